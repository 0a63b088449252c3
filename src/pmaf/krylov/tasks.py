"""The problems that a search can solve."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pmaf.krylov.search import Inside
from pmaf.krylov.space import Space
from pmaf.linalg.decompositions import eigenvalues, eigh
from pmaf.linalg.gram import Spectrum
from pmaf.linalg.products import long_norm, one_if_zero
from pmaf.linalg.roundings import TIED, merge_tolerance, merged
from pmaf.linalg.secular import secular_root
from pmaf.tangent.residuals import Product


class Largest:
    """The largest eigenvalues of a symmetric matrix.

    Args:
        k: how many.
        guards: how many more are computed until they prove to be smaller. A search from vectors
            that the user gives needs one: it might converge before a larger eigenvalue appears.
        extra: how many more are computed during the whole search.
        copies: how often each eigenvalue occurs by construction; k and skip are multiples of it.
        skip: how many of the k are not requested, so that the gaps between them do not count.
    """

    def __init__(
        self, k: int, guards: int = 0, extra: int = 0, copies: int = 1, skip: int = 0
    ) -> None:
        self.wanted, self.guards, self.width = k, guards, k + guards + extra
        self.copies, self.skip = copies, skip

    def inside(self, space: Space) -> Inside:
        theta, s = eigh(space.matrix)
        w, j, k = self.width, space.width, self.wanted
        kept = max(w, min(j - w, w + (j - w) // 2))
        # The gaps between the requested eigenvalues, and to the next one.
        first = max(self.copies, self.skip)
        gaps = theta.diff(dim=-1).flip(-1)[:, first - 1 : k : self.copies]
        gap = gaps.amin(-1) if j > first else torch.full_like(theta[:, 0], torch.inf)
        order, values = s.mT.flip(-2), theta.flip(-1)[:, :w]
        # Chebyshev polynomials on the unwanted spectrum grow by exp(2√part) at the wanted values.
        beyond = values[:, k - 1 : k] - values[:, k : k + self.guards]
        part = beyond / one_if_zero(theta[:, -1:] - theta[:, :1])
        return Inside(
            values,
            order[:, :w],
            order[:, :kept],
            gap,
            theta.abs().amax(-1),
            2 * part.clamp_min(0).sqrt(),
            gap,
        )

    def residual(self, values: Tensor, rows: Tensor, images: Tensor) -> Tensor:
        return images - values.unsqueeze(-1) * rows

    def system(self, product: Product) -> Product:
        return product


class Dominant:
    """The eigenvalue of largest modulus of a general matrix, if it is real.

    Args:
        guards: one if the user gives the first vector of the start; see `Largest`.
    """

    def __init__(self, guards: int = 0) -> None:
        self.wanted, self.guards, self.width = 1, guards, 1 + guards

    def inside(self, space: Space) -> Inside:
        H, j = space.matrix, space.width
        theta, s = torch.linalg.eig(H)
        # If two eigenvalues have one modulus, the positive one, Perron's, comes first.
        moduli = theta.abs()
        favour = TIED * torch.finfo(H.dtype).eps * (theta.real > 0.5 * moduli).to(moduli)
        order = torch.argsort(moduli * (1 + favour), dim=-1, descending=True, stable=True)
        theta = theta.gather(-1, order)
        s = s.gather(-1, order.unsqueeze(-2).expand_as(s))
        top = s[..., : self.width].mT
        pivot = top.gather(-1, top.abs().argmax(-1, keepdim=True))
        row = unit_rows((top * (pivot.conj() / pivot.abs())).real)
        values = (row @ H.mT * row).sum(-1)
        # A pair of complex vectors spans the same space as their real and imaginary parts.
        parts = torch.where((theta.imag < 0).unsqueeze(-2), s.imag, s.real)[..., : max(1, j // 2)]
        kept = torch.linalg.qr(parts).Q.mT
        moduli = theta.abs()
        gap = moduli[:, 0] - moduli[:, 1] if j > 1 else torch.full_like(moduli[:, 0], torch.inf)
        growth = _growth(theta).unsqueeze(-1) if self.guards else moduli[:, :0]
        return Inside(values, row, kept, gap, moduli[:, 0], growth, gap)

    def residual(self, values: Tensor, rows: Tensor, images: Tensor) -> Tensor:
        return images - values.unsqueeze(-1) * rows

    def system(self, product: Product) -> None:
        return None


def _growth(theta: Tensor) -> Tensor:
    """Logarithm of the growth per product of an eigenvalue beyond the first of `theta`.

    The other values seen lie in an ellipse with half axes a and b around a real number m. The
    Chebyshev polynomials of the ellipse grow by `|w + √(w² − a² + b²)|/(a + b)` a degree at
    `m + w`; the result is the minimum over all `m + w` with the modulus of the first.
    """
    first, others = theta[:, :1].abs(), theta[:, 1:]
    low, high = others.real.aminmax(dim=-1, keepdim=True)
    m, a, b = 0.5 * (low + high), 0.5 * (high - low), others.imag.abs().amax(-1, keepdim=True)
    # Half axes are at least eps·|θ₁|. `wider` scales the ellipse until it contains all values.
    least = torch.finfo(first.dtype).eps * first + torch.finfo(first.dtype).tiny
    a, b = a.clamp_min(least), b.clamp_min(least)
    wider = ((others.real - m) / a).square() + (others.imag / b).square()
    wider = wider.amax(-1, keepdim=True).sqrt().clamp_min(1)
    a, b = a * wider, b * wider
    angle = torch.linspace(0, math.pi, _ANGLES, dtype=first.dtype, device=first.device)
    w = torch.polar(first.expand(-1, _ANGLES).contiguous(), angle.expand(len(first), -1)) - m
    root = (w.square() - a.square() + b.square()).sqrt()
    outside = torch.maximum((w + root).abs(), (w - root).abs())
    return (outside / (a + b)).log().amin(-1)


_ANGLES = 33


class Lowest:
    """The minimum of `½uᵀGu − gᵀu` on the unit sphere.

    Args:
        g: `(B, 1, n)`.
        noise: `(B,)`; smaller coefficients of `g` count as zero.
        reference: `(B, 1, n)`; of two equal minima the one on its side is taken.
    """

    wanted, guards, width = 1, 0, 1

    def __init__(self, g: Tensor, noise: Tensor, reference: Tensor) -> None:
        self.g, self.noise, self.reference = g, noise, reference
        self.pull = long_norm(g).squeeze(-1)

    def inside(self, space: Space) -> Inside:
        theta, s = eigh(space.matrix)
        spread = merged(theta - theta[:, :1], theta[:, -1:], merge_tolerance(theta.dtype))
        spectrum = Spectrum(s.mT, spread, theta[:, 0], True)
        c = (self._seen(space, self.g).unsqueeze(-2) @ s).squeeze(-2)
        eps = torch.finfo(theta.dtype).eps
        side = self._seen(space, self.reference)
        u, gap, _, _, _ = secular_root(spectrum, c, self.noise, side, eps)
        row = u.unsqueeze(-2)
        # A restart keeps the lowest Ritz vectors, which a Krylov space is slow to find again.
        lowest = s.mT[:, : max(1, space.width // 2 - 1)]
        kept = torch.linalg.qr(torch.cat([row, lowest], -2).mT).Q.mT
        scale = theta.abs().amax(-1) + self.pull
        # The least curvature orthogonal to u; along u the matrix is lifted by scale + gap.
        inside = torch.diag_embed(spread + gap.unsqueeze(-1))
        y = row @ s
        aside = torch.eye(space.width, dtype=y.dtype, device=y.device) - y.mT @ y
        beside = aside @ inside @ aside + (scale + gap)[:, None, None] * (y.mT @ y)
        curvature = eigenvalues(beside)[:, 0]
        multiplier = (gap - theta[:, 0]).unsqueeze(-1)
        return Inside(multiplier, row, kept, gap, scale, theta[:, :0], curvature)

    def residual(self, values: Tensor, rows: Tensor, images: Tensor) -> Tensor:
        return images + values.unsqueeze(-1) * rows - self.g

    def system(self, product: Product) -> Product:
        return lambda x: -product(x)

    def _seen(self, space: Space, row: Tensor) -> Tensor:
        return torch.bmm(space.rows, row.mT).squeeze(-1)


def unit_rows(rows: Tensor) -> Tensor:
    return rows / one_if_zero(long_norm(rows)).unsqueeze(-1)
