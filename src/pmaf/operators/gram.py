"""`XᵀX`, or `XᴴX`, without forming it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pmaf.operators.base import Operator, as_operator, number


class Gram(Operator):
    """`scale·XᵀX` for `X` of shape `(*, m, n)`: `pmaf.ied(Gram(X))` is PCA; `XᴴX` if complex.

    A product costs O(mn), and a gradient of `X` is of rank two for each vector.

    Args:
        X: a tensor, dense, sparse or spread over ranks by rows as a DTensor; or an operator,
            for example `Matrix(X) - LowRank(ones, mean)` for centred data.
        scale: `1/(m − 1)` makes it a covariance.

    >>> import torch, pmaf
    >>> X = torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    >>> pmaf.ied(pmaf.operators.Gram(X)).values.round(decimals=4)
    tensor(9.)
    """

    symmetric = True

    def __init__(self, X: Any, scale: float = 1.0) -> None:
        self.X, self.scale = as_operator(X), number("scale", scale)

    @property
    def shape(self) -> torch.Size:
        n = self.X.shape[-1]
        return torch.Size((*self.X.batch_shape, n, n))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.X.tensors

    @property
    def dtype(self) -> torch.dtype:
        return self.X.dtype

    @property
    def device(self) -> torch.device:
        return self.X.device

    def with_tensors(self, tensors: Sequence[Tensor]) -> Gram:
        return Gram(self.X.with_tensors(tensors), self.scale)

    def claims(self) -> Iterator[Operator]:
        return self.X.claims()

    def in_units(self, rows: Tensor) -> tuple[Operator, Tensor]:
        X, exponents = self.X.in_units(rows)
        mantissa, power = math.frexp(self.scale)
        return Gram(X, mantissa), 2 * exponents + power

    def matvec(self, rows: Tensor) -> Tensor:
        image = self.X.rmatvec(self.X.matvec(rows))
        return image if self.scale == 1 else self.scale * image

    def pullback(self, left: Tensor, right: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        if not any(needs):
            return [None for _ in needs]
        both = torch.cat([left, right], -2)
        swapped = torch.cat([right, left], -2)
        return self.X.pullback(self.X.matvec(self.scale * both), swapped, needs)
