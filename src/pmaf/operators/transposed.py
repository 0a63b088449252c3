"""The transpose of an operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pmaf.linalg.products import one_if_zero
from pmaf.operators.base import Operator, Wrapping


class Transposed(Wrapping):
    """`Aᵀ` for an operator `A` of shape `(*, m, n)`."""

    @property
    def shape(self) -> torch.Size:
        *batch, m, n = self.part.shape
        return torch.Size((*batch, n, m))

    def in_units(self, rows: Tensor) -> tuple[Operator, Tensor]:
        # Products with the transpose are of the size of products with the matrix, for rows of the
        # same size.
        images = self.part.rmatvec(rows)
        part, exponents = self.part.in_units(images / one_if_zero(images.abs().amax(-1, True)))
        return self.around(part), exponents

    def matvec(self, rows: Tensor) -> Tensor:
        return self.part.rmatvec(rows)

    def rmatvec(self, rows: Tensor) -> Tensor:
        return self.part.matvec(rows)

    def pullback(self, left: Tensor, right: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        return self.part.pullback(right, left, needs)

    def __repr__(self) -> str:
        return f"Transposed({self.part!r})"
