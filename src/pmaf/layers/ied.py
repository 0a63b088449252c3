"""IED, implicit eigen decomposition: `max tr(uᵀAu)` subject to `uᵀu = I`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from pmaf import errors, native
from pmaf.executors.eigenvectors import CompiledEigenvectors, CompiledPairs
from pmaf.gradients import Gradient, Implicit
from pmaf.layers.dense_pairs import HermitianPair, PairedEigenvectors
from pmaf.layers.eigenvectors import (
    COMPILED_VECTORS,
    Eigenpairs,
    PrincipalEigenvectors,
    requested_first,
    unposed,
)
from pmaf.layers.hermitian import HermitianEigenvectors
from pmaf.linalg.roundings import HALF
from pmaf.operators.base import Operator
from pmaf.operators.diagonal import Diagonal
from pmaf.recipe import Recipe, solve_shortly
from pmaf.reductions.base import Found, Reduction, Tensors
from pmaf.reductions.end import End, Sign
from pmaf.reductions.metric import DenseMetric
from pmaf.reductions.precision import Precision
from pmaf.solvers import Auto, Solver
from pmaf.solvers.auto import are_reduced

# Created at import: constructing a solver serialises it to text, which costs more than a small
# solve.
_AUTO, _IMPLICIT = Auto(), Implicit()
# The constructor of a named tuple is a function of Python, in which this is the only line.
_named = tuple.__new__


def way_of_eigenvectors(
    tensors: Tensors,
    k: int | None,
    largest: bool,
    symmetric: bool,
    descending: bool,
    skip: int,
    diagonal: bool,
) -> Recipe | None:
    """The recipe for eigenvectors that compiled kernels find, from tensors without numbers."""
    A, M, reference, init = (tensors[name] for name in ("A", "M", "reference", "init"))
    metric = Diagonal(M) if diagonal else M
    posed = PrincipalEigenvectors(A, k, largest, symmetric, descending, reference, skip, metric)
    if init is not None:
        posed.require_start(init)
    steps: list[Reduction] = []
    dtype = A.dtype
    if dtype in HALF:
        steps.append(Precision(dtype, torch.float32))
        dtype = torch.float32
    kernels = native.available and dtype in native.EIGENVECTORS
    if not (symmetric and kernels and A.numel() > 0):
        return None
    width = None if posed.single else posed.width
    if not are_reduced(width or 1, posed.n) or (width or 1) > COMPILED_VECTORS:
        return None
    if metric is not None and A.shape != metric.shape:
        return None
    if diagonal:
        steps.append(DenseMetric())
    if reference is not None:
        steps.append(
            Sign(
                k is None, isinstance(reference, Tensor) and posed.has_columns(reference), M is None
            )
        )
    if skip or posed.flipped:
        steps.append(End(skip, posed.flipped, k is None))
    kinds: Any = (
        (PrincipalEigenvectors, PairedEigenvectors),
        (HermitianEigenvectors, HermitianPair),
    )
    problem = unposed(kinds[dtype.is_complex][M is not None], width, largest)
    common = functools.partial(_solve_commonly, k=width, largest=largest)
    executor = (CompiledEigenvectors if M is None else CompiledPairs)(
        problem, A.shape, dtype, common
    )
    return Recipe(tuple(steps), executor)


def _solve_commonly(tensors: Tensors, k: int | None, largest: bool) -> Found:
    """Vectors and values by the common path, the requested end first."""
    problem = PrincipalEigenvectors(tensors["A"], k, largest, M=tensors.get("M"))
    found = problem.run(_AUTO, _IMPLICIT, report=False)
    return found.value, found.multiplier


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
        metric, diagonal = (M.d, True) if type(M) is Diagonal else (M, False)
        given = {"A": A, "M": metric, "reference": reference, "init": init}
        options = k, largest, symmetric, descending, skip, diagonal
        found = solve_shortly(way_of_eigenvectors, given, options, solver, gradient)
        if found is not None:
            return _named(Eigenpairs, found[::-1])
    problem = PrincipalEigenvectors(A, k, largest, symmetric, descending, reference, skip, M)
    if generator is not None and init is None:
        shape = (problem.n, problem.count)
        init = torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)
        init = init.to(problem.A.device, problem.A.dtype)
        init = init[..., 0] if k is None else init
    solution = problem.run(
        solver or _AUTO, gradient or _IMPLICIT, init=init, report=False, throw=False
    )
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
