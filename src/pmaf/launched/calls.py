"""What the host does for a launch: shapes, strides, and memory for results, which is not written.

Tensors may have any strides. Nothing here reads a number, and the one operation besides a launch is
a copy of a tensor whose batch has three or more strides of their own.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from pmaf import launched
from pmaf.linalg.roundings import merge_tolerance, noise_tolerance

# Jacobi's method converges quadratically: about seven sweeps are taken of matrices of order 32, and
# up to sixteen where eigenvalues cluster.
SWEEPS = 40
# Newton's method takes about eight steps for a secular equation.
STEPS = 64
# The rows of a matrix that are read at a time.
ROWS = 4


class Block(NamedTuple):
    """How the matrices of a batch are spread over programs."""

    padded: int  # the order, a power of two
    matrices: int  # of one program
    warps: int

    def constants(self, count: int) -> tuple[int, dict[str, int]]:
        """The number of programs for so many matrices, and what a kernel is compiled with."""
        of_kernel = {"P": self.padded, "B": self.matrices, "num_warps": self.warps}
        return -(-count // self.matrices), of_kernel


@functools.cache
def block_of(n: int) -> Block:
    """Chosen by `python -m tests.launched_compile`: no kernel spills registers. Never timed."""
    padded = max(2, 1 << (n - 1).bit_length())
    return Block(padded, *_BLOCKS[padded])


_BLOCKS = {2: (16, 1), 4: (4, 1), 8: (2, 1), 16: (1, 2), 32: (1, 8)}


def batch_strides(x: Tensor, own: int) -> tuple[Tensor, tuple[int, int, int]]:
    """The batch of `x`, of whose dimensions the last `own` are not, as at most two dimensions.

    Returns the size of the inner one, and both strides; `x` is copied if it has more.
    """
    dims: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[: x.dim() - own], x.stride()):
        if size == 1:
            continue
        if dims and dims[-1][1] == stride * size:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    if len(dims) > 2:
        return batch_strides(x.contiguous(), own)
    (_, outer), (size, inner) = [(1, 0), (1, 0), *dims][-2:]
    return x, (size, outer, inner)


def eigenvectors(
    A: Tensor, k: int | None, largest: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The k eigenpairs at one end of the symmetric part, the requested end first.

    Args:
        A: `(*, n, n)`, of float32 or float64.
        keep: whether to keep what `eigenvectors_gradient` needs.

    Returns:
        Values `(*, k)`, vectors as columns `(*, n, k)`, both without the last dimension if k is
        None, and what is kept, `(*, n + 2, n)`.
    """
    A = A.detach()
    *batch, _, n = A.shape
    columns = () if k is None else (k,)
    values, vectors = A.new_empty((*batch, *columns)), A.new_empty((*batch, n, *columns))
    kept = A.new_empty((*batch, n + 2, n), dtype=torch.float64) if keep else None
    A, strides = batch_strides(A, 2)
    count = math.prod(batch)
    programs, constants = block_of(n).constants(count)
    launched.launch(
        launched.modules().eigenvectors.eigenvectors_forward, programs,
        A, values, vectors, values if kept is None else kept, count, *strides, *A.stride()[-2:],
        N=n, K=k or 1, LARGEST=largest, KEEP=keep, SCALED=A.dtype == torch.float64,
        LEAST=merge_tolerance(A.dtype) * n**0.5, SWEEPS=SWEEPS, **constants,
    )  # fmt: skip
    return values, vectors, kept


def eigenvectors_gradient(
    kept: Tensor, dtype: torch.dtype, d_values: Tensor | None, d_vectors: Tensor | None
) -> Tensor:
    """The gradient of `A`, `(*, n, n)`, given those of values and of vectors as columns."""
    *batch, _, n = kept.shape
    dA = kept.new_empty((*batch, n, n), dtype=dtype)
    count = math.prod(batch)
    programs, constants = block_of(n).constants(count)
    both, strides = _incoming(kept, d_values, d_vectors)
    launched.launch(
        launched.modules().eigenvectors.eigenvectors_backward, programs,
        kept, *both, dA, count, *strides,
        N=n, **constants, **_tolerances(dtype, d_values, d_vectors),
        SCALED=dtype == torch.float64,
    )  # fmt: skip
    return dA


def _tolerances(
    dtype: torch.dtype, d_values: Tensor | None, d_vectors: Tensor | None
) -> dict[str, float | int | bool]:
    given = d_values if d_vectors is None else d_vectors
    assert given is not None
    return {
        "K": given.shape[-1],
        "HAS_VECTORS": d_vectors is not None,
        "HAS_VALUES": d_values is not None,
        "MERGE": merge_tolerance(dtype),
        "NOISE": noise_tolerance(dtype),
    }


