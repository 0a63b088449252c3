"""A sphere of any radius becomes the unit sphere."""

from __future__ import annotations

from dataclasses import dataclass

from pmaf.reductions.base import Found, Tensors


@dataclass(frozen=True)
class Radius:
    """`u = ρw` with `w` the solution for `A` and `b/ρ` on the unit sphere.

    Multiplier and gap are the same.
    """

    radius: float

    @property
    def words(self) -> str:
        return f"sphere of radius {self.radius:g} -> unit sphere"

    def apply(self, tensors: Tensors) -> Tensors:
        return {**tensors, "b": tensors["b"] / self.radius}

    def back(self, found: Found, given: Tensors) -> Found:
        value, multiplier = found
        return self.radius * value, multiplier
