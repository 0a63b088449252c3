"""Singular triplets of an operator, differentiable in its tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pmaf.autograd.node import Saved, attach_solved
from pmaf.autograd.products import first_order
from pmaf.gradients.by_products import options_of
from pmaf.gradients.triplets_by_products import Arrived, Found, triplet_gradients
from pmaf.linalg.embedding import paired_rows, real_rows
from pmaf.operators import Operator
from pmaf.operators.embedded import Embedded
from pmaf.operators.rows import Rows
from pmaf.runtime import ranks
from pmaf.runtime.modes import full_precision
from pmaf.solution import Backward
from pmaf.solvers import Krylov, Solver


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
    pull = _OfTriplets(fixed, largest, options_of(solver))
    return attach_solved(pull, tuple(x.clone() for x in found), (scale,), *spread)


class _OfTriplets:
    """Gradients by products, given those of left vectors, of values and of right vectors."""

    def __init__(self, A: Operator, largest: bool, options: Krylov) -> None:
        self.A, self.largest, self.options = A, largest, options

    def pull(
        self, saved: Saved, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        tensors, found, (scale,), _ = saved
        A, batch = self.A, self.A.batch_shape
        arrived = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(found, grads)]
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
            triplets = Found(left, values, right, scale)
            gradients = triplet_gradients(
                seen, triplets, Arrived(*arrived), self.largest, self.options, Backward(), needs
            )
        return first_order(gradients, (*grads, *tensors))


def _first(rows: Tensor) -> Tensor:
    """Rows `(*, k, n)`, each of them followed by zeros."""
    return torch.stack([rows, torch.zeros_like(rows)], -2).flatten(-3, -2)
