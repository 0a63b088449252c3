"""Deep declarative layers for principal matrix features.

Layers whose forward pass solves an optimisation problem and whose backward pass
differentiates the solution implicitly:

* `less`, least squares with the solution on a sphere;
* `ied`, implicit eigen decomposition: the top eigenvectors of a matrix;
* `nullspace` and `isvd`, singular vectors and triplets of a matrix;
* `spectral`, functions of a symmetric matrix, such as its square root;
* `PrincipalPool`, pooling of features by their principal direction.
"""

from pmaf import gradients, metrics, operators, solvers
from pmaf.errors import ConvergenceError, ConvergenceWarning, NonFiniteError
from pmaf.explanation import explain
from pmaf.layers.eigenvectors import Eigenpairs, PrincipalEigenvectors
from pmaf.layers.ied import IED, ied
from pmaf.layers.isvd import ISVD, SingularTriplets, isvd
from pmaf.layers.least_squares import SphereLeastSquares
from pmaf.layers.less import LESS, less
from pmaf.layers.nullspace import NullSpace, nullspace
from pmaf.layers.pool import PrincipalPool
from pmaf.layers.singular_vectors import PrincipalSingularVectors
from pmaf.layers.spectral_function import Spectral, SpectralFunction, spectral
from pmaf.problem import Problem
from pmaf.runtime.checks import checks
from pmaf.solution import Certificate, Solution
from pmaf.solving import certify, solve

__version__ = "0.1.0"


def __dir__() -> list[str]:
    """What is public, without the packages that importing it has loaded."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


__all__ = [
    "IED",
    "ISVD",
    "LESS",
    "Certificate",
    "ConvergenceError",
    "ConvergenceWarning",
    "Eigenpairs",
    "NonFiniteError",
    "NullSpace",
    "PrincipalEigenvectors",
    "PrincipalPool",
    "PrincipalSingularVectors",
    "Problem",
    "SingularTriplets",
    "Solution",
    "Spectral",
    "SpectralFunction",
    "SphereLeastSquares",
    "certify",
    "checks",
    "explain",
    "gradients",
    "ied",
    "isvd",
    "less",
    "metrics",
    "nullspace",
    "operators",
    "solve",
    "solvers",
    "spectral",
]
