"""Complex matrices: Hermitian eigenvectors with a phase, and least squares on a sphere."""

import logging

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import pmaf
from pmaf import native
from pmaf.gradients import DDN, IFT, Unroll
from pmaf.linalg.embedding import independent_rows, paired_rows, real_matrix, real_rows
from pmaf.operators import Diagonal, FromMatvec, Gram, LowRank, Matrix, Operator, Sparse
from pmaf.solvers import (
    Adaptive,
    Dense,
    Krylov,
    Lanczos,
    PowerIteration,
    Reduction,
    SimultaneousIteration,
)

F64, C64, C128 = torch.float64, torch.complex64, torch.complex128
EPS = torch.finfo(F64).eps


def drawn(*shape, seed=0, dtype=C128):
    g = torch.Generator().manual_seed(seed)
    parts = torch.randn(2, *shape, generator=g, dtype=F64)
    return torch.complex(*parts).to(dtype)


def with_eigenvalues(*values, seed=0):
    q = torch.linalg.qr(drawn(len(values), len(values), seed=seed))[0]
    return q * torch.tensor(values, dtype=C128) @ q.mH


def hermitian(*shape, seed=0):
    A = drawn(*shape, seed=seed)
    return A + A.mH


def ways(caplog):
    return {record.getMessage() for record in caplog.records if record.name == "pmaf"}


