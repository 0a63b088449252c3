"""Singular triplets of operators: orthonormal whatever the singular values are, and differentiable.

By `AᵀA` alone, left vectors `Av/σ` of small or zero singular values would be rounding errors.
"""

import logging
import warnings

import pytest
import torch

import pmaf
from pmaf.operators import FromMatvec, Matrix

T = torch.float64
DTYPES = [torch.float32, T, torch.complex64, torch.complex128]
SHAPES = [(6, 4), (4, 4), (4, 6)]
VALUES = {
    "rank 1": [1.0, 0.0, 0.0, 0.0],
    "rank 2": [2.0, 1.0, 0.0, 0.0],
    "rank 3": [3.0, 2.0, 1.0, 0.0],
    "zero": [0.0, 0.0, 0.0, 0.0],
    "small": [1.0, 0.5, 1e-6, 1e-7],
    "tiny": [1.0, 1e-9, 1e-9, 1e-12],
    "equal": [1.0, 1.0, 1.0, 1.0],
    "large": [1e15, 1e14, 1e3, 0.0],
}


def normal(*shape, dtype=T, seed=0):
    wide = torch.complex128 if dtype.is_complex else T
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=wide)


def with_values(m, n, values, dtype):
    U, V = (torch.linalg.qr(normal(x, x, dtype=dtype, seed=x))[0] for x in (m, n))
    S = torch.zeros(m, n, dtype=U.dtype)
    S.diagonal().copy_(torch.tensor(values, dtype=U.dtype))
    return (U @ S @ V.mH).to(dtype)


def weighed(*outputs):
    """A number that depends on all outputs, the real and the imaginary parts of complex ones."""
    parts = [torch.view_as_real(x) if x.is_complex() else x for x in outputs]
    return sum((x * torch.arange(1.0, 1 + x.numel(), dtype=x.dtype).cos().view(x.shape)).sum()
               for x in parts)  # fmt: skip


def ways(caplog):
    return [x.getMessage() for x in caplog.records if x.name == "pmaf"]


def check_triplets(A, k, largest):
    """Both sets of vectors are orthonormal, and belong to each other up to rounding of `AᵀA`."""
    leaf = A.clone().requires_grad_()
    left, values, right = pmaf.isvd(Matrix(leaf), k, largest=largest)
    (gradient,) = torch.autograd.grad(weighed(left, values, right), leaf)
    assert torch.isfinite(gradient).all()
    left, values, right = left.detach(), values.detach(), right.detach()
    eps, eye = torch.finfo(A.dtype).eps, torch.eye(k, dtype=A.dtype)
    for x in (left, right):
        torch.testing.assert_close(x.mH @ x, eye, rtol=0, atol=64 * eps)
    top = max(float(torch.linalg.matrix_norm(A.cdouble(), 2)), 1e-300)
    exact = torch.linalg.svdvals(A.cdouble())
    exact = exact[:k] if largest else exact[-k:].flip(0)  # the requested end first
    for x in (A @ right - left * values, A.mH @ left - right * values):
        assert float(x.abs().max()) <= 8 * eps**0.5 * top
    assert float((values - exact).abs().max()) <= 8 * eps**0.5 * top


