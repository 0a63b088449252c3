"""The paper's own rule: a deep declarative node with its tensors written out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pmaf._linalg import dot, matvec
from pmaf.gradients._base import Conditions, Gradient


@dataclass(frozen=True)
class DDN(Gradient):
    """`∇L = 𝒦𝓑` with `𝒦 = v(H⁻¹y(yᵀH⁻¹y)⁻¹yᵀ − I)H⁻¹`, as published.

    Needs `H` to be invertible, which it is not in the hard case of LESS; there a
    pseudo-inverse keeps the result finite, but it is not the derivative.

    Args:
        exploit: build `𝓑` from its structure ("E"), or by automatic differentiation of
            the objective, one batch entry at a time ("J", the paper's "AutoDiff" row).
    """

    serves = ("SphereLeastSquares",)

    exploit: bool = True

    def pullback(
        self, conditions: Conditions, v: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        y = conditions.y
        both = torch.stack(torch.broadcast_tensors(v, y), -1)
        s, q = _solve(conditions.hessian(), both).unbind(-1)
        along = dot(y, q)
        # Zero only where the pseudo-inverse stands in and y lies in the null space of H.
        ratio = dot(y, s) / torch.where(along == 0, 1, along)
        k = q * ratio.unsqueeze(-1) - s
        return tuple(
            None if block is None else _contract(k, block)
            for block in conditions.mixed(self.exploit, needs)
        )


def _contract(k: Tensor, block: Tensor) -> Tensor:
    """`Σᵢ kᵢ 𝓑ᵢ` for `𝓑` of shape `(*, n, …)`."""
    flat = block.flatten(k.dim())
    return matvec(flat.mT, k).reshape(*k.shape[:-1], *block.shape[k.dim() :])


def _solve(H: Tensor, rhs: Tensor) -> Tensor:
    """`H⁻¹ rhs`, by a pseudo-inverse if any batch entry is exactly singular."""
    solution, info = torch.linalg.solve_ex(H, rhs)
    if bool((info != 0).any()):
        return torch.linalg.pinv(H, hermitian=True) @ rhs
    return solution
