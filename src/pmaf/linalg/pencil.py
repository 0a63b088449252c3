"""A pair of symmetric matrices in its own variables, in which there are no errors of a factor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.linalg.decompositions import cholesky, eigh
from pmaf.linalg.products import norm, one_if_zero, symmetric_part


class Pencil(NamedTuple):
    """The symmetric parts of `A` and `M`, and the residuals of eigenpairs."""

    A: Tensor  # (*, n, n)
    M: Tensor  # (*, n, n), or its diagonal, (*, n)
    diagonal: bool

    @classmethod
    def of(cls, A: Tensor, M: Tensor, diagonal: bool) -> Pencil:
        """The pencil of the symmetric parts."""
        return cls(symmetric_part(A), M if diagonal else symmetric_part(M), diagonal)

    @property
    def eps(self) -> float:
        return torch.finfo(self.A.dtype).eps

    def dual(self, rows: Tensor) -> Tensor:
        """The products of rows `(*, k, n)` with `M`."""
        return rows * self.M.unsqueeze(-2) if self.diagonal else rows @ self.M

    @property
    def size(self) -> Tensor:
        """`‖A‖`, `(*,)`."""
        return torch.linalg.matrix_norm(self.A)

    @property
    def mass(self) -> Tensor:
        """`‖M‖`, `(*,)`."""
        return norm(self.M) if self.diagonal else torch.linalg.matrix_norm(self.M)

    def sizes(self, rows: Tensor, values: Tensor) -> Tensor:
        """`(‖A‖ + |λ|‖M‖)‖y‖` of rows `(*, k, n)`, to which rounding of `Ay − λMy` is relative."""
        size, mass = self.size.unsqueeze(-1), self.mass.unsqueeze(-1)
        return (size + values.abs() * mass) * norm(rows)

    def errors(self, rows: Tensor, values: Tensor) -> Tensor:
        """The backward errors of eigenpairs in units of eps, `(*, k)`."""
        rest = norm(rows @ self.A - values.unsqueeze(-1) * self.dual(rows))
        return rest / (self.eps * one_if_zero(self.sizes(rows, values)))

    def skewness(self, rows: Tensor) -> Tensor:
        """How far `YMYᵀ` is from the identity, in units of eps, `(*,)`.

        Rounding of `yᵀMx` is relative to `‖M‖‖y‖‖x‖`. For unit vectors in `M` that is between one
        and the condition of `M`.
        """
        lengths = norm(rows)
        sizes = self.mass[..., None, None] * lengths.unsqueeze(-1) * lengths.unsqueeze(-2)
        eye = torch.eye(rows.shape[-2], dtype=rows.dtype, device=rows.device)
        excess = (self.dual(rows) @ rows.mT - eye).abs()
        return (excess / (self.eps * one_if_zero(sizes))).amax((-2, -1))

    def roundings(self, rows: Tensor, values: Tensor) -> Tensor:
        """`(‖A‖ + |λ|‖M‖)‖y‖²`, to which rounding of eigenvalues is relative, `(*, k)`."""
        return self.sizes(rows, values) * norm(rows)

    def are_near(self, values: Tensor) -> Tensor:
        """Which eigenvalues differ by at most half of the larger one, or of `‖A‖/‖M‖`, `(*, k, k)`.

        Rounding errors of vectors of these do not matter for each other.
        """
        one, other = values.unsqueeze(-1), values.unsqueeze(-2)
        least = (self.size / one_if_zero(self.mass))[..., None, None]
        size = torch.maximum(torch.maximum(one.abs(), other.abs()), least)
        return (one - other).abs() <= 0.5 * size


class Root(NamedTuple):
    """The change of variables `x = Tᵀy` with `M = TTᵀ`, for rows `(*, k, n)`."""

    inverse: Tensor  # T⁻¹, (*, n, n), or its diagonal, (*, n)
    diagonal: bool

    def back(self, x: Tensor) -> Tensor:
        """`y = T⁻ᵀx`."""
        return x * self.inverse.unsqueeze(-2) if self.diagonal else x @ self.inverse

    def turned(self, v: Tensor) -> Tensor:
        """`T⁻¹v`, for the products with `A` or `M`, and for gradients."""
        return v * self.inverse.unsqueeze(-2) if self.diagonal else v @ self.inverse.mT

    def reduced(self, A: Tensor) -> Tensor:
        """`C = T⁻¹AT⁻ᵀ`, of the symmetric part."""
        return symmetric_part(self.turned(self.turned(symmetric_part(A)).mT))


def rayleigh_ritz(rows: Tensor, image: Tensor, dual: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenvectors of a pair in the span of rows `(*, k, n)`, the largest value first.

    `image` and `dual` are the products of the rows with `A` and with `M`, real or complex.
    """
    lower, _ = cholesky(_hermitian_part(rows.conj() @ dual.mT))
    half = torch.linalg.solve_triangular(
        lower, _hermitian_part(rows.conj() @ image.mT), upper=False
    )
    values, vectors = eigh(
        _hermitian_part(torch.linalg.solve_triangular(lower, half.mH, upper=False))
    )
    turn = torch.linalg.solve_triangular(lower.mH, vectors.flip(-1), upper=True)
    return turn.mT @ rows, values.flip(-1)


def normalised(rows: Tensor, image: Tensor, dual: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of length one in `M`, and their values, by the arguments of `rayleigh_ritz`."""
    values, squares = ((rows.conj() * x).sum(-1).real for x in (image, dual))
    return rows / squares.sqrt().unsqueeze(-1), values / squares


def turned_inside(rows: Tensor, rest: Tensor, dual: Tensor, values: Tensor, near: Tensor) -> Tensor:
    """Rows `(*, k, n)`, turned towards eigenvectors in their span.

    `rest` has their residuals, `dual` the products with `M`, real or complex, and `near` says which
    values are near to each other.

    Residuals make vectors of different values orthogonal, up to `eps(‖A‖/‖M‖ + |λ|)` over the
    difference of the values. For near values that is above rounding of inner products. So inner
    products make their vectors orthogonal, and residuals only turn one towards the other. A unitary
    matrix does that: whatever rounding is in its angles, it changes no inner product. Elsewhere
    products would move a vector of a small value by rounding of vectors of large ones.
    """
    difference = values.unsqueeze(-1) - values.unsqueeze(-2)

    def small(angle: Tensor) -> Tensor:
        """To first order, by how much of each other vectors differ; zero stands for more."""
        known = angle.abs() < 0.1 * difference.abs()
        return torch.where(known, angle / torch.where(known, difference, 1), 0)

    inside, products = rest @ rows.mH, dual @ rows.mH
    eye = torch.eye(values.shape[-1], dtype=rows.dtype, device=rows.device)
    half = 0.5 * torch.where(near, small(_hermitian_part(inside)), 0)
    turn = torch.linalg.solve(eye - half, eye + half)
    excess = torch.where(near, _hermitian_part(products - eye), 0)
    return (turn - 0.5 * excess + torch.where(near, 0, small(inside))) @ rows


def _hermitian_part(A: Tensor) -> Tensor:
    return 0.5 * (A + A.mH)
