"""Divided differences of scalar functions, accurate at any distance of the points.

The derivatives of `V f(Λ) Vᵀ` consist of divided differences of f at the eigenvalues,

    f[x] = f(x),   f[x₀, …, xₘ] = (f[x₁, …, xₘ] − f[x₀, …, xₘ₋₁]) / (xₘ − x₀),

which are `f⁽ᵐ⁾(x)/m!` where all points are equal. The quotient loses digits where the points are
close. Some functions have a closed form that does not. For the others there is the formula of
Hermite and Genocchi, `f[x₀, …, xₘ] = ∫ f⁽ᵐ⁾(Σ tᵢxᵢ) dt` over the simplex, and a quadrature of
it is accurate where the points are close. Each entry takes what has the smaller error: that
of the quotient is known from the sizes of its operands, that of the quadrature is the difference
between two rules.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf.runtime.modes import constant_in_traces

Domain = str  # "any", "nonzero", "nonnegative" or "positive"


@dataclass(frozen=True)
class Scalar:
    """A scalar function with its derivatives, and closed forms of some divided differences."""

    name: str
    derivative: Callable[[Tensor, int], Tensor]
    closed: Callable[[Sequence[Tensor]], Tensor | None]  # of ascending points, two or more
    domain: Domain = "any"

    def settled(self, x: Tensor, rounding: Tensor) -> Tensor:
        """Arguments as the function takes them; nan where it is not defined.

        Numbers up to `rounding` in modulus may be rounding of zero. A square root takes them for
        zero: it would turn rounding of one part in 10¹⁶ into one part in 10⁸.
        """
        if self.domain == "positive":
            return torch.where(x > rounding, x, torch.nan)
        if self.domain == "nonzero":
            return torch.where(x.abs() > rounding, x, torch.nan)
        if self.domain == "nonnegative":
            return torch.where(x > rounding, x, torch.where(x < -rounding, torch.nan, 0))
        return x


def of_callable(function: Callable[[Tensor], Tensor]) -> Scalar:
    """A function that torch differentiates, element by element."""

    def derivative(x: Tensor, order: int) -> Tensor:
        if order == 0:
            return function(x)
        # A vector-Jacobian product, because a trace can follow it and rules of reverse mode are
        # more common than rules of forward mode.
        y, pullback, *_ = torch.func.vjp(lambda x: derivative(x, order - 1), x)
        return pullback(torch.ones_like(y))[0]

    return Scalar("function", derivative, lambda points: None)


def divided_difference(
    function: Scalar,
    arguments: Sequence[Tensor],
    points: Sequence[Tensor] = (),
    members: Sequence[Tensor] = (),
    rounding: Tensor | None = None,
) -> Tensor:
    """`f[x₀, …, xₘ]` for ascending points, tensors that broadcast.

    Without `members` the arguments of the function are the points. With it, the function is zero
    outside a group at one end of the points.

    Args:
        arguments: the points, each of them replaced by some member if it is not one.
        points: the points themselves.
        members: for each point, whether it belongs to the group.
        rounding: distance at which a member and another point count as equal. The quotient
            between them, which is infinite, is replaced by zero.
    """
    if not members:
        found = function.closed(arguments) if len(arguments) > 1 else None
        return _better(function, arguments) if found is None else found
    assert rounding is not None
    count = len(points)
    row = [torch.where(w, function.derivative(x, 0), 0) for x, w in zip(arguments, members)]
    for order in range(1, count):
        above = []
        for i in range(count - order):
            j = i + order
            gap = points[j] - points[i]
            apart = (members[i] ^ members[j]) & (gap > rounding)
            across = torch.where(apart, (row[i + 1] - row[i]) / torch.where(apart, gap, 1), 0)
            inside = divided_difference(function, arguments[i : j + 1])
            above.append(torch.where(members[i] & members[j], inside, across))
        row = above
    return row[0]


def _better(function: Scalar, points: Sequence[Tensor]) -> Tensor:
    """The better one of quotient and quadrature."""
    first, last, order = points[0], points[-1], len(points) - 1
    if order == 0:
        return function.derivative(first, 0)
    left = divided_difference(function, points[:-1])
    right = divided_difference(function, points[1:])
    gap = last - first
    same = gap == 0
    width = torch.where(same, 1, gap)
    quotient = (right - left) / width
    fine, coarse = (_quadrature(function, points, count) for count in _NODES)
    lost = torch.finfo(gap.dtype).eps * (left.abs() + right.abs()) / width
    settled = (fine - coarse).detach().abs() <= lost.detach()
    # Both rules may miss what happens between their nodes; the quotient does not.
    agrees = (fine - quotient).detach().abs() <= _AGREED**order * lost.detach()
    # A comparison with nan is false: where there is no quadrature, the quotient remains.
    return torch.where(same | (settled & agrees), fine, quotient)


# Rules with so many nodes in each dimension. If the second has as many digits as the quotient, the
# first has all digits; for functions with a pole at zero this is so for points that differ
# by 10 %, where the quotient loses one digit.
_NODES = (8, 5)
# By how much the errors of both operands of a quotient may exceed one rounding, for each order.
_AGREED = 64.0


def _quadrature(function: Scalar, points: Sequence[Tensor], count: int) -> Tensor:
    """Hermite and Genocchi's integral by the rule of `count` nodes in each dimension."""
    order = len(points) - 1
    weights, nodes = _rule(order, count)
    first, *others = points
    like: dict[str, Any] = {"dtype": first.dtype, "device": first.device}
    x = first.unsqueeze(-1)
    # Sums of differences are exact where the points are equal.
    for i, other in enumerate(others):
        x = x + torch.tensor([t[i] for t in nodes], **like) * (other - first).unsqueeze(-1)
    return (torch.tensor(weights, **like) * function.derivative(x, order)).sum(-1)


