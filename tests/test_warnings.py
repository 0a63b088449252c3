"""Warnings point at the line of the user that has caused them, in both passes."""

import ast
import inspect
import linecache
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import pmaf
from pmaf.operators import Diagonal, FromMatvec, Gram, Matrix
from pmaf.solvers import Krylov, PowerIteration, ProjectedGradient, SimultaneousIteration, auto
from tests.compilers import BACKEND
from tests.quadratic import SphereQuadratic

T = torch.float64
SOURCE = Path(pmaf.__file__).parent
ONE_STEP = ProjectedGradient(max_iterations=1)
FEW = Krylov(max_products=3, dimension=4)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=T)


def symmetric(n, *batch, seed=0):
    A = drawn(*batch, n, n, seed=seed)
    return A + A.mT


def graded(n):
    """Eigenvalues that a search with few products does not tell apart."""
    return Diagonal(torch.linspace(1, 2, n, dtype=T))


def turn():
    """A matrix whose dominant eigenvalues are a complex pair."""
    return torch.tensor([[0.0, -2.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 1.0]], dtype=T)


def positive(n, seed=1):
    return symmetric(n, seed=seed) + 20 * n * torch.eye(n, dtype=T)


CALLS = {
    "less": lambda: pmaf.less(drawn(6, 4), drawn(6), solver=ONE_STEP),
    "less, weights": lambda: pmaf.less(
        drawn(6, 4), drawn(6, seed=3), weights=drawn(6).square(), solver=ONE_STEP
    ),
    "LESS": lambda: pmaf.LESS(solver=ONE_STEP)(drawn(6, 4), drawn(6)),
    "less, products": lambda: pmaf.less(Matrix(drawn(90, 60)), drawn(90), solver=FEW),
    "ied": lambda: pmaf.ied(symmetric(9), solver=PowerIteration(iterations=2)),
    "IED": lambda: pmaf.IED(solver=PowerIteration(iterations=2))(symmetric(9)),
    "ied, k": lambda: pmaf.ied(
        symmetric(9), 2, solver=SimultaneousIteration(iterations=2), reference="largest"
    ),
    "ied, complex": lambda: pmaf.ied(symmetric(9) + 0j, solver=SimultaneousIteration(iterations=2)),
    "ied, nonsymmetric": lambda: pmaf.ied(turn(), symmetric=False),
    "ied, products": lambda: pmaf.ied(graded(400), solver=FEW),
    "ied, pair": lambda: pmaf.ied(symmetric(9), M=positive(9), solver=PowerIteration(iterations=2)),
    "ied, pair of operators": lambda: pmaf.ied(
        symmetric(60).to_sparse_csr(), M=Matrix(positive(60)) * 1.0, solver=FEW
    ),
    "nullspace": lambda: pmaf.nullspace(Matrix(drawn(90, 60)), solver=FEW),
    "NullSpace": lambda: pmaf.NullSpace(2, solver=FEW)(Matrix(drawn(90, 60))),
    "isvd": lambda: pmaf.isvd(Matrix(drawn(90, 60)), 2, solver=FEW),
    "ISVD": lambda: pmaf.ISVD(solver=FEW)(Matrix(drawn(60, 90))),
    "solve": lambda: pmaf.solve(pmaf.SphereLeastSquares(drawn(6, 4), drawn(6)), solver=ONE_STEP),
    "declared": lambda: pmaf.solve(
        SphereQuadratic(Matrix(symmetric(60)), drawn(60)), solver=Krylov(max_products=3)
    ),
}
# These choose their solver themselves.
AUTOMATIC = {
    "spectral": lambda: pmaf.spectral(graded(400), "exp", 2),
    "Spectral": lambda: pmaf.Spectral("exp", 2)(graded(400)),
    "SpectralFunction": lambda: pmaf.solve(pmaf.SpectralFunction(graded(400), "exp", 2)),
    "PrincipalPool": lambda: pmaf.PrincipalPool(path="products")(drawn(400, 300)),
}


