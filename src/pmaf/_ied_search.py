"""Eigenvectors by products alone."""

from __future__ import annotations

import torch
from torch import Tensor

from pmaf._linalg import long_norm, safe, square_range
from pmaf._rows import Rows
from pmaf._space import Found, Inside, Space, search
from pmaf._tangent_krylov import Product
from pmaf.errors import require_finite
from pmaf.operators import Operator
from pmaf.solvers import Krylov, Outcome
from pmaf.solvers._products import fixed_rows


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
        order = s.mT.flip(-2)
        return Inside(
            theta.flip(-1)[:, :w],
            order[:, :w],
            order[:, :kept],
            gap,
            theta.abs().amax(-1),
            theta[:, -1] - theta[:, 0],
            gap,
        )

    def residual(self, values: Tensor, rows: Tensor, images: Tensor) -> Tensor:
        return images - values.unsqueeze(-1) * rows

    def system(self, product: Product) -> Product:
        return product


class Dominant:
    """The eigenvalue of largest modulus of a general matrix, if it is real."""

    width, guards = 1, 0

    def inside(self, space: Space) -> Inside:
        H, j = space.matrix, space.width
        theta, s = torch.linalg.eig(H)
        # Of two with one modulus the positive one is Perron's.
        moduli = theta.abs()
        favour = 64 * torch.finfo(H.dtype).eps * (theta.real > 0.5 * moduli).to(moduli)
        order = torch.argsort(moduli * (1 + favour), dim=-1, descending=True, stable=True)
        theta = theta.gather(-1, order)
        s = s.gather(-1, order.unsqueeze(-2).expand_as(s))
        top = s[..., 0]
        pivot = top.gather(-1, top.abs().argmax(-1, keepdim=True))
        row = (top * (pivot.conj() / pivot.abs())).real
        row = (row / long_norm(row).unsqueeze(-1)).unsqueeze(-2)
        values = (row @ H.mT * row).sum(-1)
        # Of a pair of complex vectors the one gives the real, the other the imaginary part.
        parts = torch.where((theta.imag < 0).unsqueeze(-2), s.imag, s.real)[..., : max(1, j // 2)]
        kept = torch.linalg.qr(parts).Q.mT
        moduli = theta.abs()
        gap = moduli[:, 0] - moduli[:, 1] if j > 1 else torch.full_like(moduli[:, 0], torch.inf)
        return Inside(values, row, kept, gap, moduli[:, 0], moduli[:, 0], gap)

    def residual(self, values: Tensor, rows: Tensor, images: Tensor) -> Tensor:
        return images - values.unsqueeze(-1) * rows

    def system(self, product: Product) -> None:
        return None


def find_eigenvectors(
    rows: Rows, k: int, symmetric: bool, solver: Krylov, init: Tensor | None
) -> Outcome:
    """The largest eigenvalues of an operator, or the dominant one; vectors come as rows."""
    A = rows.A
    batch, n = A.batch_shape, A.shape[-1]
    product = rows.of_symmetric_part if symmetric else rows
    guards = 1 if init is not None and symmetric and k < n else 0
    start = _start(A, k, guards, symmetric, init)
    found = search_eigenvectors(product, start, k, symmetric, solver, rows, guards)
    low, high = square_range(A.dtype)
    if not rows.agreed((found.scale > low) & (found.scale < high)):
        # Too large or too small to be squared: once more in other units.
        unit = rows.unit(product(start))
        found = search_eigenvectors(
            lambda x: product(x) / unit[:, None, None], start, k, symmetric, solver, rows, guards
        )
        found = found._replace(
            values=found.values * unit.unsqueeze(-1),
            gap=found.gap * unit,
            scale=found.scale * unit,
        )
    rows.scale = found.scale
    converged = found.converged
    if not symmetric:
        # Whatever is found of several with one modulus is not the dominant one.
        tie = found.gap <= 64 * torch.finfo(A.dtype).eps * found.scale
        converged = converged & ~tie
    y = unit_rows(found.rows)
    shape = (*batch, k)
    return Outcome(
        value=y.reshape(*shape, n),
        multiplier=found.values.reshape(shape),
        residual=found.residual.reshape(batch),
        gap=found.gap.reshape(batch),
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
        Largest(k, guards) if symmetric else Dominant(),
        size=solver.size(start.shape[-1], k + guards),
        tolerance=solver.tolerance_of(start.dtype),
        limit=solver.max_products,
        symmetric=symmetric,
        agreed=rows.agreed,
    )


def _start(A: Operator, k: int, guards: int, symmetric: bool, init: Tensor | None) -> Tensor:
    """Rows `(B, k + guards, n)` without structure; the first of them as given, if they are."""
    n, B = A.shape[-1], A.batch_shape.numel()
    row = fixed_rows(n, A.dtype, A.device)[1] / n**0.5
    rows = torch.stack([row.roll(i) for i in range(k + guards)]).expand(B, k + guards, n)
    if init is None:
        return rows
    require_finite(init=(init, 2))
    given = unit_rows(init.detach().mT.expand(*A.batch_shape, k, n).reshape(B, k, n))
    if symmetric:
        return torch.cat([given, rows[:, k:]], -2)
    # Without a guard: enough of everything else for a larger eigenvalue to show.
    return given + 0.25 * rows


def unit_rows(rows: Tensor) -> Tensor:
    return rows / safe(long_norm(rows)).unsqueeze(-1)
