"""Subspaces that grow by products with a matrix.

A space has orthonormal rows `(B, j, n)`, their images under a linear map, and the map restricted to
the space, a matrix `(B, j, j)`. The problem restricted to the space is small, and the space grows
by the residual of its solution. From one vector this gives the Krylov space of Lanczos and Arnoldi.
A full space is reduced to its best vectors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pmaf.linalg.products import inner, long_norm, one_if_zero
from pmaf.linalg.roundings import ROUNDED
from pmaf.linalg.symmetric_part import fixed_rows
from pmaf.tangent.residuals import Product


class Space:
    """Orthonormal rows, their images, and the restricted map as a small matrix."""

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
        """Add rows `(B, p, n)` that are orthogonal to the space, as many as there is room for.

        Returns the parts of their images that are orthogonal to the space.
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
        """Compute all images again, because rounding accumulates in combinations of old ones."""
        basis = torch.linalg.qr(self.rows.mT).Q.mT
        self._rows[:, : self.width] = basis
        self._images[:, : self.width] = self.product(basis)
        self._matrix[:, : self.width, : self.width] = inner(self.rows, self.images)
        self.products += 1

    def beside(self, block: Tensor) -> Tensor:
        """The parts of rows that are orthogonal to the space, up to rounding."""
        if not self.width:
            return block
        return torch.baddbmm(block, inner(block, self.rows), self.rows, alpha=-1)

    def _orthonormal(self, block: Tensor) -> Tensor:
        """Orthonormalise rows that are orthogonal to the space."""
        eps = torch.finfo(block.dtype).eps
        # If the space is invariant, the rows are rounding error: replace them by pseudorandom rows.
        block = self._replaced(block, long_norm(block) <= ROUNDED * eps * self.reach, 0)
        block = self._unit(self.beside(block))
        if block.shape[-1] > _SMALL:
            return block
        # For small n the rows may be rounding error even then.
        left = self.beside(block)
        return self._unit(self.beside(self._replaced(left, long_norm(left) <= eps**0.5, 1)))

    def _replaced(self, block: Tensor, gone: Tensor, attempt: int) -> Tensor:
        """Pseudorandom rows in place of those of a mask `(B, p)`."""
        n, p = block.shape[-1], block.shape[1]
        # Pieces of one long pseudorandom row, of which there are many at no cost.
        row = fixed_rows(n + _SPARES, block.dtype, block.device)[0]
        at = (self.width + 97 * attempt) % (_SPARES - p + 1)
        return torch.where(gone.unsqueeze(-1), row[at : at + n + p - 1].unfold(0, n, 1), block)

    def _unit(self, block: Tensor) -> Tensor:
        block = block / one_if_zero(long_norm(block)).unsqueeze(-1)
        return block if block.shape[1] == 1 else torch.linalg.qr(block.mT).Q.mT


# Up to this n a space may become the whole space, and a third projection takes little time.
_SMALL = 1000
# Number of rows that can replace those of an invariant space.
_SPARES = 512
