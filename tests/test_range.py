"""Entries, radii and gradients at the ends of the range of a dtype."""

import pytest
import torch

import pmaf
from pmaf.gradients import DDN, IFT, Implicit
from pmaf.solvers import Cholesky, Dense, Lanczos, PowerIteration, Secular

T = torch.float64
SCALES = [
    (torch.float32, scale)
    for scale in (1e15, 1e18, 1e25, 1e37, 1e-15, 1e-18, 1e-25, 1e-30, 1e-36)
] + [(T, scale) for scale in (1e150, 1e300, 1e-150, 1e-300)]  # fmt: skip


def random(*shape, dtype, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=T).to(dtype)


def weights(x):
    return torch.cos(torch.arange(x.numel()) + 1.0).to(x).reshape(x.shape)


def eigen(A, **options):
    A = A.clone().requires_grad_()
    values, vectors = pmaf.ied(A, **options)
    (gradient,) = torch.autograd.grad((vectors * weights(vectors)).sum(), A)
    (of_values,) = torch.autograd.grad(pmaf.ied(A, **options).values.sum(), A)
    return values.detach(), vectors.detach(), gradient, of_values


@pytest.mark.parametrize(("dtype", "scale"), SCALES)
@pytest.mark.parametrize(
    ("n", "options"),
    [
        (5, dict()),
        (5, dict(largest=False)),
        (5, dict(k=3)),
        (5, dict(k=2, largest=False)),
        (5, dict(k=2, solver=Lanczos())),
        (5, dict(solver=PowerIteration(), gradient=IFT())),
        (5, dict(gradient=DDN())),
        (5, dict(symmetric=False)),
        (30, dict(symmetric=False)),
        (40, dict()),
        (120, dict()),
        (300, dict()),
        (300, dict(k=2)),
    ],
    ids=repr,
)
def test_eigenvectors_at_any_scale(n, options, dtype, scale):
    """Everything scales; rounding differs by as much as products in another order."""
    A = random(n, n, dtype=dtype).abs() if options.get("symmetric") is False else (
        random(n, n, dtype=dtype) + torch.diag(torch.linspace(0, 4 * n**0.5, n, dtype=dtype))
    )  # fmt: skip
    A = A / torch.linalg.matrix_norm(A, 2)
    values, vectors, gradient, of_values = eigen(A, **options)
    found = eigen(A * scale, **options)
    exact = torch.linalg.eigvalsh((A + A.mT).double() / 2)
    close = torch.finfo(dtype).eps * 1e3 * float(exact.abs().max() / exact.diff()[[0, -1]].min())
    close = close if options.get("symmetric", True) else 1e4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found[0] / scale, values, rtol=close, atol=0)
    torch.testing.assert_close(found[1], vectors, rtol=0, atol=close)
    if abs(torch.log10(torch.tensor(scale))) < 36:  # beyond, gradients are subnormal
        error = (found[2] * scale - gradient).norm() / gradient.norm()
        assert float(error) <= 10 * close
    torch.testing.assert_close(found[3], of_values, rtol=0, atol=close)


@pytest.mark.parametrize("n", [3, 40, 300])
@pytest.mark.parametrize("options", [dict(), dict(largest=False), dict(k=2)], ids=repr)
def test_after_nan_to_num(options, n):
    """What the error message advises makes entries as large as they can be."""
    A = random(n, n, dtype=torch.float32)
    A[0, 0], A[1, 2] = torch.inf, -torch.inf
    with pytest.raises(ValueError, match="nan_to_num"):
        pmaf.ied(A, **options)
    A = torch.nan_to_num(A)
    found = pmaf.solve(pmaf.PrincipalEigenvectors(A, **options))
    small = pmaf.solve(pmaf.PrincipalEigenvectors(A.double(), **options))
    assert found.converged
    torch.testing.assert_close(found.multiplier, small.multiplier.float(), rtol=1e-5, atol=0)
    first = found.value[..., 0] if "k" in options else found.value
    exact = small.value[..., 0] if "k" in options else small.value
    torch.testing.assert_close(first, exact.float(), rtol=0, atol=1e-5)


def test_an_eigenvalue_that_no_number_can_hold():
    """Three times the largest number: infinite, with the right vector."""
    A = torch.full((3, 3), torch.finfo(torch.float32).max)
    values, vectors = pmaf.ied(A)
    assert torch.isinf(values)
    torch.testing.assert_close(vectors, torch.full((3,), 3**-0.5))


