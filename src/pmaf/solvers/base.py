"""What a solver is, what it is asked, and what it returns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from pmaf.operators.rows import rows_of
from pmaf.runtime.text import Configured
from pmaf.tangent.kept import NOTHING, Basis, Factor, Kept, Nothing


class Outcome(NamedTuple):
    """What a solver found, one row per batch entry, on the unit sphere.

    Vectors are `(*, n)` if the problem has one, or rows `(*, k, n)` if it has several; their
    multipliers are `(*,)` or `(*, k)`.
    """

    value: Tensor
    multiplier: Tensor
    residual: Tensor
    gap: Tensor
    iterations: Tensor
    converged: Tensor
    kept: Kept = NOTHING

    @classmethod
    def of(cls, tensors: Iterable[Tensor], kept: Kept = NOTHING) -> Outcome:
        """The outcome with these tensors, in order."""
        value, multiplier, residual, gap, iterations, converged = tensors
        return cls(value, multiplier, residual, gap, iterations, converged, kept)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything but what was kept."""
        return tuple(self)[:6]  # pyright: ignore[reportReturnType]

    @property
    def factor(self) -> Factor:
        """What was kept, if it is a factor."""
        assert isinstance(self.kept, Factor)
        return self.kept

    @property
    def basis(self) -> Basis:
        """What was kept, if it is an eigenbasis."""
        assert isinstance(self.kept, Basis)
        return self.kept


def has_form(problem: Any, form: type) -> bool:
    """Whether a problem is of a form, or of one that is a special case of it."""
    return form in problem.form.__mro__


class Minimum(Protocol):
    """The form `min ½uᵀMu − gᵀu` subject to `‖u‖ = 1`, as solvers see it."""

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


class Eigenvectors(Protocol):
    """The form `max tr(YAYᵀ)` subject to `YYᵀ = I`; of a general `A` the dominant eigenvector."""

    symmetric: bool

    @property
    def batch_shape(self) -> torch.Size: ...

    @property
    def n(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def matrix(self) -> Tensor: ...

    def with_tensors(self, *tensors: Tensor) -> Any: ...

    def operand(self) -> Tensor: ...

    def spectrum(self) -> Tensor: ...

    def modulus_gap(self, moduli: Tensor | None = None) -> Tensor: ...

    def residual(self, values: Tensor, rows: Tensor) -> Tensor: ...


class Solver(Configured):
    """A way to solve a problem. Subclasses implement `solve` and name the forms they solve."""

    solves: ClassVar[tuple[type, ...]] = ()  # the forms of problems that it can solve
    unrollable: ClassVar[bool] = False  # whether autograd can follow its iterations
    matrix_free: ClassVar[bool] = False  # whether products with the matrix are all it needs
    always_converges: ClassVar[bool] = False  # for a symmetric matrix

    def solve(self, problem: Any, *, init: Tensor | None = None, report: bool = True) -> Outcome:
        """Solve every batch entry; `report=False` leaves out what only a report needs."""
        raise NotImplementedError

    def solve_by_products(self, problem: Any, init: Tensor | None) -> tuple[Outcome, Any]:
        """What `solve` finds for an operator, and what was seen of it, for the backward pass."""
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
        """The solver that does the work; itself, unless it stands for others."""
        return self

    def keeps(self, problem: Any) -> type[Kept]:
        """What every outcome carries for the backward pass, as a trace has to know in advance."""
        return Nothing

    def takes_any_scale(self, problem: Any) -> bool:
        """Whether it copes with entries whose squares leave the range of the dtype."""
        return False

    def for_shared_matrix(self) -> Solver:
        """The solver to use instead where many problems share one matrix."""
        return self

    def advice(self) -> str:
        """What to try when this solver did not converge."""
        return "try Auto()"
