"""Data minus one and the same row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pmaf.operators.base import Operator, Wrapping
from pmaf.operators.matrix import Matrix
from pmaf.runtime.ranks import is_spread


class Shifted(Wrapping):
    """`X − 1cᵀ` for an operator `X` of shape `(*, m, n)` and a constant `c`, `(*, 1, n)`.

    Of a dense tensor the differences are formed, in blocks of rows, so that products have no more
    rounding errors than those of the differences. Of another operator `X` both products are, which
    have errors of the size of `c`.
    """

    def __init__(self, part: Operator, c: Tensor) -> None:
        super().__init__(part)
        self.c, self.symmetric = c, False

    def matvec(self, rows: Tensor) -> Tensor:
        blocks = [rows @ (X - self.c).mT for X in self._blocks()]
        return torch.cat(blocks, -1) if blocks else self.part.matvec(rows) - rows @ self.c.mT

    def rmatvec(self, rows: Tensor) -> Tensor:
        total, at = None, 0
        for X in self._blocks():
            here = rows[..., at : at + X.shape[-2]] @ (X - self.c).conj()
            total, at = here if total is None else total + here, at + X.shape[-2]
        if total is None:
            total = self.part.rmatvec(rows) - rows.sum(-1, keepdim=True) * self.c.conj()
        return total

    def _blocks(self) -> Iterator[Tensor]:
        """The rows of a dense tensor in up to sixteen blocks, if they are not few; else nothing."""
        if isinstance(self.part, Matrix) and not is_spread(self.part.A):
            X = self.part.A
            m = X.shape[-2]
            yield from X.split(max(-(-m // 16), _LEAST // max(1, X.numel() // m), 1), -2)


# The least number of entries of a block: one megabyte of float32, which fits into a cache.
_LEAST = 2**18
