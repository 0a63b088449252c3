"""One vector of small symmetric matrices: power steps and decompositions."""

import logging
import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import pmaf
from pmaf import native, recipe
from pmaf.krylov.power import dominant_of_sum
from pmaf.linalg import sphere
from pmaf.linalg.symmetric_part import fixed_rows
from pmaf.solvers import Adaptive, Dense
from pmaf.tangent.series import neumann
from tests.ied_cases import SYMMETRIC, with_eigenvalues

T = torch.float64


# Power steps, however small the matrices; a decomposition, however large.
ALWAYS = Adaptive(power_from=0, power_size=1, krylov_from=math.inf, compiled=False)
NEVER = Adaptive(power_from=math.inf, krylov_from=math.inf, compiled=False)


def dominated(*batch, n=12, seed=0, dtype=T):
    g = torch.Generator().manual_seed(seed)
    X = torch.rand(*batch, n, n, generator=g, dtype=T)
    return (X + X.mT).to(dtype)


def indefinite(*batch, n=12, seed=0, dtype=T):
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(*batch, n, n, generator=g, dtype=T)
    return (X + 0.3 * X.mT).to(dtype)


def solved(A, largest, way):
    return pmaf.ied(A, largest=largest, solver=way)


def power(A, largest=True):
    """What power steps find, or None."""
    n = A.shape[-1]
    A = (A if largest else -A).reshape(-1, n, n)
    return dominant_of_sum(A, 6 * torch.finfo(A.dtype).eps)


@pytest.fixture
def ways(caplog):
    """The ways that solves have taken, as they are logged, from one call to the next."""
    caplog.set_level(logging.DEBUG, logger="pmaf")

    def taken():
        found = [x.getMessage() for x in caplog.records if x.name == "pmaf"]
        caplog.clear()
        return found

    return taken


def outputs(run, A):
    A = A.clone().requires_grad_()
    value, vector = run(A)
    weights = torch.cos(torch.arange(float(vector.numel())).to(A)).reshape(vector.shape)
    (gradient,) = torch.autograd.grad((vector * weights).sum() + value.sin().sum(), A)
    return value.detach(), vector.detach(), gradient


def same(A, largest, way):
    found = outputs(lambda A: solved(A, largest, way), A)
    exact = outputs(lambda A: pmaf.ied(A, largest=largest, solver=Dense()), A.double())
    for x, y in zip(found, exact, strict=True):
        assert x.shape == y.shape
        tolerance = 2e3 * torch.finfo(A.dtype).eps * float(y.abs().max())
        torch.testing.assert_close(x.double(), y, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize("batch", [(), (4,), (2, 3)], ids=str)
@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("way", ["power", "decomposition"])
def test_it_is_the_general_solution(way, largest, batch, dtype):
    A = dominated(*batch, dtype=dtype) if way == "power" else indefinite(*batch, dtype=dtype)
    A = A if largest else -A
    assert (power(A, largest) is not None) == (way == "power")
    same(A, largest, ALWAYS)
    same(A.mT, largest, ALWAYS)


@pytest.mark.skipif(not native.available, reason="the short forward pass needs kernels")
@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("n", [1, 2, 3, 12, 64])
@pytest.mark.parametrize("batch", [(), (4,), (2, 3)], ids=str)
def test_the_short_forward_pass_is_that_of_its_solver(batch, n, largest, monkeypatch):
    A = indefinite(*batch, n=n)
    general = outputs(lambda A: pmaf.ied(A, largest=largest, solver=Adaptive()), A)
    # A call with default options poses no problem where there are kernels.
    monkeypatch.setattr(recipe, "end", None)
    short = outputs(lambda A: pmaf.ied(A, largest=largest), A)
    for x, y in zip(short, general, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SYMMETRIC)
def test_named_matrices_by_default_and_in_general_are_the_same(name):
    A = SYMMETRIC[name]()
    default, general = pmaf.ied(A), pmaf.ied(A, solver=Dense())
    torch.testing.assert_close(default.values, general.values)
    torch.testing.assert_close(default.vectors, general.vectors)


@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("way", [ALWAYS, NEVER], ids=["power", "decomposition"])
def test_first_and_second_derivatives(way, largest):
    A = dominated(2, n=4, seed=3)
    A = (A if largest else -A).requires_grad_()
    assert gradcheck(lambda A: solved(A, largest, way), A)
    assert gradgradcheck(lambda A: solved(A, largest, way), A)


@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("way", [ALWAYS, NEVER], ids=["power", "decomposition"])
def test_a_gradient_to_be_differentiated_again_is_the_same(way, largest):
    A = (dominated(2) if largest else -dominated(2)).requires_grad_()
    value, vector = solved(A, largest, way)
    for loss in (value.sin().sum(), vector.cos().sum()):
        (once,) = torch.autograd.grad(loss, A, retain_graph=True)
        (again,) = torch.autograd.grad(loss, A, create_graph=True)
        torch.testing.assert_close(again.detach(), once)


@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
def test_a_gradient_that_the_series_is_too_slow_for(largest, monkeypatch):
    monkeypatch.setattr("pmaf.tangent.complement.neumann", lambda *_: None)
    same(dominated(3) if largest else -dominated(3), largest, ALWAYS)


def test_the_series_goes_on_until_the_slowest_of_a_batch_has_converged():
    values = torch.tensor([[0.0, 1e-6, 1e-7], [0.0, 0.4, 0.3]], dtype=T)
    right = torch.tensor([[0.0, 2.0, -3.0]], dtype=T).expand(2, 1, 3)
    A = torch.diag_embed(values)
    found = neumann(lambda w: torch.bmm(w, A), torch.ones(2, 1, dtype=T), right, math.nan)
    torch.testing.assert_close(found, right / (1 - values).unsqueeze(1), rtol=1e-14, atol=0)


def test_a_batch_whose_entries_converge_at_different_rates():
    A = torch.cat([dominated(2) + 20, dominated(2)])
    assert power(A) is not None
    same(A, True, ALWAYS)


def test_gradients_of_values_alone_and_of_nothing():
    A = dominated(3).requires_grad_()
    for way in (ALWAYS, NEVER):
        value, vector = solved(A, True, way)
        (gradient,) = torch.autograd.grad(value.sum(), A)
        outer = vector.unsqueeze(-1) * vector.unsqueeze(-2)
        torch.testing.assert_close(gradient, outer.detach())
        value, vector = solved(A, True, way)
        detached = (vector.detach() * A.sum(-1)).sum()
        torch.autograd.grad(detached, A)


def test_a_gradient_almost_along_the_vector_takes_no_other_way(ways):
    """The sum of the vector of a matrix of nearly constant entries hardly depends on it."""
    for dtype in (torch.float32, T):
        A = (dominated(5, n=32, dtype=dtype) + 20).requires_grad_()
        _, vector = solved(A, True, ALWAYS)
        ways()
        (found,) = torch.autograd.grad(vector.sum(), A)
        assert ways() == ["tangent: series"]
        exact = A.detach().double().requires_grad_()
        vector = pmaf.ied(exact, solver=Dense()).vectors
        (wanted,) = torch.autograd.grad(vector.sum(), exact)
        bound = 1e3 * torch.finfo(dtype).eps * float(wanted.norm())
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=bound)


