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

    def sizes(self, rows: Tensor, values: Tensor) -> Tensor:
        """`(‖A‖ + |λ|‖M‖)‖y‖` of rows `(*, k, n)`, to which rounding of `Ay − λMy` is relative."""
        mass = norm(self.M) if self.diagonal else torch.linalg.matrix_norm(self.M)
        size = torch.linalg.matrix_norm(self.A)
        return (size.unsqueeze(-1) + values.abs() * mass.unsqueeze(-1)) * norm(rows)

    def errors(self, rows: Tensor, values: Tensor) -> Tensor:
        """The backward errors of eigenpairs in units of eps, `(*, k)`."""
        rest = norm(rows @ self.A - values.unsqueeze(-1) * self.dual(rows))
        return rest / (self.eps * one_if_zero(self.sizes(rows, values)))


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
    """Rows of length one in `M`, and their values.

    They are orthogonal because they are eigenvectors. Projections would move a vector of a small
    value by rounding of vectors of large ones.
    """
    values, squares = ((rows.conj() * x).sum(-1).real for x in (image, dual))
    return rows / squares.sqrt().unsqueeze(-1), values / squares


def small_turn(inside: Tensor, values: Tensor) -> Tensor:
    """By how much of each other eigenvectors differ from rows, `(*, k, k)`, to first order.

    `inside` has the products of residuals with the rows. Zero stands for larger turns.
    """
    difference = values.unsqueeze(-1) - values.unsqueeze(-2)
    small = inside.abs() < 0.1 * difference.abs()
    return torch.where(small, inside / torch.where(small, difference, 1), 0)


def are_near(values: Tensor) -> Tensor:
    """Which eigenvalues `(*, k)` differ by at most half of the larger one, `(*, k, k)`."""
    one, other = values.unsqueeze(-1), values.unsqueeze(-2)
    return (one - other).abs() <= 0.5 * torch.maximum(one.abs(), other.abs())


def _hermitian_part(A: Tensor) -> Tensor:
    return 0.5 * (A + A.mH)
