"""Ways to solve the problems behind the layers: small frozen objects, one file each."""

from pmaf.solvers.adaptive import Adaptive
from pmaf.solvers.auto import Auto
from pmaf.solvers.base import (
    Eigenvectors,
    LeastSquares,
    Minimum,
    Outcome,
    SingularVectors,
    Solver,
)
from pmaf.solvers.cholesky import Cholesky
from pmaf.solvers.dense import Dense
from pmaf.solvers.krylov import Krylov
from pmaf.solvers.lanczos import Lanczos
from pmaf.solvers.line_search import Backtracking, LineSearch, TangentDecay
from pmaf.solvers.power_iteration import PowerIteration
from pmaf.solvers.projected_gradient import ProjectedGradient
from pmaf.solvers.reduction import Reduction
from pmaf.solvers.secular import Secular
from pmaf.solvers.simultaneous_iteration import SimultaneousIteration
from pmaf.solvers.singular import SVD

__all__ = [
    "SVD",
    "Adaptive",
    "Auto",
    "Backtracking",
    "Cholesky",
    "Dense",
    "Eigenvectors",
    "Krylov",
    "Lanczos",
    "LeastSquares",
    "LineSearch",
    "Minimum",
    "Outcome",
    "PowerIteration",
    "ProjectedGradient",
    "Reduction",
    "Secular",
    "SimultaneousIteration",
    "SingularVectors",
    "Solver",
    "TangentDecay",
]
