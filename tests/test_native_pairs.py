"""Compiled kernels for pairs of dense matrices, real and complex, against SciPy and differences."""

import numpy as np
import pytest
import scipy.linalg
import torch
from torch.autograd import gradcheck, gradgradcheck

import pmaf
from pmaf import native
from pmaf.solvers import Reduction

pytestmark = pytest.mark.skipif(not native.available, reason=f"no kernels: {native.about}")
F32, F64, C64, C128 = torch.float32, torch.float64, torch.complex64, torch.complex128
SIZES = (1, 2, 3, 4, 6, 9, 16, 17, 40, 100)
COMPILED, GRADIENT = {"pairs: compiled"}, {"pairs: compiled gradient"}


def pair(batch, n, dtype, seed=0):
    """A Hermitian matrix and a positive definite one, whose condition number is about ten."""
    g = torch.Generator().manual_seed(seed + n)
    wide = torch.promote_types(dtype, F64)
    A = torch.randn(batch, n, n, generator=g, dtype=wide)
    X = torch.randn(batch, n, 2 * n, generator=g, dtype=wide)
    M = X @ X.mH / (2 * n) + 0.2 * torch.eye(n, dtype=wide)
    return (A + A.mH).to(dtype), M.to(dtype)


def ways(caplog):
    found = {x.getMessage() for x in caplog.records if x.name == "pmaf"}
    caplog.clear()
    return found


def failures(A, M):
    """In how many entries the kernels do not find the largest eigenpair."""
    failed = native.largest_of_pair(A, M, None, True, False)[0].failed
    return 0 if failed is None else int(failed.sum())


def exact_pairs(A, M):
    """All eigenvalues and vectors of each pair, ascending, by SciPy."""
    found = [scipy.linalg.eigh(a, m) for a, m in zip(A.numpy(), M.numpy())]
    return tuple(torch.from_numpy(np.stack(part)) for part in zip(*found))


def textbook(A, M, y, j, v, d):
    """The gradients of `Re(vᴴy) + d·λ` in both matrices, from all eigenpairs; `y` is `(*, n)`."""
    values, basis = exact_pairs(A, M)
    if y.is_complex():
        v = v + 1j * ((v.conj() * y).sum(-1).imag / y.sum(-1).real).unsqueeze(-1)
    rise = values[:, j].unsqueeze(-1) - values
    weights = torch.where(torch.arange(A.shape[-1]) == j, 0, 1 / torch.where(rise == 0, 1, rise))
    z = (basis @ ((basis.mH @ v.unsqueeze(-1)) * weights.unsqueeze(-1))).squeeze(-1)
    z = z + d * y
    along = (y.conj() * v).sum(-1, keepdim=True).real
    w = -values[:, j].unsqueeze(-1) * z - 0.5 * along * y
    outer = [x.unsqueeze(-1) * y.conj().unsqueeze(-2) for x in (z, w)]
    return [0.5 * (x + x.mH) for x in outer]


