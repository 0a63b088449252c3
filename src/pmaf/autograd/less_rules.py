"""What the gradient rules are told about a solution of least squares on the sphere.

With `r = Ay − b` and `H = AᵀA + μI`, the stationarity condition `Aᵀr + μy = 0` gives

    ∂L/∂b = A z,   ∂L/∂A = −(r zᵀ + (A z) yᵀ),   P H P z = P v,   yᵀz = 0,

two rank-one terms, whatever the size of `A`.
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
from pmaf.linalg.gram import merge_tolerance, promoted, singular_spectrum
from pmaf.linalg.products import dot, matvec, outer_sum
from pmaf.tangent.bordered import Helper, tangent_solve
from pmaf.tangent.factor import factored_solve, gram_product, spectral_solve


@dataclass(frozen=True)
class _GramSystem:
    """Bordered systems of `AᵀA + μI`, solved with what the forward pass left behind."""

    def solve(self, v: Tensor, y: Tensor, matrix: Tensor, helper: Helper) -> Tensor:
        shift, gap, basis, spread = helper
        shift, y = shift.squeeze(-1), y.squeeze(-2)
        if helper.factor is not None:
            return factored_solve(matrix, shift, gap, basis, y, v)
        if basis.shape[-2] == 0:
            return _without_basis(matrix, shift, y, v)
        exact = promoted(matrix.dtype, basis.shape[-2], matrix.device)
        return spectral_solve(matrix, shift, gap, basis, spread, y, v, refine=not exact)

    def linked(self, matrix: Tensor, helper: Helper) -> Tensor | None:
        return None  # there is one row

    def product(self, z: Tensor, matrix: Tensor, shift: Tensor) -> Tensor:
        return gram_product(matrix, shift.squeeze(-1), z)

    def pullback(
        self, w: Tensor, z: Tensor, matrix: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor]:
        w_row, z_row = w.squeeze(-2), z.squeeze(-2)
        images = matvec(matrix, w_row), matvec(matrix, z_row)
        return outer_sum(images, (z_row, w_row), matrix.shape), (w * z).sum(-1)


def _without_basis(A: Tensor, shift: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """`z` where the forward pass, by products, left nothing to solve with.

    From singular values, in float64: in `AᵀA` the digits of the small ones are rounding.
    """
    dtype = v.dtype
    if v.device.type != "mps":  # has no float64
        A, shift, y, v = (x.double() for x in (A, shift, y, v))
    spectrum, _, _ = singular_spectrum(A)
    gap = shift + spectrum.floor
    # What is left of both is known no better than the multiplier, or than what was squared.
    rounding = 8 * torch.finfo(dtype).eps * shift.abs() + merge_tolerance(v.dtype) * spectrum.top
    gap = torch.where(gap.abs() > rounding, gap, torch.zeros_like(gap))
    return spectral_solve(A, shift, gap, spectrum.basis, spectrum.spread, y, v).to(dtype)


class LessConditions(NamedTuple):
    """Optimality conditions of LESS on the unit sphere, at the solution `y`."""

    A: Tensor
    b: Tensor
    y: Tensor
    image: Tensor  # Ay
    helper: Helper

    def residual(self) -> Tensor:
        return self.image - self.b

    def multiplier(self) -> Tensor:
        return -dot(self.image, self.residual())

    def tangent_solve(self, v: Tensor) -> Tensor:
        shift = self.multiplier().unsqueeze(-1)
        rows = v.unsqueeze(-2), self.y.unsqueeze(-2)
        return tangent_solve(_GramSystem(), *rows, self.A, shift, self.helper).squeeze(-2)

    def pullback(self, z: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        image = matvec(self.A, z)
        dA = None
        if needs[0]:
            dA = outer_sum((self.residual(), image), (-z, -self.y), self.A.shape)
        return dA, image if needs[1] else None

    def hessian(self) -> Tensor:
        eye = torch.eye(self.A.shape[-1], dtype=self.A.dtype, device=self.A.device)
        return self.A.mT @ self.A + self.multiplier()[..., None, None] * eye

    def contract(
        self, k: Tensor, exploit: bool, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        blocks = self._structured(needs) if exploit else self._autodiff(needs)
        return tuple(None if block is None else contract(k, block) for block in blocks)

    def _structured(self, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """`𝓑ᵢ = Aᵢyᵀ`, plus the residual in column `i`: the paper's Proposition 2.1."""
        A, _, y = self._expanded()
        block = None
        if needs[0]:
            block = A.mT.unsqueeze(-1) * y[..., None, None, :]
            r = self.residual()
            if torch.compiler.is_compiling():  # which does not trace writing into a view
                eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).unsqueeze(-2)
                block = torch.addcmul(block, eye, r[..., None, :, None])
            else:
                block.diagonal(dim1=-3, dim2=-1).add_(r.unsqueeze(-1))
        return block, -A.mT if needs[1] else None

    def _autodiff(self, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """The same tensors by differentiating the objective twice, entry by entry."""
        require_eager("DDN(exploit=False)", "DDN() or Implicit()", self.A)
        keep = torch.is_grad_enabled()
        A, b, y = self._expanded() if keep else (x.detach() for x in self._expanded())
        batch, m, n = A.shape[:-2], *A.shape[-2:]
        with torch.enable_grad():
            rows = list(zip(A.reshape(-1, m, n), b.reshape(-1, m), y.reshape(-1, n)))
            in_A = [jacobian(lambda x, r=r: _slope(x, *r[1:]), r[0], keep) for r in rows * needs[0]]
            in_b = [
                jacobian(lambda x, r=r: _slope(r[0], x, r[2]), r[1], keep) for r in rows * needs[1]
            ]
        return (
            torch.stack(in_A).reshape(*batch, n, m, n) if needs[0] else None,
            torch.stack(in_b).reshape(*batch, n, m) if needs[1] else None,
        )

    def _expanded(self) -> tuple[Tensor, Tensor, Tensor]:
        """A, b and y with all batch dimensions written out."""
        batch, (m, n) = self.y.shape[:-1], self.A.shape[-2:]
        return self.A.expand(*batch, m, n), self.b.expand(*batch, m), self.y


def _slope(A: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Gradient of the objective in `y`, by autodiff."""
    y = y if y.requires_grad else y.detach().requires_grad_()
    r = A @ y - b
    return torch.autograd.grad(0.5 * (r @ r), y, create_graph=True)[0]
