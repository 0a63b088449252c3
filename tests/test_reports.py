"""What a solution says about how it was found, and solutions and problems as trees of tensors."""

import ast
import io
import threading
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

import pmaf
from pmaf import native
from pmaf.gradients import Unroll
from pmaf.operators import Diagonal, Gram, Matrix
from pmaf.runtime import log
from pmaf.solvers import (
    Adaptive,
    Cholesky,
    Dense,
    Krylov,
    Lanczos,
    PowerIteration,
    ProjectedGradient,
    Secular,
)
from tests.compilers import BACKEND
from tests.quadratic import SphereQuadratic

T = torch.float64
KERNELS = "compiled kernels"


def drawn(*shape, seed=0, dtype=T):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def definite(n, *batch):
    X = drawn(*batch, n, n, seed=5)
    return X @ X.mT + torch.eye(n, dtype=T)


def symmetric(n, *batch, seed=0):
    X = drawn(*batch, n, n, seed=seed)
    return X + X.mT


Eigen, Squares = pmaf.PrincipalEigenvectors, pmaf.SphereLeastSquares
Singular, Function = pmaf.PrincipalSingularVectors, pmaf.SpectralFunction
# A problem, a solver, and the beginning of the description, with kernels and without.
# With kernels, and without.
DECOMPOSED = ("Secular(): compiled kernels around a decomposition", "Secular(): eigenvectors")
SOLVED = {
    "ied": (lambda: Eigen(symmetric(6)), None, ("Reduction(): compiled", "Adaptive(): decompos")),
    "ied, dense": (lambda: Eigen(symmetric(6), 2), Dense(), "Dense(): decomposition"),
    "ied, complex": (
        lambda: Eigen(symmetric(6) + 0j, 2),
        Dense(),
        "Dense(): decomposition",
    ),
    "ied, skip, order": (
        lambda: Eigen(symmetric(6), 2, largest=False, descending=False, skip=1),
        Dense(),
        "Dense(): decomposition",
    ),
    "ied, one dominates": (
        lambda: Eigen(drawn(300, 300).abs()),
        None,
        "Adaptive(): power steps",
    ),
    "ied, options": (
        lambda: Eigen(drawn(30, 30).abs()),
        Adaptive(power_from=0, power_size=1),
        "Adaptive(power_from=0, power_size=1): power steps",
    ),
    "ied, nonsymmetric": (
        lambda: Eigen(drawn(6, 6).abs(), symmetric=False),
        Dense(),
        "Dense(): decomposition",
    ),
    "ied, a method that logs nothing": (
        lambda: Eigen(drawn(6, 6).abs()),
        PowerIteration(iterations=500),
        "PowerIteration(iterations=500)",
    ),
    "ied, Lanczos": (lambda: Eigen(symmetric(60)), Lanczos(), "Lanczos()"),
    "ied, sparse": (
        lambda: Eigen(symmetric(6).to_sparse_csr()),
        None,
        "Krylov(): products with A",
    ),
    "ied, operator": (
        lambda: Eigen(Gram(drawn(9, 6))),
        Krylov(max_products=300),
        "Krylov(max_products=300): products with A",
    ),
    "ied, complex operator": (
        lambda: Eigen(Gram(drawn(9, 6) + 0j)),
        None,
        "Krylov(): products with A",
    ),
    "ied, pair": (
        lambda: Eigen(symmetric(6), M=definite(6)),
        Dense(),
        "Dense(): pairs: Cholesky, decomposition",
    ),
    "ied, pair of operators": (
        lambda: Eigen(Matrix(symmetric(6)) * 1, M=Diagonal(definite(6).diagonal()) * 1),
        None,
        "Krylov(): pairs: products",
    ),
    "less": (lambda: Squares(drawn(6, 4), drawn(6)), None, DECOMPOSED),
    "less, float32": (
        lambda: Squares(drawn(6, 4).float(), drawn(6).float()),
        None,
        ("Reduction(): compiled kernels", "Secular(): eigenvectors"),
    ),
    "less, factor": (
        lambda: Squares(drawn(40, 20), 9 * drawn(40)),
        Cholesky(),
        "Cholesky(): Cholesky factors",
    ),
    "less, options": (
        lambda: Squares(drawn(6, 4), drawn(6), 2.0, True, definite(4), drawn(6).square()),
        None,
        "Secular(): ",
    ),
    "less, complex": (
        lambda: Squares(drawn(6, 4) + 0j, drawn(6) + 0j),
        Secular(),
        DECOMPOSED,
    ),
    "less, operator": (
        lambda: Squares(Matrix(drawn(6, 4)), drawn(6)),
        None,
        "Krylov(): products with A",
    ),
    "less, a method that logs nothing": (
        lambda: Squares(torch.eye(4, dtype=T), drawn(4)),
        ProjectedGradient(max_iterations=500),
        "ProjectedGradient(max_iterations=500)",
    ),
    "nullspace": (
        lambda: Singular(drawn(6, 4), None, 2, False),
        None,
        "SVD(): singular value decomposition",
    ),
    "nullspace, complex": (
        lambda: Singular(drawn(6, 4) + 0j, None, 2, False),
        None,
        "SVD(): singular value decomposition",
    ),
    "nullspace, operator": (
        lambda: Singular(Matrix(drawn(6, 4)), None, 2),
        None,
        "Krylov(): products with A",
    ),
    "spectral": (
        lambda: Function(definite(6), "sqrt"),
        None,
        ("pmaf.spectral: compiled kernels", "pmaf.spectral: decomposition"),
    ),
    "spectral, operator": (
        lambda: Function(Gram(drawn(9, 6)), "sqrt", 2),
        None,
        "Krylov(): products with A",
    ),
    "declared": (
        lambda: SphereQuadratic(symmetric(6), drawn(6)),
        None,
        "Secular(): eigenvectors",
    ),
    "declared, operator": (
        lambda: SphereQuadratic(Matrix(symmetric(6)), drawn(6)),
        None,
        "Krylov(): products with A",
    ),
    "half": (lambda: Eigen(symmetric(6).half()), Dense(), "Dense(): decomposition"),
    "other units": (lambda: Eigen(1e200 * symmetric(6)), Dense(), "Dense(): decomposition"),
}


