"""Solving with a shifted symmetric matrix on the complement of known eigenvectors.

The system `(λⱼI − ½(A + Aᵀ)) w = v` with `Yw = 0` is positive definite when the rows of `Y` are the
top eigenvectors. Conjugate residuals solve it with one product a step. Batch entries that do not
converge, because the next eigenvalue is close, are solved by a decomposition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf import native
from pmaf.linalg.decompositions import eigh
from pmaf.linalg.products import (
    broadcast,
    norm,
    one_if_zero,
    solve_factored,
    symmetric_part,
)
from pmaf.linalg.roundings import ROUNDED, merge_tolerance, power_of_two
from pmaf.linalg.symmetric_part import SymmetricPart
from pmaf.runtime.log import took
from pmaf.runtime.modes import plain
from pmaf.runtime.opaque import Axes, Step, solve
from pmaf.runtime.text import joined
from pmaf.tangent.kept import Kept
from pmaf.tangent.residuals import conjugate_residuals
from pmaf.tangent.series import neumann


def complement_solve(
    A: Tensor,
    shift: Tensor,
    y: Tensor,
    v: Tensor,
    kept: Kept,
    gap: Tensor,
) -> Tensor:
    """`w` for each row of `v` and its entry of `shift`, orthogonal to the rows of `y`.

    Args:
        kept: a `Factor` of about the matrix plus a multiple of `YᵀY`, or a `Rate`, if there is one.
        gap: distance to the next eigenvalue, nan if that is not known.
    """
    if plain(v):
        return _solve(A, shift, y, v, *kept.for_products(gap, shift))
    (w,) = solve(COMPLEMENT, A, shift, y, v)
    return w


@dataclass(frozen=True)
class Complement(Step):
    """The same for `A`, shifts, `y` and `v`, without anything that was kept."""

    def run(self, tensors: Any) -> tuple[Tensor]:
        A, shift, y, v = tensors
        return (_solve(A, shift, y, v, None, math.nan, None).contiguous(),)

    def outline(self, tensors: Any) -> tuple[Tensor]:
        return (torch.empty_like(tensors[-1], memory_format=torch.contiguous_format),)

    def mapped(
        self, call: str, tensors: Any, axes: Axes, size: int
    ) -> tuple[list[Tensor], tuple[int]]:
        *fixed, v = tensors
        if all(axis is None for axis in axes[:-1]):
            # Right-hand sides for one matrix become rows, so that the matrix is not copied.
            A, shift, y = fixed
            rows = v.movedim(axes[-1] or 0, -3)
            shifts = shift.unsqueeze(-2).expand(*rows.shape[:-1]).flatten(-2)
            flat = rows.reshape(*rows.shape[:-3], -1, rows.shape[-1])
            (z,) = solve(call, A, shifts, y, flat.contiguous())
            return [z.unflatten(-2, rows.shape[-3:-1])], (z.dim() - 2,)
        moved = [x.unsqueeze(0) if i is None else x.movedim(i, 0) for x, i in zip(tensors, axes)]
        *fixed, v = moved
        v = v.expand(size, *v.shape[1:])
        return solve(call, *fixed, v.contiguous()), (0,)


COMPLEMENT = joined(Complement.kind)


def _solve(
    A: Tensor,
    shift: Tensor,
    y: Tensor,
    v: Tensor,
    factor: Tensor | None,
    rate: float,
    known: Tensor | None,
) -> Tensor:
    k, n = v.shape[-2:]
    batch = broadcast(A.shape[:-2], v.shape[:-2])
    if len(batch) != 1 or any(x.shape[:-2] != batch for x in (A, y, v)):
        A, y, v = (x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (A, y, v))
        shift = shift.expand(*batch, k).reshape(-1, k)
    if factor is None and known is None and n <= COMPILED_ROWS and native.takes(A):
        return _compiled(A, shift, y, v).reshape(*batch, k, n)
    factor = None if factor is None else factor.reshape(-1, n, n)
    part = SymmetricPart(A, known)

    def clear(x: Tensor) -> Tensor:
        return torch.baddbmm(x, torch.bmm(x, y.mT), y, alpha=-1)

    # Squares of large gradients overflow. Powers of two as units change no digit.
    unit = power_of_two(v.abs().amax(-1, keepdim=True))
    # Projected twice, here and in every step, because no step removes a component along y from the
    # residual.
    right = clear(clear(v / unit))
    w = None
    if factor is None and k == 1:
        w = neumann(part, shift, right, rate)
        took("tangent: series" if w is not None else "tangent: no series")
    w = _by_products(part, shift, right, y, clear, factor) if w is None else clear(w)
    return (unit * w).reshape(*batch, k, n)


def _compiled(A: Tensor, shift: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """The solution by compiled kernels; a decomposition where they fail."""
    took("tangent: compiled")
    w, failed = native.complement_solve(A, shift, y, v)
    if failed is not None:
        took("tangent: decomposition")
        y, v = y[failed], v[failed]
        right = v - (v @ y.mT) @ y
        found = _direct(symmetric_part(A[failed]), shift[failed], right)
        w[failed] = found - (found @ y.mT) @ y
    return w


def _by_products(
    part: SymmetricPart,
    shift: Tensor,
    right: Tensor,
    y: Tensor,
    clear: Callable[[Tensor], Tensor],
    factor: Tensor | None,
) -> Tensor:
    """Conjugate residuals, preconditioned by the factor; a decomposition where they fail."""
    column = shift.unsqueeze(-1)
    # Rounding in products with A is relative to its largest modulus; `scale` is a lower bound.
    steepness = norm(column * right - part(right)) / one_if_zero(norm(right))
    scale = torch.maximum(shift.abs(), steepness).amax(-1)
    w = conjugate_residuals(
        part,
        shift,
        y,
        right,
        scale=scale,
        limit=min(right.shape[-1], _STEPS),
        agreed=lambda done: bool(done.all()),
        inverse=None if factor is None else lambda x: solve_factored(factor, x),
    ).rows
    rest = right - clear(column * w - part.exact(w))
    done = (norm(rest) <= 100 * ROUNDED * torch.finfo(w.dtype).eps * norm(right)).all(-1)
    took("tangent: conjugate residuals" if done.all() else "tangent: decomposition")
    if not done.all():
        left = ~done
        w[left] = _direct(part.formed(left), shift[left], right[left])
        w = clear(w)
    return w.contiguous()


# Up to this many rows compiled kernels factor the matrix; beyond, products are faster.
COMPILED_ROWS = 256
# After this many steps a decomposition is cheaper than further steps.
_STEPS = 200


def _direct(S: Tensor, shift: Tensor, right: Tensor) -> Tensor:
    """Solve by a full decomposition; `w` is zero along the eigenspace of the shift."""
    values, vectors = eigh(S)
    rise = shift.unsqueeze(-1) - values.unsqueeze(-2)
    # The error of the shift is a few eps times the largest modulus.
    scale = values.abs().amax(-1)[..., None, None]
    apart = rise.abs() > merge_tolerance(S.dtype) * scale
    inside = torch.where(apart, (right @ vectors) / torch.where(apart, rise, 1), 0)
    return inside @ vectors.mT
