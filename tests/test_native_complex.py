"""Compiled kernels for complex Hermitian matrices: every size, both ends, and all derivatives."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import pmaf
from pmaf import native
from pmaf.solvers import Reduction

pytestmark = pytest.mark.skipif(not native.available, reason=f"no kernels: {native.about}")
F64, C64, C128 = torch.float64, torch.complex64, torch.complex128
# One by one, phases alone, in the lanes of vectors, beyond them, and beyond one vector.
SIZES = (1, 2, 3, 4, 6, 9, 16, 17, 40, 100)
COMPILED = {"ied: complex reduction"}


def drawn(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=C128)


def noise(batch, n):
    A = drawn(batch, n, n, seed=n)
    return A + A.mH


def one_source(batch, n):
    x = drawn(batch, n, 1, seed=n)
    return x @ x.mH + 0.1 * noise(batch, n)


def deficient(batch, n):
    X = drawn(batch, n, max(1, n // 2), seed=n)
    return X @ X.mH


def others_repeat(batch, n):
    q = torch.linalg.qr(drawn(batch, n, n, seed=n))[0]
    values = torch.ones(n, dtype=C128)
    values[0], values[-1] = 3.0, -2.0
    return q * values @ q.mH


def ring(batch, n):
    """A tridiagonal matrix whose entries have phases, and two corners."""
    links = torch.polar(torch.ones(batch, n, dtype=F64), drawn(batch, n, seed=n).real)
    A = torch.diag_embed(links[:, 1:], 1) + torch.diag_embed(drawn(batch, n, seed=1))
    A[:, -1, 0] += links[:, 0]
    return A + A.mH


FAMILIES = {f.__name__: f for f in (noise, one_source, deficient, others_repeat, ring)}


def ways(caplog):
    found = {x.getMessage() for x in caplog.records if x.name == "pmaf"}
    caplog.clear()
    return found


def textbook(S, y, j, v, d):
    """The gradient of `Re(vᴴy) + d·λ`, in complex128, from all eigenpairs; `y` is `(*, n)`."""
    values, basis = torch.linalg.eigh(S)
    v = v + 1j * ((v.conj() * y).sum(-1).imag / y.sum(-1).real).unsqueeze(-1)
    rise = values[:, j].unsqueeze(-1) - values
    weights = torch.where(torch.arange(S.shape[-1]) == j, 0, 1 / torch.where(rise == 0, 1, rise))
    along = (basis.mH @ v.unsqueeze(-1)) * weights.unsqueeze(-1)
    z = (basis @ along).squeeze(-1) + d.unsqueeze(-1) * y
    outer = z.unsqueeze(-1) * y.conj().unsqueeze(-2)
    return 0.5 * (outer + outer.mH)


@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("dtype", [C64, C128], ids=str)
@pytest.mark.parametrize("batch", [1, 11])
@pytest.mark.parametrize("family", FAMILIES)
def test_eigenpairs_and_gradients(family, batch, dtype, largest, caplog):
    caplog.set_level("DEBUG", logger="pmaf")
    eps = torch.finfo(dtype).eps
    for n in SIZES:
        A = FAMILIES[family](batch, n).to(dtype)
        S = A.to(C128)
        S = 0.5 * (S + S.mH)
        spectrum = torch.linalg.eigvalsh(S)
        size = spectrum.abs().amax(-1, keepdim=True)
        # The error of a reduction grows with the size of the matrix, in double precision.
        bound = 4 * eps + 8 * n * torch.finfo(F64).eps
        for k in (1, 3)[: 1 + (n >= 9)]:
            order = list(range(n - 1, n - 1 - k, -1)) if largest else list(range(k))
            exact = spectrum[:, order]
            leaf = A.clone().requires_grad_()
            values, vectors = pmaf.ied(leaf, k, largest=largest, descending=largest)
            # A requested eigenvalue that repeats many times is decomposed.
            many = (family, largest) == ("deficient", False) or (family, k) == ("others_repeat", 3)
            taken = ways(caplog)
            assert many or taken == COMPILED, (n, k)
            Y = vectors.detach().to(C128)
            assert ((values.detach() - exact).abs() <= bound * size).all()
            rest = S @ Y - Y * values.detach().double().unsqueeze(-2)
            assert (rest.norm(dim=-2) <= 2 * bound * size).all()
            assert ((Y.mH @ Y - torch.eye(k, dtype=C128)).abs() <= 2 * bound).all()
            sums = Y.sum(-2)
            assert (sums.imag.abs() <= 2 * n**0.5 * bound).all()
            assert (sums.real > 0).all()
            # A gradient has the error of a vector, which is that of the matrix over the gap, and
            # the phase divides it by the sum of the vector.
            rise = (exact.unsqueeze(-1) - spectrum.unsqueeze(-2)).abs()
            rise[:, range(k), order] = torch.inf
            gap = rise.amin((-2, -1)).clamp(max=size[:, 0])
            v, d = drawn(n, k, seed=3), torch.arange(1.0, k + 1, dtype=F64)
            loss = (vectors * v.conj().to(dtype)).real.sum() + (values * d.to(values.dtype)).sum()
            (found,) = torch.autograd.grad(loss, leaf)
            taken = ways(caplog)
            assert many or taken == {"tangent: compiled"}, (n, k)
            assert torch.isfinite(torch.view_as_real(found)).all()
            most = found.abs().amax((-2, -1), keepdim=True)
            assert ((found - found.mH).abs() <= 4 * eps * most).all()
            wanted = torch.zeros_like(S)
            v = v.to(dtype).to(C128)
            for column, j in enumerate(order):
                wanted += textbook(S, Y[..., column], j, v[:, column], d[column].expand(batch))
            error = (found.to(C128) - wanted).norm(dim=(-2, -1))
            loss = 16 * bound * size[:, 0] / gap / sums.abs().amin(-1).clamp_max(1)
            apart = gap > 1e3 * eps * size[:, 0]
            allowed = loss * (wanted.norm(dim=(-2, -1)) + v.norm() / gap) + bound
            assert (error <= allowed)[apart].all(), (n, k)
            assert apart.any() or family in ("deficient", "others_repeat"), n


@pytest.mark.parametrize("dtype", [C64, C128], ids=str)
@pytest.mark.parametrize("n", [2, 3, 4, 6, 16, 17, 21])
def test_all_pairs_of_a_matrix(n, dtype):
    """More of them than a layer would ask the kernels for."""
    eps = torch.finfo(dtype).eps
    A = noise(9, n).to(dtype)
    values, rows, failed = native.largest_pairs(A, n)
    assert failed is None
    S, rows = A.to(C128), rows.to(C128)
    exact = torch.linalg.eigvalsh(S).flip(-1)
    size = exact.abs().amax(-1, keepdim=True)
    assert ((values - exact).abs() <= 4 * n * eps * size).all()
    again = rows.mT * values.double().unsqueeze(-2) @ rows.conj()
    assert ((again - S).abs().amax((-2, -1)) <= 8 * n * eps * size[:, 0]).all()


@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize(("n", "k"), [(1, None), (2, None), (6, None), (6, 2), (9, 3), (18, 2)])
def test_derivatives_are_those_of_differences(n, k, largest, caplog):
    caplog.set_level("DEBUG", logger="pmaf")
    A = (noise(1, n)[0] + 4 * torch.diag(torch.arange(n)).to(C128)).requires_grad_()

    def layer(A):
        return pmaf.ied(A, k, largest=largest, descending=largest)

    assert gradcheck(layer, A, fast_mode=n > 9)
    assert ways(caplog) == COMPILED | {"tangent: compiled"}
    assert gradgradcheck(layer, A, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("k", [None, 1, 2])
@pytest.mark.parametrize("n", [6, 20])
@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
def test_the_same_as_by_the_embedding(n, k, largest, caplog):
    caplog.set_level("DEBUG", logger="pmaf")
    A, w = noise(5, n).requires_grad_(), drawn(n, k or 1, seed=4)
    results = []
    for solver in (None, Reduction()):
        values, vectors = pmaf.ied(A, k, largest=largest, descending=largest, solver=solver)
        assert (ways(caplog) == COMPILED) == (solver is None)
        loss = (vectors.reshape(5, n, -1) * w).real.sum() + values.square().sum()
        (first,) = torch.autograd.grad(loss, A, create_graph=True)
        (second,) = torch.autograd.grad(first.abs().square().sum(), A)
        results.append((values, vectors, first, second))
    spectrum = torch.linalg.eigvalsh(A.detach())
    size, gap = float(spectrum.abs().max()), float(spectrum.diff(dim=-1).min())
    sums = float(results[0][1].detach().reshape(5, n, -1).sum(1).abs().min())
    # Each derivative divides by the gap, and by the sum that fixes the phase, once more.
    error = 64 * torch.finfo(F64).eps * size / gap / min(1.0, sums)
    for x, y in zip(*results):
        torch.testing.assert_close(x, y, rtol=0, atol=error * float(1 + y.detach().abs().max()))
        error /= min(1.0, sums) * min(1.0, gap)


@pytest.mark.parametrize("n", [6, 9, 17, 40])
@pytest.mark.parametrize("dtype", [C64, C128], ids=str)
def test_repeated_eigenvalues(n, dtype, caplog):
    """The span of equal eigenvalues has derivatives; the vectors are orthonormal."""
    caplog.set_level("DEBUG", logger="pmaf")
    eps = torch.finfo(dtype).eps
    q = torch.linalg.qr(drawn(3, n, n, seed=n))[0]
    spectrum = torch.linspace(-1, 0.5, n, dtype=F64)
    spectrum[:2] = 2.0
    A = (q * spectrum @ q.mH).to(dtype).requires_grad_()
    values, Y = pmaf.ied(A, 2)
    size = 2.0
    assert ((values.detach() - 2).abs() <= 64 * eps * size).all()
    assert ((Y.mH @ Y - torch.eye(2, dtype=dtype)).abs() <= 16 * eps).all()
    W = drawn(n, n, seed=5)
    W = (W + W.mH).to(dtype)
    (found,) = torch.autograd.grad((Y @ Y.mH * W.conj()).real.sum(), A)
    # The derivative of a projector P is P·dA·Q + Q·dA·P, with divided differences.
    rise = spectrum.unsqueeze(-1) - spectrum
    inside = torch.arange(n) < 2
    between = inside.unsqueeze(-1) != inside
    weights = torch.where(between, 1 / torch.where(rise == 0, 1, rise.abs()), 0)
    W = W.to(C128)
    wanted = q @ (weights * (q.mH @ W @ q)) @ q.mH
    error = (found.to(C128) - wanted).norm(dim=(-2, -1))
    # The gap is 1.5, and rounding of A separates the two eigenvalues.
    assert (error <= 64 * n * eps * wanted.norm(dim=(-2, -1))).all()


def test_equal_matrices_and_zero():
    """Multiples of the identity: the phase of the vector that is found has a sum."""
    for n in (1, 3, 9, 20):
        for c in (0.0, 1.0, -2.5):
            A = (c * torch.eye(n, dtype=C128)).expand(5, n, n).clone().requires_grad_()
            values, vectors = pmaf.ied(A)
            assert (values == c).all()
            torch.testing.assert_close(
                vectors.detach().norm(dim=-1), torch.ones(5, dtype=F64), rtol=0, atol=1e-15
            )
            (dA,) = torch.autograd.grad(values.sum() + vectors.real.sum(), A)
            assert torch.isfinite(torch.view_as_real(dA)).all()


@pytest.mark.parametrize("n", [3, 9, 40])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, complex(0, torch.nan)], ids=str)
def test_one_bad_entry_is_named_and_others_are_not_lost(n, bad):
    A = noise(50, n).to(C64)
    whole = pmaf.ied(A)
    A[7, 0, 1] = bad
    with pytest.raises(ValueError, match="A has non-finite values in 1 of 50"):
        pmaf.ied(A)
    values, rows, failed = native.largest_pairs(A, None)
    assert failed.nonzero().tolist() == [[7]]
    others = torch.arange(50) != 7
    torch.testing.assert_close(values[others], whole.values[others], rtol=0, atol=0)
    torch.testing.assert_close(rows[others], whole.vectors[others], rtol=0, atol=0)


def test_a_phase_that_is_not_determined_takes_the_common_path_alone(caplog):
    caplog.set_level("DEBUG", logger="pmaf")
    A = noise(40, 3)
    A[5] = torch.tensor([[1, -2, 0], [-2, 1, 0], [0, 0, 0]], dtype=C128)  # (1, −1, 0)/√2
    leaf, alone = A.clone().requires_grad_(), A[5].clone().requires_grad_()
    others = A[6:].clone().requires_grad_()
    values, vectors = pmaf.ied(leaf)
    assert COMPILED | {"ied: common path for some"} <= ways(caplog)
    torch.testing.assert_close(values.detach(), torch.linalg.eigvalsh(A)[:, -1], rtol=0, atol=1e-13)
    wanted = pmaf.ied(A[5].real).vectors.to(C128)
    torch.testing.assert_close(vectors[5].detach(), wanted, rtol=0, atol=1e-14)
    v = noise(40, 3)[..., 0]
    (vectors * v).sum().real.backward()
    (pmaf.ied(alone).vectors * v[5]).sum().real.backward()
    (pmaf.ied(others).vectors * v[6:]).sum().real.backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad[5], alone.grad, rtol=0, atol=1e-13)
    # Entries share lanes with others here, and rounding is that of their gaps.
    torch.testing.assert_close(leaf.grad[6:], others.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 1e37])
def test_any_scale(scale):
    A = noise(20, 6).to(C64)
    A = A / A.abs().amax() / 6
    one, found = pmaf.ied(A), pmaf.ied(scale * A)
    eps = torch.finfo(C64).eps
    subnormal = torch.finfo(torch.float32).tiny * eps
    exact = torch.linalg.eigvalsh((scale * A).to(C128))
    size = exact.abs().amax(-1)
    assert ((found.values - exact[:, -1]).abs() <= 4 * eps * size + subnormal).all()
    if scale >= 1e-30:  # below, the entries have lost digits
        gap = (exact[:, -1] - exact[:, -2]) / size
        error = (found.vectors - one.vectors).abs().amax(-1)
        assert (error <= 64 * eps / gap / one.vectors.sum(-1).abs().clamp_max(1)).all()


def test_conjugate_transposed_and_strided_inputs():
    A = noise(6, 12)
    for given in (A.mT, A.conj(), A.mH, A[::2], A[:, ::2, ::2], A.expand(2, 6, 12, 12)):
        for k in (None, 2):
            view = given.detach().requires_grad_()
            leaf = given.resolve_conj().clone(memory_format=torch.contiguous_format)
            leaf = leaf.requires_grad_()
            found, wanted = pmaf.ied(view, k), pmaf.ied(leaf, k)
            torch.testing.assert_close(found.vectors, wanted.vectors, rtol=0, atol=0)
            for part in (
                lambda y: (y.conj() * drawn(*y.shape)).real.sum(),
                lambda y: y.mH.imag.sum(),
            ):
                (x,) = torch.autograd.grad(part(found.vectors), view, retain_graph=True)
                (y,) = torch.autograd.grad(part(wanted.vectors), leaf, retain_graph=True)
                torch.testing.assert_close(x, y, rtol=0, atol=1e-13 * float(1 + y.abs().max()))


@pytest.mark.parametrize("k", [None, 2])
def test_gradients_that_stand_for_their_conjugates(k):
    A = noise(6, 9).requires_grad_()
    vectors = pmaf.ied(A, k).vectors
    v = drawn(6, 9) if k is None else drawn(6, k, 9).mT
    assert v.conj().is_conj()
    (found,) = torch.autograd.grad(vectors, A, v.conj(), retain_graph=True)
    (wanted,) = torch.autograd.grad(vectors, A, v.conj().resolve_conj())
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_what_is_returned_is_the_users():
    """A user may write into vectors, and the values do not change with them."""
    A = noise(4, 9)
    values, vectors = pmaf.ied(A, 3)
    before = values.clone()
    vectors.zero_()
    assert torch.equal(values, before)
    assert torch.equal(pmaf.ied(A, 3).values, before)
