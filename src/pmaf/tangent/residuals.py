"""The linear systems of gradients, solved by products with the matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.linalg.products import dot, inner, long_norm, one_if_zero
from pmaf.linalg.roundings import LOOSE, ROUNDED, power_of_two

Product = Callable[[Tensor], Tensor]


class Solved(NamedTuple):
    """Solutions of linear systems and their residuals."""

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
    inverse: Product | None = None,
) -> Solved:
    """Solve `(shift·I − A) z = right` with `Yz = 0` for each row, if this is positive definite.

    Where it is only semidefinite, because an eigenvalue repeats, the residual still falls to its
    minimum and `z` stays finite, which conjugate gradients do not guarantee.

    Args:
        product: `A` times rows `(B, p, n)`.
        shift: `(B, p)`, one for each row.
        y: `(B, q, n)`, orthonormal rows that `z` is orthogonal to.
        right: `(B, p, n)`.
        scale: `(B,)`, the size of the matrix, which rounding errors are relative to.
        tolerance: on the residual relative to `right`, if it need not be down to rounding.
        inverse: a symmetric positive definite preconditioner, about the inverse of the matrix.
    """
    system, right, back, largest = scaled_system(product, shift, y, right, scale)
    eps = torch.finfo(right.dtype).eps
    size = long_norm(right)
    right = system.clear(system.clear(right))
    z, rest = torch.zeros_like(right), right
    near = rest if inverse is None else system.clear(inverse(rest))
    image = system(near)
    direction, ahead = near, image
    slope = dot(near, image)
    products = 1
    while True:
        # The residual, and the size that its rounding error is relative to.
        left, floor = long_norm(rest), size + largest * long_norm(z)
        done = left <= torch.maximum(ROUNDED * eps * floor, tolerance * size)
        # Where the matrix is zero along the residual, no step reduces the residual.
        flat = ~(slope > ROUNDED * eps * largest * dot(near, near))  # or it is nan
        if products >= limit or agreed((done | flat).all(-1)):
            break
        turned = ahead if inverse is None else system.clear(inverse(ahead))
        square = dot(ahead, turned)
        moving = ~(done | flat) & (square > 0)
        step = torch.where(moving, slope / one_if_zero(square), 0).unsqueeze(-1)
        z = z + step * direction
        rest = rest - step * ahead
        near = rest if inverse is None else near - step * turned
        image = system(near)
        products += 1
        following = dot(near, image)
        ratio = torch.where(moving, following / one_if_zero(slope), 0).unsqueeze(-1)
        direction, ahead = near + ratio * direction, image + ratio * ahead
        slope = following
    z = system.clear(z)
    left = long_norm(right - system(z))
    return Solved(z * back, *judged(left, size, largest, z), products + 1)


class System:
    """`(shift·I − A)/unit` on the complement of `y`."""

    def __init__(self, product: Product, column: Tensor, unit: Tensor, y: Tensor) -> None:
        self.product, self.column, self.unit, self.y = product, column, unit, y

    def __call__(self, x: Tensor) -> Tensor:
        x = self.clear(x)
        return self.clear(self.column * x - self.product(x) / self.unit)

    def clear(self, x: Tensor) -> Tensor:
        return torch.baddbmm(x, inner(x, self.y), self.y, alpha=-1)


def scaled_system(
    product: Product, shift: Tensor, y: Tensor, right: Tensor, scale: Tensor
) -> tuple[System, Tensor, Tensor, Tensor]:
    """The system in units in which no square over- or underflows.

    Returns the system, its right-hand side, the unit of its solution, and the size of the matrix.
    """
    unit = power_of_two(scale)[:, None, None]
    short = power_of_two(right.abs().amax(-1, keepdim=True))
    column = shift.unsqueeze(-1) / unit
    largest = column.squeeze(-1).abs() + (scale / unit[:, 0, 0]).unsqueeze(-1)
    return System(product, column, unit, y), right / short, short / unit, largest


def judged(left: Tensor, size: Tensor, largest: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Residuals relative to the right-hand sides, and whether the solutions are accurate.

    The rounding error of the matrix is magnified by the length of the solution; its sum with the
    residual has to be below `WORTH`.
    """
    eps = torch.finfo(z.dtype).eps
    magnified = largest * long_norm(z)
    solved = left <= LOOSE * eps * (size + magnified)
    known = left + eps * magnified <= WORTH * size
    return (left / one_if_zero(size)).amax(-1), (solved & known).all(-1)


# The largest relative error of a solution that is used.
WORTH = 0.01
