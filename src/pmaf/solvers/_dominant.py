"""One eigenvector that dwarfs the rest: a few power steps, and the proof that it does.

The squared moduli of all eigenvalues sum to at most `‖A‖²` (Frobenius). One that has more
than half of it is the largest in modulus, and bounds all the others: none of them has to be
looked at. For a matrix of positive entries a positive eigenvector is proof, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pmaf._linalg import norm

# A share of ‖A‖ whose square is above one half, by a margin: then |λ₂| < 0.91 |λ₁|.
_SHARE = 0.74
# Products after which other methods are faster.
_STEPS = 48


class Dominant(NamedTuple):
    """The dominant eigenpair of each matrix."""

    values: Tensor  # (B, 1)
    rows: Tensor  # (B, 1, n)
    residual: Tensor  # (B,), relative to ‖A‖
    products: int
    rate: float  # by which the residual shrinks with each product, the slowest


def dominant(
    matrix: Tensor,
    product: Callable[[Tensor], Tensor],
    exact: Callable[[Tensor], Tensor],
    tolerance: float,
    symmetric: bool,
) -> Dominant | None:
    """Dominant eigenpairs of a whole batch; None if an entry has none, or is slow to show it.

    Args:
        matrix: `(B, n, n)`, where the search starts.
        product: of a row with what is iterated.
        exact: the same to all digits, for checks.
        tolerance: on `‖Ay − λy‖/|λ|`.
        symmetric: of a symmetric matrix, the eigenvalue has to be positive.
    """
    lengths = norm(matrix)
    size = norm(lengths)[:, None, None]
    # A matrix close to a multiple of yxᵀ has rows close to x, and the image of x is y.
    index = lengths.argmax(-1)[:, None, None].expand(-1, 1, matrix.shape[-1])
    y = product(matrix.gather(-2, index))
    y, image, value, worst, rest = _check(y, exact)
    # Of a symmetric matrix this is a lower bound of the largest eigenvalue already.
    large = _has_most(value, size, symmetric)
    positive = not symmetric and not large and bool(matrix.amin() > 0)
    if not (large or positive):
        return None

    # The residual of a row by itself is unknown, but not above one.
    products, taken, before = 2, 2, 1.0
    rate = worst**0.5
    while worst > tolerance:
        # It shrinks geometrically, which says how much there is left to do.
        if not worst < before:
            return None
        count = math.ceil(taken * math.log(tolerance / worst) / math.log(worst / before))
        if products + count > _STEPS:
            return None
        y, inverse = image, 1 / value  # which keeps the length about one
        for _ in range(count - 1):
            y = product(y * inverse)
        products, taken, before = products + count, count, worst
        y, image, value, worst, rest = _check(y, exact)
        if worst > tolerance:  # or rounding, not convergence, has set it
            rate = (worst / before) ** (1 / taken)
    if not worst <= tolerance:
        return None
    y = image / norm(image).unsqueeze(-1)
    if positive and not (y.amin(-1) * y.amax(-1) > 0).all():
        return None
    if not (symmetric or positive or _has_most(value, size, symmetric)):
        return None
    return Dominant(value.squeeze(-1), y, (rest / size.squeeze(-1)).squeeze(-1), products, rate)


def _check(
    y: Tensor, exact: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor, float, Tensor]:
    """`y` normalised, its image and value; its largest relative residual, and all of them."""
    y = y / norm(y).unsqueeze(-1)
    image = exact(y)
    value = (y * image).sum(-1, keepdim=True)
    rest = norm(torch.addcmul(image, y, value, value=-1))
    return y, image, value, float((rest / value.squeeze(-1)).abs().amax()), rest


def _has_most(value: Tensor, size: Tensor, symmetric: bool) -> bool:
    share = value / size
    return float((share if symmetric else share.abs()).amin()) > _SHARE
