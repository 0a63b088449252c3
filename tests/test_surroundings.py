"""Whatever else is going on in the process: defaults, other classes, other threads."""

import copy
import dataclasses
import importlib
import threading
import warnings

import pytest
import torch
from torch.autograd import forward_ad

import pmaf
from pmaf.gradients import DDN
from pmaf.solvers import (
    Dense,
    Eigenvectors,
    Lanczos,
    LeastSquares,
    Minimum,
    Outcome,
    PowerIteration,
    Secular,
    SimultaneousIteration,
    Solver,
)
from pmaf.tangent.kept import Nothing
from tests.quadratic import SphereQuadratic


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype, device="cpu")


CALLS = {
    "ied": lambda A: pmaf.ied(A).vectors,
    "ied, k": lambda A: pmaf.ied(A, 2).vectors,
    "ied, smallest": lambda A: pmaf.ied(A, largest=False).values,
    "ied, nonsymmetric": lambda A: pmaf.ied(A.abs(), symmetric=False).vectors,
    "ied, Lanczos": lambda A: pmaf.ied(A, 2, solver=Lanczos()).vectors,
    "ied, PowerIteration": lambda A: pmaf.ied(A.abs(), solver=PowerIteration()).vectors,
    "ied, SimultaneousIteration": lambda A: (
        pmaf.ied(A @ A.mT, 2, solver=SimultaneousIteration()).values
    ),
    "less": lambda A: pmaf.less(A, A[..., 0]),
    "less, b = 0": lambda A: pmaf.less(A, torch.zeros_like(A[..., 0])),
    "less, wide": lambda A: pmaf.less(A[..., :3, :], A[..., :3, 0]),
}


# Sizes that no other test has, so that nothing is remembered of them.
@pytest.mark.parametrize("n", [17, 131, 457])
@pytest.mark.parametrize("name", CALLS)
def test_default_device(name, n):
    """Tensors on the CPU are solved there, wherever new tensors are made by default."""
    if n == 457 and "Iteration" in name:
        pytest.skip("hundreds of products of a large matrix, which show nothing more")
    call, A = CALLS[name], random(n, n) + n**0.5 * torch.diag(torch.arange(n, 0, -1.0)) / n
    with torch.device("meta"):
        leaf = A.clone().requires_grad_()
        inside = call(leaf)
        weights = torch.cos(torch.arange(inside.numel(), device="cpu") + 1.0)
        (gradient,) = torch.autograd.grad((inside.flatten() * weights).sum(), leaf)
    leaf = A.clone().requires_grad_()
    outside = call(leaf)  # what was remembered inside is of use outside
    assert torch.equal(inside, outside)
    (expected,) = torch.autograd.grad((outside.flatten() * weights).sum(), leaf)
    torch.testing.assert_close(gradient, expected)


def make_solver(iterations):
    """A class that is defined anew with each call, as a notebook cell defines it."""

    @dataclasses.dataclass(frozen=True)
    class Mine(Solver):
        solves = (LeastSquares,)
        tag: int = 7

        def solve(self, problem, *, init=None, report=True):
            found = Secular().solve(problem, init=init, report=report)
            return found._replace(
                iterations=torch.full_like(found.iterations, iterations), kept=Nothing()
            )

    return Mine()


@pytest.mark.parametrize("trace", [False, True])
def test_a_class_that_is_defined_again(trace):
    A, b = random(5, 3), random(5)
    for iterations in (1, 2, 3):
        solver = make_solver(iterations)

        def count(A, b, solver=solver):
            return pmaf.solve(pmaf.SphereLeastSquares(A, b), solver=solver).iterations

        found = torch.func.vmap(count)(A[None], b[None])[0] if trace else count(A, b)
        assert int(found) == iterations


def test_the_first_class_is_still_itself():
    first, second = make_solver(11), make_solver(12)
    A, b = random(5, 3), random(5)
    for solver, expected in ((second, 12), (first, 11)):
        found = torch.func.vmap(
            lambda A, b, solver=solver: (
                pmaf.solve(pmaf.SphereLeastSquares(A, b), solver=solver).iterations
            )
        )(A[None], b[None])
        assert int(found) == expected


def test_a_class_of_a_name_that_is_taken():
    """A user's own `Secular` and `Dense` are theirs alone."""

    @dataclasses.dataclass(frozen=True)
    class Secular(Solver):
        solves = (LeastSquares,)
        other: str = "options"

    @dataclasses.dataclass(frozen=True)
    class Dense(Solver):
        solves = (Eigenvectors,)
        other: str = "options"

    A, b = random(4, 5, 3), random(4, 5)
    assert torch.isfinite(torch.func.vmap(pmaf.less)(A, b)).all()
    S = A.mT @ A
    assert torch.isfinite(torch.func.vmap(lambda S: pmaf.ied(S).values)(S)).all()


