"""A problem that the library does not know, declared by its force and its curvature alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

import pmaf
from pmaf.gradients import Implicit
from pmaf.operators import Operator, multiply, multiply_rows
from pmaf.solvers import Auto


@dataclass(frozen=True, eq=False)
class SphereQuadratic(pmaf.Problem):
    """`min ½uᵀQu − cᵀu` subject to `‖u‖ = 1`, for a symmetric `Q` and one `c` a batch entry."""

    Q: Tensor | Operator
    c: Tensor

    inputs: ClassVar[dict[str, int]] = {"Q": 2, "c": 1}

    def force(self, u: Tensor, Q: Tensor | Operator, c: Tensor) -> Tensor:
        return c - multiply(Q, u)

    def curvature(self, rows: Tensor) -> Tensor:
        return multiply_rows(self.Q, rows)


def quadratic(Q: Tensor | Operator, c: Tensor, solver=None, gradient=None, init=None) -> Tensor:
    """The layer."""
    problem = SphereQuadratic(Q, c)
    return pmaf.solve(problem, solver=solver, gradient=gradient, init=init).value


class Quadratic(nn.Module):
    """The same as a module. `Q` is made symmetric, as a user's network would have to."""

    def __init__(self) -> None:
        super().__init__()
        self.solver, self.gradient = Auto(), Implicit()

    def forward(self, Q: Tensor, c: Tensor) -> Tensor:
        return quadratic(0.5 * (Q + Q.mT), c, self.solver, self.gradient)

    def extra_repr(self) -> str:
        return f"solver={self.solver!r}, gradient={self.gradient!r}"


def reference(Q: Tensor, c: Tensor) -> tuple[Tensor, float]:
    """The global minimum and its multiplier in float64, by bisection on the secular equation."""
    values, vectors = torch.linalg.eigh(Q.double())
    coefficients = vectors.mT @ c.double()
    low = -float(values[0]) + 1e-300
    high = float(coefficients.norm() - values[0]) + 1.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        length = (coefficients / (values + middle)).norm()
        low, high = (middle, high) if length > 1 else (low, middle)
    return vectors @ (coefficients / (values + high)), high
