"""Dominant eigenvectors by a few power steps, with a proof of dominance.

The squared moduli of all eigenvalues sum to at most `‖A‖²` (Frobenius). So an eigenvalue with
`|λ|² > ½‖A‖²` is the largest in modulus, and no other eigenvalue has to be computed. For a matrix
of positive entries a positive eigenvector is a proof, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.linalg.products import norm
from pmaf.linalg.roundings import square_range
from pmaf.linalg.symmetric_part import fixed_rows

# If |λ₁| > 0.74‖A‖, then |λ₁|² > ½‖A‖² and |λ₂| < 0.91|λ₁|.
_SHARE = 0.74
# Products after which other methods are faster.
_STEPS = 48


class Dominant(NamedTuple):
    """The dominant eigenpair of each matrix."""

    values: Tensor  # (B, 1, 1)
    rows: Tensor  # (B, 1, n)
    residual: Tensor  # (B, 1, 1), relative to ‖A‖
    products: int
    rate: float  # residual after a product over that before, for the slowest entry
    matrix: Tensor | None = None  # (B, n, n), the symmetric part, where it was formed


def dominant(
    product: Callable[[Tensor], Tensor],
    exact: Callable[[Tensor], Tensor],
    start: Start,
    tolerance: float,
    symmetric: bool,
    is_positive: Callable[[], bool] | None = None,
) -> Dominant | None:
    """Dominant eigenpairs of a whole batch; None if an entry has none or converges slowly.

    Args:
        product: of a row with the matrix, in each step.
        exact: the same product to all digits, for checks.
        tolerance: on `‖Ay − λy‖/|λ|`.
        symmetric: whether the matrices are; then the eigenvalue has to be positive.
        is_positive: whether all entries of the matrices are positive; None if this is no proof.
    """
    y, size, products, before = start
    y, image, value, worst, rest = _check(y, exact, symmetric)
    products += 1
    # For a symmetric matrix `value` is already a lower bound of the largest eigenvalue.
    large = _has_most(value, size, symmetric)
    positive = not large and is_positive is not None and is_positive()
    if not (large or positive):
        return None

    taken = products
    rate = (worst / before) ** (1 / taken)
    while worst > tolerance:
        # The residual shrinks geometrically, which predicts the number of products left.
        if not worst < before:
            return None
        count = math.ceil(taken * math.log(tolerance / worst) / math.log(worst / before))
        if products + count > _STEPS:
            return None
        y = image
        if size is None:  # ‖A‖ is one, so that a step shortens y by at most 26%
            for _ in range(count - 1):
                y = product(y)
        else:
            inverse = 1 / value  # keeps the length of y about one
            for _ in range(count - 1):
                y = product(y * inverse)
        products, taken, before = products + count, count, worst
        y, image, value, worst, rest = _check(y, exact, symmetric)
        if worst > tolerance:  # a smaller residual is rounding error
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
    size: Tensor | None  # (B, 1, 1), Frobenius norms, None if they are one
    products: int  # steps taken so far
    before: float  # estimate of the relative residual before these steps


def dominant_of_sum(A: Tensor, tolerance: float) -> Dominant | None:
    """Dominant eigenpairs of `½(A + Aᵀ)`, for matrices small enough for `A + Aᵀ` to be formed.

    The matrices are divided by their Frobenius norms, so that no step has to be normalised.
    """
    n = A.shape[-1]
    matrix = A + A.mT
    if matrix._is_zerotensor():
        matrix = matrix.clone()  # zeros of autograd have no memory to write into
    size = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    matrix.div_(size)

    def product(x: Tensor) -> Tensor:
        return torch.bmm(x, matrix)

    y = fixed_rows[n, A.dtype, A.device][:1].expand(len(A), 1, n)
    for _ in range(_FIRST):
        y = torch.bmm(y, matrix)
    # A pseudorandom unit vector has a component of about n^-½ along the eigenvector.
    start = Start(y, None, _FIRST, n**0.5)
    found = dominant(product, product, start, tolerance, True)
    if found is None or not float(size.amin()) > square_range(A.dtype)[0]:
        return None
    half = 0.5 * size
    return found._replace(values=found.values * half, matrix=matrix.mul_(half))


# Products before the first check of convergence.
_FIRST = 3


def longest_row(matrix: Tensor, product: Callable[[Tensor], Tensor]) -> Start:
    """Start from the image of the longest row: if `A ≈ yxᵀ`, it is near a multiple of `y`."""
    lengths = norm(matrix)
    size = norm(lengths)[:, None, None]
    index = lengths.argmax(-1)[:, None, None].expand(-1, 1, matrix.shape[-1])
    # The relative residual of the row itself is unknown, but at most one.
    return Start(product(matrix.gather(-2, index)), size, 1, 1.0)


def _check(
    y: Tensor, exact: Callable[[Tensor], Tensor], symmetric: bool
) -> tuple[Tensor, Tensor, Tensor, float, Tensor]:
    """`y` normalised, its image, its value, its largest relative residual, and all residuals."""
    y = y / torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    image = exact(y)
    value = (y * image).sum(-1, keepdim=True)
    rest = torch.addcmul(image, y, value, value=-1)
    rest = torch.linalg.vector_norm(rest, dim=-1, keepdim=True)
    relative = rest / value
    relative = relative if symmetric else relative.abs()  # negative values fail later
    return y, image, value, float(relative.amax()), rest


def _is_perron(y: Tensor, image: Tensor, value: Tensor, tolerance: float) -> bool:
    """Whether `y` is the dominant eigenvector of a positive matrix.

    No eigenvalue is above the largest of the ratios `(Ay)ᵢ/yᵢ` (Collatz and Wielandt). The norm of
    the residual alone would accept the eigenvector of a block that is weakly coupled to the rest of
    the matrix.
    """
    if not (y.amin(-1) * y.amax(-1) > 0).all():
        return False
    above = (image / y).amax(-1, keepdim=True) - value
    return bool((above <= y.shape[-1] * tolerance * value).all())


def _has_most(value: Tensor, size: Tensor | None, symmetric: bool) -> bool:
    share = value if size is None else value / size
    return float((share if symmetric else share.abs()).amin()) > _SHARE
