"""The dominant eigenvector of small general matrices, in one short way, against the solvers."""

import logging

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import pmaf
from pmaf.solvers import Dense
from tests.oracles import differences

T = torch.float64


def drawn(*shape, seed=0, dtype=T):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=T).to(dtype)


def positive(*shape, seed=0, dtype=T):
    """Matrices whose dominant eigenvalue is real and simple, by Perron and Frobenius."""
    return drawn(*shape, seed=seed, dtype=dtype).abs() + 0.1


def ways(caplog):
    return [record.message for record in caplog.records]


@pytest.mark.parametrize("dtype", [torch.float32, T], ids=str)
@pytest.mark.parametrize("shape", [(2, 2), (9, 9), (7, 5, 5), (2, 3, 4, 4)], ids=str)
@pytest.mark.parametrize("options", [{}, {"k": 1}, {"reference": 0}, {"reference": "largest"}])
def test_the_short_way_is_that_of_the_solver(shape, dtype, options, caplog):
    caplog.set_level(logging.DEBUG, logger="pmaf")
    A, found = positive(*shape, dtype=dtype), []
    for solver in (None, Dense()):
        caplog.clear()
        leaf = A.clone().requires_grad_()
        values, vectors = pmaf.ied(leaf, symmetric=False, solver=solver, **options)
        weights = torch.linspace(1, 2, vectors.numel(), dtype=dtype).reshape(vectors.shape)
        loss = (weights * vectors).sum() + values.sin().sum()
        (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf, retain_graph=True)
        (plain,) = torch.autograd.grad(loss, leaf)
        assert ways(caplog) == ["ied: decomposition"]
        found.append((values, vectors, first, plain, second))
    for x, y in zip(*found, strict=True):
        bound = 1e4 * torch.finfo(dtype).eps * (1 + float(y.detach().abs().max()))
        torch.testing.assert_close(x.detach(), y.detach(), rtol=0, atol=bound)


def test_gradients_are_differences():
    A = positive(5, 5).requires_grad_()

    def call(A):
        return pmaf.ied(A, symmetric=False)

    assert gradcheck(call, (A,))
    assert gradgradcheck(call, (A,))
    (dA,) = torch.autograd.grad(call(A).vectors[0], A)
    other = differences(lambda A: call(A).vectors[0], A.detach())
    torch.testing.assert_close(dA, other, rtol=0, atol=1e-7)


def test_entries_without_a_dominant_eigenvector_are_named():
    """A rotation among matrices that have one: a warning, and their results as they are alone."""
    A = positive(3, 2, 2)
    A[1] = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    leaf = A.clone().requires_grad_()
    with pytest.warns(pmaf.ConvergenceWarning, match="1 of 3 solves.*dominant eigenvalue is compl"):
        values, vectors = pmaf.ied(leaf, symmetric=False)
    alone = pmaf.ied(A[[0, 2]], symmetric=False)
    torch.testing.assert_close(values[[0, 2]], alone.values)
    torch.testing.assert_close(vectors[[0, 2]], alone.vectors)
    (dA,) = torch.autograd.grad(vectors.sum(), leaf)
    assert dA.isfinite().all()


@pytest.mark.parametrize("scale", [1e-150, 1e-30, 1e30, 1e150])
def test_any_scale(scale):
    A, leaf = positive(4, 4), (scale * positive(4, 4)).requires_grad_()
    expected = pmaf.ied(A, symmetric=False)
    values, vectors = pmaf.ied(leaf, symmetric=False)
    torch.testing.assert_close(values / scale, expected.values)
    torch.testing.assert_close(vectors, expected.vectors)
    (dA,) = torch.autograd.grad(vectors[0], leaf)
    plain = A.clone().requires_grad_()
    (other,) = torch.autograd.grad(pmaf.ied(plain, symmetric=False).vectors[0], plain)
    torch.testing.assert_close(dA * scale, other)


def test_an_eigenvalue_without_a_derivative():
    """That of a Jordan block: there is none, and zero takes its place."""
    A = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.5]], dtype=T).requires_grad_()
    with pytest.warns(pmaf.ConvergenceWarning, match="not simple"):
        found = pmaf.ied(A, symmetric=False)
    (dA,) = torch.autograd.grad(found.vectors.sum(), A)
    assert (dA == 0).all()
