"""The paper's second rule for eigenvectors: the fixed point of power iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf.gradients.base import Gradient
from pmaf.solvers.base import Eigenvectors


@dataclass(frozen=True)
class IFT(Gradient):
    """Differentiate `y = Ay/‖Ay‖`: `∇L = −v H⁻¹ 𝓑` with `H = I − (I − yyᵀ)A/λ`.

    The solve is with the transpose of `H`, as in the formula; the published code solves with `H`
    itself, which gives another result for a nonsymmetric matrix.

    Args:
        exploit: use the structure of `H` and `𝓑` ("E"), or build both by automatic
            differentiation, one batch entry at a time ("J").

    >>> import torch, pmaf
    >>> A = torch.diag(torch.tensor([3.0, 1.0])).requires_grad_()
    >>> pmaf.ied(A, gradient=pmaf.gradients.IFT()).vectors[1].backward()
    >>> A.grad[0, 1].round(decimals=3)  # one half of 1/(3 − 1)
    tensor(0.2500)
    """

    solves = (Eigenvectors,)
    words = "the linear system of the fixed point y = Ay/‖Ay‖"

    exploit: bool = True

    def pullback(
        self, conditions: Any, v: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        H = conditions.fixed_point_hessian(self.exploit)
        # Adding eps to the diagonal keeps the result finite for a repeated eigenvalue.
        eye = torch.eye(H.shape[-1], dtype=H.dtype, device=H.device)
        H = H + torch.finfo(H.dtype).eps * eye
        w = torch.linalg.solve(H.mT, v.unsqueeze(-1)).squeeze(-1)
        return (conditions.fixed_point_contract(w, self.exploit),)
