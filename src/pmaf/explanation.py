"""What a call does, in plain words, from the recipe that it uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from pmaf.executors.base import Account
from pmaf.gradients import Unroll
from pmaf.layers.eigenvectors import PrincipalEigenvectors
from pmaf.layers.ied import IED, ied
from pmaf.layers.isvd import ISVD, isvd
from pmaf.layers.least_squares import SphereLeastSquares
from pmaf.layers.less import LESS, less
from pmaf.layers.nullspace import NullSpace, nullspace
from pmaf.layers.pool import PrincipalPool
from pmaf.layers.singular_vectors import PrincipalSingularVectors
from pmaf.layers.spectral_function import Spectral, SpectralFunction, spectral
from pmaf.layers.triplets import PrincipalTriplets
from pmaf.problem import Problem
from pmaf.recipe import AUTO, IMPLICIT, Recipe, short_recipe, ways_of
from pmaf.reductions.outlines import standing_for
from pmaf.runtime import ranks
from pmaf.solution import require_products_suffice, require_rules

# What a trace contains of a call.
TRACED = (
    "the whole recipe is inside of two opaque operators, pmaf::solve and pmaf::pull, and gradients "
    "are taken once only"
)
UNTRACED = "the call is left out of the trace, and runs in eager mode"
REFUSED = "an error: gradient=Unroll() runs in eager mode only"


@dataclass(frozen=True)
class Explanation:
    """What a call does, as `pmaf.explain` finds it; its text is for people.

    Attributes:
        call: the function that is called.
        steps: the reductions, in order, each from a problem to an equivalent one.
        solver: the solver at their end, and what it does.
        why: the reason for which it is this solver.
        kept: what it keeps for the backward pass.
        derivative: the rule of the gradient, and how it is computed.
        otherwise: what follows for numbers for which the solver does not suffice, which shapes do
            not tell.
        traced: what `torch.compile` sees of the call; empty unless asked for.
        layer: the layer of the problem, where it takes another way than `pmaf.solve`.
    """

    call: str
    steps: tuple[str, ...]
    solver: str
    why: str
    kept: str
    derivative: str
    otherwise: tuple[str, ...] = ()
    traced: str = ""
    layer: Explanation | None = None

    def __str__(self) -> str:
        if self.layer is None:
            return "\n".join(self._lines())
        whole = []
        for part in (self, self.layer):
            whole += [f"{part.call}:", *(f"  {line}" for line in part._lines())]
        return "\n".join(whole)

    def _lines(self) -> list[str]:
        lines = [*self.steps, self.solver, f"  why: {self.why}", f"  kept: {self.kept}"]
        lines.append(f"  gradient: {self.derivative}")
        lines += [f"  falls back to: {words}" for words in self.otherwise]
        return lines + [f"  under torch.compile: {self.traced}"] * bool(self.traced)

    def __repr__(self) -> str:
        return f"<explanation of {self.call}>\n{self}"


def explain(problem_or_layer: Any, *given: Any, traced: bool = False, **options: Any) -> Any:
    """Say in plain words which way a call takes, and why; nothing is solved.

    It looks at shapes, dtypes, devices and options, and not at numbers: tensors may be on the
    device "meta", where they count as tensors on the CPU. What depends on numbers is named as what
    the call falls back to. Calls inside of the transforms of `torch.func` and in forward mode may
    take other ways.

    Args:
        problem_or_layer: a problem, for what `pmaf.solve` does with it, and its layer if that
            takes another way; a module or a function of `pmaf`, such as `pmaf.LESS()` or
            `pmaf.ied`.
        given: the arguments of the call of a layer.
        traced: say what `torch.compile` sees of the call, too.
        options: the keywords of the call: those of the layer, or `solver`, `gradient` and `init`
            of `pmaf.solve`.

    Returns:
        An `Explanation`, for `print`.

    >>> import torch, pmaf
    >>> A = torch.empty(10, 9, 9, dtype=torch.float64, device="meta")
    >>> print(pmaf.explain(pmaf.ied, A, solver=pmaf.solvers.Dense(), reference=0))
    sign or phase of each vector -> chosen by the reference
    Dense(): decomposition
      why: it is the one that was asked for
      kept: all eigenvectors and eigenvalues
      gradient: Implicit(): the linear system at the solution, by compiled kernels if there are any
    """
    target, by_products = problem_or_layer, False
    if isinstance(target, Problem):
        found, by_products = _of_problem(target, given, options)
    elif isinstance(target, PrincipalPool):
        found, by_products = _of_pool(target, given, options)
    else:
        found, by_products = _of_layer(*_call_of(target, given, options))
    if not traced:
        return found
    words = UNTRACED if by_products else TRACED
    unrolled = isinstance(options.get("gradient", getattr(target, "gradient", None)), Unroll)
    words = REFUSED if unrolled else words
    layer = None if found.layer is None else replace(found.layer, traced=words)
    return replace(found, traced=words, layer=layer)


# Layers, the problems that they pose, and the options of these that are fixed.
_POSED: dict[Callable[..., Any], tuple[Any, dict[str, Any]]] = {
    ied: (PrincipalEigenvectors, {}),
    less: (SphereLeastSquares, {}),
    nullspace: (PrincipalSingularVectors, {"largest": False}),
    isvd: (PrincipalTriplets, {}),
    spectral: (SpectralFunction, {}),
}
_MODULES = {IED: ied, LESS: less, NullSpace: nullspace, ISVD: isvd, Spectral: spectral}
_SHORT = (
    PrincipalEigenvectors,
    SphereLeastSquares,
    PrincipalSingularVectors,
    PrincipalTriplets,
    SpectralFunction,
)


def _call_of(
    layer: Any, given: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function of a layer, and all of its arguments by name."""
    named: dict[str, Any] = {}
    call: Any = layer
    if isinstance(layer, nn.Module) and type(layer) in _MODULES:
        function = _MODULES[type(layer)]
        own = [name for name in inspect.signature(function).parameters if hasattr(layer, name)]
        named, call = {name: getattr(layer, name) for name in own}, layer.forward
    elif inspect.isfunction(layer) and layer in _POSED:
        function = layer
    else:
        got = f"the class {layer.__name__}" if isinstance(layer, type) else repr(layer)
        raise TypeError(
            "pmaf.explain takes a problem, such as pmaf.PrincipalEigenvectors(A), a module, such "
            "as pmaf.LESS(), or a function, such as pmaf.ied, and then the arguments of the call; "
            f"got {got}"
        )
    signature = inspect.signature(call)
    try:
        bound = signature.bind(*given, **options)
    except TypeError as error:
        name = layer.__name__ if call is layer else type(layer).__name__
        words = ", ".join(signature.parameters)
        raise TypeError(
            f"pmaf.explain got arguments that do not fit pmaf.{name}: {error}; pass those of the "
            f"call, {words}"
        ) from None
    bound.apply_defaults()
    named |= bound.arguments
    return function, {name: standing_for(x) for name, x in named.items()}


