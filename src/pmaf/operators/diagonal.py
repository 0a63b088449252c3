"""Diagonal matrices: shifts, degrees, weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pmaf.errors import require_vector
from pmaf.operators.base import Operator


class Diagonal(Operator):
    """The matrix with diagonal `d` of shape `(*, n)`.

    `Diagonal(degrees) - Sparse(adjacency)` is the Laplacian of a graph.
    """

    def __init__(self, d: Tensor) -> None:
        require_vector("d", d, "n", or_complex=True)
        self.d, self.symmetric = d, not d.is_complex()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.d.shape, self.d.shape[-1]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.d,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Diagonal:
        return Diagonal(*tensors)

    def matvec(self, rows: Tensor) -> Tensor:
        return rows * self.d.unsqueeze(-2)

    def rmatvec(self, rows: Tensor) -> Tensor:
        return rows * self.d.conj().unsqueeze(-2)

    def solve(self, rows: Tensor) -> Tensor:
        return rows / self.d.unsqueeze(-2)

    def diagonal(self) -> Tensor:
        return self.d
