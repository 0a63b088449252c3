"""The problem of least squares on the sphere: `min ½‖Au − b‖²` subject to `‖u‖ = radius`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pmaf import errors, native
from pmaf.certificate import certify_minimum, certify_minimum_by_products
from pmaf.executors.least_squares import CompiledLeastSquares
from pmaf.gradients.base import Reverse
from pmaf.gradients.by_products import Incoming, least_squares_gradients
from pmaf.gradients.constrained import compiled_gradients, scaled, times
from pmaf.gradients.implicit import Implicit
from pmaf.gradients.minimum import LeastSquaresConditions
from pmaf.linalg.products import broadcast, dot, matvec, norm, rmatvec
from pmaf.linalg.roundings import times_power, widened
from pmaf.operators import Diagonal
from pmaf.operators.base import Operator, multiply
from pmaf.problem import Problem
from pmaf.reductions.sphere import column, in_range
from pmaf.runtime import ranks
from pmaf.runtime.modes import plain
from pmaf.solution import Certificate
from pmaf.solvers.auto import LEAST_SQUARES, SECULAR, Line, chosen
from pmaf.solvers.base import LeastSquares
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
    options = ("ball",)
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
        shapes = [self.A.shape[:-2], self.b.shape[:-1]]
        if isinstance(self.radius, Tensor):
            shapes.append(self.radius.shape)
        if self.M is not None:
            shapes.append(self.M.shape[:-2])
        if self.weights is not None:
            shapes.append(self.weights.shape[:-1])
        return broadcast(*shapes)

    @property
    def named(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("A", "b", "radius", "M", "weights")}

    def parts(self) -> dict[str, tuple[Tensor, int]]:
        found: dict[str, tuple[Tensor, int]] = {"A": (self.matrix, 2), "b": (self.b, 1)}
        if isinstance(self.radius, Tensor):
            found["radius"] = self.radius, 0
        if self.M is not None:
            found["M"] = (self.M.d, 1) if isinstance(self.M, Diagonal) else (self.M, 2)
        if self.weights is not None:
            found["weights"] = self.weights, 1
        return found

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

    def certified(self, value: Tensor) -> Certificate:
        value = ranks.whole(value.detach())
        if isinstance(self.A, Operator):
            unit = self.changed(b=self.b / column(self.radius), radius=1.0)
            return certify_minimum_by_products(unit, value / column(self.radius))
        A, b = (widened(x.detach()) for x in (self.matrix, self.b))
        # In these units nothing over- or underflows.
        size = torch.maximum(A.abs().amax((-2, -1)), b.abs().amax(-1) / self.radius)
        unit = torch.where(size > 0, size, torch.ones_like(size))
        A, b = A / unit[..., None, None], b / (unit * self.radius).unsqueeze(-1)
        unit = self.changed(A=A, b=b, radius=1.0)
        return certify_minimum(unit, widened(value) / column(self.radius))

    def curvature_range(self) -> tuple[Tensor, Tensor, Tensor]:
        top = torch.linalg.matrix_norm(self.matrix, 2).square()
        return self.smallest_curvature(), top, self.scale()

    def choice(self) -> Line:
        return chosen(LEAST_SQUARES, self)

    def require_value(self, value: Tensor) -> None:
        errors.require_vector("value", value, "n", or_complex=True)
        super().require_value(value)

    def is_differentiated(
        self, tensors: tuple[Tensor, ...], kept: Kept, d_multiplier: Tensor | None
    ) -> bool:
        A, b = tensors
        alike = A.shape[:-2] == b.shape[:-1]
        return kept.compiled and d_multiplier is None and alike

    def kept_again(self, tensors: tuple[Tensor, ...], kind: type[Kept]) -> Kept:
        if kind is not Exact:
            return super().kept_again(tensors, kind)
        A, b = (x.detach() for x in tensors)
        found = native.least_squares(A, b.expand(*A.shape[:-1]))
        return Exact(found.multiplier, found.numbers)

    first_gradients = CompiledLeastSquares.differentiate

    def gradients(self, given: Reverse) -> tuple[Tensor | None, ...]:
        if given.state.kept.compiled:
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


# The unit sphere without options, and without tensors.
UNIT: Any = SphereLeastSquares.read({"radius": 1.0, "ball": False})


def normal_product(A: Tensor | Operator, weights: Tensor | None, rows: Tensor) -> Tensor:
    """`AᴴWA` times rows `(*, p, n)`."""
    images = A.over_batch(A.matvec, rows) if isinstance(A, Operator) else rows @ A.mT
    images = images if weights is None else images * weights.unsqueeze(-2)
    return A.over_batch(A.rmatvec, images) if isinstance(A, Operator) else images @ A.conj()


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
