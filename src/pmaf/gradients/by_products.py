"""Gradients, by products with the matrix, of solutions that were found by products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pmaf.gradients.base import Images
from pmaf.gradients.eigenvectors import differences, turn_inside
from pmaf.linalg.products import long_norm
from pmaf.operators.rows import Rows
from pmaf.runtime import ranks
from pmaf.solvers import Krylov, Solver
from pmaf.tangent.general import gmres
from pmaf.tangent.metric import Metric
from pmaf.tangent.residuals import Product, Solved, conjugate_residuals

_KRYLOV = Krylov()


class Incoming(NamedTuple):
    """A solution that was found by products, and the gradients that came in for it."""

    seen: Rows  # products with the operator, and results of the forward pass
    y: Tensor
    multiplier: Tensor
    v: Tensor | None  # the gradient of the solution
    d_multiplier: Tensor | None
    options: Krylov  # how many products may be taken
    report: Any  # a `Backward` to fill
    needs: Sequence[bool]  # which tensors need a gradient


def options_of(solver: Solver | None) -> Krylov:
    """How many products the backward pass of a solve by this solver may take."""
    return solver if isinstance(solver, Krylov) else _KRYLOV


def eigenvector_gradients(problem: Any, given: Incoming) -> Sequence[Tensor | None]:
    """Gradients of the tensors of the operator, for eigenvectors `(*, k, n)`."""
    given, values = _as_rows(problem, given)
    seen, y = given.seen, given.y
    if problem.symmetric:
        return _symmetric_pull(seen, _tangent(given, values), y, given.needs)
    return seen.pull_back(seen.lift(_bordered(given, values)), seen.lift(y), given.needs)


def pair_gradients(
    problem: Any, given: Incoming, own: Rows, metric: Metric
) -> Sequence[Tensor | None]:
    """Gradients of the tensors of `A` and of `M`, for eigenvectors `(*, k, n)` of a pair.

    Args:
        own: products with `M`.
        metric: that of `M`.
    """
    given, values = _as_rows(problem, given)
    y, v, count = given.y, given.v, len(given.seen.A.tensors)
    z = _tangent(given, values, metric)
    dA = _symmetric_pull(given.seen, z, y, given.needs[:count])
    left = values.unsqueeze(-1) * z
    if v is not None:
        # The length of a vector, and the angle between two, change with M.
        inside = torch.bmm(v, y.mT)
        left = left + torch.bmm(0.25 * (inside + inside.mT), y)
    return [*dA, *_symmetric_pull(own, -left, y, given.needs[count:])]


def _as_rows(problem: Any, given: Incoming) -> tuple[Incoming, Tensor]:
    """The same with rows `(B, k, n)`, and the eigenvalues, all in the units of the search."""
    seen, values = given.seen, given.seen.values
    assert values is not None
    y = given.y.reshape(seen.entries, problem.width, -1)
    v = None if given.v is None else given.v.reshape(y.shape)
    d_values = given.d_multiplier
    d_values = None if d_values is None else seen.back(d_values.reshape(values.shape))
    return given._replace(y=y, v=v, d_multiplier=d_values), values


def _symmetric_pull(
    seen: Rows, left: Tensor, right: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of `Σ leftᵀAright` for the symmetric part of `A`; they are symmetric, too."""
    if not seen.A.symmetric:
        left, right = 0.5 * torch.cat([left, right], -2), torch.cat([right, left], -2)
    return seen.pull_back(seen.lift(left), seen.lift(right), needs)


def _tangent(given: Incoming, values: Tensor, metric: Metric | None = None) -> Tensor:
    """`z` such that the gradient is that of `Σ zᵀAy`, for a symmetric matrix, or a pair."""
    seen, y, v, d_values = given.seen, given.y, given.v, given.d_multiplier
    along = None if d_values is None else d_values.unsqueeze(-1) * y
    if v is None:
        assert along is not None
        return along
    solved = conjugate_residuals(
        seen.of_symmetric_part,
        values,
        y,
        v,
        scale=seen.scale,
        limit=given.options.max_products,
        agreed=seen.agreed,
        metric=metric,
    )
    given.report.fill(solved.residual, solved.products, solved.converged)
    z = solved.rows
    if y.shape[1] > 1:
        # Rounding is relative to the largest modulus, which need not be that of a wanted value.
        difference, apart = differences(values, seen.scale[:, None, None])
        # Exchanging the vectors of a pair changes the signs of numerator and denominator.
        # Rounding is that of unit vectors, and those of a pair have any length.
        unit = 1.0 if metric is None else long_norm(y).amax(-1)[:, None, None]
        half = turn_inside(unit * v, y / unit) / torch.where(apart, difference, 1)
        z = z + torch.bmm(torch.where(apart, half, 0), y)
    return z if along is None else z + along


def _bordered(given: Incoming, values: Tensor) -> Tensor:
    """The same for a general matrix: `(λI − Aᵀ)z = v − y(yᵀv)` with `yᵀz` given."""
    seen, y, v, d_values = given.seen, given.y, given.v, given.d_multiplier
    along = torch.zeros_like(y) if d_values is None else d_values.unsqueeze(-1) * y
    right = torch.zeros_like(y) if v is None else v
    if d_values is not None:
        # The image of `along` itself may leave the range in the units of the search.
        right = right + d_values.unsqueeze(-1) * seen.transposed(y)
    solved = gmres(
        seen.transposed,
        values,
        y,
        right,
        scale=seen.scale,
        depth=given.options.size(y.shape[-1]),
        limit=given.options.max_products,
        agreed=seen.agreed,
    )
    given.report.fill(solved.residual, solved.products, solved.converged)
    return along + solved.rows


