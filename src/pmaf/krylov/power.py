"""One eigenvector that dwarfs the rest: a few power steps, and the proof that it does.

The squared moduli of all eigenvalues sum to at most `‖A‖²` (Frobenius). One that has more
than half of it is the largest in modulus, and bounds all the others: none of them has to be
looked at. For a matrix of positive entries a positive eigenvector is proof, too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.linalg.products import norm
from pmaf.linalg.roundings import square_range
from pmaf.linalg.symmetric_part import fixed_rows

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
    matrix: Tensor | None = None  # (B, n, n), the symmetric part, where it was formed


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
    # For a symmetric matrix this is already a lower bound of the largest eigenvalue.
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
        if worst > tolerance:  # a residual below it is rounding and tells nothing of the rate
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


def dominant_of_sum(A: Tensor, flat: bool, tolerance: float) -> Dominant | None:
    """Dominant eigenpairs of `½(A + Aᵀ)`, for matrices small enough for `A + Aᵀ` to be formed.

    In units in which the Frobenius norm is one no step has to be normalised.

    Args:
        flat: whether most of each matrix is a constant, so that all ones is near the vector.
    """
    n = A.shape[-1]
    matrix = A + A.mT
    size = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    matrix.div_(size)

    def product(x: Tensor) -> Tensor:
        return torch.bmm(x, matrix)

    ones, random = _starts(n, A.dtype, A.device)
    y = (ones if flat else random).expand(len(A), 1, n)
    for _ in range(_FIRST):
        y = torch.bmm(y, matrix)
    # A start without structure has about a part of n^-½ along the vector.
    start = Start(y, None, _FIRST, 1.0 if flat else n**0.5)
    found = dominant(product, product, start, tolerance, True)
    if found is None or not float(size.amin()) > square_range(A.dtype)[0]:
        return None
    half = 0.5 * size
    return found._replace(values=found.values * half, matrix=matrix.mul_(half))


# Products before the first look at how fast they converge.
_FIRST = 3


@functools.lru_cache(maxsize=64)
def _starts(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """All ones, and without structure, `(1, 1, n)`."""
    with torch.inference_mode(False):  # or they would be of no use in a later training step
        ones = torch.ones(1, 1, n, dtype=dtype, device=device)
        return ones, fixed_rows(n, dtype, device)[:1].unsqueeze(0)


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
