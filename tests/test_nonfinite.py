"""Inputs that are infinite or nan: one class of errors, and a report of all other entries."""

import math

import pytest
import torch

import pmaf
from pmaf.operators import Diagonal, FromMatvec, Matrix
from tests.quadratic import SphereQuadratic

T = torch.float64


def random(*shape, dtype=T, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def symmetric(*shape, dtype=T, seed=0):
    A = random(*shape, dtype=dtype, seed=seed)
    return A + A.mH


def definite(*shape, dtype=T, seed=1):
    A = random(*shape, dtype=dtype, seed=seed)
    return A @ A.mH + torch.eye(shape[-1], dtype=dtype)


# A problem as a function of a batch of five, and the batch.
PROBLEMS = {
    "less": (pmaf.SphereLeastSquares, random(5, 6, 3), random(5, 6)),
    "less, float32": (pmaf.SphereLeastSquares, random(5, 6, 3).float(), random(5, 6).float()),
    "less, one matrix": (pmaf.SphereLeastSquares, random(6, 3), random(5, 6)),
    "less, options": (
        lambda A, b, r, w, d: pmaf.SphereLeastSquares(A, b, r, True, Diagonal(d), w),
        random(5, 6, 3),
        random(5, 6),
        random(5).exp(),
        random(5, 6).exp(),
        random(5, 3).exp(),
    ),
    "less, complex": (
        pmaf.SphereLeastSquares,
        random(5, 6, 3, dtype=torch.complex128),
        random(5, 6, dtype=torch.complex128),
    ),
    "ied": (pmaf.PrincipalEigenvectors, symmetric(5, 4, 4)),
    "ied, k": (
        lambda A, r: pmaf.PrincipalEigenvectors(A, 2, False, reference=r),
        symmetric(5, 4, 4),
        random(5, 4),
    ),
    "ied, complex": (pmaf.PrincipalEigenvectors, symmetric(5, 4, 4, dtype=torch.complex128)),
    "pair": (
        lambda A, M: pmaf.PrincipalEigenvectors(A, 2, M=M),
        symmetric(5, 4, 4),
        definite(5, 4, 4),
    ),
    "diagonal": (
        lambda A, d: pmaf.PrincipalEigenvectors(A, M=Diagonal(d)),
        symmetric(5, 4, 4),
        random(5, 4).exp(),
    ),
    "singular": (lambda A: pmaf.PrincipalSingularVectors(A, None, 2), random(5, 6, 3)),
    "declared": (SphereQuadratic, symmetric(5, 4, 4), random(5, 4)),
}
VALUES = [torch.nan, torch.inf, -torch.inf]


def spoilt(x, value, entries=(1, 3)):
    """The same with one number of some entries replaced."""
    x = x.clone()
    for i in entries:
        x[i].reshape(-1)[-1] = value
    return x


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_other_entries_are_solved(name, value):
    """They have the solution and the gradient that they have without the bad ones."""
    problem, *inputs = PROBLEMS[name]
    bad = list(inputs)
    which = next(i for i, x in enumerate(bad) if len(x) == 5)
    bad[which] = spoilt(bad[which], value)
    good = torch.tensor([True, False, True, False, True])
    leaves = [x.clone().requires_grad_() for x in bad]
    found = pmaf.solve(problem(*leaves), nonfinite="report")
    rest = [(x[good] if len(x) == 5 else x).clone().requires_grad_() for x in inputs]
    expected = pmaf.solve(problem(*rest))
    assert found.converged.tolist() == [True, False, True, False, True]
    assert found.method
    for field in ("value", "multiplier", "residual", "gap"):
        x, y = getattr(found, field), getattr(expected, field)
        assert torch.equal(x[good], y)
        assert x[~good].isnan().all()
    (g, h) = (
        torch.autograd.grad((x.value[y].abs() ** 3).sum(), z, allow_unused=True)
        for x, y, z in ((found, good, leaves), (expected, slice(None), rest))
    )
    for x, y, z in zip(g, h, leaves):
        if x is None or y is None:
            assert x is None
            assert y is None
        elif len(z) == 5:
            assert torch.equal(x[good], y)
            assert not x[~good].any()
        else:
            torch.testing.assert_close(x, y)


def test_no_entry_is_left():
    A = torch.full((2, 3, 3), torch.nan, requires_grad=True)
    found = pmaf.solve(pmaf.PrincipalEigenvectors(A, 2), nonfinite="report")
    assert found.value.shape == (2, 3, 2)
    assert found.value.isnan().all()
    assert not found.converged.any()
    single = pmaf.solve(pmaf.PrincipalEigenvectors(A[0]), nonfinite="report")
    assert single.value.shape == (3,)
    assert single.value.isnan().all()


def test_a_finite_batch_is_solved_as_ever():
    problem = pmaf.PrincipalEigenvectors(symmetric(5, 4, 4))
    found, expected = pmaf.solve(problem, nonfinite="report"), pmaf.solve(problem)
    assert torch.equal(found.value, expected.value)


CALLS = {
    "ied": pmaf.ied,
    "ied, k": lambda A: pmaf.ied(A, 2),
    "ied, options": lambda A: pmaf.ied(A, 2, skip=1, reference=0),
    "ied, general": lambda A: pmaf.ied(A, symmetric=False),
    "pair": lambda A: pmaf.ied(A, M=torch.eye(4).to(A)),
    "metric": lambda A: pmaf.ied(torch.eye(4).to(A), M=A),
    "less": lambda A: pmaf.less(A, torch.ones_like(A[..., 0])),
    "less, side": lambda A: pmaf.less(torch.ones_like(A), A[..., 0]),
    "less, ball": lambda A: pmaf.less(A, torch.ones_like(A[..., 0]), ball=True),
    "nullspace": pmaf.nullspace,
    "isvd": lambda A: pmaf.isvd(A, 2),
    "spectral": lambda A: pmaf.spectral(A, "exp"),
    "operator": lambda A: pmaf.ied(Matrix(A[0])),
    "products": lambda A: pmaf.ied(FromMatvec(lambda u: u @ A[0], (4, 4), dtype=A.dtype)),
    "start": lambda A: pmaf.less(Matrix(A[1]), A[1, 0], init=A[0, 0]),
}


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, torch.linalg.LinAlgError])
@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize("name", CALLS)
def test_one_class_of_errors(name, dtype, kind):
    """Programs catch what `torch.linalg` raises."""
    A = symmetric(3, 4, 4, dtype=dtype) + 5 * torch.eye(4, dtype=dtype)
    A[0] = torch.nan
    with pytest.raises(kind, match="non-finite") as caught:
        CALLS[name](A)
    assert isinstance(caught.value, pmaf.NonFiniteError)


