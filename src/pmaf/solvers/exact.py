"""Least squares on the unit sphere or in the unit ball, from a decomposition without loss.

The eigenvectors of `AᵀA` come from singular vectors of `A`, or, for numbers that had the digits of
float32, from `AᵀA` in float64. So what the gradient computes with them has all digits that the data
have.

In the ball, `‖u‖ ≤ 1`, the least-norm minimiser `A⁺b` without the constraint is the solution where
it is in the ball, and the multiplier is zero. Elsewhere the solution is on the sphere and has a
multiplier `μ > 0`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pmaf import native
from pmaf.errors import require_finite
from pmaf.linalg import sphere
from pmaf.linalg.gram import Spectrum, promoted_spectrum, singular_spectrum, small_gram
from pmaf.linalg.products import dot, matvec, norm, one_if_zero, rmatvec
from pmaf.linalg.roundings import NOISE, SEARCHED, SETTLED
from pmaf.linalg.secular import secular_root
from pmaf.operators.rows import Rows
from pmaf.runtime.log import took
from pmaf.runtime.modes import plain
from pmaf.solvers.base import Course, Outcome
from pmaf.tangent.basis import TangentSolver
from pmaf.tangent.kept import Basis
from pmaf.tangent.kkt import Point, invert
from pmaf.tangent.residuals import conjugate_residuals


def solve_exactly(
    A: Tensor, b: Tensor, init: Tensor | None, ball: bool, single: bool, solver: Any
) -> Outcome:
    """The minimiser of `½‖Au − b‖²` with `‖u‖ = 1`, or with `‖u‖ ≤ 1`.

    Args:
        single: whether `A` and `b` had the digits of float32 before they were converted to float64.
            Then singular values that are rounding in float32 count as zero.
        solver: a `Secular`, which limits the steps.
    """
    require_finite(A=(A, 2), b=(b, 1))
    found = solve_compiled(A, b, init, ball, single, solver)
    if found is not None:
        return found
    spectrum, c, eps = _decomposed(A, b, single)
    # The coefficient of a singular vector is its singular value times one of b.
    noise = NOISE * eps * spectrum.floor.sqrt() * norm(b)
    rounding = torch.finfo(c.dtype).eps
    u, t, steps, finished, _ = secular_root(
        spectrum, c, noise, init, rounding, solver.max_iterations
    )
    free = torch.zeros_like(finished)
    if ball:
        values = spectrum.spread + spectrum.floor.unsqueeze(-1)
        inside = torch.where(values == 0, 0, c / one_if_zero(values))
        free = norm(inside) <= 1
        u = torch.where(free.unsqueeze(-1), rmatvec(spectrum.basis, inside), u)
        t = torch.where(free, spectrum.floor, torch.maximum(t, spectrum.floor))
    multiplier = torch.where(free, 0, t - spectrum.floor)
    u, multiplier, residual = _refined(A, b, spectrum, u, multiplier, free, solver.refinements)
    multiplier = multiplier.clamp_min(0) if ball else multiplier
    return Outcome(
        value=u,
        multiplier=multiplier,
        residual=residual,
        gap=multiplier + spectrum.floor,
        iterations=torch.where(free, 0, steps),
        converged=(free | finished) & (residual <= SETTLED * eps),
        kept=Basis(spectrum.basis, spectrum.spread),
    )


def solve_compiled(
    A: Tensor,
    b: Tensor,
    init: Tensor | None,
    ball: bool,
    single: bool,
    solver: Any,
    rooted: bool = False,
) -> Outcome | None:
    """The same by compiled kernels, where they are faster; None where they are not, or fail.

    `b` is `(*, m)` with all batch dimensions of the problem; one matrix may be there for all. With
    `rooted`, multiplier and gap are those of the secular equation.
    """
    if not takes_kernels(A, b):
        return None
    eps = torch.finfo(torch.float32 if single else A.dtype).eps
    steps = solver.max_iterations, solver.refinements
    found = native.solve_unit(A.detach(), b.detach(), init, ball, rooted, eps, steps)
    if found is None:
        return None
    took("less: decomposition, compiled")
    u, multiplier, residual, gap, rows, spread, counts, converged = found
    return Outcome(u, multiplier, residual, gap, counts, converged, Basis(rows, spread))


def takes_kernels(A: Tensor, b: Tensor) -> bool:
    """Whether there are kernels for a matrix and `b`, `(*, m)` with all batch dimensions."""
    if not (plain(A) and plain(b) and native.takes_units(A, b)):
        return False
    alike = A.shape[:-2] == b.shape[:-1]
    shared = A.dim() == 2 and b.shape[:-1].numel() <= _SHARED
    return (alike or shared) and b.numel() > 0


def course_of(A: Tensor, b: Tensor, words: str, then: tuple[str, ...] = ()) -> Course:
    """What happens to a matrix and `b`, `(*, m)`, if `words` happen where there are no kernels."""
    words = f"{words}, and Newton's method for one number"
    if not takes_kernels(A, b):
        return Course(words, then)
    again = f"{words}, where the kernels do not converge, or units have to be others"
    return Course("compiled kernels around a decomposition", (again, *then))


def course_exactly(A: Tensor, b: Tensor, single: bool) -> Course:
    """What `solve_exactly` does."""
    return course_of(A, b, "eigenvectors" if _is_by_gram(A, single) else "singular vectors")


def _refined(
    A: Tensor,
    b: Tensor,
    spectrum: Spectrum,
    u: Tensor,
    multiplier: Tensor,
    free: Tensor,
    refinements: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Newton steps on the optimality conditions, their residual taken from `A`.

    A decomposition has errors relative to the largest singular value. The residual of a problem
    with columns of different sizes has smaller ones. Returns `u`, its multiplier and its residual.
    """
    mask = free.unsqueeze(-1)
    scale = one_if_zero(A.square().sum((-2, -1)) + norm(rmatvec(A, b)))
    settled = NOISE * torch.finfo(u.dtype).eps

    def rest_at(u: Tensor, multiplier: Tensor) -> tuple[Tensor, Tensor]:
        rest = rmatvec(A, b - matvec(A, u)) - multiplier.unsqueeze(-1) * u
        return rest, norm(rest) / scale

    u = torch.where(mask, u, sphere.settle(u))
    rest, residual = rest_at(u, multiplier)
    for _ in range(min(refinements, _ROUNDS)):
        gap = multiplier + spectrum.floor
        point = Point(multiplier, gap, spectrum.basis, spectrum.spread, ~free)
        solver = TangentSolver(spectrum.basis, spectrum.spread, gap, u)
        step = torch.where(mask, invert(point, rest), solver(rest))
        # In the hard case the multiplier is at its bound and stays there.
        rise = torch.where(free | (gap == 0), 0, dot(solver.growth()[0], rest))
        trial = torch.where(mask, u + step, sphere.settle(u + step))
        # Rounding must not make a definite matrix indefinite.
        lowest = torch.where(gap > 0, multiplier - 0.5 * gap, multiplier)
        trial_multiplier = torch.maximum(multiplier + rise, lowest)
        trial_rest, trial_residual = rest_at(trial, trial_multiplier)
        # A step that does not reduce the residual comes from a singular system and is rejected.
        better = (norm(step) < 0.5) & (trial_residual <= residual.clamp_min(settled))
        chosen = better.unsqueeze(-1)
        u, rest = torch.where(chosen, trial, u), torch.where(chosen, trial_rest, rest)
        multiplier = torch.where(better, trial_multiplier, multiplier)
        residual = torch.where(better, trial_residual, residual)
    return u, multiplier, residual


