"""Differentiable solves by products: a `Function` for operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pmaf.gradients.by_products import Incoming, options_of
from pmaf.runtime import ranks
from pmaf.runtime.modes import full_precision
from pmaf.runtime.saved import restored, save
from pmaf.solution import Backward, announce
from pmaf.solvers import Outcome, Solver


def attach_products(
    problem: Any, init: Tensor | None, solver: Solver, throw: bool
) -> tuple[Outcome, Backward]:
    """Solve a problem that has an operator, differentiably in the tensors it is made of."""
    tensors = problem.flat
    mesh = ranks.mesh_of(*tensors)
    # A product of a DTensor and a plain tensor is an error, so all are DTensors, or none is.
    tensors = [ranks.replicate(x, mesh) for x in tensors]
    report = Backward()
    fixed = problem.with_flat([x.detach() for x in tensors])
    found: Any = _SolveByProducts.apply(fixed, solver, init, throw, report, *tensors)
    return Outcome.of(found), report


class _SolveByProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        problem: Any,
        solver: Solver,
        init: Tensor | None,
        throw: bool,
        report: Backward,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        with full_precision(problem.device):
            outcome, seen = problem.solved_by_products(solver, init)
            outcome = problem.finished(outcome)
        announce(outcome, solver, throw)
        ctx.problem, ctx.seen, ctx.solver, ctx.report = problem, seen, solver, report
        ctx.set_materialize_grads(False)
        save(ctx, outcome.value, outcome.multiplier, *tensors)
        ctx.mark_non_differentiable(*outcome[2:6])
        return tuple(outcome[:6])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        v, d_multiplier = grads[:2]
        needs = ctx.needs_input_grad[5:]
        found: Sequence[Tensor | None] = [None for _ in needs]
        (y, multiplier, *tensors), _ = restored(ctx)
        if any(needs) and not (v is None and d_multiplier is None):
            with torch.no_grad(), full_precision(ctx.problem.device):
                options = options_of(ctx.solver)
                given = Incoming(
                    ctx.seen, y, multiplier, v, d_multiplier, options, ctx.report, needs
                )
                found = ctx.problem.gradients_by_products(given)
        return *(None,) * 5, *first_order(found, (v, d_multiplier, *tensors))


def first_order(
    gradients: Sequence[Tensor | None], sources: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients that raise an error when they are differentiated again.

    They depend on their sources, and the graph has to say so: a derivative in a tensor that is not
    in the graph is zero, or missing from a sum, without an error.
    """
    if not torch.is_grad_enabled():
        return list(gradients)
    given = [x for x in sources if x is not None]
    return [None if x is None else _Last.apply(x.detach(), *given) for x in gradients]


class _Last(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *sources: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise RuntimeError(
            "the gradient of a solve by products cannot be differentiated again; "
            "for second derivatives pass A as a dense tensor"
        )
