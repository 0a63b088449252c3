"""The optimality conditions of right singular vectors, for the implicit rule.

The right singular vectors of `√W A`, with `W` the diagonal matrix of the weights, are eigenvectors
of `AᵀWA`, at either end of its spectrum. With the requested vectors as the rows of `Y`, an
incoming gradient `v` of row `j` requires the solution `z` of

    (σⱼ²I − AᵀWA) z = v − Σ yᵢyᵢᵀv,   yᵢᵀz = 0,   the sum over all i with σᵢ = σⱼ,

and the gradients are of rank 2k, with `wᵢ` the weight of the row `aᵢ` of `A`:

    ∂L/∂A = W (A Zᵀ Y + A Yᵀ Z),   ∂L/∂wᵢ = Σ (aᵢᵀzⱼ)(aᵢᵀyⱼ).

Neither divides by a weight, so that a weight may be zero. The differences `σᵢ² − σⱼ²` come from
singular values of the matrix itself, as `(σᵢ − σⱼ)(σᵢ + σⱼ)`, not from a rounded Gram matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf import native
from pmaf.gradients.base import Reverse
from pmaf.gradients.eigenvectors import newton_in_basis
from pmaf.linalg.products import norm
from pmaf.linalg.singular import accuracy, nearest, rooted, singular_basis, weighted, weighted_gram
from pmaf.runtime.log import took
from pmaf.runtime.modes import plain
from pmaf.tangent.bordered import BorderedSystem, State, Tensors, coupled, tangent_solve
from pmaf.tangent.complement import COMPILED_ROWS
from pmaf.tangent.kept import SingularBasis


@dataclass(frozen=True)
class SingularSystem(BorderedSystem):
    """Bordered systems of `Λ − AᵀWA`, coupled where singular values are equal."""

    largest: bool
    single: bool  # whether the numbers of `A` are those of a float32 matrix

    def solve_in_basis(self, v: Tensor, y: Tensor, tensors: Tensors, state: State) -> Tensor:
        rows, values = state.kept
        first, second, top = state.shift.unsqueeze(-1), values.unsqueeze(-2), values[..., :1]
        difference = first - second
        equal = difference.abs() <= accuracy(top.dtype, self.single) * top.unsqueeze(-1)
        rise = torch.where(equal, 1, difference * (first + second))
        return ((v @ rows.mH) / rise).masked_fill(equal, 0) @ rows

    def solve_anew(self, v: Tensor, y: Tensor, tensors: Tensors, state: State) -> Tensor:
        compiled = y.shape[-1] <= COMPILED_ROWS and plain(v) and native.takes(tensors[0])
        if self.single and compiled:
            return self.compiled(v, y, tensors, state.shift)
        return self._decomposed(v, state.shift, tensors)

    def linked(self, tensors: Tensors, state: State) -> Tensor | None:
        if state.shift.shape[-1] == 1:
            return None
        top = state.kept.size(lambda: torch.linalg.matrix_norm(rooted(*tensors), keepdim=True))
        return self._equal(state.shift, state.shift, top)

    def product(self, z: Tensor, tensors: Tensors, shift: Tensor) -> Tensor:
        A, weights = (*tensors, None)[:2]
        assert A is not None
        return shift @ z - weighted(z @ A.mT, weights) @ A

    def pullback(
        self, w: Tensor, z: Tensor, tensors: Tensors, shift: Tensor
    ) -> tuple[tuple[Tensor | None, ...], Tensor]:
        # The gradients of −Σ wᵀAᵀWAz, whose sum is over rows.
        found = pulled(-w, z, tensors, [True] * len(tensors))
        return found, w @ z.mT

    def _decomposed(self, v: Tensor, shift: Tensor, tensors: Tensors) -> Tensor:
        basis = SingularBasis(*singular_basis(*tensors))
        # Hooks on saved tensors may have left the shifts fewer digits than tell values apart.
        state = State(nearest(shift, basis.values), shift[..., 0], basis)
        return self.solve_in_basis(v, v, tensors, state)

    def compiled(self, v: Tensor, y: Tensor, tensors: Tensors, shift: Tensor) -> Tensor:
        """`z` by a factorisation of `AᵀWA` in float64, which has all digits of a float32 matrix."""
        gram = weighted_gram(*tensors)
        k = v.shape[-2]
        # The kernels take the largest eigenvalues. The trace of the Gram matrix is `‖√W A‖²`.
        top = gram.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()[..., None, None]
        square = shift.square()
        took("tangent: compiled")
        if self.largest:
            z, failed = native.complement_solve(gram, square, y, v)
        else:
            z, failed = native.complement_solve(-gram, -square, y, v)
            z = -z
        # Were all other singular values further away than those that count as equal, z would be
        # shorter than this.
        close = accuracy(v.dtype, self.single) * top.squeeze(-1)
        least = (close * (2 * shift + close)).clamp_min(torch.finfo(v.dtype).tiny)
        short = norm(z) * least <= norm(v)
        if failed is None and bool((short & (close > 0)).all()):
            failed = None
        else:
            wrong = ~(short & (close > 0)).all(-1)
            failed = wrong if failed is None else failed | wrong
        if k > 1:
            inside = self._equal(shift, shift, top)
            part = (v @ y.mT) / torch.where(inside, 1, _rise(shift, shift))
            z = z + part.masked_fill(inside, 0) @ y
        if failed is not None and bool(failed.any()):
            took("tangent: decomposition")
            batch = v.shape[:-2]
            some = tuple(
                x.expand(*batch, *x.shape[x.dim() - own :])[failed]
                for x, own in zip(tensors, (2, 1))
            )
            z[failed] = self._decomposed(v[failed], shift[failed], some)
        return z

    def _equal(self, first: Tensor, second: Tensor, top: Tensor) -> Tensor:
        """Which singular values, `(*, k)` and `(*, p)`, are equal up to rounding of `top`."""
        difference = first.unsqueeze(-1) - second.unsqueeze(-2)
        return difference.abs() <= accuracy(top.dtype, self.single) * top


def _rise(first: Tensor, second: Tensor) -> Tensor:
    """`σᵢ² − σⱼ²`, `(*, k, p)`, without the rounding of squares."""
    first, second = first.unsqueeze(-1), second.unsqueeze(-2)
    return (first - second) * (first + second)


def pulled(
    z: Tensor, y: Tensor, tensors: Tensors, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of `Re Σ zᴴAᴴWAy` over rows in `A` and the weights, where they are needed."""
    A, weights = (*tensors, None)[:2]
    assert A is not None
    Az, Ay = z @ A.mT, y @ A.mT
    dA = dw = None
    if needs[0]:
        left = torch.cat([weighted(Az, weights), weighted(Ay, weights)], -2)
        dA = (left.mT @ torch.cat([y, z], -2).conj()).sum_to_size(A.shape)
    if weights is None:
        return (dA,)
    if needs[1]:
        dw = (Az.conj() * Ay).real.sum(-2).sum_to_size(weights.shape)
    return dA, dw


