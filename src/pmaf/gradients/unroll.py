"""Plain automatic differentiation through the iterations of a solver."""

from __future__ import annotations

from dataclasses import dataclass

from pmaf.gradients.base import Gradient


@dataclass(frozen=True)
class Unroll(Gradient):
    """Record every iteration and differentiate through all of them.

    The gradient is that of the last iterate, exact only in the limit, and the memory
    grows with the number of iterations. The solver has to iterate by torch operations; an opaque
    solve cannot be recorded.

    >>> import torch, pmaf
    >>> A = torch.diag(torch.tensor([3.0, 1.0])).requires_grad_()
    >>> steps = pmaf.solvers.PowerIteration(iterations=50)
    >>> pmaf.ied(A, solver=steps, gradient=pmaf.gradients.Unroll()).vectors[1].backward()
    >>> A.grad[0, 1].round(decimals=3)
    tensor(0.2500)
    """

    words = "autograd, which has recorded every step"
