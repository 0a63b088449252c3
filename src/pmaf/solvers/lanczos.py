"""Top eigenvectors of a symmetric matrix from block Krylov spaces, with restarts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf.errors import require_at_least, require_tolerance
from pmaf.krylov.search import search
from pmaf.krylov.tasks import Largest, unit_rows
from pmaf.linalg.roundings import SEARCHED, given_or
from pmaf.solvers.base import Course, Eigenvectors, Outcome, Solver
from pmaf.solvers.dense import Dense
from pmaf.solvers.report import outcome, start_block
from pmaf.tangent.kept import NOTHING


@dataclass(frozen=True)
class Lanczos(Solver):
    """The search of `Krylov` on the entries of a matrix, with blocks of a given width and depth.

    Args:
        depth: products before a restart from the best vectors.
        extra: rows of a block beyond the k requested; they help to separate close eigenvalues.
        restarts: limit on the restarts.
        tolerance: on `‖Ay − λy‖/‖A‖`; a few eps unless given.
        fallback: solve the entries that have not converged with `Dense()`.

    >>> import torch, pmaf
    >>> A = torch.diag(torch.tensor([3.0, 1.0, 2.0]))
    >>> pmaf.ied(A, k=2, solver=pmaf.solvers.Lanczos()).values.round(decimals=3)
    tensor([3., 2.])
    """

    solves = (Eigenvectors,)

    depth: int = 12
    extra: int = 2
    restarts: int = 30
    tolerance: float | None = None
    fallback: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("depth", self.depth, 2)
        require_at_least("extra", self.extra, 0)
        require_at_least("restarts", self.restarts, 1)
        require_tolerance("tolerance", self.tolerance)

    def solve(
        self, problem: Eigenvectors, *, init: Tensor | None = None, report: bool = True
    ) -> Outcome:
        if not problem.symmetric:
            raise ValueError(
                "Lanczos() is for symmetric matrices; use Dense() or PowerIteration() "
                "with symmetric=False"
            )
        k, n, batch = problem.width, problem.n, problem.batch_shape
        width = k + self.extra
        if self._is_whole(k, n):
            return Dense().solve(problem)._replace(kept=NOTHING)
        matrix = problem.operand().reshape(-1, n, n)
        found = search(
            lambda rows: torch.bmm(rows, matrix),
            unit_rows(start_block(problem, init, width).mT.reshape(-1, width, n)),
            Largest(k, extra=self.extra),
            size=width * self.depth,
            tolerance=given_or(self.tolerance, SEARCHED, matrix.dtype),
            limit=self.restarts * self.depth,
            symmetric=True,
            answers=lambda masks: masks.all(-1).tolist(),
        )
        result = outcome(
            problem,
            found.values.reshape(*batch, k),
            unit_rows(found.rows).reshape(*batch, k, n).mT,
            residual=found.residual.reshape(batch),
            iterations=torch.full(batch, found.products, device=matrix.device),
            converged=found.converged.reshape(batch),
            report=report,
        )
        if self.fallback and not result.converged.all():
            return self._complete(problem, result)
        return result

    def _is_whole(self, k: int, n: int) -> bool:
        """Whether the Krylov space would be the whole space, so that the matrix is decomposed."""
        return (k + self.extra) * self.depth >= n

    def course(self, problem: Any) -> Course:
        if self._is_whole(problem.width, problem.n):
            return Dense().course(problem)
        then = ("a decomposition of the entries that have not converged",) if self.fallback else ()
        return Course("a search in spaces of blocks, by products with A", then)

    def advice(self) -> str:
        return "raise restarts or depth, or use Dense()"

    def _complete(self, problem: Eigenvectors, found: Outcome) -> Outcome:
        """Replace the entries that have not converged by those of a full decomposition."""
        left = ~found.converged
        # A single matrix has no batch dimension to select from.
        part = problem.matrix[left] if problem.batch_shape else problem.matrix.unsqueeze(0)
        dense = Dense().solve(problem.with_tensors(part))
        fields = [x.clone() for x in found.tensors]
        for old, new in zip(fields, dense.tensors):
            old[left] = new
        return Outcome.of(fields)._replace(iterations=found.iterations)