def null_vectors(
    A: Tensor, weights: Tensor | None, k: int | None, largest: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The k singular values at one end of `√W A`, and their right singular vectors.

    Args:
        A: `(*, m, n)`, of float32.
        weights: `(*, m)`, of the rows, with the batch of `A`.
        keep: whether to keep what `null_vectors_gradient` needs.

    Returns:
        Values `(*, k)`, vectors as columns `(*, n, k)`, both without the last dimension if k is
        None, and what is kept, `(*, n + 2, n)`.
    """
    A = A.detach()
    *batch, m, n = A.shape
    columns = () if k is None else (k,)
    values, vectors = A.new_empty((*batch, *columns)), A.new_empty((*batch, n, *columns))
    kept = A.new_empty((*batch, n + 2, n), dtype=torch.float64) if keep else None
    count = math.prod(batch)
    programs, constants = block_of(n).constants(count)
    A, weights, strides = _rows(A, weights)
    launched.launch(
        launched.modules().null_vectors.null_vectors_forward, programs,
        A, A if weights is None else weights, values, vectors, values if kept is None else kept,
        count, m, *strides,
        N=n, K=k or 1, LARGEST=largest, HAS_WEIGHTS=weights is not None, KEEP=keep, R=ROWS,
        LEAST=merge_tolerance(A.dtype) * n**0.5, SWEEPS=SWEEPS, **constants,
    )  # fmt: skip
    return values, vectors, kept


def null_vectors_gradient(
    kept: Tensor,
    A: Tensor,
    weights: Tensor | None,
    d_values: Tensor | None,
    d_vectors: Tensor | None,
    needs: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of `A` and of the weights, given those of values and of vectors as columns."""
    A, weights = A.detach(), None if weights is None else weights.detach()
    *batch, m, n = A.shape
    dA = A.new_empty(A.shape) if needs[0] else None
    dw = A.new_empty((*batch, m)) if needs[1] and weights is not None else None
    first = dw if dA is None else dA
    if first is None:
        return None, None
    count = math.prod(batch)
    programs, constants = block_of(n).constants(count)
    A, weights, strides = _rows(A, weights)
    both, given = _incoming(kept, d_values, d_vectors)
    launched.launch(
        launched.modules().null_vectors.null_vectors_backward, programs,
        kept, *both, A, A if weights is None else weights,
        first if dA is None else dA, first if dw is None else dw, count, m, *given, *strides,
        N=n, R=ROWS, HAS_WEIGHTS=weights is not None, NEEDS_A=dA is not None,
        NEEDS_WEIGHTS=dw is not None, **constants, **_tolerances(A.dtype, d_values, d_vectors),
    )  # fmt: skip
    return dA, dw


def least_squares(A: Tensor, b: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """A global minimiser of `½‖Au − b‖²` on the unit sphere, and its multiplier.

    Args:
        A: `(*, m, n)`, of float32.
        b: `(*, m)`, with the batch of `A`.
        keep: whether to keep what `least_squares_gradient` needs.

    Returns:
        `u`, `(*, n)`, the multiplier `(*,)`, and what is kept, `(*, n + 3, n)`.
    """
    A, b = A.detach(), b.detach()
    *batch, m, n = A.shape
    u, multiplier = A.new_empty((*batch, n)), A.new_empty((*batch,))
    kept = A.new_empty((*batch, n + 3, n), dtype=torch.float64) if keep else None
    count = math.prod(batch)
    programs, constants = block_of(n).constants(count)
    A, right, strides = _rows(A, b)
    launched.launch(
        launched.modules().least_squares.least_squares_forward, programs,
        A, right, u, multiplier, u if kept is None else kept, count, m, *strides,
        N=n, KEEP=keep, R=ROWS, MERGE=merge_tolerance(A.dtype), NOISE=noise_tolerance(A.dtype),
        SWEEPS=SWEEPS, STEPS=STEPS, **constants,
    )  # fmt: skip
    return u, multiplier, kept


def least_squares_gradient(
    kept: Tensor, A: Tensor, b: Tensor, v: Tensor, needs: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of `A` and of `b`, given that of `u`."""
    A, b, v = A.detach(), b.detach(), v.detach()
    dA = A.new_empty(A.shape) if needs[0] else None
    db = A.new_empty(A.shape[:-1]) if needs[1] else None
    first = db if dA is None else dA
    if first is None:
        return None, None
    *batch, m, n = A.shape
    count = math.prod(batch)
    programs, constants = block_of(n).constants(count)
    A, right, strides = _rows(A, b)
    v, given = batch_strides(v, 1)
    launched.launch(
        launched.modules().least_squares.least_squares_backward, programs,
        kept, v, A, right, first if dA is None else dA, first if db is None else db, count, m,
        *given, v.stride(-1), *strides,
        N=n, NEEDS_A=dA is not None, NEEDS_B=db is not None,
        TINY=merge_tolerance(A.dtype) ** 2, **constants,
    )  # fmt: skip
    return dA, db


def _rows(A: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None, tuple[int, ...]]:
    """A matrix and a number for each of its rows, with all of their strides."""
    A, strides = batch_strides(A, 2)
    strides = *strides, *A.stride()[-2:]
    if b is None:
        return A, None, (*strides, 1, 0, 0, 0)
    b, others = batch_strides(b, 1)
    return A, b, (*strides, *others, b.stride(-1))


def _incoming(
    kept: Tensor, d_values: Tensor | None, d_vectors: Tensor | None
) -> tuple[tuple[Tensor, Tensor], tuple[int, ...]]:
    """Gradients of vectors as columns and of values, with all of their strides."""
    v, v_strides = kept, (1, 0, 0, 0, 0)
    if d_vectors is not None:
        v, strides = batch_strides(d_vectors.detach(), 2)
        v_strides = *strides, *v.stride()[-2:]
    values, l_strides = kept, (1, 0, 0, 0)
    if d_values is not None:
        values, strides = batch_strides(d_values.detach(), 1)
        l_strides = *strides, values.stride(-1)
    return (v, values), (*v_strides, *l_strides)
