"""LESS with a radius that is a tensor, in a ball, on an ellipsoid, with weights."""

import logging
import math
import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch.autograd import gradcheck, gradgradcheck
from torch.func import hessian, jacrev

import pmaf
from pmaf import native
from pmaf.gradients import DDN, Unroll
from pmaf.operators import Diagonal, FromMatvec, Matrix, Sparse
from pmaf.solvers import Cholesky, Krylov, ProjectedGradient, Secular
from tests import oracles
from tests.less_cases import with_singular_values

T = torch.float64


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=T)


def definite(*batch, n, seed=3):
    X = randn(*batch, n, n, seed=seed)
    return X @ X.mT / n + 0.5 * torch.eye(n, dtype=T)


def problems(m, n, lengths=(0.2, 0.6, 5.0)):
    """A batch whose `A⁺b` has, in the norm of M and over the radius, the given lengths."""
    k = len(lengths)
    A, M, rho = randn(k, m, n), definite(k, n=n), torch.linspace(0.7, 1.9, k, dtype=T)
    w = randn(k, m, seed=4).abs() + 0.1
    root = w.sqrt()
    factor = torch.linalg.cholesky(M)
    inverse = torch.linalg.pinv(root.unsqueeze(-1) * (A @ torch.linalg.inv(factor).mT))
    b = randn(k, m, seed=1)
    size = torch.linalg.vector_norm((inverse @ (root * b).unsqueeze(-1)).squeeze(-1), dim=-1)
    return A, b * (torch.tensor(lengths, dtype=T) * rho / size).unsqueeze(-1), rho, M, w


def posed(A, b, rho, M, w, ball, use=("radius", "M", "weights")):
    """The problem with some of the options."""
    if "diagonal" in use:
        M = Diagonal(M.diagonal(dim1=-2, dim2=-1))
    return pmaf.SphereLeastSquares(
        A,
        b,
        rho if "radius" in use else 1.3,
        ball,
        M if "M" in use or "diagonal" in use else None,
        w if "weights" in use else None,
    )


OPTIONS = {
    "radius": ("radius",),
    "M": ("M",),
    "diagonal": ("diagonal",),
    "weights": ("weights",),
    "all": ("radius", "M", "weights"),
}
options = pytest.mark.parametrize("use", OPTIONS.values(), ids=OPTIONS)
balls = pytest.mark.parametrize("ball", [False, True], ids=["sphere", "ball"])
sizes = pytest.mark.parametrize(("m", "n"), [(6, 4), (4, 4), (3, 5), (3, 1), (1, 3)])


def derivatives(problem, leaves):
    solution = pmaf.solve(problem)
    scalar = (solution.value.cos().sum(-1) + solution.multiplier).sum()
    return solution, torch.autograd.grad(scalar, leaves, allow_unused=True)


# Solutions.


@options
@balls
@pytest.mark.parametrize("entry", range(3))
def test_what_slsqp_finds(use, ball, entry):
    problem = posed(*problems(6, 4), ball, use)
    found = pmaf.solve(problem)
    A, b = problem.A[entry].numpy(), problem.b[entry].numpy()
    M = np.eye(4)
    if problem.M is not None:
        M = problem.M.d[entry].diag().numpy() if "diagonal" in use else problem.M[entry].numpy()
    w = np.ones(6) if problem.weights is None else problem.weights[entry].numpy()
    rho = float(problem.radius[entry]) if "radius" in use else problem.radius
    kind = "ineq" if ball else "eq"
    constraint = {"type": kind, "fun": lambda u: rho**2 - u @ M @ u}
    best = min(
        (
            minimize(
                lambda u: 0.5 * w @ (A @ u - b) ** 2,
                start,
                jac=lambda u: A.T @ (w * (A @ u - b)),
                constraints=[constraint],
                method="SLSQP",
                options={"ftol": 1e-15, "maxiter": 500},
            )
            for start in randn(6, 4, seed=7).numpy()
        ),
        key=lambda run: run.fun + 1e3 * abs(min(0, rho**2 - run.x @ M @ run.x)),
    )
    ours = found.value[entry].numpy()
    assert np.allclose(ours, best.x, atol=1e-5)
    length = math.sqrt(ours @ M @ ours)
    assert length <= rho * (1 + 1e-14)
    inside = float(found.multiplier[entry]) == 0
    assert inside == (ball and length < rho * (1 - 1e-12))
    # (AᵀWA + μM)u = AᵀWb
    force = A.T @ (w * (b - A @ ours)) - float(found.multiplier[entry]) * M @ ours
    assert np.abs(force).max() <= 1e-12 * np.abs(A).sum() ** 2


