"""The node of least squares with options that compiled kernels have solved, in eager mode.

It takes the tensors as the user has them: units and coordinates belong to the kernels, in both
passes. Everything but a first derivative is that of a common solve, which the backward pass then
does again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pmaf import native
from pmaf.runtime.log import took
from pmaf.runtime.modes import plain
from pmaf.runtime.saved import restored, save

# A common solve of the tensors, from a start.
Again = Callable[..., Tensor]


class FoundPosed(torch.autograd.Function):
    """A minimiser, and what the kernels have kept of it."""

    @staticmethod
    def forward(
        ctx: Any,
        found: tuple[Tensor, Tensor],
        plan: native.Posed,
        again: Again,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.again = plan, again
        save(ctx, *found, *tensors)
        return found[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        (v,), none = grads, (None, None, None)
        needs = ctx.needs_input_grad[3:]
        if v is None:
            return *none, *(None for _ in needs)
        (y, kept, *tensors), same = restored(ctx)
        if not torch.is_grad_enabled() and plain(v):
            if not same:
                solved = native.solve_posed(ctx.plan, *(_constant(x) for x in tensors))
                kept = None if solved is None else solved[1]
            if kept is not None:
                took("tangent: compiled")
                found = native.posed_gradients(ctx.plan, kept, v, tensors, needs)
                if found is not None:
                    return *none, *found
        took("tangent: common path")
        return *none, *_solved_again(ctx.again, y, v, tensors, needs)


def _constant(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


def _solved_again(
    again: Again, y: Tensor, v: Tensor, tensors: list[Tensor | None], needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """The gradients of a common solve, which are differentiable if this is recorded."""
    recorded = torch.is_grad_enabled()
    if not recorded:
        tensors = [
            None if x is None else x.detach().requires_grad_(need)
            for x, need in zip(tensors, needs)
        ]
    with torch.enable_grad():
        u = again(*tensors, init=y.detach())
        wanted = [x for x, need in zip(tensors, needs) if x is not None and need]
        found = torch.autograd.grad(u, wanted, v, create_graph=recorded, allow_unused=True)
    left = iter(found)
    return [next(left) if need else None for need in needs]