def least_squares_gradients(problem: Any, given: Incoming) -> Sequence[Tensor | None]:
    """Gradients of the tensors of the operator, and of `b`."""
    seen, needs, b = given.seen, given.needs, problem.b
    y, z = (seen.lift(x) for x in _minimum_tangent(seen.gram, given))
    images = _images(seen, y, z, b, None)
    left, right = (torch.cat(x, -2) for x in images.of_matrix(y, z))
    db = ranks.alike(images.image.reshape(b.shape), b) if needs[-1] else None
    return [*seen.pull_back(left, right, needs[:-1]), db]


def declared_gradients(problem: Any, given: Incoming) -> Sequence[Tensor | None]:
    """Gradients of all tensors, for a problem that declares its force and its curvature."""
    seen, needs, shape = given.seen, given.needs, given.y.shape
    y, z = _minimum_tangent(seen.curvature_of(problem), given)
    leaves = [x.detach().requires_grad_(need) for x, need in zip(problem.flat, needs)]
    u, z = (ranks.replicate(x.reshape(shape), seen.mesh) for x in (y, z))
    with torch.enable_grad():
        posed = problem.with_flat(leaves)
        force = posed.force(u, *posed.tensors)
        wanted = [x for x, need in zip(leaves, needs) if need]
        found = iter(torch.autograd.grad(force, wanted, z, allow_unused=True))
    parts = [next(found) if need else None for need in needs]
    return [None if dx is None else ranks.alike(dx, x) for dx, x in zip(parts, problem.flat)]


def weighted_gradients(
    problem: Any, given: Incoming, acts: Tensor | None
) -> Sequence[Tensor | None]:
    """Gradients of the tensors of the operator, and of `sides`, for weighted least squares.

    Args:
        acts: `(*,)`, where the constraint acts; None if it acts everywhere.
    """
    seen, curvature = given.seen, given.seen.curvature_of(problem)
    own = Rows(problem.operator, problem.batch_shape)
    border = y = given.y.reshape(seen.entries, 1, -1)
    null = None
    if acts is not None:
        mask = acts.reshape(-1, 1, 1)
        border = torch.where(mask, y, 0)
        if given.d_multiplier is not None:
            given = given._replace(d_multiplier=torch.where(acts, given.d_multiplier, 0))
        if own.A.shape[-2] < own.A.shape[-1] and given.v is not None:
            # A wide matrix has a null space, in which the solution of least norm has no part. What
            # the system leaves of v is the part of v in the null space.
            v = given.v.reshape(y.shape)
            rest = v - curvature(_solved(curvature, given, border, v).rows)
            null = torch.where(mask, 0, rest)
            given = given._replace(v=(v - null).reshape(given.v.shape))
    y, z = (own.lift(x) for x in _minimum_tangent(curvature, given, border))
    images = _images(own, y, z, *problem.given_sides(problem.sides))
    lefts, rights = images.of_matrix(y, z)
    d_sides = [images.of_b(), images.of_weights()]
    if null is not None:
        # This part moves with the null space.
        x = _solved(curvature, given, border, given.y.reshape(border.shape) - border).rows
        x, null = own.lift(x), own.lift(null)
        across, inner = (own.A.matvec(rows) for rows in (null, x))
        lefts += [images.weighted(across), images.weighted(inner)]
        rights += [x, null]
        d_sides[1] = d_sides[1] + across * inner
    left, right = torch.cat(lefts, -2), torch.cat(rights, -2)
    found = None
    if given.needs[-1]:
        count = problem.sides.shape[-2]
        rows = [x.reshape(problem.sides[..., 0, :].shape) for x in d_sides[:count]]
        found = ranks.alike(torch.stack(rows, -2), problem.sides)
    return [*own.pull_back(left, right, given.needs[:-1]), found]


def _images(own: Rows, y: Tensor, z: Tensor, b: Tensor, weights: Tensor | None) -> Images:
    image, along = own.A.matvec(torch.cat([y, z], -2)).chunk(2, -2)
    weights = None if weights is None else weights.reshape(image.shape)
    return Images(image - b.reshape(image.shape), along, weights)


def _solved(curvature: Product, given: Incoming, border: Tensor, right: Tensor) -> Solved:
    """The solution of the bordered system for rows `(B, 1, n)`; no border where it is zero."""
    seen = given.seen
    return conjugate_residuals(
        lambda x: -curvature(x),
        given.multiplier.reshape(-1, 1),
        border,
        right,
        scale=seen.scale,
        limit=given.options.max_products,
        agreed=seen.agreed,
    )


def _minimum_tangent(
    curvature: Product, given: Incoming, border: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`y` and `z` as rows, so that the gradient is that of `zᵀ force(y)`.

    `MinimumConditions.gradients` explains the part of the multiplier's gradient. The border of the
    linear system is `y`, unless another one is given.
    """
    seen, d_multiplier = given.seen, given.d_multiplier
    y = given.y.reshape(seen.entries, 1, -1)
    v = torch.zeros_like(y) if given.v is None else given.v.reshape(y.shape)
    along = None if d_multiplier is None else d_multiplier.reshape(-1, 1, 1) * y
    if along is not None:
        v = v - curvature(along)
    kept = seen.by_entries
    right = v if kept is None else torch.where(kept.mask[:, None, None], 0, v)
    solved = _solved(curvature, given, y if border is None else border, right)
    z, residual, converged = solved.rows, solved.residual, solved.converged & seen.unique
    if kept is not None:
        exact = (x.to(y.dtype) if x.is_floating_point() else x for x in kept.tangent(v))
        z, residual, converged = (
            torch.where(kept.mask.reshape(-1, *(1,) * (x.dim() - 1)), x, other)
            for x, other in zip(exact, (z, residual, converged))
        )
    given.report.fill(residual, solved.products, converged)
    return y, z if along is None else z + along