@pytest.mark.parametrize(("m", "n"), [(6, 4), (3, 5)])
def test_a_ball_is_a_least_norm_solution_or_a_sphere(m, n):
    A, b, rho, M, w = problems(m, n)
    found = pmaf.solve(posed(A, b, rho, M, w, True))
    factor = torch.linalg.cholesky(M)
    root = w.sqrt().unsqueeze(-1)
    inverse = torch.linalg.pinv(root * (A @ torch.linalg.inv(factor).mT))
    least = torch.linalg.solve(factor.mT, inverse @ (root * b.unsqueeze(-1))).squeeze(-1)
    torch.testing.assert_close(found.value[:2], least[:2], rtol=1e-10, atol=1e-12)
    assert found.multiplier[:2].tolist() == [0, 0]
    on_sphere = pmaf.solve(posed(A, b, rho, M, w, False))
    torch.testing.assert_close(found.value[2], on_sphere.value[2], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.multiplier[2], on_sphere.multiplier[2])
    assert found.converged.all()


def test_a_radius_for_each_problem_with_one_matrix(caplog):
    """The matrix is decomposed once: ridge regression by constraint, a whole path at a time."""
    A, b = randn(8, 4), randn(8, seed=1)
    rho = torch.logspace(-2, 1, 9, dtype=T)
    with caplog.at_level(logging.DEBUG, logger="pmaf"):
        found = pmaf.solve(pmaf.SphereLeastSquares(A, b, rho, ball=True))
    way = "decomposition, compiled" if native.available else "constrained, singular vectors"
    assert [x.getMessage() for x in caplog.records] == [f"less: {way}"]
    least = torch.linalg.lstsq(A, b.unsqueeze(-1)).solution.squeeze(-1)
    for u, mu, radius in zip(found.value, found.multiplier, rho):
        ridge = torch.linalg.solve(A.mT @ A + mu * torch.eye(4, dtype=T), A.mT @ b)
        torch.testing.assert_close(u, ridge, rtol=1e-9, atol=1e-12)
        assert (float(mu) == 0) == (float(least.norm()) <= float(radius))
    assert (found.multiplier.diff() <= 0).all()


@balls
def test_batches_broadcast(ball):
    A, b, rho, M, w = problems(6, 4)
    whole = pmaf.solve(posed(A[0], b[:2, None], rho, M[:1], w[1], ball)).value
    assert whole.shape == (2, 3, 4)
    for i in range(2):
        for j in range(3):
            one = pmaf.solve(posed(A[0], b[i], rho[j], M[0], w[1], ball)).value
            torch.testing.assert_close(whole[i, j], one, rtol=1e-11, atol=1e-12)


def test_weights_are_repeated_and_absent_rows():
    A, b = randn(5, 3), randn(5, seed=1)
    w = torch.tensor([1.0, 3.0, 0.0, 2.0, 1.0], dtype=T)
    repeated = torch.tensor([0, 1, 1, 1, 3, 3, 4])
    for ball in (False, True):
        found = pmaf.less(A, b, radius=0.8, weights=w, ball=ball)
        wanted = pmaf.less(A[repeated], b[repeated], radius=0.8, ball=ball)
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


