"""How far a call walks: calls into the library, files, and changes of file, for every layer.

    python -m tests.walk                     # the table, in Markdown
    python -m tests.walk --json FILE         # and its numbers in a file
    python -m tests.walk --compare FILE      # beside the numbers of an earlier file
    python -m tests.walk --budgets           # `BUDGETS` as this tree would have it

`BUDGETS` has one line for each call, with the numbers that `tests/test_walk.py` holds it to.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import pmaf
from pmaf.operators import Diagonal, Gram

LIBRARY = Path(pmaf.__file__).parent


class Budget(NamedTuple):
    """The most calls of the forward and the backward pass, and files that both enter together."""

    forward: int
    backward: int
    files: int


# The one place for these numbers. A change that needs more than them makes calls slower; a change
# that needs fewer lowers them here.
BUDGETS: dict[str, Budget] = {
    "less": Budget(22, 24, 10),
    "less float64": Budget(28, 24, 10),
    "less bfloat16": Budget(29, 24, 12),
    "less complex64": Budget(35, 24, 11),
    "less complex128": Budget(35, 24, 11),
    "less radius=2": Budget(26, 24, 12),
    "less radius tensor": Budget(30, 24, 10),
    "less ball": Budget(28, 24, 10),
    "less M": Budget(30, 24, 10),
    "less diagonal M": Budget(38, 24, 14),
    "less weights": Budget(30, 24, 10),
    "less float64, weights": Budget(30, 24, 10),
    "less complex64, weights": Budget(38, 24, 11),
    "less ball, radius, M, weights": Budget(34, 24, 10),
    "less init": Budget(23, 24, 10),
    "ied": Budget(17, 17, 10),
    "ied float64": Budget(17, 17, 10),
    "ied bfloat16": Budget(22, 17, 12),
    "ied complex64": Budget(17, 17, 10),
    "ied complex128": Budget(17, 17, 10),
    "ied n=300": Budget(271, 30, 36),
    "ied k=3": Budget(17, 18, 10),
    "ied complex64, k=3": Budget(17, 18, 10),
    "ied k=3, descending=False": Budget(21, 18, 12),
    "ied largest=False": Budget(17, 17, 10),
    "ied k=3, largest=False": Budget(17, 18, 10),
    "ied reference tensor": Budget(27, 17, 15),
    "ied reference integer": Budget(25, 17, 14),
    "ied reference largest": Budget(25, 17, 14),
    "ied k=3, reference tensor": Budget(27, 18, 15),
    "ied complex64, reference integer": Budget(26, 17, 14),
    "ied init": Budget(18, 17, 10),
    "ied skip=1": Budget(21, 18, 12),
    "ied k=2, skip=1": Budget(21, 18, 12),
    "ied symmetric=False": Budget(19, 14, 12),
    "ied M": Budget(24, 29, 10),
    "ied M, k=3": Budget(24, 30, 10),
    "ied M, float64": Budget(24, 29, 10),
    "ied M, complex64": Budget(24, 29, 10),
    "ied M, reference integer": Budget(34, 29, 15),
    "ied M, skip=1": Budget(28, 30, 12),
    "ied diagonal M": Budget(32, 29, 14),
    "ied diagonal M, skip=1": Budget(34, 30, 15),
    "ied Gram 30×12": Budget(939, 480, 35),
    "nullspace": Budget(25, 24, 12),
    "nullspace tall": Budget(25, 24, 12),
    "nullspace float64": Budget(38, 24, 13),
    "nullspace bfloat16": Budget(28, 24, 13),
    "nullspace complex64": Budget(29, 22, 16),
    "nullspace weights": Budget(40, 24, 13),
    "nullspace wide, weights": Budget(40, 24, 13),
    "nullspace k=2": Budget(29, 19, 16),
    "nullspace reference tensor": Budget(33, 24, 16),
    "nullspace reference integer": Budget(31, 24, 15),
    "isvd": Budget(40, 15, 18),
    "isvd k=2": Budget(40, 15, 18),
    "isvd tall, k=2": Budget(31, 15, 15),
    "isvd k=2, largest=False": Budget(40, 15, 18),
    "isvd k=2, descending=False": Budget(42, 15, 18),
    "isvd reference integer": Budget(40, 15, 18),
    "isvd float64": Budget(37, 15, 15),
    "isvd bfloat16": Budget(40, 15, 18),
    "isvd complex64": Budget(40, 16, 18),
    "spectral sqrt": Budget(27, 22, 13),
    "spectral exp": Budget(27, 20, 13),
    "spectral function": Budget(66, 43, 15),
    "spectral sqrt, k=2": Budget(27, 34, 13),
    "spectral sqrt, k=2, largest=False": Budget(27, 34, 13),
    "spectral sqrt, float64": Budget(27, 22, 13),
    "spectral sqrt, bfloat16": Budget(32, 22, 15),
    "spectral sqrt, complex64": Budget(27, 22, 13),
    "solve SphereLeastSquares": Budget(166, 105, 38),
    "solve SphereLeastSquares, weights": Budget(184, 61, 31),
    "solve PrincipalEigenvectors": Budget(152, 24, 31),
    "solve PrincipalEigenvectors, k=3": Budget(152, 25, 31),
    "solve PrincipalEigenvectors, M": Budget(230, 91, 40),
    "solve PrincipalSingularVectors": Budget(239, 46, 36),
    "solve SpectralFunction": Budget(100, 22, 24),
    "LESS()": Budget(23, 24, 10),
    "LESS(radius=2)": Budget(27, 24, 12),
    "LESS(radius=parameter)": Budget(32, 24, 10),
    "IED()": Budget(18, 17, 10),
    "IED(3, largest=False)": Budget(18, 18, 10),
    "NullSpace()": Budget(26, 24, 12),
    "ISVD(2)": Budget(41, 15, 18),
    "Spectral('sqrt')": Budget(28, 22, 13),
    "PrincipalPool()": Budget(43, 16, 16),
    "PrincipalPool(), weights": Budget(49, 16, 16),
    "PrincipalPool(k=2, centre, root)": Budget(51, 17, 16),
}

# The most there may be of what `house` counts, lines excepted.
MOST: dict[str, int] = {
    "problems": 7,
    "kept": 0,
    "functions": 10,
    "operators": 2,
}

# Searches count their steps, whose number depends on rounding: a share of the budget beyond it.
LEEWAY = 0.1


@dataclass(frozen=True)
class Call:
    """A documented call, as a function of its inputs.

    Attributes:
        inputs: Tensors; those of floating point get gradients.
        searches: Whether the number of calls depends on that of the steps of a search.
    """

    name: str
    call: Callable[..., Any]
    inputs: Callable[[], tuple[Tensor, ...]]
    searches: bool = False

    @property
    def allowed(self) -> Budget:
        budget = BUDGETS[self.name]
        more = LEEWAY if self.searches else 0
        return Budget(*(int(x * (1 + more)) for x in budget[:2]), budget.files)


@dataclass(frozen=True)
class Walk:
    """What one pass does: Python calls into the library, files it enters, changes of file.

    Attributes:
        files: Their names, in the order in which they are entered first.
        changes: How often a call is into another file than the call before it.
    """

    calls: int
    files: tuple[str, ...]
    changes: int


class Counted(NamedTuple):
    """Both passes of a call."""

    forward: Walk
    backward: Walk

    @property
    def files(self) -> int:
        """Files that either pass enters."""
        return len({*self.forward.files, *self.backward.files})


# Python 3.12 has no frames for comprehensions, and generators are entered again and again.
_NO_CALLS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


class Tracer:
    """Counts calls of Python functions of the library while it is entered.

    >>> with Tracer() as tracer:
    ...     _ = pmaf.solvers.Auto()
    >>> tracer.walk.calls
    2
    """

    def __init__(self) -> None:
        self._entered: list[str] = []
        self._generators: set[FrameType] = set()
        self._names: dict[str, str | None] = {}

    def __enter__(self) -> Tracer:
        self._before = sys.getprofile()
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)
        self._generators.clear()

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        name = self._name_of(code.co_filename)
        if name is None or code.co_name in _NO_CALLS:
            return
        if code.co_flags & inspect.CO_GENERATOR:
            if frame in self._generators:
                return
            self._generators.add(frame)
        self._entered.append(name)

    def _name_of(self, file: str) -> str | None:
        if file not in self._names:
            path = Path(file)
            inside = path.is_relative_to(LIBRARY)
            self._names[file] = path.relative_to(LIBRARY).as_posix() if inside else None
        return self._names[file]

    @property
    def walk(self) -> Walk:
        changes = sum(one != other for one, other in zip(self._entered, self._entered[1:]))
        return Walk(len(self._entered), tuple(dict.fromkeys(self._entered)), changes)


WARM = 2  # calls before the one that counts, which fill caches


def count(call: Call) -> Counted:
    """What the third call of a kind does, in both passes.

    On the CPU the engine of autograd runs in the thread that calls it, so that the backward pass is
    seen.
    """
    for _ in range(WARM):
        _passes(call)
    return _passes(call)


def _passes(call: Call) -> Counted:
    generator = torch.Generator().manual_seed(1)
    inputs = call.inputs()
    leaves = [x.requires_grad_() for x in inputs]
    with Tracer() as forward:
        found = call.call(*inputs)
    outputs = [x for x in _tensors(found) if x.requires_grad]
    incoming = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs]
    with Tracer() as backward:
        gradients = torch.autograd.grad(outputs, leaves, incoming)
    assert all(bool(x.isfinite().all()) for x in gradients), call.name
    return Counted(forward.walk, backward.walk)


def _tensors(found: Any) -> Sequence[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


# The inputs.


def _seeded(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Complex numbers are drawn as such, so that none is real."""
    drawn = torch.complex128 if dtype.is_complex else torch.float64
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=drawn).to(dtype)


