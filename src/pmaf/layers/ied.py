"""IED, implicit eigen decomposition: `max tr(uᵀAu)` subject to `uᵀu = I`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pmaf import errors, native
from pmaf.autograd.attach import attach_found, attach_some
from pmaf.gradients import Gradient, Implicit
from pmaf.layers.dense_pairs import small_pair
from pmaf.layers.eigenvectors import (
    COMPILED_VECTORS,
    Eigenpairs,
    PrincipalEigenvectors,
    look_at_symmetry,
    requested_first,
    solve_commonly,
    unposed,
)
from pmaf.layers.hermitian import HermitianEigenvectors
from pmaf.operators.base import Operator
from pmaf.runtime.log import took
from pmaf.runtime.modes import forward_mode, plain
from pmaf.solvers import Auto, Solver
from pmaf.solvers.auto import are_reduced
from pmaf.tangent.kept import NOTHING, Tridiagonal

# Created at import: constructing a solver serialises it to text, which costs more than a small
# solve.
_AUTO, _IMPLICIT = Auto(), Implicit()


def _small(A: Tensor, k: int | None, largest: bool) -> Eigenpairs | None:
    """The forward pass of the default call, without the objects in between.

    It calls the kernels that `Reduction` calls; the backward pass is the common one. Returns None
    where the common forward pass is needed: for other tensors, and for entries that the kernels do
    not solve, or that are not finite. Complex entries whose phase is not determined take the common
    path by themselves, which embeds them in matrices of twice the size.
    """
    if not plain(A) or forward_mode(A):  # asked first, so that a trace compares no sizes
        return None
    problem = _reduced(A.shape, A.dtype, k, largest)
    if problem is None or not A.is_cpu or A.layout is not _STRIDED:
        return None
    if not problem.looked:
        problem.looked = True
        look_at_symmetry(A)
    recorded = A.requires_grad and torch.is_grad_enabled()
    reduction = None
    if recorded and problem.kept is not None:
        reduction = A.new_empty(problem.kept, dtype=torch.float64)
    values, vectors, failed = native.planned_pairs(A, problem.plan, True, reduction)
    if failed is not None and (
        not A.is_complex() or bool(failed.all()) or not bool(A[failed].isfinite().all())
    ):
        return None
    took(problem.way)
    if failed is not None:
        took("ied: common path for some")
        solve = functools.partial(solve_commonly, k=k, largest=largest)
        good = failed.numel() - int(failed.sum())
        problem = _reduced(torch.Size((good, *A.shape[-2:])), A.dtype, k, largest)
        vectors, values = attach_some((A, None), (vectors, values), NOTHING, problem, failed, solve)
    elif recorded:
        kept = NOTHING if reduction is None else Tridiagonal(reduction)
        vectors, values = attach_found(A, None, (vectors, values), kept, problem)
    return _named(Eigenpairs, (values, vectors))


# The constructor of a named tuple is a function of Python, in which this is the only line.
_named = tuple.__new__
_STRIDED = torch.strided


class _Planned:
    """The problem of a default call without its matrix, and the plans of its kernels.

    It has what the backward pass asks a problem for.
    """

    __slots__ = ("gradients", "kept", "looked", "plan", "reverse", "way")

    def __init__(self, way: str, problem: Any, shape: torch.Size, dtype: torch.dtype) -> None:
        k, largest = problem.k, problem.largest
        numbers = native.reduction_numbers(shape[-1], dtype, k)
        self.way, self.looked = way, False
        self.plan = native.forward_plan(shape, dtype, k, largest)
        self.reverse = native.backward_plan(shape, dtype, k or 1, k or 1, largest)
        # The shape of what is kept of the forward pass, None if it is nothing.
        self.kept = (*shape[:-2], numbers) if numbers else None
        self.gradients = problem.gradients

    def kept_again(self, tensors: tuple[Tensor, ...], kind: Any) -> Any:
        return NOTHING

    def first_gradients(
        self,
        tensors: tuple[Tensor, ...],
        y: Tensor,
        kept: Any,
        v: Tensor | None,
        d_multiplier: Tensor | None,
        needs: Sequence[bool],
    ) -> native.Gradients:
        took("tangent: compiled")
        reduction = kept.numbers if kept else None
        return native.planned_gradient(tensors[0], y, v, d_multiplier, self.reverse, reduction)


# What follows from the shape is found once for all calls with matrices of that shape.
@functools.lru_cache(maxsize=1024)
def _reduced(
    shape: torch.Size, dtype: torch.dtype, k: int | None, largest: bool
) -> _Planned | None:
    """The problem of matrices for which kernels are used."""
    # The sizes in a trace of TorchScript are tensors, which are in no cache.
    errors.refuse_trace()
    square = len(shape) > 1 and shape[-1] == shape[-2] and shape.numel() > 0
    if not (native.available and square and dtype in native.EIGENVECTORS):
        return None
    if not are_reduced(k or 1, shape[-1]) or (k or 1) > COMPILED_VECTORS:
        return None
    kind, way = PrincipalEigenvectors, "ied: reduction"
    if dtype.is_complex:
        kind, way = HermitianEigenvectors, "ied: complex reduction"
    return _Planned(way, unposed(kind, k, largest), shape, dtype)


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
    descending = requested_first(descending, largest)
    if (
        symmetric
        and (k is None or (type(k) is int and k > 0 and (k == 1 or descending == largest)))
        and (solver is None or solver == _AUTO)
        and (gradient is None or gradient == _IMPLICIT)
        and reference is None
        and skip == 0
        and init is None
        and generator is None
        and isinstance(A, Tensor)
    ):
        found = _small(A, k, largest) if M is None else small_pair(A, M, k, largest)
        if found is not None:
            return found
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