@pytest.mark.parametrize("name", SOLVED)
def test_a_solution_says_how_it_was_found(name):
    pose, solver, words = SOLVED[name]
    found = pmaf.solve(pose(), solver=solver).method
    beginning = words if isinstance(words, str) else words[0 if native.available else 1]
    assert found, "there is always a method"
    assert found.startswith(beginning), found
    assert "tangent" not in found


def test_every_message_of_the_log_has_words():
    """A message is plain, or has words in the table, and the table has no other messages."""
    source = Path(pmaf.__file__).parent
    said = {
        leaf.value
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "took"
        for leaf in ast.walk(node)
        if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)
    }
    plain = {way for way in said if way.partition(":")[0] in ("tangent", "pairs", "pool")}
    rest = {"ied: common path for some", "products: inside of the ball"}
    assert said - plain - rest <= set(log._WORDS)
    # This one is a variable in the place where it is logged.
    assert set(log._WORDS) - said == {"ied: complex reduction"}


def test_methods_of_other_threads_and_of_a_backward_pass_are_not_mixed_in():
    stop = threading.Event()

    def others():
        while not stop.is_set():
            pmaf.less(drawn(6, 4), drawn(6))

    thread = threading.Thread(target=others)
    thread.start()
    try:
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            A = symmetric(6).requires_grad_()
            found = pmaf.solve(Eigen(A), solver=Dense())
            assert found.method == "Dense(): decomposition"
            found.value.sum().backward()
    finally:
        stop.set()
        thread.join()
    assert not log._collected  # nothing is collected once no report is made


def test_an_error_leaves_nothing_behind():
    with pytest.raises(pmaf.ConvergenceError):
        pmaf.solve(
            Squares(drawn(6, 4), drawn(6)), solver=ProjectedGradient(max_iterations=1), throw=True
        )
    assert not log._collected


def test_a_solve_inside_of_another_has_its_own_words():
    def force(u, Q, c):
        inner.append(pmaf.solve(Squares(drawn(6, 4), drawn(6)), solver=Cholesky()).method)
        return c - (Q @ u.unsqueeze(-1)).squeeze(-1)

    class Nested(SphereQuadratic):
        pass

    Nested.force = staticmethod(force)
    inner = []
    found = pmaf.solve(Nested(symmetric(6), drawn(6)))
    assert found.method == "Secular(): eigenvectors"
    assert inner
    assert all(x.startswith("Cholesky(): ") for x in inner)


def test_unrolled_iterations_have_a_method():
    problem = Squares(torch.eye(4, dtype=T).requires_grad_(), drawn(4))
    solver = ProjectedGradient(max_iterations=400, tolerance=1e-12)
    found = pmaf.solve(problem, solver=solver, gradient=Unroll())
    assert found.method == "ProjectedGradient(tolerance=1e-12, max_iterations=400)"


TENSORS = ("value", "multiplier", "residual", "gap", "iterations", "converged")


def same(found, expected, rtol=1e-9):
    for name in TENSORS:
        x, y = getattr(found, name), getattr(expected, name)
        assert x.dtype == y.dtype
        # Residuals are rounding errors.
        atol = 1e-13 if name == "residual" else 1e-10
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol, msg=name)


def weights(m):
    return drawn(3, m, seed=4).square()


# Problems with a batch of three in every tensor.
BATCHES = {
    "ied": lambda: Eigen(symmetric(6, 3)),
    "ied, k, reference": lambda: Eigen(symmetric(6, 3), 2, False, reference=drawn(3, 6, seed=2)),
    "ied, pair": lambda: Eigen(symmetric(6, 3), 2, M=definite(6, 3)),
    "ied, complex": lambda: Eigen(symmetric(6, 3) + 1j * drawn(3, 6, 6)),
    "ied, nonsymmetric": lambda: Eigen(drawn(3, 6, 6).abs(), symmetric=False),
    "less": lambda: Squares(drawn(3, 6, 4), drawn(3, 6)),
    "less, options": lambda: Squares(
        drawn(3, 6, 4), drawn(3, 6), drawn(3).exp(), True, definite(4, 3), weights(6)
    ),
    "nullspace": lambda: Singular(drawn(3, 6, 4), weights(6), 2, False),
    "spectral": lambda: Function(definite(6, 3), "sqrt"),
    "declared": lambda: SphereQuadratic(symmetric(6, 3), drawn(3, 6)),
}


