"""The problem of least squares on the sphere: `min ½‖Au − b‖²` subject to `‖u‖ = radius`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pmaf import errors, native
from pmaf.gradients.base import Reverse
from pmaf.gradients.by_products import Incoming, least_squares_gradients
from pmaf.gradients.constrained import compiled_gradients, scaled, times
from pmaf.gradients.implicit import Implicit
from pmaf.gradients.minimum import LeastSquaresConditions
from pmaf.linalg.products import broadcast, dot, matvec, norm, rmatvec
from pmaf.linalg.roundings import power_of_two, square_range, times_power
from pmaf.operators import Diagonal
from pmaf.operators.base import Operator, multiply
from pmaf.problem import Problem, as_solution, in_dtype
from pmaf.runtime.log import took
from pmaf.runtime.modes import plain
from pmaf.solution import Solution
from pmaf.solvers import Solver
from pmaf.solvers.auto import SECULAR, best_least_squares
from pmaf.solvers.base import LeastSquares, Outcome
from pmaf.tangent.bordered import State
from pmaf.tangent.kept import Exact, Kept


@dataclass(frozen=True, eq=False)
class SphereLeastSquares(Problem):
    """The problem `min ½‖Au − b‖²` subject to `‖u‖ = radius`, one per batch entry.

    Args:
        A: `(*, m, n)`, tall, square or wide, a tensor or an operator.
        b: `(*, m)`; the batch dimensions of all tensors broadcast.
        radius: of the sphere, above zero, a number or a tensor `(*,)`.
        ball: whether the constraint is `‖u‖ ≤ radius`.
        M: `(*, n, n)`, symmetric and positive definite, or `pmaf.operators.Diagonal`; the
            constraint is then one on `√(uᵀMu)`.
        weights: `(*, m)`, none negative; the objective is then `½Σᵢ wᵢ(aᵢu − bᵢ)²`.

    >>> import torch, pmaf
    >>> problem = pmaf.SphereLeastSquares(torch.eye(2), torch.tensor([3.0, 4.0]), radius=2.0)
    >>> pmaf.solve(problem).value
    tensor([1.2000, 1.6000])
    """

    A: Tensor | Operator
    b: Tensor
    radius: float | Tensor = 1.0
    ball: bool = False
    M: Tensor | Diagonal | None = None
    weights: Tensor | None = None

    inputs: ClassVar[dict[str, int]] = {"A": 2, "b": 1}
    compared: ClassVar[bool] = False
    form: ClassVar[type] = LeastSquares
    degree: ClassVar[int | None] = 2

    def __post_init__(self) -> None:
        A, b = self.require_matrix("A"), self.b
        errors.require_vector("b", b, "m", or_complex=True)
        errors.require_alike("A", A, "b", b)
        object.__setattr__(self, "radius", require_radius(self.radius, A))
        if A.shape[-2] != b.shape[-1]:
            column = b.dim() > 1 and b.shape[-1] == 1 and b.shape[-2] == A.shape[-2]
            raise ValueError(
                f"A of shape {errors.shape_of(A)} needs b of shape (*, {A.shape[-2]}); "
                f"got {errors.shape_of(b)}"
                + ("; drop its last dimension with b.squeeze(-1)" if column else "")
            )
        errors.require_broadcast("A", A.shape[:-2], "b", b.shape[:-1])
        if self.has_options:
            require_options(self)

    @property
    def has_options(self) -> bool:
        """Whether there is more than a sphere of a fixed radius."""
        tensors = self.M is not None or self.weights is not None or isinstance(self.radius, Tensor)
        return tensors or bool(self.ball)

    @property
    def batch_shape(self) -> torch.Size:
        # A trace cannot follow super() to a property.
        shapes = [x.shape[: x.dim() - dims] for x, dims in self.hints().values() if x is not None]
        return broadcast(self.A.shape[:-2], self.b.shape[:-1], *shapes)

    def hints(self) -> dict[str, tuple[Tensor | None, int]]:
        """The tensors that are options; they get gradients."""
        found: dict[str, tuple[Tensor | None, int]] = {}
        if isinstance(self.radius, Tensor):
            found["radius"] = self.radius, 0
        if self.M is not None:
            found["M"] = (self.M.d, 1) if isinstance(self.M, Diagonal) else (self.M, 2)
        if self.weights is not None:
            found["weights"] = self.weights, 1
        return found

    def with_parts(self, parts: dict[str, Tensor]) -> Any:
        diagonal = isinstance(self.M, Diagonal)
        return super().with_parts(
            {k: Diagonal(x) if diagonal and k == "M" else x for k, x in parts.items()}  # pyright: ignore
        )

    @property
    def rank(self) -> int:
        return min(self.A.shape[-2:])

    @property
    def basis_batch(self) -> torch.Size:
        return self.A.shape[:-2]

    def force(self, u: Tensor, *inputs: Any) -> Tensor:
        A, b = inputs
        if isinstance(A, Operator):
            return A.transposed(times(self.weights, b - A(u)))
        return -rmatvec(A, times(self.weights, matvec(A, u) - b))

    def curvature(self, rows: Tensor) -> Tensor:
        return normal_product(self.A, self.weights, rows)

    def objective(self, u: Tensor) -> Tensor:
        """`½‖Au − b‖²`, `(*,)`."""
        r = multiply(self.A, u) - self.b
        return 0.5 * dot(times(self.weights, r), r.conj()).real

    def unconstrained(self) -> Tensor:
        """The solution without the constraint, `A⁺b`, `(*, n)`."""
        A, b = scaled(self.matrix, self.b, self.weights)
        A = A.expand(*self.batch_shape, *self.A.shape[-2:])
        b = b.expand(*self.batch_shape, -1)
        return torch.linalg.lstsq(A, b.unsqueeze(-1)).solution.squeeze(-1)

    def scale(self) -> Tensor:
        """`‖A‖² + ‖Aᵀb‖/radius`, which residuals are relative to."""
        size = self.matrix.square().sum((-2, -1)) + norm(rmatvec(self.matrix, self.b)) / self.radius
        return torch.where(size == 0, torch.ones_like(size), size)

    def smallest_curvature(self) -> Tensor:
        """The smallest eigenvalue of `AᵀA`, `(*,)`."""
        if self.A.shape[-2] < self.n:
            return self.matrix.new_zeros(self.A.shape[:-2])
        return torch.linalg.svdvals(self.matrix)[..., -1].square()

    def on_the_unit_sphere(self, value: Tensor) -> tuple[Any, Tensor]:
        value = value / column(self.radius)
        if isinstance(self.A, Operator):
            return self.changed(b=self.b / column(self.radius), radius=1.0), value
        # In these units nothing over- or underflows.
        size = torch.maximum(self.A.abs().amax((-2, -1)), self.b.abs().amax(-1) / self.radius)
        unit = torch.where(size > 0, size, torch.ones_like(size))
        A, b = self.A / unit[..., None, None], self.b / (unit * self.radius).unsqueeze(-1)
        return self.changed(A=A, b=b, radius=1.0), value

    def curvature_range(self) -> tuple[Tensor, Tensor, Tensor]:
        top = torch.linalg.matrix_norm(self.matrix, 2).square()
        return self.smallest_curvature(), top, self.scale()

    def best_solver(self) -> Solver:
        return best_least_squares(self)

    def require_value(self, value: Tensor) -> None:
        errors.require_vector("value", value, "n", or_complex=True)
        super().require_value(value)

    def is_differentiated(
        self, tensors: tuple[Tensor, ...], kept: Kept, d_multiplier: Tensor | None
    ) -> bool:
        A, b = tensors
        alike = A.shape[:-2] == b.shape[:-1]
        return isinstance(kept, Exact) and d_multiplier is None and alike

    def kept_again(self, tensors: tuple[Tensor, ...], kind: type[Kept]) -> Kept:
        if kind is not Exact:
            return super().kept_again(tensors, kind)
        A, b = (x.detach() for x in tensors)
        found = native.least_squares(A, b.expand(*A.shape[:-1]))
        return Exact(found.multiplier, found.numbers)

    def first_gradients(
        self,
        tensors: tuple[Tensor, ...],
        y: Tensor,
        kept: Kept,
        v: Tensor | None,
        d_multiplier: Tensor | None,
        needs: Sequence[bool],
    ) -> native.Gradients:
        assert isinstance(kept, Exact)
        assert v is not None
        took("tangent: compiled")
        A, b = tensors
        return native.least_squares_gradient(A, b, y, v, *kept, needs)

    def gradients(self, given: Reverse) -> tuple[Tensor | None, ...]:
        if isinstance(given.state.kept, Exact):
            return self._other_gradients(given)
        if isinstance(given.rule, Implicit):
            A, b = given.tensors
            found = compiled_gradients(A, b, None, False, 0, given)
            if found is not None:
                return found.A, found.b
        return super().gradients(given)

    def _other_gradients(self, given: Reverse) -> tuple[Tensor | None, ...]:
        """Higher derivatives, and those of the multiplier, after a solve by compiled kernels.

        They need an eigenbasis, and units in which squares are in the range of the dtype.
        """
        tensors, d_multiplier = given.tensors, given.d_multiplier
        scaled: Any = torch.func.vjp(lambda A, b: in_range(A, b, 1.0)[:2], *tensors)
        (A, b), pull = scaled
        _, _, exponents = in_range(tensors[0].detach(), tensors[1].detach(), 1.0)
        shift = given.state.shift
        if exponents is not None:
            shift = times_power(shift, -exponents)
            d_multiplier = None if d_multiplier is None else times_power(d_multiplier, exponents)
        fixed = self.with_tensors(A.detach(), b.detach())
        basis = SECULAR.solve(fixed, init=given.y.detach(), report=False)
        state = State(shift, basis.gap, basis.kept)
        found = super().gradients(
            given._replace(tensors=(A, b), state=state, d_multiplier=d_multiplier)
        )
        zeros = (torch.zeros_like(x) if dx is None else dx for x, dx in zip((A, b), found))
        whole = pull(tuple(dx.sum_to_size(x.shape) for dx, x in zip(zeros, (A, b))))
        return tuple(None if dx is None else x for x, dx in zip(whole, found))

    def conditions(
        self, tensors: tuple[Tensor, ...], y: Tensor, state: State
    ) -> LeastSquaresConditions:
        return LeastSquaresConditions(self, tensors, y, state, matvec(tensors[0], y))

    def gradients_by_products(self, given: Incoming) -> Sequence[Tensor | None]:
        return least_squares_gradients(self, given)

    def reduced(
        self, init: Tensor | None, solver: Solver
    ) -> tuple[Any, Tensor | None, Callable[..., Solution]]:
        problem, init, _ = super().reduced(init, solver)
        A, b, exponents, radius = problem.A, problem.b, None, self.radius
        assert not isinstance(radius, Tensor)
        # On the sphere of radius ρ, u = ρw with w the solution for (A, b/ρ) on the unit sphere;
        # multiplier and gap are the same. So solvers work on the unit sphere only.
        if isinstance(A, Operator):
            b = b.expand(*self.batch_shape, -1)
            b = b if radius == 1 else b / radius
        else:
            # The kernels compute in double precision, in which no square of a float overflows.
            if radius != 1 or not solver.resolve(self).takes_any_scale(problem):
                A, b, exponents = in_range(A, b, radius)
        unit = self.changed(A=A, b=b, radius=1.0)

        def finish(outcome: Outcome) -> Solution:
            if exponents is not None:
                outcome = outcome._replace(
                    multiplier=times_power(outcome.multiplier, exponents),
                    gap=times_power(outcome.gap, exponents),
                )
            found = as_solution(outcome)
            # A user may write into this tensor, but not into that kept for the backward pass.
            if radius != 1 or isinstance(A, Operator):
                found = replace(found, value=radius * found.value)
            return in_dtype(self.dtype, found)

        return unit, init, finish

    def _empty(self) -> Solution:
        found = super()._empty()
        zero = sum(x.sum() for x, _ in self.hints().values() if x is not None)
        return replace(found, value=found.value + zero, multiplier=found.multiplier + zero)


def in_range(
    A: Tensor, b: Tensor, radius: float | Tensor, always: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`A` and `b/radius` divided by powers of two, and the exponents `(*,)` of multipliers.

    If everything is in range, `b` is only divided by the radius, and the exponents are None,
    unless `always` asks for entries of `A` of about one.
    """
    low, high = square_range(A.dtype)
    one = not isinstance(radius, Tensor) and radius == 1
    quotient = b if one else b / column(radius)
    sizes = torch.linalg.vector_norm(A.detach(), dim=(-2, -1))
    eager = plain(A) and plain(b)
    if eager:
        (least, most), (bottom, top) = sizes.aminmax(), quotient.detach().aminmax()
        if (
            not always
            and low < float(least)
            and float(most) < high
            and -high < float(bottom)
            and float(top) < high
        ):
            return A, quotient, None
        errors.require_finite(A=(A, 2), b=(b, 1))
    unit = _exponent(A.detach().abs().amax((-2, -1)))
    mantissa, power = _mantissa(radius)
    largest = b.detach().abs().amax(-1)
    # If ‖b‖ is far above ‖A‖, it does not affect the solution, and the multiplier is proportional
    # to it. So b is divided until its squares do not overflow; a b of zero has no size to divide.
    length = _exponent(largest) - power
    excess = (length - unit - _span(A.dtype)).clamp_min(0)
    excess = torch.where(largest > 0, excess, 0)
    if not always:
        # A problem that is in range stays as it is beside one that is not, and a trace cannot
        # branch on whether anything is. The units for A must come from A alone, since many
        # problems may share it.
        inside = (sizes > low) & (sizes < high)
        unit = torch.where(inside, 0, unit)
        excess = torch.where(inside & (quotient.detach().abs().amax(-1) < high), 0, excess)
    return (
        times_power(A, -unit[..., None, None]),
        times_power(b / column(mantissa), -(unit + excess + power).unsqueeze(-1)),
        2 * unit + excess,
    )


