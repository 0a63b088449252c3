"""Compiled kernels for small matrices, where a compiler was at hand when the package was built.

They take plain tensors on the CPU; every caller has another way for everything else. The sources
are in `kernels/`. The environment variable PMAF_NATIVE switches them off with 0, and chooses an
instruction set with `baseline`, `avx2` or `avx512`.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import struct
import threading
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pmaf.linalg.decompositions import eigh
from pmaf.linalg.roundings import ROUNDED, merge_tolerance

# The version of the functions in `kernels/library.cpp`.
_VERSION = 10
# Each is given a structure (`kernels/api.hpp`): first so many addresses, the last of which is that
# of `failed`, and the number of threads; then sizes and options, which many calls have in common:
# the types of these fields.
_FUNCTIONS = {
    "pmaf_forward": (9, "liiidPddd"),
    "pmaf_backward": (12, "liiiidd"),
    "pmaf_less_forward": (7, "liiP"),
    "pmaf_less_backward": (9, "lii"),
    "pmaf_unit_forward": (14, "liiiiiiid"),
    "pmaf_unit_backward": (16, "liiiii"),
    "pmaf_posed_forward": (11, "liiiiiiiidd"),
    "pmaf_posed_backward": (8, "liiiiii"),
}
(
    _FORWARD_SIZES,
    _BACKWARD_SIZES,
    _LESS_SIZES,
    _LESS_BACKWARD_SIZES,
    _UNIT_SIZES,
    _UNIT_BACKWARD_SIZES,
    _POSED_SIZES,
    _POSED_BACKWARD_SIZES,
) = (struct.Struct(sizes).pack for _, sizes in _FUNCTIONS.values())


def _structures() -> str:
    """The structures as Python packs them, in the words of `pmaf_structures`.

    A line has the name of a function, each type and where it is, and the size of the structure.
    """
    lines = []
    for name, (addresses, sizes) in _FUNCTIONS.items():
        types = "P" * addresses + "l" + sizes
        size = struct.calcsize(f"{addresses}Pl") + struct.calcsize(sizes)
        # A field ends where the format up to it does.
        places = [struct.calcsize(types[: i + 1]) - struct.calcsize(x) for i, x in enumerate(types)]
        fields = (f"{x}{place}" for x, place in zip(types, places))
        # A structure ends at a multiple of its alignment, which is that of an address.
        whole = -(-size // struct.calcsize("P")) * struct.calcsize("P")
        lines.append(f"{name} {' '.join(fields)} {whole}\n")
    return "".join(lines)


def _load() -> tuple[Any, str]:
    """The library and its instruction set, or None and why there is none."""
    setting = os.environ.get("PMAF_NATIVE", "")
    if setting == "0":
        return None, "switched off by PMAF_NATIVE=0"
    path = Path(__file__).with_name("libpmaf.so")
    if not path.exists():
        return None, "not compiled: there was no C++ compiler when pmaf was installed"
    try:
        library = ctypes.CDLL(str(path))
        version = library.pmaf_version()
        for name in _FUNCTIONS:
            function = getattr(library, name)
            function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_long
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be loaded: {error}"
    if version != _VERSION:
        return None, f"{path} is of another version of pmaf; install pmaf again"
    for name in ("structures", "choose", "sets"):
        getattr(library, f"pmaf_{name}").restype = ctypes.c_char_p
    theirs, ours = library.pmaf_structures().decode().splitlines(), _structures().splitlines()
    if differ := [b.split()[0] for a, b in zip_longest(theirs, ours, fillvalue="other") if a != b]:
        return None, f"{path} reads other structures in {', '.join(differ)}; install pmaf again"
    for name in ("reduction_numbers", "minimum_numbers", "posed_numbers", "regions"):
        getattr(library, f"pmaf_{name}").restype = ctypes.c_long
    chosen = library.pmaf_choose(setting.encode()).decode()
    if chosen:
        return library, chosen
    sets = library.pmaf_sets().decode()
    if not setting:
        return None, f"compiled for {sets} on another processor; install pmaf again"
    if setting in sets.split(", "):
        return None, f"PMAF_NATIVE={setting}, which this processor does not have"
    return None, f"PMAF_NATIVE={setting}, which this build does not have: it holds {sets}"


def forked_early() -> None:
    """Say that this process was forked from one that had not used torch's threads yet.

    Otherwise the kernels of a forked process use threads of their own, because those of OpenMP
    do not survive a fork.
    """
    if _library is not None:
        _library.pmaf_forked_early()


_library, about = _load()  # `about` is the instruction set, or why there are no kernels
available = _library is not None
# The instruction sets that the library was compiled for, of which the best is taken.
held = tuple(_library.pmaf_sets().decode().split(", ")) if available else ()
# Each function, and what packs its addresses.
(
    _FORWARD,
    _BACKWARD,
    _LESS_FORWARD,
    _LESS_BACKWARD,
    _UNIT_FORWARD,
    _UNIT_BACKWARD,
    _POSED_FORWARD,
    _POSED_BACKWARD,
) = (
    (getattr(_library, name, None), struct.Struct(f"{addresses}Pl").pack)
    for name, (addresses, _) in _FUNCTIONS.items()
)
# The numbers by which the library knows them.
_KINDS = {torch.float32: 0, torch.float64: 1, torch.complex64: 2, torch.complex128: 3}
_REAL = (torch.float32, torch.float64)
EIGENVECTORS = frozenset(_KINDS)  # the dtypes of matrices of which kernels find eigenvectors


def takes(A: Tensor) -> bool:
    """Whether the kernels take this tensor, whose numbers have to be known (`modes.plain`)."""
    return A.dtype in _REAL and takes_eigenvectors(A)


def takes_eigenvectors(A: Tensor) -> bool:
    """Whether kernels find and differentiate eigenvectors of this tensor, real or complex."""
    return _library is not None and A.is_cpu and A.dtype in _KINDS and A.layout == torch.strided


class Pairs(NamedTuple):
    """The largest eigenpairs of each matrix; where `failed`, another way has to be taken."""

    values: Tensor  # (*, k), descending
    vectors: Tensor  # (*, k, n), or as columns (*, n, k) with the memory of rows
    failed: Tensor | None  # (*,) bool, None if all have succeeded


def largest_pairs(
    A: Tensor,
    k: int | None,
    largest: bool = True,
    columns: bool = False,
    reduction: Tensor | None = None,
) -> Pairs:
    """The k largest eigenpairs of `½(A + Aᴴ)`, `(*, n, n)`, or the smallest, ascending.

    The sum of each vector is positive; if it is zero, the product with a fixed direction is, and
    a complex vector counts as failed. With `k = None` there is one, without a dimension for it.
    What the backward pass wants is written into `reduction`.
    """
    plan = forward_plan(A.shape, A.dtype, k, largest)
    return _named(Pairs, planned_pairs(A, plan, columns, reduction))


def planned_pairs(
    A: Tensor, plan: ForwardPlan, columns: bool, reduction: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same for a plan that is known."""
    A = _given(A, A.dtype, A.numel(), symmetric=True)
    values, vectors = _empty_pairs(A, plan, columns)
    kept = 0 if reduction is None else reduction.data_ptr()
    where = A.data_ptr(), 0, values.data_ptr(), vectors.data_ptr(), 0, 0, 0, kept
    return values, vectors, _call(_FORWARD, where, plan.sizes, A, plan.matrices)


