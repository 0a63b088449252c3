"""Several eigenvectors by repeated products and orthonormalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.linalg.loop import iterate
from pmaf.linalg.roundings import STILL_BLOCK, given_or
from pmaf.solvers.base import Eigenvectors, Outcome
from pmaf.solvers.power_iteration import Iteration, choose_shift
from pmaf.solvers.report import (
    norm_of,
    orthonormal,
    outcome,
    rayleigh_ritz,
    residual_of,
    stands,
    start_block,
)


class _Block(NamedTuple):
    q: Tensor  # (*, n, p)


@dataclass(frozen=True)
class SimultaneousIteration(Iteration):
    """`Q ← qr((A + shift·I)Q)` on a block of vectors, until `Q` no longer changes.

    Args:
        iterations: limit on the products.
        tolerance: stop when no entry of `Q` moves by more; a few eps unless given.
        stop: False runs all iterations, as the paper's timings do.
        shift: as for `PowerIteration`.
        full: iterate on all n columns, as the published code does, and return k of these columns,
            instead of the Ritz vectors of k columns.

    >>> import torch, pmaf
    >>> A = torch.diag(torch.tensor([3.0, 1.0, 2.0]))
    >>> pmaf.ied(A, k=2, solver=pmaf.solvers.SimultaneousIteration()).values.round(decimals=3)
    tensor([3., 2.])
    """

    solves = (Eigenvectors,)

    full: bool = False

    def solve(
        self, problem: Eigenvectors, *, init: Tensor | None = None, report: bool = True
    ) -> Outcome:
        k = problem.width
        M = problem.operand()
        size = norm_of(M.detach())
        shift = choose_shift(problem, M.detach(), self.shift)[..., None, None]
        # Rounding turns the vectors of a block within their span by more than it moves one vector.
        tolerance = given_or(self.tolerance, STILL_BLOCK, M.dtype)

        def straight(state: _Block) -> _Block:
            image = M @ state.q
            return _Block(orthonormal(image if self.shift == 0 else image + shift * state.q))

        def step(state: _Block) -> tuple[_Block, Tensor]:
            q = straight(state).q
            new, old = q[..., :k], state.q[..., :k]
            moved = torch.minimum((new - old).abs().amax(-2), (new + old).abs().amax(-2))
            return _Block(q), (moved.amax(-1) <= tolerance) & self.stop

        start = M if self.full else start_block(problem, init, k)
        active = torch.ones(problem.batch_shape, dtype=torch.bool, device=M.device)
        run = iterate(
            step,
            _Block(orthonormal(start)),
            active=active,
            max_iterations=self.iterations,
            straight=None if self.stop else straight,
        )
        q = run.state.q
        if self.full and problem.symmetric:
            values, order = (q * (M @ q)).sum(-2).topk(k, -1)
            vectors = q.gather(-1, order.unsqueeze(-2).expand(*q.shape[:-1], k))
        elif problem.symmetric:
            values, vectors, _ = rayleigh_ritz(M, q)
        else:
            vectors = q[..., :1]
            values = (vectors * (M @ vectors)).sum(-2)
        residual = residual_of(M, values, vectors, size).detach()
        return outcome(
            problem,
            values,
            vectors,
            residual=residual,
            iterations=run.iterations,
            converged=stands(run.finished, residual, tolerance),
            report=report,
        )
