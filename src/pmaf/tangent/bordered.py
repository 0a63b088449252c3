"""The kernel of implicit differentiation, shared by all layers.

At a solution with orthonormal rows `Y` (one for LESS, k for IED), a gradient needs, for each
incoming row `v`, the solution `z` of the bordered system

    [ H   Yᵀ ] [ z ]   [ v ]
    [ Y   0  ] [ ν ] = [ 0 ],

with all rows of `Y` in the border, or those that `BorderedSystem.linked` selects.

`H` depends on the tensors of the problem and on a shift for each row. Each `BorderedSystem` has its
own ways to solve, of which what the forward pass kept chooses one. The derivative of the solution
is the same for all systems and is implemented below. It is a solve of the same kind, so that
derivatives of any order exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pmaf.runtime.modes import full_precision, plain
from pmaf.runtime.saved import restored, save
from pmaf.tangent.kept import NOTHING, Kept

Tensors = tuple[Tensor, ...]


class State(NamedTuple):
    """Results of the forward pass that the solve uses; they are never differentiated."""

    shift: Tensor  # (*, k), the shifts, as accurate as the solver's
    gap: Tensor  # (*,), smallest eigenvalue of H
    kept: Kept


class BorderedSystem:
    """A family of symmetric matrices `H(tensors, shift)`, without state of its own.

    Vectors come as rows: `v`, `w` and `z` are `(*, k, n)`, `y` is `(*, q, n)`.
    """

    # What was kept chooses how `z` is found. This computation is not differentiated.

    def solve_anew(self, v: Tensor, y: Tensor, tensors: Tensors, state: State) -> Tensor:
        raise NotImplementedError

    def solve_in_basis(self, v: Tensor, y: Tensor, tensors: Tensors, state: State) -> Tensor:
        raise NotImplementedError

    def solve_factored(self, v: Tensor, y: Tensor, tensors: Tensors, state: State) -> Tensor:
        return self.solve_anew(v, y, tensors, state)

    def linked(self, tensors: Tensors, state: State) -> Tensor | None:
        """A mask `(*, k, q)` of the rows of `y` that are in the border for each row of `v`.

        None stands for all of them.
        """
        return None

    def product(self, z: Tensor, tensors: Tensors, shift: Tensor) -> Tensor:
        """`H z`, differentiable."""
        raise NotImplementedError

    def pullback(
        self, w: Tensor, z: Tensor, tensors: Tensors, shift: Tensor
    ) -> tuple[tuple[Tensor | None, ...], Tensor]:
        """Gradients of `Σ wᵀ H z` in the tensors and the shifts."""
        raise NotImplementedError


def coupled(values: Tensor, within: Callable[[], Tensor]) -> Tensor:
    """The shifts of k rows as a matrix `(*, k, k)`, for systems that equal values couple.

    `within` returns the matrix in the span of the rows, whose diagonal are the values. All its
    other entries are zero, but their derivatives are not; they are left out if nothing records.
    """
    shift = torch.diag_embed(values)
    k = values.shape[-1]
    if k == 1 or not torch.is_grad_enabled():
        return shift
    itself = torch.eye(k, dtype=torch.bool, device=values.device)
    coupling = within().masked_fill(itself, 0)
    return shift + 0.5 * (coupling + coupling.mT)


def tangent_solve(
    system: BorderedSystem, v: Tensor, y: Tensor, tensors: Tensors, shift: Tensor, state: State
) -> Tensor:
    """The solution `z` of the bordered system, differentiable in `v`, `y`, tensors and shift."""
    if plain(v) and not torch.is_grad_enabled():
        return state.kept.solve(system, v, y, tensors, state)  # nothing is recorded
    first, second = (*tensors, None)[:2]
    kept = (*state.kept, None, None)[:2]
    return _TangentSolve.apply(  # pyright: ignore[reportReturnType]
        system, type(state.kept), v, y, first, second, shift, state.shift, state.gap, *kept
    )


class _TangentSolve(torch.autograd.Function):
    generate_vmap_rule = True

    # torch.compile recognises a forward without ctx by its number of arguments: *args fails.
    @staticmethod
    def forward(
        system: BorderedSystem,
        kind: Any,
        v: Tensor,
        y: Tensor,
        first: Tensor,
        second: Tensor | None,
        shift: Tensor,
        shift_value: Tensor,
        gap: Tensor,
        kept: Tensor | None,
        kept_too: Tensor | None,
    ) -> Tensor:
        # Autograd differentiates in `shift`; the solve uses `shift_value`, which is more accurate.
        state = State(shift_value, gap, kind(*(kept, kept_too)[: len(kind._fields)]))
        return state.kept.solve(system, v, y, _given(first, second), state)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.system, ctx.kind, *tensors = inputs
        save(ctx, *tensors, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        system = ctx.system
        (v, y, first, second, shift, shift_value, gap, *kept, z), same = restored(ctx)
        kind = ctx.kind
        state = State(shift_value, gap, kind(*kept[: len(kind._fields)]) if same else NOTHING)
        tensors = _given(first, second)
        (incoming,) = grads
        with full_precision(first.device):
            w = tangent_solve(system, incoming, y, tensors, shift, state)
            nu = (v - system.product(z, tensors, shift)) @ y.mT
            omega = (incoming - system.product(w, tensors, shift)) @ y.mT
            d_tensors, d_shift = system.pullback(w, z, tensors, shift)
            linked = system.linked(tuple(x.detach() for x in tensors), state)
            if linked is not None:
                nu, omega = (torch.where(linked, x, 0) for x in (nu, omega))
                # Rows of `y` beyond those of `v` have no shift.
                d_shift = torch.where(linked[..., : d_shift.shape[-1]], d_shift, 0)
            dy = -(nu.mT @ w + omega.mT @ z)
        d_tensors = (*(None if x is None else -x for x in d_tensors), None)[:2]
        return None, None, w, dy, *d_tensors, -d_shift, None, None, None, None


def _given(*tensors: Tensor | None) -> Tensors:
    return tuple(x for x in tensors if x is not None)
