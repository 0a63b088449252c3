"""LESS where it is easy to get wrong: one named trap each."""

import pytest
import torch

import pmaf
from tests import oracles
from tests.compilers import BACKEND

T = torch.float64


@pytest.mark.parametrize(
    ("dtype", "s"), [(torch.float32, [1, 9e-4, 1e-4]), (T, [1, 1e-8, 1e-9])], ids=repr
)
def test_small_singular_values_that_the_gram_matrix_cannot_tell_apart(dtype, s):
    A = torch.diag(torch.tensor(s, dtype=dtype))
    u = pmaf.less(A, torch.zeros(3, dtype=dtype))
    torch.testing.assert_close(u, torch.tensor([0, 0, 1], dtype=dtype), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "s"), [(torch.float32, [1, 2e-4, 1e-4]), (T, [1, 2e-8, 1e-8])], ids=repr
)
def test_gradient_where_two_curvatures_are_below_rounding_of_the_largest(dtype, s):
    A = torch.diag(torch.tensor(s, dtype=dtype))
    b = (A @ torch.full((3,), 0.3, dtype=dtype)).requires_grad_()
    v = torch.tensor([0, 0, 1], dtype=dtype)
    y = pmaf.less(A, b)
    (db,) = torch.autograd.grad(y @ v, b)
    inputs = (x.detach().double().numpy() for x in (A, b, v))
    exact, _, exact_db = (torch.from_numpy(x) for x in oracles.exact_less(*inputs))
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-3)
    assert (db - exact_db).norm() <= 1e-2 * exact_db.norm()


def test_autocast_leaves_the_layer_in_its_own_precision():
    A, b = torch.randn(4, 5, 3, requires_grad=True), torch.randn(4, 5)
    expected = pmaf.less(A, b)
    (gradient,) = torch.autograd.grad(expected.sum(), A)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        u = pmaf.less(A, b)
        assert torch.equal(u, expected)
        (found,) = torch.autograd.grad(u.sum(), A)
    assert torch.equal(found, gradient)


def test_rank_deficient_and_inconsistent_ties_are_broken_by_init_and_do_not_see_scale():
    A = torch.tensor([[1, 1, 2], [2, 2, 1], [3, 3, 5], [1, 1, 0.3]], dtype=T)
    b = torch.tensor([0.1, 0.2, -0.1, 0.3], dtype=T)
    null = torch.tensor([1.0, -1.0, 0.0], dtype=T)
    one, other = pmaf.less(A, b, init=null), pmaf.less(A, b, init=-null)
    assert one @ null > 0.1
    assert other @ null < -0.1
    for c in (0.1, 3.0, 1e15, 1e-15):
        torch.testing.assert_close(pmaf.less(c * A, c * b), pmaf.less(A, b), rtol=0, atol=1e-12)
    assert pmaf.solve(pmaf.SphereLeastSquares(A, b)).gap == 0


@pytest.mark.parametrize("tiny", [1e-100, 1e-170, 1e-300])
def test_the_side_of_a_tiny_b_counts(tiny):
    A = torch.tensor([[2.0, 1], [0, 1], [1, 1]], dtype=T)
    b = tiny * torch.tensor([1.0, -1, 2], dtype=T)
    one, other = pmaf.less(A, b), pmaf.less(A, -b)
    torch.testing.assert_close(one, -other, rtol=0, atol=1e-14)
    assert pmaf.solve(pmaf.SphereLeastSquares(A, b)).gap > 0


def test_a_denormal_matrix():
    A = torch.tensor([[2.0, 1], [0, 1], [1, 1]], dtype=T)
    b = torch.tensor([1.0, -1, 2], dtype=T)
    g = A.mT @ b
    u = pmaf.less(A * 1e-310, b)
    torch.testing.assert_close(u, g / g.norm(), rtol=0, atol=1e-12)


def test_the_boundary_of_the_hard_case():
    """b pulls towards the smallest vector by less than rounding, yet the rest fills the sphere."""
    A = torch.diag(torch.tensor([1.0, 2, 3], dtype=T))
    b = torch.tensor([1e-18, 0.9, 0.8 * 8 / 3], dtype=T, requires_grad=True)
    (found,) = torch.autograd.grad(pmaf.less(A, b)[0], b)
    assert found.abs().max() < 1e13


def test_a_singular_entry_does_not_touch_the_others_of_a_ddn_batch():
    A = torch.stack([torch.diag(torch.tensor([1.0, 0.5], dtype=T)), torch.zeros(2, 2, dtype=T)])
    b = torch.tensor([[0.3, 0.4], [0.0, 0.0]], dtype=T)
    A.requires_grad_()
    rule = pmaf.gradients.DDN()
    (both,) = torch.autograd.grad(pmaf.less(A, b, gradient=rule)[0].sum(), A)
    (alone,) = torch.autograd.grad(pmaf.less(A[0], b[0], gradient=rule).sum(), A)
    torch.testing.assert_close(both[0], alone[0])
    assert torch.isfinite(both).all()


def test_mapping_over_init_alone():
    A, b = torch.diag(torch.tensor([2.0, 1.0], dtype=T)), torch.zeros(2, dtype=T)
    inits = torch.tensor([[0.0, 1.0], [0.0, -1.0]], dtype=T)
    mapped = torch.func.vmap(lambda init: pmaf.less(A, b, init=init))(inits)
    assert torch.equal(mapped, inits)


@pytest.mark.parametrize("scale", [1e-170, 1e-30, 1e100])
def test_certificates_do_not_see_scale(scale):
    A = scale * torch.tensor([[2.0, 0], [0, 1]], dtype=T)
    problem = pmaf.SphereLeastSquares(A, scale * torch.ones(2, dtype=T))
    u = pmaf.less(problem.A, problem.b)
    assert pmaf.certify(problem, u).holds(1e-12)
    assert not pmaf.certify(problem, -u).holds(1e-8)


# Tracing and compiling raise torch's own deprecation warnings.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_with_dynamic_shapes():
    layer = torch.compile(pmaf.less, fullgraph=True, dynamic=True, backend=BACKEND)
    for m in (4, 6):
        A, b = torch.randn(3, m, 2), torch.randn(3, m)
        torch.testing.assert_close(layer(A, b), pmaf.less(A, b))
