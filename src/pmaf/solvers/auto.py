"""The default solver, which chooses another solver for each problem.

The comment on each threshold names the benchmark that it was measured with; other machines may need
other thresholds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf import native
from pmaf.runtime.modes import plain
from pmaf.solvers.adaptive import Adaptive
from pmaf.solvers.base import Eigenvectors, Minimum, Outcome, SingularVectors, Solver
from pmaf.solvers.cholesky import Cholesky
from pmaf.solvers.dense import Dense
from pmaf.solvers.krylov import Krylov
from pmaf.solvers.reduction import Reduction, are_few, is_compiled, takes_least_squares
from pmaf.solvers.secular import Secular
from pmaf.solvers.singular import SVD


@dataclass(frozen=True)
class Auto(Solver):
    """The fastest solver for the problem at hand among those that are globally optimal.

    >>> import torch, pmaf
    >>> A = torch.diag(torch.tensor([3.0, 1.0, 2.0]))
    >>> pmaf.ied(A, solver=pmaf.solvers.Auto()).values.round(decimals=3)
    tensor(3.)
    """

    solves = (Minimum, Eigenvectors, SingularVectors)

    def solve(self, problem: Any, *, init: Tensor | None = None, report: bool = True) -> Outcome:
        return self.resolve(problem).solve(problem, init=init, report=report)

    def resolve(self, problem: Any) -> Solver:
        return problem.best_solver()


# Created at import: constructing a solver serialises it to text, which costs more than a small
# solve.
AUTO, KRYLOV, SECULAR = Auto(), Krylov(), Secular()
DENSE, _CHOLESKY, _ADAPTIVE, _REDUCTION = Dense(), Cholesky(), Adaptive(), Reduction()
_SVD = SVD()

# The least number of columns, and of entries of all Gram matrices together, for which a Cholesky
# factor is faster than an eigendecomposition: `pmaf bench less-crossover`.
_FACTORED_COLUMNS, _FACTORED_ENTRIES = 12, 40_000
# The most rows for which compiled kernels are faster than power steps on a matrix with a dominant
# eigenvalue: `pmaf bench ied`, family "paper".
_REDUCED_ROWS = 128
# The largest min(m, n) for which compiled kernels solve least squares faster than two Cholesky
# factors: `pmaf bench less-crossover`.
_REDUCED_COLUMNS = 256
# A trace has to know in advance whether a solve returns an eigenbasis. Below this many rows it
# takes a decomposition; above, power steps are faster in `pmaf bench ied-crossover`.
_TRACED_ROWS = 128


def best_minimum(problem: Any) -> Solver:
    """The solver for a quadratic function on the sphere."""
    return SECULAR if problem.operator is None else KRYLOV


def is_reduced_minimum(A: Tensor, batch: torch.Size) -> bool:
    """Whether compiled kernels are the fastest for a batch of least squares with `A`."""
    small = are_reduced_columns(*A.shape[-2:]) and A.shape[:-2] == batch
    return small and plain(A) and takes_least_squares(A)


def are_reduced_columns(m: int, n: int) -> bool:
    """The same for matrices of this shape, if there are kernels for them."""
    return min(m, n) <= _REDUCED_COLUMNS


def are_decomposed(shape: torch.Size, dtype: torch.dtype, sphere: bool) -> bool:
    """Whether kernels around a decomposition are the fastest for least squares of this shape.

    `sphere` says that there are no options.
    """
    *batch, m, n = shape
    entries = 4 * m * n if dtype.is_complex else m * n
    if not native.available or entries > native.UNIT_ENTRIES:
        return False
    if not sphere or dtype.is_complex:
        return True
    factored = m >= n >= _FACTORED_COLUMNS and math.prod(batch) * n * n >= _FACTORED_ENTRIES
    return dtype == torch.float64 and not factored


def best_least_squares(problem: Any) -> Solver:
    """The solver for least squares on the sphere."""
    if problem.operator is not None:
        return KRYLOV
    A, batch = problem.matrix, problem.batch_shape
    m, n = A.shape[-2:]
    if is_reduced_minimum(A, batch):
        return _REDUCTION
    # Problems with one matrix share its eigendecomposition; a factor depends on their μ.
    if not (m >= n >= _FACTORED_COLUMNS and A.shape[:-2] == batch):
        return SECULAR
    # A traced program may run on batches of any size, so that their size must not decide.
    few = plain(A) and batch.numel() * n * n < _FACTORED_ENTRIES
    return SECULAR if few else _CHOLESKY


def is_reduced(A: Tensor, k: int) -> bool:
    """Whether compiled kernels are the fastest for k eigenvectors of matrices like `A`."""
    return are_reduced(k, A.shape[-1]) and native.takes_eigenvectors(A)


def are_reduced(k: int, n: int) -> bool:
    """The same for k eigenvectors of matrices with n rows, if there are kernels for them."""
    return n <= _REDUCED_ROWS and are_few(k, n)


def best_eigenvectors(problem: Any) -> Solver:
    """The solver for eigenvectors."""
    if problem.operator is not None:
        return KRYLOV
    A, k = problem.matrix, problem.width
    if problem.symmetric and (is_reduced if plain(A) else is_compiled)(A, k):
        return _REDUCTION
    small = problem.symmetric and problem.n < _TRACED_ROWS
    return DENSE if small and not plain(A) else _ADAPTIVE


def best_singular(problem: Any) -> Solver:
    """The solver for right singular vectors of a tensor."""
    # Only numbers that float32 holds have a Gram matrix that kernels may work on.
    return _REDUCTION if problem.single and is_compiled(problem.matrix, problem.width) else _SVD