def _of_layer(function: Callable[..., Any], named: dict[str, Any]) -> tuple[Explanation, bool]:
    """The explanation of a call of a layer, and whether it is one by products."""
    kind, fixed = _POSED[function]
    solver, gradient, init = (named.get(x) for x in ("solver", "gradient", "init"))
    posed = {x.name: named[x.name] for x in fields(kind) if x.name in named}
    problem = kind(**posed, **fixed)
    drawn = named.get("generator") is not None
    if drawn and init is None:
        several = () if problem.k is None else (problem.k,)
        init = torch.ones((), dtype=problem.dtype, device=problem.device)
        init = init.expand(problem.n, *several)
    common = _common(problem, solver or AUTO, gradient or IMPLICIT, init)
    recipe = None
    if kind in _SHORT and not drawn:
        tensors = {name: named[name] for name in problem.named if name in named}
        recipe = _short(problem, tensors, solver, gradient, init)
    if recipe is not None:
        common = _shortened(recipe, {**problem.named, "init": init}, common)
    by_products = problem.for_solver(solver or AUTO).operator is not None
    return replace(common, call=f"pmaf.{function.__name__}"), by_products


def _of_problem(
    problem: Any, given: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Explanation, bool]:
    """The explanation of `pmaf.solve`, and whether it is a solve by products."""
    others = {*options} - {"solver", "gradient", "init"}
    if given or others:
        got = repr(min(others)) if others else f"{len(given)} more arguments"
        raise TypeError(
            "pmaf.explain takes a problem by itself, which has its tensors, with solver, gradient "
            f"and init of pmaf.solve; got {got}"
        )
    solver, gradient = options.get("solver"), options.get("gradient")
    init = standing_for(options.get("init"))
    problem = problem.changed(**{name: standing_for(x) for name, x in problem.named.items()})
    common = _common(problem, solver or AUTO, gradient or IMPLICIT, init)
    layer = None
    for function, (kind, fixed) in _POSED.items():
        if type(problem) is not kind or kind not in _SHORT:
            continue
        alike = all(getattr(problem, name) == x for name, x in fixed.items())
        recipe = _short(problem, problem.named, solver, gradient, init) if alike else None
        if recipe is not None:
            found = _shortened(recipe, {**problem.named, "init": init}, common)
            if _ways(found) != _ways(common):
                layer = replace(found, call=f"pmaf.{function.__name__}")
    by_products = problem.for_solver(solver or AUTO).operator is not None
    return replace(common, layer=layer), by_products