def reduction_numbers(n: int, dtype: torch.dtype, k: int | None) -> int:
    """How many numbers of float64 the backward pass of k vectors wants, for each matrix.

    Zero if it wants none: small matrices are reduced again in less time than it takes to keep the
    reduction.
    """
    if _library is None or dtype not in _REAL:
        return 0
    return _library.pmaf_reduction_numbers(n, k or 1)


# The constructor of a named tuple is a function of Python, in which this is the only line.
_named = tuple.__new__


class ForwardPlan(NamedTuple):
    """What a call of a kernel is given besides addresses, and the sizes of what it returns."""

    sizes: bytes
    matrices: int
    values: tuple[Any, ...]
    real: torch.dtype | None  # the dtype of the values, if it is not that of the vectors
    vectors: tuple[Any, ...]
    columns: tuple[tuple[int, ...], tuple[int, ...]] | None  # sizes, and order in memory
    second: Any  # memory that `sizes` refers to


@functools.lru_cache(maxsize=1024)
def forward_plan(
    shape: torch.Size, dtype: torch.dtype, k: int | None, largest: bool, definite: float = 0.0
) -> ForwardPlan:
    """Everything about a call of `planned_pairs` that follows from these."""
    *batch, n, _ = shape
    each, count, d = batch if k is None else [*batch, k], math.prod(batch), len(batch)
    second, memory, tolerance = _second(n, dtype)
    sizes = _FORWARD_SIZES(
        count,
        n,
        k or 1,
        _KINDS[dtype],
        1.0 if largest else -1.0,
        second,
        tolerance,
        definite,
        ROUNDED * torch.finfo(dtype).eps,
    )
    # Not a transposed view: a user may write into what a layer returns.
    columns = None if k is None else ((*batch, n, k), (*range(d), d + 1, d))
    real = None if dtype in _REAL else dtype.to_real()
    return ForwardPlan(sizes, count, (*each,) or ((),), real, (*each, n), columns, memory)


