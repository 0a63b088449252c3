"""LESS at and around the hard case, and at scales where squares need units of their own."""

import numpy as np
import pytest
import torch

import pmaf
from pmaf.solvers import Cholesky, Krylov, Secular
from tests import oracles
from tests.less_cases import gaussian, with_singular_values

T = torch.float64


def weights(u):
    return torch.cos(torch.arange(u.numel(), dtype=u.dtype) + 1).reshape(u.shape)


# In float64 squares of 1e-100 are in range, and squares of squares are not.
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (T, 1e-150),
        (T, 1e-100),
        (T, 1e90),
        (T, 1e150),
        (torch.float32, 1e-17),
        (torch.float32, 1e-10),
        (torch.float32, 1e10),
        (torch.float32, 1e17),
    ],
    ids=str,
)
@pytest.mark.parametrize("solver", [None, Secular(), Cholesky(), Krylov()], ids=repr)
@pytest.mark.parametrize(("m", "n"), [(6, 4), (60, 40)])
def test_multipliers_and_gaps_have_the_unit_of_squares(m, n, solver, dtype, scale):
    A, b = (x.to(dtype) for x in gaussian(m, n, 2.0))
    u, multiplier = oracles.secular(A.double().numpy(), b.double().numpy())
    s = np.linalg.svd(A.double().numpy(), compute_uv=False)
    problem = pmaf.SphereLeastSquares(scale * A, scale * b)
    found = pmaf.solve(problem, solver=solver)
    eps = torch.finfo(dtype).eps
    size = s[0] ** 2 + np.linalg.norm(A.double().mT @ b.double())
    # The condition of these matrices is below a hundred.
    close = 1e3 * eps
    assert found.converged
    assert float((found.value.double() - torch.from_numpy(u)).norm()) <= 1e4 * eps
    assert float(found.multiplier) / scale**2 == pytest.approx(multiplier, abs=close * size)
    gap = multiplier + s[-1] ** 2
    if isinstance(solver, Krylov):  # which reports what it has proved
        assert 0.5 * multiplier <= float(found.gap) / scale**2 <= gap + close * size
    else:
        assert float(found.gap) / scale**2 == pytest.approx(gap, abs=close * size)


@pytest.mark.parametrize(("m", "n"), [(6, 4), (4, 6), (60, 40)])
@pytest.mark.parametrize("scale", [1e-100, 1e90])
def test_gradients_where_squares_of_squares_leave_the_range(scale, m, n):
    A, b = gaussian(m, n, 2.0)

    def gradients(A, b):
        A, b = A.clone().requires_grad_(), b.clone().requires_grad_()
        u = pmaf.less(A, b, solver=Secular())
        return torch.autograd.grad((u * weights(u)).sum(), (A, b))

    for x, y in zip(gradients(scale * A, scale * b), gradients(A, b)):
        assert float((scale * x - y).norm() / y.norm()) <= 1e4 * torch.finfo(T).eps


@pytest.mark.parametrize("dtype", [torch.float32, T], ids=str)
@pytest.mark.parametrize("beside", [0.0, 1e3])
def test_a_tie_beside_a_large_part_of_b_that_A_does_not_reach(beside, dtype):
    """Rounding of that part pulls to one side or the other, and means nothing."""
    A, left, right = with_singular_values([3.0, 2.0, 1.0], 5)
    outside = torch.linalg.svd(A).U[:, 3]
    b = (left[:, 0] + 0.5 * left[:, 1] + beside * outside).to(dtype)
    A, lowest = A.to(dtype), right[:, 2].to(dtype)
    one, other = (pmaf.solve(pmaf.SphereLeastSquares(A, b), init=s * lowest) for s in (1, -1))
    # y = (3/8, 1/3, ±√(1 − …)) in the singular vectors.
    height = (1 - (3 / 8) ** 2 - (1 / 3) ** 2) ** 0.5
    allowed = 64 * torch.finfo(dtype).eps * (1 + beside)
    assert float(one.value @ lowest) == pytest.approx(height, abs=allowed)
    assert float(other.value @ lowest) == pytest.approx(-height, abs=allowed)
    assert float(one.gap) == float(other.gap) == 0.0


def test_the_side_of_a_small_b_in_float32():
    """It is far below rounding of A, and decides all the same."""
    A, left, right = (x.float() for x in with_singular_values([3.0, 2.0, 1.0], 5))
    for sign in (1.0, -1.0):
        u = pmaf.less(A, 1e-9 * sign * left[:, 2])
        torch.testing.assert_close(u, sign * right[:, 2], rtol=0, atol=1e-5)


