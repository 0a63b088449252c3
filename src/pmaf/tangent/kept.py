"""Results of a forward pass that help to solve the linear system of the backward pass."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from pmaf.native import Reduced


class Nothing(NamedTuple):
    """Nothing is kept: the backward pass solves by products or by its own decomposition."""


class Basis(NamedTuple):
    """Eigenvectors of the curvature.

    The eigenvalue of row i is `spreadᵢ` above the smallest one, so that small differences keep
    their digits. Directions that the rows do not span belong to the smallest eigenvalue.
    """

    rows: Tensor  # (*, p, n), orthonormal
    spread: Tensor  # (*, p)


class Decomposition(NamedTuple):
    """All eigenvectors of a symmetric matrix, and its eigenvalues in ascending order."""

    rows: Tensor  # (*, n, n), orthonormal
    values: Tensor  # (*, n)


class SingularBasis(NamedTuple):
    """All right singular vectors of a matrix, and its singular values, from the largest on.

    A wide matrix has as many zeros among its values as are missing. For triplets, the rows are left
    and right vectors side by side, and `p = min(m, n)`.
    """

    rows: Tensor  # (*, n, n), orthonormal, or (*, p, m + n)
    values: Tensor  # (*, n), or (*, p)


class Factor(NamedTuple):
    """A Cholesky factor of the curvature plus a multiple of `yyᵀ`; nan or zero if there is none."""

    lower: Tensor  # (*, n, n)


class Rate(NamedTuple):
    """The ratio `|λ₂|/|λ₁|` of the two largest moduli, as estimated by power steps."""

    ratio: Tensor  # (*,)
    matrix: Tensor | None = None  # (B, n, n), the symmetric part, where it was formed


class Exact(NamedTuple):
    """What compiled kernels differentiate least squares with.

    That is the multiplier in double precision, and the reduction of `AᵀA` or `AAᵀ`, whichever is
    smaller; or that matrix itself if it is tiny.
    """

    multiplier: Tensor  # (*,), float64
    numbers: Tensor | None = None  # (*, p), float64, in a form of the kernels, if it is kept


class Tridiagonal(NamedTuple):
    """The reduction `A = QTQᵀ` of each matrix and eigenvectors of `T`, in a form of the kernels."""

    numbers: Tensor  # (*, p), float64


class Congruence(NamedTuple):
    """What reduces a pair `A`, `M = LLᵀ` to one matrix: `L⁻¹`, and `L⁻¹AL⁻ᵀ`."""

    inverse: Tensor  # (*, n, n)
    matrix: Tensor  # (*, n, n)


NOTHING = Nothing()
Kept = (
    Nothing
    | Basis
    | Decomposition
    | SingularBasis
    | Factor
    | Rate
    | Exact
    | Tridiagonal
    | Congruence
    | Reduced
)
# What is kept, in words.
IN_WORDS: dict[type, str] = {
    Nothing: "nothing",
    Basis: "all eigenvectors and eigenvalues of the curvature",
    Decomposition: "all eigenvectors and eigenvalues",
    SingularBasis: "all singular vectors and values",
    Factor: "a Cholesky factor",
    Rate: "the ratio of the two largest eigenvalues",
    Exact: "the multiplier and the reduced Gram matrix in float64",
    Tridiagonal: "the reduction to a tridiagonal matrix",
    Congruence: "an inverse root of M, and the matrix to which it reduces the pair",
    Reduced: "the factor of M and the reduction to a tridiagonal matrix",
}
# The kinds that the opaque operator returns; their shapes are known to a trace in advance.
RETURNED = (Basis, Decomposition, SingularBasis, Factor)