def _call(
    kernel: Any, where: tuple[int, ...], sizes: bytes, A: Tensor, count: int
) -> Tensor | None:
    """Call a kernel on `count` matrices, and return where it failed, None if it did nowhere."""
    function, pack = kernel
    mask, address = _mask(count)
    if not function(pack(*where, address, torch.get_num_threads()) + sizes):
        return None
    return mask[:count].clone().view(A.shape[:-2])


# A failure is rare, and to make a mask for each call takes as long as to solve a few matrices: so
# each thread has one mask, for batches of all sizes up to that of the largest.
_masks = threading.local()


def _mask(count: int) -> tuple[Tensor, int]:
    """Memory for which of `count` entries have failed, and its address."""
    found = getattr(_masks, "found", None)
    if found is None or found[2] < count:
        numbers = max(count, 1024)
        mask = torch.empty(numbers, dtype=torch.bool, device="cpu")
        found = _masks.found = mask, mask.data_ptr(), numbers
    return found[0], found[1]


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _empty_pairs(A: Tensor, plan: ForwardPlan, columns: bool) -> tuple[Tensor, Tensor]:
    """Memory for values and vectors."""
    # torch reads sizes that are arguments of their own in half the time of a tuple.
    if plan.real is None:
        values = A.new_empty(*plan.values)
    else:
        values = A.new_empty(*plan.values, dtype=plan.real)
    if columns and plan.columns is not None:
        sizes, order = plan.columns
        return values, torch.empty_permuted(sizes, order, dtype=A.dtype, device="cpu")
    return values, A.new_empty(*plan.vectors)


class Reduced(NamedTuple):
    """What the backward pass of a pair needs: `C = T⁻¹AT⁻ᴴ`, a factor of `M`, vectors of `C`."""

    matrix: Tensor  # (*, n, n), float64 or complex128
    factor: Tensor  # (*, n, n), in a form of the kernels
    x: Tensor  # (*, k, n)


def largest_of_pair(
    A: Tensor, M: Tensor, k: int | None, largest: bool, keep: bool
) -> tuple[Pairs, Reduced | None]:
    """The k largest eigenpairs of `Ay = λMy`, `yᴴMy = 1`, as columns, and what to keep.

    Both matrices are `(*, n, n)`. An entry also fails if `M` may not be positive definite,
    or if errors of its factor are above rounding of `A` and `M`.
    """
    n, dtype = A.shape[-1], A.dtype
    plan = forward_plan(A.shape, dtype, k, largest, n * torch.finfo(dtype).eps)
    A, M = (_given(x, dtype, plan.matrices * n * n, symmetric=True) for x in (A, M))
    values, vectors = _empty_pairs(A, plan, columns=True)
    kept = None
    if keep:
        wide = torch.promote_types(dtype, torch.float64)
        C, factor = (A.new_empty(A.shape, dtype=wide) for _ in range(2))
        kept = Reduced(C, factor, A.new_empty((*A.shape[:-2], k or 1, n), dtype=wide))
    where = A.data_ptr(), M.data_ptr(), values.data_ptr(), vectors.data_ptr()
    others = tuple(x.data_ptr() for x in kept) if kept else (0, 0, 0)
    failed = _call(_FORWARD, (*where, *others, 0), plan.sizes, A, plan.matrices)
    return Pairs(values, vectors, failed), kept


class Gradients(NamedTuple):
    """The gradients of the inputs that need one; where `failed`, another way has to be taken."""

    tensors: tuple[Tensor | None, ...]
    failed: Tensor | None  # (*,) bool, None if all have succeeded


