"""Eigenvectors, singular vectors, and least squares on the sphere, by compiled kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf import native
from pmaf.errors import require_finite
from pmaf.linalg.decompositions import eigh
from pmaf.linalg.products import symmetric_part
from pmaf.runtime.log import took
from pmaf.solvers.base import (
    Course,
    Eigenvectors,
    LeastSquares,
    Outcome,
    SingularVectors,
    Solver,
    has_form,
)
from pmaf.solvers.dense import Dense
from pmaf.solvers.report import gap_of, without_report
from pmaf.solvers.secular import Secular, residual_of
from pmaf.solvers.singular import SVD, solve_reduced
from pmaf.tangent.complement import COMPILED_ROWS
from pmaf.tangent.kept import Exact, Kept, Nothing


@dataclass(frozen=True)
class Reduction(Solver):
    """Householder's reduction to a tridiagonal matrix, of which only k eigenpairs are computed.

    Laguerre's method finds the eigenvalues and Sturm counts prove them; a twisted factorisation
    gives the vectors. Many matrices with at most sixteen rows are solved at a time, one in each
    lane of the processor's vectors; of larger ones, the tridiagonal matrices are. The computation
    is in double precision for every dtype.

    It needs the compiled kernels (`pmaf info` says whether there are any), and a plain tensor on
    the CPU. `Dense()` solves everything else, and the batch entries without a proof. Nothing is
    kept of eigenvectors: a Cholesky factorisation solves the system of the backward pass. The
    default call of `pmaf.ied` keeps the reduction itself, from 17 rows on.

    For least squares in float32, the smaller of `AᵀA` and `AAᵀ` is reduced, and every step of the
    secular equation takes O(n). The backward pass uses the reduction, from 17 rows or columns on.
    `Secular()` solves everything else: other dtypes, matrices that many problems share, and batch
    entries in which the lowest singular value repeats.

    For right singular vectors in float32, `AᵀA` is formed and reduced in double precision; `SVD()`
    solves everything else.

    >>> import torch, pmaf
    >>> A = torch.diag(torch.tensor([3.0, 1.0, 2.0]))
    >>> pmaf.ied(A, k=2, solver=pmaf.solvers.Reduction()).values.round(decimals=3)
    tensor([3., 2.])
    """

    solves = (Eigenvectors, LeastSquares, SingularVectors)
    always_converges = True

    def solve(self, problem: Any, *, init: Tensor | None = None, report: bool = True) -> Outcome:
        if has_form(problem, LeastSquares):
            return self._minimum(problem, init, report)
        if has_form(problem, SingularVectors):
            if _takes_singular(problem):
                return solve_reduced(problem, report)
            return _SVD.solve(problem, report=report)
        return self._eigenvectors(problem, report)

    def keeps(self, problem: Any) -> type[Kept]:
        return Nothing

    def may_keep(self, problem: Any) -> tuple[type[Kept], ...]:
        other = _other(problem)
        if other is not None:
            return other.may_keep(problem)
        return (Exact if has_form(problem, LeastSquares) else Nothing,)

    def course(self, problem: Any) -> Course:
        other = _other(problem)
        if other is not None:
            return other.course(problem)
        if has_form(problem, LeastSquares):
            then = "eigenvectors, for entries in which the lowest singular value repeats"
        elif has_form(problem, SingularVectors):
            then = "a singular value decomposition of entries in which the kernels fail"
        else:
            then = "a decomposition of entries in which the kernels fail"
        return Course("compiled kernels", (then,))

    def _minimum(self, problem: LeastSquares, init: Tensor | None, report: bool) -> Outcome:
        A, b, batch = problem.matrix.detach(), problem.b.detach(), problem.batch_shape
        if not _takes_minimum(problem):
            return _SECULAR.solve(problem, init=init, report=report)
        took("less: reduction")
        u, exact, gap, numbers, failed = native.least_squares(A, b.expand(*batch, -1))
        multiplier, gap = exact.to(A.dtype), gap.to(A.dtype)
        converged = torch.ones(batch, dtype=torch.bool, device=A.device)
        steps = torch.zeros(batch, dtype=torch.int64, device=A.device)
        unknown = residual = torch.full(batch, torch.nan, dtype=A.dtype, device=A.device)
        if init is not None and bool((gap == 0).any()):
            # Where there are several minimisers, the start chooses one.
            failed = gap == 0 if failed is None else failed | (gap == 0)
        if failed is not None:
            require_finite(A=(A, 2), b=(b, 1))
            part = problem.with_tensors(A[failed], b.expand(*batch, -1)[failed])
            start = None if init is None else init.expand(*batch, -1)[failed]
            again = _SECULAR.solve(part, init=start, report=report)
            fields = (u, multiplier, unknown, gap, steps, converged)
            for old, new in zip(fields, again.tensors):
                old[failed] = new
            exact[failed] = again.multiplier.double()
        if report:
            residual = residual_of(A.double(), b.double(), u.double()).to(A.dtype)
        return Outcome(u, multiplier, residual, gap, steps, converged, Exact(exact, numbers))

    def _eigenvectors(self, problem: Eigenvectors, report: bool) -> Outcome:
        A, k, batch = problem.matrix, problem.width, problem.batch_shape
        if not _takes_eigenvectors(problem):
            return _DENSE.solve(problem, report=report)
        took("ied: reduction")
        # The gap in a report is the distance to the next eigenvalue.
        count = min(k + problem.copies, problem.n) if report else k
        values, rows, failed = native.largest_pairs(A.detach(), count)
        if failed is not None:
            require_finite(A=(A, 2))
            took("ied: decomposition of some")
            spectrum, vectors = eigh(symmetric_part(A.detach()[failed]))
            values[failed] = spectrum[..., -count:].flip(-1)
            rows[failed] = vectors[..., -count:].flip(-1).mT
        unknown, none, converged = without_report[batch, rows.dtype, rows.device]
        if not report:
            return Outcome(rows, values, unknown, unknown, none, converged)
        top, rows = values[..., :k], rows[..., :k, :]
        residual, gap = problem.residual(top, rows), gap_of(values, problem)
        return Outcome(rows, top, residual, gap, none.clone(), converged.clone())

    def takes_any_scale(self, problem: Any) -> bool:
        if has_form(problem, LeastSquares):
            return (
                takes_least_squares(problem.matrix)
                and problem.matrix.shape[:-2] == problem.batch_shape
            )
        return _DENSE.takes_any_scale(problem)

    def advice(self) -> str:
        return _DENSE.advice()


def _other(problem: Any) -> Solver | None:
    """The solver of problems that there are no kernels for; None if there are."""
    if has_form(problem, LeastSquares):
        return None if _takes_minimum(problem) else _SECULAR
    if has_form(problem, SingularVectors):
        return None if _takes_singular(problem) else _SVD
    return None if _takes_eigenvectors(problem) else _DENSE


def _takes_minimum(problem: Any) -> bool:
    A = problem.matrix
    return A.shape[:-2] == problem.batch_shape and takes_least_squares(A)


def _takes_singular(problem: Any) -> bool:
    return problem.single and native.takes(problem.matrix)


def _takes_eigenvectors(problem: Any) -> bool:
    A = problem.matrix
    return problem.symmetric and A.shape[-1] <= _MOST_ROWS and native.takes(A)


def is_compiled(A: Tensor, k: int) -> bool:
    """Whether compiled kernels are faster than a decomposition for k eigenvectors of `A`."""
    n = A.shape[-1]
    return n <= COMPILED_ROWS and are_few(k, n) and native.takes(A)


def are_few(k: int, n: int) -> bool:
    """Whether k of n eigenpairs are found faster than all."""
    return k <= max(1, n // _SHARE)


# LAPACK works in blocks, and is faster for matrices that do not fit into the cache of a core.
_MOST_ROWS = 1024
# The least n/k for which k eigenpairs are found faster than all: `pmaf bench ied-crossover`.
_SHARE = 3


def takes_least_squares(A: Tensor) -> bool:
    """Whether there are kernels for least squares with `A`."""
    return A.dtype == torch.float32 and native.takes(A)


_DENSE, _SECULAR, _SVD = Dense(), Secular(), SVD()
