"""`XᵀX` and `XᵀWX`, or `XᴴX`, without forming them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pmaf.errors import require_broadcast, require_row_weights
from pmaf.linalg.products import broadcast
from pmaf.linalg.singular import weighted
from pmaf.operators.base import Operator, as_operator, number


class Gram(Operator):
    """`scale·XᵀX` for `X` of shape `(*, m, n)`: `pmaf.ied(Gram(X))` is PCA; `XᴴX` if complex.

    A product costs O(mn), and a gradient of `X` is of rank two for each vector.

    Args:
        X: a tensor, dense, sparse or spread over ranks by rows as a DTensor; or an operator,
            for example `Matrix(X) - LowRank(ones, mean)` for centred data.
        scale: `1/(m − 1)` makes it a covariance.
        weights: `(*, m)`, of the rows of `X`, the diagonal of `W` in `scale·XᵀWX`; they get
            gradients, too.

    >>> import torch, pmaf
    >>> X = torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    >>> pmaf.ied(pmaf.operators.Gram(X)).values.round(decimals=4)
    tensor(9.)
    """

    symmetric = True

    def __init__(self, X: Any, scale: float = 1.0, weights: Tensor | None = None) -> None:
        self.X, self.scale, self.weights = as_operator(X), number("scale", scale), weights
        if weights is None:
            return
        require_row_weights(weights, "X", self.X)
        require_broadcast("X", self.X.batch_shape, "weights", weights.shape[:-1])

    @property
    def shape(self) -> torch.Size:
        n = self.X.shape[-1]
        batch = self.X.batch_shape
        if self.weights is not None:
            batch = broadcast(batch, self.weights.shape[:-1])
        return torch.Size((*batch, n, n))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.X.tensors if self.weights is None else (*self.X.tensors, self.weights)

    @property
    def dtype(self) -> torch.dtype:
        return self.X.dtype

    @property
    def device(self) -> torch.device:
        return self.X.device

    def with_tensors(self, tensors: Sequence[Tensor]) -> Gram:
        count = len(self.X.tensors)
        return Gram(self.X.with_tensors(tensors[:count]), self.scale, *tensors[count:])

    def claims(self) -> Iterator[Operator]:
        return self.X.claims()

    def in_units(self, rows: Tensor) -> tuple[Operator, Tensor]:
        X, exponents = self.X.in_units(rows)
        mantissa, power = math.frexp(self.scale)
        return Gram(X, mantissa, self.weights), 2 * exponents + power

    def matvec(self, rows: Tensor) -> Tensor:
        image = self.X.rmatvec(weighted(self.X.matvec(rows), self.weights))
        return image if self.scale == 1 else self.scale * image

    def pullback(self, left: Tensor, right: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        if not any(needs):
            return [None for _ in needs]
        both = torch.cat([left, right], -2)
        swapped = torch.cat([right, left], -2)
        images, count = self.X.matvec(both), len(self.X.tensors)
        scaled = weighted(self.scale * images, self.weights)
        found = self.X.pullback(scaled, swapped, needs[:count])
        if self.weights is None:
            return found
        dw = None
        if needs[count]:
            first, second = images.chunk(2, -2)
            products = torch.real(first.conj() * second)
            dw = (self.scale * products.sum(-2)).sum_to_size(self.weights.shape)
        return [*found, dw]
