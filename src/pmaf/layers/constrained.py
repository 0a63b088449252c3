"""Weighted least squares on an ellipsoid or in it, in the coordinates of `reductions/sphere.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pmaf.autograd.forward_mode import STEPS
from pmaf.certificate import certify_minimum_by_products
from pmaf.gradients.base import Reverse
from pmaf.gradients.by_products import Incoming, weighted_gradients
from pmaf.gradients.constrained import (
    CURVATURE,
    Parts,
    acting,
    constrained_gradients,
    scaled,
    times,
)
from pmaf.layers.least_squares import SphereLeastSquares, normal_product
from pmaf.linalg import sphere
from pmaf.linalg.products import broadcast, dot, matvec, norm, one_if_zero, rmatvec
from pmaf.linalg.roundings import ROUNDED, rank_tolerance
from pmaf.operators import Operator
from pmaf.operators.coordinates import WithRowFactors
from pmaf.operators.rows import Rows, rows_of
from pmaf.problem import Problem
from pmaf.reductions.base import Reduction, Tensors
from pmaf.runtime import ranks
from pmaf.solution import Certificate
from pmaf.solvers import Secular, Solver
from pmaf.solvers.auto import SECULAR
from pmaf.solvers.base import Course, Outcome
from pmaf.solvers.exact import course_exactly, solve_exactly, solve_inside
from pmaf.tangent.basis import TangentSolver
from pmaf.tangent.kkt import Point, invert
from pmaf.tangent.residuals import conjugate_residuals


@dataclass(frozen=True)
class Layout:
    """How `A` and `M` are stacked in a first tensor, and `b`, weights and radius in a second.

    The first has the rows of `A` above those of `M`, or above the diagonal of `M`. The second,
    `(*, p, m)`, has rows of `b`, of the weights, and of the radius, which is repeated.
    """

    weighted: bool
    resized: bool  # whether there is a radius

    def stack(self, parts: Parts) -> tuple[Tensor, Tensor]:
        A, M, b, weights, radius = parts
        if M is not None:
            batch = broadcast(A.shape[:-2], M.shape[:-2])
            blocks = (x.expand(*batch, *x.shape[-2:]) for x in (A, M))
            A = torch.cat([*blocks], -2)
        rows = [b, weights, None if radius is None else radius.unsqueeze(-1)]
        given = torch.broadcast_tensors(*(x for x in rows if x is not None))
        return A, torch.stack(given, -2)

    def split(self, first: Tensor, second: Tensor) -> Parts:
        m = second.shape[-1]
        A, M = first[..., :m, :], first[..., m:, :] if first.shape[-2] > m else None
        weights = second[..., 1, :] if self.weighted else None
        radius = second[..., -1, 0] if self.resized else None
        return Parts(A, M, second[..., 0, :], weights, radius)

    def gathered(self, found: Parts, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the two tensors from those of their parts."""
        dA, dM, db, dw, d_radius = found
        if dM is not None:
            batch = first.shape[:-2]
            dA = torch.cat([x.sum_to_size(*batch, *x.shape[-2:]) for x in (dA, dM)], -2)
        rows = [db] if dw is None else [db, dw]
        if self.resized:
            assert d_radius is not None
            # The radius is read from the first number of its row.
            column = d_radius.unsqueeze(-1)
            rows.append(torch.cat([column, torch.zeros_like(db[..., 1:])], -1))
        return dA.sum_to_size(first.shape), torch.stack(rows, -2).sum_to_size(second.shape)


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
    def parts_of(self) -> Parts:
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
        return normal_product(self.parts_of.A, self.parts_of.weights, rows)

    def given_sides(self, sides: Tensor) -> tuple[Tensor, Tensor | None]:
        """`b` and the weights."""
        return sides[..., 0, :], sides[..., 1, :] if self.weighted else None

    def forward_solver(self, solver: Solver) -> Solver:
        return SECULAR

    def multiplier_at(self, u: Tensor) -> Tensor:
        found, radius = super().multiplier_at(u), self.parts_of.radius
        found = found if radius is None else found / radius.square()
        return torch.where(sphere.reaches(u), found, 0) if self.ball else found

    def solved_by(self, solver: Solver, init: Tensor | None, report: bool) -> Outcome:
        A, _, b, weights, _ = self.parts_of
        A, b = scaled(A, b, weights)
        if not isinstance(solver, Secular):
            return solver.solve(SphereLeastSquares(A, b), init=init, report=report)
        b = b.expand(*self.batch_shape, -1)
        return solve_exactly(A, b, init, self.ball, self.single, solver)

    def course(self, solver: Solver) -> Course:
        if self.operator is not None:
            return super().course(solver)
        A, _, b, _, _ = self.parts_of
        b = b.expand(*self.batch_shape, -1)
        if not isinstance(solver, Secular):
            return solver.course(SphereLeastSquares(A, b))
        return course_exactly(A.expand(*self.basis_batch, *A.shape[-2:]), b, self.single)

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
        found = constrained_gradients(self.layout.split(*given.tensors), self.ball, given)
        return self.layout.gathered(found, *given.tensors)

    @torch.no_grad()
    def certified(self, value: Tensor) -> Certificate:
        if self.operator is not None:
            certify = certify_ball_by_products if self.ball else certify_minimum_by_products
            return certify(self, value)
        A, b = scaled(self.parts_of.A, self.parts_of.b, self.parts_of.weights)
        rows = SphereLeastSquares(A, b)
        if not self.ball:
            return rows.certified(value)
        dtype = torch.float32 if self.single else torch.float64
        return certify_ball(rows, value, dtype)

    def newton(
        self, fixed: Any, found: Outcome, solve: Callable[..., Outcome]
    ) -> Callable[[Tensor], Tensor]:
        y, (A, M, _, weights, radius) = found.value, self.parts_of
        tensors = A, M, weights
        acts = acting(y, found.multiplier, found.gap, self.ball)
        point = Point(found.multiplier, found.gap, *found.basis, acts)
        correct = TangentSolver(*found.basis, found.gap, y)
        mask, singular = acts.unsqueeze(-1), point.singular.unsqueeze(-1)

        def least_norm(u: Tensor) -> Tensor:
            """A point of the range of the curvature, where minimisers of least norm are."""

            def image(x: Tensor) -> Tensor:
                return CURVATURE.unmetric(CURVATURE.product(x, tensors), tensors)

            x = invert(point, u)
            for _ in range(STEPS):
                x = x + invert(point, u - image(x))
            return image(x)

        def step(u: Tensor) -> Tensor:
            force = self.force(u, *self.tensors)
            # A division by a length of zero has no derivative.
            safe = torch.where(mask, u, torch.ones_like(u))
            image = CURVATURE.metric(safe, tensors)
            normal = dot(safe, force) / dot(safe, image)
            outside = safe + correct(sphere.tangent(y, force - normal.unsqueeze(-1) * image))
            length = dot(outside, CURVATURE.metric(outside, tensors)).sqrt()
            length = length if radius is None else length / radius
            outside = outside / length.unsqueeze(-1)
            if not self.ball:
                return outside
            inside = u + invert(point, force)
            inside = torch.where(singular, least_norm(inside), inside)
            return torch.where(mask, outside, inside)

        return step


class Stacked(Reduction):
    """The tensors of weighted least squares as the two of a solve."""

    words = "b, M, weights and radius -> beside b, and below A"

    def apply(self, given: Tensors) -> Tensors:
        names = ("A", "M", "b", "weights", "radius")
        parts = Parts(*(given[name] for name in names))
        A, layout = parts.A, Layout(parts.weights is not None, parts.radius is not None)
        if isinstance(A, Operator):
            sides = layout.stack(parts._replace(A=parts.b.unsqueeze(-1)))[1]
        else:
            A, sides = layout.stack(parts)
        return {**given, "A": A, "sides": sides}


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
