"""Eigenvectors by products alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pmaf.errors import require_finite
from pmaf.krylov.space import Found, Inside, Space, search
from pmaf.linalg.products import long_norm, safe, square_range
from pmaf.linalg.symmetric import fixed_rows
from pmaf.operators import Operator
from pmaf.operators.rows import Rows
from pmaf.solvers import Krylov, Outcome
from pmaf.tangent.residuals import Product


class Largest:
    """The largest eigenvalues of a symmetric matrix.

    Args:
        k: how many.
        guards: how many more are followed until they are seen to be smaller. A search that
            starts from vectors that are given, not drawn, needs one: it might be over before
            anything else shows.
    """

    def __init__(self, k: int, guards: int = 0) -> None:
        self.width, self.guards = k + guards, guards

    def inside(self, space: Space) -> Inside:
        theta, s = torch.linalg.eigh(space.matrix)
        w, j = self.width, space.width
        k = w - self.guards
        kept = max(w, min(j - w, w + (j - w) // 2))
        # Between those asked for, and to the next.
        gaps = theta.diff(dim=-1)[:, -k:]
        gap = gaps.amin(-1) if j > 1 else torch.full_like(theta[:, 0], torch.inf)
        order, values = s.mT.flip(-2), theta.flip(-1)[:, :w]
        # Chebyshev polynomials grow by this beyond the part of the spectrum behind the wanted.
        part = (values[:, k - 1 : k] - values[:, k:]) / safe(theta[:, -1:] - theta[:, :1])
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
        guards: one if the first vector of the start is given, not drawn; see `Largest`.
    """

    def __init__(self, guards: int = 0) -> None:
        self.width, self.guards = 1 + guards, guards

    def inside(self, space: Space) -> Inside:
        H, j = space.matrix, space.width
        theta, s = torch.linalg.eig(H)
        # Of two with one modulus the positive one is Perron's.
        moduli = theta.abs()
        favour = 64 * torch.finfo(H.dtype).eps * (theta.real > 0.5 * moduli).to(moduli)
        order = torch.argsort(moduli * (1 + favour), dim=-1, descending=True, stable=True)
        theta = theta.gather(-1, order)
        s = s.gather(-1, order.unsqueeze(-2).expand_as(s))
        top = s[..., : self.width].mT
        pivot = top.gather(-1, top.abs().argmax(-1, keepdim=True))
        row = unit_rows((top * (pivot.conj() / pivot.abs())).real)
        values = (row @ H.mT * row).sum(-1)
        # Of a pair of complex vectors the one gives the real, the other the imaginary part.
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
    """By which a product brings out an eigenvalue beyond the first of `theta`, a logarithm.

    The others seen lie in an ellipse with half axes a and b around a real number m. The
    polynomials that are small on it, Chebyshev's, grow by `|w + √(w² − a² + b²)|/(a + b)` a degree
    at `m + w`; this is the least of it where the modulus is that of the first.
    """
    first, others = theta[:, :1].abs(), theta[:, 1:]
    low, high = others.real.aminmax(dim=-1, keepdim=True)
    m, a, b = 0.5 * (low + high), 0.5 * (high - low), others.imag.abs().amax(-1, keepdim=True)
    # Half axes of nothing are one rounding long; the corners of a box are outside of its ellipse.
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


def find_eigenvectors(
    rows: Rows, k: int, symmetric: bool, solver: Krylov, init: Tensor | None
) -> Outcome:
    """The largest eigenvalues of an operator, or the dominant one; vectors come as rows."""
    A = rows.A
    batch, n = A.batch_shape, A.shape[-1]
    rows.require_transposes(solver.tolerance_of(A.dtype))
    product = rows.of_symmetric_part if symmetric else rows
    guards = 1 if init is not None and k < n else 0
    start = _start(A, k, guards, init)
    found = search_eigenvectors(product, start, k, symmetric, solver, rows, guards)
    low, high = square_range(A.dtype)
    if not rows.agreed((found.scale > low) & (found.scale < high)):
        # Too large or too small to be squared, or squared already: once more in other units.
        rows.unit(product(start))  # raises an error where products overflow
        rows.change_units(start)
        product = rows.of_symmetric_part if symmetric else rows
        found = search_eigenvectors(product, start, k, symmetric, solver, rows, guards)
    rows.scale, rows.values = found.scale, found.values
    converged = found.converged
    if not symmetric:
        # Whatever is found of several with one modulus is not the dominant one.
        tie = found.gap <= 64 * torch.finfo(A.dtype).eps * found.scale
        converged = converged & ~tie
    y = unit_rows(found.rows)
    shape = (*batch, k)
    return Outcome(
        value=y.reshape(*shape, n),
        multiplier=rows.back(found.values).reshape(shape),
        residual=found.residual.reshape(batch),
        gap=rows.back(found.gap).reshape(batch),
        iterations=torch.full(batch, found.products, device=y.device),
        converged=converged.reshape(batch),
        basis=y.new_empty(*batch, 0, n),
        spread=y.new_empty(*batch, 0),
    )


def search_eigenvectors(
    product: Product,
    start: Tensor,
    k: int,
    symmetric: bool,
    solver: Krylov,
    rows: Rows,
    guards: int = 0,
) -> Found:
    return search(
        product,
        start,
        Largest(k, guards) if symmetric else Dominant(guards),
        size=solver.size(start.shape[-1], k + guards),
        tolerance=solver.tolerance_of(start.dtype),
        limit=solver.max_products,
        symmetric=symmetric,
        agreed=rows.agreed,
    )


def _start(A: Operator, k: int, guards: int, init: Tensor | None) -> Tensor:
    """Rows `(B, k + guards, n)` without structure; the first of them as given, if they are."""
    n, B = A.shape[-1], A.batch_shape.numel()
    row = fixed_rows(n, A.dtype, A.device)[1] / n**0.5
    rows = torch.stack([row.roll(i) for i in range(k + guards)]).expand(B, k + guards, n)
    if init is None:
        return rows
    require_finite(init=(init, 2))
    given = unit_rows(init.detach().mT.expand(*A.batch_shape, k, n).reshape(B, k, n))
    return torch.cat([given, rows[:, k:]], -2)


def unit_rows(rows: Tensor) -> Tensor:
    return rows / safe(long_norm(rows)).unsqueeze(-1)
