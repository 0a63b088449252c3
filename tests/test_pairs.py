"""Pairs of matrices, `Ay = λMy`, against SciPy, 50-digit arithmetic and differences."""

import logging

import mpmath
import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg
import torch
from torch.autograd import gradcheck, gradgradcheck

import pmaf
from pmaf import native
from pmaf.gradients import DDN, Unroll
from pmaf.operators import Diagonal, FromMatvec, Matrix, Sparse
from pmaf.solvers import Dense, Krylov, Lanczos

T = torch.float64
EPS = torch.finfo(T).eps


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=T)


def symmetric(*shape, seed=0):
    A = randn(*shape, seed=seed)
    return A + A.mT


def definite(*shape, seed=1):
    X = randn(*shape, seed=seed)
    return X @ X.mT / shape[-1] + 0.2 * torch.eye(shape[-1], dtype=T)


def expected(A, M, k, largest, skip, descending):
    """Values and vectors by `scipy.linalg.eigh(a, b)`, in the order of `ied`."""
    values, vectors = (torch.from_numpy(x) for x in scipy.linalg.eigh(A.numpy(), M.numpy()))
    if largest:
        values, vectors = values.flip(-1), vectors.flip(-1)
    values, vectors = values[skip : skip + k], vectors[:, skip : skip + k]
    if descending != largest:
        values, vectors = values.flip(-1), vectors.flip(-1)
    return values, vectors


def same_up_to_sign(found, truth, tolerance):
    sign = torch.sign((found * truth).sum(-2, keepdim=True))
    torch.testing.assert_close(found, sign * truth, rtol=0, atol=tolerance)


METRICS = {
    "dense": lambda M: M,
    "diagonal": lambda M: Diagonal(M.diagonal().clone()),
    "sparse": lambda M: M.to_sparse_csr(),
    "operator": lambda M: FromMatvec(lambda u, M: u @ M, M.shape, [M]),
    "matrix": lambda M: Matrix(M),
}
FORMS = {"dense": lambda A: A, "sparse": lambda A: Sparse(A.to_sparse_coo()), "matrix": Matrix}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("k", "skip"), [(None, 0), (1, 2), (3, 0), (3, 1)])
def test_values_and_vectors_are_those_of_scipy(form, metric, largest, k, skip):
    A, M = symmetric(12, 12), definite(12, 12)
    metric_given = METRICS[metric](M)
    full = torch.diag(M.diagonal()) if metric == "diagonal" else M
    for descending in (True, False):
        options = dict(largest=largest, skip=skip, descending=descending)
        truth = expected(A, full, k or 1, **options)
        values, vectors = pmaf.ied(FORMS[form](A), k, M=metric_given, **options)
        if k is None:
            values, vectors = values.unsqueeze(-1), vectors.unsqueeze(-1)
        # Conditioning: the norm of the reduced matrix, over the gaps for vectors.
        spectrum = torch.from_numpy(scipy.linalg.eigvalsh(A.numpy(), full.numpy()))
        size = float(torch.linalg.cond(full) * spectrum.abs().max())
        torch.testing.assert_close(values, truth[0], rtol=0, atol=100 * EPS * size)
        gap = float(spectrum.diff().min())
        same_up_to_sign(vectors, truth[1], 1000 * EPS * size / gap)
        one = vectors.mT @ full @ vectors
        torch.testing.assert_close(one, torch.eye(k or 1, dtype=T), rtol=0, atol=1e3 * EPS * size)


def ways(caplog):
    found = [x.getMessage() for x in caplog.records if x.name == "pmaf"]
    caplog.clear()
    return {x for x in found if x.startswith("pairs")}