@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize("solver", [None, Dense(), Lanczos()], ids=repr)
@pytest.mark.parametrize("large", [1e8, 1e12])
def test_the_symmetric_part_of_large_skew_entries(large, solver, dtype):
    """`[[1, L + 8], [−L, 2]]` has the symmetric part `[[1, 4], [4, 2]]`."""
    above = torch.tensor(large, dtype=dtype) + (8 if dtype == T or large < 1e9 else 2**17)
    A = torch.tensor([[1, above], [-large, 2]], dtype=dtype)
    half = (float(above) - float(A.new_tensor(large))) / 2
    exact = 1.5 + (0.25 + half**2) ** 0.5
    value = pmaf.ied(A, solver=solver).values
    assert float(value) == pytest.approx(exact, rel=8 * torch.finfo(dtype).eps)


def test_symmetric_part_of_opposite_numbers_does_not_overflow():
    most = torch.finfo(torch.float32).max
    values, vectors = pmaf.ied(torch.tensor([[2.0, most], [-most, 1.0]]))
    assert float(values) == 2.0
    assert vectors.tolist() == [1.0, 0.0]


def least_squares(A, b, radius, solver):
    A, b = A.clone().requires_grad_(), b.clone().requires_grad_()
    u = pmaf.less(A, b, radius=radius, solver=solver)
    return u.detach(), *torch.autograd.grad((u * weights(u)).sum() / radius, (A, b))


@pytest.mark.parametrize(("dtype", "scale"), SCALES)
@pytest.mark.parametrize("solver", [None, Secular(), Cholesky()], ids=repr)
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (60, 40), (9, 60, 40)], ids=repr)
def test_least_squares_at_any_scale(shape, solver, dtype, scale):
    A, b = random(*shape, dtype=dtype), 3 * random(*shape[:-1], dtype=dtype, seed=2)
    expected = least_squares(A, b, 1.0, solver)
    found = least_squares(A * scale, b * scale, 1.0, solver)
    # The worst of these problems has a condition of about a hundred.
    close = 1e4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=close)
    for x, y in zip(found[1:], expected[1:]):
        assert float((x * scale - y).norm() / y.norm()) <= close


@pytest.mark.parametrize("radius", [1e-30, 1e-20, 1e-5, 1e5, 1e20, 1e30])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (60, 40)], ids=repr)
def test_any_radius(shape, radius):
    A, b = random(*shape, dtype=torch.float32), random(*shape[:-1], dtype=torch.float32, seed=2)
    u, dA, db = least_squares(A, b, radius, None)
    exact = least_squares(A.double(), b.double(), radius, None)
    torch.testing.assert_close(u.double() / radius, exact[0] / radius, rtol=0, atol=1e-5)
    for x, y in zip((dA, db), exact[1:]):
        assert float((x - y).norm() / y.norm()) <= 1e-3


def test_a_radius_the_dtype_cannot_hold():
    A, b = random(5, 3, dtype=torch.float32), random(5, dtype=torch.float32)
    for radius in (1e-60, 1e60):
        with pytest.raises(
            ValueError, match=r"radius must be a number that torch.float32 can hold"
        ):
            pmaf.less(A, b, radius=radius)
    assert torch.isfinite(pmaf.less(A.double(), b.double(), radius=1e60)).all()


def test_one_entry_at_the_largest_number():
    """All of `u` goes where `A` is small; the rest of `A` is rounding beside that entry."""
    for dtype in (torch.float32, T):
        A = random(5, 3, dtype=dtype)
        A[1, 1] = torch.finfo(dtype).max
        u = pmaf.less(A, random(5, dtype=dtype, seed=2))
        assert abs(float(u[1])) <= torch.finfo(dtype).eps
        assert float(u.norm()) == pytest.approx(1.0)


