"""LESS of an operator: products forward, products backward.

Within a subspace the problem is a small one, whose global minimum is known from its
eigenvalues. The search starts from `Aᵀb` and sees only what that brings up; a multiplier that
is not negative is proof enough, and otherwise the smallest eigenvalue of `AᵀA` is looked for,
and its vector joins the space if the minimum turns out to need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pmaf.autograd.ied_attach import OutOfRangeError, full_precision
from pmaf.autograd.ied_search import Largest
from pmaf.autograd.less_entries import are_few, solve_entries
from pmaf.errors import require_finite
from pmaf.krylov.space import Found, Inside, Space, Task, search
from pmaf.linalg import sphere
from pmaf.linalg.gram import Spectrum, merge_tolerance, merged
from pmaf.linalg.products import long_norm, power_of_two, square_range
from pmaf.linalg.symmetric import fixed_rows
from pmaf.operators import Operator
from pmaf.operators.rows import Rows, first_order, spread_alike
from pmaf.runtime import ranks
from pmaf.solution import Backward, announce
from pmaf.solvers import Krylov, Outcome, Secular
from pmaf.tangent.residuals import WORTH, Product, conjugate_residuals


class Minimum:
    """The minimum of `½uᵀGu − gᵀu` on the unit sphere.

    Args:
        g: `(B, 1, n)`.
        noise: `(B,)`, of the coefficients of `g`: below it they count as zero.
        reference: `(B, 1, n)`, which of two equal minima is taken.
    """

    width, guards = 1, 0

    def __init__(self, g: Tensor, noise: Tensor, reference: Tensor) -> None:
        self.g, self.noise, self.reference = g, noise, reference
        self.pull = long_norm(g).squeeze(-1)

    def inside(self, space: Space) -> Inside:
        theta, s = torch.linalg.eigh(space.matrix)
        spread = merged(theta - theta[:, :1], theta[:, -1:], merge_tolerance(theta.dtype))
        spectrum = Spectrum(s.mT, spread, theta[:, 0], True)
        c = (self._seen(space, self.g).unsqueeze(-2) @ s).squeeze(-2)
        eps = torch.finfo(theta.dtype).eps
        side = self._seen(space, self.reference)
        u, gap, _, _, _ = _SECULAR.root(spectrum, c, self.noise, side, eps)
        row = u.unsqueeze(-2)
        # The lowest directions are the ones a Krylov space is slow to find again.
        lowest = s.mT[:, : max(1, space.width // 2 - 1)]
        kept = torch.linalg.qr(torch.cat([row, lowest], -2).mT).Q.mT
        scale = theta.abs().amax(-1) + self.pull
        # Least curvature beside u: along u itself nothing is free to move.
        inside = torch.diag_embed(spread + gap.unsqueeze(-1))
        y = row @ s
        aside = torch.eye(space.width, dtype=y.dtype, device=y.device) - y.mT @ y
        beside = aside @ inside @ aside + (scale + gap)[:, None, None] * (y.mT @ y)
        curvature = torch.linalg.eigvalsh(beside)[:, 0]
        multiplier = (gap - theta[:, 0]).unsqueeze(-1)
        return Inside(multiplier, row, kept, gap, scale, theta[:, :0], curvature)

    def residual(self, values: Tensor, rows: Tensor, images: Tensor) -> Tensor:
        return images + values.unsqueeze(-1) * rows - self.g

    def system(self, product: Product) -> Product:
        return lambda x: -product(x)

    def _seen(self, space: Space, row: Tensor) -> Tensor:
        return torch.bmm(space.rows, row.mT).squeeze(-1)


class _Searches:
    """The searches of one problem, in units in which nothing that is squared leaves the range."""

    def __init__(self, rows: Rows, b: Tensor, solver: Krylov) -> None:
        self.rows, self.solver, self.products = rows, solver, 1
        self.n, B = rows.A.shape[-1], rows.entries
        rows.require_transposes(solver.tolerance_of(rows.A.dtype))
        g = rows.pulled(b)
        if not torch.isfinite(g).all():
            rows.require_finite()
            require_finite(b=(ranks.local(b), 1))
        self.random = (fixed_rows(self.n, g.dtype, g.device)[1] / self.n**0.5).expand(B, 1, self.n)
        image = rows.gram(self.random)
        self._require_range(image, g)
        unit = rows.unit(torch.cat([image, g], -2))[:, None, None]
        low, high = square_range(g.dtype)
        if rows.agreed((unit > low) & (unit < high)):
            unit = torch.ones_like(unit)
        self.unit, self.g = unit, g / unit
        # Rounding in Aᵀb is that of ‖A‖ and ‖b‖, not of what is left of them.
        size = long_norm(image / unit).squeeze(-1).sqrt() * _norm(b, B) / unit[:, 0, 0].sqrt()
        self.noise = 8 * torch.finfo(g.dtype).eps * size
        self.tolerance = solver.tolerance_of(g.dtype)

    def _require_range(self, image: Tensor, g: Tensor) -> None:
        """Products with `AᵀA` are in the range of the dtype; raises `OutOfRangeError` if not.

        Not where those with `A` are out of range, too: no units help there.
        """
        tiny = torch.finfo(g.dtype).tiny
        size = torch.maximum(image.abs().amax((-2, -1)), g.abs().amax((-2, -1)))
        if self.rows.agreed((size >= tiny) & torch.isfinite(size)):
            return
        # One unit for all entries of a batch: an operator is multiplied by numbers.
        unit = power_of_two(self.rows(self.random).abs().amax())
        if self.rows.agreed(torch.isfinite(unit) & (unit != 1)):
            raise OutOfRangeError(unit)

    def gram(self, x: Tensor) -> Tensor:
        return self.rows.gram(x) / self.unit

    def negative(self, x: Tensor) -> Tensor:
        return -self.gram(x)

    def search(
        self, product: Product, start: Tensor, task: Task, tolerance: float, limit: int = 0
    ) -> Found:
        left = max(1, self.solver.max_products - self.products)
        found = search(
            product,
            start,
            task,
            size=self.solver.size(self.n),
            tolerance=tolerance,
            limit=min(left, limit or left),
            symmetric=True,
            agreed=self.rows.agreed,
        )
        self.products += found.products
        return found

    def bottom(self, found: Found, limit: int) -> Found:
        """The smallest eigenvalue of `AᵀA`, negated, as far as its place beside `−μ` asks for."""
        eps = torch.finfo(self.g.dtype).eps
        bottom = self.search(self.negative, self.random, Largest(1), eps**0.5, limit)
        gap = (found.values - bottom.values).squeeze(-1)
        clear = gap > 2 * bottom.residual * bottom.scale
        if self.n == 1 or self.rows.agreed(clear | ~bottom.converged):
            return bottom
        start = torch.cat([bottom.rows, self.random], -2)
        return self.search(self.negative, start, Largest(1, guards=1), self.tolerance, limit)

    def known(self, found: Found) -> Tensor:
        """Whether digits of `u` are left, `(B,)`.

        The residual and the rounding in `AᵀA`, over the least curvature beside `u`, bound its
        error. Where `A` is wide and `μ` zero, the minimisers form a sphere, and any will do.
        """
        eps = torch.finfo(self.g.dtype).eps
        error = (found.residual + _ROUNDINGS * eps) * found.scale
        m, n = self.rows.A.shape[-2:]
        any_will_do = found.values.squeeze(-1).abs() <= self.tolerance * found.scale
        return (error <= WORTH * found.curvature) | (any_will_do & (m < n))


def find_minimiser(rows: Rows, b: Tensor, solver: Krylov, init: Tensor | None) -> Outcome:
    """The minimiser on the unit sphere; `b` is `(*, m)`, spread like the rows of `A`, if so."""
    posed = _Searches(rows, b, solver)
    g, n, tolerance = posed.g, posed.n, posed.tolerance
    batch, eps = b.shape[:-1], torch.finfo(g.dtype).eps
    if init is not None:
        require_finite(init=(init, 1))
    reference = torch.ones_like(g) if init is None else init.expand(*batch, n).reshape(g.shape)
    task = Minimum(g, posed.noise, reference)
    start = torch.where((long_norm(g) > 0).unsqueeze(-1), g, posed.random)
    if init is not None:
        start = torch.cat([reference + eps * posed.random, start], -2)
    # Where n products show every entry, a search is not worth more; elsewhere some are left for
    # what b does not show.
    few = are_few(rows, solver) and posed.products + 2 * n <= solver.max_products
    limit = max(n, _FEWEST) if few else 0
    most = limit or max(_FEWEST, 2 * solver.max_products // 3)
    found = posed.search(posed.gram, start, task, tolerance, most)
    gap, proved = found.values.squeeze(-1), found.converged
    below = torch.zeros_like(gap)  # what is not known of the bottom
    lost = few & ~(posed.known(found) & found.converged)
    if not rows.agreed(lost | (found.converged & (gap >= 0))):
        bottom = posed.bottom(found, limit)
        gap = (found.values - bottom.values).squeeze(-1)
        missed = ~lost & (~found.converged | (gap < -tolerance * found.scale))
        if not rows.agreed(~missed):
            start = torch.cat([found.rows, bottom.rows, g], -2)
            again = posed.search(posed.gram, start, task, tolerance)
            found = _chosen(missed, again, found)
            gap = (found.values - bottom.values).squeeze(-1)
        multiplier = found.values.squeeze(-1)
        clear = gap > 2 * bottom.residual * bottom.scale
        proved = found.converged & (bottom.converged | clear | (multiplier >= 0))
        # Where that was not needed it is not used, or one entry would depend on another.
        gap = torch.where(multiplier >= 0, multiplier, gap)
        below = torch.where(multiplier >= 0, below, bottom.residual * bottom.scale)
    # A gap within its own error, or within rounding of AᵀA, is not known to be there.
    error = found.residual.clamp_min(tolerance) * found.scale
    gap = torch.where((gap >= -tolerance * found.scale) & (gap <= error + below), 0, gap)
    unit = posed.unit[:, 0, 0]
    rows.scale = found.scale * unit
    rows.unique = posed.known(found)
    outcome = Outcome(
        value=sphere.settle(found.rows).squeeze(1),
        multiplier=found.values.squeeze(-1) * unit,
        residual=found.residual,
        gap=gap * unit,
        iterations=torch.full((rows.entries,), posed.products, device=g.device),
        converged=proved & rows.unique,
        basis=g.new_empty(rows.entries, 0, n),
        spread=g.new_empty(rows.entries, 0),
    )
    left = solver.max_products - posed.products
    if are_few(rows, solver) and n <= left and not rows.agreed(outcome.converged):
        outcome = _by_entries(rows, b, init, outcome)
    return Outcome(*(x.reshape((*batch, *x.shape[1:])) for x in outcome))


def _by_entries(rows: Rows, b: Tensor, init: Tensor | None, outcome: Outcome) -> Outcome:
    """The same with what has not converged solved from the entries of the matrix."""
    B, n = outcome.value.shape
    init = None if init is None else init.expand(*b.shape[:-1], n).reshape(B, n)
    kept = solve_entries(rows, b.reshape(B, -1), init, ~outcome.converged)
    rows.by_entries = kept
    rows.unique = rows.unique | kept.mask
    new = kept.outcome._replace(
        iterations=outcome.iterations + n, basis=outcome.basis, spread=outcome.spread
    )
    pairs = ((x.to(y.dtype), y) for x, y in zip(new, outcome))
    return Outcome(*(_where(kept.mask, x, y) for x, y in pairs))


def _norm(b: Tensor, entries: int) -> Tensor:
    """`(B,)`, of rows that are too large to be squared, too."""
    most = b.abs().amax(-1, keepdim=True)
    size = long_norm(b / torch.where(most > 0, most, 1)) * most.squeeze(-1)
    return ranks.whole(size).reshape(entries)


def _chosen(mask: Tensor, new: Found, old: Found) -> Found:
    pairs = ((x, y) for x, y in zip(new, old) if isinstance(x, Tensor) and isinstance(y, Tensor))
    columns = (_where(mask, x, y) for x, y in pairs)
    values, rows, residual, gap, converged, scale, curvature = columns
    return Found(values, rows, residual, gap, new.products, converged, scale, curvature)


def _where(mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Whole batch entries of one or the other, for a mask `(B,)`."""
    return torch.where(mask.reshape(-1, *(1,) * (x.dim() - 1)), x, y)


