"""The kernel of implicit differentiation, shared by all layers.

At a solution `y` on the sphere with Hessian `H` of the Lagrangian, everything a
gradient needs is the solution `z` of the bordered system

    [ H   y ] [ z ]   [ v ]
    [ yᵀ  0 ] [ ν ] = [ 0 ].

`H` is made of a matrix and a shift, and how it is solved with is the system's business
(an eigenbasis here, a Krylov method there). How the solution is differentiated is the
same for all, and is written once, below. The derivative is the same kind of solve
again, so any number of derivatives may follow.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pmaf._linalg import dot


class Helper(NamedTuple):
    """What the forward pass left behind to solve with; never differentiated."""

    shift: Tensor  # (*,), value of the shift, to all the digits the solver has
    gap: Tensor  # (*,), smallest eigenvalue of H
    basis: Tensor  # (*, p, n), eigenvectors of H, or p = 0
    spread: Tensor  # (*, p), eigenvalues of H above the smallest


class BorderedSystem(Protocol):
    """A family of symmetric matrices `H(matrix, shift)`, without state of its own."""

    def solve(self, v: Tensor, y: Tensor, matrix: Tensor, helper: Helper) -> Tensor:
        """`z`, by whatever means; not differentiated."""
        ...

    def product(self, z: Tensor, matrix: Tensor, shift: Tensor) -> Tensor:
        """`H z`, differentiable."""
        ...

    def pullback(
        self, w: Tensor, z: Tensor, matrix: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of `wᵀ H z` in the matrix and the shift."""
        ...


def tangent_solve(
    system: BorderedSystem, v: Tensor, y: Tensor, matrix: Tensor, shift: Tensor, helper: Helper
) -> Tensor:
    """The solution `z` of the bordered system, differentiable in `v`, `y`, matrix and shift."""
    return _TangentSolve.apply(system, v, y, matrix, shift, *helper)  # pyright: ignore[reportReturnType]


class _TangentSolve(torch.autograd.Function):
    generate_vmap_rule = True

    # torch.compile tells a forward without context by its number of arguments, so they
    # are spelled out.
    @staticmethod
    def forward(
        system: BorderedSystem,
        v: Tensor,
        y: Tensor,
        matrix: Tensor,
        shift: Tensor,
        shift_value: Tensor,
        gap: Tensor,
        basis: Tensor,
        spread: Tensor,
    ) -> Tensor:
        # `shift` is here for its derivative; its digits come from the helper.
        return system.solve(v, y, matrix, Helper(shift_value, gap, basis, spread))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.system, *tensors = inputs
        ctx.save_for_backward(*tensors, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        system = ctx.system
        v, y, matrix, shift, *helper, z = ctx.saved_tensors
        (incoming,) = grads
        w = tangent_solve(system, incoming, y, matrix, shift, Helper(*helper))
        nu = dot(y, v - system.product(z, matrix, shift))
        omega = dot(y, incoming - system.product(w, matrix, shift))
        dy = -(w * nu.unsqueeze(-1) + z * omega.unsqueeze(-1))
        d_matrix, d_shift = system.pullback(w, z, matrix, shift)
        return None, w, dy, -d_matrix, -d_shift, None, None, None, None