@pytest.mark.parametrize("scale", [1e25, 1e-25])
@pytest.mark.parametrize("gradient", [Implicit(), DDN()], ids=repr)
def test_traced_least_squares_at_any_scale(scale, gradient):
    A, b = random(5, 3, dtype=torch.float32), random(5, dtype=torch.float32, seed=2)

    def loss(A, b):
        return (pmaf.less(A, b, gradient=gradient) * weights(A[0])).sum()

    expected = torch.func.grad(loss, (0, 1))(A, b)
    found = torch.func.grad(loss, (0, 1))(A * scale, b * scale)
    for x, y in zip(found, expected):
        assert float((x * scale - y).norm() / y.norm()) <= 1e4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1e25), (torch.float32, 1e-25), (T, 1e200), (T, 1e-200)]
)
@pytest.mark.parametrize(
    "options",
    [dict(k=2), dict(k=2, solver=Lanczos()), dict(solver=PowerIteration()), dict(symmetric=False)],
    ids=repr,
)
def test_traced_eigenvectors_at_any_scale(options, dtype, scale):
    """Units are chosen inside the operator there, and everything has to come back from them."""
    A = random(6, 6, dtype=dtype).abs() + torch.diag(torch.arange(6.0, 0.0, -1.0)).to(dtype)
    solver = options.get("solver")
    names = {name: x for name, x in options.items() if name != "solver"}

    def report(A):
        found = pmaf.solve(pmaf.PrincipalEigenvectors(A, **names), solver=solver)
        return found.value, found.multiplier, found.gap

    def loss(A):
        vectors = pmaf.ied(A, **options).vectors
        return (vectors * weights(vectors)).sum()

    vectors, values, gap = torch.func.vmap(report)((scale * A).unsqueeze(0))
    expected = torch.func.vmap(report)(A.unsqueeze(0))
    close = 1e4 * torch.finfo(dtype).eps
    for x, y in zip((vectors, values / scale, gap / scale), expected):
        torch.testing.assert_close(x, y, rtol=close, atol=close)
    gradient = torch.func.grad(loss)(scale * A) * scale
    torch.testing.assert_close(gradient, torch.func.grad(loss)(A), rtol=close, atol=close)


@pytest.mark.parametrize("k", [None, 2])
def test_traced_gradients_of_entries_whose_sum_overflows(k):
    most = torch.finfo(T).max
    A = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.5], dtype=T))
    A[0, 2] = A[2, 0] = 0.25
    unit = 2.0**1022  # three of these are a number, and six are not
    assert 3 * unit < most < 5 * unit

    def loss(A):
        vectors = pmaf.ied(A, k).vectors
        return (vectors * weights(vectors)).sum()

    # In parts, since the gradient of what is not small is next to nothing.
    found = torch.func.grad(lambda A: unit * loss(A))(unit * A)
    expected = torch.func.grad(loss)(A)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e3 * torch.finfo(T).eps)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    "options",
    [dict(), dict(k=2), dict(solver=PowerIteration()), dict(symmetric=False)],
    ids=repr,
)
def test_gradients_whose_squares_underflow(options, traced):
    """A loss that is averaged over much sends back little; the gradient is linear in it."""
    A = random(40, 40, dtype=torch.float32).abs()

    def loss(A, scale):
        vectors = pmaf.ied(A, **options).vectors
        return (scale * vectors * weights(vectors)).sum()

    def gradient(scale):
        if traced:
            return torch.func.grad(loss)(A, scale)
        leaf = A.clone().requires_grad_()
        return torch.autograd.grad(loss(leaf, scale), leaf)[0]

    expected, found = gradient(1.0), gradient(1e-25) * 1e25
    # What differs is rounding, magnified by less than ten where one eigenvalue dwarfs the rest;
    # the second of two is close to the third.
    close = torch.finfo(torch.float32).eps * (1e4 if "k" in options else 1e2)
    assert float((found - expected).norm() / expected.norm()) <= close


@pytest.mark.parametrize(
    "options", [{}, dict(k=2), dict(symmetric=False), dict(largest=False)], ids=str
)
@pytest.mark.parametrize("n", [6, 300])
@pytest.mark.parametrize("scale", [1e-25, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_start_outlives_a_change_of_units(dtype, scale, n, options):
    """The second attempt, in other units, is given the start as the user gave it."""
    A = torch.rand(n, n, generator=torch.Generator().manual_seed(n))
    A = (scale * (A + A.mT)).to(dtype)
    found = pmaf.ied(A, init=torch.ones(n, dtype=dtype), **options)
    expected = pmaf.ied(A.double(), **options)
    eps = torch.finfo(dtype).eps
    size = float(torch.linalg.matrix_norm(A.double(), 2))
    assert found.vectors.dtype == dtype
    assert float((found.values.double() - expected.values).abs().max()) <= 64 * eps * size
