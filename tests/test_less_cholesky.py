"""`Cholesky` against `Secular`: the same minimum, the same gradient, whoever finds it."""

import pytest
import torch

import pmaf
from pmaf.autograd.attach import Search
from pmaf.gradients import Implicit
from pmaf.runtime.opaque import solve
from pmaf.solvers import Auto, Cholesky, Secular
from pmaf.solvers import cholesky as module
from pmaf.solvers.factored_newton import Point, newton
from pmaf.tangent.factor import FACTORED
from tests.compilers import BACKEND
from tests.less_cases import ALL, REGULAR, gaussian, hard, with_singular_values
from tests.test_less_conditioning import allowed, make

T = torch.float64
DTYPES = [torch.float32, torch.float64]


def batch(count, m, n, length=1.0, dtype=T, seed=0):
    g = torch.Generator().manual_seed(seed)
    A = torch.randn(count, m, n, generator=g, dtype=T).to(dtype)
    return A, (length * torch.randn(count, m, generator=g, dtype=T)).to(dtype)


def gradients(A, b, solver):
    leaves = A.clone().requires_grad_(), b.clone().requires_grad_()
    u = pmaf.less(*leaves, solver=solver)
    weights = torch.cos(torch.arange(u.numel(), dtype=u.dtype)).reshape(u.shape)
    return u, torch.autograd.grad((u * weights).sum(), leaves)


@pytest.fixture
def handed(monkeypatch):
    """How many entries `Secular` was asked to solve, call by call."""
    solve, in_double, counts = Secular.solve, Secular.solve_in_double, []

    def counted(self, problem, **options):
        counts.append(problem.batch_shape.numel())
        return solve(self, problem, **options)

    def counted_in_double(self, A, *others):
        counts.append(A.shape[:-2].numel())
        return in_double(self, A, *others)

    monkeypatch.setattr(Secular, "solve", counted)
    monkeypatch.setattr(Secular, "solve_in_double", counted_in_double)
    return counts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [0.0, 1e-6, 0.03, 0.3, 1.0, 3.0, 100.0])
@pytest.mark.parametrize(("m", "n"), [(40, 20), (24, 24), (300, 256), (20, 12)])
def test_value_report_and_gradient(m, n, length, dtype):
    A, b = batch(16, m, n, length, dtype)
    eps = torch.finfo(dtype).eps
    exact = pmaf.solve(pmaf.SphereLeastSquares(A.double(), b.double()), solver=Secular())
    problem = pmaf.SphereLeastSquares(A, b)
    solution = pmaf.solve(problem, solver=Cholesky(), throw=True)
    assert pmaf.certify(problem, solution).holds(16 * eps).all()
    assert (solution.gap >= 0).all()
    assert solution.residual.max() <= 16 * eps
    scale = problem.scale()
    assert ((solution.multiplier - exact.multiplier).abs() <= 200 * eps * scale).all()
    assert ((solution.gap - exact.gap).abs() <= 200 * eps * scale).all()
    best = problem.objective(exact.value.to(dtype))
    value, found = gradients(A, b, Cholesky())
    assert (problem.objective(value.detach()) <= best * (1 + 100 * eps) + eps * scale).all()
    reference, expected = gradients(A.double(), b.double(), Secular())
    # No worse than ten times what the other solver does in the same precision.
    other, by_other = gradients(A, b, Secular())
    for x, y, z in zip((value, *found), (other, *by_other), (reference, *expected)):
        x, y, z = x.detach(), y.detach(), z.detach()
        bound = 10 * (y - z).abs().max() + 1000 * eps * z.abs().max()
        assert (x - z).abs().max() <= bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL)
def test_every_named_case_is_certified(name, dtype):
    A, b = (x.to(dtype) for x in ALL[name]())
    problem = pmaf.SphereLeastSquares(A, b)
    eps = torch.finfo(dtype).eps
    solution = pmaf.solve(problem, solver=Cholesky(), throw=True)
    assert pmaf.certify(problem, solution).holds(16 * eps)
    assert solution.gap >= 0
    torch.testing.assert_close(
        pmaf.less(A, b, solver=Cholesky()),
        pmaf.less(A, b, solver=Secular()),
        rtol=0,
        atol=2e3 * eps,
    )


