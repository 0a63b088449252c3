"""The derivative of eigenvectors in their matrix, from a kept eigenbasis, inside of a kernel.

What is kept of a matrix of order `N` are `N + 2` rows: all eigenvectors, those that were requested
first, then the numbers that tell them apart, and a row for the unit of these numbers.
"""

# pyright: reportInvalidTypeForm=false, reportPossiblyUnboundVariable=false

from pmaf.launched.kernels.jacobi import in_range
from pmaf.launched.kernels.language import jit, tl


@jit
def keep(
    kept, V, numbers, unit, place, bad, b, count, i, j,
    N: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Write eigenvectors as rows, in the order of `place`, and their numbers."""
    column = tl.arange(0, P)[None, :]
    base = kept + b * ((N + 2) * N)
    some = (b < count)[:, None] & (column < N)
    V = tl.where(bad[:, None, None], float("nan"), V)
    numbers = tl.where(bad[:, None], float("nan"), numbers)
    inside = (b < count)[:, None, None] & (i < N) & (j < N)
    tl.store(base[:, None, None] + place[:, None, :] * N + i, V, mask=inside)
    tl.store(base[:, None] + N * N + place, numbers, mask=some)
    tl.store(base[:, None] + (N + 1) * N + column, unit[:, None] + 0.0 * numbers, mask=some)


@jit
def derivative(
    kept, b, count, i, j,
    d_vectors, row, column, d_values, step,
    N: tl.constexpr, K: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
    HAS_VECTORS: tl.constexpr, HAS_VALUES: tl.constexpr, SQUARES: tl.constexpr,
    SCALED: tl.constexpr, MERGE: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """The gradient `(B, P, P)` of a loss in the matrix, symmetric.

    With `SQUARES` the eigenvalues are the squares of the kept numbers, and incoming gradients of
    values are those of these roots.

    Args:
        d_vectors: pointers to the gradients of vectors of each matrix, `(B,)`.
        row, column: their strides.
        d_values: pointers to those of the values; `step` is their stride.
    """
    known = b < count
    tall, wide = known[:, None, None] & (i < N), known[:, None, None] & (j < N)
    inside = tall & wide
    index = tl.arange(0, P)[None, :]
    some = known[:, None] & (index < N)
    base = kept + b * ((N + 2) * N)
    V = tl.load(base[:, None, None] + j * N + i, mask=inside, other=0.0)
    numbers = tl.load(base[:, None] + N * N + index, mask=some, other=0.0)
    bad = tl.max(tl.where(numbers == numbers, 0, 1), 1) > 0
    numbers = tl.where(bad[:, None], 0.0, numbers)
    top = tl.max(tl.abs(numbers), 1)
    unit = tl.load(base + (N + 1) * N, mask=known, other=1.0)
    factor = unit
    if HAS_VECTORS:
        requested = inside & (j < K)
        vectors = d_vectors[:, None, None] + i * row
        G = tl.load(vectors + j * column, mask=requested, other=0.0).to(tl.float64)
        if SCALED:
            known_size = tl.where(tl.abs(G) < float("inf"), tl.abs(G), 0.0)
            size = in_range(tl.max(tl.max(known_size, 2), 1))
            G = G * size[:, None, None]
            factor = unit / size
        lengths = tl.sum(G * G, 1)
    D = tl.zeros((B, P, P), tl.float64)
    for q in range(K):
        mine = tl.load(base + N * N + q, mask=known, other=0.0)[:, None]
        down = tl.load(base[:, None, None] + q * N + i, mask=tall, other=0.0)
        right = tl.load(base[:, None, None] + q * N + j, mask=wide, other=0.0)
        weight = tl.zeros((B, P), tl.float64)
        if HAS_VECTORS:
            g = tl.load(vectors + q * column, mask=tall, other=0.0).to(tl.float64)
            if SCALED:
                g = g * size[:, None, None]
            length = tl.sum(tl.sum(g * g, 2), 1)[:, None]
            along = tl.sum(V * g, 1)
            # Vectors stay orthonormal, so that only the antisymmetric part counts among those that
            # are requested, and only if it is more than rounding.
            turn = 0.5 * (along - tl.sum(G * down, 1))
            least = NOISE * tl.sqrt(tl.maximum(lengths, length))
            turn = tl.where(tl.abs(turn) > least, turn, 0.0)
            along = tl.where(index < K, turn, along)
            rise = mine - numbers
            apart = (tl.abs(rise) > MERGE * top[:, None]) & (index < N)
            if SQUARES:
                rise = rise * (mine + numbers)
            weight = tl.where(apart, 0.5 * along / tl.where(apart, rise, 1.0), 0.0)
            weight = weight * factor[:, None]
        if HAS_VALUES:
            own = tl.load(d_values + q * step, mask=known, other=0.0).to(tl.float64)[:, None]
            own = 0.5 * own
            if SQUARES:
                # Of a singular value that is zero, zero is one of the subgradients.
                present = mine > MERGE * top[:, None]
                own = tl.where(present, 0.5 * own / tl.where(present, mine, 1.0), 0.0)
            weight = weight + tl.where(index == q, own, 0.0)
        z = tl.sum(V * weight[:, None, :], 2)
        D += z[:, :, None] * right + down * z[:, None, :]
    return tl.where(bad[:, None, None], float("nan"), D)
