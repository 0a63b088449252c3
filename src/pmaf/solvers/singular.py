"""Right singular vectors from the matrix itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf import native
from pmaf.linalg.products import norm
from pmaf.linalg.singular import (
    padded,
    rooted,
    singular_basis,
    sizes,
    weighted,
    weighted_gram,
)
from pmaf.runtime.log import took
from pmaf.solvers.base import Outcome, SingularVectors, Solver
from pmaf.solvers.reduction import is_compiled
from pmaf.solvers.report import without_report
from pmaf.tangent.kept import NOTHING, Kept, Nothing, SingularBasis


@dataclass(frozen=True)
class SVD(Solver):
    """Right singular vectors by `torch.linalg.svd`, never by `AᵀA` in the precision of `A`.

    In float64 `AᵀA` has all digits of a float32 matrix. So for float32 the compiled kernels find k
    eigenvectors of `AᵀA` in float64, or `torch.linalg.eigh` where there are no kernels or where k
    is large. The whole basis is kept for the backward pass where it was computed.
    """

    solves = (SingularVectors,)
    always_converges = True

    def solve(
        self, problem: SingularVectors, *, init: Tensor | None = None, report: bool = True
    ) -> Outcome:
        A, weights = (*(x.detach() for x in problem.tensors), None)[:2]
        k, kept = problem.width, NOTHING
        if _reduces(problem):
            took("singular: reduction")
            rows = _reduced(weighted_gram(A, weights), k, problem.largest)
            values = sizes(rows, A, weights)
        else:
            took("singular: " + ("gram" if problem.single else "svd"))
            whole, spectrum = (_from_gram if problem.single else singular_basis)(A, weights)
            # A matrix that many problems share has one basis for each of them.
            whole = whole.expand(*problem.batch_shape, -1, -1)
            spectrum = spectrum.expand(*problem.batch_shape, -1)
            kept = SingularBasis(whole, spectrum)
            rows, values = whole[..., :k, :], spectrum[..., :k]
            if not problem.largest:
                rows, values = whole[..., -k:, :].flip(-2), spectrum[..., -k:].flip(-1)
        unknown, none, converged = without_report(problem.batch_shape, A.dtype, A.device)
        if not report:
            return Outcome(rows, values, unknown, unknown, none, converged, kept)
        spectrum = kept.values if isinstance(kept, SingularBasis) else all_values(A, weights)
        return Outcome(
            rows,
            values,
            residual_of(A, weights, rows, values),
            gap_of(spectrum, k, problem.largest).expand(problem.batch_shape),
            none.clone(),
            converged.clone(),
            kept,
        )

    def keeps(self, problem: Any) -> type[Kept]:
        return Nothing if _reduces(problem) else SingularBasis

    def takes_any_scale(self, problem: Any) -> bool:
        return True


def _reduces(problem: SingularVectors) -> bool:
    """Whether compiled kernels find the vectors of `AᵀWA` in float64."""
    A, k, n = problem.tensors[0], problem.width, problem.n
    return problem.single and is_compiled(A.new_empty((1, 1)).expand(n, n), k)


def _reduced(gram: Tensor, k: int, largest: bool) -> Tensor:
    """The vectors of the k largest or smallest eigenvalues as rows, `(*, k, n)`."""
    _, rows, failed = native.largest_pairs(gram, k, largest)
    if failed is not None:
        vectors = torch.linalg.eigh(gram[failed]).eigenvectors
        vectors = vectors[..., -k:].flip(-1) if largest else vectors[..., :k]
        rows[failed] = vectors.mT
    return rows


def _from_gram(A: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """`singular_basis` for numbers that float32 holds, by their Gram matrix in float64."""
    squares, vectors = torch.linalg.eigh(weighted_gram(A, weights))
    rows = vectors.flip(-1).mT
    found = sizes(rows, A, weights)
    # Images of null vectors are rounding, and a wide matrix has a known number of them.
    found = padded(found[..., : A.shape[-2]], A.shape[-1])
    return rows, found


def all_values(A: Tensor, weights: Tensor | None) -> Tensor:
    """All singular values of `√W A`, descending, with zeros if it is wide, `(*, n)`."""
    return padded(torch.linalg.svdvals(rooted(A, weights)), A.shape[-1])


def gap_of(spectrum: Tensor, k: int, largest: bool) -> Tensor:
    """The distance from the k requested singular values to the next; infinite if there is none."""
    n = spectrum.shape[-1]
    if k == n:
        return torch.full_like(spectrum[..., 0], torch.inf)
    inside, outside = (k - 1, k) if largest else (n - k, n - k - 1)
    return (spectrum[..., inside] - spectrum[..., outside]).abs()


def residual_of(A: Tensor, weights: Tensor | None, rows: Tensor, values: Tensor) -> Tensor:
    """`max ‖AᵀWAy − σ²y‖/‖√W A‖²` over the vectors, `(*,)`."""
    image = weighted(rows @ A.mT, weights) @ A
    size = torch.linalg.matrix_norm(rooted(A, weights)).square()
    rest = norm(image - values.square().unsqueeze(-1) * rows).amax(-1)
    return rest / torch.where(size == 0, 1, size)
