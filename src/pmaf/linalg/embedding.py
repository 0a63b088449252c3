"""Complex vectors and matrices as real ones of twice the size.

A vector `u` becomes its real and imaginary parts in turn, so that its conversion is a view. An
entry `a + ib` of a matrix becomes the block `[[a, −b], [b, a]]`. Products, norms and conjugate
transposes are preserved. A Hermitian matrix becomes a symmetric one with the same eigenvalues, each
twice as often: the vectors of `y` and of `iy` are orthogonal, and belong to one eigenvalue.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def real_matrix(A: Tensor) -> Tensor:
    """Complex `(*, m, n)` to real `(*, 2m, 2n)`."""
    # Not by conj(), with which gradients would be views that optimisers cannot take as real
    # numbers, and which vmap takes entry by entry.
    a, b = A.real, A.imag
    rows = torch.stack([torch.stack([a, -b], -1), torch.stack([b, a], -1)], -3)
    return rows.reshape(*A.shape[:-2], 2 * A.shape[-2], 2 * A.shape[-1])


def complex_matrix(E: Tensor) -> Tensor:
    """Real `(*, 2m, 2n)` to complex `(*, m, n)`; blocks with rounding errors are averaged."""
    blocks = 0.5 * E.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2))  # (*, m, 2, n, 2)
    a = blocks[..., 0, :, 0] + blocks[..., 1, :, 1]
    b = blocks[..., 1, :, 0] - blocks[..., 0, :, 1]
    return torch.view_as_complex(torch.stack([a, b], -1))


def real_rows(x: Tensor) -> Tensor:
    """Complex `(*, n)` to real `(*, 2n)`."""
    return torch.view_as_real(x.resolve_conj()).flatten(-2)


def complex_rows(x: Tensor) -> Tensor:
    """Real `(*, 2n)` to complex `(*, n)`."""
    return torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))


def paired_rows(y: Tensor) -> Tensor:
    """Complex rows `(*, k, n)` to real ones `(*, 2k, 2n)`: those of `y` and of `iy` in turn."""
    both = torch.stack([y, 1j * y], -2)
    return real_rows(both).flatten(-3, -2)


def _itself(rows: Tensor) -> Tensor:
    return rows


def independent_rows(
    y: Tensor, k: int, dual: Callable[[Tensor], Tensor] = _itself
) -> tuple[Tensor, Tensor]:
    """Orthonormal rows `(B, k, n)` from `(B, 2k, n)`, and the places `(B, k)` they come from.

    The inner product is `xᴴMy` for `dual` that multiplies rows `(B, p, n)` by M.

    The given rows are orthonormal as real vectors, so that among any 2d of them at least d are
    independent as complex vectors. Each is orthogonalised to those chosen before, and is chosen
    unless little is left of it. With d − 1 vectors chosen among 2d, the squares of what is left of
    all of them sum to at least 2, of which those that were not chosen have less than `1/(k + 1)`
    each. So one more is chosen in time, and a large eigenvalue, which comes first, is never
    replaced by a smaller one.
    """
    chosen = torch.zeros_like(y[:, :k])
    places = torch.zeros(y.shape[0], k, dtype=torch.int64, device=y.device)
    count = torch.zeros(y.shape[0], dtype=torch.int64, device=y.device)
    slots = torch.arange(k, device=y.device)
    for place in range(2 * k):
        row = y[:, place : place + 1]
        for _ in range(2):  # the second time removes rounding of the first
            row = row - (dual(row) @ chosen.mH) @ chosen
        length = (dual(row) * row.conj()).real.sum(-1, keepdim=True).clamp_min(0).sqrt()
        taken = (length[:, 0, 0].square() >= 1 / (k + 1)) & (count < k)
        here = taken[:, None] & (slots == count[:, None])
        chosen = torch.where(here.unsqueeze(-1), row / length, chosen)
        places = torch.where(here, place, places)
        count = count + taken
    return chosen, places
