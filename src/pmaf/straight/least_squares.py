"""Least squares on a sphere, an ellipsoid or in one, with row weights, and its derivative.

With `W = diag(w)` and `M = LLᵀ` the minimum of `½(Au − b)ᵀW(Au − b)` on `uᵀMu = ρ²` is `u = ρL⁻ᵀx`
for the unit vector `x` that solves the problem of `√W A L⁻ᵀ` and `√W b/ρ`. One decomposition of the
Gram matrix of the former turns that into a secular equation (`secular.py`), in units in which its
largest eigenvalue is one. `Method` says how.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.linalg import sphere
from pmaf.linalg.decompositions import cholesky, eigh
from pmaf.linalg.products import matvec, norm, outer_sum, rmatvec
from pmaf.linalg.roundings import LOOSE, NOISE, rank_tolerance, square_range
from pmaf.straight import secular
from pmaf.straight.evidence import Evidence, where_proved


class Data(NamedTuple):
    """The tensors of a problem, of which those that are optional may be None."""

    A: Tensor  # (*, m, n)
    b: Tensor  # (*, m)
    weights: Tensor | None = None  # (*, m)
    radius: Tensor | None = None  # (*,)
    M: Tensor | None = None  # (*, n, n), or its diagonal, (*, n)


class Method(enum.Enum):
    """How the Gram matrix is decomposed.

    The value is the largest step against `A` that proves a result, in roundings: a step is about
    the error of the Gram matrix where it matters, also for the derivative.
    """

    PROMOTED = 0.0  # numbers of float32 in float64, in which it loses nothing
    REFINED = LOOSE  # other numbers
    EXACT = 1e6  # by singular vectors of A, for which there are batched kernels up to 32 rows


class Kind(NamedTuple):
    """What a program depends on besides tensors."""

    computed: torch.dtype
    method: Method
    ball: bool
    diagonal: bool  # whether M is its diagonal
    length: float  # the radius, if that is a number


class Kept(NamedTuple):
    """What the backward pass uses: the problem of `x` in the eigenvectors of its Gram matrix."""

    vectors: Tensor  # (*, n, n), as columns
    spread: Tensor  # (*, n), ascending from zero, in units of the largest eigenvalue
    t: Tensor  # (*,), the distance of the multiplier from its lower bound, in these units
    x: Tensor  # (*, n), the solution in these vectors
    over: Tensor  # (*, 1), one over the largest eigenvalue
    lowest: Tensor  # (*,), the smallest singular value, relative to the largest
    flat: Tensor  # (*, n), where spread is zero
    u: Tensor  # (*, n), the minimiser with all its digits
    root: Tensor | None  # L, or the diagonal of it, (*, n)
    acts: Tensor | None  # (*,), whether the constraint acts, for a ball


class Minimum(NamedTuple):
    """A minimiser `(*, n)`, what is kept of it, and what proves it."""

    u: Tensor
    kept: Kept
    evidence: Evidence


def minimum(data: Data, kind: Kind) -> Minimum:
    """The global minimiser; no number is looked at."""
    dtype, eps = kind.computed, torch.finfo(kind.computed).eps
    given = Data(*(None if x is None else x.to(dtype) for x in data))  # pyright: ignore
    A, b, root, proved = _posed(given, kind)
    over, vectors, s, spread, c, scaled = _decomposed(A, b, kind)
    lowest, flat = s[..., :1], spread == 0
    # Of a coefficient in the lowest eigenspace as small as rounding only the place is taken, by a
    # direction that does not depend on the basis of the space.
    level: Tensor | float = NOISE * eps
    if kind.method is Method.PROMOTED:
        level = torch.rsub(lowest, level, alpha=-NOISE * torch.finfo(torch.float32).eps)
    elif kind.method is Method.EXACT:
        level = level * lowest
    pull = norm(c * flat).unsqueeze(-1)
    tied = pull <= level * norm(scaled).unsqueeze(-1)
    toward = sphere.second_reference(spread).mul_(_SHARE * secular.LEAST).add_(secular.LEAST)
    inside = rmatvec(vectors, toward)
    x, t = secular.root(spread, torch.where(tied & flat, inside, c), kind.method is Method.PROMOTED)
    acts = None
    if kind.ball:
        squares = s.square()
        floor, present = squares[..., 0], squares > 0
        free = torch.where(present, c / squares, 0)
        outside = norm(free) > 1
        # Without full rank, a solution inside of the ball is one of several, and its derivative
        # has more terms.
        single = outside | present[..., 0]
        proved = single if proved is None else proved & single
        acts = outside.unsqueeze(-1)
        x = torch.where(acts, x, free)
        t = torch.where(outside, t, floor)
    if kind.method is not Method.PROMOTED:
        step = _step(A, b, vectors, spread, flat, t, x, over, acts)
        x, small = x + step, norm(step) <= kind.method.value * eps
        # Squares of a smaller b underflow.
        largest = torch.linalg.vector_norm(scaled, math.inf, -1)
        small = small & ((largest == 0) | (largest > square_range(dtype)[0]))
        if kind.method is Method.REFINED:
            # Where the place of a coefficient was taken in a hard case, it may have been more than
            # rounding of singular vectors.
            small = small & ~((tied & (pull > 0)).squeeze(-1) & (t <= _ACROSS))
        proved = small if proved is None else proved & small
    length = norm(x).unsqueeze(-1)
    x = x / length if acts is None else torch.where(acts, x / length, x)
    u = matvec(vectors, x)
    if root is not None:
        u = _unrooted(root, u, kind.diagonal)
    if given.radius is not None:
        u = given.radius.unsqueeze(-1) * u
    elif kind.length != 1:
        u = kind.length * u
    # Where anything is not finite, the length is not.
    numbers = (over * length).squeeze(-1)
    numbers = numbers if proved is None else where_proved(proved, numbers)
    kept = Kept(vectors, spread, t, x, over, lowest.squeeze(-1), flat, u, root, acts)
    return Minimum(u.to(data.b.dtype), kept, Evidence(numbers, *square_range(dtype), zero=False))


def _decomposed(
    A: Tensor, b: Tensor, kind: Kind
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One over the largest squared singular value, and right vectors as columns.

    In units of the largest value, ascending values follow, the spreads of their squares,
    coefficients of `Aᵀb`, and `b`. Values that are rounding are zero, and so are spreads of equal
    ones.
    """
    shrink = torch.nn.functional.hardshrink
    if kind.method is Method.EXACT:
        wide = A.shape[-2] < A.shape[-1]
        left, s, rows = torch.linalg.svd(A, full_matrices=wide)
        unit, vectors = s[..., :1].reciprocal(), rows.mT.flip(-1)
        over, scaled = unit.square(), b * unit
        s = shrink(s * unit, rank_tolerance(A.dtype))
        c = s * rmatvec(left, scaled)
        missing = A.shape[-1] - s.shape[-1]
        s, c = (torch.nn.functional.pad(x, (0, missing)).flip(-1) for x in (s, c))
    else:
        squares, vectors = eigh(A.mT @ A)
        over = squares[..., -1:].reciprocal()
        unit, relative = over.sqrt(), squares * over
        scaled = b * unit
        c = rmatvec(vectors, rmatvec(A, scaled)) * unit
        if kind.method is Method.REFINED:  # the Gram matrix has errors relative to its own norm
            spread = shrink(relative - relative[..., :1], rank_tolerance(A.dtype))
            return over, vectors, relative.clamp_min(0).sqrt(), spread, c, scaled
        s = shrink(relative, rank_tolerance(torch.float32) ** 2).sqrt()
    equal = torch.float32 if kind.method is Method.PROMOTED else A.dtype
    lowest = s[..., :1]
    rise = shrink(s - lowest, rank_tolerance(equal))
    return over, vectors, s, rise * (s + lowest), c, scaled


