"""The inner product `xᵀMy` of a positive definite matrix that is known by its products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pmaf.linalg.decompositions import cholesky
from pmaf.linalg.products import dot, inner, long_norm, one_if_zero
from pmaf.linalg.roundings import power_of_two

Product = Callable[[Tensor], Tensor]


class Metric:
    """The inner product `xᵀMy` of rows `(B, p, n)`.

    A residual `Ay − λMy` is not a vector but a linear function of vectors, as a gradient is. Its
    length is that of the vector `M⁻¹(Ay − λMy)`. So `dual` and `raised` lead from vectors to
    functions and back. Only the directions that a search takes depend on the errors of `raised`.

    Args:
        product: `M` times rows.
        inverse: `M⁻¹` times rows, of which a few digits are right.
        refuse: raises the error of an `M` that is not positive definite, for a mask `(B,)`.
    """

    def __init__(
        self, product: Product, inverse: Product, refuse: Callable[[Tensor], None]
    ) -> None:
        self.product, self.inverse, self.refuse = product, inverse, refuse
        # How much longer the rounding errors of a product are, as functions, than its result.
        self.rounding = 1.0

    def dual(self, rows: Tensor) -> Tensor:
        return self.product(rows)

    def raised(self, duals: Tensor) -> Tensor:
        return self.inverse(duals)

    def length(self, rows: Tensor, duals: Tensor) -> Tensor:
        """The lengths `(B, p)` of vectors, given as vectors and as functions."""
        square = dot(rows, duals)
        negative = square < 0
        if negative.any():
            self.refuse(negative.any(-1))
        return square.sqrt()

    def unit(self, rows: Tensor) -> Tensor:
        """Orthonormal rows of the same span."""
        if rows.shape[1] == 1:
            return rows / one_if_zero(self.length(rows, self.dual(rows))).unsqueeze(-1)
        # An orthonormal basis first: the matrix of its products has at most the condition of M.
        basis = torch.linalg.qr(rows.mT).Q.mT
        root, info = cholesky(inner(basis, self.dual(basis)))
        if info.any():
            self.refuse(info > 0)
        return torch.linalg.solve_triangular(root, basis, upper=False)


class _Euclidean(Metric):
    """The inner product `xᵀy`, in which vectors and functions are the same."""

    def __init__(self) -> None:
        super().__init__(lambda rows: rows, lambda duals: duals, lambda bad: None)

    def length(self, rows: Tensor, duals: Tensor) -> Tensor:
        return long_norm(rows)

    def unit(self, rows: Tensor) -> Tensor:
        if rows.shape[1] == 1:
            return rows / one_if_zero(long_norm(rows)).unsqueeze(-1)
        return torch.linalg.qr(rows.mT).Q.mT


EUCLIDEAN = _Euclidean()


# Relative residual at which conjugate gradients stop. A search takes as many products with `A` for
# 1e-8 as for 1e-4, and half as many products with `M` for the latter.
_SOLVED = 1e-4
# Limit on the products of one solve.
_PRODUCTS = 10_000


class ConjugateGradients:
    """`M⁻¹` times rows by products with `M`, up to a residual of 1e-4 in each row.

    Args:
        product: `M` times rows `(B, p, n)`.
        diagonal: `(B, 1, n)`, that of `M` if it is known; the system is scaled by it.
        refuse: raises the error of an `M` that is not positive definite, for a mask `(B,)`.
        give_up: raises the error of a system that this number of products has not solved.
    """

    def __init__(
        self,
        product: Product,
        diagonal: Tensor | None,
        refuse: Callable[[Tensor], None],
        give_up: Callable[[int], None],
    ) -> None:
        self.product, self.diagonal = product, diagonal
        self.refuse, self.give_up = refuse, give_up

    def __call__(self, right: Tensor) -> Tensor:
        # In these units no square over- or underflows.
        unit = power_of_two(right.abs().amax(-1, keepdim=True))
        rest = right / unit
        size = _SOLVED * long_norm(rest)
        z, near = torch.zeros_like(rest), self._scaled(rest)
        direction, slope = near, dot(rest, near)
        for _ in range(_PRODUCTS):
            moving = long_norm(rest) > size
            if not moving.any():
                return unit * z
            image = self.product(direction)
            curvature = dot(direction, image)
            negative = moving & (curvature <= 0)
            if negative.any():
                self.refuse(negative.any(-1))
            step = torch.where(moving, slope / one_if_zero(curvature), 0).unsqueeze(-1)
            z, rest = z + step * direction, rest - step * image
            near = self._scaled(rest)
            following = dot(rest, near)
            direction = near + (following / one_if_zero(slope)).unsqueeze(-1) * direction
            slope = following
        self.give_up(_PRODUCTS)
        return unit * z

    def _scaled(self, rest: Tensor) -> Tensor:
        return rest if self.diagonal is None else rest / self.diagonal
