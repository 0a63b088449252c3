"""Top eigenvectors of a symmetric matrix from block Krylov spaces, with restarts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.errors import require_at_least, require_tolerance
from pmaf.linalg.loop import iterate
from pmaf.solvers.base import Eigenvectors, Outcome, Solver
from pmaf.solvers.dense import Dense
from pmaf.solvers.report import norm_of, outcome, rayleigh_ritz, start_block
from pmaf.tangent.kept import NOTHING


class _Ritz(NamedTuple):
    block: Tensor  # (*, n, p), Ritz vectors, the best first
    values: Tensor  # (*, p)
    residual: Tensor  # (*,)


@dataclass(frozen=True)
class Lanczos(Solver):
    """Rayleigh–Ritz on `span(X, AX, …, Aᵈ⁻¹X)`, restarted from its best vectors.

    Args:
        depth: products per restart, d.
        extra: columns of `X` beyond the k requested; they pull apart close eigenvalues.
        restarts: limit on the restarts.
        tolerance: on `‖Ay − λy‖/‖A‖`; a few roundings unless given.
        fallback: decompose what has not converged by `Dense()`.
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
        k, width, depth = problem.width, problem.width + self.extra, self.depth
        if width * depth >= problem.n:
            # The Krylov space would be the whole space.
            return Dense().solve(problem)._replace(kept=NOTHING)
        M = problem.operand()
        size = norm_of(M)
        eps = torch.finfo(M.dtype).eps
        tolerance = 16 * eps if self.tolerance is None else self.tolerance

        def restart(state: _Ritz) -> tuple[_Ritz, Tensor]:
            values, vectors, images = rayleigh_ritz(M, _krylov(M, state.block, depth, spare))
            largest = values.abs().amax(-1)
            values, vectors, images = values[..., :width], vectors[..., :width], images[..., :width]
            rest = (images - vectors * values.unsqueeze(-2))[..., :k]
            residual = torch.linalg.vector_norm(rest, dim=-2).amax(-1)
            # Relative to the spectral norm, as eigh's are, which is below the Frobenius norm.
            done = residual <= tolerance * largest
            return _Ritz(vectors, values, residual / size), done

        batch = problem.batch_shape
        start, spare = start_block(problem, init, 2 * width).split(width, -1)
        zeros = M.new_zeros((*batch, width))
        run = iterate(
            restart,
            _Ritz(start, zeros, zeros[..., 0]),
            active=torch.ones(batch, dtype=torch.bool, device=M.device),
            max_iterations=self.restarts,
        )
        found = outcome(
            problem,
            run.state.values[..., :k],
            run.state.block[..., :k],
            residual=run.state.residual,
            iterations=run.iterations * depth,
            converged=run.finished,
            report=report,
        )
        if self.fallback and not run.finished.all():
            return self._complete(problem, found)
        return found

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


def _krylov(M: Tensor, block: Tensor, depth: int, spare: Tensor) -> Tensor:
    """An orthonormal basis of `span(X, MX, …)`, `(*, n, p·depth)`.

    Where the space stops growing, because it is invariant, nothing orthogonal is left of
    a column; a spare direction takes its place, so that the basis stays orthonormal.
    """
    eps = torch.finfo(M.dtype).eps
    basis = newest = torch.linalg.qr(block).Q
    for _ in range(depth - 1):
        newest = _beside(basis, M @ newest)
        overlap = (basis.mT @ newest).abs().amax(-2, keepdim=True)
        if (overlap > 8 * eps).any():
            newest = _beside(basis, torch.where(overlap > eps**0.5, spare, newest))
            spare = spare.roll(1, -2)  # this one is in the basis now
        basis = torch.cat([basis, newest], -1)
    return basis


def _beside(basis: Tensor, block: Tensor) -> Tensor:
    """An orthonormal basis of the part of the block that is orthogonal to `basis`."""
    # Twice: once loses orthogonality when little is left after the projection.
    for _ in range(2):
        block = block - basis @ (basis.mT @ block)
        block = torch.linalg.qr(block).Q
    return block
