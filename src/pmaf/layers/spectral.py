"""Functions of the spectrum: `V f(Λ) Vᵀ` of the eigenpairs of a symmetric matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pmaf import errors
from pmaf.autograd.attach import solve_opaquely
from pmaf.autograd.eager import find, find_in_range
from pmaf.autograd.forward_mode import constant
from pmaf.autograd.image import image
from pmaf.autograd.node import exactly
from pmaf.autograd.spectral import (
    Group,
    differentiable,
    differentiable_group,
    forward,
    outside,
)
from pmaf.layers.eigenvectors import PrincipalEigenvectors
from pmaf.linalg import sphere
from pmaf.linalg.decompositions import eigh
from pmaf.linalg.divided_differences import NAMED, Scalar, of_callable
from pmaf.linalg.embedding import complex_matrix, real_matrix
from pmaf.linalg.matrix_function import MatrixFunction
from pmaf.linalg.products import frobenius, norm, one_if_zero, symmetric_part
from pmaf.linalg.roundings import EQUAL, HALF, LOOSE, SEARCHED, OutOfRangeError, merge_tolerance
from pmaf.operators import LowRank, Operator
from pmaf.recipe import run
from pmaf.runtime import precision, ranks
from pmaf.runtime.log import took
from pmaf.runtime.modes import (
    derivatives_around,
    forward_mode,
    full_precision,
    plain,
    recorded,
    transformed,
)
from pmaf.runtime.threads import OneThread
from pmaf.solution import Solution
from pmaf.solvers.auto import DENSE

Function = str | Callable[[Tensor], Tensor]


def function_of(A: Tensor, posed: MatrixFunction) -> Tensor:
    """The function of a tensor, real or complex, inside of `full_precision`."""
    if not A.is_complex():
        return _real(A, posed, 1)
    # Every eigenvalue of the embedding occurs twice.
    posed = replace(posed, k=None if posed.k is None else 2 * posed.k)
    return complex_matrix(_real(real_matrix(A), posed, 2))


def _real(A: Tensor, posed: MatrixFunction, copies: int) -> Tensor:
    """The function of a tensor of float32 or float64, of which each eigenvalue occurs so often."""
    if 0 in A.shape:
        return symmetric_part(A)
    with OneThread(A):
        found = _group(A, posed, copies) if takes_group(A, posed.k) else None
        if isinstance(found, Group):
            took("spectral: group")
            return differentiable_group(posed, A, found, _decomposition)
        values, vectors = _decomposition(A) if found is None else found
        known = posed.scalar.derivative(posed.arguments(values), 0)
        if plain(A):
            _check(posed, values, known)
        learned = torch.is_grad_enabled() and recorded(known)
        # A function that closes over a tensor of a transform cannot be called by the backward
        # pass of another transform.
        traced = torch.compiler.is_compiling() and derivatives_around() > 0
        if traced or forward_mode(A, known) or (learned and transformed()):
            return forward(posed, A, values, vectors)
        posed = replace(posed, learned=learned)
        if learned or not precision.turn & 1:  # nothing is reduced
            return differentiable(posed, A, values, vectors)
        return exactly(lambda A: differentiable(posed, A, values, vectors), A)


def takes_group(A: Tensor, k: int | None) -> bool:
    """Whether k eigenpairs are found by themselves, and their derivative by a linear system."""
    return is_few(A, k) and plain(A) and not forward_mode(A)


def is_few(A: Tensor, k: int | None) -> bool:
    """Whether k eigenpairs and a linear system are faster than a whole decomposition."""
    return k is not None and k <= min(_GROUP_MOST, A.shape[-1] // _GROUP_SHARE)


# The largest k, and the least n/k, for which this is so: `python benchmarks/spectral_group.py`.
_GROUP_MOST, _GROUP_SHARE = 8, 3


def _group(A: Tensor, posed: MatrixFunction, copies: int) -> Group | tuple[Tensor, Tensor] | None:
    """The eigenpairs of the group; None where all are needed, or these if they are known."""
    scalar, fixed = posed.scalar, A.detach()
    # The solvers find the largest eigenvalues.
    problem = PrincipalEigenvectors(fixed if posed.largest else -fixed, posed.k, copies=copies)
    try:
        found = find(problem, None, problem.choice().solver, False, False)
    except OutOfRangeError:  # a decomposition changes units
        return None
    if found.kept.decomposition is not None:
        rows, values = found.kept.decomposition
        return (values, rows.mT) if posed.largest else (-values.flip(-1), rows.flip(-2).mT)
    values = found.multiplier if posed.largest else -found.multiplier
    if scalar.domain != "any":
        # Whether an eigenvalue counts as zero depends on the norm of the matrix.
        size = frobenius(fixed).squeeze(-1)
        if bool((values.abs() <= merge_tolerance(A.dtype) * size).any()):
            return None
    known = scalar.derivative(scalar.settled(values, torch.zeros_like(values)), 0)
    # A decomposition raises the errors, and differentiates parameters.
    proper = isinstance(known, Tensor) and known.shape == values.shape
    if not proper or not bool(torch.isfinite(known).all()):
        return None
    if torch.is_grad_enabled() and recorded(known):
        return None
    _require_single(scalar, values, known)
    return Group(values, found.value, found.gap, found.kept)


def find_by_products(
    A: Operator, scalar: Scalar, k: int | None, largest: bool
) -> tuple[LowRank, Solution]:
    """`V C Vᴴ` with `C = f(VᴴAV)`, of which nothing is formed but `C`, and the search for `V`."""
    require_few(A, k)
    dtype = A.dtype
    if dtype in HALF:
        A = A.with_tensors([x.float() for x in A.tensors])
    mesh = ranks.mesh_of(*A.tensors)
    found = run(PrincipalEigenvectors(A, k, largest), report=False)
    V = outside(ranks.whole(found.value))
    rows = V.detach().mT
    # The eigenvalues as a matrix: where they repeat, only this one has a derivative.
    inside = exactly(lambda images: rows.conj() @ images.mT, image(A, rows))
    with full_precision(A.device):
        C = function_of(
            inside, MatrixFunction(scalar, None, largest, size=COARSER * size_of(A, rows))
        )
    parts = V.mT, exactly(lambda C, V: C @ V.mH, C, V)
    return LowRank(*(ranks.replicate(x.to(dtype), mesh) for x in parts)), found


# The eigenvalues of a search have errors of more than one decomposition.
COARSER = SEARCHED / EQUAL


def size_of(A: Operator, rows: Tensor) -> Tensor:
    """About the spectral norm of a symmetric operator, from below, `(*, 1)`."""
    x = sphere.references(rows.real)[1].to(rows).expand_as(rows[..., :1, :])
    mesh, length = ranks.mesh_of(*A.tensors), norm(x)
    with torch.no_grad(), full_precision(A.device):
        for _ in range(3):
            x = ranks.replicate(x / one_if_zero(length).unsqueeze(-1), mesh)
            x = ranks.whole(A.matvec(x))
            length = norm(x)
    return length


def scalar_of(function: Function) -> Scalar:
    if isinstance(function, str):
        if function not in NAMED:
            names = ", ".join(repr(name) for name in NAMED)
            raise ValueError(f"function must be one of {names}, or callable; got {function!r}")
        return NAMED[function]
    if not callable(function):
        raise TypeError(
            f"function must be a name or a function of a tensor; got {type(function).__name__}"
        )
    return of_callable(function)


def require_few(A: Operator, k: int | None) -> None:
    if k is None:
        raise TypeError(
            f"{A!r} is known by its products, and a function of all its eigenvalues is a dense "
            "matrix; pass k, or A as a dense tensor"
        )
    PrincipalEigenvectors(A, k)  # checks both


def require_square(A: Any, k: int | None) -> None:
    errors.require_matrix("A", A, "n, n", or_complex=True)
    n = A.shape[-1]
    if A.shape[-2] != n:
        raise ValueError(f"A must be square, of shape (*, n, n); got {errors.shape_of(A)}")
    errors.require_count("k", k)
    if k is not None and not 1 <= k <= n:
        raise ValueError(f"k must lie between 1 and n = {n}; got {k}")


def _decomposition(A: Tensor) -> tuple[Tensor, Tensor]:
    """All eigenvalues and eigenvectors, as constants."""
    eager = plain(A)
    if eager and A.is_cpu:  # LAPACK scales a matrix whose entries are near the ends of the range
        with suppress(torch.linalg.LinAlgError):  # pyright: ignore[reportPrivateImportUsage]
            values, vectors = eigh(symmetric_part(A.detach()))
            if math.isfinite(float(values.sum())):
                took("ied: decomposition")
                return values, vectors
    fixed = A.detach() if eager or torch.compiler.is_compiling() else constant(A)
    problem = PrincipalEigenvectors(fixed)
    solve = find_in_range if eager else solve_opaquely
    found = solve(problem, None, DENSE, False, False)
    known: Any = found.kept.decomposition
    return known.values, known.rows.mT


def _check(posed: MatrixFunction, values: Tensor, found: Any) -> None:
    """The function is defined at the eigenvalues, and acts on each of them alone."""
    scalar, x = posed.scalar, posed.of_group(values)
    named = scalar.name in NAMED
    if not isinstance(found, Tensor) or found.shape != x.shape:
        got = errors.shape_of(found) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"function must return a tensor of the shape of its argument, {errors.shape_of(x)}; "
            f"got {got}"
        )
    bad = ~torch.isfinite(found.detach())
    if bad.any():
        worst = float(x[bad][0])
        size = float(values.abs().amax(-1, keepdim=True).expand_as(x)[bad][0])
        remedy = "choose another function"
        if named:
            remedy = (
                f"add a multiple of the identity to A, or ask for the k eigenvalues that are "
                f"larger (eigenvalues up to {merge_tolerance(x.dtype):.1e} times the largest "
                "count as zero)"
            )
        raise ValueError(
            f"{scalar.name if named else 'function'} is not finite at the eigenvalue {worst:.3g} "
            f"of A, whose largest eigenvalue in modulus is {size:.3g}; {remedy}"
        )
    _require_single(scalar, x, found)


def _require_single(scalar: Scalar, x: Tensor, found: Tensor) -> None:
    """A function of one half of the numbers gives the same as a function of all of them."""
    half = x.shape[-1] // 2
    if scalar.name in NAMED or half == 0:
        return
    with torch.no_grad():
        again = torch.cat([scalar.derivative(y, 0) for y in (x[..., :half], x[..., half:])], -1)
    difference = (again - found.detach()).abs()
    size = found.detach().abs().amax(-1, keepdim=True)
    if (difference > LOOSE * torch.finfo(x.dtype).eps * size).any():
        raise ValueError(
            "function must act on each eigenvalue alone, but its results change with the other "
            "eigenvalues; multiply the result of pmaf.spectral by what depends on all of them"
        )
