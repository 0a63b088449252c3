"""Both layers by products alone: global, exact, scale-free, and honest."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import pmaf
from pmaf.operators import Diagonal, FromMatvec, Gram, LowRank, Matrix, Sparse
from pmaf.solvers import Auto, Krylov, Lanczos
from pmaf_lab.experiments.measure import peak_bytes
from tests.ied_cases import (
    NONSYMMETRIC,
    REPEATED_ELSEWHERE,
    REPEATED_TOP,
    SYMMETRIC,
    with_eigenvalues,
)
from tests.less_cases import DEGENERATE, REGULAR, with_singular_values
from tests.oracles import differences

F64 = torch.float64
DIMENSION = 40  # of the space, where vectors are long
SIMPLE = SYMMETRIC | REPEATED_ELSEWHERE


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def weights(x):
    return torch.cos(torch.arange(x.numel(), dtype=x.dtype)).reshape(x.shape)


def eigen(A, leaf, **options):
    solution = pmaf.solve(pmaf.PrincipalEigenvectors(A, **options))
    loss = (weights(solution.value) * solution.value).sum() + solution.multiplier.sin().sum()
    return solution, torch.autograd.grad(loss, leaf)[0]


def ladder(n, low=0.0, high=1.0, top=1.2):
    """Evenly spaced eigenvalues, and one above."""
    return torch.cat([torch.linspace(low, high, n - 1, dtype=F64), torch.tensor([top], dtype=F64)])


@pytest.mark.parametrize("options", [dict(), dict(k=2), dict(largest=False)], ids=str)
@pytest.mark.parametrize("name", SIMPLE)
def test_every_family_equals_the_dense_solve(name, options):
    A = SIMPLE[name]()
    if options.get("k", 1) > len(A):
        pytest.skip("the matrix is too small for so many vectors")
    dense = A.clone().requires_grad_()
    wanted, exact = eigen(dense, dense, **options)
    size = float(torch.linalg.matrix_norm(A, 2))
    if float(wanted.gap) < 1e-9 * size:
        pytest.skip("the eigenvalues asked for are not simple")
    leaf = A.clone().requires_grad_()
    found, gradient = eigen(Matrix(leaf), leaf, **options)
    relative_gap = float(wanted.gap) / size if math.isfinite(float(wanted.gap)) else 1.0
    digits = 1e-13 / relative_gap
    assert found.converged
    assert found.backward is not None
    assert found.backward.converged is not None
    assert found.backward.converged.all()
    torch.testing.assert_close(found.multiplier, wanted.multiplier, rtol=0, atol=1e-14 * size)
    torch.testing.assert_close(found.value, wanted.value, rtol=0, atol=digits)
    scale = float(exact.abs().max())
    torch.testing.assert_close(gradient, exact, rtol=0, atol=10 * digits * scale)
    assert pmaf.certify(pmaf.PrincipalEigenvectors(Matrix(A), **options), found).holds(1e-12).all()


@pytest.mark.parametrize("name", NONSYMMETRIC)
def test_every_nonsymmetric_family_equals_the_dense_solve(name):
    A = NONSYMMETRIC[name]()
    dense, leaf = A.clone().requires_grad_(), A.clone().requires_grad_()
    wanted, exact = eigen(dense, dense, symmetric=False)
    found, gradient = eigen(Matrix(leaf), leaf, symmetric=False)
    assert found.converged
    for x, y in (
        (found.multiplier, wanted.multiplier),
        (found.value, wanted.value),
        (found.gap, wanted.gap),
        (gradient, exact),
    ):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)
    problem = pmaf.PrincipalEigenvectors(Matrix(A), symmetric=False)
    assert pmaf.certify(problem, found).holds(1e-10)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("name", REPEATED_TOP)
def test_repeated_eigenvalues_are_found_with_their_multiplicity(name, k):
    A = REPEATED_TOP[name]().requires_grad_()
    solution = pmaf.solve(pmaf.PrincipalEigenvectors(Matrix(A), k))
    exact = torch.linalg.eigvalsh(A.detach()).flip(-1)[:k]
    torch.testing.assert_close(solution.multiplier.detach(), exact, rtol=1e-14, atol=1e-14)
    # Of several vectors none is preferred: the gradient is finite, and where some of them are
    # not among those found, it is warned of.
    missing = int((torch.linalg.eigvalsh(A.detach()) > exact[-1] - 1e-9).sum()) > k
    loss = (weights(solution.value) * solution.value).sum()
    with pytest.warns(pmaf.ConvergenceWarning, match="nearly not") if missing else nullcontext():
        (gradient,) = torch.autograd.grad(loss, A)
    assert solution.gap < 1e-13
    assert torch.isfinite(gradient).all()
    assert float(gradient.abs().max()) < 1e3


def test_multiplicity_beyond_the_size_of_the_space():
    values = torch.cat([torch.tensor([3.0, 3.0, 3.0, 2.0]), torch.linspace(0, 1, 400)]).double()
    found = pmaf.ied(Diagonal(values), k=4).values
    torch.testing.assert_close(found, values[:4], rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", REGULAR | DEGENERATE)
def test_every_least_squares_family_reaches_the_dense_minimum(name):
    A, b = (REGULAR | DEGENERATE)[name]()
    dense, operator = pmaf.SphereLeastSquares(A, b), pmaf.SphereLeastSquares(Matrix(A), b)
    wanted, found = pmaf.solve(dense), pmaf.solve(operator)
    assert found.converged
    for x, y in (
        (dense.objective(found.value), dense.objective(wanted.value)),
        (found.multiplier, wanted.multiplier),
    ):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)
    # Where μ ≥ 0 proves it, the gap is known from below.
    assert -1e-13 <= found.gap <= wanted.gap + 1e-12
    assert pmaf.certify(operator, found).holds(1e-12)
    assert pmaf.certify(dense, found).holds(1e-12)


@pytest.mark.parametrize("solver", [Krylov(), Krylov(DIMENSION)], ids=["", "small space"])
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_a_bottom_that_b_does_not_show(dtype, solver):
    """The hard case where the space is not the whole: Aᵀb and its images are zero along it."""
    s = torch.cat([torch.tensor([0.5]), torch.linspace(1, 2, 599)]).to(dtype)
    b = 0.5 * torch.nn.functional.normalize(randn(600).to(dtype), dim=0)
    b[0] = 0
    problem = pmaf.SphereLeastSquares(Diagonal(s), b)
    solution = pmaf.solve(problem, solver=solver)
    rest = s[1:] * b[1:] / (s[1:] ** 2 - 0.25)
    eps = torch.finfo(dtype).eps
    assert solution.converged
    assert float(solution.multiplier) == pytest.approx(-0.25, rel=100 * eps)
    assert float(solution.gap) == pytest.approx(0, abs=100 * eps)
    torch.testing.assert_close(solution.value[1:], rest, rtol=0, atol=100 * eps)
    assert float(solution.value[0].abs()) == pytest.approx(
        float((1 - rest.double().square().sum()).sqrt()), rel=100 * eps
    )


@pytest.mark.parametrize("name", REGULAR)
def test_every_regular_least_squares_family_has_the_dense_gradient(name):
    results = []
    for wrap in (lambda A: A, Matrix):
        A, b = (x.requires_grad_() for x in REGULAR[name]())
        u = pmaf.less(wrap(A), b, radius=0.8)
        results.append((u.detach(), *torch.autograd.grad((weights(u) * u).sum(), (A, b))))
    for x, y in zip(*results):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["b = 0", "hard case", "wide inner, one dimension free"])
def test_gradients_where_the_hessian_is_singular_but_the_minimum_is_not_flat(name):
    results = []
    for wrap in (lambda A: A, Matrix):
        A, b = (x.requires_grad_() for x in DEGENERATE[name]())
        u = pmaf.less(wrap(A), b)
        results.append((u.detach(), *torch.autograd.grad((weights(u) * u).sum(), (A, b))))
    for x, y in zip(*results):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("options", [dict(), dict(largest=False), dict(k=3)], ids=str)
def test_many_restarts(options, dtype):
    d = ladder(2000, top=1.02)
    d = d if options.get("largest", True) else -d
    leaf = d.to(dtype).requires_grad_()
    found, gradient = eigen(Diagonal(leaf), leaf, **options)
    assert found.iterations > DIMENSION
    eps = torch.finfo(dtype).eps
    assert found.residual < 16 * eps
    order = d.sort(descending=options.get("largest", True)).values[: options.get("k", 1)]
    torch.testing.assert_close(
        found.multiplier.detach().double().reshape(-1), order, rtol=0, atol=32 * eps
    )
    chosen = torch.argsort(d, descending=options.get("largest", True))[: options.get("k", 1)]
    tilted = found.value.detach().double().reshape(len(d), -1)
    tilted[chosen, torch.arange(len(chosen))] = 0
    tilt = float(tilted.norm(dim=0).max())
    gap = float(found.gap)
    # A vector is tilted by at most its residual over the gap (Davis and Kahan).
    assert tilt <= 1.02 * (float(found.residual) + eps) / gap
    # The values of a diagonal matrix depend on their entries, and the vectors not at all on them.
    if dtype == torch.float32 and "k" in options:
        return  # two of them are closer than float32 tells their vectors apart
    # The tilt is multiplied with k adjoint vectors. None is longer than 2 / gap, as the weights
    # are at most one and the distances to the other values at least the multiples of the gap.
    bound = 2 * len(chosen) * (tilt + eps) / gap
    torch.testing.assert_close(gradient[chosen].double(), order.cos(), rtol=0, atol=bound)


@pytest.mark.parametrize("length", [0.3, 1.5], ids=["inner", "outer"])
def test_least_squares_with_many_restarts(length):
    left, right = (torch.linalg.qr(randn(n, 200, seed=n))[0] for n in (500, 200))
    A = left * torch.logspace(-2, 0, 200, dtype=F64) @ right.T
    b = A @ (length * right.sum(-1) / 200**0.5)
    results = []
    for wrap in (lambda A: A, Matrix):
        a = A.clone().requires_grad_()
        solver = Auto() if wrap is not Matrix else Krylov(DIMENSION)
        solution = pmaf.solve(pmaf.SphereLeastSquares(wrap(a), b), solver=solver)
        loss = (weights(solution.value) * solution.value).sum()
        results.append((solution.value.detach(), *torch.autograd.grad(loss, a)))
        assert solution.converged
    assert int(solution.iterations) > DIMENSION
    for x, y in zip(*results):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-9 * float(y.abs().max()))


@pytest.mark.parametrize("power", [-150, -20, 20, 150])
def test_scale_does_not_matter(power):
    c = 2.0**power
    A, y = randn(30, 30), pmaf.ied(Matrix(randn(30, 30))).vectors
    values, vectors = pmaf.ied(Matrix(c * A))
    torch.testing.assert_close(vectors, y, rtol=0, atol=1e-12)
    torch.testing.assert_close(values / c, pmaf.ied(A).values, rtol=1e-13, atol=0)
    b = randn(30, seed=1)
    torch.testing.assert_close(pmaf.less(Matrix(c * A), c * b), pmaf.less(A, b), rtol=0, atol=1e-10)


def test_entries_whose_squares_leave_the_range_of_float32():
    d = torch.linspace(0.5, 1, 50)
    d[7] = 1.5
    for c in (1e-30, 1e30):
        values, vectors = pmaf.ied(Diagonal(c * d))
        assert float(values) == pytest.approx(1.5 * c, rel=1e-6)
        assert float(vectors[7]) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("c", [1e-34, 1e-30, 1e-22, 1e-18, 1e-10, 1e10, 1e17])
@pytest.mark.parametrize(
    "make",
    [
        Gram,
        lambda X: Gram(X, scale=0.3),
        lambda X: 2.0 * Gram(X) + 0.5 * Gram(X[:7]),
        lambda X: Gram(Matrix(X) - LowRank(torch.ones_like(X[:, :1]).mT, X.mean(0, keepdim=True))),
    ],
    ids=["", "scaled", "sum", "centred"],
)
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("largest", [True, False])
def test_squares_that_leave_the_range_of_float32(make, k, largest, c):
    """The value may be zero then; the vectors and their gradients do not depend on it."""
    X = randn(20, 8)
    found = []
    for data in ((c * X).float(), X):
        leaf = data.clone().requires_grad_()
        problem = pmaf.PrincipalEigenvectors(make(leaf), k, largest)
        solution = pmaf.solve(problem)
        assert solution.converged
        (solution.value * weights(solution.value)).sum().backward()
        found.append((solution.value.detach().double(), leaf.grad.double()))
    size = problem.A.matvec(X[:1] / X[:1].norm()).detach().norm()
    gap = float(solution.gap / size)
    eps = torch.finfo(torch.float32).eps
    atol = 100 * eps / min(gap, 1)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=atol)
    wanted = found[1][1] / c
    if float(wanted.abs().max()) < torch.finfo(torch.float32).max:
        scale = float(wanted.abs().max())
        torch.testing.assert_close(found[0][1], wanted, rtol=0, atol=10 * atol * scale)


def test_every_entry_of_a_batch_has_its_own_unit():
    X = randn(3, 20, 8)
    c = torch.tensor([1e-30, 1.0, 1e15], dtype=F64)[:, None, None]
    found = pmaf.solve(pmaf.PrincipalEigenvectors(Gram((c * X).float())))
    assert found.converged.all()
    torch.testing.assert_close(found.value.double(), pmaf.ied(X.mT @ X).vectors, rtol=0, atol=1e-4)


@pytest.mark.parametrize("c", [1e25, 1e20, 1e-20, 1e-30])
@pytest.mark.parametrize("shape", [(20, 8), (8, 20), (400, 300)], ids=repr)
def test_least_squares_at_any_scale(shape, c):
    """`AᵀA` leaves the range, `A` does not."""
    X, b = randn(*shape).float(), 3 * randn(shape[0], seed=1).float()

    def solved(c):
        leaves = (c * X).requires_grad_(), (c * b).requires_grad_()
        solution = pmaf.solve(pmaf.SphereLeastSquares(Matrix(leaves[0]), leaves[1]))
        assert solution.converged
        weights = torch.cos(torch.arange(shape[1]) + 1.0)
        gradients = torch.autograd.grad((solution.value * weights).sum(), leaves)
        return solution.value.detach(), *(c * x for x in gradients)

    eps = torch.finfo(torch.float32).eps
    for x, y in zip(solved(c), solved(1.0)):
        assert float((x - y).norm() / y.norm()) <= 1e3 * eps


def test_what_leaves_the_range_altogether_is_an_error_that_says_what_to_do():
    X, b = randn(20, 8).float(), randn(20, seed=1).float()
    with pytest.raises(ValueError, match=r"overflows torch.float32, scale down"):
        pmaf.ied(Gram(1e25 * X))
    zero = pmaf.solve(pmaf.SphereLeastSquares(Matrix(0 * X), 0 * b))
    assert float(zero.value.norm()) == pytest.approx(1)


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("largest", [True, False])
def test_gradients_of_what_happens_inside_the_span(k, largest):
    """A loss that turns the vectors among themselves, beside finite differences."""
    A, W = randn(12, 12), randn(k, k, seed=1)
    reference = pmaf.ied(A, k, largest=largest).vectors

    def loss(A):
        y = pmaf.ied(A, k, largest=largest, reference=reference).vectors
        return (W * (reference.mT @ y)).sum()

    leaf = A.clone().requires_grad_()
    y = pmaf.ied(Matrix(leaf), k, largest=largest, reference=reference).vectors
    (W * (reference.mT @ y)).sum().backward()
    wanted = differences(loss, A)
    torch.testing.assert_close(leaf.grad, wanted, rtol=0, atol=1e-7 * float(wanted.abs().max()))


def test_eigenvalues_closer_than_rounding_of_the_largest_count_as_one():
    """Of a matrix of size 1e6 two small eigenvalues that differ by 1e-12 have no vectors."""
    d = torch.cat([torch.tensor([1.0, 1 + 1e-12]), torch.linspace(2e5, 1e6, 30)]).double()
    A = torch.diag(d).requires_grad_()
    y = pmaf.ied(Matrix(A), 2, largest=False).vectors
    (randn(32, 2) * y).sum().backward()
    assert float(A.grad.abs().max()) < 1e3


@pytest.mark.parametrize("v_scale", [1e-25, 1.0, 1e20])
@pytest.mark.parametrize("scale", [1e-14, 1e-11, 1.0, 1e8])
def test_gradients_in_float32_at_any_scale(scale, v_scale):
    X, v = randn(20, 8, dtype=torch.float32), randn(8, seed=1, dtype=torch.float32)
    b = randn(20, seed=2, dtype=torch.float32)

    def of(X, solve):
        X = X.clone().requires_grad_()
        return torch.autograd.grad((v_scale * v.to(X) * solve(X)).sum(), X)[0].double()

    for small, exact in (
        (lambda X: pmaf.ied(Gram(X)).vectors, lambda X: pmaf.ied(X.mT @ X).vectors),
        (lambda X: pmaf.less(Matrix(X), scale * b), lambda X: pmaf.less(X, b.double())),
        (
            lambda X: pmaf.ied(Matrix(X[:8].abs()), symmetric=False).vectors,
            lambda X: pmaf.ied(X[:8].abs(), symmetric=False).vectors,
        ),
    ):
        wanted = of(X.double(), exact) / scale
        if not 1e-30 < v_scale / scale**2 < 1e30:
            continue  # the solution of the linear system has no float32
        torch.testing.assert_close(
            of(scale * X, small), wanted, rtol=0, atol=1e-4 * float(wanted.abs().max())
        )


@pytest.mark.parametrize("length", [10**5, 10**6])
def test_a_million_numbers_in_float32(length):
    d = torch.linspace(0, 1, length)
    d[3] = 1.3
    solution = pmaf.solve(pmaf.PrincipalEigenvectors(Diagonal(d)))
    assert solution.converged
    assert abs(float(torch.linalg.vector_norm(solution.value.double())) - 1) < 1e-6
    assert float(solution.multiplier) == pytest.approx(1.3, rel=1e-6)
    residual = (d.double() - float(solution.multiplier)) * solution.value.double()
    assert float(torch.linalg.vector_norm(residual)) < 4e-6


class TestWarmStarts:
    problem = pmaf.PrincipalEigenvectors(Diagonal(ladder(3000)))

    def test_a_solution_nearby_saves_products(self):
        cold = pmaf.solve(self.problem)
        nearby = cold.value + 1e-3 * randn(3000) / 3000**0.5
        warm = pmaf.solve(self.problem, init=nearby)
        assert warm.converged
        assert int(warm.iterations) <= 0.9 * int(cold.iterations)
        torch.testing.assert_close(warm.value, cold.value, rtol=0, atol=1e-11)

    def test_so_does_one_through_the_function_and_the_module(self):
        y = pmaf.ied(self.problem.A, init=self.problem.A.d).vectors
        for found in (
            pmaf.ied(self.problem.A, init=y),
            pmaf.IED()(self.problem.A, init=y),
        ):
            torch.testing.assert_close(found.vectors, y, rtol=0, atol=1e-11)

    @pytest.mark.parametrize("k", [1, 2])
    @pytest.mark.parametrize(
        ("dtype", "gap"), [(torch.float32, 1e-2), (torch.float32, 3e-4), (F64, 1e-9)], ids=str
    )
    @pytest.mark.parametrize("n", [50, 3000, 100_000])
    def test_a_vector_that_has_been_overtaken_is_left(self, n, dtype, gap, k):
        """Its residual is zero, and the new top vector next to orthogonal to any start."""
        d = torch.linspace(0, 0.9, n, dtype=dtype)
        d[-2:] = torch.tensor([1.0, 1 + gap], dtype=dtype)
        init = torch.zeros(n, k, dtype=dtype)
        init[-2, 0] = init[4, -1] = 1
        found = pmaf.ied(Diagonal(d), k, init=init)
        assert float(found.vectors[-1, 0].abs()) > 0.9

    @pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
    @pytest.mark.parametrize("start", [0, 5, -2], ids=["lowest", "inside", "second"])
    def test_an_eigenvector_that_is_not_the_top_one_is_left_again(self, start, dtype):
        A = Diagonal(ladder(3000).to(dtype))
        init = torch.zeros(3000, dtype=dtype)
        init[start] = 1
        found = pmaf.solve(pmaf.PrincipalEigenvectors(A), init=init)
        assert found.converged
        # There is a value of a symmetric matrix as near as the residual, which itself is rounded.
        bound = float(found.residual) + 2 * torch.finfo(dtype).eps
        assert float(found.multiplier) == pytest.approx(1.2, rel=bound)

    @pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("gap", [1e-2, 1e-3, -2.01], ids=["near", "nearer", "negative"])
    def test_whatever_place_it_has_a_vector_that_has_been_overtaken_is_left(
        self, gap, symmetric, dtype
    ):
        """In hundreds of places: the part of a fixed start along the new one is small in some.

        One by one, since a batch goes on until the last entry is done.
        """
        n = 1000
        generator = torch.Generator().manual_seed(0)
        eps = torch.finfo(dtype).eps
        for i in range(200 if dtype == torch.float32 and not symmetric else 40):
            d = 0.9 * torch.rand(n, generator=generator, dtype=F64)
            old, new = torch.randperm(n, generator=generator)[:2]
            d[old], d[new] = 1, 1 + gap
            init = torch.zeros(n, dtype=dtype)
            init[old] = 1
            A = Diagonal(d.to(dtype) if gap > 0 or not symmetric else -d.to(dtype))
            found = pmaf.solve(pmaf.PrincipalEigenvectors(A, symmetric=symmetric), init=init)
            assert found.converged, i
            assert float(found.multiplier.abs()) == pytest.approx(abs(1 + gap), rel=32 * eps), i

    @pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
    def test_so_is_one_among_complex_eigenvalues(self, dtype):
        """They fill a disk, where powers of a matrix tell eigenvalues apart slowly."""
        pairs, B = 150, 16
        generator = torch.Generator().manual_seed(1)
        angle = math.pi * torch.rand(B, pairs, generator=generator, dtype=F64)
        radius = 0.9 * torch.rand(B, pairs, generator=generator, dtype=F64).sqrt()
        x, y = radius * angle.cos(), radius * angle.sin()
        entry = torch.arange(B)
        scale = torch.ones(B, pairs, 2, dtype=F64)
        init = torch.zeros(B, pairs, 2, dtype=dtype)
        for place, value in ((entry, 1.01), (entry + 7, 1.0)):
            x[entry, place], y[entry, place], scale[entry, place, 1] = value, 0, 0.5
        init[entry, entry + 7, 0] = 1
        x, y, scale = (z.to(dtype) for z in (x, y, scale))

        def matvec(u):
            a, b = u.reshape(B, pairs, 2).unbind(-1)
            return (scale * torch.stack([x * a - y * b, y * a + x * b], -1)).reshape(u.shape)

        A = FromMatvec(matvec, (B, 2 * pairs, 2 * pairs), dtype=dtype)
        problem = pmaf.PrincipalEigenvectors(A, symmetric=False)
        found = pmaf.solve(problem, init=init.reshape(B, -1))
        assert found.converged.all()
        wanted = torch.full((B,), 1.01, dtype=dtype)
        rtol = 32 * torch.finfo(dtype).eps
        torch.testing.assert_close(found.multiplier, wanted, rtol=rtol, atol=0)

    @pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
    def test_a_space_that_is_everything_has_converged(self, dtype):
        """What is left of a residual there is rounding, which may be above the tolerance."""
        generator = torch.Generator().manual_seed(0)
        d = 0.9 * torch.rand(200, 50, generator=generator, dtype=F64).to(dtype)
        d[:, 7], d[:, 20] = 1, 1.001
        assert pmaf.solve(pmaf.PrincipalEigenvectors(Diagonal(d), symmetric=False)).converged.all()

    def test_several_vectors(self):
        A = Diagonal(ladder(3000))
        cold = pmaf.solve(pmaf.PrincipalEigenvectors(A, 3))
        warm = pmaf.solve(pmaf.PrincipalEigenvectors(A, 3), init=cold.value)
        assert int(warm.iterations) < int(cold.iterations)
        torch.testing.assert_close(warm.value, cold.value, rtol=0, atol=1e-10)

    def test_zero_is_no_start(self):
        found = pmaf.ied(Diagonal(ladder(50)), init=torch.zeros(50, dtype=F64))
        assert float(found.values) == pytest.approx(1.2)

    def test_least_squares(self):
        A, b = randn(300, 100) * torch.logspace(0, 1, 100, dtype=F64), randn(300, seed=1)
        problem = pmaf.SphereLeastSquares(Matrix(A), 100 * b)
        cold = pmaf.solve(problem)
        warm = pmaf.solve(problem, init=cold.value + 1e-6 * randn(100))
        assert int(warm.iterations) < int(cold.iterations)
        torch.testing.assert_close(warm.value, cold.value, rtol=0, atol=1e-10)

    def test_nonsymmetric(self):
        A = Matrix(randn(400, 400).abs() + torch.diag(200 * torch.rand(400, dtype=F64)))
        problem = pmaf.PrincipalEigenvectors(A, symmetric=False)
        cold = pmaf.solve(problem)
        warm = pmaf.solve(problem, init=cold.value)
        assert int(warm.iterations) <= int(cold.iterations)
        torch.testing.assert_close(warm.value, cold.value, rtol=0, atol=1e-10)

    def test_a_start_that_is_not_finite_is_refused(self):
        init = torch.full((3000,), torch.nan, dtype=F64)
        with pytest.raises(ValueError, match="init has non-finite"):
            pmaf.ied(self.problem.A, init=init)
        with pytest.raises(ValueError, match="init has non-finite"):
            pmaf.less(Matrix(randn(5, 3)), randn(5), init=torch.full((3,), torch.inf, dtype=F64))


class TestHonesty:
    hard = Diagonal(ladder(3000, top=1.0 + 1e-6))

    def test_a_search_that_ends_early_says_so(self):
        with pytest.warns(pmaf.ConvergenceWarning, match="60 iterations.*max_products"):
            pmaf.ied(self.hard, solver=Krylov(max_products=60))
        with pytest.raises(pmaf.ConvergenceError, match="init"):
            pmaf.solve(
                pmaf.PrincipalEigenvectors(self.hard), solver=Krylov(max_products=60), throw=True
            )

    def test_so_does_least_squares(self):
        A = randn(300, 200) * torch.logspace(0, 3, 200, dtype=F64)
        with pytest.warns(pmaf.ConvergenceWarning, match="did not converge"):
            pmaf.less(Matrix(A), randn(300, seed=1), solver=Krylov(max_products=20))

    def test_a_backward_that_ends_early_says_so(self):
        d = ladder(3000, top=1.005).requires_grad_()
        problem = pmaf.PrincipalEigenvectors(Diagonal(d))
        solution = pmaf.solve(problem, solver=Krylov(max_products=75, tolerance=1e-4))
        assert solution.backward.residual is None  # it has not run yet
        with pytest.warns(pmaf.ConvergenceWarning, match="linear system of the gradient"):
            (weights(solution.value) * solution.value).sum().backward()
        assert not solution.backward.converged.all()
        assert solution.backward.iterations >= 75
        assert float(solution.backward.residual) > 1e-12

    def test_a_tolerance_is_kept(self):
        d = ladder(3000)
        rough = pmaf.solve(pmaf.PrincipalEigenvectors(Diagonal(d)), solver=Krylov(tolerance=1e-4))
        fine = pmaf.solve(pmaf.PrincipalEigenvectors(Diagonal(d)))
        assert rough.residual <= 1e-4
        assert int(rough.iterations) < int(fine.iterations)

    def test_a_complex_dominant_pair_is_not_called_converged(self):
        turn = torch.tensor([[0.0, -2.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 1.0]], dtype=F64)
        with pytest.warns(pmaf.ConvergenceWarning, match="did not converge"):
            pmaf.ied(Matrix(turn), symmetric=False)

    @pytest.mark.parametrize("wrap", [Matrix, lambda A: Sparse(A.to_sparse_coo())], ids=["", "COO"])
    def test_two_with_one_modulus_are_not_called_dominant(self, wrap):
        """Of a bipartite graph; the positive one is returned nevertheless."""
        A = torch.tensor([[0.0, 1.0], [2.0, 0.0]], dtype=F64)
        with pytest.warns(pmaf.ConvergenceWarning):
            solution = pmaf.solve(pmaf.PrincipalEigenvectors(wrap(A), symmetric=False))
        assert not solution.converged
        assert float(solution.multiplier) == pytest.approx(2**0.5)

    def test_products_that_are_worth_less_than_the_tolerance_do_not_converge(self):
        M = randn(600, 600, dtype=torch.float32) / 600**0.5
        M = M + M.mT + 0.01
        A = FromMatvec(lambda u: (u @ M).half().float(), (600, 600), rmatvec=lambda u: u @ M)
        with pytest.warns(pmaf.ConvergenceWarning, match="what the products are worth"):
            solution = pmaf.solve(pmaf.PrincipalEigenvectors(A))
        assert not solution.converged
        rough = pmaf.solve(pmaf.PrincipalEigenvectors(A), solver=Krylov(tolerance=1e-3))
        assert rough.converged

    def test_ordinary_data_converge(self):
        for seed in range(6):
            X = randn(600, 300, seed=seed)
            for k in (1, 3):
                for data in (X, X.float()):
                    problem = pmaf.PrincipalEigenvectors(Gram(data), k)
                    assert pmaf.solve(problem, throw=True).converged

    def test_a_search_keeps_to_its_products(self):
        A = randn(600, 400) * torch.logspace(-3, 0, 400, dtype=F64)
        with pytest.warns(pmaf.ConvergenceWarning):
            solution = pmaf.solve(
                pmaf.SphereLeastSquares(Matrix(A), 1e-3 * randn(600, seed=1)),
                solver=Krylov(max_products=300),
            )
        assert int(solution.iterations) < 300 + 2 * 400  # the last step may be a Newton step

    def test_a_certificate_sees_a_complex_pair(self):
        turn = torch.tensor([[0.0, -2.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 1.0]], dtype=F64)
        problem = pmaf.PrincipalEigenvectors(Matrix(turn), symmetric=False)
        assert not pmaf.certify(problem, torch.tensor([0.0, 0.0, 1.0], dtype=F64)).holds(1e-6)

    @pytest.mark.parametrize("c", [1e-25, 1.0, 1e25])
    def test_a_certificate_is_in_no_unit(self, c):
        d = ladder(20).float()
        off = torch.nn.functional.normalize(torch.ones(20), dim=0)
        found = [pmaf.certify(pmaf.PrincipalEigenvectors(Diagonal(x * d)), off) for x in (c, 1.0)]
        torch.testing.assert_close(found[0].stationarity, found[1].stationarity)
        torch.testing.assert_close(found[0].optimality, found[1].optimality)

    def test_a_certificate_of_nothing(self):
        problem = pmaf.PrincipalEigenvectors(Diagonal(ladder(20)))
        assert not pmaf.certify(problem, torch.zeros(20, dtype=F64)).holds(1e-6)

    def test_a_certificate_sees_what_is_not_the_largest(self):
        problem = pmaf.PrincipalEigenvectors(Diagonal(ladder(100)))
        second = torch.zeros(100, dtype=F64)
        second[-2] = 1
        found = pmaf.certify(problem, second)
        assert found.stationarity < 1e-15
        assert found.optimality == pytest.approx(-0.2 / 1.2)
        assert not found.holds(1e-6)
        tilted = torch.nn.functional.normalize(pmaf.ied(problem.A).vectors + 0.01 * second, dim=0)
        assert not pmaf.certify(problem, tilted).holds(1e-6)
        assert not pmaf.certify(problem, 2 * pmaf.ied(problem.A).vectors).holds(1e-6)

    def test_a_certificate_of_the_smallest(self):
        problem = pmaf.PrincipalEigenvectors(Diagonal(ladder(100)), largest=False)
        assert pmaf.certify(problem, pmaf.solve(problem)).holds(1e-12)

    def test_a_certificate_sees_a_local_minimum_of_least_squares(self):
        A, b = torch.diag(torch.tensor([2.0, 1.0])).double(), torch.tensor([0.0, 0.5]).double()
        problem = pmaf.SphereLeastSquares(Matrix(A), b)
        assert pmaf.certify(problem, pmaf.solve(problem)).holds(1e-12)
        other = pmaf.certify(problem, torch.tensor([0.0, -1.0], dtype=F64))
        assert other.stationarity < 1e-15
        assert other.optimality < -0.1


def test_nothing_of_the_size_of_the_matrix_is_ever_held():
    n = 20_000
    X = randn(5, n, dtype=torch.float32).requires_grad_()
    device = torch.device("cpu")
    outputs = []
    forward = peak_bytes(lambda: outputs.append(pmaf.ied(Gram(X)).vectors.sum()), device)
    backward = peak_bytes(lambda: outputs.pop().backward(), device)
    vector = 4 * n
    assert forward < 3 * DIMENSION * vector
    assert backward < 3 * DIMENSION * vector  # of n²: one part in 80


def test_a_batch_is_solved_as_its_entries_are():
    X = randn(4, 25, 60)
    together = pmaf.ied(Gram(X), k=2)
    for i in range(4):
        alone = pmaf.ied(Gram(X[i]), k=2)
        torch.testing.assert_close(together.values[i], alone.values, rtol=1e-13, atol=0)
        torch.testing.assert_close(together.vectors[i], alone.vectors, rtol=0, atol=1e-11)


def test_the_same_input_gives_the_same_output():
    X = randn(25, 60)
    for x, y in zip(pmaf.ied(Gram(X)), pmaf.ied(Gram(X))):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_short_floats_are_computed_in_float32(dtype):
    X = randn(25, 10).to(dtype).requires_grad_()
    values, vectors = pmaf.ied(Gram(X))
    assert values.dtype == vectors.dtype == dtype
    vectors.sum().backward()
    exact = X.detach().float().requires_grad_()
    pmaf.ied(Gram(exact)).vectors.sum().backward()
    assert X.grad.dtype == dtype
    torch.testing.assert_close(X.grad, exact.grad.to(dtype))
    assert pmaf.less(Matrix(X), torch.ones(25, dtype=dtype)).dtype == dtype
    warm = pmaf.ied(Gram(X), init=vectors.detach()).vectors
    torch.testing.assert_close(warm, vectors.detach())


def test_autocast_does_not_reach_the_products():
    X = randn(25, 10, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        vectors = pmaf.ied(Gram(X)).vectors
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors, pmaf.ied(X.mT @ X).vectors, rtol=0, atol=1e-5)


def test_references_turn_vectors_and_orders_flip():
    X = randn(25, 10)
    y = pmaf.ied(Gram(X)).vectors
    torch.testing.assert_close(pmaf.ied(Gram(X), reference=-y).vectors, -y, rtol=0, atol=1e-12)
    down, up = (pmaf.ied(Gram(X), k=3, descending=order) for order in (True, False))
    torch.testing.assert_close(down.values.flip(-1), up.values)
    torch.testing.assert_close(down.vectors.flip(-1), up.vectors)


def test_a_generator_draws_the_start():
    A = Diagonal(ladder(300))
    found = pmaf.ied(A, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(found.vectors.abs(), pmaf.ied(A).vectors.abs(), rtol=0, atol=1e-11)


def test_lanczos_is_the_search_with_blocks():
    """Rows beyond the one requested pull its neighbours away from it, and need not converge."""
    close = [1.0, 0.999, 0.998]
    A = with_eigenvalues([*close, *torch.linspace(0.89, -1, 397).tolist()])
    problem = pmaf.PrincipalEigenvectors(A)
    found = [pmaf.solve(problem, solver=Lanczos(depth=6, extra=extra)) for extra in (0, 4)]
    for solution in found:
        assert solution.converged
        assert abs(float(solution.multiplier) - 1) <= 64 * torch.finfo(F64).eps
    narrow, wide = (int(solution.iterations) for solution in found)
    assert wide < 0.75 * narrow


def test_a_dense_matrix_may_ask_for_it():
    A = randn(50, 50)
    for x, y in zip(pmaf.ied(A, solver=Krylov()), pmaf.ied(A)):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    b = randn(3, 50, seed=1)
    torch.testing.assert_close(pmaf.less(A, b, solver=Krylov()), pmaf.less(A, b), rtol=0, atol=1e-9)


def test_a_compiled_model_goes_on_around_it():
    class Model(nn.Module):
        def forward(self, X):
            return pmaf.ied(Gram(2 * X)).vectors.square()

    X = randn(25, 10)
    compiled = torch.compile(Model(), backend="aot_eager")
    torch.testing.assert_close(compiled(X), Model()(X))


def test_training_through_a_sparse_graph():
    """Edge weights learn to put a node at the centre, from one warm start to the next."""
    index = torch.randint(0, 200, (2, 1000), generator=torch.Generator().manual_seed(0))
    index = torch.cat([index, index.flip(0)], 1)
    free = torch.zeros(1000, dtype=F64, requires_grad=True)
    optimiser = torch.optim.Adam([free], lr=0.1)
    y, first = None, 0.0
    for step in range(15):
        values = torch.nn.functional.softplus(free).repeat(2)
        A = torch.sparse_coo_tensor(index, values, (200, 200), check_invariants=True)
        y = pmaf.ied(A, init=None if y is None else y.detach()).vectors
        loss = -y[17].abs()
        first = float(loss.detach()) if step == 0 else first
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < 3 * first


def test_a_solution_may_be_written_to():
    u = pmaf.less(Matrix(randn(5, 3).requires_grad_()), randn(5))
    u.mul_(2).sum().backward()


def test_deflation_finds_the_next():
    X = randn(40, 12)
    values, vectors = pmaf.ied(X.mT @ X, k=2)
    y = vectors[:, :1].mT
    found = pmaf.ied(Gram(X) - float(values[0]) * LowRank(y, y))
    torch.testing.assert_close(found.values, values[1])
    torch.testing.assert_close(found.vectors.abs(), vectors[:, 1].abs())


def test_the_smallest_eigenvector_of_a_graph_is_constant():
    mask = (torch.rand(60, 60, generator=torch.Generator().manual_seed(0)) < 0.2).double()
    mask = torch.triu(mask, 1) + torch.triu(mask, 1).mT
    laplacian = Diagonal(mask.sum(-1)) - Sparse(mask.to_sparse_coo())
    values, vectors = pmaf.ied(laplacian, k=2, largest=False)
    torch.testing.assert_close(values[0], torch.tensor(0.0, dtype=F64), rtol=0, atol=1e-13)
    torch.testing.assert_close(vectors[:, 0], torch.full((60,), 60**-0.5, dtype=F64))
    assert values[1] > 0.1


def test_a_start_breaks_the_tie_of_two_minimisers():
    A, left, right = with_singular_values([3.0, 2.0, 1.0], 5)
    b, lowest = left[:, 0] + 0.5 * left[:, 1], right[:, 2]
    for sign in (1.0, -1.0):
        u = pmaf.less(Matrix(A), b, init=sign * lowest + 0.1 * right[:, 0])
        height = (1 - (3 / 8) ** 2 - (1 / 3) ** 2) ** 0.5
        # The height is the root of what the others leave, each of them known to rounding.
        assert float(u @ lowest) == pytest.approx(sign * height, abs=1e3 * torch.finfo(F64).eps)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("c", [1e-25, 2e-25, 1.0, 1e25, 2e25])
def test_gradients_of_values_have_no_unit(c, symmetric):
    """Of a symmetric matrix the gradient is yyᵀ, else with the left eigenvector in it."""
    X = randn(30, 30).abs().float()
    A = (c * X).requires_grad_()
    value, _ = pmaf.ied(Matrix(A), symmetric=symmetric)
    (found,) = torch.autograd.grad(value, A)
    exact = X.double()
    exact = 0.5 * (exact + exact.mT) if symmetric else exact
    pairs = [torch.linalg.eig(M) for M in (exact, exact.mT)]
    y, left = (vectors[:, values.abs().argmax()].real for values, vectors in pairs)
    expected = torch.outer(left, y) / (left @ y)
    exact_value = float(pairs[0].eigenvalues.abs().max())
    assert float(value.detach()) / c == pytest.approx(exact_value, rel=1e-5)
    # One eigenvalue is ten times the next: rounding is hardly magnified.
    assert float((found - expected).norm()) <= 1e2 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("n", [50, 1500])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_space_that_is_invariant_from_the_first_product_on(n, symmetric):
    """Of −2I nothing is left beside the start but rounding, which is no direction."""
    A = Diagonal(torch.full((n,), -2.0, dtype=F64))
    if symmetric:
        values, vectors = pmaf.ied(A, 3)
        torch.testing.assert_close(values, torch.full((3,), -2.0, dtype=F64))
        torch.testing.assert_close(vectors.mT @ vectors, torch.eye(3, dtype=F64))
    else:
        with pytest.warns(pmaf.ConvergenceWarning):  # it is not simple
            assert float(pmaf.ied(A, symmetric=False).values) == pytest.approx(-2)


def test_a_gradient_of_no_digits_says_so():
    """Its system is solved to rounding, which the inverse of the gap makes a tenth of it."""
    eps = torch.finfo(torch.float32).eps
    d = torch.linspace(0, 0.9, 50)
    d[[3, 20]] = torch.tensor([1.0, 1 - 16 * eps])
    d.requires_grad_()
    solution = pmaf.solve(pmaf.PrincipalEigenvectors(Diagonal(d)))
    with pytest.warns(pmaf.ConvergenceWarning, match="linear system of the gradient"):
        (weights(solution.value) * solution.value).sum().backward()
    assert not solution.backward.converged


@pytest.mark.parametrize("dimension", [12, 25])
def test_a_start_of_several_vectors_in_a_space_that_their_number_does_not_divide(dimension):
    A = torch.randn(40, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    problem = pmaf.PrincipalEigenvectors(pmaf.operators.Matrix(A), 3)
    solver = Krylov(dimension=dimension)
    cold = pmaf.solve(problem, solver=solver)
    warm = pmaf.solve(problem, solver=solver, init=cold.value)
    assert warm.converged
    torch.testing.assert_close(warm.value, cold.value, rtol=0, atol=1e-9)
