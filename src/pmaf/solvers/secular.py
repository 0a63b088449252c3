"""The global minimiser of least squares on the sphere, by its secular equation.

In the eigenbasis of `AᵀA` the optimality conditions reduce to one equation in one
unknown, the distance `t = μ + s_min²` of the multiplier from its lower bound:

    ‖u(t)‖ = 1,   uᵢ(t) = cᵢ/(spreadᵢ + t),   c = Vᵀ Aᵀb,   t ≥ 0.

Every root with `t ≥ 0` is a global minimiser, so `t` is the certificate as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf.errors import require_at_least, require_finite
from pmaf.linalg import sphere
from pmaf.linalg.decompositions import eigh
from pmaf.linalg.gram import (
    Spectrum,
    gram_spectrum,
    promoted,
    promoted_spectrum,
    singular_spectrum,
    small_gram,
)
from pmaf.linalg.products import dot, matvec, norm, rmatvec, symmetric_part
from pmaf.linalg.roundings import (
    NOISE,
    SETTLED,
    merge_tolerance,
    merged,
    power_of_two,
    square_range,
    widened,
    working_dtype,
)
from pmaf.linalg.secular import secular_root
from pmaf.runtime.log import took
from pmaf.solvers.base import Course, LeastSquares, Minimum, Outcome, Solver, has_form
from pmaf.solvers.exact import course_of, solve_compiled
from pmaf.tangent.basis import TangentSolver, amplification
from pmaf.tangent.kept import Basis, Kept


@dataclass(frozen=True)
class Secular(Solver):
    """Global minimiser of LESS: one eigendecomposition, then Newton's method for a scalar.

    The smaller of `AᵀA` and `AAᵀ` is decomposed, and the solution is refined against
    `A` itself. Batch entries so ill-conditioned that the refinement does not contract
    are decomposed again by a singular value decomposition of `A`.

    Args:
        max_iterations: limit on the Newton steps; about eight are taken.
        refinements: limit on the Newton steps against `A`; one or two are taken.

    >>> import torch, pmaf
    >>> A, b = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([3.0, 0.0])
    >>> pmaf.less(A, b, solver=pmaf.solvers.Secular()).round(decimals=3)
    tensor([1., 0.])
    """

    solves = (Minimum,)

    max_iterations: int = 64
    refinements: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("max_iterations", self.max_iterations, 1)
        require_at_least("refinements", self.refinements, 0)

    def keeps(self, problem: Any) -> type[Kept]:
        return Basis

    def solve(self, problem: Any, *, init: Tensor | None = None, report: bool = True) -> Outcome:
        if not has_form(problem, LeastSquares):
            return self._declared(problem, init)
        A, b = problem.matrix, problem.b
        if promoted(A.dtype, min(A.shape[-2:]), A.device):
            took("less: eigenvectors, in float64")
            return self.solve_in_double(A, b, None, init, report)
        gram = small_gram(A)
        g = rmatvec(A, b)
        if in_range(gram, g):
            whole = b.expand(*problem.batch_shape, -1)
            found = solve_compiled(A, whole, init, False, False, self, rooted=True)
            if found is not None:
                return found
            took("less: eigenvectors")
            return self._direct(A, b, gram, g, init)
        require_finite(A=(A, 2), b=(b, 1))
        took("less: eigenvectors, rescaled")
        return self._rescaled(A, b, init)

    def course(self, problem: Any) -> Course:
        if not has_form(problem, LeastSquares):
            return Course("eigenvectors of the matrix, and Newton's method for one number")
        A = problem.matrix
        if promoted(A.dtype, min(A.shape[-2:]), A.device):
            return Course("eigenvectors, in float64, and Newton's method for one number")
        shape = torch.Size((*problem.batch_shape, A.shape[-2]))
        then = "singular vectors of A, for entries of which AᵀA has too few digits"
        return course_of(A, problem.b.expand(shape), "eigenvectors", (then,))

    def advice(self) -> str:
        return "raise max_iterations or use float64"

    def _direct(
        self, A: Tensor, b: Tensor, gram: Tensor, g: Tensor, init: Tensor | None
    ) -> Outcome:
        spectrum = gram_spectrum(A, gram)
        c = matvec(spectrum.basis, g)
        noise = NOISE * torch.finfo(c.dtype).eps * spectrum.top.sqrt() * norm(b)
        found, trusted = self._attempt(A, b, g, spectrum, c, noise, init)
        if trusted.all():
            return found
        return self._retry(A, b, g, init, found, ~trusted)

    def solve_in_double(
        self, A: Tensor, b: Tensor, gram: Tensor | None, init: Tensor | None, report: bool
    ) -> Outcome:
        """Solve a float32 problem in float64, and round the result once.

        `gram` is the smaller of `AᵀA` and `AAᵀ`, by its lower triangle, if it is known.
        """
        dtype, eps = A.dtype, torch.finfo(A.dtype).eps
        A, b = A.double(), b.double()
        gram = small_gram(A) if gram is None else gram
        # No other entry of a Gram matrix is larger than those on its diagonal.
        if not torch.isfinite(gram.diagonal(dim1=-2, dim2=-1).sum() + b.sum()):
            require_finite(A=(A, 2), b=(b, 1))
        spectrum, c = promoted_spectrum(A, b, gram)
        noise = NOISE * eps * spectrum.floor.sqrt() * norm(b)
        init = None if init is None else init.double()
        u, t, iterations, finished, _ = secular_root(
            spectrum, c, noise, init, eps / 64, self.max_iterations
        )
        u = u.to(dtype)
        residual = torch.zeros_like(t)
        if report:
            residual = residual_of(A, b, u.double())
            finished = finished & (residual <= SETTLED * eps)
        return Outcome(
            value=u,
            multiplier=(t - spectrum.floor).to(dtype),
            residual=residual.to(dtype),
            gap=t.to(dtype),
            iterations=iterations,
            converged=finished,
            kept=Basis(spectrum.basis.to(dtype), spectrum.spread.to(dtype)),
        )

    def _declared(self, problem: Minimum, init: Tensor | None) -> Outcome:
        """Solve for any quadratic function from its matrix, in float64 where the device has it."""
        took("quadratic: eigenvectors")
        M, g = problem.quadratic()
        require_finite(curvature=(M, 2), force=(g, 1))
        dtype, eps = g.dtype, torch.finfo(g.dtype).eps
        wide = working_dtype(dtype, g.device)
        M, g = M.to(wide), g.to(wide)
        values, vectors = eigh(symmetric_part(M))
        low, size = values[..., 0], values.abs().amax(-1)
        spread = merged(values - values[..., :1], size.unsqueeze(-1), merge_tolerance(dtype))
        spectrum = Spectrum(vectors.mT, spread, low, True)
        c, pull = matvec(vectors.mT, g), norm(g)
        noise = NOISE * eps * (pull + size)
        init = None if init is None else init.to(wide)
        u, t, iterations, finished, _ = secular_root(
            spectrum, c, noise, init, eps / 64, self.max_iterations
        )
        u = u.to(dtype)
        y = u.to(wide)
        scale = torch.where(size + pull > 0, size + pull, 1)
        residual = norm(sphere.tangent(y, g - matvec(M, y))) / scale
        return Outcome(
            value=u,
            multiplier=(t - low).to(dtype),
            residual=residual.to(dtype),
            gap=t.to(dtype),
            iterations=iterations,
            converged=finished & (residual <= SETTLED * eps),
            kept=Basis(spectrum.basis.to(dtype), spread.to(dtype)),
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
        noise = NOISE * torch.finfo(c.dtype).eps * s[..., 0] * norm(b)
        again, _ = self._attempt(A, b, g, spectrum, c, noise, init)
        fields = [x.clone() for x in found.tensors]
        for old, new in zip(fields, again.tensors):
            old[bad] = new
        kept = Basis(*(x.clone() for x in found.basis))
        for old, new in zip(kept, again.basis):
            old.reshape(-1, *new.shape[1:])[which] = new
        return Outcome.of(fields, kept)

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
        """The solution in one eigenbasis, and whether that basis is accurate enough."""
        u, t, iterations, finished, guessed = secular_root(
            spectrum, c, noise, init, torch.finfo(c.dtype).eps, self.max_iterations
        )
        u, multiplier, residual, contracted = self._refine(A, b, g, spectrum, u, t)
        good = residual <= SETTLED * torch.finfo(u.dtype).eps
        trusted = contracted & ~guessed
        if spectrum.exact:
            # The Rayleigh quotient has an error of eps times the largest eigenvalue; this has not.
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
            kept=Basis(spectrum.basis, spectrum.spread),
        )
        return outcome, trusted

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
            # A step that does not reduce the residual comes from a singular system and is rejected.
            better = (step < 0.5) & (trial_residual <= residual.clamp_min(NOISE * eps))
            u = torch.where(better.unsqueeze(-1), trial, u)
            force = torch.where(better.unsqueeze(-1), trial_force, force)
            residual = torch.where(better, trial_residual, residual)
            fell = (step <= 0.05 * previous) & (step <= eps**0.5)
            contracted = (step <= SETTLED * eps) | (better & fell)
            if contracted.all():
                break
        return sphere.settle(u), dot(u, force), residual, contracted

    def _rescaled(self, A: Tensor, b: Tensor, init: Tensor | None) -> Outcome:
        """Solve a scaled copy in float64, since squares of the entries leave the range."""
        dtype = A.dtype
        A, b = widened(A), widened(b)
        unit, b_unit = power_of_two(A.abs().amax((-2, -1))), power_of_two(b.abs().amax(-1))
        A, b = A / unit[..., None, None], b / b_unit.unsqueeze(-1)
        # If b is this much larger than A, the solution is the direction of Aᵀb; if it is this much
        # smaller, the last singular vector with the sign of Aᵀb. The gap is proportional to b.
        ratio = b_unit.log2() - unit.log2()
        bounded = ratio.clamp(-_FAR, _FAR)
        b = b * bounded.exp2().unsqueeze(-1)
        gram = small_gram(A)
        init = None if init is None else widened(init)
        found = self._direct(A, b, gram, rmatvec(A, b), init)
        floor = found.gap - found.multiplier
        gap = found.gap * (ratio - bounded).exp2()
        rows, spread = found.basis
        found = found._replace(multiplier=(gap - floor) * unit * unit, gap=gap * unit * unit)
        tensors = (x.to(dtype) if x.is_floating_point() else x for x in found.tensors)
        spread = spread * unit.square().unsqueeze(-1)
        kept = Basis(rows.to(dtype), spread.to(dtype))
        return Outcome.of(tensors, kept)


# A Gram matrix is not used where its rounding errors would be magnified by more than this.
TOO_STEEP = 1e3

# In a float64 sum a term that is smaller by this power of two has no effect, squared or not.
_FAR = 200


def residual_of(A: Tensor, b: Tensor, u: Tensor) -> Tensor:
    """The tangent part of `Aᵀ(b − Au)`, relative to `‖A‖² + ‖Aᵀb‖`, `(*,)`."""
    scale = A.square().sum((-2, -1)) + norm(rmatvec(A, b))
    force = rmatvec(A, b - matvec(A, u))
    return norm(sphere.tangent(u, force)) / torch.where(scale > 0, scale, 1)


def in_range(gram: Tensor, g: Tensor) -> bool:
    """Whether nothing computed from `gram` and `g` can overflow, underflow or be non-finite."""
    low, high = square_range(gram.dtype)
    size = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    pull = g.abs().amax(-1)
    fits = (size > low) & (size < high) & (pull < high) & ((pull > low) | (pull == 0))
    return bool(fits.all())
