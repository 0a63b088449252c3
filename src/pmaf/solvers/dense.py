"""Eigenvectors from the full decomposition of the matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf.linalg.decompositions import eigh
from pmaf.linalg.roundings import merge_tolerance
from pmaf.runtime.log import took
from pmaf.solvers.base import Course, Eigenvectors, Outcome, Solver
from pmaf.solvers.report import gap_of, without_report
from pmaf.tangent.kept import Decomposition, Kept, Nothing


@dataclass(frozen=True)
class Dense(Solver):
    """`torch.linalg.eigh`, or `eig` for a nonsymmetric matrix.

    The whole decomposition is kept, so that the backward pass takes a few products. With `Unroll()`
    this solver is the paper's "AutoDiff", with torch's own derivative.

    >>> import torch, pmaf
    >>> A = torch.diag(torch.tensor([3.0, 1.0, 2.0]))
    >>> pmaf.ied(A, k=2, solver=pmaf.solvers.Dense()).values.round(decimals=3)
    tensor([3., 2.])
    """

    solves = (Eigenvectors,)
    unrollable = True
    always_converges = True

    def solve(
        self, problem: Eigenvectors, *, init: Tensor | None = None, report: bool = True
    ) -> Outcome:
        took("ied: decomposition")
        return self._symmetric(problem, report) if problem.symmetric else self._general(problem)

    def keeps(self, problem: Any) -> type[Kept]:
        return Decomposition if problem.symmetric else Nothing

    def course(self, problem: Any) -> Course:
        return Course("decomposition")

    def takes_any_scale(self, problem: Eigenvectors) -> bool:
        # LAPACK's syevd scales a matrix whose entries are near the ends of the range.
        return problem.symmetric and problem.matrix.device.type == "cpu"

    def advice(self) -> str:
        return (
            "the dominant eigenvalue is complex or not simple, so that there is no real "
            "eigenvector to single out; use a symmetric or entrywise positive matrix"
        )

    def _symmetric(self, problem: Eigenvectors, report: bool) -> Outcome:
        k = problem.width
        S = problem.operand()
        # A recorded decomposition has torch's own derivative, the paper's "AutoDiff".
        values, vectors = eigh(S)
        # The basis stays in eigh's order to save a copy; the requested vectors are the last.
        basis = vectors.mT
        top, rows = values[..., -k:], basis[..., -k:, :]
        if k > 1:
            top, rows = top.flip(-1), rows.flip(-2)
        unknown, none, converged = without_report[problem.batch_shape, values.dtype, values.device]
        if report:
            none, converged = none.clone(), converged.clone()
        return Outcome(
            value=rows,
            multiplier=top,
            residual=problem.residual(top, rows) if report else unknown,
            gap=gap_of(values.detach().flip(-1), problem) if report else unknown,
            iterations=none,
            converged=converged,
            kept=Decomposition(basis, values),
        )

    def _general(self, problem: Eigenvectors) -> Outcome:
        A = problem.matrix
        values, vectors = torch.linalg.eig(A)
        moduli = values.abs()
        order = moduli.argsort(-1, descending=True)
        first = order[..., :1]
        value = values.gather(-1, first)
        vector = vectors.gather(-1, first.unsqueeze(-2).expand(*vectors.shape[:-1], 1)).squeeze(-1)
        # A complex eigenvector is unique up to its phase; this phase makes the largest entry real.
        largest = vector.gather(-1, vector.abs().argmax(-1, keepdim=True))
        row = (vector * largest.conj() / largest.abs()).real
        row = row / torch.linalg.vector_norm(row, dim=-1, keepdim=True)
        gap = problem.modulus_gap(moduli)
        rounding = merge_tolerance(A.dtype) * moduli.amax(-1)
        real = value.imag.abs().squeeze(-1) <= rounding
        simple = gap > rounding
        return Outcome(
            value=row.unsqueeze(-2),
            multiplier=value.real,
            residual=problem.residual(value.real, row.unsqueeze(-2)),
            gap=gap,
            iterations=torch.zeros(problem.batch_shape, dtype=torch.int64, device=A.device),
            converged=real & simple,
        )
