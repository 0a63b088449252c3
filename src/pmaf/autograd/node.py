"""The node that a solve leaves in the graph in eager mode, for every problem and every solver.

The solve itself runs before, and autograd does not record it. What differs between solves by
kernels, by torch and by products is how a gradient is computed: that is a `Pull`. Products with
operators, functions of vectors and gradients of gradients leave the same node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pmaf.runtime.saved import restored, save


class Saved(NamedTuple):
    """What a solve has saved for its backward pass."""

    tensors: tuple[Any, ...]  # the inputs that get gradients
    found: tuple[Any, ...]  # the outputs, a value and its multiplier unless the pull says otherwise
    held: tuple[Any, ...]  # results of the solve that a gradient needs; some may be None
    same: bool  # whether no hook on saved tensors has changed the form of any of these


class Pull(Protocol):
    """How a solution is differentiated.

    The outputs are saved for it, so that nobody may write into them before the backward pass,
    unless the class says `uses_found = False`.
    """

    def pull(
        self, saved: Saved, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Gradients of the tensors, given those of the outputs, of which not all are None."""
        ...


class Solved(torch.autograd.Function):
    """The outputs of a solve, differentiable in the tensors of its problem."""

    @staticmethod
    def forward(
        ctx: Any, pull: Pull, found: tuple[Tensor, ...], held: tuple[Any, ...], *tensors: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        known = found if getattr(pull, "uses_found", True) else ()
        ctx.source, ctx.inputs, ctx.outputs = pull, len(tensors), len(tensors) + len(known)
        save(ctx, *tensors, *known, *held)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        first, last = ctx.inputs, ctx.outputs
        for dx in grads:
            if dx is not None:
                break
        else:
            return (None,) * (3 + first)
        parts, same = restored(ctx)
        saved = _named(Saved, (parts[:first], parts[first:last], parts[last:], same))
        return None, None, None, *ctx.source.pull(saved, grads, ctx.needs_input_grad[3:])


class Refused:
    """Outputs that cannot be differentiated; a derivative of them is an error that says why."""

    uses_found = False

    def __init__(self, why: str) -> None:
        self.why = why

    def pull(
        self, saved: Saved, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        raise RuntimeError(self.why)


# The constructor of a named tuple is a function of Python, in which this is the only line.
_named = tuple.__new__
# `Function.apply` binds the arguments to the signature of `forward`, to fill in defaults, and looks
# for the wrappers of transforms. In eager mode both are unnecessary, and take as long as the
# decomposition of a small matrix. So this is the method of the base class of `Function`.
attach_solved: Any = super(torch.autograd.Function, Solved).apply  # pyright: ignore
