"""Differentiable solves on tensors: an opaque operator inside a `Function`.

No single mechanism of PyTorch supports all transforms. An operator with a registered derivative
breaks `torch.func`, and a `Function` with a `jvp` breaks `torch.compile`. An operator without
derivatives works with both, inside a `Function` whose backward pass consists of differentiable
operations. The operator contains loops that depend on data, warnings and checks. In eager mode the
solver is called directly, because the dispatch of an operator takes time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from pmaf import errors
from pmaf.gradients import Gradient, Implicit
from pmaf.gradients.base import Reverse
from pmaf.linalg.roundings import OutOfRangeError
from pmaf.native import Gradients
from pmaf.runtime.log import took
from pmaf.runtime.modes import full_precision, plain
from pmaf.runtime.saved import restored, save
from pmaf.runtime.text import decode, encode
from pmaf.runtime.threads import OneThread
from pmaf.solution import announce, warn_of_gradient
from pmaf.solvers import Outcome, Solver
from pmaf.tangent.bordered import State
from pmaf.tangent.kept import NOTHING, RETURNED, Basis, Factor, Kept


def attach(
    problem: Any,
    init: Tensor | None,
    solver: Solver,
    gradient: Gradient,
    report: bool,
    throw: bool,
) -> Outcome:
    """Solve a problem of one or two tensors, differentiably in them."""
    tensors = problem.tensors
    aside: list[Outcome] | None = [] if all(plain(x) for x in tensors) else None
    # In a trace no argument may contain tensors.
    posed = problem if aside is not None else problem.bare()
    if aside is None and is_compiling():
        # A trace of `torch.func.grad` takes the very tensor that is differentiated for a constant
        # of a `Function`; it follows a view of it.
        tensors = tuple(x.view_as(x) for x in tensors)
    apply = Solve.apply if aside is None else _apply_plainly
    found = apply(*(*tensors, None)[:2], init, posed, solver, gradient, report, throw, aside)
    if aside:
        return aside[0]._replace(value=found[0], multiplier=found[1])
    return Outcome.of(found[:6])


def solve_opaquely(
    problem: Any, init: Tensor | None, solver: Solver, report: bool, throw: bool
) -> Outcome:
    """Solve by the opaque operator, without derivatives."""
    tensors = (*problem.tensors, None)[:2]
    texts = problem.encoded(), encode(solver)
    return _outcome(problem, solver, torch.ops.pmaf.solve(*tensors, init, *texts, report, throw))


def find(problem: Any, init: Tensor | None, solver: Solver, report: bool, throw: bool) -> Outcome:
    """Run the solver, and warn of entries that did not converge."""
    first = problem.first
    if init is not None:
        errors.require_finite(init=(init, problem.start_dims))
    with full_precision(first.device), OneThread(first):
        outcome = problem.finished(problem.solved_by(solver, init, report))
    if problem.may_fail(solver):
        announce(outcome, solver, throw, problem.advice(solver))
    return outcome


@torch.library.custom_op(
    "pmaf::solve",
    mutates_args=(),
    schema="(Tensor first, Tensor? second, Tensor? init, str problem, str solver, bool report, "
    "bool throw) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _solve_op(
    first: Tensor,
    second: Tensor | None,
    init: Tensor | None,
    problem: str,
    solver: str,
    report: bool,
    throw: bool,
) -> tuple[Tensor, ...]:
    method: Solver = decode(solver)
    posed = decode(problem).with_tensors(*_given(first, second))
    try:
        outcome = find(posed, init, method, report, throw)
    except OutOfRangeError as found:
        outcome = find(posed.divided(found.unit), init, method, report, throw)
        outcome = posed.multiplied(outcome, found.unit)
    return _owned(outcome, method.keeps(posed))


def _owned(outcome: Outcome, kind: type[Kept]) -> tuple[Tensor, ...]:
    """The tensors of an outcome, contiguous, none of which shares memory with another.

    The outputs of an operator may not share memory, neither with each other nor with its
    inputs, and a compiler may write into them: so they must not be cached tensors either. An
    eigenbasis or a factor is large and belongs to this outcome alone; everything else is cloned.
    Tensors that the fake kernel does not return are left out.
    """
    kept = outcome.kept
    copies = [x.clone(memory_format=torch.contiguous_format) for x in outcome.tensors]
    held: Any = kept if isinstance(kept, kind) and kind in RETURNED else ()
    large = [x.contiguous() if i == 0 else x.clone() for i, x in enumerate(held)]
    return *copies, *large, *(copies[0].new_empty(0) for _ in range(2 - len(large)))


@_solve_op.register_fake
def _solve_fake(
    first: Tensor,
    second: Tensor | None,
    init: Tensor | None,
    problem: str,
    solver: str,
    report: bool,
    throw: bool,
) -> tuple[Tensor, ...]:
    posed = decode(problem).with_tensors(*_given(first, second))
    batch, n, vectors = posed.batch_shape, posed.n, posed.vectors
    row = first.new_empty(batch)
    kind = decode(solver).keeps(posed)
    held: list[Tensor] = []
    if kind is Factor:
        held = [first.new_empty((*batch, n, n))]
    elif kind in RETURNED:
        rows = (*posed.basis_batch, posed.rank)
        held = [first.new_empty((*rows, n)), first.new_empty(rows)]
    return (
        first.new_empty((*batch, *vectors, n)),
        first.new_empty((*batch, *vectors)),
        row,
        torch.empty_like(row),
        torch.empty_like(row, dtype=torch.int64),
        torch.empty_like(row, dtype=torch.bool),
        *held,
        *(first.new_empty(0) for _ in range(2 - len(held))),
    )


@_solve_op.register_vmap
def _solve_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    *tensors, problem, solver, report, throw = args
    axes, bare = list(in_dims[:3]), decode(problem)
    if axes[0] is None:
        solver = encode(decode(solver).for_shared_matrix())
    if axes[0] is None and axes[1] is None:
        # Mapped over init alone: the problem is the same one each time.
        last = 0 if tensors[1] is None else 1
        tensors[last] = tensors[last].expand(info.batch_size, *tensors[last].shape)
        axes[last] = 0
    own = (*(*bare.inputs.values(), 0)[:2], bare.start_dims)
    rank = max(
        x.dim() - dims - (axis is not None)
        for x, axis, dims in zip(tensors, axes, own)
        if x is not None
    )

    def lead(x: Tensor | None, axis: int | None, dims: int) -> Tensor | None:
        """Move the mapped dimension to the front of all batch dimensions."""
        if x is None or axis is None:
            return x
        x = x.movedim(axis, 0)
        missing = rank - (x.dim() - dims - 1)
        return x.reshape(x.shape[0], *(1,) * missing, *x.shape[1:])

    first, second, init = (lead(x, axis, dims) for x, axis, dims in zip(tensors, axes, own))
    assert first is not None
    posed = bare.with_tensors(*_given(first, second))
    outputs = torch.ops.pmaf.solve(first, second, init, problem, solver, report, throw)
    kind = decode(solver).keeps(posed)
    mapped = kind is not Basis or len(posed.basis_batch) == len(posed.batch_shape)
    held = tuple(0 if mapped and x.numel() and x.dim() > 1 else None for x in outputs[6:])
    return outputs, (*(0,) * 6, *held)


class Solve(torch.autograd.Function):
    """The differentiable solve."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        first: Tensor,
        second: Tensor | None,
        init: Tensor | None,
        problem: Any,
        solver: Solver,
        gradient: Gradient,
        report: bool,
        throw: bool,
        aside: list[Outcome] | None,
    ) -> tuple[Tensor, ...]:
        if aside is None:
            texts = problem.encoded(), encode(solver)
            return torch.ops.pmaf.solve(first, second, init, *texts, report, throw)
        if not aside:
            aside.append(find(problem, init, solver, report, throw))
        # Outputs without derivatives need not pass through the node.
        return aside[0].value.contiguous(), aside[0].multiplier

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        first, second, _, ctx.problem, solver, ctx.gradient, _, _, aside = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:])
        ctx.doubtful = None
        if aside:
            found = aside[0]
            # A search by products that has not converged may have no correct digits.
            ctx.doubtful = found.converged.logical_not() if solver.matrix_free else None
        else:
            found = _outcome(ctx.problem, solver, output)
        # Compiled kernels differentiate once, by the implicit rule, in eager mode.
        ctx.compiled = aside is not None and isinstance(ctx.gradient, Implicit)
        ctx.kind = type(found.kept)
        kept = (*found.kept, None, None)[:2]
        save(ctx, first, second, output[0], output[1], found.gap, *kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        v, d_multiplier = grads[:2]
        if v is None and d_multiplier is None:
            return (None,) * 9
        if ctx.doubtful is not None:
            warn_of_gradient(ctx.doubtful)
        (first, second, y, multiplier, gap, *parts), same = restored(ctx)
        tensors, problem = _given(first, second), ctx.problem
        needs = ctx.needs_input_grad[: len(tensors)]
        kept = ctx.kind(*_given(*parts)) if same else problem.kept_again(tensors, ctx.kind)
        state = State(multiplier, gap, kept)
        given = Reverse(tensors, y, state, ctx.gradient, v, d_multiplier, needs)
        if ctx.compiled and not torch.is_grad_enabled():
            incoming = d_multiplier if v is None else v
            known = incoming is not None and plain(incoming)
            if known and problem.is_differentiated(tensors, kept, d_multiplier):
                compiled = problem.first_gradients(tensors, y, kept, v, d_multiplier, needs)
                found = _completed(problem, given, compiled)
                return *found, *(None,) * (9 - len(found))
        with full_precision(first.device), OneThread(first):
            found = problem.gradients(given)
        summed = (
            dx if dx is None or dx.shape == x.shape else dx.sum_to_size(x.shape)
            for dx, x in zip(found, tensors)
        )
        return *(*summed, None)[:2], *(None,) * 7


def _completed(problem: Any, given: Reverse, found: Gradients) -> tuple[Tensor | None, ...]:
    """The gradients of kernels, and those of the common path for entries in which they failed."""
    gradients, failed = found
    if failed is not None:
        took("tangent: common path for some")
        first = given.tensors[0]
        with full_precision(first.device), OneThread(first):
            others = problem.gradients(given.entries(failed))
        for whole, part in zip(gradients, others):
            if whole is not None:
                whole[failed] = part
    return gradients


class Found(torch.autograd.Function):
    """A solution that compiled kernels have found already, in eager mode.

    Several vectors are columns, as the user sees them. The derivative is that of `Solve`, in fewer
    steps: for a small matrix these take most time. Kernels differentiate it, too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        first: Tensor,
        second: Tensor | None,
        found: tuple[Tensor, Tensor],
        kept: Kept,
        problem: Any,
    ) -> Any:
        ctx.set_materialize_grads(False)
        if second is not None or kept:
            save(ctx, first, *found, second, *kept)
            ctx.kind = type(kept)
        else:  # the backward pass starts anew
            save(ctx, first, *found)
        ctx.problem = problem
        return found

    @staticmethod
    def backward(ctx: Any, v: Tensor | None, d_multiplier: Tensor | None) -> Any:  # pyright: ignore
        (first, y, multiplier, *others), same = restored(ctx)
        incoming = d_multiplier if v is None else v
        if incoming is None:
            return (None,) * 5
        problem, tensors, kept, needs = ctx.problem, (first,), NOTHING, _ONE
        if others:
            second, *parts = others
            if second is not None:
                tensors, needs = (first, second), ctx.needs_input_grad[:2]
            kept = ctx.kind(*parts) if same else problem.kept_again(tensors, ctx.kind)
        if y.dim() == first.dim():  # several vectors
            y, v = y.mT, None if v is None else v.mT
        compiled = None
        if not torch.is_grad_enabled() and plain(incoming):
            compiled = problem.first_gradients(tensors, y, kept, v, d_multiplier, needs)
            gradients, failed = compiled
            if failed is None:
                return gradients[0], gradients[1] if len(tensors) > 1 else None, None, None, None
        gap = multiplier.new_full(first.shape[:-2], torch.nan)
        state = State(multiplier, gap, kept)
        given = Reverse(tensors, y, state, _IMPLICIT, v, d_multiplier, needs)
        if compiled is not None:
            found = _completed(problem, given, compiled)
        else:
            with full_precision(first.device):
                found = problem.gradients(given)
        return *(*found, None)[:2], None, None, None


_IMPLICIT = Implicit()
_ONE = (True,)  # one matrix, which needs a gradient
# `Function.apply` binds the arguments to the signature of `forward`, to fill in defaults, and looks
# for the wrappers of transforms. In eager mode both are unnecessary, and take as long as the
# decomposition of a small matrix. So these are the methods of the base class of `Function`.
_apply_plainly: Any = super(torch.autograd.Function, Solve).apply  # pyright: ignore
attach_found: Any = super(torch.autograd.Function, Found).apply  # pyright: ignore
# In the same way, the node of the graph looks for a `backward` or a `vjp` in each backward pass.
Found._backward_cls.apply = Found.backward  # pyright: ignore


def attach_some(
    tensors: tuple[Tensor, Tensor | None],
    found: tuple[Tensor, Tensor],
    kept: Kept,
    problem: Any,
    failed: Tensor,
    solve: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """The same where kernels have failed in some entries, which `solve` finds, differentiably."""
    good = ~failed
    first, second = (None if x is None else x[good] for x in tensors)
    parts = tuple(x[good] for x in found)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        kind: Any = type(kept)
        rest = kind(*(None if x is None else x[good] for x in kept))
        parts = attach_found(first, second, parts, rest, problem)
    others = solve(*(x[failed] for x in _given(*tensors)))
    vectors, values = (
        whole.index_put((good,), part).index_put((failed,), other)
        for whole, part, other in zip(found, parts, others)
    )
    return vectors, values


def _outcome(problem: Any, solver: Solver, output: tuple[Tensor, ...]) -> Outcome:
    """The outputs of the opaque operator as an `Outcome`."""
    kind = solver.keeps(problem)
    kept = kind(*output[6 : 6 + len(kind._fields)]) if kind in RETURNED else NOTHING
    return Outcome.of(output[:6], kept)


def _given(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(x for x in tensors if x is not None)
