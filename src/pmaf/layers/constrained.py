"""Options of least squares: a ball, an ellipsoid, weights, a radius that gets a gradient.

An ellipsoid `uᵀMu = ρ²` is a sphere in other coordinates: with `M = LLᵀ`, `u = ρL⁻ᵀw` for a unit
vector `w`, which solves the problem of `AL⁻ᵀ` and `b/ρ`. Solvers work in these coordinates, and the
coordinates are fixed: `L` is not differentiated, because a factor of an ill-conditioned `M` has a
derivative in which large numbers cancel. In fixed coordinates the constraint is `wᵀM′w = ρ′²` with
`M′ = L⁻¹ML⁻ᵀ` and `ρ′`, whose values are the identity and one, and which are differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pmaf.autograd.forward_mode import STEPS
from pmaf.certificate import certify_minimum
from pmaf.gradients import Gradient, Implicit
from pmaf.gradients.base import Reverse
from pmaf.gradients.by_products import Incoming, weighted_gradients
from pmaf.gradients.constrained import Layout, Parts, acting, constrained_gradients, scaled, times
from pmaf.layers.least_squares import SphereLeastSquares, column, in_range, normal_product
from pmaf.linalg import sphere
from pmaf.linalg.products import dot, matvec, norm, one_if_zero, rmatvec
from pmaf.linalg.roundings import ROUNDED, power_of_two, rank_tolerance, times_power
from pmaf.operators import Operator
from pmaf.operators.coordinates import Coordinates, InCoordinates, WithRowFactors, in_dtype
from pmaf.operators.rows import Rows, rows_of
from pmaf.problem import Problem, as_solution
from pmaf.runtime import ranks
from pmaf.solution import Certificate, Solution
from pmaf.solvers import Secular, Solver
from pmaf.solvers.auto import SECULAR, best_minimum
from pmaf.solvers.base import Outcome
from pmaf.solvers.exact import solve_exactly, solve_inside
from pmaf.tangent.basis import TangentSolver
from pmaf.tangent.kkt import Point, invert
from pmaf.tangent.residuals import conjugate_residuals


@dataclass(frozen=True, eq=False)
class ConstrainedLeastSquares(Problem):
    """`min ½Σᵢ wᵢ(aᵢu − bᵢ)²` with `√(uᵀMu) = ρ`, or at most `ρ`, as solvers take it.

    The value of `M` is the identity and that of `ρ` is one, so that solvers work on the unit sphere
    or in the unit ball. They are here for their derivatives.

    Args:
        A: `(*, m, n)`, or an operator; below it, `M` or its diagonal. See `Layout`.
        sides: `(*, p, m)`, which has rows of `b`, of weights and of the radius. A solve has two
            tensors.
        ball: whether the constraint is an inequality.
        weighted: whether there are weights.
        resized: whether there is a radius.
        single: whether the numbers had the digits of float32 before they were converted to float64.
    """

    A: Tensor | Operator
    sides: Tensor
    ball: bool = False
    weighted: bool = False
    resized: bool = False
    single: bool = False

    inputs: ClassVar[dict[str, int]] = {"A": 2, "sides": 2}
    compared: ClassVar[bool] = False

    @property
    def layout(self) -> Layout:
        return Layout(self.weighted, self.resized)

    @property
    def parts(self) -> Parts:
        return self.layout.split(*self.tensors)

    @property
    def rank(self) -> int:
        return min(self.sides.shape[-1], self.A.shape[-1])

    @property
    def basis_batch(self) -> torch.Size:
        # Without weights all problems with one matrix share its eigenvectors.
        return self.batch_shape if self.weighted else self.A.shape[:-2]

    def force(self, u: Tensor, *inputs: Any) -> Tensor:
        A, sides = inputs
        if isinstance(A, Operator):
            b, weights = self.given_sides(sides)
            return A.transposed(times(weights, b - A(u)))
        A, _, b, weights, _ = self.layout.split(A, sides)
        return rmatvec(A, times(weights, b - matvec(A, u)))

    def curvature(self, rows: Tensor) -> Tensor:
        if isinstance(self.A, Operator):
            return normal_product(self.A, self.given_sides(self.sides)[1], rows)
        return normal_product(self.parts.A, self.parts.weights, rows)

    def given_sides(self, sides: Tensor) -> tuple[Tensor, Tensor | None]:
        """`b` and the weights."""
        return sides[..., 0, :], sides[..., 1, :] if self.weighted else None

    def best_solver(self) -> Solver:
        return best_minimum(self)

    def forward_solver(self, solver: Solver) -> Solver:
        return SECULAR

    def multiplier_at(self, u: Tensor) -> Tensor:
        found, radius = super().multiplier_at(u), self.parts.radius
        found = found if radius is None else found / radius.square()
        return torch.where(sphere.reaches(u), found, 0) if self.ball else found

    def _run(
        self, solver: Solver, gradient: Gradient, init: Tensor | None, report: bool, throw: bool
    ) -> Outcome:
        if not isinstance(gradient, Implicit):
            raise TypeError(
                f"gradient={gradient!r} is for spheres without a tensor for radius, ball=True, M "
                "or weights; use gradient=Implicit()"
            )
        if self.ball and not isinstance(solver.resolve(self), Secular):
            raise TypeError(
                f"solver={solver!r} does not solve problems with ball=True; use Auto() or Secular()"
            )
        return super()._run(solver, gradient, init, report, throw)

    def solved_by(self, solver: Solver, init: Tensor | None, report: bool) -> Outcome:
        A, _, b, weights, _ = self.parts
        A, b = scaled(A, b, weights)
        if not isinstance(solver, Secular):
            return solver.solve(SphereLeastSquares(A, b), init=init, report=report)
        b = b.expand(*self.batch_shape, -1)
        return solve_exactly(A, b, init, self.ball, self.single, solver)

    def solved_by_products(self, solver: Solver, init: Tensor | None) -> tuple[Outcome, Any]:
        A, (b, weights) = self.A, self.given_sides(self.sides)
        if weights is not None:
            assert isinstance(A, Operator)
            root = weights.sqrt()
            A, b = WithRowFactors(A, root), root * b
        outcome, seen = solver.solve_by_products(SphereLeastSquares(A, b), init)
        return (solve_inside(outcome, seen, b, solver) if self.ball else outcome), seen

    def gradients_by_products(self, given: Incoming) -> Sequence[Tensor | None]:
        return weighted_gradients(self, given, sphere.reaches(given.y) if self.ball else None)

    def gradients(self, given: Reverse) -> tuple[Tensor | None, ...]:
        return constrained_gradients(self.layout, self.ball, given)

    def newton(
        self, fixed: Any, found: Outcome, solve: Callable[..., Outcome]
    ) -> Callable[[Tensor], Tensor]:
        y, layout = found.value, self.layout
        assert isinstance(self.A, Tensor)
        tensors = self.A, self.sides
        acts = acting(y, found.multiplier, found.gap, self.ball)
        point = Point(found.multiplier, found.gap, *found.basis, acts)
        correct = TangentSolver(*found.basis, found.gap, y)
        mask, singular = acts.unsqueeze(-1), point.singular.unsqueeze(-1)
        radius = self.parts.radius

        def least_norm(u: Tensor) -> Tensor:
            """A point of the range of the curvature, where minimisers of least norm are."""

            def image(x: Tensor) -> Tensor:
                return layout.unmetric(layout.product(x, tensors), tensors)

            x = invert(point, u)
            for _ in range(STEPS):
                x = x + invert(point, u - image(x))
            return image(x)

        def step(u: Tensor) -> Tensor:
            force = self.force(u, *tensors)
            # A division by a length of zero has no derivative.
            safe = torch.where(mask, u, torch.ones_like(u))
            image = layout.metric(safe, tensors)
            normal = dot(safe, force) / dot(safe, image)
            outside = safe + correct(sphere.tangent(y, force - normal.unsqueeze(-1) * image))
            length = dot(outside, layout.metric(outside, tensors)).sqrt()
            length = length if radius is None else length / radius
            outside = outside / length.unsqueeze(-1)
            if not self.ball:
                return outside
            inside = u + invert(point, force)
            inside = torch.where(singular, least_norm(inside), inside)
            return torch.where(mask, outside, inside)

        return step


@SphereLeastSquares.case(lambda x: x.has_options and not x.A.dtype.is_complex)
@dataclass(frozen=True, eq=False)
class LeastSquaresWithOptions(SphereLeastSquares):
    """`SphereLeastSquares` with a ball, an ellipsoid, weights or a tensor for the radius."""

    def reduced(
        self, init: Tensor | None, solver: Solver
    ) -> tuple[Any, Tensor | None, Callable[..., Solution]]:
        found = posed(self)

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
        return ConstrainedLeastSquares(A, sides, self.ball, layout.weighted, layout.resized, single)

    @torch.no_grad()
    def certified(self, value: Tensor) -> Certificate:
        found = posed(self)
        w = found.of_vector(value)
        if self.operator is not None:
            unit = self._unit(found)
            return certify_ball_by_products(unit, w) if self.ball else unit.certify(w)
        A, b = scaled(found.parts.A, found.parts.b, found.parts.weights)
        rows = SphereLeastSquares(A, b)
        return certify_ball(rows, w, self.dtype) if self.ball else certify_minimum(rows, w)


class Posed(NamedTuple):
    """A problem in the coordinates in which its constraint is the unit sphere or ball."""

    parts: Parts  # with `M` and the radius in these coordinates; `A` may be an operator
    exponents: Tensor | None  # of powers of two that multiplier and gap are multiplied by
    coordinates: Coordinates | None
    radius: float | Tensor
    dtype: torch.dtype  # of the user

    def back(self, w: Tensor) -> Tensor:
        """The vector of the user's problem, in its dtype."""
        u = w if self.coordinates is None else self.coordinates.back(w)
        return (column(self.radius) * u).to(self.dtype)

    def unscaled(self, x: Tensor) -> Tensor:
        """A multiplier or a gap in the units of the user's problem, in its dtype."""
        return (x if self.exponents is None else times_power(x, self.exponents)).to(self.dtype)

    def of_vector(self, u: Tensor) -> Tensor:
        """The vector of the unit sphere or ball that `back` takes to `u`."""
        u = u.to(self.parts.b.dtype)
        u = u if self.coordinates is None else self.coordinates.of_vector(u)
        return u / column(self.radius)


