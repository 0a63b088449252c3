"""The unit sphere and its tangent spaces."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from pmaf.errors import require_finite
from pmaf.linalg.products import dot, norm, one_if_zero
from pmaf.linalg.roundings import merge_tolerance, noise_tolerance, widened
from pmaf.runtime.modes import plain


def project(u: Tensor) -> Tensor:
    """The nearest point of the unit sphere, `u/‖u‖`, for `u` of shape `(*, n)`."""
    return u / norm(u).unsqueeze(-1)


def settle(u: Tensor) -> Tensor:
    """`project`, with the division in float64 and one rounding at the end.

    At a minimum the objective is stationary along the sphere but not across it, so it is rounding
    of the length of `u` that changes the objective most.
    """
    return project(widened(u)).to(u.dtype)


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
    second = second_reference(like)
    return torch.ones_like(second), second


def signs(rows: Tensor, reference: Tensor | int | str | None = None) -> Tensor:
    """The sign for each unit vector, `(*, n)` to `(*,)`, which a reference decides.

    * None: the product with all ones is positive.
    * A tensor that broadcasts to `rows`: the product with it is positive.
    * An integer: that component is positive.
    * `"largest"`: the component of largest modulus is positive, the first of them if moduli are
      equal up to rounding.

    Where the product or the component is zero up to rounding, the paper keeps the solver's sign;
    here the product with a fixed direction is positive, so that the sign is reproducible.
    """
    if not (rows.is_cpu or isinstance(reference, str)) and plain(rows):
        return _signs_on_device(rows.detach(), reference)
    if reference is None:
        return _default_signs(rows)
    rows = rows.detach()
    if isinstance(reference, str):
        modulus = rows.abs()
        least = (1 - merge_tolerance(rows.dtype)) * modulus.amax(-1, keepdim=True)
        first = (modulus >= least).to(rows.dtype).argmax(-1, keepdim=True)
        return _one_signed(rows.gather(-1, first).squeeze(-1))
    if isinstance(reference, Tensor):
        chosen, size = (rows * reference).sum(-1), norm(reference)
    else:
        chosen, size = rows[..., reference], 1.0
    known = chosen.abs() > merge_tolerance(rows.dtype) * size
    if plain(rows) and bool(known.all()):
        return chosen.sgn()
    if plain(rows) and isinstance(reference, Tensor):
        require_finite(reference=(reference, 1))
        # Squares of a large reference overflow, so its length is in units of its largest entry.
        unit = one_if_zero(reference.abs().amax(-1, keepdim=True))
        size = norm(reference / unit) * unit.squeeze(-1)
        known = chosen.abs() > merge_tolerance(rows.dtype) * size
    both, one, _ = _references(rows)
    return torch.copysign(one, torch.where(known, chosen, (rows * both[:, 1]).sum(-1)))


def _signs_on_device(rows: Tensor, reference: Tensor | int | None) -> Tensor:
    """The signs, by few operations and without a question to the device.

    A little of the second direction is added to the reference. It decides where the product with
    that is rounding, and elsewhere has no effect. A reference that is not finite makes nan of a
    sign.
    """
    share = 4 * merge_tolerance(rows.dtype)
    second = second_reference(rows)
    if isinstance(reference, Tensor):
        # Squares may leave the range.
        size = torch.linalg.vector_norm(reference, math.inf, -1, keepdim=True)
        size = size.clamp_min(torch.finfo(rows.dtype).tiny ** 0.5)
        side = (rows * torch.addcmul(reference, size, second, value=share)).sum(-1)
        return side / side.abs()  # torch's sign of nan is zero
    flat = rows.flatten(0, -2) if rows.dim() > 1 else rows.unsqueeze(0)
    first = flat.sum(-1) if reference is None else flat[:, reference]
    return torch.addmv(first, flat, second, alpha=share).sgn().reshape(rows.shape[:-1])


def second_reference(like: Tensor) -> Tensor:
    """The second of the `references`, which has no structure, `(n,)`."""
    n = like.shape[-1]
    return torch.arange(1, n + 1, dtype=like.dtype, device=like.device).cos_()


def _one_signed(x: Tensor) -> Tensor:
    return torch.copysign(torch.ones_like(x), x)


def _default_signs(rows: Tensor) -> Tensor:
    both, one, tolerance = _references(rows)
    first, second = (rows.detach() @ both).unbind(-1)
    # `hardshrink` sets `first` to zero up to the tolerance; above, it outweighs `second`.
    side = torch.add(second, torch.hardshrink(first, tolerance), alpha=16 / tolerance)
    return torch.copysign(one, side)


def _references(rows: Tensor) -> tuple[Tensor, Tensor, float]:
    """`references` as columns, the number one, and the tolerance for a zero product.

    They are cached for plain tensors on the CPU alone. On other devices a tensor may be made in the
    memory of a CUDA graph, or on a stream for which the next call does not wait.
    """
    n = rows.shape[-1]
    if rows.is_cpu and plain(rows):
        return known_references(n, rows.dtype)
    # The first reference is all ones, the cosine of zero. These are `references` in fewer steps.
    cosines = torch.arange(n + 1, dtype=rows.dtype, device=rows.device).cos()
    both = torch.stack([cosines[:1].expand(n), cosines[1:]], -1)
    return both, both[0, 0], merge_tolerance(rows.dtype) * n**0.5


@functools.lru_cache(maxsize=64)
def known_references(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    """The same for plain tensors of a size and a dtype, on the CPU."""
    with torch.inference_mode(False):  # autograd refuses inference tensors
        both = torch.stack(references(torch.empty(n, dtype=dtype, device="cpu")), -1)
        return both, both[0, 0].clone(), merge_tolerance(dtype) * n**0.5


def reaches(u: Tensor) -> Tensor:
    """Whether points of the unit ball are on its sphere, up to rounding, `(*,)`."""
    return norm(u) >= 1 - noise_tolerance(u.dtype)
