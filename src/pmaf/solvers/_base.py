"""What a solver is, what it returns, and how it crosses into an opaque operator."""

from __future__ import annotations

import ast
import functools
import math
import numbers
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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


@dataclass(frozen=True)
class Configured:
    """A frozen bag of options that can be written as text and read back.

    The solve runs inside an opaque PyTorch operator, whose arguments are tensors,
    numbers and strings. A solver travels there as the expression that builds it, which
    also survives `torch.export` and a fresh process.
    """

    _kinds: ClassVar[dict[str, type[Configured]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Configured._kinds[cls.__name__] = cls

    def __post_init__(self) -> None:
        # Written once, here: under torch.compile with dynamic shapes the numbers in it may
        # turn symbolic, and then there is nothing to write.
        object.__setattr__(self, "text", _write(self))

    text: ClassVar[str]  # of each instance; not a field, so neither compared nor printed


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
    """A solver as text, the expression that builds it."""
    return solver.text


def _write(x: Any) -> str:
    if isinstance(x, Configured):
        names = type(x).__match_args__  # pyright: ignore[reportAttributeAccessIssue]
        options = ", ".join([f"{name}={_write(getattr(x, name))}" for name in names])
        return f"{type(x).__name__}({options})"
    # NumPy's numbers print as calls, and infinity has no literal.
    if isinstance(x, numbers.Integral) and not isinstance(x, bool):
        return repr(int(x))
    if isinstance(x, numbers.Real) and not isinstance(x, bool):
        return "1e999" if x == math.inf else repr(float(x))
    return repr(x)


@functools.lru_cache(maxsize=256)
def decode(text: str) -> Any:
    """The solver that `encode` wrote: calls of known classes with literal arguments."""
    return _build(ast.parse(text, mode="eval").body)


def _build(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        kind = Configured._kinds[node.func.id]
        return kind(**{str(item.arg): _build(item.value) for item in node.keywords})
    return ast.literal_eval(node)