def tensors_of(problem):
    named = {x.name: getattr(problem, x.name) for x in fields(problem)}
    return {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}


@pytest.mark.parametrize("name", BATCHES)
def test_a_map_over_problems_and_solutions(name):
    problem = BATCHES[name]()
    expected = pmaf.solve(problem)
    given = tensors_of(problem)

    def posed(tensors):
        fixed = {x.name: getattr(problem, x.name) for x in fields(problem)}
        return pmaf.solve(type(problem)(**(fixed | tensors)))

    same(torch.func.vmap(posed)(given), expected)
    found = torch.func.vmap(pmaf.solve)(problem)
    same(found, expected)
    assert found.method
    assert found.backward is None
    if name == "spectral":
        return  # its certificate looks at the numbers
    checks = torch.func.vmap(pmaf.certify)(problem, found)
    assert isinstance(checks, pmaf.Certificate)
    assert checks.holds(1e-8).all()


@pytest.mark.parametrize("name", ["ied", "ied, k, reference", "less, options", "declared"])
def test_a_map_of_gradients_of_problems(name):
    problem = BATCHES[name]()

    def cubes(problem):
        return (pmaf.solve(problem).value ** 3).sum()

    found = torch.func.vmap(torch.func.grad(cubes))(problem)
    assert type(found) is type(problem)
    inputs = {name: x.clone().requires_grad_() for name, x in tensors_of(problem).items()}
    leaves = type(problem)(**{f.name: getattr(problem, f.name) for f in fields(problem)} | inputs)
    expected = torch.autograd.grad(cubes(leaves), list(inputs.values()), allow_unused=True)
    for name, gradient in zip(inputs, expected):
        if gradient is not None:
            torch.testing.assert_close(getattr(found, name), gradient, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", BATCHES)
def test_a_tree_is_taken_apart_and_put_together(name):
    problem = BATCHES[name]()
    leaves, spec = pytree.tree_flatten(problem)
    given = tensors_of(problem)
    assert [id(x) for x in leaves] == [id(x) for x in given.values()]
    again = pytree.tree_unflatten(leaves, spec)
    assert type(again) is type(problem)
    assert all(getattr(again, x.name) is getattr(problem, x.name) for x in fields(problem))
    # Another thing than a tensor in the place of one is still a leaf.
    numbers = pytree.tree_map(lambda x: 0, problem)
    assert pytree.tree_leaves(numbers) == [0] * len(leaves)
    assert pytree.tree_structure(numbers) == spec
    paths = [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(problem)]
    assert paths == [f".{name}" for name in given]


def test_a_solution_is_a_tree_of_its_tensors():
    found = pmaf.solve(Eigen(Gram(drawn(9, 6).requires_grad_())))
    leaves, spec = pytree.tree_flatten(found)
    assert [id(x) for x in leaves] == [id(getattr(found, name)) for name in TENSORS]
    again = pytree.tree_unflatten(leaves, spec)
    assert again.backward is found.backward is not None
    assert again.method == found.method
    # The report of the backward pass is written to the one and seen in the other.
    again.value.sum().backward()
    assert bool(found.backward.converged.all())
    checked = pmaf.certify(Eigen(symmetric(6)), pmaf.ied(symmetric(6)).vectors)
    assert len(pytree.tree_leaves(checked)) == 3
    moved = pytree.tree_map(lambda x: x.cpu(), checked)
    assert type(moved) is pmaf.Certificate


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["ied", "ied, k, reference", "less", "spectral", "declared"])
def test_compiled_functions_return_solutions(name):
    problem = BATCHES[name]()
    expected = pmaf.solve(problem)
    kind, given = type(problem), {x.name: getattr(problem, x.name) for x in fields(problem)}

    def solve(given):
        return pmaf.solve(kind(**given))

    for backend in ("eager", BACKEND) if name == "ied" else ("eager",):
        torch.compiler.reset()
        found = torch.compile(solve, backend=backend, fullgraph=True)(given)
        assert isinstance(found, pmaf.Solution)
        same(found, expected)
        # A trace knows the solver, and not what it will do.
        assert found.method
        assert KERNELS not in found.method
    torch.compiler.reset()
    same(torch.compile(pmaf.solve, backend="eager", fullgraph=True)(problem), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_exported_program_returns_solutions():
    class Report(torch.nn.Module):
        def forward(self, A):
            return pmaf.solve(Eigen(A, 2))

    A, file = symmetric(6, 3), io.BytesIO()
    torch.export.save(torch.export.export(Report(), (A,)), file)
    file.seek(0)
    found = torch.export.load(file).module()(A)
    assert isinstance(found, pmaf.Solution)
    same(found, pmaf.solve(Eigen(A, 2)))
