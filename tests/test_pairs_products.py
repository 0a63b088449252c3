"""Pairs of operators, by products alone, against SciPy, the dense path and differences."""

import gc
import logging
from typing import NamedTuple

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg
import torch

import pmaf
from pmaf.layers import ied
from pmaf.linalg.roundings import LOOSE, ROUNDED, SEARCHED
from pmaf.operators import Diagonal, FromMatvec, Gram, Matrix, Operator, Sparse, WithSolve
from pmaf.solvers import Dense, Krylov
from pmaf.tangent import metric as metrics

T = torch.float64
EPS = torch.finfo(T).eps


@pytest.fixture
def products_only(monkeypatch):
    """Small pairs, too, go by products."""
    monkeypatch.setattr(ied, "_FORMED", 0)


def randn(*shape, seed=0, dtype=T):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=T).to(dtype)


def triangles(across, up, seed=0):
    """Stiffness and mass of linear elements on triangles, with the boundary held.

    The nodes of a grid are moved at random, so that no eigenvalue repeats by symmetry.
    """
    generator = np.random.default_rng(seed)
    x, y = np.meshgrid(np.arange(across + 2.0), np.arange(up + 2.0), indexing="ij")
    inside = np.zeros(x.shape, dtype=bool)
    inside[1:-1, 1:-1] = True
    for axis in (x, y):
        axis += np.where(inside, generator.uniform(-0.2, 0.2, x.shape), 0)
    points = np.stack([x / (across + 1), 0.9 * y / (up + 1)], -1).reshape(-1, 2)
    index = np.arange(x.size).reshape(x.shape)
    a, b, c, d = (
        z.ravel() for z in (index[:-1, :-1], index[1:, :-1], index[1:, 1:], index[:-1, 1:])
    )
    corners = np.concatenate([np.stack([a, b, c], -1), np.stack([a, c, d], -1)])
    p, q, r = (points[corners[:, i]] for i in range(3))
    area = 0.5 * ((q - p)[:, 0] * (r - p)[:, 1] - (q - p)[:, 1] * (r - p)[:, 0])
    edges = np.stack([r - q, p - r, q - p], 1)  # opposite to each corner
    stiffness = np.einsum("tid,tjd->tij", edges, edges) / (4 * area)[:, None, None]
    mass = area[:, None, None] / 12 * (np.ones((3, 3)) + np.eye(3))
    rows, columns = (np.repeat(corners, 3, 1).ravel(), np.tile(corners, (1, 3)).ravel())
    free = np.flatnonzero(inside.ravel())
    shape = (x.size, x.size)
    return [
        scipy.sparse.csr_matrix((m.ravel(), (rows, columns)), shape)[free][:, free]
        for m in (stiffness, mass)
    ]


def tensor(x, dtype=T):
    x = x.tocsr()
    return torch.sparse_csr_tensor(
        torch.from_numpy(x.indptr.astype(np.int64)),
        torch.from_numpy(x.indices.astype(np.int64)),
        torch.from_numpy(x.data).to(dtype),
        x.shape,
        check_invariants=False,
    )


SMALL = triangles(15, 20)


def reference(n, dtype=T):
    """Nearly orthogonal to no eigenvector, so that signs do not depend on rounding."""
    return torch.cos(torch.arange(n, dtype=dtype).square())


class Worth(NamedTuple):
    """Bounds for the errors of a search, from the condition of `M` and the gap of the pair."""

    residual: float  # relative to the largest eigenvalue, in the inner product of M
    values: float
    vectors: float  # Euclidean length
    gradients: float  # relative to the largest entry


def worth(A, M, k, largest=True, skip=0, eps=EPS):
    """A search ends at `SEARCHED` roundings of products, which `M` and its solve multiply.

    An eigenvector has the residual over the gap as its error, and the linear system of a gradient
    multiplies by that again, for each of k vectors.
    """
    A, M = (x.toarray() if scipy.sparse.issparse(x) else np.asarray(x) for x in (A, M))
    spectrum, masses = scipy.linalg.eigvalsh(A, M), scipy.linalg.eigvalsh(M)
    size = np.abs(spectrum).max()
    gaps = np.abs(np.diff(spectrum[::-1] if largest else spectrum))
    ratio = size / gaps[max(skip - 1, 0) : skip + k].min()
    residual = SEARCHED * eps * masses[-1] / masses[0]
    return Worth(
        residual, residual * size, residual * ratio / masses[0] ** 0.5, k * residual * ratio**2
    )


def ways(caplog):
    found = [x.getMessage() for x in caplog.records if x.name == "pmaf"]
    caplog.clear()
    return {x for x in found if x.startswith("pairs")}


def factored(x):
    """Solves by a sparse factorisation."""
    found = scipy.sparse.linalg.splu(scipy.sparse.csc_matrix(x))
    return lambda rows: torch.from_numpy(found.solve(rows.numpy().T.astype(float)).T).to(rows.dtype)


def as_function(M, dtype):
    S = tensor(M, dtype)
    return FromMatvec(lambda u: S @ u, M.shape, rmatvec=lambda u: S @ u, dtype=dtype)


