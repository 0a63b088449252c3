"""The minimum on the sphere by products with the matrix.

In a subspace the problem is small, and its secular equation gives the global minimum. The search
starts from `g`, so it does not find eigenvectors of the curvature that are orthogonal to `g`. For
least squares, `μ ≥ 0` proves that the minimum is global. Otherwise a second search finds the
smallest eigenvalue of the curvature; if that is below `−μ`, its eigenvector joins the space.

In `AᵀA` a singular value of `A` below `√eps‖A‖` is rounding, and a Krylov space takes about as many
products as the condition number of `A` to separate small ones. On the other hand, n products give
all entries of `A`. So where the search fails for a small matrix, its entries are computed, and the
problem is solved from them in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf.errors import require_finite
from pmaf.krylov.search import Found, Task, search
from pmaf.krylov.tasks import Largest, Lowest
from pmaf.linalg import sphere
from pmaf.linalg.products import long_norm
from pmaf.linalg.roundings import (
    NOISE,
    ROUNDED,
    OutOfRangeError,
    has_double,
    power_of_two,
    square_range,
)
from pmaf.linalg.symmetric_part import fixed_rows
from pmaf.operators.rows import Rows
from pmaf.runtime import ranks
from pmaf.solvers.base import LeastSquares, Outcome, has_form
from pmaf.solvers.secular import Secular
from pmaf.tangent.basis import TangentSolver
from pmaf.tangent.kept import Basis
from pmaf.tangent.residuals import WORTH, Product, judged


class _Searches:
    """The searches of one problem, in units in which no square over- or underflows."""

    def __init__(self, problem: Any, rows: Rows, solver: Any) -> None:
        self.rows, self.solver, self.products = rows, solver, 1
        self.n, B = problem.n, rows.entries
        rows.require_transposes(solver.tolerance_of(rows.A.dtype))
        # The curvature of least squares has no negative eigenvalues.
        self.definite = has_form(problem, LeastSquares)
        self.product, g = posed(problem, rows)
        if not torch.isfinite(g).all():
            rows.require_finite()
            for name, dims in problem.inputs.items():
                x = getattr(problem, name)
                if isinstance(x, Tensor):
                    require_finite(**{name: (ranks.local(x), dims)})
        self.random = (fixed_rows[self.n, g.dtype, g.device][1] / self.n**0.5).expand(B, 1, self.n)
        image = self.product(self.random)
        if self.definite:
            self._require_range(image, g)
        unit = rows.unit(torch.cat([image, g], -2))[:, None, None]
        low, high = square_range(g.dtype)
        if rows.agreed((unit > low) & (unit < high)):
            unit = torch.ones_like(unit)
        self.unit, self.g = unit, g / unit
        size = long_norm(image / unit).squeeze(-1)
        if self.definite:
            # The rounding error of Aᵀb is proportional to ‖A‖‖b‖, even where ‖Aᵀb‖ is much smaller.
            size = size.sqrt() * _norm(problem.b, B) / unit[:, 0, 0].sqrt()
        else:
            size = size + long_norm(self.g).squeeze(-1)
        self.noise = NOISE * torch.finfo(g.dtype).eps * size
        self.tolerance = solver.tolerance_of(g.dtype)

    def _require_range(self, image: Tensor, g: Tensor) -> None:
        """Raise `OutOfRangeError` if products with `AᵀA` leave the range of the dtype.

        If products with `A` leave the range too, no units help, and nothing is raised.
        """
        tiny = torch.finfo(g.dtype).tiny
        size = torch.maximum(image.abs().amax((-2, -1)), g.abs().amax((-2, -1)))
        if self.rows.agreed((size >= tiny) & torch.isfinite(size)):
            return
        image, batch = self.rows(self.random).abs(), self.rows.A.batch_shape
        # A matrix that all problems of a batch share has one unit, and otherwise each has its own.
        unit = power_of_two(image.amax((-2, -1)).reshape(batch) if batch else image.amax())
        if self.rows.agreed(torch.isfinite(unit).all() & (unit != 1).any()):
            raise OutOfRangeError(unit)

    def curvature(self, x: Tensor) -> Tensor:
        return self.product(x) / self.unit

    def negative(self, x: Tensor) -> Tensor:
        return -self.curvature(x)

    def search(
        self, product: Product, start: Tensor, task: Task, tolerance: float, limit: int = 0
    ) -> Found:
        left = max(1, self.solver.max_products - self.products)
        found = search(
            product,
            start,
            task,
            size=self.solver.size(self.n),
            tolerance=tolerance,
            limit=min(left, limit or left),
            symmetric=True,
            answers=self.rows.answers,
        )
        self.products += found.products
        return found

    def bottom(self, found: Found, limit: int) -> Found:
        """`−λ_min` of the curvature, as accurately as the sign of `μ + λ_min` requires."""
        eps = torch.finfo(self.g.dtype).eps
        bottom = self.search(self.negative, self.random, Largest(1), eps**0.5, limit)
        gap = (found.values - bottom.values).squeeze(-1)
        clear = gap > 2 * bottom.residual * bottom.scale
        if self.n == 1 or self.rows.agreed(clear | ~bottom.converged):
            return bottom
        start = torch.cat([bottom.rows, self.random], -2)
        return self.search(self.negative, start, Largest(1, guards=1), self.tolerance, limit)

    def known(self, found: Found) -> Tensor:
        """Whether `u` has correct digits, `(B,)`.

        Its error is at most the residual plus the rounding in `AᵀA`, divided by the least curvature
        orthogonal to `u`. Where `A` is wide and `μ = 0`, the minimisers form a sphere, and each of
        them is accepted.
        """
        eps = torch.finfo(self.g.dtype).eps
        error = (found.residual + ROUNDED * eps) * found.scale
        m, n = self.rows.A.shape[-2:]
        any_will_do = found.values.squeeze(-1).abs() <= self.tolerance * found.scale
        return (error <= WORTH * found.curvature) | (any_will_do & (m < n))


def posed(problem: Any, rows: Rows) -> tuple[Product, Tensor]:
    """Products with the curvature, of rows `(B, p, n)`, and `g`, `(B, 1, n)`."""
    if has_form(problem, LeastSquares):
        return rows.gram, rows.pulled(problem.b.expand(*problem.batch_shape, -1))
    return rows.curvature_of(problem), rows.pull_of(problem)


def find_minimum(rows: Rows, problem: Any, solver: Any, init: Tensor | None) -> Outcome:
    """The minimum on the unit sphere; the tensors of the problem may be spread over ranks."""
    posed = _Searches(problem, rows, solver)
    g, n, tolerance = posed.g, posed.n, posed.tolerance
    batch, eps = problem.batch_shape, torch.finfo(g.dtype).eps
    if init is not None:
        require_finite(init=(init, 1))
    reference = torch.ones_like(g) if init is None else init.expand(*batch, n).reshape(g.shape)
    task = Lowest(g, posed.noise, reference)
    start = torch.where((long_norm(g) > 0).unsqueeze(-1), g, posed.random)
    if init is not None:
        start = torch.cat([reference + eps * posed.random, start], -2)
    # If n products would give all entries of A, the first search may take about n products.
    # Otherwise it leaves a third of all products for the second search.
    entries = posed.definite and are_few(rows, solver)
    few = entries and posed.products + 2 * n <= solver.max_products
    limit = max(n, _FEWEST) if few else 0
    most = limit or max(_FEWEST, 2 * solver.max_products // 3)
    found = posed.search(posed.curvature, start, task, tolerance, most)
    gap, proved = found.values.squeeze(-1), found.converged
    below = torch.zeros_like(gap)  # the error of λ_min
    lost = few & ~(posed.known(found) & found.converged)
    if not rows.agreed(lost | (found.converged & (gap >= 0) & posed.definite)):
        bottom = posed.bottom(found, limit)
        gap = (found.values - bottom.values).squeeze(-1)
        missed = ~lost & (~found.converged | (gap < -tolerance * found.scale))
        if not rows.agreed(~missed):
            start = torch.cat([found.rows, bottom.rows, g], -2)
            again = posed.search(posed.curvature, start, task, tolerance)
            found = _chosen(missed, again, found)
            gap = (found.values - bottom.values).squeeze(-1)
        multiplier = found.values.squeeze(-1)
        clear = gap > 2 * bottom.residual * bottom.scale
        enough = (multiplier >= 0) & posed.definite
        proved = found.converged & (bottom.converged | clear | enough)
        # Entries with μ ≥ 0 keep gap = μ, so that their result does not depend on the batch.
        gap = torch.where(enough, multiplier, gap)
        below = torch.where(enough, below, bottom.residual * bottom.scale)
    # A gap that is within its own error, or within rounding of AᵀA, counts as zero.
    error = found.residual.clamp_min(tolerance) * found.scale
    gap = torch.where((gap >= -tolerance * found.scale) & (gap <= error + below), 0, gap)
    unit = posed.unit[:, 0, 0]
    rows.scale = found.scale * unit
    rows.unique = posed.known(found)
    outcome = Outcome(
        value=sphere.settle(found.rows).squeeze(1),
        multiplier=found.values.squeeze(-1) * unit,
        residual=found.residual,
        gap=gap * unit,
        iterations=torch.full((rows.entries,), posed.products, device=g.device),
        converged=proved & rows.unique,
    )
    left = solver.max_products - posed.products
    if entries and n <= left and not rows.agreed(outcome.converged):
        outcome = _by_entries(rows, problem, init, outcome)
    return Outcome.of(x.reshape((*batch, *x.shape[1:])) for x in outcome.tensors)


def _by_entries(rows: Rows, problem: Any, init: Tensor | None, outcome: Outcome) -> Outcome:
    """Solve the batch entries that have not converged from the entries of the matrix."""
    B, n = outcome.value.shape
    init = None if init is None else init.expand(*problem.batch_shape, n).reshape(B, n)
    kept = solve_entries(rows, problem, init, ~outcome.converged)
    rows.by_entries = kept
    rows.unique = rows.unique | kept.mask
    new = kept.outcome._replace(iterations=outcome.iterations + n)
    pairs = ((x.to(y.dtype), y) for x, y in zip(new.tensors, outcome.tensors))
    return Outcome.of(_where(kept.mask, x, y) for x, y in pairs)


def _norm(b: Tensor, entries: int) -> Tensor:
    """`‖b‖`, `(B,)`, even if the squares of `b` overflow."""
    most = b.abs().amax(-1, keepdim=True)
    size = long_norm(b / torch.where(most > 0, most, 1)) * most.squeeze(-1)
    return ranks.whole(size).reshape(entries)


def _chosen(mask: Tensor, new: Found, old: Found) -> Found:
    pairs = ((x, y) for x, y in zip(new, old) if isinstance(x, Tensor) and isinstance(y, Tensor))
    columns = (_where(mask, x, y) for x, y in pairs)
    values, rows, residual, gap, converged, scale, curvature = columns
    return Found(values, rows, residual, gap, new.products, converged, scale, curvature)


def _where(mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """`x` for the batch entries of a mask `(B,)`, `y` for the others."""
    return torch.where(mask.reshape(-1, *(1,) * (x.dim() - 1)), x, y)


@dataclass(frozen=True)
class Entries:
    """A solve from matrix entries for the batch entries of a mask `(B,)`, kept for gradients."""

    mask: Tensor
    A: Tensor  # (B or 1, m, n), float64
    outcome: Outcome  # of a batch (B,), with an eigenbasis, float64

    def tangent(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`z` of the tangent system for rows `(B, 1, n)`, its residual, and its success."""
        found, v = self.outcome, v.squeeze(1).double()
        y, gap = found.value, found.gap
        z = TangentSolver(*found.basis, gap, y)(v)

        def aside(x: Tensor) -> Tensor:
            return x - y * (x * y).sum(-1, keepdim=True)

        image = (z.unsqueeze(1) @ self.A.mT @ self.A).squeeze(1) + found.multiplier[:, None] * z
        left, size = long_norm(aside(v - image)), long_norm(v)
        largest = found.basis.spread.amax(-1) + gap.abs() + found.multiplier.abs()
        z = z.unsqueeze(1)
        return z, *judged(left[:, None], size[:, None], largest[:, None], long_norm(z))


