"""The default solver of IED: every way it may take, and what must not fool it."""

import pytest
import torch

import pmaf
from pmaf.gradients import Implicit
from pmaf.krylov.power import Start, dominant
from pmaf.krylov.proved import Ritz, certificate
from pmaf.linalg.roundings import DECOMPOSED
from pmaf.linalg.symmetric_part import SymmetricPart, fixed_rows
from pmaf.solvers import Adaptive, Dense, PowerIteration, adaptive
from tests.ied_cases import with_eigenvalues

T = torch.float64
# Every attempt is made, however small the matrices.
EAGER = Adaptive(
    power_from=0, power_size=1, general_from=0, krylov_from=0, krylov_size=2, compiled=False
)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Small matrices may take a large part of their size in dimensions."""
    monkeypatch.setattr(adaptive, "_limit", lambda n: n // 3)


@pytest.fixture
def ways(monkeypatch):
    """Which of the ways have led to a solution."""
    taken = []

    def watched(name, call):
        def tried(*args, **options):
            found = call(*args, **options)
            taken.extend([name] * (found is not None))
            return found

        return tried

    named = {"dominant": "dominant", "dominant_of_sum": "dominant", "_krylov": "_krylov"}
    for name, way in named.items():
        monkeypatch.setattr(adaptive, name, watched(way, getattr(adaptive, name)))
    return taken


def family(name, n=90, batch=4, seed=1):
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(batch, n, n, generator=g, dtype=T)
    if name == "dominant":
        return X.abs() + X.abs().mT
    rest = torch.linspace(0.8, -0.5, n - 1).tolist()
    return torch.stack([with_eigenvalues([1.0, *rest], seed) for seed in range(batch)])


def outputs(A, k=None, solver=EAGER, **options):
    A = A.clone().requires_grad_()
    values, vectors = pmaf.ied(A, k, solver=solver, **options)
    weights = torch.cos(torch.arange(float(vectors.numel())).to(A)).reshape(vectors.shape)
    (gradient,) = torch.autograd.grad((vectors * weights).sum() + values.sum(), A)
    return values.detach(), vectors.detach(), gradient


def same(A, k=None, factor=1e3, **options):
    found, expected = outputs(A, k, **options), outputs(A, k, solver=Dense(), **options)
    for x, y in zip(found, expected, strict=True):
        tolerance = factor * torch.finfo(A.dtype).eps * float(y.abs().max())
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize("shape", [(4,), (), (2, 2)], ids=str)
@pytest.mark.parametrize(("name", "way"), [("dominant", "dominant"), ("spread", "_krylov")])
def test_each_way_agrees_with_the_decomposition(name, way, shape, dtype, ways):
    A = family(name, batch=max(1, torch.Size(shape).numel())).reshape(*shape, 90, 90).to(dtype)
    same(A)
    assert ways == [way]
    same(-A, largest=False)
    same(A.mT)


def test_several_vectors(ways):
    A = torch.stack(
        [with_eigenvalues([3.0, 2.5, 2.0, *torch.linspace(1, -1, 87).tolist()], s) for s in (1, 2)]
    )
    same(A.float(), 3)
    same(A.float(), 2, descending=False)
    assert ways == ["_krylov"] * 2


@pytest.mark.parametrize("n", [200, 300])
def test_several_vectors_of_matrices_too_large_to_copy(n, ways):
    rest = torch.linspace(1, -1, n - 4).tolist()
    A = torch.stack([with_eigenvalues([9.0, 3.0, 2.5, 2.0, *rest], seed) for seed in (1, 2)])
    for dtype in (torch.float32, T):
        same(A.to(dtype), 4)
    assert ways == ["_krylov"] * 2


def test_a_batch_of_both_kinds(ways):
    easy = family("spread", batch=3)
    hard = with_eigenvalues([1.0, 1 - 1e-7, *torch.linspace(0.5, -0.5, 88).tolist()], 7)
    same(torch.cat([easy, hard.unsqueeze(0)]), factor=1e9)
    values, vectors = pmaf.ied(torch.cat([easy, hard.unsqueeze(0)]), solver=EAGER)
    torch.testing.assert_close(values[:3], pmaf.ied(easy, solver=EAGER).values)
    torch.testing.assert_close(vectors[:3], pmaf.ied(easy, solver=EAGER).vectors)
    assert ways


@pytest.mark.parametrize(
    ("k", "other"),
    [(None, [2.5, 2.5 - 1e-7, 2.0]), (None, [2.5, 2.5, 2.0]), (3, [2.5, 2.2, 2.0, 2.0])],
    ids=["close", "equal", "equal to the last of three"],
)
def test_a_batch_of_which_one_has_to_be_decomposed(k, other, ways):
    rest = torch.linspace(1, -1, 87).tolist()
    A = torch.stack([with_eigenvalues([3.0, 2.5, 2.0, *rest], seed) for seed in range(4)])
    A[2] = with_eigenvalues([*other, *rest][:90], 7)
    found, expected = outputs(A, k), outputs(A, k, solver=Dense())
    torch.testing.assert_close(found[0], expected[0])
    # Rounding of A decides the vectors of its equal eigenvalues, and whether they count as equal.
    simple = torch.tensor([0, 1, 3])
    for x, y in zip(found[1:], expected[1:], strict=True):
        tolerance = 1e3 * torch.finfo(T).eps * float(y[simple].abs().max())
        torch.testing.assert_close(x[simple], y[simple], rtol=0, atol=tolerance)
    assert found[2].isfinite().all()
    problem = pmaf.PrincipalEigenvectors(A, k)
    solution = pmaf.solve(problem, solver=EAGER)
    # The report is of the decomposition, not of the attempt before it.
    assert (solution.residual <= problem.n * torch.finfo(T).eps).all()
    assert ways == ["_krylov"] * 2


@pytest.mark.parametrize("seed", range(4))
def test_equal_eigenvalues_inside_the_group(seed, ways):
    """Their vectors are free to turn; values, projector and its gradient are not."""
    A = with_eigenvalues([2.5, 2.5, 2.0, *torch.linspace(1, -1, 87).tolist()], seed)
    weights = torch.cos(torch.arange(8100.0, dtype=T)).reshape(90, 90)

    def outcome(solver):
        B = A.clone().requires_grad_()
        values, V = pmaf.ied(B, 3, solver=solver)
        projector = V @ V.mT
        (gradient,) = torch.autograd.grad((projector * weights).sum(), B)
        return values.detach(), projector.detach(), gradient

    for x, y in zip(outcome(EAGER), outcome(Dense()), strict=True):
        atol = 1e3 * torch.finfo(T).eps * float(y.abs().max())
        torch.testing.assert_close(x, y, rtol=0, atol=atol)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_spikes_over_a_bulk_need_no_decomposition(k, seed, ways):
    """The steps that refine several vectors converge linearly, and all of them may be needed."""
    n = 450
    g = torch.Generator().manual_seed(seed)
    W = torch.randn(n, n, generator=g, dtype=T) / n**0.5
    spikes = torch.linalg.qr(torch.randn(n, 3, generator=g, dtype=T)).Q
    A = 0.5 * (W + W.mT) + (spikes * torch.tensor([8.0, 5.0, 4.0], dtype=T)) @ spikes.mT
    solution = pmaf.solve(pmaf.PrincipalEigenvectors(A, k), solver=Adaptive(krylov_from=0))
    assert ways == ["_krylov"]
    assert solution.residual <= DECOMPOSED * torch.finfo(T).eps
    expected = torch.linalg.eigvalsh(A).flip(-1)[:k]
    torch.testing.assert_close(solution.multiplier, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [1.0, 0.1, 1e-6])
@pytest.mark.parametrize("k", [1, 2])
def test_a_proof_is_of_the_symmetric_part(size, k):
    """The factorisation reads one triangle, which an antisymmetric part changes."""
    n = 300
    x = fixed_rows[n, T, torch.device("cpu")][0]
    g = torch.Generator().manual_seed(3)
    a, b = (torch.randn(n, generator=g, dtype=T) for _ in range(2))
    a, b = (v - x * (v @ x) / (x @ x) for v in (a, b))
    S = with_eigenvalues([3.0, 2.0, *torch.linspace(1, -1, n - 2).tolist()], 5)
    A = S + size * (torch.outer(a, b) - torch.outer(b, a)) / n
    part = SymmetricPart(A.unsqueeze(0))
    assert part.one_sided
    values, vectors = torch.linalg.eigh(S)
    one = torch.ones(1, dtype=T)
    found = Ritz(
        values[-k:].flip(0)[None], vectors[:, -k:].flip(-1).mT[None], one, 3 * one, one > 0, 1
    )
    factor, exists = certificate(part, found)
    assert exists
    y = found.rows[0]
    shift = float(values[-k]) - 8 * torch.finfo(T).eps * 3
    K = shift * torch.eye(n, dtype=T) - S + 6 * y.mT @ y
    atol = 1e2 * n * torch.finfo(T).eps
    torch.testing.assert_close(factor[0] @ factor[0].mT, K, rtol=0, atol=atol)


@pytest.mark.parametrize("top", [1.0, 0.3])
def test_a_start_without_the_answer_in_it(top):
    """The top eigenvector is exactly orthogonal to the start, and to every row's image."""
    n = 96
    start = fixed_rows[n, T, torch.device("cpu")][1]
    start = torch.cat([start[:-1], start.new_zeros(1)])
    q = torch.linalg.qr(torch.cat([start.unsqueeze(1), torch.randn(n, n - 1, dtype=T)], 1)).Q
    hidden = torch.zeros(n, dtype=T)
    hidden[-1] = 1
    q = q - torch.outer(hidden, hidden @ q)
    q = torch.linalg.qr(torch.cat([hidden.unsqueeze(1), q[:, : n - 1]], 1)).Q
    values = torch.cat([torch.tensor([top + 0.2]), torch.linspace(top, -1, n - 1)]).to(T)
    A = (q * values) @ q.mT
    A = 0.5 * (A + A.mT)
    torch.testing.assert_close(pmaf.ied(A, solver=EAGER).values, torch.tensor(top + 0.2, dtype=T))


