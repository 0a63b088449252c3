"""The two operators of the library that PyTorch does not look into.

A trace cannot follow loops that depend on numbers, warnings and checks, and neither can `vmap`. So
they stand in a graph as one operator, `pmaf::solve`. What it runs is a `Step`, which is passed to
it as text (`runtime/text.py`): equal texts mean the same step in every process, and a cache of
graphs tells different ones apart. `pmaf::pull` is the derivative of a step. Neither has a rule for
autograd, which would exclude the transforms of `torch.func`: a `Function` around them has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from pmaf.runtime.modes import is_grads_batch, untraced
from pmaf.runtime.text import Named, decode

Operands = Sequence[Tensor | None]
Axes = Sequence[int | None]


class Step(Named):
    """What one of the operators runs; it holds no tensor."""

    def run(self, tensors: Operands) -> Sequence[Tensor]:
        """The outputs, none of which shares memory with another, nor with an operand."""
        raise NotImplementedError

    def outline(self, tensors: Operands) -> Sequence[Tensor]:
        """Tensors of the forms of the outputs, without numbers."""
        raise NotImplementedError

    def mapped(
        self, call: str, tensors: Operands, axes: Axes, size: int
    ) -> tuple[Sequence[Tensor], Sequence[int | None]]:
        """The outputs of one step for operands that are mapped over axes, and their axes."""
        raise NotImplementedError

    def pull(
        self, tensors: Operands, seen: Tensor, grads: Operands, needs: Sequence[bool]
    ) -> Sequence[Tensor]:
        """The gradients of those tensors that need one."""
        raise NotImplementedError

    def pulled(
        self,
        call: str,
        operands: tuple[Operands, Tensor, Operands, Sequence[bool]],
        axes: tuple[Axes, int | None, Axes],
        size: int,
    ) -> Sequence[Tensor]:
        """The same for operands that are mapped; the gradients are mapped over their first axis."""
        raise NotImplementedError


def solve(call: str, *tensors: Tensor | None) -> list[Tensor]:
    """The outputs of a step that is described by a text."""
    if not is_compiling() and any(x is not None and is_grads_batch(x) for x in tensors):
        return _solve_grads_batch(call, tensors)
    return torch.ops.pmaf.solve(tensors, call)


def _solve_grads_batch(call: str, tensors: Operands) -> list[Tensor]:
    """The same under the vmap of `is_grads_batched=True`, which takes no rule for an operator."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    given: list[Any] = [*tensors]
    axes: list[int | None] = [None] * len(given)
    size = 1
    for i, x in enumerate(given):
        if x is not None and is_grads_batch(x):
            given[i], axes[i] = _LEGACY._remove_batch_dim(x, level, size, 0), 0
            size = given[i].shape[0]
    outputs, places = decode(call).mapped(call, given, axes, size)
    return [
        x if i is None else _LEGACY._add_batch_dim(x, i, level) for x, i in zip(outputs, places)
    ]


_LEGACY: Any = torch


def pull(
    call: str, tensors: Operands, seen: Tensor, grads: Operands, needs: Sequence[bool]
) -> list[Tensor]:
    """The gradients of a step: of those of its tensors that need one."""
    return torch.ops.pmaf.pull(tensors, seen, grads, needs, call)


# The host waits inside of the operators, and what they allocate depends on numbers. So a compiler
# must not capture them in a CUDA graph, as `mode="reduce-overhead"` does with everything else.
_ANY, _TAGS = "CompositeExplicitAutograd", (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
torch.library.define("pmaf::solve", "(Tensor?[] tensors, str call) -> Tensor[]", tags=_TAGS)
torch.library.define(
    "pmaf::pull",
    "(Tensor?[] tensors, Tensor seen, Tensor?[] grads, bool[] needs, str call) -> Tensor[]",
    tags=_TAGS,
)


# Outside of a graph a compiler may meet the operators, and would look into them.
@torch.library.impl("pmaf::solve", _ANY)
def _solve(tensors: Operands, call: str) -> list[Tensor]:
    return untraced(_run)(tensors, call)


def _run(tensors: Operands, call: str) -> list[Tensor]:
    return [*decode(call).run(tensors)]


@torch.library.register_fake("pmaf::solve")
def _solve_fake(tensors: Operands, call: str) -> list[Tensor]:
    return [*decode(call).outline(tensors)]


def _solve_vmap(
    info: Any, axes: tuple[Axes, None], tensors: Operands, call: str
) -> tuple[list[Tensor], list[int | None]]:
    outputs, found = decode(call).mapped(call, tensors, axes[0], info.batch_size)
    return [*outputs], [*found]


@torch.library.impl("pmaf::pull", _ANY)
def _pull(
    tensors: Operands, seen: Tensor, grads: Operands, needs: Sequence[bool], call: str
) -> list[Tensor]:
    return untraced(_run_back)(tensors, seen, grads, needs, call)


def _run_back(
    tensors: Operands, seen: Tensor, grads: Operands, needs: Sequence[bool], call: str
) -> list[Tensor]:
    return [*decode(call).pull(tensors, seen, grads, needs)]


@torch.library.register_fake("pmaf::pull")
def _pull_fake(
    tensors: Operands, seen: Tensor, grads: Operands, needs: Sequence[bool], call: str
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, needed in zip(tensors, needs) if needed and x is not None]


def _pull_vmap(info: Any, axes: tuple[Any, ...], *operands: Any) -> tuple[list[Tensor], list[int]]:
    *given, call = operands
    found = decode(call).pulled(call, (*given,), axes[:3], info.batch_size)
    return [*found], [0] * len(found)


torch.library.register_vmap("pmaf::solve", _solve_vmap)
torch.library.register_vmap("pmaf::pull", _pull_vmap)


def led(
    tensors: Operands, axes: Axes, dims: Sequence[int], rank: int | None = None
) -> list[Tensor | None]:
    """Operands whose mapped dimension is the first of their batch dimensions.

    Args:
        dims: of one batch entry of each operand.
        rank: how many batch dimensions there are, the mapped one left out; as many as the operand
            has that has most, unless given.
    """
    if rank is None:
        rank = max(
            x.dim() - own - (axis is not None)
            for x, axis, own in zip(tensors, axes, dims)
            if x is not None
        )
    found: list[Tensor | None] = []
    for x, axis, own in zip(tensors, axes, dims):
        if x is not None and axis is not None:
            x = x.movedim(axis, 0)
            missing = rank - (x.dim() - own - 1)
            x = x.reshape(x.shape[0], *(1,) * missing, *x.shape[1:])
        found.append(x)
    return found
