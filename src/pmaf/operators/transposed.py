"""The transpose of an operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pmaf.operators.base import Operator


class Transposed(Operator):
    """`Aᵀ` for an operator `A` of shape `(*, m, n)`."""

    def __init__(self, part: Operator) -> None:
        self.part, self.symmetric = part, part.symmetric

    @property
    def shape(self) -> torch.Size:
        *batch, m, n = self.part.shape
        return torch.Size((*batch, n, m))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.part.tensors

    @property
    def dtype(self) -> torch.dtype:
        return self.part.dtype

    @property
    def device(self) -> torch.device:
        return self.part.device

    def with_tensors(self, tensors: Sequence[Tensor]) -> Transposed:
        return Transposed(self.part.with_tensors(tensors))

    def claims(self) -> Iterator[Operator]:
        return self.part.claims()

    def in_units(self, rows: Tensor) -> tuple[Operator, Tensor]:
        # Products with the transpose are of the size of products with the matrix.
        part, exponents = self.part.in_units(self.part.rmatvec(rows))
        return Transposed(part), exponents

    def matvec(self, rows: Tensor) -> Tensor:
        return self.part.rmatvec(rows)

    def rmatvec(self, rows: Tensor) -> Tensor:
        return self.part.matvec(rows)

    def pullback(self, left: Tensor, right: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        return self.part.pullback(right, left, needs)

    def __repr__(self) -> str:
        return f"Transposed({self.part!r})"
