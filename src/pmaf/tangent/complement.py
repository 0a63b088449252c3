"""Solving with a shifted symmetric matrix on the complement of known eigenvectors.

`(λⱼI − ½(A + Aᵀ)) w = v` with `Yw = 0` is positive definite when the rows of `Y` are the
top eigenvectors: conjugate gradients, a product with the matrix a step. What does not
converge, because the next eigenvalue is close, is solved directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pmaf.linalg.loop import iterate
from pmaf.linalg.products import broadcast, dot, norm, one_if_zero, solve_factored
from pmaf.linalg.roundings import ROUNDED, merge_tolerance
from pmaf.linalg.symmetric_part import SymmetricPart
from pmaf.runtime.log import took
from pmaf.runtime.modes import plain
from pmaf.tangent.kept import Factor, Kept, Rate
from pmaf.tangent.series import neumann, rate_of


class _Search(NamedTuple):
    w: Tensor  # (*, k, n)
    residual: Tensor
    direction: Tensor
    energy: Tensor  # (*, k), squared norm of the residual, in the metric of the preconditioner


def complement_solve(
    A: Tensor,
    shift: Tensor,
    y: Tensor,
    v: Tensor,
    kept: Kept,
    gap: Tensor,
) -> Tensor:
    """`w` for each row of `v` and its entry of `shift`, with `y` the rows to stay clear of.

    Args:
        kept: a `Factor` of about the matrix, lifted along `y`, or a `Rate`, if there is one.
        gap: how far the next eigenvalue is, nan if that is not known.
    """
    if plain(v):
        if isinstance(kept, Rate):
            return _solve(A, shift, y, v, None, float(kept.ratio.amax()), kept.matrix)
        factor = kept.lower if isinstance(kept, Factor) else None
        return _solve(A, shift, y, v, factor, rate_of(gap, shift), None)
    return torch.ops.pmaf.complement_solve(A, shift, y, v)


@torch.library.custom_op(
    "pmaf::complement_solve",
    mutates_args=(),
    schema="(Tensor A, Tensor shift, Tensor y, Tensor v) -> Tensor",
)
def _complement_op(A: Tensor, shift: Tensor, y: Tensor, v: Tensor) -> Tensor:
    return _solve(A, shift, y, v, None, math.nan, None)


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
    factor = None if factor is None else factor.reshape(-1, n, n)
    part = SymmetricPart(A, known)

    def clear(x: Tensor) -> Tensor:
        return torch.baddbmm(x, torch.bmm(x, y.mT), y, alpha=-1)

    # Twice, here and in every step: what is left along y is invisible to the matrix, and
    # would stay in the residual for good.
    right = clear(clear(v))
    w = None
    if factor is None and k == 1:
        w = neumann(part, shift, right, rate)
        took("tangent: series" if w is not None else "tangent: no series")
    w = _conjugate_gradients(part, shift, right, clear, factor) if w is None else clear(w)
    return w.reshape(*batch, k, n)


def _conjugate_gradients(
    part: SymmetricPart,
    shift: Tensor,
    right: Tensor,
    clear: Callable[[Tensor], Tensor],
    factor: Tensor | None,
) -> Tensor:
    column = shift.unsqueeze(-1)
    eps = torch.finfo(right.dtype).eps
    # Along a direction this flat there is another eigenvector with the same eigenvalue. The
    # products with A are rounded against its largest modulus, of which this is a lower bound.
    steepness = norm(column * right - part(right)) / one_if_zero(norm(right))
    size = torch.maximum(shift.abs(), steepness)
    rounding = merge_tolerance(right.dtype) * size
    target = (ROUNDED * eps) ** 2 * dot(right, right)

    def precondition(x: Tensor) -> Tensor:
        return x if factor is None else clear(solve_factored(factor, x))

    def step(state: _Search) -> tuple[_Search, Tensor]:
        w, residual, direction, energy = state
        image = clear(column * direction - part(direction))
        curvature = dot(direction, image)
        flat = curvature <= rounding * dot(direction, direction)
        length = torch.where(flat, 0, energy / torch.where(flat, 1, curvature)).unsqueeze(-1)
        w = w + length * direction
        residual = clear(residual - length * image)
        better = precondition(residual)
        following = dot(residual, better)
        ratio = (following / torch.where(energy > 0, energy, 1)).unsqueeze(-1)
        direction = better + ratio * direction
        done = (dot(residual, residual) <= target) | flat
        return _Search(w, residual, direction, following), done

    first = precondition(right)
    start = _Search(torch.zeros_like(right), right, first, dot(right, first))
    limit = min(right.shape[-1], _STEPS)
    run = iterate(step, start, active=target > 0, max_iterations=limit)
    w = clear(run.state.w)
    # The recursive residual drifts from the true one; what counts is the latter.
    rest = right - clear(column * w - part.exact(w))
    done = (dot(rest, rest) <= 1e4 * target).all(-1)
    took("tangent: conjugate gradients" if done.all() else "tangent: decomposition")
    if not done.all():
        left = ~done
        w[left] = _direct(part.matrix[left], shift[left], right[left])
        w = clear(w)
    return w.contiguous()


@_complement_op.register_fake
def _complement_fake(A: Tensor, shift: Tensor, y: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@_complement_op.register_vmap
def _complement_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Any, int]:
    *_, v = args
    if all(axis is None for axis in in_dims[:-1]):
        # More right-hand sides for the same matrix: rows, not copies of the matrix.
        A, shift, y, _ = args
        rows = v.movedim(in_dims[-1] or 0, -3)
        shifts = shift.unsqueeze(-2).expand(*rows.shape[:-1]).flatten(-2)
        z = torch.ops.pmaf.complement_solve(A, shifts, y, rows.flatten(-3, -2).contiguous())
        return z.unflatten(-2, rows.shape[-3:-1]), z.dim() - 2
    moved = [
        x.unsqueeze(0) if axis is None else x.movedim(axis, 0) for x, axis in zip(args, in_dims)
    ]
    A, shift, y, v = moved
    v = v.expand(info.batch_size, *v.shape[1:])
    return torch.ops.pmaf.complement_solve(A, shift, y, v.contiguous()), 0


# Beyond this a decomposition is cheaper than going on.
_STEPS = 200


def _direct(S: Tensor, shift: Tensor, right: Tensor) -> Tensor:
    """All rows from the full decomposition, zero along eigenvectors that share the shift."""
    values, vectors = torch.linalg.eigh(S)
    rise = shift.unsqueeze(-1) - values.unsqueeze(-2)
    # The shift is only as good as its solver, a few roundings of the largest modulus.
    scale = values.abs().amax(-1)[..., None, None]
    apart = rise.abs() > merge_tolerance(S.dtype) * scale
    inside = torch.where(apart, (right @ vectors) / torch.where(apart, rise, 1), 0)
    return inside @ vectors.mT
