"""Right singular vectors of `√W A`, and the rules by which singular values count as equal."""

from __future__ import annotations

import torch
from torch import Tensor

from pmaf.linalg.products import norm
from pmaf.linalg.roundings import merge_tolerance


def weighted(rows: Tensor, weights: Tensor | None) -> Tensor:
    """`W` times images `(*, p, m)`, with `W` the diagonal matrix of `weights`, `(*, m)`."""
    return rows if weights is None else rows * weights.unsqueeze(-2)


def weighted_gram(A: Tensor, weights: Tensor | None = None) -> Tensor:
    """`AᵀWA`, `(*, n, n)`, or `AᴴWA`."""
    left = A if weights is None else A * weights.unsqueeze(-1)
    return left.mH @ A


def rooted(A: Tensor, weights: Tensor | None = None) -> Tensor:
    """`√W A`, which has the singular values of the problem; not for differentiation."""
    return A if weights is None else A * weights.sqrt().unsqueeze(-1)


def singular_basis(A: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """All right singular vectors of `√W A` as rows `(*, n, n)`, and singular values `(*, n)`."""
    m, n = A.shape[-2:]
    root = rooted(A, weights)
    # A trace can branch on sizes that are symbols, but not pass a comparison of them on.
    _, values, rows = (
        torch.linalg.svd(root) if m < n else torch.linalg.svd(root, full_matrices=False)
    )
    return rows.conj(), padded(values, n)


def pair_basis(A: Tensor) -> tuple[Tensor, Tensor]:
    """Left and right singular vectors side by side, `(*, p, m + n)`, and values `(*, p)`."""
    left, values, right = torch.linalg.svd(A, full_matrices=False)
    return torch.cat([left.mT, right.conj()], -1), values


def nearest(found: Tensor, values: Tensor) -> Tensor:
    """Those of the singular values `(*, p)` that are nearest to `found`, `(*, k)`."""
    index = (found.unsqueeze(-1) - values.unsqueeze(-2)).abs().argmin(-1)
    return values.expand(*index.shape[:-1], -1).gather(-1, index)


def padded(values: Tensor, n: int) -> Tensor:
    """Singular values, with zeros for those that a wide matrix does not have."""
    missing = n - values.shape[-1]
    if missing == 0:
        return values
    return torch.cat([values, values.new_zeros(*values.shape[:-1], missing)], -1)


def sizes(rows: Tensor, A: Tensor, weights: Tensor | None) -> Tensor:
    """`‖√W A y‖` for every row `y`, `(*, p)`: singular values, to rounding of `A` itself."""
    image = rows @ A.mT
    return norm(image if weights is None else image * weights.sqrt().unsqueeze(-2))


def accuracy(dtype: torch.dtype, single: bool) -> float:
    """How far two singular values may be apart, relative to the largest, and count as one."""
    return merge_tolerance(torch.float32 if single else dtype)
