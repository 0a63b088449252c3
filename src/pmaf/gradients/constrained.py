"""The optimality conditions of weighted least squares on the sphere or in the ball.

With weights `w`, `W = diag(w)` and `r = Ay − b`, the force is `−AᵀWr` and the curvature `AᵀWA`, so
that for the solution `z` of the linear system

    ∂L/∂b = W A z,   ∂L/∂A = −W(r zᵀ + (A z) yᵀ),   ∂L/∂w = −r∘(A z).

No square root of a weight is in them, so that they are right at weights of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pmaf.gradients.base import Gradient
from pmaf.gradients.minimum import GramSystem, MinimumConditions
from pmaf.linalg import sphere
from pmaf.linalg.products import dot, matvec, outer_sum, rmatvec
from pmaf.runtime.modes import plain
from pmaf.tangent.bordered import BorderedSystem, State, Tensors
from pmaf.tangent.kept import Basis
from pmaf.tangent.unbordered import unbordered_solve


def split(sides: Tensor) -> tuple[Tensor, Tensor | None]:
    """`b` and the weights, which are stacked in one tensor `(*, 1 or 2, m)`."""
    return sides[..., 0, :], sides[..., 1, :] if sides.shape[-2] == 2 else None


def stack(b: Tensor, weights: Tensor | None) -> Tensor:
    """The inverse of `split`."""
    if weights is None:
        return b.unsqueeze(-2)
    return torch.stack(torch.broadcast_tensors(b, weights), -2)


def scaled(A: Tensor, sides: Tensor) -> tuple[Tensor, Tensor]:
    """`√w A` and `√w b`, for solvers, which are not differentiated."""
    b, weights = split(sides)
    if weights is None:
        return A, b
    root = weights.sqrt()
    return root.unsqueeze(-1) * A, root * b


def times(weights: Tensor | None, x: Tensor) -> Tensor:
    """`W x`, `(*, m)`."""
    return x if weights is None else weights * x


@dataclass(frozen=True)
class WeightedGramSystem(GramSystem):
    """Bordered systems of `AᵀWA + μI`; the tensors are `A` and `sides`."""

    def solve(self, v: Tensor, y: Tensor, tensors: Tensors, state: State) -> Tensor:
        return super().solve(v, y, scaled(*tensors)[:1], state)

    def product(self, z: Tensor, tensors: Tensors, shift: Tensor) -> Tensor:
        A, (_, weights) = tensors[0], split(tensors[1])
        images = z @ A.mT
        images = images if weights is None else images * weights.unsqueeze(-2)
        return images @ A + shift.unsqueeze(-1) * z

    def pullback(
        self, w: Tensor, z: Tensor, tensors: Tensors, shift: Tensor
    ) -> tuple[tuple[Tensor | None, ...], Tensor]:
        A, (_, weights) = tensors[0], split(tensors[1])
        w_row, z_row = w.squeeze(-2), z.squeeze(-2)
        w_image, z_image = matvec(A, w_row), matvec(A, z_row)
        images = times(weights, w_image), times(weights, z_image)
        dA = outer_sum(images, (z_row, w_row), A.shape)
        product = w_image * z_image
        d_sides = stack(torch.zeros_like(product), None if weights is None else product)
        return (dA, d_sides.sum_to_size(tensors[1].shape)), (w * z).sum(-1)


@dataclass(frozen=True, eq=False)
class ConstrainedConditions(MinimumConditions):
    """Optimality conditions of weighted least squares at a solution `y`; `A` and `sides` given."""

    ball: bool
    image: Tensor  # Ay

    def force(self) -> Tensor:
        A, (b, weights) = self.tensors[0], split(self.tensors[1])
        return rmatvec(A, times(weights, b - self.image))

    def system(self) -> tuple[BorderedSystem, Tensors]:
        return WeightedGramSystem(), self.tensors

    def multiplier(self) -> Tensor:
        found = dot(self.y, self.force())
        return torch.where(self.active(), found, 0) if self.ball else found

    def singular(self) -> Tensor:
        """Where the curvature is singular and the multiplier is zero, `(*,)`."""
        return (self.state.gap == 0) & (self.state.shift.squeeze(-1) <= 0)

    def active(self) -> Tensor:
        """Where the constraint acts, `(*,)`.

        At the edge, where `A⁺b` is on the sphere up to rounding, the derivative from the outer side
        is taken, except where the curvature is singular.
        """
        return sphere.reaches(self.y.detach()) & ~self.singular()

    def tangent_solve(self, v: Tensor) -> Tensor:
        if not self.ball:
            return super().tangent_solve(v)
        active = self.active()
        eager = plain(v) and plain(self.y)
        if eager and bool(active.all()):
            return super().tangent_solve(v)
        mask = active.unsqueeze(-1)
        inside = self.unbordered(torch.where(mask, 0, v))
        if eager and not bool(active.any()):
            return inside
        return torch.where(mask, super().tangent_solve(torch.where(mask, v, 0)), inside)

    def unbordered(self, v: Tensor) -> Tensor:
        """`H⁺v`, `(*, n)`, for entries where the multiplier is zero."""
        system, tensors = self.system()
        kept = self.state.kept
        assert isinstance(kept, Basis)
        return unbordered_solve(system, v.unsqueeze(-2), tensors, self.state.gap, kept).squeeze(-2)

    def pullback(self, z: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        A, (b, weights) = self.tensors[0], split(self.tensors[1])
        image, r = matvec(A, z), self.image - b
        dA = d_sides = None
        if needs[0]:
            lefts = times(weights, r), times(weights, image)
            dA = outer_sum(lefts, (-z, -self.y), A.shape)
        if needs[1]:
            d_sides = stack(times(weights, image), None if weights is None else -r * image)
        return dA, d_sides

    def gradients(
        self, rule: Gradient, v: Tensor | None, d_multiplier: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        if not self.ball:
            return super().gradients(rule, v, d_multiplier, needs)
        v = torch.zeros_like(self.y) if v is None else v
        z = along = None
        if d_multiplier is not None:
            along = torch.where(self.active(), d_multiplier, 0).unsqueeze(-1) * self.y
            v = v - self.curvature(along)
        z = self.tangent_solve(v)
        found = self.pullback(z if along is None else z + along, needs)
        free = self.singular() & ~self.active()
        if plain(v) and plain(self.y) and not bool(free.any()):
            return found
        # Of several minimisers the one of least norm is taken. It is orthogonal to the null space
        # of the curvature, which moves with the inputs.
        mask = free.unsqueeze(-1)
        null = torch.where(mask, v - self.curvature(z), 0).unsqueeze(-2)
        x = self.unbordered(torch.where(mask, self.y, 0)).unsqueeze(-2)
        system, tensors = self.system()
        moved, _ = system.pullback(null, x, tensors, x.new_zeros(x.shape[:-1]))
        sums = (
            None if dx is None or more is None else dx.sum_to_size(x.shape) + more
            for dx, more, x in zip(found, moved, self.tensors)
        )
        return tuple(sums)
