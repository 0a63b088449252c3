"""Eigenvectors of a pair of operators, searched in the inner product of `M`.

The search and the derivative take products with both and solves with `M`; nothing is factored.
Complex operators are embedded, as single ones are (`hermitian.py`): the embedding of `M` is
symmetric positive definite, and each eigenvalue of the pair occurs twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pmaf.certificate import certify_eigenvectors_by_products
from pmaf.gradients.by_products import Incoming, pair_gradients
from pmaf.layers.eigenvectors import PrincipalEigenvectors
from pmaf.layers.hermitian import ComplexEigenvectors, independent, means
from pmaf.layers.pairs import Pair, is_complex_search, is_search
from pmaf.linalg.embedding import complex_rows, paired_rows, real_rows
from pmaf.linalg.products import norm
from pmaf.operators.base import Operator, as_operator
from pmaf.operators.diagonal import Diagonal
from pmaf.operators.embedded import Embedded
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


@Pair.case(is_search)
@dataclass(frozen=True, eq=False)
class PairOfOperators(Pair):
    """`PrincipalEigenvectors` of two operators, by products and solves with `M`."""

    @classmethod
    def of(cls, problem: Any) -> Any:
        pair = cls.like(problem, A=as_operator(problem.A), M=as_operator(problem.M))
        _require_batch(pair)
        return pair

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


def _require_batch(pair: Any) -> None:
    M, batch = pair.M, pair.batch_shape
    if M.batch_shape not in (batch, ()):
        raise ValueError(
            f"{M!r} has the batch {tuple(M.batch_shape)} and the problem {tuple(batch)}; "
            "an operator needs the whole batch, or none"
        )


@dataclass(frozen=True, eq=False)
class EmbeddedPair(PairOfOperators):
    """Eigenvectors of the embeddings of two Hermitian operators, in pairs of `y` and `iy`."""

    copies: ClassVar[int] = 2

    def finished(self, outcome: Outcome) -> Outcome:
        seen = Rows(self.M, self.batch_shape)

        def dual(y: Tensor) -> Tensor:
            rows = real_rows(y).reshape(seen.entries, -1, self.n)
            return complex_rows(seen.of_symmetric_part(rows)).reshape(y.shape)

        y = independent(complex_rows(outcome.value), outcome.multiplier, dual)
        values = means(outcome.multiplier)
        return outcome._replace(value=paired_rows(y), multiplier=values.repeat_interleave(2, -1))


@PrincipalEigenvectors.case(is_complex_search)
@dataclass(frozen=True, eq=False)
class ComplexPairOfOperators(ComplexEigenvectors):
    """A pair of Hermitian matrices of which one is known by its products."""

    inputs: ClassVar[dict[str, int]] = {"A": 2, "M": 2}

    @classmethod
    def of(cls, problem: Any) -> Any:
        M = problem.M
        # Of a diagonal, too, the Hermitian part is meant.
        M = Diagonal(M.d.real.to(M.d.dtype)) if isinstance(M, Diagonal) else as_operator(M)
        pair = cls.like(problem, A=as_operator(problem.A), M=M)
        _require_batch(pair)
        return pair

    def directions(self, rows: Tensor) -> Tensor:
        return rows / norm(rows.detach()).unsqueeze(-1)

    def embedding(self, A: Any, largest: bool) -> PrincipalEigenvectors:
        k, skip, M = 2 * self.count, 2 * self.skip, Embedded(self.M)
        return EmbeddedPair(Embedded(A), k, largest, skip=skip, M=M)
