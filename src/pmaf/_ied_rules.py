"""What the gradient rules are told about eigenvectors.

For a symmetric matrix with requested eigenvectors as the rows of `Y`, an incoming
gradient `v` of row `j` has a part inside span(Y), where the solve is closed form with
the differences of requested eigenvalues, and a part outside, where `z` solves

    (λⱼI − A) z = v − YᵀYv,   Yz = 0,

a positive definite system on that space. Only gaps between a requested eigenvalue and
the others ever appear in a denominator. Then `∂L/∂A = ½(ZᵀY + YᵀZ) + Yᵀdiag(∂L/∂λ)Y`.

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

from pmaf._deflated import deflated_solve
from pmaf._eager import plain
from pmaf._neumann import dominant_solve
from pmaf.errors import require_eager
from pmaf.gradients._base import contract
from pmaf.gradients._tangent import Helper, tangent_solve
from pmaf.spectrum import merge_tolerance


@dataclass(frozen=True)
class _ShiftedSystem:
    """Bordered systems of `λⱼI − ½(A + Aᵀ)`, one shift for each row."""

    def solve(self, v: Tensor, y: Tensor, matrix: Tensor, helper: Helper) -> Tensor:
        if helper.spread.shape[-1] == 0:
            return deflated_solve(matrix, helper.shift, y, v, helper.factor, helper.gap)
        k, basis, spread = y.shape[-2], helper.basis, helper.spread
        rise = spread.unsqueeze(-2)
        if k > 1:  # a single vector has no rise, and drops out
            # The requested vectors are the last k of the basis; the rest is solved for.
            basis, rise = basis[..., :-k, :], rise[..., :-k]
            rise = rise - spread[..., -k:].flip(-1).unsqueeze(-1)
        # The largest eigenvalue in modulus is at one end of the spectrum or the other.
        top = helper.shift[..., :1]
        scale = torch.maximum(top.abs(), spread[..., :1] - top).unsqueeze(-1)
        apart = rise > merge_tolerance(v.dtype) * scale
        return torch.where(apart, (v @ basis.mT) / rise, 0) @ basis

    def product(self, z: Tensor, matrix: Tensor, shift: Tensor) -> Tensor:
        return shift.unsqueeze(-1) * z - 0.5 * (z @ matrix + z @ matrix.mT)

    def pullback(
        self, w: Tensor, z: Tensor, matrix: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor]:
        return -symmetric_product(w, z), (w * z).sum(-1)


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
        z = tangent_solve(_ShiftedSystem(), v, y, self.A, self.values, self.helper)
        z = z if along is None else z + along
        if k == 1:
            return z
        inside = y @ v.mT
        difference = self.values.unsqueeze(-2) - self.values.unsqueeze(-1)
        scale = torch.linalg.matrix_norm(self.A.detach())[..., None, None]
        apart = difference.abs() > merge_tolerance(v.dtype) * scale
        antisymmetric = 0.5 * (inside - inside.mT)
        return z + torch.where(apart, antisymmetric / torch.where(apart, difference, 1), 0) @ y

    def _bordered_solve(self, v: Tensor | None) -> Tensor:
        """`(λI − A)ᵀw + αy = v` with `yᵀw = ∂L/∂λ`, without a matrix larger than `A`.

        `(λI − A)ᵀ + σyyᵀ` is regular when the eigenvalue is simple, and differs from the
        border by a multiple of `y` on the right-hand side. Where the eigenvalue is known
        not to be simple there is no derivative, and zero is returned.
        """
        if plain(self.A) and not torch.is_grad_enabled():
            w = dominant_solve(self.A, self.values, self.y, v, self.d_values, self.helper.gap)
            if w is not None:
                return w
        v = torch.zeros_like(self.y) if v is None else v
        d_values = torch.zeros_like(self.values) if self.d_values is None else self.d_values
        target = d_values.unsqueeze(-1)
        size = torch.linalg.matrix_norm(self.A.detach())[..., None, None]
        size = torch.where(size == 0, 1, size)
        # A gap that is not known (nan) is taken on trust.
        repeated = self.helper.gap[..., None, None] <= merge_tolerance(v.dtype) * size
        eye = torch.eye(self.A.shape[-1], dtype=v.dtype, device=v.device)
        rounding = torch.finfo(v.dtype).eps * size
        rest = (size * self.y).mT @ self.y - self.A.mT
        matrix = torch.addcmul(rest, eye, self.values.unsqueeze(-1) + rounding)
        del rest  # it is as large as A, and the solve needs another
        both = torch.cat([v + size * target * self.y, self.y], -2)
        p, q = torch.linalg.solve(matrix, both.mT).mT.split(1, -2)
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
        lift = 2 * torch.linalg.matrix_norm(self.A.detach())[..., None, None]
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
