"""Signs of eigenvectors: towards a tensor, by one component, by the largest."""

import pytest
import torch

import pmaf
from pmaf.operators import Diagonal, Matrix

T = torch.float64


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=T)


def symmetric(*shape, seed=0):
    A = randn(*shape, seed=seed)
    return A + A.mT


CALLS = {
    "one matrix": lambda A, k, **options: pmaf.ied(A, k, **options),
    "operator": lambda A, k, **options: pmaf.ied(Matrix(A), k, **options),
    "skip": lambda A, k, **options: pmaf.ied(A, k, skip=1, **options),
    "pair": lambda A, k, **options: pmaf.ied(
        A, k, M=4 * torch.eye(A.shape[-1], dtype=A.dtype), **options
    ),
    "diagonal": lambda A, k, **options: pmaf.ied(
        A, k, M=Diagonal(torch.full(A.shape[-1:], 4.0, dtype=A.dtype)), **options
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("order", [(True, True), (True, False), (False, True)])
def test_what_is_asked_for_is_positive(call, k, order):
    options = dict(zip(("largest", "descending"), order, strict=True))
    A = symmetric(5, 6, 6)

    def columns(reference):
        vectors = CALLS[call](A, k, reference=reference, **options).vectors
        return vectors.unsqueeze(-1) if k is None else vectors

    for i in range(-1, 6):
        assert (columns(i)[..., i, :] > 0).all()
    V = columns("largest")
    assert (V.gather(-2, V.abs().argmax(-2, keepdim=True)) > 0).all()
    assert (columns(None).sum(-2) > 0).all()
    for reference in (randn(6), randn(5, 6), randn(1, 6)):
        assert ((columns(reference) * reference.unsqueeze(-1)).sum(-2) > 0).all()
    if k is not None:
        for reference in (randn(6, 2), randn(5, 6, 2)):
            assert ((columns(reference) * reference).sum(-2) > 0).all()
    # Signs apart, it is one vector.
    torch.testing.assert_close(columns("largest").abs(), columns(0).abs(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, T])
def test_of_equal_moduli_the_first_is_positive(dtype):
    A = torch.tensor([[1.0, -2.0, 0.0], [-2.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=dtype)
    vector = pmaf.ied(A, reference="largest").vectors  # ±(1, −1, 0)/√2
    root = 0.5**0.5
    torch.testing.assert_close(vector, torch.tensor([root, -root, 0.0], dtype=dtype))
    # Rounding does not decide: the second is larger by a unit in the last place.
    x = torch.tensor([1.0, -1.0 - torch.finfo(dtype).eps, 0.0], dtype=dtype)
    vector = pmaf.ied(torch.outer(x, x), reference="largest").vectors
    assert vector[0] > 0


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("reference", [2, torch.eye(3, dtype=T)[2], torch.zeros(3, dtype=T)])
def test_a_fixed_direction_decides_where_the_reference_is_orthogonal(call, reference):
    """The rule of the docs: cos(1), cos(2), cos(3), whatever sign the solver has found."""
    x, y = torch.tensor([[0.6, 0.8, 0.0], [0.8, -0.6, 0.0]], dtype=T)
    A = 3 * torch.outer(x, x) + 2 * torch.outer(y, y)
    vectors = CALLS[call](A, 1, reference=reference).vectors.squeeze(-1)
    direction = torch.cos(torch.arange(1.0, 4.0, dtype=T))
    assert float(vectors @ direction) > 0


# Of torch's own, which traces and compiles with what it has deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("reference", [1, "largest"])
def test_traced(reference):
    A = symmetric(4, 4, 4)

    def layer(A):
        return pmaf.ied(A, 2, reference=reference).vectors

    truth = layer(A)
    torch.testing.assert_close(torch.func.vmap(layer)(A), truth)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(A), truth)
    leaf = A.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(leaf).sum(), leaf)
    torch.testing.assert_close(torch.func.grad(lambda A: layer(A).sum())(A), gradient)


@pytest.mark.parametrize(
    ("reference", "kind", "message"),
    [
        (6, ValueError, "n = 6"),
        (-7, ValueError, "n = 6"),
        ("first", ValueError, "\"largest\"; got 'first'"),
        (True, ValueError, "index of a component"),
        (1.5, TypeError, "reference must be a torch.Tensor"),
        (randn(5), ValueError, r"reference must have shape \(\*, 6\)"),
    ],
    ids=str,
)
def test_errors(reference, kind, message):
    with pytest.raises(kind, match=message):
        pmaf.ied(symmetric(6, 6), reference=reference)


@pytest.mark.parametrize("size", [1e30, 1e37])
def test_squares_of_a_reference_may_overflow(size):
    """The sign is that of the product, not that of the direction that decides ties."""
    A = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    for side in (1.0, -1.0):
        y = pmaf.ied(A, reference=side * size * torch.tensor([1.0, 0.5, 0.2])).vectors
        assert y[0] * side > 0
