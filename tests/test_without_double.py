"""Layers, reports and certificates on devices that have no float64, as MPS: the CPU acts as one."""

import os
import subprocess
import sys

import pytest
import torch

import pmaf
from pmaf import native
from pmaf.linalg import roundings
from pmaf.operators import Gram, Matrix

DOUBLE = (torch.float64, torch.complex128, float)
without_kernels = pytest.mark.skipif(native.available, reason="kernels compute in float64")


@pytest.fixture
def single(monkeypatch):
    """The CPU has no float64, and whoever asks for it gets an error."""
    roundings.WITHOUT_DOUBLE.add("cpu")
    move = torch.Tensor.to

    def refuse(*_):
        raise TypeError("the MPS framework doesn't support float64")

    def moved(x, *args, **options):
        if any(y in DOUBLE for y in (*args, *options.values()) if isinstance(y, torch.dtype)):
            refuse()
        return move(x, *args, **options)

    monkeypatch.setattr(torch.Tensor, "double", refuse)
    monkeypatch.setattr(torch.Tensor, "to", moved)
    yield
    roundings.WITHOUT_DOUBLE.discard("cpu")


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def hermitian(*shape, dtype=torch.float32):
    A = drawn(*shape, dtype=dtype)
    return A + A.mH + 3 * torch.diag(torch.arange(shape[-1])).to(dtype)


def definite(*shape):
    A = drawn(*shape)
    return A @ A.mT / shape[-1] + torch.eye(shape[-1])


A, b, W = drawn(3, 20, 8), drawn(3, 20), drawn(3, 20).abs() + 0.5
Least, Eigen = pmaf.SphereLeastSquares, pmaf.PrincipalEigenvectors
Singular = pmaf.PrincipalSingularVectors
PROBLEMS = {
    "less": lambda: Least(A, b),
    "less, small": lambda: Least(1e-25 * A, 1e-25 * b),
    "less, ball, M": lambda: Least(A, b, ball=True, M=definite(8, 8), weights=W),
    "less, large": lambda: Least(drawn(90, 60), drawn(90)),
    "less, operator": lambda: Least(Matrix(A[0]), b[0]),
    "ied": lambda: Eigen(hermitian(3, 9, 9), 2),
    "ied, large": lambda: Eigen(hermitian(150, 150)),
    "ied, general": lambda: Eigen(drawn(3, 9, 9).abs(), symmetric=False),
    "ied, complex": lambda: Eigen(hermitian(3, 9, 9, dtype=torch.complex64), 2),
    "ied, pair": lambda: Eigen(hermitian(3, 9, 9), 2, M=definite(9, 9)),
    "ied, operator": lambda: Eigen(Gram(drawn(20, 40)), 2),
    "singular": lambda: Singular(A, k=2),
    "singular, weights": lambda: Singular(A, W),
    "spectral": lambda: pmaf.SpectralFunction(definite(3, 9, 9), "sqrt"),
    "spectral, operator": lambda: pmaf.SpectralFunction(Gram(drawn(20, 40)), "sqrt", 2),
}


@without_kernels
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_is_solved_and_certified_in_float32(name, single):
    problem = PROBLEMS[name]()
    solution = pmaf.solve(problem)
    assert bool(solution.converged.all())
    found = pmaf.certify(problem, solution)
    assert found.optimality.dtype == torch.float32
    assert bool(found.holds(1e-4).all()), found


@without_kernels
@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_are_about_those_with_float64(name, monkeypatch, request):
    if "operator" in name or "small" in name:
        pytest.skip("it is not differentiated by a solver in float64")

    def gradient():
        problem = PROBLEMS[name]()
        x = problem.A.clone().requires_grad_()
        value = pmaf.solve(problem.changed(A=x)).value
        real = torch.view_as_real(value) if value.is_complex() else value
        return torch.autograd.grad(real.pow(3).sum(), x)[0]

    wanted = gradient()
    request.getfixturevalue("single")
    found = gradient()
    assert (found - wanted).abs().amax() < 1e-4 * wanted.abs().amax()


@without_kernels
def test_a_generator_draws_in_the_dtype_of_its_device(single, monkeypatch):
    drawn_in = []
    draw = torch.randn

    def randn(*shape, **options):
        drawn_in.append(options.get("dtype"))
        return draw(*shape, **options)

    monkeypatch.setattr(torch, "randn", randn)
    pmaf.ied(hermitian(9, 9), generator=torch.Generator().manual_seed(1))
    assert drawn_in[0] == torch.float32


@pytest.mark.skipif(not native.available, reason="this is the run without kernels")
def test_all_of_this_runs_without_kernels():
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"PMAF_NATIVE": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def test_one_function_says_which_dtype_has_the_most_digits():
    cpu, mps = torch.device("cpu"), torch.device("mps")
    for dtype, most, least in (
        (torch.float32, torch.float64, torch.float32),
        (torch.bfloat16, torch.float64, torch.float32),
        (torch.complex64, torch.complex128, torch.complex64),
    ):
        assert roundings.working_dtype(dtype, cpu) == most
        assert roundings.working_dtype(dtype, mps) == least
    assert roundings.has_double(cpu)
    assert not roundings.has_double(mps)
