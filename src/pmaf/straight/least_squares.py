"""Least squares on a sphere, an ellipsoid or in one, with row weights, and its derivative.

With `W = diag(w)` and `M = LLᵀ` the minimum of `½(Au − b)ᵀW(Au − b)` on `uᵀMu = ρ²` is `u = ρL⁻ᵀx`
for the unit vector `x` that solves the problem of `√W A L⁻ᵀ` and `√W b/ρ`. One decomposition of the
Gram matrix of the former turns that into a secular equation (`secular.py`), in units in which its
largest eigenvalue is one. Numbers of float32 have a Gram matrix in float64 that loses nothing.
Others are refined against `A` itself, and proved by the size of that step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.linalg import sphere
from pmaf.linalg.decompositions import cholesky, eigh
from pmaf.linalg.products import dot, matvec, norm, outer_sum, rmatvec
from pmaf.linalg.roundings import NOISE, rank_tolerance, square_range
from pmaf.straight import secular
from pmaf.straight.evidence import Evidence, where_proved


class Data(NamedTuple):
    """The tensors of a problem, of which those that are optional may be None."""

    A: Tensor  # (*, m, n)
    b: Tensor  # (*, m)
    weights: Tensor | None = None  # (*, m)
    radius: Tensor | None = None  # (*,)
    M: Tensor | None = None  # (*, n, n), or its diagonal, (*, n)


class Kind(NamedTuple):
    """What a program depends on besides tensors."""

    computed: torch.dtype
    single: bool  # whether the numbers have the digits of float32, and are computed in float64
    ball: bool
    diagonal: bool  # whether M is its diagonal
    length: float  # the radius, if that is a number


class Kept(NamedTuple):
    """What the backward pass uses: the problem of `x` in the eigenvectors of its Gram matrix."""

    vectors: Tensor  # (*, n, n), as columns
    spread: Tensor  # (*, n), ascending from zero, in units of the largest eigenvalue
    t: Tensor  # (*,), the distance of the multiplier from its lower bound, in these units
    x: Tensor  # (*, n), the solution in these vectors
    top: Tensor  # (*, 1), the largest eigenvalue
    multiplier: Tensor  # (*,)
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
    values, vectors = eigh(A.mT @ A)
    top = values[..., -1:]
    # Singular values, relative to the largest. What is rounding becomes zero, and equal ones
    # become equal.
    tolerance = rank_tolerance(torch.float32 if kind.single else dtype)
    noise = tolerance**2 if kind.single else 0.0
    squares = torch.nn.functional.hardshrink(values / top, noise)
    s = squares.clamp_min(0).sqrt() if not kind.single else squares.sqrt()
    lowest = s[..., :1]
    if kind.single:
        rise = torch.nn.functional.hardshrink(s - lowest, tolerance)
        spread = rise * (s + lowest)
    else:  # the Gram matrix has errors relative to its own norm
        spread = torch.nn.functional.hardshrink(squares - squares[..., :1], tolerance)
    unit = top.rsqrt()
    scaled = b * unit
    c = rmatvec(vectors, rmatvec(A, scaled)) * unit
    # Of a coefficient in the lowest eigenspace as small as rounding only the place is taken, by a
    # direction that does not depend on the basis of the space.
    flat = spread == 0
    data_eps = torch.finfo(torch.float32).eps if kind.single else eps
    level = torch.rsub(lowest, NOISE * eps, alpha=-NOISE * data_eps) if kind.single else NOISE * eps
    tied = norm(c * flat).unsqueeze(-1) <= level * norm(scaled).unsqueeze(-1)
    n = spread.shape[-1]
    ones = torch.arange(1, n + 1, dtype=dtype, device=A.device).pow_(_SKEW)
    inside = rmatvec(vectors, secular.LEAST * ones)
    x, t = secular.root(spread, torch.where(tied & flat, inside, c))
    acts = None
    if kind.ball:
        floor = squares[..., 0].clamp_min(0)
        free = torch.where(squares > noise, c / squares, 0)
        outside = norm(free) > 1
        # Without full rank, a solution inside of the ball is one of several, and its derivative
        # has more terms.
        proved = outside | (floor > noise) if proved is None else proved & (outside | (floor > noise))
        acts = outside.unsqueeze(-1)
        x = torch.where(acts, x, free)
        t = torch.where(outside, torch.maximum(t, floor), floor)
    if not kind.single:
        x, small = _refined(A, b, vectors, spread, t, x, top, acts)
        proved = small if proved is None else proved & small
    x = sphere.project(x) if acts is None else torch.where(acts, sphere.project(x), x)
    u = matvec(vectors, x)
    if root is not None:
        u = _unrooted(root, u, kind.diagonal)
    elif acts is None:
        u = sphere.project(u)
    if given.radius is not None:
        u = given.radius.unsqueeze(-1) * u
    elif kind.length != 1:
        u = kind.length * u
    multiplier = (t - squares[..., 0].clamp_min(0)) * top.squeeze(-1)
    size = top.squeeze(-1) if u.dim() == top.dim() else top.squeeze(-1).expand(u.shape[:-1])
    sizes = size + 0 * (u.sum(-1))
    numbers = sizes if proved is None else where_proved(proved, sizes)
    kept = Kept(vectors, spread, t, x, top, multiplier, root, acts)
    return Minimum(u.to(data.b.dtype), kept, Evidence(numbers, *square_range(dtype)))


# The exponent that makes numbers from one on nearly ones: a direction that no structured vector is
# orthogonal to, and that differs from all ones by less than matters.
_SKEW = 1e-12


def _posed(
    given: Data, kind: Kind
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The matrix and the vector of the problem of `x`, the root of `M`, and what is proved."""
    A, b, weights, radius, M = given
    root = proved = None
    if weights is not None:
        factor = weights.sqrt()
        A, b = factor.unsqueeze(-1) * A, factor * b
    if M is not None and kind.diagonal:
        root = M.sqrt()
        A = A / root.unsqueeze(-2)
    elif M is not None:
        root, info = cholesky(0.5 * (M + M.mT))
        A = torch.linalg.solve_triangular(root.mT, A, upper=True, left=False)
        proved = info == 0
    if radius is not None:
        b = b / radius.unsqueeze(-1)
        proved = radius > 0 if proved is None else proved & (radius > 0)
    elif kind.length != 1:
        b = b / kind.length
    return A, b, root, proved