@pytest.mark.parametrize("name", REGULAR)
def test_first_and_second_derivatives(name):
    A, b = (x.requires_grad_() for x in REGULAR[name]())

    def layer(A, b):
        return pmaf.less(A, b, solver=Cholesky())

    assert torch.autograd.gradcheck(layer, (A, b))
    assert torch.autograd.gradgradcheck(layer, (A, b), atol=1e-4)


@pytest.mark.parametrize(("dtype", "condition"), [(T, 1e6), (torch.float32, 1e3)])
@pytest.mark.parametrize("length", [0.3, 0.99, 1.0, 1.01, 3.0])
def test_ill_conditioned_matrices_lose_no_digits(dtype, condition, length):
    A, b = (x.requires_grad_() for x in make(condition, length, 0.01, dtype))
    v = torch.linspace(-1, 2, 5, dtype=dtype)
    y = pmaf.less(A, b, solver=Cholesky())
    found = (y, *torch.autograd.grad(y @ v, (A, b)))
    inputs = (x.detach().double().numpy() for x in (A, b, v))
    exact, bounds = allowed(*inputs, eps=torch.finfo(dtype).eps)
    for x, truth, bound in zip(found, exact, bounds):
        assert float((x.detach().double() - torch.from_numpy(truth)).norm()) <= 30 * bound


def test_only_what_is_not_proved_is_handed_over(handed):
    A, b = batch(128, 40, 20)
    assert isinstance(Auto().resolve(pmaf.SphereLeastSquares(A, b)), Cholesky)
    pmaf.less(A, b)
    assert sum(handed) <= 8
    handed.clear()
    b[::2] = 0
    pmaf.less(A, b)
    assert 64 <= sum(handed) <= 72
    handed.clear()
    pmaf.less(A, 0 * b)
    assert handed == [128]


@pytest.mark.parametrize(("condition", "handed_over"), [(10.0, []), (1e4, [1])])
def test_ill_conditioned_matrices_are_handed_over(condition, handed_over, handed):
    """A factor of the Gram matrix may exist, and keep few of the digits of A."""
    A, b = make(condition, 1.0, 0.0, T)
    pmaf.less(A, b, solver=Cholesky())
    assert handed == handed_over


@pytest.mark.parametrize("seed", range(8))
def test_a_product_that_is_only_rounding_does_not_decide(seed):
    """A does not reach b, so that all there is of Aᵀb is rounding, and the start breaks the tie."""
    A, _, right = with_singular_values([1.0], 5, seed)
    b = 1e3 * torch.linalg.svd(A).U[:, 3]
    for toward in (right[:, 0], -right[:, 0]):
        torch.testing.assert_close(pmaf.less(A, b, solver=Cholesky(), init=toward), toward)


def test_a_small_gap_has_its_digits():
    """In a sum of the multiplier and an eigenvalue it would have lost all but two."""
    A, left, _ = with_singular_values([3.0, 2.0, 1.0], 5)
    eps = torch.finfo(T).eps
    pull = 100 * eps * 14  # of the trace
    solution = pmaf.solve(pmaf.SphereLeastSquares(A, pull * left[:, 2]), solver=Cholesky())
    # (AᵀA + μI)u = Aᵀb along the smallest singular vector, which is u. Rounding turns it, and
    # the part of Aᵀb along it changes by as much.
    assert float(solution.gap) == pytest.approx(pull, rel=1e3 * eps, abs=0)


