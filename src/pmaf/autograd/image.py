"""Products with an operator, differentiable in its tensors and in the vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pmaf.autograd.products import first_order
from pmaf.operators import Operator
from pmaf.runtime import ranks
from pmaf.runtime.modes import full_precision
from pmaf.runtime.saved import restored, save


def image(A: Operator, rows: Tensor) -> Tensor:
    """`A x` for every row, `(*, p, n)` to `(*, p, m)`, as tensors that every rank has."""
    tensors = A.tensors
    mesh = ranks.mesh_of(*tensors)
    spread = [ranks.replicate(x, mesh) for x in tensors]
    fixed = A.with_tensors([x.detach() for x in spread])
    return _Image.apply(fixed, rows, *spread)  # pyright: ignore[reportReturnType]


class _Image(torch.autograd.Function):
    """Autograd cannot follow the products of every operator; `pullback` is their derivative."""

    @staticmethod
    def forward(ctx: Any, A: Operator, rows: Tensor, *tensors: Tensor) -> Tensor:
        ctx.A, ctx.mesh = A, ranks.mesh_of(*tensors)
        save(ctx, rows, *tensors)
        with full_precision(A.device):
            return ranks.whole(A.matvec(ranks.replicate(rows, ctx.mesh)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        A, ((rows, *tensors), _) = ctx.A, restored(ctx)
        right, left = (ranks.replicate(x, ctx.mesh) for x in (rows, grads[0]))
        with torch.no_grad(), full_precision(A.device):
            found = A.pullback(left, right, ctx.needs_input_grad[2:])
            parts = [None if dx is None else ranks.alike(dx, x) for dx, x in zip(found, tensors)]
            back = ranks.whole(A.rmatvec(left)) if ctx.needs_input_grad[1] else None
        return None, *first_order([back, *parts], (grads[0], rows, *tensors))
