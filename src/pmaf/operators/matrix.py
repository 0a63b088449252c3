"""A dense matrix among operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pmaf.errors import require_matrix
from pmaf.operators.base import Operator, represents
from pmaf.runtime.ranks import cuts_matrices


@represents(torch.strided)
class Matrix(Operator):
    """A dense tensor `(*, m, n)`, to be added to other operators or spread over ranks.

    >>> import torch
    >>> from pmaf.operators import Diagonal, Matrix
    >>> Matrix(torch.ones(3, 3)) + 2.0 * Diagonal(torch.ones(3))
    Sum(Matrix(3, 3), Scaled(Diagonal(3, 3), 2.0))
    """

    def __init__(self, A: Tensor) -> None:
        require_matrix("A", A, or_complex=True)
        self.A = A

    @property
    def shape(self) -> torch.Size:
        return self.A.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.A,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Matrix:
        return Matrix(*tensors)

    def matvec(self, rows: Tensor) -> Tensor:
        return rows @ self.A.mT

    def rmatvec(self, rows: Tensor) -> Tensor:
        return rows @ self.A.conj()

    def diagonal(self) -> Tensor | None:
        if cuts_matrices(self.A):  # the whole matrix would be sent to every rank
            return None
        return self.A.diagonal(dim1=-2, dim2=-1)

    def pullback(self, left: Tensor, right: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        if not needs[0]:
            return [None]
        m, n = self.A.shape[-2:]
        # One product, so that the gradient is written to memory once.
        if self.A.dim() == 2 < left.dim():
            left, right = left.reshape(-1, m), right.reshape(-1, n)
        return [(left.mT @ right.conj()).sum_to_size(self.A.shape)]
