"""Least squares on the unit sphere for batches of matrices with few columns, one launch a pass.

Matrices are of float32, and their Gram matrices of float64 have all their digits. In the eigenbasis
of `AᵀA` one equation for one number `t ≥ 0` is left, as in `pmaf.linalg.secular`; the derivative is
a solution of the bordered system of `pmaf.tangent.basis`.
"""

# pyright: reportInvalidTypeForm=false, reportPossiblyUnboundVariable=false

from pmaf.launched.kernels.jacobi import eigenbasis, offset, reference
from pmaf.launched.kernels.language import kernel, tl


@kernel
def least_squares_forward(
    A, b_, u, multiplier, kept, count, rows,
    size, outer, inner, row, column, b_size, b_outer, b_inner, b_step,
    N: tl.constexpr, P: tl.constexpr, B: tl.constexpr, R: tl.constexpr, KEEP: tl.constexpr,
    MERGE: tl.constexpr, NOISE: tl.constexpr, SWEEPS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """A global minimiser and its multiplier; nan where numbers are not finite."""
    b = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    known = b < count
    i, j = tl.arange(0, P)[None, :, None], tl.arange(0, P)[None, None, :]
    index = tl.arange(0, P)[None, :]
    tall, wide = known[:, None, None] & (i < N), known[:, None, None] & (j < N)
    at = A + offset(b, size, outer, inner)[:, None, None]
    target = b_ + offset(b, b_size, b_outer, b_inner)
    S = tl.zeros((B, P, P), tl.float64)
    g = tl.zeros((B, P, 1), tl.float64)
    square = tl.zeros((B,), tl.float64)
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
            own = tl.load(target + q * b_step, mask=there, other=0.0).to(tl.float64)
            S += down * right
            g += down * own[:, None, None]
            square += own * own
    odd = tl.where(tl.abs(S) + tl.abs(g) + square[:, None, None] < float("inf"), 0, 1)
    bad = tl.max(tl.max(odd, 2), 1) > 0
    S = tl.where(bad[:, None, None], 0.0, S)
    g = tl.where(bad[:, None, None], 0.0, g)
    square = tl.where(bad, 0.0, square)
    d, V, left = eigenbasis(S, i, j, P, B, SWEEPS)

    # Differences of singular values below rounding of float32 are zero, and so are small ones.
    valid = index < N
    s = tl.sqrt(tl.maximum(tl.where(valid, d, 0.0), 0.0))
    top = tl.max(s, 1)[:, None]
    present = s > MERGE * top
    s = tl.where(present, s, 0.0)
    low = tl.min(tl.where(valid, s, top), 1)[:, None]
    apart = valid & (s - low > MERGE * top)
    d = tl.where(present, d, 0.0)
    floor = tl.min(tl.where(valid, d, top * top * 2.0), 1)[:, None]
    spread = tl.where(apart, d - floor, 0.0)
    lowest = valid & (spread == 0.0)
    c = tl.where(present, tl.sum(V * g, 1), 0.0)

    # The hard case: no part of Aᵀb is in the lowest eigenspace.
    pull = tl.sqrt(tl.sum(tl.where(lowest, c * c, 0.0), 1))[:, None]
    tied = pull <= NOISE * low * tl.sqrt(square)[:, None]
    partial = tl.where(lowest, 0.0, c / tl.where(apart, spread, 1.0))
    # Where squares overflow, the partial solution is longer than one.
    partial = tl.minimum(tl.maximum(partial, -2.0), 2.0)
    slack = 1.0 - tl.sum(partial * partial, 1)[:, None]
    hard = tied & (slack > 0.0)
    tiny = 2.0**-1022
    length = tl.sqrt(tl.sum(c * c, 1))[:, None]
    t = tl.maximum(tl.maximum(pull, length - tl.max(spread, 1)[:, None]), tiny)

    # Newton's iterates increase from the left bound. The first that does not has reached rounding.
    active = (~hard) & known[:, None]
    step = 0
    busy = tl.max(tl.max(tl.where(active, 1, 0), 1), 0)
    while busy * STEPS > step:
        weight = tl.where(valid, c / (spread + t), 0.0)
        total = tl.sum(weight * weight, 1)[:, None]
        slope = tl.sum(weight * weight / (spread + t), 1)[:, None]
        excess = tl.sqrt(total) - 1.0
        following = t + total * excess / tl.where(slope > 0.0, slope, 1.0)
        active = active & (following > t)
        t = tl.where(active, following, t)
        active = active & (excess > 2.0**-50)
        busy = tl.max(tl.max(tl.where(active, 1, 0), 1), 0)
        step += 1

    # A unit vector of the lowest eigenspace that does not depend on the basis: the projection of
    # all ones onto it, or of a direction without structure, or any vector of it.
    ones = tl.where(lowest, tl.sum(tl.where(i < N, V, 0.0), 1), 0.0)
    second = tl.where(i < N, reference(i), 0.0)
    other = tl.where(lowest, tl.sum(V * second, 1), 0.0)
    none = 2.0**-52
    one_is_usable = tl.sum(ones * ones, 1)[:, None] > none * N
    other_is_usable = tl.sum(other * other, 1)[:, None] > none * tl.sum(second * second, 1)
    last = tl.min(tl.where(lowest, index, P), 1)[:, None]
    direction = tl.where(other_is_usable, other, tl.where(index == last, 1.0, 0.0))
    direction = tl.where(one_is_usable, ones, direction)
    size_of = tl.sqrt(tl.sum(direction * direction, 1))[:, None]
    height = tl.sqrt(tl.maximum(slack, 0.0)) / tl.where(size_of > 0.0, size_of, 1.0)

    t = tl.where(hard | (tied & (t == tiny)), 0.0, t)
    shift = tl.where(spread + t > 0.0, spread + t, 1.0)
    inside = tl.where(hard, partial + height * direction, tl.where(valid, c / shift, 0.0))
    total = tl.sqrt(tl.sum(inside * inside, 1))[:, None]
    done = (~active) & (tl.abs(total - 1.0) < 2.0**-26)
    bad = bad | left | (tl.max(tl.where(done, 0, 1), 1) > 0)
    inside = inside / tl.where(total > 0.0, total, 1.0)
    y = tl.sum(V * inside[:, None, :], 2)
    y = tl.where(bad[:, None], float("nan"), y)
    some = known[:, None] & valid
    tl.store(u + b[:, None] * N + index, y, mask=some)
    own = tl.where(bad[:, None], float("nan"), t - floor)
    tl.store(multiplier + b[:, None] + 0 * index, own + 0.0 * spread, mask=some & (index == 0))
    if KEEP:
        base = kept + b * ((N + 3) * N)
        tl.store(base[:, None, None] + j * N + i, V, mask=tall & wide)
        base = base[:, None] + N * N + index
        tl.store(base, spread, mask=some)
        tl.store(base + N, tl.where(bad[:, None], float("nan"), inside), mask=some)
        tl.store(base + 2 * N, t + 0.0 * spread, mask=some)


@kernel
def least_squares_backward(
    kept, v, A, b_, dA, db, count, rows, v_size, v_outer, v_inner, v_step,
    size, outer, inner, row, column, b_size, b_outer, b_inner, b_step,
    N: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
    NEEDS_A: tl.constexpr, NEEDS_B: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """With `z` from the bordered system: `Az` in `b`, and `−(r zᵀ + (Az) yᵀ)` in `A`."""
    b = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    known = b < count
    i, j = tl.arange(0, P)[None, :, None], tl.arange(0, P)[None, None, :]
    index = tl.arange(0, P)[None, :]
    valid = index < N
    some = known[:, None] & valid
    tall, wide = known[:, None, None] & (i < N), known[:, None, None] & (j < N)
    base = kept + b * ((N + 3) * N)
    V = tl.load(base[:, None, None] + j * N + i, mask=tall & wide, other=0.0)
    base = base[:, None] + N * N + index
    spread = tl.load(base, mask=some, other=0.0)
    y_in = tl.load(base + N, mask=some, other=0.0)
    low = tl.load(base + 2 * N, mask=some, other=0.0)
    incoming = v + offset(b, v_size, v_outer, v_inner)[:, None, None]
    given = tl.load(incoming + i * v_step, mask=tall, other=0.0).to(tl.float64)
    v_in = tl.sum(V * given, 1)

    # The rows of the lowest eigenspace are eliminated by hand: see `TangentSolver`.
    h = tl.where(valid, spread + low, 0.0)
    scale = tl.max(h, 1)[:, None]
    threshold = TINY * scale
    lowest = valid & ((spread == 0.0) | (h <= threshold))
    rest = valid & (~lowest)
    inverse = tl.where(rest, 1.0 / tl.where(rest, h, 1.0), 0.0)
    y_low, v_low = tl.where(lowest, y_in, 0.0), tl.where(lowest, v_in, 0.0)
    weighted = inverse * y_in
    q = tl.sum(y_low * y_low, 1)[:, None]
    s_yy = tl.sum(weighted * y_in, 1)[:, None]
    s_vy = tl.sum(weighted * v_in, 1)[:, None]
    determinant = q + low * s_yy
    singular = determinant <= TINY * (q + scale * s_yy)
    over_d = tl.where(singular, 0.0, 1.0 / tl.where(singular, 1.0, determinant))
    lone = singular & (s_yy > 0.0)
    fallback = tl.where(lone, 1.0 / tl.where(lone, s_yy, 1.0), 0.0)
    p = tl.sum(y_low * v_low, 1)[:, None]
    nu = (p + low * s_vy) * over_d + s_vy * fallback
    along = p / tl.where(q > 0.0, q, 1.0) * y_low
    # In a lowest eigenspace of one dimension nothing is orthogonal to y.
    several = tl.sum(tl.where(lowest, 1, 0), 1)[:, None] > 1
    along = tl.where(several, along, v_low)
    large = low > threshold
    over_low = tl.where(large, 1.0 / tl.where(large, low, 1.0), 0.0)
    inside = (s_yy * along - s_vy * y_low) * over_d + over_low * (v_low - along)
    inside = inside + inverse * (v_in - nu * y_in)
    inside = inside - y_in * tl.sum(y_in * inside, 1)[:, None]
    z, y = tl.sum(V * inside[:, None, :], 2), tl.sum(V * y_in[:, None, :], 2)

    at = A + offset(b, size, outer, inner)[:, None]
    target = b_ + offset(b, b_size, b_outer, b_inner)
    for number in range(rows):
        a = tl.load(at + number * row + index * column, mask=some, other=0.0).to(tl.float64)
        image = tl.sum(a * z, 1)
        if NEEDS_B:
            tl.store(db + b * rows + number, image, mask=known)
        if NEEDS_A:
            own = tl.load(target + number * b_step, mask=known, other=0.0).to(tl.float64)
            residual = tl.sum(a * y, 1) - own
            product = -(residual[:, None] * z + image[:, None] * y)
            tl.store(dA + b[:, None] * (rows * N) + number * N + index, product, mask=some)