@pytest.mark.filterwarnings("ignore::pmaf.ConvergenceWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_vectors_are_orthonormal_whatever_the_values_are(name, shape, dtype):
    A = with_values(*shape, VALUES[name], dtype)
    for k in (1, 2, 3, 4):
        for largest in (True, False):
            check_triplets(A, k, largest)


@pytest.mark.filterwarnings("ignore::pmaf.ConvergenceWarning")
@pytest.mark.parametrize("dtype", [torch.float32, T], ids=str)
@pytest.mark.parametrize("shape", [(100, 101), (101, 100), (100, 100)], ids=str)
@pytest.mark.parametrize("k", [3, 20])
def test_matrices_of_low_rank(k, shape, dtype):
    m, n = shape
    A = (normal(m, 5, seed=1) @ normal(5, n, seed=2)).to(dtype)
    for largest in (True, False):
        check_triplets(A, k, largest)
    diagonal = torch.diag(torch.tensor([1.0, 0.0, 0.0], dtype=dtype))
    check_triplets(diagonal, 2, True)


def spaces(found):
    left, _, right = found
    return weighed(left @ left.mH, right @ right.mH)


def everything(found):
    left, values, right = found
    columns = zip(left.mT, right.mT)
    outer = [torch.outer(x, y.conj()) for u, v in columns for x, y in ((u, v), (u, u), (v, v))]
    return weighed(*outer, values)


REGULAR = {
    "apart": [4.0, 2.5, 1.2, 0.5],
    "ill-conditioned": [4.0, 3.0, 1e-2, 1e-3],
    "singular": [3.0, 2.0, 1.0, 0.0],
    "nearly singular": [2.0, 1.0, 0.5, 1e-6],
    "repeated": [2.0, 2.0, 1.0, 1.0],
    "huge": [4e150, 2.5e150, 1.2e150, 0.5e150],
    "small": [4e-150, 2.5e-150, 1.2e-150, 0.5e-150],
}


@pytest.mark.parametrize("dtype", [T, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", REGULAR)
def test_gradients_are_those_of_the_dense_matrix(name, shape, dtype):
    values = REGULAR[name]
    A, top = with_values(*shape, values, dtype), values[0]
    for k in (1, 2, 3, 4):
        for largest in (True, False):
            wanted, others = values[:k], values[k:]
            if not largest:
                wanted, others = values[4 - k :], values[: 4 - k]
            # Left null vectors of a matrix that is not square are not unique.
            unique = min(wanted) > 0 or shape == (4, 4)
            if not unique or set(wanted) & set(others):
                continue
            losses = [spaces]
            # The sign of a null vector does not follow from that of the other.
            if len(set(wanted)) == k and min(wanted) > 0:
                losses.append(everything)
            for loss in losses:
                found = []
                for way in (Matrix, lambda x: x):
                    leaf = A.clone().requires_grad_()
                    total = loss(pmaf.isvd(way(leaf), k, largest=largest))
                    found.append(torch.autograd.grad(total, leaf)[0])
                ours, theirs = found
                # Systems of AᵀA are solved, whose condition is the square.
                gaps = [abs(x - y) * (x + y) for x in wanted for y in others] or [top**2]
                low = min(x for x in (*wanted, top) if x > 0)
                error = 1e3 * torch.finfo(dtype).eps * max(top**2 / min(gaps), top / low)
                size = max(float(theirs.abs().max()), 1 / top)
                assert float((ours - theirs).abs().max()) <= error * size


def test_left_null_vectors_by_products(caplog):
    """The epipoles of a fundamental matrix that is known by its products."""
    caplog.set_level(logging.DEBUG, logger="pmaf")
    F = with_values(3, 3, [2.0, 1.0, 0.0], T)
    operator = FromMatvec(lambda u, F: u @ F.mT, (3, 3), [F.requires_grad_()])
    left, value, right = (x.detach() for x in pmaf.isvd(operator, largest=False))
    eps = torch.finfo(T).eps
    assert "isvd: search for left vectors" in ways(caplog)
    assert float(value) <= 16 * eps
    assert float((F.detach() @ right).norm()) <= 64 * eps
    assert float((F.detach().mT @ left).norm()) <= 64 * eps
    caplog.clear()
    pmaf.isvd(Matrix(with_values(3, 3, [2.0, 1.0, 0.5], T)), largest=False)
    assert "isvd: search for left vectors" not in ways(caplog)


def test_values_that_products_do_not_resolve_are_announced():
    A = with_values(6, 4, [4.0, 3.0, 1e-3, 3e-4], T)
    with pytest.warns(
        pmaf.ConvergenceWarning, match="1 of 1 .* too small for a search by products"
    ):
        pmaf.isvd(Matrix(A.float()), largest=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pmaf.isvd(Matrix(A), largest=False)
        pmaf.isvd(A.float(), largest=False)
        # Zero is not too small: it is known to be zero.
        pmaf.isvd(Matrix(with_values(6, 4, [4.0, 3.0, 1.0, 0.0], torch.float32)), largest=False)
