"""LESS of an operator of few entries, where products with `AᵀA` lose the digits of the solution.

In `AᵀA` a singular value below `√ε‖A‖` is rounding, and a Krylov space takes about as many
products as the condition of `A` to tell small ones apart. A matrix of n columns is known from n
products. So where it is small, and the search was of no avail, its entries are computed, and the
problem is solved from them in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pmaf.linalg.gram import TangentSolver
from pmaf.linalg.products import long_norm
from pmaf.operators.rows import Rows
from pmaf.runtime import ranks
from pmaf.solvers import Krylov, Outcome, Secular
from pmaf.tangent.residuals import judged


@dataclass(frozen=True)
class Entries:
    """What a solve from entries leaves for the backward pass, for the entries of a mask `(B,)`."""

    mask: Tensor
    A: Tensor  # (B or 1, m, n), float64
    outcome: Outcome  # of a batch (B,), with an eigenbasis, float64

    def tangent(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`z` of the tangent-space system for rows `(B, 1, n)`, its residual, and its worth."""
        found, v = self.outcome, v.squeeze(1).double()
        y, gap = found.value, found.gap
        z = TangentSolver(found.basis, found.spread, gap, y)(v)

        def aside(x: Tensor) -> Tensor:
            return x - y * (x * y).sum(-1, keepdim=True)

        image = (z.unsqueeze(1) @ self.A.mT @ self.A).squeeze(1) + found.multiplier[:, None] * z
        left, size = long_norm(aside(v - image)), long_norm(v)
        largest = found.spread.amax(-1) + gap.abs() + found.multiplier.abs()
        z = z.unsqueeze(1)
        return z, *judged(left[:, None], size[:, None], largest[:, None], z)


def are_few(rows: Rows, solver: Krylov) -> bool:
    """Whether the entries may be computed: in memory, in products, and in time.

    A `dimension` that is given says how many vectors there is memory for.
    """
    *batch, m, n = rows.A.shape
    few = n <= _COLUMNS and torch.Size(batch).numel() * m * n <= _ENTRIES
    return few and solver.dimension is None and rows.A.device.type != "mps"  # has no float64


def solve_entries(rows: Rows, b: Tensor, init: Tensor | None, mask: Tensor) -> Entries:
    """The minimisers for `b`, `(B, m)`, from the entries of the matrix."""
    A = rows.A
    m, n = A.shape[-2:]
    # One matrix for a whole batch of problems is computed once.
    alone = Rows(A, A.batch_shape)
    eye = torch.eye(n, dtype=A.dtype, device=A.device)
    parts = [alone(part.expand(alone.entries, -1, n)) for part in eye.split(_BLOCK)]
    dense = torch.cat(parts, 1).mT.double()
    if len(dense) != rows.entries:
        dense = dense.reshape(m, n)

    from pmaf.layers.less import SphereLeastSquares

    problem = SphereLeastSquares(dense, ranks.whole(b).double())
    found = Secular().solve(problem, init=None if init is None else init.double())
    batch = (rows.entries,)
    basis = found.basis.expand(*batch, *found.basis.shape[-2:])
    spread = found.spread.expand(*batch, found.spread.shape[-1])
    return Entries(mask, dense, found._replace(basis=basis, spread=spread))


# Columns and entries up to which a decomposition in float64 takes a second or so, and 32 MB.
_COLUMNS, _ENTRIES = 2048, 1 << 22
# Products that are made at once.
_BLOCK = 64
