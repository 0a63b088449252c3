"""What the executors at the end of a recipe have in common.

What follows from shapes, dtypes and options is found when an executor is made; a call allocates,
calls a kernel or a decomposition, and leaves one node in the graph. Kernels differentiate once.
Where the derivative is to be differentiated again, or a kernel fails, the rule of the problem takes
their place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pmaf import native
from pmaf.autograd.eager import completed, may_compile
from pmaf.autograd.node import Saved
from pmaf.gradients import Implicit
from pmaf.gradients.base import Reverse
from pmaf.reductions.base import Found, Tensors
from pmaf.runtime.modes import full_precision
from pmaf.tangent.bordered import State
from pmaf.tangent.kept import Kept, Nothing

# Finds vectors and values for tensors by name on the common path, differentiably.
Common = Callable[[Tensors], Found]


class Account(NamedTuple):
    """What `pmaf.explain` says of the end of a recipe."""

    solver: str  # as the user may write it, and what it does
    why: str
    kept: str
    derivative: str
    otherwise: tuple[
        str, ...
    ] = ()  # what follows for numbers for which the solver does not suffice


class Executor:
    """Solves all calls with one signature, and differentiates them.

    Args:
        problem: without its tensors; its rule differentiates what kernels do not.
        names: of the tensors that the kernels take.
        way: for the log.
    """

    columns = False  # whether several vectors are columns, as the user sees them
    compiles = True  # whether kernels differentiate
    kind: type[Kept] = Nothing  # of what the solve keeps

    def __init__(self, problem: Any, names: tuple[str, ...], way: str) -> None:
        self.problem, self.names, self.way = problem, names, way

    # Where `solve` returns None, in words.
    fails: ClassVar[str] = "the kernels find no proof, or units have to be others"

    def account(self, tensors: Tensors) -> Account:
        """What happens to all tensors of these shapes, for `pmaf.explain`."""
        raise NotImplementedError

    def solve(self, tensors: Tensors) -> Found | None:
        """A solution and its multiplier, or None where the common path has to find all of it."""
        raise NotImplementedError

    def differentiate(
        self,
        tensors: Sequence[Tensor],
        y: Tensor,
        multiplier: Tensor,
        kept: Kept,
        v: Tensor | None,
        d_multiplier: Tensor | None,
        needs: Sequence[bool],
    ) -> native.Gradients:
        """The gradients by kernels; several vectors are rows."""
        raise NotImplementedError

    def pull(
        self, saved: Saved, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """The derivative of the node; see `autograd/node.py`."""
        tensors, (y, multiplier), held, same = saved
        v, d_multiplier = grads
        kind = self.kind
        kept = kind(*held) if same else self.problem.kept_again(tensors, kind)
        if self.columns:
            y, v = y.mT, None if v is None else v.mT
        compiled = None
        if self.compiles and may_compile(v, d_multiplier):
            compiled = self.differentiate(tensors, y, multiplier, kept, v, d_multiplier, needs)
            if compiled.failed is None:
                return compiled.tensors
        state = State(multiplier, multiplier.new_full(tensors[0].shape[:-2], math.nan), kept)
        given = Reverse(tensors, y, state, IMPLICIT, v, d_multiplier, needs)
        if compiled is not None:
            return completed(self.problem, given, compiled)
        with full_precision(y.device):
            return self.problem.gradients(given)


def solved_again(
    common: Callable[[Sequence[Any]], Sequence[Tensor]],
    tensors: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of another solve of the same tensors, which are differentiable if recorded.

    Args:
        common: from the tensors to outputs in the order of `grads`, differentiably.
    """
    recorded = torch.is_grad_enabled()
    if not recorded:
        tensors = [
            None if x is None else x.detach().requires_grad_(need)
            for x, need in zip(tensors, needs)
        ]
    with torch.enable_grad():
        found = common(tensors)
        outputs, given = zip(*((x, v) for x, v in zip(found, grads) if v is not None))
        wanted = [x for x, need in zip(tensors, needs) if x is not None and need]
        parts = torch.autograd.grad(
            outputs, wanted, given, create_graph=recorded, allow_unused=True
        )
    left = iter(parts)
    return [next(left) if need else None for need in needs]


IMPLICIT = Implicit()
# How a solution is differentiated: by kernels, or from what is kept.
BY_KERNELS = (
    "compiled kernels, and operations of torch where the gradient is differentiated again or the "
    "kernels fail"
)
COMPILED = f"{IMPLICIT!r}: {BY_KERNELS}"
OF_TORCH = f"{IMPLICIT!r}: {IMPLICIT.words}"
BY_PRODUCTS = "products with A and its transpose, never its entries"


def records(*tensors: Tensor | None) -> bool:
    """Whether autograd records a call with these tensors."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False
