"""How a gradient is attached to IED: an opaque operator inside an `autograd.Function`."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pmaf import errors
from pmaf.autograd.ied_rules import EigenConditions
from pmaf.gradients import Gradient, Implicit
from pmaf.linalg.products import power_of_two, square_range
from pmaf.runtime.threads import OneThread
from pmaf.solution import announce
from pmaf.solvers import Outcome, Solver
from pmaf.solvers.base import decode, encode, owned
from pmaf.tangent.bordered import Helper


def attach(
    A: Tensor,
    init: Tensor | None,
    k: int,
    symmetric: bool,
    solver: Solver,
    gradient: Gradient,
    report: bool,
    throw: bool,
) -> Outcome:
    """Solve by way of an operator, differentiably in `A`; vectors come as rows."""
    found: Any = _Ied.apply(A, init, k, symmetric, encode(solver), gradient, report, throw)
    return Outcome(*found)


@torch.library.custom_op(
    "pmaf::ied",
    mutates_args=(),
    schema="(Tensor A, Tensor? init, int k, bool symmetric, str solver, bool report, bool throw)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _ied_op(
    A: Tensor,
    init: Tensor | None,
    k: int,
    symmetric: bool,
    solver: str,
    report: bool,
    throw: bool,
) -> tuple[Tensor, ...]:
    method: Solver = decode(solver)
    outcome = solve_in_range(A, init, k, symmetric, method, report, throw)
    if not method.keeps_basis:  # a factor, of which the fake kernel knows nothing
        outcome = outcome._replace(basis=outcome.basis[..., :0, :], spread=outcome.spread[..., :0])
    return owned(outcome)


def solve_in_range(
    A: Tensor,
    init: Tensor | None,
    k: int,
    symmetric: bool,
    solver: Solver,
    report: bool,
    throw: bool,
) -> Outcome:
    """Solve in units in which no square of an entry leaves the range of the dtype."""
    try:
        return solve_as_given(A, init, k, symmetric, solver, report, throw)
    except OutOfRangeError as found:
        unit = found.unit
    scaled = A / unit[..., None, None]
    outcome = solve_as_given(scaled, init, k, symmetric, solver, report, throw)
    factor = outcome.spread.shape[-1] < outcome.basis.shape[-2]
    return outcome._replace(
        multiplier=outcome.multiplier * unit.unsqueeze(-1),
        gap=outcome.gap * unit,
        basis=outcome.basis * unit.sqrt()[..., None, None] if factor else outcome.basis,
        spread=outcome.spread * unit.unsqueeze(-1),
    )


class OutOfRangeError(Exception):
    """Squares or sums of the entries of a finite matrix leave the range of the dtype.

    Attributes:
        unit: `(*,)`, powers of two; divided by them, the largest entry is between one and two.
    """

    def __init__(self, unit: Tensor) -> None:
        super().__init__()
        self.unit = unit


def require_range(A: Tensor) -> None:
    """Squares of the entries stay in the range of the dtype; raises `OutOfRangeError` otherwise."""
    least, most = torch.linalg.vector_norm(A.detach(), dim=(-2, -1)).aminmax()
    low, high = square_range(A.dtype)
    if not (float(least) > low and float(most) < high):
        blame_range(A)


def blame_range(A: Tensor) -> None:
    """Raise what explains a result that is not finite, if `A` does."""
    errors.require_finite(A=(A, 2))
    unit = power_of_two(A.detach().abs().amax((-2, -1)))
    if (unit != 1).any():
        raise OutOfRangeError(unit)


def solve_as_given(
    A: Tensor,
    init: Tensor | None,
    k: int,
    symmetric: bool,
    solver: Solver,
    report: bool,
    throw: bool,
) -> Outcome:
    """Solve in the units of `A`; raises `OutOfRangeError` if they do not do."""
    from pmaf.layers.ied import PrincipalEigenvectors

    if init is not None:
        errors.require_finite(init=(init, 2))
    problem = PrincipalEigenvectors(A, k, symmetric=symmetric)
    if not solver.any_scale(problem):
        require_range(A)
    try:
        with full_precision(A), OneThread(A):
            outcome = solver.solve(problem, init=init, report=report)
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        blame_range(A)
        raise
    # Of matrices with infinite entries, or sums of them, LAPACK makes nothing but nan.
    if not math.isfinite(float(outcome.multiplier.sum())):
        blame_range(A)
    if not (symmetric and solver.certain):
        announce(outcome, solver, throw)
    return outcome


def full_precision(A: errors.Typed) -> AbstractContextManager[Any]:
    """Without autocast, if there is any."""
    device = A.device.type
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


@_ied_op.register_fake
def _ied_fake(
    A: Tensor,
    init: Tensor | None,
    k: int,
    symmetric: bool,
    solver: str,
    report: bool,
    throw: bool,
) -> tuple[Tensor, ...]:
    batch, n = A.shape[:-2], A.shape[-1]
    p = n if decode(solver).keeps_basis and symmetric else 0
    row = A.new_empty(batch)
    return (
        A.new_empty((*batch, k, n)),
        A.new_empty((*batch, k)),
        row,
        torch.empty_like(row),
        torch.empty_like(row, dtype=torch.int64),
        torch.empty_like(row, dtype=torch.bool),
        A.new_empty((*batch, p, n)),
        A.new_empty((*batch, p)),
    )


@_ied_op.register_vmap
def _ied_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    A, init, *rest = args
    A = A.expand(info.batch_size, *A.shape) if in_dims[0] is None else A.movedim(in_dims[0], 0)
    if init is not None and in_dims[1] is not None:
        init = init.movedim(in_dims[1], 0)
        missing = A.dim() - init.dim()
        init = init.reshape(init.shape[0], *(1,) * missing, *init.shape[1:])
    return torch.ops.pmaf.ied(A, init, *rest), (0,) * 8


class _Ied(torch.autograd.Function):
    """The differentiable solve: an opaque operator and its rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        A: Tensor,
        init: Tensor | None,
        k: int,
        symmetric: bool,
        solver: str,
        gradient: Gradient,
        report: bool,
        throw: bool,
    ) -> tuple[Tensor, ...]:
        return torch.ops.pmaf.ied(A, init, k, symmetric, solver, report, throw)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        A, _, _, ctx.symmetric, _, ctx.gradient, _, _ = inputs
        found = Outcome(*output)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(
            A, found.value, found.multiplier, found.gap, found.basis, found.spread
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 7
        v, d_values = grads[:2]
        if v is None and d_values is None:
            return None, *nothing
        A, y, values, *rest = ctx.saved_tensors
        helper = Helper(values, *rest)
        conditions = EigenConditions(A, y, values, d_values, ctx.symmetric, helper)
        with full_precision(A), OneThread(A):
            return pullback(conditions, ctx.gradient, v), *nothing


def pullback(conditions: EigenConditions, gradient: Gradient, v: Tensor | None) -> Tensor | None:
    """The gradient of `A`, given those of the vectors, or None, and of the values."""
    if isinstance(gradient, Implicit):
        return conditions.pullback(conditions.tangent_solve(v), (True,))[0]
    # One vector at a time. The value is yᵀAy, whatever rule y is differentiated by.
    A, y, d_values = conditions.A, conditions.y, conditions.d_values
    v = torch.zeros_like(y) if v is None else v
    dA = torch.zeros_like(A)
    if d_values is not None:
        weighted = d_values.unsqueeze(-1)
        v = v + weighted * (y @ A + y @ A.mT)
        dA = (weighted * y).mT @ y
    for j, column in enumerate(conditions.columns()):
        (term,) = gradient.pullback(column, v[..., j, :], (True,))
        dA = dA if term is None else dA + term
    return dA
