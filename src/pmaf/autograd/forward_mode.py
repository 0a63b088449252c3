"""Forward-mode derivatives of a solution.

An opaque solve has no tangents. So Newton steps on the optimality conditions follow, with the
linear system of the solution. They start at the root, so that they do not change the solution, but
they carry its derivatives, each step one order more: four steps are exact up to fourth derivatives,
in any mix of modes. They are plain torch operations. A step of triplets divides rounding errors of
the last one by gaps: no more of them are taken than there are derivatives, if that is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from pmaf.autograd.attach import solve_opaquely
from pmaf.gradients import Gradient, Implicit
from pmaf.runtime.constant import constant
from pmaf.runtime.modes import transforms_around, unwrapped
from pmaf.solvers import Outcome, Solver

STEPS = 4


def require_forward(gradient: Gradient) -> None:
    """The rule is `Implicit`, the only one with a forward mode."""
    if not isinstance(gradient, Implicit):
        raise TypeError(
            f"gradient={gradient!r} is a rule for reverse mode; "
            "use gradient=Implicit() with torch.func.jvp, jacfwd or hessian"
        )


def forward(
    problem: Any, init: Tensor | None, solver: Solver, report: bool, throw: bool
) -> Outcome:
    """The solution of a problem, and its multiplier, with tangents."""
    fixed = problem.with_tensors(*(constant(x) for x in problem.tensors))
    init = None if init is None else constant(init)
    found = solve_opaquely(fixed, init, solver, report, throw)
    step = problem.newton(fixed, found, solve_opaquely)
    u = found.value
    for _ in range(_steps(problem.tensors) if problem.few_steps else STEPS):
        moved = step(u)
        # The value stays the one that was found: where eigenvalues nearly repeat, a step magnifies
        # its rounding errors, and the next one those of the first.
        u = found.value + (moved - constant(moved))
    return found._replace(value=u, multiplier=problem.multiplier_at(u))


def _steps(tensors: Sequence[Tensor]) -> int:
    """How many steps carry all derivatives that may be asked for."""
    if is_compiling() or any(unwrapped(x).requires_grad for x in tensors):
        return STEPS  # how often something outside differentiates is not known
    return min(STEPS, max(transforms_around(x) for x in tensors))