def test_the_numbers_of_an_option_and_of_none_agree():
    A, b = randn(7, 6, 4), randn(7, 6, seed=1)
    plain = pmaf.solve(pmaf.SphereLeastSquares(A, b, 2.0))
    eye, one = torch.eye(4, dtype=T), torch.ones(6, dtype=T)
    for options in (
        dict(radius=torch.tensor(2.0, dtype=T)),
        dict(radius=2.0, M=eye),
        dict(radius=2.0, M=Diagonal(eye.diagonal())),
        dict(radius=2.0, weights=one),
        dict(radius=1.0, M=eye / 4),
    ):
        found = pmaf.solve(pmaf.SphereLeastSquares(A, b, **options))
        torch.testing.assert_close(found.value, plain.value, rtol=1e-10, atol=1e-11)
        ratio = 4 if options["radius"] == 1.0 else 1
        torch.testing.assert_close(found.multiplier / ratio, plain.multiplier)
        torch.testing.assert_close(found.gap / ratio, plain.gap)


def test_the_ways_that_are_taken(caplog):
    A, b = randn(6, 4), randn(6, seed=1)
    for dtype, way in ((T, "singular vectors"), (torch.float32, "eigenvectors")):
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="pmaf"):
            pmaf.less(A.to(dtype), b.to(dtype), ball=True)
        way = "decomposition, compiled" if native.available else f"constrained, {way}"
        assert [x.getMessage() for x in caplog.records] == [f"less: {way}"]


@pytest.mark.parametrize("solver", [Cholesky(), Krylov()], ids=repr)
def test_other_solvers_on_ellipsoids(solver):
    """Solvers know spheres only; the gradient is that of the problem."""
    A, b, rho, M, w = problems(9, 4, (2.0, 3.0, 5.0))
    leaves = [x.requires_grad_() for x in (A, b, rho, M, w)]
    wanted = torch.autograd.grad(pmaf.solve(posed(*leaves, False)).value.cos().sum(), leaves)
    found = pmaf.solve(posed(*leaves, False), solver=solver).value.cos().sum()
    for x, y in zip(torch.autograd.grad(found, leaves), wanted):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)


# Derivatives.


@sizes
@balls
def test_derivatives_of_both_orders(m, n, ball):
    """The batch mixes solutions inside of the ball and on its edge."""
    lengths = (0.2, 0.6, 5.0) if ball or m >= n else (1.5, 3.0, 5.0)
    inputs = [x.requires_grad_() for x in problems(m, n, lengths)]

    def call(*inputs):
        found = pmaf.solve(posed(*inputs, ball))
        return found.value, found.multiplier

    assert (call(*inputs)[1] == 0).tolist() == [ball and x < 1 for x in lengths]
    assert gradcheck(call, inputs)
    assert gradgradcheck(call, inputs, fast_mode=True)


@options
@balls
def test_derivatives_of_each_option(use, ball):
    inputs = [x.requires_grad_() for x in problems(5, 3, (0.4, 2.0))]

    def call(*inputs):
        found = pmaf.solve(posed(*inputs, ball, use))
        return found.value, found.multiplier

    assert gradcheck(call, inputs)
    assert gradgradcheck(call, inputs, fast_mode=True)


def newton(A, b, rho, M, w, u, mu):
    """The solution again, by Newton's method on dense optimality conditions, with derivatives.

    It is defined for weights below zero as well, so that it has derivatives at zero.
    """
    n, inside = u.shape[-1], float(mu) == 0
    for _ in range(3):
        H = A.mT @ (w.unsqueeze(-1) * A)
        top = A.mT @ (w * (b - A @ u)) - mu * M @ u
        low = 0.5 * (rho**2 - u @ M @ u)
        if inside:
            u = u + torch.linalg.solve(H, top)
            continue
        border = (M @ u).unsqueeze(-1)
        corner = torch.zeros(1, 1, dtype=T)
        K = torch.cat([torch.cat([H + mu * M, border], 1), torch.cat([border.mT, corner], 1)])
        step = torch.linalg.solve(K, torch.cat([top, low.reshape(1)]))
        u, mu = u + step[:n], mu + step[n]
    return u, mu


