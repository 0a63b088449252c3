"""What a reduction is."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

# The tensors of a call by the names of its arguments, among them None and sign rules.
Tensors = dict[str, Any]
# A solution, its multiplier, and vectors that belong to those of the solution, as left ones do.
Found = tuple[Tensor, ...]


class Reduction(Protocol):
    """One step of a recipe, as it is for all calls with one signature.

    It holds no tensor, and both directions are differentiable.
    """

    @property
    def words(self) -> str:
        """What the step does, for `pmaf.explain`."""
        ...

    def apply(self, tensors: Tensors) -> Tensors:
        """The tensors of the equivalent problem."""
        ...

    def back(self, found: Found, given: Tensors) -> Found:
        """The solution for tensors that the call was given, from that of the equivalent problem."""
        ...