def pair_gradients(
    kept: Reduced,
    v: Tensor | None,
    d_values: Tensor | None,
    dtype: torch.dtype,
    largest: bool,
    needs: Sequence[bool],
) -> Gradients:
    """The gradients of `A` and `M` where they are needed.

    `v` is `(*, k, n)`, `d_values` is `(*, k)`, given for `A` and `M` of `dtype`.
    """
    C, k = kept.matrix, kept.x.shape[-2]
    plan = backward_plan(C.shape, dtype, k, k, largest)
    wide, entries = torch.promote_types(dtype, torch.float64), plan.entries
    C, factor = (_held(x, wide, entries) for x in (C, kept.factor))
    x = _held(kept.x, wide, plan.vectors)
    v = None if v is None else _given(v, dtype, plan.vectors)
    d = None if d_values is None else _given(d_values, plan.real, plan.values)
    dA, dM = (C.new_empty(C.shape, dtype=dtype) if need else None for need in needs)
    where = 0, 0, *(x.data_ptr() for x in (C, factor, x)), 0, _address(v), 0, _address(d)
    failed = _call(_BACKWARD, (*where, _address(dA), _address(dM)), plan.sizes, C, plan.matrices)
    return Gradients((dA, dM), failed)


def eigenvector_gradient(
    A: Tensor,
    y: Tensor,
    k: int,
    v: Tensor | None,
    d_values: Tensor | None,
    largest: bool = True,
    reduction: Tensor | None = None,
) -> Gradients:
    """The gradient of `A`, `(*, n, n)`, given those of the eigenpairs.

    `y` and `v` are `(*, k, n)`, or `(*, n)` for one; `d_values` is `(*, k)`. The sum of a complex
    vector is positive. `reduction` is what the forward pass has kept.
    """
    plan = backward_plan(A.shape, A.dtype, k, k, largest)
    return planned_gradient(A, y, v, d_values, plan, reduction)


def planned_gradient(
    A: Tensor,
    y: Tensor,
    v: Tensor | None,
    d_values: Tensor | None,
    plan: BackwardPlan,
    reduction: Tensor | None = None,
) -> Gradients:
    """The same for a plan that is known."""
    sizes, count, dtype, real, entries, vectors, values, numbers = plan
    A, y = _given(A, dtype, entries, symmetric=True), _given(y, dtype, vectors)
    v_ = d_ = kept = 0
    if v is not None:
        v = _given(v, dtype, vectors)
        v_ = v.data_ptr()
    if d_values is not None:
        d_values = _given(d_values, real, values)
        d_ = d_values.data_ptr()
    if reduction is not None:
        reduction = _held(reduction, torch.float64, numbers)
        kept = reduction.data_ptr()
    result = torch.empty_like(A)
    where = A.data_ptr(), y.data_ptr(), 0, 0, 0, kept, v_, 0, d_, result.data_ptr(), 0
    return _named(Gradients, ((result,), _call(_BACKWARD, where, sizes, A, count)))


class BackwardPlan(NamedTuple):
    """What a call of a kernel is given besides addresses, and how many numbers it reads."""

    sizes: bytes
    matrices: int
    dtype: torch.dtype
    real: torch.dtype  # the dtype of the values
    entries: int  # of all matrices
    vectors: int  # numbers of all vectors
    values: int
    reduction: int


@functools.lru_cache(maxsize=1024)
def backward_plan(
    shape: torch.Size, dtype: torch.dtype, k: int, rows: int, largest: bool
) -> BackwardPlan:
    """Everything about a call of `planned_gradient` that follows from these."""
    *batch, n, _ = shape
    count, sign = math.prod(batch), 1.0 if largest else -1.0
    return BackwardPlan(
        _BACKWARD_SIZES(count, n, k, rows, _KINDS[dtype], sign, _EQUAL[dtype]),
        count,
        dtype,
        dtype if dtype in _REAL else dtype.to_real(),
        count * n * n,
        count * k * n,
        count * k,
        count * reduction_numbers(n, dtype, k),
    )


