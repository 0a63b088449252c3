"""Least squares by products where AᵀA loses digits: right, or said not to be."""

import math
import warnings

import numpy as np
import pytest
import torch

import pmaf
from pmaf.operators import FromMatvec, Matrix
from pmaf.solvers import Krylov
from tests.oracles import secular

F64 = torch.float64
SMALL_SPACE = Krylov(dimension=12)  # says that there is no memory for the entries of the matrix


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def problem(n, cond, length, dtype, noise=0.0):
    """Of two columns for each row, with ‖A⁺b‖ about `length`."""
    left, right = (torch.linalg.qr(randn(k, n, seed=k))[0] for k in (2 * n, n))
    A = left * torch.logspace(-math.log10(cond), 0, n, dtype=F64) @ right.mT
    x = torch.nn.functional.normalize(randn(n, seed=1), dim=0)
    b = A @ (length * x) + noise * randn(2 * n, seed=2) / (2 * n) ** 0.5
    return A.to(dtype), b.to(dtype)


def function(A):
    return FromMatvec(
        lambda u, A: u @ A.mT, A.shape, [A], lambda u, A: u @ A, dtype=A.dtype
    )  # of any kind


def answer(A, b):
    """Minimiser, multiplier, and the least curvature, which is at least the gap."""
    u, multiplier = secular(A.detach().double().numpy(), b.double().numpy())
    lowest = np.linalg.svd(A.detach().double().numpy(), compute_uv=False)[-1] ** 2
    return torch.from_numpy(u), multiplier, multiplier + lowest


WAYS = {
    "Matrix": lambda A, b, solver: pmaf.SphereLeastSquares(Matrix(A), b),
    "function": lambda A, b, solver: pmaf.SphereLeastSquares(function(A), b),
    "dense": lambda A, b, solver: pmaf.SphereLeastSquares(A, b),
}
way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
lengths = pytest.mark.parametrize(
    ("length", "noise"), [(0.5, 0.0), (0.5, 1e-2), (1.5, 0.0)], ids=["inner", "noisy", "outer"]
)


@way
@lengths
@pytest.mark.parametrize("cond", [1e2, 1e3, 1e4], ids="{:.0e}".format)
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("n", [40, 300])
def test_ill_conditioned_problems_are_solved(n, dtype, cond, length, noise, way):
    A, b = problem(n, cond, length, dtype, noise)
    u, multiplier, gap = answer(A, b)
    solution = pmaf.solve(way(A, b, Krylov()), solver=Krylov())
    eps = torch.finfo(dtype).eps
    # What a residual of a few roundings of ‖A‖² + ‖Aᵀb‖ may do, and what is no solution.
    worth = min(0.01, 64 * eps * (1 + length) / gap)
    assert solution.converged
    assert float((solution.value.double() - u).norm()) <= worth
    assert float(solution.multiplier) == pytest.approx(multiplier, abs=64 * eps)
    assert float(solution.multiplier) == pytest.approx(
        multiplier, rel=2 * worth, abs=2 * worth * gap
    )
    assert 0 <= float(solution.gap) <= gap * (1 + 2 * worth)
    # n products show all there is to see; three searches are not worth more than that each.
    assert int(solution.iterations) <= 4 * n + 200


@way
@pytest.mark.parametrize("cond", [1e3, 1e4], ids="{:.0e}".format)
def test_so_are_their_gradients(cond, way):
    """Beside those of a float64 solve: from digits that AᵀA in float32 does not have."""
    n = 40
    A, b = problem(n, cond, 0.5, torch.float32)
    v = randn(n, seed=3)
    found = []
    for dtype, solver in ((torch.float32, Krylov()), (F64, pmaf.solvers.Auto())):
        leaf, target = A.to(dtype).requires_grad_(), b.to(dtype).requires_grad_()
        make = way if dtype == torch.float32 else WAYS["dense"]
        u = pmaf.solve(make(leaf, target, solver), solver=solver).value
        found.append([x.double() for x in torch.autograd.grad(u @ v.to(dtype), (leaf, target))])
    # Rounding of A to one part in 1/eps moves the derivative by the condition of A, at least.
    worth = 64 * cond * torch.finfo(torch.float32).eps
    for x, y in zip(*found):
        assert float((x - y).norm()) <= worth * float(y.norm())