@dataclass(frozen=True, eq=False)
class SingularConditions:
    """Optimality conditions of requested right singular vectors, all of them at once."""

    given: Reverse  # the vectors as rows (*, k, n), the singular values as shifts (*, k)
    largest: bool
    single: bool

    def tangent_solve(self, v: Tensor | None) -> Tensor:
        """`z` for the incoming gradients `v` of the vectors and those of the singular values."""
        tensors, y, state, _, _, d_values, _ = self.given
        values, along = state.shift, None
        if d_values is not None:
            # Of a singular value that is zero, zero is one of the subgradients.
            size = torch.linalg.matrix_norm(rooted(*(x.detach() for x in tensors)))
            zero = values <= (accuracy(y.dtype, self.single) * size).unsqueeze(-1)
            weight = (0.5 * d_values / torch.where(zero, 1, values)).masked_fill(zero, 0)
            along = weight.unsqueeze(-1) * y
        if v is None:
            assert along is not None
            return along

        def within() -> Tensor:
            A, weights = (*tensors, None)[:2]
            assert A is not None
            image = y @ A.mT
            return weighted(image, weights) @ image.mT

        shift = coupled(values.square(), within)
        system = SingularSystem(self.largest, self.single)
        z = tangent_solve(system, v, y, tensors, shift, state)
        return z if along is None else z + along

    def pullback(self, z: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        return pulled(z, self.given.y, self.given.tensors, needs)


def singular_newton(
    tensors: Tensors, fixed: Tensors, found: Any, single: bool
) -> Callable[[Tensor], Tensor]:
    """Newton's step for right singular vectors as rows `(*, k, n)`, from a solution for `fixed`."""
    A, weights = (*tensors, None)[:2]
    assert A is not None
    rows, spectrum = found.kept.singular(lambda: singular_basis(*fixed))
    values, top = found.multiplier, spectrum[..., :1].unsqueeze(-1)

    def equal(others: Tensor) -> Tensor:
        difference = values.unsqueeze(-1) - others.unsqueeze(-2)
        return difference.abs() <= accuracy(values.dtype, single) * top

    merged = equal(spectrum)
    inverse = (1 / torch.where(merged, 1, _rise(values, spectrum))).masked_fill(merged, 0)
    # The vectors of a repeated singular value move together: only their span has derivatives.
    linked = equal(values)
    return newton_in_basis(lambda y: weighted(y @ A.mT, weights) @ A, rows, inverse, linked)
