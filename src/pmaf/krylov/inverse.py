"""The solution of LESS in a small Krylov space of an inverse.

With `H = AᵀA + νI` factored at some shift `ν`, the solution at any other shift `ν + δ` is
`(I + δH⁻¹)⁻¹ H⁻¹g`. In the space spanned by `H⁻¹g, H⁻²g, …` that is a tridiagonal system. The
smallest eigenvalues of `H`, which decide the multiplier, are the largest of `H⁻¹`. The space finds
these first, so that a few solves replace an eigendecomposition.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.linalg.products import long_norm, solve_factored


class Guess(NamedTuple):
    """The approximate solution in the Krylov space, one row per entry."""

    u: Tensor  # (B, n), of unit length
    shift: Tensor  # (B,), the multiplier minus the factored shift
    steps: Tensor  # (B,) int64, the dimension at which the entry converged


def solve_row(factor: Tensor, x: Tensor) -> Tensor:
    """`solve_factored` for `x` of shape `(B, n)`."""
    return solve_factored(factor, x.unsqueeze(-2)).squeeze(-2)


def guess(factor: Tensor, start: Tensor, *, limit: int, tolerance: float, spare: int) -> Guess:
    """Grow the space until all but `spare` entries are solved up to `tolerance`.

    `factor` is the Cholesky factor of `H`, `start` is `H⁻¹g`. At most `limit` vectors are taken.
    """
    B, n = start.shape
    length = long_norm(start)
    v = start / length.unsqueeze(-1)
    space = start.new_empty(B, limit, n)
    diagonal, beside = start.new_empty(2, limit, B)
    steps = torch.zeros_like(length, dtype=torch.int64)
    growing = torch.ones_like(length, dtype=torch.bool)
    delta, y = torch.full_like(length, -torch.inf), v
    first = _FIRST if n >= LARGE else 2 * _FIRST
    for k in range(1, limit + 1):
        space[:, k - 1] = v
        image = solve_row(factor, v)
        if k > 1:
            image.addcmul_(beside[k - 2].unsqueeze(-1), space[:, k - 2], value=-1)
        torch.sum(image * v, -1, out=diagonal[k - 1])
        image.addcmul_(diagonal[k - 1].unsqueeze(-1), v, value=-1)
        torch.sum(image * image, -1, out=beside[k - 1]).sqrt_()
        v = image / beside[k - 1].clamp_min(torch.finfo(v.dtype).tiny).unsqueeze(-1)
        if k < limit and k != first and (k < first or k % 2):
            continue  # a check costs about as much as another vector
        delta, y = tridiagonal_root(diagonal[:k], beside[: k - 1], length, delta, spare // 4)
        growing = growing & ~((delta * beside[k - 1] * y[-1]).abs() <= tolerance)
        steps = torch.where(growing | (steps == 0), k, steps)
        if int(growing.sum()) <= spare:
            break
    u = (y.mT.unsqueeze(-2) @ space[:, : y.shape[0]]).squeeze(-2)
    return Guess(u / long_norm(u).unsqueeze(-1), delta, steps)


# Vectors before the first check, and the n below which they are doubled, because a solve with a
# small matrix takes less time than a check.
_FIRST, LARGE = 3, 256

_NEWTON_STEPS = 6


def tridiagonal_root(
    diagonal: Tensor, beside: Tensor, length: Tensor, delta: Tensor, spare: int
) -> tuple[Tensor, Tensor]:
    """`δ` and `y` with `(I + δT) y = length·e₁`, `‖y‖ = 1` and `I + δT` positive definite.

    `T` is positive definite and tridiagonal, `(k, B)` and `(k − 1, B)`. Newton's method solves
    `1/‖y‖ − 1 = 0`. The function is concave, so that every step ends left of the root. A step may
    end where `I + δT` is not definite, so the iterates are kept in a bracket.
    """
    tolerance = torch.finfo(length.dtype).eps ** 0.75
    low = (length - 1) / diagonal[0]  # the step from zero, which ends left of the root
    high = torch.where(length < 1, 0.0, torch.inf)
    delta, y = torch.maximum(delta, low), diagonal
    pivots = torch.empty_like(diagonal)
    rows = pivots.unbind()
    for _ in range(_NEWTON_STEPS):
        a = torch.addcmul(torch.ones_like(delta), delta, diagonal)
        c = delta * beside
        rows[-1].copy_(a[-1])
        below = rows[-1]
        for own, square, row in zip(a.unbind()[-2::-1], (c * c).unbind()[::-1], rows[-2::-1]):
            below = torch.addcdiv(own, square, below, value=-1, out=row)
        inverse = pivots.reciprocal()
        ratios = -c * inverse[1:]
        y = torch.cat([(length * inverse[0]).unsqueeze(0), ratios]).cumprod(0)
        # One half of the factorisation is applied to y and to Ty, the derivative of (I + δT)y in δ.
        image = diagonal * y
        image[:-1].addcmul_(beside, y[1:])
        image[1:].addcmul_(beside, y[:-1])
        pair = torch.stack([y, image], 1)
        halves = pair.unbind()
        below = halves[-1]
        for half, ratio in zip(halves[-2::-1], ratios.unbind()[::-1]):
            below = half.addcmul_(ratio, below)
        slope = (pair.prod(1) * inverse).sum(0)
        square = (y * y).sum(0)
        size = square.sqrt()
        following = torch.addcdiv(delta, (size - 1) * square, slope)
        definite = (pivots > 0).all(0)
        left = ~definite | (size > 1)
        low = torch.where(left, torch.maximum(low, delta), low)
        high = torch.where(left, high, torch.minimum(high, delta))
        settled = definite & ((following - delta).abs() * diagonal[0] <= tolerance)
        if int(settled.sum()) >= settled.numel() - spare:
            break
        inside = definite & (following >= low) & (following <= high)
        delta = torch.where(settled, delta, torch.where(inside, following, 0.5 * (low + high)))
    return delta, y
