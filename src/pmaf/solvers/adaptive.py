"""Products with the matrix where they settle it, a decomposition where they do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pmaf.errors import require_at_least, require_not_negative
from pmaf.krylov.power import Dominant, dominant, longest_row
from pmaf.krylov.proved import Ritz, certificate, polish, ritz
from pmaf.linalg.symmetric import SymmetricPart, right_product
from pmaf.runtime.log import took
from pmaf.solvers.base import Outcome, Solver
from pmaf.solvers.dense import Dense
from pmaf.solvers.report import outcome, without_report

if TYPE_CHECKING:
    from pmaf.layers.ied import PrincipalEigenvectors


@dataclass(frozen=True)
class Adaptive(Solver):
    """Whatever finds the eigenvectors of the matrices at hand fastest, with proof.

    A few power steps if one eigenvalue dwarfs the rest; then, for a symmetric matrix, a
    Krylov space and a Cholesky factorisation that proves its completeness; then `Dense()`.
    Each attempt costs little of what comes after it, and a vector is accepted only if its
    residual is that of a full decomposition.

    Args:
        power_from: Entries of all matrices together, n² each, from which power steps are
            tried on symmetric ones; infinity for never.
        general_from: The same for matrices that are not symmetric.
        krylov_from: The same for a Krylov space.
        krylov_size: The least n for a Krylov space.

    The defaults are about where the attempts cross a decomposition in
    `pmaf bench ied-crossover` on two cores; another machine may want others.
    """

    power_from: float = 12_000
    general_from: float = 500  # `eig` takes longer than `eigh`
    krylov_from: float = 200_000
    krylov_size: int = 224

    serves = ("PrincipalEigenvectors",)
    certain = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("power_from", "general_from", "krylov_from"):
            require_not_negative(name, getattr(self, name), infinite=True)
        require_at_least("krylov_size", self.krylov_size, 1)

    def solve(
        self, problem: PrincipalEigenvectors, *, init: Tensor | None = None, report: bool = True
    ) -> Outcome:
        n, k = problem.n, problem.width
        A = problem.matrix.reshape(-1, n, n)
        work = A.numel()
        tolerance = TOLERANCE * torch.finfo(A.dtype).eps
        if work >= self.general_from and not problem.symmetric:
            A = A.contiguous()

            def product(x: Tensor) -> Tensor:
                return right_product(A, x)

            def is_positive() -> bool:
                return bool(A.amin() > 0)

            start = longest_row(A, product)
            found = dominant(product, product, start, tolerance, False, is_positive)
            if found is not None:
                took("ied: power steps")
                return _outcome(problem, found, report)
        power, krylov = work >= self.power_from and k == 1, self.takes_krylov(work, n, k)
        if problem.symmetric and (power or krylov):
            part = SymmetricPart(A)
            found = None
            if power:
                start = longest_row(part.matrix, part)
                found = dominant(part, part.exact, start, tolerance, symmetric=True)
            if found is not None:
                took("ied: power steps")
                return _outcome(problem, found, report)
            if krylov:
                both = _krylov(problem, part, tolerance)
                if both is not None:
                    took("ied: Krylov space")
                    found, factor = both
                    shape = (*problem.batch_shape, n, n)
                    return _outcome(problem, found, report)._replace(basis=factor.view(shape))
        return _DENSE.solve(problem, report=report)

    def takes_krylov(self, work: int, n: int, k: int) -> bool:
        """Whether a Krylov space is tried, for `work` entries of all matrices together."""
        return work >= self.krylov_from and n >= self.krylov_size and k <= n // 16

    def any_scale(self, problem: PrincipalEigenvectors) -> bool:
        return problem.matrix.numel() < min(self.power_from, self.krylov_from) and _DENSE.any_scale(
            problem
        )

    def advice(self) -> str:
        return _DENSE.advice()


def _krylov(
    problem: PrincipalEigenvectors, part: SymmetricPart, tolerance: float
) -> tuple[Ritz, Tensor] | None:
    """Eigenpairs and Cholesky factors; None where most entries would have to be decomposed."""
    n, k = problem.n, problem.width
    found = ritz(part, k, tolerance, _limit(n))
    if found is None:
        return None
    factor, exists = certificate(part, found)
    found = polish(part, found._replace(found=exists), factor, tolerance)
    good = exists & (found.residual <= tolerance)
    left = len(good) - int(good.sum())
    if left == 0:
        return found, factor
    if 2 * left > len(good):
        return None
    bad = ~good
    values, vectors = torch.linalg.eigh(part.matrix[bad])
    rows, top = found.rows.clone(), found.values.clone()
    rows[bad] = vectors[..., -k:].flip(-1).mT
    top[bad] = values[..., -k:].flip(-1)
    found = found._replace(values=top, rows=rows)
    again, exists = certificate(part, found, bad)
    # Without a factor, because the next eigenvalue is too close, the backward pass knows.
    factor[bad] = torch.where(exists[:, None, None], again, torch.nan)
    return found, factor


def _outcome(problem: PrincipalEigenvectors, found: Dominant | Ritz, report: bool) -> Outcome:
    batch, n, k = problem.batch_shape, problem.n, problem.width
    rows = found.rows.reshape(*batch, k, n)
    unknown, none, converged = without_report(batch, rows.dtype, rows.device)
    values = found.values.reshape(*batch, k)
    if report:
        return outcome(
            problem,
            values,
            rows.mT,
            residual=found.residual.reshape(batch),
            iterations=none + found.products,
            converged=converged.clone(),
            report=True,
        )
    # How far apart the moduli seem to be tells the backward pass how many terms to take.
    gap = (1 - found.rate) * values.abs().squeeze(-1) if isinstance(found, Dominant) else unknown
    basis, spread = rows[..., :0, :], values[..., :0]
    return Outcome(rows, values, unknown, gap, none, converged, basis, spread)


_DENSE = Dense()

# On ‖Ay − λy‖ relative to the largest modulus, in roundings: what eigh's are.
TOLERANCE = 6.0


def _limit(n: int) -> int:
    """Dimensions after which a Krylov space is given up; more of them save some and cost others.

    With 85 at n = 256 a GOE matrix is found in time, and one with a gap of 1e-4 takes
    longest of all: `pmaf bench ied-crossover`, "krylov" beside "dense".
    """
    return min(n * n // 2000, 160)
