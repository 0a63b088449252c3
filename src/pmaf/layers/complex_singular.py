"""Singular vectors of complex matrices, by the real embedding of `linalg/embedding.py`.

The embedding has every singular value twice: with `v`, the vector of `iv` belongs to it, too. As
for eigenvectors (`layers/hermitian.py`), the derivatives of functions of the span of both are exact
to every order, and the vector with the phase that `reference` fixes is such a function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from pmaf.layers.singular_vectors import PrincipalSingularVectors
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


@PrincipalSingularVectors.case(lambda x: x.A.dtype.is_complex and isinstance(x.A, Tensor))
@dataclass(frozen=True, eq=False)
class ComplexSingularVectors(PrincipalSingularVectors):
    """`PrincipalSingularVectors` of a complex tensor, by its embedding."""

    def reduced(
        self, init: Tensor | None, solver: Solver
    ) -> tuple[Any, Tensor | None, Callable[..., Solution]]:
        posed, start, _ = self._embedding().reduced(None, solver)
        return posed, start, self.present

    def _embedding(self) -> EmbeddedSingularVectors:
        weights = self.weights
        weights = None if weights is None else weights.repeat_interleave(2, -1)
        k, A = 2 * self.width, real_matrix(self.matrix)
        return EmbeddedSingularVectors(A, weights, k, self.largest, single=self.single)

    def present(self, outcome: Outcome) -> Solution:
        rows, values, residual, gap, iterations, converged = outcome.tensors
        y, values = complex_rows(rows[..., ::2, :]), values[..., ::2]
        if self.flipped:
            y, values = y.flip(-2), values.flip(-1)
        real = self.matrix.real.dtype
        # New tensors, not views of what the backward pass uses: a user may write into them.
        vectors = (y * self.signs(y).unsqueeze(-1)).to(self.dtype)
        values = values.to(real, copy=True)
        if self.k is None:
            vectors, values = vectors.squeeze(-2), values.squeeze(-1)
        else:
            vectors = vectors.mT
        reported = residual.to(real), gap.to(real), iterations, converged
        return Solution(vectors, values, *reported, method=outcome.method)

    def certified(self, value: Tensor) -> Certificate:
        columns = value.unsqueeze(-1) if self.k is None else value
        return self._embedding().certify(paired_rows(columns.mT).mT)
