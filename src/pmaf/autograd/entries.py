"""The entries of an operator, differentiable in its tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pmaf.autograd.products import first_order
from pmaf.operators import Operator
from pmaf.runtime.saved import restored, save


def entries(A: Operator) -> Tensor:
    """The entries of an operator, `(*, m, n)`, by n products, with gradients to its tensors."""
    fixed = A.with_tensors([x.detach() for x in A.tensors])
    return _Entries.apply(fixed, *A.tensors)  # pyright: ignore[reportReturnType]


class _Entries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, A: Operator, *tensors: Tensor) -> Tensor:
        ctx.A = A
        save(ctx, *tensors)
        return A.matvec(_units(A)).mT.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        left = grads[0].detach().mT.contiguous()
        found = ctx.A.pullback(left, _units(ctx.A), ctx.needs_input_grad[1:])
        return None, *first_order(found, (grads[0], *restored(ctx)[0]))


def _units(A: Operator) -> Tensor:
    n = A.shape[-1]
    return torch.eye(n, dtype=A.dtype, device=A.device).expand(*A.batch_shape, n, n)
