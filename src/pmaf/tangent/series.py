"""The inverse of `λI − A` as the series `Σ Aʲ/λʲ⁺¹`, where `|λ|` is far above all other moduli.

Each term takes one product, and the series converges at the rate of the power iteration that found
`λ`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pmaf.linalg.products import norm
from pmaf.linalg.roundings import ROUNDED

# Products after which other methods are faster.
_STEPS = 48


def rate_of(gap: Tensor, value: Tensor) -> float:
    """The largest ratio of the next modulus to `|λ|`, for `λ` `(*, 1)` and the gap `(*,)` below it.

    nan where the gap is not known.
    """
    return 1 - float((gap / value.abs().squeeze(-1)).amin()) if value.shape[-1] == 1 else math.nan


def neumann(
    product: Callable[[Tensor], Tensor], value: Tensor, right: Tensor, rate: float
) -> Tensor | None:
    """`w` with `λw − (A times w) = right` for rows `(B, p, n)`, `λ` `(B, 1)`; None if slow.

    `right` has no part along the eigenvector of `λ`, up to rounding. `rate` estimates the largest
    ratio of another modulus to `|λ|`; nan if it is unknown.
    """
    inverse = 1 / value.unsqueeze(-1)
    least = torch.finfo(right.dtype).tiny
    # In these units no square underflows; an underflow would look like convergence.
    unit = torch.linalg.vector_norm(right, math.inf, -1, keepdim=True).clamp_min_(least)
    w = last = first = right / unit
    size = norm(first).clamp_min_(least)
    target = ROUNDED * torch.finfo(right.dtype).eps
    count = math.ceil(math.log(target) / math.log(rate)) + 1 if 0 < rate < 1 else 4
    steps, count, before = 0, min(count, _STEPS), 1.0
    while True:
        for _ in range(count):
            last, w = w, torch.addcmul(first, product(w), inverse)
        steps += count
        worst = float((norm(w - last) / size).amax())  # the residual of `last`, exactly
        if worst <= target:
            return w * (unit * inverse)
        # The residual shrinks geometrically, which predicts the number of products left.
        if not worst < before:
            return None
        count = math.ceil(count * math.log(target / worst) / math.log(worst / before))
        if steps + count > _STEPS:
            return None
        before = worst
