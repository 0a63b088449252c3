"""Complex operators as real ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pmaf.linalg.embedding import complex_rows, real_matrix, real_rows
from pmaf.operators.base import Operator, Wrapping
from pmaf.runtime.ranks import mesh_of, replicate, whole


class Embedded(Wrapping):
    """A complex operator `(*, m, n)` on the real and imaginary parts of vectors, `(*, 2m, 2n)`.

    Its tensors are those of the complex operator, and get complex gradients.
    """

    @property
    def shape(self) -> torch.Size:
        *batch, m, n = self.part.shape
        return torch.Size((*batch, 2 * m, 2 * n))

    @property
    def dtype(self) -> torch.dtype:
        return self.part.dtype.to_real()

    def claims(self) -> Iterator[Operator]:
        return map(Embedded, self.part.claims())

    def in_units(self, rows: Tensor) -> tuple[Operator, Tensor]:
        part, exponents = self.part.in_units(complex_of(rows))
        return self.around(part), exponents

    def matvec(self, rows: Tensor) -> Tensor:
        return real_of(self.part.matvec(complex_of(rows)))

    def rmatvec(self, rows: Tensor) -> Tensor:
        return real_of(self.part.rmatvec(complex_of(rows)))

    def solve(self, rows: Tensor) -> Tensor:
        return real_of(self.part.solve(complex_of(rows)))

    @property
    def solvable(self) -> bool:
        return self.part.solvable

    def diagonal(self) -> Tensor | None:
        found = self.part.diagonal()
        return None if found is None else whole(found).real.repeat_interleave(2, -1)

    def pullback(self, left: Tensor, right: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        return self.part.pullback(complex_of(left), complex_of(right), needs)


def embedded(A: Tensor | Operator) -> Tensor | Operator:
    """A complex matrix or operator as a real one."""
    return Embedded(A) if isinstance(A, Operator) else real_matrix(A)


# The views in `complex_rows` and `real_rows` are not defined for DTensors.


def complex_of(rows: Tensor) -> Tensor:
    """`complex_rows`, on every rank if the rows are a DTensor."""
    return replicate(complex_rows(whole(rows)), mesh_of(rows))


def real_of(rows: Tensor) -> Tensor:
    """`real_rows`, on every rank if the rows are a DTensor."""
    return replicate(real_rows(whole(rows)), mesh_of(rows))