@way
@pytest.mark.parametrize("cond", [1e3, 1e4], ids="{:.0e}".format)
@pytest.mark.parametrize("n", [40, 300])
def test_what_is_not_solved_says_so_forward_and_backward(n, cond, way):
    A, b = problem(n, cond, 0.5, torch.float32)
    A.requires_grad_()
    solver = Krylov(dimension=12, max_products=600)
    with pytest.warns(pmaf.ConvergenceWarning, match="did not converge"):
        solution = pmaf.solve(way(A, b, solver), solver=solver)
    assert not solution.converged
    _, _, gap = answer(A, b)
    assert float(solution.gap) <= max(gap, 16 * torch.finfo(torch.float32).eps)
    with pytest.warns(pmaf.ConvergenceWarning, match="gradient"):
        solution.value.sum().backward()
    assert torch.isfinite(A.grad).all()


# With cond² eps > 1, AᵀA has no digit of the smallest singular value; at 1e3 it is 0.12, and the
# order of summation decides whether u has lost its digits.
@pytest.mark.parametrize("cond", [4e3, 1e4], ids="{:.0e}".format)
@pytest.mark.parametrize("n", [20, 40])
def test_a_space_that_is_everything_knows_no_more_than_the_square_of_the_matrix(n, cond):
    """Its residual is rounding, and u is off all the same: what is lost is lost in AᵀA."""
    A, b = problem(n, cond, 0.5, torch.float32)
    A.requires_grad_()
    solver = Krylov(dimension=n)
    with pytest.warns(pmaf.ConvergenceWarning, match="did not converge"):
        solution = pmaf.solve(pmaf.SphereLeastSquares(Matrix(A), b), solver=solver)
    assert float(solution.residual) <= 160 * torch.finfo(torch.float32).eps
    assert not solution.converged
    with pytest.warns(pmaf.ConvergenceWarning, match="linear system of the gradient"):
        solution.value.sum().backward()
    assert solution.backward is not None
    assert not solution.backward.converged.all()


@lengths
@pytest.mark.parametrize("cond", [1e1, 1e2, 1e3, 1e4], ids="{:.0e}".format)
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_whatever_converges_in_a_small_space_is_right(cond, length, noise, dtype):
    A, b = problem(100, cond, length, dtype, noise)
    u, _, gap = answer(A, b)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pmaf.ConvergenceWarning)
        solution = pmaf.solve(pmaf.SphereLeastSquares(Matrix(A), b), solver=SMALL_SPACE)
    if solution.converged:
        worth = min(0.02, 64 * torch.finfo(dtype).eps * (1 + length) / gap)
        assert float((solution.value.double() - u).norm()) <= worth


def test_a_batch_is_solved_entry_by_entry():
    """One entry that needs its entries does not change what the others get."""
    pairs = [problem(40, cond, 0.5, torch.float32) for cond in (3.0, 1e4, 10.0)]
    A, b = (torch.stack(x) for x in zip(*pairs))
    leaf = A.clone().requires_grad_()
    together = pmaf.solve(pmaf.SphereLeastSquares(Matrix(leaf), b))
    together.value.sum().backward()
    assert together.converged.all()
    for i, (a, c) in enumerate(pairs):
        a = a.clone().requires_grad_()
        alone = pmaf.solve(pmaf.SphereLeastSquares(Matrix(a), c))
        alone.value.sum().backward()
        _, _, gap = answer(a, c)
        worth = min(0.01, 64 * torch.finfo(torch.float32).eps / gap)
        torch.testing.assert_close(together.value[i], alone.value, rtol=0, atol=worth)
        scale = float(a.grad.abs().max())
        torch.testing.assert_close(leaf.grad[i], a.grad, rtol=0, atol=10 * worth * scale)