def complement_solve(
    A: Tensor, shift: Tensor, y: Tensor, v: Tensor
) -> tuple[Tensor, Tensor | None]:
    """`(shift·I − ½(A + Aᵀ))⁻¹v` on the complement of `y`, and where it failed.

    `y` is `(*, k, n)`, `v` is `(*, p, n)`, `shift` is `(*, p)`.
    """
    dtype, rows = A.dtype, v.shape[-2]
    plan = backward_plan(A.shape, dtype, y.shape[-2], rows, True)
    count = plan.matrices
    A, y = _given(A, dtype, plan.entries, symmetric=True), _given(y, dtype, plan.vectors)
    v, shift = _given(v, dtype, count * rows * A.shape[-1]), _given(shift, dtype, count * rows)
    result = torch.empty_like(v)
    where = A.data_ptr(), y.data_ptr(), 0, 0, 0, 0, v.data_ptr(), shift.data_ptr(), 0
    return result, _call(_BACKWARD, (*where, result.data_ptr(), 0), plan.sizes, A, count)


class Minimum(NamedTuple):
    """The minimiser of each problem; where `failed`, another way has to be taken."""

    u: Tensor  # (*, n)
    multiplier: Tensor  # (*,), float64
    gap: Tensor  # (*,), float64
    numbers: Tensor | None  # (*, p), float64, what the backward pass wants, if anything
    failed: Tensor | None  # (*,) bool, None if all have succeeded


class MinimumPlan(NamedTuple):
    """What both passes are given besides addresses, and the sizes of what they return."""

    sizes: bytes
    reverse: bytes
    problems: int
    u: tuple[Any, ...]
    each: tuple[Any, ...]
    numbers: tuple[int, ...] | None  # of what is kept, None if that is nothing
    entries: int  # of all matrices
    rows: int  # of all matrices, which is how many numbers all b have
    columns: int
    second: Any  # memory that `sizes` refers to


@functools.lru_cache(maxsize=1024)
def minimum_plan(shape: torch.Size, dtype: torch.dtype) -> MinimumPlan:
    """Everything about a call of `least_squares` that follows from these."""
    *batch, m, n = shape
    count, wanted = math.prod(batch), _library.pmaf_minimum_numbers(m, n)
    second, memory, _ = _second(n, dtype)
    return MinimumPlan(
        _LESS_SIZES(count, m, n, second),
        _LESS_BACKWARD_SIZES(count, m, n),
        count,
        (*batch, n),
        (*batch,) or ((),),
        (*batch, wanted) if wanted else None,
        count * m * n,
        count * m,
        count * n,
        memory,
    )


def least_squares(A: Tensor, b: Tensor, keep: bool = True) -> Minimum:
    """The minimiser of `‖Au − b‖` on the unit sphere, for `(*, m, n)` and `(*, m)` of float32.

    With `keep`, what the backward pass wants is returned too.
    """
    plan = minimum_plan(A.shape, A.dtype)
    A, b = _given(A, torch.float32, plan.entries), _given(b, torch.float32, plan.rows)
    u = A.new_empty(*plan.u)
    multiplier = A.new_empty(*plan.each, dtype=torch.float64)
    gap = torch.empty_like(multiplier)
    numbers, kept = None, 0
    if keep and plan.numbers is not None:
        numbers = A.new_empty(plan.numbers, dtype=torch.float64)
        kept = numbers.data_ptr()
    where = A.data_ptr(), b.data_ptr(), u.data_ptr(), multiplier.data_ptr(), gap.data_ptr(), kept
    failed = _call(_LESS_FORWARD, where, plan.sizes, A, plan.problems)
    return _named(Minimum, (u, multiplier, gap, numbers, failed))


def least_squares_gradient(
    A: Tensor,
    b: Tensor,
    u: Tensor,
    v: Tensor,
    multiplier: Tensor,
    numbers: Tensor | None,
    needs: Sequence[bool],
) -> Gradients:
    """The gradients of `A` and `b` where they are needed, given that of `u`."""
    plan = minimum_plan(A.shape, A.dtype)
    single, columns = torch.float32, plan.columns
    A, b = _given(A, single, plan.entries), _given(b, single, plan.rows)
    u, v = _given(u, single, columns), _given(v, single, columns)
    multiplier = _given(multiplier, torch.float64, plan.problems)
    if numbers is not None:
        numbers = _held(numbers, torch.float64, math.prod(plan.numbers or (0,)))
    dA = torch.empty_like(A) if needs[0] else None
    db = torch.empty_like(b) if needs[1] else None
    where = (
        A.data_ptr(),
        b.data_ptr(),
        u.data_ptr(),
        v.data_ptr(),
        multiplier.data_ptr(),
        _address(numbers),
        _address(dA),
        _address(db),
    )
    failed = _call(_LESS_BACKWARD, where, plan.reverse, A, plan.problems)
    return _named(Gradients, ((dA, db), failed))


