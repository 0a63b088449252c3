"""Differentiable solves in traces: one opaque operator around the whole recipe of a call.

In a trace there is nothing of the library but `pmaf::solve`, and `pmaf::pull`, its derivative.
Inside of the operator the call is solved as in eager mode and recorded by autograd, on copies of
its tensors, because a compiler may use their memory again. The record belongs to an empty tensor,
`seen`, which is an output of the one operator and an operand of the other: it lives as long as that
tensor, and where that has lost it, as after it was offloaded, the call is solved again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _len_torch_dispatch_stack
from torch.compiler import is_compiling

from pmaf.gradients import Gradient
from pmaf.operators import Diagonal
from pmaf.reductions.base import Found, Report
from pmaf.runtime.modes import derivatives_around, plain, require_traceable_derivatives, transformed
from pmaf.runtime.opaque import Axes, Operands, Step, led, pull, solve
from pmaf.runtime.text import decode, encode, joined
from pmaf.solvers import Solver


def is_traced(x: Tensor) -> bool:
    """Whether the call is traced, and not inside of a transform, or `x` has no numbers."""
    if is_compiling():
        return True
    return not (plain(x) or transformed()) and (
        x.is_meta or _len_torch_dispatch_stack() > 0 or isinstance(x, torch._subclasses.FakeTensor)
    )


class _Record(NamedTuple):
    """What autograd has recorded of a call."""

    leaves: list[Tensor | None]
    found: Found


@dataclass(frozen=True)
class Whole(Step):
    """A problem, with a solver and a rule, by its recipe.

    The outputs are what is found, the report if there is one, and an empty tensor.

    Attributes:
        problem: without its tensors.
        names: of the operands, those of diagonals with a star.
        recorded: which operands may need a gradient.
    """

    problem: Any
    solver: Solver
    gradient: Gradient
    names: tuple[str, ...]
    recorded: tuple[bool, ...]
    report: bool
    throw: bool

    def ended(self, problem: Any, init: Tensor | None) -> tuple[Found, Report | None]:
        """What is found, and a report if there is to be one; this is solved, and not traced."""
        raise NotImplementedError

    def posed(self, tensors: Operands) -> tuple[Any, Tensor | None]:
        """The problem with its tensors, which are not checked, and the start."""
        given: dict[str, Any] = {"init": None}
        for name, x in zip(self.names, tensors):
            assert x is not None
            given[name.lstrip("*")] = Diagonal(x) if name.startswith("*") else x
        init = given.pop("init")
        return self.problem.changed(**given), init

    # The operator.

    def run(self, tensors: Operands) -> tuple[Tensor, ...]:
        found, report, seen = self._run(tensors, self.recorded)
        outputs = self._laid_out(tuple(x.detach() for x in found))
        return *outputs, *(x.detach().clone() for x in report or ()), seen

    def _run(
        self, tensors: Operands, recorded: Sequence[bool]
    ) -> tuple[Found, Report | None, Tensor]:
        leaves = [
            x.detach().clone().requires_grad_() if needed and x is not None else x
            for x, needed in zip(tensors, recorded)
        ]
        with _Outside(any(recorded)):
            posed, init = self.posed(leaves)
            found, report = self.ended(posed, init)
        if len(found) < len(posed.shapes):
            # Nobody looks at what a short way has not found.
            found = *found, *(torch.full_like(x, torch.nan) for x in posed.blank()[len(found) :])
        seen: Any = found[0].detach().new_empty(0)
        if any(recorded):
            seen.record = _Record(leaves, found)
        return found, report, seen

    def outline(self, tensors: Operands) -> tuple[Tensor, ...]:
        posed, _ = self.posed(tensors)
        found = self._laid_out(posed.blank())
        report: tuple[Tensor, ...] = ()
        if self.report:
            dtype = torch.promote_types(found[0].dtype.to_real(), torch.float32)
            kinds = dtype, dtype, torch.int64, torch.bool
            report = tuple(found[0].new_empty(posed.batch_shape, dtype=x) for x in kinds)
        return *found, *report, found[0].new_empty(0)

    def _laid_out(self, found: Found) -> tuple[Tensor, ...]:
        """Copies in which the entries of a vector are next to each other."""
        columns = self.problem.has_several
        several = (columns and i != 1 for i in range(len(found)))
        return tuple(_copy(x.mT).mT if swap else _copy(x) for x, swap in zip(found, several))

    # Its derivative.

    def pull(
        self, tensors: Operands, seen: Tensor, grads: Operands, needs: Sequence[bool]
    ) -> list[Tensor]:
        record: _Record | None = getattr(seen, "record", None)
        if record is None or not _serves(record, tensors, needs):
            again: Any = self._run(tensors, needs)[-1]
            record = again.record
            assert record is not None
        pairs = [
            (x, dx)
            for i, (x, dx) in enumerate(zip(record.found, grads))
            # A compiler passes zeros where no gradient comes in, and kernels may need to know.
            if x.requires_grad and dx is not None and (i == 0 or bool(dx.any()))
        ]
        wanted = [x for x, needed in zip(record.leaves, needs) if needed and x is not None]
        gradients: Sequence[Tensor | None] = [None] * len(wanted)
        if pairs:
            with _Outside(False):
                outputs, incoming = zip(*pairs)
                gradients = torch.autograd.grad(
                    outputs, wanted, incoming, retain_graph=True, allow_unused=True
                )
        return [
            _copy(torch.zeros_like(x) if dx is None else dx) for x, dx in zip(wanted, gradients)
        ]

    def differentiated(
        self, tensors: Operands, grads: Operands, needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """The gradients of a trace that goes on without a compiler, to differentiate them again."""
        found, _ = self.ended(*self.posed(tensors))
        pairs = [(x, dx) for x, dx in zip(found, grads) if dx is not None and x.requires_grad]
        wanted = [x for x, needed in zip(tensors, needs) if needed and x is not None]
        outputs, incoming = zip(*pairs)
        left = iter(torch.autograd.grad(outputs, wanted, incoming, create_graph=True))
        return [next(left) if needed else None for needed in needs]

    # Both under `vmap`.

    def _led(self, tensors: Operands, axes: Axes, size: int) -> list[Tensor | None]:
        """Operands of one step for all, the mapped dimension the first of the batch."""
        one = [x if i is None or x is None else x.select(i, 0) for x, i in zip(tensors, axes)]
        problem, init = self.posed(one)
        dims = {name: d for name, (_, d) in problem.parts().items()}
        dims["init"] = problem.dims_of(init)
        names = [name.lstrip("*") for name in self.names]
        given, axes = [*tensors[: len(names)]], [*axes[: len(names)]]
        if all(i is None or name in _BESIDE for name, i in zip(names, axes)):
            # The problem is the same one each time.
            x = given[0]
            assert x is not None
            given[0], axes[0] = x.expand(size, *x.shape), 0
        return led(given, axes, [dims[name] for name in names])

    def mapped(
        self, call: str, tensors: Operands, axes: Axes, size: int
    ) -> tuple[list[Tensor], tuple[int | None, ...]]:
        outputs = solve(call, *self._led(tensors, axes, size))
        return outputs, (*(0,) * (len(outputs) - 1), None)

    def pulled(
        self,
        call: str,
        operands: tuple[Operands, Tensor, Operands, Sequence[bool]],
        axes: tuple[Axes, int | None, Axes],
        size: int,
    ) -> list[Tensor]:
        (tensors, seen, grads, needs), (own, _, over) = operands, axes
        if all(i is None for i in own):
            # Several gradients of one solve.
            each = [
                [dx if i is None or dx is None else dx.select(i, k) for dx, i in zip(grads, over)]
                for k in range(size)
            ]
            found = [pull(call, tensors, seen, one, needs) for one in each]
            return [torch.stack(parts) for parts in zip(*found)]
        given, places = [*tensors], [*own]
        for k, (x, needed) in enumerate(zip(tensors, needs)):
            if needed and x is not None and places[k] is None:
                given[k], places[k] = x.expand(size, *x.shape), 0
        moved = self._led(given, places, size)
        incoming = [
            dx if dx is None else dx.expand(size, *dx.shape) if i is None else dx.movedim(i, 0)
            for dx, i in zip(grads, over)
        ]
        found = pull(call, moved, seen, incoming, needs)
        shapes = [
            x.movedim(i, 0).shape
            for x, i, needed in zip(given, places, needs)
            if needed and x is not None and i is not None
        ]
        return [dx.reshape(shape) for dx, shape in zip(found, shapes)]


# Tensors that do not decide the shape of a batch, and have no gradient.
_BESIDE = ("reference", "init")


def _serves(record: _Record, tensors: Operands, needs: Sequence[bool]) -> bool:
    """Whether the gradients of these tensors follow from a record."""
    return all(
        x is None or not needed or (known is not None and known.shape == x.shape)
        for x, known, needed in zip(tensors, record.leaves, needs)
    )


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


class _Outside:
    """A context inside of an operator in which torch works as outside of it.

    Around the operators of a compiled graph, torch leaves out autograd, and sometimes more: what
    conjugates lazily, and the transforms of `torch.func`.
    """

    def __init__(self, records: bool) -> None:
        self.records = records

    def __enter__(self) -> None:
        included = torch._C._dispatch_tls_local_include_set()
        self.keys = torch._C._ForceDispatchKeyGuard(included, _AUTOCAST)
        self.keys.__enter__()
        self.before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self.records)

    def __exit__(self, *error: Any) -> None:
        torch._C._set_grad_enabled(self.before)
        self.keys.__exit__(*error)


# Outside of all contexts, autocast alone is left out.
_AUTOCAST = DispatchKeySet.from_raw_repr(0)
for _name, _key in DispatchKey.__members__.items():
    if _name.startswith("Autocast"):
        _AUTOCAST = _AUTOCAST.add(_key)


class Traced(torch.autograd.Function):
    """The operator with its derivative."""

    generate_vmap_rule = True

    # torch.compile recognises a forward without ctx by its number of arguments: *args fails.
    @staticmethod
    def forward(
        call: str,
        count: int,
        a: Tensor,
        b: Tensor | None,
        c: Tensor | None,
        d: Tensor | None,
        e: Tensor | None,
        f: Tensor | None,
    ) -> tuple[Tensor, ...]:
        return (*solve(call, a, b, c, d, e, f),)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, ctx.count, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[ctx.count :])
        ctx.save_for_backward(*tensors, output[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, seen = ctx.saved_tensors
        needs, grads = [*ctx.needs_input_grad[2:]], grads[: ctx.count]
        if torch.is_grad_enabled() and not is_compiling():
            return None, None, *decode(ctx.call).differentiated(tensors, grads, needs)
        left = iter(pull(ctx.call, tensors, seen, grads, needs))
        return None, None, *(next(left) if needed else None for needed in needs)


_MOST = 6  # tensors of a call


def attach_traced(
    kind: type[Whole],
    problem: Any,
    solver: Solver,
    gradient: Gradient,
    init: Tensor | None,
    report: bool,
    throw: bool,
) -> tuple[Found, Report]:
    """Solve a problem by one operator, differentiably in its tensors."""
    require_traceable_derivatives()
    differentiated = is_compiling() and derivatives_around() > 0
    records = torch.is_grad_enabled()
    names, tensors, recorded = [], [], []
    for name, part in (*problem.named.items(), ("init", init)):
        diagonal = isinstance(part, Diagonal)
        x: Any = part.d if diagonal else part
        if isinstance(x, Tensor):
            needed = name not in _BESIDE and (differentiated or (records and x.requires_grad))
            names.append("*" + name if diagonal else name)
            # A trace of `torch.func.grad` takes the very tensor that is differentiated for a
            # constant of a `Function`; it follows a view of it.
            tensors.append(x.view_as(x) if is_compiling() else x)
            recorded.append(needed)
    call = joined(
        kind.kind,
        problem=problem.encoded(),
        solver=encode(solver),
        gradient=encode(gradient),
        names=repr(tuple(names)),
        recorded=repr(tuple(recorded)),
        report=repr(report),
        throw=repr(throw),
    )
    count = problem.parts_found
    outputs = Traced.apply(call, count, *tensors, *(None,) * (_MOST - len(tensors)))
    assert outputs is not None
    found, known = outputs[:count], outputs[count:-1]
    # Without a report, nobody looks at it.
    return found, Report(*(known if report else outputs[-1:] * 4))
