"""Complex vectors and matrices as real ones of twice the size.

A vector `u` becomes its real and imaginary parts in turn, so that its conversion is a view. An
entry `a + ib` of a matrix becomes the block `[[a, −b], [b, a]]`. Products, norms and conjugate
transposes are preserved. A Hermitian matrix becomes a symmetric one with the same eigenvalues, each
twice as often: the vectors of `y` and of `iy` are orthogonal, and belong to one eigenvalue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pmaf.linalg.decompositions import eigh
from pmaf.runtime.log import took


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


def unpaired_rows(x: Tensor) -> Tensor:
    """Real rows `(*, 2k, 2n)` of `y` and of `iy` in turn to complex ones `(*, k, n)`.

    Their mean has the same value as `y` alone. But its gradient comes in for both rows, and is that
    of a function of their span in which it is one of the span of all `y`. Otherwise, rows of close
    eigenvalues would get large gradients that cancel.
    """
    y = complex_rows(x)
    return 0.5 * (y[..., ::2, :] - 1j * y[..., 1::2, :])


def _itself(rows: Tensor) -> Tensor:
    return rows


def independent_rows(
    y: Tensor, values: Tensor, dual: Callable[[Tensor], Tensor] = _itself
) -> Tensor:
    """Orthonormal rows `(B, k, n)` from rows `(B, 2k, n)` with values `(B, 2k)`, descending.

    The inner product is `xᴴMy` for `dual` that multiplies rows `(B, p, n)` by M.

    The given rows are orthonormal as real vectors. With `iy` for each `y`, up to rounding, their
    span is a space of k complex dimensions. Their Gram matrix then has the eigenvalue two k times,
    and otherwise zero: no row decides alone what is in the space, since small leftovers of rows
    that depend on others would become vectors, and take the place of others. Where k cuts a group
    of equal eigenvalues in two, other eigenvalues of the Gram matrix are below two, and the k
    largest are at least `2/(k + 1)`. In its eigenvectors, the matrix whose eigenvectors are sought
    is known by the values of the rows.
    """
    k = y.shape[-2] // 2
    squares, turn = eigh(dual(y) @ y.mH)
    squares, turn = squares[..., -k:], turn[..., -k:]
    within = turn.mT @ (values.unsqueeze(-1) * turn.conj())
    order = eigh(0.5 * (within + within.mH)).vectors.flip(-1)
    rows = order.mT @ ((turn.mH / squares.sqrt().unsqueeze(-1)) @ y)
    # Newton's step towards orthonormal rows squares the error.
    return rows - 0.5 * excess(rows, dual) @ rows


def excess(rows: Tensor, dual: Callable[[Tensor], Tensor] = _itself) -> Tensor:
    """The products of complex rows `(*, k, n)` minus the identity, `(*, k, k)`."""
    eye = torch.eye(rows.shape[-2], dtype=rows.dtype, device=rows.device)
    return dual(rows) @ rows.mH - eye


def means(values: Tensor) -> Tensor:
    """The mean of each pair, `(*, 2k)` to `(*, k)`."""
    return values.unflatten(-1, (-1, 2)).mean(-1)


def independent(
    y: Tensor, values: Tensor, dual: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Orthonormal rows `(*, k, n)` from `(*, 2k, n)` in pairs with values `(*, 2k)`, descending.

    If all eigenvalues are apart, the rows of a pair are multiples of each other, and one of them
    is taken. Where eigenvalues are equal, rows of different pairs are mixed. The inner product is
    `xᴴMy` if `dual` multiplies rows of the whole batch by M.
    """
    k, n = y.shape[-2] // 2, y.shape[-1]
    options: dict[str, Any] = {} if dual is None else {"dual": dual}
    rows = y[..., ::2, :]
    away = excess(rows, **options)
    # Newton's step towards orthonormal rows squares the error.
    found = rows - 0.5 * away @ rows
    mixed = away.abs().amax((-2, -1)) > torch.finfo(y.dtype).eps ** 0.5
    if mixed.any():
        took("ied: mixed pairs")
        mixed = mixed if dual is None else torch.ones_like(mixed)
        chosen = independent_rows(
            y[mixed].reshape(-1, 2 * k, n), values[mixed].reshape(-1, 2 * k), **options
        )
        found[mixed] = chosen.reshape(found[mixed].shape)
    return found
