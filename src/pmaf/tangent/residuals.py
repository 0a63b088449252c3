"""The linear systems of gradients, from products alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.linalg.products import dot, inner, long_norm, power_of_two, safe

Product = Callable[[Tensor], Tensor]


class Solved(NamedTuple):
    """Solutions of linear systems, and how well they solve them."""

    rows: Tensor  # (B, p, n)
    residual: Tensor  # (B,), relative to the right-hand sides
    converged: Tensor  # (B,) bool
    products: int


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
    system, right, back, largest = _scaled(product, shift, y, right, scale)
    eps = torch.finfo(right.dtype).eps
    size = long_norm(right)
    right = system.clear(system.clear(right))
    z, rest = torch.zeros_like(right), right
    image = system(rest)
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
        step = torch.where(moving, slope / safe(square), 0).unsqueeze(-1)
        z = z + step * direction
        rest = rest - step * ahead
        image = system(rest)
        products += 1
        following = dot(rest, image)
        ratio = torch.where(moving, following / safe(slope), 0).unsqueeze(-1)
        direction, ahead = rest + ratio * direction, image + ratio * ahead
        slope = following
    z = system.clear(z)
    left = long_norm(right - system(z))
    return Solved(z * back, *judged(left, size, largest, z), products + 1)


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
    system, right, back, largest = _scaled(product, shift, y, right, scale)
    B, _, n = right.shape
    depth = min(depth, n)
    eps = torch.finfo(right.dtype).eps
    size = long_norm(right)
    right = system.clear(system.clear(right))
    w, rest = torch.zeros_like(right), right
    products = 0
    Q = right.new_empty(B, depth + 1, n)
    previous = size
    while True:
        left = long_norm(rest)
        floor = size + largest * long_norm(w)
        done = left <= _ROUNDINGS * eps * floor
        stuck = (left >= 0.5 * previous) & (left <= _LOOSE * eps * floor) & (products > 0)
        if products >= limit or agreed((done | stuck).all(-1)):
            return Solved(system.clear(w) * back, *judged(left, size, largest, w), products)
        H = right.new_zeros(B, depth + 1, depth)
        Q[:, :1] = rest / safe(left).unsqueeze(-1)
        look, used, s = _FIRST, depth, H.mT
        for j in range(depth):
            image = system(Q[:, j : j + 1])
            products += 1
            basis = Q[:, : j + 1]
            h = inner(image, basis)
            image = torch.baddbmm(image, h, basis, alpha=-1)
            g = inner(image, basis)
            image = torch.baddbmm(image, g, basis, alpha=-1)
            length = long_norm(image)
            H[:, : j + 1, j] = (h + g).squeeze(1)
            # Of an invariant space nothing is left but rounding, which is no direction.
            length = torch.where(length <= _ROUNDINGS * eps * largest, 0, length)
            H[:, j + 1, j] = length.squeeze(-1)
            unit = image / safe(length).unsqueeze(-1)
            Q[:, j + 1 : j + 2] = torch.where((length > 0).unsqueeze(-1), unit, 0)
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


class _System:
    """`(shift·I − A)/unit` on the complement of `y`."""

    def __init__(self, product: Product, column: Tensor, unit: Tensor, y: Tensor) -> None:
        self.product, self.column, self.unit, self.y = product, column, unit, y

    def __call__(self, x: Tensor) -> Tensor:
        x = self.clear(x)
        return self.clear(self.column * x - self.product(x) / self.unit)

    def clear(self, x: Tensor) -> Tensor:
        return torch.baddbmm(x, inner(x, self.y), self.y, alpha=-1)


def _scaled(
    product: Product, shift: Tensor, y: Tensor, right: Tensor, scale: Tensor
) -> tuple[_System, Tensor, Tensor, Tensor]:
    """The system in units in which nothing that is squared leaves the range of the dtype.

    Returns it, its right-hand side, what brings a solution back, and the size of the matrix.
    """
    unit = power_of_two(scale)[:, None, None]
    short = power_of_two(right.abs().amax(-1, keepdim=True))
    column = shift.unsqueeze(-1) / unit
    largest = column.squeeze(-1).abs() + (scale / unit[:, 0, 0]).unsqueeze(-1)
    return _System(product, column, unit, y), right / short, short / unit, largest


def judged(left: Tensor, size: Tensor, largest: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Residuals relative to the right-hand sides, and whether the solutions are good for use.

    Rounding in the matrix is magnified by the length of the solution; what is left of its
    digits has to be worth something.
    """
    eps = torch.finfo(z.dtype).eps
    magnified = largest * long_norm(z)
    solved = left <= _LOOSE * eps * (size + magnified)
    known = left + eps * magnified <= WORTH * size
    return (left / safe(size)).amax(-1), (solved & known).all(-1)


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


# In roundings: where a solve ends, and what still counts as solved.
_ROUNDINGS, _LOOSE = 4.0, 1e3
# A relative error above this is no solution.
WORTH = 0.01
# Steps before the first look at the residual.
_FIRST = 6
