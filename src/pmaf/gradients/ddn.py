"""The paper's own rule: a deep declarative node with its tensors written out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pmaf.gradients.base import Gradient, VectorConditions
from pmaf.linalg.products import dot, frobenius


@dataclass(frozen=True)
class DDN(Gradient):
    """`∇L = 𝒦𝓑` with `𝒦 = v(H⁻¹y(yᵀH⁻¹y)⁻¹yᵀ − I)H⁻¹`, as published.

    The formula needs an invertible `H`. In the hard case of LESS `H` is singular, and the result is
    finite but not the derivative. For a nonsymmetric eigenproblem the result is not the derivative
    either, because `−yᵀAy` depends only on the symmetric part of `A`.

    Args:
        exploit: build `𝓑` from its structure ("E"), or by automatic differentiation of
            the objective, one batch entry at a time ("J", the paper's "AutoDiff" row).

    >>> import torch, pmaf
    >>> A = torch.diag(torch.tensor([3.0, 1.0])).requires_grad_()
    >>> pmaf.ied(A, gradient=pmaf.gradients.DDN()).vectors[1].backward()
    >>> A.grad[0, 1].round(decimals=3)  # one half of 1/(3 − 1)
    tensor(0.2500)
    """

    words = "the published formula, with the inverse of the objective's second derivatives"

    exploit: bool = True

    def pullback(
        self, conditions: VectorConditions, v: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        y = conditions.y
        both = torch.stack(torch.broadcast_tensors(v, y), -1)
        s, q = _solve(conditions.hessian(), both).unbind(-1)
        along = dot(y, q)
        # yᵀH⁻¹y is zero only by cancellation, where H is singular.
        ratio = dot(y, s) / torch.where(along == 0, 1, along)
        k = q * ratio.unsqueeze(-1) - s
        return conditions.contract(k, self.exploit, needs)


def _solve(H: Tensor, rhs: Tensor) -> Tensor:
    """`H⁻¹ rhs`, with `eps·‖H‖` added to the diagonal so that it is always finite."""
    rounding = torch.finfo(H.dtype).eps * frobenius(H.detach())
    eye = torch.eye(H.shape[-1], dtype=H.dtype, device=H.device)
    return torch.linalg.solve(H + rounding * eye, rhs)
