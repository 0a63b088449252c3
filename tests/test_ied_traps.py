"""IED where it is easy to get wrong: one named trap each."""

import pytest
import torch

import pmaf
from pmaf.gradients import DDN, IFT, Implicit, Unroll
from pmaf.solvers import Dense, Lanczos, PowerIteration, SimultaneousIteration
from tests.ied_cases import with_eigenvalues

T = torch.float64


def unit(n, dtype=T, seed=0):
    x = torch.randn(n, 1, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return x / x.norm()


@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("solver", [None, Lanczos()], ids=repr)
@pytest.mark.parametrize(
    "make",
    [
        lambda n, x: -torch.eye(n, dtype=x.dtype) + 0.5 * x @ x.T,
        lambda n, x: torch.eye(n, dtype=x.dtype),
        lambda n, x: torch.ones(n, n, dtype=x.dtype),
        lambda n, x: torch.zeros(n, n, dtype=x.dtype),
        lambda n, x: torch.diag(torch.cat([x.new_tensor([5, 4, 3]), x.new_zeros(n - 3)])),
        lambda n, x: n * torch.eye(n, dtype=x.dtype) - torch.ones(n, n, dtype=x.dtype),
    ],
    ids=["-I+xx'/2", "identity", "ones", "zero", "rank 3", "complete graph"],
)
def test_an_invariant_krylov_space(make, solver, largest, dtype):
    """Few distinct eigenvalues: the Krylov space stops growing at once."""
    n = 400
    A = make(n, unit(n, dtype))
    problem = pmaf.PrincipalEigenvectors(A, largest=largest)
    solution = pmaf.solve(problem, solver=solver)
    assert pmaf.certify(problem, solution).holds(64 * torch.finfo(dtype).eps)
    exact = torch.linalg.eigvalsh(A.double())[-1 if largest else 0]
    assert (solution.multiplier - exact).abs() <= 64 * torch.finfo(dtype).eps * A.norm()


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (torch.float32, [1e17, 1e30, 1e-17, 1e-25, 1e-30]),
        (T, [1e160, 1e300, 1e-160, 1e-300]),
    ],
    ids=["float32", "float64"],
)
@pytest.mark.parametrize("n", [5, 400])
def test_extreme_scales(n, dtype, scales):
    A = torch.randn(n, n, generator=torch.Generator().manual_seed(1), dtype=dtype)
    A = A + A.mT
    solvers = [None] if n == 400 else [None, PowerIteration(), SimultaneousIteration()]
    for solver in solvers:
        value, vector = pmaf.ied(A, solver=solver)
        for scale in scales:
            found = pmaf.ied(A * scale, solver=solver)
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(found.values / scale, value, rtol=1e2 * eps, atol=0)
            torch.testing.assert_close(found.vectors, vector, rtol=0, atol=1e4 * eps)
            problem = pmaf.PrincipalEigenvectors(A * scale)
            assert pmaf.certify(problem, found.vectors).holds(1e3 * eps)
            assert not pmaf.certify(problem, torch.roll(found.vectors, 1)).holds(1e-3)


def test_entries_near_the_largest_number():
    values, _ = pmaf.ied(torch.diag(torch.tensor([3e38, 1e38])))
    assert values == pytest.approx(3e38)


def test_plus_and_minus_the_same_modulus_is_not_converged():
    problem = pmaf.PrincipalEigenvectors(torch.diag(torch.tensor([1.0, -1.0])), symmetric=False)
    for solver in (SimultaneousIteration(), PowerIteration()):
        with pytest.warns(pmaf.ConvergenceWarning):
            assert not pmaf.solve(problem, solver=solver).converged


