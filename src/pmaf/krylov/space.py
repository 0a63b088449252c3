"""The search for a solution in a subspace that grows by products.

A space has orthonormal rows `(B, j, n)`, their images under a linear map, and the map as
seen from inside, a matrix `(B, j, j)`. A problem posed inside it is small; its solution has
a residual outside, and that is where the space grows. From one vector this is the Krylov
space of Lanczos and Arnoldi; when the space is full, the best of it is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pmaf.linalg.products import inner, long_norm, safe
from pmaf.linalg.symmetric import fixed_rows
from pmaf.tangent.residuals import Product, conjugate_residuals


class Inside(NamedTuple):
    """The solution of a small problem."""

    values: Tensor  # (B, w), eigenvalues or a multiplier
    rows: Tensor  # (B, w, j), coefficients of the solution
    kept: Tensor  # (B, q, j), orthonormal coefficients of what a restart keeps
    gap: Tensor  # (B,)
    scale: Tensor  # (B,), what a residual is measured against
    growth: Tensor  # (B, guards), logarithm, see `_behind`
    curvature: Tensor  # (B,), least along the constraint; zero where the solution is not unique


class Task(Protocol):
    """What is looked for."""

    width: int  # rows that are looked for
    guards: int  # of them, how many only have to be seen to lie behind the others

    def inside(self, space: Space) -> Inside: ...

    def residual(self, values: Tensor, rows: Tensor, images: Tensor) -> Tensor:
        """`(B, w, n)`, zero at a solution."""
        ...

    def system(self, product: Product) -> Product | None:
        """`A` such that `value·I − A` is positive definite beside a solution, if any is."""
        ...


class Found(NamedTuple):
    """Where a search ended."""

    values: Tensor  # (B, w)
    rows: Tensor  # (B, w, n)
    residual: Tensor  # (B,), relative
    gap: Tensor  # (B,)
    products: int
    converged: Tensor  # (B,) bool
    scale: Tensor  # (B,)
    curvature: Tensor  # (B,)


class Space:
    """Orthonormal rows, their images, and the map between them as a small matrix."""

    def __init__(self, product: Product, start: Tensor, size: int, symmetric: bool) -> None:
        B, _, n = start.shape
        self.product, self.symmetric = product, symmetric
        self.size = min(size, n)
        self._rows = start.new_empty(B, self.size, n)
        self._images = start.new_empty(B, self.size, n)
        self._matrix = start.new_zeros(B, self.size, self.size)
        self.reach = start.new_zeros(B, 1)  # length of the longest image so far
        self.width = self.products = 0

    @property
    def rows(self) -> Tensor:
        return self._rows[:, : self.width]

    @property
    def images(self) -> Tensor:
        return self._images[:, : self.width]

    @property
    def matrix(self) -> Tensor:
        """`(B, j, j)`: entry (a, b) is row a times the image of row b."""
        return self._matrix[:, : self.width, : self.width]

    @property
    def full(self) -> bool:
        return self.width == self.size

    def grow(self, block: Tensor) -> Tensor:
        """Add rows `(B, p, n)` that are beside the space, as far as there is room.

        Returns what the images of the added have beside it.
        """
        block = self._orthonormal(block[:, : self.size - self.width])
        image = self.product(block)
        self.products += 1
        old, self.width = self.width, self.width + block.shape[1]
        self._rows[:, old : self.width] = block
        self._images[:, old : self.width] = image
        column = inner(self.rows, image)
        self._matrix[:, : self.width, old : self.width] = column
        if self.symmetric:
            self._matrix[:, old : self.width, : self.width] = column.mT
        elif old:
            self._matrix[:, old : self.width, :old] = inner(block, self._images[:, :old])
        self.reach = torch.maximum(self.reach, long_norm(image).amax(-1, keepdim=True))
        return torch.baddbmm(image, column.mT, self.rows, alpha=-1)

    def keep(self, coefficients: Tensor) -> None:
        """Shrink to the span of these combinations, orthonormal rows `(B, q, j)`."""
        q = coefficients.shape[1]
        rows, images = coefficients.bmm(self.rows), coefficients.bmm(self.images)
        matrix = coefficients.bmm(self.matrix).bmm(coefficients.mT)
        self._rows[:, :q], self._images[:, :q] = rows, images
        self._matrix[:, :q, :q] = matrix
        self.width = q

    def refresh(self) -> None:
        """Multiply again: in images that are combined over and over, rounding gathers."""
        basis = torch.linalg.qr(self.rows.mT).Q.mT
        self._rows[:, : self.width] = basis
        self._images[:, : self.width] = self.product(basis)
        self._matrix[:, : self.width, : self.width] = inner(self.rows, self.images)
        self.products += 1

    def beside(self, block: Tensor) -> Tensor:
        """What rows have outside the space, up to rounding."""
        if not self.width:
            return block
        return torch.baddbmm(block, inner(block, self.rows), self.rows, alpha=-1)

    def _orthonormal(self, block: Tensor) -> Tensor:
        """Orthonormal rows for rows beside the space."""
        eps = torch.finfo(block.dtype).eps
        # Of an invariant space nothing is left but rounding: go on somewhere else.
        block = self._replaced(block, long_norm(block) <= _ROUNDINGS * eps * self.reach, 0)
        block = self._unit(self.beside(block))
        if block.shape[-1] > _SMALL:
            return block
        # In a small space what is left may be rounding even then.
        left = self.beside(block)
        return self._unit(self.beside(self._replaced(left, long_norm(left) <= eps**0.5, 1)))

    def _replaced(self, block: Tensor, gone: Tensor, attempt: int) -> Tensor:
        """Other rows in place of those of a mask `(B, p)`."""
        n, p = block.shape[-1], block.shape[1]
        # Pieces of one long row: there is no end of them, and they take no time to make.
        row = fixed_rows(n + _SPARES, block.dtype, block.device)[0]
        at = (self.width + 97 * attempt) % (_SPARES - p + 1)
        return torch.where(gone.unsqueeze(-1), row[at : at + n + p - 1].unfold(0, n, 1), block)

    def _unit(self, block: Tensor) -> Tensor:
        block = block / safe(long_norm(block)).unsqueeze(-1)
        return block if block.shape[1] == 1 else torch.linalg.qr(block.mT).Q.mT


def search(
    product: Product,
    start: Tensor,
    task: Task,
    *,
    size: int,
    tolerance: float,
    limit: int,
    symmetric: bool,
    agreed: Callable[[Tensor], bool],
) -> Found:
    """Grow a space until the residual is small, relative to the scale of the task.

    Args:
        product: of rows `(B, p, n)`.
        start: `(B, p, n)`, no row zero.
        size: of the space; when it is full, the best is kept.
        tolerance: on the residual.
        limit: on the products.
        agreed: whether a mask `(B,)` holds for all.
    """
    space = Space(product, start, size, symmetric)
    ahead = rest = space.grow(start)
    look = max(_FIRST, 2 * task.width) if start.shape[1] == task.width else space.width
    history: list[Tensor] = []
    restarts, refreshed, system = 0, 0, task.system(product)
    while True:
        if space.full or space.width >= look:
            inside = task.inside(space)
            rows, images = inside.rows.bmm(space.rows), inside.rows.bmm(space.images)
            rest = task.residual(inside.values, rows, images)
            lengths = long_norm(rest) / safe(inside.scale).unsqueeze(-1)
            wanted = task.width - task.guards
            residual = lengths[:, :wanted].amax(-1)
            done = residual <= tolerance
            history.append(residual)
            everything = space.width == rows.shape[-1]
            spent = everything or space.products >= limit
            stuck = ~done & _stuck(history, tolerance)
            hopeless = ~torch.isfinite(residual)
            if refreshed:
                # Rounding in the products themselves, then; the residual says how much.
                close = residual <= _CLOSE * tolerance
                done = done | (stuck & close)
                hopeless = hopeless | (stuck & ~close & (refreshed > 1))
            behind = _behind(inside, space, lengths, wanted, tolerance)
            if everything:
                # Nothing is left to be seen, and nothing but rounding of the residual.
                behind, done = torch.ones_like(done), residual <= _CLOSE * tolerance
            done = done & behind
            if spent or agreed(done | hopeless):
                return Found(
                    inside.values[:, :wanted],
                    rows[:, :wanted],
                    residual,
                    inside.gap,
                    space.products,
                    done,
                    inside.scale,
                    inside.curvature,
                )
            look = space.width + max(1, min(space.width // 4, _LONGEST))
            if refreshed < 2 and agreed(done | stuck):
                # Rounding in old images may be all that is left of the residual.
                space.keep(inside.kept)
                space.refresh()
                history.clear()
                refreshed += 1
                look = space.width
                continue
            if space.full:
                space.keep(inside.kept)
                restarts += 1
                if restarts % _REFRESH == 0:
                    space.refresh()
                if restarts >= _CORRECT_FROM and system is not None:
                    step = conjugate_residuals(
                        system,
                        inside.values,
                        rows,
                        rest,
                        scale=inside.scale,
                        limit=_CORRECT_TO,
                        agreed=agreed,
                        tolerance=_CORRECT_BY,
                    )
                    space.products += step.products
                    length = long_norm(step.rows).unsqueeze(-1)
                    # Of a step the direction counts, however short it is.
                    scaled = space.reach.unsqueeze(-1) * step.rows / safe(length)
                    rest = torch.where(length > 0, scaled, rest)
                look = space.width + max(1, (space.size - space.width) // 2)
            # A guard is worth what powers of the matrix make of a start without structure. Its
            # own residual would let go of what has not shown yet.
            if task.guards and not refreshed and restarts < _CORRECT_FROM:
                rest = torch.where(behind[:, None, None], rest, ahead)
            rest = space.beside(rest)
        ahead = rest = space.grow(rest)


def _behind(inside: Inside, space: Space, lengths: Tensor, wanted: int, tolerance: float) -> Tensor:
    """Whether what guards has turned out to lie behind the rows that are wanted, `(B,)`.

    A guard starts without structure. An eigenvalue beyond those wanted, which would be the one
    to find, grows in it by `exp(growth)` a product, relative to what has been seen: after j
    products the chance that it has not shown is at most `1.648·√n·exp(−growth·(j − ½))`. For a
    symmetric matrix Kuczyński and Woźniakowski (1992) prove it.
    """
    needed = math.log(1.648 * space.rows.shape[-1] ** 0.5 / _CHANCE)
    behind = inside.growth * (space.products - 0.5) >= needed
    return (behind | (lengths[:, wanted:] <= tolerance)).all(-1)


def _stuck(history: list[Tensor], tolerance: float) -> Tensor:
    """Where a residual near its tolerance does not fall any more, `(B,)`."""
    now = history[-1]
    stuck = torch.zeros_like(now, dtype=torch.bool)
    if len(history) > 2:
        stuck = (now <= _CLOSE * tolerance) & (now >= 0.5 * history[-3])
    if len(history) >= 2 * _PATIENCE:
        before, lately = torch.stack(history[-2 * _PATIENCE :]).reshape(2, _PATIENCE, -1).amin(1)
        stuck = stuck | ((now <= _NEAR * tolerance) & (lately >= 0.8 * before))
    return stuck


# A remainder this many roundings long is rounding.
_ROUNDINGS = 4.0
# Up to so many rows a space may come to be the whole, and a third projection costs nothing.
_SMALL = 1000
# Directions to go on with where there is none.
_SPARES = 512
# Vectors before the first look, and at most between two.
_FIRST, _LONGEST = 6, 16
# Of a guard that has overlooked something, a bound.
_CHANCE = 1e-3
# Restarts after which images are made anew.
_REFRESH = 10
# Restarts after which the space grows by a Newton step instead of a residual, the products
# that one may take, and how far they have to bring the residual down: a space of a few dozen
# vectors is slow to tell close eigenvalues apart, and conjugate residuals forget nothing.
_CORRECT_FROM, _CORRECT_TO, _CORRECT_BY = 4, 400, 0.01
# Looks without progress, near the tolerance, after which there will be none; and how close to
# it rounding may be all that is left.
_PATIENCE, _NEAR, _CLOSE = 6, 1e3, 10
