"""IED of large matrices in float32, with eigenvalues that are close but not equal.

An eigenvector moves with a perturbation `E`, `‖E‖ ≤ c·eps·‖A‖`, by at most `‖E‖/gap`, and the
relative error of its gradient is of the same size. The spectral norm counts, here one, and not
the Frobenius norm, which is `√n` times as large.
"""

import pytest
import torch

import pmaf
from pmaf.solvers import Dense

T = torch.float64
EPS = torch.finfo(torch.float32).eps
ROUNDINGS = 64


def with_spectrum(values, seed=0):
    n = len(values)
    g = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=T))[0]
    A = q * values @ q.T
    return (0.5 * (A + A.T)).float()


def two_close(n, gap, kind):
    """One, and the next eigenvalue a gap below it; the rest takes up the Frobenius norm."""
    half = n // 2 - 1
    flat = torch.cat([-torch.linspace(0.9, 0.97, half), torch.linspace(0.9, 0.97, n - 2 - half)])
    rest = flat if kind == "flat" else torch.linspace(-0.9, 0.9, n - 2)
    return with_spectrum(torch.cat([rest.double(), torch.tensor([1 - gap, 1.0], dtype=T)]))


def gradient(A, k, largest, solver):
    A = A.clone().requires_grad_()
    vectors = pmaf.ied(A, k, largest=largest, solver=solver).vectors
    weights = torch.cos(torch.arange(vectors.numel()) + 1.0).to(A).reshape(vectors.shape)
    return torch.autograd.grad((vectors * weights).sum(), A)[0]


@pytest.mark.parametrize("solver", [None, Dense()], ids=repr)
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [None, 2, 3])
@pytest.mark.parametrize(
    ("n", "gap", "kind"),
    [
        (500, 3e-5, "flat"),
        (500, 1e-5, "flat"),  # below rounding of the Frobenius norm
        (250, 9e-6, "flat"),
        (500, 1e-4, "even"),
        (800, 5e-5, "even"),
        (40, 1e-5, "flat"),
    ],
)
def test_gradients_of_close_eigenvectors(n, gap, kind, k, largest, solver):
    A = two_close(n, gap, kind)
    A = A if largest else -A
    expected = gradient(A.double(), k, largest, Dense())
    found = gradient(A, k, largest, solver)
    error = float((found - expected).norm() / expected.norm())
    # The computed gap is off by roundings of the norm, and so is its reciprocal.
    assert error <= ROUNDINGS * EPS / gap < 0.9


@pytest.mark.parametrize("n", [12, 40])
def test_a_simple_eigenvalue_beside_complex_ones_of_its_modulus(n):
    """A rotation with a little of all ones: dominant by 3e-6 in modulus, apart by 6/n in place."""
    A = torch.eye(n).roll(1, 0) * (1 - 3e-6) + 3e-6 / n

    def gradients(A):
        A = A.clone().requires_grad_()
        solution = pmaf.solve(pmaf.PrincipalEigenvectors(A, symmetric=False))
        assert solution.converged
        weights = torch.cos(torch.arange(n) + 1.0).to(A)
        return torch.autograd.grad((solution.value * weights).sum() + solution.multiplier, A)[0]

    expected = gradients(A.double())
    error = float((gradients(A) - expected).norm() / expected.norm())
    assert error <= ROUNDINGS * EPS * n / 6


def hadamard(n):
    """`Hᵀ = H` and `H² = nI`, with entries ±1, for n a power of two."""
    H = torch.ones(1, 1, dtype=T)
    while len(H) < n:
        H = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=T), H)
    return H


@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("n", [256, 512])
def test_equal_eigenvalues_are_still_found_equal(n, k, dtype):
    """Rounding tells computed eigenvalues apart by a few eps; no gradient is made of it.

    With eigenvalues of ten binary digits every product and sum of `HΛH/n` is exact, so that three
    eigenvalues of the matrix as stored are equal.
    """
    values = torch.cat([torch.linspace(-1, 0.5, n - 3, dtype=T), torch.ones(3, dtype=T)])
    values = (1024 * values).round() / 1024
    H = hadamard(n)
    A = H * values @ H / n
    assert torch.equal(A @ H, H * values)
    assert torch.equal(A.to(dtype).double(), A)
    found = gradient(A.to(dtype), k, True, None)
    assert float(found.abs().max()) <= 10.0  # the next eigenvalue is 0.5 away


@pytest.mark.parametrize("largest", [True, False])
def test_a_hundred_thousand_matrices(largest):
    A = torch.randn(100_000, 3, 3, generator=torch.Generator().manual_seed(2))
    A = A.requires_grad_()
    values, vectors = pmaf.ied(A, largest=largest)
    (found,) = torch.autograd.grad((vectors * torch.tensor([1.0, 2.0, 3.0])).sum(), A)
    S = 0.5 * (A + A.mT).detach()
    rest = (S @ vectors.detach().unsqueeze(-1)).squeeze(-1) - values.detach().unsqueeze(
        -1
    ) * vectors
    norms = torch.linalg.matrix_norm(S)
    assert (rest.norm(dim=-1) <= 16 * EPS * norms).all()
    exact = torch.linalg.eigvalsh(S.double())
    end, next_to = (-1, -2) if largest else (0, 1)
    assert ((values - exact[:, end]).abs() <= 16 * EPS * norms).all()
    some = torch.arange(0, 100_000, 997)
    leaf = A.detach()[some].double().requires_grad_()
    wide = pmaf.ied(leaf, largest=largest, solver=Dense()).vectors
    (expected,) = torch.autograd.grad((wide * torch.tensor([1.0, 2.0, 3.0])).sum(), leaf)
    gap = (exact[:, end] - exact[:, next_to]).abs()[some]
    error = (found[some] - expected).norm(dim=(-2, -1)) / expected.norm(dim=(-2, -1))
    assert (error <= ROUNDINGS * EPS * norms[some] / gap).all()


@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize("symmetric", [True, False])
def test_one_by_one(dtype, symmetric):
    A = torch.tensor([[-2.0]], dtype=dtype, requires_grad=True)
    values, vectors = pmaf.ied(A, symmetric=symmetric)
    (found,) = torch.autograd.grad(3 * values + vectors.sum(), A)
    assert [x.item() for x in (values, vectors, found)] == [-2.0, 1.0, 3.0]
