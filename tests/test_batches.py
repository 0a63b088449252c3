"""Entries of a batch do not influence each other: each has the value and gradient it has alone.

The entries differ as much as they can: well-conditioned ones stand beside zero, repeated values,
matrices without full rank, and multiples that are far too large or too small for squares. A
tolerance, a unit or a decision that is taken for all of them shows here.
"""

import pytest
import torch

import pmaf
from pmaf.operators import Matrix
from pmaf.solvers import SVD, Dense, Krylov, Secular

T = torch.float64
# By products, the derivative of a zero entry is not found, because it has none.
pytestmark = pytest.mark.filterwarnings("ignore::pmaf.ConvergenceWarning")
FAR = {torch.float32: 1e6, T: 1e100, torch.complex64: 1e6, torch.complex128: 1e100}
DTYPES = [torch.float32, T, torch.complex64, torch.complex128]


def normal(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(
        *shape, generator=generator, dtype=torch.complex128 if dtype.is_complex else T
    )


def with_values(m, n, values, dtype):
    """A matrix with these singular values, in double precision."""
    U, V = (torch.linalg.qr(normal(x, x, dtype=dtype, seed=x))[0] for x in (m, n))
    S = torch.zeros(m, n, dtype=U.dtype)
    S.diagonal().copy_(torch.tensor(values, dtype=U.dtype))
    return U @ S @ V.mH


def symmetric(values, dtype):
    n = len(values)
    Q = torch.linalg.qr(normal(n, n, dtype=dtype, seed=n))[0]
    A = (Q * torch.tensor(values, dtype=Q.dtype)) @ Q.mH
    return 0.5 * (A + A.mH)


def scaled(matrices, dtype):
    """The matrices, multiples of them that are far away, and zero, with the factors."""
    factors = (1.0, FAR[dtype], 1 / FAR[dtype])
    found = [((A * x).to(dtype), x) for A in matrices for x in factors]
    return [*found, (torch.zeros_like(found[0][0]), 0.0)]


def weighed(outputs):
    """A number for each entry, which depends on all outputs."""
    total = 0
    for x in outputs:
        x = (torch.view_as_real(x) if x.is_complex() else x).flatten(1)
        total = total + (x * torch.arange(1.0, 1 + x.shape[-1], dtype=x.dtype).cos()).sum(-1)
    return total


def found_for(layer, inputs):
    inputs = inputs.clone().requires_grad_()
    outputs = layer(inputs)
    (gradient,) = torch.autograd.grad(weighed(outputs).sum(), inputs)
    return [x.detach() for x in outputs], gradient


def check(layer, entries, condition, whole=True):
    """All entries at once, and each beside zero, against each of them alone.

    Args:
        entries: pairs of an input and its factor; for the factor zero, there is no derivative.
        condition: of the derivatives of the others.
        whole: whether all entries at once are looked at.
    """
    inputs = [x for x, _ in entries]
    alone = [found_for(layer, x.unsqueeze(0)) for x in inputs]
    last = len(inputs) - 1
    batches = [[i, last] for i in range(last)] + [[last, i] for i in range(last)]
    batches += [list(range(last + 1)), list(range(last, -1, -1))] if whole else []
    eps = torch.finfo(inputs[0].dtype).eps
    for batch in batches:
        outputs, gradients = found_for(layer, torch.stack([inputs[i] for i in batch]))
        for place, i in enumerate(batch):
            assert torch.isfinite(gradients[place]).all()
            if entries[i][1] == 0:
                continue
            theirs, gradient = alone[i]
            for x, y in zip(outputs, theirs):
                atol = 64 * eps * condition * float(y.abs().max())
                torch.testing.assert_close(x[place], y[0], rtol=0, atol=atol)
            atol = 64 * eps * condition**2 * float(gradient.abs().max())
            torch.testing.assert_close(gradients[place], gradient[0], rtol=0, atol=atol)


def projector(x):
    x = x if x.dim() == 3 else x.unsqueeze(-1)
    return x @ x.mH


# The groups at both ends are apart from the rest.
ENDS = {
    1: [[4.0, 2.5, 1.2, 0.3, -1.0], [3.0, 1.0, 1.0, 1.0, -2.0], [2.0, 0.0, 0.0, 0.0, -1.0]],
    2: [[4.0, 2.5, 1.2, 0.3, -1.0], [3.0, 3.0, 1.0, -2.0, -2.0], [2.0, 1.0, 0.0, -1.0, -3.0]],
    3: [[4.0, 2.5, 1.2, 0.3, -1.0], [3.0, 3.0, 3.0, 1.0, 1.0], [2.0, 1.0, 0.5, 0.0, 0.0]],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("solver", [None, Dense(), Krylov()], ids=repr)
@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("k", [1, 3])
def test_eigenvectors(k, largest, solver, dtype):
    groups = ENDS[k] if largest else [[-x for x in values] for values in ENDS[k]]
    entries = scaled([symmetric(values, dtype) for values in groups], dtype)

    def layer(A):
        return [projector(pmaf.ied(A, k, largest=largest, solver=solver).vectors)]

    # A search by products in complex64 has rounding errors of both copies of a vector.
    check(layer, entries, 32.0 if isinstance(solver, Krylov) else 8.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("k", [1, 3])
def test_pairs(k, largest, dtype):
    # With M of condition 3, groups stay apart that are far enough apart.
    groups = [[40.0, 30.0, 20.0, 1.0, 0.5], [30.0, 30.0, 30.0, 1.0, 1.0]][: 1 if k == 1 else 2]
    groups = groups if largest else [[-x for x in values] for values in groups]
    M = symmetric([1.0, 1.2, 1.4, 1.6, 1.8], dtype).roll((1, 1), (0, 1))
    parts = scaled([symmetric(values, dtype) for values in groups], dtype)
    entries = [(torch.cat([A, M.to(dtype)], -1), factor) for A, factor in parts]

    def layer(X):
        A, M = X.split(5, -1)
        return [projector(pmaf.ied(A, k, largest=largest, M=M).vectors)]

    check(layer, entries, 16.0)


def test_pairs_beside_an_ill_conditioned_metric():
    """A search ends at the rounding errors of its own M, not at those of another entry."""
    n = 300
    slow = torch.diag(torch.linspace(1, 5, n, dtype=T).square())
    slow = slow + 0.05 * symmetric([float(x % 7) for x in range(n)], T)
    A = torch.stack([slow, torch.full((n, n), 1e9 / n, dtype=T)])
    M = torch.stack([torch.eye(n, dtype=T), symmetric(torch.logspace(0, -6, n).tolist(), T)])
    found = pmaf.solve(pmaf.PrincipalEigenvectors(Matrix(A), M=Solvable(M)))
    assert float(found.residual[0]) <= 16 * torch.finfo(T).eps


class Solvable(pmaf.operators.Operator):
    """A symmetric matrix with a product with its inverse."""

    symmetric = True

    def __init__(self, M):
        self.M = M

    shape = property(lambda self: self.M.shape)
    tensors = property(lambda self: (self.M,))

    def with_tensors(self, tensors):
        return Solvable(*tensors)

    def matvec(self, rows):
        return rows @ self.M

    def solve(self, rows):
        return torch.linalg.solve(self.M, rows.mT).mT


SINGULAR = [[4.0, 2.5, 1.2], [3.0, 1.0, 1.0], [1.0, 1e-2, 1e-2], [2.0, 1.0, 0.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (3, 3), (3, 5)], ids=str)
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("solver", [None, SVD(), Krylov()], ids=repr)
def test_triplets(solver, largest, k, shape, dtype):
    # The group has to be apart from the rest, and its left vectors have to be unique. The signs of
    # null vectors are free of each other, and two searches may choose them in different ways.
    wanted = [values for values in SINGULAR if not (k == 1) ^ largest or values[1] != values[2]]
    free = shape == (3, 3) and not isinstance(solver, Krylov)
    wanted = [x for x in wanted if x[2] > 0 or largest or free]
    entries = scaled([with_values(*shape, values, dtype) for values in wanted], dtype)

    def layer(A):
        u, _, v = pmaf.isvd(A, k, largest=largest, solver=solver)
        u, v = (x if x.dim() == 3 else x.unsqueeze(-1) for x in (u, v))
        return [u @ u.mH, u @ v.mH, v @ v.mH]

    # By products, systems of AᵀA are solved, whose condition is the square.
    check(layer, entries, 1e4 if isinstance(solver, Krylov) else 100.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (3, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
def test_null_spaces(weighted, shape, dtype):
    k = 1 if shape[0] == 2 else 2
    wanted = [x for x in SINGULAR if k == 1 or x[0] != x[1]]
    wanted = [x[: min(shape)] for x in wanted]
    wanted = [x for x in wanted if k == 2 or x[-1] > 0]
    entries = scaled([with_values(*shape, values, dtype) for values in wanted], dtype)

    def layer(A):
        w = torch.linspace(1, 1.2, shape[0], dtype=A.real.dtype) if weighted else None
        return [projector(pmaf.nullspace(A, k, weights=w))]

    check(layer, entries, 100.0)


LESS = {
    "plain": {},
    "Secular()": dict(solver=Secular()),
    "Krylov()": dict(solver=Krylov()),
    "radius": dict(radius=2.0),
    "radii": dict(radius=lambda b: torch.full(b.shape[:-1], 2.0, dtype=b.real.dtype)),
    "weights": dict(weights=lambda b: torch.linspace(1, 1.2, 5, dtype=b.real.dtype)),
    "M": dict(M=lambda b: torch.diag(torch.linspace(1, 1.5, 4, dtype=T)).to(b.dtype)),
    "ball": dict(ball=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, T, torch.complex128], ids=str)
@pytest.mark.parametrize("name", LESS)
def test_least_squares(name, dtype):
    b = normal(5, dtype=dtype, seed=9)
    problems = []
    for values, length in (
        ([4.0, 2.5, 1.2, 0.7], 10.0),
        ([4.0, 3.0, 2.5, 2.0], 0.1),
        ([4.0, 2.5, 1.2, 0.7], 0.0),
        ([3.0, 1.0, 1.0, 1.0], 2.0),
        ([2.0, 1.0, 0.5, 0.0], 20.0),
    ):
        if name == "ball" and values[-1] == 0:
            continue
        if dtype.is_complex and length == 0:  # one vector is not unique
            continue
        A = with_values(5, 4, values, dtype)
        problems.append(torch.cat([A, length * b.unsqueeze(-1)], -1))

    def layer(X):
        A, b = X[..., :-1], X[..., -1]
        options = {key: x(b) if callable(x) else x for key, x in LESS[name].items()}
        return [pmaf.less(A, b, **options)]

    check(layer, scaled(problems, dtype), 100.0)


@pytest.mark.parametrize("dtype", [torch.float32, T], ids=str)
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("function", ["one", "square", "identity", torch.negative])
def test_functions_of_the_spectrum(function, k, dtype):
    entries = scaled([symmetric(values, dtype) for values in ENDS[2]], dtype)
    if function == "square" and dtype == torch.float32:
        entries = [x for x in entries if x[1] <= 1]

    def layer(A):
        return [pmaf.spectral(A, function, k)]

    check(layer, entries, 8.0)


@pytest.mark.parametrize("dtype", [torch.float32, T], ids=str)
@pytest.mark.parametrize("k", [1, 3])
def test_large_eigenvectors(k, dtype):
    """Where power steps or a Krylov space may find the vectors of some entries."""
    n = 300
    groups = [
        [4.0, 3.0, 2.5, *torch.linspace(1, -2, n - 3).tolist()],
        [40.0, 3.0, 2.5, *[0.0] * (n - 3)],
        [4.0, 3.0, 2.5, *[1.0] * (n - 3)],
    ]
    entries = scaled([symmetric(values, dtype) for values in groups], dtype)
    check(lambda A: [projector(pmaf.ied(A, k).vectors)], entries, 100.0)


@pytest.mark.parametrize("dtype", [torch.float32, T], ids=str)
def test_least_squares_by_products(dtype):
    b = normal(12, dtype=dtype, seed=9)
    values = torch.linspace(4, 1, 8).tolist()
    problems = [
        torch.cat([with_values(12, 8, values, dtype), length * b.unsqueeze(-1)], -1)
        for length in (10.0, 0.1)
    ]

    def layer(X):
        return [pmaf.less(Matrix(X[..., :-1]), X[..., -1])]

    check(layer, scaled(problems, dtype), 100.0)


def test_the_gradient_of_no_b_has_the_units_of_A():
    """The direction in which b would push has no size of its own."""
    A = normal(6, 4, dtype=T, seed=3)

    def gradients(factor, **options):
        a, b = (factor * A).requires_grad_(), torch.zeros(6, dtype=T, requires_grad=True)
        u = pmaf.less(a, b, **options)
        return [x * factor for x in torch.autograd.grad(u[0], (a, b))]

    radius, weights = torch.tensor(2.0, dtype=T), torch.ones(6, dtype=T)
    for options in ({}, dict(radius=radius), dict(weights=weights), dict(ball=True)):
        for x in (1e-30, 1e-100, 1e-150, 1e150):
            for found, expected in zip(gradients(x, **options), gradients(1.0, **options)):
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