@balls
@pytest.mark.parametrize("entry", range(3))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, in forward mode
def test_weights_of_zero_have_both_derivatives(ball, entry):
    A, b, rho, M, w = (x[entry] for x in problems(6, 3))
    w[1], w[4] = 0, 0
    fixed = pmaf.solve(posed(A, b, rho, M, w, ball))

    def ours(*inputs):
        found = pmaf.solve(posed(*inputs, ball))
        return found.value.cos().sum() + found.multiplier

    def theirs(*inputs):
        u, mu = newton(*inputs, fixed.value, fixed.multiplier)
        return u.cos().sum() + mu

    inputs, every = (A, b, rho, M, w), tuple(range(5))
    for x, y in zip(jacrev(ours, every)(*inputs), jacrev(theirs, every)(*inputs)):
        # M is taken for symmetric.
        y = 0.5 * (y + y.mT) if y.shape == (3, 3) else y
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)
    wanted = hessian(theirs, (1, 2, 4))(*inputs)
    for derive in (hessian, lambda f, argnums: jacrev(jacrev(f, argnums), argnums)):
        found = derive(ours, (1, 2, 4))(*inputs)
        for xs, ys in zip(found, wanted):
            for x, y in zip(xs, ys):
                torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-8)


def test_a_singular_matrix_inside_of_a_ball():
    """The least-norm solution, differentiated along matrices of the same rank."""
    X, Y, b = randn(6, 2), randn(4, 2, seed=1), 0.3 * randn(6, seed=2)
    leaves = [x.requires_grad_() for x in (X, Y, b)]

    def call(X, Y, b):
        return pmaf.less(X @ Y.mT, b, radius=2.0, ball=True)

    torch.testing.assert_close(call(X, Y, b), torch.linalg.pinv(X @ Y.mT) @ b)
    assert gradcheck(call, leaves)
    assert gradgradcheck(call, leaves)


def test_weights_that_leave_fewer_rows_than_columns():
    A, b = randn(6, 4).requires_grad_(), (0.2 * randn(6, seed=1)).requires_grad_()
    w = torch.tensor([1.0, 0.0, 2.0, 0.0, 0.0, 0.5], dtype=T)
    present = w > 0

    def call(A, b):
        return pmaf.less(A, b, radius=2.0, ball=True, weights=w)

    torch.testing.assert_close(call(A, b), torch.linalg.pinv(A[present]) @ b[present])
    assert gradcheck(call, (A, b))
    assert gradgradcheck(call, (A, b))


@pytest.mark.parametrize("length", [1.0, 1.0 - 1e-3, 1.0 + 1e-3])
def test_the_edge_of_a_ball(length):
    """There the derivative is that of the outer side."""
    A, b = torch.eye(3, dtype=T), torch.tensor([length, 0, 0], dtype=T)
    found = pmaf.solve(pmaf.SphereLeastSquares(A, b, ball=True))
    assert float(found.multiplier) == max(0, length - 1)
    J = jacrev(lambda b: pmaf.less(A, b, ball=True))(b)
    inside = torch.diag(torch.tensor([length < 1, True, True]).to(T))
    torch.testing.assert_close(J, inside / max(1, length))


def test_the_solution_of_zero_inside_of_a_ball():
    A = randn(5, 3).requires_grad_()
    for b in (torch.zeros(5, dtype=T), randn(5, seed=1)):
        b = b.requires_grad_()
        u = pmaf.less(A, b, radius=100.0, ball=True, weights=torch.ones(5, dtype=T) * (b != 0))
        for x in torch.autograd.grad(u.sum(), (A, b)):
            assert torch.isfinite(x).all()


