"""LESS, least squares on the sphere: `min ½‖Au − b‖²` subject to `‖u‖ = radius`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from pmaf import errors, native
from pmaf.executors.direct import Direct
from pmaf.executors.least_squares import CompiledLeastSquares, DecomposedLeastSquares
from pmaf.executors.straight import StraightLeastSquares
from pmaf.gradients import Gradient, Implicit
from pmaf.layers.constrained import ConstrainedLeastSquares, Stacked
from pmaf.layers.host import on_host
from pmaf.layers.least_squares import UNIT, SphereLeastSquares
from pmaf.linalg.roundings import working_dtype
from pmaf.operators import Diagonal
from pmaf.operators.base import Operator
from pmaf.recipe import AUTO, IMPLICIT, Place, Recipe, register, run, short_recipe
from pmaf.reductions.base import Reduction
from pmaf.reductions.field import EmbeddedLeastSquares
from pmaf.reductions.metric import VectorMetric
from pmaf.reductions.precision import of_short
from pmaf.reductions.sphere import Ellipsoid, Radius, RadiusAndUnits
from pmaf.solvers import Auto, Secular, Solver
from pmaf.solvers.auto import (
    HOST_MINIMUM_ENTRIES,
    SECULAR,
    are_decomposed,
    are_reduced_columns,
)
from pmaf.straight.least_squares import Kind, Method
from pmaf.straight.singular import BATCHED_SVD

# The problem of solvers, on the unit sphere, without its tensors.


def coordinates(problem: SphereLeastSquares) -> tuple[list[Reduction], Any]:
    """The steps to a problem that solvers take, and this problem without its tensors."""
    steps: list[Reduction] = []
    if problem.A.dtype.is_complex:
        steps.append(EmbeddedLeastSquares())
    if not problem.has_options:
        # A certificate chooses units of its own.
        return steps, problem.bare().changed(radius=problem.radius)
    steps.append(Ellipsoid())
    weighted, by_products = problem.weights is not None, problem.operator is not None
    if by_products and not (problem.ball or weighted):
        return steps, UNIT
    names = {
        "ball": problem.ball,
        "weighted": weighted,
        "resized": isinstance(problem.radius, Tensor) and not by_products,
        "single": problem.dtype.to_real() != torch.float64,
    }
    return [*steps, Stacked()], ConstrainedLeastSquares.read(names)


def way_of_least_squares(
    problem: SphereLeastSquares, solver: Solver, gradient: Gradient, init: Tensor | None
) -> Recipe:
    """The recipe for least squares by solvers."""
    dtype, by_products = problem.dtype, problem.operator is not None
    steps, bare = coordinates(problem)
    if not problem.has_options:
        steps += of_short(dtype)
        radius: Any = problem.radius
        if by_products:
            steps.append(Radius(radius))
        elif radius != 1 or not solver.resolve(problem).takes_any_scale(problem):
            steps.append(RadiusAndUnits(radius))
        return Recipe(tuple(steps), Direct(UNIT, solver, gradient))
    if not isinstance(gradient, Implicit) and not by_products:
        raise TypeError(
            f"gradient={gradient!r} is for spheres without a tensor for radius, ball=True, M "
            "or weights; use gradient=Implicit()"
        )
    if problem.ball and not by_products and not isinstance(solver, (Auto, Secular)):
        raise TypeError(
            f"solver={solver!r} does not solve problems with ball=True; use Auto() or Secular()"
        )
    return Recipe(tuple(steps), Direct(bare, solver, gradient))


def short_way_of_least_squares(
    posed: SphereLeastSquares, init: Tensor | None, place: Place | None
) -> Recipe | None:
    """The recipe for least squares by compiled kernels, or by a straight-line program."""
    if place is not None:
        found = on_host(short_way_of_least_squares, posed, init, place, HOST_MINIMUM_ENTRIES)
        return found or _straight_way(posed, init, place.device)
    A, radius, M = posed.matrix, posed.radius, posed.M
    if not native.available or A.numel() == 0 or A.shape[:-1] != posed.b.shape:
        return None
    steps = of_short(A.dtype)
    dtype = torch.float32 if steps else A.dtype
    plain = not posed.has_options
    if plain and dtype == torch.float32 and are_reduced_columns(*A.shape[-2:]):
        if radius != 1:
            assert not isinstance(radius, Tensor)
            steps.append(Radius(float(radius)))
        return Recipe(tuple(steps), CompiledLeastSquares(UNIT))
    # A start chooses where there are several minimisers, which the kernels do not know of.
    if init is not None or posed.batch_shape != A.shape[:-2]:
        return None
    if not are_decomposed(A.shape, dtype, plain):
        return None
    diagonal = isinstance(M, Diagonal)
    if diagonal:
        steps.append(VectorMetric())
    form = 0 if M is None else 1 if diagonal else 2
    length = 1.0 if isinstance(radius, Tensor) else float(radius)
    limits = SECULAR.max_iterations, SECULAR.refinements
    plan = native.posed_plan(
        A.shape, dtype, posed.weights is not None, form, posed.ball, length, limits
    )
    again = functools.partial(_solved, length, posed.ball, diagonal)
    return Recipe(tuple(steps), DecomposedLeastSquares(again, plan, 1 if diagonal else 2))


def _straight_way(
    posed: SphereLeastSquares, init: Tensor | None, device: torch.device
) -> Recipe | None:
    A, radius = posed.matrix, posed.radius
    m, n = A.shape[-2:]
    # The common path decomposes AAᵀ, if that is much smaller, and lets a start choose among
    # minimisers.
    if init is not None or 0 in posed.batch_shape or A.numel() == 0 or n > max(2 * m, _WIDE):
        return None
    steps = of_short(A.dtype)
    dtype = (torch.float32 if steps else A.dtype).to_real()
    if A.dtype.is_complex:
        steps.append(EmbeddedLeastSquares())
    diagonal = isinstance(posed.M, Diagonal)
    if diagonal:
        steps.append(VectorMetric())
    length = 1.0 if isinstance(radius, Tensor) else float(radius)
    computed = working_dtype(dtype, device)
    rows = 2 * max(m, n) if A.is_complex() else max(m, n)
    method = Method.PROMOTED
    if computed == dtype:
        method = Method.EXACT if rows <= BATCHED_SVD else Method.REFINED
    form = Kind(computed, method, posed.ball, diagonal, length)
    again = functools.partial(_solved, length, posed.ball, diagonal)
    return Recipe(tuple(steps), StraightLeastSquares(again, form))


# The most columns of a wide matrix of which AᵀA is decomposed on a device, if AAᵀ is much smaller.
_WIDE = 64


def _solved(
    length: float,
    ball: bool,
    diagonal: bool,
    init: Tensor,
    A: Tensor,
    b: Tensor,
    weights: Tensor | None,
    radius: Tensor | None,
    M: Any,
) -> Tensor:
    """The solution for tensors by solvers; `length` is the radius if that is a number."""
    metric = Diagonal(M) if diagonal else M
    radius_of: Any = length if radius is None else radius
    problem = SphereLeastSquares(A, b, radius_of, ball, metric, weights)
    return run(problem, init=init, report=False).value


register(SphereLeastSquares, way_of_least_squares, coordinates, short_way_of_least_squares)


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
    given = {"A": A, "b": b, "radius": radius, "M": M, "weights": weights, "init": init}
    recipe = short_recipe(SphereLeastSquares, given, (ball,), solver, gradient)
    found = None if recipe is None else recipe.run(given)
    if found is not None:
        return found[0]
    problem = SphereLeastSquares(A, b, radius, ball, M, weights)
    return run(problem, solver or AUTO, gradient or IMPLICIT, init=init, report=False).value


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
