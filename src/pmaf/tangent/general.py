"""Bordered systems of matrices that are not symmetric."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pmaf.linalg.products import inner, long_norm, one_if_zero
from pmaf.linalg.roundings import LOOSE, ROUNDED, merge_tolerance
from pmaf.tangent.residuals import Product, Solved, judged, scaled_system
from pmaf.tangent.series import neumann


def dominant_solve(
    A: Tensor,
    values: Tensor,
    y: Tensor,
    v: Tensor | None,
    d_values: Tensor | None,
    gap: Tensor,
    rate: float,
) -> Tensor | None:
    """`w` of the bordered system of a nonsymmetric matrix; None if the series is too slow.

    On the complement of `y`, which `Aᵀ` maps to itself, the system is `(λI − Aᵀ)w = v`. The left
    eigenvector, which the gradient of `λ` needs, is `y` plus the solution of the same system with
    the right-hand side `Aᵀy − λy`.
    """
    n = A.shape[-1]
    batch = y.shape[:-2]
    matrix, y, values = A.reshape(-1, n, n), y.reshape(-1, 1, n), values.reshape(-1, 1)
    if (gap.reshape(-1, 1) <= merge_tolerance(A.dtype) * values.abs()).any():
        return None
    known = []
    if v is not None:
        known.append(v.expand(*batch, 1, n).reshape(-1, 1, n))
    if d_values is not None:
        known.append(torch.bmm(y, matrix))
    right = known[0] if len(known) == 1 else torch.cat(known, -2)
    for _ in range(2):  # every term of the series would add a remainder along y
        right = torch.baddbmm(right, torch.bmm(right, y.mT), y, alpha=-1)
    found = neumann(lambda w: torch.bmm(w, matrix), values, right, rate)
    if found is None:
        return None
    found = torch.baddbmm(found, torch.bmm(found, y.mT), y, alpha=-1)
    w = found[:, :1]
    if d_values is not None:
        left = d_values.reshape(-1, 1, 1) * (y + found[:, -1:])
        w = left if v is None else w + left
    return w.view(*batch, 1, n)


def gmres(
    product: Product,
    shift: Tensor,
    y: Tensor,
    right: Tensor,
    *,
    scale: Tensor,
    depth: int,
    limit: int,
    agreed: Callable[[Tensor], bool],
) -> Solved:
    """`(shift·I − A) w = right` on the complement of `y`, which `A` maps to itself.

    Args:
        product: `A` times rows `(B, 1, n)`.
        shift: `(B, 1)`.
        y: `(B, 1, n)`.
        right: `(B, 1, n)`.
        scale: `(B,)`, of the matrix.
        depth: steps between restarts.
    """
    system, right, back, largest = scaled_system(product, shift, y, right, scale)
    B, _, n = right.shape
    depth = min(depth, n)
    eps = torch.finfo(right.dtype).eps
    size = long_norm(right)
    right = system.clear(system.clear(right))
    w, rest = torch.zeros_like(right), right
    products = 0
    Q = right.new_empty(B, depth + 1, n)
    previous = size
    while True:
        left = long_norm(rest)
        floor = size + largest * long_norm(w)
        done = left <= ROUNDED * eps * floor
        stuck = (left >= 0.5 * previous) & (left <= LOOSE * eps * floor) & (products > 0)
        if products >= limit or agreed((done | stuck).all(-1)):
            return Solved(
                system.clear(w) * back, *judged(left, size, largest, long_norm(w)), products
            )
        H = right.new_zeros(B, depth + 1, depth)
        Q[:, :1] = rest / one_if_zero(left).unsqueeze(-1)
        look, used, s = _FIRST, depth, H.mT
        for j in range(depth):
            image = system(Q[:, j : j + 1])
            products += 1
            basis = Q[:, : j + 1]
            h = inner(image, basis)
            image = torch.baddbmm(image, h, basis, alpha=-1)
            g = inner(image, basis)
            image = torch.baddbmm(image, g, basis, alpha=-1)
            length = long_norm(image)
            H[:, : j + 1, j] = (h + g).squeeze(1)
            # If the space is invariant, the remainder is rounding error and no new direction.
            length = torch.where(length <= ROUNDED * eps * largest, 0, length)
            H[:, j + 1, j] = length.squeeze(-1)
            unit = image / one_if_zero(length).unsqueeze(-1)
            Q[:, j + 1 : j + 2] = torch.where((length > 0).unsqueeze(-1), unit, 0)
            if j + 1 < min(look, depth):
                continue
            s, rough = _least_squares(H[:, : j + 2, : j + 1], left)
            look, used = j + 1 + max(1, (j + 1) // 4), j + 1
            if agreed((rough <= ROUNDED * eps * floor.squeeze(-1)) | done.squeeze(-1)):
                break
        w = w + torch.bmm(s.mT, Q[:, :used])
        previous = left
        rest = right - system(w)
        products += 1


def _least_squares(H: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """The minimiser `s` of `‖Hs − left·e₁‖`, and the minimum."""
    q, r = torch.linalg.qr(H, mode="complete")
    j = H.shape[-1]
    known = left.unsqueeze(-1) * q[:, :1].mT
    diagonal = r[:, :j].diagonal(dim1=-2, dim2=-1)
    # A zero pivot means that the space is invariant; its coefficient is set to zero.
    usable = diagonal.abs() > torch.finfo(H.dtype).eps * r.abs().amax((-2, -1)).unsqueeze(-1)
    r = torch.where(usable.unsqueeze(-1), r[:, :j], torch.eye(j, dtype=H.dtype, device=H.device))
    top = torch.where(usable.unsqueeze(-1), known[:, :j], 0)
    return torch.linalg.solve_triangular(r, top, upper=True), known[:, j, 0].abs()


# Steps before the first check of the residual.
_FIRST = 6
