"""Implicit singular value decomposition: one or a few triplets `Av = σu`, `Aᵀu = σv`.

Those of a complex matrix are `Av = σu`, `Aᴴu = σv`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from pmaf import errors
from pmaf.autograd.span import again_of_triplets, warn_of_triplets
from pmaf.executors import singular as executors
from pmaf.gradients import Implicit
from pmaf.gradients.base import Reverse
from pmaf.gradients.triplets import TripletConditions, halves, triplet_newton
from pmaf.layers.complex_singular import EmbeddedSingularVectors
from pmaf.layers.eigenvectors import requested_first
from pmaf.layers.singular_vectors import PrincipalSingularVectors, is_compiled_shape
from pmaf.layers.triplets import triplets_by_products
from pmaf.linalg.embedding import complex_rows, real_matrix
from pmaf.linalg.products import dot
from pmaf.linalg.roundings import HALF
from pmaf.operators import Operator, as_operator
from pmaf.operators.transposed import Transposed
from pmaf.problem import as_solution
from pmaf.recipe import Recipe, solve_shortly
from pmaf.reductions.base import Reduction, Tensors
from pmaf.reductions.end import End, Sign
from pmaf.reductions.precision import Precision
from pmaf.reductions.wide import Wide
from pmaf.runtime import ranks
from pmaf.runtime.modes import forward_mode, transforms_around
from pmaf.solution import Solution
from pmaf.solvers import Auto, Solver
from pmaf.solvers.base import Outcome, Triplets


class SingularTriplets(NamedTuple):
    """Left vectors, singular values and right vectors, as `torch.linalg.svd` returns them.

    `(*, m)`, `(*,)` and `(*, n)`, or `(*, m, k)`, `(*, k)` and `(*, n, k)`.

    >>> import torch, pmaf
    >>> pmaf.isvd(torch.diag(torch.tensor([3.0, 2.0])), k=2).values
    tensor([3., 2.])
    """

    left: Tensor
    values: Tensor
    right: Tensor


@dataclass(frozen=True, eq=False)
class _PrincipalTriplets(PrincipalSingularVectors):
    """The same problem with left vectors, for a tensor with at least as many rows as columns.

    One vector of the solution is `(u, v)`, of length `m + n`; its sign is the solver's.
    """

    form: ClassVar[type] = Triplets
    few_steps: ClassVar[bool] = True

    @property
    def n(self) -> int:
        return sum(self.A.shape[-2:])

    @property
    def rank(self) -> int:
        return self.A.shape[-1]

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (*self.batch_shape, *self.vectors, self.n), (*self.batch_shape, *self.vectors)

    def gradients(self, given: Reverse) -> tuple[Tensor | None, ...]:
        conditions: Any = TripletConditions(given, self.largest, self.single)
        found = given.rule.pullback(conditions, given.v, given.needs)  # pyright: ignore
        return again_of_triplets(found, given.state.shift)

    def newton(
        self, fixed: Any, found: Outcome, solve: Callable[..., Outcome]
    ) -> Callable[[Tensor], Tensor]:
        return triplet_newton(self.matrix, fixed.matrix, found, self.largest, self.single)

    def multiplier_at(self, u: Tensor) -> Tensor:
        left, right = halves(u, self.A.shape[-2])
        return dot(left, right @ self.matrix.mT)

    def finished(self, outcome: Outcome) -> Outcome:
        return outcome

    def present(self, outcome: Outcome) -> Solution:
        return as_solution(outcome)


@dataclass(frozen=True, eq=False)
class _EmbeddedTriplets(EmbeddedSingularVectors, _PrincipalTriplets):
    """The triplets of the embedding of a complex matrix, in pairs of `(u, v)` and `(iu, iv)`."""


_AUTO, _IMPLICIT = Auto(), Implicit()


def way_of_triplets(
    tensors: Tensors, k: int | None, largest: bool, descending: bool | None
) -> Recipe | None:
    """The recipe for triplets of real matrices, from tensors without numbers."""
    A, reference, init = (tensors[name] for name in ("A", "reference", "init"))
    posed = PrincipalSingularVectors(A, None, k, largest, descending, reference)
    if init is not None:
        posed.require_start(init)
    shape, dtype = A.shape, A.dtype
    if A.numel() == 0 or dtype.is_complex or posed.width > min(shape[-2:]):
        return None
    single = dtype in (*HALF, torch.float32)
    steps: list[Reduction] = [Precision(dtype, torch.float64)] if single else []
    wide = shape[-2] < shape[-1]
    if reference is not None or wide:
        block = isinstance(reference, Tensor) and posed.dims_of(reference) == 2
        steps.append(Sign(k is None, block, unit=True))
    if posed.flipped:
        steps.append(End(0, True, False))
    if wide:
        steps.append(Wide())
        shape = torch.Size((*shape[:-2], shape[-1], shape[-2]))
    if single and not is_compiled_shape(k, shape[-1]):
        return None
    problem = _PrincipalTriplets.read({"k": posed.width, "largest": largest, "single": single})
    return Recipe(tuple(steps), executors.Triplets(problem, shape, k is not None))


def isvd(
    A: Tensor | Operator,
    k: int | None = None,
    *,
    largest: bool = True,
    descending: bool | None = None,
    reference: Any = None,
    solver: Solver | None = None,
    init: Tensor | None = None,
) -> SingularTriplets:
    """Singular triplets, one or k of them, differentiable.

    Gradients are finite and exact whenever the requested singular values are simple, however often
    other singular values repeat; of a real square matrix also where one of them is zero.

    Args:
        A: `(*, m, n)`, tall, square or wide, of float32 or float64, complex64 or complex128;
            float16 and bfloat16 are computed in float32. Or a sparse tensor, a DTensor, or an
            operator of `pmaf.operators`.
        k: how many, at most `min(m, n)`; None for one, without a dimension for it.
        largest: the largest singular values, or the smallest.
        descending: order of the singular values if there are several. Unless given, the requested
            end is first: they descend from the largest, or ascend from the smallest.
        reference: `(*, n)` or `(*, n, k)`, towards which the sign of each right vector is chosen,
            or its phase if it is complex, as in `pmaf.ied`; the left vector follows.
        solver: one of `pmaf.solvers`; `Auto()` unless given.
        init: `(*, n)` or `(*, n, k)`, right vectors, the start of a search by products.

    Returns:
        `SingularTriplets(left, values, right)`, `(*, m)`, `(*,)` and `(*, n)`, or `(*, m, k)`,
        `(*, k)` and `(*, n, k)`.

    >>> import torch, pmaf
    >>> left, values, right = pmaf.isvd(torch.tensor([[0.0, 2.0], [0.0, 0.0], [1.0, 0.0]]))
    >>> left.abs(), values, right
    (tensor([1., 0., 0.]), tensor(2.), tensor([0., 1.]))
    """
    tensors = {"A": A, "reference": reference, "init": init}
    short = solve_shortly(way_of_triplets, tensors, (k, largest, descending), solver, None)
    if short is not None:
        right, values, left = short
        return SingularTriplets(left, values, right)
    # Checks the arguments; signs belong to the right vectors.
    given = PrincipalSingularVectors(A, None, k, largest, descending, reference)
    m, n = given.A.shape[-2:]
    if given.width > min(m, n):
        raise ValueError(f"k must lie between 1 and min(m, n) = {min(m, n)}; got {k}")
    if init is not None:
        given.require_start(init)
    A, dtype = given.A, given.dtype
    if ranks.is_spread(A):
        return _on_ranks(given, solver, init)
    if dtype in HALF:
        A = A.with_tensors([x.float() for x in A.tensors]) if isinstance(A, Operator) else A.float()
        init = None if init is None else init.float()
    if getattr(solver, "matrix_free", False):
        A = as_operator(A)
    if isinstance(A, Operator):
        found = _by_products(A, given, solver, init)
    else:
        found = _directly(A, given, solver)
    left, values, right = found if m >= n else found[::-1]
    # The sign of a triplet is that of its right vector, and so is its phase.
    signs = given.signs(right.mT).unsqueeze(-2)
    left, right = left * signs, right * signs
    if k is None:
        left, values, right = left.squeeze(-1), values.squeeze(-1), right.squeeze(-1)
    values = values if dtype.is_complex else values.to(dtype)
    left, right = left.to(dtype), right.to(dtype)
    return SingularTriplets(*(ranks.replicate(x, _mesh(A)) for x in (left, values, right)))


def _directly(
    A: Tensor, given: PrincipalSingularVectors, solver: Solver | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors as columns, and values, in order; of the transpose of a wide tensor."""
    kind, copies = (_EmbeddedTriplets, 2) if A.is_complex() else (_PrincipalTriplets, 1)
    # The embedding of the conjugate transpose is the transpose of the embedding.
    A = real_matrix(A) if A.is_complex() else A
    A = A if A.shape[-2] >= A.shape[-1] else A.mT
    problem = kind(A, None, copies * given.width, given.largest)
    found = problem.run(solver or _AUTO, _IMPLICIT, report=False)
    rows, values = found.value[..., ::copies, :], found.multiplier[..., ::copies]
    if given.width > 1 and forward_mode(A) and transforms_around(A) > 1:
        warn_of_triplets(values)
    if given.flipped:
        rows, values = rows.flip(-2), values.flip(-1)
    left, right = halves(rows, A.shape[-2])
    if copies == 2:
        left, right = complex_rows(left), complex_rows(right)
    return left.mT, values, right.mT


