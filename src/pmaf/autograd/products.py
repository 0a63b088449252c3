"""Differentiable solves by products, for operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pmaf.autograd.node import Refused, Saved, Solved, attach_solved
from pmaf.gradients.by_products import Incoming, options_of
from pmaf.runtime import ranks
from pmaf.runtime.modes import full_precision
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
    fixed = problem.with_flat([x.detach() for x in tensors])
    with torch.no_grad():
        outcome, seen = fixed.solved_by_products(solver, init)
    announce(outcome, solver, throw)
    pull = _ByProducts(fixed, seen, solver)
    value, multiplier = attach_solved(pull, (outcome.value, outcome.multiplier), (), *tensors)
    return outcome._replace(value=value, multiplier=multiplier), pull.report


class _ByProducts:
    """Gradients by products with the operator."""

    def __init__(self, problem: Any, seen: Any, solver: Solver) -> None:
        self.problem, self.seen, self.options = problem, seen, options_of(solver)
        self.report = Backward()

    def pull(
        self, saved: Saved, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        with torch.no_grad(), full_precision(self.problem.device):
            y, multiplier = saved.found
            v, d = grads
            given = Incoming(self.seen, y, multiplier, v, d, self.options, self.report, needs)
            found = self.problem.gradients_by_products(given)
        return first_order(found, (*grads, *saved.tensors))


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
    last: Any = Solved.apply
    return [None if x is None else last(_LAST, (x.detach(),), (), *given)[0] for x in gradients]


_LAST = Refused(
    "the gradient of a solve by products cannot be differentiated again; "
    "for second derivatives pass A as a dense tensor"
)
