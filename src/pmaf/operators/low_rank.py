"""Matrices of low rank, given by their factors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pmaf.errors import require_alike, require_matrix
from pmaf.linalg.products import broadcast
from pmaf.operators.base import Operator


class LowRank(Operator):
    """`LᵀR` for rows `L` of shape `(*, r, m)` and `R` of shape `(*, r, n)`.

    Examples are the teleport of PageRank, the mean of centred data, and a vector to deflate.

    >>> import torch
    >>> from pmaf.operators import LowRank
    >>> LowRank(torch.ones(1, 3), torch.ones(1, 5) / 5)
    LowRank(3, 5)
    """

    def __init__(self, left: Tensor, right: Tensor) -> None:
        require_matrix("left", left, "r, m", or_complex=True)
        require_matrix("right", right, "r, n", or_complex=True)
        require_alike("left", left, "right", right)
        if left.shape[-2] != right.shape[-2]:
            raise ValueError(
                "left and right must have as many rows, (*, r, m) and (*, r, n); "
                f"got {tuple(left.shape)} and {tuple(right.shape)}"
            )
        self.left, self.right = left, right

    @property
    def shape(self) -> torch.Size:
        batch = broadcast(self.left.shape[:-2], self.right.shape[:-2])
        return torch.Size((*batch, self.left.shape[-1], self.right.shape[-1]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.left, self.right

    def with_tensors(self, tensors: Sequence[Tensor]) -> LowRank:
        return LowRank(*tensors)

    def matvec(self, rows: Tensor) -> Tensor:
        return (rows @ self.right.mT) @ self.left

    def rmatvec(self, rows: Tensor) -> Tensor:
        return (rows @ self.left.mH) @ self.right.conj()
