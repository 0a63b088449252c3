"""Differentiable solves on tensors in eager mode: the solver is called directly.

The dispatch of an opaque operator would take as long as a small solve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pmaf import errors
from pmaf.autograd.node import Saved, attach_solved
from pmaf.gradients import Gradient, Implicit
from pmaf.gradients.base import Reverse
from pmaf.linalg.roundings import OutOfRangeError
from pmaf.native import Gradients
from pmaf.reductions.units import Units
from pmaf.runtime.log import took
from pmaf.runtime.modes import full_precision, plain
from pmaf.runtime.threads import OneThread
from pmaf.solution import announce, warn_of_gradient
from pmaf.solvers import Outcome, Solver
from pmaf.tangent.bordered import State
from pmaf.tangent.kept import Kept


def find(problem: Any, init: Tensor | None, solver: Solver, report: bool, throw: bool) -> Outcome:
    """Run the solver, in full precision, and warn of entries that did not converge."""
    first = problem.first
    if init is not None:
        errors.require_finite(init=(init, problem.start_dims))
    with OneThread(first):
        outcome = problem.solved_by(solver, init, report)
    if problem.may_fail(solver):
        announce(outcome, solver, throw, problem.advice(solver))
    return outcome


def find_in_range(
    problem: Any, init: Tensor | None, solver: Solver, report: bool, throw: bool
) -> Outcome:
    """The same in other units where squares leave the range; nothing of it is differentiated."""
    try:
        return find(problem, init, solver, report, throw)
    except OutOfRangeError as error:
        units, names = Units(problem, error.unit), tuple(problem.inputs)
        posed = units.apply({**dict(zip(names, problem.tensors)), "init": init})
        start = posed.pop("init")
        return units.outcome(find(problem.changed(**posed), start, solver, report, throw))


def attach_eagerly(
    problem: Any,
    init: Tensor | None,
    solver: Solver,
    gradient: Gradient,
    report: bool,
    throw: bool,
) -> Outcome:
    """Solve a problem on plain tensors, differentiably in them."""
    with torch.no_grad():
        found = find(problem, init, solver, report, throw)
    # A search by products that has not converged may have no correct digits.
    doubtful = found.converged.logical_not() if solver.matrix_free else None
    pull = _ByRule(problem, gradient, type(found.kept), doubtful)
    both = found.value.contiguous(), found.multiplier
    value, multiplier = attach_solved(pull, both, (found.gap, *found.kept), *problem.tensors)
    return found._replace(value=value, multiplier=multiplier)


class _ByRule:
    """Gradients by a rule, from what a solver has kept, or by kernels where these differentiate."""

    __slots__ = ("doubtful", "gradient", "kind", "problem")

    def __init__(
        self, problem: Any, gradient: Gradient, kind: type[Kept], doubtful: Tensor | None
    ) -> None:
        self.problem, self.gradient, self.kind, self.doubtful = problem, gradient, kind, doubtful

    def pull(
        self, saved: Saved, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        if self.doubtful is not None:
            warn_of_gradient(self.doubtful)
        tensors, (y, multiplier), (gap, *parts), same = saved
        v, d_multiplier = grads
        problem, kind = self.problem, self.kind
        kept = kind(*parts) if same else problem.kept_again(tensors, kind)
        state = State(multiplier, gap, kept)
        given = Reverse(tensors, y, state, self.gradient, v, d_multiplier, needs)
        implicit = isinstance(self.gradient, Implicit) and may_compile(v, d_multiplier)
        if implicit and problem.is_differentiated(tensors, kept, d_multiplier):
            whole = problem.first_gradients(tensors, y, multiplier, kept, v, d_multiplier, needs)
            return completed(problem, given, whole)
        with full_precision(tensors[0].device), OneThread(tensors[0]):
            found = problem.gradients(given)
        return [
            dx if dx is None or dx.shape == x.shape else dx.sum_to_size(x.shape)
            for dx, x in zip(found, tensors)
        ]


def may_compile(v: Tensor | None, d_multiplier: Tensor | None) -> bool:
    """Whether kernels may differentiate: they do so once, and take plain tensors."""
    incoming = d_multiplier if v is None else v
    return not torch.is_grad_enabled() and incoming is not None and plain(incoming)


def completed(problem: Any, given: Reverse, found: Gradients) -> tuple[Tensor | None, ...]:
    """The gradients of kernels, and those of the rule for entries in which they failed."""
    gradients, failed = found
    if failed is not None:
        took("tangent: common path for some")
        first = given.tensors[0]
        with full_precision(first.device), OneThread(first):
            others = problem.gradients(given.entries(failed))
        for whole, part in zip(gradients, others):
            if whole is not None:
                whole[failed] = part
    return gradients