@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("dtype", [F32, F64, C64, C128], ids=str)
@pytest.mark.parametrize("batch", [1, 7])
def test_eigenpairs_and_gradients(batch, dtype, largest, caplog):
    caplog.set_level("DEBUG", logger="pmaf")
    eps, wide = torch.finfo(dtype).eps, torch.promote_types(dtype, F64)
    for n in SIZES:
        A, M = pair(batch, n, dtype)
        S, N = (0.5 * (x.to(wide) + x.to(wide).mH) for x in (A, M))
        spectrum, _ = exact_pairs(S, N)
        condition = torch.linalg.cond(N)
        size = spectrum.abs().amax(-1) * condition
        # The reduced matrix has rounding errors of the size of A over the least eigenvalue of M.
        bound = 8 * eps + 16 * n * torch.finfo(F64).eps
        for k in (1, 3)[: 1 + (n >= 9)]:
            order = list(range(n - 1, n - 1 - k, -1)) if largest else list(range(k))
            exact = spectrum[:, order]
            leaves = A.clone().requires_grad_(), M.clone().requires_grad_()
            values, vectors = pmaf.ied(
                leaves[0], k, M=leaves[1], largest=largest, descending=largest
            )
            assert ways(caplog) == COMPILED
            Y = vectors.detach().to(wide)
            assert ((values.detach() - exact).abs() <= bound * size[:, None]).all()
            length = Y.norm(dim=(-2, -1))
            rest = (S @ Y - N @ Y * values.detach().to(wide).unsqueeze(-2)).norm(dim=(-2, -1))
            norms = torch.linalg.matrix_norm(S, 2) + size * torch.linalg.matrix_norm(N, 2)
            assert (rest <= bound * norms * length).all()
            rest = (Y.mH @ N @ Y - torch.eye(k, dtype=wide)).abs().amax((-2, -1))
            assert (rest <= bound * condition * k).all()
            sums = Y.sum(-2)
            assert (sums.real > 0).all()
            assert (
                (sums.imag.abs() <= n * bound * length[:, None]).all() if Y.is_complex() else True
            )
            rise = (exact.unsqueeze(-1) - spectrum.unsqueeze(-2)).abs()
            rise[:, range(k), order] = torch.inf
            gap = rise.amin((-2, -1)).clamp(max=size)
            g = torch.Generator().manual_seed(n)
            v = torch.randn(n, k, generator=g, dtype=wide).to(dtype)
            d = torch.arange(1.0, k + 1, dtype=values.dtype)
            loss = (vectors * v.conj()).sum().real + (values * d).sum()
            found = torch.autograd.grad(loss, leaves)
            assert ways(caplog) == GRADIENT
            wanted = [torch.zeros_like(S), torch.zeros_like(S)]
            for column, j in enumerate(order):
                parts = textbook(S, N, Y[..., column], j, v[:, column].to(wide), float(d[column]))
                wanted = [x + part for x, part in zip(wanted, parts)]
            turns = (sums.abs().amin(-1) / length).clamp_max(1) if Y.is_complex() else 1
            error = 16 * bound * size / gap / turns
            for x, y in zip(found, wanted, strict=True):
                most = y.norm(dim=(-2, -1)) + v.norm() * length / gap
                assert ((x.to(wide) - y).norm(dim=(-2, -1)) <= error * most).all(), (n, k)


@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("dtype", [F64, C128], ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, None), (4, None), (4, 1), (6, 2), (9, 3), (18, 2)])
def test_derivatives_are_those_of_differences(n, k, dtype, largest, caplog):
    caplog.set_level("DEBUG", logger="pmaf")
    A, M = (x[0] for x in pair(1, n, dtype))
    A = A + 6 * torch.diag(torch.arange(n)).to(dtype)
    inputs = A.requires_grad_(), M.requires_grad_()

    def layer(A, M):
        return tuple(pmaf.ied(A, k, M=M, largest=largest, descending=largest))

    assert gradcheck(layer, inputs, fast_mode=n > 6)
    assert ways(caplog) == COMPILED | GRADIENT
    assert gradgradcheck(layer, inputs, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("dtype", [F64, C128], ids=str)
@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)], ids=str)
def test_the_same_as_by_the_common_path(k, largest, dtype, needs, caplog):
    """Each gradient by itself, and both, of values and vectors together or of one of them."""
    caplog.set_level("DEBUG", logger="pmaf")
    A, M = pair(5, 8, dtype)
    A.requires_grad_(needs[0])
    M.requires_grad_(needs[1])
    leaves = [x for x in (A, M) if x.requires_grad]
    g = torch.Generator().manual_seed(1)
    w = torch.randn(8, k or 1, generator=g, dtype=dtype)
    options = dict(largest=largest, descending=largest)
    for losses in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)):
        results = []
        for solver in (None, Reduction()):
            caplog.clear()
            values, vectors = pmaf.ied(A, k, M=M, solver=solver, **options)
            assert (ways(caplog) == COMPILED) == (solver is None)
            parts = (vectors.reshape(5, 8, -1) * w).sum().real, values.square().sum()
            loss = sum(c * part for c, part in zip(losses, parts) if c)
            first = torch.autograd.grad(loss, leaves, retain_graph=True)
            # With a graph, the first derivative is computed in another way, too.
            graph = torch.autograd.grad(loss, leaves, create_graph=True)
            total = sum(dx.abs().square().sum() for dx in graph)
            second = torch.autograd.grad(total, leaves)
            results.append(((values, vectors, *first, *graph), second))
        # Both have errors of eps·cond(M)·size/gap, which is about 1e-12 here. Each derivative
        # divides by the gap, and by the sum that fixes the phase, once more.
        for part, tolerance in ((0, 1e-10), (1, 1e-8)):
            for x, y in zip(*(result[part] for result in results), strict=True):
                most = 1 + float(y.detach().abs().max())
                torch.testing.assert_close(x, y, rtol=0, atol=tolerance * most)


def test_second_derivatives_of_one_of_both():
    A, M = (x[0] for x in pair(1, 4, C128))
    A.requires_grad_()
    assert gradgradcheck(lambda A: pmaf.ied(A, M=M).vectors, A, atol=1e-4)
    A, M = A.detach(), M.requires_grad_()
    assert gradgradcheck(lambda M: pmaf.ied(A, M=M).values, M, atol=1e-4)


