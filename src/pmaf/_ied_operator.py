"""IED of an operator: products forward, products backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pmaf import _spread
from pmaf._ied_attach import full_precision
from pmaf._linalg import dot, long_norm, square_range
from pmaf._rows import Rows, first_order, spread_alike
from pmaf._solve import Backward, Certificate, announce
from pmaf._space import Found, Inside, Product, Space, search
from pmaf._tangent_krylov import conjugate_residuals, gmres
from pmaf.errors import require_finite
from pmaf.operators import Operator
from pmaf.solvers import Krylov, Outcome
from pmaf.solvers._products import fixed_rows

if TYPE_CHECKING:
    from pmaf.ied import PrincipalEigenvectors


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

    def curvature(self, product: Product) -> Product:
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

    def curvature(self, product: Product) -> None:
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
    found = _search(product, start, k, symmetric, solver, rows, guards)
    low, high = square_range(A.dtype)
    if not rows.agreed((found.scale > low) & (found.scale < high)):
        # Too large or too small to be squared: once more in other units.
        unit = rows.unit(product(start))
        found = _search(
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
    y = _unit(found.rows)
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


def _search(
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
    given = _unit(init.detach().mT.expand(*A.batch_shape, k, n).reshape(B, k, n))
    if symmetric:
        return torch.cat([given, rows[:, k:]], -2)
    # Without a guard: enough of everything else for a larger eigenvalue to show.
    return given + 0.25 * rows


def _unit(rows: Tensor) -> Tensor:
    return rows / _safe(long_norm(rows)).unsqueeze(-1)


def _safe(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1, x)


def attach_operator(
    problem: PrincipalEigenvectors, solver: Krylov, init: Tensor | None, throw: bool
) -> tuple[Outcome, Backward]:
    """Solve for an operator, differentiably in what it is made of."""
    A = problem.A
    assert isinstance(A, Operator)
    A = spread_alike(A)
    report = Backward()
    question = (problem.width, problem.symmetric)
    found: Any = _Eigen.apply(A, question, solver, init, throw, report, *A.tensors)
    return Outcome(*found), report


class _Eigen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operator: Operator,
        question: tuple[int, bool],
        solver: Krylov,
        init: Tensor | None,
        throw: bool,
        report: Backward,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        rows = Rows(operator.with_tensors([x.detach() for x in tensors]), operator.batch_shape)
        k, symmetric = question
        with full_precision(rows.A):
            outcome = rows.guarded(find_eigenvectors, k, symmetric, solver, init)
        announce(outcome, solver, throw)
        ctx.rows, ctx.question, ctx.solver, ctx.report = rows, question, solver, report
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(outcome.multiplier, outcome.value, *tensors)
        ctx.mark_non_differentiable(*outcome[2:])
        return tuple(outcome)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        v, d_values = grads[:2]
        needs = ctx.needs_input_grad[6:]
        found: list[Tensor | None] = [None for _ in needs]
        if any(needs) and not (v is None and d_values is None):
            with torch.no_grad(), full_precision(ctx.rows.A):
                found = _Eigen.gradients(ctx, v, d_values, needs)
        return *(None,) * 6, *first_order(found)

    @staticmethod
    def gradients(
        ctx: Any, v: Tensor | None, d_values: Tensor | None, needs: Sequence[bool]
    ) -> list[Tensor | None]:
        values, y, *_ = ctx.saved_tensors
        rows, (k, symmetric) = ctx.rows, ctx.question
        y, values = y.reshape(rows.entries, k, -1), values.reshape(rows.entries, k)
        v = None if v is None else v.reshape(y.shape)
        d_values = None if d_values is None else d_values.reshape(values.shape)
        tangent = _tangent if symmetric else _bordered
        z = tangent(rows, values, y, v, d_values, ctx.solver, ctx.report)
        left, right = z, y
        if symmetric and not rows.A.symmetric:
            # Of the symmetric part, whatever the operator is.
            left, right = 0.5 * torch.cat([z, y], -2), torch.cat([y, z], -2)
        return rows.pull_back(rows.lift(left), rows.lift(right), needs)


def _tangent(
    rows: Rows,
    values: Tensor,
    y: Tensor,
    v: Tensor | None,
    d_values: Tensor | None,
    solver: Krylov,
    report: Backward,
) -> Tensor:
    """`z` such that the gradient is that of `Σ zᵀAy`, for a symmetric matrix."""
    along = None if d_values is None else d_values.unsqueeze(-1) * y
    if v is None:
        assert along is not None
        return along
    product, limit = rows.of_symmetric_part, solver.max_products
    solved = conjugate_residuals(
        product, values, y, v, scale=rows.scale, limit=limit, agreed=rows.agreed
    )
    report.fill(solved.residual, solved.products, solved.converged)
    z = solved.rows
    if y.shape[1] > 1:
        inside = torch.bmm(y, v.mT)
        difference = values.unsqueeze(-2) - values.unsqueeze(-1)
        scale = values.abs().amax(-1)[:, None, None]
        apart = difference.abs() > 8 * torch.finfo(v.dtype).eps * scale
        half = 0.5 * (inside - inside.mT) / torch.where(apart, difference, 1)
        z = z + torch.bmm(torch.where(apart, half, 0).mT, y)
    return z if along is None else z + along


def _bordered(
    rows: Rows,
    values: Tensor,
    y: Tensor,
    v: Tensor | None,
    d_values: Tensor | None,
    solver: Krylov,
    report: Backward,
) -> Tensor:
    """The same for a general matrix: `(λI − Aᵀ)z = v − y(yᵀv)` with `yᵀz` given."""
    along = torch.zeros_like(y) if d_values is None else d_values.unsqueeze(-1) * y
    right = torch.zeros_like(y) if v is None else v
    if d_values is not None:
        right = right + rows.transposed(along)
    solved = gmres(
        rows.transposed,
        values,
        y,
        right,
        scale=rows.scale,
        depth=solver.size(y.shape[-1]),
        limit=solver.max_products,
        agreed=rows.agreed,
    )
    report.fill(solved.residual, solved.products, solved.converged)
    return along + solved.rows


def certify_operator(problem: PrincipalEigenvectors, value: Tensor) -> Certificate:
    """Checked by products, and by a second search, beside the vectors given.

    `optimality` is by how much the eigenvalues exceed the largest that is found there,
    relative to the matrix, and zero if they do: what another start does not bring to light
    is taken not to be there.
    """
    A = problem.A
    assert isinstance(A, Operator)
    shape = (*problem.batch_shape, problem.n, *(() if problem.k is None else (problem.k,)))
    if value.shape != shape:
        raise ValueError(f"a solution of this problem has shape {shape}; got {tuple(value.shape)}")
    A = spread_alike(A.with_tensors([x.detach() for x in A.tensors]))
    rows = Rows(A if problem.largest else -A, problem.batch_shape)
    y = _spread.whole(value.detach()).to(A.dtype)
    y = (y.unsqueeze(-1) if problem.k is None else y).mT.reshape(-1, problem.width, problem.n)
    exact = rows.of_symmetric_part if problem.symmetric else rows
    start = fixed_rows(problem.n, A.dtype, A.device)[1:].flip(-1).expand(len(y), 1, -1)
    # All three measures are relative; in these units nothing over- or underflows.
    unit = rows.unit(exact(start))[:, None, None]

    def product(x: Tensor) -> Tensor:
        return exact(x) / unit

    image = product(y)
    values = dot(y, image) / _safe(dot(y, y))
    basis = _unit(y) if problem.width == 1 else torch.linalg.qr(y.mT).Q.mT

    def beside(x: Tensor) -> Tensor:
        return torch.baddbmm(x, torch.bmm(x, basis.mT), basis, alpha=-1)

    # What is given counts as its smallest eigenvalue: only what is above that shows.
    lowest = values.amin(-1)[:, None, None]

    def elsewhere(x: Tensor) -> Tensor:
        rest = beside(x)
        return beside(product(rest)) + lowest * (x - rest)

    scale = values.abs().amax(-1)
    surplus = torch.zeros_like(scale)
    if problem.width < problem.n:
        solver = Krylov(tolerance=torch.finfo(A.dtype).eps ** 0.5)
        other = _search(elsewhere, start, 1, problem.symmetric, solver, rows)
        scale = torch.maximum(scale, other.scale)
        # A pair of complex eigenvalues does not converge, but its modulus is known.
        best = other.values[:, 0] if problem.symmetric else other.scale
        known = lowest[:, 0, 0] if problem.symmetric else lowest[:, 0, 0].abs()
        surplus = (known - best).clamp_max(0)
    scale = _safe(scale)
    eye = torch.eye(problem.width, dtype=y.dtype, device=y.device)
    found = Certificate(
        feasibility=(y @ y.mT - eye).abs().amax((-2, -1)),
        stationarity=long_norm(image - values.unsqueeze(-1) * y).amax(-1) / scale,
        optimality=surplus / scale,
    )
    return _spread.replace_tensors(found, lambda x: x.reshape(problem.batch_shape))