def test_a_multiplier_that_is_corrected_has_to_prove_itself_again():
    """Where the step starts AᵀA + μI is definite; where it ends, in a saddle point, it is not."""
    eps = torch.finfo(T).eps
    s = torch.tensor([1.0, 2.0, 3.0], dtype=T)
    t = -(2.0**-32)
    # (s² − 1 + t)u = sb, and the part of u along the first vector is against b.
    u = torch.tensor([-0.5, 0.5, 0.5**0.5], dtype=T)
    b = (s.square() - 1 + t) * u / s
    A, b, u = torch.diag(s).unsqueeze(0), b.unsqueeze(0), u.unsqueeze(0)
    gram = A.mT @ A
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    for off, near in ((-4 * t, True), (0.0, False)):
        start = Point(u, torch.tensor([t - 1 + off], dtype=T))
        step = newton(A, b, s * b, gram, mean, start, eps)
        assert step.near == near
        assert not step.done
        assert float(step.mu) == pytest.approx(t - 1, abs=64 * eps * float(s.square().sum()))


@pytest.fixture
def ways(caplog):
    """Runs a function, and returns its result and the methods that were used."""

    def run(function, *given, **options):
        caplog.clear()
        with caplog.at_level("DEBUG", logger="pmaf"):
            result = function(*given, **options)
        found = [record.getMessage() for record in caplog.records]
        return result, [way for way in found if way.startswith("less")]

    return run


def rotation(rows, columns, generator):
    return torch.linalg.qr(torch.randn(rows, columns, generator=generator, dtype=T)).Q


def large(spectrum, kind, dtype, n=260, m=400):
    """A large problem with given singular values, its left and its right singular vectors."""
    g = torch.Generator().manual_seed(0)
    s = torch.linspace(1, 3, n, dtype=T)
    s[0] = {"near": 0.95, "apart": 0.5, "tiny": 1e-4, "zero": 0.0, "double": float(s[1])}[spectrum]
    U, V = rotation(m, n, g), rotation(n, n, g)
    x = torch.randn(n, generator=g, dtype=T)
    b = 0.3 * (U * s) @ (x / x.norm()) + 0.01 * torch.randn(m, generator=g, dtype=T)
    along = {"hard": 0.0, "nearly hard": 1e-5, "inner": 2e-3, "zero": 0.0}[kind]
    b = 0 * b if kind == "zero" else b + (along - U[:, 0] @ b) * U[:, 0]
    return ((U * s) @ V.mT).to(dtype), b.to(dtype), V[:, 0].to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["inner", "nearly hard", "hard", "zero"])
@pytest.mark.parametrize("spectrum", ["near", "apart", "tiny", "zero", "double"])
def test_large_problems_with_a_small_or_negative_multiplier(spectrum, kind, dtype):
    """The solution needs an eigenvector of which b may have nothing."""
    A, b, _ = large(spectrum, kind, dtype)
    eps = torch.finfo(dtype).eps
    # The other entry has another multiplier, so that both kinds of spaces are in one batch.
    A, b = torch.stack([A, A]), torch.stack([b, b + 10 * A @ torch.ones(260, dtype=dtype)])
    problem = pmaf.SphereLeastSquares(A.double(), b.double())
    exact = pmaf.solve(problem, solver=Secular())
    assert exact.multiplier[0] < 1e-3 < exact.multiplier[1]
    least, size = problem.objective(exact.value), problem.scale()
    u, found = gradients(A, b, Cholesky())
    assert ((u.norm(dim=-1) - 1).abs() <= 4 * eps).all()
    # The objective itself is a sum of squares in float64.
    bound = 4 * eps * size + 16 * torch.finfo(T).eps * least
    assert (problem.objective(u.detach().double()) - least <= bound).all()
    assert all(bool(x.isfinite().all()) for x in found)
    single = pmaf.SphereLeastSquares(A, b)
    solution = pmaf.solve(single, solver=Cholesky(), throw=True)
    assert pmaf.certify(single, solution).holds(16 * eps).all()
    assert (solution.gap >= 0).all()


