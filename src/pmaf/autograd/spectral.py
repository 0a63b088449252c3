"""Differentiable functions `V f(Λ) Vᵀ` of a symmetric matrix.

The decomposition is a constant. What carries the derivatives are the formulas of
`linalg/matrix_function.py`, which are exact where eigenvalues repeat. In reverse mode a `Function`
adds to each derivative the next one, which is computed only if it is asked for. It has no `jvp`,
which a trace cannot follow and with which forward mode over forward mode is wrong. In forward
mode the value is Taylor's polynomial in `A − VΛVᵀ`, which is rounding but has tangents; its degree
is the number of transforms around the call. A trace of `torch.func.grad` takes the polynomial, too:
it may leave out the backward pass of a `Function`, and always leaves out its derivatives.

A function with parameters is recorded by autograd, at constant eigenvalues. So the gradient of the
parameters would be constant in the matrix. Its derivative in the matrix is that of the divided
differences of the function in the parameters: they are an input of the `Function`, too.

Of a few eigenpairs of a large matrix, the first derivative takes these alone: divided differences
inside their group, and a linear system for the part outside. All further derivatives are those of
the whole decomposition, which is computed when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pmaf.autograd.node import Saved, attach_solved, exactly
from pmaf.gradients.eigenvectors import symmetric_product
from pmaf.linalg.matrix_function import MatrixFunction
from pmaf.linalg.products import symmetric_part
from pmaf.runtime.modes import full_precision, plain, transforms_around
from pmaf.runtime.saved import restored, save
from pmaf.runtime.threads import OneThread
from pmaf.tangent.complement import complement_solve
from pmaf.tangent.kept import NOTHING, Kept


def differentiable(function: MatrixFunction, A: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """`V f(Λ) Vᵀ`, differentiable in `A` and in what the function itself depends on."""
    return _derivative(function, A, values, vectors, None)


def _derivative(
    function: MatrixFunction, A: Tensor, values: Tensor, vectors: Tensor, directions: Tensor | None
) -> Tensor:
    """The derivative of `V f(Λ) Vᵀ` in symmetric directions `(*, m, n, n)`; the value for None."""
    if directions is None:
        learned = function.learned
        total = _learned(function, values, vectors) if learned else function.value(values, vectors)
    elif directions.shape[-3] == 1:
        total = function.first(values, vectors, directions.squeeze(-3))
    else:
        basis = vectors.unsqueeze(-3)
        turned = basis.mT @ directions @ basis
        if function.learned:
            inner = function.words(values, turned)
        else:
            inner = _Words.apply(values, turned, function)
        total = vectors @ inner @ vectors.mT
    slopes = function.slopes(values) if function.learned and directions is None else None
    simple = plain(A) and plain(total)
    if simple and not torch.is_grad_enabled():
        return symmetric_part(total)
    apply: Any = _follow_plainly if simple else _Follow.apply
    return apply(total, slopes, A, values, vectors, directions, function)


def _learned(function: MatrixFunction, values: Tensor, vectors: Tensor) -> Tensor:
    """`V f(Λ) Vᵀ`, differentiable in the parameters of the function."""
    V = function.of_group(vectors)
    images = function.scalar.derivative(function.arguments(values), 0)
    return exactly(lambda images: (V * images.unsqueeze(-2)) @ V.mH, images)


class Group(NamedTuple):
    """The eigenpairs of a group at one end of the spectrum, found without the others."""

    values: Tensor  # (*, k)
    rows: Tensor  # (*, k, n), the eigenvectors
    gap: Tensor  # (*,), the distance to the next eigenvalue, nan if that is not known
    kept: Kept  # results of the solver for the linear system


Decompose = Callable[[Tensor], tuple[Tensor, Tensor]]


def differentiable_group(
    function: MatrixFunction, A: Tensor, group: Group, decompose: Decompose
) -> Tensor:
    """`V f(Λ) Vᵀ` of a group of eigenpairs, in eager mode.

    Args:
        function: of the group, without parameters that autograd records.
        decompose: from `A` to all eigenvalues and eigenvectors, for higher derivatives.
    """
    values, rows, gap, kept = group
    whole = replace(function, k=None)  # of the values that there are
    found = symmetric_part(whole.value(values, rows.mT))
    pull = _OfGroup(function, decompose, type(kept))
    return attach_solved(pull, (found,), (values, rows, gap, *kept), A)[0]


class _OfGroup(NamedTuple):
    """The derivative of a function of a group."""

    function: MatrixFunction
    decompose: Decompose
    kind: type[Kept]
    uses_found = False

    def pull(
        self, saved: Saved, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        (A,), _, (values, rows, gap, *held), same = saved
        assert grads[0] is not None
        direction, function = symmetric_part(grads[0]), self.function
        with full_precision(A.device), OneThread(A):
            if torch.is_grad_enabled() or not plain(direction):
                all_values, vectors = self.decompose(A)
                return [_derivative(function, A, all_values, vectors, direction.unsqueeze(-3))]
            kept = self.kind(*held) if same else NOTHING
            return [_by_tangent(function, A, Group(values, rows, gap, kept), direction)]


def _by_tangent(function: MatrixFunction, A: Tensor, group: Group, direction: Tensor) -> Tensor:
    """The first derivative by the eigenpairs of the group alone, as rows."""
    whole, (values, rows, gap, kept) = replace(function, k=None), group
    x, image = whole.arguments(values), rows @ direction
    inner = whole.inner(x, image @ rows.mT)
    right = function.scalar.derivative(x, 0).unsqueeze(-1) * image
    # The linear system is that of the largest eigenvalues.
    sign = 1.0 if function.largest else -1.0
    z = sign * complement_solve(sign * A.detach(), sign * values, rows, right, kept, gap)
    return symmetric_product(inner @ rows + 2 * z, rows)


def outside(vectors: Tensor) -> Tensor:
    """The vectors `(*, n, k)` for functions of their span, whose gradients are outside of it.

    The part inside cancels, and what rounding leaves of it would be divided by differences of
    eigenvalues that nearly repeat.
    """
    fixed = vectors.detach()

    def moved(vectors: Tensor) -> Tensor:
        change = vectors - fixed
        for _ in range(2):  # the second time removes rounding of the first
            change = change - fixed @ (fixed.mH @ change)
        return fixed + change

    return exactly(moved, vectors)


class _Follow(torch.autograd.Function):
    """The symmetric part of a derivative, whose derivative in `A` is the next derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        total: Tensor,
        slopes: Tensor | None,
        A: Tensor,
        values: Tensor,
        vectors: Tensor,
        directions: Tensor | None,
        function: MatrixFunction,
    ) -> Tensor:
        return symmetric_part(total)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, A, values, vectors, directions, ctx.function = inputs
        save(ctx, A, values, vectors, directions)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (A, values, vectors, directions), _ = restored(ctx)
        needs_total, needs_slopes, needs_A, *_ = ctx.needs_input_grad
        direction: Any = symmetric_part(grads[0])
        dA, d_slopes = None, None
        with full_precision(A.device), OneThread(A):
            if needs_A:
                more = direction.unsqueeze(-3)
                more = more if directions is None else torch.cat((directions, more), -3)
                # The derivative is symmetric in all its directions, the incoming one included.
                dA = _derivative(ctx.function, A, values, vectors, more)
            if needs_slopes and torch.is_grad_enabled():
                d_slopes = _Mixed.apply(vectors.mT @ direction @ vectors, A, vectors)
        if needs_total and ctx.function.learned and directions is not None:
            direction = _Last.apply(direction, A)
        return direction, d_slopes, dA, None, None, None, None