METRICS = {
    "sparse": tensor,
    "function": as_function,
    "factored": lambda M, dtype: WithSolve(tensor(M, dtype), factored(M)),
}
CASES = [
    ("sparse", T, True, None, 0),
    ("sparse", T, True, 3, 2),
    ("sparse", T, False, None, 0),
    ("sparse", T, False, 3, 2),
    ("sparse", torch.float32, True, 1, 0),
    ("sparse", torch.float32, False, 3, 0),
    ("function", T, True, 1, 1),
    ("factored", T, False, 3, 0),
    ("factored", torch.float32, True, 3, 1),
]


@pytest.mark.parametrize(("metric", "dtype", "largest", "k", "skip"), CASES, ids=str)
def test_values_vectors_and_certificates(metric, dtype, largest, k, skip, products_only, caplog):
    caplog.set_level(logging.DEBUG, logger="pmaf")
    A, M = SMALL
    n = A.shape[0]
    values, vectors = scipy.linalg.eigh(A.toarray(), M.toarray())
    if largest:
        values, vectors = values[::-1], vectors[:, ::-1]
    count, size = k or 1, np.abs(values).max()
    values, vectors = values[skip:], vectors[:, skip : skip + count]
    gap = np.abs(np.diff(values[: count + 1])).min()
    values = values[:count]
    problem = pmaf.PrincipalEigenvectors(
        tensor(A, dtype), k, largest, descending=largest, skip=skip, M=METRICS[metric](M, dtype)
    )
    found = pmaf.solve(problem)
    way = "pairs: products, own solve" if metric == "factored" else "pairs: products"
    assert ways(caplog) == {way}
    assert found.converged
    # A product of a mass matrix and its solve lose a factor of at most its condition, about 20.
    eps = 20 * torch.finfo(dtype).eps
    assert found.residual <= 16 * eps
    np.testing.assert_allclose(
        found.multiplier.double().reshape(-1), values, rtol=0, atol=16 * eps * size
    )
    y = found.value.double().reshape(n, count).numpy()
    y = y * np.sign((y * (M @ vectors)).sum(0))
    error = np.sqrt(((y - vectors) * (M @ (y - vectors))).sum(0)).max()
    assert error <= 16 * eps * size / gap
    assert np.abs(y.T @ (M @ y) - np.eye(count)).max() <= 4 * eps
    assert pmaf.certify(problem, found).holds(32 * eps)


def test_certificates_see_what_is_wrong(products_only):
    pair = triangles(7, 8)
    A, M = (tensor(x) for x in pair)
    first = pmaf.PrincipalEigenvectors(A, 2, M=M)
    later = pmaf.PrincipalEigenvectors(A, 2, M=M, skip=1)
    found = pmaf.solve(later).value
    good = pmaf.certify(later, found)
    assert good.holds(2 * worth(*pair, 2, skip=1).residual)
    assert pmaf.certify(first, found).optimality < -1e-3
    assert pmaf.certify(first.changed(largest=False), found).optimality < -1e-3
    assert pmaf.certify(later, 1.01 * found).feasibility > 0.01  # yᵀMy is not one
    moved = pmaf.certify(later, found + 1e-3 * found.roll(1, 0))
    # The length of the residual in the inner product of M, relative to the largest eigenvalue.
    y = (found + 1e-3 * found.roll(1, 0)).numpy()
    K, mass = (x.toarray() for x in pair)
    values = (y * (K @ y)).sum(0) / (y * (mass @ y)).sum(0)
    rest = K @ y - values * (mass @ y)
    size = scipy.linalg.eigvalsh(K, mass).max()
    truth = np.sqrt((rest * np.linalg.solve(mass, rest)).sum(0)).max() / size
    # A solve with M leaves this share of a residual, whose square M⁻¹ multiplies.
    error = 0.5 * metrics._DIRECTION * np.linalg.cond(mass)
    assert float(moved.stationarity) == pytest.approx(truth, rel=error)


def given_pair(form, A, M):
    """Operators, and the tensors they are made of, in which gradients are compared entrywise."""
    if form == "dense":
        a, m = A.clone().requires_grad_(), M.clone().requires_grad_()
        return a, m, a, m
    if form == "function":
        a, m = A.clone().requires_grad_(), M.clone().requires_grad_()
        of = lambda u, X: u @ X  # noqa: E731
        return FromMatvec(of, A.shape, [a]), FromMatvec(of, M.shape, [m]), a, m
    if form == "factored":
        a, m = A.clone().requires_grad_(), M.clone().requires_grad_()
        return Matrix(a), WithSolve(m, factored(M.numpy())), a, m
    patterns = [Sparse(x.to_sparse_csr()) for x in (A, M)]
    a, m = (x.tensors[0].detach().requires_grad_() for x in patterns)
    return *(x.with_tensors([leaf]) for x, leaf in zip(patterns, (a, m))), a, m


def on_pattern(x, like):
    x = 0.5 * (x + x.mT) if x.dim() == 2 else x
    return x if x.dim() == 1 else x[like != 0]


