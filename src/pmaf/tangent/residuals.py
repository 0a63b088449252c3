"""The linear systems of gradients, solved by products with the matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.linalg.products import dot, inner, long_norm, one_if_zero
from pmaf.linalg.roundings import LOOSE, ROUNDED, power_of_two
from pmaf.tangent.metric import Metric, Product


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
    metric: Metric | None = None,
) -> Solved:
    """Solve `(shift·I − A) z = right` with `Yz = 0` for each row, if this is positive definite.

    With a metric `M`, solve `(shift·M − A) z = right` with `YMz = 0`.

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
        metric: in which rows are orthogonal and lengths are measured; it preconditions, too.
    """
    system, right, back, largest = scaled_system(product, shift, y, right, scale, metric)
    if metric is not None:
        # Errors of solves add up, so they are small, or the residual need not fall far.
        inverse = metric.raised if tolerance else metric.raised_well
    eps = torch.finfo(right.dtype).eps
    right, size = system.cleared(right)
    z, rest = torch.zeros_like(right), right
    near = rest if inverse is None else system.clear(inverse(rest))
    image = system(near)
    direction, ahead = near, image
    slope = dot(near, image)
    products = 1
    mark = size
    look = 1 if right.is_cpu else _FIRST_LOOK
    while True:
        looked = products >= look or products >= limit
        # The residual, and the size that its rounding error is relative to.
        left, floor = system.left(rest, near), size + largest * system.length(z)
        done = left <= torch.maximum(ROUNDED * eps * floor, tolerance * size)
        if metric is not None and looked and (~done & (left <= eps ** (1 / 3) * mark)).any():
            assert inverse is not None
            near = system.clear(inverse(rest))
            image = system(near)
            products += 1
            direction, ahead, slope = near, image, dot(near, image)
            mark = left = system.left(rest, near)
        # Where the matrix is zero along the residual, no step reduces the residual.
        flat = ~(slope > ROUNDED * eps * largest * system.square(rest, near))  # or it is nan
        if products >= limit or (looked and agreed((done | flat).all(-1))):
            break
        if looked and not right.is_cpu:
            look = 2 * products  # rows that are done stay as they are
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
    rest = right - system(z)
    left = system.left(rest, rest if inverse is None else system.clear(inverse(rest)))
    rounding = 1.0 if metric is None else metric.rounding
    judgement = judged(left, size, largest, system.length(z), rounding)
    return Solved(z * back, *judgement, products + 1)


# The number of products before the host looks whether a device is done, and waits for it; from then
# on it looks whenever that number has doubled.
_FIRST_LOOK = 8


class System:
    """`(shift·I − A)/unit` on the complement of `y`."""

    def __init__(self, product: Product, column: Tensor, unit: Tensor, y: Tensor) -> None:
        self.product, self.column, self.unit, self.y = product, column, unit, y

    def __call__(self, x: Tensor) -> Tensor:
        x = self.clear(x)
        return self.clear(self.column * x - self.product(x) / self.unit)

    def clear(self, x: Tensor) -> Tensor:
        return torch.baddbmm(x, inner(x, self.y), self.y, alpha=-1)

    def cleared(self, right: Tensor) -> tuple[Tensor, Tensor]:
        """A right-hand side without its part along `y`, and its length `(B, p)` with it."""
        return self.clear(self.clear(right)), long_norm(right)

    def left(self, rest: Tensor, near: Tensor) -> Tensor:
        """The length of a residual, of which `near` is the preconditioned one."""
        return long_norm(rest)

    def square(self, rest: Tensor, near: Tensor) -> Tensor:
        """The square of the length of `near`."""
        return dot(near, near)

    def length(self, z: Tensor) -> Tensor:
        return long_norm(z)


class MetricSystem(System):
    """`(shift·M − A)/unit` on the complement of `y`, from vectors to functions; see `Metric`."""

    def __init__(
        self, product: Product, column: Tensor, unit: Tensor, y: Tensor, metric: Metric
    ) -> None:
        super().__init__(product, column, unit, y)
        self.metric, self.dual = metric, metric.dual(y)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.clear(x)
        return self._lowered(self.column * self.metric.dual(x) - self.product(x) / self.unit)

    def clear(self, x: Tensor) -> Tensor:
        return torch.baddbmm(x, inner(x, self.dual), self.y, alpha=-1)

    def _lowered(self, right: Tensor) -> Tensor:
        """`clear` for functions."""
        return torch.baddbmm(right, inner(right, self.y), self.dual, alpha=-1)

    def cleared(self, right: Tensor) -> tuple[Tensor, Tensor]:
        along = long_norm(inner(right, self.y))
        right = self._lowered(self._lowered(right))
        return right, torch.hypot(along, self.left(right, self.metric.raised(right)))

    def left(self, rest: Tensor, near: Tensor) -> Tensor:
        # Rounding of a residual near zero may have any sign.
        return self.square(rest, near).clamp_min(0).sqrt()

    def square(self, rest: Tensor, near: Tensor) -> Tensor:
        return dot(rest, near)

    def length(self, z: Tensor) -> Tensor:
        return self.metric.length(z, self.metric.dual(z))


def scaled_system(
    product: Product,
    shift: Tensor,
    y: Tensor,
    right: Tensor,
    scale: Tensor,
    metric: Metric | None = None,
) -> tuple[System, Tensor, Tensor, Tensor]:
    """The system in units in which no square over- or underflows.

    Returns the system, its right-hand side, the unit of its solution, and the size of the matrix.
    """
    unit = power_of_two(scale)[:, None, None]
    short = power_of_two(right.abs().amax(-1, keepdim=True))
    column = shift.unsqueeze(-1) / unit
    largest = column.squeeze(-1).abs() + (scale / unit[:, 0, 0]).unsqueeze(-1)
    system = System(product, column, unit, y)
    if metric is not None:
        system = MetricSystem(product, column, unit, y, metric)
    return system, right / short, short / unit, largest


def judged(
    left: Tensor, size: Tensor, largest: Tensor, length: Tensor, rounding: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """Residuals relative to the right-hand sides, and whether the solutions are accurate.

    The rounding error of the matrix is magnified by the length of the solution; its sum with the
    residual has to be below `WORTH`. `rounding` is the error of a product, in units of eps, one
    number or `(B,)`.
    """
    eps = rounding * torch.finfo(left.dtype).eps
    eps = eps.unsqueeze(-1) if isinstance(eps, Tensor) else eps
    magnified = largest * length
    solved = left <= LOOSE * eps * (size + magnified)
    known = left + eps * magnified <= WORTH * size
    return (left / one_if_zero(size)).amax(-1), (solved & known).all(-1)


# The largest relative error of a solution that is used.
WORTH = 0.01
