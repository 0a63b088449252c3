"""Gradients of singular triplets, by products with the matrix, in the notation of `triplets.py`.

Outside of the requested vectors, `(σI − J)z = g` is solved by two systems of `σ²I − AᵀA`, which is
definite there: with `w₁` and `w₂` for the right-hand sides `g_v` and `Aᵀg_u`,

    z_v = σw₁ + w₂,   z_u = Aw₁ + (g_u + Aw₂)/σ.

The last term is `σ(σ²I − AAᵀ)⁻¹g_u`. Where `σ` is small and the matrix is square it is found as
such, by a third system, so that nothing is divided by `σ`, which may be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pmaf.gradients.eigenvectors import differences, turn_inside
from pmaf.linalg.roundings import rank_tolerance, square_range
from pmaf.linalg.symmetric_part import fixed_rows
from pmaf.operators.rows import Rows
from pmaf.solvers import Krylov
from pmaf.tangent.residuals import conjugate_residuals


class Found(NamedTuple):
    """Triplets of a real operator with at least as many rows as columns, all as rows."""

    left: Tensor  # (B, k, m)
    values: Tensor  # (B, k)
    right: Tensor  # (B, k, n)
    scale: Tensor  # (B,), about ‖A‖


class Arrived(NamedTuple):
    """The gradients that came in for triplets, with zeros where there are none."""

    left: Tensor
    values: Tensor
    right: Tensor


def triplet_gradients(
    seen: Rows,
    found: Found,
    given: Arrived,
    largest: bool,
    options: Krylov,
    report: Any,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of the tensors of the operator."""
    u, v, d_values = found.left, found.right, given.values
    low, high = square_range(u.dtype)
    if not seen.agreed((found.scale > low) & (found.scale < high)):
        # In other units no square over- or underflows.
        n = v.shape[-1]
        seen.change_units(fixed_rows[n, v.dtype, v.device][:1].expand(len(v), 1, n))
        d_values = seen.back(d_values)
        values, scale = (_divided(x, seen) for x in (found.values, found.scale))
        found = found._replace(values=values, scale=scale)
    z_u, z_v = _inside(found, given)
    if bool((given.left != 0).any()) or bool((given.right != 0).any()):
        more_u, more_v = _outside(seen, found, given, largest, options, report)
        z_u, z_v = z_u + more_u, z_v + more_v
    z_u = z_u + d_values.unsqueeze(-1) * u
    left, right = torch.cat([z_u, u], -2), torch.cat([v, z_v], -2)
    return seen.pull_back(seen.lift(left), seen.lift(right), needs)


def _divided(x: Tensor, seen: Rows) -> Tensor:
    """Numbers `(B, *)` in the units of the search."""
    assert seen.exponents is not None
    half = (seen.exponents / 2).floor()
    for part in (half, seen.exponents - half):
        x = x * (-part).to(x.dtype).exp2().reshape(-1, *(1,) * (x.dim() - 1))
    return x


def _inside(found: Found, given: Arrived) -> tuple[Tensor, Tensor]:
    """`z` in the span of the requested `(u, v)` and `(u, −v)`.

    Exchanging two vectors changes the signs of numerator and denominator in the first part, and
    exchanges the signs of both terms of the gradient in the second. So only antisymmetric parts
    of the numerators matter.
    """
    u, values, v, scale = found
    if u.shape[1] == 1:
        return torch.zeros_like(u), torch.zeros_like(v)
    both, scale = 0.5 * torch.cat([u, v], -1), scale[:, None, None]
    same, opposite = (
        turn_inside(torch.cat([given.left, sign * given.right], -1), both) for sign in (1, -1)
    )
    difference, apart = differences(values, scale)
    same = torch.where(apart, same / torch.where(apart, difference, 1), 0)
    total = values.unsqueeze(-1) + values.unsqueeze(-2)
    above = total > rank_tolerance(total.dtype) * scale
    opposite = torch.where(above, opposite / torch.where(above, total, 1), 0)
    return torch.bmm(same + opposite, u), torch.bmm(same - opposite, v)


def _outside(
    seen: Rows, found: Found, given: Arrived, largest: bool, options: Krylov, report: Any
) -> tuple[Tensor, Tensor]:
    """`z` in the complement of the requested vectors."""
    u, values, v, scale = found
    sign = 1.0 if largest else -1.0
    squares, k = sign * values.square(), values.shape[-1]
    g_u, g_v = _cleared(given.left, u), _cleared(given.right, v)
    solved = []

    def solve(gram: Callable[[Tensor], Tensor], y: Tensor, right: Tensor) -> Tensor:
        """`(σ²I − gram)⁻¹` times rows, on the complement of `y`."""
        shifts = squares.repeat(1, right.shape[1] // k)
        solved.append(
            conjugate_residuals(
                lambda x: sign * gram(x),
                shifts,
                y,
                right,
                scale=scale.square(),
                limit=options.max_products,
                agreed=seen.agreed,
            )
        )
        return sign * solved[-1].rows

    first, second = solve(seen.gram, v, torch.cat([g_v, seen.transposed(g_u)], 1)).chunk(2, 1)
    image, other = seen(torch.cat([first, second], 1)).chunk(2, 1)
    column = values.unsqueeze(-1)
    zero = column <= rank_tolerance(column.dtype) * scale[:, None, None]
    last = (g_u + other) / torch.where(zero, 1, column)
    last = torch.where(zero, 0, last)
    small = column <= _SMALL * scale[:, None, None]
    if u.shape[-1] == v.shape[-1] and bool(small.any()):

        def gram_of_rows(x: Tensor) -> Tensor:
            return seen(seen.transposed(x))

        last = torch.where(small, column * solve(gram_of_rows, u, g_u), last)
    residual = torch.stack([x.residual for x in solved]).amax(0)
    converged = torch.stack([x.converged for x in solved]).all(0)
    report.fill(residual, sum(x.products for x in solved), converged)
    return _cleared(image + last, u), column * first + second


def _cleared(x: Tensor, y: Tensor) -> Tensor:
    """Rows without their parts along the rows of `y`; the second time removes rounding."""
    for _ in range(2):
        x = torch.baddbmm(x, torch.bmm(x, y.mT), y, alpha=-1)
    return x


# Of a smaller singular value, relative to the norm, a quotient has too few digits.
_SMALL = 1e-3