def weighed(values, vectors):
    weights = torch.cos(torch.arange(vectors.numel(), dtype=vectors.dtype)).reshape(vectors.shape)
    return (vectors * weights).sum() + (values / values.detach().abs().max()).square().sum()


@pytest.mark.parametrize("form", ["sparse", "function", "factored"])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("k", "skip"), [(None, 0), (None, 1), (1, 0), (3, 0), (3, 2)])
def test_gradients_are_those_of_dense_pairs(form, largest, k, skip, products_only):
    A, M = (torch.from_numpy(x.toarray()) for x in triangles(5, 6))
    A, M = 0.5 * (A + A.mT), 0.5 * (M + M.mT)

    def gradients(form):
        A_given, M_given, a, m = given_pair(form, A, M)
        found = pmaf.ied(
            A_given, k, M=M_given, largest=largest, skip=skip, reference=reference(len(A))
        )
        both = torch.autograd.grad(weighed(*found), (a, m))
        return [on_pattern(x, like) for x, like in zip(both, (A, M))]

    error = worth(A, M, k or 1, largest, skip).gradients
    assert error < 1e-6
    for x, y in zip(gradients(form), gradients("dense"), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=error * float(y.abs().max()))


@pytest.mark.parametrize("largest", [True, False])
def test_gradients_of_parameters_are_differences(largest, products_only):
    """A lattice with learned springs and masses: gradients against central differences."""
    n = 20
    springs = (1.5 + 0.5 * torch.cos(torch.arange(n + 1, dtype=T).square())).requires_grad_()
    masses = (1.5 + 0.5 * torch.sin(torch.arange(n, dtype=T).square())).requires_grad_()

    def stiffness(u, springs):
        padded = torch.nn.functional.pad(u, (1, 1))
        return -(springs * padded.diff()).diff()

    def inertia(u, masses):
        padded = torch.nn.functional.pad(masses * u, (1, 1))
        return masses * (4 * padded[1:-1] + padded[:-2] + padded[2:]) / 6

    def loss(springs, masses):
        A = FromMatvec(stiffness, (n, n), [springs])
        M = FromMatvec(inertia, (n, n), [masses])
        found = pmaf.ied(A, 2, M=M, largest=largest, reference=reference(n))
        return (found.vectors * randn(n, 2)).sum() + found.values.square().sum()

    found = torch.autograd.grad(loss(springs, masses), (springs, masses))

    def difference(which, i, step):
        ends = []
        for sign in (1, -1):
            moved = [springs.detach().clone(), masses.detach().clone()]
            moved[which][i] += sign * step
            ends.append(float(loss(*moved)))
        return (ends[0] - ends[1]) / (2 * step)

    eye = torch.eye(n, dtype=T)
    full = [torch.stack([f(row, x.detach()) for row in eye]) for f, x in
            ((stiffness, springs), (inertia, masses))]  # fmt: skip
    error, top = worth(*full, 2, largest), scipy.linalg.eigvalsh(*full).max()
    # Of the vectors times their weights, and of the squares of two values.
    noise = error.vectors * float(randn(n, 2).norm()) + 4 * top * error.values
    step = 1e-4
    for which, gradient in enumerate(found):
        for i in (0, 13):
            near, far = (difference(which, i, h) for h in (step, 2 * step))
            # Truncation is of second order: the error of the nearer one is a third of this.
            bound = abs(far - near) + 2 * noise / step
            assert abs(float(gradient[i]) - near) <= bound
            assert bound <= 1e-4 * float(gradient.abs().max())


def test_sums_and_gram_matrices(products_only):
    """`A` a Gram matrix, `M` a sum; everything gets its gradient."""
    X, d = randn(60, 30).requires_grad_(), torch.rand(30, dtype=T).add_(1).requires_grad_()
    B = randn(20, 30, seed=2).requires_grad_()
    found, truth = (
        pmaf.ied(A, 2, M=M, reference=reference(30))
        for A, M in [
            (Gram(X), Diagonal(d) + 0.5 * Gram(B)),
            (X.mT @ X, torch.diag(d) + 0.5 * B.mT @ B),
        ]
    )
    with torch.no_grad():
        error = worth(X.mT @ X, torch.diag(d) + 0.5 * B.mT @ B, 2)
    torch.testing.assert_close(found.values, truth.values, rtol=0, atol=error.values)
    torch.testing.assert_close(found.vectors, truth.vectors, rtol=0, atol=error.vectors)
    for x, y in zip(
        *(torch.autograd.grad(weighed(*pair), (X, d, B)) for pair in (found, truth)), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=0, atol=error.gradients * float(y.abs().max()))


def test_multiples_of_a_diagonal_matrix_are_solved_as_they_are(caplog):
    caplog.set_level(logging.DEBUG, logger="pmaf")
    A, d = randn(20, 20), torch.rand(20, dtype=T) + 0.5
    A = A + A.mT
    found = pmaf.ied(Matrix(A), 3, M=2.0 * Diagonal(d))
    assert ways(caplog) == {"pairs: products, own solve"}
    truth = pmaf.ied(A, 3, M=torch.diag(2.0 * d)).values
    error = worth(A, torch.diag(2.0 * d), 3).values
    torch.testing.assert_close(found.values, truth, rtol=0, atol=error)