class Posed(NamedTuple):
    """What of least squares with options follows from shapes and options, for both passes."""

    forward: bytes
    backward: bytes
    problems: int
    dtype: torch.dtype
    real: torch.dtype  # of weights and radius
    counts: tuple[
        int, int, int, int, int
    ]  # numbers of A, b, weights, radius, and M or its diagonal
    u: tuple[int, ...]
    kept: tuple[int, ...]
    square: tuple[int, ...] | None  # of what LAPACK decomposes, if it does


@functools.lru_cache(maxsize=1024)
def posed_plan(
    shape: torch.Size,
    dtype: torch.dtype,
    weighted: bool,
    metric: int,
    ball: bool,
    length: float,
    steps: tuple[int, int],
) -> Posed:
    """Everything about a call of `solve_posed` that follows from these.

    `metric` is how many dimensions `M` has in one entry: two, one for a diagonal, or zero for none.
    """
    *batch, m, n = shape
    count, kind = math.prod(batch), _KINDS[dtype]
    real = dtype if dtype in _REAL else dtype.to_real()
    rows, columns = (2 * m, 2 * n) if kind >= 2 else (m, n)
    p = min(rows, columns)
    form = (0, 2, 1)[metric]
    backward = _POSED_BACKWARD_SIZES(count, m, n, kind, weighted, form, ball)
    pack = _POSED_BACKWARD[1]
    numbers = _library.pmaf_posed_numbers(pack(*(0,) * 9) + backward)
    return Posed(
        _POSED_SIZES(
            count,
            m,
            n,
            kind,
            weighted,
            form,
            ball,
            *steps,
            length,
            torch.finfo(real).eps,
        ),
        backward,
        count,
        dtype,
        real,
        (count * m * n, count * m, count * m, count, count * n**metric),
        (*batch, n),
        (*batch, numbers),
        (*batch, p, p) if p > _ROTATED else None,
    )


