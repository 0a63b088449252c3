"""The default: which solver runs when, in one place.

Every threshold names the benchmark that it comes from; on another machine the crossings may lie
elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pmaf.runtime.modes import plain
from pmaf.solvers.adaptive import Adaptive
from pmaf.solvers.base import Eigenvectors, Minimum, Outcome, Solver
from pmaf.solvers.cholesky import Cholesky
from pmaf.solvers.dense import Dense
from pmaf.solvers.krylov import Krylov
from pmaf.solvers.secular import Secular


@dataclass(frozen=True)
class Auto(Solver):
    """The fastest solver for the problem at hand among those that are globally optimal."""

    solves = (Minimum, Eigenvectors)

    def solve(self, problem: Any, *, init: Tensor | None = None, report: bool = True) -> Outcome:
        return self.resolve(problem).solve(problem, init=init, report=report)

    def resolve(self, problem: Any) -> Solver:
        return problem.best_solver()


# Created at import: constructing a solver serialises it to text, which costs more than a small
# solve.
KRYLOV, SECULAR = Krylov(), Secular()
_CHOLESKY, _DENSE, _ADAPTIVE = Cholesky(), Dense(), Adaptive()

# Columns from which a Cholesky factor is cheaper than an eigendecomposition, and entries of all
# Gram matrices together below which the calls around a factor cost more than it saves:
# `pmaf bench less-crossover`.
_FACTORED_COLUMNS, _FACTORED_ENTRIES = 12, 40_000
# Rows below which a trace, which has to know in advance whether there will be an eigenbasis,
# takes a decomposition: about where `pmaf bench ied-crossover` has power steps ahead of it.
_TRACED_ROWS = 128


def best_minimum(problem: Any) -> Solver:
    """For a quadratic function on the sphere."""
    return SECULAR if problem.operator is None else KRYLOV


def best_least_squares(problem: Any) -> Solver:
    """For least squares on the sphere."""
    if problem.operator is not None:
        return KRYLOV
    A, batch = problem.matrix, problem.batch_shape
    m, n = A.shape[-2:]
    # One eigendecomposition serves all problems that share a matrix; a factor does not.
    if not (m >= n >= _FACTORED_COLUMNS and A.shape[:-2] == batch):
        return SECULAR
    # A trace has to serve batches of any size.
    few = plain(A) and batch.numel() * n * n < _FACTORED_ENTRIES
    return SECULAR if few else _CHOLESKY


def best_eigenvectors(problem: Any) -> Solver:
    """For eigenvectors."""
    if problem.operator is not None:
        return KRYLOV
    small = problem.symmetric and problem.n < _TRACED_ROWS
    return _DENSE if small and not plain(problem.matrix) else _ADAPTIVE
