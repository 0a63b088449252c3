"""The description of a result, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf.errors import ConvergenceError, ConvergenceWarning
from pmaf.gradients import Gradient, Implicit
from pmaf.gradients.unroll import Unroll
from pmaf.runtime.caller import warn
from pmaf.runtime.checks import looks
from pmaf.runtime.trees import register_tree
from pmaf.solvers import Outcome, Solver
from pmaf.solvers.base import has_form

# The page that says what each warning means, and what to do.
PAGE = "see docs/convergence.md"


@dataclass(eq=False)
class Backward:
    """The report of a backward pass by products; all fields are None before it has run.

    Attributes:
        residual: of its linear system, relative to the incoming gradient, one per entry.
        iterations: products it took.
        converged: whether the residual is down to rounding, one per entry.
    """

    residual: Tensor | None = None
    iterations: int | None = None
    converged: Tensor | None = None

    def fill(self, residual: Tensor, iterations: int, converged: Tensor) -> None:
        """Store the report, and warn if the linear system of a gradient was not solved."""
        self.residual, self.iterations, self.converged = residual, iterations, converged
        if converged.all():
            return
        warn(
            f"the linear system of the gradient was not solved for {int((~converged).sum())} of "
            f"{converged.numel()} batch entries after {iterations} products (largest residual "
            f"{float(residual.max()):.1e}): the solution is nearly not unique, so that its "
            "derivative is large or does not exist; look at gap, use float64, or raise "
            f"max_products ({PAGE})",
            ConvergenceWarning,
        )


def warn_of_gradient(doubtful: Tensor) -> None:
    """Warn of gradients that belong to solutions that have not converged, given by a mask."""
    if not doubtful.any():
        return
    warn(
        f"the gradient of {int(doubtful.sum())} of {doubtful.numel()} batch entries belongs to "
        "solutions that did not converge, and is worth no more than they are; look at gap, use "
        f"float64, or Auto() ({PAGE})",
        ConvergenceWarning,
    )


@dataclass(frozen=True, eq=False)
class Solution:
    """A solution and how it was reached; every field has one row per batch entry.

    Attributes:
        value: the solution, differentiable in the problem's inputs.
        multiplier: Lagrange multiplier of the constraint.
        residual: how far from stationary, relative to the size of the problem.
        gap: smallest eigenvalue of the Lagrangian's Hessian. Zero or more certifies a
            global minimum; zero also says that it need not be the only one.
        iterations: steps taken.
        converged: whether the solver's own stopping rule was met.
        backward: the report of the backward pass about its linear system, for a solve by products.
        method: the solver that has run, and how; in a trace, the one that was asked for.

    The tensors are those of a tree, so that `torch.func.vmap` maps a function that returns it.

    >>> import torch, pmaf
    >>> A = torch.diag(torch.tensor([3.0, 1.0]))
    >>> solution = pmaf.solve(pmaf.PrincipalEigenvectors(A), solver=pmaf.solvers.Dense())
    >>> solution.value, solution.gap, solution.method
    (tensor([1., 0.]), tensor(2.), 'Dense(): decomposition')
    """

    value: Tensor
    multiplier: Tensor
    residual: Tensor
    gap: Tensor
    iterations: Tensor
    converged: Tensor
    backward: Backward | None = None
    method: str = ""


@dataclass(frozen=True, eq=False)
class Certificate:
    """Evidence about a solution, from the problem and the solution alone.

    Attributes:
        feasibility: relative distance from the constraint.
        stationarity: size of the gradient along the constraint, relative to the problem.
        optimality: smallest eigenvalue of the Lagrangian's Hessian, relative to the
            largest of the objective's. It is zero or more, up to rounding, at a global minimum.

    >>> import torch, pmaf
    >>> problem = pmaf.SphereLeastSquares(torch.eye(2), torch.tensor([3.0, 4.0]))
    >>> pmaf.certify(problem, torch.tensor([-0.6, -0.8])).optimality < 0  # no minimum
    tensor(True)
    """

    feasibility: Tensor
    stationarity: Tensor
    optimality: Tensor

    def holds(self, tolerance: float) -> Tensor:
        """Which batch entries are global minima, up to `tolerance` in every respect."""
        feasible = self.feasibility <= tolerance
        return feasible & (self.stationarity <= tolerance) & (self.optimality >= -tolerance)


_REPORTED = ("value", "multiplier", "residual", "gap", "iterations", "converged")
_CERTIFIED = ("feasibility", "stationarity", "optimality")
register_tree(Solution, "pmaf.Solution", _REPORTED)
register_tree(Certificate, "pmaf.Certificate", _CERTIFIED)


def announce(outcome: Outcome, solver: Solver, throw: bool, advice: str | None = None) -> None:
    """Warn, or raise, if any entry stopped before its own rule was met.

    `advice` says what to try, if it is not what the solver says.
    """
    converged = outcome.converged
    if not (converged.is_cpu or looks(converged)) or converged.all():
        return
    failed = ~outcome.converged
    worst = float(outcome.residual[failed].max())
    steps = int(outcome.iterations[failed].max())
    message = (
        f"{int(failed.sum())} of {failed.numel()} solves did not converge in {steps} iterations "
        f"(largest residual {worst:.1e}) with {solver!r}; {advice or solver.advice()} ({PAGE})"
    )
    if throw:
        raise ConvergenceError(message)
    warn(message, ConvergenceWarning)


def require_rules(problem: Any, solver: object, gradient: object) -> None:
    """The solver and the gradient rule suit the problem, and each other."""
    target = type(problem).__name__

    def suits(kind: type[Solver] | type[Gradient] | Solver | Gradient) -> bool:
        return any(has_form(problem, form) for form in kind.solves)

    for role, given, kind in (("solver", solver, Solver), ("gradient", gradient, Gradient)):
        if not (isinstance(given, kind) and suits(given)):
            hint = "; pass an instance, not the class" if isinstance(given, type) else ""
            raise TypeError(
                f"{role}={given!r} does not serve {target}{hint}; "
                f"choose one of {_choices(kind, suits)}"
            )
    if isinstance(gradient, Unroll) and isinstance(solver, Solver) and not solver.unrollable:
        recordable = _choices(Solver, lambda kind: suits(kind) and kind.unrollable)
        if not recordable:
            raise TypeError(
                f"gradient={gradient!r} does not serve {target}, none of whose solvers has "
                "iterations that can be recorded; leave it out"
            )
        raise TypeError(
            f"gradient=Unroll() needs a solver whose iterations can be recorded, not {solver!r}; "
            f"use {recordable}, or gradient=Implicit()"
        )


def require_products_suffice(A: object, solver: Solver, gradient: Gradient) -> None:
    """The solver and the gradient rule need no more than products with `A`."""
    if not solver.matrix_free:
        raise TypeError(
            f"{solver!r} needs the entries of a matrix, and {A!r} is known by its products; "
            "use Auto() or Krylov()"
        )
    if not isinstance(gradient, Implicit):
        raise TypeError(
            f"{gradient!r} needs the entries of a matrix, and {A!r} is known by its products; "
            "use Implicit()"
        )
    if torch._C._functorch.maybe_current_level() is not None:  # pyright: ignore
        raise RuntimeError(
            f"{A!r} does not go through the transforms of torch.func; give the operator a "
            "batch instead of vmap, and use torch.autograd"
        )


def _choices(base: type, wanted: Callable[[Any], bool]) -> str:
    return ", ".join(f"{kind.__name__}()" for kind in _below(base) if wanted(kind))


def _below(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield kind
        yield from _below(kind)
