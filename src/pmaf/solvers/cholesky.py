"""The global minimiser of least squares on the sphere, from Cholesky factors.

A first factor, of `AᵀA` with little or no shift, gives a Krylov space in which the solution `u` and
its multiplier `μ` are found to several digits (`krylov/inverse.py`). A second factor, of

    K = AᵀA + μI + σuuᵀ,

serves the Newton step, whose residual is computed from `A`, the gradient, and the certificate:
`AᵀA + μI` is positive definite exactly if `K` is and `σuᵀK⁻¹u < 1`. The rank-one term changes
nothing in directions orthogonal to `u`, where the steps are taken, and keeps `K` regular where
`AᵀA + μI` is nearly singular along `u`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pmaf.errors import require_at_least
from pmaf.krylov.inverse import guess, solve_row
from pmaf.linalg import sphere
from pmaf.linalg.decompositions import cholesky, eigenvalues
from pmaf.linalg.gram import lower_gram
from pmaf.linalg.products import dot, matvec, norm, rmatvec
from pmaf.linalg.roundings import LOOSE, NOISE
from pmaf.runtime.log import took
from pmaf.solvers.base import LeastSquares, Outcome, Solver
from pmaf.solvers.secular import TOO_STEEP, Secular, in_range
from pmaf.tangent.kept import Factor, Kept


@dataclass(frozen=True)
class Cholesky(Solver):
    """Global minimiser of LESS: a Cholesky factor, a few solves with it, and a second factor.

    It is for matrices with at least as many rows as columns, each with its own `b`. Entries of
    float32 whose solution is not proved global, or not accurate to rounding, are solved again in
    float64. `Secular` solves those that this leaves: hard cases, `b = 0`, and, of float64,
    ill-conditioned matrices.

    Args:
        max_iterations: limit on the vectors of the Krylov space, twice as many in float64; four to
            ten are taken for most problems.
        rounds: limit on the Newton steps, with a factor each; nearly always one is taken.

    >>> import torch, pmaf
    >>> A, b = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([3.0, 0.0])
    >>> pmaf.less(A, b, solver=pmaf.solvers.Cholesky()).round(decimals=3)
    tensor([1., 0.])
    """

    solves = (LeastSquares,)

    max_iterations: int = 12
    rounds: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("max_iterations", self.max_iterations, 1)
        require_at_least("rounds", self.rounds, 1)

    def keeps(self, problem: Any) -> type[Kept]:
        return Factor

    def solve(
        self, problem: LeastSquares, *, init: Tensor | None = None, report: bool = True
    ) -> Outcome:
        batch, (m, n) = problem.batch_shape, problem.matrix.shape[-2:]
        A = problem.matrix.expand(*batch, m, n).reshape(-1, m, n)
        b = problem.b.expand(*batch, m).reshape(-1, m)
        gram, g = lower_gram(A), rmatvec(A, b)
        if m >= n and in_range(gram, g):
            init = None if init is None else init.expand(*batch, n).reshape(-1, n)
            took("less: factor")
            found = self._solve_flat(problem.with_tensors(A, b), gram, g, init, report)
        else:
            fields = Secular().solve(problem, init=init, report=report).tensors
            flat = [x.reshape(len(A), *x.shape[len(batch) :]) for x in fields]
            found = _with_factor(Outcome.of(flat), gram)
        *fields, factor = (x.reshape(batch + x.shape[1:]) for x in (*found.tensors, *found.factor))
        return Outcome.of(fields, Factor(factor))

    def advice(self) -> str:
        return "use Secular() or float64"

    def for_shared_matrix(self) -> Solver:
        return Secular()

    def _solve_flat(
        self,
        problem: LeastSquares,
        gram: Tensor,
        g: Tensor,
        init: Tensor | None,
        report: bool,
    ) -> Outcome:
        found = self._by_factors(problem, gram, g, report)
        which = (~found.converged).nonzero().squeeze(-1)
        if len(which) == 0:
            return found
        part = problem.with_tensors(problem.matrix[which], problem.b[which])
        start = None if init is None else init[which]
        if part.matrix.dtype == torch.float32 and part.matrix.device.type != "mps":
            return _replaced(found, self._in_double(part, start, report), which)
        return _replaced(found, _with_factor(Secular().solve(part, init=start), gram[which]), which)

    def _in_double(self, problem: LeastSquares, init: Tensor | None, report: bool) -> Outcome:
        """Solve in float64 what float32 does not prove, and round the result.

        The bounds for the rounding of `AᵀA` are below the gap then, unless that is zero.
        """
        took("less: factor, in float64")
        A, b, dtype = problem.matrix.double(), problem.b.double(), problem.matrix.dtype
        gram = lower_gram(A)
        # Those with a small gap, which are left, need a larger space.
        longer = replace(self, max_iterations=2 * self.max_iterations)
        found = longer._by_factors(problem.with_tensors(A, b), gram, rmatvec(A, b), report)
        which = (~found.converged).nonzero().squeeze(-1)
        if len(which):
            start = None if init is None else init[which]
            part = problem.matrix[which], problem.b[which]
            again = Secular().solve_in_double(*part, gram[which], start, report)
            fields = (x.double() if x.is_floating_point() else x for x in again.tensors)
            found = _replaced(found, _with_factor(Outcome.of(fields), gram[which]), which)
        fields = (x.to(dtype) if x.is_floating_point() else x for x in found.tensors)
        return Outcome.of(fields, Factor(*(x.to(dtype) for x in found.factor)))

    def _by_factors(self, problem: LeastSquares, gram: Tensor, g: Tensor, report: bool) -> Outcome:
        """The solution; entries for which it is not proved have not converged."""
        A, b = problem.matrix, problem.b
        mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)
        start, steps = self._predict(A, gram, g, mean)
        found = _newton(A, b, g, gram, mean, start)
        for _ in range(1, self.rounds):
            which = (found.near & ~found.done).nonzero().squeeze(-1)
            if len(which) == 0:
                break
            point = _Point(found.u[which], found.mu[which])
            again = _newton(A[which], b[which], g[which], gram[which], mean[which], point)
            for old, new in zip(found, again):
                old.index_copy_(0, which, new)
        outcome = Outcome(
            value=sphere.settle(found.u),
            multiplier=found.mu,
            residual=found.residual,
            gap=torch.full_like(mean, torch.nan),
            iterations=steps,
            converged=found.done,
            kept=Factor(found.factor),
        )
        return _reported(A, b, g, gram, outcome) if report else outcome

    def _predict(self, A: Tensor, gram: Tensor, g: Tensor, mean: Tensor) -> tuple[_Point, Tensor]:
        """A point near the solution, and the dimension of the Krylov space that contains it."""
        eps = torch.finfo(g.dtype).eps
        pull = norm(g)
        # With this shift a positive semidefinite matrix has a factor in spite of rounding, and its
        # leading digits do not change.
        shift = NOISE * eps * A.shape[-1] * mean
        if (pull > mean).any():
            # The multiplier for u restricted to the direction of g, which is a lower bound of μ.
            image = matvec(A, g)
            quotient = dot(image, image) / torch.where(pull > 0, pull, 1).square()
            shift = torch.maximum(shift, pull - quotient)
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        kept = diagonal.clone()
        diagonal.add_(shift.unsqueeze(-1))
        factor, _ = cholesky(gram)
        diagonal.copy_(kept)
        found = guess(
            factor,
            g,
            limit=min(self.max_iterations, A.shape[-1]),
            tolerance=eps**_CLOSE,
            spare=len(g) // _SPARE,
        )
        return _Point(found.u, shift + found.shift), found.steps


class _Point(NamedTuple):
    u: Tensor
    mu: Tensor


class _Step(NamedTuple):
    """The point after a Newton step, and what is known about it."""

    u: Tensor
    mu: Tensor
    residual: Tensor  # before the step
    factor: Tensor
    near: Tensor  # whether another step may help
    done: Tensor  # whether `u` is the global minimum, so that no other step is needed


# A Newton step of length eps**_CLOSE is the last, because its square is far below eps.
_CLOSE = 0.6

# The Krylov space stops growing when at most one entry in _SPARE has not converged.
_SPARE = 8


def _newton(A: Tensor, b: Tensor, g: Tensor, gram: Tensor, mean: Tensor, start: _Point) -> _Step:
    """One Newton step on the optimality conditions, their residual taken from `A`."""
    u, mu = start
    n, eps = A.shape[-1], torch.finfo(u.dtype).eps
    factor, regular = _bordered_factor(gram, mean, u, mu)
    force, residual = _force(A, b, g, mean, u)
    p = solve_row(factor, force - mu.unsqueeze(-1) * u)
    q = solve_row(factor, u)
    along = dot(u, q)
    nu = dot(u, p) / along
    step = p - nu.unsqueeze(-1) * q
    size = norm(step)
    # 1/(uᵀ(AᵀA + μI)⁻¹u) is at least the gap. If it is above `noise`, which bounds the effect of
    # rounding in AᵀA and Aᵀb, then AᵀA + μI is definite.
    curvature = (1 - mean * along) / along
    noise = 2 * NOISE * eps * ((n * mean).sqrt() * norm(b) + n * mean)
    near = regular & (along > 0) & (size < 0.5) & (curvature > 0)
    # If |ν| is at most `noise`, then AᵀA + (μ + ν)I is definite as well, up to rounding.
    sure = (curvature > noise) & (nu.abs() <= noise)
    done = near & sure & (size <= eps**_CLOSE)
    moved = sphere.project(u + step)
    return _Step(moved, mu + nu, residual, factor, near, done)


def _force(A: Tensor, b: Tensor, g: Tensor, mean: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """`Aᵀ(b − Au)`, and the norm of its tangent part relative to `‖A‖² + ‖Aᵀb‖`."""
    force = rmatvec(A, b - matvec(A, u))
    return force, norm(sphere.tangent(u, force)) / (A.shape[-1] * mean + norm(g))


def _reported(A: Tensor, b: Tensor, g: Tensor, gram: Tensor, found: Outcome) -> Outcome:
    """The outcome with the quantities that only a report contains, final residual and gap."""
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    force, residual = _force(A, b, g, mean, found.value)
    multiplier = dot(found.value, force)
    # The factor proves that the gap is positive; its size needs the eigenvalues of AᵀA. Where μ and
    # λ_min cancel to a few digits, `Secular` solves the entry again.
    gap = multiplier + eigenvalues(gram)[:, 0]
    clear = gap > LOOSE * torch.finfo(g.dtype).eps * A.shape[-1] * mean
    return found._replace(
        multiplier=multiplier, residual=residual, gap=gap, converged=found.converged & clear
    )


def _bordered_factor(gram: Tensor, mean: Tensor, u: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
    """The Cholesky factor of `K`, and whether it is accurate enough to be used."""
    K = torch.baddbmm(gram, (mean.unsqueeze(-1) * u).unsqueeze(-1), u.unsqueeze(-2))
    diagonal = K.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(mu.unsqueeze(-1))
    top = diagonal.amax(-1)
    factor, info = cholesky(K)
    pivot = factor.diagonal(dim1=-2, dim2=-1).amin(-1)
    return factor, (info == 0) & (pivot.square() * TOO_STEEP >= top)


def _replaced(found: Outcome, again: Outcome, which: Tensor) -> Outcome:
    """The outcome with the entries `which` solved again."""
    for old, new in zip((*found.tensors, *found.factor), (*again.tensors, *again.factor)):
        old.index_copy_(0, which, new)
    return found


def _with_factor(found: Outcome, gram: Tensor) -> Outcome:
    """A solution of `Secular` with a factor instead of a basis; zero where `K` has none."""
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    factor, regular = _bordered_factor(gram, mean, found.value, found.multiplier)
    regular = regular & torch.isfinite(mean)
    factor = torch.where(regular[:, None, None], factor, 0)
    return found._replace(kept=Factor(factor))
