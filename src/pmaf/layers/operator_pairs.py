"""Eigenvectors of a pair of operators, searched in the inner product of `M`.

The search and the derivative take products with both and solves with `M`; nothing is factored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf.certificate import certify_eigenvectors_by_products
from pmaf.gradients.by_products import Incoming, pair_gradients
from pmaf.layers.pairs import Pair
from pmaf.operators.base import Operator
from pmaf.operators.diagonal import Diagonal
from pmaf.operators.inner import inner_product
from pmaf.operators.rows import Rows
from pmaf.runtime.log import took
from pmaf.solution import Certificate
from pmaf.solvers import Solver
from pmaf.solvers.base import Outcome
from pmaf.solvers.krylov import Krylov, find_eigenvectors
from pmaf.tangent.metric import Metric


class Seen(Rows):
    """Products with the operator `A` of a pair, and with its `M`."""

    def __init__(self, A: Operator, batch: torch.Size, own: Rows, metric: Metric) -> None:
        super().__init__(A, batch)
        self.own, self.metric = own, metric


@Pair.case(lambda x: isinstance(x.M, Operator) and not isinstance(x.M, Diagonal))
@dataclass(frozen=True, eq=False)
class PairOfOperators(Pair):
    """`PrincipalEigenvectors` of two operators, by products and solves with `M`."""

    @classmethod
    def of(cls, problem: Any) -> Any:
        M, batch = problem.M, problem.batch_shape
        if M.batch_shape not in (batch, ()):
            raise ValueError(
                f"{M!r} has the batch {tuple(M.batch_shape)} and the problem {tuple(batch)}; "
                "an operator needs the whole batch, or none"
            )
        return super().of(problem)

    def solved_by_products(self, solver: Solver, init: Tensor | None) -> tuple[Outcome, Any]:
        if not isinstance(solver, Krylov):
            raise TypeError(
                f"{solver!r} does not know the inner product of {self.M!r}; use Auto() or Krylov()"
            )
        took("pairs: products, own solve" if self.M.solvable else "pairs: products")
        assert isinstance(self.A, Operator)
        seen = Seen(self.A, self.batch_shape, *self._inner_product(solver))
        return seen.guarded(find_eigenvectors, self, solver, init, seen.metric), seen

    def _inner_product(self, solver: Krylov) -> tuple[Rows, Metric]:
        own = Rows(self.M, self.batch_shape)
        return own, inner_product(own, solver.tolerance_of(self.dtype))

    def gradients_by_products(self, given: Incoming) -> Sequence[Tensor | None]:
        seen: Any = given.seen
        return pair_gradients(self, given, seen.own, seen.metric)

    def certified(self, value: Tensor) -> Certificate:
        fixed = self.with_flat([x.detach() for x in self.flat])
        _, metric = fixed._inner_product(Krylov())
        return certify_eigenvectors_by_products(fixed, value, metric)
