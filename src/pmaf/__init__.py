"""Deep declarative layers for principal matrix features.

Layers whose forward pass solves an optimisation problem and whose backward pass
differentiates the solution implicitly:

* `less`, least squares with the solution on a sphere.
"""

from pmaf import gradients, metrics, solvers
from pmaf._solve import Certificate, Solution, certify, solve
from pmaf.errors import ConvergenceError, ConvergenceWarning
from pmaf.less import LESS, SphereLeastSquares, less

__version__ = "0.1.0"

__all__ = [
    "LESS",
    "Certificate",
    "ConvergenceError",
    "ConvergenceWarning",
    "Solution",
    "SphereLeastSquares",
    "certify",
    "gradients",
    "less",
    "metrics",
    "solve",
    "solvers",
]