def test_options_without_a_literal():
    """Fine in eager mode; a trace cannot carry them, and says so."""

    @dataclasses.dataclass(frozen=True)
    class Weighted(Solver):
        solves = (LeastSquares,)
        weights: object = None

        def solve(self, problem, *, init=None, report=True):
            return Secular().solve(problem, init=init, report=report)

    A, b = random(5, 3), random(5)
    solver = Weighted(weights=object())
    torch.testing.assert_close(pmaf.less(A, b, solver=solver), pmaf.less(A, b, solver=Secular()))
    with pytest.raises(TypeError, match=r"cannot be traced, .* has no literal"):
        torch.func.vmap(lambda A, b: pmaf.less(A, b, solver=solver))(A[None], b[None])


@pytest.mark.parametrize("k", [None, 1, 3])
@pytest.mark.parametrize("n", [4, 40, 130])
@pytest.mark.parametrize("largest", [True, False])
def test_results_can_be_written_to(n, k, largest):
    A = (random(n, n).abs() + 0).requires_grad_()
    values, vectors = pmaf.ied(A, k, largest=largest)
    expected = vectors.detach() * 2
    with torch.no_grad():
        copies = vectors.detach().clone()
    vectors.mul_(2)
    values.mul_(2)
    assert torch.equal(vectors, expected)
    assert torch.equal(pmaf.ied(A, k, largest=largest).vectors, copies)
    # Neither is what was remembered.
    problem = pmaf.PrincipalEigenvectors(A.detach(), k, largest=largest)
    solution = pmaf.solve(problem)
    before = copy.deepcopy([solution.gap, solution.iterations, solution.converged])
    for x in (solution.gap, solution.iterations, solution.residual):
        x.fill_(9)
    again = pmaf.solve(problem)
    assert all(
        torch.equal(x, y)
        for x, y in zip((again.gap, again.iterations, again.converged), before, strict=True)
    )


def test_a_dual_level_in_another_thread():
    """The level of forward mode is shared by all threads; tangents are not."""
    entered, done = threading.Event(), threading.Event()

    def elsewhere():
        with forward_ad.dual_level():
            entered.set()
            done.wait(60)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    try:
        assert entered.wait(60)
        A = (random(4, 4) + 3 * torch.diag(torch.arange(4.0))).requires_grad_()
        pmaf.ied(A, gradient=DDN()).vectors.sum().backward()
        pmaf.less(A, A[0], gradient=DDN()).sum().backward()
        assert torch.isfinite(A.grad).all()
    finally:
        done.set()
        thread.join()


def test_script_says_what_to_use():
    layers = (pmaf.IED(), pmaf.LESS(), pmaf.NullSpace(), pmaf.ISVD(), pmaf.Spectral("exp"))
    for layer in (*layers, torch.nn.Sequential(pmaf.IED(k=2))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(RuntimeError, match=r"torch\.compile, or torch\.export"):
                torch.jit.script(layer)


def test_the_way_is_logged(caplog):
    caplog.set_level("DEBUG", logger="pmaf")
    pmaf.ied(random(200, 200).abs())
    assert caplog.messages == ["ied: power steps"]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("trace", [False, True])
def test_small_steps_run_on_one_thread(trace, monkeypatch):
    """A parallel region of a tiny step waits for a core whenever another process is busy."""
    seen = []

    def watched(name):
        original = getattr(torch.linalg, name)

        def call(*args, **kwargs):
            seen.append(torch.get_num_threads())
            return original(*args, **kwargs)

        monkeypatch.setattr(torch.linalg, name, call)

    watched("eigh")
    A, b = random(1_000, 6, 4).requires_grad_(), random(1_000, 6)
    S = random(1_000, 5, 5).requires_grad_()
    less, ied = pmaf.LESS(solver=Secular()), pmaf.IED(solver=Dense())
    for call, inputs in ((less, (A, b)), (lambda S: ied(S).vectors, (S,))):
        seen.clear()
        out = torch.func.vmap(call)(*inputs) if trace else call(*inputs)
        out.square().sum().backward()
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="non-finite"):
        less(A.detach() * torch.nan, b)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_large_matrices_keep_their_threads(monkeypatch):
    original, seen = torch.linalg.eigh, []

    def call(*args, **kwargs):
        seen.append(torch.get_num_threads())
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.linalg, "eigh", call)
    pmaf.ied(random(4, 100, 100), 3, solver=Dense())
    assert seen == [2]


@pytest.mark.parametrize(
    "call",
    [
        lambda A: pmaf.ied(A).vectors,
        lambda A: pmaf.ied(A, 2).vectors,
        lambda A: pmaf.ied(A.abs(), symmetric=False).vectors,
        lambda A: pmaf.less(A, A[..., 0]),
    ],
    ids=["ied", "ied, k", "ied, nonsymmetric", "less"],
)
def test_the_number_of_threads_is_left_alone(call):
    """Batches of small matrices are solved by one thread; what comes after has all of them."""
    before = torch.get_num_threads()
    A = random(64, 6, 6).requires_grad_()
    torch.set_num_threads(3)
    try:
        found = call(A)
        assert torch.get_num_threads() == 3
        found.sum().backward()
        assert torch.get_num_threads() == 3
        with pytest.raises(ValueError, match="non-finite"):
            call(A.detach() * torch.nan)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@dataclasses.dataclass(frozen=True)
