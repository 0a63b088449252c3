"""Principal components: Gram matrices of centred data that are not kept."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

import pmaf
from pmaf.operators import FromMatvec, Gram, Matrix, Scaled, shifted

F64 = torch.float64


def drawn(*shape, seed=0, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    real = torch.randn(*shape, generator=generator, dtype=F64)
    if dtype.is_complex:
        real = torch.complex(real, torch.randn(*shape, generator=generator, dtype=F64))
    return real.to(dtype)


def data(m, n, *batch, dtype=F64, seed=0, mean=1.0):
    """Data with distinct principal components, and a mean of this many spreads."""
    spreads = torch.linspace(1, 3, n, dtype=F64).to(dtype)
    turn = torch.linalg.qr(drawn(*batch, n, n, seed=seed + 1, dtype=dtype)).Q
    centre = torch.nn.functional.normalize(drawn(*batch, 1, n, seed=seed + 2, dtype=dtype), dim=-1)
    return drawn(*batch, m, n, seed=seed, dtype=dtype) * spreads @ turn.mH + 3 * mean * centre


def components(X, weights=None):
    """Descending eigenvalues and vectors as columns, by the SVD of centred data in float64."""
    X = X.to(torch.complex128 if X.is_complex() else F64)
    w = X.new_ones(X.shape[:-1]) if weights is None else weights.to(X)
    mean = (w.unsqueeze(-1) * X).sum(-2, keepdim=True) / w.sum(-1)[..., None, None]
    _, sizes, right = torch.linalg.svd(w.real.sqrt().unsqueeze(-1) * (X - mean))
    values = torch.zeros_like(right[..., 0].real)
    values[..., : sizes.shape[-1]] = sizes.square()
    return values, right.mH


def require_components(X, weights=None, **options):
    k, eps = 2, torch.finfo(X.dtype).eps
    found = pmaf.ied(Gram(X, 0.5, weights, centre=True), k, **options)
    values, vectors = components(X, weights)
    values = 0.5 * values
    gap = (values[..., :k] - values[..., 1 : k + 1]).amin(-1) / values[..., 0]
    size = float(values.amax())
    torch.testing.assert_close(found.values.double(), values[..., :k], rtol=0, atol=64 * eps * size)
    y, v = found.vectors.to(vectors), vectors[..., :k]
    sines = (y - v * (v.conj() * y).sum(-2, keepdim=True)).norm(dim=-2)
    assert (sines <= 64 * eps / gap.unsqueeze(-1)).all()
    return found


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(4, 60),
    n=st.integers(3, 12),
    batch=st.sampled_from([(), (3,), (2, 1)]),
    dtype=st.sampled_from([torch.float32, F64, torch.complex64, torch.complex128]),
    weighted=st.booleans(),
    mean=st.sampled_from([0.0, 1.0, 1e4]),
    seed=st.integers(0, 1000),
)
def test_they_are_those_of_the_singular_vectors_of_centred_data(
    m, n, batch, dtype, weighted, mean, seed
):
    """For any dense data: a mean of ten thousand spreads costs no digits, in float32 either."""
    X = data(m, n, *batch, dtype=dtype, seed=seed, mean=mean)
    weights = 0.1 + drawn(*batch, m, seed=seed + 3).square() if weighted else None
    require_components(X, None if weights is None else weights.to(X.real.dtype))


@pytest.mark.parametrize("m", [7, 400])
def test_blocks_of_rows_are_those_of_one_piece(m, monkeypatch):
    """Also where the number of rows is not a multiple of that of a block."""
    X = data(m, 5, 2, mean=1e4).float()
    sizes = []

    def counted(self):
        for block in blocks(self):
            sizes.append(block.shape[-2])
            yield block

    blocks = shifted.Shifted._blocks
    monkeypatch.setattr(shifted.Shifted, "_blocks", counted)
    x = drawn(2, 5, 3).float()
    whole = Gram(X, centre=True) @ x
    assert set(sizes) == {m}
    sizes.clear()
    monkeypatch.setattr(shifted, "_LEAST", 1)
    torch.testing.assert_close(Gram(X, centre=True) @ x, whole)
    assert max(sizes) == -(-m // 16)
    assert len(sizes) <= 2 * 16
    assert sum(sizes) == 2 * m
    require_components(X)


def test_no_copy_of_large_data_is_made(monkeypatch):
    """The largest tensor that a product makes has a sixteenth of the numbers of the data."""
    monkeypatch.setattr(shifted, "_LEAST", 1)
    X = data(320, 10)
    seen = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out._base is None and out.numel() >= X.numel():
                view = out.untyped_storage().data_ptr() == X.untyped_storage().data_ptr()
                seen.extend([] if view else [function])
            return out

    with Counting():
        Gram(X, centre=True).matvec(drawn(1, 10))
    assert not seen


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_other_data_have_the_digits_that_their_mean_leaves(dtype):
    """Sparse data, functions and sums are multiplied as they are."""
    X = data(60, 8, mean=10.0).to(dtype)
    wanted, _ = components(X)
    eps = torch.finfo(dtype).eps
    for given_ in (
        X.to_sparse_csr(),
        X.to_sparse_coo(),
        FromMatvec(lambda u, X: X @ u, (60, 8), [X]),
        Scaled(Matrix(X), 1.0),
    ):
        operator = Gram(given_, centre=True)
        solver = pmaf.solvers.Krylov(tolerance=1e4 * eps)
        found = pmaf.ied(operator, 2, solver=solver).values.double()
        bound = 64 * eps * 30 * float(wanted[0])  # of a mean of thirty
        torch.testing.assert_close(found, wanted[:2], rtol=0, atol=bound)


CASES = {
    "data": lambda X: Gram(X, centre=True),
    "scaled": lambda X: Gram(X, 1 / 11, centre=True),
    "sparse": lambda X: Gram(X.to_sparse_coo(), centre=True),
    "function": lambda X: Gram(FromMatvec(lambda u, X: X @ u, (12, 5), [X]), centre=True),
}


def real(pairs):
    """Values and vectors, which a complex phase has been fixed for."""
    values, vectors = pairs
    return torch.real(values), torch.real(vectors), torch.imag(vectors + 0j)


@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_data_against_differences(name, k):
    X = data(12, 5).requires_grad_()
    assert gradcheck(lambda X: tuple(pmaf.ied(CASES[name](X), k)), X, atol=1e-6)


@pytest.mark.parametrize("dtype", [F64, torch.complex128], ids=str)
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_gradients_of_weights_against_differences(batch, dtype):
    """Also where one is zero; and of weights for data that a batch shares."""
    X, w = data(9, 4, dtype=dtype), 0.1 + drawn(*batch, 9, seed=3).square()
    w[..., 2] = 0
    X.requires_grad_()
    w.requires_grad_()

    def both(X, w):
        return real(pmaf.ied(Gram(X, weights=w, centre=True), 2, reference="largest"))

    assert gradcheck(both, (X, w), atol=1e-6)


def test_gradients_do_not_depend_on_where_the_data_are():
    """In float32, with a mean of ten thousand spreads, they are those in float64."""
    X = data(200, 6, mean=1e4).float()
    found = []
    for Y in (X, X.double()):
        Y.requires_grad_()
        vector = pmaf.ied(Gram(Y, centre=True), reference="largest").vectors
        weights = torch.cos(torch.arange(6.0)).to(Y)
        found.append(torch.autograd.grad((vector * weights).sum(), Y)[0])
    single, exact = found
    values, _ = components(X.detach())
    gap = float((values[0] - values[1]) / values[0])
    bound = 256 * torch.finfo(torch.float32).eps / gap * float(exact.norm())
    assert float((single.double() - exact).norm()) <= bound
    # Moving all data changes nothing, so that the gradients of the rows sum to zero.
    assert float(single.sum(0).norm()) <= bound


def test_a_batch_of_weights_may_be_in_the_middle_of_that_of_the_data():
    X, w = drawn(3, 1, 9, 4) + 5, drawn(2, 9, seed=1).square()
    x = drawn(3, 2, 4, 2)
    mean = (w.unsqueeze(-1) * X).sum(-2, keepdim=True) / w.sum(-1)[..., None, None]
    wanted = (X - mean).mT @ (w.unsqueeze(-1) * (X - mean))
    torch.testing.assert_close(Gram(X, weights=w, centre=True) @ x, wanted @ x)


def test_weights_that_are_all_zero_leave_nothing():
    operator = Gram(drawn(9, 4) + 5, weights=torch.zeros(9, dtype=F64), centre=True)
    assert not (operator @ drawn(4, 2)).any()


@pytest.mark.parametrize("size", [1e-15, 1e15], ids=str)
def test_any_size_of_numbers(size):
    X = data(30, 5)
    found = pmaf.ied(Gram((X * size).float(), centre=True), 2)
    wanted = pmaf.ied(Gram(X.float(), centre=True), 2)
    torch.testing.assert_close(found.vectors, wanted.vectors, rtol=0, atol=1e-4)


def test_text_and_errors():
    X = drawn(9, 4)
    assert repr(Gram(X, centre=True)) == "Gram(4, 4, centre=True)"
    assert repr(Gram(X.expand(2, 9, 4))) == "Gram(2, 4, 4)"
    again = Gram(X, 2.0, drawn(9).square(), centre=True)
    again = again.with_tensors([x.clone() for x in again.tensors])
    assert again.centre
    assert again.scale == 2
    with pytest.raises(TypeError, match=r"centre is True.*got Tensor.*Gram\(X - c\)"):
        Gram(X, centre=X.mean(0))


def test_half_precision_is_computed_in_single():
    X = data(50, 5, mean=3.0).half()
    values, vectors = pmaf.ied(Gram(X, centre=True))
    assert values.dtype == vectors.dtype == torch.float16
    wanted, _ = components(X)
    torch.testing.assert_close(values.double(), wanted[0], rtol=2**-10, atol=0)


def test_operators_that_are_trained_are_exact_after_a_step():
    """What is kept of the mean is a constant, so that writing into the data is harmless."""
    X = data(30, 5)
    operator = Gram(X, centre=True)
    pmaf.ied(operator)
    X += 7.0
    X[3] *= 2
    Z = X - X.mean(0)
    torch.testing.assert_close(operator @ torch.eye(5, dtype=F64), Z.mT @ Z)