def test_batches(products_only):
    A = randn(3, 20, 20)
    A, X = A + A.mT, randn(3, 25, 20, seed=1)
    M = X.mT @ X
    for A_given, M_given, full in [
        (Matrix(A), Gram(X), (A, M)),
        (Matrix(A), Gram(X[0]), (A, M[0])),
        (Matrix(A[0]), Gram(X), (A[0], M)),
    ]:
        leaf = A_given.A.detach().requires_grad_()
        found = pmaf.ied(Matrix(leaf), 2, M=M_given, reference=reference(20))
        again = full[0].clone().requires_grad_()
        truth = pmaf.ied(again, 2, M=full[1], reference=reference(20))
        pairs_of_batch = zip(*(x.expand(3, 20, 20) for x in full))
        errors = [worth(*pair, 2) for pair in pairs_of_batch]
        for i, error in enumerate(errors):
            torch.testing.assert_close(found[0][i], truth[0][i], rtol=0, atol=error.values)
            torch.testing.assert_close(found[1][i], truth[1][i], rtol=0, atol=error.vectors)
        for x, y in zip(
            torch.autograd.grad(weighed(*found), leaf),
            torch.autograd.grad(weighed(*truth), again),
            strict=True,
        ):
            # Problems that share a matrix add to its gradient, so that the worst error counts.
            error = max(error.gradients for error in errors) * float(y.abs().max())
            torch.testing.assert_close(0.5 * (x + x.mT), y, rtol=0, atol=error)
    with pytest.raises(ValueError, match=r"has the batch \(1,\) and the problem \(3,\)"):
        pmaf.ied(Matrix(A), M=Gram(X[:1]))


@pytest.mark.parametrize("m", [1e-5, 1e5])
@pytest.mark.parametrize("a", [1e-25, 1e25])
def test_any_scale(a, m, products_only):
    """In float32, squares of `a` leave the range."""
    A, M = (tensor(x, torch.float32).to_dense() for x in triangles(6, 7))
    root, signs = torch.linalg.cholesky(M).mT, reference(42).float()
    one = pmaf.ied(Matrix(A), 2, M=Gram(root), reference=signs)
    leaf = (a * A).requires_grad_()
    found = pmaf.ied(Matrix(leaf), 2, M=m * Gram(root), reference=signs)
    error = worth(A.double(), M.double(), 2, eps=torch.finfo(torch.float32).eps)
    torch.testing.assert_close(found.values / a * m, one.values, rtol=0, atol=error.values)
    torch.testing.assert_close(found.vectors * m**0.5, one.vectors, rtol=0, atol=error.vectors)
    (gradient,) = torch.autograd.grad(found.values[0], leaf)
    y = found.vectors[:, 0].detach()
    # The same product of the same vector, in another order.
    torch.testing.assert_close(
        gradient, torch.outer(y, y), rtol=4 * torch.finfo(torch.float32).eps, atol=0
    )
    with pytest.raises(ValueError, match=r"leave the range of torch.float32; multiply M"):
        pmaf.ied(Matrix(A), M=1e-25 * Gram(root))


LARGE = None


def large():
    """A pair of 10,100 rows, assembled once."""
    global LARGE
    LARGE = LARGE or triangles(100, 101)
    return LARGE


def _condition(M):
    """The condition of a sparse positive definite matrix."""
    ends = [scipy.sparse.linalg.eigsh(M, 1, which="LA", return_eigenvectors=False)[0]]
    low = scipy.sparse.linalg.eigsh(M, 1, sigma=0, return_eigenvectors=False)[0]
    return float(ends[0] / low)


def test_ten_thousand_rows():
    """The largest eigenvalues as `eigsh`, with gradients of all stored values."""
    K, M = large()
    truth = np.sort(scipy.sparse.linalg.eigsh(K, 3, M=M, which="LA")[0])[::-1]
    A, metric = Sparse(tensor(K)), Sparse(tensor(M))
    a, m = (x.tensors[0].detach().requires_grad_() for x in (A, metric))
    values, vectors = pmaf.ied(A.with_tensors([a]), 3, M=metric.with_tensors([m]))
    # The residual is one of both searches; that of a value is of second order.
    residual = SEARCHED * EPS * _condition(M)
    np.testing.assert_allclose(values.detach(), truth, rtol=2 * residual)
    da, dm = torch.autograd.grad(values[0], (a, m))
    y = vectors[:, 0].detach().numpy()
    i, j = (torch.from_numpy(x.astype(np.int64)) for x in K.nonzero())
    assert len(i) == len(da)
    entries = torch.from_numpy(y)[i] * torch.from_numpy(y)[j]
    # The same products, in another order.
    torch.testing.assert_close(da, entries, rtol=0, atol=4 * EPS * float(entries.abs().max()))
    torch.testing.assert_close(dm, -values[0].detach() * da, rtol=8 * EPS, atol=0)
    # The residual has a length in the inner product of M, too.
    largest = float(values[0].detach())
    rest = K @ y - largest * (M @ y)
    length = np.sqrt(rest @ scipy.sparse.linalg.spsolve(M.tocsc(), rest))
    assert length <= residual * largest


