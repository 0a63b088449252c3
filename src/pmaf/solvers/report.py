"""Starts, orthonormal blocks and final reports, shared by the eigenvector solvers.

Blocks of vectors are columns here, `(*, n, p)`; outcomes carry them as rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pmaf.linalg.decompositions import eigh
from pmaf.linalg.roundings import ROUNDED, SETTLED
from pmaf.linalg.symmetric_part import fixed_normal
from pmaf.runtime.cached import CachedOnCPU
from pmaf.solvers.base import Eigenvectors, Outcome
from pmaf.tangent.kept import NOTHING, Kept


def start_block(problem: Eigenvectors, init: Tensor | None, width: int) -> Tensor:
    """The start, `(*, n, width)`: the columns of `init`, then fixed pseudorandom columns.

    The pseudorandom columns are the same for every batch entry and every call. Each column of
    `init` may be exactly orthogonal to the eigenvector, so `√eps` times a pseudorandom column is
    added to it.
    """
    A = problem.matrix
    block = fixed_normal(problem.n, width).to(A)
    block = block.expand(*problem.batch_shape, -1, -1)
    if init is not None:
        given = init.expand(*problem.batch_shape, -1, -1)[..., :width]
        length = torch.linalg.vector_norm(given, dim=-2, keepdim=True)
        given = given / torch.where(length > 0, length, torch.ones_like(length))
        count = given.shape[-1]
        given = given + torch.finfo(A.dtype).eps ** 0.5 * block[..., :count]
        block = torch.cat([given, block[..., count:]], -1)
    return block


def orthonormal(block: Tensor) -> Tensor:
    """The factor `Q` of a QR factorisation in which no diagonal entry of `R` is negative."""
    q, r = torch.linalg.qr(block)
    diagonal = r.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    return torch.where(diagonal < 0, -q, q)


def rayleigh_ritz(M: Tensor, block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ritz pairs in the span of an orthonormal block: values descending, vectors, `M` vectors."""
    image = M @ block
    small = block.mT @ image
    values, vectors = eigh(0.5 * (small + small.mT))
    vectors = vectors.flip(-1)
    return values.flip(-1), block @ vectors, image @ vectors


def norm_of(M: Tensor) -> Tensor:
    """Frobenius norm, one where it is zero, `(*,)`."""
    size = torch.linalg.matrix_norm(M)
    return torch.where(size == 0, torch.ones_like(size), size)


def stands(finished: Tensor, residual: Tensor, tolerance: float) -> Tensor:
    """Whether an iteration ended at an eigenpair.

    It did if it met its stopping rule with a small residual, or if its residual is rounding.
    """
    eps = torch.finfo(residual.dtype).eps
    settled = finished & (residual <= max(SETTLED * eps, 16 * tolerance))
    return settled | (residual <= ROUNDED * eps)


def residual_of(M: Tensor, values: Tensor, vectors: Tensor, size: Tensor) -> Tensor:
    """`max ‖My − λy‖/‖M‖` over the columns, `(*,)`."""
    rest = M @ vectors - vectors * values.unsqueeze(-2)
    return torch.linalg.vector_norm(rest, dim=-2).amax(-1) / size


def outcome(
    problem: Eigenvectors,
    values: Tensor,
    vectors: Tensor,
    *,
    residual: Tensor,
    iterations: Tensor,
    converged: Tensor,
    report: bool,
    kept: Kept = NOTHING,
) -> Outcome:
    """An outcome; the gap is computed only for a report."""
    batch = problem.batch_shape
    gap = torch.full(batch, torch.nan, dtype=values.dtype, device=values.device)
    if report:
        gap = gap_of(problem.spectrum(), problem) if problem.symmetric else problem.modulus_gap()
    return Outcome(
        value=vectors.mT,
        multiplier=values,
        residual=residual,
        gap=gap,
        iterations=iterations,
        converged=converged,
        kept=kept,
    )


def _without_report(
    batch: torch.Size, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    unknown = torch.full(batch, torch.nan, dtype=dtype, device=device)
    none = torch.zeros(batch, dtype=torch.int64, device=device)
    return unknown, none, torch.ones(batch, dtype=torch.bool, device=device)


# Placeholders for residuals and gaps, iterations and convergence, without a report, by
# `[batch, dtype, device]`.
without_report = CachedOnCPU(_without_report)


def gap_of(spectrum: Tensor, problem: Eigenvectors) -> Tensor:
    """Distance between a requested eigenvalue and its nearest neighbour, `(*,)`.

    `spectrum` has all eigenvalues, descending, each `problem.copies` times, or the first ones. The
    first `problem.width` are requested, except for `problem.skip` of them, and the next one has to
    be there. The distance is infinite if there is one eigenvalue only.
    """
    copies = problem.copies
    spectrum, k, skip = spectrum[..., ::copies], -(-problem.width // copies), problem.skip // copies
    n = spectrum.shape[-1]
    if n == 1:
        return torch.full_like(spectrum[..., 0], torch.inf)
    steps = spectrum[..., :-1] - spectrum[..., 1:]
    return steps[..., max(0, skip - 1) : min(k, n - 1)].amin(-1)