def test_each_kind_takes_its_way(caplog):
    caplog.set_level(logging.DEBUG, logger="pmaf")
    A, M = symmetric(6, 6), definite(6, 6)
    d = Diagonal(M.diagonal().clone())
    sparse = M.to_sparse_csr()
    for A_given, M_given, way in [
        (A, M, {"pairs: compiled" if native.available else "pairs: Cholesky"}),
        (A, d, {"pairs: compiled" if native.available else "pairs: diagonal"}),
        (Matrix(A), d, {"pairs: diagonal"}),
        (A, sparse, {"pairs: entries of M", "pairs: Cholesky"}),
        (Matrix(A), M, {"pairs: factor and products"}),
        (Matrix(A), sparse, {"pairs: entries of M", "pairs: factor and products"}),
    ]:
        pmaf.ied(A_given, 2, M=M_given)
        assert ways(caplog) == way
    pmaf.ied(A, 2, M=d, solver=Dense())
    assert ways(caplog) == {"pairs: diagonal"}


def test_shift_and_invert_of_scipy():
    """A finite-element pair: stiffness and mass of a string; `sigma=0` asks for the lowest."""
    n = 60
    off = torch.ones(n - 1, dtype=T)
    stiffness = 2 * torch.eye(n, dtype=T) - torch.diag(off, 1) - torch.diag(off, -1)
    mass = (4 * torch.eye(n, dtype=T) + torch.diag(off, 1) + torch.diag(off, -1)) / 6
    K, M = (scipy.sparse.csc_matrix(x.numpy()) for x in (stiffness, mass))
    truth = np.sort(scipy.sparse.linalg.eigsh(K, 3, M=M, sigma=0, which="LM")[0])
    for A, metric in [
        (stiffness, mass),
        (stiffness.to_sparse_csr(), mass.to_sparse_csr()),
        (Sparse(stiffness.to_sparse_csr()), mass),
    ]:
        values = pmaf.ied(A, 3, M=metric, largest=False).values
        # The norm of the reduced matrix is 12, and its rounding errors are absolute.
        np.testing.assert_allclose(values.numpy(), truth, rtol=0, atol=1e3 * EPS * 12)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("k", "skip"), [(None, 0), (None, 1), (1, 0), (3, 0), (3, 1)])
@pytest.mark.parametrize("solver", [None, Dense(), Lanczos()], ids=repr)
def test_first_and_second_derivatives(diagonal, largest, k, skip, solver):
    def layer(A, M):
        metric = Diagonal(M) if diagonal else M
        return tuple(pmaf.ied(A, k, M=metric, largest=largest, skip=skip, solver=solver))

    A, M = symmetric(4, 4), definite(4, 4)
    inputs = A.requires_grad_(), (M.diagonal().clone() if diagonal else M).requires_grad_()
    assert gradcheck(layer, inputs)
    if solver is None or (solver == Dense() and k == 3 and largest):
        assert gradgradcheck(layer, inputs)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("largest", [True, False])
def test_gradients_of_operators_are_those_of_their_entries(metric, k, largest):
    A, M = symmetric(8, 8).requires_grad_(), definite(8, 8).requires_grad_()
    full = torch.diag_embed(M.diagonal()) if metric == "diagonal" else M

    def gradients(A_given, M_given):
        values, vectors = pmaf.ied(A_given, k, M=M_given, largest=largest, skip=1)
        weights = torch.cos(torch.arange(vectors.numel(), dtype=T)).reshape(vectors.shape)
        loss = (vectors * weights).sum() + values.square().sum()
        found = torch.autograd.grad(loss, (A, M))
        return [0.5 * (x + x.mT) for x in found]  # a product may see one triangle only

    truth = gradients(A, full)
    metric_given = {
        **METRICS,
        "diagonal": lambda M: Diagonal(M.diagonal()),
    }[metric](M)
    for found in (gradients(A, metric_given), gradients(Matrix(A), metric_given)):
        for x, y in zip(found, truth, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-9 * float(1 + y.abs().max()))