def test_a_solution_that_fills_the_sphere_without_the_smallest_vector():
    """On the boundary of the hard case the other directions move as if it were not there."""
    s = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=T)
    # Everything below is exact in binary: y = (0, ½, ½, ½, ½) and μ = −1.
    b = 0.5 * (s.square() - 1) / s
    v = torch.tensor([0.0, 1.0, -2.0, 0.5, 3.0], dtype=T)

    def gradients(part):
        A, target = torch.diag(s[part]).requires_grad_(), b[part].clone().requires_grad_()
        u = pmaf.less(A, target)
        torch.testing.assert_close(u.detach(), torch.tensor([0] + 4 * [0.5], dtype=T)[part])
        return torch.autograd.grad(u @ v[part], (A, target))

    dA, db = gradients(slice(None))
    smaller_dA, smaller_db = gradients(slice(1, None))
    close = 1e3 * torch.finfo(T).eps
    torch.testing.assert_close(db[1:], smaller_db, rtol=0, atol=close * float(smaller_db.norm()))
    torch.testing.assert_close(
        dA[1:, 1:], smaller_dA, rtol=0, atol=close * float(smaller_dA.norm())
    )


@pytest.mark.parametrize("values", [[2.0, 1.0, 1.0], [3.0, 2.0, 1.0, 1.0]], ids=repr)
@pytest.mark.parametrize("pull", [0.0, 0.5])
def test_two_smallest_singular_values_that_are_equal(values, pull):
    """Across the minimiser, in their plane, nothing moves at a tie, and all moves as gap⁻¹ else."""
    A, left, right = with_singular_values(values, 6)
    b = (0.3 * left[:, 0] + pull * left[:, -1]).requires_grad_()
    solution = pmaf.solve(pmaf.SphereLeastSquares(A, b))
    u = solution.value.detach()
    plane = right[:, -2:]
    inside = plane.mT @ u
    across = plane @ torch.stack([-inside[1], inside[0]]) / inside.norm()
    (db,) = torch.autograd.grad(solution.value @ across, b)
    # (AᵀA + μI)z = v along an eigenvector of AᵀA with the value one.
    gap = float(solution.gap)
    expected = A @ across / gap if pull else torch.zeros_like(db)
    bound = 1e3 * torch.finfo(T).eps * (1 / gap if pull else 1)
    torch.testing.assert_close(db, expected, rtol=0, atol=bound)
    assert gap > 0.1 if pull else gap == 0.0


@pytest.mark.parametrize("cond", [30.0, 100.0, 300.0])
@pytest.mark.parametrize("length", [1.02, 1.5])
def test_gradients_from_factors_have_the_digits_of_A(cond, length):
    """In float32 the square of the condition leaves none, or a few."""
    n, m, B = 16, 24, 4
    s = torch.logspace(0, -np.log10(cond), n, dtype=T).tolist()
    cases = [with_singular_values(s, m, seed) for seed in range(B)]
    x = torch.stack(
        [length * weights(right[:, 0]) / weights(right[:, 0]).norm() for *_, right in cases]
    )
    A = torch.stack([case[0] for case in cases]).float()
    b = (A.double() @ x.unsqueeze(-1)).squeeze(-1).float()
    found = []
    for dtype, solver in ((torch.float32, Cholesky()), (T, Secular())):
        leaves = [y.to(dtype).requires_grad_() for y in (A, b)]
        u = pmaf.less(*leaves, solver=solver)
        found.append([y.double() for y in torch.autograd.grad((u * weights(u)).sum(), leaves)])
    for y, z in zip(*found):
        error = (y - z).flatten(1).norm(dim=1) / z.flatten(1).norm(dim=1)
        assert float(error.max()) <= 64 * cond * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("side", [1, -1])
def test_a_part_of_b_that_only_the_singular_vectors_show(side):
    """In Aᵀb it is below rounding of the rest; it decides between two minimisers all the same."""
    s = torch.tensor([2.0, 1.5, 1e-6], dtype=T)
    b = torch.tensor([0.5, 0.5, side * 1e-10], dtype=T)
    u = pmaf.less(torch.diag(s), b)
    # (s² + μ)u = sb, in which μ = −1e-12 up to the 1e-16 of that part.
    beside = s[:2] * b[:2] / (s[:2].square() - s[2].square())
    expected = torch.cat([beside, side * (1 - beside.square().sum(0, keepdim=True)).sqrt()])
    torch.testing.assert_close(u, expected, rtol=0, atol=64 * torch.finfo(T).eps)


def test_one_decomposition_is_enough_for_ordinary_matrices(monkeypatch):
    """A step against A itself makes up for what their Gram matrix loses."""

    def never(*_):
        raise AssertionError("a second decomposition was computed")

    monkeypatch.setattr("pmaf.solvers.secular.singular_spectrum", never)
    for seed in range(8):
        s = torch.logspace(0, -np.log10(30), 40, dtype=T).tolist()
        A, _, right = with_singular_values(s, 44, seed)
        b = A @ (1.1 * weights(right[:, 0]) / weights(right[:, 0]).norm())
        assert pmaf.solve(pmaf.SphereLeastSquares(A, b), solver=Secular()).converged
