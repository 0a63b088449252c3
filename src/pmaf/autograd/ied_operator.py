"""IED of an operator: products forward, products backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf.autograd.ied_attach import full_precision
from pmaf.autograd.ied_search import find_eigenvectors
from pmaf.operators import Operator
from pmaf.operators.rows import Rows, first_order, spread_alike
from pmaf.solution import Backward, announce
from pmaf.solvers import Krylov, Outcome
from pmaf.tangent.residuals import conjugate_residuals, gmres


def attach_operator(
    A: Operator, k: int, symmetric: bool, solver: Krylov, init: Tensor | None, throw: bool
) -> tuple[Outcome, Backward]:
    """Solve for an operator, differentiably in what it is made of; vectors come as rows."""
    A = spread_alike(A)
    report = Backward()
    found: Any = _Eigen.apply(A, (k, symmetric), solver, init, throw, report, *A.tensors)
    return Outcome(*found), report


class _Eigen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operator: Operator,
        question: tuple[int, bool],
        solver: Krylov,
        init: Tensor | None,
        throw: bool,
        report: Backward,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        rows = Rows(operator.with_tensors([x.detach() for x in tensors]), operator.batch_shape)
        k, symmetric = question
        with full_precision(rows.A):
            outcome = rows.guarded(find_eigenvectors, k, symmetric, solver, init)
        announce(outcome, solver, throw)
        ctx.rows, ctx.question, ctx.solver, ctx.report = rows, question, solver, report
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(outcome.value, *tensors)
        ctx.mark_non_differentiable(*outcome[2:])
        return tuple(outcome)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        v, d_values = grads[:2]
        needs = ctx.needs_input_grad[6:]
        found: list[Tensor | None] = [None for _ in needs]
        if any(needs) and not (v is None and d_values is None):
            with torch.no_grad(), full_precision(ctx.rows.A):
                found = _Eigen.gradients(ctx, v, d_values, needs)
        return *(None,) * 6, *first_order(found)

    @staticmethod
    def gradients(
        ctx: Any, v: Tensor | None, d_values: Tensor | None, needs: Sequence[bool]
    ) -> list[Tensor | None]:
        y = ctx.saved_tensors[0]
        rows, (k, symmetric) = ctx.rows, ctx.question
        y, values = y.reshape(rows.entries, k, -1), rows.values
        v = None if v is None else v.reshape(y.shape)
        # Of the eigenvalues in the units of the search.
        d_values = None if d_values is None else rows.back(d_values.reshape(values.shape))
        pairs = _Pairs(rows, values, y, ctx.solver, ctx.report)
        z = pairs.tangent(v, d_values) if symmetric else pairs.bordered(v, d_values)
        left, right = z, y
        if symmetric and not rows.A.symmetric:
            # Of the symmetric part, whatever the operator is.
            left, right = 0.5 * torch.cat([z, y], -2), torch.cat([y, z], -2)
        return rows.pull_back(rows.lift(left), rows.lift(right), needs)


@dataclass(frozen=True)
class _Pairs:
    """Eigenpairs, `(B, k)` and `(B, k, n)`, and how to solve beside them."""

    rows: Rows
    values: Tensor
    y: Tensor
    solver: Krylov
    report: Backward

    def tangent(self, v: Tensor | None, d_values: Tensor | None) -> Tensor:
        """`z` such that the gradient is that of `Σ zᵀAy`, for a symmetric matrix."""
        rows, values, y = self.rows, self.values, self.y
        along = None if d_values is None else d_values.unsqueeze(-1) * y
        if v is None:
            assert along is not None
            return along
        product, limit = rows.of_symmetric_part, self.solver.max_products
        solved = conjugate_residuals(
            product, values, y, v, scale=rows.scale, limit=limit, agreed=rows.agreed
        )
        self.report.fill(solved.residual, solved.products, solved.converged)
        z = solved.rows
        if y.shape[1] > 1:
            inside = torch.bmm(y, v.mT)
            difference = values.unsqueeze(-2) - values.unsqueeze(-1)
            # Rounding is that of the largest eigenvalue seen, which need not be among the wanted.
            scale = rows.scale[:, None, None]
            apart = difference.abs() > 8 * torch.finfo(v.dtype).eps * scale
            # Both the numerator and the denominator change sign with the order of a pair.
            half = 0.5 * (inside - inside.mT) / torch.where(apart, difference, 1)
            z = z + torch.bmm(torch.where(apart, half, 0), y)
        return z if along is None else z + along

    def bordered(self, v: Tensor | None, d_values: Tensor | None) -> Tensor:
        """The same for a general matrix: `(λI − Aᵀ)z = v − y(yᵀv)` with `yᵀz` given."""
        rows, y = self.rows, self.y
        along = torch.zeros_like(y) if d_values is None else d_values.unsqueeze(-1) * y
        right = torch.zeros_like(y) if v is None else v
        if d_values is not None:
            # Not the image of `along`, which may leave the range in the units of the search.
            right = right + d_values.unsqueeze(-1) * rows.transposed(y)
        solved = gmres(
            rows.transposed,
            self.values,
            y,
            right,
            scale=rows.scale,
            depth=self.solver.size(y.shape[-1]),
            limit=self.solver.max_products,
            agreed=rows.agreed,
        )
        self.report.fill(solved.residual, solved.products, solved.converged)
        return along + solved.rows
