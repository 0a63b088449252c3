"""Batched products that broadcast without copying what is shared.

For an unbatched matrix and many vectors every helper here takes one matrix product, not a batch of
matrix-vector products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling


def matvec(A: Tensor, x: Tensor) -> Tensor:
    """`A x` for `A` of shape `(*, m, n)` and `x` of shape `(*, n)`."""
    if A.dim() == 2:
        return x @ A.mT
    # On the CPU a row times a matrix is several times faster than a matrix times a column.
    return (x.unsqueeze(-2) @ A.mT).squeeze(-2)


def rmatvec(A: Tensor, x: Tensor) -> Tensor:
    """`Aᵀ x` for `A` of shape `(*, m, n)` and `x` of shape `(*, m)`."""
    return matvec(A.mT, x)


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Inner product along the last dimension."""
    return (x * y).sum(-1)


def norm(x: Tensor) -> Tensor:
    """Euclidean norm along the last dimension."""
    return torch.linalg.vector_norm(x, dim=-1)


def long_norm(x: Tensor) -> Tensor:
    """Euclidean norm by `sum`, because torch's norm of a million float32 numbers has five digits.

    On the CPU it is also several times faster for rows of a few dozen numbers.
    """
    return (x * x).sum(-1).sqrt()


def one_if_zero(x: Tensor) -> Tensor:
    """`x`, or one where it is zero: a divisor for quotients that are not used there."""
    return torch.where(x == 0, 1, x)


def inner(x: Tensor, y: Tensor) -> Tensor:
    """Inner products of rows, `(B, p, n)` and `(B, q, n)` to `(B, p, q)`.

    Long rows are summed in blocks, because one sum of a million float32 products loses a digit.
    """
    n = x.shape[-1]
    if n < _LONG:
        return torch.bmm(x, y.mT)
    cut = n // _BLOCK * _BLOCK
    found = x.new_empty(len(x), x.shape[1], y.shape[1])
    for total, a, b in zip(found, x, y):
        left, right = (z[:, :cut].unflatten(-1, (-1, _BLOCK)).movedim(1, 0) for z in (a, b))
        torch.sum(torch.bmm(left, right.mT), 0, out=total)
        total.addmm_(a[:, cut:], b[:, cut:].mT)
    return found


_LONG, _BLOCK = 1 << 16, 1 << 12


def broadcast(first: torch.Size, *others: torch.Size) -> torch.Size:
    """The common shape; `torch.broadcast_shapes` runs only for symbols and to raise its error.

    It is slow, and its first call imports sympy.
    """
    if all(other == first for other in others):
        return first
    shapes = (first, *others)
    if not is_compiling() and all(type(size) is int for shape in shapes for size in shape):
        rank = max(len(shape) for shape in shapes)
        columns = zip(*((1,) * (rank - len(shape)) + tuple(shape) for shape in shapes))
        sizes = [{1, *column} for column in columns]
        if all(len(each) <= 2 for each in sizes):
            return torch.Size(next(iter(each - {1}), 1) for each in sizes)
    return torch.broadcast_shapes(*shapes)


def outer_sum(lefts: Sequence[Tensor], rights: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """`Σ left rightᵀ`, summed over whatever batch dimensions `shape` does not have.

    All terms are one product, so that a rank-two gradient is written to memory once.
    """
    m, n = shape[-2:]
    batch = broadcast(*(x.shape[:-1] for x in (*lefts, *rights)))
    if len(shape) == 2 and batch:
        left = torch.cat([x.expand(*batch, m).reshape(-1, m) for x in lefts])
        right = torch.cat([x.expand(*batch, n).reshape(-1, n) for x in rights])
        return left.mT @ right
    left = torch.stack([x.expand(*batch, m) for x in lefts], -1)
    right = torch.stack([x.expand(*batch, n) for x in rights], -2)
    return (left @ right).sum_to_size(shape)


def frobenius(A: Tensor) -> Tensor:
    """The Frobenius norm `(*, 1, 1)` of matrices of any scale; one for a matrix of zeros."""
    largest = A.abs().amax((-2, -1), keepdim=True)
    unit = torch.where(largest == 0, 1, largest)
    size = torch.linalg.matrix_norm(A / unit, keepdim=True)
    return unit * torch.where(size == 0, 1, size)


def symmetric_part(A: Tensor) -> Tensor:
    """`½(A + Aᴴ)`, exactly `A` if that is symmetric, or Hermitian.

    This is a sum and not an interpolation, whose difference would lose digits or overflow for
    entries of opposite signs.
    """
    return 0.5 * (A + A.mH)


def solve_factored(factor: Tensor, rows: Tensor) -> Tensor:
    """`(LLᵀ)⁻¹` times rows `(*, p, n)`, for a lower triangular `L` of shape `(*, n, n)`.

    It takes two triangular solves, because `torch.cholesky_solve` copies its factor first.
    """
    half = torch.linalg.solve_triangular(factor, rows.mT, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True).mT
