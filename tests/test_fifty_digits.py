"""Ill-conditioned matrices and pairs, real and complex, against 50-digit arithmetic.

Errors of vectors and of derivatives are within 30 times of what rounding the inputs does.
"""

import mpmath
import pytest
import scipy.linalg
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


def vector(A, M, largest):
    """The eigenvector at one end with a positive first component, in 50 digits."""
    inverse = mp.eye(N) if M is None else mp.cholesky(M) ** -1
    C = inverse * A * adjoint(inverse)
    values, vectors = mp.eighe((C + adjoint(C)) / 2)
    order = sorted(range(N), key=lambda i: values[i])
    y = adjoint(inverse) * vectors[:, order[-1] if largest else order[0]]
    return y * (mpmath.conj(y[0]) / abs(y[0]))


def slope(v, A, M, largest, G, which):
    """The derivative of `Re(vᴴy)` as `A`, or `M`, moves along `G`."""
    ends = []
    for sign in (1, -1):
        moved = [A, M]
        moved[which] = moved[which] + sign * STEP * G
        ends.append(sum(mpmath.re(mpmath.conj(a) * b) for a, b in zip(v, vector(*moved, largest))))
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
@pytest.mark.parametrize("case", CASES)
def test_errors_are_those_of_rounding_the_inputs(case, largest, dtype):
    """At the small end of two ill-conditioned matrices this holds in the other order only.

    Every method that factors `M` has errors of eps times the largest eigenvalue there, SciPy's
    `eigh(a, b)` included, and the pair `Mx = μAx` has the same vectors at its large end.
    """
    values, masses = CASES[case]
    exchanged = case == "both" and not largest
    A = with_eigenvalues(values, dtype, 0)
    M = None if masses is None else with_eigenvalues(masses, dtype, 1)
    v = drawn(dtype, 2)[0]
    directions = [drawn(dtype, 3 + i) for i in range(1 if M is None else 2)]
    directions = [0.5 * (G + G.mH) for G in directions]
    with mp.workdps(50):
        given = [exactly(A), None if M is None else exactly(M)]
        towards = [exactly(G) for G in directions]
        right = [mpmath.mpmathify(x) for x in v.tolist()]

        def all_of(pair):
            found = [vector(*pair, largest)]
            return found + [slope(right, *pair, largest, G, i) for i, G in enumerate(towards)]

        truth = all_of(given)
        moved = [mpf(0)] * len(truth)
        for draw in range(4):
            pair = [None if x is None else rounded(x, 10 * draw + i) for i, x in enumerate(given)]
            distances = [mp.norm(mpmath.matrix([x - y]) if not hasattr(x, "rows") else x - y)
                         for x, y in zip(all_of(pair), truth)]  # fmt: skip
            moved = [max(m, d) for m, d in zip(moved, distances)]
        leaves = [x.clone().requires_grad_() for x in (A, M) if x is not None]
        if exchanged:
            assert M is not None
            direct = pmaf.ied(A, M=M, largest=False, reference=0).vectors
            _, theirs = scipy.linalg.eigh(A.numpy(), M.numpy(), subset_by_index=(0, 0))
            theirs = theirs[:, 0] * abs(theirs[0, 0]) / theirs[0, 0]
            ours, theirs = (mp.norm(mpmath.matrix(x.tolist()) - truth[0]) for x in (direct, theirs))
            assert ours <= 30 * theirs, (ours, theirs)
            inverse, x = pmaf.ied(leaves[1], M=leaves[0], reference=0)
            y = x / inverse.sqrt()
        else:
            metric = None if M is None else leaves[1]
            y = pmaf.ied(leaves[0], M=metric, largest=largest, reference=0).vectors
        gradients = torch.autograd.grad(torch.real((v.conj() * y).sum()), leaves)
        error = mp.norm(mpmath.matrix(y.detach().tolist()) - truth[0])
        size = mp.norm(truth[0])
        assert error <= 30 * max(moved[0], EPS * size), (error, moved[0])
        for g, G, exact, bound in zip(gradients, directions, truth[1:], moved[1:]):
            found = float(torch.real((g.conj() * G).sum()))
            # The sum of products itself rounds.
            rounding = EPS * float((g.abs() * G.abs()).sum())
            assert abs(found - exact) <= 30 * max(bound, rounding), (found - exact, bound)
