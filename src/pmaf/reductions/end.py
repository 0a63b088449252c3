"""Order, number and signs of vectors.

Solvers find the first vectors of the requested end, with that end first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf.linalg import sphere
from pmaf.reductions.base import Found, Reduction, Tensors
from pmaf.reductions.phases import phases


@dataclass(frozen=True)
class End(Reduction):
    """The requested ones of the vectors that were found, in the requested order.

    Args:
        skip: how many of the first vectors are left out.
        flipped: whether the requested end is last.
        single: whether one vector is requested, without a dimension for it, and was found with one.
        lone: whether a start is one vector, without a dimension for it.
        signed: whether a `Sign` follows on the way back, which makes new vectors.
    """

    skip: int
    flipped: bool
    single: bool
    lone: bool = False
    signed: bool = False

    @property
    def words(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        first = "the first vector" if self.skip == 1 else f"the first {self.skip} vectors"
        parts = [f"{first} of the requested end -> left out"] * (self.skip > 0)
        parts += ["the requested end first -> the requested end last"] * self.flipped
        return ", ".join(parts)

    def back(self, found: Found, given: Tensors, posed: Tensors) -> Found:
        if self.flipped and not self.single:
            return (*[x[..., self.skip :].flip(-1) for x in found],)
        which = self.skip if self.single else slice(self.skip, None)
        vectors, values, *partners = [x[..., which] for x in found]
        # New tensors, not views: a user may write into what a layer returns.
        values = values.clone()
        if self.signed:
            return vectors, values, *partners
        return vectors.clone(), values, *[x.clone() for x in partners]

    def forth(self, vectors: Tensor, given: Tensors, posed: Tensors) -> Tensor:
        return vectors.unsqueeze(-1) if self.lone else vectors


class Smallest(Reduction):
    """The smallest eigenvalues are the largest of `−A`, in the opposite order."""

    words = "smallest eigenvalues of A -> largest of −A"

    def apply(self, given: Tensors) -> Tensors:
        return {**given, "A": -given["A"]}

    def back(self, found: Found, given: Tensors, posed: Tensors) -> Found:
        vectors, values = found
        return vectors, -values


@dataclass(frozen=True)
class Sign(Reduction):
    """The sign of each vector, or its phase if it is complex, is that of `reference`.

    Args:
        single: whether there is one vector, without a dimension for it.
        block: whether the reference has a column for each vector.
        unit: whether the vectors are unit vectors, and not those of a pair.
        asked: whether there is a reference; all ones take the place of one that is missing.
    """

    single: bool
    block: bool
    unit: bool
    asked: bool = True

    @property
    def words(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        chosen = "by the reference" if self.asked else "so that its components have a positive sum"
        return f"sign or phase of each vector -> chosen {chosen}"

    def back(self, found: Found, given: Tensors, posed: Tensors) -> Found:
        vectors, *others = found
        rows = vectors.unsqueeze(-2) if self.single else vectors.mT
        reference = reference_rows(given["reference"], self.block, rows.dtype)
        if rows.is_complex():
            # The length of a vector of a pair does not change its phase.
            rows = rows if self.unit else rows / sphere.norm(rows.detach()).unsqueeze(-1)
            factor = phases(rows, reference).squeeze(-1)
        else:
            factor = sphere.signs(rows if self.unit else sphere.project(rows.detach()), reference)
        factor = factor if self.single else factor.unsqueeze(-2)
        return vectors * factor, *others[:1], *[x * factor for x in others[1:]]


def reference_rows(reference: Any, block: bool, dtype: torch.dtype) -> Any:
    """A reference as rows that broadcast to vectors as rows; a rule for signs as it is."""
    if not isinstance(reference, Tensor):
        return reference
    reference = reference.detach().to(dtype)
    return reference.mT if block else reference.unsqueeze(-2)
