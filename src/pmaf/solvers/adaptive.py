"""Eigenvectors by products with the matrix where these suffice, else by a decomposition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf.errors import require_at_least, require_not_negative
from pmaf.krylov.power import Dominant, dominant, dominant_of_sum, longest_row
from pmaf.krylov.proved import Ritz, certificate, judge, polish, ritz
from pmaf.linalg.decompositions import eigh
from pmaf.linalg.roundings import DECOMPOSED
from pmaf.linalg.symmetric_part import FORM_TO, SymmetricPart, right_product
from pmaf.runtime.log import took
from pmaf.solvers.base import Course, Eigenvectors, Outcome, Solver
from pmaf.solvers.dense import Dense
from pmaf.solvers.reduction import Reduction, is_compiled
from pmaf.solvers.report import outcome, without_report
from pmaf.tangent.kept import NOTHING, Factor, Kept, Nothing, Rate


@dataclass(frozen=True)
class Adaptive(Solver):
    """Power steps, a Krylov space or a decomposition, whichever is fastest for the matrices.

    Power steps are tried first and suffice if one eigenvalue dominates. Then, for a symmetric
    matrix of at most 256 rows, `Reduction()` runs if there are compiled kernels. For others a
    Krylov space is tried, with a Cholesky factorisation that proves that no larger eigenvalue is
    missing; then `Dense()` runs. Each attempt takes little time compared with the
    next, and a vector is accepted only if its residual is that of a full decomposition.

    Args:
        power_from: Entries of all matrices together, n² each, from which power steps are
            tried on symmetric ones; infinity for never.
        power_size: The least n for power steps; below it, a failed attempt takes long compared with
            a decomposition.
        general_from: `power_from` for matrices that are not symmetric.
        krylov_from: `power_from` for a Krylov space.
        krylov_size: The least n for a Krylov space.
        compiled: Whether to use compiled kernels, if there are any.

    The defaults are about where the attempts become faster than a decomposition in
    `pmaf bench ied-crossover` on two cores; other machines may need others.

    >>> import torch, pmaf
    >>> A = torch.diag(torch.tensor([3.0, 1.0, 2.0]))
    >>> pmaf.ied(A, solver=pmaf.solvers.Adaptive()).values.round(decimals=3)
    tensor(3.)
    """

    power_from: float = 12_000
    power_size: int = 24
    general_from: float = 500  # `eig` takes longer than `eigh`
    krylov_from: float = 200_000
    krylov_size: int = 224
    compiled: bool = True

    solves = (Eigenvectors,)
    always_converges = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("power_from", "general_from", "krylov_from"):
            require_not_negative(name, getattr(self, name), infinite=True)
        for name in ("power_size", "krylov_size"):
            require_at_least(name, getattr(self, name), 1)

    def solve(
        self, problem: Eigenvectors, *, init: Tensor | None = None, report: bool = True
    ) -> Outcome:
        n, k, A = problem.n, problem.width, problem.matrix
        if A.dim() != 3:
            A = A.reshape(-1, n, n)
        work = A.numel()
        tolerance = DECOMPOSED * torch.finfo(A.dtype).eps
        if not problem.symmetric and work >= self.general_from:
            A = A.contiguous()

            def product(x: Tensor) -> Tensor:
                return right_product(A, x)

            def is_positive() -> bool:
                return bool(A.amin() > 0)

            start = longest_row(A, product)
            found = dominant(product, product, start, tolerance, False, is_positive)
            if found is not None:
                took("ied: power steps")
                return _outcome(problem, found, report)
        if problem.symmetric:
            found = self.power(A, tolerance) if k == 1 else None
            if found is not None:
                took("ied: power steps")
                return _outcome(problem, found, report)
            if self.compiled and is_compiled(A, k):
                return _REDUCTION.solve(problem, report=report)
            if self.takes_krylov(work, n, k):
                both = _krylov(problem, SymmetricPart(A), tolerance)
                if both is not None:
                    took("ied: Krylov space")
                    found, factor = both
                    shape = (*problem.batch_shape, n, n)
                    return _outcome(problem, found, report, Factor(factor.view(shape)))
        return _DENSE.solve(problem, report=report)

    def power(self, A: Tensor, tolerance: float) -> Dominant | None:
        """The result of power steps; None where they are not tried or do not suffice."""
        work, n = A.numel(), A.shape[-1]
        if not self.takes_power(work, n):
            return None
        if n <= FORM_TO:
            return dominant_of_sum(A, tolerance)
        part = SymmetricPart(A)
        start = longest_row(part.matrix, part)
        return dominant(part, part.exact, start, tolerance, symmetric=True)

    def takes_power(self, work: int, n: int) -> bool:
        """Whether power steps are tried on symmetric matrices of `work` entries together."""
        return work >= self.power_from and n >= self.power_size

    def takes_krylov(self, work: int, n: int, k: int) -> bool:
        """Whether a Krylov space is tried, for `work` entries of all matrices together."""
        return work >= self.krylov_from and n >= self.krylov_size and k <= n // 16

    def attempts(self, problem: Eigenvectors) -> Iterator[tuple[str, type[Kept]]]:
        """What `solve` tries for matrices of this shape, and what it keeps, until one suffices."""
        n, k, A = problem.n, problem.width, problem.matrix
        work, symmetric = A.numel(), problem.symmetric
        if self.takes_power(work, n) and k == 1 if symmetric else work >= self.general_from:
            yield "power steps", Rate
        if symmetric and self.compiled and is_compiled(A, k):
            yield "compiled kernels", Nothing
            return
        if symmetric and self.takes_krylov(work, n, k):
            yield "Krylov space", Factor
        yield "decomposition", _DENSE.keeps(problem)

    def may_keep(self, problem: Any) -> tuple[type[Kept], ...]:
        return tuple(kind for _, kind in self.attempts(problem))

    def course(self, problem: Any) -> Course:
        first, *others = (words for words, _ in self.attempts(problem))
        return Course(first, tuple(_THEN[words] for words in others))

    def takes_any_scale(self, problem: Eigenvectors) -> bool:
        # Power steps on small matrices handle every scale, and so may a decomposition.
        work, n = problem.matrix.numel(), problem.n
        krylov = self.takes_krylov(work, n, problem.width)
        krylov = krylov and not (self.compiled and is_compiled(problem.matrix, problem.width))
        if not problem.symmetric or n > FORM_TO or krylov:
            return False
        return _DENSE.takes_any_scale(problem)

    def advice(self) -> str:
        return _DENSE.advice()


def rate_of_steps(found: Dominant, batch: torch.Size) -> Rate:
    """The convergence rate of power steps, for the backward pass."""
    rows = found.rows
    return Rate(torch.full(batch, found.rate, dtype=rows.dtype, device=rows.device), found.matrix)


def _krylov(
    problem: Eigenvectors, part: SymmetricPart, tolerance: float
) -> tuple[Ritz, Tensor] | None:
    """Eigenpairs and Cholesky factors; None where most batch entries need a decomposition."""
    n, k = problem.n, problem.width
    found = ritz(part, k, tolerance, _limit(n))
    if found is None:
        return None
    factor, exists = certificate(part, found)
    found = polish(part, found._replace(found=exists), factor, tolerance)
    good = exists & (found.residual <= tolerance)
    left = len(good) - int(good.sum())
    if left == 0:
        return found, factor
    if 2 * left > len(good):
        return None
    bad = ~good
    rows = found.rows.clone()
    rows[bad] = eigh(part.formed(bad)).vectors[..., -k:].flip(-1).mT
    found = judge(part, rows, found.scale, good, found.products)
    again, exists = certificate(part, found, bad)
    # nan marks an entry without a factor, whose next eigenvalue is too close. Conjugate residuals
    # then fail their check, and the backward pass decomposes the matrix.
    factor[bad] = torch.where(exists[:, None, None], again, torch.nan)
    return found, factor


def _outcome(
    problem: Eigenvectors, found: Dominant | Ritz, report: bool, kept: Kept = NOTHING
) -> Outcome:
    batch, n, k = problem.batch_shape, problem.n, problem.width
    rows = found.rows.reshape(*batch, k, n)
    unknown, none, converged = without_report[batch, rows.dtype, rows.device]
    values = found.values.reshape(*batch, k)
    if isinstance(found, Dominant):
        kept = rate_of_steps(found, batch)
    if report:
        return outcome(
            problem,
            values,
            rows.mT,
            residual=found.residual.reshape(batch),
            iterations=none + found.products,
            converged=converged.clone(),
            report=True,
            kept=kept,
        )
    return Outcome(rows, values, unknown, unknown, none, converged, kept)


_DENSE, _REDUCTION = Dense(), Reduction()
# When an attempt is made that is not the first one.
_THEN = {
    "compiled kernels": "compiled kernels where no eigenvalue dominates",
    "Krylov space": "a Krylov space where no eigenvalue dominates",
    "decomposition": "a decomposition where nothing before it has proved its result",
}


def _limit(n: int) -> int:
    """The largest dimension of a Krylov space, a compromise between different matrices.

    With 85 at n = 256 the space suffices for a GOE matrix, but the attempt for a matrix with a gap
    of 1e-4 takes longest: `pmaf bench ied-crossover`, "krylov" beside "dense".
    """
    return min(n * n // 2000, 160)