# See `autograd/node.py`.
_follow_plainly: Any = super(torch.autograd.Function, _Follow).apply  # pyright: ignore


class _Mixed(torch.autograd.Function):
    """The gradient of the divided differences `f[λᵢ, λⱼ]` in the value, which is zero.

    Its derivative in `A` is not zero: the value changes by `Σ f[λᵢ, λⱼ] Eᵢⱼ` with the change E.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(direction: Tensor, A: Tensor, vectors: Tensor) -> Tensor:
        return torch.zeros_like(direction)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        save(ctx, *inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (direction, A, vectors), _ = restored(ctx)
        with full_precision(A.device):
            dA = symmetric_part(vectors @ (grads[0] * direction) @ vectors.mT)
        return torch.zeros_like(direction), _Last.apply(dA, A), None


class _Last(torch.autograd.Function):
    """A derivative that raises an error when it is differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, A: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "third derivatives of pmaf.spectral in reverse mode need a function without "
            "parameters that require gradients; detach the parameters, or use torch.func.jacfwd"
        )


class _Words(torch.autograd.Function):
    """The sum over all inner indices, none of whose terms is kept for the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, directions: Tensor, function: MatrixFunction) -> Tensor:
        return function.words(values, directions)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, directions, ctx.function = inputs
        save(ctx, values, directions)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (values, directions), _ = restored(ctx)
        parts = directions.unbind(-3)
        found: list[Any] = []
        with full_precision(values.device):
            for i in range(len(parts)):
                others = torch.stack((*parts[:i], grads[0], *parts[i + 1 :]), -3)
                found.append(_Words.apply(values, others, ctx.function))
        return None, torch.stack(found, -3), None


def forward(function: MatrixFunction, A: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """`V f(Λ) Vᵀ` with tangents."""
    change = vectors.mT @ symmetric_part(A) @ vectors - torch.diag_embed(values)
    total = function.value(values, vectors)
    for order in range(1, transforms_around(A) + 1):
        word = function.word(values, [change] * order)
        total = total + vectors @ word @ vectors.mT
    return symmetric_part(total)
