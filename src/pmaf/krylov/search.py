"""The search for a solution in a subspace that grows by residuals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pmaf.krylov.space import MetricSpace, Space
from pmaf.linalg.products import one_if_zero
from pmaf.tangent.metric import Metric
from pmaf.tangent.residuals import Product, conjugate_residuals


class Inside(NamedTuple):
    """The solution of the problem restricted to a space."""

    values: Tensor  # (B, w), eigenvalues or a multiplier
    rows: Tensor  # (B, w, j), coefficients of the solution
    kept: Tensor  # (B, q, j), orthonormal coefficients of what a restart keeps
    gap: Tensor  # (B,)
    scale: Tensor  # (B,), which residuals are relative to
    growth: Tensor  # (B, guards), logarithm, see `_behind`
    curvature: Tensor  # (B,), least along the constraint; zero where the solution is not unique


class Task(Protocol):
    """The problem that a search solves."""

    wanted: int  # number of requested rows
    guards: int  # number of rows after them, whose values must prove to be smaller
    width: int  # rows of the block that the space grows by, including these

    def inside(self, space: Space) -> Inside: ...

    def residual(self, values: Tensor, rows: Tensor, images: Tensor) -> Tensor:
        """`(B, w, n)`, zero at a solution; with a metric `M`, for rows times `M`."""
        ...

    def system(self, product: Product) -> Product | None:
        """`A` such that `value·I − A` is positive definite orthogonal to a solution, if any is."""
        ...


class Found(NamedTuple):
    """The result of a search."""

    values: Tensor  # (B, w)
    rows: Tensor  # (B, w, n)
    residual: Tensor  # (B,), relative
    gap: Tensor  # (B,)
    products: int
    converged: Tensor  # (B,) bool
    scale: Tensor  # (B,)
    curvature: Tensor  # (B,)


def search(
    product: Product,
    start: Tensor,
    task: Task,
    *,
    size: int,
    tolerance: Tensor | float,
    limit: int,
    symmetric: bool,
    answers: Callable[[Tensor], list[bool]],
    metric: Metric | None = None,
    floor: Callable[[Tensor], Tensor] | None = None,
) -> Found:
    """Grow a space until the residual is small, relative to the scale of the task.

    Args:
        product: of rows `(B, p, n)`.
        start: `(B, p, n)`, no row zero.
        size: of the space; a full space restarts from its best vectors.
        tolerance: on the residual, one number or `(B,)`.
        limit: on the products.
        answers: whether each mask of some, `(q, B)`, is true for all entries, as all ranks see it.
        metric: `M`, for `M⁻¹` times a symmetric product, and rows that are orthonormal in it.
        floor: residuals `(B,)` that are rounding errors, for rows near a solution, if they may be
            larger than the tolerance.
    """
    space = Space(product, start, size, symmetric)
    if metric is not None:
        space = MetricSpace(product, start, size, metric)
    ahead = rest = space.grow(start)
    first = _FIRST if start.is_cpu else _FIRST_ON_DEVICE
    look = max(first, 2 * task.width) if start.shape[1] == task.width else space.width
    history: list[Tensor] = []
    allowed = least = torch.zeros_like(start[:, 0, 0]) + tolerance
    restarts, refreshed, system = 0, 0, task.system(product)
    while True:
        if space.full or space.width >= look:
            inside = task.inside(space)
            rows, duals, images = space.combined(inside.rows)
            force = task.residual(inside.values, duals, images)
            rest = space.raised(force)
            lengths = space.length(rest, force) / one_if_zero(inside.scale).unsqueeze(-1)
            wanted = task.wanted
            residual = lengths[:, :wanted].amax(-1)
            done = residual <= allowed
            history.append(residual)
            everything = space.width == rows.shape[-1]
            spent = everything or space.products >= limit
            stuck = ~done & _stuck(history, allowed)
            hopeless = ~torch.isfinite(residual)
            if refreshed:
                # After a refresh, a residual that is stuck is the rounding error of the products.
                close = residual <= _CLOSE * allowed
                done = done | (stuck & close)
                hopeless = hopeless | (stuck & ~close & (refreshed > 1))
            guards = lengths[:, wanted : wanted + task.guards]
            behind = _behind(inside, space, guards <= least.unsqueeze(-1))
            if everything:
                # In the whole space no eigenvalue is missing, and the residual is rounding error.
                behind, done = torch.ones_like(done), residual <= _CLOSE * allowed
            done = done & behind
            over, still = (True, True)
            if not spent:
                over, still = answers(torch.stack([done | hopeless, done | stuck]))
            if over:
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
            look = 2 * space.width
            if start.is_cpu:
                look = space.width + max(1, min(space.width // 4, _LONGEST))
            if refreshed < 2 and still:
                # The residual may be rounding error of old images: compute them again.
                if floor is not None:
                    allowed = allowed.maximum(floor(rows[:, :wanted]))
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
                    ours, others = rest.tensor_split((wanted + task.guards,), 1)
                    step = conjugate_residuals(
                        system,
                        inside.values[:, : ours.shape[1]],
                        rows,
                        force[:, : ours.shape[1]],
                        scale=inside.scale,
                        limit=_CORRECT_TO,
                        agreed=lambda mask: answers(mask.unsqueeze(0))[0],
                        tolerance=_CORRECT_BY,
                        metric=metric,
                    )
                    space.products += step.products
                    length = space.length(step.rows).unsqueeze(-1)
                    # Only the direction of the step matters, however short the step is.
                    scaled = space.reach.unsqueeze(-1) * step.rows / one_if_zero(length)
                    rest = torch.cat([torch.where(length > 0, scaled, ours), others], 1)
                look = space.width + max(1, (space.size - space.width) // 2)
            # The bound in `_behind` is for powers of the matrix times a pseudorandom start. So the
            # space grows by images, not by residuals, until the guards are behind.
            if task.guards and not refreshed and restarts < _CORRECT_FROM:
                # The block before a restart has fewer rows, if there was less room.
                first, others = rest.tensor_split((ahead.shape[1],), 1)
                first = torch.where(behind[:, None, None], first, ahead)
                rest = torch.cat([first, others], 1)
            rest = space.beside(rest)
        ahead = rest = space.grow(rest)


def _behind(inside: Inside, space: Space, converged: Tensor) -> Tensor:
    """Whether the guards show that no larger eigenvalue than the wanted ones is missing, `(B,)`.

    A guard starts from a pseudorandom vector. A missing eigenvalue, which is larger than the wanted
    ones, grows in it by `exp(growth)` a product, relative to those seen: after j products the
    probability that it is still missing is at most `1.648·√n·exp(−growth·(j − ½))`. Kuczyński and
    Woźniakowski (1992) prove this for symmetric matrices.
    """
    needed = math.log(1.648 * space.rows.shape[-1] ** 0.5 / _CHANCE)
    behind = inside.growth * (space.products - 0.5) >= needed
    return (behind | converged).all(-1)


def _stuck(history: list[Tensor], tolerance: Tensor) -> Tensor:
    """Where a residual near its tolerance has stopped falling, `(B,)`."""
    now = history[-1]
    stuck = torch.zeros_like(now, dtype=torch.bool)
    if len(history) > 2:
        stuck = (now <= _CLOSE * tolerance) & (now >= 0.5 * history[-3])
    if len(history) >= 2 * _PATIENCE:
        before, lately = torch.stack(history[-2 * _PATIENCE :]).reshape(2, _PATIENCE, -1).amin(1)
        stuck = stuck | ((now <= _NEAR * tolerance) & (lately >= 0.8 * before))
    return stuck


# Vectors before the first check, and the most between two checks.
_FIRST, _LONGEST = 6, 16
# The same on a device, which a check makes the host wait for, twice; from then on the space doubles
# between two checks.
_FIRST_ON_DEVICE = 12
# A bound on the probability that a guard has missed a larger eigenvalue; see `_behind`.
_CHANCE = 1e-3
# Restarts after which all images are computed again.
_REFRESH = 10
# Restarts after which the space grows by a Newton step instead of a residual, the products that a
# step may take, and the factor by which it reduces the residual. A space of a few dozen vectors is
# slow to separate close eigenvalues, and conjugate residuals need no restarts.
_CORRECT_FROM, _CORRECT_TO, _CORRECT_BY = 4, 400, 0.01
# Checks without progress after which a residual below _NEAR·tolerance counts as stuck, and the
# multiple _CLOSE of the tolerance up to which a stuck residual may be rounding error.
_PATIENCE, _NEAR, _CLOSE = 6, 1e3, 10
