"""LESS: solver × dtype × shape against independent solutions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pmaf
from pmaf.linalg import sphere
from pmaf.solvers import Auto, ProjectedGradient, Secular, TangentDecay
from pmaf_lab.paper.less import METHODS
from tests import oracles
from tests.less_cases import ALL, DEGENERATE, REGULAR, gaussian, hard, with_singular_values

DTYPES = [torch.float32, torch.float64]


def problem_of(case, dtype=torch.float64, radius=1.0):
    A, b = case()
    return pmaf.SphereLeastSquares(A.to(dtype), b.to(dtype), radius)


@pytest.mark.parametrize("solver", [Auto(), Secular()], ids=repr)
@pytest.mark.parametrize("radius", [1.0, 1.7])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REGULAR)
def test_matches_the_bracketed_secular_equation(name, dtype, radius, solver):
    problem = problem_of(REGULAR[name], dtype, radius)
    solution = pmaf.solve(problem, solver=solver)
    value, multiplier = oracles.secular(
        problem.A.double().numpy(), problem.b.double().numpy(), radius
    )
    eps = torch.finfo(dtype).eps
    tolerance = 200 * eps * max(1.0, radius)
    np.testing.assert_allclose(solution.value, value, atol=tolerance)
    np.testing.assert_allclose(
        solution.multiplier, multiplier, atol=200 * eps * float(problem.scale())
    )
    assert solution.converged


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL)
def test_certified(name, dtype):
    problem = problem_of(ALL[name], dtype)
    solution = pmaf.solve(problem)
    eps = torch.finfo(dtype).eps
    certificate = pmaf.certify(problem, solution)
    assert certificate.feasibility <= 4 * eps
    assert certificate.stationarity <= 16 * eps
    assert certificate.optimality >= -16 * eps
    assert certificate.holds(16 * eps)
    assert solution.gap >= 0
    assert solution.residual <= 16 * eps
    assert solution.converged


@pytest.mark.parametrize("name", ALL)
def test_no_random_point_is_better(name):
    problem = problem_of(ALL[name])
    best = problem.objective(pmaf.less(problem.A, problem.b))
    points = torch.randn(2000, problem.n, dtype=torch.float64)
    others = problem.objective(points / points.norm(dim=-1, keepdim=True))
    assert (best <= others + 1e-13 * (1 + best)).all()


@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_solutions_are_flagged_by_the_gap(name):
    assert pmaf.solve(problem_of(DEGENERATE[name])).gap == 0


def test_certificate_rejects_what_is_not_a_global_minimum():
    A, b = gaussian(6, 4, 0.4)
    problem = pmaf.SphereLeastSquares(A, b)
    minimum = pmaf.less(A, b)
    assert pmaf.certify(problem, minimum).holds(1e-12)
    assert not pmaf.certify(problem, 1.01 * minimum).holds(1e-12)
    assert not pmaf.certify(problem, -minimum).holds(1e-12)
    # A largest singular vector is stationary for b = 0, and only the curvature tells.
    largest = torch.linalg.svd(A).Vh[0]
    stationary = pmaf.certify(pmaf.SphereLeastSquares(A, torch.zeros_like(b)), largest)
    assert stationary.stationarity < 1e-14
    assert stationary.optimality < -0.5


@pytest.mark.parametrize("radius", [1.0, 2.5])
@pytest.mark.parametrize(("m", "n"), [(6, 4), (3, 5)], ids=["tall", "wide"])
def test_certificate_of_any_point_is_what_it_says(m, n, radius):
    A, b = gaussian(m, n, 2.0)
    problem = pmaf.SphereLeastSquares(A, b, radius)
    y = torch.randn(n, dtype=torch.float64)
    y = 1.1 * radius * y / y.norm()
    residual, gram, g = A @ y - b, A.mT @ A, A.mT @ b
    curvatures = torch.linalg.eigvalsh(gram)
    multiplier = y @ (g - gram @ y) / (y @ y)
    rest = (g - gram @ y - multiplier * y).norm()
    scale = gram.trace() + g.norm() / radius
    certificate = pmaf.certify(problem, y)
    for found, wanted in (
        (problem.objective(y), 0.5 * residual @ residual),
        (problem.scale(), scale),
        (certificate.feasibility, torch.tensor(0.1, dtype=torch.float64)),
        (certificate.stationarity, rest / (radius * scale)),
        (certificate.optimality, (multiplier + curvatures[0]) / curvatures[-1]),
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(7,), (2, 3), (1,), ()])
@pytest.mark.parametrize(("m", "n"), [(6, 4), (4, 4), (3, 5), (5, 1), (1, 3)])
def test_batch_equals_loop(shape, m, n):
    A = torch.randn(*shape, m, n, dtype=torch.float64)
    b = torch.randn(*shape, m, dtype=torch.float64)
    batched = pmaf.less(A, b)
    assert batched.shape == (*shape, n)
    singly = [pmaf.less(x, y) for x, y in zip(A.reshape(-1, m, n), b.reshape(-1, m))]
    torch.testing.assert_close(batched.reshape(-1, n), torch.stack(singly), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("left", "right"), [((), (5,)), ((5,), ()), ((2, 1), (3,)), ((1,), (4,)), ((3, 1), (1, 2))]
)
def test_broadcasts_like_torch_linalg(left, right):
    A = torch.randn(*left, 4, 3, dtype=torch.float64)
    b = torch.randn(*right, 4, dtype=torch.float64)
    batch = torch.broadcast_shapes(left, right)
    expanded = pmaf.less(A.expand(*batch, 4, 3), b.expand(*batch, 4))
    torch.testing.assert_close(pmaf.less(A, b), expanded, rtol=0, atol=1e-13)


def test_ill_conditioned_entries_of_a_batch_are_solved_again_without_the_others_noticing():
    A = torch.stack([gaussian(6, 4, 0.4)[0], with_singular_values([1, 1e-2, 1e-5, 1e-9], 6)[0]])
    b = (A @ torch.tensor([0.5, -0.5, 0.5, 0.5], dtype=torch.float64)).unsqueeze(1)
    b = torch.cat([b, 3 * b], 1)
    both = pmaf.less(A.unsqueeze(1), b)
    for i in range(2):
        for j in range(2):
            alone = pmaf.less(A[i], b[i, j])
            torch.testing.assert_close(both[i, j], alone, rtol=0, atol=1e-6 if i else 1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    A, b = (x.to(dtype) for x in gaussian(6, 4, 2.0))
    result = pmaf.less(A, b)
    assert result.dtype == dtype
    assert torch.equal(result, pmaf.less(A.float(), b.float()).to(dtype))


@pytest.mark.parametrize(
    "name", ["inner", "outer", "wide outer", "repeated smallest, hard", "b = 0"]
)
@pytest.mark.parametrize(
    ("dtype", "factors"),
    [
        (torch.float64, [1e15, 1e-15, 1e150, 1e-150, 1e300]),
        (torch.float32, [1e8, 1e-8, 1e15, 1e-15, 1e30]),
    ],
    ids=["float64", "float32"],
)
def test_scale_changes_nothing(name, dtype, factors):
    A, b = (x.to(dtype) for x in ALL[name]())
    expected = pmaf.less(A, b)
    for factor in factors:
        scaled = pmaf.less(A * factor, b * factor)
        torch.testing.assert_close(scaled, expected, rtol=0, atol=100 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("ratio", [1e-300, 1e-30, 1e-8, 1e8, 1e30, 1e300])
def test_b_far_larger_or_smaller_than_A(ratio):
    A, b = gaussian(6, 4, 1.0)
    problem = pmaf.SphereLeastSquares(A, b * ratio)
    solution = pmaf.solve(problem)
    assert solution.converged
    assert pmaf.certify(problem, solution).holds(1e-14)
    if ratio > 1:
        g = A.mT @ b
        torch.testing.assert_close(
            solution.value, g / g.norm(), rtol=0, atol=max(1e-14, 10 / ratio)
        )
        torch.testing.assert_close(solution.multiplier, g.norm() * ratio, rtol=1e-6, atol=0)
    else:
        smallest = torch.linalg.svd(A).Vh[-1]
        aligned = smallest * torch.sign(smallest @ (A.mT @ b))
        torch.testing.assert_close(solution.value, aligned, rtol=0, atol=max(1e-14, 10 * ratio))


@given(
    m=st.integers(1, 6),
    n=st.integers(1, 6),
    seed=st.integers(0, 10**6),
    length=st.floats(0, 10),
    rank=st.integers(0, 6),
)
@settings(max_examples=150, deadline=None)
def test_any_problem_is_solved_and_certified(m, n, seed, length, rank):
    g = torch.Generator().manual_seed(seed)
    rank = min(rank, m, n)
    A = torch.randn(m, rank, generator=g, dtype=torch.float64) @ torch.randn(
        rank, n, generator=g, dtype=torch.float64
    )
    b = length * torch.randn(m, generator=g, dtype=torch.float64)
    problem = pmaf.SphereLeastSquares(A, b)
    solution = pmaf.solve(problem, throw=True)
    assert pmaf.certify(problem, solution).holds(1e-13)


class TestTies:
    def test_a_direction_that_all_ones_do_not_see_has_a_sign_of_its_own(self):
        n = 5
        second = torch.cos(torch.arange(1.0, n + 1).double())
        for i in range(n):
            for j in range(i):
                lowest = torch.zeros(n).double()
                lowest[i], lowest[j] = 0.5**0.5, -(0.5**0.5)
                A = torch.diag(torch.arange(2.0, n + 2).double())
                A = A - A @ torch.outer(lowest, lowest)
                u = pmaf.less(A, torch.zeros(n).double())
                expected = lowest * torch.sign(lowest @ second)
                # The singular values beside the zero one are at least one.
                torch.testing.assert_close(u, expected, rtol=0, atol=1e3 * torch.finfo(u.dtype).eps)

    def test_init_chooses_between_two_minimisers(self):
        A, b = hard()
        smallest = torch.linalg.svd(A).Vh[-1]
        one, other = (pmaf.less(A, b, init=sign * smallest) for sign in (1.0, -1.0))
        assert one @ smallest > 0.1
        assert other @ smallest < -0.1
        problem = pmaf.SphereLeastSquares(A, b)
        assert (problem.objective(one) - problem.objective(other)).abs() < 1e-14

    def test_without_init_the_choice_is_deterministic_and_the_same_in_a_batch(self):
        A, b = hard()
        expected = pmaf.less(A, b)
        assert torch.equal(expected, pmaf.less(A, b))
        batch = pmaf.less(A.expand(3, -1, -1), b.expand(3, -1))
        torch.testing.assert_close(batch, expected.expand(3, -1), rtol=0, atol=1e-15)

    def test_b_zero_is_the_smallest_singular_vector_pointing_along_all_ones(self):
        A = gaussian(5, 3, 1.0)[0]
        u = pmaf.less(A, torch.zeros(5).double())
        smallest = torch.linalg.svd(A).Vh[-1]
        torch.testing.assert_close(u, smallest * torch.sign(smallest.sum()), rtol=0, atol=1e-14)

    def test_a_smallest_vector_orthogonal_to_all_ones(self):
        A = torch.tensor([[1.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
        u = pmaf.less(A, torch.zeros(2).double())
        torch.testing.assert_close(u.abs(), torch.full((2,), 0.5**0.5).double())
        assert torch.equal(u, pmaf.less(A.expand(4, 2, 2), torch.zeros(2).double())[2])

    def test_a_preference_of_b_beyond_rounding_is_not_a_tie(self):
        A, b = hard()
        left, _, right = torch.linalg.svd(A, full_matrices=False)
        for sign in (1.0, -1.0):
            u = pmaf.less(A, b + 1e-10 * sign * left[:, -1], init=-sign * right[-1])
            assert sign * (u @ right[-1]) > 0.1


class TestProjectedGradient:
    @pytest.mark.filterwarnings("ignore::pmaf.ConvergenceWarning")
    @pytest.mark.parametrize("solver", METHODS.values(), ids=METHODS)
    def test_each_entry_stops_as_if_it_were_alone(self, solver):
        A = torch.randn(40, 5, 3, dtype=torch.float64)
        b = torch.randn(40, 5, dtype=torch.float64)
        batch = pmaf.solve(pmaf.SphereLeastSquares(A, b), solver=solver)
        alone = [
            pmaf.solve(pmaf.SphereLeastSquares(x, y), solver=solver)
            for x, y in zip(A.split(1), b.split(1))
        ]
        steps = torch.cat([one.iterations for one in alone])
        values = torch.cat([one.value for one in alone])
        # A run that wanders for long amplifies the last digit, which a batch rounds differently.
        early = steps < 50
        assert early.any()
        assert (~early).any() or batch.iterations.unique().numel() > 1
        assert torch.equal(batch.iterations[early], steps[early])
        torch.testing.assert_close(batch.value[early], values[early], rtol=0, atol=1e-8)

    @pytest.mark.parametrize("name", ["PGD+RM", "PGD+RM+BLSOne", "PGD+RM+BLS", "PGD+RM+TWD"])
    def test_reaches_the_global_minimum_of_a_convex_problem(self, name):
        A, b = gaussian(8, 4, 3.0)
        solver = _tight(METHODS[name])
        torch.testing.assert_close(
            pmaf.less(A, b, solver=solver), pmaf.less(A, b), rtol=0, atol=1e-5
        )

    def test_reports_a_local_minimum_as_one(self):
        """Far from the global minimiser, a local one exists, and `gap` tells them apart."""
        A = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))
        b = torch.tensor([0.2, 0.3], dtype=torch.float64)
        solution = pmaf.solve(
            pmaf.SphereLeastSquares(A, b),
            solver=_tight(METHODS["PGD+RM+BLS"]),
            init=torch.tensor([-1.0, 0.0], dtype=torch.float64),
        )
        assert solution.converged
        assert solution.residual < 1e-6
        assert solution.gap < -0.1
        assert not pmaf.certify(pmaf.SphereLeastSquares(A, b), solution).holds(1e-6)

    def test_starts_from_all_ones_when_b_is_zero(self):
        A = gaussian(5, 3, 1.0)[0]
        solver = _tight(METHODS["PGD+RM+BLS"])
        u = pmaf.less(A, torch.zeros(5).double(), solver=solver)
        torch.testing.assert_close(u, pmaf.less(A, torch.zeros(5).double()), rtol=0, atol=1e-4)

    def test_an_early_stop_warns_with_what_to_try_and_throws_on_request(self):
        A, b = gaussian(6, 4, 0.4)
        problem = pmaf.SphereLeastSquares(A.expand(3, -1, -1), b)
        solver = ProjectedGradient(max_iterations=2, tolerance=0.0)
        with pytest.warns(
            pmaf.ConvergenceWarning, match=r"3 of 3 solves .* 2 iterations .*Secular"
        ):
            solution = pmaf.solve(problem, solver=solver)
        assert not solution.converged.any()
        assert (solution.iterations == 2).all()
        with pytest.raises(pmaf.ConvergenceError, match="raise max_iterations"):
            pmaf.solve(problem, solver=solver, throw=True)
        with pytest.warns(pmaf.ConvergenceWarning):
            pmaf.less(A, b, solver=solver)


def test_an_empty_batch_gives_an_empty_result():
    A = torch.zeros(0, 4, 3, requires_grad=True)
    b = torch.zeros(4, requires_grad=True)
    result = pmaf.less(A, b)
    assert result.shape == (0, 3)
    result.sum().backward()
    assert A.grad.shape == A.shape
    assert (b.grad == 0).all()
    assert pmaf.solve(pmaf.SphereLeastSquares(A, b)).converged.shape == (0,)


def _tight(solver):
    search = solver.search
    if isinstance(search, TangentDecay):
        search = TangentDecay(angle_tolerance=1e-18)
    return replace(solver, search=search, tolerance=1e-15, max_iterations=20000)


def test_settled_on_the_sphere_up_to_half_a_rounding():
    """One rounding of each number changes the length by half of eps at most."""
    u = sphere.settle(torch.randn(4096, 64))
    away = (torch.linalg.vector_norm(u.double(), dim=-1) - 1).abs().max()
    assert float(away) <= 0.5 * torch.finfo(torch.float32).eps * (1 + 1e-6)
