"""The base class of solvers, the forms of problems they solve, and their outcome."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from pmaf.operators.rows import rows_of
from pmaf.runtime.text import Configured
from pmaf.tangent.kept import NOTHING, Basis, Factor, Kept, Nothing


class Outcome(NamedTuple):
    """The result of a solver on the unit sphere, one row per batch entry.

    `value` is one vector `(*, n)` or k rows `(*, k, n)`; `multiplier` is `(*,)` or `(*, k)`.
    """

    value: Tensor
    multiplier: Tensor
    residual: Tensor
    gap: Tensor
    iterations: Tensor
    converged: Tensor
    kept: Kept = NOTHING
    method: str = ""  # the solver that has run, for a report

    @classmethod
    def of(cls, tensors: Iterable[Tensor], kept: Kept = NOTHING) -> Outcome:
        """The outcome with these tensors, in order."""
        value, multiplier, residual, gap, iterations, converged = tensors
        return cls(value, multiplier, residual, gap, iterations, converged, kept)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All fields that are tensors."""
        return tuple(self)[:6]  # pyright: ignore[reportReturnType]

    @property
    def factor(self) -> Factor:
        """`kept`, which must be a `Factor`."""
        assert isinstance(self.kept, Factor)
        return self.kept

    @property
    def basis(self) -> Basis:
        """`kept`, which must be a `Basis`."""
        assert self.kept.basis is not None
        return self.kept.basis


def has_form(problem: Any, form: type) -> bool:
    """Whether the form of a problem is `form`, or a special case of `form`."""
    return form in problem.form.__mro__


class Minimum(Protocol):
    """The form `min ½uᵀMu − gᵀu` subject to `‖u‖ = 1`."""

    @property
    def batch_shape(self) -> torch.Size: ...

    @property
    def n(self) -> int: ...

    def quadratic(self) -> tuple[Tensor, Tensor]:
        """`M`, `(*, n, n)`, and `g`, `(*, n)`."""
        ...


class LeastSquares(Minimum, Protocol):
    """The form `min ½‖Au − b‖²` subject to `‖u‖ = 1`."""

    @property
    def matrix(self) -> Tensor: ...

    @property
    def b(self) -> Tensor: ...

    def with_tensors(self, *tensors: Tensor) -> Any: ...

    def unconstrained(self) -> Tensor: ...

    def scale(self) -> Tensor: ...

    def smallest_curvature(self) -> Tensor: ...


class _Vectors(Protocol):
    """What the forms of several vectors have in common."""

    copies: int  # how often each eigenvalue or singular value occurs by construction

    @property
    def batch_shape(self) -> torch.Size: ...

    @property
    def n(self) -> int: ...

    @property
    def width(self) -> int: ...


class Eigenvectors(_Vectors, Protocol):
    """The form `max tr(YAYᵀ)` subject to `YYᵀ = I`; for a general `A`, the dominant eigenvector."""

    symmetric: bool

    @property
    def skip(self) -> int:
        """How many of the first vectors are not requested; the distances between them are free."""
        ...

    @property
    def matrix(self) -> Tensor:
        """What the user has passed, which need not be symmetric."""
        ...

    def with_tensors(self, *tensors: Tensor) -> Any: ...

    def operand(self) -> Tensor:
        """The matrix whose eigenvectors are asked for, the symmetric part if that is meant."""
        ...

    def spectrum(self) -> Tensor: ...

    def modulus_gap(self, moduli: Tensor | None = None) -> Tensor: ...

    def residual(self, values: Tensor, rows: Tensor) -> Tensor: ...


class SingularVectors(_Vectors, Protocol):
    """The form `max tr(YAᵀWAYᵀ)` subject to `YYᵀ = I`, or its minimum, from `A` and `W` itself."""

    largest: bool
    single: bool

    @property
    def tensors(self) -> tuple[Any, ...]: ...


class Triplets(SingularVectors, Protocol):
    """The same with left vectors: every row is `(u, v)`. There are no weights, and `m ≥ n`."""


class Course(NamedTuple):
    """What a solver does for all problems of one shape, in words."""

    first: str = ""  # what it does, as far as shapes decide
    then: tuple[str, ...] = ()  # what follows for numbers for which that does not suffice


class Solver(Configured):
    """A way to solve a problem. Subclasses implement `solve` and name the forms they solve."""

    solves: ClassVar[tuple[type, ...]] = ()  # the forms of problems that it can solve
    unrollable: ClassVar[bool] = False  # whether autograd can record its iterations
    matrix_free: ClassVar[bool] = False  # whether it needs only products with the matrix
    always_converges: ClassVar[bool] = False  # whether it does so for every symmetric matrix

    def solve(self, problem: Any, *, init: Tensor | None = None, report: bool = True) -> Outcome:
        """Solve every batch entry; `report=False` skips quantities that only a report contains."""
        raise NotImplementedError

    def solve_by_products(self, problem: Any, init: Tensor | None) -> tuple[Outcome, Any]:
        """The outcome for an operator, and the products that the backward pass uses."""
        outcome = self.solve(problem, init=init)
        seen = rows_of(problem)
        product: Any = seen
        if has_form(problem, LeastSquares):
            product = seen.gram
        elif has_form(problem, Minimum):
            product = seen.curvature_of(problem)
        seen.look(product, outcome.multiplier)
        return outcome, seen

    def resolve(self, problem: Any) -> Solver:
        """The solver that runs for this problem; `Auto` returns another one than itself."""
        return self

    def keeps(self, problem: Any) -> type[Kept]:
        """The type of `Outcome.kept`, which a trace has to know before the solve runs."""
        return Nothing

    def may_keep(self, problem: Any) -> tuple[type[Kept], ...]:
        """The types that `Outcome.kept` may have after a solve in eager mode."""
        return (self.keeps(problem),)

    def course(self, problem: Any) -> Course:
        """What `solve` does for the problem, whose numbers are not looked at; for `explain`."""
        return Course()

    def takes_any_scale(self, problem: Any) -> bool:
        """Whether `solve` accepts entries whose squares leave the range of the dtype."""
        return False

    def for_shared_matrix(self) -> Solver:
        """The solver to use instead where many problems share one matrix."""
        return self

    def advice(self) -> str:
        """Advice for users whose solve by this solver did not converge."""
        return "try Auto()"