class Shifted(Solver):
    """Power iteration on an operator: a user's own way to solve by products."""

    solves = (Eigenvectors,)
    matrix_free = True
    steps: int = 2000

    def solve(self, problem, *, init=None, report=True):
        A, n = problem.A, problem.n
        row = torch.linspace(1, 2, n, dtype=A.dtype).expand(*problem.batch_shape, 1, n)
        for _ in range(self.steps):
            row = A.matvec(row)
            row = row / row.norm(dim=-1, keepdim=True)
        image = A.matvec(row)
        value = (row * image).sum(-1)
        rest = (image - value.unsqueeze(-1) * row).norm(dim=-1).squeeze(-1)
        done = rest <= 1e-9
        return Outcome(row, value, rest, torch.full_like(rest, torch.nan), 0 * rest.long(), done)


def test_a_solver_of_ones_own_that_needs_products_alone():
    A = random(3, 6, 6).double().abs()
    A = (A + A.mT).requires_grad_()
    operator = pmaf.operators.Matrix(A)
    results = []
    for call in (
        lambda: pmaf.ied(operator, solver=Shifted()),
        lambda: pmaf.ied(A),
        lambda: pmaf.ied(operator),
    ):
        values, vectors = call()
        loss = vectors.cos().sum() + values.sum()
        results.append([values, vectors, *torch.autograd.grad(loss, A)])
    for other in results[1:]:
        for x, y in zip(results[0], other):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


@dataclasses.dataclass(frozen=True)
class Descent(Solver):
    """Projected gradient steps on an operator, for any minimum on the sphere."""

    solves = (Minimum,)
    matrix_free = True
    step: float = 0.1

    def solve(self, problem, *, init=None, report=True):
        u = torch.ones(*problem.batch_shape, problem.n, dtype=problem.dtype)
        u = u / u.norm(dim=-1, keepdim=True)
        for _ in range(3000):
            u = u + self.step * problem.force(u, *problem.tensors)
            u = u / u.norm(dim=-1, keepdim=True)
        force = problem.force(u, *problem.tensors)
        multiplier = (u * force).sum(-1)
        rest = (force - multiplier.unsqueeze(-1) * u).norm(dim=-1)
        unknown = torch.full_like(rest, torch.nan)
        return Outcome(u, multiplier, rest, unknown, 0 * rest.long(), unknown.isnan())


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("kind", ["least squares", "declared"])
def test_what_a_solver_of_ones_own_has_not_said_is_found_out(kind, scale):
    """The backward pass measures its residual against the size of the curvature."""
    A, b = random(40, 24).double(), 8 * random(40).double()
    if kind == "least squares":
        leaves, power = (scale * A, scale * b), 2
        pose = pmaf.SphereLeastSquares
    else:
        leaves, power = (scale * A.mT @ A, scale * A.mT @ b), 1
        pose = SphereQuadratic
    leaves = [x.requires_grad_() for x in leaves]
    solver = Descent(0.005 / scale**power)
    seen = []
    for problem, way in (
        (pose(pmaf.operators.Matrix(leaves[0]), leaves[1]), solver),
        (pose(*leaves), None),
    ):
        solution = pmaf.solve(problem, solver=way)
        seen.append(torch.autograd.grad(solution.value.cos().sum(), leaves))
        if way is not None:
            assert solution.backward.converged.all()
    for x, y in zip(*seen):
        torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-8 * float(y.abs().max()))


def test_a_layer_is_not_mistaken_for_its_module():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("pmaf.ied")
    module = importlib.import_module("pmaf.layers.ied")
    assert module.ied is pmaf.ied


class LinearOperator:
    """What SciPy calls an operator, as far as it matters here."""

    shape, dtype = (3, 3), "float64"

    def matvec(self, x):
        return x


def test_an_operator_of_another_library_is_wrapped():
    with pytest.raises(TypeError, match=r"got LinearOperator \(pmaf.operators.FromMatvec wraps"):
        pmaf.ied(LinearOperator())


@pytest.mark.parametrize("layer", ["less", "ied"])
def test_arguments_are_looked_at_once(layer, monkeypatch):
    A, b = random(5, 4, 4), random(5, 4)

    # Neither call is one that the kernels take without the objects of the common path, which the
    # first call with a signature finds out.
    def call():
        return pmaf.less(A, b, solver=Secular()) if layer == "less" else pmaf.ied(A, 2)

    call()
    seen = []
    look = pmaf.errors.require_matrix

    def watched(*arguments, **options):
        seen.append(arguments[0])
        look(*arguments, **options)

    monkeypatch.setattr(pmaf.errors, "require_matrix", watched)
    call()
    assert seen == ["A"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in jvp
def test_forward_mode_decomposes_once(monkeypatch):
    calls = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda *a: calls.append(a) or eigh(*a))
    A = random(4, 4)
    torch.func.jvp(lambda A: pmaf.ied(A).vectors, (A,), (A.cos(),))
    assert len(calls) == 1
