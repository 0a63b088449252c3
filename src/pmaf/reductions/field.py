"""Complex problems as real ones of twice the size; see `linalg/embedding.py`.

An eigenvector of a Hermitian matrix is free up to its phase. Its embedding has pairs of
eigenvectors, those of `y` and of `iy`, whose span does not depend on the phase, and the derivatives
of functions of the span of equal eigenvalues are exact to every order. The vector `y` with the
phase that `reference` fixes is such a function; a step `Sign` fixes the phase by differentiable
operations, after the solve. The same holds for singular vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from pmaf.linalg.embedding import complex_rows, paired_rows, real_matrix, real_rows, unpaired_rows
from pmaf.operators import Diagonal
from pmaf.operators.base import Operator, as_operator
from pmaf.operators.embedded import Embedded, embedded, real_of
from pmaf.reductions.base import Found, Reduction, Tensors
from pmaf.runtime.log import took

_WORDS = "complex -> real embedding, twice the size"


@dataclass(frozen=True)
class EmbeddedVectors(Reduction):
    """Eigenvectors or singular vectors of the embedding, each of them in a pair `y`, `iy`.

    Args:
        width: how many complex vectors a start has.
        averaged: whether the mean of both vectors of a pair is taken. It has the value of the
            first, and its gradient comes in for both. For singular vectors the first alone is
            taken, from which the other follows.
    """

    width: int
    averaged: bool

    words = _WORDS

    def apply(self, given: Tensors) -> Tensors:
        posed = self.outline(given)
        dense = isinstance(posed["A"], Tensor) and posed.get("M") is not None
        if dense and not is_compiling():  # a trace cannot follow a log
            took("pairs: complex")
        return posed

    def outline(self, given: Tensors) -> Tensors:
        A, M, weights = given["A"], given.get("M"), given.get("weights")
        by_products = isinstance(A, Operator) or _is_known_by_products(M)
        posed = {**given, "A": embedded(as_operator(A) if by_products else A)}
        if M is not None:
            posed["M"] = _metric(M, by_products)
        if weights is not None:
            posed["weights"] = weights.repeat_interleave(2, -1)
        return posed

    def back(self, found: Found, given: Tensors, posed: Tensors) -> Found:
        vectors, values, *partners = found
        # New tensors, not views of what the backward pass uses: a user may write into them.
        values = values[..., ::2].clone()
        return self._complex(vectors), values, *(self._complex(x) for x in partners)

    def _complex(self, columns: Tensor) -> Tensor:
        rows = columns.mT
        return (unpaired_rows(rows) if self.averaged else complex_rows(rows[..., ::2, :])).mT

    def forth(self, vectors: Tensor, given: Tensors, posed: Tensors) -> Tensor:
        columns = vectors.expand(*vectors.shape[:-1], self.width)
        return paired_rows(columns.mT).mT


def _is_known_by_products(M: Any) -> bool:
    return isinstance(M, Operator) and not isinstance(M, Diagonal)


def _metric(M: Any, by_products: bool) -> Any:
    """The embedding of a metric, which enters by its Hermitian part; for a diagonal, its real."""
    if not by_products:
        return real_matrix(torch.diag_embed(M.d) if isinstance(M, Diagonal) else M)
    return Embedded(Diagonal(M.d.real.to(M.d.dtype)) if isinstance(M, Diagonal) else as_operator(M))


class EmbeddedLeastSquares(Reduction):
    """Least squares of the embedding, whose solution is that of `u`, and no other."""

    words = _WORDS

    def apply(self, given: Tensors) -> Tensors:
        M, weights = given["M"], given["weights"]
        if isinstance(M, Diagonal):
            M = Diagonal(M.d.real.repeat_interleave(2, -1))
        elif M is not None:
            M = real_matrix(M.to(given["b"].dtype))
        weights = None if weights is None else weights.repeat_interleave(2, -1)
        A, b = embedded(given["A"]), real_of(given["b"])
        return {**given, "A": A, "b": b, "M": M, "weights": weights}

    def back(self, found: Found, given: Tensors, posed: Tensors) -> Found:
        u, *others = found
        return complex_rows(u), *others

    def forth(self, vectors: Tensor, given: Tensors, posed: Tensors) -> Tensor:
        return real_rows(vectors)
