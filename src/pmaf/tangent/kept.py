"""Results of a forward pass that help to solve the linear system of the backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pmaf import native
from pmaf.linalg.embedding import means
from pmaf.tangent.series import rate_of


class Kept(tuple[Any, ...]):
    """What is kept of a solve; every subclass is a named tuple of tensors.

    The methods are those of results that do not help: whoever asks them computes its own.
    """

    __slots__ = ()
    _fields: ClassVar[tuple[str, ...]]
    words: ClassVar[str]  # what is kept, for `pmaf.explain`
    compiled: ClassVar[bool] = False  # whether compiled kernels differentiate by it
    of_pair: ClassVar[bool] = False  # whether it belongs to a pair, not to one matrix
    basis: ClassVar[Any] = None  # the `Basis`, if that was kept
    decomposition: ClassVar[Any] = None  # the `Decomposition`
    congruence: ClassVar[Any] = None  # the `Congruence`

    def solve(self, system: Any, *given: Any) -> Tensor:
        """`z` of a `BorderedSystem`, by one of its methods, whose arguments are `given`."""
        return system.solve_anew(*given)

    def singular(self, otherwise: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The rows and values of a `SingularBasis`; those of `otherwise` if none was kept."""
        return otherwise()

    def size(self, otherwise: Callable[[], Tensor]) -> Tensor:
        """The spectral norm of the matrix, `(*, 1, 1)`, or about that by `otherwise`."""
        return otherwise()

    def for_products(
        self, gap: Tensor, values: Tensor
    ) -> tuple[Tensor | None, float, Tensor | None]:
        """What solves by products use: a factor, the `rate` of `neumann`, and the symmetric part.

        Args:
            gap: `(*,)`, the distance from known eigenvalues `(*, k)` to the next one, or nan.
        """
        return None, rate_of(gap, values), None

    def with_values(self, values: Tensor) -> Any:
        """The same where the requested eigenvalues are known more exactly."""
        return self

    def in_pairs(self, values: Tensor) -> tuple[Any, Tensor]:
        """The same and the requested eigenvalues, for a matrix that has all of them twice."""
        return self, values

    def in_units(self, unit: Tensor, power: int) -> Any:
        """The same for a matrix that is multiplied by a power of units `(*,)`."""
        return self


class _Eigenbasis(Kept):
    """Orthonormal rows `(*, p, n)`, and numbers `(*, p)` that scale with the matrix."""

    __slots__ = ()

    def solve(self, system: Any, *given: Any) -> Tensor:
        return system.solve_in_basis(*given)

    def in_units(self, unit: Tensor, power: int) -> Any:
        return type(self)(self[0], self[1] * unit.unsqueeze(-1) ** power)  # pyright: ignore


class Nothing(NamedTuple("Nothing", []), Kept):
    """Nothing is kept: the backward pass solves by products or by its own decomposition."""

    __slots__ = ()
    words = "nothing"


class Basis(NamedTuple("Basis", [("rows", Tensor), ("spread", Tensor)]), _Eigenbasis):
    """Eigenvectors of the curvature as orthonormal rows `(*, p, n)`.

    The eigenvalue of row i is `spreadᵢ` above the smallest one, so that small differences keep
    their digits. Directions that the rows do not span belong to the smallest eigenvalue.
    """

    __slots__ = ()
    words = "all eigenvectors and eigenvalues of the curvature"

    @property
    def basis(self) -> Basis:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self


class Decomposition(
    NamedTuple("Decomposition", [("rows", Tensor), ("values", Tensor)]), _Eigenbasis
):
    """All eigenvectors of a symmetric matrix, and its eigenvalues `(*, n)` in ascending order."""

    __slots__ = ()
    words = "all eigenvectors and eigenvalues"

    @property
    def decomposition(self) -> Decomposition:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self

    def size(self, otherwise: Callable[[], Tensor]) -> Tensor:
        return torch.linalg.vector_norm(self.values.unsqueeze(-2), math.inf, -1, keepdim=True)

    def with_values(self, values: Tensor) -> Decomposition:
        others = self.values[..., : -values.shape[-1]]
        return Decomposition(self.rows, torch.cat([others, values.flip(-1)], -1))

    def in_pairs(self, values: Tensor) -> tuple[Decomposition, Tensor]:
        # Rounding separates equal eigenvalues; with their mean, they are exactly equal again.
        equal = means(self.values).repeat_interleave(2, -1)
        return Decomposition(self.rows, equal), equal.flip(-1)


