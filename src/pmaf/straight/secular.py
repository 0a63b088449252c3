"""The secular equation by a fixed number of operations, which suffices for every equation.

It is the equation of `linalg/secular.py`, in units in which the largest eigenvalue is one:
`‖u(t)‖ = 1` for `uᵢ(t) = cᵢ/(spreadᵢ + t)`, with spreads that ascend from zero.

From the left Newton's method for `ψ(t) = 1/‖u(t)‖ − 1 = 0`, which is concave, needs any number of
steps where plateaus of `‖u(t)‖` follow each other. But `−ψ″ ≤ 3ψ′/t`, so that a relative error `ε`
of `t` becomes at most `3/2 ε²` in a step. So sections of a bracket of `log t`, which need nothing
but that `‖u(t)‖` decreases, come near enough to the root in every case, and few steps do the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.linalg.products import norm


class Plan(NamedTuple):
    """How the root is found: sections of the bracket, each at `points`, then Newton's steps.

    A bracket reaches over 42 powers of ten at most (`LEAST`, and a direction that is nearly
    orthogonal to all ones). From `ε = log(10⁴²)/(points + 1)^sections` on, the bound for the error
    of each plan ends below 2e-16, and a step earlier below 1e-8.
    """

    points: int
    sections: int
    steps: int


# In place of a coefficient of zero in the lowest eigenspace. It makes `t` about as large, which is
# far below every rounding error, so that the hard case is an equation like any other.
LEAST = 1e-30
# The most numbers that a section may hold in memory, and the plans that hold fewer and fewer for
# one number of the problem, and take more and more operations.
_MOST = 1 << 24
_PLANS = (Plan(128, 2, 3), Plan(48, 2, 4), Plan(8, 3, 5))


def planned(shape: torch.Size, device: torch.device) -> Plan:
    """The plan for coefficients of this shape: few operations on a device, few numbers on a CPU."""
    plans = _PLANS[2:] if device.type == "cpu" else _PLANS
    return next((x for x in plans if x.points * shape.numel() <= _MOST), plans[-1])


def root(spread: Tensor, c: Tensor, single: bool) -> tuple[Tensor, Tensor]:
    """`u` and `t`, for coefficients that are not all zero in the lowest eigenspace.

    Args:
        single: whether the result is rounded to float32, for which a step less suffices.
    """
    points, sections, steps = planned(c.shape, c.device)
    steps -= single
    # As the spreads ascend, the terms up to the j-th are at least ‖(c₀, …, cⱼ)‖/(spreadⱼ + t)
    # together, and less than one; and all of them are at most ‖c‖/t.
    prefix = c.square().cumsum(-1).sqrt()
    low = (prefix - spread).amax(-1, keepdim=True).log()
    width = prefix[..., -1:].log() - low
    part = torch.arange(1, points + 1, dtype=c.dtype, device=c.device)
    for i in range(1, sections + 1):
        cell = (points + 1.0) ** -i
        t = torch.addcmul(low, width, part, value=cell).exp()
        sizes = norm(c.unsqueeze(-2) / (spread.unsqueeze(-2) + t.unsqueeze(-1)))
        left = (sizes > 1).sum(-1, keepdim=True, dtype=c.dtype)
        low = torch.addcmul(low, width, left, value=cell)
    t = low.exp()
    for _ in range(steps):
        h = spread + t
        u = c / h
        s = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
        slope = (u.unsqueeze(-2) @ (u / h).unsqueeze(-1)).squeeze(-1)
        # Newton's step for 1/‖u(t)‖ = 1.
        t = torch.addcdiv(t, torch.addcmul(s.pow(3), s, s, value=-1), slope)
    return c / (spread + t), t.squeeze(-1)