@pytest.mark.parametrize("own", [True, False])
def test_shift_and_invert(own):
    """The lowest eigenvalues as `eigsh(sigma=0)`: the largest of the pair in the other order."""
    K, M = large()
    truth = np.sort(scipy.sparse.linalg.eigsh(K, 4, M=M, sigma=0)[0])
    stiffness = Sparse(tensor(K))
    leaf = stiffness.tensors[0].detach().requires_grad_()
    metric = stiffness.with_tensors([leaf])
    metric = WithSolve(metric, factored(K)) if own else metric
    inverse, x = pmaf.ied(tensor(M), 4, M=metric)
    values, vectors = 1 / inverse, x / inverse.sqrt()
    # Errors are relative to the largest of the inverse values, 1/λ₁, and are those of sums of n
    # products, because errors of vectors matter to second order.
    error = ROUNDED * EPS * K.shape[0] ** 0.5 * truth[-1] / truth[0]
    np.testing.assert_allclose(values.detach(), truth, rtol=error)
    y = vectors.detach().numpy()
    np.testing.assert_allclose(y.T @ (M @ y), np.eye(4), rtol=0, atol=error)
    (found,) = torch.autograd.grad(values.sum(), leaf)
    i, j = K.nonzero()
    expected = (y[i] * y[j]).sum(-1)
    # The same vectors, which differ by their lengths.
    assert np.abs(found.numpy() - expected).max() <= 2 * error * np.abs(expected).max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_an_ill_conditioned_metric(dtype, products_only):
    """Residuals end at the rounding of products with M, which is κ(M) times that of one matrix."""
    n, condition = 60, 0.01 / torch.finfo(dtype).eps ** 0.5
    q = torch.linalg.qr(randn(n, n, dtype=T))[0]
    M = (q * torch.logspace(0, -float(np.log10(condition)), n, dtype=T)) @ q.mT
    M, A = 0.5 * (M + M.mT), randn(n, n, seed=1)
    A = A + A.mT
    truth = scipy.linalg.eigh(A.numpy(), M.numpy(), eigvals_only=True)
    problem = pmaf.PrincipalEigenvectors(
        Matrix(A.to(dtype)), 2, M=FromMatvec(lambda u: u @ M.to(dtype), M.shape, dtype=dtype)
    )
    found = pmaf.solve(problem)
    assert found.converged
    eps = torch.finfo(dtype).eps * condition
    values = found.multiplier.double().numpy()
    np.testing.assert_allclose(values, truth[:-3:-1], rtol=0, atol=16 * eps * np.abs(truth).max())
    assert pmaf.certify(problem, found).holds(32 * eps)


def test_a_warm_start_takes_fewer_products(products_only):
    pair = triangles(8, 9)
    A, M = (tensor(x) for x in pair)
    problem = pmaf.PrincipalEigenvectors(A, 2, M=M)
    cold = pmaf.solve(problem)
    warm = pmaf.solve(problem, init=cold.value)
    assert warm.converged
    error = worth(*pair, 2).values
    torch.testing.assert_close(warm.multiplier, cold.multiplier, rtol=0, atol=error)
    assert warm.iterations < cold.iterations
    # A start at the other end does not hide the wanted one.
    lowest = pmaf.solve(pmaf.PrincipalEigenvectors(A, 2, M=M, largest=False)).value
    found = pmaf.solve(problem, init=lowest)
    torch.testing.assert_close(found.multiplier, cold.multiplier, rtol=0, atol=error)


def test_restarts_and_corrections(products_only):
    """A small space restarts often, and takes Newton steps in the inner product of M."""
    A, M = (tensor(x) for x in SMALL)
    solver = Krylov(dimension=6)
    problem = pmaf.PrincipalEigenvectors(A, 1, largest=False, M=M)
    found = pmaf.solve(problem, solver=solver)
    truth = scipy.linalg.eigh(*(x.toarray() for x in SMALL), subset_by_index=(0, 0))[0]
    assert found.converged
    assert found.iterations > 100
    # Of second order in the residual, and as in SciPy's reduced matrix a few roundings of its norm.
    size = float(pmaf.ied(A, M=M).values)
    assert abs(float(found.multiplier) - truth[0]) <= SEARCHED * EPS * size


def test_reports_say_what_happened(products_only):
    pair = triangles(8, 9)
    A, M = (tensor(x) for x in pair)
    problem = pmaf.PrincipalEigenvectors(A, 2, largest=False, M=M)
    with pytest.warns(pmaf.ConvergenceWarning, match="did not converge"):
        found = pmaf.solve(problem, solver=Krylov(max_products=5))
    assert not found.converged
    with pytest.raises(pmaf.ConvergenceError):
        pmaf.solve(problem, solver=Krylov(max_products=5), throw=True)
    spectrum = scipy.linalg.eigvalsh(*(x.toarray() for x in pair))
    values = A.values().detach().requires_grad_()
    found = pmaf.solve(
        pmaf.PrincipalEigenvectors(Sparse(A).with_tensors([values]), 2, largest=False, M=M)
    )
    # The next eigenvalue is known from the same space, where it has not converged: from within.
    gap = np.diff(spectrum[:3]).min()
    assert float(found.gap) == pytest.approx(gap, abs=2 * worth(*pair, 2, False).values)
    found.value[0].sum().backward()
    assert found.backward.converged
    assert found.backward.residual <= LOOSE * EPS  # what counts as solved
    assert found.backward.iterations > 10