# A trace takes the numbers, and does not follow how they are computed.
@constant_in_traces
def _rule(order: int, count: int) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
    return simplex_rule(order, count)


@functools.lru_cache(maxsize=16)
def simplex_rule(order: int, count: int) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """Weights, and nodes `(t₁, …, tₘ)` of the simplex `tᵢ ≥ 0`, `Σ tᵢ ≤ 1`.

    A product of Gauss's rules in the coordinates in which the simplex is a cube: the first is the
    sum of all `tᵢ`, and the others say how it is divided.
    """
    if order == 0:
        return (1.0,), ((),)
    line_weights, line = gauss_legendre(count)
    weights, nodes = [], []
    for w, s in zip(line_weights, line):
        for rest_weight, rest in zip(*simplex_rule(order - 1, count)):
            weights.append(w * s ** (order - 1) * rest_weight)
            nodes.append((s * (1 - sum(rest)), *(s * t for t in rest)))
    return tuple(weights), tuple(nodes)


@functools.lru_cache(maxsize=16)
def gauss_legendre(count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Weights and nodes of Gauss's rule on [0, 1], by Newton's method on Legendre's polynomial."""
    weights, nodes = [], []
    for i in range(count):
        x = math.cos(math.pi * (i + 0.75) / (count + 0.5))
        slope = 1.0
        for _ in range(8):
            value, before = x, 1.0
            for j in range(2, count + 1):
                value, before = ((2 * j - 1) * x * value - (j - 1) * before) / j, value
            slope = count * (x * value - before) / (x * x - 1)
            x -= value / slope
        weights.append(1 / ((1 - x * x) * slope * slope))
        nodes.append(0.5 * (1 - x))
    return tuple(weights), tuple(nodes)


# The functions that have a name.


def _power(exponent: float) -> Callable[[Tensor, int], Tensor]:
    def derivative(x: Tensor, order: int) -> Tensor:
        factor = 1.0
        for i in range(order):
            factor *= exponent - i
        return torch.zeros_like(x) if factor == 0 else factor * x ** (exponent - order)

    return derivative


def _exponential(x: Tensor, order: int) -> Tensor:
    return x.exp()


def _logarithm(x: Tensor, order: int) -> Tensor:
    return x.log() if order == 0 else _power(-1.0)(x, order - 1)


def _sums(points: Sequence[Tensor]) -> list[Tensor]:
    """Sums of two, of each pair."""
    return [a + b for i, a in enumerate(points) for b in points[i + 1 :]]


def _product(factors: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.mul, factors)


def _polynomial(degree: int) -> Callable[[Sequence[Tensor]], Tensor]:
    """Of the power of degree 0, 1 or 2."""

    def closed(points: Sequence[Tensor]) -> Tensor:
        order, total = len(points) - 1, functools.reduce(torch.add, points)
        if order > degree:
            return torch.zeros_like(total)
        return torch.ones_like(total) if order == degree else total

    return closed


def _inverse(points: Sequence[Tensor]) -> Tensor:
    found = _product([1 / x for x in points])
    return -found if len(points) % 2 == 0 else found


def _square_root(points: Sequence[Tensor]) -> Tensor | None:
    if len(points) > 4:
        return None
    roots = [x.sqrt() for x in points]
    # Where two roots are zero there is no derivative, and zero takes its place.
    inverses = [torch.where(s == 0, 0, 1 / torch.where(s == 0, 1, s)) for s in _sums(roots)]
    found = _product(inverses)
    if len(points) == 3:
        return -found
    return found * functools.reduce(torch.add, roots) if len(points) == 4 else found


def _inverse_root(points: Sequence[Tensor]) -> Tensor | None:
    if len(points) > 3:
        return None
    roots = [x.sqrt() for x in points]
    found = _product([1 / x for x in (*roots, *_sums(roots))])
    return found * functools.reduce(torch.add, roots) if len(points) == 3 else -found


def _logarithmic(points: Sequence[Tensor]) -> Tensor | None:
    if len(points) > 2:
        return None
    low, high = points
    gap = high - low
    width = torch.where(gap == 0, 1, gap)
    return torch.where(gap == 0, 1 / low, (gap / low).log1p() / width)


def _exponentials(points: Sequence[Tensor]) -> Tensor | None:
    if len(points) > 2:
        return None
    low, high = points
    gap = high - low
    width = torch.where(gap == 0, 1, gap)
    # Relative to the larger number nothing overflows that need not.
    return high.exp() * torch.where(gap == 0, 1, -(-gap).expm1() / width)


NAMED: dict[str, Scalar] = {
    scalar.name: scalar
    for scalar in (
        Scalar("sqrt", _power(0.5), _square_root, "nonnegative"),
        Scalar("inverse", _power(-1.0), _inverse, "nonzero"),
        Scalar("inverse_sqrt", _power(-0.5), _inverse_root, "positive"),
        Scalar("log", _logarithm, _logarithmic, "positive"),
        Scalar("exp", _exponential, _exponentials),
        Scalar("square", _power(2.0), _polynomial(2)),
        Scalar("identity", _power(1.0), _polynomial(1)),
        Scalar("one", _power(0.0), _polynomial(0)),
    )
}
