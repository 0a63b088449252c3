"""Every layer with every option on small matrices, beside what people write with torch.linalg."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

import pmaf
from pmaf.operators import Diagonal
from pmaf_lab.bench import by_hand
from pmaf_lab.bench.families import EIGEN, GENERAL, SQUARES, Eigen, Squares
from pmaf_lab.bench.present import OURS, ratio, seconds
from pmaf_lab.bench.race import Competitor, Result, race
from pmaf_lab.experiments import (
    Cell,
    Experiment,
    Finding,
    Measured,
    Row,
    Scale,
    Section,
    Table,
)

THEIRS = "torch.linalg"
# Between our results and theirs.
ERRORS = ("difference", "gradient difference")
MANY = 64  # matrices from which on no call may be slower

# From a batch, the size of a matrix and a generator to inputs.
Draw = Callable[[int, Sequence[int], torch.Generator], Result]


@dataclass(frozen=True)
class Source:
    """Where the inputs of a call come from.

    Attributes:
        families: How each family of inputs is drawn, in float32 or complex64.
        sizes: Of the matrices.
        hermitian: Whether only that part of a gradient has a meaning.
    """

    families: Mapping[str, Draw]
    sizes: Sequence[tuple[int, ...]]
    hermitian: bool = False


@dataclass(frozen=True)
class Call:
    """A call, and what people write instead.

    Attributes:
        ours: From the inputs, and from what is `known`, to outputs.
        theirs: The same.
        alone: The least time of theirs over ours for one matrix, None for no goal.
        known: Arguments without gradients, from the inputs.
    """

    name: str
    ours: Callable[..., Result]
    theirs: Callable[..., Result]
    source: Source
    alone: float | None = 1.0
    dtype: torch.dtype | None = None
    known: Callable[[Result], Result] = lambda inputs: ()

    @property
    def layer(self) -> str:
        return self.name.split()[0]

    def goal(self, batch: int) -> float | None:
        """The least time of theirs over ours, None for no goal."""
        return 1.0 if batch >= MANY else self.alone

    def inputs(self, family: str, shape: Sequence[int], device: torch.device) -> Result:
        batch, *size = shape
        generator = torch.Generator().manual_seed(0)
        drawn = self.source.families[family](batch, size, generator)
        if self.dtype is not None:
            drawn = tuple(x.to(_alike(x, self.dtype)) for x in drawn)
        return tuple(x.to(device).requires_grad_() for x in drawn)


def _alike(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype in the field of a tensor: weights of complex matrices are real."""
    return dtype if x.is_complex() else dtype.to_real()


# Where inputs come from.


def _square(family: Eigen) -> Draw:
    return lambda batch, size, generator: (family(batch, size[-1], generator),)


def _system(family: Squares) -> Draw:
    return lambda batch, size, generator: family(batch, size[0], size[1], generator)


def _rows(family: str) -> Draw:
    def draw(batch: int, size: Sequence[int], generator: torch.Generator) -> Result:
        A = torch.randn(batch, *size, generator=generator)
        if family == "nearly singular":
            x = torch.randn(batch, size[-1], 1, generator=generator)
            x = torch.nn.functional.normalize(x, dim=-2)
            A = A - 0.99 * (A @ x) @ x.mT
        return (A,)

    return draw