@pytest.mark.parametrize("dtype", [F64, C128], ids=str)
def test_many_gradients_at_once(dtype):
    A, M = pair(2, 5, dtype)
    A.requires_grad_()
    M.requires_grad_()
    vectors = pmaf.ied(A, M=M).vectors
    g = torch.Generator().manual_seed(2)
    rows = torch.randn(3, *vectors.shape, generator=g, dtype=dtype)

    def gradients(v):
        return torch.autograd.grad(vectors, (A, M), v, retain_graph=True)

    at_once = torch.func.vmap(gradients)(rows)
    for i, v in enumerate(rows):
        for x, y in zip(at_once, gradients(v), strict=True):
            torch.testing.assert_close(x[i], y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("n", [3, 9, 40])
@pytest.mark.parametrize("dtype", [F32, C64], ids=str)
def test_one_bad_entry_is_named(n, dtype):
    A, M = pair(50, n, dtype)
    for x, name in ((A, "A"), (M, "M")):
        for bad in (torch.nan, torch.inf):
            kept = x[7, 0, -1].clone()
            x[7, 0, -1] = bad
            with pytest.raises(ValueError, match=f"{name} has non-finite values in 1 of 50"):
                pmaf.ied(A, M=M)
            x[7, 0, -1] = kept
    M[7] -= 3 * torch.linalg.matrix_norm(M[7], 2) * torch.eye(n, dtype=dtype)
    with pytest.raises(ValueError, match="M is not positive definite in 1 of 50"):
        pmaf.ied(A, M=M)


def test_a_metric_that_is_singular_up_to_rounding_is_left_to_the_common_path(caplog):
    caplog.set_level("DEBUG", logger="pmaf")
    A, _ = pair(1, 3, F32)
    # The last pivot is 2⁻²³, which is positive, and rounding of the diagonal entry.
    M = torch.tensor([[1.0, 0, 1], [0, 1, 0], [1, 0, 1 + 2.0**-23]])
    assert failures(A[0], M) == 1
    pmaf.ied(A[0].double(), M=M.double())  # in double precision it is positive definite
    caplog.clear()
    M[2, 2] = 1.0
    with pytest.raises(ValueError, match="M is not positive definite"):
        pmaf.ied(A[0], M=M)
    assert ways(caplog) == {"pairs: Cholesky"}


@pytest.mark.parametrize("n", [3, 9, 20, 40])
@pytest.mark.parametrize("dtype", [F64, C128], ids=str)
def test_pairs_with_errors_of_the_factor_are_left_to_the_common_path(dtype, n, caplog):
    """The smallest eigenvalues of 50 pairs, of which one has cond(M) = 1e8."""
    caplog.set_level("DEBUG", logger="pmaf")
    A, M = pair(50, n, dtype)
    A = A @ A
    Q = torch.linalg.qr(pair(1, n, dtype, seed=1)[0][0]).Q
    M[7] = (Q * torch.logspace(0, -8, n, dtype=F64)) @ Q.mH
    M = 0.5 * (M + M.mH)
    _, _, failed = native.largest_of_pair(A, M, None, False, False)[0]
    assert failed is not None
    assert bool(failed[7])
    assert int(failed.sum()) < 25
    values, y = pmaf.ied(A, M=M, largest=False)
    assert COMPILED | {"pairs: common path for some", "pairs: refined"} <= ways(caplog)
    image, dual = ((x @ y.unsqueeze(-1)).squeeze(-1) for x in (A, M))
    rest = torch.linalg.vector_norm(image - values[:, None] * dual, dim=-1)
    size, mass = (torch.linalg.matrix_norm(x) for x in (A, M))
    sizes = (size + values * mass) * torch.linalg.vector_norm(y, dim=-1)
    # The kernels leave 4 roundings, and the products of this test have n.
    assert bool((rest <= (4 + n) * torch.finfo(F64).eps * sizes).all())


@pytest.mark.parametrize("dtype", [F64, C128], ids=str)
@pytest.mark.parametrize("n", [9, 20])
def test_equal_eigenvalues(n, dtype):
    """The top eigenvalue of A = M + UUᴴ repeats; the density matrix of the span has a gradient."""
    _, M = pair(3, n, dtype)
    L = torch.linalg.cholesky(M)
    g = torch.Generator().manual_seed(n)
    q = torch.linalg.qr(torch.randn(3, n, n, generator=g, dtype=dtype))[0]
    spectrum = torch.linspace(-1, 0.5, n, dtype=F64)
    spectrum[:2] = 2.0
    A = L @ (q * spectrum.to(dtype) @ q.mH) @ L.mH
    leaves = A.requires_grad_(), M.clone().requires_grad_()
    values, Y = pmaf.ied(leaves[0], 2, M=leaves[1])
    torch.testing.assert_close(values.detach(), torch.full_like(values, 2.0), rtol=0, atol=1e-12)
    W = torch.randn(n, n, generator=g, dtype=dtype)
    W = W + W.mH
    found = torch.autograd.grad((Y @ Y.mH * W.conj()).sum().real, leaves)

    def loss(A, M):
        X = torch.linalg.inv(torch.linalg.cholesky(M))
        V = torch.linalg.eigh(X @ A @ X.mH).eigenvectors
        Y = X.mH @ V[..., -2:]
        return (Y @ Y.mH * W.conj()).sum((-2, -1)).real

    step = 1e-5
    for i in range(2):
        D = torch.randn(3, n, n, generator=g, dtype=dtype)
        D = D + D.mH
        moved = [
            loss(*(x.detach() + s * D * (i == place) for place, x in enumerate(leaves)))
            for s in (step, -step)
        ]
        slope = (moved[0] - moved[1]) / (2 * step)
        along = (found[i].conj() * D).sum((-2, -1)).real
        torch.testing.assert_close(along, slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("a", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("m", [1e-15, 1.0, 1e15])
@pytest.mark.parametrize("dtype", [F64, C128], ids=str)
def test_any_scale(a, m, dtype, caplog):
    caplog.set_level("DEBUG", logger="pmaf")
    A, M = pair(4, 6, dtype)
    one, found = pmaf.ied(A, 2, M=M), pmaf.ied(a * A, 2, M=m * M)
    assert ways(caplog) == COMPILED
    torch.testing.assert_close(found.values / a * m, one.values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.vectors * m**0.5, one.vectors, rtol=0, atol=1e-11)


def test_values_that_no_float_holds_take_the_common_path(caplog):
    caplog.set_level("DEBUG", logger="pmaf")
    A, M = pair(1, 3, F32)
    pmaf.ied(1e30 * A[0], M=1e-6 * M[0])
    assert ways(caplog) == COMPILED
    assert failures(1e30 * A, 1e-20 * M) == 1


def test_transposed_and_strided_inputs():
    for dtype in (F64, C128):
        A, M = pair(6, 12, dtype)
        for view in (lambda x: x.mT, lambda x: x.mH, lambda x: x[::2], lambda x: x[:, ::2, ::2]):
            given = [view(x).detach().requires_grad_() for x in (A, M)]
            leaves = [x.detach().resolve_conj().clone() for x in given]
            leaves = [x.contiguous().requires_grad_() for x in leaves]
            found, wanted = (pmaf.ied(x, 2, M=y) for x, y in (given, leaves))
            torch.testing.assert_close(found.vectors, wanted.vectors, rtol=0, atol=1e-12)
            for x, y in zip(
                torch.autograd.grad(found.vectors.mH.real.sum(), given),
                torch.autograd.grad(wanted.vectors.mH.real.sum(), leaves),
                strict=True,
            ):
                torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_other_pairs_take_the_common_path(caplog):
    caplog.set_level("DEBUG", logger="pmaf")
    A, M = pair(3, 6, F64)
    whole = pmaf.ied(A, M=M)
    assert ways(caplog) == COMPILED
    for options in ({"reference": 0}, {"skip": 1}, {"init": whole.vectors}):
        pmaf.ied(A, M=M, **options)
        assert ways(caplog) == COMPILED
    for given in ((A, M[:1]), (A[:1], M)):
        pmaf.ied(given[0], M=given[1])
        assert ways(caplog) & COMPILED == set()
    pmaf.ied(A, 3, M=M)  # half of all
    assert ways(caplog) & COMPILED == set()


def both_passes(A, M, v, d, second):
    """Eigenpairs, and gradients of a loss in both matrices, or those of a loss of the gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in (A, M)]
    values, vectors = pmaf.ied(leaves[0], M=leaves[1])
    loss = (vectors * v.conj()).sum().real + (values * d).sum()
    found = torch.autograd.grad(loss, leaves, create_graph=second)
    if second:
        squares = sum(x.abs().square().sum() for x in found)
        found = torch.autograd.grad(squares, leaves)
    return values.detach(), vectors.detach(), *found


def graph_pairs(batch, n, dtype):
    """Laplacians of random graphs and their degrees, and entries without edges among them."""
    g = torch.Generator().manual_seed(0)
    W = (torch.rand(batch, n, n, generator=g) < 0.5).triu(1)
    W[::100] = False
    W[50::100] = torch.ones(n, n).triu(1) > 0
    W = (W | W.mT).to(dtype)
    degrees = W.sum(-1)
    return torch.diag_embed(degrees) - W, torch.diag_embed(degrees + 1)


def assert_alone(found, given, i, second=False):
    """Entry i has the results that it has in a batch of copies of itself, up to rounding."""
    copies = [x[i].expand(4, *x.shape[1:]) for x in given]
    for x, y in zip(found, both_passes(*copies, second), strict=True):
        size = 1 + float(y[0].abs().max())
        bound = 256 * torch.finfo(x.dtype).eps * size  # sums of at most 12² products
        torch.testing.assert_close(x[i], y[0], rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_repeated_eigenvalues_in_some_entries_stay_in_the_kernels(dtype, caplog):
    """Of graphs without edges, and of complete ones, the largest eigenvalue repeats."""
    g = torch.Generator().manual_seed(1)
    A, M = graph_pairs(1000, 4, dtype)
    given = A, M, torch.randn(1000, 4, generator=g, dtype=dtype), torch.randn(1000, generator=g)
    caplog.set_level("DEBUG", logger="pmaf")
    whole = both_passes(*given, second=False)
    assert ways(caplog) == COMPILED | GRADIENT
    for i in (0, 1, 49, 50, 51, 999):
        assert_alone(whole, given, i)
    # Without edges there is no derivative of y, and that of λ is yyᵀ.
    y, d = whole[1][0], given[3][0]
    torch.testing.assert_close(whole[2][0], (d * torch.outer(y, y)).to(dtype))


@pytest.mark.parametrize("dtype", [F64, C128], ids=str)
def test_gradients_in_which_the_kernels_fail_take_the_common_path_alone(dtype, caplog):
    """A multiple of the metric has more equal eigenvalues than there is room for null vectors."""
    n, hard = 12, [3, 500, 998]
    g = torch.Generator().manual_seed(1)
    A, M = pair(1000, n, dtype)
    A[hard], M[hard] = 2 * torch.eye(n, dtype=dtype), torch.eye(n, dtype=dtype)
    given = A, M, torch.randn(1000, n, generator=g, dtype=dtype), torch.randn(1000, generator=g)
    caplog.set_level("DEBUG", logger="pmaf")
    whole = both_passes(*given, second=False)
    assert COMPILED | GRADIENT | {"tangent: common path for some"} <= ways(caplog)
    for i in (2, 4, 501, 997):
        assert_alone(whole, given, i)
    # There is no derivative of y, only that of its length in M, and those of λ = 2. The common path
    # solves complex pairs again, and may find another of the vectors.
    for i in hard:
        y, v, d = whole[1][i], given[2][i], given[3][i].to(dtype)
        dA, dM = (x[i] for x in whole[2:])
        torch.testing.assert_close(dA.trace(), d)
        torch.testing.assert_close(dA @ dA, d * dA)
        if not dtype.is_complex:
            outer = torch.outer(y, y)
            torch.testing.assert_close(dA, d * outer)
            torch.testing.assert_close(dM, -(2 * d + 0.5 * torch.dot(y, v)) * outer)


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
def test_vectors_that_the_kernels_do_not_find_take_the_common_path_alone(second, caplog):
    """The sum of (1, −1, 0)/√2, which is an eigenvector of two entries, has no phase."""
    g = torch.Generator().manual_seed(1)
    A, M = pair(1000, 3, C128)
    A[[7, 800]] = torch.tensor([[1, -2, 0], [-2, 1, 0], [0, 0, 0]], dtype=C128)
    M[[7, 800]] = torch.eye(3, dtype=C128)
    given = A, M, torch.randn(1000, 3, generator=g, dtype=C128), torch.randn(1000, generator=g)
    caplog.set_level("DEBUG", logger="pmaf")
    whole = both_passes(*given, second)
    taken = ways(caplog)
    assert COMPILED | {"pairs: common path for some"} <= taken
    assert taken >= GRADIENT
    for i in (6, 7, 8, 800, 801):
        assert_alone(whole, given, i, second)
    # A gradient that is differentiated again is computed by torch.
    caplog.clear()
    leaves = [x.clone().requires_grad_() for x in given[:2]]
    values, _ = pmaf.ied(leaves[0], M=leaves[1])
    torch.autograd.grad(values.sum(), leaves, create_graph=second)
    assert (ways(caplog) >= GRADIENT) == (not second)
