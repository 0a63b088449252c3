"""`Eigenpairs.projector()`: gradients where eigenvalues inside the group nearly repeat."""

import warnings

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import pmaf
from pmaf.linalg.roundings import merge_tolerance
from pmaf.operators import Matrix
from pmaf.solvers import Dense, Lanczos

T = torch.float64


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=T)


def nearly_repeated(gap, n=6, seed=0):
    """Eigenvalues 3 + gap, 3, 3 − gap above others, their vectors, and the matrix."""
    values = torch.tensor([3 + gap, 3.0, 3 - gap, 1.0, 0.5, -2.0], dtype=T)[:n]
    q = torch.linalg.qr(randn(n, n, seed=seed))[0]
    return values, q, (q * values) @ q.mT


def resolvent(values, q, k, G):
    """The exact gradient: `Σ (qᵢᵀGqⱼ)/(λᵢ − λⱼ)` for i in the group and j outside."""
    inside, outside = q[:, :k], q[:, k:]
    G = 0.5 * (G + G.mT)
    middle = inside.mT @ (2 * G) @ outside / (values[:k, None] - values[None, k:])
    S = inside @ middle @ outside.mT
    return 0.5 * (S + S.mT)


@pytest.mark.parametrize(
    ("solver", "create_graph"),
    # Operators have first derivatives only.
    [(solver, graph) for solver in (None, Dense(), Lanczos()) for graph in (False, True)]
    + [("operator", False)],
    ids=repr,
)
@pytest.mark.parametrize(
    ("dtype", "gap"),
    [(T, 0.0), (T, 1e-14), (T, 1e-12), (T, 1e-9), (T, 1e-3)]
    + [(torch.float32, gap) for gap in (0.0, 1e-6, 1e-5, 1e-3)],
    ids=str,
)
@pytest.mark.parametrize("seed", range(3))
def test_nearly_repeated_eigenvalues(dtype, gap, solver, create_graph, seed):
    values, q, A = nearly_repeated(gap, seed=seed)
    # Towards the projector itself, most of G lies inside the span, where nothing may come of it.
    for G in (randn(6, 6, seed=seed + 9), randn(6, 6, seed=seed) / 64 + q[:, :3] @ q[:, :3].mT):
        leaf = A.to(dtype).requires_grad_()
        given, method = (Matrix(leaf), None) if solver == "operator" else (leaf, solver)
        P = pmaf.ied(given, 3, solver=method).projector()
        (found,) = torch.autograd.grad((P * G.to(dtype)).sum(), leaf, create_graph=create_graph)
        truth = resolvent(values, q, 3, G)
        # The group is 2 apart from the rest, so that rounding is magnified by less than ten.
        eps = torch.finfo(dtype).eps
        tolerance = 100 * eps * float(G.norm())
        if create_graph and gap > eps**0.5:
            tolerance *= 1 + 1 / gap  # what keeps vectors unit vectors is divided by the gap
        found = found.detach().to(T)
        torch.testing.assert_close(0.5 * (found + found.mT), truth, rtol=0, atol=tolerance)
        P = P.detach()
        torch.testing.assert_close(P.to(T), q[:, :3] @ q[:, :3].mT, rtol=0, atol=tolerance)


@pytest.mark.parametrize("gap", [0.0, 1e-12, 1e-9, 1e-4])
def test_density_matrices_of_pairs(gap):
    """The exact gradient of one matrix `C` in other variables, `A = LCLᵀ`, `M = LLᵀ`."""
    values, q, C = nearly_repeated(gap)
    L = torch.tril(randn(6, 6, seed=3)) / 4 + torch.eye(6, dtype=T)
    W = torch.linalg.inv(L)
    A, M = (L @ C @ L.mT).requires_grad_(), (L @ L.mT).requires_grad_()
    G = randn(6, 6, seed=4)
    G = G + G.mT
    found = torch.autograd.grad((pmaf.ied(A, 3, M=M).projector() * G).sum(), (A, M))
    Y, others = W.mT @ q[:, :3], W.mT @ q[:, 3:]
    middle = Y.mT @ (2 * G) @ others / (values[:3, None] - values[None, 3:])
    dA = Y @ middle @ others.mT
    # Along `others` M acts by λ of the group, and inside the span it shortens the vectors.
    dM = -Y @ (values[:3, None] * middle) @ others.mT - Y @ (Y.mT @ G @ Y) @ Y.mT
    size = float(torch.linalg.cond(M.detach())) * float(G.norm())
    for x, y in zip(found, (dA, dM), strict=True):
        atol = 1000 * torch.finfo(T).eps * size
        torch.testing.assert_close(x, 0.5 * (y + y.mT), rtol=0, atol=atol)