@pytest.mark.parametrize(
    ("hidden", "k"), [(1.2, None), (1.2, 2), (0.9, 2)], ids=["top", "first of two", "last of two"]
)
def test_a_krylov_space_that_converges_without_the_answer_in_it(hidden, k, ways):
    n = 90
    start = fixed_rows[n, T, torch.device("cpu")][1]
    x = torch.randn(n, dtype=T)
    x = x - start * (x @ start) / (start @ start)
    q = torch.linalg.qr(torch.cat([x.unsqueeze(1), torch.randn(n, n - 1, dtype=T)], 1)).Q
    values = [hidden, 1.0, 0.8, *torch.linspace(0.3, -0.3, n - 3).tolist()]
    A = (q * torch.tensor(values, dtype=T)) @ q.mT
    found = pmaf.ied(A, k, solver=EAGER).values
    wanted = torch.tensor(sorted(values, reverse=True)[: k or 1], dtype=T)
    torch.testing.assert_close(found.reshape(-1), wanted)
    assert ways == []


@pytest.mark.parametrize(
    ("values", "k", "exists"),
    [
        ([1.0, 0.9, 0.5, -1.0], 1, True),
        ([1.0, 0.9, 0.5, -1.0], 2, True),
        ([1.0, 1.0, 0.5, -1.0], 1, False),
        ([1.0, 1.1, 0.5, -1.0], 1, False),
        ([1.0, 0.5, 0.5, -1.0], 2, False),
        ([1.0, 0.5, 0.9, -1.0], 2, False),
    ],
    ids=["one", "two", "a double", "a larger one", "a double last", "one in between"],
)
def test_what_the_certificate_of_the_first_vectors_says(values, k, exists):
    A = torch.diag(torch.tensor([values], dtype=T)[0]).unsqueeze(0)
    one = torch.ones(1, dtype=T)
    found = Ritz(
        torch.tensor([values[:k]], dtype=T), torch.eye(4, dtype=T)[None, :k], one, one, one > 0, 1
    )
    assert certificate(SymmetricPart(A), found)[1] == exists


