"""Gradients of weighted least squares on an ellipsoid or in it.

With weights `w`, `W = diag(w)` and `r = Ay − b`, a minimum of `½rᵀWr` on the ellipsoid `yᵀMy = ρ²`
has `AᵀWr + μMy = 0`. With `z` and `ν` of the linear system in `tangent/kkt.py`,

    ∂L/∂M = −½μ(z yᵀ + y zᵀ) − ½ν y yᵀ,   ∂L/∂ρ = νρ,

and `Images` has the other gradients. No square root of a weight is in them, so that they are right
at weights of zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pmaf import native
from pmaf.gradients.base import Images, Reverse
from pmaf.linalg import sphere
from pmaf.linalg.gram import singular_spectrum
from pmaf.linalg.products import matvec, outer_sum, rmatvec
from pmaf.runtime.log import took
from pmaf.runtime.modes import plain
from pmaf.tangent.factor import gap_above
from pmaf.tangent.kept import Basis
from pmaf.tangent.kkt import Pairs, Point, Tensors, kkt_solve


class Parts(NamedTuple):
    """Tensors of weighted least squares, or their gradients."""

    A: Any  # (*, m, n), a tensor, or before a solve an operator
    M: Tensor | None  # (*, n, n), or (*, 1, n) if it is diagonal
    b: Tensor  # (*, m)
    weights: Tensor | None  # (*, m)
    radius: Tensor | None  # (*,)


class WeightedCurvature:
    """The curvature `AᵀWA` and `M`, for tensors `A`, `M` and the weights."""

    def product(self, z: Tensor, tensors: Tensors) -> Tensor:
        A, _, weights = tensors
        return rmatvec(A, times(weights, matvec(A, z)))

    def metric(self, z: Tensor, tensors: Tensors) -> Tensor:
        _, M, _ = tensors
        if M is None:
            return z
        return z * M.squeeze(-2) if _is_diagonal(M) else matvec(M, z)

    def unmetric(self, z: Tensor, tensors: Tensors) -> Tensor:
        found = rest = z
        # As the value of M is the identity, each term of Neumann's series adds a derivative.
        for _ in range(_TERMS):
            rest = rest - self.metric(rest, tensors)
            found = found + rest
        return found

    def pullback(self, pairs: Pairs, metric: Pairs, tensors: Tensors) -> Tensors:
        A, M, weights = tensors
        images = [(matvec(A, w), matvec(A, z)) for w, z in pairs]
        lefts = [times(weights, x) for both in images for x in both]
        dA = outer_sum(lefts, [x for w, z in pairs for x in (z, w)], A.shape)
        dw = None
        if weights is not None:
            products = sum((x * y for x, y in images[1:]), images[0][0] * images[0][1])
            dw = products.sum_to_size(weights.shape)
        return dA, None if M is None else _pull_metric(metric, M), dw


CURVATURE = WeightedCurvature()
# Derivatives up to this order are exact.
_TERMS = 4


def times(weights: Tensor | None, x: Tensor) -> Tensor:
    """`W x`, `(*, m)`."""
    return x if weights is None else weights * x


def scaled(A: Tensor, b: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """`√w A` and `√w b`, for solvers, which are not differentiated."""
    if weights is None:
        return A, b
    root = weights.sqrt()
    return root.unsqueeze(-1) * A, root * b


def _is_diagonal(M: Tensor) -> bool:
    return M.shape[-2] == 1


def _pull_metric(pairs: Pairs, M: Tensor) -> Tensor:
    """The gradient of `Σ wᵀMz`, symmetric, in the shape of `M`."""
    if not pairs:
        return torch.zeros_like(M)
    if _is_diagonal(M):
        terms = [(w * z).unsqueeze(-2) for w, z in pairs]
        return sum(terms[1:], terms[0]).sum_to_size(M.shape)
    lefts = tuple(0.5 * x for pair in pairs for x in pair)
    rights = tuple(x for w, z in pairs for x in (z, w))
    return outer_sum(lefts, rights, M.shape)


def acting(y: Tensor, multiplier: Tensor, gap: Tensor, ball: bool) -> Tensor:
    """Where the constraint acts on a minimum `y` in the unit ball or on the sphere, `(*,)`.

    At the edge of the ball, where `A⁺b` is on the sphere up to rounding, the derivative from the
    outer side is taken, except where the minimum without the constraint is not unique.
    """
    if not ball:
        return torch.ones_like(gap, dtype=torch.bool)
    # A hook on saved tensors may have rounded y, and the sign of the multiplier survives that.
    return (multiplier > 0) | (sphere.reaches(y) & (gap != 0))


def constrained_gradients(parts: Parts, ball: bool, given: Reverse) -> Parts:
    """Gradients of the parts, given those of the solution and of its multiplier."""
    A, M, b, weights, radius = parts
    kind = 0 if M is None else 1 if _is_diagonal(M) else 2
    compiled = compiled_gradients(A, b, weights, ball, kind, given)
    if compiled is not None:
        dA, dM, db, dw, nu = compiled
        assert nu is not None
        assert db is not None
        dM = dM.unsqueeze(-2) if dM is not None and kind == 1 else dM
        return Parts(dA, dM, db, dw, nu if radius is None else nu * radius)
    y, v, d_multiplier = given.y, given.v, given.d_multiplier
    found, gap, kept = given.state
    basis = kept.basis
    if basis is None:
        fixed = scaled(A.detach(), b.detach(), None if weights is None else weights.detach())
        spectrum, _, _ = singular_spectrum(fixed[0])
        basis, gap = Basis(spectrum.basis, spectrum.spread), gap_above(spectrum, found)
    acts = acting(y.detach(), found, gap, ball)
    point = Point(found, gap, basis.rows, basis.spread, acts)
    # The multiplier of the solver, itself an output of the solve, has more digits than `yᵀAᵀWr`.
    multiplier = torch.where(acts, found, 0)
    v = torch.zeros_like(y) if v is None else v
    c = torch.zeros_like(found) if d_multiplier is None else torch.where(acts, d_multiplier, 0)
    tensors = A, M, weights
    z, nu = kkt_solve(CURVATURE, v, c, y, multiplier, tensors, point)
    images = Images(matvec(A, y) - b, matvec(A, z), weights)
    pull = -multiplier.unsqueeze(-1) * z - 0.5 * nu.unsqueeze(-1) * y
    whole = Parts(
        A=outer_sum(*images.of_matrix(y, z), shape=A.shape),
        M=None if M is None else _pull_metric([(pull, y)], M),
        b=images.of_b(),
        weights=None if weights is None else images.of_weights(),
        radius=nu if radius is None else nu * radius,
    )
    singular = point.singular
    if plain(v) and plain(y) and not bool(singular.any()):
        return whole
    # Of several minimisers the one of least norm is taken. It has no part in the null space of the
    # curvature, which moves with the inputs.
    mask, none = singular.unsqueeze(-1), torch.zeros_like(c)
    rest = torch.where(mask, v - CURVATURE.product(z, tensors), 0)
    null = CURVATURE.unmetric(rest, tensors)
    image = CURVATURE.metric(torch.where(mask, y, 0), tensors)
    inner = kkt_solve(CURVATURE, image, none, y, multiplier, tensors, point).z
    dA, dM, dw = CURVATURE.pullback([(null, inner)], [(-null, y)], tensors)
    return whole._replace(
        A=whole.A + dA,
        M=None if whole.M is None or dM is None else whole.M + dM,
        weights=None if whole.weights is None or dw is None else whole.weights + dw,
    )


def compiled_gradients(
    A: Tensor, b: Tensor, weights: Tensor | None, ball: bool, metric: int, given: Reverse
) -> native.UnitGradients | None:
    """The gradients of `A`, of `M`, and of all others, each with the batch of the solution.

    None where compiled kernels are not used, or fail.
    """
    y, v, d, kept = given.y, given.v, given.d_multiplier, given.state.kept.basis
    batch = y.shape[:-1]
    if torch.is_grad_enabled() or kept is None:
        return None
    if not all(x is None or plain(x) for x in (A, y, v, d)):
        return None
    if not native.takes_units(A, b, y, *kept) or kept.rows.shape[:-2] not in (batch, ()):
        return None
    took("tangent: compiled")
    found, failed = native.unit_gradients(
        A.expand(*batch, *A.shape[-2:]),
        b.expand(*batch, -1),
        None if weights is None else weights.expand(*batch, -1),
        kept,
        y,
        given.state.shift,
        given.state.gap,
        torch.zeros_like(y) if v is None else v,
        d,
        ball,
        metric,
        (True, metric > 0, True, weights is not None, True),
    )
    return found if failed is None else None