BATCH = 5


def _square(n: int, dtype: torch.dtype) -> Tensor:
    """Hermitian, with eigenvalues that short floats keep apart."""
    noise = _seeded(2, BATCH, n, n, dtype=dtype)
    return noise + noise.mH + 3 * torch.diag(torch.arange(1.0, n + 1)).to(dtype)


def symmetric(n: int = 9, dtype: torch.dtype = torch.float32) -> Callable[[], tuple[Tensor]]:
    return lambda: (_square(n, dtype),)


def _metric(n: int, dtype: torch.dtype) -> Tensor:
    noise = _seeded(3, BATCH, 2 * n, n, dtype=dtype)
    return noise.mH @ noise / (2 * n) + torch.eye(n, dtype=dtype)


def paired(dtype: torch.dtype = torch.float32) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (_square(9, dtype), _metric(9, dtype))


def with_diagonal() -> tuple[Tensor, Tensor]:
    return _square(9, torch.float32), 0.5 + _seeded(4, BATCH, 9).abs()


def positive(dtype: torch.dtype = torch.float32) -> Callable[[], tuple[Tensor]]:
    def inputs() -> tuple[Tensor]:
        A = _metric(9, dtype)
        return (A + torch.diag(torch.arange(9.0)).to(dtype),)

    return inputs


