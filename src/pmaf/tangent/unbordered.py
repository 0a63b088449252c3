"""The linear system of a minimum without a constraint: the bordered system without its border.

Inside a ball the constraint does not act, and an incoming gradient `v` requires `z = H⁺v`. If `H`
is singular, the minimum of least norm is taken, and `H⁺` is differentiated at constant rank (Golub
and Pereyra 1973): with `N = I − HH⁺`,

    d(H⁺) = −H⁺ dH H⁺ + N dH H⁺H⁺ + H⁺H⁺ dH N.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pmaf.linalg.products import one_if_zero
from pmaf.linalg.roundings import merge_tolerance
from pmaf.runtime.modes import plain
from pmaf.tangent.bordered import BorderedSystem, Tensors
from pmaf.tangent.kept import Basis


def invert_in_basis(kept: Basis, gap: Tensor, v: Tensor) -> Tensor:
    """`H⁺` times rows `(*, k, n)`, where `H` has eigenvalues `spread + gap` in the basis.

    Directions that the basis does not span have the eigenvalue `gap`.
    """
    rows, spread = kept
    h = spread + gap.unsqueeze(-1)
    # The forward pass has set to zero what is rounding; everything else is far above this.
    null = h.abs() <= merge_tolerance(v.dtype) ** 2 * h.abs().amax(-1, keepdim=True)
    inside = v @ rows.mT
    z = (inside * torch.where(null, 0, 1 / torch.where(null, 1, h)).unsqueeze(-2)) @ rows
    if rows.shape[-2] == rows.shape[-1]:
        return z
    outside = torch.where(gap == 0, 0, 1 / one_if_zero(gap))[..., None, None]
    return z + outside * (v - inside @ rows)


def unbordered_solve(
    system: BorderedSystem, v: Tensor, tensors: Tensors, gap: Tensor, kept: Basis
) -> Tensor:
    """`H⁺v` for rows `(*, k, n)`, differentiable in `v` and the tensors.

    `gap` is the smallest eigenvalue of `H`, exactly zero where `H` is singular.
    """
    if plain(v) and not torch.is_grad_enabled():
        return _solve(system, v, tensors, gap, kept)
    first, second = (*tensors, None)[:2]
    return _UnborderedSolve.apply(system, v, first, second, gap, *kept)  # pyright: ignore


def _solve(system: BorderedSystem, v: Tensor, tensors: Tensors, gap: Tensor, kept: Basis) -> Tensor:
    z = invert_in_basis(kept, gap, v)
    return z + invert_in_basis(kept, gap, v - _product(system, z, tensors))


def _product(system: BorderedSystem, z: Tensor, tensors: Tensors) -> Tensor:
    return system.product(z, tensors, z.new_zeros(z.shape[:-1]))


class _UnborderedSolve(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        system: BorderedSystem,
        v: Tensor,
        first: Tensor,
        second: Tensor | None,
        gap: Tensor,
        rows: Tensor,
        spread: Tensor,
    ) -> Tensor:
        return _solve(system, v, _given(first, second), gap, Basis(rows, spread))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.system, *tensors = inputs
        ctx.save_for_backward(*tensors, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        v, first, second, gap, rows, spread, z = ctx.saved_tensors
        system, tensors, kept = ctx.system, _given(first, second), Basis(rows, spread)
        (incoming,) = grads
        with torch.autocast(first.device.type, enabled=False):

            def solve(x: Tensor) -> Tensor:
                return unbordered_solve(system, x, tensors, gap, kept)

            w = solve(incoming)
            shift = z.new_zeros(z.shape[:-1])
            singular = (gap == 0)[..., None, None]
            # The parts of v and of the incoming gradient in the null space of H.
            nu, omega = (
                torch.where(singular, x - _product(system, y, tensors), 0)
                for x, y in ((v, z), (incoming, w))
            )
            terms = (
                system.pullback(-w, z, tensors, shift)[0],
                system.pullback(omega, solve(z), tensors, shift)[0],
                system.pullback(solve(w), nu, tensors, shift)[0],
            )
        sums = (None if x is None else x + y + z for x, y, z in zip(*terms))
        return None, w, *(*sums, None)[:2], None, None, None


def _given(*tensors: Tensor | None) -> Tensors:
    return tuple(x for x in tensors if x is not None)
