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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pmaf.linalg.roundings import ROUNDED, merge_tolerance

# The version of the functions in `kernels/library.cpp`.
_VERSION = 5
# The types of their arguments, a letter each.
_FUNCTIONS = {
    "pmaf_ied_forward": "pliiidpdpppi",
    "pmaf_ied_backward": "pppppliiiiddppi",
    "pmaf_pair_forward": "ppliiidpdddppppppi",
    "pmaf_pair_backward": "pppppliiiddpppi",
    "pmaf_less_forward": "ppliippppppi",
    "pmaf_less_backward": "ppppppliipppi",
}
_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_long, "i": ctypes.c_int, "d": ctypes.c_double}


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
        for name, types in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes = [_TYPES[letter] for letter in types]
            function.restype = ctypes.c_long
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be loaded: {error}"
    if version != _VERSION:
        return None, f"{path} is of another version of pmaf; install pmaf again"
    library.pmaf_choose.restype = ctypes.c_char_p
    chosen = library.pmaf_choose(setting.encode()).decode()
    if setting and chosen != setting:
        return None, f"PMAF_NATIVE={setting}, which this processor or this build does not have"
    return library, chosen


_library, about = _load()  # `about` is the instruction set, or why there are no kernels
available = _library is not None
# The numbers by which the library knows them.
_KINDS = {torch.float32: 0, torch.float64: 1, torch.complex64: 2, torch.complex128: 3}
_REAL = (torch.float32, torch.float64)


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


def largest_pairs(A: Tensor, k: int | None, largest: bool = True, columns: bool = False) -> Pairs:
    """The k largest eigenpairs of `½(A + Aᴴ)`, `(*, n, n)`, or the smallest, ascending.

    The sum of each vector is positive; if it is zero, the product with a fixed direction is, and
    a complex vector counts as failed. With `k = None` there is one, without a dimension for it.
    """
    A = _laid_out(A)
    n, count = A.shape[-1], A.numel() // A.shape[-1] ** 2
    values, vectors = _empty_pairs(A, k, columns)
    second, tolerance = _second(n, A.dtype)
    start = A.data_ptr(), count, n, k or 1, _KINDS[A.dtype], 1.0 if largest else -1.0
    start += second, tolerance, values.data_ptr(), vectors.data_ptr()
    failed = _call(_library.pmaf_ied_forward, start, A, count)
    return Pairs(values, vectors, failed)


def _call(function: Any, arguments: tuple[Any, ...], A: Tensor, count: int) -> Tensor | None:
    """Call a kernel on `count` matrices, and return where it failed, None if it did nowhere."""
    threads = torch.get_num_threads()
    # A failure is rare, and a few matrices are solved twice faster than the mask is made.
    failed = _mask(A) if count > _FEW else None
    if not function(*arguments, None if failed is None else failed.data_ptr(), threads):
        return None
    if failed is None:
        failed = _mask(A)
        function(*arguments, failed.data_ptr(), threads)
    return failed


def _empty_pairs(A: Tensor, k: int | None, columns: bool) -> tuple[Tensor, Tensor]:
    """Memory for values and vectors."""
    shape, dtype = A.shape, A.dtype
    batch, n = shape[:-2], shape[-1]
    each = batch if k is None else (*batch, k)
    values = A.new_empty(each) if dtype in _REAL else A.new_empty(each, dtype=dtype.to_real())
    if k is None or not columns:
        return values, A.new_empty((*each, n))
    d = len(batch)
    layout = (*range(d), d + 1, d)  # not a view: a user may write into what a layer returns
    return values, torch.empty_permuted((*batch, n, k), layout, dtype=dtype, device="cpu")


def _mask(A: Tensor) -> Tensor:
    return torch.empty(A.shape[:-2], dtype=torch.bool, device="cpu")


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
    A, M = _laid_out(A), _laid_out(M)
    n, dtype, count = A.shape[-1], A.dtype, A.numel() // A.shape[-1] ** 2
    values, vectors = _empty_pairs(A, k, columns=True)
    kept = None
    if keep:
        wide = torch.promote_types(dtype, torch.float64)
        C, factor = (A.new_empty(A.shape, dtype=wide) for _ in range(2))
        kept = Reduced(C, factor, A.new_empty((*A.shape[:-2], k or 1, n), dtype=wide))
    second, tolerance = _second(n, dtype)
    arguments = (
        A.data_ptr(),
        M.data_ptr(),
        count,
        n,
        k or 1,
        _KINDS[dtype],
        1.0 if largest else -1.0,
        second,
        tolerance,
        n * torch.finfo(dtype).eps,
        ROUNDED * torch.finfo(dtype).eps,
        values.data_ptr(),
        vectors.data_ptr(),
        *((x.data_ptr() for x in kept) if kept else (None, None, None)),
    )
    failed = _call(_library.pmaf_pair_forward, arguments, A, count)
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
    C = kept.matrix
    n = C.shape[-1]
    v, d = (None if x is None else _plain(x) for x in (v, d_values))
    dA, dM = (C.new_empty(C.shape, dtype=dtype) if need else None for need in needs)
    count = C.numel() // n**2
    arguments = (
        *(x.data_ptr() for x in kept),
        *(None if x is None else x.data_ptr() for x in (v, d)),
        count,
        n,
        kept.x.shape[-2],
        _KINDS[dtype],
        1.0 if largest else -1.0,
        _EQUAL[dtype],
        *(None if x is None else x.data_ptr() for x in (dA, dM)),
    )
    failed = _call(_library.pmaf_pair_backward, arguments, C, count)
    return Gradients((dA, dM), failed)


