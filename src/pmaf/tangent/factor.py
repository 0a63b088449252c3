"""Solving the bordered systems of LESS: `P(AᵀA + μI)P z = Pv` with `yᵀz = 0`.

They are solved in an eigenbasis of `AᵀA`, or with the Cholesky factor of `K = AᵀA + μI + σyyᵀ`,
which equals `AᵀA + μI` on the tangent space. Both may come from a rounded Gram matrix; the solution
is refined by residuals that are computed from `A`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf.linalg.gram import Spectrum, singular_spectrum
from pmaf.linalg.products import dot, solve_factored
from pmaf.linalg.roundings import SETTLED, merge_tolerance
from pmaf.runtime.log import took
from pmaf.runtime.opaque import Axes, Step
from pmaf.runtime.opaque import solve as solve_opaquely
from pmaf.runtime.text import joined
from pmaf.tangent.basis import solve_in_basis
from pmaf.tangent.kept import Basis


def gram_product(A: Tensor, shift: Tensor, z: Tensor) -> Tensor:
    """`(AᵀA + shift·I) z` for each row of `z`, `(*, k, n)`."""
    return z @ A.mT @ A + shift[..., None, None] * z


def gap_above(spectrum: Spectrum, shift: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """The smallest eigenvalue of `AᵀA + shift·I`, zero where it is only rounding.

    The shift may have errors `noise` of its own.
    """
    gap = shift + spectrum.floor
    rounding = noise + merge_tolerance(gap.dtype) * spectrum.top
    return torch.where(gap.abs() > rounding, gap, torch.zeros_like(gap))


def factored_solve(
    A: Tensor, shift: Tensor, gap: Tensor, factor: Tensor, y: Tensor, v: Tensor
) -> Tensor:
    """`z` for each row of `v`, `(*, k, n)`, with the Cholesky factor `L` of `K = LLᵀ`.

    Batch entries whose factor is zero or too inaccurate are solved in an eigenbasis.
    """
    (z,) = solve_opaquely(FACTORED, A, shift, gap, factor, y, v)
    return z


@dataclass(frozen=True)
class Factored(Step):
    """The same as a step of the opaque operator."""

    def run(self, tensors: Any) -> tuple[Tensor]:
        return (_solve(*tensors),)

    def outline(self, tensors: Any) -> tuple[Tensor]:
        return (torch.empty_like(tensors[-1], memory_format=torch.contiguous_format),)

    def mapped(
        self, call: str, tensors: Any, axes: Axes, size: int
    ) -> tuple[list[Tensor], tuple[int]]:
        *fixed, v = tensors
        if all(axis is None for axis in axes[:-1]):
            # Right-hand sides for one matrix become rows, so that the factor is not copied.
            rows = v.movedim(axes[-1] or 0, -3)
            (z,) = solve_opaquely(call, *fixed, rows.flatten(-3, -2))
            return [z.unflatten(-2, rows.shape[-3:-1]).contiguous()], (z.dim() - 2,)
        moved = [
            x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0)
            for x, axis in zip(tensors, axes)
        ]
        return solve_opaquely(call, *moved), (0,)


FACTORED = joined(Factored.kind)


def _solve(A: Tensor, shift: Tensor, gap: Tensor, factor: Tensor, y: Tensor, v: Tensor) -> Tensor:
    y_row = y.unsqueeze(-2)

    def solve(x: Tensor) -> Tensor:
        return solve_factored(factor, x)

    q = solve(y_row)
    q = q / dot(q, y_row).unsqueeze(-1)

    def tangent(p: Tensor) -> Tensor:
        z = p - (p @ y_row.mT) * q
        return z - (z @ y_row.mT) * y_row

    eps = torch.finfo(v.dtype).eps
    p = solve(v)
    z = tangent(p)
    # For v along y the solution is rounding error, which refinement does not reduce.
    rounding = (SETTLED * eps) ** 2 * dot(p, p)
    settled = torch.zeros_like(v[..., 0], dtype=torch.bool)
    for _ in range(_REFINEMENTS):
        step = tangent(solve(v - gram_product(A, shift, z)))
        z = z + step
        settled = dot(step, step) <= torch.maximum(eps * dot(z, z), rounding)
        if settled.all():
            return z.contiguous()
    took("tangent: singular vectors")
    left = (~settled).any(-1)
    A = A.expand(*left.shape, *A.shape[-2:])[left]
    shift, gap, y, v = shift[left], gap[left], y[left], v[left]
    spectrum, _, _ = singular_spectrum(A)
    gap = torch.where(torch.isfinite(gap), gap, gap_above(spectrum, shift))
    kept = Basis(spectrum.basis, spectrum.spread)
    z[left] = solve_in_basis(kept, gap, y, v, lambda z: gram_product(A, shift, z))
    return z.contiguous()


# If so many refinements do not converge, the factor is too inaccurate.
_REFINEMENTS = 3
