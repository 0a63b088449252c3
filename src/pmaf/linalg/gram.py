"""Eigenvectors and eigenvalues of `AᵀA`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.linalg.decompositions import eigh
from pmaf.linalg.products import rmatvec
from pmaf.linalg.roundings import WITHOUT_DOUBLE, merge_tolerance, merged, rank_tolerance


class Spectrum(NamedTuple):
    """Eigenvectors and eigenvalues of `AᵀA`, measured upwards from the smallest.

    Writing the eigenvalues as `floor + spread` keeps the digits of the small differences that
    decide nearly degenerate problems. When `A` is wide the basis spans its row space only, and all
    other directions have the eigenvalue `floor = 0`.
    """

    basis: Tensor  # (*, p, n) with p = min(m, n); one orthonormal eigenvector a row
    spread: Tensor  # (*, p), none negative; zero throughout the smallest eigenspace
    floor: Tensor  # (*,)
    exact: bool  # whether it comes from A itself, not from a rounded Gram matrix

    @property
    def complete(self) -> bool:
        """Whether the basis spans the whole space."""
        return self.basis.shape[-1] == self.basis.shape[-2]

    @property
    def top(self) -> Tensor:
        """The largest eigenvalue, `(*,)`."""
        return self.floor + self.spread.amax(-1)

    @property
    def trace(self) -> Tensor:
        """The sum of the eigenvalues, `‖A‖²` in the Frobenius norm, `(*,)`."""
        return self.spread.shape[-1] * self.floor + self.spread.sum(-1)


def small_gram(A: Tensor) -> Tensor:
    """The smaller of `AᵀA` and `AAᵀ`."""
    return A.mT @ A if A.shape[-2] >= A.shape[-1] else A @ A.mT


def lower_gram(A: Tensor) -> Tensor:
    """`AᵀA` stored by columns, of which only the lower triangle has a meaning if it is large.

    `cholesky` and `eigh` read no more. Eight block rows save seven sixteenths of the work, and what
    is stored by columns is factored without a copy.
    """
    n = A.shape[-1]
    if n < _BLOCKED:
        return (A.mT @ A).mT
    A = A.reshape(-1, *A.shape[-2:]) if A.dim() != 3 else A
    upper = A.new_empty(len(A), n, n)
    size = -(-n // _BLOCKS)
    for low in range(0, n, size):
        high = min(low + size, n)
        left, right, into = A[..., low:high].mT, A[..., low:], upper[:, low:high, low:]
        if A.is_cpu:
            # One after the other, torch writes each product where it belongs.
            for x, y, z in zip(left, right, into):
                torch.mm(x, y, out=z)
        else:
            into.copy_(left @ right)
    return upper.mT


# Below this size one product is faster than one for each block row.
_BLOCKED, _BLOCKS = 256, 8


def gram_spectrum(A: Tensor, gram: Tensor | None = None) -> Spectrum:
    """The spectrum from the smaller of `AᵀA` and `AAᵀ`: fast, exact to rounding in that matrix."""
    m, n = A.shape[-2:]
    squares, vectors = eigh(small_gram(A) if gram is None else gram)
    tolerance = merge_tolerance(A.dtype)
    if m >= n:
        floor = squares[..., 0].clamp_min(0)
        spread = squares - squares[..., :1]
        return Spectrum(vectors.mT, merged(spread, squares[..., -1:], tolerance), floor, False)
    spread = merged(squares, squares[..., -1:], tolerance)
    lengths = torch.where(spread > 0, spread, torch.ones_like(spread)).sqrt()
    # Null vectors of AAᵀ have no counterpart in the row space: their rows of the basis are zero, so
    # that the complement is not reduced.
    basis = (vectors * ((spread > 0) / lengths).unsqueeze(-2)).mT @ A
    return Spectrum(basis, spread, squares.new_zeros(squares.shape[:-1]), False)


def singular_spectrum(A: Tensor) -> tuple[Spectrum, Tensor, Tensor]:
    """The spectrum from the singular values of `A`: slower, without the rounding of `AᵀA`.

    Returns the left singular vectors `(*, m, p)` and the singular values `(*, p)`, in
    the order of the spectrum, as well.
    """
    m, n = A.shape[-2:]
    left, s, basis = torch.linalg.svd(A, full_matrices=False)
    left, s, basis = left.flip(-1), s.flip(-1), basis.flip(-2)
    top = s[..., -1:]
    s = torch.where(s > rank_tolerance(A.dtype) * top, s, torch.zeros_like(s))
    if m >= n:
        low = s[..., :1]
        rise = merged(s - low, top, merge_tolerance(A.dtype))
        return Spectrum(basis, rise * (s + low), s[..., 0].square(), True), left, s
    basis = basis * (s > 0).unsqueeze(-1)
    return Spectrum(basis, s.square(), s.new_zeros(s.shape[:-1]), True), left, s


def promoted(dtype: torch.dtype, p: int, device: torch.device) -> bool:
    """Whether `AᵀA` or `AAᵀ` of order `p` is better formed and decomposed in float64.

    The square then keeps all digits of `A`, so that no refinement is needed. For small matrices
    this saves more time than float32 does.
    """
    return dtype == torch.float32 and p <= 32 and device.type not in WITHOUT_DOUBLE


def promoted_spectrum(A: Tensor, b: Tensor, gram: Tensor) -> tuple[Spectrum, Tensor]:
    """The result of `singular_spectrum` for a float32 matrix, from its copy in float64.

    Returns the coefficients of `Aᵀb` in the basis as well.
    """
    m, n = A.shape[-2:]
    squares, vectors = eigh(gram)
    s = squares.clamp_min(0).sqrt()
    top = s[..., -1:]
    present = s > rank_tolerance(torch.float32) * top
    # Rounding of a square of zero may be negative, and differences of it may be of any size.
    s, squares = s * present, squares * present
    if m >= n:
        spread = squares - squares[..., :1]
        apart = spread > merge_tolerance(torch.float32) * top * (s + s[..., :1])
        spectrum = Spectrum(vectors.mT, spread * apart, squares[..., 0], True)
        # Aᵀb has no part along a singular vector whose singular value is zero.
        return spectrum, rmatvec(vectors, rmatvec(A, b)) * present
    left = vectors * s.reciprocal().masked_fill(~present, 0).unsqueeze(-2)
    floor = squares.new_zeros(squares.shape[:-1])
    return Spectrum(left.mT @ A, squares, floor, True), rmatvec(vectors, b) * s
