"""IED: solver × dtype × family against float64 eigh and eig."""

import pytest
import torch

import pmaf
from pmaf.solvers import (
    Adaptive,
    Auto,
    Dense,
    Krylov,
    Lanczos,
    PowerIteration,
    Reduction,
    SimultaneousIteration,
)
from pmaf_lab.bench.families import EIGEN
from tests.ied_cases import NONSYMMETRIC, REPEATED_TOP, SYMMETRIC, drawn, with_eigenvalues

DTYPES = [torch.float32, torch.float64]


def wanted(A, k, largest):
    """The requested part of float64 `eigh`, descending, and how well vectors are determined."""
    values, vectors = torch.linalg.eigh(A)
    order = torch.arange(len(values)).flip(0) if largest else torch.arange(len(values))
    values, vectors = values[order], vectors[:, order]
    apart = (values.unsqueeze(1) - values).abs() + torch.diag(torch.full_like(values, torch.inf))
    gaps = apart.amin(1)
    chosen = slice(0, k)
    values, vectors, gaps = values[chosen], vectors[:, chosen], gaps[chosen]
    return (values, vectors, gaps) if largest else (
        values.flip(0), vectors.flip(1), gaps.flip(0)
    )  # fmt: skip


def check(A, k, largest, solver, dtype, scale=1.0, tolerance=200.0):
    n = A.shape[-1]
    k = n if k == "n" else k
    # What float32 sees is the matrix in float32.
    given = (A * scale).to(dtype)
    exact = given.double()
    exact = 0.5 * (exact + exact.T)
    values, vectors = pmaf.ied(given, k, largest=largest, descending=True, solver=solver)
    true_values, true_vectors, gaps = wanted(exact, k, largest)
    size = exact.norm()
    eps = torch.finfo(dtype).eps
    assert (values.double() - true_values).abs().max() <= tolerance * eps * size
    signs = torch.sign((vectors.double() * true_vectors).sum(0))
    distance = (vectors.double() - signs * true_vectors).norm(dim=0)
    determined = gaps > 1e3 * eps * size
    assert (distance <= tolerance * eps * (1 + size / gaps))[determined].all()
    gram = vectors.mT @ vectors
    torch.testing.assert_close(gram, torch.eye(k, dtype=dtype), rtol=0, atol=64 * eps)
    assert (vectors.sum(0) >= -64 * eps * n**0.5).all()


@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("k", [1, 3, "n"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SYMMETRIC)
def test_default_matches_eigh(name, dtype, k, largest):
    A = SYMMETRIC[name]()
    if k != "n" and k > len(A):
        pytest.skip("fewer eigenvectors than asked for")
    check(A, k, largest, Auto(), dtype)
    for scale in (1e15, 1e-15) if dtype == torch.float64 else (1e8, 1e-8):
        check(A, k, largest, Auto(), dtype, scale)


# Sixteen rows, so that the space of `Lanczos(depth=3)` is not the whole.
KIND = {
    **{name: drawn(EIGEN[name], 16) for name in ("paper", "wishart", "goe", "spiked")},
    **{name: SYMMETRIC[name] for name in ("negative definite", "|λ_min| > λ_max")},
}


@pytest.mark.parametrize(
    ("solver", "k"),
    [
        (Dense(), 3),
        (Lanczos(depth=3), 2),
        (PowerIteration(), 1),
        (SimultaneousIteration(iterations=20_000), 2),
        (SimultaneousIteration(iterations=20_000, full=True), 2),
    ],
    ids=repr,
)
@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KIND)
def test_every_solver_where_gaps_are_kind(name, dtype, largest, solver, k):
    check(KIND[name](), k, largest, solver, dtype, tolerance=1e3)