def test_repeated_eigenvalues_warn_in_the_backward_pass(products_only):
    """A square membrane: the second eigenvalue is double, and its vectors have no derivative."""
    n = 5
    K1 = 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
    M1 = (4 * np.eye(n) + np.eye(n, k=1) + np.eye(n, k=-1)) / 6
    A = torch.from_numpy(np.kron(K1, M1) + np.kron(M1, K1)).requires_grad_()
    M = torch.from_numpy(np.kron(M1, M1))
    found = pmaf.ied(Matrix(A), M=Matrix(M) + 0.0 * Matrix(M), largest=False, skip=1)
    with pytest.warns(pmaf.ConvergenceWarning, match="linear system of the gradient"):
        found.vectors[0].backward()
    assert torch.isfinite(A.grad).all()
    A.grad = None
    # The span of both has one.
    span = pmaf.ied(Matrix(A), 2, M=Matrix(M) + 0.0 * Matrix(M), largest=False, skip=1)
    weights = randn(n * n, n * n)
    (gradient,) = torch.autograd.grad((span.projector() * weights).sum(), A)
    dense = pmaf.ied(A, 2, M=M, largest=False, skip=1)
    (truth,) = torch.autograd.grad((dense.projector() * weights).sum(), A)
    gradient = 0.5 * (gradient + gradient.mT)
    # The group of both is apart from the rest; distances inside it do not matter.
    spectrum = scipy.linalg.eigvalsh(A.detach().numpy(), M.numpy())
    ratio = spectrum.max() / min(spectrum[1] - spectrum[0], spectrum[3] - spectrum[2])
    error = 2 * SEARCHED * EPS * np.linalg.cond(M.numpy()) * ratio**2
    torch.testing.assert_close(gradient, truth, rtol=0, atol=error * float(truth.abs().max()))


def test_training_keeps_its_memory(products_only):
    """Thirty steps that raise the lowest frequency by moving mass."""
    A, M = tensor(triangles(3, 4)[0]), Sparse(tensor(triangles(3, 4)[1]))
    base = M.tensors[0].clone()
    weights = torch.zeros_like(base, requires_grad=True)
    optimiser = torch.optim.Adam([weights], lr=0.01)
    start, values, counts = None, [], []
    for step in range(30):
        # Gradients of a symmetric matrix are symmetric, so that this one stays so.
        metric = M.with_tensors([base * (1 + 0.1 * torch.tanh(weights))])
        found = pmaf.ied(A, M=metric, largest=False, init=start)
        optimiser.zero_grad()
        (-found.values).backward()
        optimiser.step()
        values.append(float(found.values.detach()))
        start = found.vectors.detach()
        if step in (9, 29):
            del found, metric
            gc.collect()
            counts.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
    assert values[-1] > 1.02 * values[0]
    assert counts[1] <= counts[0] + 2


def test_a_wrong_solve_says_so():
    A, M = (torch.from_numpy(x.toarray()) for x in triangles(5, 6))
    right, error = factored(M.numpy()), worth(A, M, 2)
    for wrong in (
        lambda rows: 2 * right(rows),
        lambda rows: right(rows) + 1e-3 * right(rows.roll(1, -1)),
        lambda rows: rows,
    ):
        with pytest.raises(ValueError, match=r"solve of .* is not the inverse of its matvec"):
            pmaf.ied(Matrix(A), M=WithSolve(M, wrong))
        metric = FromMatvec(
            lambda u: u @ M, M.shape, dtype=T, solve=lambda u, f=wrong: f(u[None])[0]
        )
        with pytest.raises(ValueError, match="is not the inverse"):
            pmaf.ied(Matrix(A), M=metric)
    # What is inexact on purpose is a matter of the tolerance, and finds what it is worth.
    inexact = WithSolve(M, lambda rows: (1 + 1e-5) * right(rows))
    found = pmaf.ied(Matrix(A), M=inexact, solver=Krylov(tolerance=1e-5))
    spectrum = scipy.linalg.eigvalsh(A.numpy(), M.numpy())
    # Values have the square of the residual over the gap as their error.
    second = 1e-5**2 * spectrum[-1] ** 2 / (spectrum[-1] - spectrum[-2])
    torch.testing.assert_close(found.values, pmaf.ied(A, M=M).values, rtol=0, atol=second)
    good = FromMatvec(lambda u: u @ M, M.shape, dtype=T, solve=lambda u: right(u[None])[0])
    torch.testing.assert_close(
        pmaf.ied(Matrix(A), 2, M=good).values,
        pmaf.ied(A, 2, M=M).values,
        rtol=0,
        atol=error.values,
    )


