"""Gradients of weighted least squares on an ellipsoid or in it.

With weights `w`, `W = diag(w)` and `r = Ay − b`, a minimum of `½rᵀWr` on the ellipsoid `yᵀMy = ρ²`
has `AᵀWr + μMy = 0`. With `z` and `ν` of the linear system in `tangent/kkt.py`,

    ∂L/∂M = −½μ(z yᵀ + y zᵀ) − ½ν y yᵀ,   ∂L/∂ρ = νρ,

and `Images` has the other gradients. No square root of a weight is in them, so that they are right
at weights of zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pmaf import native
from pmaf.gradients.base import Images, Reverse
from pmaf.linalg import sphere
from pmaf.linalg.gram import singular_spectrum
from pmaf.linalg.products import broadcast, matvec, outer_sum, rmatvec
from pmaf.runtime.log import took
from pmaf.runtime.modes import plain
from pmaf.tangent.factor import gap_above
from pmaf.tangent.kept import Basis
from pmaf.tangent.kkt import Point, Tensors, kkt_solve


class Parts(NamedTuple):
    """What the two tensors of a solve consist of."""

    A: Any  # (*, m, n), a tensor, or before a solve an operator
    M: Tensor | None  # (*, n, n), or (*, 1, n) if it is diagonal
    b: Tensor  # (*, m)
    weights: Tensor | None  # (*, m)
    radius: Tensor | None  # (*,)


@dataclass(frozen=True)
class Layout:
    """How `A` and `M` are stacked in a first tensor, and `b`, weights and radius in a second.

    The first has the rows of `A` above those of `M`, or above the diagonal of `M`. The second,
    `(*, p, m)`, has rows of `b`, of the weights, and of the radius, which is repeated.
    """

    weighted: bool
    resized: bool  # whether there is a radius

    def stack(self, parts: Parts) -> Tensors:
        A, M, b, weights, radius = parts
        if M is not None:
            batch = broadcast(A.shape[:-2], M.shape[:-2])
            blocks = (x.expand(*batch, *x.shape[-2:]) for x in (A, M))
            A = torch.cat([*blocks], -2)
        rows = [b, weights, None if radius is None else radius.unsqueeze(-1)]
        given = torch.broadcast_tensors(*(x for x in rows if x is not None))
        return A, torch.stack(given, -2)

    def split(self, first: Tensor, second: Tensor) -> Parts:
        m = second.shape[-1]
        A, M = first[..., :m, :], first[..., m:, :] if first.shape[-2] > m else None
        weights = second[..., 1, :] if self.weighted else None
        radius = second[..., -1, 0] if self.resized else None
        return Parts(A, M, second[..., 0, :], weights, radius)

    # The curvature `AᵀWA` and `M`, as `tangent/kkt.py` uses them.

    def product(self, z: Tensor, tensors: Tensors) -> Tensor:
        A, _, _, weights, _ = self.split(*tensors)
        return rmatvec(A, times(weights, matvec(A, z)))

    def metric(self, z: Tensor, tensors: Tensors) -> Tensor:
        M = self.split(*tensors).M
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

    def pullback(
        self, pairs: list[tuple[Tensor, Tensor]], metric: list[tuple[Tensor, Tensor]], like: Tensors
    ) -> Tensors:
        A, M, _, weights, _ = self.split(*like)
        images = [(matvec(A, w), matvec(A, z)) for w, z in pairs]
        lefts = [times(weights, x) for both in images for x in both]
        dA = outer_sum(tuple(lefts), tuple(x for w, z in pairs for x in (z, w)), A.shape)
        products = sum((x * y for x, y in images[1:]), images[0][0] * images[0][1])
        dM = None if M is None else _pull_metric(metric, M)
        zero = torch.zeros_like(products)
        found = Parts(dA, dM, zero, products, zero[..., 0])
        return self.gathered(found, like)

    def gathered(self, found: Parts, like: Tensors) -> Tensors:
        """Gradients of the two tensors from those of their parts."""
        dA, dM, db, dw, d_radius = found
        first, second = like
        if dM is not None:
            batch = first.shape[:-2]
            dA = torch.cat([x.sum_to_size(*batch, *x.shape[-2:]) for x in (dA, dM)], -2)
        rows = [db]
        if self.weighted:
            assert dw is not None
            rows.append(dw)
        if self.resized:
            assert d_radius is not None
            # The radius is read from the first number of its row.
            column = d_radius.unsqueeze(-1)
            rows.append(torch.cat([column, torch.zeros_like(db[..., 1:])], -1))
        return dA.sum_to_size(first.shape), torch.stack(rows, -2).sum_to_size(second.shape)


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


def _pull_metric(pairs: list[tuple[Tensor, Tensor]], M: Tensor) -> Tensor:
    """The gradient of `Σ wᵀMz`, symmetric, in the shape of `M`."""
    if not pairs:
        return torch.zeros_like(M)
    if _is_diagonal(M):
        terms = [(w * z).unsqueeze(-2) for w, z in pairs]
        return sum(terms[1:], terms[0])
    lefts = tuple(0.5 * x for pair in pairs for x in pair)
    rights = tuple(x for w, z in pairs for x in (z, w))
    shape = broadcast(lefts[0].shape[:-1], M.shape[:-2])
    return outer_sum(lefts, rights, torch.Size((*shape, *M.shape[-2:])))


def acting(y: Tensor, multiplier: Tensor, gap: Tensor, ball: bool) -> Tensor:
    """Where the constraint acts on a minimum `y` in the unit ball or on the sphere, `(*,)`.

    At the edge of the ball, where `A⁺b` is on the sphere up to rounding, the derivative from the
    outer side is taken, except where the minimum without the constraint is not unique.
    """
    if not ball:
        return torch.ones_like(gap, dtype=torch.bool)
    # A hook on saved tensors may have rounded y, and the sign of the multiplier survives that.
    return (multiplier > 0) | (sphere.reaches(y) & (gap != 0))


def decomposed(A: Tensor, multiplier: Tensor) -> tuple[Basis, Tensor]:
    """An eigenbasis of `AᵀA` and the gap, for a solver that has kept none."""
    spectrum, _, _ = singular_spectrum(A)
    return Basis(spectrum.basis, spectrum.spread), gap_above(spectrum, multiplier)


def constrained_gradients(layout: Layout, ball: bool, given: Reverse) -> Tensors:
    """Gradients of the two tensors, given those of the solution and of its multiplier."""
    compiled = _compiled(layout, ball, given)
    if compiled is not None:
        return compiled
    first, second = given.tensors
    tensors = first, second
    y, v, d_multiplier = given.y, given.v, given.d_multiplier
    A, M, b, weights, radius = layout.split(first, second)
    found, gap, kept = given.state
    basis = kept.basis
    if basis is None:
        fixed = scaled(A.detach(), b.detach(), None if weights is None else weights.detach())
        basis, gap = decomposed(fixed[0], found)
    acts = acting(y.detach(), found, gap, ball)
    point = Point(found, gap, basis.rows, basis.spread, acts)
    r = matvec(A, y) - b
    # The multiplier of the solver, itself an output of the solve, has more digits than `yᵀAᵀWr`.
    multiplier = torch.where(acts, found, 0)
    v = torch.zeros_like(y) if v is None else v
    c = torch.zeros_like(found) if d_multiplier is None else torch.where(acts, d_multiplier, 0)
    z, nu = kkt_solve(layout, v, c, y, multiplier, tensors, point)
    images = Images(r, matvec(A, z), weights)
    pull = -multiplier.unsqueeze(-1) * z - 0.5 * nu.unsqueeze(-1) * y
    parts = Parts(
        A=outer_sum(*images.of_matrix(y, z), shape=A.shape),
        M=None if M is None else _pull_metric([(pull, y)], M),
        b=images.of_b(),
        weights=images.of_weights(),
        radius=nu if radius is None else nu * radius,
    )
    gathered = layout.gathered(parts, tensors)
    singular = point.singular
    if plain(v) and plain(y) and not bool(singular.any()):
        return gathered
    # Of several minimisers the one of least norm is taken. It has no part in the null space of the
    # curvature, which moves with the inputs.
    mask, none = singular.unsqueeze(-1), torch.zeros_like(c)
    null = layout.unmetric(torch.where(mask, v - layout.product(z, tensors), 0), tensors)
    image = layout.metric(torch.where(mask, y, 0), tensors)
    inner = kkt_solve(layout, image, none, y, multiplier, tensors, point).z
    also = layout.pullback([(null, inner)], [(-null, y)], tensors)
    return gathered[0] + also[0], gathered[1] + also[1]


def _compiled(layout: Layout, ball: bool, given: Reverse) -> Tensors | None:
    """The same by compiled kernels, once; None where they are not used, or fail."""
    first, second = given.tensors
    A, M, b, weights, radius = layout.split(first, second)
    metric = 0 if M is None else 1 if _is_diagonal(M) else 2
    found = compiled_gradients(A, b, weights, ball, metric, given)
    if found is None:
        return None
    dA, dM, db, dw, nu = found
    assert nu is not None
    dM = dM.unsqueeze(-2) if dM is not None and metric == 1 else dM
    parts = Parts(dA, dM, db, dw, nu if radius is None else nu * radius)  # pyright: ignore
    return layout.gathered(parts, (first, second))


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
