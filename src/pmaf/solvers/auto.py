"""The default: let the problem say which solver suits its shape and dtype best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pmaf.solvers.base import Outcome, Solver


@dataclass(frozen=True)
class Auto(Solver):
    """The fastest solver for the problem at hand among those that are globally optimal."""

    serves = ("SphereLeastSquares", "PrincipalEigenvectors")

    def solve(self, problem: Any, *, init: Tensor | None = None, report: bool = True) -> Outcome:
        return self.resolve(problem).solve(problem, init=init, report=report)

    def resolve(self, problem: Any) -> Solver:
        return problem.best_solver()
