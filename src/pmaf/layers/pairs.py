"""Pairs of matrices: `Ay = λMy` with `yᵀMy = 1`, for a symmetric positive definite `M`.

A factor `M = TTᵀ` reduces a dense pair to the matrix `C = T⁻¹AT⁻ᵀ`, whose eigenvectors are
`x = Tᵀy`. The derivative does not go through the factor: with `z` from `(λM − A)z = v − My(yᵀv)`,
`yᵀMz = 0`,

    ∂L/∂A = ½(zyᵀ + yzᵀ) + ∂L/∂λ yyᵀ,   ∂L/∂M = −λ ∂L/∂A − ½(yᵀv) yyᵀ.

For several vectors with `N = YᵀV`, the symmetric part of `N` takes the place of `yᵀv`, and `z` has
a part inside the span for the antisymmetric part alone, so that functions of the span need no
division by the differences of the eigenvalues.

Rounding errors of the factor are multiplied by the condition of `M`. At the small end of the
spectrum they would be the largest errors of all, in `eigh(a, b)` of LAPACK, too. So solutions of
both systems are refined by residuals in the given variables, in which there is no factor (Davies,
Higham and Tisseur, SIAM J. Matrix Anal. Appl. 23, 2001).

A pair of operators is searched in the inner product of `M`. The search and the derivative take
products with both and solves with `M`; nothing is factored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from pmaf import native
from pmaf.certificate import certify_eigenvectors_by_products
from pmaf.executors.eigenvectors import CompiledPairs
from pmaf.gradients.base import Reverse
from pmaf.gradients.by_products import Incoming, pair_gradients
from pmaf.gradients.eigenvectors import (
    EigenConditions,
    differences,
    normal_part,
    symmetric_newton,
    symmetric_product,
    without,
)
from pmaf.layers.eigenvectors import PrincipalEigenvectors, embedded_gradients
from pmaf.linalg.decompositions import cholesky
from pmaf.linalg.embedding import complex_rows, independent, means, paired_rows, real_rows
from pmaf.linalg.pencil import Pencil, Root, normalised, rayleigh_ritz, turned_inside
from pmaf.linalg.products import norm, symmetric_part
from pmaf.linalg.roundings import LOOSE, REFINED, ROUNDED, noise_tolerance, widened
from pmaf.operators.base import Operator
from pmaf.operators.diagonal import Diagonal
from pmaf.operators.inner import inner_product
from pmaf.operators.rows import Rows
from pmaf.reductions.metric import Change, refuse_metric
from pmaf.runtime.log import took
from pmaf.runtime.modes import plain
from pmaf.solution import Certificate
from pmaf.solvers import Solver
from pmaf.solvers.auto import Line
from pmaf.solvers.base import Course, Outcome
from pmaf.solvers.krylov import Krylov, find_eigenvectors
from pmaf.tangent.bordered import State
from pmaf.tangent.kept import NOTHING, Congruence, Kept, Nothing, Reduced
from pmaf.tangent.metric import Metric


class Seen(Rows):
    """Products with the operator `A` of a pair, and with its `M`."""

    def __init__(self, A: Operator, batch: torch.Size, own: Rows, metric: Metric) -> None:
        super().__init__(A, batch)
        self.own, self.metric = own, metric


@dataclass(frozen=True, eq=False)
class Pair(PrincipalEigenvectors):
    """`PrincipalEigenvectors` of two matrices as solvers take it; both get gradients.

    Both are dense, or both are operators. A diagonal `M` is a row `(*, 1, n)`.
    """

    inputs: ClassVar[dict[str, int]] = {"A": 2, "M": 2}
    homogeneous: ClassVar[int | None] = 1  # eigenvalues are of degree −1 in M

    def alone(self, C: Tensor | Operator) -> PrincipalEigenvectors:
        """The problem of one matrix, with the options of the pair."""
        one = PrincipalEigenvectors.__new__(PrincipalEigenvectors)
        for field in fields(self):
            object.__setattr__(one, field.name, getattr(self, field.name))
        return one.changed(A=C, M=None, reference=None)

    def choice(self) -> Line:
        return self.alone(self.A).choice()

    def solved_by(self, solver: Solver, init: Tensor | None, report: bool) -> Outcome:
        A, M = self.tensors
        took("pairs: diagonal" if _is_diagonal(M) else "pairs: Cholesky")
        root = self.root(M, checked=True)
        C = root.reduced(A)
        if init is not None:
            init = root.turned(self.pencil(A, M).dual(init.mT)).mT
        found = self.alone(C).solved_by(solver, init, report)
        if found.value.requires_grad:  # the solver is differentiated, and nothing else
            return found._replace(value=root.back(found.value))
        found = self._refined(found, root, C)
        return found._replace(kept=found.kept or Congruence(root.inverse, C))

    def may_keep(self, solver: Solver) -> tuple[type[Kept], ...]:
        kinds = self._reduced().may_keep(solver)
        return tuple(Congruence if kind is Nothing else kind for kind in kinds)

    def course(self, solver: Solver) -> Course:
        if self.operator is not None:
            return super().course(solver)
        inverse = "the diagonal of M" if _is_diagonal(self.M) else "a Cholesky factor of M"
        first, then = self._reduced().course(solver)
        return Course(
            f"{inverse} makes one matrix of the pair, then {first}, refined by Newton steps "
            "where the residuals of the pair are above rounding",
            then,
        )

    def _reduced(self) -> PrincipalEigenvectors:
        """The problem of one matrix of the shape that a dense pair reduces to."""
        n = self.n
        return self.alone(self.matrix.expand(*self.batch_shape, n, n))

    def may_fail(self, solver: Solver) -> bool:
        # The solver solves for the reduced matrix only.
        return True

    def advice(self, solver: Solver) -> str:
        if not solver.always_converges:
            return solver.advice()
        return (
            "M is nearly singular in this precision; use float64, or add a multiple of the identity"
        )

    def pencil(self, A: Tensor, M: Tensor) -> Pencil:
        """The pair in its own variables."""
        diagonal = _is_diagonal(M)
        return Pencil.of(A, M.squeeze(-2) if diagonal else M, diagonal)

    def root(self, M: Tensor, checked: bool = False) -> Root:
        """An inverse root of `M`, differentiable; an error if there is none and it is checked.

        It is formed, because it is used six times in both passes, and products with it are several
        times faster than triangular solves. Its errors are about cond(T) roundings.
        """
        if _is_diagonal(M):
            d = M.squeeze(-2)
            bad = ~((d > 0) & d.isfinite()).all(-1)
            if checked and bool(bad.any()):
                refuse_metric(d, bad)
            return Root(d.rsqrt(), True)
        lower, info = cholesky(symmetric_part(M))
        # An infinite entry of the diagonal leaves a factor, whose inverse is zero there.
        bad = (info != 0) | ~lower.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)
        if checked and bool(bad.any()):
            refuse_metric(M, bad)
        eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device).expand_as(lower)
        return Root(torch.linalg.solve_triangular(lower, eye, upper=False), False)

    def _refined(self, found: Outcome, root: Root, C: Tensor) -> Outcome:
        """The solution of the pair, given that for `C`.

        Where residuals `Ay − λMy` or inner products `yᵀMx` are above rounding, the vectors take
        steps of Newton's method, with the derivative at the solution for `C`. Vectors whose inner
        products stay far above rounding have not converged.
        """
        pair, rows = self.pencil(*self.tensors), root.back(found.value)
        first = values = found.multiplier
        state = State(first, found.gap, found.kept)
        x, away = root.turned(pair.dual(rows)), self._errors(pair, rows, values)
        for step in range(_REFINEMENTS):
            due = (away > 1).any(0)
            if not bool(due.any()):
                break
            took("pairs: refined")
            dual = pair.dual(rows)
            rest = rows @ pair.A - values.unsqueeze(-1) * dual
            inside = rest @ rows.mT
            conditions = EigenConditions(C, x, first, None, True, state)
            across = root.back(conditions.solve(root.turned(rest - inside @ dual)))
            moved = self.turned(rows, rest, dual, values, pair.are_near(values)) + across
            # A decomposition separates vectors of close values, up to rounding of the largest
            # value, and turns of first order remove that.
            moved, theirs = self.separated(moved, pair, normalised if step else rayleigh_ritz)
            left = self._errors(pair, moved, theirs)
            # Without a gap to the next eigenvalue, a step may lead away.
            better = (left <= away.clamp_min(1)).all(0) & (left.amax(0) < away.amax(0))
            due = due & better
            away, due = torch.where(due, left, away), due.unsqueeze(-1)
            values = torch.where(due, theirs, values)
            rows = torch.where(due.unsqueeze(-1), moved, rows)
        kept = found.kept
        if values is not first:
            kept = kept.with_values(values)  # they differ from those of C by its errors
        converged = found.converged & (pair.skewness(rows) <= LOOSE)
        return found._replace(value=rows, multiplier=values, converged=converged, kept=kept)

    def _errors(self, pair: Pencil, rows: Tensor, values: Tensor) -> Tensor:
        """Errors of residuals and of inner products, one for what is rounding, `(2, *)`."""
        residual = pair.errors(rows, values).amax(-1) / REFINED
        return torch.stack([residual, pair.skewness(rows) / ROUNDED])

    def turned(
        self, rows: Tensor, rest: Tensor, dual: Tensor, values: Tensor, near: Tensor
    ) -> Tensor:
        """Rows in the span of `rows`, nearer to eigenvectors; the arguments of `turned_inside`."""
        if self.copies == 1:
            return turned_inside(rows, rest, dual, values, near)
        # Every second row is i times the one before, and has to stay so in spite of rounding.
        y, r, d = (complex_rows(x[..., ::2, :]) for x in (rows, rest, dual))
        return paired_rows(turned_inside(y, r, d, values[..., ::2], near[..., ::2, ::2]))

    def separated(self, rows: Tensor, pair: Pencil, by: Any) -> tuple[Tensor, Tensor]:
        """Rows in the span of `rows`, by one of two functions of `pencil.py`, and their values."""
        if self.copies == 1:
            return by(rows, rows @ pair.A, pair.dual(rows))
        one = rows[..., ::2, :]
        y, values = by(*map(complex_rows, (one, one @ pair.A, pair.dual(one))))
        return paired_rows(y), values.repeat_interleave(2, -1)

    def is_differentiated(
        self, tensors: tuple[Tensor, ...], kept: Kept, d_multiplier: Tensor | None
    ) -> bool:
        return kept.compiled

    def kept_again(self, tensors: tuple[Tensor, ...], kind: type[Kept]) -> Kept:
        if kind is not Reduced:
            return super().kept_again(tensors, kind)
        A, M = (x.detach() for x in tensors)
        _, kept = native.largest_of_pair(A, M, self.k, self.largest, keep=True)
        return Reduced(*kept) if kept else NOTHING

    first_gradients = CompiledPairs.differentiate

    def gradients(self, given: Reverse) -> tuple[Tensor | None, ...]:
        given = given.as_rows() if self.single else given
        if given.tensors[0].is_complex():
            return embedded_gradients(self, given)
        tensors, y, state, _, v, d_multiplier, needs = given
        if not self.largest:  # the largest of −A
            tensors, state = (-tensors[0], tensors[1]), state._replace(shift=-state.shift)
            d_multiplier = None if d_multiplier is None else -d_multiplier
        along = None if d_multiplier is None else d_multiplier.unsqueeze(-1) * y
        z, normal = along, None
        if v is not None:
            A, M = tensors
            known = None if torch.is_grad_enabled() else state.kept.congruence
            if state.kept.of_pair:
                state = state._replace(kept=NOTHING)
            if known is None:
                root = self.root(M)
                C = root.reduced(A)
            else:
                root, C = Root(known.inverse, _is_diagonal(M)), known.matrix
            pair = self.pencil(A, M)
            x = root.turned(pair.dual(y))
            # Products in the given variables have no rounding errors of the factor.
            normal, near = normal_part(v @ y.mT, C, state.shift, state)
            # Vectors of a small value would get rounding errors of those of large ones.
            near = near & pair.are_near(state.shift)
            normal = torch.where(near, normal, 0)
            across = without(root.turned(v), x, normal, near)
            conditions = EigenConditions(C, x, state.shift, None, True, state)
            z = root.back(conditions.solve(across))
            with torch.no_grad():
                lacking = self._correction(conditions, root, pair, y, v, normal, z)
            z = z + lacking
            z = z if along is None else z + along
        assert z is not None
        dA = symmetric_product(z, y) if needs[0] else None
        if dA is not None and not self.largest:
            dA = -dA
        if not needs[1]:
            return dA, None
        z = state.shift.unsqueeze(-1) * z
        z = z if normal is None else z + 0.5 * normal @ y
        if _is_diagonal(tensors[1]):
            return dA, -(z * y).sum(-2, keepdim=True)
        return dA, -symmetric_product(z, y)

    def _correction(
        self,
        conditions: EigenConditions,
        root: Root,
        pair: Pencil,
        y: Tensor,
        v: Tensor,
        normal: Tensor,
        z: Tensor,
    ) -> Tensor:
        """What a solution `z` of `(λM − A)z = v` on the complement lacks, as a constant."""
        values, dual = conditions.values, pair.dual(y)
        across = v - normal @ dual
        # Inside the span, products that are zero up to rounding stay zero.
        rounding = pair.roundings(y, values)
        rounding = torch.maximum(rounding.unsqueeze(-1), rounding.unsqueeze(-2))
        difference, apart = differences(values, rounding)
        sizes = norm(v).unsqueeze(-1) * norm(y).unsqueeze(-2)
        apart = apart & ((across @ y.mT).abs() > noise_tolerance(v.dtype) * sizes)
        difference = torch.where(apart, difference, 1)
        found = z
        # A trace cannot look whether steps are needed, and takes one.
        for _ in range(_REFINEMENTS if plain(z) else 1):
            rest = across - (values.unsqueeze(-1) * pair.dual(found) - found @ pair.A)
            inside = rest @ y.mT
            outside, inside = rest - inside @ dual, torch.where(apart, inside, 0)
            size = pair.sizes(found, values) + norm(across)
            due = norm(outside + inside @ dual) > REFINED * pair.eps * size
            if plain(z):
                if not bool(due.any()):
                    break
                took("pairs: refined gradient")
            step = root.back(conditions.solve(root.turned(outside)))
            step = step + (inside / difference) @ y
            found = found + torch.where(due.unsqueeze(-1), step, 0)
        # The other parts inside the span are zero, which no residual shows.
        along = torch.where(apart, 0, pair.dual(found) @ y.mT)
        return found - along @ y - z

    def newton(
        self, fixed: Any, found: Outcome, solve: Callable[..., Outcome]
    ) -> Callable[[Tensor], Tensor]:
        A, M = fixed.tensors
        root = self.root(M)
        pair = self.pencil(*self.tensors)
        return symmetric_newton(self.matrix, root.reduced(A), found, (pair.dual, root.back))

    # By products.

    def solved_by_products(self, solver: Solver, init: Tensor | None) -> tuple[Outcome, Any]:
        if not isinstance(solver, Krylov):
            raise TypeError(
                f"{solver!r} does not know the inner product of {self.M!r}; use Auto() or Krylov()"
            )
        took("pairs: products, own solve" if self.M.solvable else "pairs: products")
        assert isinstance(self.A, Operator)
        seen = Seen(self.A, self.batch_shape, *self._inner_product(solver))
        outcome = seen.guarded(find_eigenvectors, self, solver, init, seen.metric)
        return outcome if self.copies == 1 else self._in_pairs(outcome), seen

    def _inner_product(self, solver: Krylov) -> tuple[Rows, Metric]:
        own = Rows(self.M, self.batch_shape)
        return own, inner_product(own, solver.tolerance_of(self.dtype))

    def gradients_by_products(self, given: Incoming) -> Sequence[Tensor | None]:
        seen: Any = given.seen
        return pair_gradients(self, given, seen.own, seen.metric)

    def _in_pairs(self, outcome: Outcome) -> Outcome:
        """The outcome in pairs of `y` and `iy`, orthonormal in the inner product of `M`."""
        seen = Rows(self.M, self.batch_shape)

        def dual(y: Tensor) -> Tensor:
            rows = real_rows(y).reshape(seen.entries, -1, self.n)
            return complex_rows(seen.of_symmetric_part(rows)).reshape(y.shape)

        y = independent(complex_rows(outcome.value), outcome.multiplier, dual)
        values = means(outcome.multiplier).repeat_interleave(2, -1)
        return outcome._replace(value=paired_rows(y), multiplier=values)

    def certified(self, value: Tensor) -> Certificate:
        """A certificate for the matrix to which a dense pair reduces, in float64, or by products.

        `feasibility` is the largest entry of `YᵀMY − I`.
        """
        if not isinstance(self.A, Operator):
            A, M = (widened(x.detach()) for x in self.tensors)
            change = Change(Diagonal(M.squeeze(-2)) if _is_diagonal(M) else M)
            x = change.forth(widened(value.detach()))
            return self.alone(change.reduced(A)).certified(x)
        fixed = self.with_flat([x.detach() for x in self.flat])
        _, metric = fixed._inner_product(Krylov())
        return certify_eigenvectors_by_products(fixed, value, metric)


def _is_diagonal(M: Any) -> bool:
    """Whether a metric is its diagonal as a row; for n = 1 there is no difference."""
    return isinstance(M, Tensor) and M.shape[-2] == 1 < M.shape[-1]


# Each step reduces errors by about eps times the conditions of A and M.
_REFINEMENTS = 3