@pytest.mark.parametrize("use", [("radius", "weights"), ("radius", "M", "weights")], ids=str)
def test_null_vectors(use):
    """With b = 0 it is the vector of the smallest (generalised) singular value."""
    A, _, rho, M, w = problems(7, 4)
    b, start = torch.zeros(3, 7, dtype=T), randn(3, 4, seed=5)
    w[:, 2] = 0
    inputs = [x.requires_grad_() for x in (A, rho, M)]

    def call(A, rho, M):
        found = pmaf.solve(posed(A, b, rho, M, w, False, use), init=start)
        return found.value, found.multiplier

    _, mu = call(*inputs)
    metric = M if "M" in use else torch.eye(4, dtype=T)
    pairs = torch.linalg.eigvals(torch.linalg.solve(metric, A.mT @ (w.unsqueeze(-1) * A)))
    torch.testing.assert_close(mu, -pairs.real.amin(-1))
    assert gradcheck(call, inputs)
    assert gradgradcheck(call, inputs, fast_mode=True)
    assert (pmaf.solve(posed(A, b, rho, M, w, False, use)).gap == 0).all()


def test_only_a_symmetric_part_counts():
    A, b, rho, M, w = (x[1] for x in problems(6, 4))
    skew = randn(4, 4, seed=9)
    skew = skew - skew.mT
    assert torch.equal(
        pmaf.solve(posed(A, b, rho, M + skew, w, False)).value.round(decimals=10),
        pmaf.solve(posed(A, b, rho, M, w, False)).value.round(decimals=10),
    )
    M = (M + skew).requires_grad_()
    pmaf.solve(posed(A, b, rho, M, w, False)).value.cos().sum().backward()
    torch.testing.assert_close(M.grad, M.grad.mT)


# Accuracy.


def conditioned(dtype, of_A, of_M, length, diagonal):
    A = with_singular_values((10.0 ** np.linspace(0, -np.log10(of_A), 4)).tolist(), 7)[0]
    values = torch.logspace(0, -math.log10(of_M), 4, dtype=T)[[2, 0, 3, 1]]
    Q = torch.eye(4, dtype=T) if diagonal else torch.linalg.qr(randn(4, 4, seed=2))[0]
    M = Q * values @ Q.mT
    x = randn(4, seed=7)
    b = A @ (length * x / (x @ M @ x).sqrt()) + 1e-3 * randn(7, seed=8)
    w = randn(7, seed=9).abs()
    w[2] = 0
    inputs = [x.to(dtype) for x in (A, b, torch.tensor(1.1, dtype=T), M, w)]
    inputs[3] = 0.5 * (inputs[3] + inputs[3].mT)
    return inputs


DRAWS, SLACK = 3, 30  # of our error over the largest effect of rounding the inputs


@pytest.mark.parametrize(
    ("dtype", "of_A", "of_M"),
    [(T, 1e6, 1e6), (T, 3.0, 1e6), (T, 1e6, 3.0), (torch.float32, 1e3, 1e3)],
    ids=str,
)
@pytest.mark.parametrize("diagonal", [False, True], ids=["dense", "diagonal"])
@pytest.mark.parametrize(("ball", "length"), [(False, 0.4), (True, 0.4), (True, 3.0)])
def test_ill_conditioned_against_fifty_digits(dtype, of_A, of_M, diagonal, ball, length):
    inputs = conditioned(dtype, of_A, of_M, length, diagonal)
    A, b, rho, M, w = leaves = [x.requires_grad_() for x in inputs]
    v = torch.linspace(-1, 2, 4, dtype=dtype)
    metric = Diagonal(M.diagonal()) if diagonal else M
    u = pmaf.less(A, b, radius=rho, ball=ball, M=metric, weights=w)
    found = [x.detach().double().numpy() for x in (u, *torch.autograd.grad(u @ v, leaves))]
    given = [x.detach().double().numpy() for x in leaves]
    g, eps = np.random.default_rng(0), torch.finfo(dtype).eps

    def exact(inputs):
        answers = list(oracles.exact_constrained(*inputs, v.double().numpy(), ball))
        if diagonal:
            answers[4] = np.diag(np.diag(answers[4]))
        return answers

    def rounded():
        near = [x * (1 + eps * g.uniform(-1, 1, x.shape)) for x in given]
        near[3] = 0.5 * (near[3] + near[3].T)
        return exact(near)

    truth, moved = exact(given), [rounded() for _ in range(DRAWS)]
    for i, name in enumerate(("u", "dA", "db", "dρ", "dM", "dw")):
        allowed = max(np.linalg.norm(near[i] - truth[i]) for near in moved)
        allowed += eps * np.linalg.norm(truth[i])
        assert np.linalg.norm(found[i] - truth[i]) <= SLACK * allowed, name


