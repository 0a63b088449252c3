"""Singular vectors of complex matrices, by the real embedding of `linalg/embedding.py`.

The embedding has every singular value twice: with `v`, the vector of `iv` belongs to it, too. As
for eigenvectors (`layers/hermitian.py`), the derivatives of functions of the span of both are exact
to every order, and the vector with the phase that `reference` fixes is such a function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from pmaf.layers.nullspace import PrincipalSingularVectors
from pmaf.linalg.embedding import complex_rows, paired_rows, real_matrix
from pmaf.solution import Certificate, Solution
from pmaf.solvers import SVD, Reduction, Solver
from pmaf.solvers.auto import best_singular
from pmaf.solvers.base import Outcome

_SVD = SVD()


@dataclass(frozen=True, eq=False)
class EmbeddedSingularVectors(PrincipalSingularVectors):
    """Singular vectors of the embedding of a complex matrix, in pairs of `v` and `iv`."""

    copies: ClassVar[int] = 2

    def best_solver(self) -> Solver:
        return best_singular(self.changed(k=1)) if self.width == 2 else _SVD

    def solved_by(self, solver: Solver, init: Tensor | None, report: bool) -> Outcome:
        if self.width > 2:
            # Kernels would mix the vectors of equal singular values.
            way = _SVD if isinstance(solver, Reduction) else solver
            return super().solved_by(way, init, report)
        return PrincipalSingularVectors.solved_by(self.changed(k=1), solver, init, report)

    def finished(self, outcome: Outcome) -> Outcome:
        rows, values = outcome.value, outcome.multiplier
        if rows.shape[-2] == self.width:
            return outcome
        # One vector of a pair gives the other.
        pairs, values = paired_rows(complex_rows(rows)), values.repeat_interleave(2, -1)
        return outcome._replace(value=pairs, multiplier=values)


def _embedding(problem: PrincipalSingularVectors) -> EmbeddedSingularVectors:
    weights = problem.weights
    weights = None if weights is None else weights.repeat_interleave(2, -1)
    k = 2 * problem.width
    return EmbeddedSingularVectors(real_matrix(problem.matrix), weights, k, problem.largest)


def reduced(
    problem: PrincipalSingularVectors, solver: Solver
) -> tuple[Any, Tensor | None, Callable[..., Solution]]:
    """`Problem.reduced` of a complex matrix."""
    posed, start, _ = _embedding(problem).reduced(None, solver)
    return posed, start, functools.partial(_present, problem)


def _present(problem: PrincipalSingularVectors, outcome: Outcome) -> Solution:
    """The outcome of the embedded problem as the user sees it."""
    rows, values, residual, gap, iterations, converged = outcome.tensors
    y, values = complex_rows(rows[..., ::2, :]), values[..., ::2]
    if problem.flipped:
        y, values = y.flip(-2), values.flip(-1)
    dtype = problem.dtype
    real = dtype.to_real()
    # New tensors, not views of what the backward pass uses: a user may write into them.
    vectors, values = (y * problem.signs(y).unsqueeze(-1)).to(dtype), values.to(real, copy=True)
    if problem.k is None:
        vectors, values = vectors.squeeze(-2), values.squeeze(-1)
    else:
        vectors = vectors.mT
    return Solution(vectors, values, residual.to(real), gap.to(real), iterations, converged)


def certify(problem: PrincipalSingularVectors, value: Tensor) -> Certificate:
    """The certificate of the embedded problem."""
    columns = value.unsqueeze(-1) if problem.k is None else value
    return _embedding(problem).certify(paired_rows(columns.mT).mT)
