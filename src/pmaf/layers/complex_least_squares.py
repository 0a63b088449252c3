"""Complex least squares, which are real ones of twice the size; see `linalg/embedding.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from pmaf.layers.least_squares import SphereLeastSquares
from pmaf.linalg.embedding import complex_rows, real_matrix, real_rows
from pmaf.operators import Diagonal
from pmaf.operators.embedded import embedded, real_of
from pmaf.solution import Certificate, Solution
from pmaf.solvers import Solver
from pmaf.solvers.base import Outcome


@SphereLeastSquares.case(lambda x: x.A.dtype.is_complex)
@dataclass(frozen=True, eq=False)
class ComplexLeastSquares(SphereLeastSquares):
    """`SphereLeastSquares` of complex matrices, by their embedding."""

    def reduced(
        self, init: Tensor | None, solver: Solver
    ) -> tuple[Any, Tensor | None, Callable[..., Solution]]:
        start = None if init is None else real_rows(init)
        posed, start, finish = self._embedding().reduced(start, solver)

        def present(outcome: Outcome) -> Solution:
            found = finish(outcome)
            return replace(found, value=complex_rows(found.value))

        return posed, start, present

    def _embedding(self) -> Any:
        M, weights = self.M, self.weights
        if isinstance(M, Diagonal):
            M = Diagonal(M.d.real.repeat_interleave(2, -1))
        elif M is not None:
            M = real_matrix(M.to(self.dtype))
        weights = None if weights is None else weights.repeat_interleave(2, -1)
        A, b = embedded(self.A), real_of(self.b)
        return SphereLeastSquares.like(self, A=A, b=b, M=M, weights=weights).special()

    def certified(self, value: Tensor) -> Certificate:
        return self._embedding().certified(real_rows(value))
