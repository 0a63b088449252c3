"""The problem of singular triplets, by solvers and by products with the matrix.

A search for eigenvectors of `AᵀA` finds right vectors. Its rounding errors are those of squares. In
the span of the vectors a small decomposition of their images `AV` gives the triplets to rounding of
`A` itself, with orthonormal left vectors where singular values are zero, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pmaf.autograd.span import again_of_triplets, warn_of_triplets
from pmaf.autograd.triplets import attach_triplets
from pmaf.errors import ConvergenceWarning
from pmaf.executors import singular as executors
from pmaf.executors.base import BY_PRODUCTS, IMPLICIT, Account
from pmaf.executors.direct import Ended
from pmaf.executors.straight import StraightTriplets
from pmaf.gradients import Gradient
from pmaf.gradients.base import Reverse
from pmaf.gradients.triplets import TripletConditions, halves, triplet_newton
from pmaf.layers.host import on_host
from pmaf.layers.singular_vectors import (
    PrincipalSingularVectors,
    coordinates,
    doubled,
    is_compiled_shape,
    signs_of,
    with_signs,
)
from pmaf.linalg.products import dot, one_if_zero
from pmaf.linalg.roundings import HALF, LOOSE, SETTLED
from pmaf.linalg.symmetric_part import fixed_rows
from pmaf.operators import Operator
from pmaf.operators.rows import Rows
from pmaf.operators.transposed import Transposed
from pmaf.recipe import Place, Recipe, end, register, run
from pmaf.reductions.base import Found, Reduction, Report, Tensors
from pmaf.reductions.end import End, Sign
from pmaf.reductions.precision import Precision, of_short
from pmaf.reductions.wide import Wide
from pmaf.runtime import ranks
from pmaf.runtime.caller import warn
from pmaf.runtime.log import took
from pmaf.runtime.modes import full_precision, transforms_around
from pmaf.runtime.text import abbreviated
from pmaf.solution import PAGE
from pmaf.solvers import Auto, Solver
from pmaf.solvers.base import Outcome, Triplets
from pmaf.tangent.kept import NOTHING
from pmaf.tangent.residuals import WORTH


@dataclass(frozen=True, eq=False)
class PrincipalTriplets(PrincipalSingularVectors):
    """The problem of singular triplets `Av = σu`, `Aᵀu = σv`, of which v is the solution.

    Solvers take tensors with at least as many rows as columns. A vector of theirs is `(u, v)`, of
    length `m + n`, and left vectors are found beside the solution.
    """

    decomposed: ClassVar[type] = Triplets
    few_steps: ClassVar[bool] = True
    parts_found: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        m, n = self.A.shape[-2:]
        if self.width > min(m, n):
            raise ValueError(f"k must lie between 1 and min(m, n) = {min(m, n)}; got {self.k}")

    @property
    def length(self) -> int:
        return sum(self.A.shape[-2:])

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        several = () if self.k is None else (self.k,)
        return *super().shapes, (*self.batch_shape, self.A.shape[-2], *several)

    @property
    def rank(self) -> int:
        return min(self.A.shape[-2:])

    def found(self, value: Tensor, multiplier: Tensor) -> tuple[Tensor, ...]:
        left, right = halves(value, self.A.shape[-2])
        return right.mT, multiplier, left.mT

    def gradients(self, given: Reverse) -> tuple[Tensor | None, ...]:
        conditions: Any = TripletConditions(given, self.largest, self.single)
        found = given.rule.pullback(conditions, given.v, given.needs)  # pyright: ignore
        return again_of_triplets(found, given.state.shift)

    def newton(
        self, fixed: Any, found: Outcome, solve: Callable[..., Outcome]
    ) -> Callable[[Tensor], Tensor]:
        if self.width > self.copies and transforms_around(self.matrix) > 1:
            warn_of_triplets(found.multiplier)
        return triplet_newton(self.matrix, fixed.matrix, found, self.largest, self.single)

    def multiplier_at(self, u: Tensor) -> Tensor:
        left, right = halves(u, self.A.shape[-2])
        return dot(left, right @ self.matrix.mT)


def _coordinates(problem: PrincipalTriplets) -> tuple[list[Reduction], Any]:
    """Certificates are those of right vectors, which say nothing of left ones."""
    right = PrincipalSingularVectors(
        problem.A, None, problem.k, problem.largest, problem.descending, problem.reference
    )
    return coordinates(right)


def way_of_triplets(
    problem: PrincipalTriplets, solver: Solver, gradient: Gradient, init: Tensor | None
) -> Recipe:
    """The recipe for triplets by solvers, or by products."""
    m, n = problem.A.shape[-2:]
    wide: list[Reduction] = [Wide()] * (m < n)
    if problem.operator is None:
        # The embedding of the conjugate transpose is the transpose of the embedding.
        steps, bare = coordinates(problem)
        return Recipe(*with_signs(problem, [*steps, *wide], bare, solver, gradient))
    dtype, reference, single = problem.dtype, problem.reference, problem.k is None
    chain = of_short(dtype)
    block = isinstance(reference, Tensor) and problem.has_columns(reference)
    lone = init is not None and not problem.has_columns(init)
    sign = Sign(single, block, True, reference is not None)
    chain += [sign, End(0, problem.flipped, single, lone, signed=True), *wide]
    executor = TripletsByProducts(problem.width, problem.largest, solver)
    return Recipe(tuple(chain), executor)


def short_way_of_triplets(
    posed: PrincipalTriplets, init: Tensor | None, place: Place | None
) -> Recipe | None:
    """The recipe for triplets of small matrices, or for those by a straight-line program."""
    if place is not None:
        found = on_host(short_way_of_triplets, posed, init, place)
        return found or _straight_way(posed, place.device)
    A, k, reference = posed.matrix, posed.k, posed.reference
    shape, dtype = A.shape, A.dtype
    if A.numel() == 0:
        return None
    single = dtype in (*HALF, torch.float32, torch.complex64)
    double = torch.complex128 if dtype.is_complex else torch.float64
    steps: list[Reduction] = [Precision(dtype, double)] if single else []
    wide = shape[-2] < shape[-1]
    if reference is not None or wide:
        block = isinstance(reference, Tensor) and posed.dims_of(reference) == 2
        steps.append(Sign(k is None, block, True, reference is not None))
    if posed.flipped:
        steps.append(End(0, True, False))
    if wide:
        steps.append(Wide())
        A, shape = A.mT, A.mT.shape
    if single and not is_compiled_shape(k, A):
        return None
    problem = posed.bare().changed(k=posed.width, single=single)
    common = functools.partial(_solve_commonly, k=k, largest=posed.largest)
    complexes = common if dtype.is_complex else None
    executor = executors.Triplets(problem, shape, double, k is not None, complexes)
    return Recipe(tuple(steps), executor)


def _straight_way(posed: PrincipalTriplets, device: torch.device) -> Recipe | None:
    A, k = posed.matrix, posed.k
    # Where complex singular values repeat, a second solve may find other vectors.
    if A.numel() == 0 or (A.is_complex() and posed.width > 1):
        return None
    steps, single = doubled(A.dtype, device)
    signs, wide = signs_of(posed), A.shape[-2] < A.shape[-1]
    if A.is_complex() and wide and not signs:
        signs = [Sign(k is None, False, True, False)]
    steps += signs
    if posed.flipped:
        steps.append(End(0, True, False))
    if wide:
        steps.append(Wide())
    bare = posed.bare().changed(k=posed.width, single=single)
    common = functools.partial(_solve_commonly, k=k, largest=posed.largest)
    complexes = common if A.is_complex() else None
    # What the common path finds again has phases of its own, which these have to be.
    signed, by_left = A.is_complex() or not signs, wide and not A.is_complex()
    executor = StraightTriplets(bare, k is not None, signed, by_left, complexes)
    return Recipe(tuple(steps), executor)


def _solve_commonly(tensors: Tensors, k: int | None, largest: bool) -> Found:
    """Right vectors, values and left vectors by solvers, the requested end first."""
    return end(PrincipalTriplets(tensors["A"], None, k, largest), report=False).found


register(PrincipalTriplets, way_of_triplets, _coordinates, short_way_of_triplets)


class TripletsByProducts:
    """Triplets of an operator with at least as many rows as columns."""

    def __init__(self, k: int, largest: bool, solver: Solver) -> None:
        self.k, self.largest, self.solver = k, largest, solver

    def account(self, tensors: Tensors) -> Account:
        solver, why = self.solver, "it is the one that was asked for"
        if isinstance(solver, Auto):
            problem = PrincipalSingularVectors(tensors["A"], None, self.k)
            _, solver, why = problem.choice()
        return Account(
            f"{abbreviated(solver)}: products with A, which find right vectors of AᵀA; a small "
            "decomposition of their images finds left ones",
            why,
            NOTHING.words,
            f"{IMPLICIT!r}: {BY_PRODUCTS}",
            ("a search for left vectors, where singular values are nearly zero",),
        )

    def run(self, tensors: Tensors, report: bool, throw: bool) -> Ended:
        """The triplets; only their singular values are reported on."""
        A, start = tensors["A"], tensors["init"]
        left, values, right = triplets_by_products(A, self.k, self.largest, self.solver, start)
        blank = torch.full_like(values[..., 0], torch.nan).detach()
        count = torch.zeros_like(blank, dtype=torch.int64)
        known = Report(blank, blank.clone(), count, torch.ones_like(count, dtype=torch.bool))
        return Ended((right, values, left), known, abbreviated(self.solver))


def triplets_by_products(
    A: Operator, k: int, largest: bool, solver: Solver, init: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Left vectors `(*, m, k)`, values `(*, k)` and right vectors `(*, n, k)`, differentiable.

    The requested end is first.

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
    found = left.mT, values, right.mT
    return found if largest else tuple(x.flip(-1) for x in found)  # pyright: ignore


def _searched(A: Operator, k: int, largest: bool, solver: Solver, init: Tensor | None) -> Tensor:
    """Right vectors as rows `(B, k, n)`, in descending order of their singular values."""
    problem = PrincipalSingularVectors(A, None, k, largest, descending=True)
    found = run(problem, solver, init=init, report=False)
    return ranks.whole(found.value).mT.reshape(-1, k, A.shape[-1])


class _Triplets(NamedTuple):
    left: Tensor  # (B, k, m)
    values: Tensor  # (B, k)
    right: Tensor  # (B, k, n)


def _fitted(seen: Rows, right: Tensor) -> _Triplets:
    """The triplets of `A` in the span of right vectors."""
    left, values, turn = torch.linalg.svd(seen(right).mT, full_matrices=False)
    return _Triplets(left.mT, values, turn.conj() @ right)


def _with_null_vectors(seen: Rows, found: _Triplets, scale: Tensor, solver: Solver) -> _Triplets:
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
    row = fixed_rows[n, A.dtype, A.device][:1].expand(seen.entries, 1, n)
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
