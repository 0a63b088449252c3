"""The global minimiser of least squares on the sphere, from Cholesky factors.

A first factor, of `AᵀA` with little or no shift, gives a Krylov space in which the solution `u` and
its multiplier `μ` are found to several digits (`krylov/inverse.py`, and for large matrices with
`‖A⁺b‖ < 1` `krylov/inside.py`). A second factor, of

    K = AᵀA + μI + σuuᵀ,

serves Newton's method, whose residual is computed from `A`, the certificate (`factored_newton.py`),
and the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pmaf.errors import require_at_least
from pmaf.krylov.inside import guess_inside
from pmaf.krylov.inverse import LARGE, Guess, guess, solve_row
from pmaf.linalg import sphere
from pmaf.linalg.decompositions import cholesky_in_place, eigenvalues
from pmaf.linalg.gram import lower_gram
from pmaf.linalg.products import dot, long_norm, matvec, norm, rmatvec
from pmaf.linalg.roundings import LOOSE, NOISE, has_double
from pmaf.runtime.log import took
from pmaf.solvers.base import Course, LeastSquares, Outcome, Solver
from pmaf.solvers.factored_newton import (
    CLOSE,
    Point,
    bordered_factor,
    force_at,
    gap_noise,
    newton,
)
from pmaf.solvers.secular import Secular, in_range
from pmaf.tangent.kept import Factor, Kept


@dataclass(frozen=True)
class Cholesky(Solver):
    """Global minimiser of LESS: a Cholesky factor, a few solves with it, and a second factor.

    It is for matrices with at least as many rows as columns, each with its own `b`. Entries of
    float32 whose solution is not proved global, or not accurate to rounding, are solved again in
    float64. `Secular` solves those that this leaves: hard cases and `b = 0` with fewer than 256
    columns, minimisers that are not isolated, and, of float64, ill-conditioned matrices.

    Args:
        max_iterations: limit on the vectors of the Krylov space, twice as many in float64, three
            times as many from each of two starts; four to ten are taken for most problems.
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

    def course(self, problem: Any) -> Course:
        m, n = problem.matrix.shape[-2:]
        if m < n:
            return Secular().course(problem)
        then = (
            "a Krylov space with a second start, Cholesky factors, in float64, and eigenvectors, "
            "for entries that are not proved"
        )
        return Course("Cholesky factors", (then,))

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
        eps = torch.finfo(g.dtype).eps
        found = self._by_factors(problem, gram, g, init, report, eps)
        which = (~found.converged).nonzero().squeeze(-1)
        if len(which) == 0:
            return found
        part = problem.with_tensors(problem.matrix[which], problem.b[which])
        start = None if init is None else init[which]
        if part.matrix.dtype == torch.float32 and has_double(part.matrix.device):
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
        start = None if init is None else init.double()
        posed, eps = problem.with_tensors(A, b), torch.finfo(dtype).eps
        found = longer._by_factors(posed, gram, rmatvec(A, b), start, report, eps)
        which = (~found.converged).nonzero().squeeze(-1)
        if len(which):
            start = None if init is None else init[which]
            part = problem.matrix[which], problem.b[which]
            again = Secular().solve_in_double(*part, gram[which], start, report)
            fields = (x.double() if x.is_floating_point() else x for x in again.tensors)
            found = _replaced(found, _with_factor(Outcome.of(fields), gram[which]), which)
        fields = (x.to(dtype) if x.is_floating_point() else x for x in found.tensors)
        return Outcome.of(fields, Factor(*(x.to(dtype) for x in found.factor)))

    def _by_factors(
        self,
        problem: LeastSquares,
        gram: Tensor,
        g: Tensor,
        init: Tensor | None,
        report: bool,
        rounding: float,
    ) -> Outcome:
        """The solution; entries for which it is not proved have not converged.

        `rounding` is that of the data, which may have had fewer digits.
        """
        A, b = problem.matrix, problem.b
        mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)
        start, steps = self._predict(A, b, gram, g, mean, init, rounding)
        found = newton(A, b, g, gram, mean, start, rounding)
        for _ in range(1, self.rounds):
            which = (found.near & ~found.done).nonzero().squeeze(-1)
            if len(which) == 0:
                break
            point = Point(found.u[which], found.mu[which])
            part = A[which], b[which], g[which], gram.mT[which].mT, mean[which]
            again = newton(*part, point, rounding)
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
        return _reported(A, b, g, gram, outcome, rounding) if report else outcome

    def _predict(
        self,
        A: Tensor,
        b: Tensor,
        gram: Tensor,
        g: Tensor,
        mean: Tensor,
        init: Tensor | None,
        rounding: float,
    ) -> tuple[Point, Tensor]:
        """A point near the solution, and the dimension of the Krylov space that contains it."""
        n, eps = A.shape[-1], torch.finfo(g.dtype).eps
        pull = norm(g)
        # With this shift a positive semidefinite matrix has a factor in spite of rounding, and its
        # leading digits do not change.
        shift = NOISE * eps * n * mean
        if (pull > mean).any():
            # The multiplier for u restricted to the direction of g, which is a lower bound of μ.
            image = matvec(A, g)
            quotient = dot(image, image) / torch.where(pull > 0, pull, 1).square()
            shift = torch.maximum(shift, pull - quotient)
        shifted = gram.mT.clone(memory_format=torch.contiguous_format).mT
        shifted.diagonal(dim1=-2, dim2=-1).add_(shift.unsqueeze(-1))
        factor, _ = cholesky_in_place(shifted)
        start = solve_row(factor, g)

        def from_b(which: Any) -> Guess:
            limit, spare = min(self.max_iterations, n), len(start[which]) // _SPARE
            tolerance = eps**CLOSE
            lower = factor.mT[which].mT
            return guess(lower, start[which], limit=limit, tolerance=tolerance, spare=spare)

        def from_both(which: Any) -> Guess:
            toward = None if init is None else init[which]
            limit = min(_LONGER * self.max_iterations, n // 2)
            lower = factor.mT[which].mT
            return guess_inside(lower, start[which], noise[which], toward, limit=limit)

        length = long_norm(start)
        # Of Aᵀb, and of AᵀA times the part of u that does not depend on the smallest eigenvector.
        noise = NOISE * rounding * mean.sqrt() * (norm(b) + mean.sqrt() * length)
        # The solution has a part along the smallest eigenvector, which b may not see.
        inside = length < 1 if n >= LARGE else torch.zeros_like(mean, dtype=torch.bool)
        found = _each(inside, from_both, from_b)
        return Point(found.u, shift + found.shift), found.steps


def _each(which: Tensor, yes: Callable[[Any], Guess], no: Callable[[Any], Guess]) -> Guess:
    """The results of one of two functions for each entry, which are given its index."""
    everything = slice(None)
    if not which.any():
        return no(everything)
    if which.all():
        return yes(everything)
    parts = [(mask, function(mask)) for mask, function in ((which, yes), (~which, no))]
    merged = [x.new_empty(len(which), *x.shape[1:]) for x in parts[0][1]]
    for mask, part in parts:
        for whole, x in zip(merged, part):
            whole[mask] = x
    return Guess(*merged)


# The Krylov space stops growing when at most one entry in _SPARE has not converged.
_SPARE = 8

# Two starts grow by so many times as many vectors each, because they have to find an eigenvector.
_LONGER = 3


def _reported(
    A: Tensor, b: Tensor, g: Tensor, gram: Tensor, found: Outcome, rounding: float
) -> Outcome:
    """The outcome with the quantities that only a report contains, final residual and gap."""
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    force, residual = force_at(A, b, g, mean, found.value)
    multiplier = dot(found.value, force)
    # The factor proves that the gap is positive; its size needs the eigenvalues of AᵀA. Where μ and
    # λ_min cancel to a few digits, `Secular` solves the entry again.
    gap = multiplier + eigenvalues(gram)[:, 0]
    clear = gap > LOOSE * torch.finfo(g.dtype).eps * A.shape[-1] * mean
    if A.shape[-1] >= LARGE and g.dtype == torch.float64:
        # In a hard case the gap is zero up to rounding of the data, which is proved, too.
        hard = gap.abs() <= gap_noise(b, mean, multiplier, rounding)
        gap, clear = torch.where(hard, 0, gap), clear | hard
    return found._replace(
        multiplier=multiplier, residual=residual, gap=gap, converged=found.converged & clear
    )


def _replaced(found: Outcome, again: Outcome, which: Tensor) -> Outcome:
    """The outcome with the entries `which` solved again."""
    for old, new in zip((*found.tensors, *found.factor), (*again.tensors, *again.factor)):
        old.index_copy_(0, which, new)
    return found


def _with_factor(found: Outcome, gram: Tensor) -> Outcome:
    """A solution of `Secular` with a factor instead of a basis; zero where `K` has none."""
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    factor, regular = bordered_factor(gram, mean, found.value, found.multiplier)
    regular = regular & torch.isfinite(mean)
    factor = torch.where(regular[:, None, None], factor, 0)
    return found._replace(kept=Factor(factor))
