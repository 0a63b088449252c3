"""Solving with `λI − A` where `λ` dwarfs all other eigenvalues: `Σ Aʲ/λʲ⁺¹`.

The power iteration of linear systems: one product a step and nothing else, and as fast as
the power iteration that found `λ`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pmaf.linalg.gram import merge_tolerance
from pmaf.linalg.products import norm

# Products after which other methods are faster.
_STEPS = 48


def rate_of(gap: Tensor | None, value: Tensor) -> float:
    """Largest ratio of the next modulus to that of `λ`, `(B, 1)`, a `gap` `(B,)` below it."""
    return math.nan if gap is None else 1 - float((gap / value.abs().squeeze(-1)).amin())


def neumann(
    product: Callable[[Tensor], Tensor], value: Tensor, right: Tensor, rate: float
) -> Tensor | None:
    """`w` with `λw − (A times w) = right` for rows `(B, p, n)`, `λ` `(B, 1)`; None if slow.

    `right` has no part along the eigenvector of `λ`, up to rounding. `rate` is a guess of
    the largest ratio of moduli to that of `λ`; nan without one.
    """
    inverse = 1 / value.unsqueeze(-1)
    least = torch.finfo(right.dtype).tiny
    # In units in which no square underflows: what cannot be seen would seem to have converged.
    unit = torch.linalg.vector_norm(right, math.inf, -1, keepdim=True).clamp_min_(least)
    w = last = first = right / unit
    size = norm(first).clamp_min_(least)
    target = 4 * torch.finfo(right.dtype).eps
    count = math.ceil(math.log(target) / math.log(rate)) + 1 if 0 < rate < 1 else 4
    steps, count, before = 0, min(count, _STEPS), 1.0
    while True:
        for _ in range(count):
            last, w = w, torch.addcmul(first, product(w), inverse)
        steps += count
        worst = float((norm(w - last) / size).amax())  # the residual of `last`, exactly
        if worst <= target:
            return w * (unit * inverse)
        # It shrinks geometrically, which says how much there is left to do.
        if not worst < before:
            return None
        count = math.ceil(count * math.log(target / worst) / math.log(worst / before))
        if steps + count > _STEPS:
            return None
        before = worst


def dominant_solve(
    A: Tensor,
    values: Tensor,
    y: Tensor,
    v: Tensor | None,
    d_values: Tensor | None,
    gap: Tensor,
) -> Tensor | None:
    """`w` of the bordered system of a nonsymmetric matrix; None where it takes other means.

    On the complement of `y`, which `Aᵀ` maps to itself, the system is `(λI − Aᵀ)w = v`. The
    left eigenvector is `y` and the solution of the same system with `Aᵀy − λy`: the part
    that the gradient of the value asks for.
    """
    n = A.shape[-1]
    batch = y.shape[:-2]
    matrix, y, values = A.reshape(-1, n, n), y.reshape(-1, 1, n), values.reshape(-1, 1)
    if (gap.reshape(-1, 1) <= merge_tolerance(A.dtype) * values.abs()).any():
        return None
    known = []
    if v is not None:
        known.append(v.expand(*batch, 1, n).reshape(-1, 1, n))
    if d_values is not None:
        known.append(torch.bmm(y, matrix))
    right = known[0] if len(known) == 1 else torch.cat(known, -2)
    for _ in range(2):  # what is left along y would stay in the sum, as often as it has terms
        right = torch.baddbmm(right, torch.bmm(right, y.mT), y, alpha=-1)
    rate = rate_of(gap.reshape(-1), values)
    found = neumann(lambda w: torch.bmm(w, matrix), values, right, rate)
    if found is None:
        return None
    found = torch.baddbmm(found, torch.bmm(found, y.mT), y, alpha=-1)
    w = found[:, :1]
    if d_values is not None:
        left = d_values.reshape(-1, 1, 1) * (y + found[:, -1:])
        w = left if v is None else w + left
    return w.view(*batch, 1, n)