@pytest.mark.parametrize("own", [True, False])
def test_own_operators_may_solve(own, caplog):
    """A class of the user with products and, if it likes, a solve."""
    caplog.set_level(logging.DEBUG, logger="pmaf")

    class Circulant(Operator):
        symmetric = True

        def __init__(self, first):
            self.first = first

        @property
        def shape(self):
            return torch.Size((len(self.first), len(self.first)))

        @property
        def tensors(self):
            return (self.first,)

        def with_tensors(self, tensors):
            return type(self)(*tensors)

        def matvec(self, rows):
            n = rows.shape[-1]
            return torch.fft.irfft(torch.fft.rfft(rows) * torch.fft.rfft(self.first), n=n)

    class Solvable(Circulant):
        def solve(self, rows):
            n = rows.shape[-1]
            return torch.fft.irfft(torch.fft.rfft(rows) / torch.fft.rfft(self.first), n=n)

    n = 3000
    first = torch.zeros(n, dtype=T)
    first[0], first[1], first[-1] = 4.0, 1.0, 1.0
    first.requires_grad_()
    A = Diagonal(torch.arange(n, dtype=T).cos())
    value, vector = pmaf.ied(A, M=(Solvable if own else Circulant)(first))
    assert ways(caplog) == {"pairs: products, own solve" if own else "pairs: products"}
    value.backward()
    banded = np.zeros((n, n))
    i = np.arange(n)
    banded[i, i], banded[i, i - 1], banded[i - 1, i] = 4.0, 1.0, 1.0
    sparse = scipy.sparse.csr_matrix(banded)
    truth = scipy.sparse.linalg.eigsh(scipy.sparse.diags(np.cos(i)), 1, M=sparse, which="LA")
    top, y = float(truth[0][0]), vector.detach().numpy()
    # The condition of M is 3, and all eigenvalues of the pair are at most 1/2.
    residual = SEARCHED * EPS * 3 * 0.5
    assert float(value.detach()) == pytest.approx(top, abs=2 * residual)
    rest = np.cos(i) * y - top * (sparse @ y)
    assert np.sqrt(rest @ scipy.sparse.linalg.spsolve(sparse.tocsc(), rest)) <= 2 * residual
    # The derivative in first[0] is that of M along the identity, the same sum in another order.
    assert float(first.grad[0]) == pytest.approx(-top * (y @ y), rel=ROUNDED * EPS * n**0.5)


