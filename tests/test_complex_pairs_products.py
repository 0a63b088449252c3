"""Pairs of complex operators, by products alone, against dense pairs and SciPy."""

import logging

import numpy as np
import pytest
import scipy.linalg
import torch

import pmaf
from pmaf.linalg.roundings import SEARCHED
from pmaf.operators import Diagonal, FromMatvec, Gram, Matrix, Sparse, WithSolve

C64, C128, F64 = torch.complex64, torch.complex128, torch.float64
EPS = torch.finfo(F64).eps
N = 14


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=C128, generator=torch.Generator().manual_seed(seed))


def hermitian(*shape, seed=0):
    X = drawn(*shape, seed=seed)
    return X + X.mH


def definite(*shape, seed=1):
    X = drawn(*shape, seed=seed)
    return X @ X.mH / shape[-1] + 0.5 * torch.eye(shape[-1], dtype=C128)


def ways(caplog):
    found = [x.getMessage() for x in caplog.records if x.name == "pmaf"]
    caplog.clear()
    return {x for x in found if x.startswith(("pairs", "ied: mixed"))}


def errors(A, M, k, largest, skip, dtype=C128):
    """Bounds for values, vectors and gradients: the rounding of a search, which M multiplies."""
    spectrum = scipy.linalg.eigvalsh(A.numpy(), M.numpy())
    gaps = np.abs(np.diff(spectrum[::-1] if largest else spectrum))
    ratio = np.abs(spectrum).max() / gaps[max(skip - 1, 0) : skip + k].min()
    masses = np.linalg.eigvalsh(M.numpy())
    residual = SEARCHED * torch.finfo(dtype).eps * masses[-1] / masses[0]
    size = np.abs(spectrum).max()
    return residual, residual * size, residual * ratio / masses[0] ** 0.5, k * residual * ratio**2


def function(X):
    return FromMatvec(lambda u, X: X @ u, X.shape, [X])


def factored(M):
    lower = torch.linalg.cholesky(M.detach())
    return lambda rows: torch.cholesky_solve(rows.mT, lower).mT


FORMS = {
    "matrices": (Matrix, Matrix),
    "functions": (function, function),
    "dense A": (lambda A: A, function),
    "dense M": (Matrix, lambda M: M),
    "own solve": (function, lambda M: WithSolve(Matrix(M), factored(M))),
    "sums": (lambda A: 0.5 * Matrix(A) + Matrix(0.5 * A), lambda M: Matrix(M) + 0.0 * Matrix(M)),
}


def weighed(values, vectors):
    """A loss that depends on the phases."""
    angles = torch.arange(vectors.numel(), dtype=F64)
    weights = torch.polar(torch.ones_like(angles), angles).reshape(vectors.shape)
    return torch.real(weights * vectors).sum() + values.square().sum() / 100


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(
    ("k", "skip", "reference"),
    [(None, 0, None), (1, 0, 2), (3, 0, None), (3, 2, "largest"), (None, 1, None)],
)
def test_solutions_and_gradients_are_those_of_dense_pairs(
    form, largest, k, skip, reference, caplog
):
    caplog.set_level(logging.DEBUG, logger="pmaf")
    A, M = hermitian(N, N), definite(N, N)
    options = {"largest": largest, "skip": skip, "reference": reference}
    of_A, of_M = FORMS[form]
    found = []
    for first, second in ((of_A, of_M), (lambda x: x, lambda x: x)):
        a, m = A.clone().requires_grad_(), M.clone().requires_grad_()
        pair = pmaf.ied(first(a), k, M=second(m), **options)
        found.append((*pair, *torch.autograd.grad(weighed(*pair), (a, m))))
        if first is of_A:
            own = form == "own solve"
            assert ways(caplog) == {"pairs: products, own solve" if own else "pairs: products"}
    _, values, vectors, gradients = errors(A, M, k or 1, largest, skip)
    (values_here, vectors_here, *mine), (values_there, vectors_there, *theirs) = found
    torch.testing.assert_close(values_here, values_there, rtol=0, atol=values)
    torch.testing.assert_close(vectors_here, vectors_there, rtol=0, atol=vectors)
    for x, y in zip(mine, theirs, strict=True):
        x, y = 0.5 * (x + x.mH), 0.5 * (y + y.mH)
        torch.testing.assert_close(x, y, rtol=0, atol=gradients * float(y.abs().max()))


