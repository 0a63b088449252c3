"""IED, implicit eigen decomposition: `max tr(uᵀAu)` subject to `uᵀu = I`."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from pmaf import errors, native
from pmaf.autograd.image import entries
from pmaf.executors.direct import Direct
from pmaf.executors.eigenvectors import CompiledEigenvectors, CompiledPairs
from pmaf.executors.general import DominantEigenvector
from pmaf.executors.straight import StraightEigenvectors
from pmaf.gradients import Gradient, Implicit, Unroll
from pmaf.layers.eigenvectors import (
    COMPILED_VECTORS,
    Eigenpairs,
    PrincipalEigenvectors,
    requested_first,
)
from pmaf.layers.host import on_host
from pmaf.layers.pairs import Pair
from pmaf.linalg.roundings import working_dtype
from pmaf.operators.base import Operator, as_operator
from pmaf.operators.diagonal import Diagonal
from pmaf.operators.matrix import Matrix
from pmaf.recipe import AUTO, IMPLICIT, Place, Recipe, register, run, short_recipe
from pmaf.reductions.base import Found, Reduction, Tensors
from pmaf.reductions.end import End, Sign, Smallest
from pmaf.reductions.field import EmbeddedVectors
from pmaf.reductions.metric import DenseMetric, FactoredMetric, RowMetric
from pmaf.reductions.precision import of_short
from pmaf.runtime import ranks
from pmaf.runtime.log import took
from pmaf.solvers import Auto, Solver
from pmaf.solvers.auto import are_reduced, is_general_and_small

# The constructor of a named tuple is a function of Python, in which this is the only line.
_named = tuple.__new__
# Up to this many rows, the entries of an operator M without a solve are formed where A is an
# operator, too.
_FORMED = 2048


def coordinates(problem: PrincipalEigenvectors) -> tuple[list[Reduction], Any]:
    """The steps to a problem that solvers take, and this problem without its tensors.

    Vectors are columns there, and there are as many as are asked for, before order and signs.
    """
    A, M, k = problem.A, problem.M, problem.count
    bare = problem.bare().changed(k=k)
    steps: list[Reduction] = []
    if A.dtype.is_complex:
        steps.append(EmbeddedVectors(k, averaged=True))
        bare = bare.changed(k=2 * k, skip=2 * problem.skip, copies=2)
        return steps, bare if M is None else _as_pair(bare)
    if M is None:
        return steps, bare
    cut = problem.operator is not None and ranks.mesh_of(*problem.flat) is not None
    if not cut:
        if isinstance(M, Matrix):
            steps.append(RowMetric())
        elif isinstance(M, Operator) and not isinstance(M, Diagonal):
            searched = isinstance(A, Operator) and (M.solvable or problem.n > _FORMED)
            steps += [] if searched else [EntriesOfMetric()]
        dense = bool(steps) or isinstance(M, (Tensor, Diagonal))
        if isinstance(A, Operator) and dense:
            return [*steps, FactoredMetric()], bare
        if isinstance(M, Diagonal):
            steps.append(RowMetric())
        if not isinstance(A, Operator):
            return steps, _as_pair(bare)
    return [Operators()], _as_pair(bare)


class EntriesOfMetric(Reduction):
    """An `M` that is known by its products is formed."""

    words = "M by its products -> the entries of M"

    def outline(self, given: Tensors) -> Tensors:
        M = given["M"]
        return {**given, "M": torch.empty(M.shape, dtype=M.dtype, device="meta")}

    def apply(self, given: Tensors) -> Tensors:
        took("pairs: entries of M")
        return {**given, "M": entries(given["M"])}


class Operators(Reduction):
    """Both matrices of a pair as operators."""

    words = "pair of A and M -> products with both"

    def apply(self, given: Tensors) -> Tensors:
        return {**given, "A": as_operator(given["A"]), "M": as_operator(given["M"])}


def _as_pair(bare: PrincipalEigenvectors) -> Pair:
    pair = object.__new__(Pair)
    for field in fields(bare):
        object.__setattr__(pair, field.name, getattr(bare, field.name))
    return pair


def way_of_eigenvectors(
    problem: PrincipalEigenvectors, solver: Solver, gradient: Gradient, init: Tensor | None
) -> Recipe:
    """The recipe for eigenvectors by solvers."""
    dtype, M, reference = problem.dtype, problem.M, problem.reference
    if dtype.is_complex and not isinstance(gradient, Implicit):
        raise TypeError(
            f"gradient={gradient!r} needs real eigenvectors, which are unique up to a sign; "
            "use gradient=Implicit() for a complex matrix"
        )
    if M is not None and not isinstance(gradient, (Implicit, Unroll)):
        raise TypeError(
            f"gradient={gradient!r} is a rule for one matrix; use Implicit() or Unroll() with M"
        )
    single, steps = problem.k is None, of_short(dtype)
    block = isinstance(reference, Tensor) and problem.has_columns(reference)
    lone = init is not None and not problem.has_columns(init)
    steps.append(Sign(single, block, M is None, reference is not None))
    steps.append(End(problem.skip, problem.flipped, single, lone, signed=True))
    more, bare = coordinates(problem)
    steps += more
    if not problem.largest:
        steps.append(Smallest())
        bare = bare.changed(largest=True)
    return Recipe(tuple(steps), Direct(bare.changed(descending=True), solver, gradient))


def short_way_of_eigenvectors(
    posed: PrincipalEigenvectors, init: Tensor | None, place: Place | None
) -> Recipe | None:
    """The recipe for eigenvectors by compiled kernels, or by a straight-line program."""
    if place is not None:
        found = on_host(short_way_of_eigenvectors, posed, init, place)
        return found or _straight_way(posed)
    A, M, k = posed.matrix, posed.M, posed.k
    steps = of_short(A.dtype)
    dtype = torch.float32 if steps else A.dtype
    if is_general_and_small(posed) and A.numel() > 0:
        steps += _signs(posed)
        return Recipe(tuple(steps), DominantEigenvector(posed.bare()))
    kernels = native.available and dtype in native.EIGENVECTORS
    if not (posed.symmetric and kernels and A.numel() > 0):
        return None
    width = None if posed.single else posed.width
    if not are_reduced(width or 1, posed.n) or (width or 1) > COMPILED_VECTORS:
        return None
    if M is not None and A.shape != M.shape:
        return None
    if isinstance(M, Diagonal):
        steps.append(DenseMetric())
    steps += _signs(posed)
    if posed.skip or posed.flipped:
        steps.append(End(posed.skip, posed.flipped, k is None))
    common = functools.partial(_solve_commonly, k=width, largest=posed.largest)
    bare = posed.bare().changed(k=width, skip=0, descending=posed.largest)
    if M is None:
        return Recipe(tuple(steps), CompiledEigenvectors(bare, A.shape, dtype, common))
    return Recipe(tuple(steps), CompiledPairs(_as_pair(bare), A.shape, dtype, common))


def _straight_way(posed: PrincipalEigenvectors) -> Recipe | None:
    A, M = posed.matrix, posed.M
    pair = M is not None
    if not posed.symmetric or A.numel() == 0 or (pair and A.shape != M.shape):
        return None
    steps: list[Reduction] = [*of_short(A.dtype)]
    if isinstance(M, Diagonal):
        steps.append(DenseMetric())
    steps += _signs(posed)
    if posed.skip or posed.flipped:
        steps.append(End(posed.skip, posed.flipped, posed.k is None))
    width = None if posed.single else posed.width
    bare = posed.bare().changed(k=width, skip=0, descending=posed.largest)
    bare = _as_pair(bare) if pair else bare
    return Recipe(tuple(steps), StraightEigenvectors(bare, posed.reference is None, pair))


def _signs(posed: PrincipalEigenvectors) -> list[Reduction]:
    """The step that chooses signs, where these are not those of the kernels."""
    reference = posed.reference
    if reference is None:
        return []
    block = isinstance(reference, Tensor) and posed.has_columns(reference)
    return [Sign(posed.k is None, block, posed.M is None)]


def _solve_commonly(tensors: Tensors, k: int | None, largest: bool) -> Found:
    """Vectors and values by solvers, the requested end first."""
    problem = PrincipalEigenvectors(tensors["A"], k, largest, M=tensors.get("M"))
    found = run(problem, report=False)
    return found.value, found.multiplier


register(PrincipalEigenvectors, way_of_eigenvectors, coordinates, short_way_of_eigenvectors)


def ied(
    A: Tensor | Operator,
    k: int | None = None,
    *,
    M: Tensor | Operator | None = None,
    skip: int = 0,
    largest: bool = True,
    symmetric: bool = True,
    descending: bool | None = None,
    solver: Solver | None = None,
    gradient: Gradient | None = None,
    reference: Tensor | int | str | None = None,
    init: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Eigenpairs:
    """Principal eigenvectors and their eigenvalues, differentiable.

    Gradients are finite and exact whenever the requested eigenvalues are simple, however
    often other eigenvalues repeat. Where a requested eigenvalue repeats they are exact for
    functions of the span of its vectors, and not for functions of values and vectors together,
    for which there is `pmaf.spectral` (docs/ied.md says why).

    Args:
        A: `(*, n, n)`, of float32 or float64; float16 and bfloat16 are computed in float32.
            With `symmetric=True` its symmetric part is used, and gradients are symmetric. Of
            complex64 or complex128 the Hermitian part is used (docs/complex.md). Or a sparse
            tensor, a DTensor, or an operator of `pmaf.operators`.
        k: how many; None for one, without a dimension for it.
        M: `(*, n, n)`, symmetric positive definite, for pairs `Ay = λMy` with `yᵀMy = 1`
            (docs/pairs.md): a tensor, a sparse tensor, or an operator, such as
            `pmaf.operators.Diagonal(d)`.
        skip: how many eigenvectors of the requested end to leave out, such as the constant
            vector of a Laplacian.
        largest: the largest eigenvalues, or the smallest.
        symmetric: False for the dominant real eigenvalue of a general matrix.
        descending: order of the eigenvalues if there are several. Unless given, the requested end
            is first: they descend from the largest, or ascend from the smallest.
        solver: one of `pmaf.solvers`; `Auto()` unless given.
        gradient: one of `pmaf.gradients`; `Implicit()` unless given.
        reference: `(*, n)` or `(*, n, k)`, towards which the sign of each eigenvector is chosen,
            or its phase if it is complex; all ones unless given. Or an integer, for that component
            to be positive, or `"largest"`, for the component of largest modulus to be.
        init: `(*, n)` or `(*, n, k)`, the start of an iterative solver, such as the solution
            of the last step of training.
        generator: draws the start of an iterative solver; without it the start is fixed.

    Returns:
        `Eigenpairs(values, vectors)`, `(*,)` and `(*, n)`, or `(*, k)` and `(*, n, k)`.

    >>> import torch, pmaf
    >>> values, vectors = pmaf.ied(torch.diag(torch.tensor([3.0, 1.0, 1.0, 1.0])))
    >>> values, vectors
    (tensor(3.), tensor([1., 0., 0., 0.]))
    """
    if descending is None:
        descending = largest
    if generator is None:
        given = {"A": A, "M": M, "reference": reference, "init": init}
        options = k, largest, symmetric, descending, skip
        recipe = short_recipe(PrincipalEigenvectors, given, options, solver, gradient)
        found = None if recipe is None else recipe.run(given)
        if found is not None:
            return _named(Eigenpairs, found[::-1])
    problem = PrincipalEigenvectors(A, k, largest, symmetric, descending, reference, skip, M)
    if generator is not None and init is None:
        shape = (problem.n, problem.count)
        dtype = working_dtype(torch.float64, generator.device)
        init = torch.randn(shape, generator=generator, dtype=dtype, device=generator.device)
        init = init.to(problem.A.device, problem.A.dtype)
        init = init[..., 0] if k is None else init
    solution = run(problem, solver or AUTO, gradient or IMPLICIT, init=init, report=False)
    return Eigenpairs(solution.multiplier, solution.value)


class IED(nn.Module):
    """`pmaf.ied` as a module, with the same keywords and results.

    >>> import torch, pmaf
    >>> pmaf.IED(k=3, largest=False)
    IED(k=3, largest=False, symmetric=True, descending=False, solver=Auto(), gradient=Implicit())
    """

    def __init__(
        self,
        k: int | None = None,
        *,
        skip: int = 0,
        largest: bool = True,
        symmetric: bool = True,
        descending: bool | None = None,
        solver: Solver | None = None,
        gradient: Gradient | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        errors.require_count("k", k)
        self.k, self.largest, self.symmetric, self.skip = k, largest, symmetric, skip
        self.descending = requested_first(descending, largest)
        self.solver, self.gradient = solver or Auto(), gradient or Implicit()
        self.generator = generator

    def forward(
        self,
        A: Tensor | Operator,
        reference: Tensor | int | str | None = None,
        init: Tensor | None = None,
        M: Tensor | Operator | None = None,
    ) -> Eigenpairs:
        return ied(
            A,
            self.k,
            M=M,
            skip=self.skip,
            largest=self.largest,
            symmetric=self.symmetric,
            descending=self.descending,
            solver=self.solver,
            gradient=self.gradient,
            reference=reference,
            init=init,
            generator=self.generator,
        )

    def __prepare_scriptable__(self) -> None:
        errors.refuse_script(self)

    def extra_repr(self) -> str:
        skip = ("skip",) if self.skip else ()
        names = ("k", *skip, "largest", "symmetric", "descending", "solver", "gradient")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
