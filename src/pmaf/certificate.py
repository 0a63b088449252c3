"""Certificates of solutions, by decomposition or by products.

Certificates by products come from searches with a start that differs from the solver's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pmaf.krylov.tasks import Dominant, Largest
from pmaf.linalg import sphere
from pmaf.linalg.decompositions import eigenvalues, eigh
from pmaf.linalg.products import dot, frobenius, long_norm, norm, one_if_zero, symmetric_part
from pmaf.linalg.roundings import widened, working_dtype
from pmaf.linalg.symmetric_part import fixed_rows
from pmaf.operators.rows import Rows, rows_of
from pmaf.runtime import ranks
from pmaf.solution import Certificate
from pmaf.solvers.krylov import Krylov, search_eigenvectors
from pmaf.solvers.krylov_minimum import posed
from pmaf.tangent.metric import EUCLIDEAN, Metric


def certify_eigenvectors_by_products(
    problem: Any, value: Tensor, metric: Metric = EUCLIDEAN
) -> Certificate:
    """A certificate by products and by a second search, orthogonal to the given vectors.

    `optimality` is the smallest given eigenvalue minus the largest found there, relative to the
    matrix, or zero if that is positive. An eigenvalue that the second search does not find is
    assumed not to exist. With a metric `M` it is for the pair `Ay = λMy`.
    """
    A = _spread(problem).A
    rows = Rows(A if problem.largest else -A, problem.batch_shape)
    rows.require_transposes(0.0)
    y = ranks.whole(value.detach()).to(A.dtype)
    y = (y.unsqueeze(-1) if problem.k is None else y).mT.reshape(-1, problem.count, problem.n)
    exact = rows.of_symmetric_part if problem.symmetric else rows
    start = fixed_rows[problem.n, A.dtype, A.device][1:].flip(-1).expand(len(y), 1, -1)
    # All three measures are relative; in these units nothing over- or underflows.
    unit = rows.unit(exact(start))[:, None, None]

    def product(x: Tensor) -> Tensor:
        return exact(x) / unit

    image, dual = product(y), metric.dual(y)
    values = dot(y, image) / one_if_zero(dot(y, dual))
    basis = metric.unit(y)
    border = metric.dual(basis)

    def beside(x: Tensor) -> Tensor:
        return torch.baddbmm(x, torch.bmm(x, border.mT), basis, alpha=-1)

    def beside_images(x: Tensor) -> Tensor:
        return torch.baddbmm(x, torch.bmm(x, basis.mT), border, alpha=-1)

    # On the span of the vectors given, the map below acts as their smallest eigenvalue, so that
    # a larger eigenvalue of the map lies outside of the span.
    lowest = values.amin(-1)[:, None, None]

    def elsewhere(x: Tensor) -> Tensor:
        rest = beside(x)
        return beside_images(product(rest)) + lowest * metric.dual(x - rest)

    scale = values.abs().amax(-1)
    surplus = torch.zeros_like(scale)
    if problem.count < problem.n:
        solver = Krylov(tolerance=torch.finfo(A.dtype).eps ** 0.5)
        # Only the skipped eigenvalues may be larger.
        skip = problem.skip
        start = torch.cat([start.roll(i, -1) for i in range(1 + skip)], 1)
        task = Largest(1 + skip) if problem.symmetric else Dominant()
        space = None if metric is EUCLIDEAN else metric
        other = search_eigenvectors(elsewhere, start, task, solver, rows, space)
        scale = torch.maximum(scale, other.scale)
        # A pair of complex eigenvalues does not converge, but its modulus is known.
        best = other.values[:, skip] if problem.symmetric else other.scale
        known = lowest[:, 0, 0] if problem.symmetric else lowest[:, 0, 0].abs()
        surplus = (known - best).clamp_max(0)
    scale = one_if_zero(scale)
    eye = torch.eye(problem.count, dtype=y.dtype, device=y.device)
    rest = image - values.unsqueeze(-1) * dual
    found = Certificate(
        feasibility=(y @ dual.mT - eye).abs().amax((-2, -1)),
        stationarity=metric.length(metric.raised(rest), rest).amax(-1) / scale,
        optimality=surplus / scale,
    )
    return ranks.replace_tensors(found, lambda x: x.reshape(problem.batch_shape))


def certify_minimum_by_products(problem: Any, value: Tensor) -> Certificate:
    """A certificate by products; two searches find the ends of the spectrum of the curvature."""
    batch, n = problem.batch_shape, problem.n
    problem, y = _spread(problem), ranks.whole(value.detach())
    seen = rows_of(problem)
    seen.require_transposes(0.0)
    product, g = posed(problem, seen)
    y = y.reshape(seen.entries, 1, n)
    unit = seen.unit(torch.cat([product(y), g], -2))[:, None, None]
    g = g / unit

    def curvature(x: Tensor) -> Tensor:
        return product(x) / unit

    force = g - curvature(y)
    length = long_norm(y)
    multiplier = (dot(y, force) / length.square()).squeeze(-1)
    along = long_norm(sphere.tangent(sphere.project(y), force)).squeeze(-1)
    random = fixed_rows[n, y.dtype, y.device][1:].flip(-1).expand_as(y)
    solver = Krylov(tolerance=torch.finfo(y.dtype).eps ** 0.75)

    def extreme(sign: float) -> Tensor:
        found = search_eigenvectors(lambda x: sign * curvature(x), random, Largest(1), solver, seen)
        return sign * found.values.squeeze(-1)

    high, low = extreme(1.0), extreme(-1.0)
    top = torch.maximum(high.abs(), low.abs())
    top = torch.where(top > 0, top, 1)
    found = Certificate(
        feasibility=(length.squeeze(-1) - 1).abs(),
        stationarity=along / (top + long_norm(g).squeeze(-1)),
        optimality=(multiplier + low) / top,
    )
    return ranks.replace_tensors(found, lambda x: x.reshape(batch))


def _spread(problem: Any) -> Any:
    """The problem without its graph, all tensors spread over ranks if one of them is."""
    tensors = [x.detach() for x in problem.flat]
    mesh = ranks.mesh_of(*tensors)
    return problem.with_flat([ranks.replicate(x, mesh) for x in tensors])


def certify_minimum(problem: Any, value: Tensor) -> Certificate:
    """A certificate from all eigenvalues of the curvature, in float64.

    All three measures are relative.
    """
    wide = problem.with_tensors(*(widened(x) for x in problem.tensors))
    y = widened(value)
    force = wide.force(y, *wide.tensors)
    length = norm(y)
    multiplier = dot(y, force) / length.square()
    low, high, scale = wide.curvature_range()
    top = torch.maximum(low.abs(), high.abs())
    return Certificate(
        feasibility=(length - 1).abs(),
        stationarity=norm(sphere.tangent(sphere.project(y), force)) / one_if_zero(scale),
        optimality=(multiplier + low) / one_if_zero(top),
    )


def certify_eigenvectors(problem: Any, value: Tensor) -> Certificate:
    """A certificate from all eigenvalues, in float64."""
    A = widened(problem.A)
    # All three measures are relative; in these units nothing over- or underflows.
    unit = A.abs().amax((-2, -1), keepdim=True)
    A = A / torch.where(unit > 0, unit, torch.ones_like(unit))
    A = symmetric_part(A) if problem.symmetric else A
    Y = widened(value.unsqueeze(-1) if problem.k is None else value)
    size = torch.linalg.matrix_norm(A)
    size = torch.where(size == 0, torch.ones_like(size), size)
    image = A @ Y
    values = (Y * image).sum(-2) / (Y * Y).sum(-2)
    eye = torch.eye(problem.count, dtype=A.dtype, device=A.device)
    if problem.symmetric:
        exact = eigenvalues(A)
        n, width, skip = problem.n, problem.width, problem.skip
        exact = exact[..., n - width : n - skip] if problem.largest else exact[..., skip:width]
        surplus = values.sort(-1).values - exact
        surplus = surplus if problem.largest else -surplus
    else:
        surplus = values.abs() - torch.linalg.eigvals(A).abs().amax(-1, keepdim=True)
    return Certificate(
        feasibility=(Y.mT @ Y - eye).abs().amax((-2, -1)),
        stationarity=torch.linalg.vector_norm(image - Y * values.unsqueeze(-2), dim=-2).amax(-1)
        / size,
        optimality=surplus.amin(-1) / size,
    )


def certify_function(
    A: Tensor,
    F: Tensor,
    of_group: Callable[[Tensor], tuple[Tensor, Tensor]],
    k: int,
    largest: bool,
    beside: Tensor | float = 0.0,
    size: Tensor | float = 0.0,
) -> Certificate:
    """A certificate of `F = V f(Λ) Vᴴ` of the k top eigenpairs, in float64.

    The eigenpairs come from a singular value decomposition of `A + cI`, which is positive definite;
    it is another algorithm than those of the solvers.

    Args:
        A: `(*, n, n)`, its Hermitian part is meant.
        F: `(*, n, n)`.
        of_group: from all eigenvalues `(*, n)` to those of the function at the group `(*, k)`, and
            to the distance `(*, 1)` of eigenvalues that count as equal.
        k: how many eigenvalues the group has.
        largest: whether it is at the upper end.
        beside: `(*,)`, the part of `(AF − FA)/‖A‖` that these matrices do not contain.
        size: `(*,)`, the norm of `A` where that is larger than its eigenvalues here.
    """
    n, wide = A.shape[-1], working_dtype(A.dtype, A.device)
    A, F = A.to(wide), F.to(wide)
    A = 0.5 * (A + A.mH)
    unit = frobenius(A)
    eye = torch.eye(n, dtype=wide, device=A.device)
    # In these units the norm of A is at most one.
    V, moduli, _ = torch.linalg.svd(A / unit + eye)
    V, values = V.flip(-1), (moduli.flip(-1) - 1) * unit.squeeze(-1)
    known, rounding = of_group(values)
    here = torch.arange(n, device=A.device)
    member = here >= n - k if largest else here < k
    heights = torch.zeros_like(values).masked_scatter(member.expand_as(values), known)
    edge = n - k if largest else k - 1
    tied = (values - values[..., edge, None]).abs() <= rounding
    # Where the edge cuts equal eigenvalues, any k of them may be meant.
    tied = tied & (tied & ~member).any(-1, keepdim=True)
    exact = (V * torch.where(tied, 0, heights).unsqueeze(-2)) @ V.mH
    if tied.any():
        exact = exact + _nearest(F, V, heights, tied, member)
    length = one_if_zero(_length(F))
    scale = values.abs().amax(-1).clamp_min(size)
    turned = (A @ F - F @ A) / one_if_zero(scale)[..., None, None]
    return Certificate(
        feasibility=_length(F - F.mH) / length,
        stationarity=(_length(turned).square() + beside**2).sqrt() / length,
        optimality=-_length(F - exact) / torch.maximum(length, _length(exact)),
    )


def _nearest(F: Tensor, V: Tensor, heights: Tensor, tied: Tensor, member: Tensor) -> Tensor:
    """The function of eigenvalues at the edge of the group, of which as many as are members count.

    Of all choices of their eigenvectors it is the one nearest to `F`.
    """
    chosen = tied & member
    count = chosen.sum(-1, keepdim=True)
    height = torch.where(chosen, heights, 0).sum(-1, keepdim=True) / count.clamp_min(1)
    inside = V.mH @ (F + F.mH) @ V * height.sign().unsqueeze(-1)
    inside = torch.where(tied.unsqueeze(-1) & tied.unsqueeze(-2), inside, 0).nan_to_num()
    # All others have smaller eigenvalues.
    least = (-1 - 2 * _length(inside).unsqueeze(-1)) * (~tied)
    W = V @ eigh(inside + torch.diag_embed(least).to(inside)).vectors
    n = tied.shape[-1]
    taken = torch.arange(n, device=tied.device) >= n - count
    return (W * (height * taken).unsqueeze(-2)) @ W.mH


def _length(A: Tensor) -> Tensor:
    """The Frobenius norm, `(*,)`."""
    return torch.linalg.matrix_norm(A)
