"""Exact gradients by the implicit function theorem, at the cost of a few products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pmaf.gradients.base import Conditions, Gradient
from pmaf.solvers.base import Eigenvectors, Minimum, SingularVectors


@dataclass(frozen=True)
class Implicit(Gradient):
    """Differentiate the optimality conditions on the tangent space of the sphere.

    The gradient is exact wherever the derivative exists, including the hard case of LESS and
    eigenvectors. Where the derivative does not exist, the gradient is finite and of least norm.
    Derivatives of any order may be taken.

    >>> import torch, pmaf
    >>> A = torch.diag(torch.tensor([3.0, 1.0])).requires_grad_()
    >>> pmaf.ied(A, gradient=pmaf.gradients.Implicit()).vectors[1].backward()
    >>> A.grad[0, 1].round(decimals=3)  # one half of 1/(3 − 1)
    tensor(0.2500)
    """

    solves = (Minimum, Eigenvectors, SingularVectors)
    words = "the linear system at the solution, by compiled kernels if there are any"

    def pullback(
        self, conditions: Conditions, v: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        return conditions.pullback(conditions.tangent_solve(v), needs)