@pytest.mark.parametrize("n", [8, 40])
@pytest.mark.parametrize("cond", [1e2, 1e4])
def test_float32_inside_of_a_ball_is_that_of_a_good_solver(n, cond):
    left, right = (torch.linalg.qr(randn(k, n, seed=k))[0] for k in (2 * n, n))
    A = (left * torch.logspace(-math.log10(cond), 0, n, dtype=T) @ right.mT).float()
    b = (A.double() @ randn(n, seed=1) + 1e-3 * randn(2 * n, seed=2)).float()
    truth = torch.linalg.lstsq(A.double(), b.double().unsqueeze(-1)).solution.squeeze(-1)
    found = pmaf.less(A, b, radius=1e6, ball=True)
    # Rounded once.
    eps = torch.finfo(torch.float32).eps
    assert float((found.double() - truth).norm()) <= 2 * eps * float(truth.norm())


SCALES = [(torch.float32, s) for s in (1e15, 1e18, 1e-15, 1e-18)] + [
    (T, s) for s in (1e15, 1e100, 1e-15, 1e-100)
]


@balls
@pytest.mark.parametrize(("dtype", "scale"), SCALES, ids=str)
def test_any_scale(dtype, scale, ball):
    """The same numbers in other units: of A and b, of the weights, of u and M."""
    tolerance = 100 * torch.finfo(dtype).eps
    inputs = problems(6, 4)

    def run(a, bs, r, ms, ws, into=1.0):
        factors = (a, bs, r, ms, ws)
        leaves = [(x * f).to(dtype).requires_grad_() for x, f in zip(inputs, factors)]
        u = pmaf.solve(posed(*leaves, ball)).value
        grads = torch.autograd.grad((u.double() / into).cos().sum(), leaves)
        return [u.detach().double() / into, *(x.double() * f for x, f in zip(grads, factors))]

    wanted = run(1, 1, 1, 1, 1)
    cases = [
        run(scale, scale, 1, 1, 1),
        run(1, 1, 1, 1, scale),
        run(1, scale, scale, 1, 1, into=scale),
    ]
    if dtype == T:
        cases.append(run(scale, 1, 1, scale**2, 1, into=1 / scale))
    for found in cases:
        for x, y in zip(found, wanted):
            torch.testing.assert_close(x, y, rtol=0, atol=tolerance * (1 + float(y.abs().max())))


# Operators.


def by_products(A):
    yield Matrix(A)
    yield FromMatvec(lambda u, A: (A @ u.unsqueeze(-1)).squeeze(-1), A.shape, [A], dtype=A.dtype)


@options
@balls
@pytest.mark.parametrize(("m", "n"), [(9, 6), (4, 6)], ids=["tall", "wide"])
def test_operators(use, ball, m, n):
    lengths = (0.3, 4.0) if ball else (3.0, 4.0)
    A, *others = (x.requires_grad_() for x in problems(m, n, lengths))
    wanted, gradients = derivatives(posed(A, *others, ball, use), [A, *others])
    for operator in by_products(A):
        found, ours = derivatives(posed(operator, *others, ball, use), [A, *others])
        torch.testing.assert_close(found.value, wanted.value, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(found.multiplier, wanted.multiplier, rtol=1e-8, atol=1e-8)
        for x, y in zip(ours, gradients):
            assert (x is None) == (y is None)
            if x is not None:
                torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-8)
        assert pmaf.certify(posed(operator, *others, ball, use), found).holds(1e-9).all()