@pytest.mark.parametrize("dtype", [C64, C128])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("k", "skip"), [(None, 0), (3, 0), (3, 1)])
def test_reports_certificates_and_scipy(k, skip, largest, dtype):
    A, M = hermitian(N, N).to(dtype), definite(N, N).to(dtype)
    problem = pmaf.PrincipalEigenvectors(
        A.to_sparse_coo(), k, largest, descending=largest, skip=skip, M=M.to_sparse_coo()
    )
    found = pmaf.solve(problem)
    count, (A, M) = k or 1, (A.to(C128), M.to(C128))
    residual, error, _, _ = errors(A, M, count, largest, skip, dtype)
    assert found.converged
    assert found.residual <= residual
    spectrum = scipy.linalg.eigvalsh(A.numpy(), M.numpy())
    spectrum = (spectrum[::-1] if largest else spectrum).copy()
    truth = torch.from_numpy(spectrum[skip : skip + count])
    torch.testing.assert_close(found.multiplier.double().reshape(-1), truth, rtol=0, atol=error)
    gap = np.abs(np.diff(spectrum))[max(skip - 1, 0) : skip + count].min()
    assert float(found.gap) == pytest.approx(gap, abs=2 * error)
    y = found.value.to(C128).reshape(N, count)
    assert (y.mH @ M @ y - torch.eye(count)).abs().max() <= residual
    assert pmaf.certify(problem, found).holds(2 * residual)
    # A vector with another phase is as good; one of another eigenvalue, or length, is not.
    assert pmaf.certify(problem, 1j * found.value).holds(2 * residual)
    assert not pmaf.certify(problem, 1.01 * found.value).holds(0.01)
    other = pmaf.solve(pmaf.PrincipalEigenvectors(
        A.to(dtype), k, largest, descending=largest, skip=skip + 1, M=M.to(dtype)
    )).value  # fmt: skip
    assert pmaf.certify(problem, other).optimality < -1e-3


def test_gradients_of_the_stored_values_of_sparse_matrices():
    A, M = hermitian(N, N), definite(N, N)
    where = (drawn(N, N, seed=5).real > 0) | torch.eye(N, dtype=torch.bool)
    where = where | where.mT
    A, M = A * where, M * torch.eye(N) * 2 + A * where * 0.01
    patterns = [Sparse(x.to_sparse_csr()) for x in (A, M)]
    leaves = [x.tensors[0].detach().requires_grad_() for x in patterns]
    found = pmaf.ied(
        patterns[0].with_tensors(leaves[:1]), 2, M=patterns[1].with_tensors(leaves[1:])
    )
    a, m = A.clone().requires_grad_(), M.clone().requires_grad_()
    mine = torch.autograd.grad(weighed(*found), leaves)
    theirs = torch.autograd.grad(weighed(*pmaf.ied(a, 2, M=m)), (a, m))
    *_, error = errors(A, M, 2, True, 0)
    for x, y in zip(mine, theirs, strict=True):
        y = (0.5 * (y + y.mH))[where]
        torch.testing.assert_close(x, y, rtol=0, atol=error * float(y.abs().max()))


def test_repeated_eigenvalues_have_orthonormal_vectors(caplog):
    """Twice three equal eigenvalues: what the search finds mixes the vectors of the embedding."""
    caplog.set_level(logging.DEBUG, logger="pmaf")
    Q, M = torch.linalg.qr(drawn(N, N)).Q, definite(N, N)
    root = torch.linalg.cholesky(M)
    values = torch.tensor([3.0] * 3 + [2.0] * 3 + [0.0] * (N - 6), dtype=F64)
    A = root @ (Q * values) @ Q.mH @ root.mH
    for batch in ((), (2,)):
        a, m = (x.expand(*batch, N, N).clone() for x in (A, M))
        found = pmaf.ied(Matrix(a), 6, M=Matrix(m))
        assert "ied: mixed pairs" in ways(caplog)
        bound = SEARCHED * EPS * float(torch.linalg.cond(M)) * 3
        y = found.vectors
        torch.testing.assert_close(found.values, values[:6].expand(*batch, 6), rtol=0, atol=bound)
        one = y.mH @ m @ y - torch.eye(6)
        assert one.abs().max() <= bound
        rest = a @ y - m @ y * found.values.unsqueeze(-2)
        assert rest.abs().max() <= bound * float(torch.linalg.matrix_norm(M, 2)) ** 0.5


def test_functions_of_the_span_of_equal_eigenvalues():
    Q, M = torch.linalg.qr(drawn(N, N)).Q, definite(N, N)
    root = torch.linalg.cholesky(M)
    values = torch.tensor([2.0, 2.0] + [0.0] * (N - 2), dtype=F64)
    A = root @ (Q * values) @ Q.mH @ root.mH
    gradients = []
    for kind in (Matrix, lambda x: x):
        a, m = A.clone().requires_grad_(), M.clone().requires_grad_()
        y = pmaf.ied(kind(a), 2, M=kind(m)).vectors
        loss = torch.real((y @ y.mH) * drawn(N, N, seed=7)).sum()
        gradients.append([0.5 * (x + x.mH) for x in torch.autograd.grad(loss, (a, m))])
    bound = 2 * SEARCHED * EPS * float(torch.linalg.cond(M)) ** 2
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=bound * float(y.abs().max()))


