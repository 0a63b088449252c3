"""The secular equation of a quadratic function on the unit sphere.

In the eigenbasis of `M` the minimum of `½uᵀMu − gᵀu` on the sphere follows from one equation in one
unknown, the distance `t = μ + λ_min` of the multiplier from its lower bound:

    ‖u(t)‖ = 1,   uᵢ(t) = cᵢ/(spreadᵢ + t),   c = Vᵀg,   t ≥ 0.

Every root with `t ≥ 0` is a global minimiser.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pmaf.linalg import sphere
from pmaf.linalg.gram import Spectrum
from pmaf.linalg.products import dot, matvec, norm, rmatvec


def secular_root(
    spectrum: Spectrum, c: Tensor, noise: Tensor, init: Tensor | None, eps: float, steps: int = 64
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The root of the secular equation for `Aᵀb` with coefficients `c` known up to `noise`.

    Returns `u`, `t`, the steps taken, whether they sufficed, and whether a nonzero coefficient was
    taken for zero.
    """
    basis, spread = spectrum.basis, spectrum.spread
    lowest = spread == 0
    pull = norm(c * lowest)  # norm of the coefficients in the smallest eigenspace
    tied = pull <= noise
    hard = torch.zeros_like(tied)
    partial = slack = c
    if tied.any():
        partial = torch.where(lowest, 0, c / torch.where(lowest, 1, spread))
        slack = 1 - dot(partial, partial)
        hard = tied & (slack > 0)

    tiny = torch.finfo(c.dtype).tiny
    t = torch.maximum(pull, norm(c) - spread.amax(-1)).clamp_min(tiny)
    active = ~hard
    iterations = torch.zeros_like(active, dtype=torch.int64)
    # Sums over a leading dimension are several times faster, and there are two a step.
    rise, pulls = (x.movedim(-1, 0).contiguous() for x in (spread.expand_as(c), c))
    for _ in range(steps):
        inverse = (rise + t).reciprocal_()
        weights = (pulls * inverse).square_()
        square, slope = weights.sum(0), (weights * inverse).sum(0)
        excess = square.sqrt() - 1
        following = torch.addcdiv(t, square * excess, slope)
        # Newton's iterates increase from the left bound. The first that does not has reached
        # rounding.
        moving = active & (following > t)
        t = torch.where(moving, following, t)
        iterations += active
        active = moving & (excess > eps)
        if not active.any():
            break
    u = c / (spread + t.unsqueeze(-1))
    finished = hard | (~active & ((norm(u) - 1).abs() <= eps**0.5))
    if tied.any():
        t = torch.where(hard | (t == tiny), 0, t)
        u = torch.where(hard.unsqueeze(-1), partial, u)
    u = rmatvec(basis, u)
    if hard.any():
        height = torch.where(hard, slack, 0).sqrt().unsqueeze(-1)
        u = u + height * _lowest_direction(spectrum, u, init)
    return sphere.project(u), t, iterations, finished, hard & (pull > 0)


def _lowest_direction(spectrum: Spectrum, like: Tensor, init: Tensor | None) -> Tensor:
    """A unit vector of the smallest eigenspace that does not depend on the basis.

    It is the projection of a reference onto that space: of `init`, of all ones if that projection
    is zero, else of a direction without structure.
    """
    basis, lowest = spectrum.basis, spectrum.spread == 0
    tolerance = torch.finfo(like.dtype).eps ** 0.5
    fallback = basis[..., 0, :].expand_as(like)
    chosen = torch.zeros_like(like)
    found = torch.zeros_like(like[..., :1], dtype=torch.bool)
    for reference in (*(() if init is None else (init,)), *sphere.references(like)):
        inside = matvec(basis, reference.expand_as(like))
        shadow = rmatvec(basis, inside * lowest)
        if not spectrum.complete:
            shadow = shadow + reference - rmatvec(basis, inside)
        usable = norm(shadow).unsqueeze(-1) > tolerance * norm(reference).unsqueeze(-1)
        chosen = torch.where(usable & ~found, shadow, chosen)
        found = found | usable
        if found.all():
            break
    return sphere.project(torch.where(found, chosen, fallback))
