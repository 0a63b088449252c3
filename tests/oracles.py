"""Independent answers to compare with: other algorithms, other arithmetic."""

from __future__ import annotations

import mpmath
import numpy as np
import torch
from mpmath import mp
from scipy.optimize import brentq

mp.dps = 50


def secular(A: np.ndarray, b: np.ndarray, radius: float = 1.0) -> tuple[np.ndarray, float]:
    """Global minimiser and multiplier by bracketing the secular equation, in float64.

    For problems outside the hard case.
    """
    u, s, vt = np.linalg.svd(A, full_matrices=True)
    n = A.shape[1]
    squares, c = np.zeros(n), np.zeros(n)
    squares[: len(s)], c[: len(s)] = s**2, s * (u.T @ b)[: len(s)]
    low = squares.min()

    def excess(t: float) -> float:
        return 1 / radius - 1 / np.linalg.norm(c / (squares - low + t))

    high = np.linalg.norm(c) / radius
    t = brentq(excess, high * 1e-14, high * 1.0001, xtol=1e-300, rtol=1e-15, maxiter=1000)
    return vt.T @ (c / (squares - low + t)), t - low


def exact_less(A: np.ndarray, b: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    """Minimiser and the gradients in A and b of `vᵀy`, in 50 digits, then rounded.

    For problems with more rows than columns, outside the hard case.
    """
    A_, b_, v_ = mp.matrix(A.tolist()), mp.matrix(b.tolist()), mp.matrix(v.tolist())
    n = A_.cols
    gram, g = A_.T * A_, A_.T * b_
    squares, vectors = mp.eigsy(gram)
    c = vectors.T * g
    spread = [squares[i] - squares[0] for i in range(n)]

    def size(t: mpmath.mpf) -> mpmath.mpf:
        return mp.sqrt(sum((c[i] / (spread[i] + t)) ** 2 for i in range(n)))

    low, high = abs(c[0]), mp.norm(c)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if size(middle) > 1 else (low, middle)
    t = (low + high) / 2
    y = vectors * mp.matrix([c[i] / (spread[i] + t) for i in range(n)])
    bordered = mp.zeros(n + 1)
    for i in range(n):
        for j in range(n):
            bordered[i, j] = gram[i, j] + (t - squares[0] if i == j else 0)
        bordered[i, n] = bordered[n, i] = y[i]
    z = mp.lu_solve(bordered, mp.matrix([*v_, 0]))[:n]
    z = mp.matrix(z)
    r = A_ * y - b_
    dA = -(r * z.T + (A_ * z) * y.T)
    return tuple(
        np.array(x.tolist(), dtype=np.float64).reshape(shape)
        for x, shape in ((y, (n,)), (dA, A.shape), (A_ * z, b.shape))
    )


def differences(function, x: torch.Tensor, step: float = 1e-6) -> torch.Tensor:
    """Central differences of a scalar function of one tensor."""
    gradient = torch.zeros_like(x)
    for index in np.ndindex(*x.shape):
        up, down = x.clone(), x.clone()
        up[index] += step
        down[index] -= step
        gradient[index] = (function(up) - function(down)) / (2 * step)
    return gradient