def test_two_blocks_of_which_the_longest_row_is_in_the_wrong_one():
    small, large = 3.0 * torch.ones(20, 20, dtype=T), 2.0 * torch.ones(40, 40, dtype=T)
    value, vector = pmaf.ied(torch.block_diag(small, large), solver=EAGER)
    assert value == pytest.approx(80)
    assert vector[:20].abs().max() < 1e-12


@pytest.mark.parametrize("size", [1.0, 0.1])
def test_an_antisymmetric_part_that_the_first_glance_misses(size):
    n = 300
    x = fixed_rows[n, T, torch.device("cpu")][0]
    g = torch.Generator().manual_seed(3)
    a, b = (torch.randn(n, generator=g, dtype=T) for _ in range(2))
    a, b = (v - x * (v @ x) / (x @ x) for v in (a, b))
    S = family("dominant", n, batch=1)[0]
    A = S + size * (torch.outer(a, b) - torch.outer(b, a))
    assert SymmetricPart(A.unsqueeze(0)).one_sided
    same(A)


@pytest.mark.parametrize("size", [0.0, 1e-9, 1.0])
def test_one_matrix_of_a_batch_that_is_not_symmetric(size):
    """Of a size at which the symmetric part is not formed unless it has to be."""
    n = 300
    S = family("dominant", n, batch=2)
    X, x = torch.randn(n, n, dtype=T), torch.randn(2, 3, n, dtype=T)
    A = S.clone()
    A[1] += size * (X - X.mT)
    part = SymmetricPart(A)
    assert part.one_sided == (size == 0)
    image = x @ S
    for found in (part(x), part.exact(x)):
        bound = 1e2 * torch.finfo(T).eps * float(image.abs().max())
        torch.testing.assert_close(found, image, rtol=0, atol=bound)
    same(A)