def test_a_single_vector_keeps_its_large_derivative():
    """What is above rounding is not touched: a vector of a close pair turns by 1/gap."""
    gap = 1e-6
    A = torch.diag(torch.tensor([3 + gap, 3.0, 1.0], dtype=T)).requires_grad_()
    (found,) = torch.autograd.grad(pmaf.ied(A, 2).vectors[1, 0], A)
    assert float(found[0, 1]) == pytest.approx(0.5 / gap, rel=1e-8)


@pytest.mark.parametrize("k", [None, 1, 2, 4])
@pytest.mark.parametrize("batch", [(), (4,), (4, 4)])
def test_shapes(k, batch):
    """Also where the batch is as large as n, and k."""
    A = randn(*batch, 4, 4)
    A = A + A.mT
    pairs = pmaf.ied(A, k)
    columns = pairs.vectors.unsqueeze(-1) if k is None else pairs.vectors
    P = pairs.projector()
    assert P.shape == (*batch, 4, 4)
    torch.testing.assert_close(P, columns @ columns.mT)
    compiled = torch.func.vmap(lambda A: pmaf.ied(A, k).projector())(A) if batch else P
    torch.testing.assert_close(compiled, P)


def test_differences():
    A = randn(5, 5).requires_grad_()
    assert gradcheck(lambda A: pmaf.ied(A, 2).projector(), A)
    assert gradcheck(lambda A: pmaf.ied(A).projector(), A)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("solver", [None, Dense(), Lanczos(), "operator"], ids=repr)
@pytest.mark.parametrize("factor", [2.0**-600, 2.0**600, 2.0**1021])
def test_gradients_whose_squares_leave_the_range(solver, factor, create_graph):
    """What is rounding depends on ratios alone: a loss in other units has a gradient in them."""
    if solver == "operator":
        factor, create_graph = min(factor, 2.0**600), False
    _, _, A = nearly_repeated(0.5)
    weights = randn(6, 3, seed=2) / 8

    def gradient(scale):
        leaf = A.clone().requires_grad_()
        given, method = (Matrix(leaf), None) if solver == "operator" else (leaf, solver)
        vectors = pmaf.ied(given, 3, solver=method).vectors
        (found,) = torch.autograd.grad(vectors, leaf, scale * weights, create_graph=create_graph)
        return found.detach() / scale

    torch.testing.assert_close(gradient(factor), gradient(1.0), rtol=0, atol=1e-13)


GAPS = [0.0, 1e-14, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2]


def derivatives(function, A, D, G):
    """The derivative in a direction in forward mode, and the Hessian in the same, in two mixes."""

    def loss(A):
        return (function(A) * G).sum()

    _, forward = torch.func.jvp(function, (A,), (D,))
    _, mixed = torch.func.jvp(torch.func.grad(loss), (A,), (D,))
    leaf = A.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (reverse,) = torch.autograd.grad((first * D).sum(), leaf)
    return forward, *(0.5 * (x + x.mT) for x in (mixed, reverse))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("gap", GAPS)