# Of a direction without structure, beside all ones: it decides where these are orthogonal to the
# lowest eigenspace up to rounding, and has no effect elsewhere.
_SHARE = 1e-13


def _posed(given: Data, kind: Kind) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The matrix and the vector of the problem of `x`, the root of `M`, and what is proved."""
    A, b, weights, radius, M = given
    root = proved = None
    scales = b
    if weights is not None:
        factor = weights.sqrt()
        A, b = factor.unsqueeze(-1) * A, factor * b
    if M is not None and kind.diagonal:
        root = M.sqrt()
        A = A / root.unsqueeze(-2)
        proved = root.sum(-1) < math.inf
        scales = root
    elif M is not None:
        root, info = cholesky(0.5 * (M + M.mT))
        A = torch.linalg.solve_triangular(root.mT, A, upper=True, left=False)
        # An infinite entry of M makes a finite solution, as its inverse is zero.
        proved = (info == 0) & (M.sum((-2, -1)) < math.inf)
        scales = root.diagonal(dim1=-2, dim2=-1)
    if proved is not None and kind.method is not Method.PROMOTED:
        # The coordinates of an M of very different scales lose digits, which are not refined here.
        least, most = scales.aminmax(dim=-1)
        proved = proved & (most <= _SCALES * least)
    if radius is not None:
        b = b / radius.unsqueeze(-1)
        positive = (radius > 0) & (radius < math.inf)
        proved = positive if proved is None else proved & positive
    elif kind.length != 1:
        b = b / kind.length
    return A, b, root, proved


# The largest ratio of the entries on the diagonal of a root of M.
_SCALES = 16.0


def _unrooted(root: Tensor, x: Tensor, diagonal: bool) -> Tensor:
    """`L⁻ᵀx`."""
    if diagonal:
        return x / root
    return torch.linalg.solve_triangular(root.mT, x.unsqueeze(-1), upper=True).squeeze(-1)


def _step(
    A: Tensor,
    b: Tensor,
    vectors: Tensor,
    spread: Tensor,
    flat: Tensor,
    t: Tensor,
    x: Tensor,
    over: Tensor,
    acts: Tensor | None,
) -> Tensor:
    """One Newton step from `x`, whose residual is taken from `A`."""
    u = matvec(vectors, x)
    force = rmatvec(vectors, rmatvec(A, b - matvec(A, u))) * over
    return _tangent(spread, flat, t, x, force, acts)[0]


def _tangent(
    spread: Tensor, flat: Tensor, t: Tensor, x: Tensor, v: Tensor, acts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`z` and `ν` of the bordered system `(D + tI)z + νx = v`, `xᵀz = 0`, with spreads `D`.

    The rows of the lowest eigenspace are eliminated by hand, as in `tangent/basis.py`, so that
    nothing is divided by `t`, except across `x` in a space of several dimensions. Where the
    constraint does not act, `z = (D + tI)⁻¹v`.
    """
    shift = t.unsqueeze(-1)
    inverse = ~flat / (spread + shift)
    both = torch.stack(torch.broadcast_tensors(x, v), -2)
    inner = (both * inverse.unsqueeze(-2)) @ both.mT
    lower = both * flat.unsqueeze(-2)
    outer = lower @ both.mT
    # Products xᵀx and xᵀv: of the other rows, over the matrix; of the lowest ones; of all, times t.
    (beta, alpha), (q, a) = (x[..., :1, :].transpose(-1, -2).unbind(-2) for x in (inner, outer))
    whole = torch.addcmul(outer[..., 0, :], shift, inner[..., 0, :])
    nu = whole[..., 1:] / whole[..., :1]
    # Across x there is only rounding in a space of one dimension, unless x has no part in it.
    apart = q == 0
    several = apart | flat[..., 1:2] if flat.shape[-1] > 1 else apart
    across = several & (shift > _ACROSS)
    over = across / shift
    share = torch.addcmul(a * beta, q, alpha, value=-1) / whole[..., :1]
    share = torch.addcmul(share, over, a, value=-1) / (q + apart)
    x_low, v_low = lower.unbind(-2)
    z = inverse * torch.addcmul(v, nu, x, value=-1)
    z = torch.addcmul(torch.addcmul(z, share, x_low), over, v_low)
    if acts is not None:
        z = torch.where(acts, z, v / (spread + shift))
        nu = torch.where(acts, nu, 0.0)
    return z, nu.squeeze(-1)


