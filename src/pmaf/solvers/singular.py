"""Right singular vectors from the matrix itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf import native
from pmaf.linalg.decompositions import eigh
from pmaf.linalg.embedding import complex_matrix, paired_rows
from pmaf.linalg.products import norm
from pmaf.linalg.singular import (
    padded,
    pair_basis,
    rooted,
    singular_basis,
    sizes,
    weighted,
    weighted_gram,
)
from pmaf.runtime.log import took
from pmaf.solvers.base import Course, Outcome, SingularVectors, Solver, Triplets, has_form
from pmaf.solvers.report import without_report
from pmaf.tangent.kept import NOTHING, Kept, SingularBasis


@dataclass(frozen=True)
class SVD(Solver):
    """Right singular vectors by `torch.linalg.svd`, never by `AᵀA` in the precision of `A`.

    In float64 `AᵀA` has all digits of a float32 matrix, so that for these it is decomposed instead,
    by `torch.linalg.eigh`, which is faster. The whole basis is kept for the backward pass.

    >>> import torch, pmaf
    >>> A = torch.tensor([[3.0, -4.0], [6.0, -8.0]])
    >>> pmaf.nullspace(A, solver=pmaf.solvers.SVD()).round(decimals=3)
    tensor([0.8000, 0.6000])
    """

    solves = (SingularVectors,)
    always_converges = True

    def solve(
        self, problem: SingularVectors, *, init: Tensor | None = None, report: bool = True
    ) -> Outcome:
        A, weights = _fixed(problem)
        k, by_gram = problem.width, _is_by_gram(problem)
        took("singular: gram" if by_gram else "singular: svd")
        paired = problem.copies == 2
        if paired:
            # Complex vectors give exact pairs, and take half the time of the embedding.
            A = complex_matrix(A)
            weights = None if weights is None else weights[..., ::2]
        if has_form(problem, Triplets):
            rows, spectrum = pair_basis(A)
        else:
            rows, spectrum = (_from_gram if by_gram else singular_basis)(A, weights)
        if paired:
            rows, spectrum = paired_rows(rows), spectrum.repeat_interleave(2, -1)
        kept = SingularBasis(rows, spectrum)
        rows, values = rows[..., :k, :], spectrum[..., :k]
        if not problem.largest:
            rows, values = kept.rows[..., -k:, :].flip(-2), spectrum[..., -k:].flip(-1)
        return _outcome(problem, rows, values, spectrum if report else None, kept)

    def keeps(self, problem: Any) -> type[Kept]:
        return SingularBasis

    def course(self, problem: Any) -> Course:
        by_gram = _is_by_gram(problem)
        return Course(
            "a decomposition of the Gram matrix AᵀA in float64"
            if by_gram
            else "singular value decomposition"
        )


def _is_by_gram(problem: SingularVectors) -> bool:
    """Whether the Gram matrix has all digits of the matrix, and is all that is needed."""
    return problem.single and not has_form(problem, Triplets)


def solve_reduced(problem: SingularVectors, report: bool) -> Outcome:
    """The outcome by compiled kernels, for numbers that float32 holds in tensors of float64."""
    took("singular: reduction")
    A, weights = _fixed(problem)
    rows = _reduced(weighted_gram(A, weights), problem.width, problem.largest)
    values = sizes(rows, A, weights)
    if has_form(problem, Triplets):
        rows, values = _with_partners(A, rows, values, problem.largest)
    spectrum = all_values(A, weights) if report else None
    return _outcome(problem, rows, values, spectrum, NOTHING)


def _fixed(problem: SingularVectors) -> tuple[Tensor, Tensor | None]:
    A, weights = (*(x.detach() for x in problem.tensors), None)[:2]
    assert A is not None
    return A, weights


def _outcome(
    problem: SingularVectors, rows: Tensor, values: Tensor, spectrum: Tensor | None, kept: Kept
) -> Outcome:
    """An outcome, with a report if all singular values are known."""
    A, weights = _fixed(problem)
    unknown, none, converged = without_report[problem.batch_shape, A.dtype, A.device]
    if spectrum is None:
        return Outcome(rows, values, unknown, unknown, none, converged, kept)
    copies = problem.copies
    return Outcome(
        rows,
        values,
        residual_of(A, weights, rows, values),
        gap_of(spectrum[..., ::copies], -(-problem.width // copies), problem.largest),
        none.clone(),
        converged.clone(),
        kept,
    )


def _reduced(gram: Tensor, k: int, largest: bool) -> Tensor:
    """The vectors of the k largest or smallest eigenvalues as rows, `(*, k, n)`."""
    _, rows, failed = native.largest_pairs(gram, k, largest)
    if failed is not None:
        vectors = eigh(gram[failed]).vectors
        vectors = vectors[..., -k:].flip(-1) if largest else vectors[..., :k]
        rows[failed] = vectors.mT
    return rows


def _with_partners(A: Tensor, rows: Tensor, values: Tensor, largest: bool) -> tuple[Tensor, Tensor]:
    """Left vectors `Av/σ` beside the right ones; by a decomposition where σ is small."""
    k = rows.shape[-2]
    small = (values < _SMALL * torch.linalg.matrix_norm(A).unsqueeze(-1)).any(-1)
    left = (rows @ A.mT) / torch.where(values > 0, values, 1).unsqueeze(-1)
    rows = torch.cat([left, rows], -1)
    some = small | (values <= 0).any(-1)
    if bool(some.any()):
        took("singular: svd of some")
        whole, spectrum = pair_basis(A[some])
        whole = whole[..., :k, :] if largest else whole[..., -k:, :].flip(-2)
        rows[some] = whole
        values[some] = spectrum[..., :k] if largest else spectrum[..., -k:].flip(-1)
    return rows, values


# Of a smaller singular value, relative to the norm, `Av/σ` has too few digits.
_SMALL = 1e-3


def _from_gram(A: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """`singular_basis` for numbers that float32 holds, by their Gram matrix in float64."""
    vectors = eigh(weighted_gram(A, weights)).vectors
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
    """`max ‖AᵀWAy − σ²y‖/‖√W A‖²` over the right vectors, `(*,)`."""
    rows = rows[..., -A.shape[-1] :]
    image = weighted(rows @ A.mT, weights) @ A
    size = torch.linalg.matrix_norm(rooted(A, weights)).square()
    rest = norm(image - values.square().unsqueeze(-1) * rows).amax(-1)
    return rest / torch.where(size == 0, 1, size)