def solve_posed(plan: Posed, *tensors: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The minimiser of least squares with options, and what the backward pass wants.

    It is None if an entry has numbers that are refused or has not converged. The tensors are `A`,
    `b`, weights, radius, and `M` or its diagonal; all have the batch dimensions of `A`.
    """
    dtypes = plan.dtype, plan.dtype, plan.real, plan.real, plan.dtype
    held = [
        None if x is None else _given(x, dtype, count)
        for x, dtype, count in zip(tensors, dtypes, plan.counts)
    ]
    A: Any = held[0]
    kept = A.new_empty(plan.kept, dtype=torch.float64)
    given = (*map(_address, held), kept.data_ptr())
    parts = none = (0, 0)
    values = vectors = None
    if plan.square is not None:
        square = A.new_empty(plan.square, dtype=torch.float64)
        where = *given, square.data_ptr(), *none, 0
        if _call(_POSED_FORWARD, where, plan.forward, A, plan.problems) is not None:
            return None
        values, vectors = _decomposed(square)
        parts = values.data_ptr(), vectors.data_ptr()
    u = A.new_empty(plan.u)
    where = *given, 0, *parts, u.data_ptr()
    if _call(_POSED_FORWARD, where, plan.forward, A, plan.problems) is not None:
        return None
    return u, kept


# Up to this many rows or columns, rotations begin with the identity instead of LAPACK's vectors.
# No benchmark has settled the number.
_ROTATED = 4


def _decomposed(square: Tensor) -> tuple[Tensor, Tensor]:
    """Values and vectors of symmetric matrices by LAPACK, in the order that kernels read."""
    values, vectors = eigh(square)
    # LAPACK stores matrices by columns, so that the transposes are in one piece.
    return values, _given(vectors.mT, torch.float64, vectors.numel())


def posed_gradients(
    plan: Posed, kept: Tensor, v: Tensor, tensors: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None] | None:
    """The gradients of those of the tensors that need one; None if an entry has none."""
    kept = _held(kept, torch.float64, math.prod(plan.kept))
    v = _given(v, plan.dtype, math.prod(plan.u))
    found = [
        None
        if x is None or not need
        else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, need in zip(tensors, needs)
    ]
    where = kept.data_ptr(), v.data_ptr(), *map(_address, found)
    failed = _call(_POSED_BACKWARD, where, plan.backward, v.unsqueeze(-1), plan.problems)
    return None if failed is not None else found


def takes_units(*tensors: Tensor) -> bool:
    """Whether kernels take these tensors, whose numbers have to be known, as problems in units.

    The first is the matrix, `(*, m, n)`.
    """
    m, n = tensors[0].shape[-2:]
    return (
        _library is not None
        and m * n <= UNIT_ENTRIES
        and all(x.is_cpu and x.dtype == torch.float64 for x in tensors)
    )


# The most entries of a matrix for which kernels, each of which has one thread, are faster around a
# decomposition than operations of torch, which share each product between all threads. No benchmark
# has settled the number.
UNIT_ENTRIES = 16_384


class UnitMinimum(NamedTuple):
    """The minimisers of problems in the units of a solver; all in double precision."""

    u: Tensor  # (*, n)
    multiplier: Tensor  # (*,)
    residual: Tensor  # (*,)
    gap: Tensor  # (*,)
    rows: Tensor  # (*, p, n), an eigenbasis of `AᵀA`, without the batch if the matrix is shared
    spread: Tensor  # (*, p)
    steps: Tensor  # (*,), int64
    converged: Tensor  # (*,), bool


def solve_unit(
    A: Tensor,
    b: Tensor,
    start: Tensor | None,
    ball: bool,
    rooted: bool,
    eps: float,
    steps: tuple[int, int],
) -> UnitMinimum | None:
    """The minimiser of `½‖Au − b‖²` with `‖u‖ = 1`, or `‖u‖ ≤ 1`; None if there is none.

    `A` is `(*, m, n)`, or `(m, n)` for all `b`, which are `(*, m)`. `eps` is the rounding of the
    data. With `rooted`, multiplier and gap are those of the secular equation, so that a small gap
    has its digits.
    """
    wide, (*batch, m), n = torch.float64, b.shape, A.shape[-1]
    count, p = math.prod(batch), min(m, n)
    shared = A.dim() == 2
    A, b = _given(A, wide, A.numel()), _given(b, wide, count * m)
    start = None if start is None else _given(start.expand(*batch, n), wide, count * n)
    values = vectors = None
    if p > _ROTATED:
        values, vectors = _decomposed(A.mT @ A if m >= n else A @ A.mT)
    each, matrices = (*batch,), A.shape[:-2]
    u, rows, spread = (A.new_empty(x) for x in ((*batch, n), (*matrices, p, n), (*matrices, p)))
    multiplier, residual, gap = A.new_empty(3, *each).unbind()
    counts = torch.empty(each, dtype=torch.int64)
    converged = torch.empty(each, dtype=torch.bool)
    addresses = A, b, start, values, vectors, u, multiplier, residual, gap, rows, spread
    where = *map(_address, addresses), counts.data_ptr(), converged.data_ptr()
    sizes = _UNIT_SIZES(count, m, n, shared, ball, rooted, *steps, eps)
    if _call(_UNIT_FORWARD, where, sizes, b.unsqueeze(-1), count) is not None:
        return None
    return UnitMinimum(u, multiplier, residual, gap, rows, spread, counts, converged)


class UnitGradients(NamedTuple):
    """The gradients of what a problem in the units of a solver consists of."""

    A: Tensor | None  # (*, m, n)
    M: Tensor | None  # (*, n, n), or (*, n) of a diagonal
    b: Tensor | None  # (*, m)
    weights: Tensor | None  # (*, m)
    radius: Tensor | None  # (*,)


def unit_gradients(
    A: Tensor,
    b: Tensor,
    weights: Tensor | None,
    basis: tuple[Tensor, Tensor],
    y: Tensor,
    multiplier: Tensor,
    gap: Tensor,
    v: Tensor,
    d_multiplier: Tensor | None,
    ball: bool,
    metric: int,
    needs: UnitGradients | tuple[bool, ...],
) -> tuple[UnitGradients, Tensor | None]:
    """The gradients that are needed, and where there are none. `metric` is as in `posed_plan`."""
    wide, (*batch, m), n = torch.float64, b.shape, A.shape[-1]
    count, p = math.prod(batch), min(m, n)
    rows, spread = basis
    matrices = math.prod(rows.shape[:-2])
    A, b = _given(A, wide, count * m * n), _given(b, wide, count * m)
    weights = None if weights is None else _given(weights, wide, count * m)
    rows, spread = _given(rows, wide, matrices * p * n), _given(spread, wide, matrices * p)
    y, v = _given(y, wide, count * n), _given(v, wide, count * n)
    multiplier, gap = _given(multiplier, wide, count), _given(gap, wide, count)
    d = None if d_multiplier is None else _given(d_multiplier, wide, count)
    shapes = (m, n), (n,) * metric, (m,), (m,), ()
    found = UnitGradients(
        *(A.new_empty((*batch, *s)) if need else None for s, need in zip(shapes, needs))
    )
    given = A, b, weights, rows, spread, y, multiplier, gap, v, d
    where = *map(_address, given), *map(_address, found)
    shared = matrices != count or rows.dim() == 2
    sizes = _UNIT_BACKWARD_SIZES(count, m, n, shared, ball, metric == 1)
    return found, _call(_UNIT_BACKWARD, where, sizes, b.unsqueeze(-1), count)


def _given(x: Tensor, dtype: torch.dtype, numbers: int, symmetric: bool = False) -> Tensor:
    """A tensor that a kernel may read: `numbers` numbers of `dtype` in one piece.

    The caller holds it as long as the kernel runs, because it may be a copy. A kernel knows an
    address and nothing else, so that this is the gate for every tensor. What torch would read in
    another order, conjugated or negated is written out here; of matrices of which the symmetric
    part is used, the transposes will do.
    """
    if (
        x.dtype is dtype
        and x.numel() == numbers
        and x.is_cpu
        and x.is_contiguous()
        and not x.is_conj()
        and not x.is_neg()
        and x.data_ptr()
    ):
        return x
    if x.dtype is not dtype or x.numel() != numbers or not x.is_cpu or x.layout != torch.strided:
        raise RuntimeError(
            f"a kernel reads {numbers} numbers of {dtype} on the CPU; got a tensor of "
            f"{x.dtype} on {x.device} with shape {tuple(x.shape)}"
        )
    return _laid_out(x) if symmetric else _plain(x)


def _held(x: Tensor, dtype: torch.dtype, numbers: int) -> Tensor:
    """The same for what a forward pass has kept, which kernels read in whole vectors."""
    x = _given(x, dtype, numbers)
    # torch aligns its own memory; that of NumPy, to which a hook may have moved it, is not aligned.
    return x.clone() if x.data_ptr() % _ALIGNED else x


_ALIGNED = 64  # bytes of the longest vector


def _laid_out(A: Tensor) -> Tensor:
    """The matrices, or their transposes, which have the same symmetric part, in one piece."""
    # The transpose of a complex matrix has another Hermitian part.
    if A.is_complex() or A.is_neg() or A.is_contiguous():
        return _plain(A)
    return _plain(A.mT)


def _plain(x: Tensor) -> Tensor:
    """The numbers in one piece, none of which stands for its conjugate or negative."""
    if not x.data_ptr() and x.numel():
        # Zeros of autograd have no memory; a clone of them has.
        if not x._is_zerotensor():
            raise RuntimeError(
                f"a kernel reads a tensor of shape {tuple(x.shape)} without memory: its storage "
                "was freed; keep the inputs of a layer until its backward pass is done"
            )
        x = x.clone()
    return x.resolve_conj().resolve_neg().contiguous()


@functools.lru_cache(maxsize=256)
def _second(n: int, dtype: torch.dtype) -> tuple[int, Any, float]:
    """The direction that decides signs, its memory, and the tolerance for a sum of zero."""
    numbers = (ctypes.c_double * n)(*(math.cos(i + 1) for i in range(n)))
    return ctypes.addressof(numbers), numbers, _EQUAL[dtype] * n**0.5


# Eigenvalues that are closer than this, relative to the largest, count as one.
_EQUAL = {dtype: merge_tolerance(dtype) for dtype in _KINDS}