class SingularBasis(
    NamedTuple("SingularBasis", [("rows", Tensor), ("values", Tensor)]), _Eigenbasis
):
    """All right singular vectors of a matrix, and its singular values, from the largest on.

    A wide matrix has as many zeros among its values as are missing. For triplets, the rows
    `(*, p, m + n)` are left and right vectors side by side, and `p = min(m, n)`.
    """

    __slots__ = ()
    words = "all singular vectors and values"

    def singular(self, otherwise: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return self

    def size(self, otherwise: Callable[[], Tensor]) -> Tensor:
        return self.values[..., :1].unsqueeze(-1)


class Whole(NamedTuple("Whole", [("rows", Tensor), ("values", Tensor)]), Kept):
    """All eigenvectors of a matrix or a pair, or all right singular vectors, and their values.

    The values ascend. The program that has found them differentiates by them; the rules of
    problems, which differentiate again, do not use them.
    """

    __slots__ = ()
    words = "all vectors and values"


class Factor(NamedTuple("Factor", [("lower", Tensor)]), Kept):
    """A Cholesky factor `(*, n, n)` of the curvature plus a multiple of `yyᵀ`.

    It is nan or zero where there is none.
    """

    __slots__ = ()
    words = "a Cholesky factor"

    def solve(self, system: Any, *given: Any) -> Tensor:
        return system.solve_factored(*given)

    def for_products(self, gap: Tensor, values: Tensor) -> tuple[Tensor, float, None]:
        return self.lower, rate_of(gap, values), None

    def in_units(self, unit: Tensor, power: int) -> Factor:
        return Factor(self.lower * unit[..., None, None] ** (0.5 * power))


class Rate(NamedTuple("Rate", [("ratio", Tensor), ("matrix", Tensor | None)]), Kept):
    """The ratio `|λ₂|/|λ₁|` of the two largest moduli, `(*,)`, as estimated by power steps.

    The symmetric part of the matrix, `(B, n, n)`, is here where it was formed.
    """

    __slots__ = ()
    words = "the ratio of the two largest eigenvalues"

    def for_products(self, gap: Tensor, values: Tensor) -> tuple[None, float, Tensor | None]:
        return None, float(self.ratio.amax()), self.matrix


class Exact(NamedTuple("Exact", [("multiplier", Tensor), ("numbers", Tensor | None)]), Kept):
    """What compiled kernels differentiate least squares with.

    That is the multiplier in double precision, `(*,)`, and the reduction of `AᵀA` or `AAᵀ`,
    whichever is smaller, `(*, p)` in a form of the kernels, if it is kept; or that matrix itself if
    it is tiny.
    """

    __slots__ = ()
    words = "the multiplier and the reduced Gram matrix in float64"
    compiled = True


class Tridiagonal(NamedTuple("Tridiagonal", [("numbers", Tensor)]), Kept):
    """The reduction `A = QTQᵀ` of each matrix and eigenvectors of `T`, in a form of the kernels."""

    __slots__ = ()
    words = "the reduction to a tridiagonal matrix"


class Congruence(NamedTuple("Congruence", [("inverse", Tensor), ("matrix", Tensor)]), Kept):
    """What reduces a pair `A`, `M = LLᵀ` to one matrix: `L⁻¹`, and `L⁻¹AL⁻ᵀ`, both `(*, n, n)`."""

    __slots__ = ()
    words = "an inverse root of M, and the matrix to which it reduces the pair"
    of_pair = True

    @property
    def congruence(self) -> Congruence:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self


class Reduced(native.Reduced, Kept):
    """What compiled kernels differentiate a pair with."""

    __slots__ = ()
    words = "the factor of M and the reduction to a tridiagonal matrix"
    compiled = of_pair = True


NOTHING = Nothing()
# The kinds that the opaque operator returns; their shapes are known to a trace in advance.
RETURNED = (Basis, Decomposition, SingularBasis, Factor)