def _mantissa(radius: float | Tensor) -> tuple[float | Tensor, int | Tensor]:
    """The radius divided by a power of two, and its exponent."""
    if not isinstance(radius, Tensor):
        return math.frexp(radius)
    power = _exponent(radius.detach())
    return times_power(radius, -power), power


def _exponent(size: Tensor) -> Tensor:
    """The exponent of the power of two below each size; zero for zero."""
    return power_of_two(size).log2()


def _span(dtype: torch.dtype) -> float:
    """The largest `log₂(‖b‖/‖A‖)` at which `AᵀA` is not yet lost in rounding of the multiplier."""
    return -1.25 * math.log2(torch.finfo(dtype).eps)


def normal_product(A: Tensor | Operator, weights: Tensor | None, rows: Tensor) -> Tensor:
    """`AᵀWA` times rows `(*, p, n)`."""
    images = A.over_batch(A.matvec, rows) if isinstance(A, Operator) else rows @ A.mT
    images = images if weights is None else images * weights.unsqueeze(-2)
    return A.over_batch(A.rmatvec, images) if isinstance(A, Operator) else images @ A


def column(radius: float | Tensor) -> float | Tensor:
    """The radius as a factor of vectors `(*, n)`."""
    return radius.unsqueeze(-1) if isinstance(radius, Tensor) else radius


