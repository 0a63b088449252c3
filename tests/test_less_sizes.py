"""LESS with many rows or columns, in float32, where singular values differ by a lot.

The bounds are those of first-order perturbation theory: a backward stable solve returns the
solution for some `A + E`, `‖E‖ ≤ c·eps·‖A‖`, and `u` moves with `E` by at most

    ‖E‖ (‖AH⁺‖ + ‖r‖‖H⁺‖),   H = P(AᵀA + μI)P,   r = Au − b.

The gradients `db = Az` and `dA = −(rzᵀ + (Az)uᵀ)`, with `Hz = Pv`, move by a multiple of that,
relatively, and by `Ez` and `(Eu)zᵀ`, which are of size `‖E‖‖z‖` however small `Az` and `r` are.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import pmaf
from pmaf.solvers import Cholesky, Secular
from tests.oracles import secular

T = torch.float64
EPS = torch.finfo(torch.float32).eps
# A solve takes some dozens of operations, each of them good for a rounding.
ROUNDINGS = 64


def graded(batch: int, m: int, n: int, cond: float, length: float) -> tuple[Tensor, Tensor]:
    """Float32 problems whose singular values span `cond`, with `‖A⁺b‖` about `length`."""
    g = torch.Generator().manual_seed(m + n)
    p = min(m, n)
    A = torch.randn(batch, m, n, generator=g, dtype=T) / max(m, n) ** 0.5
    scales = torch.logspace(0, -np.log10(cond), p, dtype=T)
    A = A * scales if m >= n else A * scales.unsqueeze(-1)
    x = torch.randn(batch, n, generator=g, dtype=T)
    if m < n:  # only the part in the row space shows in b
        x = (torch.linalg.pinv(A) @ (A @ x.unsqueeze(-1))).squeeze(-1)
    b = (A @ (length * x / x.norm(dim=-1, keepdim=True)).unsqueeze(-1)).squeeze(-1)
    return A.float(), b.float()


class Exact:
    """Everything about one float32 problem, in float64."""

    def __init__(self, A: Tensor, b: Tensor, v: Tensor) -> None:
        A, b, v = (x.double().numpy() for x in (A, b, v))
        left, s, right = np.linalg.svd(A, full_matrices=False)
        # In coordinates of the row space and, for a wide matrix, of one direction beside it,
        # where all directions of the null space are alike.
        beside = v - right.T @ (right @ v)
        spare = np.linalg.norm(beside) if A.shape[0] < A.shape[1] else 0.0
        rows = np.vstack([right, beside / spare]) if spare else right
        small = np.diag(s) @ (right @ rows.T)
        known = left.T @ b
        u, self.multiplier = secular(small, known)
        tangent = np.eye(len(u)) - np.outer(u, u)
        H = tangent @ (small.T @ small + self.multiplier * np.eye(len(u))) @ tangent
        inverse = np.linalg.pinv(H + np.outer(u, u)) - np.outer(u, u)
        z = inverse @ (rows @ v)
        self.u = rows.T @ u
        r = A @ self.u - b
        image = left @ (small @ z)
        self.dA = -(np.outer(r, rows.T @ z) + np.outer(image, self.u))
        self.db = image
        top, norm = s[0], np.linalg.norm
        self.gap = self.multiplier + (0.0 if A.shape[0] < A.shape[1] else s[-1] ** 2)
        # An inner problem sees the smallest singular value, an outer one the largest and Aᵀb.
        pull = norm(small.T @ known)
        self.gap_moves = top * s[-1] if self.multiplier < 0 else top**2 + pull
        self.moves = top * (norm(small @ inverse, 2) + norm(r) * norm(inverse, 2))
        self.direct = 2 * top * norm(z)


def weights(A: Tensor) -> Tensor:
    """The gradient handed in. Of a wide matrix it has a part in the row space as large as the rest:
    the rest drowns `db`, which is a function of the row space alone."""
    v = torch.cos(torch.arange(A.shape[-1], dtype=torch.float32) + 1).expand(len(A), -1)
    if A.shape[-2] >= A.shape[-1]:
        return v
    rows = torch.linalg.svd(A.double(), full_matrices=False)[2]
    inside = torch.cos(torch.arange(rows.shape[-2], dtype=T) + 1) @ rows
    return v / v.norm(dim=-1, keepdim=True) + inside.to(v) / inside.norm(dim=-1, keepdim=True).to(v)


def check(A: Tensor, b: Tensor, solver: pmaf.solvers.Solver | None) -> None:
    """Solution, multiplier, gap and gradients of every problem of a batch."""
    v = weights(A)
    problem = pmaf.SphereLeastSquares(A.requires_grad_(), b.requires_grad_())
    found = pmaf.solve(problem, solver=solver)
    dA, db = torch.autograd.grad((found.value * v).sum(), (A, b))
    assert found.converged.all()
    for i in range(len(A)):
        exact = Exact(A[i].detach(), b[i].detach(), v[i])
        allowed = ROUNDINGS * EPS * exact.moves
        assert allowed < 0.1, "the case says nothing"
        assert np.linalg.norm(found.value[i].detach().double().numpy() - exact.u) <= allowed
        noise = ROUNDINGS * EPS * (exact.gap_moves + abs(exact.gap))
        assert abs(float(found.gap[i]) - exact.gap) <= noise
        assert abs(float(found.multiplier[i].detach()) - exact.multiplier) <= noise
        for ours, truth in ((dA[i], exact.dA), (db[i], exact.db)):
            size = np.linalg.norm(truth)
            bound = 2 * allowed * size + ROUNDINGS * EPS * exact.direct
            assert bound < 0.5 * size, "the case says nothing"
            assert np.linalg.norm(ours.double().numpy() - truth) <= bound


@pytest.mark.parametrize("solver", [None, Secular(), Cholesky()], ids=repr)
@pytest.mark.parametrize("length", [0.7, 3.0], ids=["inner", "outer"])
@pytest.mark.parametrize(
    ("batch", "m", "n", "cond"),
    [
        (1, 30_000, 40, 300),
        (1, 100_000, 40, 300),
        (1, 1_000, 40, 1_000),
        (1, 100_000, 12, 100),
        (1, 30_000, 3, 1_000),
        (20, 10_000, 14, 1_600),
        (300, 2_000, 14, 1_000),
    ],
)
def test_tall(batch, m, n, cond, length, solver):
    check(*graded(batch, m, n, cond, length), solver)


@pytest.mark.parametrize("solver", [None, Secular()], ids=repr)
@pytest.mark.parametrize("length", [1.05, 3.0])
@pytest.mark.parametrize(
    ("batch", "m", "n", "cond"),
    [(1, 40, 20_000, 1_000), (2, 12, 20_000, 1_000), (1, 40, 1_000, 1_000)],
)
def test_wide(batch, m, n, cond, length, solver):
    check(*graded(batch, m, n, cond, length), solver)


@pytest.mark.parametrize("n", [3, 14, 40])
@pytest.mark.parametrize("m", [1_000, 30_000, 100_000])
def test_rounding_is_not_a_singular_value(m, n):
    """Of a matrix of rank one everything but one singular value is rounding, at any size."""
    g = torch.Generator().manual_seed(0)
    A = torch.randn(m, 1, generator=g) * torch.randn(n, generator=g)
    found = pmaf.solve(pmaf.SphereLeastSquares(A, 0.5 * A[:, 0] / A.norm()))
    assert found.converged
    assert float(found.gap) == 0.0  # every point of a sphere is as good
    assert float(found.multiplier) == 0.0


def test_a_hundred_thousand_problems():
    A, b = graded(100_000, 6, 4, 10.0, 0.7)
    A, b = A.requires_grad_(), b.requires_grad_()
    u = pmaf.less(A, b)
    dA, db = torch.autograd.grad(u[:, 0].sum(), (A, b))
    some = torch.arange(0, 100_000, 9_973)
    for i in some:
        v = torch.zeros(4)
        v[0] = 1
        exact = Exact(A[i].detach(), b[i].detach(), v)
        allowed = ROUNDINGS * EPS * exact.moves
        for ours, truth, direct in (
            (u[i].detach(), exact.u, 0.0),
            (dA[i], exact.dA, exact.direct),
            (db[i], exact.db, exact.direct),
        ):
            difference = np.linalg.norm(ours.double().numpy() - truth)
            assert difference <= 2 * allowed * np.linalg.norm(truth) + ROUNDINGS * EPS * direct
