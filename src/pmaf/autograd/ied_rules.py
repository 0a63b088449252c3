"""What the gradient rules are told about eigenvectors.

For a symmetric matrix with requested eigenvectors as the rows of `Y`, an incoming gradient
`v` of row `j` asks for the solution `z` of a bordered system of its own,

    (λⱼI − A) z = v − Σ yᵢyᵢᵀv,   yᵢᵀz = 0,   the sum over all i with λᵢ = λⱼ,

and `∂L/∂A = ½(ZᵀY + YᵀZ) + Yᵀdiag(∂L/∂λ)Y`. The system of a simple eigenvalue has its own
vector in the border and no other, so that nothing depends on the choice of vectors where
other eigenvalues repeat, to any order of derivative. Inside span(Y) it is solved in closed
form; outside it is positive definite. Only gaps between a requested eigenvalue and the
others ever appear in a denominator.

Within a group of equal eigenvalues `λⱼ` is the matrix `Λ` of all `yᵢᵀAyⱼ`, which is diagonal
only at the matrix at hand: its derivative is not.

For a nonsymmetric matrix and one vector, eigenvector and eigenvalue are differentiated
together: `[[λI − A, y], [yᵀ, 0]]ᵀ [w; ·] = [v; ∂L/∂λ]`, `∂L/∂A = w yᵀ`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from pmaf.errors import require_eager
from pmaf.gradients.base import contract
from pmaf.linalg import sphere
from pmaf.linalg.gram import merge_tolerance
from pmaf.linalg.products import frobenius, norm
from pmaf.runtime.modes import plain
from pmaf.tangent.bordered import Helper, tangent_solve
from pmaf.tangent.deflated import deflated_solve
from pmaf.tangent.series import dominant_solve


@dataclass(frozen=True)
class _ShiftedSystem:
    """Bordered systems of `Λ − ½(A + Aᵀ)`, coupled where eigenvalues are equal."""

    def solve(self, v: Tensor, y: Tensor, matrix: Tensor, helper: Helper) -> Tensor:
        basis, spread, k = helper.basis, helper.spread, y.shape[-2]
        if spread.shape[-1] == 0:
            z = deflated_solve(matrix, helper.shift, y, v, helper.factor, helper.gap)
            return z if k == 1 else z + self._within(v, y, matrix, helper)
        rise = spread.unsqueeze(-2)
        if k > 1:  # the requested vectors are the last of the basis; the first has no rise
            rise = rise - spread[..., -k:].flip(-1).unsqueeze(-1)
        apart = rise.abs() > merge_tolerance(v.dtype) * self._scale(matrix, helper)
        return torch.where(apart, (v @ basis.mT) / torch.where(apart, rise, 1), 0) @ basis

    def linked(self, matrix: Tensor, helper: Helper) -> Tensor | None:
        """Which vectors are in the border of which, `(*, k, k)`; None if each is alone."""
        if helper.shift.shape[-1] == 1:
            return None
        return ~self._apart(matrix, helper)[1]

    def product(self, z: Tensor, matrix: Tensor, shift: Tensor) -> Tensor:
        return shift @ z - 0.5 * (z @ matrix + z @ matrix.mT)

    def pullback(
        self, w: Tensor, z: Tensor, matrix: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor]:
        return -symmetric_product(w, z), w @ z.mT

    def _within(self, v: Tensor, y: Tensor, matrix: Tensor, helper: Helper) -> Tensor:
        """The part of the solution in the span of the requested vectors."""
        difference, apart = self._apart(matrix, helper)
        return torch.where(apart, (v @ y.mT) / torch.where(apart, difference, 1), 0) @ y

    def _apart(self, matrix: Tensor, helper: Helper) -> tuple[Tensor, Tensor]:
        """Differences `λⱼ − λᵢ` of the requested eigenvalues, and which of them are not zero."""
        difference = helper.shift.unsqueeze(-1) - helper.shift.unsqueeze(-2)
        scale = self._scale(matrix, helper)
        return difference, difference.abs() > merge_tolerance(matrix.dtype) * scale

    def _scale(self, matrix: Tensor, helper: Helper) -> Tensor:
        """`‖A‖` in the spectral norm, `(*, 1, 1)`: what eigenvalues are rounded against."""
        shift, spread = helper.shift, helper.spread
        if spread.shape[-1] == 0:
            return largest_modulus(matrix, shift)
        # The largest eigenvalue in modulus is at one end of the spectrum or the other.
        top = shift[..., :1]
        return torch.maximum(top.abs(), spread.amax(-1, keepdim=True) - top).unsqueeze(-1)


def largest_modulus(A: Tensor, values: Tensor) -> Tensor:
    """About the spectral norm of `½(A + Aᵀ)`, `(*, 1, 1)`, of which `values` are eigenvalues.

    From below: by the eigenvalues that are known and by three products with a vector without
    structure. The Frobenius norm would be up to `√n` too large.
    """
    x = _probe(A)
    for _ in range(3):
        x = x / norm(x).unsqueeze(-1).clamp_min(torch.finfo(A.dtype).tiny)
        x = 0.5 * (x @ A + x @ A.mT)
    return torch.maximum(values.abs().amax(-1, keepdim=True), norm(x)).unsqueeze(-1)


class EigenConditions(NamedTuple):
    """Optimality conditions of requested eigenvectors, all of them at once."""

    A: Tensor
    y: Tensor  # (*, k, n), the vectors as rows
    values: Tensor  # (*, k)
    d_values: Tensor | None  # (*, k), incoming gradient of the values
    symmetric: bool
    helper: Helper

    def tangent_solve(self, v: Tensor | None) -> Tensor:
        """`z` for the incoming gradient `v` of the vectors, and that of the values."""
        if not self.symmetric:
            return self._bordered_solve(v)
        y, k = self.y, self.values.shape[-1]
        along = None if self.d_values is None else self.d_values.unsqueeze(-1) * y
        if v is None:
            return torch.zeros_like(y) if along is None else along
        shift = self.values.unsqueeze(-1)
        if k > 1:
            shift = torch.diag_embed(self.values)
            if torch.is_grad_enabled():  # for its derivative; its value is zero
                eye = torch.eye(k, dtype=torch.bool, device=y.device)
                coupling = (y @ self.A @ y.mT).masked_fill(eye, 0)
                shift = shift + 0.5 * (coupling + coupling.mT)
        z = tangent_solve(_ShiftedSystem(), v, y, self.A, shift, self.helper)
        return z if along is None else z + along

    def _bordered_solve(self, v: Tensor | None) -> Tensor:
        """`(λI − A)ᵀw + αy = v` with `yᵀw = ∂L/∂λ`, without a matrix larger than `A`.

        `(λI − A)ᵀ + σyyᵀ` is regular when the eigenvalue is simple, and differs from the
        border by a multiple of `y` on the right-hand side. Where it is singular up to rounding
        the eigenvalue is not simple, there is no derivative, and zero is returned.
        """
        if plain(self.A) and not torch.is_grad_enabled():
            w = dominant_solve(self.A, self.values, self.y, v, self.d_values, self.helper.gap)
            if w is not None:
                return w
        v = torch.zeros_like(self.y) if v is None else v
        d_values = torch.zeros_like(self.values) if self.d_values is None else self.d_values
        target = d_values.unsqueeze(-1)
        size = size_of(self.A.detach())
        matrix = lifted(self.A, self.values, self.y, size).mT
        both = torch.cat([v + size * target * self.y, self.y], -2)
        factor, pivots, info = torch.linalg.lu_factor_ex(matrix.detach())
        probe = _probe(v).expand_as(self.y.detach())
        # How long a vector of the size of the matrix comes back bounds the condition from below.
        # Beyond the reciprocal of rounding the inverse has no digits.
        length = norm(torch.linalg.lu_solve(factor, pivots, (size * probe).mT).mT).unsqueeze(-1)
        repeated = ~(length * merge_tolerance(v.dtype) < 1) | (info != 0)[..., None, None]
        if torch.is_grad_enabled():
            eye = torch.eye(self.A.shape[-1], dtype=v.dtype, device=v.device)
            solved = torch.linalg.solve(torch.where(repeated, eye, matrix), both.mT)
        else:
            solved = torch.linalg.lu_solve(factor, pivots, both.mT)
        p, q = torch.where(repeated, 0, solved).mT.split(1, -2)
        along = (self.y * q).sum(-1, keepdim=True)
        alpha = ((self.y * p).sum(-1, keepdim=True) - target) / torch.where(along == 0, 1, along)
        return torch.where(repeated, 0, p - alpha * q)

    def pullback(self, z: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        if not needs[0]:
            return (None,)
        return (symmetric_product(z, self.y) if self.symmetric else z.mT @ self.y,)

    def columns(self) -> list[ColumnConditions]:
        """The same for one vector at a time, as the paper's rules want it."""
        A = 0.5 * (self.A + self.A.mT) if self.symmetric else self.A
        return [
            ColumnConditions(A, self.y[..., j, :], self.values[..., j], self.symmetric)
            for j in range(self.y.shape[-2])
        ]


