"""Subspaces that grow by products with a matrix.

A space has orthonormal rows `(B, j, n)`, their images under a linear map, and the map restricted to
the space, a matrix `(B, j, j)`. The problem restricted to the space is small, and the space grows
by the residual of its solution. From one vector this gives the Krylov space of Lanczos and Arnoldi.
A full space is reduced to its best vectors.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.linalg.products import inner, long_norm, one_if_zero
from pmaf.linalg.roundings import ROUNDED
from pmaf.linalg.symmetric_part import fixed_rows
from pmaf.tangent.metric import Metric
from pmaf.tangent.residuals import Product


class Combined(NamedTuple):
    """Combinations of the rows of a space."""

    rows: Tensor
    duals: Tensor  # M times the rows, if the space has a metric
    images: Tensor


# Up to this n a space may become the whole space, and a third projection takes little time.
_SMALL = 1000


class Space:
    """Orthonormal rows, their images, and the restricted map as a small matrix."""

    small: float = _SMALL

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
        self._put(old, block, image)
        column = inner(self.rows, image)
        self._matrix[:, : self.width, old : self.width] = column
        if self.symmetric:
            self._matrix[:, old : self.width, : self.width] = column.mT
        elif old:
            self._matrix[:, old : self.width, :old] = inner(block, self._images[:, :old])
        return self._outside(image, column)

    def _put(self, old: int, block: Tensor, image: Tensor) -> None:
        self._rows[:, old : self.width] = block
        self._images[:, old : self.width] = image

    def _outside(self, image: Tensor, column: Tensor) -> Tensor:
        """The part of an image that is orthogonal to the space; `column` has its other part."""
        self.reach = torch.maximum(self.reach, long_norm(image).amax(-1, keepdim=True))
        return torch.baddbmm(image, column.mT, self.rows, alpha=-1)

    def combined(self, coefficients: Tensor) -> Combined:
        """Combinations of the rows, with coefficients `(B, w, j)`."""
        rows = coefficients.bmm(self.rows)
        return Combined(rows, rows, coefficients.bmm(self.images))

    def raised(self, rest: Tensor) -> Tensor:
        """The directions of residuals, by which the space grows."""
        return rest

    def length(self, rows: Tensor, duals: Tensor | None = None) -> Tensor:
        """Lengths `(B, p)` of rows; `duals` are the residuals whose directions the rows are."""
        return long_norm(rows)

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
        basis = self._orthonormalised(self.rows)
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
        block = self._replaced(block, self.length(block) <= ROUNDED * eps * self.reach, 0)
        block = self._unit(self.beside(block))
        if block.shape[-1] > self.small:
            return block
        # For small n the rows may be rounding error even then.
        left = self.beside(block)
        return self._unit(self.beside(self._replaced(left, self.length(left) <= eps**0.5, 1)))

    def _replaced(self, block: Tensor, gone: Tensor, attempt: int) -> Tensor:
        """Pseudorandom rows in place of those of a mask `(B, p)`."""
        n, p = block.shape[-1], block.shape[1]
        # Pieces of one long pseudorandom row, of which there are many at no cost.
        row = fixed_rows[n + _SPARES, block.dtype, block.device][0]
        at = (self.width + 97 * attempt) % (_SPARES - p + 1)
        return torch.where(gone.unsqueeze(-1), row[at : at + n + p - 1].unfold(0, n, 1), block)

    def _unit(self, block: Tensor) -> Tensor:
        block = block / one_if_zero(long_norm(block)).unsqueeze(-1)
        return block if block.shape[1] == 1 else self._orthonormalised(block)

    def _orthonormalised(self, rows: Tensor) -> Tensor:
        return torch.linalg.qr(rows.mT).Q.mT


class MetricSpace(Space):
    """A space whose rows are orthonormal in a metric `M`, for the map `M⁻¹A`.

    The images are products with `A` alone, and the restricted map is exact: the errors of solves
    with `M` change the directions by which the space grows, and not what is found in it.
    """

    # Directions from inexact solves are never orthogonal to the space.
    small = math.inf

    def __init__(self, product: Product, start: Tensor, size: int, metric: Metric) -> None:
        super().__init__(product, start, size, True)
        self.metric = metric
        self._duals = torch.empty_like(self._rows)

    @property
    def duals(self) -> Tensor:
        """`M` times the rows."""
        return self._duals[:, : self.width]

    def _put(self, old: int, block: Tensor, image: Tensor) -> None:
        super()._put(old, block, image)
        self._duals[:, old : self.width] = self.metric.dual(block)

    def _outside(self, image: Tensor, column: Tensor) -> Tensor:
        rest = torch.baddbmm(image, column.mT, self.duals, alpha=-1)
        raised = self.raised(rest)
        # The image has two parts that are orthogonal to each other.
        length = torch.hypot(long_norm(column.mT), self.length(raised, rest))
        self.reach = torch.maximum(self.reach, length.amax(-1, keepdim=True))
        return raised

    def combined(self, coefficients: Tensor) -> Combined:
        images = coefficients.bmm(self.images)
        return Combined(coefficients.bmm(self.rows), coefficients.bmm(self.duals), images)

    def raised(self, rest: Tensor) -> Tensor:
        return self.metric.raised(rest)

    def length(self, rows: Tensor, duals: Tensor | None = None) -> Tensor:
        return self.metric.length(rows, self.metric.dual(rows) if duals is None else duals)

    def keep(self, coefficients: Tensor) -> None:
        duals = coefficients.bmm(self.duals)
        super().keep(coefficients)
        self._duals[:, : self.width] = duals

    def refresh(self) -> None:
        super().refresh()
        self._duals[:, : self.width] = self.metric.dual(self.rows)

    def beside(self, block: Tensor) -> Tensor:
        if not self.width:
            return block
        return torch.baddbmm(block, inner(block, self.duals), self.rows, alpha=-1)

    def _unit(self, block: Tensor) -> Tensor:
        return self.metric.unit(block / one_if_zero(long_norm(block)).unsqueeze(-1))

    def _orthonormalised(self, rows: Tensor) -> Tensor:
        return self.metric.unit(rows)


# Number of rows that can replace those of an invariant space.
_SPARES = 512
