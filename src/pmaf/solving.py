"""Solving and certifying any problem."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pmaf.errors import refuse_trace
from pmaf.gradients import Gradient
from pmaf.operators import Diagonal, Operator
from pmaf.problem import Problem
from pmaf.recipe import AUTO, IMPLICIT, run, run_finite, ways_of
from pmaf.reductions.base import posed_by
from pmaf.runtime.checks import looks
from pmaf.runtime.log import collected, in_words
from pmaf.runtime.modes import full_precision, require_eager
from pmaf.solution import Certificate, Solution
from pmaf.solvers import Solver


def solve(
    problem: Any,
    *,
    solver: Solver | None = None,
    gradient: Gradient | None = None,
    init: Tensor | None = None,
    throw: bool = False,
    nonfinite: str = "raise",
) -> Solution:
    """Solve a problem and report on the solution, batch entry by batch entry.

    Args:
        problem: what to solve, for example `SphereLeastSquares(A, b)`.
        solver: one of `pmaf.solvers`; `Auto()` unless given.
        gradient: one of `pmaf.gradients`; `Implicit()` unless given.
        init: where to start, or which of several solutions to prefer.
        throw: raise `ConvergenceError` where the default warns.
        nonfinite: `"raise"` raises `NonFiniteError` if any entry of the batch has infinite or nan
            inputs. `"report"` solves the other entries, as if these were not there: their values
            are nan, `converged` is false, and their gradients are zero.

    >>> import torch, pmaf
    >>> problem = pmaf.SphereLeastSquares(torch.eye(2), torch.tensor([3.0, 4.0]))
    >>> solution = pmaf.solve(problem)
    >>> solution.value, solution.multiplier, solution.converged
    (tensor([0.6000, 0.8000]), tensor(4.), tensor(True))
    """
    _require_problem(problem)
    if nonfinite not in ("raise", "report"):
        raise ValueError(f'nonfinite must be "raise" or "report"; got {nonfinite!r}')
    way: Any = run
    if nonfinite == "report":
        _require_entries(problem)
        way = run_finite
    call = functools.partial(
        way, problem, solver or AUTO, gradient or IMPLICIT, init=init, throw=throw
    )
    if torch.compiler.is_compiling():
        return call()
    with collected() as ways:
        solution = call()
    method = in_words(solution.method, ways)
    if not (solution.converged.is_cpu or looks(solution.converged)):
        method += ", not looked at"
    return replace(solution, method=method)


def certify(problem: Any, solution: Solution | Tensor) -> Certificate:
    """Check a solution, or any tensor of its shape, independently of how it was found.

    >>> import torch, pmaf
    >>> problem = pmaf.SphereLeastSquares(torch.eye(2), torch.tensor([3.0, 4.0]))
    >>> pmaf.certify(problem, torch.tensor([0.6, 0.8])).holds(1e-6)
    tensor(True)
    >>> pmaf.certify(problem, torch.tensor([1.0, 0.0])).holds(1e-6)
    tensor(False)
    """
    _require_problem(problem)
    value = solution.value if isinstance(solution, Solution) else solution
    # The solution of `SpectralFunction` for an operator is one.
    if not isinstance(value, (Tensor, Operator)):
        raise TypeError(
            "solution must be what pmaf.solve returns, or a tensor such as the vectors of "
            f"pmaf.ied; got {type(value).__name__}"
        )
    problem.require_value(value)
    given, steps, bare = problem.named, *ways_of(type(problem)).coordinates(problem)
    with full_precision(problem.device):
        stages = posed_by(tuple(steps), given)
        columns = problem.columns(value)
        for step, before, after in zip(steps, stages, stages[1:]):
            columns = step.forth(columns, before, after)
        tensors = {name: stages[-1][name] for name in bare.inputs}
        return bare.changed(**tensors).certified(columns)


def _require_entries(problem: Any) -> None:
    """The problem has entries that can be solved one by one."""
    if not isinstance(problem, Problem):
        raise TypeError(f'nonfinite="report" is not for {type(problem).__name__}')
    if any(isinstance(x, Operator) and not isinstance(x, Diagonal) for x in problem.tensors):
        raise TypeError('nonfinite="report" is for tensors, and the problem has an operator')
    require_eager('nonfinite="report"', 'nonfinite="raise"', problem.matrix)


def _require_problem(problem: object) -> None:
    """`problem` is one, and not its matrix, its class, or its solution; nor is this a trace."""
    refuse_trace()
    if not isinstance(problem, Problem):
        got = (
            f"the class {problem.__name__}" if isinstance(problem, type) else type(problem).__name__
        )
        raise TypeError(
            f"problem must be an instance of a pmaf.Problem; got {got}; pass for example "
            "pmaf.PrincipalEigenvectors(A) or pmaf.SphereLeastSquares(A, b)"
        )
