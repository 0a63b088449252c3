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

from pmaf.linalg.products import norm

# A share of ‖A‖ whose square is above one half, by a margin: then |λ₂| < 0.91 |λ₁|.
_SHARE = 0.74
# Products after which other methods are faster.
_STEPS = 48


class Dominant(NamedTuple):
    """The dominant eigenpair of each matrix."""

    values: Tensor  # (B, 1, 1)
    rows: Tensor  # (B, 1, n)
    residual: Tensor  # (B, 1, 1), relative to ‖A‖
    products: int
    rate: float  # by which the residual shrinks with each product, the slowest


def dominant(
    product: Callable[[Tensor], Tensor],
    exact: Callable[[Tensor], Tensor],
    start: Start,
    tolerance: float,
    symmetric: bool,
    is_positive: Callable[[], bool] | None = None,
) -> Dominant | None:
    """Dominant eigenpairs of a whole batch; None if an entry has none, or is slow to show it.

    Args:
        product: of a row with what is iterated.
        exact: the same to all digits, for checks.
        tolerance: on `‖Ay − λy‖/|λ|`.
        symmetric: of a symmetric matrix, the eigenvalue has to be positive.
        is_positive: whether all entries of the matrices are, where that would be a proof.
    """
    y, size, products, before = start
    y, image, value, worst, rest = _check(y, exact, symmetric)
    products += 1
    # Of a symmetric matrix this is a lower bound of the largest eigenvalue already.
    large = _has_most(value, size, symmetric)
    positive = not large and is_positive is not None and is_positive()
    if not (large or positive):
        return None

    taken = products
    rate = (worst / before) ** (1 / taken)
    while worst > tolerance:
        # It shrinks geometrically, which says how much there is left to do.
        if not worst < before:
            return None
        count = math.ceil(taken * math.log(tolerance / worst) / math.log(worst / before))
        if products + count > _STEPS:
            return None
        y = image
        if size is None:  # a step divides by little more than one
            for _ in range(count - 1):
                y = product(y)
        else:
            inverse = 1 / value  # which keeps the length about one
            for _ in range(count - 1):
                y = product(y * inverse)
        products, taken, before = products + count, count, worst
        y, image, value, worst, rest = _check(y, exact, symmetric)
        if worst > tolerance:  # or rounding, not convergence, has set it
            rate = (worst / before) ** (1 / taken)
    if not worst <= tolerance:
        return None
    if positive and not _is_perron(y, image, value, tolerance):
        return None
    y = image / torch.linalg.vector_norm(image, dim=-1, keepdim=True)
    if not (symmetric or positive or _has_most(value, size, symmetric)):
        return None
    return Dominant(value, y, rest if size is None else rest / size, products, rate)


class Start(NamedTuple):
    """Where power steps begin."""

    row: Tensor  # (B, 1, n)
    size: Tensor | None  # (B, 1, 1), Frobenius norms, if they are not one
    products: int  # steps taken so far
    before: float  # about the relative residual before them


def longest_row(matrix: Tensor, product: Callable[[Tensor], Tensor]) -> Start:
    """A matrix close to a multiple of `yxᵀ` has rows close to `x`, and the image of `x` is `y`."""
    lengths = norm(matrix)
    size = norm(lengths)[:, None, None]
    index = lengths.argmax(-1)[:, None, None].expand(-1, 1, matrix.shape[-1])
    # The residual of a row by itself is unknown, but not above one.
    return Start(product(matrix.gather(-2, index)), size, 1, 1.0)


def _check(
    y: Tensor, exact: Callable[[Tensor], Tensor], symmetric: bool
) -> tuple[Tensor, Tensor, Tensor, float, Tensor]:
    """`y` normalised, its image and value; its largest relative residual, and all of them."""
    y = y / torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    image = exact(y)
    value = (y * image).sum(-1, keepdim=True)
    rest = torch.addcmul(image, y, value, value=-1)
    rest = torch.linalg.vector_norm(rest, dim=-1, keepdim=True)
    relative = rest / value
    relative = relative if symmetric else relative.abs()  # or it is not accepted anyway
    return y, image, value, float(relative.amax()), rest


def _is_perron(y: Tensor, image: Tensor, value: Tensor, tolerance: float) -> bool:
    """Whether `y` is the dominant eigenvector of a positive matrix.

    No eigenvalue is above the largest of the ratios `(Ay)ᵢ/yᵢ` (Collatz and Wielandt). A
    residual that is small only on the whole would let the eigenvector of a block pass that
    the rest of the matrix is hardly coupled to.
    """
    if not (y.amin(-1) * y.amax(-1) > 0).all():
        return False
    above = (image / y).amax(-1, keepdim=True) - value
    return bool((above <= y.shape[-1] * tolerance * value).all())


def _has_most(value: Tensor, size: Tensor | None, symmetric: bool) -> bool:
    share = value if size is None else value / size
    return float((share if symmetric else share.abs()).amin()) > _SHARE
