"""The inner product of an operator `M`, with solves by its own `solve` or by products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pmaf.linalg.products import long_norm, one_if_zero
from pmaf.linalg.roundings import square_range
from pmaf.linalg.symmetric_part import fixed_rows
from pmaf.operators.base import Operator
from pmaf.operators.rows import Rows
from pmaf.runtime import ranks
from pmaf.tangent.metric import ConjugateGradients, Metric


def inner_product(seen: Rows, tolerance: float) -> Metric:
    """The metric of an operator, after one solve that checks it.

    Args:
        seen: products with the operator.
        tolerance: the user's bound for the errors of products.
    """
    M = seen.A
    refuse, give_up = _complaints(M)
    seen.require_transposes(tolerance)
    product = seen.of_symmetric_part
    x, signs = _drawn(seen)
    dual = product(x)
    seen.unit(dual)  # raises an error where a product is not finite
    _require_range(M, dual)
    if M.solvable:
        _require_inverse(seen, product, dual, tolerance)
        metric = Metric(product, lambda rows, error: seen.solved(rows), refuse, seen.agreed)
    else:
        scales = _diagonal(seen, refuse)
        solve = ConjugateGradients(product, scales, refuse, give_up, seen.agreed)
        metric = Metric(product, solve, refuse, seen.agreed)
    length = metric.length(x, dual)
    if not seen.agreed(length > 0):
        refuse((length == 0).any(-1))
    # Errors of a product are relative to its size, and their signs are arbitrary.
    noise = signs.sign() * dual
    raised = metric.raised(noise)
    ratio = metric.length(raised, noise) / one_if_zero(length)
    metric.rounding = ratio.squeeze(-1).clamp_min(1)
    metric.size = (long_norm(dual) / long_norm(x)).unsqueeze(-1)
    return metric


def _drawn(seen: Rows) -> tuple[Tensor, Tensor]:
    """Two pseudorandom rows `(B, 1, n)`."""
    M = seen.A
    n = M.shape[-1]
    rows = fixed_rows[n, M.dtype, M.device] / n**0.5
    first, second = (row.expand(seen.entries, 1, n) for row in rows)
    return first, second


def _diagonal(seen: Rows, refuse: Callable[[Tensor], None]) -> Tensor | None:
    """The diagonal of `M` as rows `(B or 1, 1, n)`, if it is known."""
    found = seen.A.diagonal()
    if found is None:
        return None
    found = ranks.whole(found.detach()).reshape(-1, 1, found.shape[-1])
    bad = ~(found > 0).all(-1).squeeze(-1)
    if bad.any():
        refuse(bad)
    return found


def _require_inverse(
    seen: Rows, product: Callable[[Tensor], Tensor], right: Tensor, tolerance: float
) -> None:
    """`M solve(x)` is `x`, up to `√eps` or ten times the tolerance, for two vectors."""
    worth = max(torch.finfo(right.dtype).eps ** 0.5, 10 * tolerance)
    rows = torch.cat([right / one_if_zero(long_norm(right)).unsqueeze(-1), _drawn(seen)[1]], 1)
    left = product(seen.solved(rows)) - rows
    apart = long_norm(left) / one_if_zero(long_norm(rows))
    if (apart <= worth).all():
        return
    raise ValueError(
        f"solve of {seen.A!r} is not the inverse of its matvec: ‖M solve(x) − x‖ = "
        f"{float(apart.nan_to_num(torch.inf).max()):.2g} ‖x‖ for a vector x without structure; it "
        "has to belong to the present values of M, and to be symmetric. If it is meant to be "
        "inexact, pass Krylov(tolerance=...) with what it is worth, or leave it out"
    )


def _require_range(M: Operator, dual: Tensor) -> None:
    low, high = square_range(dual.dtype)
    size = dual.abs().amax((-2, -1))
    if not ((size > low) & (size < high) | (size == 0)).all():
        raise ValueError(
            f"squares of products with {M!r}, of size {float(size.max()):.1e}, leave the range of "
            f"{dual.dtype}; multiply M by a number, or use float64"
        )


def _complaints(M: Operator) -> tuple[Callable[[Tensor], None], Callable[[int], None]]:
    """Functions that raise the errors of an operator that is not positive definite."""

    def refuse(bad: Tensor) -> None:
        where = f" in {int(bad.sum())} of {bad.numel()} batch entries" * (bad.numel() > 1)
        raise ValueError(
            f"M is not positive definite{where}, up to rounding in {M.dtype}: {M!r} maps a vector "
            "y to My with yᵀMy ≤ 0; add a multiple of the identity to it, use float64, or exchange "
            "A and M if A is the positive definite one"
        )

    def give_up(products: int) -> None:
        raise ValueError(
            f"a system with {M!r} was not solved by {products} products: M is badly conditioned, "
            f"or not positive definite up to rounding in {M.dtype}; give it a solve, "
            "pmaf.operators.WithSolve(M, solve), scale it so that the entries of its diagonal are "
            "alike, or add a multiple of the identity"
        )

    return refuse, give_up
