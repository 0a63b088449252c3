"""Functions of the spectrum: `V f(Λ) Vᵀ` of the eigenpairs of a symmetric matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pmaf import errors
from pmaf.autograd.attach import find, solve_opaquely
from pmaf.autograd.forward_mode import constant
from pmaf.autograd.spectral import differentiable, forward
from pmaf.layers.ied import PrincipalEigenvectors
from pmaf.linalg.divided_differences import NAMED, Scalar, of_callable
from pmaf.linalg.matrix_function import MatrixFunction
from pmaf.linalg.products import symmetric_part
from pmaf.linalg.roundings import LOOSE, OutOfRangeError, merge_tolerance
from pmaf.operators.base import known_by_products
from pmaf.runtime import ranks
from pmaf.runtime.modes import (
    derivatives_around,
    forward_mode,
    full_precision,
    plain,
    recorded,
    transformed,
)
from pmaf.runtime.threads import OneThread
from pmaf.solvers.auto import DENSE
from pmaf.tangent.kept import Decomposition

Function = str | Callable[[Tensor], Tensor]


def spectral(
    A: Tensor, function: Function, k: int | None = None, *, largest: bool = True
) -> Tensor:
    """`V f(Λ) Vᵀ` of all eigenpairs of a symmetric matrix, or of the k top ones, differentiable.

    Derivatives are exact where eigenvalues repeat, inside the group of the k eigenvalues and
    outside. The group itself has to be apart from the other eigenvalues; where the k-th
    eigenvalue equals the next, there is no derivative, and gradients are finite.

    Args:
        A: `(*, n, n)`, of float32 or float64; float16 and bfloat16 are computed in float32. Its
            symmetric part is used, and gradients are symmetric.
        function: "sqrt", "inverse", "inverse_sqrt", "log", "exp", "square", "identity", "one", or
            a function from tensors to tensors of the same shape, element by element, that torch
            can differentiate. Gradients reach the parameters of such a function.
        k: how many eigenpairs; None for all.
        largest: those of the largest eigenvalues, or of the smallest.

    Returns:
        `(*, n, n)`, symmetric.

    >>> import torch, pmaf
    >>> pmaf.spectral(torch.diag(torch.tensor([9.0, 4.0, 4.0])), "sqrt", 1)
    tensor([[3., 0., 0.],
            [0., 0., 0.],
            [0., 0., 0.]])
    """
    scalar = _scalar(function)
    _require(A, k)
    if ranks.is_spread(A):
        parts = ranks.Parts(A.shape[:-2], {"A": (A, 2)})
        return parts.join(spectral(parts.inputs["A"], function, k, largest=largest))
    if torch.finfo(A.dtype).bits == 16:
        return spectral(A.float(), function, k, largest=largest).to(A.dtype)
    if 0 in A.shape:
        return symmetric_part(A)
    group = None if k == A.shape[-1] else k
    with full_precision(A.device), OneThread(A):
        values, vectors = _decomposition(A)
        posed = MatrixFunction(scalar, group, largest)
        known = scalar.derivative(posed.arguments(values), 0)
        if plain(A):
            _check(posed, values, known)
        learned = torch.is_grad_enabled() and recorded(known)
        # A function that closes over a tensor of a transform cannot be called by the backward
        # pass of another transform.
        traced = torch.compiler.is_compiling() and derivatives_around() > 0
        if traced or forward_mode(A, known) or (learned and transformed()):
            return forward(posed, A, values, vectors)
        return differentiable(replace(posed, learned=learned), A, values, vectors)


class Spectral(nn.Module):
    """`pmaf.spectral` as a module; a function that is a module is a part of it.

    >>> import torch, pmaf
    >>> pmaf.Spectral("inverse_sqrt", k=3)
    Spectral(function='inverse_sqrt', k=3, largest=True)
    """

    def __init__(self, function: Function, k: int | None = None, *, largest: bool = True) -> None:
        super().__init__()
        _scalar(function)
        self.function, self.k, self.largest = function, k, largest

    def forward(self, A: Tensor) -> Tensor:
        return spectral(A, self.function, self.k, largest=self.largest)

    def __prepare_scriptable__(self) -> None:
        errors.refuse_script(self)

    def extra_repr(self) -> str:
        names = ("k", "largest")
        if not isinstance(self.function, nn.Module):
            names = ("function", *names)
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def _scalar(function: Function) -> Scalar:
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


def _require(A: Any, k: int | None) -> None:
    if known_by_products(A):
        raise TypeError(
            f"A is of type {type(A).__name__}, and functions of the spectrum are dense matrices; "
            "pass A as a dense tensor, or take eigenpairs from pmaf.ied(A, k), and use them as "
            "vectors * f(values) without forming a matrix"
        )
    errors.require_matrix("A", A, "n, n")
    n = A.shape[-1]
    if A.shape[-2] != n:
        raise ValueError(f"A must be square, of shape (*, n, n); got {errors.shape_of(A)}")
    if k is not None and (isinstance(k, bool) or not isinstance(k, int)):
        raise TypeError(f"k must be None or an integer; got {k!r}")
    if k is not None and not 1 <= k <= n:
        raise ValueError(f"k must lie between 1 and n = {n}; got {k}")


def _decomposition(A: Tensor) -> tuple[Tensor, Tensor]:
    """All eigenvalues and eigenvectors, as constants."""
    eager = plain(A)
    fixed = A.detach() if eager or torch.compiler.is_compiling() else constant(A)
    problem = PrincipalEigenvectors(fixed)
    try:
        solve = find if eager else solve_opaquely
        found = solve(problem, None, DENSE, False, False)
    except OutOfRangeError:  # the operator changes units
        found = solve_opaquely(problem, None, DENSE, False, False)
    assert isinstance(found.kept, Decomposition)
    return found.kept.values, found.kept.rows.mT


def _check(posed: MatrixFunction, values: Tensor, found: Any) -> None:
    """The function is defined at the eigenvalues, and acts on each of them alone."""
    scalar, x = posed.scalar, posed.group(values)
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
        size = float(values.abs().amax())
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
    if named:
        return
    # A function of one half of the numbers gives the same as a function of all of them.
    half = x.shape[-1] // 2
    if half == 0:
        return
    with torch.no_grad():
        again = torch.cat([scalar.derivative(y, 0) for y in (x[..., :half], x[..., half:])], -1)
    difference = (again - found.detach()).abs()
    if (difference > LOOSE * torch.finfo(x.dtype).eps * found.detach().abs().amax()).any():
        raise ValueError(
            "function must act on each eigenvalue alone, but its results change with the other "
            "eigenvalues; multiply the result of pmaf.spectral by what depends on all of them"
        )