def general() -> tuple[Tensor]:
    return (_seeded(5, BATCH, 9, 9).abs(),)


def rows(m: int, n: int, dtype: torch.dtype = torch.float32) -> Callable[[], tuple[Tensor]]:
    return lambda: (_seeded(6, BATCH, m, n, dtype=dtype),)


def weighted(m: int, n: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (_seeded(6, BATCH, m, n), 0.5 + _seeded(7, BATCH, m).abs())


def squares(dtype: torch.dtype = torch.float32) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (_seeded(6, BATCH, 8, 3, dtype=dtype), 3 * _seeded(8, BATCH, 8, dtype=dtype))


def squares_and(
    other: Callable[[], Tensor], dtype: torch.dtype = torch.float32
) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (*squares(dtype)(), other().to(dtype))


def _positive_numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: 0.5 + _seeded(9, *shape).abs()


def _of_three() -> Tensor:
    return _metric(3, torch.float32)


def everything() -> tuple[Tensor, ...]:
    return (*squares()(), _positive_numbers(BATCH)(), _of_three(), _positive_numbers(BATCH, 8)())


# The calls.


def _less(name: str, inputs: Callable[[], tuple[Tensor, ...]], **options: Any) -> Call:
    return Call(name, lambda A, b: pmaf.less(A, b, **options), inputs)


def _ied(
    name: str,
    inputs: Callable[[], tuple[Tensor, ...]],
    k: int | None = None,
    searches: bool = False,
    **options: Any,
) -> Call:
    return Call(name, lambda A: pmaf.ied(A, k, **options), inputs, searches)


def _pair(
    name: str, inputs: Callable[[], tuple[Tensor, ...]], k: int | None = None, **options: Any
) -> Call:
    return Call(name, lambda A, M: pmaf.ied(A, k, M=M, **options), inputs)


def _null(
    name: str, inputs: Callable[[], tuple[Tensor, ...]], k: int | None = None, **options: Any
) -> Call:
    return Call(
        name,
        lambda A, weights=None: pmaf.nullspace(A, k, weights=weights, **options),
        inputs,
    )


def _isvd(
    name: str, inputs: Callable[[], tuple[Tensor, ...]], k: int | None = None, **options: Any
) -> Call:
    return Call(name, lambda A: pmaf.isvd(A, k, **options), inputs)


def _spectral(
    name: str,
    function: Any,
    inputs: Callable[[], tuple[Tensor, ...]],
    k: int | None = None,
    **options: Any,
) -> Call:
    return Call(name, lambda A: pmaf.spectral(A, function, k, **options), inputs)


def _solve(
    name: str, problem: Callable[..., Any], inputs: Callable[[], tuple[Tensor, ...]]
) -> Call:
    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        solution = pmaf.solve(problem(*tensors))
        return solution.value, solution.multiplier

    return Call(name, call, inputs)


def _module(name: str, module: nn.Module, inputs: Callable[[], tuple[Tensor, ...]]) -> Call:
    return Call(name, module, inputs)


_ONES = torch.ones(9)
_F64, _BF16, _C64, _C128 = torch.float64, torch.bfloat16, torch.complex64, torch.complex128

CALLS: tuple[Call, ...] = (
    _less("less", squares()),
    _less("less float64", squares(_F64)),
    _less("less bfloat16", squares(_BF16)),
    _less("less complex64", squares(_C64)),
    _less("less complex128", squares(_C128)),
    _less("less radius=2", squares(), radius=2.0),
    Call(
        "less radius tensor",
        lambda A, b, r: pmaf.less(A, b, radius=r),
        squares_and(_positive_numbers(BATCH)),
    ),
    _less("less ball", squares(), ball=True),
    Call("less M", lambda A, b, M: pmaf.less(A, b, M=M), squares_and(_of_three)),
    Call(
        "less diagonal M",
        lambda A, b, d: pmaf.less(A, b, M=Diagonal(d)),
        squares_and(_positive_numbers(BATCH, 3)),
    ),
    Call(
        "less weights",
        lambda A, b, w: pmaf.less(A, b, weights=w),
        squares_and(_positive_numbers(BATCH, 8)),
    ),
    Call(
        "less float64, weights",
        lambda A, b, w: pmaf.less(A, b, weights=w),
        squares_and(_positive_numbers(BATCH, 8), _F64),
    ),
    Call(
        "less complex64, weights",
        lambda A, b, w: pmaf.less(A, b, weights=w.real),
        squares_and(_positive_numbers(BATCH, 8), _C64),
    ),
    Call(
        "less ball, radius, M, weights",
        lambda A, b, r, M, w: pmaf.less(A, b, radius=r, ball=True, M=M, weights=w),
        everything,
    ),
    _less("less init", squares(), init=torch.ones(3) / 3**0.5),
    _ied("ied", symmetric()),
    _ied("ied float64", symmetric(dtype=_F64)),
    _ied("ied bfloat16", symmetric(dtype=_BF16)),
    _ied("ied complex64", symmetric(dtype=_C64)),
    _ied("ied complex128", symmetric(dtype=_C128)),
    _ied("ied n=300", symmetric(300), searches=True),
    _ied("ied k=3", symmetric(), 3),
    _ied("ied complex64, k=3", symmetric(dtype=_C64), 3),
    _ied("ied k=3, descending=False", symmetric(), 3, descending=False),
    _ied("ied largest=False", symmetric(), largest=False),
    _ied("ied k=3, largest=False", symmetric(), 3, largest=False),
    _ied("ied reference tensor", symmetric(), reference=_ONES),
    _ied("ied reference integer", symmetric(), reference=0),
    _ied("ied reference largest", symmetric(), reference="largest"),
    _ied("ied k=3, reference tensor", symmetric(), 3, reference=_ONES),
    _ied("ied complex64, reference integer", symmetric(dtype=_C64), reference=0),
    _ied("ied init", symmetric(), init=_ONES / 3),
    _ied("ied skip=1", symmetric(), skip=1),
    _ied("ied k=2, skip=1", symmetric(), 2, skip=1),
    _ied("ied symmetric=False", general, symmetric=False, searches=True),
    _pair("ied M", paired()),
    _pair("ied M, k=3", paired(), 3),
    _pair("ied M, float64", paired(_F64)),
    _pair("ied M, complex64", paired(_C64)),
    _pair("ied M, reference integer", paired(), reference=0),
    _pair("ied M, skip=1", paired(), skip=1),
    Call("ied diagonal M", lambda A, d: pmaf.ied(A, M=Diagonal(d)), with_diagonal),
    Call("ied diagonal M, skip=1", lambda A, d: pmaf.ied(A, M=Diagonal(d), skip=1), with_diagonal),
    Call("ied Gram 30×12", lambda X: pmaf.ied(Gram(X)), rows(30, 12), searches=True),
    _null("nullspace", rows(8, 9)),
    _null("nullspace tall", rows(30, 9)),
    _null("nullspace float64", rows(8, 9, _F64)),
    _null("nullspace bfloat16", rows(8, 9, _BF16)),
    _null("nullspace complex64", rows(8, 9, _C64)),
    _null("nullspace weights", weighted(30, 9)),
    _null("nullspace wide, weights", weighted(8, 9)),
    _null("nullspace k=2", rows(7, 9), 2),
    _null("nullspace reference tensor", rows(8, 9), reference=_ONES),
    _null("nullspace reference integer", rows(8, 9), reference=0),
    _isvd("isvd", rows(8, 9)),
    _isvd("isvd k=2", rows(8, 9), 2),
    _isvd("isvd tall, k=2", rows(30, 9), 2),
    _isvd("isvd k=2, largest=False", rows(8, 9), 2, largest=False),
    _isvd("isvd k=2, descending=False", rows(8, 9), 2, descending=False),
    _isvd("isvd reference integer", rows(8, 9), reference=0),
    _isvd("isvd float64", rows(8, 9, _F64)),
    _isvd("isvd bfloat16", rows(8, 9, _BF16)),
    _isvd("isvd complex64", rows(8, 9, _C64)),
    _spectral("spectral sqrt", "sqrt", positive()),
    _spectral("spectral exp", "exp", positive()),
    _spectral("spectral function", torch.tanh, positive()),
    _spectral("spectral sqrt, k=2", "sqrt", positive(), 2),
    _spectral("spectral sqrt, k=2, largest=False", "sqrt", positive(), 2, largest=False),
    _spectral("spectral sqrt, float64", "sqrt", positive(_F64)),
    _spectral("spectral sqrt, bfloat16", "sqrt", positive(_BF16)),
    _spectral("spectral sqrt, complex64", "sqrt", positive(_C64)),
    _solve("solve SphereLeastSquares", pmaf.SphereLeastSquares, squares()),
    _solve(
        "solve SphereLeastSquares, weights",
        lambda A, b, w: pmaf.SphereLeastSquares(A, b, weights=w),
        squares_and(_positive_numbers(BATCH, 8)),
    ),
    _solve("solve PrincipalEigenvectors", pmaf.PrincipalEigenvectors, symmetric()),
    _solve(
        "solve PrincipalEigenvectors, k=3", lambda A: pmaf.PrincipalEigenvectors(A, 3), symmetric()
    ),
    _solve(
        "solve PrincipalEigenvectors, M",
        lambda A, M: pmaf.PrincipalEigenvectors(A, M=M),
        paired(),
    ),
    _solve(
        "solve PrincipalSingularVectors",
        lambda A: pmaf.PrincipalSingularVectors(A, largest=False),
        rows(8, 9),
    ),
    _solve("solve SpectralFunction", lambda A: pmaf.SpectralFunction(A, "sqrt"), positive()),
    _module("LESS()", pmaf.LESS(), squares()),
    _module("LESS(radius=2)", pmaf.LESS(radius=2.0), squares()),
    _module("LESS(radius=parameter)", pmaf.LESS(radius=nn.Parameter(torch.ones(()))), squares()),
    _module("IED()", pmaf.IED(), symmetric()),
    _module("IED(3, largest=False)", pmaf.IED(3, largest=False), symmetric()),
    _module("NullSpace()", pmaf.NullSpace(), rows(8, 9)),
    _module("ISVD(2)", pmaf.ISVD(2), rows(8, 9)),
    _module("Spectral('sqrt')", pmaf.Spectral("sqrt"), positive()),
    _module("PrincipalPool()", pmaf.PrincipalPool(), rows(30, 9)),
    _module("PrincipalPool(), weights", pmaf.PrincipalPool(), weighted(30, 9)),
    _module(
        "PrincipalPool(k=2, centre, root)",
        pmaf.PrincipalPool(k=2, centre=True, scale="root"),
        rows(8, 30),
    ),
)
NAMED = {call.name: call for call in CALLS}


# The house.


@dataclass(frozen=True)
class House:
    """Facts about the sources of the library.

    Attributes:
        kept: Lines that ask of which class the results of a forward pass are.
        lines: Of Python.
    """

    problems: int
    kept: int
    functions: int
    operators: int
    lines: int


MEANINGS = {
    "problems": "classes below `Problem`",
    "kept": "lines with `isinstance(kept,`",
    "functions": "classes of `autograd.Function`",
    "operators": "custom operators in the namespace `pmaf`",
    "lines": "lines of Python",
}


def house() -> House:
    files = sorted(LIBRARY.rglob("*.py"))
    for file in files:
        parts = file.relative_to(LIBRARY.parent).with_suffix("").parts
        if parts[-1] != "__main__":
            importlib.import_module(".".join(parts).removesuffix(".__init__"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    names = torch._C._dispatch_get_all_op_names()
    return House(
        problems=len(_below(pmaf.Problem)),
        kept=sum(len(re.findall(r"^.*isinstance\(kept,.*$", text, re.M)) for text in texts),
        functions=len(_below(torch.autograd.Function)),
        operators=len({name.split(".")[0] for name in names if name.startswith("pmaf::")}),
        lines=sum(text.count("\n") for text in texts),
    )


def _below(kind: type) -> set[type]:
    """The classes of the library that inherit from a class, itself left out."""
    found: set[type] = set()
    for other in kind.__subclasses__():
        found |= {other, *_below(other)}
    # Classes that examples in docstrings define have the module, too, but are not in it.
    return {
        x
        for x in found
        if x.__module__.split(".")[0] == "pmaf"
        and getattr(sys.modules[x.__module__], x.__name__, None) is x
    }


# The table.


def numbers_of(found: dict[str, Counted]) -> dict[str, Any]:
    """What `--json` writes."""
    passes = {
        name: {
            part: {"calls": walk.calls, "files": len(walk.files), "changes": walk.changes}
            for part, walk in (("forward", counted.forward), ("backward", counted.backward))
        }
        | {"files": counted.files}
        for name, counted in found.items()
    }
    return {"calls": passes, "house": asdict(house())}


def table(numbers: dict[str, Any], before: dict[str, Any] | None = None) -> str:
    """Both passes of every call and the facts about the house, in Markdown.

    With earlier numbers each entry is `before → now` where they differ.
    """
    earlier = before or {"calls": {}, "house": {}}
    lines = [
        "Python calls into the library / distinct files / changes of file, third call:",
        "",
        "| call | forward | backward | files |",
        "|---|---|---|---|",
    ]
    for name, row in numbers["calls"].items():
        old = earlier["calls"].get(name)
        cells = [
            _moved(_pass(row[part]), None if old is None else _pass(old[part]))
            for part in ("forward", "backward")
        ]
        files = _moved(str(row["files"]), None if old is None else str(old["files"]))
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {files} |")
    lines += ["", "| house | number |", "|---|---|"]
    for key, value in numbers["house"].items():
        old = earlier["house"].get(key)
        lines.append(
            f"| {MEANINGS[key]} | {_moved(str(value), None if old is None else str(old))} |"
        )
    return "\n".join(lines) + "\n"


def _pass(row: dict[str, int]) -> str:
    return f"{row['calls']} / {row['files']} / {row['changes']}"


def _moved(now: str, before: str | None) -> str:
    return now if before in (None, now) else f"{before} → {now}"


def budgets(found: dict[str, Counted]) -> str:
    """`BUDGETS` and `MOST` as this tree would have them, as lines of Python."""
    lines = ["BUDGETS: dict[str, Budget] = {"]
    lines += [
        f'    "{name}": Budget({x.forward.calls}, {x.backward.calls}, {x.files}),'
        for name, x in found.items()
    ]
    lines += ["}", "MOST: dict[str, int] = {"]
    lines += [f'    "{key}": {value},' for key, value in asdict(house()).items()]
    return "\n".join([*lines, "}"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.walk")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    parser.add_argument("--compare", type=Path, help="a file of earlier numbers")
    parser.add_argument("--budgets", action="store_true", help="print the budgets of this tree")
    parser.add_argument("calls", nargs="*", help="names of calls; all unless given")
    asked = parser.parse_args()
    found = {name: count(NAMED[name]) for name in asked.calls or NAMED}
    if asked.budgets:
        print(budgets(found), end="")
        return
    numbers = numbers_of(found)
    before = None if asked.compare is None else json.loads(asked.compare.read_text())
    print(table(numbers, before), end="")
    if asked.json is not None:
        asked.json.write_text(json.dumps(numbers, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