def test_a_sparse_matrix_with_weights_in_a_ball(caplog):
    A = randn(40, 12) * (randn(40, 12, seed=1) > 0.5)
    b, w = randn(40, seed=2), randn(40, seed=3).clamp_min(0)
    for radius in (0.05, 50.0):
        with caplog.at_level(logging.DEBUG, logger="pmaf"):
            found = pmaf.less(Sparse(A.to_sparse_csr()), b, radius=radius, ball=True, weights=w)
        wanted = pmaf.less(A, b, radius=radius, ball=True, weights=w)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    assert "products: inside of the ball" in [x.getMessage() for x in caplog.records]


# Certificates.


@options
@balls
def test_certificates(use, ball):
    problem = posed(*problems(6, 4), ball, use)
    found = pmaf.solve(problem)
    assert pmaf.certify(problem, found).holds(1e-12).all()
    assert not pmaf.certify(problem, 1.01 * found.value).holds(1e-3)[2]
    assert not pmaf.certify(problem, 0.99 * found.value).holds(1e-6).any()
    assert not pmaf.certify(problem, found.value.flip(-1)).holds(1e-3).any()
    other = randn(3, 4, seed=11)
    assert (problem.objective(found.value) <= problem.objective(_feasible(other, problem))).all()


def _feasible(u, problem):
    M = problem.M
    image = u if M is None else M(u) if isinstance(M, Diagonal) else (M @ u.unsqueeze(-1))[..., 0]
    length = (u * image).sum(-1).sqrt()
    return u * (problem.radius / length).unsqueeze(-1)


def test_a_point_of_the_sphere_is_no_minimum_where_the_ball_is_larger():
    A, b = randn(6, 3), 0.1 * randn(6, seed=1)
    on_sphere = pmaf.less(A, b)
    assert pmaf.certify(pmaf.SphereLeastSquares(A, b), on_sphere).holds(1e-12)
    assert not pmaf.certify(pmaf.SphereLeastSquares(A, b, ball=True), on_sphere).holds(1e-3)


# Arguments.

A, B = randn(3, 5, 4).float(), randn(3, 5, seed=1).float()
INDEFINITE = torch.diag(torch.tensor([1.0, 1.0, 1.0, -1.0]))


@pytest.mark.parametrize(
    ("error", "text", "given"),
    [
        (ValueError, "positive and finite; got 0.0", dict(radius=torch.tensor(0.0))),
        (ValueError, "in 1 of 3 entries", dict(radius=torch.tensor([1.0, -2.0, 1.0]))),
        (ValueError, "got nan", dict(radius=torch.tensor([1.0, math.nan, 1.0]))),
        (ValueError, "got inf", dict(radius=torch.tensor(math.inf))),
        (ValueError, "positive and finite", dict(radius=-1.0)),
        (ValueError, r"\(2,\) of radius", dict(radius=torch.ones(2))),
        (TypeError, "radius is torch.float64", dict(radius=torch.ones(3, dtype=T))),
        (TypeError, "ball must be True or False", dict(ball=1.0)),
        (ValueError, r"weights of shape \(\*, 5\)", dict(weights=torch.ones(3, 4))),
        (ValueError, "must not be negative", dict(weights=torch.full((5,), -1.0))),
        (ValueError, "weights has non-finite", dict(weights=torch.full((5,), math.nan))),
        (ValueError, r"\(2,\) of weights", dict(weights=torch.ones(2, 5))),
        (TypeError, "weights is torch.float64", dict(weights=torch.ones(5, dtype=T))),
        (TypeError, "weights has dtype torch.bool", dict(weights=torch.ones(5) > 0)),
        (ValueError, r"M of shape \(\*, 4, 4\)", dict(M=torch.eye(5))),
        (ValueError, r"M must have shape", dict(M=torch.ones(4))),
        (ValueError, "M is not positive definite", dict(M=INDEFINITE)),
        (ValueError, "in 1 of 2 batch", dict(M=torch.stack([INDEFINITE, torch.eye(4)])[:, None])),
        (ValueError, "M is not positive definite", dict(M=Diagonal(INDEFINITE.diagonal()))),
        (ValueError, "M is not positive definite", dict(M=torch.zeros(4, 4))),
        (ValueError, "M has non-finite", dict(M=torch.full((4, 4), math.nan))),
        (TypeError, "which has no factor", dict(M=Matrix(torch.eye(4)))),
        (TypeError, "M is torch.float64", dict(M=torch.eye(4, dtype=T))),
        (TypeError, "does not solve problems with ball", dict(ball=True, solver=Cholesky())),
        (TypeError, "use gradient=Implicit", dict(ball=True, gradient=DDN())),
        (
            TypeError,
            "use gradient=Implicit",
            dict(weights=torch.ones(5), solver=ProjectedGradient(), gradient=Unroll()),
        ),
    ],
)  # fmt: skip
def test_bad_arguments(error, text, given):
    with pytest.raises(error, match=text):
        pmaf.less(A, B, **given)