@pytest.mark.parametrize("family", ["paper", "wishart", "goe", "gap-1e-4"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_n_512(family, k, dtype):
    A = drawn(EIGEN[family], 512)()
    assert isinstance(Auto().resolve(pmaf.PrincipalEigenvectors(A.to(dtype), k)), Adaptive)
    check(A, k, True, Auto(), dtype)
    check(A, k, False, Auto(), dtype)


def test_auto_is_as_accurate_as_dense():
    g = torch.Generator().manual_seed(6)
    X = torch.randn(4, 400, 400, generator=g)
    for A in (X.abs() + X.abs().mT, X.mT @ X / 400, X + X.mT):
        problem = pmaf.PrincipalEigenvectors(A)
        residuals = [
            pmaf.certify(problem, pmaf.solve(problem, solver=solver)).stationarity.max()
            for solver in (Auto(), Dense())
        ]
        assert residuals[0] <= residuals[1] + 8 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("solver", [Auto(), PowerIteration(shift=0.0)], ids=repr)
@pytest.mark.parametrize("name", NONSYMMETRIC)
def test_nonsymmetric_matches_eig(name, dtype, solver):
    A = NONSYMMETRIC[name]().to(dtype)
    value, vector = pmaf.ied(A, symmetric=False, solver=solver)
    values, vectors = torch.linalg.eig(A.double())
    first = values.abs().argmax()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(value.double(), values[first].real, rtol=1e3 * eps, atol=0)
    truth = vectors[:, first].real
    truth = truth / truth.norm() * torch.sign(truth.sum())
    torch.testing.assert_close(vector.double(), truth, rtol=0, atol=1e4 * eps)


@pytest.mark.parametrize(
    "A",
    [
        torch.tensor([[0.0, -1.0], [1.0, 0.0]]),
        torch.tensor([[0.0, 1.0], [1.0, 0.0]]),
        torch.tensor([[2.0, 1.0], [0.0, 2.0]]),
    ],
    ids=["complex", "plus and minus", "defective"],
)
def test_a_dominant_eigenvalue_that_is_not_real_and_simple_is_reported(A):
    problem = pmaf.PrincipalEigenvectors(A, symmetric=False)
    with pytest.warns(pmaf.ConvergenceWarning, match="complex or not simple"):
        solution = pmaf.solve(problem)
    assert not solution.converged
    assert solution.gap.abs() < 1e-3
    with pytest.raises(pmaf.ConvergenceError):
        pmaf.solve(problem, throw=True)


@pytest.mark.parametrize("solver", [Auto(), Dense(), Lanczos(), PowerIteration()], ids=repr)
@pytest.mark.parametrize("name", REPEATED_TOP)
def test_a_repeated_top_eigenvalue_gives_some_eigenvector_and_a_zero_gap(name, solver):
    A = REPEATED_TOP[name]()
    problem = pmaf.PrincipalEigenvectors(A)
    solution = pmaf.solve(problem, solver=solver)
    assert pmaf.certify(problem, solution).holds(1e-12)
    assert solution.gap.abs() <= 1e-14
    assert torch.equal(solution.value, pmaf.solve(problem, solver=solver).value)


class TestSigns:
    A = torch.diag(torch.tensor([3.0, 2.0, 1.0]))

    def test_all_ones_unless_given(self):
        for sign in (1.0, -1.0):
            vector = pmaf.ied(self.A, reference=torch.tensor([sign, 5.0, 5.0])).vectors
            assert torch.equal(vector, torch.tensor([sign, 0.0, 0.0]))

    def test_per_column_with_the_previous_solution(self):
        A = with_eigenvalues([4.0, 2.0, 1.0])
        before = pmaf.ied(A, k=2).vectors * torch.tensor([1.0, -1.0])
        for descending in (True, False):
            flip = before if descending else before.flip(-1)
            after = pmaf.ied(A, k=2, reference=flip, descending=descending).vectors
            torch.testing.assert_close(after, flip)

    def test_an_orthogonal_reference_changes_nothing(self):
        vector = pmaf.ied(self.A, reference=torch.tensor([0.0, 1.0, 0.0])).vectors
        assert torch.equal(vector, torch.tensor([1.0, 0.0, 0.0]))

    def test_a_batch_is_aligned_entry_by_entry(self):
        A = self.A.expand(2, 3, 3)
        reference = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]])
        assert torch.equal(pmaf.ied(A, reference=reference).vectors, reference)

    @pytest.mark.parametrize("solver", [PowerIteration(shift=0.0), SimultaneousIteration()])
    def test_iterates_are_aligned_with_their_history(self, solver):
        """A negative dominant eigenvalue flips every product, not the iterates."""
        A = torch.diag(torch.tensor([-3.0, 1.0, 0.5]))
        problem = pmaf.PrincipalEigenvectors(A, symmetric=False)
        solution = pmaf.solve(problem, solver=solver)
        assert solution.converged
        assert solution.iterations < 100
        assert solution.multiplier == pytest.approx(-3)


