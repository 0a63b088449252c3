"""The kernel of implicit differentiation, shared by all layers.

At a solution with orthonormal rows `Y` (one for LESS, k for IED), everything a gradient
needs is, for each incoming row `v`, the solution `z` of the bordered system

    [ H   Yᵀ ] [ z ]   [ v ]
    [ Y   0  ] [ ν ] = [ 0 ],

with all rows of `Y` in the border, or those that the system says.

`H` is made of a matrix and of a shift for each row, and how it is solved with is the
system's business (an eigenbasis here, a Krylov method there). How the solution is
differentiated is the same for all, and is written once, below. The derivative is the
same kind of solve again, so any number of derivatives may follow.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pmaf.runtime.modes import plain


class Helper(NamedTuple):
    """What the forward pass left behind to solve with; never differentiated."""

    shift: Tensor  # (*, k), value of the shifts, to all the digits the solver has
    gap: Tensor  # (*,), smallest eigenvalue of H
    basis: Tensor  # (*, p, n), eigenvectors of H as rows, or p = 0; or a triangular factor
    spread: Tensor  # (*, p), eigenvalues of H above the smallest

    @property
    def factor(self) -> Tensor | None:
        """What there is instead of a basis if it has no eigenvalues: a triangular factor of `H`."""
        return self.basis if self.spread.shape[-1] < self.basis.shape[-2] else None


class BorderedSystem(Protocol):
    """A family of symmetric matrices `H(matrix, shift)`, without state of its own.

    Vectors come as rows: `v`, `w` and `z` are `(*, k, n)`, `y` is `(*, q, n)`.
    """

    def solve(self, v: Tensor, y: Tensor, matrix: Tensor, helper: Helper) -> Tensor:
        """`z`, by whatever means; not differentiated."""
        ...

    def linked(self, matrix: Tensor, helper: Helper) -> Tensor | None:
        """Which rows of `y` the solution for each row of `v` is orthogonal to, `(*, k, q)`.

        None if it is all of them.
        """
        ...

    def product(self, z: Tensor, matrix: Tensor, shift: Tensor) -> Tensor:
        """`H z`, differentiable."""
        ...

    def pullback(
        self, w: Tensor, z: Tensor, matrix: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of `Σ wᵀ H z` in the matrix and the shifts."""
        ...


def tangent_solve(
    system: BorderedSystem, v: Tensor, y: Tensor, matrix: Tensor, shift: Tensor, helper: Helper
) -> Tensor:
    """The solution `z` of the bordered system, differentiable in `v`, `y`, matrix and shift."""
    if plain(v) and not torch.is_grad_enabled():
        return system.solve(v, y, matrix, helper)  # nobody will differentiate it
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
        with torch.autocast(matrix.device.type, enabled=False):
            w = tangent_solve(system, incoming, y, matrix, shift, Helper(*helper))
            nu = (v - system.product(z, matrix, shift)) @ y.mT
            omega = (incoming - system.product(w, matrix, shift)) @ y.mT
            d_matrix, d_shift = system.pullback(w, z, matrix, shift)
            linked = system.linked(matrix.detach(), Helper(*helper))
            if linked is not None:
                nu, omega, d_shift = (torch.where(linked, x, 0) for x in (nu, omega, d_shift))
            dy = -(nu.mT @ w + omega.mT @ z)
        return None, w, dy, -d_matrix, -d_shift, None, None, None, None
