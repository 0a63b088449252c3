"""The node that a solve leaves in the graph in eager mode, for every problem and every solver.

The solve itself runs before, and autograd does not record it. What differs between solves by
kernels, by torch and by products is how a gradient is computed: that is a `Pull`. Products with
operators, functions of vectors and gradients of gradients leave the same node.

What autograd records inside of `full_precision` is differentiated outside of it: in TF32 if the
user has chosen that. So, where digits may be lost, a piece of the graph that is made of operations
of torch becomes such a node, too, whose backward pass is inside (`exactly`). There is none in a
trace and in the transforms of `torch.func`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling

from pmaf.runtime.modes import forward_mode, full_precision, plain
from pmaf.runtime.precision import is_reduced
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
        source, needs = ctx.source, ctx.needs_input_grad[3:]
        if _is_grad_enabled() and not is_compiling() and _loses_digits(source):
            return None, None, None, *_recorded(source, (first, last), parts, grads, same, needs)
        saved = _named(Saved, (parts[:first], parts[first:last], parts[last:], same))
        return None, None, None, *source.pull(saved, grads, needs)


def _loses_digits(pull: Pull) -> bool:
    """Whether derivatives of the gradients would not be in full precision."""
    return is_reduced() and not getattr(pull, "is_one_node", False)


def _recorded(
    pull: Pull,
    ends: tuple[int, int],
    parts: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    same: bool,
    needs: Sequence[bool],
) -> Sequence[Tensor | None]:
    """Gradients whose own derivatives are in full precision."""
    (first, last), outputs = ends, len(grads)

    def gradients(*given: Any) -> Sequence[Tensor | None]:
        count = len(given) - outputs
        held = given[last:count]
        return pull.pull(Saved(given[:first], given[first:last], held, same), given[count:], needs)

    return recorded_as_one(gradients, (*parts, *grads))


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
_is_grad_enabled = torch.is_grad_enabled


# Derivatives of every order in full precision.


def exactly(function: Callable[..., Any], *tensors: Tensor | None) -> Any:
    """`function(*tensors)`, a tensor or several; autograd records nothing else that they need."""
    first: Any = tensors[0]
    with full_precision(first.device):
        if is_compiling() or not is_reduced():
            return function(*tensors)
        found: Any = None

        def several(*parts: Tensor | None) -> Sequence[Tensor]:
            nonlocal found
            found = function(*parts)
            return (found,) if isinstance(found, Tensor) else found

        parts = recorded_as_one(several, tensors)
        return parts[0] if isinstance(found, Tensor) else parts


def recorded_as_one(
    function: Callable[..., Sequence[Tensor | None]], tensors: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """The outputs of a function of tensors, in full precision, as one node of the graph."""
    given = [x for x in tensors if x is not None]
    records = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    usual = all(plain(x) and x.layout is torch.strided for x in given)
    with full_precision(given[0].device):
        if not (records and usual) or forward_mode(*given):
            return function(*tensors)
        leaves = [_leaf(x) for x in tensors]
        outer = [x for x in given if x.requires_grad]
        inner = [x for x in leaves if x is not None and x.requires_grad]
        return _as_node(function(*leaves), inner, outer)


def _leaf(x: Tensor | None) -> Tensor | None:
    """The start of a graph that does not continue outside, where the node connects it.

    Otherwise `torch.autograd.grad` would follow the graph outside as well, from one tensor to
    another, and hooks on tensors would run twice.
    """
    return x.detach().requires_grad_() if x is not None and x.requires_grad else x


def _as_node(
    outputs: Sequence[Tensor | None], inner: Sequence[Tensor | None], outer: Sequence[Tensor]
) -> list[Tensor | None]:
    """Outputs, which autograd has recorded from the inner tensors, as those of the outer ones."""
    graphs = [x for x in outputs if x is not None and x.requires_grad]
    if not graphs:
        return [*outputs]
    found = tuple(x.detach() for x in graphs)
    ends = iter(attach_solved(_Inside(graphs, inner), found, (), *outer))
    return [next(ends) if x is not None and x.requires_grad else x for x in outputs]


class _Inside:
    """The derivatives of outputs of which autograd has recorded how they follow from leaves."""

    uses_found = False
    is_one_node = True

    def __init__(self, graphs: Sequence[Tensor], leaves: Sequence[Any]) -> None:
        self.graphs, self.leaves = graphs, leaves

    def pull(
        self, saved: Saved, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        outputs = [x for x, dx in zip(self.graphs, grads) if dx is not None]
        arrived = [dx for dx in grads if dx is not None]
        wanted = [x for x, needed in zip(self.leaves, needs) if needed]
        again = torch.is_grad_enabled()

        def gradients(*incoming: Tensor) -> Sequence[Tensor | None]:
            return torch.autograd.grad(
                outputs,
                wanted,
                incoming,
                create_graph=again,
                retain_graph=True,
                allow_unused=True,
            )

        with full_precision(outputs[0].device):
            if again:
                incoming: list[Any] = [_leaf(x) for x in arrived]
                inner = [*self.leaves, *(x for x in incoming if x.requires_grad)]
                outer = [*saved.tensors, *(x for x in arrived if x.requires_grad)]
                found = _as_node(gradients(*incoming), inner, outer)
            else:
                found = gradients(*arrived)
        left = iter(found)
        return [next(left) if needed else None for needed in needs]