def test_derivatives_beyond_the_first_gradient(gap):
    """They are exact, or a warning names their errors and what to use instead."""
    _, _, A = nearly_repeated(gap)
    D, G = (0.5 * (x + x.mT) for x in (randn(6, 6, seed=5), randn(6, 6, seed=6)))
    expected = derivatives(lambda A: pmaf.spectral(A, "one", k=3), A, D, G)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", pmaf.ConvergenceWarning)
        found = derivatives(lambda A: pmaf.ied(A, 3).projector(), A, D, G)
    eps, size = torch.finfo(T).eps, gap / 3
    told = {str(x.message).partition("; ")[2] for x in caught if "projector()" in str(x.message)}
    if merge_tolerance(T) < size < eps ** (1 / 3):
        assert told == {'pmaf.spectral(A, "one", k) is exact there'}
    else:
        assert not told
    first, *second = (float((x - y).norm() / y.norm()) for x, y in zip(found, expected))
    # The group is 2 apart from the rest; a digit more is for the conditions of both.
    assert first <= 100 * eps * (1 + 1 / size if size else 1)
    if not 0 < size < eps ** (1 / 3):  # the warning names errors above one elsewhere
        assert max(second) <= 1000 * eps * (1 + 1 / size**2 if size else 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pmaf.ConvergenceWarning")
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("gap", GAPS)
def test_forward_mode_keeps_the_value(gap, k):
    """Newton's steps carry tangents; where eigenvalues nearly repeat, they magnified rounding."""
    _, _, A = nearly_repeated(gap)
    value, _ = torch.func.jvp(lambda A: pmaf.ied(A, k, solver=Dense()).vectors, (A,), (A,))
    torch.testing.assert_close(value, pmaf.ied(A, k, solver=Dense()).vectors, rtol=0, atol=0)


@pytest.mark.parametrize("M", [None, "pair"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_complex_vectors(k, M):
    """With the conjugate transpose: `VVᵀ` is no projector of complex vectors."""
    A = torch.complex(randn(5, 5, seed=1), randn(5, 5, seed=2))
    A = A + A.mH
    B = torch.complex(randn(5, 5, seed=3), randn(5, 5, seed=4))
    metric = None if M is None else B @ B.mH + torch.eye(5)
    P = pmaf.ied(A, k, M=metric).projector()
    again = P @ P if metric is None else P @ metric @ P
    bound = 1000 * torch.finfo(T).eps * float(torch.linalg.matrix_norm(P, 2)) ** 2
    torch.testing.assert_close(P, P.mH, rtol=0, atol=bound)
    torch.testing.assert_close(again, P, rtol=0, atol=bound)
    assert gradcheck(lambda A: pmaf.ied(A, k, M=metric).projector(), A.requires_grad_())


@pytest.mark.parametrize("k", [2, 3])
def test_second_derivatives_of_a_pair(k):
    A, M = randn(5, 5, seed=1), randn(5, 5, seed=2)
    A, M = (A + A.mT).requires_grad_(), (M @ M.mT + torch.eye(5)).requires_grad_()

    def density(A, M):
        return pmaf.ied(A + A.mT, k, M=M + M.mT).projector()

    assert gradgradcheck(density, (A, M))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("shape", [(4, 4), (6, 4)], ids=str)
@pytest.mark.parametrize("gap", GAPS)
def test_derivatives_of_the_product_of_both_sides(gap, shape):
    """As of a projector, those of `UVᵀ` have no gaps inside; a warning names what is exact."""
    m, n = shape
    U, V = (torch.linalg.qr(randn(x, n, seed=x))[0] for x in shape)
    A = (U * torch.tensor([3 + gap, 3.0, 1.0, 0.5], dtype=T)) @ V.mT
    D, G = randn(m, n, seed=5), randn(m, n, seed=6)

    def product(A):
        left, _, right = pmaf.isvd(A, 2)
        return left @ right.mT

    def exact(A):
        above = torch.cat([A.new_zeros(m, m), A], -1)
        J = torch.cat([above, torch.cat([A.mT, A.new_zeros(n, n)], -1)], -2)
        return 2 * pmaf.spectral(J, "one", k=2)[:m, m:]

    def all_of(function):
        def loss(A):
            return (function(A) * G).sum()

        _, forward = torch.func.jvp(function, (A,), (D,))
        leaf = A.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        yield forward
        yield torch.autograd.grad((first * D).sum(), leaf)[0]
        yield torch.func.jvp(torch.func.grad(loss), (A,), (D,))[1]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", pmaf.ConvergenceWarning)
        found = [*all_of(product)]
    eps, size = torch.finfo(T).eps, gap / 3
    told = {str(x.message).partition("; ")[2] for x in caught}
    close = merge_tolerance(T) < size < eps ** (1 / 4)
    assert {'pmaf.spectral(J, "one", k)' in x for x in told} == ({True} if close else set())
    assert all(x.filename == __file__ for x in caught)
    first, *second = (float((x - y).norm() / y.norm()) for x, y in zip(found, all_of(exact)))
    assert first <= 100 * eps * (1 + 1 / size if size else 1)
    if not close and not 0 < size < merge_tolerance(T):
        assert max(second) <= 1000 * eps * (1 + 1 / size**3 if size else 1)


def test_the_product_may_be_written_into():
    A = torch.diag(torch.tensor([5.0, 3.0, 2.0, 1.0], dtype=torch.float64))
    A = (A + torch.ones(4, 4, dtype=torch.float64)).requires_grad_()
    weights = torch.arange(16.0, dtype=torch.float64).reshape(4, 4)
    (wanted,) = torch.autograd.grad((pmaf.ied(A, 2).projector() * weights).sum(), A)
    product = pmaf.ied(A, 2).projector()
    product.mul_(2)
    (found,) = torch.autograd.grad((product * weights).sum(), A)
    torch.testing.assert_close(found, 2 * wanted, rtol=1e-12, atol=1e-12)
