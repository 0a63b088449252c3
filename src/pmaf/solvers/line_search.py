"""How a first-order method on the sphere shortens a step that is too long."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.errors import require_not_negative, require_number
from pmaf.linalg.loop import iterate
from pmaf.linalg.products import dot, norm
from pmaf.runtime.text import Configured


class Ray(NamedTuple):
    """A descent direction from a point of the sphere, and its image under `A`."""

    u: Tensor  # (*, n), the point
    residual: Tensor  # (*, m), A u − b
    target: Tensor  # (*, m), b
    direction: Tensor  # (*, n)
    image: Tensor  # (*, m), A direction

    def objective(self, length: Tensor) -> Tensor:
        """`½‖A(u + length·direction) − b‖²`, before projection to the sphere."""
        moved = self.residual + length.unsqueeze(-1) * self.image
        return 0.5 * dot(moved, moved)

    def agreement(self, length: Tensor) -> Tensor:
        """Product of the direction and the tangent descent direction after projection.

        Products with `A` are linear along the ray, so none is needed here.
        """
        stretch = length.unsqueeze(-1)
        moved = self.u + stretch * self.direction
        size = norm(moved).unsqueeze(-1)
        u = moved / size
        image = (self.residual + self.target + stretch * self.image) / size
        residual = image - self.target
        return dot(self.direction, u) * dot(image, residual) - dot(self.image, residual)


class Trial(NamedTuple):
    """A step length under test, and its score."""

    eta: Tensor
    score: Tensor


class LineSearch(Configured):
    """Shrinks a step by the factor `beta` until it is acceptable."""

    beta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("alpha", "beta"):
            value = getattr(self, name, 0.5)
            if not 0 < require_number(name, value) < 1:
                raise ValueError(f"{name} must lie between 0 and 1; got {value}")

    def score(self, ray: Ray, length: Tensor) -> Tensor:
        """The score of a trial step, which is acceptable if the score is at least `lowest`."""
        raise NotImplementedError

    @property
    def lowest(self) -> float:
        return 0.0

    def settled(self, score: Tensor) -> Tensor:
        """Whether a step accepted with this score ends the whole run."""
        return torch.zeros_like(score, dtype=torch.bool)

    def shrink(self, ray: Ray, eta: Tensor, weight: Tensor) -> Trial:
        """The first acceptable step length among `eta, β·eta, β²·eta, …`, times `weight`."""

        def step(trial: Trial) -> tuple[Trial, Tensor]:
            eta = self.beta * trial.eta
            score = self.score(ray, weight * eta)
            return Trial(eta, score), score >= self.lowest

        score = self.score(ray, weight * eta)
        underflow = math.log(torch.finfo(eta.dtype).tiny) / math.log(self.beta)
        first = Trial(eta, score)
        run = iterate(step, first, active=score < self.lowest, max_iterations=int(underflow))
        return run.state


@dataclass(frozen=True)
class Backtracking(LineSearch):
    """Shrink until the objective falls by `alpha` of the linear forecast (the paper's BLS).

    The test is made at the trial point *before* it is projected onto the sphere, as in
    the published code.

    >>> from pmaf.solvers import Backtracking, ProjectedGradient
    >>> ProjectedGradient(step="unit", search=Backtracking()).search
    Backtracking(alpha=0.5, beta=0.8)
    """

    alpha: float = 0.5
    beta: float = 0.8

    def score(self, ray: Ray, length: Tensor) -> Tensor:
        forecast = self.alpha * length * dot(ray.direction, ray.direction)
        return (0.5 * dot(ray.residual, ray.residual) - forecast) - ray.objective(length)


@dataclass(frozen=True)
class TangentDecay(LineSearch):
    """Shrink while the tangent gradient at the trial point is reversed (the paper's TWD).

    The test is made at the trial point *after* it is projected onto the sphere. A
    product of the two tangent gradients within `angle_tolerance` of zero ends both the
    shrinking and the whole run, as in the published code.

    >>> from pmaf.solvers import ProjectedGradient, TangentDecay
    >>> ProjectedGradient(search=TangentDecay(beta=0.8)).search
    TangentDecay(beta=0.8, angle_tolerance=1e-05)
    """

    beta: float = 0.9
    angle_tolerance: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_not_negative("angle_tolerance", self.angle_tolerance)

    @property
    def lowest(self) -> float:
        return -self.angle_tolerance

    def score(self, ray: Ray, length: Tensor) -> Tensor:
        return ray.agreement(length)

    def settled(self, score: Tensor) -> Tensor:
        return score.abs() <= self.angle_tolerance
