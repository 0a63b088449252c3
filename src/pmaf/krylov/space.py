"""The search for a solution in a subspace that grows by products.

A space has orthonormal rows `(B, j, n)`, their images under a linear map, and the map as
seen from inside, a matrix `(B, j, j)`. A problem posed inside it is small; its solution has
a residual outside, and that is where the space grows. From one vector this is the Krylov
space of Lanczos and Arnoldi; when the space is full, the best of it is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pmaf.linalg.products import inner, long_norm, one_if_zero
from pmaf.linalg.roundings import ROUNDED
from pmaf.linalg.symmetric_part import fixed_rows
from pmaf.tangent.residuals import Product


class Space:
    """Orthonormal rows, their images, and the map between them as a small matrix."""

    def __init__(self, product: Product, start: Tensor, size: int, symmetric: bool) -> None:
        B, _, n = start.shape
        self.product, self.symmetric = product, symmetric
        self.size = min(size, n)
        self._rows = start.new_empty(B, self.size, n)
        self._images = start.new_empty(B, self.size, n)
        self._matrix = start.new_zeros(B, self.size, self.size)
        self.reach = start.new_zeros(B, 1)  # length of the longest image so far
        self.width = self.products = 0

    @property
    def rows(self) -> Tensor:
        return self._rows[:, : self.width]

    @property
    def images(self) -> Tensor:
        return self._images[:, : self.width]

    @property
    def matrix(self) -> Tensor:
        """`(B, j, j)`: entry (a, b) is row a times the image of row b."""
        return self._matrix[:, : self.width, : self.width]

    @property
    def full(self) -> bool:
        return self.width == self.size

    def grow(self, block: Tensor) -> Tensor:
        """Add rows `(B, p, n)` that are beside the space, as far as there is room.

        Returns what the images of the added have beside it.
        """
        block = self._orthonormal(block[:, : self.size - self.width])
        image = self.product(block)
        self.products += 1
        old, self.width = self.width, self.width + block.shape[1]
        self._rows[:, old : self.width] = block
        self._images[:, old : self.width] = image
        column = inner(self.rows, image)
        self._matrix[:, : self.width, old : self.width] = column
        if self.symmetric:
            self._matrix[:, old : self.width, : self.width] = column.mT
        elif old:
            self._matrix[:, old : self.width, :old] = inner(block, self._images[:, :old])
        self.reach = torch.maximum(self.reach, long_norm(image).amax(-1, keepdim=True))
        return torch.baddbmm(image, column.mT, self.rows, alpha=-1)

    def keep(self, coefficients: Tensor) -> None:
        """Shrink to the span of these combinations, orthonormal rows `(B, q, j)`."""
        q = coefficients.shape[1]
        rows, images = coefficients.bmm(self.rows), coefficients.bmm(self.images)
        matrix = coefficients.bmm(self.matrix).bmm(coefficients.mT)
        self._rows[:, :q], self._images[:, :q] = rows, images
        self._matrix[:, :q, :q] = matrix
        self.width = q

    def refresh(self) -> None:
        """Multiply again: in images that are combined over and over, rounding gathers."""
        basis = torch.linalg.qr(self.rows.mT).Q.mT
        self._rows[:, : self.width] = basis
        self._images[:, : self.width] = self.product(basis)
        self._matrix[:, : self.width, : self.width] = inner(self.rows, self.images)
        self.products += 1

    def beside(self, block: Tensor) -> Tensor:
        """What rows have outside the space, up to rounding."""
        if not self.width:
            return block
        return torch.baddbmm(block, inner(block, self.rows), self.rows, alpha=-1)

    def _orthonormal(self, block: Tensor) -> Tensor:
        """Orthonormal rows for rows beside the space."""
        eps = torch.finfo(block.dtype).eps
        # Of an invariant space nothing is left but rounding: go on somewhere else.
        block = self._replaced(block, long_norm(block) <= ROUNDED * eps * self.reach, 0)
        block = self._unit(self.beside(block))
        if block.shape[-1] > _SMALL:
            return block
        # In a small space what is left may be rounding even then.
        left = self.beside(block)
        return self._unit(self.beside(self._replaced(left, long_norm(left) <= eps**0.5, 1)))

    def _replaced(self, block: Tensor, gone: Tensor, attempt: int) -> Tensor:
        """Other rows in place of those of a mask `(B, p)`."""
        n, p = block.shape[-1], block.shape[1]
        # Pieces of one long row: there is no end of them, and they take no time to make.
        row = fixed_rows(n + _SPARES, block.dtype, block.device)[0]
        at = (self.width + 97 * attempt) % (_SPARES - p + 1)
        return torch.where(gone.unsqueeze(-1), row[at : at + n + p - 1].unfold(0, n, 1), block)

    def _unit(self, block: Tensor) -> Tensor:
        block = block / one_if_zero(long_norm(block)).unsqueeze(-1)
        return block if block.shape[1] == 1 else torch.linalg.qr(block.mT).Q.mT


# Up to this many rows a space may come to be the whole, and a third projection costs little.
_SMALL = 1000
# Directions to go on with where the space is invariant.
_SPARES = 512
