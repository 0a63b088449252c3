"""Eigendecompositions of symmetric matrices, tiny ones all at once.

`torch.linalg.eigh` decomposes the matrices of a batch one after the other. For 2×2 and 3×3 matrices
there are closed forms, which a few dozen calls evaluate for a whole batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pmaf.linalg.products import dot, norm
from pmaf.runtime.log import took


def eigh(A: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.linalg.eigh`, or a closed form where that is faster and as accurate."""
    n = A.shape[-1]
    if n == 2 and A.numel() >= _TWO_FROM:
        took("eigh: closed form, 2×2")
        return _eigh_two(A)
    if n == 3 and A.numel() >= _THREE_FROM and A.dtype == torch.float32 and A.is_cpu:
        took("eigh: closed form, 3×3")
        values, vectors = _eigh_three(A.double())
        return values.float(), vectors.float()
    return torch.linalg.eigh(A)


# The least number of entries of all matrices together for which the closed forms are faster.
_TWO_FROM, _THREE_FROM = 256, 8_000


def _eigh_two(A: Tensor) -> tuple[Tensor, Tensor]:
    first, beside, _, last = A.flatten(-2).unbind(-1)
    (low, high), (c, s) = _two(first, beside, last)
    vectors = torch.stack([-s, c, c, s], -1).unflatten(-1, (2, 2))
    return torch.stack([low, high], -1), vectors


def _two(
    first: Tensor, beside: Tensor, last: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Both eigenvalues, and the eigenvector of the larger one."""
    first, last = 0.5 * first, 0.5 * last
    middle, half = first + last, first - last
    radius, angle = torch.hypot(half, beside), 0.5 * torch.atan2(beside, half)
    return (middle - radius, middle + radius), (angle.cos(), angle.sin())


def _eigh_three(A: Tensor) -> tuple[Tensor, Tensor]:
    """The closed form, for matrices that were converted from float32 to float64.

    The roots of the characteristic polynomial show which eigenvalue is farther from the others. Its
    vector is a cross product of two rows of `A − λI`; a 2×2 matrix gives the others.
    """
    mean = A.diagonal(dim1=-2, dim2=-1).mean(-1)
    shifted = A.clone()
    shifted.diagonal(dim1=-2, dim2=-1).sub_(mean.unsqueeze(-1))
    size = (shifted.square().sum((-2, -1)) / 6).sqrt()
    unit = shifted / torch.where(size > 0, size, 1)[..., None, None]
    x, y, z = unit.unbind(-2)
    half = (0.5 * dot(x, torch.linalg.cross(y, z))).clamp(-1, 1)
    upper = half >= 0  # the largest eigenvalue stands apart, else the smallest does
    angle = half.acos() / 3
    root = 2 * torch.where(upper, angle.cos(), (angle + 2 * math.pi / 3).cos())
    unit.diagonal(dim1=-2, dim2=-1).sub_(root.unsqueeze(-1))
    x, y, z = unit.unbind(-2)
    normals = torch.stack([torch.linalg.cross(*p) for p in ((x, y), (y, z), (z, x))], -2)
    lengths = norm(normals)
    longest = lengths.argmax(-1, keepdim=True)
    length = lengths.gather(-1, longest)
    w = normals.gather(-2, longest.unsqueeze(-1).expand(*longest.shape, 3)).squeeze(-2)
    # The length is not zero: both other roots are at least √3 away in these units. For a multiple
    # of the identity the shifted matrix is −√3·I, whose rows are orthogonal.
    w = w / length
    a, b, c = w.unbind(-1)
    zero = torch.zeros_like(a)
    u = torch.where(
        (a.abs() > b.abs()).unsqueeze(-1),
        torch.stack([-c, zero, a], -1),
        torch.stack([zero, c, -b], -1),
    )
    u = u / norm(u).unsqueeze(-1)
    v = torch.linalg.cross(w, u)
    frame = torch.stack([u, v, w], -2)
    inside = frame @ A @ frame.mT
    (low, high), (c, s) = _two(inside[..., 0, 0], inside[..., 0, 1], inside[..., 1, 1])
    c, s = c.unsqueeze(-1), s.unsqueeze(-1)
    lower, higher = c * v - s * u, c * u + s * v
    apart = inside[..., 2, 2]
    ahead = upper.unsqueeze(-1)
    values = torch.where(
        ahead, torch.stack([low, high, apart], -1), torch.stack([apart, low, high], -1)
    )
    vectors = torch.where(
        ahead.unsqueeze(-1),
        torch.stack([lower, higher, w], -1),
        torch.stack([w, lower, higher], -1),
    )
    return values, vectors
