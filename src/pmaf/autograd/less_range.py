"""Units in which squares of the entries of a LESS problem stay in the range of the dtype.

The solution for `(A, b)` is that for `(A/c, b/c)`; multiplier and gap are `c²` times theirs. The
division is differentiable, so that gradients come out in the units they were asked for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pmaf import errors
from pmaf.linalg.products import power_of_two, square_range
from pmaf.runtime.modes import plain


def in_range(A: Tensor, b: Tensor, radius: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """`A` and `b/radius` divided by powers of two, and the exponents `(*,)` of multipliers.

    None instead of exponents, and nothing but the division by the radius, if everything is in
    range already.
    """
    low, high = square_range(A.dtype)
    quotient = b if radius == 1 else b / radius
    sizes = torch.linalg.vector_norm(A.detach(), dim=(-2, -1))
    eager = plain(A) and plain(b)
    if eager:
        (least, most), (bottom, top) = sizes.aminmax(), quotient.detach().aminmax()
        if (
            low < float(least)
            and float(most) < high
            and -high < float(bottom)
            and float(top) < high
        ):
            return A, quotient, None
        errors.require_finite(A=(A, 2), b=(b, 1))
    unit = _exponent(A.detach().abs().amax((-2, -1)))
    mantissa, power = math.frexp(radius)
    length = _exponent(b.detach().abs().amax(-1)) - power
    # Far above A, the length of b has no effect on the solution, and the multiplier is
    # proportional to it: so it may be shortened to what can be squared.
    excess = (length - unit - _span(A.dtype)).clamp_min(0)
    if not eager:
        # A trace cannot ask whether anything is out of range. Its units for A must come from A
        # alone, since many problems may share it.
        unit = torch.where((sizes > low) & (sizes < high), 0, unit)
        excess = torch.where(quotient.detach().abs().amax(-1) < high, 0, excess)
    return (
        scaled(A, -unit[..., None, None]),
        scaled(b / mantissa, -(unit + excess + power).unsqueeze(-1)),
        2 * unit + excess,
    )


def scaled(x: Tensor, exponent: Tensor) -> Tensor:
    """`x · 2^exponent`, where the power itself may be out of range."""
    half = (0.5 * exponent).floor()
    return x * half.to(x.dtype).exp2() * (exponent - half).to(x.dtype).exp2()


def _exponent(size: Tensor) -> Tensor:
    """Of the power of two below each size; zero for zero."""
    return power_of_two(size).log2()


def _span(dtype: torch.dtype) -> float:
    """How many powers of two `b` may be above `A`: beyond, `AᵀA` is lost in the multiplier."""
    return -1.25 * math.log2(torch.finfo(dtype).eps)
