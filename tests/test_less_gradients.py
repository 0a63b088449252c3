"""LESS: derivatives against differences, against each other, and where there are none."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import pmaf
from pmaf.gradients import DDN, Implicit, Unroll
from pmaf.solvers import Cholesky, Krylov, LeastSquares, Outcome, ProjectedGradient, Secular, Solver
from pmaf_lab.paper.less import METHODS
from tests import oracles
from tests.less_cases import ALL, DEGENERATE, REGULAR, gaussian, hard


@dataclass(frozen=True)
class Branch(Solver):
    """Newton's method on the optimality conditions, from `init`.

    It follows one branch of stationary points, which is what a derivative at a tie can
    mean: the global minimiser itself jumps from one branch to another there.
    """

    solves = (LeastSquares,)

    def solve(self, problem, *, init=None, report=True):
        A, b, u = problem.A, problem.b, init
        n = u.shape[-1]
        bordered = torch.zeros(n + 1, n + 1, dtype=u.dtype)
        for _ in range(12):
            force = A.mT @ (b - A @ u)
            mu = u @ force
            bordered[:n, :n] = A.mT @ A + mu * torch.eye(n, dtype=u.dtype)
            bordered[:n, n] = bordered[n, :n] = u
            right = torch.cat([force - mu * u, u.new_zeros(1)])
            u = u + torch.linalg.solve(bordered, right)[:n]
            u = u / u.norm()
        mu = u @ (A.mT @ (b - A @ u))
        zero = torch.zeros_like(mu)
        return Outcome(
            value=u,
            multiplier=mu,
            residual=zero,
            gap=zero.clone(),
            iterations=torch.tensor(12),
            converged=torch.tensor(True),
        )


# With tolerance zero it takes every step, down to rounding, and then says so.
PATIENT = ProjectedGradient(regulariser=1e-60, tolerance=0.0, max_iterations=300)
takes_every_step = pytest.mark.filterwarnings("ignore::pmaf.ConvergenceWarning")

RULES = [Implicit(), DDN(), DDN(exploit=False)]


def leaves(case):
    return tuple(x.clone().requires_grad_() for x in case())


def weights_like(u):
    return torch.linspace(-1, 2, u.shape[-1], dtype=u.dtype)


@pytest.mark.parametrize("radius", [1.0, 1.7])
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("name", REGULAR)
def test_first_and_second_derivatives(name, rule, radius):
    A, b = leaves(REGULAR[name])

    def layer(A, b):
        return pmaf.less(A, b, radius=radius, gradient=rule)

    assert gradcheck(layer, (A, b))
    assert gradgradcheck(layer, (A, b), atol=1e-4)


@pytest.mark.parametrize(
    ("left", "right"), [((2,), (2,)), ((), (3,)), ((3,), ()), ((2, 1), (3,))], ids=repr
)
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_derivatives_of_a_batch(rule, left, right):
    A = torch.randn(*left, 4, 3, dtype=torch.float64, requires_grad=True)
    b = torch.randn(*right, 4, dtype=torch.float64, requires_grad=True)

    def layer(A, b):
        return pmaf.less(A, b, gradient=rule)

    assert gradcheck(layer, (A, b))
    assert gradgradcheck(layer, (A, b), atol=1e-4)


def test_derivative_of_b_zero_in_A_follows_the_smallest_singular_vector():
    A, b = leaves(DEGENERATE["b = 0"])
    assert gradcheck(lambda A: pmaf.less(A, b.detach()), (A,))
    assert gradgradcheck(lambda A: pmaf.less(A, b.detach()), (A,), atol=1e-4)


@pytest.mark.parametrize("name", ["b = 0", "hard case", "wide inner, one dimension free"])
def test_derivatives_at_a_tie_are_those_of_the_branch(name):
    A, b = leaves(DEGENERATE[name])
    here = pmaf.less(A, b).detach()
    if name == "hard case":
        smallest = torch.linalg.svd(A.detach()).Vh[-1]
        assert (smallest @ here).abs() > 0.1  # τ ≠ 0

    def branch(A, b):
        return pmaf.less(A, b, solver=Branch(), init=here)

    assert gradcheck(branch, (A, b))
    assert gradgradcheck(branch, (A, b), atol=1e-4)
    # The global solver reports the same derivative of the branch it is on.
    u = pmaf.less(A, b)
    expected = torch.autograd.grad(branch(A, b) @ weights_like(u), (A, b))
    found = torch.autograd.grad(u @ weights_like(u), (A, b))
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("name", ALL)
def test_gradients_are_finite_everywhere(name, rule, dtype):
    A, b = (x.to(dtype).requires_grad_() for x in ALL[name]())
    u = pmaf.less(A, b, gradient=rule)
    gradients = torch.autograd.grad(u @ weights_like(u), (A, b), create_graph=True)
    for g in gradients:
        assert torch.isfinite(g).all()
    if isinstance(rule, Implicit):
        second = torch.autograd.grad(sum(g.square().sum() for g in gradients), (A, b))
        assert all(torch.isfinite(g).all() for g in second)


def test_where_the_minimiser_is_not_unique_the_free_directions_get_no_gradient():
    A, b = leaves(DEGENERATE["wide inner"])
    u = pmaf.less(A, b)
    null = torch.linalg.svd(A.detach()).Vh[2:]
    free = null[0] * (null[1] @ u.detach()) - null[1] * (null[0] @ u.detach())
    assert (free @ u.detach()).abs() < 1e-14  # moves along the sphere of minimisers
    dA, db = torch.autograd.grad(u @ free, (A, b))
    torch.testing.assert_close(dA, torch.zeros_like(dA), rtol=0, atol=1e-13)
    torch.testing.assert_close(db, torch.zeros_like(db), rtol=0, atol=1e-13)


@takes_every_step
@pytest.mark.parametrize("solver", [Secular(), PATIENT], ids=["Secular", "ProjectedGradient"])
@pytest.mark.parametrize("name", ["inner", "on the sphere", "square inner"])
def test_the_gradient_does_not_depend_on_the_solver(name, solver):
    A, b = leaves(REGULAR[name])
    weights = torch.linspace(-1, 2, A.shape[-1], dtype=torch.float64)
    found = torch.autograd.grad(pmaf.less(A, b, solver=solver) @ weights, (A, b))
    for x, leaf, other in ((found[0], A, b), (found[1], b, A)):
        first = leaf is A

        def value(moved, other=other, first=first):
            pair = (moved, other.detach()) if first else (other.detach(), moved)
            return pmaf.less(*pair) @ weights

        torch.testing.assert_close(x, oracles.differences(value, leaf.detach()), rtol=0, atol=1e-6)


@takes_every_step
@pytest.mark.parametrize("name", ["inner", "on the sphere", "slightly outer"])
def test_unrolling_converges_to_the_implicit_gradient(name):
    A, b = leaves((REGULAR | {"slightly outer": lambda: gaussian(6, 4, 1.1)})[name])
    u = pmaf.less(A, b, solver=PATIENT, gradient=Unroll())
    expected = torch.autograd.grad(pmaf.less(A, b) @ weights_like(u), (A, b))
    found = torch.autograd.grad(u @ weights_like(u), (A, b))
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


@takes_every_step
@pytest.mark.parametrize("size", [(2, 2), (5, 3), (6, 4)], ids=str)
def test_unrolling_survives_steps_of_rounding(size):
    """All of these have reached rounding long before the last step, and go on in it."""
    cases = [gaussian(*size, 0.4, seed) for seed in range(64)]
    single = [torch.stack(x).float().requires_grad_() for x in zip(*cases)]
    double = [x.detach().double().requires_grad_() for x in single]
    solution = pmaf.solve(pmaf.SphereLeastSquares(*double))
    expected = torch.autograd.grad(solution.value.sum(), double)
    solver = replace(PATIENT, regulariser=1e-30, max_iterations=1000)  # float32 has no 1e-60
    u = pmaf.less(*single, solver=solver, gradient=Unroll())
    found = torch.autograd.grad(u.sum(), single)
    # The gradient solves a linear system with the curvature on the tangent space.
    condition = (pmaf.SphereLeastSquares(*double).scale() / solution.gap).detach()
    for x, y in zip(found, expected):
        error = (x - y).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1)
        assert (error <= 4 * torch.finfo(torch.float32).eps * condition).all()


@takes_every_step
@pytest.mark.parametrize("solver", METHODS.values(), ids=METHODS)
def test_unrolling_records_the_iterations_of_every_paper_method(solver):
    A, b = (x.requires_grad_() for x in gaussian(6, 4, 0.4))
    solver = replace(solver, max_iterations=6, tolerance=0.0)
    assert gradcheck(lambda A, b: pmaf.less(A, b, solver=solver, gradient=Unroll()), (A, b))


def test_only_what_is_asked_for_is_computed():
    A, b = gaussian(6, 4, 0.4)
    A.requires_grad_()
    pmaf.less(A, b).sum().backward()
    assert A.grad is not None
    assert b.grad is None
    assert not pmaf.less(A.detach(), b).requires_grad
    solution = pmaf.solve(pmaf.SphereLeastSquares(A, b))
    assert solution.value.requires_grad
    assert solution.multiplier.requires_grad
    assert not solution.gap.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_come_back_in_half_precision(dtype):
    A, b = (x.to(dtype).requires_grad_() for x in gaussian(6, 4, 2.0))
    u = pmaf.less(A, b)
    u.sum().backward()
    wide = [x.detach().float().requires_grad_() for x in (A, b)]
    pmaf.less(*wide).sum().backward()
    for x, y in zip((A, b), wide):
        assert x.grad.dtype == dtype
        torch.testing.assert_close(x.grad.float(), y.grad, rtol=2e-2, atol=2e-2)


def test_a_module_with_the_layer_trains():
    """Unit normals from noisy points: learn the weights that down-weigh the outliers."""
    g = torch.Generator().manual_seed(3)
    normal = torch.tensor([0.6, 0.0, 0.8])
    points = torch.randn(40, 3, generator=g)
    points = points - (points @ normal).unsqueeze(-1) * normal
    points[:10] += 2 * torch.randn(10, 3, generator=g)

    class Fit(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(40))
            self.layer = pmaf.LESS()

        def forward(self, points):
            A = torch.sigmoid(self.weights).unsqueeze(-1) * points
            return self.layer(A, torch.zeros(40))

    model = Fit()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.3)
    errors = []
    for _ in range(60):
        optimiser.zero_grad()
        error = 1 - (model(points) @ normal).square()
        error.backward()
        optimiser.step()
        errors.append(float(error.detach()))
    assert errors[0] > 0.02
    assert errors[-1] < 0.05 * errors[0]


def test_the_hard_case_gradient_is_where_the_papers_rule_breaks():
    """𝒦 needs H⁻¹, which does not exist there; the tangent-space system is regular."""
    A, b = (x.requires_grad_() for x in hard())
    here = pmaf.less(A, b).detach()
    weights = torch.linspace(-1, 2, 3, dtype=torch.float64)

    def along_branch(moved):
        return pmaf.less(moved, b.detach(), solver=Branch(), init=here) @ weights

    truth = oracles.differences(along_branch, A.detach())
    (implicit,) = torch.autograd.grad(pmaf.less(A, b) @ weights, A)
    (ddn,) = torch.autograd.grad(pmaf.less(A, b, gradient=DDN()) @ weights, A)
    assert (implicit - truth).abs().max() < 1e-6
    assert torch.isfinite(ddn).all()


@pytest.mark.parametrize("radius", [1.0, 0.3])
@pytest.mark.parametrize("solver", [Secular(), Cholesky(), Krylov()], ids=repr)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in jvp
def test_the_multiplier_is_differentiable(solver, radius):
    A, b = (x.requires_grad_() for x in gaussian(6, 4, 0.4))

    def multiplier(A, b):
        problem = pmaf.SphereLeastSquares(A, b, radius)
        return pmaf.solve(problem, solver=solver).multiplier

    assert gradcheck(multiplier, (A, b))
    assert gradgradcheck(multiplier, (A, b))
    operator = pmaf.operators.Matrix(A) if solver.matrix_free else A
    found = torch.autograd.grad(multiplier(operator, b), (A, b))
    point = A.detach(), b.detach()
    direction = tuple(x.cos() for x in point)
    _, along = torch.func.jvp(multiplier, point, direction)
    expected = sum((x * y).sum() for x, y in zip(found, direction))
    torch.testing.assert_close(along, expected, rtol=1e-7, atol=1e-9)