def _unrooted(root: Tensor, x: Tensor, diagonal: bool) -> Tensor:
    """`L⁻ᵀx`."""
    if diagonal:
        return x / root
    return torch.linalg.solve_triangular(root.mT, x.unsqueeze(-1), upper=True).squeeze(-1)


def _refined(
    A: Tensor,
    b: Tensor,
    vectors: Tensor,
    spread: Tensor,
    t: Tensor,
    x: Tensor,
    top: Tensor,
    acts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`x` after one Newton step whose residual is taken from `A`, and whether the step is small.

    Its length is about the relative error of the Gram matrix where it matters. Where its square is
    rounding, so is the error that is left.
    """
    u = matvec(vectors, x)
    force = rmatvec(vectors, rmatvec(A, b - matvec(A, u))) / top
    step, _ = _tangent(spread, t, x, force, acts)
    small = norm(step) <= torch.finfo(x.dtype).eps ** 0.5
    return x + step, small


def _tangent(
    spread: Tensor, t: Tensor, x: Tensor, v: Tensor, acts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`z` and `ν` of the bordered system `(D + tI)z + νx = v`, `xᵀz = 0`, with spreads `D`.

    The rows of the lowest eigenspace are eliminated by hand, as in `tangent/basis.py`, so that
    nothing is divided by `t`, except across `x` in a space of several dimensions. Where the
    constraint does not act, `z = (D + tI)⁻¹v`.
    """
    shift = t.unsqueeze(-1)
    flat = spread == 0
    inverse = torch.where(flat, 0.0, 1 / (spread + shift))
    both = torch.stack(torch.broadcast_tensors(x, v), -2)
    inner = ((both * inverse.unsqueeze(-2)) @ both.mT).unsqueeze(-1)
    lower = both * flat.unsqueeze(-2)
    outer = (lower @ both.mT).unsqueeze(-1)
    whole = torch.addcmul(outer, shift.unsqueeze(-1).unsqueeze(-1), inner)
    beta, alpha, q, a = inner[..., 0, 0, :], inner[..., 0, 1, :], outer[..., 0, 0, :], outer[..., 0, 1, :]
    d = whole[..., 0, 0, :]
    nu = whole[..., 0, 1, :] / d
    x_low, v_low = lower.unbind(-2)
    # Across x there is only rounding in a space of one dimension.
    across = (flat.sum(-1, keepdim=True) > 1) & (shift > _ACROSS)
    over = torch.where(across, 1 / shift, 0.0)
    share = torch.where(q == 0, 0.0, ((a * beta - q * alpha) / d - over * a) / q)
    z = inverse * torch.addcmul(v, nu, x, value=-1) + share * x_low + over * v_low
    if acts is not None:
        z = torch.where(acts, z, v / (spread + shift))
        nu = torch.where(acts, nu, 0.0)
    return z, nu.squeeze(-1)


# In units of the largest eigenvalue: a smaller t is one that takes the place of zero.
_ACROSS = 1e-28


def gradients(
    data: Data, kind: Kind, kept: Kept, u: Tensor, v: Tensor, needs: Sequence[bool]
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
    u, v = u.to(dtype), v.to(dtype)
    root = kept.root
    right = v
    if root is not None and kind.diagonal:
        right = v / root
    elif root is not None:
        right = torch.linalg.solve_triangular(root, v.unsqueeze(-1), upper=False).squeeze(-1)
    right = rmatvec(kept.vectors, right) / kept.top
    z, nu = _tangent(kept.spread, kept.t, kept.x, right, kept.acts)
    nu = nu * kept.top.squeeze(-1)
    z = matvec(kept.vectors, z)
    if root is not None:
        z = _unrooted(root, z, kind.diagonal)
    image, rest = matvec(A, z), matvec(A, u) - b
    left, pull = rest, image
    if weights is not None:
        left, pull = weights * rest, weights * image
    found: list[Tensor | None] = [None] * 5
    if needs[0]:
        found[0] = outer_sum((left, pull), (-z, -u), A.shape)
    if needs[1]:
        found[1] = pull
    if needs[2]:
        found[2] = -image * rest
    if needs[3]:
        found[3] = nu
    if needs[4]:
        assert M is not None
        length = kind.length if radius is None else radius.unsqueeze(-1)
        side = kept.multiplier.unsqueeze(-1) * z + (0.5 * nu).unsqueeze(-1) / length * u
        if kind.diagonal:
            found[4] = -side * u
        else:
            half = -0.5 * side.unsqueeze(-1) * u.unsqueeze(-2)
            found[4] = half + half.mT
    return [
        None if x is None or dx is None else dx.sum_to_size(x.shape).to(x.dtype)
        for x, dx in zip(data, found)
    ]