@pytest.mark.parametrize("dtype", [torch.float32, T, torch.complex128])
@pytest.mark.parametrize("n", [2, 4, 20, 90])
def test_one_infinite_entry_of_a_metric(n, dtype):
    """It leaves a Cholesky factor, and its row would drop out of the pair without a word."""
    A, M = symmetric(3, n, n, dtype=dtype), torch.eye(n, dtype=dtype).repeat(3, 1, 1)
    M[1, -1, -1] = torch.inf
    diagonal = Diagonal(M.diagonal(dim1=-2, dim2=-1).real.to(dtype))
    for call in (
        lambda: pmaf.ied(A, M=M),
        lambda: pmaf.ied(A[1], 2, M=M[1], largest=False),
        lambda: pmaf.ied(A, M=M, reference=0),
        lambda: pmaf.ied(A, M=diagonal),
        lambda: pmaf.less(A, A[..., 0], M=M),
        lambda: pmaf.less(A, A[..., 0], radius=M[:, -1, -1].real),
    ):
        with pytest.raises(pmaf.NonFiniteError):
            call()


def test_what_cannot_be_reported_is_said():
    A = symmetric(4, 4)
    with pytest.raises(ValueError, match='must be "raise" or "report"'):
        pmaf.solve(pmaf.PrincipalEigenvectors(A), nonfinite="ignore")
    with pytest.raises(TypeError, match="has an operator"):
        pmaf.solve(pmaf.PrincipalEigenvectors(Matrix(A)), nonfinite="report")


def test_functions_of_the_spectrum():
    A = symmetric(4, 4, 4)
    A[1, 0, 2] = math.nan
    A[3, 1, 1] = math.inf
    leaf, good = A.clone().requires_grad_(), [0, 2]
    found = pmaf.solve(pmaf.SpectralFunction(leaf, "exp", 2), nonfinite="report")
    alone = pmaf.solve(pmaf.SpectralFunction(A[good], "exp", 2))
    assert torch.equal(found.value[good], alone.value)
    assert torch.equal(found.multiplier[good], alone.multiplier)
    assert found.value[[1, 3]].isnan().all()
    assert found.converged.tolist() == [True, False, True, False]
    (dA,) = torch.autograd.grad(found.value[good].sum(), leaf)
    assert (dA[[1, 3]] == 0).all()
    assert dA[good].isfinite().all()
    assert (dA[good] != 0).any(-1).any(-1).all()
