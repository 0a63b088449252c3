"""Ill-conditioned matrices and pairs, real and complex, against 50-digit arithmetic.

Errors of vectors and of derivatives are within 30 times of what rounding the inputs does.
"""

import logging
from typing import Any

import mpmath
import pytest
import torch
from mpmath import mp, mpf

import pmaf

F64, C128 = torch.float64, torch.complex128
EPS = torch.finfo(F64).eps
N = 4
# In 50 digits a difference quotient with this step has 30 of them.
STEP = mpf(10) ** -15


def drawn(dtype, seed):
    return torch.randn(N, N, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def with_eigenvalues(values, dtype, seed):
    Q = torch.linalg.qr(drawn(dtype, seed)).Q
    A = (Q * torch.tensor(values, dtype=F64)) @ Q.mH
    return 0.5 * (A + A.mH)


GRADED = (1.0, 1e-2, 1e-4, 1e-6)
APART = (1.0, 0.6, -0.3, -0.8)
CASES = {
    "cond(A) = 1e6": (GRADED, None),
    "nearly repeated": ((1 + 1e-6, 1.0, 1e-6, 0.0), None),
    "cond(M) = 1e6": (APART, GRADED),
    "both": (GRADED, GRADED),
    "nearly repeated, of a pair": ((1 + 1e-6, 1.0, 1e-6, 0.0), (1.0, 1.0, 1.0, 1.0)),
}


def exactly(x):
    return mpmath.matrix([[mpmath.mpmathify(entry) for entry in row] for row in x.tolist()])


def adjoint(x):
    return x.T.apply(mpmath.conj)


def vectors(A, M, largest, k):
    """The first k eigenvectors at one end as rows, each with a positive first component."""
    inverse = mp.eye(N) if M is None else mp.cholesky(M) ** -1
    C = inverse * A * adjoint(inverse)
    values, found = mp.eighe((C + adjoint(C)) / 2)
    order = sorted(range(N), key=lambda i: -values[i] if largest else values[i])
    rows = mpmath.matrix(k, N)
    for row, i in enumerate(order[:k]):
        y = adjoint(inverse) * found[:, i]
        rows[row, :] = (y * (mpmath.conj(y[0]) / abs(y[0]))).T
    return rows


def slope(v, A, M, largest, G, which):
    """The derivative of `Σ Re(vᴴy)` as `A`, or `M`, moves along `G`."""
    ends = []
    for sign in (1, -1):
        moved = [A, M]
        moved[which] = moved[which] + sign * STEP * G
        y = vectors(*moved, largest, v.rows)
        ends.append(sum(mpmath.re(mpmath.conj(a) * b) for a, b in zip(v, y)))
    return (ends[0] - ends[1]) / (2 * STEP)


def rounded(x, seed):
    """Every entry changed by half a rounding, which a float would not hold."""
    signs = torch.randn(N, N, dtype=F64, generator=torch.Generator().manual_seed(seed)).sign()
    signs = torch.triu(signs) + torch.triu(signs, 1).mT
    return mpmath.matrix(
        [[x[i, j] * (1 + mpf(EPS) / 2 * int(signs[i, j])) for j in range(N)] for i in range(N)]
    )


@pytest.mark.parametrize("dtype", [F64, C128], ids=["real", "complex"])
@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("draw", [1000, 3000])
def test_errors_are_those_of_rounding_the_inputs(draw, case, k, largest, dtype, caplog):
    """By the default call and, with a reference, by the common path."""
    caplog.set_level(logging.DEBUG, logger="pmaf")
    values, masses = CASES[case]
    A = with_eigenvalues(values, dtype, draw)
    M = None if masses is None else with_eigenvalues(masses, dtype, draw + 1)
    v = drawn(dtype, draw + 2)[:k]
    directions = [drawn(dtype, draw + 3 + i) for i in range(1 if M is None else 2)]
    directions = [0.5 * (G + G.mH) for G in directions]
    with mp.workdps(50):
        given = [exactly(A), None if M is None else exactly(M)]
        towards = [exactly(G) for G in directions]
        right = exactly(v)

        def all_of(pair):
            y = vectors(*pair, largest, k)
            slopes = [slope(right, *pair, largest, G, i) for i, G in enumerate(towards)]
            return [*(y[i, :] for i in range(k)), *(mpmath.matrix([x]) for x in slopes)]

        truth = all_of(given)
        moved = [mpf(0)] * len(truth)
        for seed in range(draw, draw + 80, 10):
            pair = [None if x is None else rounded(x, seed + i) for i, x in enumerate(given)]
            distances = [mp.norm(x - y) for x, y in zip(all_of(pair), truth)]
            moved = [max(m, d) for m, d in zip(moved, distances)]
        for reference in (None, 0):
            caplog.clear()
            leaves = [x.clone().requires_grad_() for x in (A, M) if x is not None]
            options: Any = {"largest": largest, "descending": largest, "reference": reference}
            options["M"] = None if M is None else leaves[1]
            y = pmaf.ied(leaves[0], k, **options).vectors.mT
            if reference is None:
                y = y * (y[:, :1].conj() / y[:, :1].abs())
            if case == "both" and not largest:
                assert "pairs: refined" in caplog.text
            gradients = torch.autograd.grad(torch.real((v.conj() * y).sum()), leaves)
            for row, exact, bound in zip(y.detach().tolist(), truth, moved):
                error, size = mp.norm(mpmath.matrix([row]) - exact), mp.norm(exact)
                assert error <= 30 * max(bound, EPS * size), (error, bound)
            for g, G, exact, bound in zip(gradients, directions, truth[k:], moved[k:]):
                found = float(torch.real((g.conj() * G).sum()))
                # The sum of products itself rounds.
                rounding = EPS * float((g.abs() * G.abs()).sum())
                off = abs(found - exact[0])
                assert off <= 30 * max(bound, rounding), (reference, off, bound)


@pytest.mark.parametrize("dtype", [F64, C128], ids=["real", "complex"])
@pytest.mark.parametrize("kind", ["default", "common", "diagonal"])
def test_all_eigenpairs_have_small_residuals(kind, dtype):
    """Those of small eigenvalues, too, which differ from the largest by a factor of 1e12."""
    for seed in range(20):
        A = with_eigenvalues(GRADED, dtype, 10 * seed)
        M = with_eigenvalues(GRADED, dtype, 10 * seed + 1)
        if kind == "diagonal":
            M = torch.diag(torch.tensor(GRADED, dtype=dtype))
        metric = pmaf.operators.Diagonal(M.diagonal()) if kind == "diagonal" else M
        reference = None if kind == "default" else 0
        values, Y = pmaf.ied(A, N, M=metric, reference=reference)
        rest = torch.linalg.vector_norm(A @ Y - values * (M @ Y), dim=-2)
        sizes = torch.linalg.matrix_norm(A) + values * torch.linalg.matrix_norm(M)
        # Vectors are refined to one rounding where that is possible. Products round N times.
        assert bool((rest <= 2 * N * EPS * sizes * torch.linalg.vector_norm(Y, dim=-2)).all())