def test_batches_and_starts():
    A, X = hermitian(3, N, N), drawn(3, 2 * N, N, seed=2)
    M = X.mH @ X
    truth = pmaf.ied(A, 2, M=M)
    for a, m in ((Matrix(A), Gram(X)), (A, Gram(X))):
        found = pmaf.ied(a, 2, M=m)
        for i in range(3):
            _, values, vectors, _ = errors(A[i], M[i], 2, True, 0)
            torch.testing.assert_close(found.values[i], truth.values[i], rtol=0, atol=values)
            torch.testing.assert_close(found.vectors[i], truth.vectors[i], rtol=0, atol=vectors)
    problem = pmaf.PrincipalEigenvectors(Matrix(A), 2, M=Gram(X))
    cold = pmaf.solve(problem)
    warm = pmaf.solve(problem, init=cold.value)
    assert warm.iterations.max() < cold.iterations.max()
    with pytest.raises(ValueError, match=r"has the batch \(1,\) and the problem \(3,\)"):
        pmaf.ied(Matrix(A), M=Gram(X[:1]))


def test_a_large_pair_with_a_diagonal_metric(caplog):
    """A magnetic Laplacian with masses, of 3,000 rows, never formed."""
    caplog.set_level(logging.DEBUG, logger="pmaf")
    n = 3000
    turn = torch.polar(torch.ones(n, dtype=F64), 0.1 * torch.arange(n, dtype=F64).cos())
    turn.requires_grad_()
    d = (1.5 + 0.5 * torch.arange(n, dtype=F64).sin()).to(C128).requires_grad_()

    def hop(u, turn):
        ahead = turn * u.roll(-1)
        return ahead + (turn.conj() * u).roll(1) + 4 * torch.arange(n).div(n) * u

    A = FromMatvec(hop, (n, n), [turn])
    values, vectors = pmaf.ied(A, 2, M=Diagonal(d))
    assert ways(caplog) == {"pairs: products, own solve"}
    y, mass = vectors.detach(), d.detach().real
    residual = 3 * SEARCHED * EPS * float(values[0].detach())  # the condition of M is 3
    rest = torch.stack([hop(y[:, i], turn.detach()) for i in range(2)], -1)
    rest = rest - values.detach() * mass.unsqueeze(-1) * y
    assert (rest.abs().square() / mass.unsqueeze(-1)).sum(0).sqrt().max() <= residual
    (dd,) = torch.autograd.grad(values[0], d)
    # The derivative in the masses, the same product in another order.
    expected = -values[0].detach() * y[:, 0].abs().square()
    torch.testing.assert_close(
        dd.real, expected, rtol=0, atol=8 * EPS * float(expected.abs().max())
    )
    assert dd.imag.abs().max() == 0


class TestErrors:
    def test_a_metric_that_is_not_positive(self):
        A, M = hermitian(N, N), definite(N, N)
        for bad in (Matrix(-M), function(-M), Diagonal(-torch.ones(N, dtype=C128))):
            with pytest.raises(ValueError, match="M is not positive definite"):
                pmaf.ied(Matrix(A), M=bad)

    def test_a_wrong_solve(self):
        A, M = hermitian(N, N), definite(N, N)
        right = factored(M)
        with pytest.raises(ValueError, match="is not the inverse of its matvec"):
            pmaf.ied(Matrix(A), M=WithSolve(Matrix(M), lambda rows: right(rows.conj()).conj()))

    def test_a_transpose_without_conjugation(self):
        A, M = hermitian(N, N), definite(N, N)
        wrong = FromMatvec(lambda u: M @ u, M.shape, rmatvec=lambda u: M.mT @ u, dtype=C128)
        with pytest.raises(ValueError, match="is not the transpose of its matvec"):
            pmaf.ied(Matrix(A), M=wrong)

    def test_second_derivatives(self):
        a = hermitian(N, N).requires_grad_()
        value = pmaf.ied(Matrix(a), M=Matrix(definite(N, N))).values
        (first,) = torch.autograd.grad(value, a, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            first.abs().sum().backward()

    def test_real_and_complex(self):
        with pytest.raises(TypeError, match="make both complex"):
            pmaf.ied(Matrix(hermitian(N, N)), M=Diagonal(torch.ones(N, dtype=F64)))
        with pytest.raises(TypeError, match=r"gradient=Unroll\(\)"):
            pmaf.ied(
                Matrix(hermitian(N, N)),
                M=Matrix(definite(N, N)),
                gradient=pmaf.gradients.Unroll(),
            )
