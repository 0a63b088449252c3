"""Forward-mode derivatives of a solution.

An opaque solve has no tangents. So Newton steps on the optimality conditions follow, with the
linear system of the solution. They start at the root, so that they do not change the solution, but
they carry its derivatives, each step one order more: four steps are exact up to fourth derivatives,
in any mix of modes. They are plain torch operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pmaf.autograd.attach import solve_opaquely
from pmaf.gradients import Gradient, Implicit
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
    for _ in range(STEPS):
        moved = step(u)
        # The value stays the one that was found: where eigenvalues nearly repeat, a step magnifies
        # its rounding errors, and the next one those of the first.
        u = found.value + (moved - constant(moved))
    return found._replace(value=u, multiplier=problem.multiplier_at(u))


def constant(x: Tensor) -> Tensor:
    """A copy without derivatives of any kind, under any transform."""
    return _Constant.apply(x)  # pyright: ignore[reportReturnType]


class _Constant(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        return None
