"""Exact gradients by the implicit function theorem, at the cost of a few products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pmaf.gradients.base import Conditions, Gradient


@dataclass(frozen=True)
class Implicit(Gradient):
    """Differentiate the optimality conditions on the tangent space of the sphere.

    Exact wherever the derivative exists, the hard case of LESS and eigenvectors
    included; finite, of least norm, where it does not. Any number of derivatives may
    be taken.
    """

    def pullback(
        self, conditions: Conditions, v: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        return conditions.pullback(conditions.tangent_solve(v), needs)
