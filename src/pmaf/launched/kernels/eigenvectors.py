"""Eigenvectors of batches of small symmetric matrices, one launch a pass."""

# pyright: reportInvalidTypeForm=false, reportPossiblyUnboundVariable=false

from pmaf.launched.kernels.coupling import derivative, keep
from pmaf.launched.kernels.jacobi import eigenbasis, in_range, offset, ranks, signs
from pmaf.launched.kernels.language import kernel, tl


@kernel
def eigenvectors_forward(
    A, values, vectors, kept, count, size, outer, inner, row, column,
    N: tl.constexpr, K: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
    LARGEST: tl.constexpr, KEEP: tl.constexpr, SCALED: tl.constexpr,
    LEAST: tl.constexpr, SWEEPS: tl.constexpr,
):  # fmt: skip
    """The requested eigenpairs of the symmetric part; nan for entries that are not finite."""
    b = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    i, j = tl.arange(0, P)[None, :, None], tl.arange(0, P)[None, None, :]
    inside = (b < count)[:, None, None] & (i < N) & (j < N)
    at = A + offset(b, size, outer, inner)[:, None, None]
    S = tl.load(at + i * row + j * column, mask=inside, other=0.0).to(tl.float64)
    T = tl.load(at + j * row + i * column, mask=inside, other=0.0).to(tl.float64)
    odd = tl.where(tl.abs(S) < float("inf"), 0, 1)
    bad = tl.max(tl.max(odd, 2), 1) > 0
    S = tl.where(bad[:, None, None], 0.0, S)
    T = tl.where(bad[:, None, None], 0.0, T)
    unit = tl.full((B,), 1.0, tl.float64)
    if SCALED:
        unit = in_range(tl.max(tl.max(tl.abs(S), 2), 1))
        S = S * unit[:, None, None]
        T = T * unit[:, None, None]
    S = 0.5 * (S + T)
    d, V, left = eigenbasis(S, i, j, P, B, SWEEPS)
    bad = bad | left
    V = V * signs(V, i, N, LEAST)[:, None, :]
    place = ranks(d, i, j, N, LARGEST)
    if KEEP:
        keep(kept, V, d, unit, place, bad, b, count, i, j, N, P)
    V = tl.where(bad[:, None, None], float("nan"), V)
    d = tl.where(bad[:, None], float("nan"), d / unit[:, None])
    index = tl.arange(0, P)[None, :]
    some = (b < count)[:, None] & (index < N) & (place < K)
    tl.store(values + b[:, None] * K + place, d, mask=some)
    place = place[:, None, :]
    at = vectors + b[:, None, None] * (N * K)
    tl.store(at + i * K + place, V, mask=inside & (place < K))


@kernel
def eigenvectors_backward(
    kept, d_vectors, d_values, dA, count,
    v_size, v_outer, v_inner, v_row, v_column, l_size, l_outer, l_inner, l_step,
    N: tl.constexpr, K: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
    HAS_VECTORS: tl.constexpr, HAS_VALUES: tl.constexpr, SCALED: tl.constexpr,
    MERGE: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """The gradient of the matrices, symmetric."""
    b = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    i, j = tl.arange(0, P)[None, :, None], tl.arange(0, P)[None, None, :]
    D = derivative(
        kept, b, count, i, j,
        d_vectors + offset(b, v_size, v_outer, v_inner), v_row, v_column,
        d_values + offset(b, l_size, l_outer, l_inner), l_step,
        N, K, P, B, HAS_VECTORS, HAS_VALUES, False, SCALED, MERGE, NOISE,
    )  # fmt: skip
    inside = (b < count)[:, None, None] & (i < N) & (j < N)
    tl.store(dA + b[:, None, None] * (N * N) + i * N + j, D, mask=inside)
