"""What a gradient rule is, and what it is told about a solution.

A problem hands over the *conditions* its solution satisfies. A rule turns them and
the incoming gradient into gradients of the inputs, without knowing which problem or
which solver it is looking at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor


class Conditions(Protocol):
    """The optimality conditions `∇f(inputs, y) + μy = 0`, `‖y‖ = 1` at a solution `y`."""

    @property
    def y(self) -> Tensor:
        """The solution, `(*, n)`."""
        ...

    def tangent_solve(self, v: Tensor) -> Tensor:
        """Differentiable solution `z` of `P H P z = P v`, `yᵀz = 0`."""
        ...

    def pullback(self, z: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs given `z`: `−zᵀ ∂²f/∂input∂y`, without forming that tensor."""
        ...

    def hessian(self) -> Tensor:
        """`H = ∂²f/∂y² + μI` as a matrix, `(*, n, n)`."""
        ...

    def mixed(self, exploit: bool, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """The tensors `∂²f/∂input∂y`, `(*, n, …)`, from their structure or by autodiff."""
        ...


@dataclass(frozen=True)
class Gradient:
    """A rule for differentiating a solution. Subclasses name the problems they serve."""

    serves: ClassVar[tuple[str, ...]] = ()  # names of problem classes

    def pullback(
        self, conditions: Conditions, v: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs whose `needs` is set, given the solution's gradient `v`."""
        raise NotImplementedError