def heard(call):
    """The warnings of the library during a call; a compiler may have others."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        call()
    found = [x for x in caught if issubclass(x.category, pmaf.ConvergenceWarning)]
    assert found, "the call ought to warn"
    return found


def lines_of(function):
    source, first = inspect.getsourcelines(function)
    return range(first, first + len(source))


@pytest.mark.parametrize("name", CALLS)
def test_a_forward_pass_points_at_its_call(name):
    for warning in heard(CALLS[name]):
        assert warning.filename == __file__
        assert warning.lineno in lines_of(CALLS[name])


@pytest.mark.parametrize("name", AUTOMATIC)
def test_layers_without_a_choice_of_solvers_point_at_their_call(name, monkeypatch):
    few = auto.Line(lambda problem: True, FEW, "the test has chosen it")
    monkeypatch.setattr(pmaf.PrincipalEigenvectors, "choice", lambda problem: few)
    for warning in heard(AUTOMATIC[name]):
        assert warning.filename == __file__
        assert warning.lineno in lines_of(AUTOMATIC[name])


def recorded(name):
    """A solution whose gradient gives a warning, and the tensor that gets the gradient."""
    if name == "the linear system":
        d = torch.linspace(0, 1, 3000, dtype=T)
        d[-1] = 1.005
        d.requires_grad_()
        solver = Krylov(max_products=75, tolerance=1e-4)
        return pmaf.ied(Diagonal(d), solver=solver).vectors, d
    with warnings.catch_warnings(action="ignore"):
        if name == "a solution by products":
            d = torch.linspace(1, 2, 400, dtype=T, requires_grad=True)
            return pmaf.ied(Diagonal(d), solver=FEW).vectors, d
        A = symmetric(300).requires_grad_()
        return pmaf.ied(A, solver=FEW).vectors, A


@pytest.mark.parametrize("name", ["the linear system", "a solution by products", "a matrix"])
@pytest.mark.parametrize("way", ["backward", "grad"])
def test_a_backward_pass_points_at_its_call(name, way):
    u, given = recorded(name)
    weights = torch.cos(torch.arange(u.numel(), dtype=T))

    def backward():
        if way == "grad":
            torch.autograd.grad(u, given, weights)  # the line of torch.autograd.grad
        else:
            (u * weights).sum().backward()  # the line of backward

    for warning in heard(backward):
        assert warning.filename == __file__
        line = linecache.getline(warning.filename, warning.lineno)
        assert line.rstrip().endswith(f"# the line of {'torch.autograd.' * (way == 'grad')}{way}")


class Inner(nn.Module):
    def forward(self, A):
        return pmaf.ied(A, solver=PowerIteration(iterations=2)).vectors  # inside of a module


def test_frames_of_modules_and_transforms_lie_between(monkeypatch):
    A = symmetric(9, 2)

    def mapped(A):
        return pmaf.ied(A, solver=PowerIteration(iterations=2)).vectors  # inside of a map

    for call, comment in (
        (lambda: nn.Sequential(Inner(), nn.Identity())(A), "# inside of a module"),
        (lambda: torch.func.vmap(mapped)(A), "# inside of a map"),
        (lambda: torch.func.jacrev(mapped)(A[0]), "# inside of a map"),
    ):
        for warning in heard(call):
            assert warning.filename == __file__
            assert linecache.getline(__file__, warning.lineno).rstrip().endswith(comment)


def test_a_compiled_program_points_at_the_function():
    """The line is that of the function: the compiler keeps no other."""

    def solve(A):
        return pmaf.ied(A, solver=PowerIteration(iterations=2)).vectors * 2

    for backend in ("eager", "aot_eager", BACKEND):
        torch.compiler.reset()
        compiled = torch.compile(solve, backend=backend, fullgraph=True)
        A = symmetric(9).requires_grad_()
        for warning in heard(lambda compiled=compiled, A=A: compiled(A)):
            assert warning.filename == __file__


def test_a_thread_without_a_frame_of_the_user_warns_all_the_same():
    def run():
        with warnings.catch_warnings(record=True, action="always") as caught:
            thread = threading.Thread(
                target=pmaf.ied,
                args=(symmetric(9),),
                kwargs={"solver": PowerIteration(iterations=2)},
            )
            thread.start()
            thread.join()
        found.extend(caught)

    found = []
    run()
    (warning,) = found
    assert not Path(warning.filename).is_relative_to(SOURCE)


def test_a_line_warns_once_and_two_lines_twice():
    """As the filters of Python promise it, by the line of the user."""

    def solve(seed):
        return pmaf.less(drawn(6, 4), drawn(6), solver=ONE_STEP) * seed

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for seed in range(3):
            solve(seed)
        assert len(caught) == 1
        pmaf.less(drawn(6, 4), drawn(6), solver=ONE_STEP)
        assert len(caught) == 2


def test_a_module_of_the_user_may_be_named_in_a_filter():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module=__name__.replace(".", r"\."))
        pmaf.less(drawn(6, 4), drawn(6), solver=ONE_STEP)
    assert not caught


def test_the_library_warns_in_one_place():
    """So that no other warning points into the library."""
    found = [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("warn", "warn_explicit")
    ]
    assert found == ["runtime/caller.py"]


def test_the_page_about_convergence_is_named():
    for call in (CALLS["less"], CALLS["ied, products"]):
        for warning in heard(call):
            assert "docs/convergence.md" in str(warning.message)
    u, _ = recorded("the linear system")
    (warning,) = heard(lambda: u.sum().backward())
    assert "docs/convergence.md" in str(warning.message)
    assert (SOURCE.parent.parent / "docs" / "convergence.md").is_file()
    problem = pmaf.SphereLeastSquares(drawn(6, 4), drawn(6))
    with pytest.raises(pmaf.ConvergenceError, match=r"docs/convergence\.md"):
        pmaf.solve(problem, solver=ONE_STEP, throw=True)


def test_gram_of_functions_warns_at_the_call_too():
    X = drawn(90, 60)
    operator = Gram(FromMatvec(lambda u: X @ u, (90, 60), dtype=T))

    def call():
        return pmaf.ied(operator, solver=FEW)

    for warning in heard(call):
        assert warning.lineno in lines_of(call)
