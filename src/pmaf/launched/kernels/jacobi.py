"""Eigenvectors of small symmetric matrices by Jacobi's rotations, inside of a kernel.

A program has `B` matrices of order `N`, padded to a power of two `P` by zeros, as one tile
`(B, P, P)` of float64. In round `r` of a sweep all pairs `(j, j ^ r)` are rotated at once: these
are disjoint, and the rounds `1, …, P − 1` together have every pair once. A padded row is zero
outside of its diagonal, so that no rotation mixes it with another one.
"""

# pyright: reportInvalidTypeForm=false, reportPossiblyUnboundVariable=false

from pmaf.launched.kernels.language import jit, tl


@jit
def eigenbasis(S, i, j, P: tl.constexpr, B: tl.constexpr, SWEEPS: tl.constexpr):
    """Eigenvalues `(B, P)`, eigenvectors as columns `(B, P, P)`, and which have not converged.

    Args:
        S: symmetric, of entries whose squares are in range.
        i, j: the indices of rows and columns, `(1, P, 1)` and `(1, 1, P)`.
    """
    column = tl.broadcast_to(tl.arange(0, P)[None, :], (B, P))
    # Off the diagonal this is rounding. It counts as zero: among eigenvalues that repeat, rotations
    # by what is left would have angles without a correct digit, and go on for many sweeps.
    least = tl.max(tl.max(tl.abs(S), 2), 1) * 2.0**-56
    d = tl.sum(tl.where(i == j, S, 0.0), 1)
    S = tl.where(i == j, 0.0, S)
    V = tl.where(tl.broadcast_to(i == j, (B, P, P)), 1.0, 0.0).to(tl.float64)
    left = tl.max(tl.max(tl.abs(S), 2), 1)
    busy = tl.max(tl.where(left > least, 1, 0), 0)
    sweep = 0
    while busy * SWEEPS > sweep:
        for r in range(1, P):
            across = tl.broadcast_to(j ^ r, (B, P, P))
            down = tl.broadcast_to(i ^ r, (B, P, P))
            mixed = tl.gather(S, across, 2)
            # The entries (j ^ r, j) and (j, j ^ r) may differ by rounding. Both columns of a pair
            # have to find the same angle, and addition in another order has the same result.
            both = tl.where(i == (j ^ r), S, 0.0) + tl.where(i == j, mixed, 0.0)
            a = 0.5 * tl.sum(both, 1)
            a = tl.where(tl.abs(a) > least[:, None], a, 0.0)
            partner = column ^ r
            side = tl.where(column < partner, -1.0, 1.0).to(tl.float64)
            tau = 0.5 * side * (d - tl.gather(d, partner, 1))
            size = tl.abs(tau) + tl.sqrt(tau * tau + a * a)
            # A quotient of numbers whose squares underflow may be larger than one.
            tangent = tl.minimum(tl.abs(a) / tl.where(size == 0.0, 1.0, size), 1.0)
            tangent = tl.where((a < 0.0) == (tau < 0.0), tangent, -tangent)
            cosine = 1.0 / tl.sqrt(1.0 + tangent * tangent)
            sine = side * tangent * cosine
            d = d + side * tangent * a
            S = cosine[:, None, :] * S + sine[:, None, :] * mixed
            S = cosine[:, :, None] * S + sine[:, :, None] * tl.gather(S, down, 1)
            S = tl.where((i == j) | (i == (j ^ r)), 0.0, S)
            V = cosine[:, None, :] * V + sine[:, None, :] * tl.gather(V, across, 2)
        left = tl.max(tl.max(tl.abs(S), 2), 1)
        busy = tl.max(tl.where(left > least, 1, 0), 0)
        sweep += 1
    return d, V, left > least


@jit
def ranks(d, i, j, N: tl.constexpr, LARGEST: tl.constexpr):
    """The place of each eigenvalue, the requested end first; equal ones keep their order."""
    if LARGEST:
        d = -d
    mine, other = d[:, None, :], d[:, :, None]
    before = (other < mine) | ((other == mine) & (i < j))
    return tl.sum(tl.where(before & (i < N), 1, 0), 1)


@jit
def reference(index):
    """The cosine of `index + 1`, an angle up to 33, to rounding of float64.

    The function of the library for all angles would take many registers.
    """
    x = index.to(tl.float64) + 1.0
    turns = tl.floor(x * 0.15915494309189535 + 0.5)
    # 2π as a number of few digits, whose multiples are exact, and the rest.
    x = (x - turns * 6.283185005187988) - turns * 3.0199159819789713e-07
    y = x * x
    total = y * 0.0 + 1.0
    for step in tl.static_range(15):
        # Horner's rule begins with the term of order 30.
        total = 1.0 - total * y / ((29 - 2 * step) * (30 - 2 * step) * 1.0)
    return total


@jit
def signs(V, i, N: tl.constexpr, LEAST: tl.constexpr):
    """±1 for each column, `(B, P)`: what makes its sum positive, or its product with a reference.

    Args:
        LEAST: sums up to this size are rounding, and the reference decides.
    """
    first = tl.sum(V, 1)
    second = tl.sum(V * tl.where(i < N, reference(i), 0.0), 1)
    chosen = tl.where(tl.abs(first) > LEAST, first, second)
    return tl.where(chosen < 0.0, -1.0, 1.0).to(tl.float64)


@jit
def offset(b, size, outer, inner):
    """Where the entry `b` of a batch begins, whose dimensions have two strides at most."""
    return (b // size) * outer + (b % size) * inner


@jit
def in_range(size):
    """A power of two for each number, which brings squares of numbers of this size into range."""
    one = size * 0.0 + 1.0
    return tl.where(size > 2.0**500, 2.0**-600, tl.where(size < 2.0**-500, 2.0**600, one))