@pytest.mark.parametrize("kind", ["inner", "nearly hard", "hard", "zero"])
def test_what_float32_does_not_bound_is_proved_by_probes(kind, handed, ways):
    """Nothing is solved again in float64, and no decomposition is made."""
    A, b, e = large("apart", kind, torch.float32)
    eps = torch.finfo(torch.float32).eps
    exact = pmaf.solve(pmaf.SphereLeastSquares(A.double(), b.double()), solver=Secular())
    assert exact.multiplier < 0
    handed.clear()
    (u, found), way = ways(gradients, A, b, Cholesky())
    assert way == ["less: factor", "less: probes"]
    assert handed == []
    if kind in ("inner", "nearly hard"):
        _, truth = gradients(A.double(), b.double(), Secular())
        # On the tangent space of u the curvature is at least the distance of the two smallest
        # eigenvalues, times the squared part of u along the first. Rounding A to float32 turns the
        # solution by eps·‖A‖² over it.
        squares = torch.linalg.svdvals(A.double()).square()
        least = (squares[-2] - squares[-1]) * (exact.value @ e.double()).square()
        condition = squares[0] / least
        assert (u.detach().double() - exact.value).norm() <= eps * condition
        for x, y in zip(found, truth):
            assert (x.double() - y).norm() <= 8 * eps * condition * y.norm()
    else:  # the start breaks the tie
        for side in (e, -e):
            toward, way = ways(pmaf.less, A, b, solver=Cholesky(), init=side)
            assert way == ["less: factor", "less: probes"]
            assert toward @ side > 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["inner", "hard", "zero"])
def test_two_factors_are_enough_for_large_problems(kind, dtype, monkeypatch):
    """A step with the second factor takes less time than another factor.

    In a nearly hard case the first guess may be on the wrong side, and a third factor is needed.
    """
    A, b, _ = large("near", kind, dtype)
    factor, count = torch.linalg.cholesky_ex, []

    def counted(*given, **options):
        count.append(1)
        return factor(*given, **options)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", counted)
    pmaf.less(A, b, solver=Cholesky())
    assert len(count) == 2


