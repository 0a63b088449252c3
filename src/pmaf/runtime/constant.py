"""Copies of tensors without derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling


def constant(x: Tensor) -> Tensor:
    """A copy without derivatives of any kind, under any transform."""
    if is_compiling():
        # A trace follows the forward pass of a `Function` without gradients, and its tangents.
        return x.detach()
    return _Constant.apply(x)  # pyright: ignore[reportReturnType]


class _Constant(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        return None
