"""Eigenvectors of complex matrices, by the real embedding of `linalg/embedding.py`, or by kernels.

Compiled kernels find and differentiate the eigenvectors of small matrices. Everything else is
embedded.

An eigenvector of a Hermitian matrix is free up to its phase. Its embedding has pairs of
eigenvectors, those of `y` and of `iy`, whose span does not depend on the phase, and the derivatives
of functions of the span of equal eigenvalues are exact to every order. The vector `y` with the
phase that `reference` fixes is such a function; the phase is fixed by differentiable operations,
after the solve.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pmaf.gradients import Gradient, Implicit
from pmaf.gradients.base import Reverse
from pmaf.layers.eigenvectors import PrincipalEigenvectors
from pmaf.linalg.embedding import (
    complex_rows,
    excess,
    independent_rows,
    paired_rows,
    real_matrix,
    real_rows,
    unpaired_rows,
)
from pmaf.operators.base import Operator
from pmaf.operators.embedded import embedded
from pmaf.reductions.phases import phases
from pmaf.runtime.log import took
from pmaf.solution import Certificate, Solution
from pmaf.solvers import Adaptive, Krylov, Solver
from pmaf.solvers.auto import best_eigenvectors
from pmaf.solvers.base import Outcome
from pmaf.tangent.complement import COMPILED_ROWS
from pmaf.tangent.kept import Decomposition


@dataclass(frozen=True, eq=False)
class EmbeddedEigenvectors(PrincipalEigenvectors):
    """Eigenvectors of the embedding of a Hermitian matrix, in pairs of `y` and `iy`."""

    copies: ClassVar[int] = 2

    def best_solver(self) -> Solver:
        return best_eigenvectors(self.changed(k=1) if self.width == 2 else self)

    def _run(
        self, solver: Solver, gradient: Gradient, init: Tensor | None, report: bool, throw: bool
    ) -> Outcome:
        require_implicit(gradient)
        return super()._run(solver, gradient, init, report, throw)

    def solved_by(self, solver: Solver, init: Tensor | None, report: bool) -> Outcome:
        # One vector of a pair gives the other. But a search has to find both, to tell the next
        # eigenvalue from the second copy of the first.
        searched = isinstance(solver, Adaptive) and self.n > COMPILED_ROWS
        if self.width > 2 or searched or isinstance(solver, Krylov):
            return super().solved_by(solver, init, report)
        return PrincipalEigenvectors.solved_by(self.changed(k=1), solver, init, report)

    def finished(self, outcome: Outcome) -> Outcome:
        rows, values, kept = outcome.value, outcome.multiplier, outcome.kept
        if isinstance(kept, Decomposition):
            # Rounding separates equal eigenvalues; with their mean, they are exactly equal again.
            equal = means(kept.values).repeat_interleave(2, -1)
            kept = Decomposition(kept.rows, equal)
            values = equal.flip(-1)[..., : self.width]
        if rows.shape[-2] == 1:
            y, values = complex_rows(rows), values[..., :1]
        else:
            y, values = independent(complex_rows(rows), values), means(values)
        return outcome._replace(
            value=paired_rows(y), multiplier=values.repeat_interleave(2, -1), kept=kept
        )


def require_implicit(gradient: Gradient) -> None:
    """Raise an error unless complex eigenvectors can be differentiated by this rule."""
    if not isinstance(gradient, Implicit):
        raise TypeError(
            f"gradient={gradient!r} needs real eigenvectors, which are unique up to a sign; "
            "use gradient=Implicit() for a complex matrix"
        )


def means(values: Tensor) -> Tensor:
    """The mean of each pair, `(*, 2k)` to `(*, k)`."""
    return values.unflatten(-1, (-1, 2)).mean(-1)


def independent(
    y: Tensor, values: Tensor, dual: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Orthonormal rows `(*, k, n)` from `(*, 2k, n)` in pairs with values `(*, 2k)`, descending.

    If all eigenvalues are apart, the rows of a pair are multiples of each other, and one of them
    is taken. Where eigenvalues are equal, rows of different pairs are mixed. The inner product is
    `xᴴMy` if `dual` multiplies rows of the whole batch by M.
    """
    k, n = y.shape[-2] // 2, y.shape[-1]
    options: dict[str, Any] = {} if dual is None else {"dual": dual}
    rows = y[..., ::2, :]
    away = excess(rows, **options)
    # Newton's step towards orthonormal rows squares the error.
    found = rows - 0.5 * away @ rows
    mixed = away.abs().amax((-2, -1)) > torch.finfo(y.dtype).eps ** 0.5
    if mixed.any():
        took("ied: mixed pairs")
        mixed = mixed if dual is None else torch.ones_like(mixed)
        chosen = independent_rows(
            y[mixed].reshape(-1, 2 * k, n), values[mixed].reshape(-1, 2 * k), **options
        )
        found[mixed] = chosen.reshape(found[mixed].shape)
    return found