def test_order_and_its_gradient_flip_together():
    """Appendix C: the ascending decomposition of the flipped matrix is the flipped one."""
    A = with_eigenvalues([4.0, 3.0, 1.5, -2.0]).requires_grad_()
    weights = torch.randn(4, 4, dtype=torch.float64)
    down = pmaf.ied(A, k=4)
    up = pmaf.ied(A.flip(0, 1), k=4, descending=False)
    torch.testing.assert_close(up.values, down.values.flip(0))
    torch.testing.assert_close(up.vectors, down.vectors.flip(0, 1))
    (one,) = torch.autograd.grad((down.vectors * weights).sum(), A, retain_graph=True)
    (other,) = torch.autograd.grad((up.vectors * weights.flip(0, 1)).sum(), A)
    torch.testing.assert_close(one, other)


def test_the_symmetric_part_is_what_counts():
    A = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    values, vectors = pmaf.ied(A)
    torch.testing.assert_close(values, pmaf.ied(0.5 * (A + A.mT)).values)
    (gradient,) = torch.autograd.grad(vectors.sum() + values, A)
    torch.testing.assert_close(gradient, gradient.mT)


def test_batches_dtypes_shapes():
    A = torch.randn(2, 3, 4, 4)
    values, vectors = pmaf.ied(A)
    assert (values.shape, vectors.shape) == ((2, 3), (2, 3, 4))
    values, vectors = pmaf.ied(A, k=2)
    assert (values.shape, vectors.shape) == ((2, 3, 2), (2, 3, 4, 2))
    torch.testing.assert_close(vectors[1, 2], pmaf.ied(A[1, 2], k=2).vectors)
    half = pmaf.ied(A.bfloat16())
    assert half.values.dtype == half.vectors.dtype == torch.bfloat16
    empty = pmaf.ied(torch.zeros(0, 4, 4), k=2)
    assert (empty.values.shape, empty.vectors.shape) == ((0, 2), (0, 4, 2))
    layer = pmaf.IED(k=2, largest=False)
    assert torch.equal(layer(A).values, pmaf.ied(A, k=2, largest=False).values)


def test_randomness_comes_in_through_the_generator_only():
    A = torch.randn(30, 30)
    solver = PowerIteration(iterations=3, stop=False, shift=0.0)

    def run(generator=None):
        with pytest.warns(pmaf.ConvergenceWarning):
            return pmaf.ied(A, solver=solver, generator=generator).vectors

    assert torch.equal(run(), run())
    seeded = [run(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(seeded[0], seeded[1])
    assert not torch.equal(seeded[0], seeded[2])


A = torch.randn(4, 4)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (dict(A=torch.randn(4, 3)), ValueError, r"A must be square.*got \(4, 3\)"),
        (dict(A=A[0]), ValueError, r"\(\*, n, n\); got \(4,\)"),
        (dict(A=A.long()), TypeError, r"torch.int64"),
        (dict(k=0), ValueError, r"between 1 and n = 4; got 0"),
        (dict(k=5), ValueError, r"got 5"),
        (dict(k=2.0), TypeError, r"got 2.0"),
        (dict(k="2"), TypeError, r"k must be None or an integer; got '2'"),
        (dict(k=True), TypeError, r"got True"),
        (dict(k=torch.eye(3)), TypeError, r"got a tensor of shape \(3, 3\), pass the matrix to"),
        (dict(A=None), TypeError, r"A must be a torch.Tensor; got NoneType$"),
        (dict(k=2, symmetric=False), ValueError, r"dominant eigenvector only; got k=2"),
        (dict(largest=False, symmetric=False), ValueError, r"needs symmetric=True"),
        (dict(reference=torch.ones(3)), ValueError, r"reference must have shape \(\*, 4\)"),
        (dict(reference=torch.ones(4).double()), TypeError, r"reference is torch.float64"),
        (dict(k=3, solver=PowerIteration()), ValueError, r"one eigenvector, not k=3"),
        (dict(symmetric=False, solver=Lanczos()), ValueError, r"for symmetric matrices"),
        (dict(solver=pmaf.solvers.Secular()), TypeError, r"does not serve PrincipalEigen"),
        (dict(solver=Lanczos(), gradient=pmaf.gradients.Unroll()), TypeError, r"use Dense\(\)"),
        (dict(A=A * float("nan")), ValueError, r"A has non-finite values in 16 of 16 numbers"),
        (
            dict(A=torch.stack([A, A * float("inf")]), solver=PowerIteration()),
            ValueError,
            r"A has non-finite values in 1 of 2 batch entries",
        ),
    ],
)
def test_wrong_arguments(arguments, kind, words):
    with pytest.raises(kind, match=words):
        pmaf.ied(**(dict(A=A) | arguments))