class TestErrors:
    A, M = (torch.from_numpy(x.toarray()) for x in triangles(5, 6))

    def test_an_indefinite_metric(self, products_only):
        values, vectors = torch.linalg.eigh(self.M)
        for flipped in (0, 7, -1):
            changed = values.clone()
            changed[flipped] *= -1
            M = (vectors * changed) @ vectors.mT
            metric = FromMatvec(lambda u, M=M: u @ M, M.shape, dtype=T)
            with pytest.raises(ValueError, match="M is not positive definite, up to rounding"):
                pmaf.ied(Matrix(self.A), 2, M=metric)
        both = torch.stack([self.M, -self.M])
        metric = FromMatvec(lambda u: (u.unsqueeze(-2) @ both).squeeze(-2), both.shape, dtype=T)
        with pytest.raises(ValueError, match="in 1 of 2 batch entries"):
            pmaf.ied(Matrix(self.A.expand(2, -1, -1)), M=metric)

    def test_an_indefinite_metric_with_a_solve(self):
        M = -self.M
        with pytest.raises(ValueError, match="M is not positive definite"):
            pmaf.ied(Matrix(self.A), 2, M=WithSolve(M, factored(M.numpy())))

    def test_a_diagonal_that_is_not_positive(self, products_only):
        M = self.M.clone()
        M[3, 3] = 0
        with pytest.raises(ValueError, match="M is not positive definite"):
            pmaf.ied(Matrix(self.A), 2, M=M.to_sparse_csr())

    def test_a_singular_metric(self, products_only):
        """Zero masses: conjugate gradients find no solution, and say so."""
        M = torch.diag((torch.arange(30) > 2).to(T))
        metric = FromMatvec(lambda u: u @ M, M.shape, dtype=T)
        with pytest.raises(ValueError, match=r"not positive definite|was not solved"):
            pmaf.ied(Matrix(self.A), 2, M=metric)

    def test_a_system_that_is_not_solved(self, products_only, monkeypatch):
        monkeypatch.setattr("pmaf.tangent.metric._PRODUCTS", 20)
        q = torch.linalg.qr(randn(30, 30))[0]
        M = (q * torch.logspace(0, -8, 30, dtype=T)) @ q.mT
        metric = FromMatvec(lambda u: u @ M, M.shape, dtype=T)
        with pytest.raises(ValueError, match=r"not solved by 20 products.*give it a solve"):
            pmaf.ied(Matrix(self.A), 2, M=metric)

    def test_numbers_that_are_not_finite(self, products_only):
        for A, M in [(self.A * torch.nan, self.M), (self.A, self.M * torch.nan)]:
            with pytest.raises(ValueError, match="non-finite values"):
                pmaf.ied(Matrix(A), M=Matrix(M) + 0.0 * Matrix(M))

    def test_arguments(self, products_only):
        A, M = Matrix(self.A), Sparse(self.M.to_sparse_csr())
        with pytest.raises(ValueError, match=r"M must have shape \(\*, 30, 30\) like A"):
            pmaf.ied(A, M=Sparse(torch.eye(29, dtype=T).to_sparse_csr()))
        with pytest.raises(ValueError, match="k must lie between 1 and n = 30"):
            pmaf.ied(A, 31, M=M)
        with pytest.raises(TypeError, match="needs the entries of a matrix"):
            pmaf.ied(A, M=M, solver=Dense())
        with pytest.raises(ValueError, match="solve is for square matrices"):
            FromMatvec(lambda u: u, (3, 2), solve=lambda u: u)
        with pytest.raises(ValueError, match="solve is for square matrices"):
            WithSolve(torch.ones(3, 2), lambda rows: rows)
        with pytest.raises(TypeError, match="solve must be a function of rows; got int"):
            WithSolve(torch.eye(3), 3)
        with pytest.raises(TypeError, match=r"solve returned ndarray.*torch.from_numpy"):
            pmaf.ied(A, M=WithSolve(self.M, lambda rows: rows.numpy()))
        with pytest.raises(ValueError, match="return rows of the same kind"):
            pmaf.ied(A, M=WithSolve(self.M, lambda rows: rows[..., :-1]))
        with pytest.raises(NotImplementedError, match="no product with its inverse"):
            M.solve(torch.ones(1, 30, dtype=T))

    def test_second_derivatives(self, products_only):
        leaf = self.A.clone().requires_grad_()
        value = pmaf.ied(Matrix(leaf), M=self.M.to_sparse_csr()).vectors[0]
        (first,) = torch.autograd.grad(value, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            first.sum().backward()


def test_diagonals():
    """Diagonals that operators know at a look, which scale the systems with M."""
    A = randn(2, 5, 5)
    sparse = A * (randn(5, 5, seed=3) > 0)
    for operator, truth in [
        (Matrix(A), A),
        (Sparse(sparse.to_sparse_coo()), sparse),
        (Sparse(sparse[0].to_sparse_csr()), sparse[0]),
        (Matrix(A) - 2.0 * Diagonal(A[0, 0]), A - 2.0 * torch.diag(A[0, 0])),
        (WithSolve(A, lambda rows: rows), A),
    ]:
        torch.testing.assert_close(operator.diagonal(), truth.diagonal(dim1=-2, dim2=-1))
    for operator in (Gram(A), Matrix(A) + Gram(A), 2.0 * Gram(A)):
        assert operator.diagonal() is None


def test_a_diagonal_saves_products(products_only):
    """Masses over six orders of magnitude take no more products than equal ones."""
    M = SMALL[1]
    n = M.shape[0]
    size = np.logspace(0, 3, n)
    counts = []
    for root in (np.ones(n), size):
        scaled = scipy.sparse.diags(root) @ M @ scipy.sparse.diags(root)
        A = scipy.sparse.diags(root) @ SMALL[0] @ scipy.sparse.diags(root)
        given = Sparse(tensor(scaled))
        count = [0]

        class Counted(WithSolve):
            solvable = False

            def matvec(self, rows, count=count):
                count[0] += 1
                return super().matvec(rows)

            def with_tensors(self, tensors):
                return type(self)(self.part.with_tensors(tensors), self.function)

        values = pmaf.ied(tensor(A), M=Counted(given, lambda rows: rows)).values
        counts.append((count[0], float(values)))
    # The same pair in other variables, in the same steps up to those that rounding decides.
    assert counts[1][1] == pytest.approx(counts[0][1], abs=2 * worth(*SMALL, 1).values)
    assert counts[1][0] <= 2 * counts[0][0]


def test_the_smooth_end_of_a_long_string_converges():
    """Terms of products with smooth vectors cancel, and the errors that remain are no failure."""
    n, k = 8000, 3

    def tridiagonal(middle, beside):
        return scipy.sparse.diags([beside, middle, beside], [-1, 0, 1], shape=(n, n), format="csc")

    stiffness, mass = tridiagonal(2.0, -1.0), tridiagonal(4 / 6, 1 / 6)
    cosines = np.cos(np.arange(1, k + 1) * np.pi / (n + 1))
    exact = torch.from_numpy((4 + 2 * cosines) / 6 / (2 - 2 * cosines))
    metric = WithSolve(tensor(stiffness, T), factored(stiffness))
    solution = pmaf.solve(
        pmaf.PrincipalEigenvectors(Sparse(tensor(mass, T)), k=k, M=metric), throw=True
    )
    # yᵀMy = 1 has the rounding errors of terms that are cond(M) times as large.
    condition = 4 / (2 - 2 * cosines[0])
    error = (solution.multiplier - exact).abs() / exact
    assert (error <= torch.finfo(T).eps * condition).all()
    assert solution.residual <= torch.finfo(T).eps * condition