def _dominant(A, row, **options):
    A, row = A.unsqueeze(0), row.reshape(1, 1, -1)

    def product(x):
        return x @ A.mT

    start = Start(row, A.norm().reshape(1, 1, 1), 0, 1.0)
    return dominant(product, product, start, 1e-4, symmetric=False, **options)


def test_a_share_that_is_lost_on_the_way_proves_nothing():
    """A start with 0.74 of the norm leads to an eigenvalue with less, below another."""
    A = torch.tensor([[1.0, 0.495, 0.0], [-0.495, 0.0, 0.0], [0.0, 0.0, 0.575]], dtype=T)
    e = torch.eye(3, dtype=T)[0]
    assert e @ A @ e > 0.74 * A.norm()
    assert torch.linalg.eigvals(A).abs().max() == pytest.approx(0.575)
    assert _dominant(A, e) is None
    A[2, 2] = 0
    assert _dominant(A, e) is None
    A[1, 0] = 0
    assert _dominant(A, e).values == pytest.approx(1.0)


def test_a_vector_of_two_signs_proves_nothing_about_a_positive_matrix():
    A = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=T)
    rows = torch.tensor([[1.0, -1.0], [1.0, 1.0]], dtype=T)
    assert _dominant(0.5 + A, rows[0], is_positive=lambda: True) is None
    assert _dominant(0.5 + A, rows[1], is_positive=lambda: True).values == pytest.approx(4)


def test_a_positive_vector_proves_nothing_about_a_matrix_that_is_not_positive():
    """No product from its longest row sees the alternating vector, which has more than 6."""
    A = torch.full((36, 36), 2.0**-7, dtype=T)
    A[:4, :4] = 1
    c = torch.tensor([1.0, -1.0], dtype=T).repeat(16)
    A[4:, 4:] += 6 / 32 * torch.outer(c, c)
    A += torch.diag(torch.linspace(0, 0.1, 18, dtype=T).repeat_interleave(2))
    values = torch.linalg.eigvals(A).real.sort().values
    assert values[-1] > 6 > 5 > values[-2] > 4
    assert pmaf.ied(A, symmetric=False, solver=EAGER).values == pytest.approx(float(values[-1]))


def test_positive_matrices_that_are_far_from_rank_one(ways):
    """Columns of a stochastic matrix sum to one, and so does its dominant eigenvalue."""
    g = torch.Generator().manual_seed(4)
    P = torch.rand(3, 30, 30, generator=g, dtype=T) * 0.2 + 0.01 + 10 * torch.eye(30).roll(1, 0)
    P = P / P.sum(-2, keepdim=True)
    found = pmaf.ied(P, symmetric=False, solver=EAGER)
    torch.testing.assert_close(found.values, torch.ones(3, dtype=T))
    same(P, symmetric=False)


