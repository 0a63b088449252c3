"""LESS, least squares on the sphere: `min ½‖Au − b‖²` subject to `‖u‖ = radius`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pmaf import errors, native
from pmaf.certificate import certify_minimum
from pmaf.gradients import Gradient, Implicit
from pmaf.gradients.base import Reverse
from pmaf.gradients.by_products import Incoming, least_squares_gradients
from pmaf.gradients.constrained import Layout, scaled, times
from pmaf.gradients.minimum import LeastSquaresConditions
from pmaf.layers.constrained import (
    ConstrainedLeastSquares,
    Posed,
    certify_ball,
    certify_ball_by_products,
    column,
    posed,
    require_options,
    require_radius,
)
from pmaf.layers.hermitian import real_problem, reduced_least_squares
from pmaf.linalg.embedding import real_rows
from pmaf.linalg.products import broadcast, dot, matvec, norm, rmatvec
from pmaf.linalg.roundings import power_of_two, square_range, times_power
from pmaf.operators import Diagonal
from pmaf.operators.base import Operator, as_operator, known_by_products, multiply
from pmaf.problem import Problem, as_solution, in_dtype
from pmaf.runtime.log import took
from pmaf.runtime.modes import plain
from pmaf.solution import Certificate, Solution
from pmaf.solvers import Auto, Solver
from pmaf.solvers.auto import SECULAR, best_least_squares
from pmaf.solvers.base import LeastSquares, Outcome
from pmaf.tangent.bordered import State
from pmaf.tangent.kept import Exact


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
    form: ClassVar[type] = LeastSquares
    degree: ClassVar[int | None] = 2

    def __post_init__(self) -> None:
        A, b = self.A, self.b
        if known_by_products(A):
            A = as_operator(A)
            object.__setattr__(self, "A", A)
        else:
            errors.require_matrix("A", A, or_complex=True)
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
        if self.weights is not None:
            sides = torch.stack(torch.broadcast_tensors(self.b, self.weights), -2)
            return _Constrained(self.A, sides, weighted=True).curvature(rows)
        if isinstance(self.A, Operator):
            return self.A.rmatvec(self.A.matvec(rows))
        return rows @ self.A.mT @ self.A

    def objective(self, u: Tensor) -> Tensor:
        """`½‖Au − b‖²`, `(*,)`."""
        if self.dtype.is_complex:
            return real_problem(self).objective(real_rows(u))
        r = multiply(self.A, u) - self.b
        return 0.5 * dot(times(self.weights, r), r)

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

    def certify(self, value: Tensor) -> Certificate:
        errors.require_vector("value", value, "n", or_complex=True)
        if self.dtype.is_complex:
            return real_problem(self).certify(real_rows(value))
        if not self.has_options:
            return super().certify(value)
        self.require_value(value)
        found = posed(self.with_flat([x.detach() for x in self.flat]), _in_units)
        w = found.of_vector(value.detach())
        if self.operator is not None:
            unit = self._unit(found)
            return certify_ball_by_products(unit, w) if self.ball else unit.certify(w)
        A, b = scaled(found.parts.A, found.parts.b, found.parts.weights)
        rows = SphereLeastSquares(A, b)
        return certify_ball(rows, w) if self.ball else certify_minimum(rows, w)

    def first_gradients(self, given: Reverse) -> native.Gradients | None:
        (A, b), kept, v = given.tensors, given.state.kept, given.v
        alike = A.shape[:-2] == b.shape[:-1]
        if not (isinstance(kept, Exact) and given.d_multiplier is None and alike):
            return None
        assert v is not None
        took("tangent: compiled")
        return native.least_squares_gradient(A, b, given.y, v, *kept, given.needs)

    def gradients(self, given: Reverse) -> tuple[Tensor | None, ...]:
        if isinstance(given.state.kept, Exact):
            return self._other_gradients(given)
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
        if self.dtype.is_complex:
            return reduced_least_squares(self, init, solver)
        if self.has_options:
            return self._reduced(init)
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

    def _reduced(self, init: Tensor | None) -> tuple[Any, Tensor | None, Callable[..., Solution]]:
        """`reduced` for a ball, an ellipsoid or weights."""
        found = posed(self, _in_units)

        def finish(outcome: Outcome) -> Solution:
            return replace(
                as_solution(outcome),
                value=found.back(outcome.value),
                multiplier=found.unscaled(outcome.multiplier),
                residual=outcome.residual.to(self.dtype),
                gap=found.unscaled(outcome.gap),
            )

        start = None if init is None else found.of_vector(init)
        return self._unit(found), start, finish

    def _unit(self, found: Posed) -> Any:
        """The problem that solvers take, on the unit sphere or in the unit ball."""
        A, _, b, weights, radius = found.parts
        layout = Layout(weights is not None, radius is not None)
        if self.operator is None:
            A, sides = layout.stack(found.parts)
        elif self.ball or weights is not None:
            b = b.expand(*self.batch_shape, -1)
            sides = layout.stack(found.parts._replace(b=b))[1]
        else:
            return SphereLeastSquares(A, b.expand(*self.batch_shape, -1))
        single = self.dtype != torch.float64
        return _Constrained(A, sides, self.ball, layout.weighted, layout.resized, single)

    def _empty(self) -> Solution:
        found = super()._empty()
        zero = sum(x.sum() for x, _ in self.hints().values() if x is not None)
        return replace(found, value=found.value + zero, multiplier=found.multiplier + zero)


@dataclass(frozen=True, eq=False)
class _Constrained(ConstrainedLeastSquares):
    """`ConstrainedLeastSquares` with the problem that it hands to solvers."""

    def rows(self, A: Any, b: Tensor) -> SphereLeastSquares:
        return SphereLeastSquares(A, b)


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
    length = _exponent(b.detach().abs().amax(-1)) - power
    # If ‖b‖ is far above ‖A‖, it does not affect the solution, and the multiplier is proportional
    # to it. So b is divided until its squares do not overflow.
    excess = (length - unit - _span(A.dtype)).clamp_min(0)
    if not eager and not always:
        # A trace cannot branch on whether anything is out of range. The units for A must come from
        # A alone, since many problems may share it.
        unit = torch.where((sizes > low) & (sizes < high), 0, unit)
        excess = torch.where(quotient.detach().abs().amax(-1) < high, 0, excess)
    return (
        times_power(A, -unit[..., None, None]),
        times_power(b / column(mantissa), -(unit + excess + power).unsqueeze(-1)),
        2 * unit + excess,
    )


_in_units = partial(in_range, always=True)


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


def less(
    A: Tensor | Operator,
    b: Tensor,
    *,
    radius: float | Tensor = 1.0,
    ball: bool = False,
    M: Tensor | Diagonal | None = None,
    weights: Tensor | None = None,
    solver: Solver | None = None,
    gradient: Gradient | None = None,
    init: Tensor | None = None,
) -> Tensor:
    """Least squares with the solution on a sphere: the global minimiser, differentiable.

    Minimises `½‖Au − b‖²` over all `u` with `‖u‖ = radius`. With `ball=True` the constraint is
    `‖u‖ ≤ radius`, with `M` it is `uᵀMu = radius²`, with both it is `uᵀMu ≤ radius²`. With
    `weights` the objective is `½Σᵢ wᵢ(aᵢu − bᵢ)²`.

    Args:
        A: `(*, m, n)`, tall, square or wide, of float32 or float64; float16 and bfloat16
            are computed in float32, and for complex64 and complex128 `u` is complex. Or a sparse
            tensor, a DTensor, or an operator of `pmaf.operators`.
        b: `(*, m)`; the batch dimensions of all tensors broadcast.
        radius: of the sphere, a number, or a tensor `(*,)`, which gets a gradient.
        ball: whether the solution may be inside of the sphere. Where the least-norm solution
            `A⁺b` is in the ball, it is the solution, and the multiplier is zero.
        M: `(*, n, n)`, symmetric and positive definite, or `pmaf.operators.Diagonal`. Of a
            matrix that is not symmetric, the symmetric part is used.
        weights: `(*, m)`, one for each row, none negative; zero leaves the row out.
        solver: one of `pmaf.solvers`; `Auto()` unless given.
        gradient: one of `pmaf.gradients`; `Implicit()` unless given.
        init: `(*, n)`, the start of an iterative solver; a direct one prefers the
            solution nearest to it where there are several.

    Returns:
        The solution, `(*, n)`.

    >>> import torch, pmaf
    >>> A = torch.tensor([[2.0, 0.0], [0.0, 1.0]], requires_grad=True)
    >>> pmaf.less(A, torch.tensor([2.0, 0.0])).detach()
    tensor([1., 0.])
    """
    problem = SphereLeastSquares(A, b, radius, ball, M, weights)
    return problem.run(
        solver or _AUTO, gradient or _IMPLICIT, init=init, report=False, throw=False
    ).value


# Created at import: constructing a solver serialises it to text, which costs more than a small
# solve.
_AUTO, _IMPLICIT = Auto(), Implicit()


class LESS(nn.Module):
    """`pmaf.less` as a module, with the same keywords and results.

    `radius` may be a parameter, which is then trained. `M` and `weights` are inputs, as `A` and `b`
    are.

    >>> import torch, pmaf
    >>> pmaf.LESS(radius=2.0)
    LESS(radius=2.0, solver=Auto(), gradient=Implicit())
    """

    def __init__(
        self,
        *,
        radius: float | Tensor = 1.0,
        ball: bool = False,
        solver: Solver | None = None,
        gradient: Gradient | None = None,
    ) -> None:
        super().__init__()
        if isinstance(radius, Tensor) and not isinstance(radius, nn.Parameter):
            self.register_buffer("radius", radius)
        else:
            number = not isinstance(radius, Tensor)
            self.radius = errors.require_positive("radius", radius) if number else radius
        self.ball = ball
        self.solver = solver or Auto()
        self.gradient = gradient or Implicit()

    def forward(
        self,
        A: Tensor | Operator,
        b: Tensor,
        init: Tensor | None = None,
        *,
        M: Tensor | Diagonal | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        return less(
            A,
            b,
            radius=self.radius,
            ball=self.ball,
            M=M,
            weights=weights,
            solver=self.solver,
            gradient=self.gradient,
            init=init,
        )

    def __prepare_scriptable__(self) -> None:
        errors.refuse_script(self)

    def extra_repr(self) -> str:
        radius = self.radius
        if isinstance(radius, Tensor):
            radius = f"{type(radius).__name__}{tuple(radius.shape)}"
        ball = "ball=True, " * self.ball
        return f"radius={radius}, {ball}solver={self.solver!r}, gradient={self.gradient!r}"