# Arguments.


def require_radius(radius: float | Tensor, A: Any) -> float | Tensor:
    """A number, or a tensor `(*,)`; both positive, finite, and in the range of the dtype."""
    info = torch.finfo(A.dtype)
    if not isinstance(radius, Tensor):
        radius = errors.require_positive("radius", radius)
        if not info.tiny <= radius <= info.max:
            raise ValueError(
                f"radius must be a number that {A.dtype} can hold, {info.tiny} to {info.max}; "
                f"got {radius}"
            )
        return radius
    errors.require_alike("radius", radius, "A", A, real=True)
    if plain(radius):
        bad = ~((radius > 0) & torch.isfinite(radius))
        if bad.any():
            first = float(radius.detach()[bad].reshape(-1)[0])
            finite = bool(radius.isfinite().all())
            raise (ValueError if finite else errors.NonFiniteError)(
                f"radius must be positive and finite; got {first}"
                + f" in {int(bad.sum())} of {bad.numel()} entries" * bool(bad.dim())
                + "; use radius.exp() or softplus of a parameter to keep it positive"
            )
    return radius


def require_options(problem: Any) -> None:
    """Tensors that are options have the dtype of `A`, and shapes that fit."""
    A, b, M, weights = problem.A, problem.b, problem.M, problem.weights
    batches = {"A": A.shape[:-2], "b": b.shape[:-1]}
    if not isinstance(problem.ball, bool):
        raise TypeError(f"ball must be True or False; got {problem.ball!r}")
    if isinstance(problem.radius, Tensor):
        batches["radius"] = problem.radius.shape
    if weights is not None:
        errors.require_row_weights(weights, "A", A)
        if plain(weights):
            errors.require_finite(weights=(weights, 1))
            if (weights < 0).any():
                raise ValueError(
                    f"weights must not be negative; the smallest is {float(weights.detach().min())}"
                )
        batches["weights"] = weights.shape[:-1]
    if M is not None:
        batches["M"] = _require_metric(M, A)
    names = list(batches)
    for i, name in enumerate(names):
        for other in names[:i]:
            errors.require_broadcast(name, batches[name], other, batches[other])


def _require_metric(M: Any, A: Any) -> torch.Size:
    """Raise an error unless `M` is `(*, n, n)`; returns its batch shape."""
    if isinstance(M, Operator) and not isinstance(M, Diagonal):
        raise TypeError(
            f"M must be a dense tensor or pmaf.operators.Diagonal; got {M!r}, which has no factor"
        )
    n = A.shape[-1]
    if not isinstance(M, Diagonal):
        errors.require_no_diagonal("M", M, n)
        errors.require_matrix("M", M, "n, n", or_complex=True)
    errors.require_alike("M", M, "A", A)
    if M.shape[-2:] != (n, n):
        raise ValueError(
            f"A of shape {errors.shape_of(A)} needs M of shape (*, {n}, {n}); "
            f"got {errors.shape_of(M)}"
        )
    return M.shape[:-2]
