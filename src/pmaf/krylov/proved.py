"""Top eigenvectors from one Krylov space, with a proof that no larger eigenvalue is missing.

The k rows of `Y` are approximate eigenvectors, and `θ` is the smallest of their values. If the
Cholesky factorisation of `(θ − δ)I − A + YᵀτY` exists, then `A` has no eigenvalue above `θ − δ` on
the complement of `Y`, and by interlacing at most k in all, which are those found. The factor then
refines the vectors, and preconditions the linear system of the backward pass.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.linalg.decompositions import cholesky, eigh
from pmaf.linalg.products import norm, one_if_zero, solve_factored, symmetric_part
from pmaf.linalg.roundings import merge_tolerance, working_dtype
from pmaf.linalg.symmetric_part import SymmetricPart, fixed_rows


class Ritz(NamedTuple):
    """Top eigenpairs of each matrix; they have not converged where not `found`."""

    values: Tensor  # (B, k), descending
    rows: Tensor  # (B, k, n)
    residual: Tensor  # (B,), relative to the largest modulus
    scale: Tensor  # (B,), the largest modulus
    found: Tensor  # (B,) bool
    products: int


def ritz(part: SymmetricPart, k: int, tolerance: float, limit: int) -> Ritz | None:
    """Lanczos with full orthogonalisation; None once most entries are predicted to fail.

    A few digits are enough, because `polish` refines the vectors.
    """
    A = part.matrix
    B, n = A.shape[:2]
    start = fixed_rows[n, A.dtype, A.device][1]
    Q = A.new_zeros(B, limit + 1, n)
    T = A.new_zeros(B, limit, limit)
    Q[:, 0] = start / norm(start)
    check = max(_FIRST, 6 * k)
    for m in range(1, limit + 1):
        basis = Q[:, :m]
        w = part(Q[:, m - 1 : m])
        # Orthogonalised twice, or rounding would bring in second copies of eigenvectors.
        h = torch.bmm(w, basis.mT)
        w = torch.baddbmm(w, h, basis, alpha=-1)
        g = torch.bmm(w, basis.mT)
        w = torch.baddbmm(w, g, basis, alpha=-1)
        T[:, m - 1, :m] = (h + g).squeeze(1)
        length = norm(w)
        # If the space is invariant, w is zero or rounding error. A Ritz pair that this row spoils
        # is rejected by its residual.
        tiny = torch.finfo(A.dtype).tiny
        torch.div(w, length.unsqueeze(-1).clamp_min(tiny), out=Q[:, m : m + 1])
        if m < check and m < limit:
            continue
        theta, s = eigh(T[:, :m, :m])
        scale = theta.abs().amax(-1)
        rest = (length * s[:, -1, -k:].abs()).amax(-1)
        gap = theta[:, -k] - theta[:, max(m - k - 1, 0)]
        wanted = torch.maximum(tolerance * scale, _POLISH * gap)
        done = rest <= wanted
        if done.all() or m == limit:
            y = torch.bmm(s[:, :, -k:].flip(-1).mT, basis)
            # Beyond an invariant space, as of a matrix of low rank, the basis has rows of zeros.
            return judge(part, y / one_if_zero(norm(y)).unsqueeze(-1), scale, done, m)
        left = _steps_left(rest / wanted, gap / (theta[:, -1] - theta[:, 0]))
        hopeful = done | (m + left <= limit)
        if 2 * int(hopeful.sum()) < B:
            return None
        check = m + max(4, math.ceil(float(torch.where(hopeful & ~done, left, 0).amax())))
    return None


def polish(part: SymmetricPart, found: Ritz, factor: Tensor, tolerance: float) -> Ritz:
    """Refine with the factor, by Newton's steps for one vector, by Davidson's for several."""
    left = torch.inf
    for _ in range(_POLISHES):
        before, left = left, float(torch.where(found.found, found.residual, 0).amax())
        # Davidson's steps converge linearly; one that gains less than a factor of two meets
        # rounding.
        if left <= 0.5 * tolerance or (left <= tolerance and left > 0.5 * before):
            break
        image = part.exact(found.rows)
        rest = image - found.values.unsqueeze(-1) * found.rows
        step = solve_factored(factor, rest)
        step = torch.where(found.found[:, None, None], step, 0)
        if step.shape[-2] == 1:
            y = found.rows + step
            y = y / norm(y).unsqueeze(-1)
        else:
            y = _best_within(part, torch.cat([found.rows, step], -2))
        found = judge(part, y, found.scale, found.found, found.products + 2)
    return found


def _best_within(part: SymmetricPart, rows: Tensor) -> Tensor:
    """The Ritz vectors of the larger half of all Ritz values in the span of the rows.

    They are computed in float64 where the device has it: the cost for a few rows is small, and
    rounding in float32 would limit the accuracy of the refinement.
    """
    dtype = rows.dtype
    wide = working_dtype(dtype, rows.device)
    basis = torch.linalg.qr(rows.mT.to(wide)).Q.mT
    small = torch.bmm(basis, part.exact(basis.to(dtype)).to(wide).mT)
    turn = eigh(symmetric_part(small)).vectors
    return torch.bmm(turn[..., -(rows.shape[-2] // 2) :].flip(-1).mT, basis).to(dtype)


def certificate(
    part: SymmetricPart, found: Ritz, of: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The Cholesky factors, `(B, n, n)`, and which of them exist; `of` selects entries."""
    y, values, scale = found.rows, found.values, found.scale
    if of is not None:
        y, values, scale = y[of], values[of], scale[of]
    lift = (2 * scale)[:, None, None] * y
    matrix = torch.baddbmm(part.formed(of), lift.mT, y, beta=-1)
    shift = values[:, -1] - merge_tolerance(y.dtype) * scale
    matrix.diagonal(dim1=-2, dim2=-1).add_(shift.unsqueeze(-1))
    factor, info = cholesky(matrix)
    return factor, info == 0


def judge(part: SymmetricPart, y: Tensor, scale: Tensor, found: Tensor, products: int) -> Ritz:
    image = part.exact(y)
    values = (y * image).sum(-1)
    rest = norm(image - values.unsqueeze(-1) * y).amax(-1)
    return Ritz(values, y, rest / scale, scale, found, products)


def _steps_left(excess: Tensor, gap: Tensor) -> Tensor:
    """How many steps divide the residual by `excess`, by the theory of Chebyshev polynomials."""
    g = (gap / (1 - gap).clamp_min(torch.finfo(gap.dtype).eps)).clamp_min(0)
    rate = torch.log1p(2 * (g + (g * (1 + g)).sqrt()))
    return torch.nan_to_num(excess.clamp_min(1).log() / rate, nan=torch.inf)


# Newton's steps converge if the residual is at most this fraction of the gap.
_POLISH = 1e-2
_POLISHES = 16
# Steps before the first check.
_FIRST = 12
