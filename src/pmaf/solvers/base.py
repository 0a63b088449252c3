"""What a solver is, what it returns, and how it crosses into an opaque operator."""

from __future__ import annotations

import ast
import functools
import math
import numbers
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor


class Outcome(NamedTuple):
    """What a solver found, one row per batch entry, on the unit sphere."""

    value: Tensor
    multiplier: Tensor
    residual: Tensor
    gap: Tensor
    iterations: Tensor
    converged: Tensor
    # (*, p, n) and (*, p): the eigenbasis of the Hessian if the solver `keeps_basis`, else p = 0;
    # (*, n, n) and (*, 0): a triangular factor of it instead.
    basis: Tensor
    spread: Tensor


def owned(outcome: Outcome) -> tuple[Tensor, ...]:
    """The tensors of an outcome, contiguous, none of which shares memory with another.

    The outputs of an operator may not share memory, neither with each other nor with its
    inputs, and a compiler may write into them: so they must not be remembered tensors either.
    Solvers make what is large, the basis, for the outcome alone; everything else is cloned.
    """
    *small, basis, spread = outcome
    large = basis.contiguous() if basis.numel() else basis.new_empty(basis.shape)
    copies = [x.clone(memory_format=torch.contiguous_format) for x in (*small, spread)]
    return *copies[:-1], large, copies[-1]


@dataclass(frozen=True)
class Configured:
    """A frozen bag of options that can be written as text and read back.

    A traced solve runs inside an opaque PyTorch operator, whose arguments are tensors,
    numbers and strings. A solver travels there as text, which also survives `torch.export`
    and a fresh process: the qualified name of its class, and its options.

    A class that is defined again, as in a notebook cell that runs twice, gets a name of its
    own, so that each instance comes back as what it was.
    """

    _kinds: ClassVar[dict[str, type[Configured]]] = {}
    kind: ClassVar[str]  # the name of the class in texts

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = f"{cls.__module__}.{cls.__qualname__}"
        version = sum(known.partition("@")[0] == name for known in Configured._kinds)
        cls.kind = f"{name}@{version + 1}" if version else name
        Configured._kinds[cls.kind] = cls

    def __post_init__(self) -> None:
        # Written once, here: under torch.compile with dynamic shapes the numbers in it may
        # turn symbolic, and then there is nothing to write.
        try:
            text = repr(_written(self))
        except TypeError as error:
            text, reason = None, str(error)
            object.__setattr__(self, "unwritten", reason)
        object.__setattr__(self, "text", text)

    # Of each instance; not fields, so neither compared nor printed.
    text: ClassVar[str | None]
    unwritten: ClassVar[str]


class Solver(Configured):
    """A way to solve a problem. Subclasses implement `solve` and name what they serve."""

    serves: ClassVar[tuple[str, ...]] = ()  # names of problem classes
    keeps_basis: ClassVar[bool] = False  # whether outcomes carry an eigenbasis
    keeps_factor: ClassVar[bool] = False  # whether they carry a factor in its place
    unrollable: ClassVar[bool] = False  # whether autograd can follow its iterations
    matrix_free: ClassVar[bool] = False  # whether products with the matrix are all it needs
    certain: ClassVar[bool] = False  # whether it always converges, on a symmetric matrix

    def solve(self, problem: Any, *, init: Tensor | None = None, report: bool = True) -> Outcome:
        """Solve every batch entry; `report=False` leaves out what only a report needs."""
        raise NotImplementedError

    def resolve(self, problem: Any) -> Solver:
        """The solver that does the work; itself, unless it stands for others."""
        return self

    def any_scale(self, problem: Any) -> bool:
        """Whether it copes with entries whose squares leave the range of the dtype."""
        return False

    def sharing(self) -> Solver:
        """The solver to use instead where many problems share one matrix."""
        return self

    def advice(self) -> str:
        """What to try when this solver did not converge."""
        return "try Auto()"


def encode(solver: Configured) -> str:
    """A solver as text: a literal, in which each class is named."""
    if solver.text is None:
        raise TypeError(
            f"{solver!r} cannot be traced, transformed or exported: {solver.unwritten}; "
            "make its options numbers, strings, or sequences of them, or call it in eager mode"
        )
    return solver.text


# The key under which the name of a class stands beside its options, which are identifiers.
_KIND = "class"


def _written(x: Any) -> Any:
    """The same with literals only; a bag of options becomes a dictionary."""
    if isinstance(x, Configured):
        names = type(x).__match_args__  # pyright: ignore[reportAttributeAccessIssue]
        return {_KIND: x.kind, **{name: _written(getattr(x, name)) for name in names}}
    if isinstance(x, (tuple, list)):
        return type(x)(_written(item) for item in x)
    if x is None or isinstance(x, (bool, str)):
        return x
    if isinstance(x, numbers.Integral):  # NumPy's numbers print as calls
        return int(x)
    if isinstance(x, numbers.Real) and not math.isnan(x):
        return _Number(x)
    raise TypeError(f"{x!r} has no literal")


class _Number(float):
    """A number that is written so that it can be read: infinity has no literal."""

    def __repr__(self) -> str:
        if math.isinf(self):
            return "1e999" if self > 0 else "-1e999"
        return float.__repr__(self)


@functools.lru_cache(maxsize=256)
def decode(text: str) -> Any:
    """The solver that `encode` wrote."""
    return _read(ast.literal_eval(text))


def _read(x: Any) -> Any:
    if isinstance(x, dict):
        options = {name: _read(value) for name, value in x.items() if name != _KIND}
        return _class_named(x[_KIND])(**options)
    return type(x)(_read(item) for item in x) if isinstance(x, (tuple, list)) else x


def _class_named(kind: str) -> type[Configured]:
    # In a fresh process a class that had been defined twice is defined once.
    for name in (kind, kind.partition("@")[0]):
        if name in Configured._kinds:
            return Configured._kinds[name]
    raise LookupError(
        f"the solver class {kind} is not defined here; import its module before running the program"
    )