REPEATED = {
    "diag(3,1,1,1)": torch.diag(torch.tensor([3, 1, 1, 1], dtype=C128)),
    "I + 5xxᴴ": torch.eye(4, dtype=C128) + 5 * torch.outer(x := drawn(4), x.conj()),
    "turned": with_eigenvalues(3.0, 1.0, 1.0, 1.0, 0.0),
}


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [None, 1, 3])
@pytest.mark.parametrize("n", [1, 2, 3, 6, 17])
def test_values_and_vectors_are_those_of_eigh(n, k, largest):
    if k == 3 and n < 3:
        return
    A = hermitian(4, n, n)
    values, vectors = pmaf.ied(A, k, largest=largest, descending=True)
    assert (values.dtype, vectors.dtype) == (F64, C128)
    Y = vectors.reshape(4, n, k or 1)
    exact, basis = torch.linalg.eigh(A)
    order = torch.arange(n).flip(0)[: k or 1] if largest else torch.arange(k or 1).flip(0)
    size = float(exact.abs().max())
    gap = float(exact.diff(dim=-1).min()) if n > 1 else size
    wanted, found = exact[:, order], values.reshape(4, -1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=32 * EPS * size)
    # The moduli of inner products with eigh's vectors do not depend on phases.
    overlaps = (basis[:, :, order].mH @ Y).abs()
    eye = torch.eye(k or 1, dtype=F64).expand_as(overlaps)
    torch.testing.assert_close(overlaps, eye, rtol=0, atol=256 * EPS * size / gap)
    sums = Y.sum(-2)
    assert (sums.imag.abs() <= 32 * EPS * n).all()
    assert (sums.real > 0).all()


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [None, 1, 3])
@pytest.mark.parametrize("reference", [False, True])
def test_derivatives_are_those_of_differences(k, largest, reference):
    A = (hermitian(4, 4) + 3 * torch.diag(torch.arange(4)).to(C128)).requires_grad_()
    r = drawn(4, seed=3) if reference else None

    def layer(A):
        return pmaf.ied(A, k, largest=largest, reference=r)

    assert gradcheck(layer, A)
    assert gradgradcheck(layer, A, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("k", [None, 1])
@pytest.mark.parametrize("A", REPEATED.values(), ids=REPEATED.keys())
def test_derivatives_where_other_eigenvalues_repeat(A, k):
    A = A.clone().requires_grad_()
    assert gradcheck(lambda A: pmaf.ied(A, k), A)
    assert gradgradcheck(lambda A: pmaf.ied(A, k), A, atol=1e-4, fast_mode=True)


def test_where_eigh_has_no_gradient():
    A = REPEATED["diag(3,1,1,1)"].clone().requires_grad_()
    y = torch.linalg.eigh(A).eigenvectors[:, -1]
    (dA,) = torch.autograd.grad(y.abs().square()[0], A)
    assert not torch.isfinite(torch.view_as_real(dA)).all()
    (dA,) = torch.autograd.grad(pmaf.ied(A).vectors.abs().square()[0], A)
    assert torch.isfinite(torch.view_as_real(dA)).all()


@pytest.mark.parametrize("k", [None, 3])
def test_gradients_are_those_of_eigh_where_the_phase_has_no_effect(k):
    A, w = hermitian(3, 6, 6).requires_grad_(), drawn(6, k or 1, seed=2)

    def loss(values, vectors):
        return (vectors.abs().square() * w.real).sum() + values.square().sum()

    exact = torch.linalg.eigh(A)
    top = slice(-1, None) if k is None else slice(-k, None)
    values, vectors = exact.eigenvalues[:, top].flip(-1), exact.eigenvectors[..., top].flip(-1)
    (wanted,) = torch.autograd.grad(loss(values, vectors), A)
    values, vectors = pmaf.ied(A, k)
    (found,) = torch.autograd.grad(loss(values.reshape(3, -1), vectors.reshape(3, 6, -1)), A)
    # torch differentiates the lower triangle and pmaf the Hermitian part.
    wanted = 0.5 * (wanted + wanted.mH)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_a_loss_that_depends_on_the_phase():
    A, w = hermitian(5, 5).requires_grad_(), drawn(5, seed=2)
    with pytest.raises(RuntimeError, match="up to multiplication by e"):
        (torch.linalg.eigh(A).eigenvectors[:, -1] * w).sum().real.backward()
    assert gradcheck(lambda A: (pmaf.ied(A).vectors * w).sum(), A)


@pytest.mark.parametrize("k", [None, 1])
@pytest.mark.parametrize("largest", [True, False])
def test_the_gradient_is_the_formula_of_the_textbook(k, largest):
    """`v + i·r·Im(vᴴy)/(rᴴy)` comes in, the pseudoinverse of `λI − A` solves."""
    A, v, r = hermitian(6, 6), drawn(6, seed=1), drawn(6, seed=2)
    leaf = A.clone().requires_grad_()
    reference = None if k is None else r
    r = torch.ones_like(r) if k is None else r
    values, vectors = pmaf.ied(leaf, k, largest=largest, reference=reference)
    y, value = vectors.reshape(6), values.reshape(())
    (found,) = torch.autograd.grad((v.conj() * y).sum().real + 2 * value, leaf)
    y, value = y.detach(), value.detach()
    right = v + 1j * r * (v.conj() @ y).imag / (r.conj() @ y)
    z = torch.linalg.pinv(value * torch.eye(6, dtype=C128) - A, rtol=1e-9, hermitian=True) @ right
    outer = torch.outer(z, y.conj())
    wanted = 0.5 * (outer + outer.mH) + 2 * torch.outer(y, y.conj())
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("k", [None, 2])
def test_a_real_matrix_that_is_stored_as_complex(k):
    A = hermitian(3, 5, 5).real.clone().requires_grad_()
    w = drawn(5, k or 1, seed=2).real
    w = w[:, 0] if k is None else w
    values, vectors = pmaf.ied(A, k)
    (wanted,) = torch.autograd.grad((vectors * w).sum() + values.sum(), A)
    leaf = A.detach().to(C128).requires_grad_()
    found = pmaf.ied(leaf, k)
    (dA,) = torch.autograd.grad((found.vectors.real * w).sum() + found.values.sum(), leaf)
    torch.testing.assert_close(found.values, values, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(found.vectors, vectors.to(C128), rtol=0, atol=1e-12)
    torch.testing.assert_close(dA, wanted.to(C128), rtol=0, atol=1e-11)


def test_ten_thousand_matrices(caplog):
    caplog.set_level(logging.DEBUG, logger="pmaf")
    X = drawn(10_000, 6, 8)
    A = (X @ X.mH).requires_grad_()
    values, vectors = pmaf.ied(A)
    (dA,) = torch.autograd.grad((values + vectors[:, 0].real).sum(), A)
    if native.available:
        assert ways(caplog) == {"ied: complex reduction", "tangent: compiled"}
    exact = torch.linalg.eigvalsh(A.detach())
    torch.testing.assert_close(values.detach(), exact[:, -1], rtol=64 * EPS, atol=0)
    rest = A.detach() @ vectors.detach().unsqueeze(-1) - (values.unsqueeze(-1) * vectors).unsqueeze(
        -1
    )
    assert (rest.detach().abs().amax((-2, -1)) <= 64 * EPS * exact[:, -1]).all()
    some = A.detach()[17].clone().requires_grad_()
    values, vectors = pmaf.ied(some)
    (alone,) = torch.autograd.grad(values + vectors[0].real, some)
    torch.testing.assert_close(dA[17], alone, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("k", [None, 3])
def test_single_precision(k):
    A = (hermitian(20, 6, 6) + 4 * torch.diag(torch.arange(6)).to(C128)).to(C64).requires_grad_()
    wide = A.detach().to(C128).requires_grad_()
    found, exact = pmaf.ied(A, k), pmaf.ied(wide, k)
    assert (found.values.dtype, found.vectors.dtype) == (torch.float32, C64)
    spectrum = torch.linalg.eigvalsh(wide.detach())
    size, gap = float(spectrum.abs().max()), float(spectrum.diff(dim=-1)[:, -(k or 1) :].min())
    small = 64 * torch.finfo(C64).eps
    torch.testing.assert_close(found.values.double(), exact.values, rtol=0, atol=small * size)
    # The phase divides by the sum of a vector, and the gradient by the gap once more.
    sums = float(exact.vectors.detach().sum(1).abs().min())
    loss = small * size / gap / sums
    torch.testing.assert_close(found.vectors.to(C128), exact.vectors, rtol=0, atol=loss)
    w = drawn(*exact.vectors.shape, seed=1)
    (wanted,) = torch.autograd.grad((exact.vectors * w).real.sum(), wide)
    (dA,) = torch.autograd.grad((found.vectors * w.to(C64)).real.sum(), A)
    most = float(wanted.abs().max())
    torch.testing.assert_close(dA.to(C128), wanted, rtol=0, atol=10 * loss * most)


@pytest.mark.parametrize("dtype", [C64, C128], ids=str)
@pytest.mark.parametrize("c", [1e-15, 1e15])
@pytest.mark.parametrize("k", [None, 2])
def test_scale_changes_nothing(k, c, dtype):
    A = (hermitian(3, 4, 4) + 3 * torch.diag(torch.arange(4)).to(C128)).to(dtype)
    found = []
    for factor in (1.0, c):
        leaf = (factor * A).requires_grad_()
        values, vectors = pmaf.ied(leaf, k)
        (dA,) = torch.autograd.grad(vectors.imag.sum() + vectors.real.square()[:, 0].sum(), leaf)
        u = pmaf.less(leaf, factor * A[..., 0])
        found.append((values / factor, vectors, factor * dA, u))
    for x, y in zip(*found):
        most = float(x.detach().abs().max())
        torch.testing.assert_close(x, y, rtol=0, atol=2e3 * torch.finfo(dtype).eps * (1 + most))


@pytest.mark.parametrize(
    "values", [(3, 3, 1, 0, -1), (2, 2, 2, 2, 2), (3, 1, 1, 1, 0), (5, 3, 3, 1, 1)], ids=str
)
@pytest.mark.parametrize("solver", [None, Dense(), Krylov(), Lanczos()], ids=repr)
def test_repeated_eigenvalues_have_orthonormal_vectors(values, solver):
    A = with_eigenvalues(*values)
    for k in range(1, 6):
        found, Y = pmaf.ied(A, k, solver=solver)
        torch.testing.assert_close(Y.mH @ Y, torch.eye(k, dtype=C128), rtol=0, atol=1e-13)
        torch.testing.assert_close(A @ Y, Y * found, rtol=0, atol=1e-12)
        wanted = torch.tensor(sorted(values, reverse=True)[:k], dtype=F64)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


def test_a_span_of_a_repeated_eigenvalue_has_derivatives():
    A = with_eigenvalues(3.0, 3.0, 1.0, 0.5).requires_grad_()

    def projector(A):
        Y = pmaf.ied(0.5 * (A + A.mH), 2).vectors
        return Y @ Y.mH

    # Differences leave the repeated eigenvalue, and the span stays a function.
    assert gradcheck(projector, A)


def test_independent_rows_from_mixed_pairs():
    """Of a basis that has no pairs, as many vectors as there are dimensions, in order."""
    y = paired_rows(torch.linalg.qr(drawn(6, 3, 3))[0])  # two groups of eigenvalues
    turn = torch.linalg.qr(torch.randn(6, 4, 4, dtype=F64))[0]
    y = torch.cat([turn @ y[:, :4], y[:, 4:]], -2)
    rows = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
    values = torch.tensor([2.0, 2, 2, 2, 1, 1], dtype=F64).expand(6, 6)
    chosen = independent_rows(rows, values)
    eye = torch.eye(3, dtype=C128).expand(6, 3, 3)
    torch.testing.assert_close(chosen @ chosen.mH, eye, rtol=0, atol=1e-13)
    for group, found in ((rows[:, :4], chosen[:, :2]), (rows[:, 4:], chosen[:, 2:])):
        torch.testing.assert_close(found.mH @ found, 0.5 * group.mH @ group, rtol=0, atol=1e-13)


def test_a_vector_orthogonal_to_the_reference():
    A = torch.tensor([[1, -2, 0], [-2, 1, 0], [0, 0, 0]], dtype=C128)  # (1, −1, 0)/√2
    for k in (None, 1):
        wanted = pmaf.ied(A.real, k).vectors
        torch.testing.assert_close(pmaf.ied(A, k).vectors, wanted.to(C128), rtol=0, atol=1e-14)
    # Orthogonal to the second direction as well: the largest component is positive.
    plane = torch.stack([torch.ones(3), torch.cos(torch.arange(3).double() + 1)], -1).to(C128)
    y = torch.linalg.qr(plane, mode="complete").Q[:, -1]
    leaf = torch.outer(y, y.conj()).requires_grad_()
    for k in (None, 1):
        found = pmaf.ied(leaf, k).vectors.reshape(3)
        top = found.detach()[y.abs().argmax()]
        torch.testing.assert_close(found.abs(), y.abs(), rtol=0, atol=1e-14)
        assert float(top.real) > 0
        assert abs(float(top.imag)) <= 1e-15
        (dA,) = torch.autograd.grad(found.imag.sum() + found.real[0], leaf)
        assert torch.isfinite(torch.view_as_real(dA)).all()


@pytest.mark.parametrize("largest", [True, False])
def test_references_fix_the_phase_of_each_vector(largest):
    A, r = hermitian(2, 5, 5), drawn(2, 5, 3, seed=4)
    for reference in (r, r[..., 0], r[0, :, 0]):
        Y = pmaf.ied(A, 3, largest=largest, reference=reference).vectors
        column = reference if reference.dim() == 3 else reference.unsqueeze(-1)
        products = (column.conj() * Y).sum(-2)
        assert (products.real > 0).all()
        assert (products.imag.abs() <= 64 * EPS * column.abs().sum(-2)).all()
    y = pmaf.ied(A, reference=r[..., 0]).vectors
    torch.testing.assert_close(pmaf.ied(A, reference=y).vectors, y, rtol=0, atol=1e-14)


SOLVERS = [
    Dense(),
    Reduction(),
    Adaptive(),
    Lanczos(),
    Krylov(),
    SimultaneousIteration(iterations=3000),
]


@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("solver", [*SOLVERS, PowerIteration(iterations=3000)], ids=repr)
def test_every_solver(solver, k):
    if k and isinstance(solver, PowerIteration):
        return
    A = with_eigenvalues(5.0, 3.0, 1.0, 0.5, 0.0, -0.5).requires_grad_()
    found, exact = pmaf.ied(A, k, solver=solver), pmaf.ied(A, k)
    w = drawn(*exact.vectors.shape, seed=1)
    grads = []
    for values, vectors in (found, exact):
        (dA,) = torch.autograd.grad((vectors * w).real.sum() + values.sum(), A)
        grads.append(dA)
    for x, y in zip((*found, grads[0]), (*exact, grads[1])):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-9)


@pytest.mark.parametrize("n", [90, 140])
def test_larger_matrices(n):
    X = drawn(n, n // 2)
    A = (X @ X.mH / n + 4 * torch.outer(x := drawn(n, seed=1), x.conj()) / n).requires_grad_()
    values, vectors = pmaf.ied(A)
    (dA,) = torch.autograd.grad(vectors.real.sum() + values, A)
    assert pmaf.certify(pmaf.PrincipalEigenvectors(A.detach()), vectors.detach()).holds(1e-12)
    direction = hermitian(n, n, seed=5)
    step = 1e-5
    up, down = (pmaf.ied(A.detach() + s * direction) for s in (step, -step))
    slope = (up.vectors.real.sum() + up.values - down.vectors.real.sum() - down.values) / (2 * step)
    torch.testing.assert_close((dA.conj() * direction).sum().real, slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [None, 1, 3])
@pytest.mark.parametrize("solver", [None, Dense(), Krylov()], ids=repr)
def test_reports_and_certificates(k, solver):
    A = hermitian(3, 5, 5)
    problem = pmaf.PrincipalEigenvectors(A, k)
    solution = pmaf.solve(problem, solver=solver)
    steps = torch.linalg.eigvalsh(A).diff(dim=-1).flip(-1)[:, : k or 1]
    torch.testing.assert_close(solution.gap, steps.amin(-1), rtol=1e-10, atol=1e-12)
    assert solution.converged.all()
    assert (solution.residual <= 64 * EPS).all()
    assert pmaf.certify(problem, solution).holds(1e-12).all()
    assert (
        not pmaf.certify(problem, solution.value.roll(1, -1 if k is None else -2)).holds(1e-3).any()
    )
    assert not pmaf.certify(pmaf.PrincipalEigenvectors(-A, k), solution).holds(1e-3).any()


def test_one_by_one_and_no_matrices():
    solution = pmaf.solve(pmaf.PrincipalEigenvectors(torch.tensor([[-2 + 0j]])))
    assert (solution.value, solution.multiplier, solution.gap) == (1, -2, torch.inf)
    A = torch.zeros(0, 3, 3, dtype=C64, requires_grad=True)
    values, vectors = pmaf.ied(A, 2)
    assert (values.shape, values.dtype) == ((0, 2), torch.float32)
    assert (vectors.shape, vectors.dtype) == ((0, 3, 2), C64)
    (vectors.real.sum() + values.sum()).backward()
    assert pmaf.less(A, torch.zeros(0, 3, dtype=C64)).dtype == C64


@pytest.mark.parametrize("k", [None, 1])
def test_an_optimiser_takes_the_gradients(k):
    A = hermitian(4, 4).requires_grad_()
    b = drawn(4).requires_grad_()
    optimiser = torch.optim.Adam([A, b], lr=0.01)
    for _ in range(2):
        optimiser.zero_grad()
        (pmaf.less(A, b).real.sum() - pmaf.ied(A, k).values.sum()).backward()
        assert not A.grad.is_conj()
        optimiser.step()


def test_only_the_hermitian_part_counts():
    A = drawn(3, 4, 4).requires_grad_()
    for k in (None, 2):
        part = pmaf.ied(0.5 * (A + A.mH), k)
        for x, y in zip(pmaf.ied(A, k), part):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-13)
        (dA,) = torch.autograd.grad(pmaf.ied(A, k).vectors.imag.sum(), A)
        torch.testing.assert_close(dA, dA.mH, rtol=0, atol=1e-13)


def test_a_start_is_used():
    A = with_eigenvalues(1.0, 0.999, 0.2, 0.1)
    exact = pmaf.ied(A).vectors
    problem = pmaf.PrincipalEigenvectors(A)
    with pytest.warns(pmaf.ConvergenceWarning):
        cold = pmaf.solve(problem, solver=PowerIteration(iterations=20, tolerance=1e-9))
    warm = pmaf.solve(
        problem, solver=PowerIteration(iterations=20, tolerance=1e-9), init=1j * exact
    )
    assert not cold.converged
    assert warm.converged
    # √eps of pseudorandom numbers is added to a start, and the gap keeps it.
    torch.testing.assert_close(warm.value, exact, rtol=0, atol=10 * EPS**0.5)
    for k, init in ((2, exact), (2, pmaf.ied(A, 2).vectors), (None, exact)):
        found = pmaf.ied(Gram(A), k, init=init).vectors
        torch.testing.assert_close(found, pmaf.ied(A, k).vectors, rtol=0, atol=1e-9)


# Operators.


class Shifted(Operator):
    """The class of a user, with a conjugate transpose of its own."""

    def __init__(self, A, sign=1):
        self.A, self.sign = A, sign

    @property
    def shape(self):
        return self.A.shape

    @property
    def tensors(self):
        return (self.A,)

    def with_tensors(self, tensors):
        return Shifted(*tensors, self.sign)

    def matvec(self, rows):
        return rows @ self.A.mT + rows

    def rmatvec(self, rows):
        return self.sign * rows @ self.A.conj() + rows


def twice(rows, X):
    return ((rows.unsqueeze(-2) @ X.mT) @ X.conj()).squeeze(-2)


OPERATORS = {
    "Gram": (Gram, lambda X: X.mH @ X),
    "Matrix": (lambda X: Matrix(X.mH @ X), lambda X: X.mH @ X),
    "Matrix, not Hermitian": (lambda X: Matrix(X[..., :5, :]), lambda X: X[..., :5, :]),
    "FromMatvec": (
        lambda X: FromMatvec(twice, (*X.shape[:-2], 5, 5), [X]),
        lambda X: X.mH @ X,
    ),
    "LowRank + Diagonal": (
        lambda X: LowRank(X.conj(), X) - 2 * Diagonal(X[..., 0, :]),
        lambda X: X.mH @ X - 2 * torch.diag_embed(X[..., 0, :]),
    ),
    "a class of the user": (
        lambda X: Shifted(X.mH @ X),
        lambda X: X.mH @ X + torch.eye(5),
    ),
}


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("build", "dense"), OPERATORS.values(), ids=OPERATORS.keys())
def test_operators_are_their_matrices(build, dense, k, largest, batch):
    X = drawn(*batch, 7, 5).requires_grad_()
    results = []
    for A in (build(X), dense(X)):
        values, vectors = pmaf.ied(A, k, largest=largest)
        w = drawn(*vectors.shape, seed=3)
        (dX,) = torch.autograd.grad((vectors * w).real.sum() + values.sum(), X)
        results.append((values, vectors, dX))
    for x, y in zip(*results):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
    problem = pmaf.PrincipalEigenvectors(build(X.detach()), k, largest)
    solution = pmaf.solve(problem)
    other = pmaf.solve(pmaf.PrincipalEigenvectors(dense(X.detach()), k, largest))
    torch.testing.assert_close(solution.gap, other.gap, rtol=1e-9, atol=1e-9)
    assert pmaf.certify(problem, solution).holds(1e-10).all()


@pytest.mark.parametrize("c", [1e-120, 1e120])
def test_operators_of_any_scale(c):
    X = drawn(7, 5)
    found, exact = pmaf.ied(Gram(c * X)), pmaf.ied(Gram(X))
    torch.testing.assert_close(found.values / c / c, exact.values, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.vectors, exact.vectors, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_sparse_matrices(layout):
    A = hermitian(8, 8) * (hermitian(8, 8, seed=1).real > 0)
    sparse = A.to_sparse_csr() if layout == "csr" else A.to_sparse_coo()
    values = Sparse(sparse).tensors[0].detach().requires_grad_()
    found = pmaf.ied(Sparse(sparse).with_tensors([values]), 2)
    leaf = A.clone().requires_grad_()
    exact = pmaf.ied(leaf, 2)
    w = drawn(8, 2, seed=2)
    (dx,) = torch.autograd.grad((found.vectors * w).real.sum(), values)
    (dA,) = torch.autograd.grad((exact.vectors * w).real.sum(), leaf)
    torch.testing.assert_close(found.vectors, exact.vectors, rtol=0, atol=1e-10)
    torch.testing.assert_close(dx, dA[A != 0], rtol=0, atol=1e-10)


def test_a_transpose_that_is_not_conjugate_is_found_out():
    A = drawn(5, 5)
    with pytest.raises(ValueError, match="is not the transpose"):
        pmaf.ied(FromMatvec(lambda u, A: A @ u, (5, 5), [A], lambda u, A: A.mT @ u))
    with pytest.raises(ValueError, match="is not the transpose"):
        pmaf.ied(Shifted(A, sign=-1))


# Least squares.

PROBLEMS = {
    "outer": (drawn(6, 4), 9 * drawn(6, seed=1)),
    "inner": (drawn(6, 4), 0.1 * drawn(6, seed=1)),
    "wide": (drawn(3, 5), 9 * drawn(3, seed=1)),
    "square, 1×1": (drawn(1, 1), drawn(1, seed=1)),
    "batch": (drawn(2, 3, 2), drawn(2, 3, seed=1)),
    "shared": (drawn(3, 2), drawn(2, 3, seed=1)),
}


@pytest.mark.parametrize("radius", [1.0, 1.7])
@pytest.mark.parametrize(("A", "b"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_least_squares_meet_the_conditions_of_a_global_minimum(A, b, radius):
    problem = pmaf.SphereLeastSquares(A, b, radius)
    solution = pmaf.solve(problem)
    u, mu = solution.value, solution.multiplier
    assert (u.dtype, mu.dtype) == (C128, F64)
    along = (mu.unsqueeze(-1) * u).unsqueeze(-1)
    rest = A.mH @ (A @ u.unsqueeze(-1) - b.unsqueeze(-1)) + along
    squares = torch.linalg.eigvalsh(A.mH @ A)
    size = float(squares.max()) + float(b.abs().max())
    assert (rest.abs() <= 100 * EPS * size * radius).all()
    lengths = torch.linalg.vector_norm(u, dim=-1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, radius), rtol=8 * EPS, atol=0)
    torch.testing.assert_close(solution.gap, mu + squares[..., 0], rtol=0, atol=100 * EPS * size)
    assert (solution.gap >= 0).all()
    assert pmaf.certify(problem, solution).holds(1e-12).all()
    assert not pmaf.certify(problem, 1j * u).holds(1e-3).any()
    rows = A @ u.unsqueeze(-1) - b.unsqueeze(-1)
    wanted = 0.5 * rows.abs().square().sum((-2, -1))
    torch.testing.assert_close(problem.objective(u), wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("A", "b"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_derivatives_of_least_squares(A, b):
    A, b = A.clone().requires_grad_(), b.clone().requires_grad_()
    assert gradcheck(pmaf.less, (A, b))
    assert gradgradcheck(pmaf.less, (A, b), atol=1e-4, fast_mode=True)


def test_least_squares_in_other_ways():
    A, b = PROBLEMS["outer"]
    A, b = A.clone().requires_grad_(), b.clone().requires_grad_()
    v = drawn(4, seed=5)

    def both(u):
        return u.detach(), *torch.autograd.grad((u * v).sum().real, (A, b))

    exact = both(pmaf.less(A, b))
    for u in (
        pmaf.less(Matrix(A), b),
        pmaf.less(A, b, solver=Krylov()),
        pmaf.less(A, b, gradient=DDN()),
        pmaf.less(A, b, init=drawn(4, seed=6)),
    ):
        for x, y in zip(both(u), exact):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)
    short = pmaf.less(A.to(C64), b.to(C64))
    torch.testing.assert_close(short.to(C128).detach(), exact[0], rtol=0, atol=1e-5)


def test_least_squares_of_real_numbers_stored_as_complex():
    A, b = drawn(6, 4).real, drawn(6, seed=1).real
    found = pmaf.less(A.to(C128), b.to(C128))
    torch.testing.assert_close(found, pmaf.less(A, b).to(C128), rtol=0, atol=1e-13)


def test_the_embedding_keeps_products():
    A, u = drawn(2, 3, 4), drawn(2, 4, seed=1)
    image = (real_matrix(A) @ real_rows(u).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(image, real_rows((A @ u.unsqueeze(-1)).squeeze(-1)))
    torch.testing.assert_close(real_matrix(A.mH), real_matrix(A).mT, rtol=0, atol=0)


# Errors.

H, R = hermitian(4, 4), torch.eye(4, dtype=F64)
ERRORS = {
    "nonsymmetric": (
        lambda: pmaf.ied(H, symmetric=False),
        ValueError,
        "symmetric=True takes the Hermitian part",
    ),
    "real A, complex b": (
        lambda: pmaf.less(R, H[0]),
        TypeError,
        r"convert A with .to\(torch.complex128\)",
    ),
    "complex A, real b": (
        lambda: pmaf.less(H, R[0]),
        TypeError,
        r"convert b with .to\(torch.complex128\)",
    ),
    "real reference": (
        lambda: pmaf.ied(H, reference=R[0]),
        TypeError,
        r"convert reference with .to\(torch.complex128\)",
    ),
    "complex start": (lambda: pmaf.ied(R, init=H[0]), TypeError, "convert A with"),
    "two precisions": (lambda: pmaf.less(H, H[0].to(C64)), TypeError, r"one of them with .to\(\)"),
    "DDN": (lambda: pmaf.ied(H, gradient=DDN()), TypeError, r"use gradient=Implicit\(\)"),
    "IFT": (lambda: pmaf.ied(H, gradient=IFT()), TypeError, r"use gradient=Implicit\(\)"),
    "Unroll": (
        lambda: pmaf.ied(H, solver=Dense(), gradient=Unroll()),
        TypeError,
        r"use gradient=Implicit\(\)",
    ),
    "not finite": (lambda: pmaf.ied(H / 0), ValueError, "A has non-finite values"),
    "integers": (lambda: pmaf.ied(R.int()), TypeError, "complex64 or complex128"),
}


@pytest.mark.parametrize(("call", "kind", "words"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_say_what_to_do(call, kind, words):
    with pytest.raises(kind, match=words):
        call()
