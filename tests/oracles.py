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


def exact_constrained(
    A: np.ndarray,
    b: np.ndarray,
    radius: float,
    M: np.ndarray,
    weights: np.ndarray,
    v: np.ndarray,
    ball: bool,
) -> tuple[np.ndarray, ...]:
    """Minimiser of `½Σ wᵢ(aᵢu − bᵢ)²` on the ellipsoid `uᵀMu = ρ²`, or in it, in 50 digits.

    Returns the gradients of `vᵀu` in A, b, ρ, M and w as well. For matrices of full column rank,
    outside the hard case.
    """
    A_, b_, M_ = (mp.matrix(x.tolist()) for x in (A, b, M))
    w_, v_, rho = mp.matrix(weights.tolist()), mp.matrix(v.tolist()), mp.mpf(float(radius))
    m, n = A_.rows, A_.cols
    W = mp.diag(list(w_))
    H, g = A_.T * W * A_, A_.T * W * b_

    def at(mu: mpmath.mpf) -> mpmath.matrix:
        return mp.lu_solve(H + mu * M_, g)

    def length(u: mpmath.matrix) -> mpmath.mpf:
        return mp.sqrt((u.T * M_ * u)[0])

    inverse = mp.inverse(mp.cholesky(M_))
    lowest = mp.eigsy(inverse * H * inverse.T, eigvals_only=True)[0]
    mu = mp.mpf(0)
    acts = not ball or length(at(mu)) > rho
    if acts:
        low, high = mp.mpf(0), mp.norm(inverse * g) / rho
        for _ in range(250):
            middle = (low + high) / 2
            low, high = (middle, high) if length(at(middle - lowest)) > rho else (low, middle)
        mu = (low + high) / 2 - lowest
    u = at(mu)
    K = mp.zeros(n + 1)
    K[:n, :n] = H + mu * M_
    border = M_ * u
    for i in range(n):
        K[i, n] = K[n, i] = border[i] if acts else 0
    K[n, n] = 0 if acts else 1
    solved = mp.lu_solve(K, mp.matrix([*v_, 0]))
    z, nu = mp.matrix(solved[:n]), solved[n]
    r, image = A_ * u - b_, A_ * z
    dA = -(W * (r * z.T + image * u.T))
    dM = -mu * (z * u.T + u * z.T) / 2 - nu * u * u.T / 2
    dw = mp.matrix([-r[i] * image[i] for i in range(m)])
    found = ((u, (n,)), (dA, (m, n)), (W * image, (m,)), (mp.matrix([nu * rho]), ()))
    found += ((dM, (n, n)), (dw, (m,)))
    return tuple(np.array(x.tolist(), dtype=np.float64).reshape(shape) for x, shape in found)
