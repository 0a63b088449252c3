"""Singular vectors and triplets from one batched decomposition, and their derivatives.

In float64 the Gram matrix of numbers that float32 holds loses nothing. Small matrices of other
numbers are decomposed themselves, as there are batched kernels for that. For large ones a step
takes the residual from `A` itself, and the length of that step proves the result: it is about the
relative error of the Gram matrix where it matters. Rows are all right singular vectors,
`(*, n, n)`, and squares those of all singular values, `(*, n)`, in ascending order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.gradients.singular import pulled
from pmaf.linalg.decompositions import eigh
from pmaf.linalg.products import norm
from pmaf.linalg.roundings import LOOSE, square_range
from pmaf.linalg.singular import accuracy, rooted, singular_basis
from pmaf.straight.eigenvectors import end, factors
from pmaf.straight.evidence import Evidence, where_proved
from pmaf.straight.form import Form

# The most rows and columns of matrices that cuSOLVER decomposes into singular vectors all together;
# larger ones it takes one after the other.
BATCHED_SVD = 32
# Of a smaller singular value, relative to the largest, `Av/σ` has too few digits.
SMALL = 1e-3


class Right(NamedTuple):
    """The requested right singular vectors as rows, the requested end first, and all of them."""

    rows: Tensor  # (*, k, n)
    values: Tensor  # (*, k)
    every_row: Tensor
    every_value: Tensor  # (*, n), singular values, not their squares
    evidence: Evidence


class Both(NamedTuple):
    """The same with left vectors, `(*, k, m)`."""

    rows: Tensor
    values: Tensor
    left: Tensor
    every_row: Tensor
    every_value: Tensor
    evidence: Evidence


def right_vectors(A: Tensor, weights: Tensor | None, form: Form) -> Right:
    """k right singular vectors of `√W A`."""
    single = form.single
    # A weight below zero makes nan of everything.
    root, proved = rooted(A, weights), None
    exact = not single and max(A.shape[-2:]) <= BATCHED_SVD
    if exact:
        every, values = (x.flip(-1 - i) for i, x in zip((1, 0), singular_basis(root)))
    else:
        squares, vectors = eigh(root.mH @ root)
        # Squares of zero are rounding, which may be negative.
        every, values = vectors.mT, squares.clamp_min(0).sqrt()
    rows, found = end(every, values, form)
    numbers = values[..., -1]
    if not (single or exact):
        rows, found, proved = _refined(root, rows, every, values, form)
    if form.signed and not form.by_left:
        factor, known = factors(rows)
        rows = rows * factor
        if known is not None:
            proved = known if proved is None else proved & known
    if form.apart:
        distance = form.end(values).diff(dim=-1).abs()
        several = (distance > accuracy(values.dtype, single) * values[..., -1:]).all(-1)
        proved = several if proved is None else proved & several
    if proved is not None:
        numbers = where_proved(proved, numbers)
    return Right(rows, found, every, values, Evidence(numbers, *square_range(values.dtype)))


def _refined(
    A: Tensor, rows: Tensor, every: Tensor, values: Tensor, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and values after one step towards singular vectors of `A`, and where it is small."""
    image = (rows @ A.mT) @ A.conj()
    step = (image @ every.mH / _rises(values, form)) @ every
    rows = rows + step
    rows = rows / norm(rows).unsqueeze(-1)
    small = (norm(step) <= LOOSE * torch.finfo(values.dtype).eps).all(-1)
    return rows, norm(rows @ A.mT), small


def _rises(values: Tensor, form: Form) -> Tensor:
    """`σⱼ² − σᵢ²`, `(*, k, n)`, infinite where the two are equal, so that there is no coupling.

    Both are those of the decomposition, so that each value is equal to itself.
    """
    one, other = form.end(values).unsqueeze(-1), values.unsqueeze(-2)
    difference = one - other
    equal = difference.abs() <= accuracy(values.dtype, form.single) * values[..., -1:].unsqueeze(-1)
    return (difference * (one + other)).masked_fill_(equal, math.inf)


def pull_right(
    tensors: Sequence[Tensor],
    rows: Tensor,
    every_row: Tensor,
    every_value: Tensor,
    v: Tensor,
    form: Form,
    needs: Sequence[bool],
) -> Sequence[Tensor | None]:
    """The gradients of `A`, and of weights if there are any, given that of rows."""
    z = (v @ every_row.mH / _rises(every_value, form)) @ every_row
    return pulled(z, rows, tuple(tensors), needs)


def triplets(A: Tensor, form: Form) -> Both:
    """k singular triplets of a matrix with at least as many rows as columns."""
    found = right_vectors(A, None, form)
    rows = found.rows
    images = rows @ A.mT
    values = norm(images)
    left = images / values.unsqueeze(-1)
    # Of a smaller singular value the image has too few digits for a left vector.
    numbers = values / found.every_value[..., -1:]
    if form.signed and form.by_left:  # both vectors have one sign or phase
        factor, known = factors(left)
        rows, left = rows * factor, left * factor
        numbers = numbers if known is None else where_proved(known.unsqueeze(-1), numbers)
    before = found.evidence
    if not form.single:  # squares may leave the range
        numbers = numbers + before.marks(before.numbers.dim()).unsqueeze(-1)
    elif form.apart or A.is_complex():  # what is not proved is infinite
        numbers = numbers * (before.numbers / before.numbers).unsqueeze(-1)
    evidence = Evidence(numbers, SMALL, zero=False)
    return Both(rows, values, left, found.every_row, found.every_value, evidence)


def pull_triplets(
    A: Tensor,
    found: tuple[Tensor, Tensor, Tensor],
    every: tuple[Tensor, Tensor],
    incoming: Sequence[Tensor | None],
    form: Form,
) -> Tensor:
    """The gradient of `A`, given those of right vectors, values and left vectors, all as rows.

    With the part `h` of the gradient of `u` that is orthogonal to `u`, `g = g_v + Aᴴh/σ` and
    `(σ²I − AᴴA)z = g`, it is `(Az + h/σ + ∂L/∂σ u)vᴴ + σu zᴴ`.
    """
    (right, values, left), (g, d_values, g_left) = found, incoming
    column = values.unsqueeze(-1)
    side = None if d_values is None else d_values.unsqueeze(-1).to(left.dtype)
    if A.is_complex():
        fixed = left if form.by_left else right
        pairs = ((x, y) for x, y in ((g, right), (g_left, left)) if x is not None)
        along = sum((x.conj() * y).sum(-1, keepdim=True).imag for x, y in pairs)
        if isinstance(along, Tensor):
            turn = along / fixed.sum(-1, keepdim=True).real
            turn = torch.complex(torch.zeros_like(turn), turn)
            if form.by_left:
                g_left = turn if g_left is None else g_left + turn
                g_left = g_left.expand_as(left)
            else:
                g = turn.expand_as(right) if g is None else g + turn
    if g_left is not None:
        along = (g_left.conj() * left).real.sum(-1, keepdim=True)
        h = torch.addcmul(g_left, along.to(left.dtype), left, value=-1) / column
        side = h if side is None else torch.addcmul(h, side, left)
        back = h @ A.conj()
        g = back if g is None else g + back
    elif side is not None:
        side = side * left
    if g is None:
        assert side is not None
        return side.mT @ right.conj()
    every_row, every_value = every
    z = (g @ every_row.mH / _rises(every_value, form)) @ every_row
    rows = z @ A.mT
    rows = rows if side is None else rows + side
    return torch.cat([rows, column * left], -2).mT @ torch.cat([right, z], -2).conj()