@pytest.mark.parametrize("scale", [1e15, 1e-15, 1e100])
@pytest.mark.parametrize("rule", [Implicit(), IFT(), DDN()], ids=repr)
@pytest.mark.parametrize("symmetric", [True, False])
def test_gradients_scale(symmetric, rule, scale):
    A = torch.rand(8, 8, generator=torch.Generator().manual_seed(2), dtype=T)

    def gradient(A):
        A = A.clone().requires_grad_()
        vectors = pmaf.ied(A, symmetric=symmetric, gradient=rule).vectors
        return torch.autograd.grad(vectors @ torch.arange(8.0).double(), A)[0]

    torch.testing.assert_close(gradient(A * scale) * scale, gradient(A), rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore::pmaf.ConvergenceWarning")
@pytest.mark.parametrize("rule", [Implicit(), IFT(), DDN()], ids=repr)
def test_a_hopeless_entry_does_not_touch_the_others(rule):
    good = torch.rand(3, 3, generator=torch.Generator().manual_seed(3), dtype=T)
    for bad in (
        torch.eye(3),
        torch.zeros(3, 3),
        torch.tensor([[0.0, -1, 0], [1, 0, 0], [0, 0, 0]]),
    ):
        A = torch.stack([good, bad.double()]).requires_grad_()
        vectors = pmaf.ied(A, symmetric=False, gradient=rule).vectors
        (both,) = torch.autograd.grad(vectors.sum(), A)
        assert torch.isfinite(both).all()
        alone = pmaf.ied(A[0], symmetric=False, gradient=rule).vectors
        (expected,) = torch.autograd.grad(alone.sum(), A)
        torch.testing.assert_close(both[0], expected[0])


def rotated(values, seed=0):
    return with_eigenvalues(values, seed).requires_grad_()


@pytest.mark.parametrize(
    ("A", "k", "largest"),
    [
        (lambda: rotated([5.0, 4.0, 3.0, *[0.0] * 17]), 2, False),
        (lambda: rotated([2.0] * 6), None, True),
        (lambda: rotated([3.0, 2.0, 2.0, 2.0, *torch.linspace(0, 1, 396).tolist()], 4), 2, True),
    ],
    ids=["null space", "multiple of the identity", "k-th equal to the next"],
)
def test_repeated_requested_eigenvalues_get_gradients_of_ordinary_size(A, k, largest):
    A = A()
    vectors = pmaf.ied(A, k, largest=largest).vectors
    weights = torch.cos(torch.arange(float(vectors.numel())).double()).reshape(vectors.shape)
    (found,) = torch.autograd.grad((vectors * weights).sum(), A)
    assert found.abs().max() < 1e4


class TestReferenceShapes:
    A = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(5))

    def test_one_vector_per_entry_when_batch_and_size_agree(self):
        reference = torch.randn(4, 4)
        for k in (1, 2, 4):
            vectors = pmaf.ied(self.A, k=k, reference=reference).vectors
            assert vectors.shape == (4, 4, k)
            assert ((vectors * reference.unsqueeze(-1)).sum(-2) >= 0).all()

    def test_a_block_for_all_entries(self):
        reference = torch.randn(4, 2)
        vectors = pmaf.ied(self.A[:3], k=2, reference=reference).vectors
        assert ((vectors * reference).sum(-2) >= 0).all()

    def test_a_start_for_all_columns(self):
        generator = torch.Generator().manual_seed(0)
        solver = SimultaneousIteration(iterations=5000)
        values = pmaf.ied(self.A[0], 4, solver=solver, generator=generator).values
        torch.testing.assert_close(values, pmaf.ied(self.A[0], 4).values)


def test_autocast_leaves_unrolled_iterations_in_their_own_precision():
    A = with_eigenvalues([3.0, 1.0, 0.5]).float()
    expected = pmaf.ied(A, solver=PowerIteration(), gradient=Unroll()).vectors
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = pmaf.ied(A, solver=PowerIteration(), gradient=Unroll()).vectors
    assert torch.equal(found, expected)


def test_a_start_at_the_wrong_eigenvector_does_not_stay_there():
    A = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=T))
    problem = pmaf.PrincipalEigenvectors(A)
    for solver in (PowerIteration(), SimultaneousIteration(), Lanczos()):
        for init in (torch.tensor([0.0, 1.0, 0.0], dtype=T), torch.zeros(3, dtype=T)):
            solution = pmaf.solve(problem, solver=solver, init=init)
            assert solution.multiplier == pytest.approx(3)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Lanczos(extra=-1),
        lambda: Lanczos(depth=1),
        lambda: Lanczos(restarts=0),
        lambda: PowerIteration(iterations=0),
        lambda: SimultaneousIteration(iterations=-1),
    ],
)
def test_wrong_options(build):
    with pytest.raises(ValueError, match="must be an integer of at least"):
        build()


def test_as_accurate_as_eigh_when_the_interesting_part_is_small():
    g = torch.Generator().manual_seed(6)
    X = torch.randn(600, 600, generator=g, dtype=T)
    B = (X + X.mT) / (X + X.mT).norm()
    A = torch.eye(600, dtype=T) + 1e-8 * B
    truth = torch.linalg.eigh(B)[1][:, -1]
    errors = [1 - (pmaf.ied(A, solver=solver).vectors @ truth).abs() for solver in (None, Dense())]
    assert errors[0] <= 4 * errors[1] + 1e-15


@pytest.mark.parametrize(
    ("dtype", "coupling"),
    [(torch.float32, 1e-8), (torch.float32, 1e-7), (T, 1e-18), (T, 1e-16)],
    ids=str,
)
def test_blocks_of_a_positive_matrix_that_are_hardly_coupled(dtype, coupling):
    """The vector of the smaller block is positive and has next to no residual."""
    generator = torch.Generator().manual_seed(0)
    blocks = [
        value + 0.1 * torch.rand(n, n, generator=generator, dtype=T)
        for value, n in ((3, 20), (2, 40))
    ]
    A = torch.block_diag(*blocks).to(dtype) + coupling
    exact = torch.linalg.eigvals(A.double()).abs().max()
    assert float(pmaf.ied(A, symmetric=False).values) == pytest.approx(float(exact), rel=1e-5)


def test_mapping_over_a_start():
    """One start after another for a batch of matrices that all of them have in common."""
    A = torch.stack([with_eigenvalues([3.0, 2.0, 0.5, 0.1], seed) for seed in (1, 2)])
    inits = torch.eye(4, dtype=T)[:3]
    solver = PowerIteration()
    mapped = torch.func.vmap(lambda init: pmaf.ied(A, init=init, solver=solver).vectors)(inits)
    expected = torch.stack([pmaf.ied(A, init=init, solver=solver).vectors for init in inits])
    torch.testing.assert_close(mapped, expected, rtol=0, atol=1e-12)