@pytest.mark.parametrize("solver", [None, Dense(), Reduction(), Adaptive()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
@pytest.mark.parametrize("n", [3, 8, 130])
def test_nan_in_a_block_that_the_requested_vector_does_not_touch(n, dtype, solver):
    """LAPACK decomposes each block by itself, so that the other eigenvalues are finite."""
    A = torch.eye(n, dtype=dtype).repeat(2, 1, 1)
    A[1, 0, 0] = torch.nan
    for function in (pmaf.ied, lambda A, **options: pmaf.ied(A, k=2, largest=False, **options)):
        with pytest.raises(ValueError, match="A has non-finite values in 1 of 2 batch entries"):
            function(A, solver=solver)
    with pytest.raises(ValueError, match="A has non-finite values"):
        pmaf.spectral(A, "square")


@pytest.mark.parametrize(
    "layer", [pmaf.IED, pmaf.NullSpace, pmaf.ISVD, lambda k: pmaf.Spectral("sqrt", k)]
)
def test_a_matrix_is_passed_to_a_layer_and_not_to_its_class(layer):
    with pytest.raises(TypeError, match=r"got a tensor of shape \(3, 3\), pass the matrix to the"):
        layer(torch.eye(3))


def test_what_is_not_a_problem_or_a_solution():
    problem = pmaf.PrincipalEigenvectors(A)
    for given, words in (
        (A, "got Tensor"),
        (pmaf.PrincipalEigenvectors, "got the class PrincipalEigenvectors"),
        (pmaf.solve(problem), "got Solution"),
    ):
        with pytest.raises(TypeError, match=rf"instance of a pmaf.Problem; {words}"):
            pmaf.solve(given)
        with pytest.raises(TypeError, match=rf"instance of a pmaf.Problem; {words}"):
            pmaf.certify(given, A)
    with pytest.raises(TypeError, match=r"the vectors of pmaf.ied; got Eigenpairs"):
        pmaf.certify(problem, pmaf.ied(A))


@pytest.mark.parametrize(
    "solver", [None, Dense(), Lanczos(), SimultaneousIteration(), Krylov()], ids=repr
)
@pytest.mark.parametrize("largest", [True, False])
def test_the_gap_is_that_of_the_vectors_asked_for(largest, solver):
    """Eigenvalues that are closer to each other than to them are of no account."""
    A = with_eigenvalues([5.0, 4.2, 3.0, 1.0, 0.9, 0.6])
    A = A if largest else -A
    for k, gap in ((1, 0.8), (2, 0.8), (3, 0.8), (4, 0.1), (6, 0.1)):
        found = pmaf.solve(pmaf.PrincipalEigenvectors(A, k, largest=largest), solver=solver)
        assert float(found.gap) == pytest.approx(gap, abs=1e-12)


@pytest.mark.parametrize("k", [None, 2])
def test_a_certificate_tells_the_smallest_from_the_largest(k):
    A = with_eigenvalues([5.0, 3.0, 2.0, -1.0])
    for largest in (True, False):
        problem = pmaf.PrincipalEigenvectors(A, k, largest=largest)
        assert pmaf.certify(problem, pmaf.ied(A, k, largest=largest).vectors).holds(1e-12)
        assert not pmaf.certify(problem, pmaf.ied(A, k, largest=not largest).vectors).holds(0.1)
