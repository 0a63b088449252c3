"""Eigenvalues that repeat, to second order: what is exact, and what has no derivative.

A loss of a simple eigenvector, and a loss of the projector onto a group of vectors that is
apart from the rest, have all derivatives, however often other eigenvalues repeat.
"""

import pytest
import torch

import pmaf
from pmaf.solvers import Dense, Lanczos
from pmaf.tangent.complement import complement_solve
from pmaf.tangent.kept import NOTHING
from tests.ied_cases import with_eigenvalues

T = torch.float64
SPECTRA = [
    [2.0, 1.0, 1.0, 0.5],
    [3.0, 3.0, 1.0, 0.5],
    [2.0, 1.0, 1.0, 1.0],
    [2.0, 2.0, 2.0, 1.0, -1.0],
    [3.0, 2.0, 2.0, 1.0, 1.0, 0.0],
]


def matrices(values):
    yield torch.diag(torch.tensor(values, dtype=T))
    yield with_eigenvalues(values)


def random(*shape, seed=5):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=T)


def second(loss, A, D):
    """`d²loss(A + tD)/dt²` by two reverse passes."""
    A = A.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(A), A, create_graph=True)
    (again,) = torch.autograd.grad((first * D).sum(), A)
    return float((again * D).sum())


def second_difference(loss, A, D, step=1e-3):
    """The same by differences of fourth order, whose error is about eps/step² + step⁴."""
    f = [float(loss(A + i * step * D)) for i in (-2, -1, 0, 1, 2)]
    return (-f[0] + 16 * f[1] - 30 * f[2] + 16 * f[3] - f[4]) / (12 * step**2)


def simple(values, j):
    return sum(abs(x - values[j]) < 1e-9 for x in values) == 1


CASES = [(values, k) for values in SPECTRA for k in range(1, len(values))]


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("solver", [None, Dense(), Lanczos()], ids=repr)
@pytest.mark.parametrize(("values", "k"), CASES, ids=repr)
def test_second_derivatives_of_simple_eigenvectors(values, k, solver, largest):
    n = len(values)
    w, D = random(n), random(n, n)
    D = 0.3 * (D + D.mT)
    for A in matrices(values):
        A = A if largest else -A
        for j in filter(lambda j: simple(values, j), range(k)):
            order = dict(largest=largest, descending=largest)

            def loss(A, j=j, order=order):
                return (pmaf.ied(A, k, solver=solver, **order).vectors[:, j] @ w) ** 2

            def truth(A, j=j):
                vectors = torch.linalg.eigh(A).eigenvectors
                return (vectors[:, n - 1 - j if largest else j] @ w) ** 2

            expected = second_difference(truth, A, D)
            assert second(loss, A, D) == pytest.approx(expected, rel=1e-5, abs=1e-5)


# Of torch's own: jvp compiles its decompositions with torch.jit.script.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("solver", [None, Dense(), Lanczos()], ids=repr)
@pytest.mark.parametrize(
    ("values", "k"), [(v, k) for v, k in CASES if v[k - 1] - v[k] > 1e-9], ids=repr
)
def test_derivatives_of_projectors(values, k, solver):
    n = len(values)
    C, D = random(n, n), random(n, n)
    D = 0.3 * (D + D.mT)

    def projected(V):
        return ((V @ V.mT) * C).sum() ** 2

    def loss(A):
        return projected(pmaf.ied(A, k, solver=solver).vectors)

    def truth(A):
        return projected(torch.linalg.eigh(A).eigenvectors[:, n - k :])

    for A in matrices(values):
        expected = second_difference(truth, A, D)
        assert second(loss, A, D) == pytest.approx(expected, rel=1e-5, abs=1e-5)
        along = torch.func.hessian(lambda t, A=A: loss(A + t * D))(torch.zeros((), dtype=T))
        assert float(along) == pytest.approx(expected, rel=1e-5, abs=1e-5)
        leaf = A.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf), leaf)
        step = 1e-4
        difference = (truth(A + step * D) - truth(A - step * D)) / (2 * step)
        assert float((first * D).sum()) == pytest.approx(float(difference), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, T])
def test_functions_of_values_and_vectors_are_finite_and_not_exact(dtype):
    """V f(Λ) Vᵀ of equal eigenvalues: no rule that sees ∂L/∂λ and ∂L/∂v alone can be exact."""
    A = torch.eye(2, dtype=dtype, requires_grad=True)
    values, vectors = pmaf.ied(A, 2)
    (found,) = torch.autograd.grad(((vectors * values) @ vectors.mT).sum(), A)
    assert torch.isfinite(found).all()
    solution = pmaf.solve(pmaf.PrincipalEigenvectors(A, 2))
    assert float(solution.gap) == 0.0  # which says so


