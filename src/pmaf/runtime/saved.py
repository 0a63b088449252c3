"""Tensors that a node of the graph saves for its backward pass.

Hooks on saved tensors, such as `torch.autograd.graph.saved_tensors_hooks`, may return other tensors
than were saved: on another device, or of another dtype, after they were offloaded or compressed. A
product of torch then raises an error or promotes. A compiled kernel would read whatever is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from pmaf.runtime.modes import has_numbers, transformed

Form = tuple[torch.dtype, torch.Size, torch.device]


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """Save tensors for the backward pass, with their forms, which `restored` compares."""
    ctx.save_for_backward(*tensors)
    # No hook is between the passes of a trace or a transform.
    known = not is_compiling() and not transformed()
    ctx.forms = [_form(x) for x in tensors] if known else None


def restored(ctx: Any) -> tuple[tuple[Any, ...], bool]:
    """The saved tensors in their forms, and whether they have come back in them.

    If they have not, they have the digits that the hooks have left them, and everything that can be
    computed again had better be.
    """
    tensors, forms = ctx.saved_tensors, ctx.forms
    if forms is None or [_form(x) for x in tensors] == forms:
        return tensors, True
    return tuple(_converted(x, form) for x, form in zip(tensors, forms)), False


def _form(x: Tensor | None) -> Form | None:
    return None if x is None else (x.dtype, x.shape, x.device)


def _converted(x: Tensor | None, form: Form | None) -> Tensor | None:
    if x is None or form is None:
        return None
    dtype, shape, device = form
    known = has_numbers(x) and not (x.is_meta and device.type != "meta")
    if not known or x.shape != shape or x.is_complex() != dtype.is_complex:
        raise RuntimeError(
            f"a tensor was saved for the backward pass as {_words(dtype, shape, device)}, and a "
            f"hook on saved tensors returned {_words(x.dtype, x.shape, x.device)} of type "
            f"{type(x).__name__}; its unpack function has to return the numbers that its pack "
            "function was given"
        )
    return x.to(device, dtype)


def _words(dtype: torch.dtype, shape: torch.Size, device: torch.device) -> str:
    return f"{dtype} of shape {tuple(shape)} on {device}"
