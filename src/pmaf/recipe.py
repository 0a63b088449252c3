"""Recipes: the way from a problem to a solver and back.

A recipe is a chain of reductions, each of which turns a problem into an equivalent one, and an
executor at its end. It depends on the signature of a call, which is everything but its numbers: the
problem, shapes, dtypes and devices, options, the solver and the rule of the gradient. It holds no
tensor. Where compiled kernels solve a call, its recipe is found once and cached.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pmaf import errors
from pmaf.autograd.node import recorded_as_one
from pmaf.autograd.traced import Whole, attach_traced, is_traced
from pmaf.executors.base import Account
from pmaf.executors.direct import Direct, Ended
from pmaf.gradients import Gradient, Implicit, Unroll
from pmaf.linalg.roundings import OutOfRangeError
from pmaf.operators import Diagonal, Operator
from pmaf.reductions import outlines
from pmaf.reductions.base import Found, Reduction, Report, Tensors, brought_back, posed_by
from pmaf.reductions.precision import of_short
from pmaf.reductions.units import Units
from pmaf.runtime import precision, ranks
from pmaf.runtime.checks import looks
from pmaf.runtime.modes import forward_mode, full_precision, plain, untraced
from pmaf.runtime.text import abbreviated
from pmaf.runtime.threads import OneThread
from pmaf.solution import Solution, require_products_suffice, require_rules
from pmaf.solvers import Auto, Solver

# Created at import: constructing a solver serialises it to text, which costs more than a small
# solve.
AUTO, IMPLICIT = Auto(), Implicit()


class Recipe(NamedTuple):
    """The way of all calls with one signature."""

    steps: tuple[Reduction, ...]
    executor: Any  # of which a `Direct` solves every call, and others those that they accept

    @property
    def words(self) -> tuple[str, ...]:
        """What the steps do; those that have nothing to do for this signature are left out."""
        return tuple(step.words for step in self.steps if step.words)

    def account(self, given: Tensors) -> Account:
        """What the executor does for tensors of these shapes; no number is looked at."""
        first = next(iter(given.values()))
        if not isinstance(first, Operator):
            given = {name: outlines.without_numbers(x) for name, x in given.items()}
            for step in self.steps:
                given = step.outline(given)
            given = {name: outlines.standing_for(x, first.device) for name, x in given.items()}
        return self.executor.account(given)

    def run(self, given: Tensors) -> Found | None:
        """The solution and its multiplier; None where the executor does not solve these numbers."""
        steps = self.steps
        if not steps:
            return self.executor.solve(given)
        stages = posed_by(steps, given)
        found = self.executor.solve(stages[-1])
        return None if found is None else brought_back(steps, stages, found)

    def end(self, given: Tensors, report: bool, throw: bool) -> Ended:
        """The solution with a report, by a `Direct`."""
        steps, executor = self.steps, self.executor
        stages = posed_by(steps, given)
        try:
            ended = executor.run(stages[-1], report, throw)
        except OutOfRangeError as error:
            unit = error.unit
            more = Units(executor.problem, unit)
            steps, stages = (*steps, more), [*stages, *posed_by((more,), stages[-1])[1:]]
            ended = executor.run(stages[-1], report, throw)
        found, known, *others = ended
        for i in range(len(steps) - 1, -1, -1):
            if report:
                known = steps[i].report(known, found, stages[i], stages[i + 1])
            found = steps[i].back(found, stages[i], stages[i + 1])
        return Ended(found, known, *others)


# From a problem, a solver, a rule and a start to a recipe.
Way = Callable[[Any, Solver, Gradient, Tensor | None], Recipe]
# From a problem to the steps that change its coordinates, and to the problem in these, without its
# tensors, for which certificates are.
Change = Callable[[Any], tuple[list[Reduction], Any]]


class Place(NamedTuple):
    """Where the tensors of a call are, if not on the CPU."""

    device: torch.device
    waits: bool  # whether the host may wait for the device


# From a problem, a start and a place to the recipe of a call that has a short way there, or None:
# by compiled kernels on the CPU, where the place is None, and by straight-line programs elsewhere.
ShortWay = Callable[[Any, Tensor | None, Place | None], Recipe | None]


class Ways(NamedTuple):
    """How the recipes for a class of problems are found.

    The functions look at classes, options, shapes, dtypes and devices, never at numbers.
    """

    solved: Way
    coordinates: Change
    short: ShortWay | None = None


_WAYS: dict[type, Ways] = {}


def register(kind: type, solved: Way, coordinates: Change, short: ShortWay | None = None) -> None:
    """Say how the recipes for a class of problems, and for its subclasses, are found."""
    _WAYS[kind] = Ways(solved, coordinates, short)


def ways_of(kind: type) -> Ways:
    for base in kind.__mro__:
        if base in _WAYS:
            return _WAYS[base]
    return _DECLARED


def declared_way(problem: Any, solver: Solver, gradient: Gradient, init: Tensor | None) -> Recipe:
    """The recipe of a problem that says nothing about its way: only short dtypes are reduced."""
    return Recipe((*of_short(problem.dtype),), Direct(problem.bare(), solver, gradient))


_DECLARED = Ways(declared_way, lambda problem: ([], problem.bare()))


def run(
    problem: Any,
    solver: Solver = AUTO,
    gradient: Gradient = IMPLICIT,
    *,
    init: Tensor | None = None,
    report: bool = True,
    throw: bool = False,
) -> Solution:
    """Solve a problem with a solver, and attach a rule for the gradient."""
    ended = end(problem, solver, gradient, init=init, report=report, throw=throw)
    value, multiplier, *_ = ended.found
    known = ended.report
    return Solution(value, multiplier, *known, backward=ended.backward, method=ended.method)


def end(
    problem: Any,
    solver: Solver = AUTO,
    gradient: Gradient = IMPLICIT,
    *,
    init: Tensor | None = None,
    report: bool = True,
    throw: bool = False,
) -> Ended:
    """The same with all that was found, such as left vectors."""
    problem = problem.for_solver(solver)
    require_rules(problem, solver, gradient)
    if init is not None:
        problem.require_start(init)
        # The solution does not depend on the start, and the graph of the start is not needed.
        init = init.detach()
    if problem.operator is not None:
        return untraced(_end_by_products)(problem, solver, gradient, init, throw)
    if any(ranks.is_spread(x) for x, _ in problem.parts().values()):
        return _end_on_ranks(problem, solver, gradient, init, report, throw)
    if 0 in problem.batch_shape:
        return _end_of_nothing(problem)
    if not plain(problem.first) and _is_whole(problem, gradient):
        found, known = attach_traced(_Call, problem, solver, gradient, init, report, throw)
        return Ended(found, known, abbreviated(solver) if report else "")
    return _end_by_recipe(problem, solver, gradient, init, report, throw)


def _is_whole(problem: Any, gradient: Gradient) -> bool:
    """Whether one operator stands for the call in a trace.

    It does not where tangents are to pass, or for options that no text describes.
    """
    traced = is_traced(problem.first) and not isinstance(gradient, Unroll)
    return traced and not forward_mode(*problem.flat) and problem.is_described


class _Call(Whole):
    """A call inside of the operator that stands for it in a trace."""

    def ended(self, problem: Any, init: Tensor | None) -> tuple[Found, Report | None]:
        kind, solver, gradient = type(problem), self.solver, self.gradient
        if not self.report and ways_of(kind).short is not None:
            given = {**problem.named, "init": init}
            options = tuple(getattr(problem, name) for name in kind.options)
            recipe = short_recipe(kind, given, options, solver, gradient)
            found = None if recipe is None else recipe.run(given)
            if found is not None:
                return found, None
        checked = kind(**{field.name: getattr(problem, field.name) for field in fields(kind)})
        ended = _end_by_recipe(checked, solver, gradient, init, self.report, self.throw)
        return ended.found, ended.report if self.report else None


def _end_by_recipe(
    problem: Any, solver: Solver, gradient: Gradient, init: Tensor | None, report: bool, throw: bool
) -> Ended:
    recipe = ways_of(type(problem)).solved(problem, solver, gradient, init)
    given = {**problem.named, "init": init}
    first = next(iter(given.values()))
    with full_precision(first.device), OneThread(first):
        if precision.turn & 1 and isinstance(gradient, Unroll):
            return _end_as_node(recipe, given, report, throw)
        return recipe.end(given, report, throw)


def _end_by_products(
    problem: Any, solver: Solver, gradient: Gradient, init: Tensor | None, throw: bool
) -> Ended:
    """The solution of a problem that has an operator, on all ranks alike."""
    A, batch = problem.operator, problem.batch_shape
    require_products_suffice(A, solver.resolve(problem), gradient)
    for part in problem.tensors:
        if part is A or not isinstance(part, Tensor):
            _require_batch(part, batch)
    if 0 in batch:
        raise ValueError(f"{A!r} has an empty batch; leave the layer out where it is")
    mesh = ranks.mesh_of(*problem.flat)
    given = {**problem.named, "init": None if init is None else ranks.whole(init)}
    reference = given.get("reference")
    if isinstance(reference, Tensor):
        given["reference"] = ranks.whole(reference)
        errors.require_finite(reference=(given["reference"], 1))  # on all ranks or none
    recipe = ways_of(type(problem)).solved(problem, solver, gradient, init)
    with full_precision(problem.device):
        if recipe.steps and precision.turn & 1:
            ended = _end_as_node(recipe, given, True, throw)
        else:
            ended = recipe.end(given, True, throw)
    if mesh is None:
        return ended

    def spread(parts: Any) -> Any:
        return (ranks.replicate(x, mesh) if isinstance(x, Tensor) else x for x in parts)

    return ended._replace(found=(*spread(ended.found),), report=Report(*spread(ended.report)))


def _end_as_node(recipe: Recipe, given: Tensors, report: bool, throw: bool) -> Ended:
    """The end of a recipe whose steps autograd records, so that they are differentiated exactly.

    It is for calls in which torch may leave out digits of products: then `precision.turn` is odd.
    """
    parts = {name: x for name, x in given.items() if isinstance(x, (Tensor, Operator))}
    flat = [x.tensors if isinstance(x, Operator) else (x,) for x in parts.values()]
    ended: Any = None

    def found(*tensors: Any) -> Found:
        nonlocal ended
        left = iter(tensors)
        posed = {
            name: x.with_tensors([next(left) for _ in x.tensors])
            if isinstance(x, Operator)
            else next(left)
            for name, x in parts.items()
        }
        ended = recipe.end({**given, **posed}, report, throw)
        return ended.found

    outputs = recorded_as_one(found, [x for some in flat for x in some])
    return ended._replace(found=tuple(outputs))


def _require_batch(A: Any, batch: torch.Size) -> None:
    if A.batch_shape not in (batch, ()):
        raise ValueError(
            f"{A!r} has the batch {tuple(A.batch_shape)} and the problem {tuple(batch)}; "
            "an operator needs the whole batch, or none"
        )


def _end_on_ranks(
    problem: Any,
    solver: Solver,
    gradient: Gradient,
    init: Tensor | None,
    report: bool,
    throw: bool,
) -> Ended:
    """Every rank solves the part of the batch that it has."""
    named = {**problem.parts(), "init": (init, problem.dims_of(init))}
    parts = ranks.Parts(problem.batch_shape, named)
    start = parts.inputs.pop("init", None)
    mine = problem.changed(**parts.inputs)
    ended = end(mine, solver, gradient, init=start, report=report, throw=throw)
    known = Report(*(parts.join(x) for x in ended.report))
    return ended._replace(found=tuple(parts.join(x) for x in ended.found), report=known)


def _end_of_nothing(problem: Any) -> Ended:
    """The solution of no problems, whose gradients are zero."""
    total = sum(x.sum() for name, (x, _) in problem.parts().items() if name != "reference")
    assert isinstance(total, Tensor)
    size = torch.real(total)  # multipliers are real for complex inputs, too
    like = total, size, total
    found = tuple(x + x.new_zeros(shape) for x, shape in zip(like, problem.shapes))
    blank = size.detach().new_zeros(problem.batch_shape)
    count = blank.to(torch.int64)
    return Ended(found, Report(blank, blank.clone(), count, count.bool()))


def run_finite(
    problem: Any,
    solver: Solver,
    gradient: Gradient,
    *,
    init: Tensor | None = None,
    report: bool = True,
    throw: bool = False,
) -> Solution:
    """Solve the entries of the batch whose inputs are finite, and report nan of the others."""
    batch = problem.batch_shape
    named = {**problem.parts(), "init": (init, problem.dims_of(init))}
    whole = {
        name: x.expand(*batch, *x.shape[x.dim() - dims :])
        for name, (x, dims) in named.items()
        if x is not None
    }
    good = torch.ones(batch, dtype=torch.bool, device=problem.device)
    for x in whole.values():
        good = good & x.detach().isfinite().reshape(*batch, -1).all(-1)
    if bool(good.all()):
        return run(problem, solver, gradient, init=init, report=report, throw=throw)
    parts = {name: x[good] for name, x in whole.items()}
    start = parts.pop("init", None)
    finite = problem.changed(**parts)
    found = run(finite, solver, gradient, init=start, report=report, throw=throw)

    def spread(x: Tensor) -> Tensor:
        fill = math.nan if x.is_floating_point() or x.is_complex() else 0
        whole = x.new_full((*batch, *x.shape[1:]), fill)
        return whole.index_put((good,), x) if batch else whole

    return ranks.replace_tensors(found, spread)


# Calls that have a short way.


def short_recipe(
    kind: Any,
    given: Tensors,
    options: tuple[Any, ...],
    solver: Solver | None,
    gradient: Gradient | None,
) -> Recipe | None:
    """The cached recipe of a call by compiled kernels or a straight-line program, if it has one.

    The recipe does not run for all numbers: `Recipe.run` may return None.

    Args:
        kind: the class of the problem.
        given: its tensors and the start by name; those that are optional may be None.
        options: what else the problem consists of, in the order of `kind.options`.
    """
    forms, place = [], None
    for x in given.values():
        if x is None:
            forms.append(None)
            continue
        diagonal = type(x) is Diagonal
        if diagonal:
            x = x.d
        if isinstance(x, Tensor):
            # Asked first, so that a trace compares no sizes.
            if not plain(x) or x.layout is not _STRIDED:
                return None
            if not x.is_cpu:
                place = place or Place(x.device, looks(x))
            forms.append(_named(Form, (x.shape, x.dtype, diagonal)))
        elif type(x) in _RULES:
            forms.append(x)
        else:
            return None
    if forward_ad._current_level >= 0 and forward_mode(*given.values()):
        return None
    if place is not None and not _are_on(place.device, given):
        return None
    try:
        recipe = _recipe(kind, solver, gradient, place, (*given,), *options, *forms)
    except TypeError:  # an argument that cannot be hashed, of which the common path complains
        return None
    if recipe is None:
        return None
    start = given["init"]
    if start is not None and place is None and not math.isfinite(float(start.detach().sum())):
        return None  # the common path says what is wrong
    return recipe


def _are_on(device: torch.device, given: Tensors) -> bool:
    """Whether all tensors are on one device."""
    parts = (x.d if type(x) is Diagonal else x for x in given.values())
    return all(x.device == device for x in parts if isinstance(x, Tensor))


_STRIDED = torch.strided
_RULES = (int, float, str)  # what may stand for a tensor: a rule for signs, or a radius


class Form(NamedTuple):
    """What a recipe may depend on of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    diagonal: bool  # whether it is the diagonal of a matrix