def attach_less_operator(
    A: Operator, b: Tensor, solver: Krylov, init: Tensor | None, throw: bool
) -> tuple[Outcome, Backward]:
    """Solve on the unit sphere, differentiably in `b` and in what the operator is made of.

    `b` is `(*, m)` with the batch of the problem, the operator has that batch or none.
    """
    A = spread_alike(A, b)
    b = ranks.replicate(b, ranks.mesh_of(*A.tensors))
    report = Backward()
    found: Any = _Less.apply(A, solver, init, throw, report, b, *A.tensors)
    return Outcome(*found), report


class _Less(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operator: Operator,
        solver: Krylov,
        init: Tensor | None,
        throw: bool,
        report: Backward,
        b: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        batch = torch.Size(b.shape[:-1])
        rows = Rows(operator.with_tensors([x.detach() for x in tensors]), batch)
        with full_precision(rows.A):
            outcome = rows.guarded(find_minimiser, b.detach(), solver, init)
        announce(outcome, solver, throw)
        ctx.rows, ctx.solver, ctx.report = rows, solver, report
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(outcome.value, outcome.multiplier, b, *tensors)
        ctx.mark_non_differentiable(*outcome[1:])
        return tuple(outcome)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        v, needs = grads[0], ctx.needs_input_grad[5:]
        found: list[Tensor | None] = [None for _ in needs]
        if v is not None and any(needs):
            with torch.no_grad(), full_precision(ctx.rows.A):
                found = _Less.gradients(ctx, v, needs)
        return *(None,) * 5, *first_order(found)

    @staticmethod
    def gradients(ctx: Any, v: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        u, multiplier, b, *_ = ctx.saved_tensors
        rows: Rows = ctx.rows
        y, v = (x.reshape(rows.entries, 1, -1) for x in (u, v))

        def negative(x: Tensor) -> Tensor:
            return -rows.gram(x)

        kept = rows.by_entries
        solved = conjugate_residuals(
            negative,
            multiplier.reshape(-1, 1),
            y,
            v if kept is None else torch.where(kept.mask[:, None, None], 0, v),
            scale=rows.scale,
            limit=ctx.solver.max_products,
            agreed=rows.agreed,
        )
        z, residual, converged = solved.rows, solved.residual, solved.converged & rows.unique
        if kept is not None:
            exact = (x.to(y.dtype) if x.is_floating_point() else x for x in kept.tangent(v))
            pairs = zip(exact, (z, residual, converged))
            z, residual, converged = (_where(kept.mask, x, y) for x, y in pairs)
        ctx.report.fill(residual, solved.products, converged)
        y, z = rows.lift(y), rows.lift(z)
        image, along = rows.A.matvec(torch.cat([y, z], -2)).chunk(2, -2)
        rest = image - b.reshape(image.shape)
        left, right = -torch.cat([rest, along], -2), torch.cat([z, y], -2)
        db = ranks.alike(along.reshape(b.shape), b) if needs[0] else None
        return [db, *rows.pull_back(left, right, needs[1:])]


_SECULAR = Secular()

# Rounding in products with AᵀA, in units of eps.
_ROUNDINGS = 4.0
# Products that a search may always take.
_FEWEST = 64
