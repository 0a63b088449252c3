"""The linear system of a minimum on an ellipsoid or in it, and its derivative.

At a minimum `y` of `f` with `yᵀMy = ρ²` and the multiplier `μ`, incoming gradients `v` of `y` and
`c` of `μ` require the solution of

    [ H + μM    My ] [ z ]   [ v ]
    [ (My)ᵀ     0  ] [ ν ] = [ c ],      H = ∇²f.

Where the constraint does not act, `z = H⁺v` and `ν = 0`. If `H` is singular there, the minimum with
the least `yᵀMy` is taken: `H⁺ = L⁻ᵀ(L⁻¹HL⁻ᵀ)⁺L⁻¹` with `M = LLᵀ`. It is differentiated at constant
rank (Golub and Pereyra 1973): with `N = M⁻¹(I − HH⁺)`, whose range is the null space of `H`,

    d(H⁺) = −H⁺ dH H⁺ + Nᵀ dH H⁺MH⁺ + H⁺MH⁺ dH N − Nᵀ dM H⁺ − H⁺ dM N.

The value of `M` is the identity and that of `ρ` is one: problems come in such coordinates. But `M`
is differentiated.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pmaf.linalg.products import dot, one_if_zero
from pmaf.linalg.roundings import merge_tolerance
from pmaf.runtime.modes import full_precision, plain
from pmaf.runtime.saved import restored, save
from pmaf.tangent.basis import TangentSolver

# `A`, `M` and weights, on which `H` and `M` depend.
Tensors = tuple[Tensor, Tensor | None, Tensor | None]
Pairs = list[tuple[Tensor, Tensor]]


class Solved(NamedTuple):
    """The solution of the system."""

    z: Tensor  # (*, n)
    nu: Tensor  # (*,)


class Point(NamedTuple):
    """A minimum, as the forward pass has found it; nothing of it is differentiated."""

    multiplier: Tensor  # (*,)
    gap: Tensor  # (*,), smallest eigenvalue of H + μI, exactly zero where that is singular
    rows: Tensor  # an eigenbasis of H
    spread: Tensor
    acts: Tensor  # (*,), whether the constraint acts

    @property
    def singular(self) -> Tensor:
        """Where the minimum without a constraint is not unique, `(*,)`."""
        return ~self.acts & (self.gap == 0)


class Curvature(Protocol):
    """A family of matrices `H` and `M`, without state of its own; vectors are `(*, n)`."""

    def product(self, z: Tensor, tensors: Tensors) -> Tensor:
        """`H z`, differentiable."""
        ...

    def metric(self, z: Tensor, tensors: Tensors) -> Tensor:
        """`M z`, differentiable."""
        ...

    def unmetric(self, z: Tensor, tensors: Tensors) -> Tensor:
        """`M⁻¹z`, differentiable, for an `M` whose value is the identity."""
        ...

    def pullback(self, pairs: Pairs, metric: Pairs, tensors: Tensors) -> Tensors:
        """Gradients of `Σ wᵀHz` over pairs, plus `Σ wᵀMz` over other pairs, in the tensors."""
        ...


def invert(point: Point, v: Tensor) -> Tensor:
    """`(H + μI)⁺v` in the eigenbasis, `(*, n)`; `gap` for directions that it does not span."""
    rows, spread, gap = point.rows, point.spread, point.gap
    h = spread + gap.unsqueeze(-1)
    # The forward pass has set to zero what is rounding; everything else is far above this.
    null = h.abs() <= merge_tolerance(v.dtype) ** 2 * h.abs().amax(-1, keepdim=True)
    inside = (v.unsqueeze(-2) @ rows.mT).squeeze(-2)
    inverse = torch.where(null, 0, 1 / torch.where(null, 1, h))
    z = ((inside * inverse).unsqueeze(-2) @ rows).squeeze(-2)
    if rows.shape[-2] == rows.shape[-1]:
        return z
    outside = torch.where(gap == 0, 0, 1 / one_if_zero(gap)).unsqueeze(-1)
    return z + outside * (v - (inside.unsqueeze(-2) @ rows).squeeze(-2))


def kkt_solve(
    system: Curvature,
    v: Tensor,
    c: Tensor,
    y: Tensor,
    multiplier: Tensor,
    tensors: Tensors,
    point: Point,
) -> Solved:
    """`z` and `ν`, differentiable in `v`, `c`, `y`, the multiplier and the tensors.

    `c` is zero where the constraint does not act.
    """
    if plain(v) and plain(y) and not torch.is_grad_enabled():
        return _solve(system, v, c, y, tensors, point)
    found: Any = _KKTSolve.apply(system, v, c, y, multiplier, *tensors, *point)
    return Solved(*found)


def _solve(
    system: Curvature, v: Tensor, c: Tensor, y: Tensor, tensors: Tensors, point: Point
) -> Solved:
    mu, acts = point.multiplier.unsqueeze(-1), point.acts.unsqueeze(-1)
    solver = TangentSolver(point.rows, point.spread, point.gap, y)

    def product(z: Tensor) -> Tensor:
        return system.product(z, tensors) + mu * z

    def corrected(z: Tensor, right: Tensor) -> Tensor:
        rest = right - product(z)
        return z + torch.where(acts, solver(rest), invert(point, rest))

    z = corrected(torch.where(acts, solver(v), invert(point, v)), v)
    # The solution for v = 0 and c = 1, which is how y moves with the radius. As the matrix is
    # symmetric, it gives ν: the residual v − (H + μI)z would have few digits of a small one.
    s, kappa = solver.growth()
    s = torch.where(acts, s, 0)
    s = corrected(s, -kappa.unsqueeze(-1) * y)
    nu = dot(s, v) + c * kappa
    return Solved(z + c.unsqueeze(-1) * s, torch.where(point.acts, nu, 0))


class _KKTSolve(torch.autograd.Function):
    generate_vmap_rule = True

    # torch.compile recognises a forward without ctx by its number of arguments: *args fails.
    @staticmethod
    def forward(
        system: Curvature,
        v: Tensor,
        c: Tensor,
        y: Tensor,
        multiplier: Tensor,
        A: Tensor,
        M: Tensor | None,
        weights: Tensor | None,
        value: Tensor,
        gap: Tensor,
        rows: Tensor,
        spread: Tensor,
        acts: Tensor,
    ) -> tuple[Tensor, Tensor]:
        # Autograd differentiates in `multiplier`; the solve uses `value`, which is more accurate.
        point = Point(value, gap, rows, spread, acts)
        found = _solve(system, v, c, y, (A, M, weights), point)
        return found.z, found.nu

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.system, *tensors = inputs
        save(ctx, *tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (v, _, y, multiplier, A, M, weights, *parts, z, nu), _ = restored(ctx)
        system, point, tensors = ctx.system, Point(*parts), (A, M, weights)
        with full_precision(v.device):
            acts, singular = point.acts, point.singular
            d_z, d_nu = grads[0], torch.where(acts, grads[1], 0)

            def solve(v: Tensor, c: Tensor) -> Solved:
                return kkt_solve(system, v, c, y, multiplier, tensors, point)

            w, omega = solve(d_z, d_nu)
            mask, none = acts.unsqueeze(-1), torch.zeros_like(nu)
            # Of the border My, and of μM.
            side = torch.where(mask, nu.unsqueeze(-1) * w + omega.unsqueeze(-1) * z, 0)
            shifted = torch.where(mask, multiplier.unsqueeze(-1) * w, 0)
            pairs, metric = [(-w, z)], [(-shifted, z), (-side, y)]
            if not (plain(v) and plain(y)) or bool(singular.any()):
                null = singular.unsqueeze(-1)

                def across(x: Tensor, solved: Tensor) -> Tensor:
                    rest = torch.where(null, x - system.product(solved, tensors), 0)
                    return system.unmetric(rest, tensors)

                def twice(solved: Tensor) -> Tensor:
                    image = system.metric(torch.where(null, solved, 0), tensors)
                    return solve(image, none).z

                across_v, across_d = across(v, z), across(d_z, w)
                pairs += [(across_d, twice(z)), (twice(w), across_v)]
                metric += [(-across_d, z), (-torch.where(null, w, 0), across_v)]
            d_tensors = system.pullback(pairs, metric, tensors)
            d_y = -system.metric(side, tensors)
            d_multiplier = -torch.where(acts, (w * system.metric(z, tensors)).sum(-1), 0)
        return None, w, omega, d_y, d_multiplier, *d_tensors, *(None,) * 5