def test_what_power_steps_cannot_prove_goes_on():
    """Not dominated; too small for the norm to be trusted; not finite."""
    assert power(indefinite(2)) is None
    tiny = dominated(2, dtype=torch.float32) * 1e-22
    assert power(tiny) is None
    same(tiny, True, ALWAYS)
    assert power(dominated(2) * math.nan) is None
    # A single entry among others, which are dominated.
    mixed = torch.cat([dominated(3), indefinite(1)])
    same(mixed, True, ALWAYS)


def test_large_ones_of_ordinary_spectrum_go_on_to_a_krylov_space(ways):
    A = torch.stack([with_eigenvalues([1.0, *torch.linspace(0.8, -0.5, 299).tolist()], 1)] * 4)
    torch.testing.assert_close(pmaf.ied(A).values, torch.ones(4, dtype=T))
    assert ways() == ["ied: Krylov space"]


@pytest.mark.parametrize("way", [ALWAYS, NEVER], ids=["power", "decomposition"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite(bad, way):
    A = dominated(2)
    A[1, 2, 3] = bad
    with pytest.raises(ValueError, match="A has non-finite values in 1 of 2"):
        solved(A, True, way)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite_among_many(bad, n):
    A = indefinite(1000, n=n, dtype=torch.float32)
    A[7, 0, 1] = bad
    with pytest.raises(ValueError, match="A has non-finite values in 1 of 1000"):
        solved(A, True, NEVER)


def test_gradients_of_many_three_by_three():
    A = indefinite(1000, n=3, dtype=torch.float32)
    same(A[:40], True, NEVER)
    full, part = pmaf.ied(A), pmaf.ied(A[:40])
    torch.testing.assert_close(full.vectors[:40], part.vectors)


def test_gradients_of_two_by_two():
    A = indefinite(70, n=2)
    same(A, True, NEVER)
    same(A, False, NEVER)


def test_autocast_does_not_reach_the_solve():
    A = dominated(2).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = pmaf.ied(A)
    assert found.vectors.dtype == torch.float32
    torch.testing.assert_close(found.vectors, pmaf.ied(A).vectors, rtol=0, atol=0)


def test_a_loop_in_inference_mode_does_not_spoil_training():
    sphere.known_references.cache_clear()
    with torch.inference_mode():
        pmaf.ied(dominated(5, n=64))
    A = dominated(5, n=64).requires_grad_()
    assert torch.autograd.grad(pmaf.ied(A).vectors.sum(), A)[0].isfinite().all()


def test_squares_that_underflow_prove_nothing():
    """The start sees 0.70; the squares of 0.71, spread over many entries, are below all numbers."""
    n = 120
    start = fixed_rows[n, T, torch.device("cpu")][0]
    span = torch.stack([torch.eye(n, dtype=T)[0], start])
    x = torch.cos(torch.arange(n, dtype=T))
    x = x - torch.linalg.lstsq(span.mT, x.unsqueeze(-1)).solution.mT[0] @ span
    x = x / x.norm()
    A = 0.71 * torch.outer(x, x)
    A[0, 0] += 0.70
    for scale in (1.0, 1e-161):
        value, vector = pmaf.ied(scale * A)
        assert float(value) / scale == pytest.approx(0.71, rel=1e-10)
        assert float((vector @ x).abs()) == pytest.approx(1, rel=1e-10)
