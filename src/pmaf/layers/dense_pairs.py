"""Eigenvectors of a pair of dense matrices, by Cholesky's factor of `M`, or by kernels.

The derivative does not go through the factor: with `z` from `(λM − A)z = v − My(yᵀv)`, `yᵀMz = 0`,

    ∂L/∂A = ½(zyᵀ + yzᵀ) + ∂L/∂λ yyᵀ,   ∂L/∂M = −λ ∂L/∂A − ½(yᵀv) yyᵀ.

For several vectors with `N = YᵀV`, the symmetric part of `N` takes the place of `yᵀv`, and `z` has
a part inside the span for the antisymmetric part alone, so that functions of the span need no
division by the differences of the eigenvalues.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf import native
from pmaf.autograd.attach import attach_found, attach_some
from pmaf.gradients.base import Reverse
from pmaf.gradients.eigenvectors import (
    EigenConditions,
    normal_part,
    symmetric_newton,
    symmetric_product,
    without,
)
from pmaf.layers.eigenvectors import Eigenpairs, solve_commonly, unposed
from pmaf.layers.pairs import Pair, refuse_metric
from pmaf.linalg.decompositions import cholesky
from pmaf.linalg.products import symmetric_part
from pmaf.runtime.log import took
from pmaf.runtime.modes import forward_mode, plain
from pmaf.solvers import Solver
from pmaf.solvers.auto import is_reduced
from pmaf.solvers.base import Outcome
from pmaf.tangent.kept import NOTHING, Congruence, Kept, Nothing, Reduced


@Pair.case(lambda x: isinstance(x.A, Tensor) and isinstance(x.M, Tensor))
@dataclass(frozen=True, eq=False)
class PairedEigenvectors(Pair):
    """`PrincipalEigenvectors` of two dense matrices, both of which get gradients."""

    def solved_by(self, solver: Solver, init: Tensor | None, report: bool) -> Outcome:
        A, M = self.tensors
        took("pairs: Cholesky")
        inverse, C = congruence(A, M, checked=True)
        if init is not None:
            init = inverse @ (symmetric_part(M) @ init)
        found = self.alone(C).solved_by(solver, init, report)
        kept = Congruence(inverse, C) if isinstance(found.kept, Nothing) else found.kept
        return found._replace(value=found.value @ inverse, kept=kept)

    def divided(self, unit: Tensor) -> Any:
        # Eigenvalues are proportional to A; in M they are of degree −1.
        return self.changed(A=self.matrix / unit[..., None, None])

    def is_differentiated(
        self, tensors: tuple[Tensor, ...], kept: Kept, d_multiplier: Tensor | None
    ) -> bool:
        return isinstance(kept, Reduced)

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
                inverse, C = kept
            else:
                inverse, C = congruence(A, M)
            x = y @ symmetric_part(M) @ inverse.mT
            # Products in the given variables have no rounding errors of the factor.
            normal, near = normal_part(v @ y.mT, C, state.shift, state)
            across = without(v @ inverse.mT, x, normal, near)
            conditions = EigenConditions(C, x, state.shift, None, True, state)
            z = conditions.tangent_solve(across) @ inverse
            z = z if along is None else z + along
        assert z is not None
        dA = symmetric_product(z, y) if needs[0] else None
        if dA is not None and not self.largest:
            dA = -dA
        if not needs[1]:
            return dA, None
        z = state.shift.unsqueeze(-1) * z
        z = z if normal is None else z + 0.5 * normal @ y
        return dA, -symmetric_product(z, y)

    def newton(
        self, fixed: Any, found: Outcome, solve: Callable[..., Outcome]
    ) -> Callable[[Tensor], Tensor]:
        A, M = self.tensors
        inverse, C = congruence(A, M)
        before, still = congruence(*fixed.tensors)
        metric = symmetric_part(M)
        y, values = found.value, found.multiplier
        if self.single:
            y, values = y.unsqueeze(-2), values.unsqueeze(-1)
        x = y @ symmetric_part(fixed.M) @ before.mT
        step = symmetric_newton(C, still, found._replace(value=x, multiplier=values))

        def paired(y: Tensor) -> Tensor:
            y = y.unsqueeze(-2) if self.single else y
            y = step(y @ metric @ inverse.mT) @ inverse
            return y.squeeze(-2) if self.single else y

        return paired


@dataclass(frozen=True, eq=False)
class HermitianPair(PairedEigenvectors):
    """Eigenvectors of a pair of complex matrices, in the default phase, found by the kernels."""

    def gradients(self, given: Reverse) -> tuple[Tensor | None, ...]:
        # The common path, solved again, which can be differentiated again.
        (A, M), needs = given.tensors, given.needs
        wanted = [x for x, need in zip(given.tensors, needs) if need]
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            vectors, values = solve_commonly(A, M, k=self.k, largest=self.largest)
            rows = vectors if self.k is None else vectors.mT
            both = ((rows, given.v), (values, given.d_multiplier))
            outputs, incoming = zip(*((x, dx) for x, dx in both if dx is not None))
            gradients = torch.autograd.grad(outputs, wanted, incoming, create_graph=again)
        left = iter(gradients)
        return tuple(next(left) if need else None for need in needs)


def small_pair(A: Tensor, M: Any, k: int | None, largest: bool) -> Eigenpairs | None:
    """The forward pass of the default call on a small dense pair, in one call of the kernels.

    Returns None where the common path is needed, which also says what is wrong with `M`.
    """
    if not (isinstance(M, Tensor) and A.shape == M.shape and A.dtype == M.dtype):
        return None
    shape = A.shape
    square = len(shape) > 1 and shape[-1] == shape[-2] and A.numel() > 0
    compiled = square and is_reduced(A, k or 1) and native.takes_eigenvectors(M)
    if not (compiled and plain(A) and plain(M)) or forward_mode(A, M):
        return None
    recorded = torch.is_grad_enabled() and (A.requires_grad or M.requires_grad)
    found, kept = native.largest_of_pair(A.detach(), M.detach(), k, largest, recorded)
    values, vectors, failed = found
    if failed is not None and (
        bool(failed.all()) or not _are_proper(A.detach(), M.detach(), failed)
    ):
        return None
    took("pairs: compiled")
    problem = unposed(HermitianPair if A.is_complex() else PairedEigenvectors, k, largest)
    if failed is not None:
        took("pairs: common path for some")
        solve = functools.partial(solve_commonly, k=k, largest=largest)
        both = (A, M), (vectors, values)
        vectors, values = attach_some(*both, kept or NOTHING, problem, failed, solve)
    elif recorded:
        vectors, values = attach_found(A, M, (vectors, values), kept, problem)
    return Eigenpairs(values, vectors)


def _are_proper(A: Tensor, M: Tensor, mask: Tensor) -> bool:
    """Whether these entries are finite, and positive definite in `M`."""
    A, M = A[mask], M[mask]
    finite = bool(A.isfinite().all()) and bool(M.isfinite().all())
    return finite and not bool(cholesky(0.5 * (M + M.mH))[1].any())


def congruence(A: Tensor, M: Tensor, checked: bool = False) -> tuple[Tensor, Tensor]:
    """`L⁻¹` and `C = L⁻¹AL⁻ᵀ` for `M = LLᵀ`, of the symmetric parts; differentiable.

    `L⁻¹` is formed, because it is used six times in both passes, and products with it are several
    times faster than triangular solves. The errors of both are about cond(L) roundings.
    """
    lower, info = cholesky(symmetric_part(M))
    if checked and bool(info.any()):
        refuse_metric(M, info != 0)
    eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    inverse = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
    return inverse, symmetric_part(inverse @ symmetric_part(A) @ inverse.mT)