# The constructor of a named tuple is a function of Python, in which this is the only line.
_named = tuple.__new__


# Typed, because True is equal to 1, and is no integer here.
@functools.lru_cache(maxsize=1024, typed=True)
def _recipe(
    kind: Any,
    solver: Any,
    gradient: Any,
    place: Place | None,
    names: tuple[str, ...],
    *others: Any,
) -> Recipe | None:
    """The recipe for a signature: options, then forms by names."""
    errors.refuse_trace()  # the sizes in a trace of TorchScript are tensors, which are in no cache
    if not isinstance(solver, (Auto, type(None))):
        return None
    if not isinstance(gradient, (Implicit, type(None))):
        return None
    count = len(names)
    options, forms = others[:-count], others[-count:]
    blank = {name: _blank(x) for name, x in zip(names, forms)}
    init = blank.pop("init")
    short = _WAYS[kind].short
    assert short is not None
    try:
        problem = kind(**blank, **dict(zip(kind.options, options, strict=True)))
        if init is not None:
            problem.require_start(init)
        # A diagonal matrix that is the first of the inputs is solved by products.
        return None if isinstance(problem.first, Operator) else short(problem, init, place)
    except (TypeError, ValueError):  # the common path raises it for the tensors themselves
        return None


def _blank(x: Any) -> Any:
    """A tensor without numbers in the place of a form."""
    if not isinstance(x, Form):
        return x
    blank = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return Diagonal(blank) if x.diagonal else blank
