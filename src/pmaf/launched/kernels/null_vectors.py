"""Right singular vectors of the smallest singular values of batches of matrices with few columns.

Matrices are of float32, and their Gram matrices of float64 have all their digits.
"""

# pyright: reportInvalidTypeForm=false, reportPossiblyUnboundVariable=false

from pmaf.launched.kernels.coupling import derivative, keep
from pmaf.launched.kernels.jacobi import eigenbasis, offset, ranks, signs
from pmaf.launched.kernels.language import kernel, tl


@kernel
def null_vectors_forward(
    A, weights, values, vectors, kept, count, rows,
    size, outer, inner, row, column, w_size, w_outer, w_inner, w_step,
    N: tl.constexpr, K: tl.constexpr, P: tl.constexpr, B: tl.constexpr, R: tl.constexpr,
    LARGEST: tl.constexpr, HAS_WEIGHTS: tl.constexpr, KEEP: tl.constexpr,
    LEAST: tl.constexpr, SWEEPS: tl.constexpr,
):  # fmt: skip
    """The requested singular vectors; nan where numbers are not finite, or weights negative.

    Args:
        R: the rows that are read at a time.
    """
    b = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    known = b < count
    i, j = tl.arange(0, P)[None, :, None], tl.arange(0, P)[None, None, :]
    tall, wide = known[:, None, None] & (i < N), known[:, None, None] & (j < N)
    at = A + offset(b, size, outer, inner)[:, None, None]
    weight_at = weights + offset(b, w_size, w_outer, w_inner)
    S = tl.zeros((B, P, P), tl.float64)
    negative = tl.zeros((B,), tl.int32)
    for first in range(0, rows, R):
        for more in tl.static_range(R):
            q = first + more
            there = known & (q + 0 * b < rows)
            here = at + q * row
            down = tl.load(here + i * column, mask=there[:, None, None] & (i < N), other=0.0).to(
                tl.float64
            )
            right = tl.load(here + j * column, mask=there[:, None, None] & (j < N), other=0.0).to(
                tl.float64
            )
            product = down * right
            if HAS_WEIGHTS:
                own = tl.load(weight_at + q * w_step, mask=there, other=0.0)
                negative += tl.where(own < 0.0, 1, 0)
                product = product * own.to(tl.float64)[:, None, None]
            S += product
    odd = tl.where(tl.abs(S) < float("inf"), 0, 1)
    bad = (tl.max(tl.max(odd, 2), 1) > 0) | (negative > 0)
    S = tl.where(bad[:, None, None], 0.0, S)
    d, V, left = eigenbasis(S, i, j, P, B, SWEEPS)
    bad = bad | left
    V = V * signs(V, i, N, LEAST)[:, None, :]
    place = ranks(d, i, j, N, LARGEST)
    # A square of zero may be negative by rounding.
    d = tl.sqrt(tl.maximum(d, 0.0))
    if KEEP:
        keep(kept, V, d, tl.full((B,), 1.0, tl.float64), place, bad, b, count, i, j, N, P)
    V = tl.where(bad[:, None, None], float("nan"), V)
    d = tl.where(bad[:, None], float("nan"), d)
    some = known[:, None] & (tl.arange(0, P)[None, :] < N) & (place < K)
    tl.store(values + b[:, None] * K + place, d, mask=some)
    place = place[:, None, :]
    at_vector = vectors + b[:, None, None] * (N * K)
    tl.store(at_vector + i * K + place, V, mask=tall & wide & (place < K))


@kernel
def null_vectors_backward(
    kept, d_vectors, d_values, A, weights, dA, dw, count, rows,
    v_size, v_outer, v_inner, v_row, v_column, l_size, l_outer, l_inner, l_step,
    size, outer, inner, row, column, w_size, w_outer, w_inner, w_step,
    N: tl.constexpr, K: tl.constexpr, P: tl.constexpr, B: tl.constexpr, R: tl.constexpr,
    HAS_VECTORS: tl.constexpr, HAS_VALUES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, NEEDS_A: tl.constexpr, NEEDS_WEIGHTS: tl.constexpr,
    MERGE: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """With `D` the gradient in `AᵀWA`: `2WAD` in the matrix, and `aᵢᵀDaᵢ` in a weight."""
    b = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    known = b < count
    i, j = tl.arange(0, P)[None, :, None], tl.arange(0, P)[None, None, :]
    D = derivative(
        kept, b, count, i, j,
        d_vectors + offset(b, v_size, v_outer, v_inner), v_row, v_column,
        d_values + offset(b, l_size, l_outer, l_inner), l_step,
        N, K, P, B, HAS_VECTORS, HAS_VALUES, True, False, MERGE, NOISE,
    )  # fmt: skip
    index = tl.arange(0, P)[None, :]
    at = A + offset(b, size, outer, inner)
    weight_at = weights + offset(b, w_size, w_outer, w_inner)
    for first in range(0, rows, R):
        for more in tl.static_range(R):
            q = first + more
            there = known & (q + 0 * b < rows)
            here = at[:, None, None] + q * row
            down = tl.load(here + i * column, mask=there[:, None, None] & (i < N), other=0.0).to(
                tl.float64
            )
            product = tl.sum(down * D, 1)
            if NEEDS_WEIGHTS:
                here = at[:, None] + q * row
                right = tl.load(here + index * column, mask=there[:, None] & (index < N), other=0.0)
                square = tl.sum(product * right.to(tl.float64), 1)
                tl.store(dw + b * rows + q, square, mask=there)
            if NEEDS_A:
                product = 2.0 * product
                if HAS_WEIGHTS:
                    own = tl.load(weight_at + q * w_step, mask=there, other=0.0)
                    product = product * own.to(tl.float64)[:, None]
                into = dA + b[:, None] * (rows * N) + q * N + index
                tl.store(into, product, mask=there[:, None] & (index < N))