# In units of the largest eigenvalue: a smaller t is one that takes the place of zero.
_ACROSS = 1e-28


def gradients(
    data: Data, kind: Kind, kept: Kept, v: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of the tensors, given that of the minimiser.

    With the solution of the bordered system, `r = Au − b` and `ν` of `tangent/kkt.py`,

        ∂L/∂A = −W(r zᵀ + Az uᵀ),   ∂L/∂b = WAz,   ∂L/∂w = −Az∘r,
        ∂L/∂M = −½μ(z uᵀ + u zᵀ) − ½ν u uᵀ,   ∂L/∂ρ = νρ.
    """
    dtype = kind.computed
    A, b, weights, radius, M = (None if x is None else x.to(dtype) for x in data)
    assert A is not None
    assert b is not None
    u, right = kept.u, v.to(dtype)
    root = kept.root
    if root is not None and kind.diagonal:
        right = right / root
    elif root is not None:
        right = torch.linalg.solve_triangular(root, right.unsqueeze(-1), upper=False).squeeze(-1)
    right = rmatvec(kept.vectors, right) * kept.over
    z, nu = _tangent(kept.spread, kept.flat, kept.t, kept.x, right, kept.acts)
    z = matvec(kept.vectors, z)
    if root is not None:
        z = _unrooted(root, z, kind.diagonal)
    image, rest = matvec(A, z), matvec(A, u) - b
    left, pull = rest, image
    if weights is not None:
        left, pull = weights * rest, weights * image
    found: list[Tensor | None] = [None] * 5
    if needs[0]:
        found[0] = _rank_two(A, (left, pull), (z, u))
    if needs[1]:
        found[1] = pull
    if needs[2]:
        found[2] = -image * rest
    if needs[3]:
        found[3] = nu / kept.over.squeeze(-1)
    if needs[4]:
        assert M is not None
        length = kind.length if radius is None else radius.unsqueeze(-1)
        multiplier = (kept.t - kept.lowest.square()).unsqueeze(-1)
        side = torch.addcmul(multiplier * z, nu.unsqueeze(-1) / length, u, value=0.5) / kept.over
        if kind.diagonal:
            found[4] = -side * u
        else:
            half = -0.5 * side.unsqueeze(-1) * u.unsqueeze(-2)
            found[4] = half + half.mT
    return [
        None if x is None or dx is None else dx.sum_to_size(x.shape).to(x.dtype)
        for x, dx in zip(data, found)
    ]


def _rank_two(A: Tensor, lefts: tuple[Tensor, Tensor], rights: tuple[Tensor, Tensor]) -> Tensor:
    """`−Σ left rightᵀ` in the shape of `A`."""
    if A.dim() != 3 or lefts[0].dim() != 2:
        first, second = rights
        return outer_sum(lefts, (-first, -second), A.shape)
    left, right = torch.stack(lefts, -1), torch.stack(rights, -2)
    return torch.baddbmm(A, left, right, beta=0, alpha=-1)