def test_batches_broadcast():
    A, M = symmetric(3, 1, 4, 4), definite(2, 4, 4)
    values, vectors = pmaf.ied(A, 2, M=M)
    assert values.shape == (3, 2, 2)
    assert vectors.shape == (3, 2, 4, 2)
    for i in range(3):
        for j in range(2):
            one = pmaf.ied(A[i, 0], 2, M=M[j])
            torch.testing.assert_close(values[i, j], one.values)
            torch.testing.assert_close(vectors[i, j], one.vectors)
    d = torch.rand(2, 4, dtype=T) + 0.5
    values = pmaf.ied(A, 2, M=Diagonal(d)).values
    torch.testing.assert_close(values, pmaf.ied(A, 2, M=torch.diag_embed(d)).values)
    values = pmaf.ied(Matrix(A[0, 0]), 2, M=M).values
    torch.testing.assert_close(values, pmaf.ied(A[0, 0], 2, M=M).values)


@pytest.mark.parametrize("batch", [(0,), (2, 0)])
def test_empty_batches(batch):
    A = torch.zeros(*batch, 3, 3, dtype=T, requires_grad=True)
    M = torch.eye(3, dtype=T, requires_grad=True)
    found = pmaf.ied(A, 2, M=M)
    assert found.vectors.shape == (*batch, 3, 2)
    found.vectors.sum().backward()
    assert float(M.grad.abs().max()) == 0


def test_one_row():
    value, vector = pmaf.ied(torch.tensor([[6.0]]), M=torch.tensor([[4.0]]))
    assert (float(value), float(vector)) == (1.5, 0.5)


def test_a_pair_with_the_identity_is_one_matrix():
    A = symmetric(6, 6)
    for M in (torch.eye(6, dtype=T), Diagonal(torch.ones(6, dtype=T))):
        for found, truth in zip(pmaf.ied(A, 3, M=M), pmaf.ied(A, 3), strict=True):
            torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("a", [1e-15, 1.0, 1e15])
@pytest.mark.parametrize("m", [1e-15, 1.0, 1e15])
def test_any_scale(a, m):
    A, M = symmetric(5, 5), definite(5, 5)
    one, found = pmaf.ied(A, 2, M=M), pmaf.ied(a * A, 2, M=m * M)
    torch.testing.assert_close(found.values / a * m, one.values, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.vectors * m**0.5, one.vectors, rtol=0, atol=1e-11)


@pytest.mark.parametrize("a", [1e-200, 1e200])
def test_entries_whose_squares_leave_the_range(a):
    A, M = symmetric(5, 5), definite(5, 5)
    truth = pmaf.ied(A, 2, M=M)
    leaf = (a * A).requires_grad_()
    found = pmaf.ied(leaf, 2, M=M, solver=Lanczos())
    torch.testing.assert_close(found.values / a, truth.values, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.vectors, truth.vectors, rtol=0, atol=1e-11)
    found.vectors[0].sum().backward()
    assert torch.isfinite(leaf.grad).all()


