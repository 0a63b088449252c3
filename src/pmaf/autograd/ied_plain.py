"""IED without a trace or a transform around it: one node in the graph, and few calls.

The solve of a small matrix costs what its calls into PyTorch cost. Where nobody has to see
an operator of fixed shapes, what the solver left behind goes to the backward pass as it
is, and everything that is not differentiated happens inside the node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pmaf.autograd.ied_attach import full_precision, pullback, solve_as_given
from pmaf.autograd.ied_rules import EigenConditions
from pmaf.gradients import Gradient
from pmaf.runtime.threads import OneThread
from pmaf.solution import Solution
from pmaf.solvers import Solver
from pmaf.tangent.bordered import Helper

if TYPE_CHECKING:
    from pmaf.layers.ied import PrincipalEigenvectors


def attach_plain(
    problem: PrincipalEigenvectors,
    A: Tensor,
    init: Tensor | None,
    solver: Solver,
    gradient: Gradient,
    report: bool,
    throw: bool,
) -> Solution:
    """Solve for the problem's `A`, or `−A` for the smallest, and attach the gradient."""
    aside: list[Tensor] = []
    found: Any = _Ied.apply(A, problem, init, solver, gradient, report, throw, aside)
    return Solution(*found, *aside)


class _Ied(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        A: Tensor,
        problem: PrincipalEigenvectors,
        init: Tensor | None,
        solver: Solver,
        gradient: Gradient,
        report: bool,
        throw: bool,
        aside: list[Tensor],
    ) -> tuple[Tensor, ...]:
        found = solve_as_given(A, init, problem.width, problem.symmetric, solver, report, throw)
        seen = problem.present(found._replace(value=found.value.contiguous()))
        ctx.problem, ctx.gradient = problem, gradient
        # What is not differentiated does not have to pass through the node.
        aside.extend((seen.residual, seen.gap, seen.iterations, seen.converged))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(A, seen.value, seen.multiplier, found.gap, found.basis, found.spread)
        return seen.value, seen.multiplier

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 7
        v, d_values = grads
        if v is None and d_values is None:
            return None, *nothing
        problem = ctx.problem
        A, vectors, values, *rest = ctx.saved_tensors
        y, values = _rows(problem, vectors), _columns(problem, values)
        v = None if v is None else _rows(problem, v)
        d_values = None if d_values is None else _columns(problem, d_values)
        helper = Helper(values.detach(), *rest)
        conditions = EigenConditions(A, y, values, d_values, problem.symmetric, helper)
        with full_precision(A), OneThread(A):
            return pullback(conditions, ctx.gradient, v), *nothing


def _rows(problem: PrincipalEigenvectors, vectors: Tensor) -> Tensor:
    """Vectors as the solver has them, `(*, k, n)`."""
    rows = vectors.unsqueeze(-2) if problem.k is None else vectors.mT
    return rows.flip(-2) if problem.flipped else rows


def _columns(problem: PrincipalEigenvectors, values: Tensor) -> Tensor:
    """Values as the solver has them, `(*, k)`."""
    values = values.unsqueeze(-1) if problem.k is None else values
    values = values.flip(-1) if problem.flipped else values
    return values if problem.largest else -values
