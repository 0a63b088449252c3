"""Singular triplets of an operator, differentiable in its tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pmaf.autograd.products import first_order
from pmaf.gradients.by_products import options_of
from pmaf.gradients.triplets_by_products import Arrived, Found, triplet_gradients
from pmaf.linalg.embedding import paired_rows, real_rows
from pmaf.operators import Operator
from pmaf.operators.embedded import Embedded
from pmaf.operators.rows import Rows
from pmaf.runtime import ranks
from pmaf.runtime.modes import full_precision
from pmaf.runtime.saved import restored, save
from pmaf.solution import Backward
from pmaf.solvers import Solver


def attach_triplets(
    A: Operator,
    found: tuple[Tensor, Tensor, Tensor],
    scale: Tensor,
    largest: bool,
    solver: Solver | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Left vectors, values and right vectors that are known, with derivatives.

    Args:
        A: with at least as many rows as columns.
        found: `(*, k, m)`, `(*, k)` and `(*, k, n)`, vectors as rows.
        scale: `(*,)`, about `‖A‖`.
    """
    mesh = ranks.mesh_of(*A.tensors)
    spread = [ranks.replicate(x, mesh) for x in A.tensors]
    fixed = A.with_tensors([x.detach() for x in spread])
    result: Any = _Triplets.apply(fixed, largest, solver, scale, *found, *spread)
    return result


class _Triplets(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        A: Operator,
        largest: bool,
        solver: Solver | None,
        scale: Tensor,
        left: Tensor,
        values: Tensor,
        right: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.A, ctx.largest, ctx.solver = A, largest, solver
        ctx.set_materialize_grads(False)
        found = left.clone(), values.clone(), right.clone()
        save(ctx, left, values, right, scale, *tensors)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        kept, _ = restored(ctx)
        (*found, scale), tensors = kept[:4], kept[4:]
        needs = ctx.needs_input_grad[7:]
        none = (None,) * 7
        if not any(needs) or all(x is None for x in grads):
            return *none, *(None for _ in needs)
        arrived = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(found, grads)]
        A, batch = ctx.A, ctx.A.batch_shape
        if A.dtype.is_complex:
            # The rows of y and of iy, of which only the first are seen.
            A, (left, values, right) = Embedded(A), found
            found = paired_rows(left), values.repeat_interleave(2, -1), paired_rows(right)
            rows = (real_rows(arrived[0]), arrived[1].unsqueeze(-1), real_rows(arrived[2]))
            g_left, g_values, g_right = (_first(x) for x in rows)
            arrived = [g_left, g_values.squeeze(-1), g_right]
        seen = Rows(A, batch)
        parts = (*found, scale, *arrived)
        flat = (x.reshape((seen.entries, *x.shape[len(batch) :])) for x in parts)
        left, values, right, scale, *arrived = flat
        with torch.no_grad(), full_precision(A.device):
            gradients = triplet_gradients(
                seen,
                Found(left, values, right, scale),
                Arrived(*arrived),
                ctx.largest,
                options_of(ctx.solver),
                Backward(),
                needs,
            )
        return *none, *first_order(gradients, (*grads, *tensors))


def _first(rows: Tensor) -> Tensor:
    """Rows `(*, k, n)`, each of them followed by zeros."""
    return torch.stack([rows, torch.zeros_like(rows)], -2).flatten(-3, -2)