def _by_products(
    A: Operator, given: PrincipalSingularVectors, solver: Solver | None, init: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for an operator."""
    if init is not None and given.k is None:
        init = init.unsqueeze(-1)
    if A.shape[-2] < A.shape[-1]:
        if init is not None:
            init = ranks.whole(A.matvec(ranks.replicate(init.detach().mT, _mesh(A)))).mT
        A = Transposed(A)
    found = triplets_by_products(A, given.width, given.largest, solver, init)
    left, values, right = found if given.descending else tuple(x.flip(-1) for x in found)
    return left, values, right


def _mesh(A: Tensor | Operator) -> Any:
    return ranks.mesh_of(*A.tensors) if isinstance(A, Operator) else None


def _on_ranks(
    given: PrincipalSingularVectors, solver: Solver | None, init: Tensor | None
) -> SingularTriplets:
    """Every rank solves the part of the batch that it has."""
    named = {"A": (given.matrix, 2), **given.hints(), "init": (init, given.dims_of(init))}
    parts = ranks.Parts(given.batch_shape, named)
    mine = {"reference": given.reference, **parts.inputs}
    order = {"largest": given.largest, "descending": given.descending}
    found = isvd(mine.pop("A"), given.k, **order, solver=solver, **mine)
    return SingularTriplets(*(parts.join(x) for x in found))


class ISVD(nn.Module):
    """`pmaf.isvd` as a module, with the same keywords and results.

    >>> import torch, pmaf
    >>> pmaf.ISVD(k=3)
    ISVD(k=3, largest=True, descending=True, solver=Auto())
    """

    def __init__(
        self,
        k: int | None = None,
        *,
        largest: bool = True,
        descending: bool | None = None,
        solver: Solver | None = None,
    ) -> None:
        super().__init__()
        errors.require_count("k", k)
        self.k, self.largest, self.solver = k, largest, solver or Auto()
        self.descending = requested_first(descending, largest)

    def forward(
        self,
        A: Tensor | Operator,
        reference: Tensor | int | str | None = None,
        init: Tensor | None = None,
    ) -> SingularTriplets:
        return isvd(
            A,
            self.k,
            largest=self.largest,
            descending=self.descending,
            reference=reference,
            solver=self.solver,
            init=init,
        )

    def __prepare_scriptable__(self) -> None:
        errors.refuse_script(self)

    def extra_repr(self) -> str:
        names = ("k", "largest", "descending", "solver")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