def working_dtype(A: Any) -> torch.dtype:
    """The dtype to compute in: float64, except for operators, and on devices that have none."""
    if isinstance(A, Operator) or A.device.type == "mps":
        return torch.float64 if A.dtype == torch.float64 else torch.float32
    return torch.float64


def posed(problem: SphereLeastSquares) -> Posed:
    """Change coordinates and units; differentiable."""
    A, b, M, weights, radius = (
        problem.A,
        problem.b,
        problem.M,
        problem.weights,
        problem.radius,
    )
    dtype = working_dtype(A)
    b, weights = b.to(dtype), None if weights is None else weights.to(dtype)
    radius = radius.to(dtype) if isinstance(radius, Tensor) else radius
    M = None if M is None else in_dtype(M, dtype)
    exponents = size = coordinates = within = None
    if isinstance(A, Operator):
        # Tensors of the embedding of a complex operator are complex.
        kinds = (dtype.to_complex() if x.is_complex() else dtype for x in A.tensors)
        A = A.with_tensors([x.to(kind) for x, kind in zip(A.tensors, kinds)])
        if M is not None:
            coordinates = Coordinates.of(M)
            A = InCoordinates(A, coordinates)
        b = b / column(radius)
    else:
        A = A.to(dtype)
        if M is not None:
            coordinates = Coordinates.of(M, fixed=True)
            within = coordinates.of_metric(M)
            A = coordinates.of_matrix(A)
        if isinstance(radius, Tensor):
            fixed = radius.detach()
            size, radius = 1 + (radius - fixed) / fixed, fixed
        A, b, exponents = in_range(A, b, radius, always=True)
    if weights is not None:
        power = power_of_two(weights.detach().amax(-1)).log2()
        weights = times_power(weights, -power.unsqueeze(-1))
        exponents = power if exponents is None else exponents + power
    return Posed(Parts(A, within, b, weights, size), exponents, coordinates, radius, problem.dtype)


