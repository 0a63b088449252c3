"""The base class of gradient rules, and the optimality conditions that they work on.

A problem provides the *conditions* that its solution satisfies. A rule computes gradients of the
inputs from them and the incoming gradient, independently of the problem and the solver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from pmaf.linalg.products import matvec
from pmaf.runtime.text import Configured
from pmaf.solvers.base import Eigenvectors, Minimum
from pmaf.tangent.bordered import State


class Conditions(Protocol):
    """The optimality conditions at a solution, as `Implicit` uses them."""

    def tangent_solve(self, v: Tensor) -> Tensor:
        """Differentiable solution `z` of the conditions' linearisation, given `v`."""
        ...

    def pullback(self, z: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs given `z`: `−zᵀ ∂²f/∂input∂y`, without forming that tensor."""
        ...


class VectorConditions(Protocol):
    """`∇f(inputs, y) + μy = 0`, `‖y‖ = 1` for one vector, as the paper's rules use them."""

    @property
    def y(self) -> Tensor:
        """The solution, `(*, n)`."""
        ...

    def hessian(self) -> Tensor:
        """`H = ∂²f/∂y² + μI` as a matrix, `(*, n, n)`."""
        ...

    def contract(
        self, k: Tensor, exploit: bool, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """`𝒦𝓑` with `𝓑 = ∂²f/∂input∂y`, from its structure or by autodiff."""
        ...


def contract(k: Tensor, block: Tensor) -> Tensor:
    """`Σᵢ kᵢ 𝓑ᵢ` for an explicit tensor `𝓑` of shape `(*, n, …)`."""
    flat = block.flatten(k.dim())
    return matvec(flat.mT, k).reshape(*k.shape[:-1], *block.shape[k.dim() :])


@dataclass(frozen=True)
class Gradient(Configured):
    """A rule for differentiating a solution. Subclasses name the forms of problems they are for."""

    solves: ClassVar[tuple[type, ...]] = (Minimum, Eigenvectors)  # the forms that it is for
    words: ClassVar[str] = "a rule of the user"  # what it does, for `pmaf.explain`

    def pullback(
        self, conditions: Any, v: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs whose `needs` is set, given the solution's gradient `v`."""
        raise NotImplementedError


class Images(NamedTuple):
    """Images of a minimum `y` of least squares and of the solution `z` of its linear system.

    With `r = Ay − b` and weights `W`, the gradients are

        ∂L/∂b = W A z,   ∂L/∂A = −W(r zᵀ + (A z) yᵀ),   ∂L/∂w = −r∘(A z).
    """

    residual: Tensor  # r
    image: Tensor  # Az
    weights: Tensor | None

    def weighted(self, x: Tensor) -> Tensor:
        return x if self.weights is None else self.weights * x

    def of_b(self) -> Tensor:
        return self.weighted(self.image)

    def of_weights(self) -> Tensor:
        return -self.residual * self.image

    def of_matrix(self, y: Tensor, z: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Left and right factors of the gradient of `A`, a sum of two products."""
        r, along, weights = self
        r, along = (r, along) if weights is None else (weights * r, weights * along)
        return [-r, -along], [z, y]


class Reverse(NamedTuple):
    """A solution of a problem, and the gradients that come in for it."""

    tensors: tuple[Tensor, ...]  # the inputs of the problem
    y: Tensor  # (*, n), or (*, k, n)
    state: State
    rule: Gradient
    v: Tensor | None  # the gradient of y
    d_multiplier: Tensor | None
    needs: Sequence[bool]  # which inputs need a gradient

    def as_rows(self) -> Reverse:
        """One vector `(*, n)` as rows `(*, 1, n)`, with all that belongs to it."""
        state, v, d = self.state, self.v, self.d_multiplier
        return self._replace(
            y=self.y.unsqueeze(-2),
            state=state._replace(shift=state.shift.unsqueeze(-1)),
            v=None if v is None else v.unsqueeze(-2),
            d_multiplier=None if d is None else d.unsqueeze(-1),
        )

    def entries(self, mask: Tensor) -> Reverse:
        """The batch entries `(*,)` of the mask, as leaves of another graph."""
        state, v, d = self.state, self.v, self.d_multiplier
        kind: Any = type(state.kept)
        kept = kind(*(None if x is None else x[mask] for x in state.kept))
        return self._replace(
            tensors=tuple(x[mask].requires_grad_(x.requires_grad) for x in self.tensors),
            y=self.y[mask],
            state=State(state.shift[mask], state.gap[mask], kept),
            v=None if v is None else v[mask],
            d_multiplier=None if d is None else d[mask],
        )
