"""The one loop behind every iterative method.

A method defines a step and a stopping rule. Each batch entry runs until *its own* rule stops it and
does not change after that, exactly as if it had been solved by itself. Steps are counted per entry.
An entry that becomes non-finite keeps its last finite state and counts as not finished.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

State = TypeVar("State", bound=tuple[Any, ...])


class Run(NamedTuple, Generic[State]):
    """The final state of every entry."""

    state: State
    iterations: Tensor  # (*,) int64, the steps each entry took
    finished: Tensor  # (*,) bool, whether its own rule stopped it


def iterate(
    step: Callable[[State], tuple[State, Tensor]],
    state: State,
    *,
    active: Tensor,
    max_iterations: int,
    straight: Callable[[State], State] | None = None,
) -> Run[State]:
    """Repeat `step` on the entries of the mask `active` until they are done.

    `step` maps a state, a named tuple of tensors of shape `(*, …)`, to the next one
    and a mask `(*,)` of the entries that need no further step.

    `straight` is the same step for a method that never stops early, without the checks for
    non-finite entries. It runs first, and its result is returned if all of it is finite.
    """
    if straight is not None:
        run = state
        for _ in range(max_iterations):
            run = straight(run)
        if all(bool(torch.isfinite(x).all()) for x in run):
            iterations = torch.full_like(active, max_iterations, dtype=torch.int64)
            return Run(run, iterations, torch.zeros_like(active))
    iterations = torch.zeros_like(active, dtype=torch.int64)
    finished = ~active
    for _ in range(max_iterations):
        if not active.any():
            break
        proposed, done = step(state)
        moving = active
        for x in proposed:
            moving = moving & torch.isfinite(_rows(x, active)).all(-1)
        state = type(state)(
            *(torch.where(_columns(moving, x), x, old) for x, old in zip(proposed, state))
        )
        iterations = iterations + active
        finished = finished | (moving & done)
        active = moving & ~done
    return Run(state, iterations, finished)


def _rows(x: Tensor, mask: Tensor) -> Tensor:
    """`x` as one row of numbers per entry of `mask`."""
    return x.reshape(*mask.shape, -1)


def _columns(mask: Tensor, x: Tensor) -> Tensor:
    """`mask` with the trailing dimensions that let it broadcast against `x`."""
    return mask.reshape(mask.shape + (1,) * (x.dim() - mask.dim()))
