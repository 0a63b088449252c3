"""The inner product `xᵀMy` of a positive definite matrix that is known by its products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pmaf.linalg.decompositions import cholesky
from pmaf.linalg.products import dot, inner, long_norm, one_if_zero
from pmaf.linalg.roundings import power_of_two

Product = Callable[[Tensor], Tensor]


def all_true(done: Tensor) -> bool:
    return bool(done.all())


class Metric:
    """The inner product `xᵀMy` of rows `(B, p, n)`.

    A residual `Ay − λMy` is not a vector but a linear function of vectors, as a gradient is. Its
    length is that of the vector `M⁻¹(Ay − λMy)`. So `dual` and `raised` lead from vectors to
    functions and back. Only the directions that a search takes depend on the errors of `raised`.

    Args:
        product: `M` times rows.
        inverse: `M⁻¹` times rows, for rows and the relative residual to solve them up to.
        refuse: raises the error of an `M` that is not positive definite, for a mask `(B,)`.
        agreed: whether all entries of a mask are true, as every rank sees it.
    """

    def __init__(
        self,
        product: Product,
        inverse: Callable[[Tensor, float], Tensor],
        refuse: Callable[[Tensor], None],
        agreed: Callable[[Tensor], bool] = all_true,
    ) -> None:
        self.product, self.inverse, self.refuse = product, inverse, refuse
        self.agreed = agreed
        # How much longer the rounding errors of a product are, as functions, than its result,
        # `(B,)`; and the size of a product, `(B, 1, 1)`, relative to its factor: both for arbitrary
        # vectors.
        self.rounding: Tensor | float = 1.0
        self.size: Tensor | float = 1.0

    def roundings(self, rows: Tensor, signs: Tensor) -> Tensor:
        """How long the rounding errors of products with rows of unit length are, `(B, p)`.

        The terms of a product with a smooth vector cancel, and their errors do not: these are
        relative to `‖M‖·|y|`, and their signs are arbitrary.
        """
        noise = self.size * signs.sign() * rows
        return self.length(self.raised(noise), noise)

    def dual(self, rows: Tensor) -> Tensor:
        return self.product(rows)

    def raised(self, duals: Tensor) -> Tensor:
        """`M⁻¹` times rows, as exact as the direction of a search has to be."""
        return self.inverse(duals, _DIRECTION)

    def raised_well(self, duals: Tensor) -> Tensor:
        """`M⁻¹` times rows, up to `√eps`."""
        return self.inverse(duals, min(_DIRECTION, torch.finfo(duals.dtype).eps ** 0.5))

    def length(self, rows: Tensor, duals: Tensor) -> Tensor:
        """The lengths `(B, p)` of vectors, given as vectors and as functions."""
        square = dot(rows, duals)
        negative = square < 0
        if not self.agreed(~negative):
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
        super().__init__(lambda rows: rows, lambda duals, error: duals, lambda bad: None)

    def length(self, rows: Tensor, duals: Tensor) -> Tensor:
        return long_norm(rows)

    def unit(self, rows: Tensor) -> Tensor:
        if rows.shape[1] == 1:
            return rows / one_if_zero(long_norm(rows)).unsqueeze(-1)
        return torch.linalg.qr(rows.mT).Q.mT


EUCLIDEAN = _Euclidean()


# Relative residual of the directions of a search. For 1e-8 a search takes as many products with `A`
# as for 1e-4, and twice as many products with `M`.
_DIRECTION = 1e-4
# Limit on the products of one solve.
_PRODUCTS = 10_000


class ConjugateGradients:
    """`M⁻¹` times rows by products with `M`.

    Args:
        product: `M` times rows `(B, p, n)`.
        diagonal: `(B, 1, n)`, that of `M` if it is known; the system is scaled by it.
        refuse: raises the error of an `M` that is not positive definite, for a mask `(B,)`.
        give_up: raises the error of a system that this number of products has not solved.
        agreed: whether all entries of a mask are true, as every rank sees it.
    """

    def __init__(
        self,
        product: Product,
        diagonal: Tensor | None,
        refuse: Callable[[Tensor], None],
        give_up: Callable[[int], None],
        agreed: Callable[[Tensor], bool] = all_true,
    ) -> None:
        self.product, self.diagonal = product, diagonal
        self.refuse, self.give_up, self.agreed = refuse, give_up, agreed

    def __call__(self, right: Tensor, error: float) -> Tensor:
        # In these units no square over- or underflows.
        unit = power_of_two(right.abs().amax(-1, keepdim=True))
        rest = right / unit
        size = error * long_norm(rest)
        z, near = torch.zeros_like(rest), self._scaled(rest)
        direction, slope = near, dot(rest, near)
        for _ in range(_PRODUCTS):
            moving = long_norm(rest) > size
            if self.agreed(~moving):
                return unit * z
            image = self.product(direction)
            curvature = dot(direction, image)
            negative = moving & (curvature <= 0)
            if not self.agreed(~negative):
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
