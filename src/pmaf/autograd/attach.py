"""Differentiable solves on tensors in transforms: an opaque operator in a `Function`.

No single mechanism of PyTorch supports all transforms. An operator with a registered derivative
breaks `torch.func`, and a `Function` with a `jvp` breaks `torch.compile`. An operator without
derivatives works with both, inside a `Function` whose backward pass consists of differentiable
operations. The operator contains loops that depend on data, warnings and checks. In eager mode
(`eager.py`) there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from pmaf.autograd.eager import attach_eagerly, find_in_range
from pmaf.gradients import Gradient
from pmaf.gradients.base import Reverse
from pmaf.runtime.modes import full_precision, plain
from pmaf.runtime.opaque import Axes, Operands, Step, led, solve
from pmaf.runtime.saved import restored, save
from pmaf.runtime.text import encode, joined
from pmaf.runtime.threads import OneThread
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
    if all(plain(x) for x in tensors):
        return attach_eagerly(problem, init, solver, gradient, report, throw)
    if is_compiling():
        # A trace of `torch.func.grad` takes the very tensor that is differentiated for a constant
        # of a `Function`; it follows a view of it.
        tensors = tuple(x.view_as(x) for x in tensors)
    # In a trace no argument may contain tensors.
    posed = problem.with_tensors(*(None for _ in tensors))
    found = Solve.apply(*(*tensors, None)[:2], init, posed, solver, gradient, report, throw)
    return Outcome.of(found[:6])  # pyright: ignore[reportIndexIssue]


def solve_opaquely(
    problem: Any, init: Tensor | None, solver: Solver, report: bool, throw: bool
) -> Outcome:
    """Solve by the opaque operator, without derivatives."""
    tensors = (*problem.tensors, None)[:2]
    call = Search.text(problem, solver, report, throw)
    return _outcome(problem, solver, solve(call, *tensors, init))


@dataclass(frozen=True)
class Search(Step):
    """A solver on a problem; the outputs are the tensors of an `Outcome`, and what it has kept."""

    problem: Any
    solver: Solver
    report: bool
    throw: bool

    @classmethod
    def text(cls, problem: Any, solver: Solver, report: bool, throw: bool) -> str:
        options = {"problem": problem.encoded(), "solver": encode(solver)}
        return joined(cls.kind, **options, report=repr(report), throw=repr(throw))

    def _posed(self, tensors: Operands) -> Any:
        return self.problem.with_tensors(*_given(*tensors[:2]))

    def run(self, tensors: Operands) -> tuple[Tensor, ...]:
        posed, solver = self._posed(tensors), self.solver
        with full_precision(posed.device):
            outcome = find_in_range(posed, tensors[2], solver, self.report, self.throw)
        return _owned(outcome, solver.keeps(posed))

    def outline(self, tensors: Operands) -> tuple[Tensor, ...]:
        posed, first = self._posed(tensors), tensors[0]
        assert first is not None
        batch, n, vectors = posed.batch_shape, posed.length, posed.vectors
        row = first.new_empty(batch)
        kind = self.solver.keeps(posed)
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

    def mapped(
        self, call: str, tensors: Operands, axes: Axes, size: int
    ) -> tuple[list[Tensor], tuple[int | None, ...]]:
        given, axes, solver, bare = [*tensors], [*axes], self.solver, self.problem
        if axes[0] is None:
            solver = solver.for_shared_matrix()
        if axes[0] is None and axes[1] is None:
            # Mapped over init alone: the problem is the same one each time.
            last = 0 if given[1] is None else 1
            x = given[last]
            assert x is not None
            given[last], axes[last] = x.expand(size, *x.shape), 0
        given = led(given, axes, (*(*bare.inputs.values(), 0)[:2], bare.start_dims))
        posed = self._posed(given)
        outputs = solve(Search.text(bare, solver, self.report, self.throw), *given)
        kind = solver.keeps(posed)
        mapped = kind is not Basis or len(posed.basis_batch) == len(posed.batch_shape)
        held = tuple(0 if mapped and x.numel() and x.dim() > 1 else None for x in outputs[6:])
        return outputs, (*(0,) * 6, *held)


def _owned(outcome: Outcome, kind: type[Kept]) -> tuple[Tensor, ...]:
    """The tensors of an outcome, contiguous, none of which shares memory with another.

    The outputs of an operator may not share memory, neither with each other nor with its
    inputs, and a compiler may write into them: so they must not be cached tensors either. An
    eigenbasis or a factor is large and belongs to this outcome alone; everything else is cloned.
    Tensors that the outline does not have are left out.
    """
    kept = outcome.kept
    copies = [x.clone(memory_format=torch.contiguous_format) for x in outcome.tensors]
    held: Any = kept if type(kept) is kind and kind in RETURNED else ()
    large = [x.contiguous() if i == 0 else x.clone() for i, x in enumerate(held)]
    return *copies, *large, *(copies[0].new_empty(0) for _ in range(2 - len(large)))


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
    ) -> tuple[Tensor, ...]:
        return (*solve(Search.text(problem, solver, report, throw), first, second, init),)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        first, second, _, ctx.problem, solver, ctx.gradient, _, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:])
        found = _outcome(ctx.problem, solver, output)
        ctx.kind = type(found.kept)
        kept = (*found.kept, None, None)[:2]
        save(ctx, first, second, output[0], output[1], found.gap, *kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        v, d_multiplier = grads[:2]
        if v is None and d_multiplier is None:
            return (None,) * 8
        (first, second, y, multiplier, gap, *parts), same = restored(ctx)
        tensors, problem = _given(first, second), ctx.problem
        needs = ctx.needs_input_grad[: len(tensors)]
        kept = ctx.kind(*_given(*parts)) if same else problem.kept_again(tensors, ctx.kind)
        state = State(multiplier, gap, kept)
        given = Reverse(tensors, y, state, ctx.gradient, v, d_multiplier, needs)
        with full_precision(first.device), OneThread(first):
            found = problem.gradients(given)
        summed = (
            dx if dx is None or dx.shape == x.shape else dx.sum_to_size(x.shape)
            for dx, x in zip(found, tensors)
        )
        return *(*summed, None)[:2], *(None,) * 6


def _outcome(problem: Any, solver: Solver, output: Sequence[Tensor]) -> Outcome:
    """The outputs of the opaque operator as an `Outcome`."""
    kind = solver.keeps(problem)
    kept = kind(*output[6 : 6 + len(kind._fields)]) if kind in RETURNED else NOTHING
    return Outcome.of(output[:6], kept)


def _given(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(x for x in tensors if x is not None)