def exact_pair(A, M, v):
    """The top vector, and gradients of A and M for the incoming v, in 50 digits."""
    with mpmath.workdps(50):
        n = len(v)
        A, M, v = mpmath.matrix(A), mpmath.matrix(M), mpmath.matrix(v)
        L = mpmath.cholesky(M)
        W = L**-1
        C = W * A * W.T
        values, vectors = mpmath.eigsy((C + C.T) / 2)
        top = max(range(n), key=lambda i: values[i])
        y = W.T * vectors[:, top]
        y = y * mpmath.sign(sum(y))
        image = M * y
        K = mpmath.zeros(n + 1)
        for i in range(n):
            for j in range(n):
                K[i, j] = values[top] * M[i, j] - A[i, j]
            K[i, n] = K[n, i] = image[i]
        z = mpmath.matrix(mpmath.lu_solve(K, mpmath.matrix([*v, 0]))[:n])
        S = (z * y.T + y * z.T) / 2
        dM = -values[top] * S - (y.T * v)[0] / 2 * (y * y.T)
        return [np.array(x.tolist(), dtype=np.float64) for x in (y, S, dM)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("solver", [None, Dense()], ids=repr)
def test_ill_conditioned_metric(seed, solver):
    """cond(M) = 1e6: errors are within 30 times what rounding the inputs does."""
    n = 5
    q = torch.linalg.qr(randn(n, n, seed=seed))[0]
    M = (q * torch.logspace(0, -6, n, dtype=T)) @ q.mT
    M, A, v = 0.5 * (M + M.mT), symmetric(n, n, seed=seed + 10), randn(n, seed=seed + 20)
    leaves = A.clone().requires_grad_(), M.clone().requires_grad_()
    y = pmaf.ied(leaves[0], M=leaves[1], solver=solver).vectors
    found = [y.detach(), *torch.autograd.grad((y * v).sum(), leaves)]
    truth = exact_pair(A.tolist(), M.tolist(), v.tolist())
    moved = [0.0, 0.0, 0.0]
    for draw in range(8):
        noise = [symmetric(n, n, seed=100 * draw + i).sign() for i in range(2)]
        # A change by half a rounding, which a float would not hold.
        with mpmath.workdps(50):
            other = [
                [[mpmath.mpf(a) * (1 + EPS / 2 * int(s)) for a, s in zip(row, signs)]
                 for row, signs in zip(x.tolist(), e.tolist())]
                for x, e in zip((A, M), noise, strict=True)
            ]  # fmt: skip
        changed = exact_pair(*other, v.tolist())
        moved = [max(m, np.abs(x - t).max()) for m, x, t in zip(moved, changed, truth)]
    for x, t, m in zip(found, truth, moved, strict=True):
        assert np.abs(x.numpy() - t.reshape(x.shape)).max() <= 30 * m


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("operator", [False, True])
@pytest.mark.parametrize(("k", "skip"), [(None, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("largest", [True, False])
def test_reports_and_certificates(diagonal, operator, k, skip, largest):
    A, M = symmetric(9, 9), definite(9, 9)
    full = torch.diag(M.diagonal()) if diagonal else M
    metric = Diagonal(M.diagonal().clone()) if diagonal else M
    problem = pmaf.PrincipalEigenvectors(
        Matrix(A) if operator else A, k, largest=largest, skip=skip, M=metric
    )
    solution = pmaf.solve(problem)
    assert solution.converged
    assert solution.residual <= 100 * EPS
    spectrum = torch.from_numpy(scipy.linalg.eigvalsh(A.numpy(), full.numpy()))
    steps = (spectrum.flip(0) if largest else spectrum).diff().abs()
    gap = steps[max(0, skip - 1) : skip + (k or 1)].min()
    assert float(solution.gap) == pytest.approx(float(gap), rel=1e-6)
    tolerance = 1e-10
    assert pmaf.certify(problem, solution).holds(tolerance)
    assert not pmaf.certify(problem, 1.01 * solution.value).holds(tolerance)  # yᵀMy is not one
    wrong = pmaf.PrincipalEigenvectors(problem.A, k, largest=not largest, skip=skip, M=metric)
    assert not pmaf.certify(wrong, solution).holds(tolerance)


def test_a_start():
    A, M = symmetric(40, 40), definite(40, 40)
    for metric in (M, Diagonal(M.diagonal().clone())):
        for A_given in (A, Matrix(A)):
            problem = pmaf.PrincipalEigenvectors(A_given, 2, M=metric, skip=1)
            cold = pmaf.solve(problem, solver=Krylov(dimension=12))
            warm = pmaf.solve(problem, solver=Krylov(dimension=12), init=cold.value)
            torch.testing.assert_close(warm.value, cold.value, rtol=0, atol=1e-9)
    problem = pmaf.PrincipalEigenvectors(A, M=M)
    cold = pmaf.solve(problem, solver=pmaf.solvers.PowerIteration(iterations=3000))
    warm = pmaf.solve(problem, solver=pmaf.solvers.PowerIteration(), init=cold.value)
    assert warm.iterations < cold.iterations


def test_unrolled():
    A, M = symmetric(4, 4).requires_grad_(), definite(4, 4).requires_grad_()
    for solver, gradient in [(None, None), (Dense(), Unroll())]:
        found = pmaf.ied(A, 2, M=M, solver=solver, gradient=gradient)
        loss = (found.vectors * randn(4, 2)).sum() + found.values.sum()
        current = [0.5 * (x + x.mT) for x in torch.autograd.grad(loss, (A, M))]
        if gradient is None:
            truth = current
    for x, y in zip(current, truth, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_skipped_vectors_may_repeat():
    """A Laplacian of three components has three constant vectors; the next ones have gradients."""
    blocks = []
    for size in (3, 4, 5):
        W = torch.rand(size, size, generator=torch.Generator().manual_seed(size), dtype=T)
        W = torch.triu(W, 1)
        blocks.append(W + W.mT)
    W = torch.block_diag(*blocks)
    d = W.sum(0)

    def layer(W, d):
        L = torch.diag_embed(W.sum(-1)) - 0.5 * (W + W.mT)
        found = pmaf.ied(L, 2, M=Diagonal(d), largest=False, descending=False, skip=3)
        return found.values, found.vectors.square()

    values, _ = layer(W, d)
    truth = scipy.linalg.eigvalsh((torch.diag(d) - W).numpy(), torch.diag(d).numpy())[3:5]
    np.testing.assert_allclose(values.numpy(), truth, rtol=0, atol=1e-12)
    assert gradcheck(layer, (W.requires_grad_(), d.requires_grad_()))
    solution = pmaf.solve(
        pmaf.PrincipalEigenvectors(
            torch.diag(d.detach()) - W.detach(), 2, M=Diagonal(d.detach()), largest=False, skip=3
        )
    )
    assert solution.gap > 0.01  # the three zeros are not requested


@pytest.mark.parametrize("solver", [None, Dense(), Krylov()], ids=repr)
def test_gaps_between_skipped_eigenvalues_do_not_count(solver):
    A = torch.diag(torch.tensor([5.0, 5.0, 5.0, 4.0, 2.0, 1.5, 0.0], dtype=T))
    for skip, k, gap in [(3, 1, 1.0), (3, 2, 0.5), (2, 1, 0.0), (4, 1, 0.5), (3, 4, 0.5)]:
        problem = pmaf.PrincipalEigenvectors(A, k, skip=skip)
        found = pmaf.solve(problem, solver=solver)
        assert float(found.gap) == pytest.approx(gap, abs=1e-12)


ERRORS = [
    (dict(M=-torch.eye(4, dtype=T)), ValueError, "M is not positive definite"),
    (dict(M=torch.zeros(4, 4, dtype=T)), ValueError, "M is not positive definite"),
    (
        dict(
            M=torch.stack([torch.eye(4, dtype=T), torch.diag(torch.tensor([1.0, 1, 1, -1])).to(T)])
        ),
        ValueError,
        "in 1 of 2 batch entries.*add a multiple of the identity",
    ),
    (dict(M=Diagonal(torch.tensor([1.0, 0, 1, 1], dtype=T))), ValueError, "not positive definite"),
    (dict(M=torch.full((4, 4), torch.nan, dtype=T)), ValueError, "M has non-finite values"),
    (dict(M=torch.eye(3, dtype=T)), ValueError, r"M must have shape \(\*, 4, 4\) like A"),
    (dict(M=torch.ones(4, dtype=T)), ValueError, "M must have shape"),
    (dict(M=torch.eye(4)), TypeError, "M is torch.float32 but A is torch.float64"),
    (dict(M=torch.eye(4, dtype=T), symmetric=False), ValueError, "symmetric=True"),
    (dict(M=torch.eye(4, dtype=T), gradient=DDN()), TypeError, "rule for one matrix"),
    (dict(M=[[1.0]]), TypeError, "M must be a torch.Tensor"),
    (dict(skip=4), ValueError, "skip must lie between 0 and n - k = 3"),
    (dict(k=3, skip=2), ValueError, "n - k = 1"),
    (dict(skip=-1), ValueError, "skip must lie"),
    (dict(skip=1.0), TypeError, "skip must be an integer"),
    (dict(skip=1, symmetric=False), ValueError, "skip needs symmetric=True"),
]


@pytest.mark.parametrize(("options", "kind", "message"), ERRORS, ids=lambda x: str(x)[:40])
def test_errors(options, kind, message):
    with pytest.raises(kind, match=message):
        pmaf.ied(symmetric(4, 4), **options)


@pytest.mark.parametrize("complex_too", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize(
    ("batch", "given", "remedy"),
    [
        ((), (4,), "Diagonal(M)"),
        ((3,), (4,), "Diagonal(M)"),
        ((3,), (3, 4), "Diagonal(M)"),
        ((), (3, 4), "Diagonal(M)"),
        ((2, 3), (2, 3, 4), "Diagonal(M)"),
        ((), (4, 1), "Diagonal(M.squeeze(-1))"),
        ((3,), (3, 4, 1), "Diagonal(M.squeeze(-1))"),
    ],
)
def test_a_diagonal_is_told_from_a_matrix(batch, given, remedy, complex_too):
    """Degrees of a graph, or masses: the error names the operator, with which the call works."""
    dtype = torch.complex128 if complex_too else T
    A, d = symmetric(*batch, 4, 4).to(dtype), (1 + torch.rand(given, dtype=T)).to(dtype)
    b = A[..., 0]
    for call in (
        lambda M: pmaf.ied(A, M=M).values,
        lambda M: pmaf.ied(Matrix(A), M=M).values,
        lambda M: pmaf.IED(k=1)(A, M=M).values,
        lambda M: pmaf.solve(pmaf.PrincipalEigenvectors(A, M=M)).multiplier,
        lambda M: pmaf.less(A, b, M=M),
        lambda M: pmaf.LESS()(A, b, M=M),
    ):
        with pytest.raises(ValueError, match=r"M must have shape \(\*, 4, 4\)") as caught:
            call(d)
        assert str(caught.value).endswith(f"pass pmaf.operators.{remedy}")
    M = eval(remedy, {"Diagonal": Diagonal, "M": d})
    assert pmaf.ied(A, M=M).values.isfinite().all()
    assert pmaf.less(A, b, M=M).isfinite().all()


def test_a_large_operator_needs_no_factor(caplog):
    caplog.set_level(logging.DEBUG, logger="pmaf")
    n = 3000
    A = Diagonal(torch.arange(n, dtype=T))
    for metric, way in [
        (FromMatvec(lambda u: 2 * u, (n, n), dtype=T), "pairs: products"),
        (Diagonal(torch.full((n,), 2.0, dtype=T)), "pairs: diagonal"),
    ]:
        values = pmaf.ied(A, 2, M=metric).values
        assert ways(caplog) == {way}
        torch.testing.assert_close(values, torch.tensor([n - 1.0, n - 2.0], dtype=T) / 2)


def test_an_indefinite_metric_under_a_transform():
    A, M = symmetric(2, 4, 4), -torch.eye(4, dtype=T)
    with pytest.raises(ValueError, match="M is not positive definite"):
        torch.func.vmap(lambda A: pmaf.ied(A, M=M).values)(A)


def test_second_derivatives_of_an_operator_are_refused():
    A, M = symmetric(4, 4).requires_grad_(), definite(4, 4).requires_grad_()
    metric = FromMatvec(lambda u, M: u @ M, M.shape, [M])
    loss = pmaf.ied(A, M=metric).vectors[0]
    (first,) = torch.autograd.grad(loss, M, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        first.sum().backward()
