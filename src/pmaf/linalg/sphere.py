"""The unit sphere and its tangent spaces."""

from __future__ import annotations

import torch
from torch import Tensor

from pmaf.linalg.products import dot, norm
from pmaf.linalg.roundings import noise_tolerance


def project(u: Tensor) -> Tensor:
    """The nearest point of the unit sphere, `u/‖u‖`, for `u` of shape `(*, n)`."""
    return u / norm(u).unsqueeze(-1)


def settle(u: Tensor) -> Tensor:
    """`project`, with the division in float64 and one rounding at the end.

    At a minimum the objective is stationary along the sphere but not across it, so it is rounding
    of the length of `u` that changes the objective most.
    """
    if u.device.type == "mps":  # has no float64
        return project(u)
    return project(u.double()).to(u.dtype)


def tangent(u: Tensor, x: Tensor) -> Tensor:
    """The part of `x` orthogonal to the unit vector `u`: `(I − uuᵀ)x`."""
    return x - u * dot(u, x).unsqueeze(-1)


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Cosine of the angle between `x` and `y`; zero where either of them is zero."""
    lengths = norm(x) * norm(y)
    return dot(x, y) / torch.where(lengths > 0, lengths, torch.ones_like(lengths))


def references(like: Tensor) -> tuple[Tensor, Tensor]:
    """Two fixed directions of the size of `like`, to break ties reproducibly.

    All ones is the paper's choice. Structured vectors such as `(1, −1, 0, …)` are
    orthogonal to it, so the second direction has no structure.
    """
    n = like.shape[-1]
    index = torch.arange(n, dtype=like.dtype, device=like.device)
    return torch.ones_like(index), torch.cos(index + 1)


def reaches(u: Tensor) -> Tensor:
    """Whether points of the unit ball are on its sphere, up to rounding, `(*,)`."""
    return norm(u) >= 1 - noise_tolerance(u.dtype)
