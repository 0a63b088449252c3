"""Recipes: the way from a call to a solver and back, found once for a signature.

A signature is everything about a call except its numbers: the problem, shapes and dtypes, options,
the solver and the rule of the gradient. The recipe is a chain of reductions, each of which turns a
problem into an equivalent one, and an executor at its end. It is cached, and holds no tensor.

There are recipes for what compiled kernels solve. Everything else takes the common path
(`Problem.run`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pmaf import errors
from pmaf.executors.base import Executor
from pmaf.gradients import Gradient, Implicit
from pmaf.reductions.base import Found, Reduction, Tensors
from pmaf.runtime.modes import forward_mode, plain
from pmaf.solvers import Auto, Solver


class Recipe(NamedTuple):
    """The way of all calls with one signature."""

    steps: tuple[Reduction, ...]
    executor: Executor

    def __str__(self) -> str:
        words = [step.words for step in self.steps]
        return "\n".join([*(x for x in words if x), self.executor.words])

    def run(self, given: Tensors) -> Found | None:
        """The solution and its multiplier; None where the numbers need the common path."""
        steps, tensors = self.steps, given
        if not steps:
            return self.executor.solve(tensors)
        for step in steps:
            tensors = step.apply(tensors)
        found = self.executor.solve(tensors)
        if found is None:
            return None
        for step in reversed(steps):
            found = step.back(found, given)
        return found


def solve_shortly(
    way: Callable[..., Recipe | None],
    given: Tensors,
    options: tuple[Any, ...],
    solver: Solver | None,
    gradient: Gradient | None,
) -> Found | None:
    """The solution of a problem and its multiplier by a recipe; None if the call has none.

    Args:
        way: finds the recipe, given the tensors by name, without numbers, and the options.
        given: the tensors of the call by name; those that are optional may be None.
        options: what else the problem consists of.
    """
    forms = []
    for x in given.values():
        if x is None:
            forms.append(None)
        elif isinstance(x, Tensor):
            # Asked first, so that a trace compares no sizes.
            if not plain(x) or not x.is_cpu or x.layout is not _STRIDED:
                return None
            forms.append(_named(Form, (x.shape, x.dtype)))
        elif type(x) in _RULES:
            forms.append(x)
        else:
            return None
    if forward_ad._current_level >= 0 and forward_mode(*given.values()):
        return None
    try:
        recipe = _recipe(way, solver, gradient, (*given,), *options, *forms)
    except TypeError:  # an argument that cannot be hashed, of which the common path complains
        return None
    if recipe is None:
        return None
    start = given["init"]
    if start is not None and not math.isfinite(float(start.detach().sum())):
        return None  # the common path says what is wrong
    return recipe.run(given)


_STRIDED = torch.strided
_RULES = (int, float, str)  # what may stand for a tensor: a rule for signs, or a radius


class Form(NamedTuple):
    """What a recipe may depend on of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


# The constructor of a named tuple is a function of Python, in which this is the only line.
_named = tuple.__new__


# Typed, because True is equal to 1, and is no integer here.
@functools.lru_cache(maxsize=1024, typed=True)
def _recipe(
    way: Any, solver: Any, gradient: Any, names: tuple[str, ...], *others: Any
) -> Recipe | None:
    """The recipe for a signature: options, then forms by names."""
    errors.refuse_trace()  # the sizes in a trace of TorchScript are tensors, which are in no cache
    if not isinstance(solver, (Auto, type(None))):
        return None
    if not isinstance(gradient, (Implicit, type(None))):
        return None
    count = len(names)
    options, forms = others[:-count], others[-count:]
    tensors = {
        name: torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Form) else x
        for name, x in zip(names, forms)
    }
    try:
        return way(tensors, *options)
    except (TypeError, ValueError):  # the common path raises it for the tensors themselves
        return None
