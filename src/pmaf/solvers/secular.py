"""The global minimiser of least squares on the sphere, by its secular equation.

In the eigenbasis of `AᵀA` the optimality conditions collapse to one equation in one
unknown, the distance `t = μ + s_min²` of the multiplier from its lower bound:

    ‖u(t)‖ = 1,   uᵢ(t) = cᵢ/(spreadᵢ + t),   c = Vᵀ Aᵀb,   t ≥ 0.

Every root with `t ≥ 0` is a global minimiser, so `t` is the certificate as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pmaf.errors import require_at_least, require_finite
from pmaf.linalg import sphere
from pmaf.linalg.gram import (
    Spectrum,
    TangentSolver,
    amplification,
    gram_spectrum,
    promoted,
    promoted_spectrum,
    singular_spectrum,
    small_gram,
)
from pmaf.linalg.products import dot, matvec, norm, power_of_two, rmatvec, square_range
from pmaf.runtime.log import took
from pmaf.solvers.base import Outcome, Solver

if TYPE_CHECKING:
    from pmaf.layers.less import SphereLeastSquares


@dataclass(frozen=True)
class Secular(Solver):
    """Global minimiser of LESS: one eigendecomposition, then Newton on a scalar.

    The smaller of `AᵀA` and `AAᵀ` is decomposed, and the solution is refined against
    `A` itself. Batch entries so ill-conditioned that the refinement does not contract
    are decomposed again by a singular value decomposition of `A`.

    Args:
        max_iterations: limit on the Newton steps; about eight are taken.
        refinements: limit on the Newton steps against `A`; one or two are taken.
    """

    serves = ("SphereLeastSquares",)
    keeps_basis = True

    max_iterations: int = 64
    refinements: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("max_iterations", self.max_iterations, 1)
        require_at_least("refinements", self.refinements, 0)

    def solve(
        self, problem: SphereLeastSquares, *, init: Tensor | None = None, report: bool = True
    ) -> Outcome:
        A, b = problem.matrix, problem.b
        if promoted(A.dtype, min(A.shape[-2:]), A.device):
            took("less: eigenvectors, in float64")
            return self._promoted(A, b, init, report)
        gram = small_gram(A)
        g = rmatvec(A, b)
        if in_range(gram, g):
            took("less: eigenvectors")
            return self._direct(A, b, gram, g, init)
        require_finite(A=(A, 2), b=(b, 1))
        took("less: eigenvectors, rescaled")
        return self._rescaled(A, b, init)

    def advice(self) -> str:
        return "raise max_iterations or use float64"

    def _direct(
        self, A: Tensor, b: Tensor, gram: Tensor, g: Tensor, init: Tensor | None
    ) -> Outcome:
        spectrum = gram_spectrum(A, gram)
        c = matvec(spectrum.basis, g)
        noise = _ROUNDINGS * torch.finfo(c.dtype).eps * spectrum.top.sqrt() * norm(b)
        found, trusted = self._attempt(A, b, g, spectrum, c, noise, init)
        if trusted.all():
            return found
        return self._retry(A, b, g, init, found, ~trusted)

    def _promoted(self, A: Tensor, b: Tensor, init: Tensor | None, report: bool) -> Outcome:
        """A small float32 problem, solved in float64 and rounded once."""
        dtype, eps = A.dtype, torch.finfo(A.dtype).eps
        A, b = A.double(), b.double()
        gram = small_gram(A)
        if not torch.isfinite(gram.sum() + b.sum()):
            require_finite(A=(A, 2), b=(b, 1))
        spectrum, c = promoted_spectrum(A, b, gram)
        noise = _ROUNDINGS * eps * spectrum.floor.sqrt() * norm(b)
        init = None if init is None else init.double()
        u, t, iterations, finished, _ = self.root(spectrum, c, noise, init, eps / 64)
        u = u.to(dtype)
        residual = torch.zeros_like(t)
        if report:
            y = u.double()
            scale = spectrum.trace + norm(c)
            scale = torch.where(scale > 0, scale, 1)
            force = rmatvec(A, b - matvec(A, y))
            residual = norm(sphere.tangent(y, force)) / scale
            finished = finished & (residual <= _GOOD * eps)
        return Outcome(
            value=u,
            multiplier=(t - spectrum.floor).to(dtype),
            residual=residual.to(dtype),
            gap=t.to(dtype),
            iterations=iterations,
            converged=finished,
            basis=spectrum.basis.to(dtype),
            spread=spectrum.spread.to(dtype),
        )

    def _retry(
        self, A: Tensor, b: Tensor, g: Tensor, init: Tensor | None, found: Outcome, bad: Tensor
    ) -> Outcome:
        """Solve the entries of the mask `bad` again, from singular vectors of `A` itself."""
        took("less: singular vectors")
        m, n = A.shape[-2:]
        batch = bad.shape
        which = torch.arange(A.shape[:-2].numel(), device=A.device)
        which = which.reshape(A.shape[:-2]).expand(batch)[bad]
        A, b, g = A.reshape(-1, m, n)[which], b.expand(*batch, m)[bad], g.expand(*batch, n)[bad]
        init = None if init is None else init.expand(*batch, n)[bad]
        spectrum, left, s = singular_spectrum(A)
        c = s * rmatvec(left, b)
        noise = _ROUNDINGS * torch.finfo(c.dtype).eps * s[..., 0] * norm(b)
        again, _ = self._attempt(A, b, g, spectrum, c, noise, init)
        merged = []
        for name, old, new in zip(Outcome._fields, found, again):
            old = old.clone()
            if name in ("basis", "spread"):
                old.reshape(-1, *new.shape[1:])[which] = new
            else:
                old[bad] = new
            merged.append(old)
        return Outcome(*merged)

    def _attempt(
        self,
        A: Tensor,
        b: Tensor,
        g: Tensor,
        spectrum: Spectrum,
        c: Tensor,
        noise: Tensor,
        init: Tensor | None,
    ) -> tuple[Outcome, Tensor]:
        """The solution in one eigenbasis, and whether that basis was good enough for it."""
        u, t, iterations, finished, guessed = self.root(
            spectrum, c, noise, init, torch.finfo(c.dtype).eps
        )
        u, multiplier, residual, contracted = self._refine(A, b, g, spectrum, u, t)
        good = residual <= _GOOD * torch.finfo(u.dtype).eps
        trusted = contracted & ~guessed
        if spectrum.exact:
            # The Rayleigh quotient is off by rounding of the largest curvature; this is not.
            multiplier = t - spectrum.floor
        elif (t < spectrum.top / TOO_STEEP).any():
            trusted = trusted & (amplification(spectrum, t, u) <= TOO_STEEP)
        outcome = Outcome(
            value=u,
            multiplier=multiplier,
            residual=residual,
            gap=t,
            iterations=iterations,
            converged=finished & good,
            basis=spectrum.basis,
            spread=spectrum.spread,
        )
        return outcome, trusted

    def root(
        self, spectrum: Spectrum, c: Tensor, noise: Tensor, init: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The root of the secular equation for `Aᵀb` with coefficients `c` known up to `noise`.

        Returns `u`, `t`, the steps taken, whether they sufficed, and whether a coefficient
        was taken for zero that is not.
        """
        basis, spread = spectrum.basis, spectrum.spread
        lowest = spread == 0
        pull = norm(c * lowest)  # of b towards the smallest eigenspace
        tied = pull <= noise
        hard = torch.zeros_like(tied)
        partial = slack = c
        if tied.any():
            partial = torch.where(lowest, 0, c / torch.where(lowest, 1, spread))
            slack = 1 - dot(partial, partial)
            hard = tied & (slack > 0)

        tiny = torch.finfo(c.dtype).tiny
        t = torch.maximum(pull, norm(c) - spread.amax(-1)).clamp_min(tiny)
        active = ~hard
        iterations = torch.zeros_like(active, dtype=torch.int64)
        # Sums over a leading dimension are several times faster, and there are two a step.
        rise, pulls = (x.movedim(-1, 0).contiguous() for x in (spread.expand_as(c), c))
        for _ in range(self.max_iterations):
            inverse = (rise + t).reciprocal_()
            weights = (pulls * inverse).square_()
            square, slope = weights.sum(0), (weights * inverse).sum(0)
            excess = square.sqrt() - 1
            following = torch.addcdiv(t, square * excess, slope)
            # Newton climbs from the left bound; once it does not, rounding has the word.
            moving = active & (following > t)
            t = torch.where(moving, following, t)
            iterations += active
            active = moving & (excess > eps)
            if not active.any():
                break
        u = c / (spread + t.unsqueeze(-1))
        finished = hard | (~active & ((norm(u) - 1).abs() <= eps**0.5))
        if tied.any():
            t = torch.where(hard | (t == tiny), 0, t)
            u = torch.where(hard.unsqueeze(-1), partial, u)
        u = rmatvec(basis, u)
        if hard.any():
            height = torch.where(hard, slack, 0).sqrt().unsqueeze(-1)
            u = u + height * _lowest_direction(spectrum, u, init)
        return sphere.project(u), t, iterations, finished, hard & (pull > 0)

    def _refine(
        self, A: Tensor, b: Tensor, g: Tensor, spectrum: Spectrum, u: Tensor, t: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Newton steps on the optimality conditions, their residual taken from `A`.

        Returns `u`, its multiplier, its residual, and whether the steps became small.
        """
        eps = torch.finfo(u.dtype).eps
        scale = spectrum.trace + norm(g)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))

        def force_at(u: Tensor) -> tuple[Tensor, Tensor]:
            force = -rmatvec(A, matvec(A, u) - b)
            return force, norm(sphere.tangent(u, force)) / scale

        force, residual = force_at(u)
        step = torch.full_like(residual, torch.inf)
        contracted = torch.zeros_like(residual, dtype=torch.bool)
        for _ in range(self.refinements):
            correction = TangentSolver(spectrum.basis, spectrum.spread, t, u)(force)
            previous, step = step, norm(correction)
            trial = sphere.project(u + correction)
            trial_force, trial_residual = force_at(trial)
            # A step that is no improvement comes from a singular system: stay.
            better = (step < 0.5) & (trial_residual <= residual.clamp_min(8 * eps))
            u = torch.where(better.unsqueeze(-1), trial, u)
            force = torch.where(better.unsqueeze(-1), trial_force, force)
            residual = torch.where(better, trial_residual, residual)
            fell = (step <= 0.05 * previous) & (step <= eps**0.5)
            contracted = (step <= 64 * eps) | (better & fell)
            if contracted.all():
                break
        return sphere.settle(u), dot(u, force), residual, contracted

    def _rescaled(self, A: Tensor, b: Tensor, init: Tensor | None) -> Outcome:
        """Squares of the entries leave the dtype's range: solve a scaled copy in float64."""
        dtype = A.dtype
        A, b = A.double(), b.double()
        unit, b_unit = power_of_two(A.abs().amax((-2, -1))), power_of_two(b.abs().amax(-1))
        A, b = A / unit[..., None, None], b / b_unit.unsqueeze(-1)
        # Beyond these ratios of b to A the solution is the direction of Aᵀb, or the
        # smallest singular vector on its side, and the gap is proportional to b.
        ratio = b_unit.log2() - unit.log2()
        bounded = ratio.clamp(-_FAR, _FAR)
        b = b * bounded.exp2().unsqueeze(-1)
        gram = small_gram(A)
        init = None if init is None else init.double()
        found = self._direct(A, b, gram, rmatvec(A, b), init)
        floor = found.gap - found.multiplier
        gap = found.gap * (ratio - bounded).exp2()
        found = found._replace(
            multiplier=(gap - floor) * unit * unit,
            gap=gap * unit * unit,
            spread=found.spread * unit.square().unsqueeze(-1),
        )
        return Outcome(*(x.to(dtype) if x.is_floating_point() else x for x in found))


# A Gram matrix is not relied on where its rounding would be magnified more than this.
TOO_STEEP = 1e3

# A residual of no more than this, in units of eps, is a solution.
_GOOD = 64

# Rounding errors of a product, in units of eps, are taken to be no more than this.
_ROUNDINGS = 8

# A ratio of two to this power does not show in float64, squared or not.
_FAR = 200


def in_range(gram: Tensor, g: Tensor) -> bool:
    """Whether nothing computed from these can overflow, underflow or be non-finite."""
    low, high = square_range(gram.dtype)
    size = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    pull = g.abs().amax(-1)
    fits = (size > low) & (size < high) & (pull < high) & ((pull > low) | (pull == 0))
    return bool(fits.all())


def _lowest_direction(spectrum: Spectrum, like: Tensor, init: Tensor | None) -> Tensor:
    """A unit vector of the smallest eigenspace, the same whatever basis describes it.

    It is the projection of a reference onto that space: `init` where it has a say,
    else all ones, else a direction without structure.
    """
    basis, lowest = spectrum.basis, spectrum.spread == 0
    tolerance = torch.finfo(like.dtype).eps ** 0.5
    fallback = basis[..., 0, :].expand_as(like)
    chosen = torch.zeros_like(like)
    found = torch.zeros_like(like[..., :1], dtype=torch.bool)
    for reference in (*(() if init is None else (init,)), *sphere.references(like)):
        inside = matvec(basis, reference.expand_as(like))
        shadow = rmatvec(basis, inside * lowest)
        if not spectrum.complete:
            shadow = shadow + reference - rmatvec(basis, inside)
        usable = norm(shadow).unsqueeze(-1) > tolerance * norm(reference).unsqueeze(-1)
        chosen = torch.where(usable & ~found, shadow, chosen)
        found = found | usable
        if found.all():
            break
    return sphere.project(torch.where(found, chosen, fallback))
