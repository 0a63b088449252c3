"""The linear systems of gradients, from products alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pmaf._linalg import dot, long_norm

Product = Callable[[Tensor], Tensor]


class Solved(NamedTuple):
    """Solutions of linear systems, and how well they solve them."""

    rows: Tensor  # (B, p, n)
    residual: Tensor  # (B,), relative to the right-hand sides
    products: int
    converged: Tensor  # (B,) bool


def conjugate_residuals(
    product: Product,
    shift: Tensor,
    y: Tensor,
    right: Tensor,
    *,
    scale: Tensor,
    limit: int,
    agreed: Callable[[Tensor], bool],
    tolerance: float = 0.0,
) -> Solved:
    """`(shift·I − A) z = right` with `Yz = 0`, for each row, where that is positive definite.

    Where it is not quite, because an eigenvalue is repeated, the residual still falls as far
    as it can, and `z` stays finite; conjugate gradients would not promise that.

    Args:
        product: `A` times rows `(B, p, n)`.
        shift: `(B, p)`, one for each row.
        y: `(B, q, n)`, orthonormal rows to stay clear of.
        right: `(B, p, n)`.
        scale: `(B,)`, of the matrix: what cancels is measured against it.
        tolerance: on the residual relative to `right`, where rounding is not asked for.
    """
    clear = _clear_of(y)
    column = shift.unsqueeze(-1)

    def system(x: Tensor) -> Tensor:
        return clear(column * x - product(x))

    eps = torch.finfo(right.dtype).eps
    size = long_norm(right)
    right = clear(clear(right))
    z, rest = torch.zeros_like(right), right
    image = system(rest)
    largest = shift.abs() + scale.unsqueeze(-1)
    direction, ahead = rest, image
    slope = dot(rest, image)
    products = 1
    while True:
        # What is left, and what rounding leaves of a solution this long.
        left, floor = long_norm(rest), size + largest * long_norm(z)
        done = left <= torch.maximum(_ROUNDINGS * eps * floor, tolerance * size)
        # Along what is left the matrix is zero: no step would be of use.
        flat = slope <= _ROUNDINGS * eps * largest * left.square()
        if products >= limit or agreed((done | flat).all(-1)):
            break
        square = dot(ahead, ahead)
        moving = ~(done | flat) & (square > 0)
        step = torch.where(moving, slope / _safe(square), 0).unsqueeze(-1)
        z = z + step * direction
        rest = rest - step * ahead
        image = system(rest)
        products += 1
        following = dot(rest, image)
        ratio = torch.where(moving, following / _safe(slope), 0).unsqueeze(-1)
        direction, ahead = rest + ratio * direction, image + ratio * ahead
        slope = following
    z = clear(z)
    left = long_norm(right - system(z))
    floor = size + largest * long_norm(z)
    converged = (left <= _LOOSE * eps * floor).all(-1)
    return Solved(z, (left / _safe(size)).amax(-1), products + 1, converged)


def gmres(
    product: Product,
    shift: Tensor,
    y: Tensor,
    right: Tensor,
    *,
    scale: Tensor,
    depth: int,
    limit: int,
    agreed: Callable[[Tensor], bool],
) -> Solved:
    """`(shift·I − A) w = right` on the complement of `y`, which `A` maps to itself.

    Args:
        product: `A` times rows `(B, 1, n)`.
        shift: `(B, 1)`.
        y: `(B, 1, n)`.
        right: `(B, 1, n)`.
        scale: `(B,)`, of the matrix.
        depth: steps between restarts.
    """
    clear = _clear_of(y)
    column = shift.unsqueeze(-1)

    def system(x: Tensor) -> Tensor:
        return clear(column * x - product(x))

    B, _, n = right.shape
    depth = min(depth, n)
    eps = torch.finfo(right.dtype).eps
    size = long_norm(right)
    right = clear(clear(right))
    w, rest, largest = torch.zeros_like(right), right, shift.abs() + scale.unsqueeze(-1)
    products = 0
    Q = right.new_empty(B, depth + 1, n)
    previous = size
    while True:
        left = long_norm(rest)
        floor = size + largest * long_norm(w)
        done = left <= _ROUNDINGS * eps * floor
        stuck = (left >= 0.5 * previous) & (left <= _LOOSE * eps * floor) & (products > 0)
        if products >= limit or agreed((done | stuck).all(-1)):
            converged = (left <= _LOOSE * eps * floor).all(-1)
            return Solved(clear(w), (left / _safe(size)).amax(-1), products, converged)
        H = right.new_zeros(B, depth + 1, depth)
        Q[:, :1] = rest / _safe(left).unsqueeze(-1)
        look, used, s = _FIRST, depth, H.mT
        for j in range(depth):
            image = system(Q[:, j : j + 1])
            products += 1
            basis = Q[:, : j + 1]
            h = torch.bmm(image, basis.mT)
            image = torch.baddbmm(image, h, basis, alpha=-1)
            g = torch.bmm(image, basis.mT)
            image = torch.baddbmm(image, g, basis, alpha=-1)
            length = long_norm(image)
            H[:, : j + 1, j] = (h + g).squeeze(1)
            H[:, j + 1, j] = length.squeeze(-1)
            Q[:, j + 1 : j + 2] = image / _safe(length).unsqueeze(-1)
            if j + 1 < min(look, depth):
                continue
            s, rough = _least_squares(H[:, : j + 2, : j + 1], left)
            look, used = j + 1 + max(1, (j + 1) // 4), j + 1
            if agreed((rough <= _ROUNDINGS * eps * floor.squeeze(-1)) | done.squeeze(-1)):
                break
        w = w + torch.bmm(s.mT, Q[:, :used])
        previous = left
        rest = right - system(w)
        products += 1


def _least_squares(H: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """`s` with `‖Hs − left·e₁‖` least, and that."""
    q, r = torch.linalg.qr(H, mode="complete")
    j = H.shape[-1]
    known = left.unsqueeze(-1) * q[:, :1].mT
    diagonal = r[:, :j].diagonal(dim1=-2, dim2=-1)
    # A zero pivot says that the space is invariant and the rest of no use.
    usable = diagonal.abs() > torch.finfo(H.dtype).eps * r.abs().amax((-2, -1)).unsqueeze(-1)
    r = torch.where(usable.unsqueeze(-1), r[:, :j], torch.eye(j, dtype=H.dtype, device=H.device))
    top = torch.where(usable.unsqueeze(-1), known[:, :j], 0)
    return torch.linalg.solve_triangular(r, top, upper=True), known[:, j, 0].abs()


def _clear_of(y: Tensor) -> Product:
    """What remains of rows beside those of `y`."""

    def clear(x: Tensor) -> Tensor:
        return torch.baddbmm(x, torch.bmm(x, y.mT), y, alpha=-1)

    return clear


def _safe(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1, x)


# In roundings: where a solve ends, and what still counts as solved.
_ROUNDINGS, _LOOSE = 4.0, 1e3
# Steps before the first look at the residual.
_FIRST = 6
