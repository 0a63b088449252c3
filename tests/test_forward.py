"""Forward mode: derivatives up to the fourth, where they are known in closed form.

A layer that is turned turns with what it is given. With a rotation by t in one plane and by 2t
in another, the fourth derivative of what turns is itself, once and sixteen times.
"""

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp

import pmaf
from pmaf.solvers import Lanczos, PowerIteration, ProjectedGradient, Secular
from tests import oracles

T = torch.float64
EPS = torch.finfo(T).eps
# Of torch's own: jvp compiles its decompositions with torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


def turn(t):
    """The rotation, `(4, 4)`."""
    zero = torch.zeros_like(t)
    (c, s), (d, r) = ((torch.cos(x), torch.sin(x)) for x in (t, 2 * t))
    rows = [[c, -s, zero, zero], [s, c, zero, zero], [zero, zero, d, -r], [zero, zero, r, d]]
    return torch.stack([torch.stack(row) for row in rows])


def derivative(function, t, order):
    for _ in range(order):

        def function(t, inner=function):
            return jvp(inner, (t,), (torch.ones_like(t),))[1]

    return function(t)


def turned(order):
    """How much larger each coordinate is in an even derivative, and its sign."""
    return (-1) ** (order // 2) * torch.tensor([1.0, 1.0, 2.0**order, 2.0**order], dtype=T)


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=T)


def with_values(values, seed):
    q = torch.linalg.qr(randn(4, 4, seed=seed))[0]
    return q * torch.tensor(values, dtype=T) @ q.mT


def bound(condition, order):
    """Every order solves with the curvature once more."""
    return 1e3 * EPS * (2 * condition) ** order


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("length", [0.3, 2.0])
def test_least_squares(length, order):
    C = torch.cat([with_values([2.0, 1.7, 1.3, 1.0], 1), torch.zeros(1, 4, dtype=T)])
    b = length * randn(5, seed=2)
    t = torch.tensor(0.4, dtype=T)

    def layer(t):
        return pmaf.less(C @ turn(t).mT, b, solver=Secular())

    solution = pmaf.solve(pmaf.SphereLeastSquares(C, b))
    condition = (4 + float(solution.multiplier)) / float(solution.gap)
    expected = turn(t) @ (turned(order) * solution.value)
    found = derivative(layer, t, order)
    torch.testing.assert_close(found, expected, rtol=0, atol=bound(condition, order))


@pytest.mark.filterwarnings("ignore::pmaf.ConvergenceWarning")
def test_least_squares_by_an_iteration_that_leaves_no_basis():
    C = with_values([2.0, 1.7, 1.3, 1.0], 1)
    b = C @ torch.tensor([0.3, -0.2, 0.4, 0.1], dtype=T)
    t = torch.tensor(0.4, dtype=T)
    solver = ProjectedGradient(regulariser=1e-30, tolerance=0.0, max_iterations=300)
    found = derivative(lambda t: pmaf.less(C @ turn(t).mT, b, solver=solver), t, 1)
    expected = derivative(lambda t: turn(t) @ pmaf.less(C, b), t, 1)
    # The iteration ends where the objective stands still, which is half of the digits.
    torch.testing.assert_close(found, expected, rtol=0, atol=100 * EPS**0.5)


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize(
    ("k", "options"),
    [(None, {}), (3, {}), (2, dict(largest=False)), (None, dict(solver=Lanczos()))],
    ids=repr,
)
def test_eigenvectors(k, options, order):
    M = with_values([4.0, 3.0, 2.0, 1.0], 3)
    t = torch.tensor(0.4, dtype=T)
    start = pmaf.ied(M, k, **options).vectors

    def layer(t):
        Q = turn(t)
        return pmaf.ied(Q @ M @ Q.mT, k, reference=(Q @ start).detach(), **options)

    rows = start.reshape(4, -1)
    expected = (turn(t) @ (turned(order).unsqueeze(-1) * rows)).reshape(start.shape)
    found = derivative(lambda t: layer(t).vectors, t, order)
    torch.testing.assert_close(found, expected, rtol=0, atol=bound(4, order))
    values = derivative(lambda t: layer(t).values, t, order)
    torch.testing.assert_close(values, torch.zeros_like(values), rtol=0, atol=4 * bound(4, order))


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("solver", [None, PowerIteration()], ids=repr)
def test_dominant_eigenvectors(solver, order):
    M = randn(4, 4, seed=5).abs() + 1
    t = torch.tensor(0.4, dtype=T)
    start = pmaf.ied(M, symmetric=False).vectors

    def layer(t):
        Q = turn(t)
        reference = (Q @ start).detach()
        A = Q @ M @ Q.mT
        return pmaf.ied(A, symmetric=False, reference=reference, solver=solver).vectors

    values = torch.linalg.eigvals(M)
    top = values.abs().max()
    apart = (top - values).abs().sort().values[1]
    condition = float(torch.linalg.matrix_norm(M, 2) / apart)
    found = derivative(layer, t, order)
    expected = turn(t) @ (turned(order) * start)
    torch.testing.assert_close(found, expected, rtol=0, atol=bound(condition, order))


@pytest.mark.parametrize("seed", range(4))
def test_equal_eigenvalues(seed):
    """Their vectors have no derivative; the projector that they span has one."""
    M = with_values([3.0, 3.0, 1.0, 0.0], seed)
    t = torch.tensor(0.4, dtype=T)

    def projector(t):
        Q = turn(t)
        Y = pmaf.ied(Q @ M @ Q.mT, 2).vectors
        return Y @ Y.mT

    vectors = torch.linalg.eigh(M).eigenvectors
    P = vectors[:, 2:] @ vectors[:, 2:].mT
    expected = derivative(lambda t: turn(t) @ P @ turn(t).mT, t, 1)
    torch.testing.assert_close(derivative(projector, t, 1), expected, rtol=0, atol=bound(3, 1))


