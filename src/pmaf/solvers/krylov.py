"""Both problems by products with the matrix, in a subspace that grows by residuals."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pmaf.errors import require_at_least, require_finite, require_tolerance
from pmaf.krylov.search import Found, search
from pmaf.krylov.tasks import Dominant, Largest, unit_rows
from pmaf.linalg.roundings import REFINED, SEARCHED, TIED, given_or, square_range
from pmaf.linalg.symmetric_part import fixed_rows
from pmaf.operators.base import Operator
from pmaf.operators.rows import Rows, rows_of
from pmaf.runtime.log import took
from pmaf.solvers.base import Course, Eigenvectors, Minimum, Outcome, Solver, has_form
from pmaf.solvers.krylov_minimum import find_minimum
from pmaf.tangent.metric import Metric
from pmaf.tangent.residuals import Product


@dataclass(frozen=True)
class Krylov(Solver):
    """Thick-restart Lanczos or Arnoldi for eigenvectors; a Krylov space for minima on the sphere.

    `Auto()` uses it for operators, sparse tensors and matrices spread over ranks. It forms no n×n
    matrix, forward or backward, except where the search for a small least-squares solution fails.

    Args:
        dimension: vectors of the space; twice as many are held in memory. A larger space takes
            fewer products when eigenvalues are close. Unless given, 40, or n if n is at most 256.
        max_products: limit on the products, forward and again backward.
        tolerance: on the residual relative to the matrix, as reported; a few eps unless given.

    >>> import torch, pmaf
    >>> A = torch.diag(torch.tensor([3.0, 1.0, 2.0]))
    >>> pmaf.ied(A, solver=pmaf.solvers.Krylov(max_products=100)).values.round(decimals=3)
    tensor(3.)
    """

    solves = (Minimum, Eigenvectors)
    matrix_free = True

    dimension: int | None = None
    max_products: int = 5000
    tolerance: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dimension is not None:
            require_at_least("dimension", self.dimension, 4)
        require_at_least("max_products", self.max_products, 1)
        require_tolerance("tolerance", self.tolerance)

    def solve(self, problem: Any, *, init: Tensor | None = None, report: bool = True) -> Outcome:
        return self.solve_by_products(problem, init)[0]

    def solve_by_products(self, problem: Any, init: Tensor | None) -> tuple[Outcome, Rows]:
        took("products")
        seen = rows_of(problem)
        eigen = has_form(problem, Eigenvectors)
        outcome = seen.guarded(find_eigenvectors if eigen else find_minimum, problem, self, init)
        return outcome, seen

    def course(self, problem: Any) -> Course:
        return Course("products with A, in a subspace that grows by residuals")

    def size(self, n: int, k: int = 1) -> int:
        """The dimension of the space for k vectors of length n."""
        return max(self.dimension or (n if n <= 256 else 40), 4 * k + 8)

    def tolerance_of(self, dtype: torch.dtype) -> float:
        return given_or(self.tolerance, SEARCHED, dtype)

    def advice(self) -> str:
        return (
            "raise max_products or dimension, start from the last solution with init, or set "
            "tolerance to what the products are worth"
        )


def find_eigenvectors(
    rows: Rows,
    problem: Eigenvectors,
    solver: Krylov,
    init: Tensor | None,
    metric: Metric | None = None,
) -> Outcome:
    """The largest eigenvalues of an operator, or the dominant one, with eigenvectors as rows.

    With a metric `M` they are those of the pair `Ay = λMy`.
    """
    k, symmetric = problem.width, problem.symmetric
    A = rows.A
    batch, n = problem.batch_shape, A.shape[-1]
    rows.require_transposes(solver.tolerance_of(A.dtype))
    product = rows.of_symmetric_part if symmetric else rows
    guards = 1 if init is not None and k < n else 0
    start = _start(A, batch, k, guards, init)
    task = Dominant(guards)
    if symmetric:
        task = Largest(k, guards, copies=problem.copies, skip=problem.skip)
    found = search_eigenvectors(product, start, task, solver, rows, metric)
    low, high = square_range(A.dtype)
    if not rows.agreed((found.scale > low) & (found.scale < high)):
        # Squares over- or underflow in the search or in the operator: search again in other units.
        rows.unit(product(start))  # raises an error where products overflow
        rows.change_units(start)
        product = rows.of_symmetric_part if symmetric else rows
        found = search_eigenvectors(product, start, task, solver, rows, metric)
    rows.scale, rows.values = found.scale, found.values
    converged = found.converged
    if not symmetric:
        # If several eigenvalues have the largest modulus, none of them is dominant.
        tie = found.gap <= TIED * torch.finfo(A.dtype).eps * found.scale
        converged = converged & ~tie
    y = found.rows
    y = unit_rows(y) if metric is None else y / metric.length(y, metric.dual(y)).unsqueeze(-1)
    shape = (*batch, k)
    return Outcome(
        value=y.reshape(*shape, n),
        multiplier=rows.back(found.values).reshape(shape),
        residual=found.residual.reshape(batch),
        gap=rows.back(found.gap).reshape(batch),
        iterations=torch.full(batch, found.products, device=y.device),
        converged=converged.reshape(batch),
    )


def search_eigenvectors(
    product: Product,
    start: Tensor,
    task: Largest | Dominant,
    solver: Krylov,
    rows: Rows,
    metric: Metric | None = None,
) -> Found:
    tolerance, floor = solver.tolerance_of(start.dtype), None
    if metric is not None and solver.tolerance is None:
        tolerance = tolerance * metric.rounding
        floor = partial(_rounding_errors, metric)
    return search(
        product,
        start,
        task,
        size=solver.size(start.shape[-1], start.shape[-2]),
        tolerance=tolerance,
        limit=solver.max_products,
        symmetric=isinstance(task, Largest),
        answers=rows.answers,
        metric=metric,
        floor=floor,
    )


def _rounding_errors(metric: Metric, rows: Tensor) -> Tensor:
    """The residual of rows `(B, w, n)` that is rounding error of products with `M`, `(B,)`."""
    signs = fixed_rows[rows.shape[-1], rows.dtype, rows.device][0]
    return REFINED * torch.finfo(rows.dtype).eps * metric.roundings(rows, signs).amax(-1)


def _start(A: Operator, batch: torch.Size, k: int, guards: int, init: Tensor | None) -> Tensor:
    """Pseudorandom rows `(B, k + guards, n)`, of which `init`, if given, replaces the first."""
    n, B = A.shape[-1], batch.numel()
    row = fixed_rows[n, A.dtype, A.device][1] / n**0.5
    rows = torch.stack([row.roll(i) for i in range(k + guards)]).expand(B, k + guards, n)
    if init is None:
        return rows
    require_finite(init=(init, 2))
    p = init.shape[-1]  # fewer than k if some vectors are skipped
    given = unit_rows(init.detach().mT.expand(*batch, p, n).reshape(B, p, n))
    return torch.cat([given, rows[:, p:]], -2)