def certify_ball(rows: Any, w: Tensor, dtype: torch.dtype) -> Certificate:
    """A certificate of `w` in the unit ball, for least squares `rows` of data in `dtype`."""
    low, high, scale = rows.curvature_range()
    found = _explained(w, rows.force(w, *rows.tensors), low, high, scale)
    _, s, basis = torch.linalg.svd(rows.matrix, full_matrices=False)
    present = s > rank_tolerance(dtype) * s[..., :1]
    basis = basis * present.unsqueeze(-1)
    null = torch.where(present.sum(-1) < rows.n, norm(w - rmatvec(basis, matvec(basis, w))), 0)
    return _of_least_norm(found, null)


def certify_ball_by_products(problem: Any, w: Tensor) -> Certificate:
    """The same by products; the smallest eigenvalue of the curvature is only known as positive."""
    problem = problem.with_flat([x.detach() for x in problem.flat])
    seen = rows_of(problem)
    force = problem.force(w, *problem.tensors)
    seen.look(seen.curvature_of(problem), torch.zeros_like(w[..., 0]))
    top = seen.scale.reshape(problem.batch_shape)
    scale = top + norm(problem.force(torch.zeros_like(w), *problem.tensors))
    found = _explained(w, force, torch.zeros_like(top), top, scale)
    return _of_least_norm(found, _null_part(problem, seen, w))