def test_one_matrix_for_many_right_hand_sides():
    A, b = problem(40, 1e4, 0.5, torch.float32)
    b = torch.stack([b, 0.5 * b, 3 * b])
    solution = pmaf.solve(pmaf.SphereLeastSquares(function(A), b))
    assert solution.converged.all()
    for u, c in zip(solution.value, b):
        assert float((u.double() - answer(A, c)[0]).norm()) <= 0.01


def test_minimisers_that_form_a_sphere_converge():
    """Of a wide matrix any minimiser will do: they are all as good."""
    A, b = randn(200, 300).float(), 0.01 * randn(200, seed=1).float()
    for solver in (Krylov(), Krylov(dimension=60)):
        solution = pmaf.solve(pmaf.SphereLeastSquares(Matrix(A), b), solver=solver)
        assert solution.converged
        rest = A.double() @ solution.value.double() - b.double()
        assert float(rest.norm()) <= 1e-4 * float(torch.linalg.matrix_norm(A.double(), 2))


def test_a_minimum_beside_a_bottom_that_was_not_found_is_not_proved():
    """The space of b is invariant at once, and too few products are left to see below it."""
    squares = torch.linspace(0.25, 9, 400, dtype=F64)
    squares[1] = 0.27
    b = torch.zeros(400, dtype=F64)
    b[1] = 1e-3
    A = torch.diag(squares.sqrt())
    solver = Krylov(dimension=12, max_products=20)
    with pytest.warns(pmaf.ConvergenceWarning, match="did not converge"):
        solution = pmaf.solve(pmaf.SphereLeastSquares(Matrix(A), b), solver=solver)
    assert not solution.converged
    # What was found is along b, and the minimum is along the first vector.
    assert not pmaf.certify(pmaf.SphereLeastSquares(A, b), solution.value).holds(1e-3)


def test_a_start_beside_a_sphere_of_minimisers():
    """The space holds two of them, and is flat from one to the other."""
    A, b = randn(20, 300), 0.01 * randn(20, seed=1)
    init = torch.nn.functional.normalize(randn(300, seed=2), dim=0)
    problem = pmaf.SphereLeastSquares(Matrix(A), b)
    assert pmaf.solve(problem, solver=Krylov(dimension=60), init=init).converged


def test_minimisers_that_form_a_circle_have_no_gradient_and_say_so():
    """Their search loses its digits, so that they come from the entries of the matrix."""
    A = torch.diag(torch.tensor([1.0, 0.5, 1e-4, 1e-4])).requires_grad_()
    b = torch.tensor([0.1, 0.1, 0.0, 0.0])
    solution = pmaf.solve(pmaf.SphereLeastSquares(Matrix(A), b))
    assert solution.converged
    with pytest.warns(pmaf.ConvergenceWarning, match="linear system of the gradient"):
        (solution.value @ torch.tensor([1.0, 2.0, 3.0, -4.0])).backward()
    assert solution.backward is not None
    assert not solution.backward.converged.all()
    assert torch.isfinite(A.grad).all()


def test_the_gradient_of_a_dense_matrix_has_digits_that_its_square_does_not():
    """In float32 the gap, of 0.9e-6, is below rounding of AᵀA, and a derivative is its inverse."""
    s = torch.tensor([1.0, 0.5, 0.25, 0.125, 0.95 * 2**-10])
    u = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.0])
    b = (s * u).requires_grad_()  # exactly, so that the multiplier is zero
    found = pmaf.less(torch.diag(s), b, solver=Krylov())
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(found.detach(), u, rtol=0, atol=64 * eps)
    (db,) = torch.autograd.grad(found[-1], b)
    # s²z = v along the last vector. The multiplier is known up to a rounding of ‖b‖², a third,
    # which is a twentieth of the gap.
    assert float(db[-1] * s[-1]) == pytest.approx(1, rel=0.5)