class ColumnConditions(NamedTuple):
    """Optimality conditions of one eigenvector `y` as the maximiser of `yᵀAy`."""

    A: Tensor
    y: Tensor  # (*, n)
    value: Tensor  # (*,)
    symmetric: bool

    def hessian(self) -> Tensor:
        """`2λI − (A + Aᵀ)`, and `yyᵀ` times a constant.

        Without the latter it is singular along `y`. On the tangent space, which is all
        that `𝒦` depends on, it makes no difference.
        """
        n = self.A.shape[-1]
        eye = torch.eye(n, dtype=self.A.dtype, device=self.A.device)
        value = self.value[..., None, None]
        lift = 2 * frobenius(self.A.detach())
        outer = self.y.unsqueeze(-1) * self.y.unsqueeze(-2)
        return 2 * value * eye - (self.A + self.A.mT) + lift * outer

    def contract(
        self, k: Tensor, exploit: bool, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        if not exploit:
            return (contract(k, _per_entry(_slope, self.A, self.y)),)
        rows = k.unsqueeze(-2), self.y.unsqueeze(-2)
        return (-2 * symmetric_product(*rows),)

    def _divisor(self) -> Tensor:
        """The eigenvalue, one where it is zero and there is no fixed point to speak of."""
        return torch.where(self.value == 0, torch.ones_like(self.value), self.value)

    def fixed_point_hessian(self, exploit: bool) -> Tensor:
        """Derivative of `y − Ay/‖Ay‖` in `y`, `I − (I − yyᵀ)A/λ`."""
        if not exploit:
            return _per_entry(lambda y, A: _fixed_point(A, y), self.y, self.A)
        eye = torch.eye(self.A.shape[-1], dtype=self.A.dtype, device=self.A.device)
        image = self.A / self._divisor()[..., None, None]
        row = self.y.unsqueeze(-2)
        return eye - image + row.mT @ (row @ image)

    def fixed_point_contract(self, w: Tensor, exploit: bool) -> Tensor:
        """`−wᵀ` times the derivative of `y − Ay/‖Ay‖` in `A`."""
        if not exploit:
            full = -contract(w, _per_entry(_fixed_point, self.A, self.y))
        else:
            along = (w * self.y).sum(-1, keepdim=True)
            left = (w - along * self.y) / self._divisor().unsqueeze(-1)
            full = left.unsqueeze(-1) * self.y.unsqueeze(-2)
        return 0.5 * (full + full.mT) if self.symmetric else full


def _probe(like: Tensor) -> Tensor:
    """A unit row without structure, `(1, n)`, by operations that can be traced."""
    return sphere.project(sphere.references(like)[1]).unsqueeze(0)


def size_of(A: Tensor) -> Tensor:
    """`‖Ax‖` for a unit vector without structure, or the largest entry, `(*, 1, 1)`.

    No larger than the spectral norm, and one for a matrix of zeros. Nothing is squared that
    could leave the range of the dtype.
    """
    largest = A.abs().amax((-2, -1), keepdim=True)
    safe = torch.where(largest == 0, 1, largest)
    return safe * norm(_probe(A) @ (A / safe).mT).unsqueeze(-1).clamp_min(1)


def lifted(A: Tensor, values: Tensor, y: Tensor, size: Tensor) -> Tensor:
    """`λI − A + σyyᵀ`, regular where the eigenvalue `λ` of the unit row `y` is simple."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    return torch.addcmul((size * y).mT @ y - A, eye, values.unsqueeze(-1))


def symmetric_product(z: Tensor, y: Tensor) -> Tensor:
    """`½(ZᵀY + YᵀZ)` for rows `Z`, `Y`, as one product."""
    z = 0.5 * z
    return torch.cat([z, y], -2).mT @ torch.cat([y, z], -2)


def _slope(A: Tensor, y: Tensor) -> Tensor:
    """Gradient of `−yᵀAy` in `y`, by autodiff."""
    y = y if y.requires_grad else y.detach().requires_grad_()
    return torch.autograd.grad(-(y @ (A @ y)), y, create_graph=True)[0]


def _fixed_point(A: Tensor, y: Tensor) -> Tensor:
    image = A @ y
    # A negative eigenvalue flips the iterate; the fixed point is one up to sign.
    image = torch.where(image @ y < 0, -image, image)
    return y - image / image.norm()


def _per_entry(function, x: Tensor, other: Tensor) -> Tensor:
    """Jacobian in `x` of a function of `x` and `other`, one batch entry at a time."""
    require_eager("A gradient rule with exploit=False", "exploit=True or Implicit()", x)
    keep = torch.is_grad_enabled()
    batch = x.shape[: x.dim() - (1 if x.dim() < other.dim() else 2)]
    if not keep:
        x, other = x.detach(), other.detach()
    with torch.enable_grad():
        xs, others = (
            x.reshape(-1, *x.shape[len(batch) :]),
            other.reshape(-1, *other.shape[len(batch) :]),
        )
        rows = [
            jacobian(lambda a, o=o: function(a, o), entry, create_graph=keep)
            for entry, o in zip(xs, others)
        ]
    stacked = torch.stack(rows)
    return stacked.reshape(*batch, *stacked.shape[1:])