def are_few(rows: Rows, solver: Any) -> bool:
    """Whether the entries of `A` take little enough memory and time to be computed.

    A user who sets `Krylov(dimension=...)` limits the memory, so that they are not computed.
    """
    *batch, m, n = rows.A.shape
    few = n <= _COLUMNS and torch.Size(batch).numel() * m * n <= _ENTRIES
    return few and solver.dimension is None and has_double(rows.A.device)


def solve_entries(rows: Rows, problem: Any, init: Tensor | None, mask: Tensor) -> Entries:
    """The minimisers from the entries of the matrix."""
    A = rows.A
    m, n = A.shape[-2:]
    # The entries of a matrix that all problems share are computed once.
    alone = Rows(A, A.batch_shape)
    eye = torch.eye(n, dtype=A.dtype, device=A.device)
    parts = [alone(part.expand(alone.entries, -1, n)) for part in eye.split(_BLOCK)]
    dense = torch.cat(parts, 1).mT.double()
    if len(dense) != rows.entries:
        dense = dense.reshape(m, n)
    b = ranks.whole(problem.b.expand(*problem.batch_shape, -1)).reshape(rows.entries, m)
    posed = problem.with_tensors(dense, b.double())
    found = Secular().solve(posed, init=None if init is None else init.double())
    kept = Basis(*(x.expand(rows.entries, *x.shape[-d:]) for x, d in zip(found.basis, (2, 1))))
    return Entries(mask, dense, found._replace(kept=kept))


# Up to these columns and entries a decomposition in float64 takes about a second and 32 MB.
_COLUMNS, _ENTRIES = 2048, 1 << 22
# Rows in each product that computes entries.
_BLOCK = 64

# Every search may take at least this many products.
_FEWEST = 64
