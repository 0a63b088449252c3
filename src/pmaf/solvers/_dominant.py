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
    y = _advance(matrix.gather(-2, index), product, 2)
    image = exact(y)
    value = (y * image).sum(-1, keepdim=True)
    large = ((value if symmetric else value.abs()) > _SHARE * size).all()
    positive = not symmetric and not large and bool(matrix.amin() > 0)
    if not (large or positive):
        return None

    # The residual before the first steps is unknown, but not above one.
    products, taken, before = 3, 2, 1.0
    while True:
        rest = norm(torch.addcmul(image, y, value, value=-1))
        worst = float((rest / value.squeeze(-1).abs()).amax())
        y = image / norm(image).unsqueeze(-1)
        if worst <= tolerance:
            break
        # It shrinks geometrically, which says how much there is left to do.
        if not worst < before:
            return None
        count = math.ceil(taken * math.log(tolerance / worst) / math.log(worst / before))
        if products + count > _STEPS:
            return None
        y = _advance(y, product, count - 1)
        image = exact(y)
        value = (y * image).sum(-1, keepdim=True)
        products, taken, before = products + count, count, worst
    if positive:
        proven = (y.amin(-1) * y.amax(-1) > 0).all()
    else:
        proven = ((value if symmetric else value.abs()) > _SHARE * size).all()
    residual = (rest / size.squeeze(-1)).squeeze(-1)
    return Dominant(value.squeeze(-1), y, residual, products) if proven else None


def _advance(y: Tensor, product: Callable[[Tensor], Tensor], count: int) -> Tensor:
    for _ in range(count):
        y = product(y)
        y = y / norm(y).unsqueeze(-1)
    return y