def test_nonsymmetric_matrices_with_and_without_a_dominant_eigenvalue(ways):
    g = torch.Generator().manual_seed(5)
    X = torch.randn(3, 40, 40, generator=g, dtype=T)
    same(X.abs(), symmetric=False)
    same(-X.abs(), symmetric=False)
    assert ways == ["dominant"] * 2
    y = torch.randn(40, 1, generator=g, dtype=T)
    same(X + 3 * y @ y.mT, symmetric=False, factor=1e4)


def test_second_derivatives_with_a_factor(ways):
    A = family("spread", batch=1)[0]
    direction = torch.randn(90, 90, generator=torch.Generator().manual_seed(6), dtype=T)

    def second(solver):
        t = torch.zeros((), dtype=T, requires_grad=True)
        loss = pmaf.ied(A + t * direction, solver=solver).vectors.sum()
        (first,) = torch.autograd.grad(loss, t, create_graph=True)
        return torch.autograd.grad(first, t)[0]

    torch.testing.assert_close(second(EAGER), second(Dense()), rtol=1e-8, atol=0)
    assert ways == ["_krylov"]


@pytest.mark.parametrize("name", ["dominant", "spread"])
def test_any_scale(name):
    A = family(name)
    vectors = pmaf.ied(A, solver=EAGER).vectors
    for scale in (1e200, 1e-200):
        B = (A * scale).requires_grad_()
        found = pmaf.ied(B, solver=EAGER)
        torch.testing.assert_close(found.vectors, vectors)


@pytest.mark.parametrize("name", ["dominant", "spread"])
def test_a_report_says_how_it_was_found(name):
    problem = pmaf.PrincipalEigenvectors(1e6 * family(name))
    solution = pmaf.solve(problem, solver=EAGER, gradient=Implicit())
    assert solution.converged.all()
    assert (solution.iterations > 0).all()
    assert (solution.residual > 0).all()
    assert (solution.residual <= DECOMPOSED * torch.finfo(T).eps).all()
    assert pmaf.certify(problem, solution).holds(1e-12).all()


def test_a_run_without_stopping_test_is_careful_where_it_has_to_be():
    """A zero matrix has no image to normalise; its entry alone keeps its start."""
    A = torch.stack([with_eigenvalues([3.0, 1.0, 0.5]), torch.zeros(3, 3).to(T)])
    solver = PowerIteration(iterations=80, stop=False, shift=0.0)
    values, vectors = pmaf.ied(A, solver=solver)
    torch.testing.assert_close(values, torch.tensor([3.0, 0.0], dtype=T))
    assert torch.isfinite(vectors).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_less_than_half_of_the_norm_proves_nothing(symmetric):
    """The longest row leads to 0.70 of the norm, an eigenvector, and 0.71 is elsewhere."""
    n = 40
    x = torch.cos(torch.arange(n, dtype=T))
    x[0] = 0
    x = x / x.norm()
    A = 0.71 * torch.outer(x, x)
    A[0, 0] = 0.70
    value, vector = pmaf.ied(A, symmetric=symmetric, solver=EAGER)
    assert float(value) == pytest.approx(0.71, rel=1e-12)
    assert float((vector @ x).abs()) == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_a_krylov_space_that_has_all_digits_without_the_answer_in_it(seed, ways):
    """Twelve eigenvalues show, and no more vectors are made: a residual of rounding is no proof."""
    n = 40
    g = torch.Generator().manual_seed(seed)
    start = fixed_rows[n, T, torch.device("cpu")][1]
    x = torch.randn(n, dtype=T, generator=g)
    x = x - start * (x @ start) / (start @ start)
    others = torch.randn(n, n - 1, dtype=T, generator=g)
    q = torch.linalg.qr(torch.cat([x.unsqueeze(1), others], 1)).Q
    ten = torch.linspace(0.3, -0.3, 10, dtype=T)
    values = torch.cat([torch.tensor([1.2, 1.0, 0.8], dtype=T), ten.repeat(4)[: n - 3]])
    found = pmaf.ied((q * values) @ q.mT, solver=EAGER).values
    torch.testing.assert_close(found, values[0])
    assert ways == []