@PrincipalEigenvectors.case(lambda x: x.M is None and x.A.dtype.is_complex)
@dataclass(frozen=True, eq=False)
class ComplexEigenvectors(PrincipalEigenvectors):
    """`PrincipalEigenvectors` of a Hermitian matrix, by its embedding."""

    def reduced(
        self, init: Tensor | None, solver: Solver
    ) -> tuple[Any, Tensor | None, Callable[..., Solution]]:
        self.require_reference()
        posed = self.embedding(self.A if self.largest else -self.A, True)
        if init is not None:
            columns = self.columns(init)
            init = paired_rows(columns.expand(*columns.shape[:-1], self.count).mT).mT
        return posed, init, self.present

    def embedding(self, A: Tensor | Operator, largest: bool) -> PrincipalEigenvectors:
        """The real problem, of `A` in the place of the own matrix."""
        k, skip = 2 * self.count, 2 * self.skip
        return EmbeddedEigenvectors(embedded(A), k, largest, skip=skip)

    def present(self, outcome: Outcome) -> Solution:
        rows, values, residual, gap, iterations, converged = outcome.tensors
        first = 2 * self.skip
        y, values = unpaired_rows(rows[..., first:, :]), values[..., first::2]
        if self.flipped:
            y, values = y.flip(-2), values.flip(-1)
        # New tensors, not views of what the backward pass uses: a user may write into them.
        vectors = y * phases(self.directions(y), self.reference_rows(y, False))
        values = values.clone() if self.largest else -values
        if self.k is None:
            vectors, values = vectors.squeeze(-2), values.squeeze(-1)
        else:
            vectors = vectors.mT
        reported = residual, gap, iterations, converged
        return Solution(vectors, values, *reported, method=outcome.method)

    def certified(self, value: Tensor) -> Certificate:
        posed = self.embedding(self.A, self.largest)
        return posed.certify(paired_rows(self.columns(value).mT).mT)


@dataclass(frozen=True, eq=False)
class HermitianEigenvectors(PrincipalEigenvectors):
    """Eigenvectors of a complex matrix, in the default phase, that the kernels have found.

    The kernels differentiate once. Other derivatives are those of the embedding, in fewer steps
    than by the common path: the phase makes the sum of `y` real, so that an incoming gradient `v`
    counts as `v + i·Im(vᴴy)/Σy`, which is orthogonal to `iy`.
    """

    def gradients(self, given: Reverse) -> tuple[Tensor | None, ...]:
        given = given.as_rows() if self.single else given
        (A,), y, state, _, v, d, _ = given
        posed = _embedded(y.shape[-2], self.largest)
        embedding: Any = torch.func.vjp(real_matrix, A)
        E, pull = embedding
        (dE,) = posed.gradients(
            given._replace(
                tensors=(E,),
                y=paired_rows(y),
                state=state._replace(shift=state.shift.repeat_interleave(2, -1)),
                v=None if v is None else _paired(real_rows(_along(y, v)), -2),
                d_multiplier=None if d is None else _paired(d, -1),
            )
        )
        return pull(dE)


def _along(y: Tensor, v: Tensor) -> Tensor:
    """The gradient that comes in for the span of `y`, given that for `y` in the default phase."""
    turn = (v.conj() * y).sum(-1, keepdim=True).imag / y.sum(-1, keepdim=True).real
    return v + torch.complex(torch.zeros_like(turn), turn)


def _paired(x: Tensor, dim: int) -> Tensor:
    """The slices along a negative `dim`, each of them followed by zeros."""
    return torch.stack([x, torch.zeros_like(x)], dim).flatten(dim - 1, dim)


@functools.lru_cache(maxsize=64)
def _embedded(k: int, largest: bool) -> Any:
    options = {"k": 2 * k, "largest": largest, "symmetric": True, "skip": 0}
    return EmbeddedEigenvectors.read(options)
