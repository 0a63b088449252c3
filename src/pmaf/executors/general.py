"""The dominant eigenvector of small general matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pmaf import native
from pmaf.autograd.node import attach_solved
from pmaf.executors.base import OF_TORCH, Account, Executor, records
from pmaf.linalg import sphere
from pmaf.linalg.products import norm, one_if_zero
from pmaf.linalg.roundings import merge_tolerance
from pmaf.reductions.base import Found, Tensors
from pmaf.runtime.log import took
from pmaf.runtime.modes import full_precision
from pmaf.solution import announce
from pmaf.solvers.auto import DENSE, GENERAL
from pmaf.solvers.base import Outcome
from pmaf.tangent.kept import Kept, Nothing


class DominantEigenvector(Executor):
    """The real eigenvector of the largest modulus; a warning says where it is not simple."""

    fails = "LAPACK fails, or numbers are not finite"

    def __init__(self, problem: Any) -> None:
        super().__init__(problem, ("A",), "ied: decomposition")
        self.columns = problem.k is not None

    def account(self, tensors: Tensors) -> Account:
        return Account("Dense(): decomposition", GENERAL.reason, Nothing.words, OF_TORCH)

    def solve(self, tensors: Tensors) -> Found | None:
        A = tensors["A"]
        try:
            spectrum, basis = torch.linalg.eig(A.detach())
        except RuntimeError:  # of LAPACK, or because a number is not finite
            return None
        moduli, order = spectrum.abs().topk(2, -1)
        first = order[..., :1]
        values = spectrum.gather(-1, first)
        rounding = merge_tolerance(A.dtype) * moduli[..., :1]
        simple = (moduli[..., :1] - moduli[..., 1:] > rounding) & (values.imag.abs() <= rounding)
        if not math.isfinite(float(moduli.sum())):
            return None
        took(self.way)
        y = basis.gather(-1, first.unsqueeze(-2).expand(*basis.shape[:-1], 1)).squeeze(-1)
        # The eigenvector of a real eigenvalue is real, up to the phase that LAPACK gives it.
        row = (y * y.gather(-1, y.abs().argmax(-1, keepdim=True)).conj()).real
        row = row / torch.linalg.vector_norm(row, dim=-1, keepdim=True)
        with full_precision(A.device):
            row = row * sphere.signs(row.unsqueeze(-2))
            if not bool(simple.all()):
                self._announce(A.detach(), values.real, row, simple.squeeze(-1))
        value = values.real.clone()
        found = (row.unsqueeze(-1), value) if self.columns else (row, value.squeeze(-1))
        return attach_solved(self, found, (), A) if records(A) else found

    def _announce(self, A: Tensor, values: Tensor, row: Tensor, simple: Tensor) -> None:
        """Warn of entries in which there is no real eigenvector to single out."""
        rows, none = row.unsqueeze(-2), torch.zeros_like(simple, dtype=torch.int64)
        residual = self.problem.changed(A=A).residual(values, rows)
        found = Outcome(rows, values, residual, residual, none, simple)
        announce(found, DENSE, False)

    def differentiate(
        self,
        tensors: Sequence[Tensor],
        y: Tensor,
        multiplier: Tensor,
        kept: Kept,
        v: Tensor | None,
        d_multiplier: Tensor | None,
        needs: Sequence[bool],
    ) -> native.Gradients:
        """`∂L/∂A = wyᵀ` with `[[(λI − A)ᵀ, y], [yᵀ, 0]] [w; ·] = [v; ∂L/∂λ]`."""
        (A,) = tensors
        if self.columns:
            y, multiplier = y.squeeze(-2), multiplier.squeeze(-1)
            v = None if v is None else v.squeeze(-2)
            d_multiplier = None if d_multiplier is None else d_multiplier.squeeze(-1)
        n, size = A.shape[-1], one_if_zero(multiplier.abs())
        border, probe = size.unsqueeze(-1) * y, sphere.references(y)[1]
        system = A.new_zeros(*A.shape[:-2], n + 1, n + 1)
        system[..., :n, :n] = -A.mT
        system.diagonal(dim1=-2, dim2=-1)[..., :n] += multiplier.unsqueeze(-1)
        system[..., :n, n] = system[..., n, :n] = border
        given = A.new_zeros(*A.shape[:-2], n + 1, 2)
        if v is not None:
            given[..., :n, 0] = v
        if d_multiplier is not None:
            given[..., n, 0] = size * d_multiplier
        given[..., :n, 1] = (size / norm(probe)).unsqueeze(-1) * probe
        found, info = torch.linalg.solve_ex(system, given)
        w, probed = found[..., :n, 0], found[..., :n, 1]
        # The solution for the probe bounds the condition of the eigenvalue. Where it is too large
        # there is no derivative, and the rule of the problem says so.
        failed = ~(norm(probed) * merge_tolerance(A.dtype) < 1) | (info != 0)
        gradient = w.unsqueeze(-1) * y.unsqueeze(-2)
        return native.Gradients((gradient,), failed if bool(failed.any()) else None)