def test_the_wrong_side_of_the_smallest_eigenvector_is_left(monkeypatch, ways):
    """The mirror image of the minimum is stationary, and the proof finds a negative curvature."""
    A, b, e = large("apart", "nearly hard", T)
    expected = pmaf.less(A, b, solver=Secular())
    assert (expected @ e).abs() > 0.5
    guess_inside = module.guess_inside

    def mirrored(*given, **options):
        found = guess_inside(*given, **options)
        return found._replace(u=found.u - 2 * (found.u @ e).unsqueeze(-1) * e)

    monkeypatch.setattr(module, "guess_inside", mirrored)
    found, way = ways(pmaf.less, A, b, solver=Cholesky())
    assert way == ["less: factor", "less: probes", "less: probes"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_what_float32_does_not_prove_is_proved_in_float64(ways):
    """The smallest singular value repeats and b is zero, so that u is not unique."""
    A, b, _ = large("double", "zero", torch.float32)
    u, way = ways(pmaf.less, A, b, solver=Cholesky())
    assert way[0] == "less: factor"
    assert "less: factor, in float64" in way
    problem = pmaf.SphereLeastSquares(A.double(), b.double())
    least = problem.objective(pmaf.less(A.double(), b.double(), solver=Secular()))
    assert problem.objective(u.double()) - least <= 4 * torch.finfo(u.dtype).eps * problem.scale()


def test_a_large_hard_case_has_a_gap_of_zero(handed):
    """Its gap is that of rounding b to float32."""
    A, b = batch(2, 600, 300, 0.3, torch.float32)
    U, S, _ = torch.linalg.svd(A.double(), full_matrices=False)
    last = U[..., -1]
    b = b.double()
    b = (b - (b * last).sum(-1, keepdim=True) * last).float()
    problem = pmaf.SphereLeastSquares(A, b)
    solution = pmaf.solve(problem, solver=Cholesky(), throw=True)
    assert handed == []
    eps = torch.finfo(torch.float32).eps
    assert (solution.gap == 0).all()
    assert pmaf.certify(problem, solution).holds(16 * eps).all()
    error = (solution.multiplier.double() + S[:, -1].square()).abs()
    assert (error <= 8 * eps * S[:, 0].square()).all()


@pytest.mark.parametrize("n", [255, 256, 301])
def test_large_problems_are_not_handed_over(n, handed):
    """Their Gram matrices are made in blocks, and are Gram matrices all the same."""
    A, b = batch(3, 2 * n, n)
    u = pmaf.less(A, b, solver=Cholesky())
    assert handed == []
    assert pmaf.certify(pmaf.SphereLeastSquares(A, b), u).holds(16 * torch.finfo(T).eps).all()


def test_a_few_small_problems_are_decomposed(handed):
    A, b = batch(4, 40, 20)
    assert isinstance(Auto().resolve(pmaf.SphereLeastSquares(A, b)), Secular)
    pmaf.solve(pmaf.SphereLeastSquares(A, b))
    assert handed == [4]


def test_a_direction_that_b_does_not_see_is_not_forgotten(handed):
    """The Krylov space of b never meets the smallest singular vector; the factor does."""
    left = torch.linalg.qr(torch.randn(40, 20, dtype=T, generator=torch.Generator()))[0]
    s = torch.linspace(1, 2, 20, dtype=T)
    s[0] = 0.5
    A, b = left * s, 0.05 * left[:, 1:].sum(-1)
    u = pmaf.solve(pmaf.SphereLeastSquares(A, b)).value
    assert handed == [1]
    assert u[0].abs() > 0.1
    assert pmaf.certify(pmaf.SphereLeastSquares(A, b), u).holds(1e-13)
    toward = torch.zeros(20, dtype=T)
    toward[0] = -1
    assert pmaf.less(A, b, init=toward)[0] < -0.1


def test_entries_do_not_touch_each_other():
    A, b = batch(12, 40, 20)
    A[3] *= 1e-3
    A[5, :, 0] *= 1e-7
    b[7] = 0
    A[9] = A[9, :, :1]
    together, found = gradients(A, b, Auto())
    for i in range(12):
        alone, _ = gradients(A[i : i + 1], b[i : i + 1], Auto())
        torch.testing.assert_close(together[i], alone[0], rtol=0, atol=1e-6)
    assert all(torch.isfinite(x).all() for x in found)


def test_a_shared_matrix_is_decomposed_once(handed):
    A, b = batch(6, 40, 20)
    pmaf.less(A[0], b)
    assert handed == [6]
    handed.clear()
    mapped = torch.func.vmap(lambda b: pmaf.less(A[0], b))(b)
    assert handed == [6]
    torch.testing.assert_close(mapped, pmaf.less(A[:1].expand(6, -1, -1).contiguous(), b))


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e8, 1e30])
def test_scale_changes_nothing(scale):
    for dtype in DTYPES:
        A, b = batch(4, 40, 20, dtype=dtype)
        expected = pmaf.less(A, b, solver=Cholesky())
        found = pmaf.less(A * scale, b * scale, solver=Cholesky())
        torch.testing.assert_close(found, expected, rtol=0, atol=100 * torch.finfo(dtype).eps)


