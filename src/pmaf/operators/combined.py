"""Sums and multiples of operators."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import chain
from operator import add

import torch
from torch import Tensor

from pmaf.errors import require_alike, require_broadcast
from pmaf.operators.base import Operator, number
from pmaf.runtime.ranks import mesh_of, replicate


class Sum(Operator):
    """`A + B + …`."""

    def __init__(self, *parts: Operator) -> None:
        if not parts:
            raise ValueError("a sum has at least one part; got none")
        first, *others = parts
        for part in others:
            if part.shape[-2:] != first.shape[-2:]:
                raise ValueError(f"{first!r} and {part!r} do not add up: their shapes differ")
            require_alike(repr(part), part, repr(first), first)
            require_broadcast(repr(first), first.batch_shape, repr(part), part.batch_shape)
        self.parts = parts
        self.symmetric = all(part.symmetric for part in parts)

    @property
    def shape(self) -> torch.Size:
        batch = torch.broadcast_shapes(*(part.batch_shape for part in self.parts))
        return torch.Size((*batch, *self.parts[0].shape[-2:]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(x for part in self.parts for x in part.tensors)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def with_tensors(self, tensors: Sequence[Tensor]) -> Sum:
        pairs = zip(self.parts, _split(self.parts, tensors))
        return Sum(*(part.with_tensors(own) for part, own in pairs))

    def claims(self) -> Iterator[Operator]:
        return chain.from_iterable(part.claims() for part in self.parts)

    def in_units(self, rows: Tensor) -> tuple[Operator, Tensor]:
        found = [part.in_units(rows) for part in self.parts]
        largest = reduce(torch.maximum, (exponents for _, exponents in found))
        return Sum(*(TimesPowers(A, exponents - largest) for A, exponents in found)), largest

    def matvec(self, rows: Tensor) -> Tensor:
        return reduce(add, (part.matvec(rows) for part in self.parts))

    def rmatvec(self, rows: Tensor) -> Tensor:
        return reduce(add, (part.rmatvec(rows) for part in self.parts))

    def diagonal(self) -> Tensor | None:
        found = [part.diagonal() for part in self.parts]
        known = [d for d in found if d is not None]
        return reduce(add, known) if len(known) == len(found) else None

    def pullback(self, left: Tensor, right: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        pairs = zip(self.parts, _split(self.parts, needs))
        return [dx for part, own in pairs for dx in part.pullback(left, right, own)]

    def __repr__(self) -> str:
        return f"Sum({', '.join(map(repr, self.parts))})"


def _split(parts: Sequence[Operator], items: Sequence) -> list[Sequence]:
    """As many items for each part as it has tensors."""
    found, at = [], 0
    for part in parts:
        found.append(items[at : at + len(part.tensors)])
        at += len(part.tensors)
    return found


class _Multiple(Operator):
    """A multiple of an operator; `times` multiplies rows by the factor."""

    def __init__(self, part: Operator) -> None:
        self.part, self.symmetric = part, part.symmetric

    def times(self, rows: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        return self.part.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.part.tensors

    @property
    def dtype(self) -> torch.dtype:
        return self.part.dtype

    @property
    def device(self) -> torch.device:
        return self.part.device

    def claims(self) -> Iterator[Operator]:
        return self.part.claims()

    def matvec(self, rows: Tensor) -> Tensor:
        return self.times(self.part.matvec(rows))

    def rmatvec(self, rows: Tensor) -> Tensor:
        return self.times(self.part.rmatvec(rows))

    def pullback(self, left: Tensor, right: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        return self.part.pullback(self.times(left), right, needs)


class Scaled(_Multiple):
    """A number times an operator."""

    def __init__(self, part: Operator, factor: float) -> None:
        super().__init__(part)
        self.factor = number("the factor of an operator", factor)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Scaled:
        return Scaled(self.part.with_tensors(tensors), self.factor)

    def in_units(self, rows: Tensor) -> tuple[Operator, Tensor]:
        part, exponents = self.part.in_units(rows)
        mantissa, power = math.frexp(self.factor)
        return Scaled(part, mantissa), exponents + power

    def times(self, rows: Tensor) -> Tensor:
        return self.factor * rows

    def solve(self, rows: Tensor) -> Tensor:
        return self.part.solve(rows) / self.factor

    @property
    def solvable(self) -> bool:
        return self.part.solvable and self.factor != 0

    def diagonal(self) -> Tensor | None:
        found = self.part.diagonal()
        return None if found is None else self.factor * found

    def __repr__(self) -> str:
        return f"Scaled({self.part!r}, {self.factor})"


class TimesPowers(_Multiple):
    """An operator times a power of two for each batch entry, with exponents `(*,)`."""

    def __init__(self, part: Operator, exponents: Tensor) -> None:
        super().__init__(part)
        self.exponents = exponents

    def with_tensors(self, tensors: Sequence[Tensor]) -> TimesPowers:
        return TimesPowers(self.part.with_tensors(tensors), self.exponents)

    def times(self, rows: Tensor) -> Tensor:
        power = self.exponents.to(rows.dtype.to_real()).exp2()[..., None, None]
        return rows * replicate(power, mesh_of(rows))

    def __repr__(self) -> str:
        return repr(self.part)
