"""Order, number and signs of vectors.

Solvers find the first vectors of the requested end, with that end first and in the default sign.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pmaf.linalg import sphere
from pmaf.reductions.base import Found, Tensors
from pmaf.reductions.phases import phases


@dataclass(frozen=True)
class End:
    """The requested ones of the vectors that were found, in the requested order.

    Args:
        skip: how many of the first vectors are left out.
        flipped: whether the requested end is last.
        single: whether one vector is requested, without a dimension for it, and was found with one.
    """

    skip: int
    flipped: bool
    single: bool

    @property
    def words(self) -> str:
        parts = [f"leave out the first {self.skip}"] * (self.skip > 0)
        parts += ["the other order"] * self.flipped
        return ", ".join(parts)

    def apply(self, tensors: Tensors) -> Tensors:
        return tensors

    def back(self, found: Found, given: Tensors) -> Found:
        # New tensors, not views: a user may write into what a layer returns.
        if self.single:
            return tuple(x[..., self.skip].clone() for x in found)
        if self.flipped:
            return tuple(x[..., self.skip :].flip(-1) for x in found)
        return tuple(x[..., self.skip :].clone() for x in found)


@dataclass(frozen=True)
class Sign:
    """The sign of each vector, or its phase if it is complex, is that of `reference`.

    Args:
        single: whether there is one vector, without a dimension for it.
        block: whether the reference has a column for each vector.
        unit: whether the vectors are unit vectors, and not those of a pair.
    """

    single: bool
    block: bool
    unit: bool

    words = "signs by the reference"

    def apply(self, tensors: Tensors) -> Tensors:
        return tensors

    def back(self, found: Found, given: Tensors) -> Found:
        vectors, values, *partners = found
        reference = given["reference"]
        rows = vectors.unsqueeze(-2) if self.single else vectors.mT
        if isinstance(reference, Tensor):
            reference = reference.detach().to(rows.dtype)
            reference = reference.mT if self.block else reference.unsqueeze(-2)
        fixed = rows.detach()
        unit = fixed if self.unit else sphere.project(fixed)
        if rows.is_complex():
            # The length of a vector of a pair does not change its phase.
            rows = rows if self.unit else rows / sphere.norm(fixed).unsqueeze(-1)
            factor = phases(rows, reference).squeeze(-1)
        else:
            factor = sphere.signs(unit, reference)
        factor = factor if self.single else factor.unsqueeze(-2)
        return vectors * factor, values, *(x * factor for x in partners)