def _null_part(problem: Any, seen: Rows, w: Tensor) -> Tensor:
    """The length of the part of `w` in the null space of the curvature, `(*,)`, by products.

    What no combination of products with the curvature removes from `w` is that part, if its own
    product is rounding.
    """
    curvature = seen.curvature_of(problem)
    rows = ranks.whole(w).reshape(seen.entries, 1, -1)
    zero = torch.zeros_like(rows)
    solved = conjugate_residuals(
        lambda x: -curvature(x),
        zero[..., 0],
        zero,
        rows,
        scale=seen.scale,
        limit=_CERTIFIED,
        agreed=seen.agreed,
    )
    rest = rows - curvature(solved.rows)
    slope, square = dot(rest, curvature(rest)), dot(rest, rest)
    flat = slope <= ROUNDED * torch.finfo(w.dtype).eps * seen.scale.unsqueeze(-1) * square
    return torch.where(flat, square.sqrt(), 0).reshape(problem.batch_shape)


# The most products that are taken to find the null part of a solution.
_CERTIFIED = 5000


def _of_least_norm(found: Certificate, null: Tensor) -> Certificate:
    """The certificate of a solution whose part in the null space of the curvature has this length.

    Of several minimisers in a ball the one of least norm is the solution. Neither it nor a solution
    on the sphere with `μ > 0` has such a part, whose length counts as missing optimality.
    """
    optimality = torch.where(null > 0, torch.minimum(found.optimality, -null), found.optimality)
    return replace(found, optimality=optimality)


def _explained(w: Tensor, force: Tensor, low: Tensor, high: Tensor, scale: Tensor) -> Certificate:
    """The certificate from the force at `w` and the range of the curvature.

    A minimum is explained by a constraint that does not act, or by one that acts with a
    multiplier of at least zero. The explanation that fits better counts. The problem is convex, so
    that a stationary point is a global minimum.
    """
    length, scale, top = norm(w), one_if_zero(scale), one_if_zero(high)
    multiplier = (dot(w, force) / one_if_zero(length.square())).clamp_min(0)
    inside = (length - 1).clamp_min(0), norm(force) / scale
    outside = (length - 1).abs(), norm(force - multiplier.unsqueeze(-1) * w) / scale
    acts = torch.maximum(*outside) < torch.maximum(*inside)
    feasibility, stationarity = (torch.where(acts, x, y) for x, y in zip(outside, inside))
    optimality = (torch.where(acts, multiplier, 0) + low) / top
    return Certificate(feasibility, stationarity, optimality)
