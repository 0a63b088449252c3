"""Eigenvectors of a pair of dense matrices, by Cholesky's factor of `M`, or by kernels.

The derivative does not go through the factor: with `z` from `(λM − A)z = v − My(yᵀv)`, `yᵀMz = 0`,

    ∂L/∂A = ½(zyᵀ + yzᵀ) + ∂L/∂λ yyᵀ,   ∂L/∂M = −λ ∂L/∂A − ½(yᵀv) yyᵀ.

For several vectors with `N = YᵀV`, the symmetric part of `N` takes the place of `yᵀv`, and `z` has
a part inside the span for the antisymmetric part alone, so that functions of the span need no
division by the differences of the eigenvalues.

Rounding errors of the factor are multiplied by the condition of `M`. At the small end of the
spectrum they would be the largest errors of all, in `eigh(a, b)` of LAPACK, too. So solutions of
both systems are refined by residuals in the given variables, in which there is no factor (Davies,
Higham and Tisseur, SIAM J. Matrix Anal. Appl. 23, 2001).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pmaf import native
from pmaf.gradients import Gradient, Implicit
from pmaf.gradients.base import Reverse
from pmaf.gradients.eigenvectors import (
    EigenConditions,
    differences,
    normal_part,
    symmetric_newton,
    symmetric_product,
    without,
)
from pmaf.layers.eigenvectors import PrincipalEigenvectors
from pmaf.layers.hermitian import ComplexEigenvectors, EmbeddedEigenvectors, require_implicit
from pmaf.layers.pairs import Pair, is_complex_search, refuse_metric
from pmaf.linalg.decompositions import cholesky
from pmaf.linalg.embedding import complex_rows, paired_rows, real_matrix
from pmaf.linalg.pencil import Pencil, Root, normalised, rayleigh_ritz, turned_inside
from pmaf.linalg.products import norm, symmetric_part
from pmaf.linalg.roundings import LOOSE, REFINED, ROUNDED, noise_tolerance
from pmaf.operators.base import Operator
from pmaf.operators.diagonal import Diagonal
from pmaf.runtime.log import took
from pmaf.runtime.modes import plain
from pmaf.solution import Certificate
from pmaf.solvers import Auto, Solver
from pmaf.solvers.base import Outcome
from pmaf.tangent.bordered import State
from pmaf.tangent.kept import NOTHING, Congruence, Decomposition, Kept, Nothing, Reduced


@Pair.case(lambda x: isinstance(x.A, Tensor) and isinstance(x.M, Tensor))
@dataclass(frozen=True, eq=False)
class PairedEigenvectors(Pair):
    """`PrincipalEigenvectors` of two dense matrices, both of which get gradients."""

    diagonal: ClassVar[bool] = False  # whether M is given as its diagonal

    def solved_by(self, solver: Solver, init: Tensor | None, report: bool) -> Outcome:
        A, M = self.tensors
        took("pairs: diagonal" if self.diagonal else "pairs: Cholesky")
        root = self.root(M, checked=True)
        C = root.reduced(A)
        if init is not None:
            init = root.turned(self.pencil(A, M).dual(init.mT)).mT
        found = self.found_alone(C, solver, init, report)
        if found.value.requires_grad:  # the solver is differentiated, and nothing else
            return found._replace(value=root.back(found.value))
        found = self._refined(found, root, C)
        kept = Congruence(root.inverse, C) if isinstance(found.kept, Nothing) else found.kept
        return found._replace(kept=kept)

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
        return Pencil.of(A, M, self.diagonal)

    def root(self, M: Tensor, checked: bool = False) -> Root:
        """An inverse root of `M`, differentiable; an error if there is none and it is checked.

        It is formed, because it is used six times in both passes, and products with it are several
        times faster than triangular solves. Its errors are about cond(T) roundings.
        """
        lower, info = cholesky(symmetric_part(M))
        # An infinite entry of the diagonal leaves a factor, whose inverse is zero there.
        bad = (info != 0) | ~lower.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)
        if checked and bool(bad.any()):
            refuse_metric(M, bad)
        eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device).expand_as(lower)
        return Root(torch.linalg.solve_triangular(lower, eye, upper=False), False)

    def found_alone(self, C: Tensor, solver: Solver, init: Tensor | None, report: bool) -> Outcome:
        """The solution for the matrix to which the pair reduces."""
        return self.alone(C).solved_by(solver, init, report)

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
        if isinstance(kept, Decomposition) and values is not first:
            # The requested values are the last, and differ from those of C by its errors.
            others = kept.values[..., : -values.shape[-1]]
            kept = Decomposition(kept.rows, torch.cat([others, values.flip(-1)], -1))
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
        return turned_inside(rows, rest, dual, values, near)

    def separated(self, rows: Tensor, pair: Pencil, by: Any) -> tuple[Tensor, Tensor]:
        """Rows in the span of `rows`, by one of two functions below, and their values."""
        return by(rows, rows @ pair.A, pair.dual(rows))

    def divided(self, unit: Tensor) -> Any:
        # Eigenvalues are proportional to A; in M they are of degree −1.
        A = self.matrix / unit[..., None, None]
        return self.changed(A=A, M=self.M.to(A.dtype))

    def is_differentiated(
        self, tensors: tuple[Tensor, ...], kept: Kept, d_multiplier: Tensor | None
    ) -> bool:
        return isinstance(kept, Reduced)

    def kept_again(self, tensors: tuple[Tensor, ...], kind: type[Kept]) -> Kept:
        if kind is not Reduced:
            return super().kept_again(tensors, kind)
        A, M = (x.detach() for x in tensors)
        _, kept = native.largest_of_pair(A, M, self.k, self.largest, keep=True)
        return kept or NOTHING

    def first_gradients(
        self,
        tensors: tuple[Tensor, ...],
        y: Tensor,
        kept: Kept,
        v: Tensor | None,
        d_multiplier: Tensor | None,
        needs: Sequence[bool],
    ) -> native.Gradients:
        assert isinstance(kept, Reduced)
        took("pairs: compiled gradient")
        dtype = tensors[0].dtype
        return native.pair_gradients(kept, v, d_multiplier, dtype, self.largest, needs)

    def gradients(self, given: Reverse) -> tuple[Tensor | None, ...]:
        given = given.as_rows() if self.single else given
        tensors, y, state, _, v, d_multiplier, needs = given
        if not self.largest:  # the largest of −A
            tensors, state = (-tensors[0], tensors[1]), state._replace(shift=-state.shift)
            d_multiplier = None if d_multiplier is None else -d_multiplier
        along = None if d_multiplier is None else d_multiplier.unsqueeze(-1) * y
        z, normal = along, None
        if v is not None:
            A, M = tensors
            kept = state.kept
            if isinstance(kept, (Congruence, Reduced)):
                state = state._replace(kept=NOTHING)
            if isinstance(kept, Congruence) and not torch.is_grad_enabled():
                root, C = Root(kept.inverse, self.diagonal), kept.matrix
            else:
                root = self.root(M)
                C = root.reduced(A)
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
        return dA, -self.metric_gradient(z, y)

    def metric_gradient(self, z: Tensor, y: Tensor) -> Tensor:
        """The symmetric part of `Σ zyᵀ`, as a gradient of `M`."""
        return symmetric_product(z, y)

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
        if self.single:
            found = found._replace(multiplier=found.multiplier.unsqueeze(-1))
        pair = self.pencil(*self.tensors)
        step = symmetric_newton(self.matrix, root.reduced(A), found, (pair.dual, root.back))
        return step if not self.single else lambda u: step(u.unsqueeze(-2)).squeeze(-2)


_AUTO, _IMPLICIT = Auto(), Implicit()
# Each step reduces errors by about eps times the conditions of A and M.
_REFINEMENTS = 3


@Pair.case(lambda x: isinstance(x.A, Tensor) and isinstance(x.M, Diagonal))
@dataclass(frozen=True, eq=False)
class DiagonalPair(PairedEigenvectors):
    """The same for a diagonal `M`, of which the diagonal is a tensor."""

    inputs: ClassVar[dict[str, int]] = {"A": 2, "M": 1}
    diagonal: ClassVar[bool] = True

    @classmethod
    def of(cls, problem: Any) -> Any:
        return cls.like(problem, M=problem.M.d)

    def with_parts(self, parts: dict[str, Tensor]) -> Any:
        return self.changed(**parts)  # M is a vector here, which the checks would refuse

    def root(self, M: Tensor, checked: bool = False) -> Root:
        bad = ~((M > 0) & M.isfinite()).all(-1)
        if checked and bool(bad.any()):
            refuse_metric(M, bad)
        return Root(M.rsqrt(), True)

    def metric_gradient(self, z: Tensor, y: Tensor) -> Tensor:
        return (z * y).sum(-2)

    def certified(self, value: Tensor) -> Certificate:
        return Pair.like(self, M=Diagonal(self.M)).certified(value)


@dataclass(frozen=True, eq=False)
class EmbeddedPairedEigenvectors(PairedEigenvectors):
    """Eigenvectors of the embeddings of two Hermitian matrices, in pairs of `y` and `iy`."""

    copies: ClassVar[int] = 2

    def _run(
        self, solver: Solver, gradient: Gradient, init: Tensor | None, report: bool, throw: bool
    ) -> Outcome:
        require_implicit(gradient)
        return super()._run(solver, gradient, init, report, throw)

    def best_solver(self) -> Solver:
        return self.alone(self.matrix).best_solver()

    def alone(self, C: Tensor | Operator) -> PrincipalEigenvectors:
        return EmbeddedEigenvectors.like(self, A=C, M=None, reference=None)

    def found_alone(self, C: Tensor, solver: Solver, init: Tensor | None, report: bool) -> Outcome:
        alone = self.alone(C)
        return alone.finished(alone.solved_by(solver, init, report))

    def turned(
        self, rows: Tensor, rest: Tensor, dual: Tensor, values: Tensor, near: Tensor
    ) -> Tensor:
        # Every second row is i times the one before, and has to stay so in spite of rounding.
        y, r, d = (complex_rows(x[..., ::2, :]) for x in (rows, rest, dual))
        return paired_rows(turned_inside(y, r, d, values[..., ::2], near[..., ::2, ::2]))

    def separated(self, rows: Tensor, pair: Pencil, by: Any) -> tuple[Tensor, Tensor]:
        one = rows[..., ::2, :]
        y, values = by(*map(complex_rows, (one, one @ pair.A, pair.dual(one))))
        return paired_rows(y), values.repeat_interleave(2, -1)


@PrincipalEigenvectors.case(
    lambda x: x.M is not None and x.A.dtype.is_complex and not is_complex_search(x)
)
@dataclass(frozen=True, eq=False)
class ComplexPair(ComplexEigenvectors):
    """A pair of dense Hermitian matrices, by their embeddings."""

    inputs: ClassVar[dict[str, int]] = {"A": 2, "M": 2}

    @classmethod
    def of(cls, problem: Any) -> Any:
        M = problem.M
        return cls.like(problem, M=torch.diag_embed(M.d) if isinstance(M, Diagonal) else M)

    def directions(self, rows: Tensor) -> Tensor:
        return rows / norm(rows.detach()).unsqueeze(-1)

    def embedding(self, A: Any, largest: bool) -> PrincipalEigenvectors:
        if not torch.compiler.is_compiling():  # a trace cannot follow a log
            took("pairs: complex")
        k, skip, M = 2 * self.count, 2 * self.skip, real_matrix(self.M)
        return EmbeddedPairedEigenvectors(real_matrix(A), k, largest, skip=skip, M=M)


@dataclass(frozen=True, eq=False)
class HermitianPair(PairedEigenvectors):
    """Eigenvectors of a pair of complex matrices, in the default phase, found by the kernels."""

    def gradients(self, given: Reverse) -> tuple[Tensor | None, ...]:
        # The common path, solved again, which can be differentiated again.
        (A, M), needs = given.tensors, given.needs
        wanted = [x for x, need in zip(given.tensors, needs) if need]
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            found = PrincipalEigenvectors(A, self.k, self.largest, M=M).run(
                _AUTO, _IMPLICIT, report=False
            )
            rows = found.value if self.k is None else found.value.mT
            both = ((rows, given.v), (found.multiplier, given.d_multiplier))
            outputs, incoming = zip(*((x, dx) for x, dx in both if dx is not None))
            gradients = torch.autograd.grad(outputs, wanted, incoming, create_graph=again)
        left = iter(gradients)
        return tuple(next(left) if need else None for need in needs)