def eigenvector_gradient(
    A: Tensor,
    y: Tensor,
    k: int,
    v: Tensor | None,
    d_values: Tensor | None,
    largest: bool = True,
) -> Gradients:
    """The gradient of `A`, `(*, n, n)`, given those of the eigenpairs.

    `y` and `v` are `(*, k, n)`, or `(*, n)` for one; `d_values` is `(*, k)`. The sum of a complex
    vector is positive.
    """
    A = _laid_out(A)
    result, n, dtype = torch.empty_like(A), A.shape[-1], A.dtype
    y = y if y.is_contiguous() and not y.is_conj() else _plain(y)
    v = v if v is None or (v.is_contiguous() and not v.is_conj()) else _plain(v)
    d = d_values if d_values is None or d_values.is_contiguous() else d_values.contiguous()
    count = A.numel() // (n * n)
    arguments = (
        A.data_ptr(),
        y.data_ptr(),
        None if v is None else v.data_ptr(),
        None,
        None if d is None else d.data_ptr(),
        count,
        n,
        k,
        k,
        _KINDS[dtype],
        1.0 if largest else -1.0,
        _EQUAL[dtype],
        result.data_ptr(),
    )
    return Gradients((result,), _call(_library.pmaf_ied_backward, arguments, A, count))


def complement_solve(
    A: Tensor, shift: Tensor, y: Tensor, v: Tensor
) -> tuple[Tensor, Tensor | None]:
    """`(shift·I − ½(A + Aᵀ))⁻¹v` on the complement of `y`, and where it failed.

    `y` is `(*, k, n)`, `v` is `(*, p, n)`, `shift` is `(*, p)`.
    """
    A, y, v, shift = _laid_out(A), y.contiguous(), v.contiguous(), shift.contiguous()
    result, n = torch.empty_like(v), A.shape[-1]
    count = A.numel() // (n * n)
    arguments = (
        A.data_ptr(),
        y.data_ptr(),
        v.data_ptr(),
        shift.data_ptr(),
        None,
        count,
        n,
        y.shape[-2],
        v.shape[-2],
        _KINDS[A.dtype],
        1.0,
        _EQUAL[A.dtype],
        result.data_ptr(),
    )
    return result, _call(_library.pmaf_ied_backward, arguments, A, count)


class Minimum(NamedTuple):
    """The minimiser of each problem; where `failed`, another way has to be taken."""

    u: Tensor  # (*, n)
    multiplier: Tensor  # (*,), float64
    gap: Tensor  # (*,), float64
    gram: Tensor | None  # (*, p, p), float64, if it is small beside A
    failed: Tensor | None  # (*,) bool, None if all have succeeded


def least_squares(A: Tensor, b: Tensor) -> Minimum:
    """The minimiser of `‖Au − b‖` on the unit sphere, for `(*, m, n)` and `(*, m)` of float32."""
    A, b = A.contiguous(), b.contiguous()
    batch, (m, n) = A.shape[:-2], A.shape[-2:]
    u = A.new_empty((*batch, n))
    multiplier, gap = (A.new_empty(batch, dtype=torch.float64) for _ in range(2))
    p = min(m, n)
    # At most half of the memory of A.
    keep = 4 * p <= max(m, n)
    gram = A.new_empty((*batch, p, p), dtype=torch.float64) if keep else None
    arguments = (
        A.data_ptr(),
        b.data_ptr(),
        batch.numel(),
        m,
        n,
        _second(n, A.dtype)[0],
        u.data_ptr(),
        multiplier.data_ptr(),
        gap.data_ptr(),
        None if gram is None else gram.data_ptr(),
    )
    failed = _call(_library.pmaf_less_forward, arguments, A, batch.numel())
    return Minimum(u, multiplier, gap, gram, failed)


def least_squares_gradient(
    A: Tensor,
    b: Tensor,
    u: Tensor,
    v: Tensor,
    multiplier: Tensor,
    gram: Tensor | None,
    needs: Sequence[bool],
) -> Gradients:
    """The gradients of `A` and `b` where they are needed, given that of `u`."""
    A, b, u, v = (x.contiguous() for x in (A, b, u, v))
    m, n = A.shape[-2:]
    count = A.numel() // (m * n)
    dA, db = (torch.empty_like(x) if need else None for x, need in zip((A, b), needs))
    arguments = (
        A.data_ptr(),
        b.data_ptr(),
        u.data_ptr(),
        v.data_ptr(),
        multiplier.data_ptr(),
        None if gram is None else gram.data_ptr(),
        count,
        m,
        n,
        None if dA is None else dA.data_ptr(),
        None if db is None else db.data_ptr(),
    )
    return Gradients((dA, db), _call(_library.pmaf_less_backward, arguments, A, count))


def _laid_out(A: Tensor) -> Tensor:
    """The matrices, or their transposes, which have the same symmetric part, in one piece."""
    if A.is_complex():  # the transpose of a complex matrix has another Hermitian part
        return A if A.is_contiguous() and not A.is_conj() else _plain(A)
    return A if A.is_contiguous() else A.mT.contiguous()


def _plain(x: Tensor) -> Tensor:
    """The numbers in one piece, none of which stands for its conjugate."""
    return x.resolve_conj().contiguous()


@functools.lru_cache(maxsize=256)
def _second(n: int, dtype: torch.dtype) -> tuple[Any, float]:
    """The direction that decides signs, and the tolerance for a sum of zero."""
    numbers = (ctypes.c_double * n)(*(math.cos(i + 1) for i in range(n)))
    return numbers, _EQUAL[dtype] * n**0.5


# So many matrices are solved again where one has failed, to find out which.
_FEW = 32
# Eigenvalues that are closer than this, relative to the largest, count as one.
_EQUAL = {dtype: merge_tolerance(dtype) for dtype in _KINDS}
