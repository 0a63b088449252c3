"""Bordered systems in an eigenbasis of their matrix.

At a solution `y` on the sphere a symmetric matrix `H` describes the curvature; it is positive
semidefinite if the solution is global. Forward refinement and backward differentiation need the
solution `z` of

    P H P z = P v,   yᵀz = 0,   P = I − yyᵀ.

`H` itself may be singular (the hard case of LESS; always for an eigenvector) while this system
is not, so nothing here divides by the smallest eigenvalue of `H`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pmaf.linalg.gram import Spectrum
from pmaf.linalg.products import dot, matvec, rmatvec
from pmaf.linalg.roundings import merge_tolerance
from pmaf.tangent.kept import Basis


def solve_in_basis(
    kept: Basis, gap: Tensor, y: Tensor, v: Tensor, product: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """`z` for each row of `v`, `(*, k, n)`, and one `y`, `(*, n)`.

    With `product`, `H` times rows, the solution is refined once against its residual.
    """
    basis, spread = kept
    single = v.shape[-2] == 1
    if not single:
        basis, spread, gap = basis.unsqueeze(-3), spread.unsqueeze(-2), gap.unsqueeze(-1)
        y = y.unsqueeze(-2)
    solver = TangentSolver(basis, spread, gap, y)

    def solve(x: Tensor) -> Tensor:
        return solver(x.squeeze(-2)).unsqueeze(-2) if single else solver(x)

    z = solve(v)
    return z if product is None else z + solve(v - product(z))


class TangentSolver:
    """Solves `P H P z = P v`, `yᵀz = 0` where `H` has eigenvalues `spread + gap` in `basis`.

    Directions that the basis does not span have eigenvalue `gap`. Where the system is singular (a
    non-unique solution), `z` is zero along its null space.

    In the eigenbasis, with `ν` the multiplier of `yᵀz = 0`, every row reads
    `hᵢzᵢ + νyᵢ = vᵢ`. The rows of the smallest eigenvalue `h₀ = gap` are eliminated by
    hand, multiplied through by `h₀`, so that neither `h₀ = 0` nor `y₀ = 0` leads to a division by
    zero:

        ν = (y₀v₀ + h₀ Σ yᵢvᵢ/hᵢ) / d,   z₀ = (v₀ Σ yᵢ²/hᵢ − y₀ Σ yᵢvᵢ/hᵢ) / d,
        d = y₀² + h₀ Σ yᵢ²/hᵢ,   the sums over all other rows.
    """

    def __init__(self, basis: Tensor, spread: Tensor, gap: Tensor, y: Tensor) -> None:
        # Far below eps: a spectrum from A itself resolves eigenvalues that one from AᵀA does not.
        tiny = merge_tolerance(y.dtype) ** 2
        p, n = basis.shape[-2:]
        low = gap.unsqueeze(-1)
        h = spread + low
        size = h.abs()
        scale = size.amax(-1, keepdim=True)
        threshold = tiny * scale
        lowest = (spread == 0) | (size <= threshold)
        self.basis, self.y, self.low, self.lowest = basis, y, low, lowest
        self.complete = p == n
        self.inverse = h.reciprocal().masked_fill(lowest, 0)

        self.y_in = matvec(basis, y)
        self.y_low = self.y_in * lowest
        self.y_rest = y if self.complete else y - rmatvec(basis, self.y_in)
        q = dot(self.y_low, self.y_low)
        if not self.complete:
            q = q + dot(self.y_rest, self.y_rest)
        self.weighted = self.inverse * self.y_in
        q, s_yy = q.unsqueeze(-1), dot(self.weighted, self.y_in).unsqueeze(-1)

        determinant = torch.addcmul(q, low, s_yy)
        singular = determinant.abs() <= tiny * torch.addcmul(q, scale, s_yy)
        # Where d = 0 the solution is not unique, and ν follows from the other rows alone.
        self.over_d = determinant.reciprocal().masked_fill(singular, 0)
        self.fallback = s_yy.reciprocal().masked_fill(~(singular & (s_yy > 0)), 0)
        self.s_yy = s_yy
        # In the lowest eigenspace v has a part along y, coupled to the other rows, and a part
        # orthogonal to y. In one dimension the latter is zero, whatever the rounding errors are.
        self.several = None if n - p > 1 else n - (~lowest).sum(-1, keepdim=True) > 1
        self.over_q = q.reciprocal().masked_fill(q == 0, 0)
        self.over_low = low.reciprocal().masked_fill(low.abs() <= threshold, 0)

    def growth(self) -> tuple[Tensor, Tensor]:
        """`s` and `κ` with `Hs + κy = 0`, `yᵀs = 1`: how `y` and `−H` move with the radius.

        `s` is `H⁻¹y` up to its length, so that nothing is lost where `H` is ill-conditioned.
        """
        inside = torch.addcmul(self.y_low, self.low, self.weighted) * self.over_d
        s = rmatvec(self.basis, inside + self.weighted * self.fallback)
        if not self.complete:
            s = s + self.y_rest * self.over_d
        return s, -(self.low * self.over_d + self.fallback).squeeze(-1)

    def __call__(self, v: Tensor) -> Tensor:
        v_in = matvec(self.basis, v)
        v_low = v_in * self.lowest
        v_rest = v if self.complete else v - rmatvec(self.basis, v_in)
        p = dot(self.y_low, v_low)
        if not self.complete:
            p = p + dot(self.y_rest, v_rest)
        p, s_vy = p.unsqueeze(-1), dot(self.weighted, v_in).unsqueeze(-1)
        nu = torch.addcmul(p, self.low, s_vy) * self.over_d + s_vy * self.fallback
        share = p * self.over_q

        def solve_lowest(y_low: Tensor, v_low: Tensor) -> Tensor:
            along = share * y_low
            if self.several is not None:
                along = torch.where(self.several, along, v_low)
            coupled = (self.s_yy * along - s_vy * y_low) * self.over_d
            return torch.addcmul(coupled, self.over_low, v_low - along)

        z_in = torch.addcmul(solve_lowest(self.y_low, v_low), self.inverse, v_in - nu * self.y_in)
        z = rmatvec(self.basis, z_in)
        if not self.complete:
            z = z + solve_lowest(self.y_rest, v_rest)
        return z - self.y * dot(self.y, z).unsqueeze(-1)


def amplification(spectrum: Spectrum, gap: Tensor, y: Tensor) -> Tensor:
    """About how much a tangent solve magnifies its right-hand side, times the top of `AᵀA`.

    Multiplied by eps, this is the relative error of a solve in the basis of a rounded
    Gram matrix.
    """
    basis, spread = spectrum.basis, spectrum.spread
    low = gap.unsqueeze(-1)
    lowest = (spread == 0).expand(*gap.shape, -1)
    inverse = torch.where(lowest, 0, 1 / torch.where(lowest, 1, spread + low))
    y_in = matvec(basis, y)
    s_yy = dot(inverse * y_in, y_in)
    q = dot(y, y) - dot(y_in * ~lowest, y_in)
    determinant = q + gap * s_yy
    coupled = torch.where(determinant > 0, s_yy / torch.where(determinant > 0, determinant, 1), 0)
    # Among smallest eigenvalues that were merged into one, the solve magnifies by 1/gap.
    repeated = lowest.sum(-1) > (1 if spectrum.complete else 0)
    across = torch.where(repeated, 1 / gap.clamp_min(torch.finfo(y.dtype).tiny), 0)
    return spectrum.top * torch.stack([coupled, inverse.amax(-1), across]).amax(0)
