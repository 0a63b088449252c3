"""Certificates by products alone, and by searches that start elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pmaf.autograd.ied_search import Largest, search_eigenvectors, unit_rows
from pmaf.krylov.space import search
from pmaf.linalg import sphere
from pmaf.linalg.products import dot, long_norm, safe
from pmaf.linalg.symmetric import fixed_rows
from pmaf.operators import Operator
from pmaf.operators.rows import Rows, spread_alike
from pmaf.runtime import ranks
from pmaf.solution import Certificate
from pmaf.solvers import Krylov

if TYPE_CHECKING:
    from pmaf.layers.ied import PrincipalEigenvectors
    from pmaf.layers.less import SphereLeastSquares


def certify_eigenvectors(problem: PrincipalEigenvectors, value: Tensor) -> Certificate:
    """Checked by products, and by a second search, beside the vectors given.

    `optimality` is by how much the eigenvalues exceed the largest that is found there,
    relative to the matrix, and zero if they do: what another start does not bring to light
    is taken not to be there.
    """
    A = problem.A
    assert isinstance(A, Operator)
    shape = (*problem.batch_shape, problem.n, *(() if problem.k is None else (problem.k,)))
    if value.shape != shape:
        raise ValueError(f"a solution of this problem has shape {shape}; got {tuple(value.shape)}")
    A = spread_alike(A.with_tensors([x.detach() for x in A.tensors]))
    rows = Rows(A if problem.largest else -A, problem.batch_shape)
    rows.require_transposes(0.0)
    y = ranks.whole(value.detach()).to(A.dtype)
    y = (y.unsqueeze(-1) if problem.k is None else y).mT.reshape(-1, problem.width, problem.n)
    exact = rows.of_symmetric_part if problem.symmetric else rows
    start = fixed_rows(problem.n, A.dtype, A.device)[1:].flip(-1).expand(len(y), 1, -1)
    # All three measures are relative; in these units nothing over- or underflows.
    unit = rows.unit(exact(start))[:, None, None]

    def product(x: Tensor) -> Tensor:
        return exact(x) / unit

    image = product(y)
    values = dot(y, image) / safe(dot(y, y))
    basis = unit_rows(y) if problem.width == 1 else torch.linalg.qr(y.mT).Q.mT

    def beside(x: Tensor) -> Tensor:
        return torch.baddbmm(x, torch.bmm(x, basis.mT), basis, alpha=-1)

    # What is given counts as its smallest eigenvalue: only what is above that shows.
    lowest = values.amin(-1)[:, None, None]

    def elsewhere(x: Tensor) -> Tensor:
        rest = beside(x)
        return beside(product(rest)) + lowest * (x - rest)

    scale = values.abs().amax(-1)
    surplus = torch.zeros_like(scale)
    if problem.width < problem.n:
        solver = Krylov(tolerance=torch.finfo(A.dtype).eps ** 0.5)
        other = search_eigenvectors(elsewhere, start, 1, problem.symmetric, solver, rows)
        scale = torch.maximum(scale, other.scale)
        # A pair of complex eigenvalues does not converge, but its modulus is known.
        best = other.values[:, 0] if problem.symmetric else other.scale
        known = lowest[:, 0, 0] if problem.symmetric else lowest[:, 0, 0].abs()
        surplus = (known - best).clamp_max(0)
    scale = safe(scale)
    eye = torch.eye(problem.width, dtype=y.dtype, device=y.device)
    found = Certificate(
        feasibility=(y @ y.mT - eye).abs().amax((-2, -1)),
        stationarity=long_norm(image - values.unsqueeze(-1) * y).amax(-1) / scale,
        optimality=surplus / scale,
    )
    return ranks.replace_tensors(found, lambda x: x.reshape(problem.batch_shape))


def certify_minimiser(problem: SphereLeastSquares, value: Tensor) -> Certificate:
    """Checked by products; the smallest eigenvalue of `AᵀA` by a search of its own."""
    A, batch, n = problem.A, problem.batch_shape, problem.n
    assert isinstance(A, Operator)
    if value.shape != (*batch, n):
        raise ValueError(
            f"a solution of this problem has shape {(*batch, n)}; got {tuple(value.shape)}"
        )
    A = spread_alike(A.with_tensors([x.detach() for x in A.tensors]), problem.b)
    rows = Rows(A, batch)
    rows.require_transposes(0.0)
    y = ranks.whole(value.detach()).reshape(rows.entries, 1, n)
    g = rows.pulled(problem.b.detach().expand(*batch, -1))
    unit = rows.unit(torch.cat([rows.gram(y), g], -2))[:, None, None]
    g = g / unit

    def gram(x: Tensor) -> Tensor:
        return rows.gram(x) / unit

    force = g - gram(y)
    length = long_norm(y)
    multiplier = (dot(y, force) / length.square()).squeeze(-1)
    along = long_norm(sphere.tangent(sphere.project(y), force)).squeeze(-1)
    random = fixed_rows(n, y.dtype, y.device)[1:].flip(-1).expand_as(y)

    def extreme(sign: float) -> Tensor:
        return sign * search(
            lambda x: sign * gram(x),
            random,
            Largest(1),
            size=Krylov().size(n),
            tolerance=torch.finfo(y.dtype).eps ** 0.75,
            limit=Krylov().max_products,
            symmetric=True,
            agreed=rows.agreed,
        ).values.squeeze(-1)

    top = extreme(1.0)
    top = torch.where(top > 0, top, 1)
    found = Certificate(
        feasibility=(length.squeeze(-1) / problem.radius - 1).abs(),
        stationarity=along / (problem.radius * top + long_norm(g).squeeze(-1)),
        optimality=(multiplier + extreme(-1.0)) / top,
    )
    return ranks.replace_tensors(found, lambda x: x.reshape(batch))