def _spectrum(family: str) -> Draw:
    """Positive definite."""

    def draw(batch: int, size: Sequence[int], generator: torch.Generator) -> Result:
        n = size[-1]
        if family == "wishart":
            return (EIGEN["wishart"](batch, n, generator) + 0.1 * torch.eye(n),)
        Q = torch.linalg.qr(torch.randn(batch, n, n, generator=generator)).Q
        values = torch.logspace(0, -3, n)
        if family == "equal in pairs":
            values = ((n + 1) // 2 - torch.arange(n) // 2).float()
        A = (Q * values) @ Q.mT
        return (_hermitian_part(A),)

    return draw


def _complex(draw: Draw) -> Draw:
    """Independent real and imaginary parts; a symmetric real part makes a Hermitian matrix."""

    def both(batch: int, size: Sequence[int], generator: torch.Generator) -> Result:
        real, imaginary = (draw(batch, size, generator) for _ in range(2))
        return tuple(torch.complex(x, y) for x, y in zip(real, imaginary))

    return both


def _hermitian(batch: int, size: Sequence[int], generator: torch.Generator) -> Result:
    n = size[-1]
    X = torch.randn(batch, n, 2 * n, generator=generator, dtype=torch.complex64)
    return (_hermitian_part(X @ X.mH / (2 * n)),)


def _hermitian_part(A: Tensor) -> Tensor:
    """Without what rounding left beside it, of which everybody makes something else."""
    return 0.5 * (A + A.mH)


def _one_source(batch: int, size: Sequence[int], generator: torch.Generator) -> Result:
    n = size[-1]
    x = torch.randn(batch, n, 1, generator=generator, dtype=torch.complex64)
    return (_hermitian_part(x @ x.mH) + 0.01 * _hermitian(batch, size, generator)[0],)


def _metric(batch: int, n: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    X = torch.randn(batch, 2 * n, n, generator=generator, dtype=dtype)
    return _hermitian_part(X.mH @ X / (2 * n)) + 0.1 * torch.eye(n)


def _and_metric(draw: Draw) -> Draw:
    def both(batch: int, size: Sequence[int], generator: torch.Generator) -> Result:
        inputs = draw(batch, size, generator)
        return *inputs, _metric(batch, size[-1], generator, inputs[0].dtype)

    return both


def _and_positive(draw: Draw, axis: int | None) -> Draw:
    """And numbers from one half up, as many as rows or columns; one for each matrix for None."""

    def both(batch: int, size: Sequence[int], generator: torch.Generator) -> Result:
        shape = (batch,) if axis is None else (batch, size[axis])
        more = 0.5 + torch.randn(shape, generator=generator).abs()
        return *draw(batch, size, generator), more

    return both


def _of(families: Mapping[str, Draw], change: Callable[[Draw], Draw]) -> Mapping[str, Draw]:
    return {name: change(draw) for name, draw in families.items()}


_SIZES = ((3,), (9,), (32,))
_SYSTEMS = ((3, 3), (8, 9), (32, 32))
_EIGEN = {name: _square(EIGEN[name]) for name in ("goe", "wishart", "gap-1e-4", "laplacian")}
_PENCIL = {name: _EIGEN[name] for name in ("goe", "wishart", "laplacian")}
_HERMITIAN = {"noise": _hermitian, "one source": _one_source}
_NULL = {name: _rows(name) for name in ("noise", "nearly singular")}
_SQUARES = {name: _system(family) for name, family in SQUARES.items()}

SYMMETRIC = Source(_EIGEN, _SIZES, True)
HERMITIAN = Source(_HERMITIAN, _SIZES, True)
NOT_SYMMETRIC = Source({name: _square(GENERAL[name]) for name in GENERAL}, _SIZES)
PENCILS = Source(_of(_PENCIL, _and_metric), _SIZES, True)
HERMITIAN_PENCILS = Source(_of(_HERMITIAN, _and_metric), _SIZES, True)
SCALED = Source(_of(_PENCIL, partial(_and_positive, axis=-1)), _SIZES, True)
POSITIVE = Source(
    {name: _spectrum(name) for name in ("wishart", "down to 1e-3", "equal in pairs")}, _SIZES, True
)
ROWS = Source(_NULL, _SYSTEMS)
COMPLEX_ROWS = Source(_of(_NULL, _complex), _SYSTEMS)
WEIGHTED_ROWS = Source(_of(_NULL, partial(_and_positive, axis=0)), _SYSTEMS)
SYSTEMS = Source(_SQUARES, _SYSTEMS)
COMPLEX_SYSTEMS = Source(_of(_SQUARES, _complex), _SYSTEMS)
WEIGHTED = Source(_of(_SQUARES, partial(_and_positive, axis=0)), _SYSTEMS)
WITH_RADIUS = Source(_of(_SQUARES, partial(_and_positive, axis=None)), _SYSTEMS)
WITH_METRIC = Source(_of(_SQUARES, _and_metric), _SYSTEMS)
WITH_DIAGONAL = Source(_of(_SQUARES, partial(_and_positive, axis=-1)), _SYSTEMS)
WITH_ALL = Source(
    _of(
        _of(_of(_SQUARES, partial(_and_positive, axis=0)), partial(_and_positive, axis=None)),
        _and_metric,
    ),
    _SYSTEMS,
)


# The calls.


def _ones(inputs: Result) -> Result:
    """A reference or a start: a unit vector."""
    n = inputs[0].shape[-1]
    return (torch.full((n,), n**-0.5, dtype=inputs[0].dtype, device=inputs[0].device),)


_F64, _BF16, _C128 = torch.float64, torch.bfloat16, torch.complex128


def _less(
    name: str,
    source: Source,
    ours: Callable[..., Tensor],
    theirs: Callable[..., Result],
    **options: Any,
) -> Call:
    return Call(name, lambda *x: (ours(*x),), theirs, source, **options)


def _ied(name: str, theirs: Callable[..., Result], **options: Any) -> Call:
    """Options of `Call` beside those of `pmaf.ied`."""
    chosen = {
        key: options.pop(key) for key in ("source", "alone", "dtype", "known") if key in options
    }
    return Call(
        name,
        lambda A: tuple(pmaf.ied(A, **options)),
        theirs,
        chosen.pop("source", SYMMETRIC),
        **chosen,
    )


def _everything(A: Tensor, b: Tensor, w: Tensor, r: Tensor, M: Tensor) -> Tensor:
    return pmaf.less(A, b, radius=r, ball=True, M=M, weights=w)


_half_eigh = by_hand.in_float32(by_hand.eigenpairs)
_half_squares = by_hand.in_float32(by_hand.least_squares)

_LESS = (
    _less("less", SYSTEMS, pmaf.less, by_hand.least_squares),
    _less("less float64", SYSTEMS, pmaf.less, by_hand.least_squares, dtype=_F64),
    _less("less bfloat16", SYSTEMS, pmaf.less, _half_squares, dtype=_BF16, alone=None),
    _less("less complex64", COMPLEX_SYSTEMS, pmaf.less, by_hand.least_squares, alone=None),
    _less(
        "less radius=2",
        SYSTEMS,
        partial(pmaf.less, radius=2.0),
        partial(by_hand.least_squares, radius=2.0),
    ),
    _less(
        "less radius tensor",
        WITH_RADIUS,
        lambda A, b, r: pmaf.less(A, b, radius=r),
        lambda A, b, r: by_hand.least_squares(A, b, radius=r),
    ),
    _less(
        "less ball",
        SYSTEMS,
        partial(pmaf.less, ball=True),
        partial(by_hand.least_squares, ball=True),
    ),
    _less(
        "less M",
        WITH_METRIC,
        lambda A, b, M: pmaf.less(A, b, M=M),
        lambda A, b, M: by_hand.least_squares(A, b, M=M),
    ),
    _less(
        "less diagonal M",
        WITH_DIAGONAL,
        lambda A, b, d: pmaf.less(A, b, M=Diagonal(d)),
        lambda A, b, d: by_hand.least_squares(A, b, diagonal=d),
    ),
    _less(
        "less weights",
        WEIGHTED,
        lambda A, b, w: pmaf.less(A, b, weights=w),
        lambda A, b, w: by_hand.least_squares(A, b, weights=w),
    ),
    _less(
        "less float64, weights",
        WEIGHTED,
        lambda A, b, w: pmaf.less(A, b, weights=w),
        lambda A, b, w: by_hand.least_squares(A, b, weights=w),
        dtype=_F64,
    ),
    _less(
        "less ball, radius, M, weights",
        WITH_ALL,
        _everything,
        lambda A, b, w, r, M: by_hand.least_squares(A, b, radius=r, ball=True, M=M, weights=w),
    ),
    _less(
        "less init",
        SYSTEMS,
        lambda A, b, start: pmaf.less(A, b, init=start),
        lambda A, b, start: by_hand.least_squares(A, b),
        known=_ones,
    ),
)

_IED = (
    _ied("ied", by_hand.eigenpairs),
    _ied("ied float64", by_hand.eigenpairs, dtype=_F64),
    _ied("ied bfloat16", _half_eigh, dtype=_BF16),
    _ied("ied complex64", by_hand.eigenpairs, source=HERMITIAN),
    _ied("ied complex128", by_hand.eigenpairs, source=HERMITIAN, dtype=_C128),
    _ied("ied k=3", partial(by_hand.eigenpairs, k=3), k=3),
    _ied(
        "ied k=2, ascending",
        partial(by_hand.eigenpairs, k=2, flip=False),
        k=2,
        descending=False,
    ),
    _ied("ied largest=False", partial(by_hand.eigenpairs, largest=False), largest=False),
    _ied(
        "ied k=2, largest=False",
        partial(by_hand.eigenpairs, k=2, largest=False),
        k=2,
        largest=False,
    ),
    Call(
        "ied reference tensor",
        lambda A, r: tuple(pmaf.ied(A, reference=r)),
        by_hand.signed,
        SYMMETRIC,
        known=_ones,
    ),
    _ied("ied reference integer", partial(by_hand.signed, reference=0), reference=0),
    _ied(
        "ied reference largest", partial(by_hand.signed, reference="largest"), reference="largest"
    ),
    Call(
        "ied k=3, reference tensor",
        lambda A, r: tuple(pmaf.ied(A, 3, reference=r)),
        partial(by_hand.signed, k=3),
        SYMMETRIC,
        known=_ones,
    ),
    Call(
        "ied init",
        lambda A, start: tuple(pmaf.ied(A, init=start)),
        lambda A, start: by_hand.eigenpairs(A),
        SYMMETRIC,
        known=_ones,
    ),
    _ied("ied skip=1", partial(by_hand.eigenpairs, skip=1), skip=1),
    _ied("ied symmetric=False", by_hand.general, source=NOT_SYMMETRIC, symmetric=False, alone=0.7),
)

_PAIRS = (
    Call("pair M", lambda A, M: tuple(pmaf.ied(A, M=M)), by_hand.pairs, PENCILS),
    Call(
        "pair M, float64",
        lambda A, M: tuple(pmaf.ied(A, M=M)),
        by_hand.pairs,
        PENCILS,
        dtype=_F64,
    ),
    Call(
        "pair M, complex64",
        lambda A, M: tuple(pmaf.ied(A, M=M)),
        by_hand.pairs,
        HERMITIAN_PENCILS,
    ),
    Call(
        "pair M, k=3",
        lambda A, M: tuple(pmaf.ied(A, 3, M=M)),
        partial(by_hand.pairs, k=3),
        PENCILS,
    ),
    Call(
        "pair M, skip=1",
        lambda A, M: tuple(pmaf.ied(A, M=M, skip=1)),
        partial(by_hand.pairs, skip=1),
        PENCILS,
        alone=0.7,
    ),
    Call(
        "pair diagonal M",
        lambda A, d: tuple(pmaf.ied(A, M=Diagonal(d))),
        by_hand.diagonal_pairs,
        SCALED,
    ),
    Call(
        "pair diagonal M, skip=1",
        lambda A, d: tuple(pmaf.ied(A, M=Diagonal(d), skip=1)),
        partial(by_hand.diagonal_pairs, skip=1),
        SCALED,
        alone=0.7,
    ),
)


def _null(name: str, source: Source = ROWS, dtype: torch.dtype | None = None) -> Call:
    theirs = by_hand.null_vectors
    theirs = by_hand.in_float32(theirs) if dtype == _BF16 else theirs
    return Call(name, lambda A: (pmaf.nullspace(A),), theirs, source, dtype=dtype)


def _signed_null(A: Tensor, reference: Tensor) -> Result:
    (u,) = by_hand.null_vectors(A)
    return (by_hand.towards(reference)(u),)


_NULLSPACE = (
    _null("nullspace"),
    _null("nullspace float64", dtype=_F64),
    _null("nullspace bfloat16", dtype=_BF16),
    _null("nullspace complex64", COMPLEX_ROWS),
    Call(
        "nullspace weights",
        lambda A, w: (pmaf.nullspace(A, weights=w),),
        lambda A, w: by_hand.null_vectors(w.sqrt().unsqueeze(-1) * A),
        WEIGHTED_ROWS,
    ),
    Call(
        "nullspace k=2",
        lambda A: (pmaf.nullspace(A, 2),),
        partial(by_hand.null_vectors, k=2),
        ROWS,
    ),
    Call(
        "nullspace reference tensor",
        lambda A, r: (pmaf.nullspace(A, reference=r),),
        _signed_null,
        ROWS,
        known=_ones,
    ),
)


def _isvd(name: str, source: Source = ROWS, dtype: torch.dtype | None = None) -> Call:
    theirs = by_hand.in_float32(by_hand.triplets) if dtype == _BF16 else by_hand.triplets
    return Call(name, lambda A: tuple(pmaf.isvd(A)), theirs, source, dtype=dtype)


def _signed_triplets(A: Tensor, reference: Tensor) -> Result:
    left, values, right = by_hand.triplets(A)
    along = (right * reference).sum(-1, keepdim=True)
    sign = torch.where(along < 0, -1.0, 1.0)
    return sign * left, values, sign * right


_ISVD = (
    _isvd("isvd"),
    _isvd("isvd float64", dtype=_F64),
    _isvd("isvd bfloat16", dtype=_BF16),
    _isvd("isvd complex64", COMPLEX_ROWS),
    Call("isvd k=2", lambda A: tuple(pmaf.isvd(A, 2)), partial(by_hand.triplets, k=2), ROWS),
    Call(
        "isvd k=2, largest=False",
        lambda A: tuple(pmaf.isvd(A, 2, largest=False)),
        partial(by_hand.triplets, k=2, largest=False),
        ROWS,
    ),
    Call(
        "isvd reference tensor",
        lambda A, r: tuple(pmaf.isvd(A, reference=r)),
        _signed_triplets,
        ROWS,
        known=_ones,
    ),
)


def _spectral(
    name: str,
    function: Any,
    theirs: Callable[[Tensor], Tensor],
    k: int | None = None,
    dtype: torch.dtype | None = None,
) -> Call:
    by = partial(by_hand.function_of, function=theirs, k=k)
    by = by_hand.in_float32(lambda A: by_hand.function_of(A, theirs, k)) if dtype == _BF16 else by
    return Call(
        name, lambda A: (pmaf.spectral(A, function, k),), by, POSITIVE, alone=0.7, dtype=dtype
    )


_SPECTRAL = (
    _spectral("spectral sqrt", "sqrt", torch.sqrt),
    _spectral("spectral exp", "exp", torch.exp),
    _spectral("spectral function", torch.tanh, torch.tanh),
    _spectral("spectral sqrt, k=2", "sqrt", torch.sqrt, 2),
    _spectral("spectral sqrt, float64", "sqrt", torch.sqrt, dtype=_F64),
    _spectral("spectral sqrt, bfloat16", "sqrt", torch.sqrt, dtype=_BF16),
    Call(
        "spectral exp, complex64",
        lambda A: (pmaf.spectral(A, "exp"),),
        partial(by_hand.function_of, function=torch.exp),
        HERMITIAN,
        alone=0.7,
    ),
)


def _solve(
    name: str, problem: Callable[..., Any], theirs: Callable[..., Result], source: Source
) -> Call:
    """With the report, beside what has none."""
    return Call(
        f"solve {name}",
        lambda *x: (pmaf.solve(problem(*x)).value,),
        theirs,
        source,
        alone=0.7,
    )


def _second(solve: Callable[..., Result]) -> Callable[..., Result]:
    """Vectors without values."""
    return lambda *x: solve(*x)[1:2]


_SOLVE = (
    _solve("SphereLeastSquares", pmaf.SphereLeastSquares, by_hand.least_squares, SYSTEMS),
    _solve(
        "SphereLeastSquares, weights",
        lambda A, b, w: pmaf.SphereLeastSquares(A, b, weights=w),
        lambda A, b, w: by_hand.least_squares(A, b, weights=w),
        WEIGHTED,
    ),
    _solve(
        "PrincipalEigenvectors",
        pmaf.PrincipalEigenvectors,
        _second(by_hand.eigenpairs),
        SYMMETRIC,
    ),
    _solve(
        "PrincipalEigenvectors, k=3",
        partial(pmaf.PrincipalEigenvectors, k=3),
        _second(partial(by_hand.eigenpairs, k=3)),
        SYMMETRIC,
    ),
    _solve(
        "PrincipalEigenvectors, M",
        lambda A, M: pmaf.PrincipalEigenvectors(A, M=M),
        _second(by_hand.pairs),
        PENCILS,
    ),
    _solve(
        "PrincipalSingularVectors",
        partial(pmaf.PrincipalSingularVectors, largest=False),
        by_hand.null_vectors,
        ROWS,
    ),
    _solve(
        "SpectralFunction",
        partial(pmaf.SpectralFunction, function="sqrt"),
        partial(by_hand.function_of, function=torch.sqrt),
        POSITIVE,
    ),
)

_pool = pmaf.PrincipalPool()
_POOL = (
    Call("pool", lambda X: (_pool(X),), by_hand.pooled, ROWS, alone=None),
    Call(
        "pool weights",
        lambda X, w: (_pool(X, w),),
        lambda X, w: by_hand.pooled(w.sqrt().unsqueeze(-1) * X),
        WEIGHTED_ROWS,
        alone=None,
    ),
)

CALLS: dict[str, Call] = {
    call.name: call
    for call in (*_LESS, *_IED, *_PAIRS, *_NULLSPACE, *_ISVD, *_SPECTRAL, *_SOLVE, *_POOL)
}


# The race.


def loss(outputs: Result, seed: int = 1) -> Tensor:
    """Squares, which do not depend on signs, with a weight of their own for each component."""
    generator = torch.Generator().manual_seed(seed)
    total: Any = 0.0
    for x in outputs[1:] if len(outputs) == 2 else outputs:  # values and vectors: the latter
        weights = torch.rand(x.shape[1:], generator=generator).to(x.device, x.dtype.to_real())
        total = total + ((x * x.conj()).real * weights).sum()
    return total


class CallsRace(Experiment):
    """Each cell is a call at one size, on all families of its inputs."""

    name = "calls"
    title = "Every call beside what people write with torch.linalg"
    about = (
        "Both passes of every layer with every option, on one, 64 and 1,000 small matrices, beside "
        "eigh, svd or eig with slices, signs and casts; for least squares on the sphere, eigh of "
        "AᵀA, Newton's method on the secular equation in a fixed number of steps and the implicit "
        "function theorem. The gradients of svd, and of eigh where eigenvalues repeat, are wrong "
        "or not finite; their time counts. Ratios are theirs over ours, in the family where ours "
        "is worst and in the median one. With OMP_NUM_THREADS=1 the times are the processor's, "
        "which other work on the machine does not change: run so where there is any."
    )
    reduced = "a call of each layer and a few options, one family, nine rows, 1 and 64 matrices."
    quick: ClassVar[Sequence[str]] = (
        "less",
        "less weights",
        "less float64",
        "ied",
        "ied reference tensor",
        "ied bfloat16",
        "ied symmetric=False",
        "pair M",
        "pair M, skip=1",
        "nullspace",
        "isvd k=2",
        "spectral sqrt",
        "solve PrincipalEigenvectors",
        "pool",
    )
    batches: ClassVar[Sequence[int]] = (1, 64, 1000)

    def cells(self, scale: Scale) -> list[Cell]:
        if scale == "quick":
            return [
                _cell(CALLS[name], [batch, *CALLS[name].source.sizes[1]], 0.02, 1)
                for name in self.quick
                for batch in self.batches[:2]
            ]
        # Those of nine columns first, so that a run that is stopped says something of every call.
        return [
            _cell(call, [batch, *call.source.sizes[which]], 0.04, None)
            for which in (1, 0, 2)
            for batch in self.batches
            for call in CALLS.values()
        ]

    def measure(
        self,
        device: torch.device,
        *,
        call: str,
        shape: list[int],
        budget: float,
        families: int | None,
    ) -> dict[str, Any]:
        asked = CALLS[call]
        chosen = list(asked.source.families)[:families]
        return {family: _raced(asked, family, shape, device, budget) for family in chosen}

    def present(self, rows: Sequence[Row]) -> Section:
        done = [row for row in rows if row.status == "done"]
        if not done:
            return Section()
        found = {
            (row.params["call"], tuple(row.params["shape"])): self.measured(row) for row in done
        }
        layers = dict.fromkeys(CALLS[name].layer for name, _ in found)
        tables = [_table(layer, batch, found) for layer in layers for batch in _batches(found)]
        notes = dict.fromkeys(
            f"{name} of {row.params['call']}, {family}, does not take part: {entry['skipped']}."
            for row in done
            for family, result in row.values.items()
            for name, entry in result.items()
            if "skipped" in entry
        )
        return Section(
            findings=_findings(found),
            tables=[x for x in tables if x is not None],
            notes=list(notes),
        )

    def measured(self, row: Row) -> Measured:
        """The least and the median ratio of the families; calls take the place of families."""
        numbers: dict[str, float | None] = {}
        for part in ("forward", "backward"):
            times = [seconds(x, OURS, part) for x in row.values.values()]
            numbers[f"ours {part}"] = _median([x for x in times if x is not None])
        for part in ("both", "forward"):
            ratios = {
                family: speed
                for family, found in row.values.items()
                if (speed := ratio(found, THEIRS, part)) is not None
            }
            numbers[f"least {part}"] = min(ratios.values(), default=None)
            numbers[f"median {part}"] = _median(list(ratios.values()))
            if part == "both":
                numbers |= {f"{family} both": speed for family, speed in ratios.items()}
        for family, found in row.values.items():
            for error in ERRORS:
                numbers[f"{family} {error}"] = found.get(OURS, {}).get(error)
        numbers["goal"] = CALLS[row.params["call"]].goal(row.params["shape"][0])
        size = "×".join(str(x) for x in row.params["shape"])
        return Measured(row.params["call"], size, numbers)


def _cell(call: Call, shape: list[int], budget: float, families: int | None) -> Cell:
    count = len(list(call.source.families)[:families])
    params = {"call": call.name, "shape": shape, "budget": budget, "families": families}
    return Cell(params, 0.5 + 5 * budget * count)


def _raced(
    call: Call, family: str, shape: list[int], device: torch.device, budget: float
) -> dict[str, Any]:
    """Both competitors in turn; ours has the differences between their results."""
    inputs = call.inputs(family, shape, device)
    known = call.known(inputs)
    competitors = {
        OURS: Competitor(lambda *x: call.ours(*x, *known)),
        THEIRS: Competitor(lambda *x: call.theirs(*x, *known)),
    }
    # On one thread the time of the processor says the same, and other processes do not change it.
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else None
    found = race(competitors, inputs, loss, device, budget, clock=clock)
    outputs = [x.pop("outputs", None) for x in found.values()]
    gradients = [x.pop("gradients", None) for x in found.values()]
    if None not in outputs:
        pairs = [(_squares(x), _squares(y)) for x, y in zip(*outputs)]
        found[OURS]["difference"] = max(_difference(x, y) for x, y in pairs)
    if None not in gradients:
        G, other = (x[0] for x in gradients)
        if call.source.hermitian:  # only this part has a meaning
            G, other = G + G.mH, other + other.mH
        found[OURS]["gradient difference"] = _difference(G, other)
    for entry in found.values():
        for error in ERRORS:
            if error in entry and not math.isfinite(entry[error]):
                entry[error] = None
    return found


def _squares(x: Tensor) -> Tensor:
    """Without a sign or a phase."""
    return (x * x.conj()).real


def _difference(x: Tensor, y: Tensor) -> float:
    """Relative; that of the median matrix, of those of which it is finite."""
    wide = torch.promote_types(x.dtype, torch.float64)
    x, y = (z.to(wide).flatten(1) if z.dim() > 1 else z.to(wide).unsqueeze(-1) for z in (x, y))
    return float(((x - y).norm(dim=-1) / y.norm(dim=-1)).nanmedian())


# What comes of it.

Key = tuple[str, tuple[int, ...]]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _table(layer: str, batch: int, found: Mapping[Key, Measured]) -> Table | None:
    """The calls of a layer at a number of matrices: ratios and the goal beside them."""
    chosen = {key: row for key, row in found.items() if key[1][0] == batch}
    names = [
        name for name in dict.fromkeys(name for name, _ in chosen) if CALLS[name].layer == layer
    ]
    if not names:
        return None
    sizes = sorted({shape for name, shape in chosen if name in names})
    heads = ["×".join(str(x) for x in shape[1:]) for shape in sizes]
    lines = []
    for name in names:
        rows = [chosen.get((name, shape)) for shape in sizes]
        ratios = [
            None if row is None else row.numbers[f"{which} both"]
            for row in rows
            for which in ("least", "median")
        ]
        lines.append([name, CALLS[name].goal(batch), *ratios])
    columns = [("", "call"), ("", "goal")]
    columns += [(head, which) for head in heads for which in ("least", "median")]
    return Table.of(
        f"bench-calls-{layer}-{batch}",
        f"{layer}, {THEIRS} ÷ ours, both passes, batch {batch}",
        columns,
        lines,
        formats=dict.fromkeys(("goal", "least", "median"), "{:.2f}"),
        note="The family in which ours is worst, and the median one.",
    )


def _batches(found: Mapping[Key, Measured]) -> list[int]:
    return sorted({shape[0] for _, shape in found})


def _findings(found: Mapping[Key, Measured]) -> list[Finding]:
    """Each call at one matrix, and at 64 and more."""
    findings = []
    for name in dict.fromkeys(name for name, _ in found):
        for where, many in (("one matrix", False), (f"{MANY} matrices and more", True)):
            goal = CALLS[name].goal(MANY if many else 1)
            speeds = [
                (speed, row.size)
                for (other, shape), row in found.items()
                if other == name and (shape[0] >= MANY) == many
                if (speed := row.numbers["least both"]) is not None
            ]
            if goal is not None and speeds:
                speed, size = min(speeds)
                findings.append(
                    Finding(
                        f"{name}, {where}: {THEIRS} over ours, least",
                        f"at least {goal:g}×",
                        f"{speed:.2f}× ({size})",
                        speed >= goal,
                    )
                )
    return findings
