"""Ways to solve the problems behind the layers: small frozen objects, one file each."""

from pmaf.solvers._base import Outcome, Solver
from pmaf.solvers.auto import Auto
from pmaf.solvers.line_search import Backtracking, LineSearch, TangentDecay
from pmaf.solvers.projected_gradient import ProjectedGradient
from pmaf.solvers.secular import Secular

__all__ = [
    "Auto",
    "Backtracking",
    "LineSearch",
    "Outcome",
    "ProjectedGradient",
    "Secular",
    "Solver",
    "TangentDecay",
]