def _ways(found: Explanation) -> tuple[str, ...]:
    """Where explanations differ if their calls do; kernels choose signs without a step."""
    return found.solver, found.kept, found.derivative


def _short(
    problem: Any, tensors: dict[str, Any], solver: Any, gradient: Any, init: Tensor | None
) -> Recipe | None:
    """The cached recipe of a call, which a layer finds with the same arguments."""
    options = tuple(getattr(problem, name) for name in problem.options)
    return short_recipe(type(problem), {**tensors, "init": init}, options, solver, gradient)


def _shortened(recipe: Recipe, given: dict[str, Any], common: Explanation) -> Explanation:
    """The explanation of a cached recipe, which falls back to the common way."""
    found = _told(recipe, given)
    again = f"what pmaf.solve does, {common.solver}, where {recipe.executor.fails}"
    return replace(found, otherwise=(again, *common.otherwise))


def _common(problem: Any, solver: Any, gradient: Any, init: Tensor | None) -> Explanation:
    """The explanation of a solve that no cached recipe shortens."""
    require_rules(problem, solver, gradient)
    if init is not None:
        problem.require_start(init)
    problem = problem.for_solver(solver)
    if problem.operator is not None:
        if not isinstance(problem, SpectralFunction):
            require_products_suffice(problem.operator, solver.resolve(problem), gradient)
    elif any(ranks.is_spread(x) for x, _ in problem.parts().values()):
        named = {**problem.parts(), "init": (init, problem.dims_of(init))}
        parts = ranks.Parts(problem.batch_shape, named).inputs
        parts = {name: standing_for(x.detach()) for name, x in parts.items()}
        start = parts.pop("init", None)
        found = _common(problem.changed(**parts), solver, gradient, start)
        return replace(found, steps=("batch -> the part of it on each rank", *found.steps))
    elif 0 in problem.batch_shape:
        why = "the batch is empty"
        return Explanation("pmaf.solve", (), "no solver", why, "nothing", "zeros")
    recipe = ways_of(type(problem)).solved(problem, solver, gradient, init)
    return _told(recipe, {**problem.named, "init": init})


def _told(recipe: Recipe, given: dict[str, Any]) -> Explanation:
    account: Account = recipe.account(given)
    return Explanation("pmaf.solve", recipe.words, *account)


def _of_pool(
    pool: PrincipalPool, given: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Explanation, bool]:
    """The explanation of pooling, which is that of eigenvectors of moments."""
    try:
        bound = inspect.signature(pool.forward).bind(*given, **options)
    except TypeError as error:
        raise TypeError(
            f"pmaf.explain got arguments that do not fit pmaf.PrincipalPool: {error}; pass those "
            "of the call, features, weights, reference, init"
        ) from None
    bound.apply_defaults()
    weights = bound.arguments["weights"]
    blank = standing_for(weights)
    if isinstance(weights, Tensor) and weights.requires_grad:
        blank = blank.detach().requires_grad_()  # on which the path depends
    words, moments = pool.outline(standing_for(bound.arguments["features"]), blank)
    found, by_products = _of_layer(*_call_of(ied, (moments, pool.k or 1), {}))
    return replace(found, call="pmaf.PrincipalPool", steps=(words, *found.steps)), by_products