def test_data_that_are_not_finite_are_an_error():
    bad = A.clone()
    bad[1, 0, 0] = math.nan
    for given in (dict(ball=True), dict(weights=torch.ones(5)), dict(M=torch.eye(4))):
        with pytest.raises(ValueError, match="A has non-finite values in 1 of 3"):
            pmaf.less(bad, B, **given)


def test_an_empty_batch():
    inputs = [x[:0].requires_grad_() for x in problems(6, 4)]
    u = pmaf.solve(posed(*inputs, True)).value
    assert u.shape == (0, 4)
    for x, y in zip(torch.autograd.grad(u.sum(), inputs), inputs):
        assert x.shape == y.shape


# Modules and training.


def test_the_module():
    A, b, rho, M, w = problems(6, 4)
    layer = pmaf.LESS(radius=torch.nn.Parameter(rho), ball=True, solver=Secular())
    assert [name for name, _ in layer.named_parameters()] == ["radius"]
    assert "radius=Parameter(3,), ball=True, solver=" in repr(layer)
    found = layer(A, b, M=M, weights=w)
    torch.testing.assert_close(found, pmaf.solve(posed(A, b, rho, M, w, True)).value)
    found.sum().backward()
    # The constraint acts on the last entry only.
    assert (layer.radius.grad != 0).tolist() == [False, False, True]
    buffered = pmaf.LESS(radius=rho)
    assert list(buffered.state_dict()) == ["radius"]
    assert not list(buffered.parameters())


def test_many_small_problems():
    g = torch.Generator().manual_seed(0)
    A, b = torch.randn(100_000, 6, 4, generator=g), torch.randn(100_000, 6, generator=g)
    w, rho = torch.rand(100_000, 6, generator=g), torch.rand(100_000, generator=g) + 0.1
    rho.requires_grad_()
    problem = pmaf.SphereLeastSquares(A, b, rho, ball=True, weights=w)
    found = pmaf.solve(problem)
    inside = found.multiplier == 0
    assert 0.05 < float(inside.float().mean()) < 0.95
    assert found.converged.all()
    length = found.value.norm(dim=-1).detach()
    assert (length <= rho * (1 + 1e-6)).all()
    (gradient,) = torch.autograd.grad(found.value.sum(), rho)
    assert torch.isfinite(gradient).all()
    assert (gradient[inside] == 0).all()


def test_a_radius_is_learned():
    """The radius of a ball in which the fits were made; warnings are errors."""
    torch.manual_seed(0)
    A, b = torch.randn(16, 6, 4), 3 * torch.randn(16, 6)
    target = pmaf.less(A, b, radius=0.7, ball=True)
    size = torch.nn.Parameter(torch.tensor(0.5))
    optimiser = torch.optim.Adam([size], lr=0.02)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(300):
            optimiser.zero_grad()
            loss = (pmaf.less(A, b, radius=size.exp(), ball=True) - target).square().sum()
            loss.backward()
            optimiser.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < 1e-6 * losses[0]
    assert abs(float(size.detach().exp()) - 0.7) < 1e-3