# Tracing and compiling raise torch's own deprecation warnings.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transforms():
    A, b = batch(3, 24, 12)

    def loss(A, b):
        u = pmaf.less(A, b)
        return (u * torch.arange(1.0, 13, dtype=T)).sum()

    leaves = A.clone().requires_grad_(), b.clone().requires_grad_()
    expected = torch.autograd.grad(loss(*leaves), leaves)
    per_sample = torch.func.vmap(torch.func.grad(loss, (0, 1)))(A, b)
    for x, y in zip(per_sample, expected):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)
    jacobian = torch.func.jacrev(pmaf.less)(A[0], b[0])
    assert jacobian.shape == (12, 24, 12)
    forward = torch.func.jacfwd(pmaf.less)(A[0], b[0])
    torch.testing.assert_close(jacobian, forward, rtol=0, atol=1e-9)
    over = torch.func.jacrev(torch.func.jacrev(loss, 1), 1)(A[0], b[0])
    torch.testing.assert_close(over, torch.func.hessian(loss, 1)(A[0], b[0]), rtol=0, atol=1e-8)
    both = torch.func.vmap(torch.func.jacrev(pmaf.less, 1))(A, b)
    single = torch.stack([torch.func.jacrev(pmaf.less, 1)(x, y) for x, y in zip(A, b)])
    torch.testing.assert_close(both, single, rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_and_exported():
    A, b = batch(3, 24, 12)
    layer = torch.compile(pmaf.less, fullgraph=True, dynamic=True, backend=BACKEND)
    leaves = A.clone().requires_grad_(), b.clone().requires_grad_()
    found = torch.autograd.grad(layer(*leaves).square()[:, 0].sum(), leaves)
    expected = torch.autograd.grad(pmaf.less(*leaves).square()[:, 0].sum(), leaves)
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y)
    program = torch.export.export(pmaf.LESS(), (A, b))
    torch.testing.assert_close(program.module()(A, b), pmaf.less(A, b))


def test_opcheck():
    A, b = batch(3, 24, 12)
    problem, given = pmaf.SphereLeastSquares(A, b), [A, b, None]
    call = Search.text(problem, Cholesky(), True, False)
    torch.library.opcheck(torch.ops.pmaf.solve.default, (given, call))
    found = solve(Search.text(problem, Cholesky(), False, False), *given)
    y, multiplier, _, gap, _, _, factor, _ = found
    arguments = [A, multiplier, gap, factor, y, torch.randn(3, 2, 12, dtype=T)]
    torch.library.opcheck(torch.ops.pmaf.solve.default, (arguments, FACTORED))


def test_the_backward_builds_nothing_larger_than_the_inputs():
    from torch.profiler import ProfilerActivity, profile

    A, b = (x.requires_grad_() for x in batch(50, 64, 32, dtype=torch.float32))
    u = pmaf.less(A, b, gradient=Implicit())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        torch.autograd.grad(u.sum(), (A, b))
    peak = current = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    assert peak <= 2 * 4 * (A.numel() + b.numel())


def test_a_gradient_along_the_solution_is_zero_at_no_extra_cost(monkeypatch):
    def never(*_):
        raise AssertionError("a decomposition was computed")

    monkeypatch.setattr("pmaf.tangent.factor.singular_spectrum", never)
    for dtype in DTYPES:
        A, b = (x.requires_grad_() for x in batch(50, 40, 20, dtype=dtype))
        dA, db = torch.autograd.grad(pmaf.less(A, b).square().sum(), (A, b))
        assert max(dA.abs().max(), db.abs().max()) <= 1e4 * torch.finfo(dtype).eps


def test_hard_case_and_ties_are_those_of_secular():
    A, b = hard()
    for init in (None, torch.ones(3, dtype=T), -torch.ones(3, dtype=T)):
        options = {"solver": Cholesky(), "init": init}
        torch.testing.assert_close(pmaf.less(A, b, **options), pmaf.less(A, b, init=init))


def test_wrong_options():
    with pytest.raises(ValueError, match="rounds must be an integer of at least 1"):
        Cholesky(rounds=0)
    with pytest.raises(ValueError, match="max_iterations must be"):
        Cholesky(max_iterations=0)


def test_few_vectors_and_rounds_still_end_in_the_minimum():
    A, b = batch(8, 40, 20)
    expected = pmaf.less(A, b, solver=Secular())
    found = pmaf.less(A, b, solver=Cholesky(max_iterations=1, rounds=1))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    A, b = gaussian(20, 14, 0.5)
    torch.testing.assert_close(pmaf.less(A, b), pmaf.less(A, b, solver=Secular()))
