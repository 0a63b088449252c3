"""Eigenvectors of Hermitian matrices and pairs from all of them, and their derivatives.

Rows `(*, n, n)` are all eigenvectors, and values `(*, n)` all eigenvalues in ascending order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.linalg import sphere
from pmaf.linalg.decompositions import cholesky, eigh
from pmaf.linalg.products import norm
from pmaf.linalg.roundings import SETTLED, merge_tolerance, noise_tolerance, square_range
from pmaf.straight.evidence import Evidence, where_proved
from pmaf.straight.form import Form


class Vectors(NamedTuple):
    """The requested eigenvectors as rows, the requested end first, and all of them."""

    rows: Tensor  # (*, k, n)
    values: Tensor  # (*, k)
    every_row: Tensor
    every_value: Tensor
    evidence: Evidence


def of_matrix(A: Tensor, form: Form) -> Vectors:
    """Eigenvectors of the Hermitian part of each matrix."""
    doubled, vectors = eigh(A + A.mH)
    values, every = 0.5 * doubled, vectors.mT
    rows, found = end(every, values, form)
    numbers = torch.linalg.vector_norm(values, math.inf, -1)
    if form.signed:
        factor, known = factors(rows)
        rows = rows * factor
        numbers = numbers if known is None else where_proved(known, numbers)
    # Where squares leave the range, the derivative may, and another way changes units.
    return Vectors(rows, found, every, values, Evidence(numbers, *square_range(values.dtype)))


def of_pair(A: Tensor, M: Tensor, form: Form) -> Vectors:
    """Eigenvectors of each pair `Ay = λMy` with `yᴴMy = 1`, of which every row has that length.

    They are proved by the residuals of all eigenvectors in the given variables, since the
    derivative uses all: where `M` is too ill-conditioned for its factor, the evidence fails.
    Lengths and products in `M` have rounding errors of `M` alone.
    """
    A, M = A + A.mH, M + M.mH
    lower, info = cholesky(M)
    half = torch.linalg.solve_triangular(lower, A, upper=False)
    values, vectors = eigh(torch.linalg.solve_triangular(lower, half.mH, upper=False))
    # Lengths are those in M, of which there is the double.
    vectors = math.sqrt(2) * torch.linalg.solve_triangular(lower.mH, vectors, upper=True)
    every = vectors.mT
    rows, found = end(every, values, form)
    column = values.unsqueeze(-1).to(every.dtype)
    rest = norm(torch.addcmul(every @ A.mT, column, every @ M.mT, value=-1))
    size, mass = (torch.linalg.matrix_norm(x).unsqueeze(-1) for x in (A, M))
    numbers = rest / (torch.addcmul(size, values.abs(), mass) * norm(every))
    proved = (info.unsqueeze(-1) == 0) & (mass < math.inf)
    if form.signed:
        factor, known = factors(rows, norm(rows))
        rows = rows * factor
        proved = proved if known is None else proved & known.unsqueeze(-1)
    limit = SETTLED * torch.finfo(values.dtype).eps
    return Vectors(rows, found, every, values, Evidence(where_proved(proved, numbers), 0, limit))


def end(rows: Tensor, values: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """The rows and values of the requested end, that end first, as new tensors."""
    found = form.end(values)
    if form.k == 1 or not form.largest:
        found = found.clone()
    return form.end(rows.mT).mT, found


def factors(rows: Tensor, length: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """What makes the sums of components of rows positive, `(*, k, 1)`.

    Beside it, for complex rows, is a mask of the entries `(*,)` where these sums are not rounding.

    Args:
        length: of the rows, `(*, k)`, if they are no unit vectors.
    """
    if not rows.is_complex():
        unit = rows if length is None else rows / length.unsqueeze(-1)
        return sphere.signs(unit).unsqueeze(-1), None
    total = rows.sum(-1)
    size = total.abs()
    least = merge_tolerance(rows.dtype) * rows.shape[-1] ** 0.5
    known = size > (least if length is None else least * length)
    return (total.conj() / size).unsqueeze(-1), known.all(-1)


def turned(v: Tensor, rows: Tensor) -> Tensor:
    """Incoming gradients of complex rows whose phases make the sums of their components positive.

    A change of a row changes its phase, and by that the loss: the sum of the components stays real.
    """
    along = (v.conj() * rows).sum(-1, keepdim=True).imag
    turn = along / rows.sum(-1, keepdim=True).real
    return v + torch.complex(torch.zeros_like(turn), turn)


def pull_matrix(
    rows: Tensor,
    values: Tensor,
    every_row: Tensor,
    every_value: Tensor,
    v: Tensor | None,
    d_values: Tensor | None,
    form: Form,
) -> tuple[Tensor]:
    """The gradient of the matrix, given those of rows and of values.

    With all eigenvectors `yᵢ`, `zⱼ = Σ yᵢ yᵢᴴvⱼ/(λⱼ − λᵢ)` over all eigenvalues that are not equal
    to `λⱼ`, and the gradient is the Hermitian part of `Σ (zⱼ + ∂L/∂λⱼ yⱼ) yⱼᴴ`.
    """
    z = None
    if v is not None:
        z = _coupled(v, rows, values, every_row, every_value, form)[0]
    z = _with_values(z, d_values, rows)
    product = z.mT @ rows.conj()
    return (0.5 * (product + product.mH),)


def pull_pair(
    rows: Tensor,
    values: Tensor,
    every_row: Tensor,
    every_value: Tensor,
    v: Tensor | None,
    d_values: Tensor | None,
    form: Form,
) -> tuple[Tensor, Tensor]:
    """The gradients of `A` and `M`, given those of rows and of values.

    That of `A` is the one of a matrix. As `(A − λM)y = 0`, that of `M` is the Hermitian part of
    `−Σ λⱼ (zⱼ + ∂L/∂λⱼ yⱼ) yⱼᴴ`, less half of `Σ yᵢ Nᵢⱼ yⱼᴴ` with the Hermitian part `N` of the
    products `yᵢᴴvⱼ` of requested vectors: lengths and products of these in `M` are fixed.
    """
    z = normal = None
    if v is not None:
        z, among = _coupled(v, rows, values, every_row, every_value, form)
        normal = 0.5 * (among + among.mH)
    z = _with_values(z, d_values, rows)
    side = -values.unsqueeze(-1) * z
    if normal is not None:
        side = side - 0.5 * normal @ rows
    both = torch.stack([z, side], -3).mT @ rows.conj().unsqueeze(-3)
    whole = 0.5 * (both + both.mH)
    dA, dM = whole.unbind(-3)
    return dA, dM


def _coupled(
    v: Tensor,
    rows: Tensor,
    values: Tensor,
    every_row: Tensor,
    every_value: Tensor,
    form: Form,
) -> tuple[Tensor, Tensor]:
    """`Σ yᵢ yᵢᴴvⱼ/(λⱼ − λᵢ)`, and the products `yᵢᴴvⱼ` of the requested vectors, `(*, k, k)`.

    Only the skew-Hermitian part of the latter couples two vectors: quotients of the other one
    cancel, and would leave their rounding errors where eigenvalues nearly repeat. For a function of
    the span of the vectors the skew part is zero, so that its rounding is, too.
    """
    difference = _differences(values, every_value)
    inside, among = v @ every_row.mH, v @ rows.mH
    if form.k == 1:
        return (inside / difference) @ every_row, among
    form.of(inside).zero_()
    # A bound of the lengths of v, whose squares may overflow.
    turn, noise = 0.5 * (among - among.mH), noise_tolerance(v.dtype) * v.shape[-1] ** 0.5
    length = noise * torch.linalg.vector_norm(v, math.inf, -1)
    size = torch.maximum(length.unsqueeze(-1), length.unsqueeze(-2)) * norm(rows).unsqueeze(-2)
    turn = turn * (turn.abs() > size)
    z = (inside / difference) @ every_row + (turn / form.end(difference)) @ rows
    return z, among


def _differences(values: Tensor, every_value: Tensor) -> Tensor:
    """`λⱼ − λᵢ`, `(*, k, n)`, infinite where the two are equal, so that there is no coupling."""
    difference = values.unsqueeze(-1) - every_value.unsqueeze(-2)
    top = torch.linalg.vector_norm(every_value, math.inf, -1, keepdim=True).unsqueeze(-1)
    equal = difference.abs() <= merge_tolerance(every_value.dtype) * top
    return difference.masked_fill_(equal, math.inf)


def _with_values(z: Tensor | None, d_values: Tensor | None, rows: Tensor) -> Tensor:
    if d_values is None:
        assert z is not None
        return z
    along = d_values.unsqueeze(-1) * rows
    return along if z is None else z + along
