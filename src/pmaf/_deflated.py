"""Solving with a shifted symmetric matrix on the complement of known eigenvectors.

`(λⱼI − ½(A + Aᵀ)) w = v` with `Yw = 0` is positive definite when the rows of `Y` are the
top eigenvectors: conjugate gradients, a product with the matrix a step. What does not
converge, because the next eigenvalue is close, is solved directly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pmaf._linalg import dot
from pmaf.solvers._loop import iterate
from pmaf.spectrum import merge_tolerance


class _Search(NamedTuple):
    w: Tensor  # (*, k, n)
    residual: Tensor
    direction: Tensor
    energy: Tensor  # (*, k), squared norm of the residual


def deflated_solve(A: Tensor, shift: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """`w` for each row of `v` and its entry of `shift`, with `y` the rows to stay clear of."""
    return torch.ops.pmaf.deflated_solve(A, shift, y, v)


@torch.library.custom_op(
    "pmaf::deflated_solve",
    mutates_args=(),
    schema="(Tensor A, Tensor shift, Tensor y, Tensor v) -> Tensor",
)
def _deflated_op(A: Tensor, shift: Tensor, y: Tensor, v: Tensor) -> Tensor:
    S = 0.5 * (A + A.mT)
    column = shift.unsqueeze(-1)

    def clear(x: Tensor) -> Tensor:
        return x - (x @ y.mT) @ y

    eps = torch.finfo(v.dtype).eps
    # Twice, here and in every step: what is left along y is invisible to the matrix, and
    # would stay in the residual for good.
    right = clear(clear(v))
    # Along a direction this flat there is another eigenvector with the same eigenvalue.
    rounding = merge_tolerance(v.dtype) * torch.linalg.matrix_norm(S).unsqueeze(-1)
    energy = dot(right, right)
    target = (4 * eps) ** 2 * energy

    def step(state: _Search) -> tuple[_Search, Tensor]:
        w, residual, direction, energy = state
        image = clear(column * direction - direction @ S)
        curvature = dot(direction, image)
        flat = curvature <= rounding * dot(direction, direction)
        length = torch.where(flat, 0, energy / torch.where(flat, 1, curvature)).unsqueeze(-1)
        w = w + length * direction
        residual = clear(residual - length * image)
        following = dot(residual, residual)
        ratio = (following / torch.where(energy > 0, energy, 1)).unsqueeze(-1)
        direction = residual + ratio * direction
        return _Search(w, residual, direction, following), (following <= target) | flat

    start = _Search(torch.zeros_like(right), right, right, energy)
    limit = min(v.shape[-1], _STEPS)
    run = iterate(step, start, active=energy > 0, max_iterations=limit)
    w = clear(run.state.w)
    # The recursive residual drifts from the true one; what counts is the latter.
    rest = right - clear(column * w - w @ S)
    done = dot(rest, rest) <= 1e4 * target
    if not done.all():
        w = torch.where(done.unsqueeze(-1), w, clear(_direct(S, shift, right)))
    return w.contiguous()


@_deflated_op.register_fake
def _deflated_fake(A: Tensor, shift: Tensor, y: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@_deflated_op.register_vmap
def _deflated_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Any, int]:
    moved = [
        x.unsqueeze(0) if axis is None else x.movedim(axis, 0) for x, axis in zip(args, in_dims)
    ]
    A, shift, y, v = moved
    v = v.expand(info.batch_size, *v.shape[1:])
    return deflated_solve(A, shift, y, v.contiguous()), 0


# Beyond this a decomposition is cheaper than going on.
_STEPS = 200


def _direct(S: Tensor, shift: Tensor, right: Tensor) -> Tensor:
    """All rows from the full decomposition, zero along eigenvectors that share the shift."""
    values, vectors = torch.linalg.eigh(S)
    rise = shift.unsqueeze(-1) - values.unsqueeze(-2)
    # The shift is only as good as its solver, which is a few roundings of this norm.
    scale = torch.linalg.matrix_norm(S)[..., None, None]
    apart = rise.abs() > merge_tolerance(S.dtype) * scale
    inside = torch.where(apart, (right @ vectors) / torch.where(apart, rise, 1), 0)
    return inside @ vectors.mT
