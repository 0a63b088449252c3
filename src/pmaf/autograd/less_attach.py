"""How a gradient is attached to LESS: an opaque operator inside an `autograd.Function`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pmaf import errors
from pmaf.autograd.less_rules import LessConditions
from pmaf.gradients import Gradient
from pmaf.linalg.products import matvec
from pmaf.runtime.modes import plain
from pmaf.runtime.threads import OneThread
from pmaf.solution import announce, warn_of_gradient
from pmaf.solvers import Outcome, Solver
from pmaf.solvers.base import decode, encode, owned
from pmaf.tangent.bordered import Helper


def attach(
    A: Tensor,
    b: Tensor,
    init: Tensor | None,
    solver: Solver,
    gradient: Gradient,
    report: bool,
    throw: bool,
) -> Outcome:
    """Solve on the unit sphere, differentiably in `A` and `b`."""
    found: Any = _Less.apply(A, b, init, solver, gradient, report, throw)
    return Outcome(*found)


@torch.library.custom_op(
    "pmaf::less",
    mutates_args=(),
    schema="(Tensor A, Tensor b, Tensor? init, str solver, bool report, bool throw) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _less_op(
    A: Tensor, b: Tensor, init: Tensor | None, solver: str, report: bool, throw: bool
) -> tuple[Tensor, ...]:
    return owned(_solve(A, b, init, decode(solver), report, throw))


def _solve(
    A: Tensor, b: Tensor, init: Tensor | None, solver: Solver, report: bool, throw: bool
) -> Outcome:
    from pmaf.layers.less import SphereLeastSquares

    if init is not None:
        errors.require_finite(init=(init, 1))
    with torch.autocast(A.device.type, enabled=False), OneThread(A):
        outcome = solver.solve(SphereLeastSquares(A, b), init=init, report=report)
    announce(outcome, solver, throw)
    return outcome


@_less_op.register_fake
def _less_fake(
    A: Tensor, b: Tensor, init: Tensor | None, solver: str, report: bool, throw: bool
) -> tuple[Tensor, ...]:
    m, n = A.shape[-2:]
    batch = torch.broadcast_shapes(A.shape[:-2], b.shape[:-1])
    row = A.new_empty(batch)
    method: Solver = decode(solver)
    held = A.shape[:-2] if method.keeps_basis else batch
    p = min(m, n) if method.keeps_basis else 0
    return (
        A.new_empty((*batch, n)),
        row,
        torch.empty_like(row),
        torch.empty_like(row),
        torch.empty_like(row, dtype=torch.int64),
        torch.empty_like(row, dtype=torch.bool),
        A.new_empty((*held, n if method.keeps_factor else p, n)),
        A.new_empty((*held, p)),
    )


@_less_op.register_vmap
def _less_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    A, b, init, solver, *rest = args
    if in_dims[0] is None:
        solver = encode(decode(solver).sharing())
    rank = max(
        x.dim() - own - (axis is not None)
        for x, axis, own in zip((A, b, init), in_dims, (2, 1, 1))
        if x is not None
    )

    def lead(x: Tensor | None, axis: int | None, own: int) -> Tensor | None:
        """Move the mapped dimension to the front of all batch dimensions."""
        if x is None or axis is None:
            return x
        x = x.movedim(axis, 0)
        missing = rank - (x.dim() - own - 1)
        return x.reshape(x.shape[0], *(1,) * missing, *x.shape[1:])

    tensors = [lead(x, axis, own) for x, axis, own in zip((A, b, init), in_dims, (2, 1, 1))]
    if in_dims[0] is None and in_dims[1] is None:
        # Mapped over init alone: the problem is the same one each time.
        tensors[1] = lead(b.expand(info.batch_size, *b.shape), 0, 1)
    outputs = torch.ops.pmaf.less(*tensors, solver, *rest)
    mapped_A = in_dims[0] is not None or not decode(solver).keeps_basis
    return outputs, (*(0,) * 6, *(0 if mapped_A else None,) * 2)


class _Less(torch.autograd.Function):
    """The differentiable solve on the unit sphere: an opaque operator and its rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        A: Tensor,
        b: Tensor,
        init: Tensor | None,
        solver: Solver,
        gradient: Gradient,
        report: bool,
        throw: bool,
    ) -> tuple[Tensor, ...]:
        # Only a trace or a transform needs the operator; in eager mode its dispatch costs time.
        if plain(A) and plain(b):
            return tuple(x.contiguous() for x in _solve(A, b, init, solver, report, throw))
        return torch.ops.pmaf.less(A, b, init, encode(solver), report, throw)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        A, b, _, solver, ctx.gradient, _, _ = inputs
        outcome = Outcome(*output)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(
            A, b, outcome.value, outcome.multiplier, outcome.gap, outcome.basis, outcome.spread
        )
        # A search by products that has not converged may have no digits of the solution.
        by_products = plain(outcome.value) and solver.matrix_free
        ctx.doubtful = outcome.converged.logical_not() if by_products else None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        incoming = grads[0]
        nothing = (None,) * 5
        if incoming is None:
            return None, None, *nothing
        if ctx.doubtful is not None:
            warn_of_gradient(ctx.doubtful)
        A, b, y, multiplier, *rest = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        with torch.autocast(A.device.type, enabled=False), OneThread(A):
            helper = Helper(multiplier.unsqueeze(-1), *rest)
            conditions = LessConditions(A, b, y, matvec(A, y), helper)
            dA, db = ctx.gradient.pullback(conditions, incoming, needs)
        return (
            None if dA is None else dA.sum_to_size(A.shape),
            None if db is None else db.sum_to_size(b.shape),
            *nothing,
        )
