"""What every kind of call costs on an accelerator, beside a budget, by a pretend device.

    python -m tests.devices                        # the table, in Markdown
    python -m tests.devices --only ied --lines 9   # and the library's lines behind its numbers
    python -m tests.devices --capture              # where the capture of a CUDA graph fails first
    python -m tests.devices --tf32                 # with products in TF32, where torch allows it
    python -m tests.devices --no-doubles           # on a device without float64, as MPS
    python -m tests.devices --default-device       # with the device as torch's default
    python -m tests.devices --record               # write the rows that exceed their budget
    python -m tests.devices --write                # write the table into docs/devices.md
    python -m tests.devices --device cuda          # times on a real device instead of counts

`ROWS` has a line for each call with its budget, which `tests/test_devices.py` holds it to. A row
that does not keep within its budget yet has its numbers in `tests/devices_now.json`; they may not
grow, and `--record` drops the rows that have come within. Counts are those of the second call,
when everything is cached that a signature decides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import pmaf
from pmaf import native, recipe
from pmaf.operators import Diagonal, FromMatvec, Gram, Sparse
from tests import pretend

HERE = Path(__file__).parent
NOW = HERE / "devices_now.json"
PAGE = HERE.parent / "docs" / "devices.md"
START, END = "<!-- from python -m tests.devices -->", "<!-- end of the table -->"


class Numbers(NamedTuple):
    """Counts of both passes, or the most that they may be; None where there is no limit."""

    launches: int | None = None
    waits: int | None = None
    back_launches: int | None = None
    back_waits: int | None = None

    def within(self, limit: Numbers) -> bool:
        return all(
            most is None or count is None or count <= most for count, most in zip(self, limit)
        )

    def __str__(self) -> str:
        if self == NO_BUDGET:
            return "–"
        words = ["–" if x is None else f"{x:,}" for x in self]
        forward = " / ".join(words[:2])
        if self[2:] == (None, None):
            return forward
        return f"{forward}; {words[2]}" + ("" if self.back_waits is None else f" / {words[3]}")


NO_BUDGET = Numbers()


@dataclass(frozen=True)
class Row:
    """A call of the library, and what it may cost."""

    name: str
    make: Callable[[], Sequence[Tensor]]  # those that require gradients are differentiated
    call: Callable[..., Any]
    budget: Numbers = NO_BUDGET
    beside: tuple[str, Callable[..., Any]] | None = None  # torch's own call for such tensors
    seen: Callable[[Any], Any] | None = None  # what of a result is unique, if it is not all

    @property
    def doubles(self) -> bool:
        """Whether the tensors are float64, so that a device without it has no such call."""
        return any(x.dtype in (torch.float64, torch.complex128) for x in self.make())


@dataclass
class Result:
    """What a call does on the device."""

    row: Row
    error: Exception | None = None
    forward: pretend.Counts | None = None
    backward: pretend.Counts | None = None
    beside: Numbers | None = None
    differs: float = 0.0  # the largest difference from the CPU, relative to the largest number
    allowed: float = 0.0  # what rounding may make of it

    @property
    def numbers(self) -> Numbers:
        return _numbers(self.forward, self.backward)

    @property
    def agrees(self) -> bool:
        return self.differs <= self.allowed


def _numbers(forward: pretend.Counts | None, backward: pretend.Counts | None) -> Numbers:
    sides = [(None, None) if x is None else (x.launches, x.waits) for x in (forward, backward)]
    return Numbers(*sides[0], *sides[1])


# How a row runs.


def run(
    row: Row,
    capture: bool = False,
    doubles: bool = True,
    default: bool = False,
    beside: bool = True,
) -> Result:
    """Count the second call on the pretend device, and compare its results with the CPU's."""
    result = Result(row)
    given = [*row.make()]
    context = torch.device(pretend.DEVICE) if default else nullcontext()
    try:
        with quiet(), context, pretend.options(doubles=doubles):
            _passes(row.call, [_put(x) for x in given], row.seen)
            with pretend.options(doubles=doubles, capture=capture):
                found, result.forward, result.backward = _passes(
                    row.call, [_put(x) for x in given], row.seen
                )
    except Exception as error:
        result.error = error
        return result
    with quiet(), without_kernels():
        result.differs, result.allowed = _compared(row, given, found)
    with quiet():
        if beside and row.beside is not None:
            call = row.beside[1]
            _passes(call, [_put(x) for x in given])
            result.beside = _numbers(*_passes(call, [_put(x) for x in given])[1:])
    return result


