"""Where tensors of two devices may meet on CUDA, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.pretend.costs import INDEXED


def copies_to_meet(
    func: Any, args: Sequence[Any], here: type[Tensor], tensors: list[Tensor]
) -> int:
    """How many tensors of the CPU a call copies to the device; an error where CUDA raises one.

    Args:
        here: the class of tensors on the device.
        tensors: all tensors among the arguments.
    """
    name: str = func._schema.name.partition("::")[2]
    others = [x for x in tensors if not isinstance(x, here)]
    if not others or len(others) == len(tensors) or name in ("copy_", "_copy_from", "_to_copy"):
        return 0  # copies are what brings tensors together
    if name in ("lift_fresh", "set_"):
        return 0
    scalars = all(x.dim() == 0 for x in others)
    if name in INDEXED and isinstance(args[0], here):
        # Indices of the CPU are copied, and so is one number that is written to places.
        value = args[2] if len(args) > 2 else None
        if not isinstance(value, Tensor) or isinstance(value, here) or value.dim() == 0:
            return len(others)
    if name == "where" and scalars:
        return len(others)
    if (
        torch.Tag.pointwise in func.tags
        and len(others) == 1
        and scalars
        and not _writes_outside(func, args, here)
        # The kernel of `masked_fill` reads the mask's memory.
        and not (name in ("masked_fill", "masked_fill_") and not isinstance(args[1], here))
    ):
        return 0  # the number is an argument of the kernel
    raise RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{_first(tensors, here).device} and cpu! ({func}: "
        + ", ".join(f"{tuple(x.shape)} on {x.device}" for x in tensors)
        + ")"
    )


def _writes_outside(func: Any, args: Sequence[Any], here: type[Tensor]) -> bool:
    """Whether a call writes to a tensor that is not on the device."""
    return any(
        isinstance(x, Tensor) and not isinstance(x, here)
        for x, argument in zip(args, func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _first(tensors: list[Tensor], here: type[Tensor]) -> Tensor:
    return next(x for x in tensors if isinstance(x, here))