# The most problems with one matrix that kernels solve one by one. Beyond, a product of torch with
# all their vectors at a time takes their place; no benchmark has settled the number.
_SHARED = 256

# The decomposition has most digits, so that a second step corrects what rounding left of the first.
_ROUNDS = 2


def _is_by_gram(A: Tensor, single: bool) -> bool:
    """Whether `AᵀA` has all digits of the data."""
    return single and A.dtype == torch.float64


def _decomposed(A: Tensor, b: Tensor, single: bool) -> tuple[Spectrum, Tensor, float]:
    """The spectrum of `AᵀA`, the coefficients of `Aᵀb`, and the rounding of the data."""
    if _is_by_gram(A, single):
        took("less: constrained, eigenvectors")
        return *promoted_spectrum(A, b, small_gram(A)), torch.finfo(torch.float32).eps
    took("less: constrained, singular vectors")
    spectrum, left, s = singular_spectrum(A)
    return spectrum, s * rmatvec(left, b), torch.finfo(A.dtype).eps


def solve_inside(found: Outcome, seen: Rows, b: Tensor, solver: Any) -> Outcome:
    """The minimiser in the ball by products with `A`, from that on the sphere.

    The multiplier on the sphere is positive exactly if `A⁺b` is outside of the ball. For the other
    entries conjugate residuals solve `AᵀAu = Aᵀb`; as they start from zero, the solution is that of
    least norm. A second solve, for the residual computed from `A`, gives it the digits that `AᵀA`
    has lost.
    """
    B, n = seen.entries, found.value.shape[-1]
    size, multiplier = found.value.shape, found.multiplier.reshape(B)
    tolerance = SEARCHED * torch.finfo(found.value.dtype).eps
    near = multiplier <= tolerance * seen.scale
    if seen.agreed(~near):
        return found
    took("products: inside of the ball")
    g = seen.pulled(b.expand(*size[:-1], -1))
    zero = torch.zeros_like(g)
    u, products, done = zero, 0, ~near
    for _ in range(2):
        right = torch.where(near[:, None, None], g if products == 0 else g - seen.gram(u), 0)
        solved = conjugate_residuals(
            lambda x: -seen.gram(x),
            zero[..., 0],
            zero,
            right,
            scale=seen.scale,
            limit=getattr(solver, "max_products", 5000),
            agreed=seen.agreed,
        )
        done = solved.converged if products == 0 else done
        u, products = u + solved.rows, products + solved.products
    u = u.reshape(B, n)
    free = near & (norm(u) <= 1)
    residual = norm((g - seen.gram(u.unsqueeze(1))).squeeze(1)) / one_if_zero(
        seen.scale + norm(g.squeeze(1))
    )
    new = (u, torch.zeros_like(multiplier), residual, torch.zeros_like(multiplier))
    counts = torch.full_like(found.iterations.reshape(B), products)
    fields = [
        torch.where(free.reshape(-1, *(1,) * (x.dim() - 1)), x, old.reshape(x.shape)).reshape(
            old.shape
        )
        for x, old in zip((*new, counts, done), found.tensors)
    ]
    seen.unique = seen.unique | free
    if seen.by_entries is not None:
        # What was kept of these entries belongs to the sphere.
        seen.by_entries = replace(seen.by_entries, mask=seen.by_entries.mask & ~free)
    return Outcome.of(fields, found.kept)
