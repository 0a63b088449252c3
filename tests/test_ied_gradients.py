"""IED: derivatives of values and vectors, against differences, eigh's own and each other."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import pmaf
from pmaf.gradients import DDN, IFT, Implicit, Unroll
from pmaf.solvers import Dense, Lanczos, PowerIteration, SimultaneousIteration
from pmaf.tangent.general import dominant_solve
from tests import oracles
from tests.ied_cases import (
    NONSYMMETRIC,
    REPEATED_ELSEWHERE,
    REPEATED_TOP,
    SYMMETRIC,
    with_eigenvalues,
)

SIMPLE = {
    name: case
    for name, case in SYMMETRIC.items()
    # Only the top eigenvalue is simple, or differences of vectors are all noise.
    if name not in ("karate, adjacency", "karate, Laplacian", "gap 1e-6")
}


def weights(*shape):
    return torch.cos(torch.arange(1.0, 1 + torch.Size(shape).numel()).double()).reshape(shape)


def loss_of(A, k=None, **options):
    values, vectors = pmaf.ied(A, k, **options)
    return (values * weights(*values.shape)).sum() + (vectors * weights(*vectors.shape)).sum()


def requested_are_simple(A, k, largest):
    values = torch.linalg.eigvalsh(A)
    values = values.flip(0) if largest else values
    n = len(values)
    return n == 1 or ((values[:-1] - values[1:]).abs()[: min(k, n - 1)] > 1e-3 * A.norm()).all()


@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("name", SIMPLE)
def test_matches_differences_and_eigh(name, k, largest):
    A = SIMPLE[name]()
    count = 1 if k is None else k
    if count > len(A):
        pytest.skip("fewer eigenvectors than asked for")
    if not requested_are_simple(A, count, largest):
        pytest.skip("a requested eigenvalue is repeated, or nearly")
    # Some are orthogonal to all ones, where differences would see the sign jump.
    order = dict(largest=largest, descending=True)
    options = dict(**order, reference=pmaf.ied(A, k, **order).vectors)
    A.requires_grad_()
    (found,) = torch.autograd.grad(loss_of(A, k, **options), A)
    torch.testing.assert_close(found, found.mT)
    truth = oracles.differences(lambda x: loss_of(x, k, **options), A.detach())
    scale = max(1.0, float(truth.abs().max()))
    torch.testing.assert_close(found, truth, rtol=0, atol=2e-6 * scale)

    def by_eigh(A):
        values, vectors = torch.linalg.eigh(0.5 * (A + A.mT))
        part = slice(-count, None) if largest else slice(0, count)
        values, vectors = values[part].flip(0), vectors[:, part].flip(1)
        vectors = vectors * torch.sign((vectors * pmaf.ied(A.detach(), count, **order)
                                        .vectors).sum(0))  # fmt: skip
        if k is None:
            values, vectors = values[0], vectors[:, 0]
        return (values * weights(*values.shape)).sum() + (vectors * weights(*vectors.shape)).sum()

    (theirs,) = torch.autograd.grad(by_eigh(A), A)
    if torch.isfinite(theirs).all() and theirs.abs().max() < 1e6 * scale:
        torch.testing.assert_close(found, theirs, rtol=0, atol=1e-8 * scale)


@pytest.mark.parametrize("solver", [None, Lanczos(), PowerIteration()], ids=repr)
@pytest.mark.parametrize("name", REPEATED_ELSEWHERE)
def test_exact_where_eigh_gives_nan(name, solver):
    A = REPEATED_ELSEWHERE[name]().requires_grad_()
    (found,) = torch.autograd.grad(loss_of(A, solver=solver), A)
    truth = oracles.differences(lambda x: loss_of(x, solver=solver), A.detach())
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-7)
    vectors = torch.linalg.eigh(A)[1]
    (theirs,) = torch.autograd.grad(vectors[:, -1].sum(), A)
    assert not torch.isfinite(theirs).all() or name != "diag(3,1,1,1)"


@pytest.mark.parametrize(
    ("solver", "k"),
    [
        (None, None),
        (None, 1),
        (None, 2),
        (None, 4),
        (Dense(), 2),
        (Lanczos(), 2),
        (PowerIteration(), None),
        (SimultaneousIteration(), 2),
    ],
    ids=repr,
)
@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
def test_first_and_second_derivatives(solver, k, largest):
    A = torch.stack([with_eigenvalues([3.0, 2.0, 0.5, -1.0], seed) for seed in (1, 2)])
    A.requires_grad_()

    def layer(A):
        return pmaf.ied(A, k, largest=largest, solver=solver)

    assert gradcheck(layer, A)
    assert gradgradcheck(layer, A, atol=1e-4)


def test_krylov_backward_of_a_large_matrix():
    """No eigenbasis is kept at this size: the backward pass iterates."""
    g = torch.Generator().manual_seed(2)
    X = torch.randn(2, 400, 400, generator=g, dtype=torch.float64)
    for A in (X.abs() + X.abs().mT, X.mT @ X / 400):
        for k in (None, 3):
            found, expected = (
                torch.autograd.grad(loss_of(x, k, solver=solver), x)[0]
                for x, solver in ((A.clone().requires_grad_(), s) for s in (Lanczos(), Dense()))
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * expected.abs().max())


def test_a_backward_that_does_not_converge_by_iteration_is_solved_directly():
    values = [1.0, 1 - 1e-7, *torch.linspace(0.9, -1, 298).tolist()]
    A = with_eigenvalues(values).requires_grad_()
    found = torch.autograd.grad(loss_of(A, solver=Lanczos(fallback=True)), A)[0]
    expected = torch.autograd.grad(loss_of(A, solver=Dense()), A)[0]
    assert (found - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("solver", [None, PowerIteration()], ids=repr)
@pytest.mark.parametrize("name", NONSYMMETRIC)
def test_nonsymmetric_matches_differences_of_eig(name, solver):
    A = NONSYMMETRIC[name]().requires_grad_()
    n = len(A)
    reference = pmaf.ied(A.detach(), symmetric=False).vectors

    def by_eig(A):
        values, vectors = torch.linalg.eig(A)
        first = values.abs().argmax()
        vector = vectors[:, first].real
        vector = vector / vector.norm() * torch.sign(vector @ reference)
        return values[first].real * weights(1)[0] + (vector * weights(n)).sum()

    value, vector = pmaf.ied(A, symmetric=False, solver=solver)
    loss = value * weights(1)[0] + (vector * weights(n)).sum()
    truth = oracles.differences(by_eig, A.detach())
    for again in (False, True):  # whether it is to be differentiated again
        (found,) = torch.autograd.grad(loss, A, create_graph=again, retain_graph=True)
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-6)


def test_a_dominant_eigenvalue_is_solved_by_a_series():
    """A series with the transpose, which does not leave the complement of y alone, never ends."""
    A = NONSYMMETRIC["paper"]()
    values = torch.linalg.eigvals(A)
    moduli = values.abs().sort(descending=True).values
    value, y = (x.detach() for x in pmaf.ied(A, symmetric=False))
    v = weights(len(A)).to(A).unsqueeze(0)
    gap = moduli[0] - moduli[1]
    rate = float(moduli[1] / moduli[0])
    w = dominant_solve(A, value.reshape(1), y.unsqueeze(0), v, None, gap, rate)
    assert w is not None
    right = v - (v @ y).unsqueeze(-1) * y
    eps = torch.finfo(A.dtype).eps
    # As many roundings as there are entries in a row, of what is multiplied.
    allowed = 64 * len(A) * eps * float(right.norm() + torch.linalg.matrix_norm(A, 2) * w.norm())
    assert float((value * w - w @ A - right).norm()) <= allowed
    assert float((w @ y).abs()) <= allowed


def test_nonsymmetric_second_derivatives():
    A = torch.stack([NONSYMMETRIC["Perron, 3x3"]()] * 2) + torch.eye(3) * torch.arange(2.0)[
        :, None, None
    ]  # fmt: skip
    A.requires_grad_()
    assert gradcheck(lambda A: pmaf.ied(A, symmetric=False), A)
    assert gradgradcheck(lambda A: pmaf.ied(A, symmetric=False), A)


RULES = [DDN(), DDN(exploit=False), IFT(), IFT(exploit=False)]


@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_papers_rules_are_exact_for_symmetric_matrices(rule, k):
    A = torch.stack([with_eigenvalues([3.0, 2.0, 0.5, 0.1], seed) for seed in (1, 2)])
    A.requires_grad_()
    assert gradcheck(lambda A: pmaf.ied(A, k, gradient=rule), A)
    assert gradgradcheck(lambda A: pmaf.ied(A, k, gradient=rule), A, atol=1e-4)


@pytest.mark.parametrize("exploit", [True, False])
def test_for_nonsymmetric_matrices_ift_is_exact_and_ddn_is_not(exploit):
    A = NONSYMMETRIC["paper"]().requires_grad_()
    exact, ift, ddn = (
        torch.autograd.grad(loss_of(A, symmetric=False, gradient=rule), A)[0]
        for rule in (Implicit(), IFT(exploit=exploit), DDN(exploit=exploit))
    )
    assert (ift - exact).norm() <= 1e-10 * exact.norm()
    assert (ddn - exact).norm() >= 0.3 * exact.norm()


@pytest.mark.parametrize(
    "solver",
    [
        Dense(),
        PowerIteration(iterations=300, stop=False),
        SimultaneousIteration(iterations=300, stop=False),
        SimultaneousIteration(iterations=300, stop=False, full=True),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore::pmaf.ConvergenceWarning")
def test_unrolling_converges_to_the_implicit_gradient(solver):
    A = with_eigenvalues([3.0, 2.0, 0.5, -0.1]).requires_grad_()
    (found,) = torch.autograd.grad(loss_of(A, solver=solver, gradient=Unroll()), A)
    (expected,) = torch.autograd.grad(loss_of(A), A)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("solver", [None, Lanczos(), PowerIteration()], ids=repr)
@pytest.mark.parametrize("name", REPEATED_TOP)
def test_finite_through_a_repeated_requested_eigenvalue(name, solver, k):
    if k == 2 and isinstance(solver, PowerIteration):
        pytest.skip("one eigenvector only")
    A = REPEATED_TOP[name]().requires_grad_()
    (found,) = torch.autograd.grad(loss_of(A, k, solver=solver), A)
    assert torch.isfinite(found).all()
    assert found.abs().max() < 1e3
    assert pmaf.solve(pmaf.PrincipalEigenvectors(A, k), solver=solver).gap.abs() <= 1e-14


def test_a_projector_has_a_gradient_even_if_its_vectors_have_none():
    """YYᵀ is smooth where two requested eigenvalues meet, though the vectors are not."""
    A = torch.diag(torch.tensor([3.0, 3.0, 1.0, 0.0], dtype=torch.float64)).requires_grad_()

    def loss(A):
        Y = pmaf.ied(A, 2).vectors
        return (Y @ Y.mT * weights(4, 4)).sum()

    (found,) = torch.autograd.grad(loss(A), A)
    torch.testing.assert_close(found, oracles.differences(loss, A.detach()), rtol=0, atol=1e-7)


def test_only_what_is_asked_for():
    A = with_eigenvalues([3.0, 2.0, 0.5]).requires_grad_()
    values, vectors = pmaf.ied(A)
    (dA,) = torch.autograd.grad(values, A, retain_graph=True)
    y = vectors.detach()
    torch.testing.assert_close(dA, torch.outer(y, y))
    assert torch.autograd.grad(vectors.sum(), A)[0].abs().max() > 0
    assert not pmaf.ied(A.detach()).values.requires_grad


def test_a_module_with_the_layer_trains():
    """Learn weights of features so that the principal direction points where it should."""
    g = torch.Generator().manual_seed(1)
    X = torch.randn(200, 5, generator=g)
    target = torch.nn.functional.normalize(torch.tensor([1.0, 2.0, 0.0, -1.0, 0.5]), dim=0)
    mix = torch.nn.Parameter(torch.eye(5))
    layer = pmaf.IED()
    optimiser = torch.optim.Adam([mix], lr=0.05)
    errors = []
    for _ in range(80):
        optimiser.zero_grad()
        Z = X @ mix
        error = 1 - (layer(Z.mT @ Z / 200).vectors @ target).square()
        error.backward()
        optimiser.step()
        errors.append(float(error.detach()))
    assert errors[-1] < 0.02 < errors[0]


@pytest.mark.parametrize("k", [1, 3])
def test_jacobians_by_iteration(k):
    """Right-hand sides for one matrix are solved for together, each with its own shift."""
    A = with_eigenvalues([5.0, 4.0, 2.5, *torch.linspace(1, -1, 37).tolist()])

    def call(A):
        return pmaf.ied(A, k, solver=Lanczos(depth=4)).vectors[:4]

    found = torch.func.jacrev(call)(A)
    leaf = A.clone().requires_grad_()
    flat = call(leaf).flatten()
    rows = [torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in flat]
    expected = torch.stack(rows).reshape(found.shape)
    # The gap that counts is one half, of a matrix of norm five.
    close = 1e3 * torch.finfo(A.dtype).eps * 5 / 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=close)