# Matrices of few small integers: their vectors have zeros, and products of them are exactly zero,
# while derivatives of these products are not.


def drawn(m, n, spectrum, seed):
    """A matrix of small integers, most of them zero, whose spectrum is apart, and apart from 0.

    The first two seeds stand for diagonal matrices.
    """
    generator = torch.Generator().manual_seed(seed)
    choices = torch.tensor([-1.0, 0.0, 0.0, 1.0, 2.0], dtype=T)
    while True:
        A = choices[torch.randint(5, (m, n), generator=generator)]
        if seed < 2:
            A = torch.zeros(m, n, dtype=T)
            A.diagonal().copy_(torch.randint(-5, 6, (min(m, n),), generator=generator))
        values = spectrum(A).sort().values
        if float(values.diff().min()) > 0.2 and float(values.abs().min()) > 0.2:
            return A


def weighed(*outputs):
    """A number that depends on all outputs, the real and the imaginary parts of complex ones."""
    parts = [torch.view_as_real(x) if x.is_complex() else x for x in outputs]
    return sum((x * torch.arange(1.0, 1 + x.numel(), dtype=T).cos().view(x.shape)).sum()
               for x in parts)  # fmt: skip


def outer(x, y):
    """All products of a column of x and the same column of y, which have no sign or phase."""
    return x.mT.unsqueeze(-1) * y.mT.conj().unsqueeze(-2)


def complexified(A):
    return torch.complex(A, 0.5 * A.flip(-1))


def metric(A):
    return torch.diag(torch.arange(1.0, 1 + len(A), dtype=T)) + 0.5 * A @ A.mT


def pair_values(A):
    inverse = torch.linalg.inv(torch.linalg.cholesky(metric(A)))
    return torch.linalg.eigvalsh(inverse @ (A + A.mT) @ inverse.mT)


def triplets(A, largest):
    u, s, v = pmaf.isvd(A, 2, largest=largest, reference="largest")
    return weighed(outer(u, v), s, outer(u, u))


def null_vectors(A, largest):
    found = pmaf.solve(pmaf.PrincipalSingularVectors(A, k=2, largest=largest))
    return weighed(outer(found.value, found.value), found.multiplier)


def eigenpairs(A, largest, M=None):
    values, vectors = pmaf.ied(A + A.mH, 2, largest=largest, M=M, reference="largest")
    return weighed(outer(vectors, vectors), values)


def of_complex(layer):
    return lambda A, largest: layer(complexified(A), largest)


WITH_ZEROS = {
    "isvd": (triplets, torch.linalg.svdvals, [(2, 2), (3, 3), (4, 2), (2, 3)]),
    "nullspace": (null_vectors, torch.linalg.svdvals, [(2, 2), (3, 3), (4, 2)]),
    "ied": (eigenpairs, lambda A: torch.linalg.eigvalsh(A + A.mT), [(2, 2), (3, 3), (4, 4)]),
    "pair": (lambda A, largest: eigenpairs(A, largest, metric(A)), pair_values, [(2, 2), (3, 3)]),
    "complex isvd": (
        of_complex(triplets),
        lambda A: torch.linalg.svdvals(complexified(A)),
        [(2, 2), (3, 2), (2, 3)],
    ),
    "complex ied": (
        of_complex(eigenpairs),
        lambda A: torch.linalg.eigvalsh(complexified(A) + complexified(A).mH),
        [(2, 2), (3, 3)],
    ),
}


@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("name", WITH_ZEROS)
def test_all_modes_agree_where_products_are_zero(name, largest):
    layer, spectrum, shapes = WITH_ZEROS[name]
    for shape in shapes:
        for seed in range(6):
            A = drawn(*shape, spectrum, seed)

            def f(A):
                return layer(A, largest)

            truth = oracles.differences(f, A)
            atol = 1e-7 * max(1.0, float(truth.abs().max()))
            for found in (grad(f)(A), jacfwd(f)(A)):
                torch.testing.assert_close(found, truth, rtol=0, atol=atol)
            if seed % 2 == 0:
                twice = oracles.differences(lambda A: weighed(grad(f)(A)), A)
                atol = 1e-6 * max(1.0, float(twice.abs().max()))
                for second in (jacrev(grad(f)), hessian(f), jacrev(jacfwd(f)), jacfwd(jacfwd(f))):
                    columns = second(A).movedim((-2, -1), (0, 1))
                    found = torch.stack([weighed(x) for x in columns.flatten(0, 1)]).view(shape)
                    torch.testing.assert_close(found, twice, rtol=0, atol=atol)


@pytest.mark.parametrize("layer", ["ied", "less", "nullspace"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in jvp
def test_a_trace_of_forward_mode_has_the_tangents_of_the_call(layer):
    g = torch.Generator().manual_seed(0)
    A, dA = (torch.randn(6, 4, generator=g, dtype=torch.float64) for _ in range(2))
    b = torch.randn(6, generator=g, dtype=torch.float64)
    call = {
        "ied": lambda A: pmaf.ied(A[:4] + A[:4].mT).vectors,
        "less": lambda A: pmaf.less(A, b),
        "nullspace": pmaf.nullspace,
    }[layer]

    def tangent(A, dA):
        return torch.func.jvp(call, (A,), (dA,))[1]

    torch._dynamo.reset()
    traced = torch.compile(tangent, backend="aot_eager")(A, dA)
    difference = (call(A + 1e-6 * dA) - call(A - 1e-6 * dA)) / 2e-6
    torch.testing.assert_close(traced, difference, rtol=0, atol=1e-7)
    torch.testing.assert_close(traced, tangent(A, dA), rtol=0, atol=1e-12)