@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize(
    "rows",
    [[[2, 0, 0], [0, 2, 0], [0, 0, 1]], [[2, 1, 0], [0, 2, 0], [0, 0, 1]], [[1, 0], [0, 1]]],
    ids=["double", "defective", "identity"],
)
def test_a_repeated_dominant_eigenvalue_has_no_gradient(rows, dtype):
    """Of a matrix that is not symmetric: zero, and not a number of the size of 1/eps."""
    A = torch.tensor(rows, dtype=dtype, requires_grad=True)
    with pytest.warns(pmaf.ConvergenceWarning):
        found = pmaf.ied(A, symmetric=False)
    (gradient,) = torch.autograd.grad((found.vectors * torch.arange(1.0, len(A) + 1)).sum(), A)
    assert float(gradient.abs().max()) == 0.0


@pytest.mark.filterwarnings("ignore::pmaf.ConvergenceWarning")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize("values", [[2, 2, 1, 0.5], [2, 1, 2, 2], [-2, 1, 0.5, -2]], ids=str)
def test_a_repeated_dominant_eigenvalue_that_is_known_up_to_rounding(values, dtype, create_graph):
    """The matrix is exact in binary, its eigenvalues are not; none is divided by the rest."""
    one = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=dtype)
    q = torch.kron(one, one) / 2
    A = (q * torch.tensor(values, dtype=dtype) @ q.mT).requires_grad_()
    found = pmaf.ied(A, symmetric=False)
    loss = (found.vectors * torch.arange(1.0, 5.0)).sum() + found.values
    (gradient,) = torch.autograd.grad(loss, A, create_graph=create_graph)
    assert float(gradient.detach().abs().max()) <= 100.0


@pytest.mark.filterwarnings("ignore::pmaf.ConvergenceWarning")
# Of torch's own: jvp compiles its decompositions with torch.jit.script.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize("n", [2, 3, 5, 30])
def test_nilpotent(n, dtype):
    A = torch.diag(torch.ones(n - 1, dtype=dtype), 1).requires_grad_()
    found = pmaf.ied(torch.stack([A, torch.ones(n, n, dtype=dtype)]), symmetric=False)
    (gradient,) = torch.autograd.grad(found.vectors.sum() + found.values.sum(), A)
    assert torch.isfinite(gradient).all()
    _, tangent = torch.func.jvp(
        lambda A: pmaf.ied(A, symmetric=False).vectors, (A.detach(),), (torch.ones_like(A),)
    )
    assert torch.isfinite(tangent).all()


def beside(A, shift, y, v):
    """Solutions beside `y` where the forward pass kept nothing, and no gap is known."""
    return complement_solve(A, shift, y, v, NOTHING, torch.full(A.shape[:-2], torch.nan, dtype=T))


@pytest.mark.parametrize("top", [1.0, 2.0**-10])
def test_a_rounding_of_a_right_hand_side_along_an_equal_eigenvector_is_not_magnified(top):
    """Two eigenvalues a quarter of the tolerance apart count as one, and v has a rounding there.

    The tolerance is of the largest modulus, whatever the size of the shift.
    """
    eps = torch.finfo(T).eps
    values = torch.tensor([top + 2 * eps, top, -1.0, -0.5], dtype=T)
    y, other, third, fourth = torch.eye(4, dtype=T)
    v = torch.stack([third, fourth]) + 64 * eps * other
    w = beside(torch.diag(values), values[:1].expand(2), y.unsqueeze(0), v)
    expected = torch.stack([third / (top + 1), fourth / (top + 0.5)])
    torch.testing.assert_close(w, expected, rtol=0, atol=1e3 * eps)


def test_what_conjugate_residuals_do_not_solve_is_decomposed():
    """Their steps end long before the residual is small, whatever they believe it to be."""
    n = 300
    rise = torch.logspace(0, -5, n - 1, dtype=T)
    values = torch.cat([torch.ones(1, dtype=T), 1 - rise])
    y = torch.zeros(1, n, dtype=T)
    y[0, 0] = 1
    v = torch.ones(2, n, dtype=T)
    v[:, 0] = 0
    w = beside(torch.diag(values), torch.ones(2, dtype=T), y, v)
    expected = torch.cat([torch.zeros(1, dtype=T), 1 / (1 - values[1:])])
    # The eigenvalues are rounded to one part in 1e-5/eps of what they are below the shift.
    close = 64 * torch.finfo(T).eps / 1e-5
    torch.testing.assert_close(w, expected.expand(2, n), rtol=close, atol=close)
