"""Wide matrices by their transposes."""

from __future__ import annotations

from pmaf.reductions.base import Found, Tensors


class Wide:
    """Triplets of a wide matrix are those of its transpose with left and right exchanged."""

    words = "wide matrix -> its transpose"

    def apply(self, tensors: Tensors) -> Tensors:
        return {**tensors, "A": tensors["A"].mT}

    def back(self, found: Found, given: Tensors) -> Found:
        right, values, left = found
        return left, values, right