@contextmanager
def quiet() -> Iterator[None]:
    """Whoever asks what a call costs has seen its warnings elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def without_kernels() -> Iterator[None]:
    """Solve on the CPU without the compiled kernels, in which float32 is more accurate."""
    held = native._library, native.available
    native._library, native.available = None, False
    recipe._recipe.cache_clear()  # plans for kernels
    try:
        yield
    finally:
        native._library, native.available = held
        recipe._recipe.cache_clear()


def _put(x: Tensor) -> Tensor:
    return pretend.put(x).requires_grad_(x.requires_grad)


def _passes(
    call: Callable[..., Any], inputs: Sequence[Tensor], seen: Callable[[Any], Any] | None = None
) -> tuple[list[Tensor], pretend.Counts, pretend.Counts | None]:
    """The numbers of a forward and a backward pass, and what each of the passes does."""
    with pretend.counted() as forward:
        found = call(*inputs)
    outputs = tensors_of(found)
    shown = outputs if seen is None else tensors_of(seen(found))
    seeds = [_seed(x) for x in shown]
    if seen is not None:
        seeds = torch.autograd.grad(shown, outputs, seeds)
    with pretend.counted() as backward:
        gradients = _gradients(outputs, inputs, seeds)
    numbers = [pretend.on_host(x) for x in (*shown, *gradients)]
    return numbers, forward, backward if gradients else None


def _gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor]
) -> list[Tensor]:
    leaves = [x for x in inputs if x.requires_grad]
    pairs = [(x, seed) for x, seed in zip(outputs, seeds) if x.requires_grad]
    if not (leaves and pairs):
        return []
    seen, given = zip(*pairs)
    return [
        torch.zeros_like(x) if gradient is None else gradient
        for x, gradient in zip(leaves, torch.autograd.grad(seen, leaves, given, allow_unused=True))
    ]


def tensors_of(found: Any) -> list[Tensor]:
    """The floating-point tensors of a result, in order."""
    if is_dataclass(found):
        found = [getattr(found, x.name) for x in fields(found)]
    leaves = [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]
    return [x for x in leaves if x.is_floating_point() or x.is_complex()]


def _seed(x: Tensor) -> Tensor:
    """A fixed gradient of an output, on its device."""
    generator = torch.Generator("cpu").manual_seed(7)
    seed = torch.randn(x.shape, generator=generator, dtype=x.dtype, device="cpu")
    return pretend.put(seed) if isinstance(x, pretend.Pretend) else seed.to(x.device)


def _compared(row: Row, given: Sequence[Tensor], found: list[Tensor]) -> tuple[float, float]:
    """The difference from the CPU, and a limit: what rounding errors of the inputs change."""
    wanted, *_ = _passes(row.call, given, row.seen)
    generator = torch.Generator("cpu").manual_seed(3)
    moved = _passes(row.call, [_rounded_otherwise(x, generator) for x in given], row.seen)[0]
    differs = max((_difference(x, y) for x, y in zip(found, wanted, strict=True)), default=0.0)
    change = max((_difference(x, y) for x, y in zip(moved, wanted, strict=True)), default=0.0)
    eps = max(torch.finfo(x.dtype).eps for x in wanted)
    return differs, 30 * max(change, 10 * eps)


def _rounded_otherwise(x: Tensor, generator: torch.Generator) -> Tensor:
    if not (x.is_floating_point() or x.is_complex()):
        return x
    real = x.detach().real if x.is_complex() else x.detach()
    noise = torch.randn(real.shape, generator=generator, dtype=real.dtype)
    # A symmetric matrix stays one.
    if x.dim() > 1 and x.shape[-2] == x.shape[-1]:
        noise = (noise + noise.mT) / 2
    factors = 1 + torch.finfo(x.dtype).eps * noise
    return (x.detach() * factors).requires_grad_(x.requires_grad)


def _difference(x: Tensor, y: Tensor) -> float:
    """The largest difference, relative to the largest number; nan where only one is finite."""
    if x.shape != y.shape or bool((x.isfinite() != y.isfinite()).any()):
        return float("nan")
    finite = y.isfinite()
    if not bool(finite.any()):
        return 0.0
    size = y[finite].abs().max().clamp_min(torch.finfo(y.dtype).tiny)
    return float((x - y)[finite].abs().max() / size)


# Tensors of rows.

F32, F64, C64 = torch.float32, torch.float64, torch.complex64


def _random(*shape: int, dtype: torch.dtype = F32, grad: bool = True) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    x = torch.randn(*shape, generator=generator, dtype=dtype, device="cpu")
    return x.requires_grad_(grad)


def _positive(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return _random(*shape, dtype=dtype, grad=False).abs().add(0.5).requires_grad_()


def _symmetric(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    A = _random(*shape, dtype=dtype, grad=False)
    return (0.5 * (A + A.mH)).requires_grad_()


def _definite(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    A = _random(*shape, dtype=dtype, grad=False)
    eye = torch.eye(shape[-1], dtype=dtype, device="cpu")
    return (A @ A.mH / shape[-1] + 0.5 * eye).requires_grad_()


def _graph() -> list[Tensor]:
    """A sparse symmetric matrix: where its rows start, its columns and its values."""
    generator = torch.Generator("cpu").manual_seed(1)
    index = torch.randint(2000, (2, 8000), generator=generator, device="cpu")
    A = torch.zeros(2000, 2000, device="cpu")
    A[index[0], index[1]] = 1.0
    A = (A + A.T).to_sparse_csr()
    return [A.crow_indices(), A.col_indices(), A.values().requires_grad_()]


def _sparse(starts: Tensor, columns: Tensor, values: Tensor) -> Sparse:
    pattern = torch.sparse_csr_tensor(starts, columns, values.detach(), (2000, 2000))
    return Sparse(pattern).with_tensors([values])


def _shown(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


_SHORT = {F32: "f32", F64: "f64", C64: "c64"}


# The rows.

LESS = Numbers(90, 2, 40)
ONE_VECTOR = Numbers(16, 2, 20)
VECTORS = Numbers(20, 2, 40)
LARGE = Numbers(30, 3, 60)
FUNCTION = Numbers(30, 2, 30)
PAIR = Numbers(40, 2, 60)
COMPLEX = Numbers(40, 2, 50)
PRODUCTS = Numbers(None, 6)

_EIGH = "eigh", lambda A, *_: tuple(torch.linalg.eigh(A))
_SVD = "svd", lambda A, *_: tuple(torch.linalg.svd(A, full_matrices=False))
_LSTSQ = "lstsq", lambda A, b: torch.linalg.lstsq(A, b.unsqueeze(-1)).solution


def _less_rows() -> Iterator[Row]:
    sizes = ((1000, 8, 9), (256, 64, 32), (5, 1024, 512))
    for shape, dtype in [(x, y) for x in sizes for y in (F32, F64)] + [((2, 1100, 1024), F32)]:
        yield Row(
            f"less {_shown(shape)} {_SHORT[dtype]}",
            lambda shape=shape, dtype=dtype: [
                _random(*shape, dtype=dtype),
                _random(*shape[:-1], dtype=dtype),
            ],
            pmaf.less,
            LESS,
            _LSTSQ if shape[-2] >= shape[-1] else None,
        )

    def both() -> list[Tensor]:
        return [_random(256, 64, 32), _random(256, 64)]

    def less(name: str, call: Callable[..., Any], *more: Callable[[], Tensor]) -> Row:
        return Row(f"less 256×64×32 {name}", lambda: [*both(), *(x() for x in more)], call, LESS)

    yield less("ball", lambda A, b: pmaf.less(A, b, ball=True))
    yield less(
        "radius, weights",
        lambda A, b, radius, weights: pmaf.less(A, b, radius=radius, weights=weights),
        lambda: _positive(256),
        lambda: _positive(256, 64),
    )
    yield less("M=", lambda A, b, M: pmaf.less(A, b, M=M), lambda: _definite(256, 32, 32))
    yield less(
        "M=Diagonal", lambda A, b, d: pmaf.less(A, b, M=Diagonal(d)), lambda: _positive(256, 32)
    )
    yield Row(
        "less 100×16×8 c64",
        # More entries than go to the host, where there are kernels or not.
        lambda: [_random(100, 16, 8, dtype=C64), _random(100, 16, dtype=C64)],
        pmaf.less,
        LESS,
    )
    yield Row("less 64×9×20 wide", lambda: [_random(64, 9, 20), _random(64, 9)], pmaf.less, LESS)
    yield Row(
        "less 64×32 shared, b 256×64", lambda: [_random(64, 32), _random(256, 64)], pmaf.less, LESS
    )


def _ied_rows() -> Iterator[Row]:
    def ied(
        shape: tuple[int, ...],
        budget: Numbers,
        name: str = "",
        call: Callable[..., Any] = pmaf.ied,
        dtype: torch.dtype = F32,
        more: Callable[[], list[Tensor]] = lambda: [],
    ) -> Row:
        return Row(
            f"ied {_shown(shape)} {_SHORT[dtype]} {name}".rstrip(),
            lambda: [_symmetric(*shape, dtype=dtype), *more()],
            call,
            budget,
            _EIGH if not name else None,
        )

    def three(A: Tensor) -> Any:
        return pmaf.ied(A, 3)

    for shape in ((8, 8), (1000, 3, 3), (64, 32, 32)):
        yield ied(shape, ONE_VECTOR)
        yield ied(shape, VECTORS, "k=3", three)
    middle = (64, 32, 32)
    yield ied(
        middle,
        ONE_VECTOR,
        "reference=tensor",
        lambda A, x: pmaf.ied(A, reference=x),
        more=lambda: [_random(64, 32, grad=False)],
    )
    yield ied(middle, ONE_VECTOR, 'reference="largest"', lambda A: pmaf.ied(A, reference="largest"))
    yield ied(middle, VECTORS, "k=2 skip=1", lambda A: pmaf.ied(A, 2, skip=1))
    yield ied(middle, ONE_VECTOR, "largest=False", lambda A: pmaf.ied(A, largest=False))
    for dtype in (F32, F64):
        yield ied((5, 300, 300), LARGE, dtype=dtype)
    yield ied((5, 300, 300), LARGE, "k=3", three)
    yield ied((5, 1024, 1024), LARGE)

    def pair(k: int | None) -> Row:
        return ied(
            middle,
            PAIR,
            "M=" if k is None else f"M= k={k}",
            lambda A, M: pmaf.ied(A, k, M=M),
            more=lambda: [_definite(*middle)],
        )

    yield pair(None)
    yield pair(3)
    yield ied((64, 16, 16), COMPLEX, dtype=C64)
    yield ied((64, 16, 16), COMPLEX, "k=3", three, dtype=C64)
    yield Row(
        "ied 64×32×32 f32 symmetric=False",
        lambda: [_positive(64, 32, 32)],
        lambda A: pmaf.ied(A, symmetric=False),
        beside=("eig", lambda A: tuple(torch.linalg.eig(A))),
    )


def _singular_rows() -> Iterator[Row]:
    yield Row("nullspace 1000×8×9", lambda: [_random(1000, 8, 9)], pmaf.nullspace, ONE_VECTOR, _SVD)
    yield Row(
        "nullspace 1000×7×9 k=2",
        lambda: [_random(1000, 7, 9)],
        lambda A: pmaf.nullspace(A, 2),
        VECTORS,
        seen=lambda V: V @ V.mT,
    )
    yield Row(
        "nullspace 1000×12×9 weights",
        lambda: [_random(1000, 12, 9), _positive(1000, 12)],
        lambda A, weights: pmaf.nullspace(A, weights=weights),
        ONE_VECTOR,
    )
    for shape in ((1000, 8, 9), (64, 64, 32)):
        make = lambda shape=shape: [_random(*shape)]  # noqa: E731
        yield Row(f"isvd {_shown(shape)}", make, pmaf.isvd, ONE_VECTOR, _SVD)
        yield Row(f"isvd {_shown(shape)} k=3", make, lambda A: pmaf.isvd(A, 3), VECTORS)
    for shape in ((64, 32, 32), (1000, 8, 8)):
        yield Row(
            f'spectral "sqrt" {_shown(shape)}',
            lambda shape=shape: [_definite(*shape)],
            lambda A: pmaf.spectral(A, "sqrt"),
            FUNCTION,
        )


def _other_rows() -> Iterator[Row]:
    yield Row(
        "ied Gram 200×5000",
        lambda: [_random(200, 5000)],
        lambda X: pmaf.ied(Gram(X, scale=1 / 199)),
        PRODUCTS,
    )
    yield Row("ied Sparse n=2000", _graph, lambda *A: pmaf.ied(_sparse(*A)), PRODUCTS)
    yield Row("ied Sparse n=2000 k=3", _graph, lambda *A: pmaf.ied(_sparse(*A), 3), PRODUCTS)

    def product(d: Tensor, V: Tensor) -> Any:
        return pmaf.ied(FromMatvec(lambda x, d: d * x + V @ (V.mT @ x), (500, 500), [d]))

    yield Row(
        "ied FromMatvec n=500",
        lambda: [
            torch.linspace(1, 2, 500, device="cpu").square().requires_grad_(),
            _random(500, 2, grad=False),
        ],
        product,
        PRODUCTS,
    )
    pool = pmaf.PrincipalPool()
    yield Row("PrincipalPool 32×196×64", lambda: [_random(32, 196, 64)], pool)
    yield Row("PrincipalPool 8×64×14×14", lambda: [_random(8, 64, 14, 14)], pool)

    def solved(A: Tensor, b: Tensor) -> Any:
        found = pmaf.solve(pmaf.SphereLeastSquares(A, b))
        return found.value, found.multiplier

    def certified(A: Tensor, b: Tensor) -> Any:
        problem = pmaf.SphereLeastSquares(A.detach(), b.detach())
        found = pmaf.solve(problem)
        pmaf.certify(problem, found)
        return found.value

    both = lambda: [_random(256, 64, 32), _random(256, 64)]  # noqa: E731
    yield Row("solve less 256×64×32, report", both, solved)
    yield Row("solve, certify less 256×64×32", both, certified)

    def solved_ied(A: Tensor) -> Any:
        found = pmaf.solve(pmaf.PrincipalEigenvectors(A, 3))
        return found.value, found.multiplier

    def certified_ied(A: Tensor) -> Any:
        problem = pmaf.PrincipalEigenvectors(A.detach(), 3)
        found = pmaf.solve(problem)
        pmaf.certify(problem, found)
        return found.value

    yield Row("solve ied 64×32×32 k=3, report", lambda: [_symmetric(64, 32, 32)], solved_ied)
    yield Row("solve, certify ied 64×32×32 k=3", lambda: [_symmetric(64, 32, 32)], certified_ied)


ROWS = [*_less_rows(), *_ied_rows(), *_singular_rows(), *_other_rows()]


# What is recorded.


def recorded() -> dict[str, Numbers]:
    """The numbers of the rows that exceed their budget, and of those that have none."""
    if not NOW.exists():
        return {}
    return {name: Numbers(*numbers) for name, numbers in json.loads(NOW.read_text()).items()}


def record(results: Sequence[Result]) -> None:
    """Write the numbers of these rows, unless they are within their budget."""
    known = recorded()
    for result in results:
        if result.error is not None:
            raise result.error
        known.pop(result.row.name, None)
        budget = result.row.budget
        if budget == NO_BUDGET or not result.numbers.within(budget):
            known[result.row.name] = result.numbers
    lines = [
        f"  {json.dumps(row.name, ensure_ascii=False)}: {json.dumps(known[row.name])}"
        for row in ROWS
        if row.name in known
    ]
    NOW.write_text("{\n" + ",\n".join(lines) + "\n}\n")


# The table.

HEADER = "| call | launches / waits; backward | budget | torch | decompositions | differs |"


def line(result: Result) -> str:
    row = result.row
    if result.error is not None:
        return f"| {row.name} | {type(result.error).__name__} | {row.budget} | | | |"
    passes = [x for x in (result.forward, result.backward) if x is not None]
    named = "; ".join(x.decompositions or "–" for x in passes)
    torches = "" if result.beside is None or row.beside is None else row.beside[0]
    torches += f" {result.beside}" if torches else ""
    over = "" if result.numbers.within(row.budget) else " **over**"
    differs = f"{result.differs:.0e}" + ("" if result.agrees else " **differs**")
    return (
        f"| {row.name} | {result.numbers}{over} | {row.budget} | {torches} | {named} | {differs} |"
    )


def table(results: Sequence[Result]) -> str:
    return "\n".join([HEADER, "|---" * 6 + "|", *map(line, results)])


def lines_behind(result: Result, most: int) -> Iterator[str]:
    """The lines of the library that most of the numbers come from."""
    for name, counts in (("forward", result.forward), ("backward", result.backward)):
        for kind in ("wait", "copy", "launch") if counts is not None else ():
            found = counts.by_line(kind).most_common(most)  # pyright: ignore
            if found:
                yield f"    {name} {kind}: " + ", ".join(f"{where} {n}" for where, n in found)


def where(error: BaseException) -> str:
    """The lines of the library that an error has come through, the innermost first."""
    found: list[str] = []
    trace = error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if "/pmaf/" in path:
            found.append(f"{path.rpartition('/pmaf/')[2]}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " < ".join(reversed(found))


def timed(row: Row, device: torch.device) -> str:
    """A line with the times of a real device."""
    given = row.make()
    inputs = [x.detach().to(device).requires_grad_(x.requires_grad) for x in given]
    forwards, backwards = [], []
    outputs, gradients = [], []
    with quiet():
        for _ in range(12):
            start = _now(device)
            outputs = tensors_of(row.call(*inputs))
            middle = _now(device)
            seeds = [_seed(x) for x in outputs]
            between = _now(device)
            gradients = _gradients(outputs, inputs, seeds)
            forwards.append(middle - start)
            backwards.append(_now(device) - between)
    found = [x.detach().cpu() for x in (*outputs, *gradients)]
    with quiet(), without_kernels():
        differs, allowed = _compared(row, given, found)
    # The first two calls compile, load and cache.
    times = [1e3 * statistics.median(x[2:]) for x in (forwards, backwards)]
    flag = "" if differs <= allowed else " **differs**"
    return f"| {row.name} | {times[0]:.2f} | {times[1]:.2f} | {differs:.0e}{flag} |"


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--lines", type=int, default=0, help="how many lines of each kind to show")
    parser.add_argument("--capture", action="store_true", help="stop at the first wait")
    parser.add_argument("--tf32", action="store_true", help="allow TF32, and see what differs")
    parser.add_argument("--no-doubles", action="store_true", help="a device without float64")
    parser.add_argument("--default-device", action="store_true", help="as torch's default device")
    parser.add_argument("--record", action="store_true", help=f"write {NOW.name}")
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    parser.add_argument("--device", default=pretend.NAME, help="cuda, mps or xpu: times instead")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.tf32:
        torch.set_float32_matmul_precision("high")
    rows = [x for x in ROWS if given.only in x.name and not (given.no_doubles and x.doubles)]
    if given.device != pretend.NAME:
        device = torch.device(given.device)
        print("| call | ms | ms backward | differs |\n|---|---|---|---|")
        for row in rows:
            print(timed(row, device), flush=True)
        return
    results: list[Result] = []
    print(HEADER + "\n" + "|---" * 6 + "|")
    for row in rows:
        result = run(row, given.capture, not given.no_doubles, given.default_device)
        results.append(result)
        print(line(result), flush=True)
        if result.error is not None:
            print(f"    {result.error}\n    at {where(result.error)}")
        elif given.lines:
            print("\n".join(lines_behind(result, given.lines)))
    if given.record:
        record(results)
    if given.write:
        write(results)


def write(results: Sequence[Result]) -> None:
    """Put the table between the markers of the page."""
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}\n\n{table(results)}\n\n{END}{after}")


def table_of(page: str) -> list[tuple[str, Numbers]]:
    """The names and numbers of a page's table."""
    rows = page.partition(START)[2].partition(END)[0].strip().splitlines()[2:]
    found = []
    for row in rows:
        name, numbers, *_ = (x.strip() for x in row.strip("|").split("|"))
        forward, _, backward = numbers.replace(",", "").replace("**over**", "").partition(";")
        counts = [int(x) for side in (forward, backward) if side for x in side.split("/")]
        found.append((name, Numbers(*counts)))
    return found


if __name__ == "__main__":
    main()
