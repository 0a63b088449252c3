"""Singular triplets by products with the matrix.

A search for eigenvectors of `AᵀA` finds right vectors. Its rounding errors are those of squares. In
the span of the vectors a small decomposition of their images `AV` gives the triplets to rounding of
`A` itself, with orthonormal left vectors where singular values are zero, too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.autograd.triplets import attach_triplets
from pmaf.errors import ConvergenceWarning
from pmaf.gradients import Implicit
from pmaf.layers.singular_vectors import PrincipalSingularVectors
from pmaf.linalg.products import one_if_zero
from pmaf.linalg.roundings import LOOSE, SETTLED
from pmaf.linalg.symmetric_part import fixed_rows
from pmaf.operators import Operator
from pmaf.operators.rows import Rows
from pmaf.operators.transposed import Transposed
from pmaf.runtime import ranks
from pmaf.runtime.caller import warn
from pmaf.runtime.log import took
from pmaf.runtime.modes import full_precision
from pmaf.solution import PAGE
from pmaf.solvers import Auto, Solver
from pmaf.tangent.residuals import WORTH


def triplets_by_products(
    A: Operator, k: int, largest: bool, solver: Solver | None, init: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Left vectors `(*, m, k)`, values `(*, k)` and right vectors `(*, n, k)`, differentiable.

    Args:
        A: with at least as many rows as columns.
        init: `(*, n, k)`, where the search starts.
    """
    mesh = ranks.mesh_of(*A.tensors)
    fixed = A.with_tensors([ranks.replicate(x.detach(), mesh) for x in A.tensors])
    batch = fixed.batch_shape
    seen = Rows(fixed, batch)
    with torch.no_grad(), full_precision(fixed.device):
        found = _fitted(seen, _searched(fixed, k, largest, solver, init))
        scale = torch.maximum(_size(seen), found.values.amax(-1))
        if not largest:
            found = _with_null_vectors(seen, found, scale, solver)
        _announce(seen, found, scale)
    parts = [x.reshape((*batch, *x.shape[1:])) for x in (*found, scale)]
    left, values, right, scale = parts
    left, values, right = attach_triplets(A, (left, values, right), scale, largest, solver)
    return left.mT, values, right.mT


def _searched(
    A: Operator, k: int, largest: bool, solver: Solver | None, init: Tensor | None
) -> Tensor:
    """Right vectors as rows `(B, k, n)`, in descending order of their singular values."""
    problem = PrincipalSingularVectors(A, None, k, largest, descending=True)
    found = problem.run(solver or Auto(), Implicit(), init=init, report=False)
    return ranks.whole(found.value).mT.reshape(-1, k, A.shape[-1])


class _Triplets(NamedTuple):
    left: Tensor  # (B, k, m)
    values: Tensor  # (B, k)
    right: Tensor  # (B, k, n)


def _fitted(seen: Rows, right: Tensor) -> _Triplets:
    """The triplets of `A` in the span of right vectors."""
    left, values, turn = torch.linalg.svd(seen(right).mT, full_matrices=False)
    return _Triplets(left.mT, values, turn.conj() @ right)


def _with_null_vectors(
    seen: Rows, found: _Triplets, scale: Tensor, solver: Solver | None
) -> _Triplets:
    """The smallest triplets, with left vectors from another search where images are rounding.

    The image of a right vector is then no multiple of a left one, as `Aᵀu = σv` shows. Where there
    is nothing larger beside them, as for the largest triplets, any vectors will do.
    """
    left, values, right = found
    (m, n), k = seen.A.shape[-2:], values.shape[-1]
    error, sizes = _errors(seen, found, scale)
    wrong = error > LOOSE * torch.finfo(values.dtype).eps
    if m > n:
        # A vector of the null space of Aᵀ, which has more dimensions, has an error of σ.
        wrong = wrong & (error > sizes)
    if seen.agreed(~wrong.any(-1)):
        return found
    took("isvd: search for left vectors")
    other = _searched(Transposed(seen.A), k, False, solver, None)
    if m == n:
        within = other.conj() @ seen(right).mT
        turn, sizes, back = torch.linalg.svd(within)
        new = _Triplets(turn.mT @ other, sizes, back.conj() @ right)
    else:
        some = torch.where(wrong.unsqueeze(-1), other, left)
        basis, upper = torch.linalg.qr(some.mT)
        signs = torch.sgn(upper.diagonal(dim1=-2, dim2=-1)).unsqueeze(-1)
        new = _Triplets(signs * basis.mT, values, right)
    due = wrong.any(-1)
    return _Triplets(
        *(torch.where(due.reshape(-1, *(1,) * (x.dim() - 1)), x, y) for x, y in zip(new, found))
    )


def _errors(seen: Rows, found: _Triplets, scale: Tensor) -> tuple[Tensor, Tensor]:
    """`‖Aᵀu − σv‖` and `σ`, both relative to `‖A‖`, `(B, k)`."""
    left, values, right = found
    unit = one_if_zero(scale)[:, None, None]
    rest = (seen.transposed(left) - values.unsqueeze(-1) * right) / unit
    return torch.linalg.vector_norm(rest, dim=-1), values / unit.squeeze(-1)


def _announce(seen: Rows, found: _Triplets, scale: Tensor) -> None:
    """Warn of singular values that are not zero, but too small for the accuracy of `AᵀA`."""
    error, sizes = _errors(seen, found, scale)
    dtype = sizes.dtype
    bad = ((error > WORTH * sizes) & (error > SETTLED * torch.finfo(dtype).eps)).any(-1)
    if seen.agreed(~bad):
        return
    warn(
        f"singular values of {int(bad.sum())} of {bad.numel()} batch entries are too small for a "
        f"search by products in {dtype}: they are known up to {float(error[bad].max()):.1e}‖A‖, "
        f"and their vectors are not; pass A as a dense tensor, or use float64 ({PAGE})",
        ConvergenceWarning,
    )


def _size(seen: Rows) -> Tensor:
    """A lower bound of `‖A‖`, about as large, `(B,)`; no square of it is taken."""
    A = seen.A
    n = A.shape[-1]
    row = fixed_rows(n, A.dtype, A.device)[:1].expand(seen.entries, 1, n)
    length, row = _normalised(row)
    for _ in range(3):
        for product in (seen, seen.transposed):
            length, row = _normalised(product(row))
    return length


def _normalised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The lengths of rows `(B, 1, n)`, `(B,)`, and the rows divided by them."""
    largest = rows.abs().amax(-1, keepdim=True)
    largest = torch.where(largest > 0, largest, 1)
    rows = rows / largest
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return (largest * length).squeeze(-1).squeeze(-1), rows / torch.where(length > 0, length, 1)
