"""Any solver on any problem, at the end of a recipe."""

from __future__ import annotations

from typing import Any, NamedTuple

from pmaf.autograd.attach import attach
from pmaf.autograd.forward_mode import forward, require_forward
from pmaf.autograd.products import attach_products
from pmaf.executors.base import BY_KERNELS, BY_PRODUCTS, Account, Executor
from pmaf.gradients import Gradient, Implicit, Unroll
from pmaf.reductions.base import Found, Report, Tensors
from pmaf.runtime.modes import (
    forward_mode,
    require_eager,
    require_traceable_derivatives,
)
from pmaf.runtime.text import abbreviated
from pmaf.solution import Backward, announce
from pmaf.solvers import Auto, Outcome, Solver
from pmaf.tangent.kept import NOTHING


class Ended(NamedTuple):
    """The end of a solve, with a report."""

    found: Found
    report: Report
    method: str = ""
    backward: Backward | None = None


class Direct(Executor):
    """Solves by a solver and differentiates by a rule, in eager mode, traces and transforms.

    Args:
        problem: without its tensors, as the solver takes it.
    """

    def __init__(self, problem: Any, solver: Solver, gradient: Gradient) -> None:
        super().__init__(problem, tuple(problem.inputs), "")
        self.solver, self.gradient = solver, gradient

    def account(self, tensors: Tensors) -> Account:
        problem = self.problem.changed(**{name: tensors.get(name) for name in self.names})
        solver, why = self.solver, "it is the one that was asked for"
        if isinstance(solver, Auto):
            _, solver, why = problem.choice()
        first, then = problem.course(solver)
        name = abbreviated(solver)
        kept, how = NOTHING.words, self.gradient.words
        if problem.operator is not None:
            how = BY_PRODUCTS
        elif isinstance(self.gradient, Unroll):
            kept = "every step of the solver"
        else:
            kinds = problem.may_keep(solver)
            kept = ", or ".join(dict.fromkeys(kind.words for kind in kinds))
            blank = (kind(*(None,) * len(kind._fields)) for kind in kinds)
            compiled = all(problem.is_differentiated(problem.tensors, x, None) for x in blank)
            how = BY_KERNELS if compiled and isinstance(self.gradient, Implicit) else how
        words = f"{name}: {first}" if first else name
        return Account(words, why, kept, f"{self.gradient!r}: {how}", then)

    def run(self, tensors: Tensors, report: bool, throw: bool) -> Ended:
        """The solution with what is known of it; raises `OutOfRangeError` for other units."""
        problem, init = self.problem.changed(**{x: tensors[x] for x in self.names}), tensors["init"]
        backward = None
        if problem.operator is not None:
            way = self.solver.resolve(problem)
            outcome, backward = attach_products(problem, init, way, throw)
        elif isinstance(self.gradient, Unroll):
            way = self.solver
            outcome = _recorded(problem, init, way, report, throw)
        else:
            way = self.solver.resolve(problem)
            require_traceable_derivatives()
            if forward_mode(*problem.tensors):
                require_forward(self.gradient)
                way = problem.forward_solver(way)
                outcome = forward(problem, init, way, report, throw)
            else:
                outcome = attach(problem, init, way, self.gradient, report, throw)
        _, _, *others = outcome.tensors
        found = problem.found(outcome.value, outcome.multiplier)
        return Ended(found, Report(*others), abbreviated(way) if report else "", backward)


def _recorded(problem: Any, init: Any, solver: Solver, report: bool, throw: bool) -> Outcome:
    """The outcome of a solver whose iterations autograd records."""
    require_eager("gradient=Unroll()", "gradient=Implicit()", problem.matrix)
    found = problem.solved_by(solver, init, report)
    value, multiplier, *others = found.tensors
    found = Outcome.of((value, multiplier, *(x.detach() for x in others)))
    announce(found, solver, throw)
    return found
