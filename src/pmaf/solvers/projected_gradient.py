"""The paper's first-order methods for least squares on the sphere, as one composition.

| paper          | here                                                            |
|----------------|-----------------------------------------------------------------|
| PGD            | `ProjectedGradient(tangent=False)`                              |
| + RM           | `tangent=True`                                                  |
| + BLS, η = 1   | `step="unit", search=Backtracking()`                            |
| + BLS, η = ∇   | `search=Backtracking()`                                         |
| + TWD          | `search=TangentDecay()`                                         |
| + DW           | `direction_weight=True`                                         |

These are local methods: they end at a stationary point, which need not be the global
minimiser. Their stopping rules are absolute, as published, so they depend on the scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pmaf.errors import require_at_least, require_finite, require_not_negative
from pmaf.linalg import sphere
from pmaf.linalg.loop import iterate
from pmaf.linalg.products import dot, matvec, norm, rmatvec
from pmaf.solvers.base import Course, LeastSquares, Outcome, Solver
from pmaf.solvers.line_search import LineSearch, Ray


class Iterate(NamedTuple):
    """The state of a run: a point on the sphere, its residual and its objective."""

    u: Tensor  # (*, n)
    residual: Tensor  # (*, m), A u − b
    objective: Tensor  # (*,)
    moved: Tensor  # (*, n), the point before it was projected onto the sphere


@dataclass(frozen=True)
class ProjectedGradient(Solver):
    """Projected gradient descent and its variants, each entry stopping by its own rule.

    Args:
        tangent: descend along the tangent part of the gradient ("RM").
        step: first step length, `"gradient"` for the closed-form minimiser along the
            direction ("η = ∇") or `"unit"` ("η = 1").
        search: how the step is shrunk: not at all, `Backtracking` or `TangentDecay`.
        direction_weight: scale the step by `1 − cos(u, ∓∇f)` ("DW"), with the current
            iterate `u` as in the published code; the paper's text has `A⁺b` instead.
        regulariser: added to the denominator of the closed-form step, as published. It shortens the
            steps once the norm of the gradient is below `√regulariser`.
        tolerance: stop when the objective changes by less than this.
        max_iterations: give up after this many steps.

    >>> import torch, pmaf
    >>> A, b = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([3.0, 0.0])
    >>> pmaf.less(A, b, solver=pmaf.solvers.ProjectedGradient(max_iterations=500)).round(decimals=3)
    tensor([1., 0.])
    """

    solves = (LeastSquares,)
    unrollable = True

    tangent: bool = True
    step: Literal["unit", "gradient"] = "gradient"
    search: LineSearch | None = None
    direction_weight: bool = False
    regulariser: float = 1e-8
    tolerance: float = 1e-7
    max_iterations: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step not in ("unit", "gradient"):
            raise ValueError(f'step must be "unit" or "gradient"; got {self.step!r}')
        if not (self.search is None or isinstance(self.search, LineSearch)):
            raise TypeError(
                f"search must be None, Backtracking() or TangentDecay(); got {self.search!r}"
            )
        require_not_negative("regulariser", self.regulariser)
        require_not_negative("tolerance", self.tolerance)
        require_at_least("max_iterations", self.max_iterations, 1)

    def solve(
        self, problem: LeastSquares, *, init: Tensor | None = None, report: bool = True
    ) -> Outcome:
        scale = problem.scale()
        if not torch.isfinite(scale).all():
            require_finite(A=(problem.matrix, 2), b=(problem.b, 1))
        start = self.start(problem, init)
        inner = norm(problem.unconstrained()) < 1 if self.direction_weight else None
        recorded = scale.detach() if scale.requires_grad else None
        run = iterate(
            lambda state: self.advance(problem, state, inner, recorded),
            start,
            active=torch.ones_like(start.objective, dtype=torch.bool),
            max_iterations=self.max_iterations,
        )
        u = run.state.u
        force = -rmatvec(problem.matrix, run.state.residual)
        multiplier = dot(u, force)
        unknown = torch.full_like(multiplier, torch.nan)
        return Outcome(
            value=u,
            multiplier=multiplier,
            residual=norm(sphere.tangent(u, force)) / scale,
            gap=multiplier + problem.smallest_curvature() if report else unknown,
            iterations=run.iterations,
            converged=run.finished,
        )

    def course(self, problem: Any) -> Course:
        return Course("steps along the gradient on the sphere, from A⁺b or from init")

    def advice(self) -> str:
        return "raise max_iterations, or use Secular(), which is global and direct"

    def start(self, problem: LeastSquares, init: Tensor | None = None) -> Iterate:
        """The given point, else `A⁺b`, on the sphere; all ones where that is zero."""
        point = problem.unconstrained() if init is None else init
        point = point.expand(*problem.batch_shape, problem.n)
        nowhere = (norm(point) == 0).unsqueeze(-1)
        return self._at(problem, torch.where(nowhere, torch.ones_like(point), point))

    def advance(
        self,
        problem: LeastSquares,
        state: Iterate,
        inner: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> tuple[Iterate, Tensor]:
        """One step, and the mask of the entries that stop after it.

        `inner` says which problems have `‖A⁺b‖ < 1`; only the direction weight needs it. `scale`
        bounds the curvature; only a derivative through the step needs it.
        """
        A, u = problem.matrix, state.u
        gradient = rmatvec(A, state.residual)
        direction = -(sphere.tangent(u, gradient) if self.tangent else gradient)
        ray = Ray(u, state.residual, problem.b, direction, matvec(A, direction))
        eta = torch.ones_like(state.objective)
        if self.step == "gradient":
            curvature = dot(ray.image, ray.image) + self.regulariser
            eta = dot(direction, direction) / curvature
        weight = torch.ones_like(eta)
        if inner is not None:
            descent = torch.where(inner.unsqueeze(-1), gradient, -gradient)
            weight = 1 - sphere.cosine(u, descent)
        settled = torch.zeros_like(eta, dtype=torch.bool)
        if self.search is not None:
            eta, score = self.search.shrink(ray, eta, weight)
            settled = self.search.settled(score)
        move = (weight * eta).unsqueeze(-1) * direction
        if scale is not None:
            # u is accurate to eps, so a direction shorter than eps·scale is rounding error, and the
            # step length is a quotient of rounding errors. The product of the derivatives of such
            # steps grows without bound. The product for steps of length 1/scale contracts towards
            # the derivative of the same fixed point.
            rounding = norm(direction.detach()) <= torch.finfo(scale.dtype).eps * scale
            short = (direction - direction.detach()) / scale.unsqueeze(-1)
            move = torch.where(rounding.unsqueeze(-1), move.detach() + short, move)
        following = self._at(problem, u + move)
        steady = (following.objective - state.objective).abs() < self.tolerance
        return following, steady | settled

    def _at(self, problem: LeastSquares, point: Tensor) -> Iterate:
        u = sphere.project(point)
        r = matvec(problem.matrix, u) - problem.b
        return Iterate(u, r, 0.5 * dot(r, r), point)
