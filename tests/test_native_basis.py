"""Compiled kernels around a decomposition: the same values and gradients as torch's operations."""

import importlib
import itertools
import json
import logging
import os
import subprocess
import sys

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import pmaf
from pmaf import native
from pmaf.operators import Diagonal
from pmaf_lab.bench.families import SQUARES
from tests.builds import variables_of
from tests.less_cases import with_singular_values

less = importlib.import_module("pmaf.layers.less")
pytestmark = pytest.mark.skipif(not native.available, reason=f"no kernels: {native.about}")
T = torch.float64
REAL = {torch.complex64: torch.float32, torch.complex128: T}
SIZES = [(8, 3), (3, 3), (3, 7), (1, 1), (4, 1), (1, 4), (20, 17)]
OPTIONS = [(), ("weights",), ("radius",), ("M",), ("diagonal",), ("weights", "radius", "M")]
sizes = pytest.mark.parametrize(("m", "n"), SIZES)
balls = pytest.mark.parametrize("ball", [False, True], ids=["sphere", "ball"])
options = pytest.mark.parametrize("use", OPTIONS, ids=lambda use: "+".join(use) or "none")


def randn(*shape, dtype=T, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def inputs(m, n, use, *batch, dtype=T, length=1.0):
    """A, b and the tensors of options, by name."""
    real = REAL.get(dtype, dtype)
    X = randn(*batch, n, n, dtype=dtype, seed=2)
    M = X @ X.mH / n + torch.eye(n, dtype=dtype)
    every = {
        "weights": randn(*batch, m, dtype=real, seed=3).abs() + 0.1,
        "radius": randn(*batch, dtype=real, seed=4).exp(),
        "M": M,
        "diagonal": M.diagonal(dim1=-2, dim2=-1).clone(),
    }
    chosen = {name: every[name] for name in use}
    A, b = randn(*batch, m, n, dtype=dtype), length * randn(*batch, m, dtype=dtype, seed=1)
    return {"A": A, "b": b, **chosen}


def arguments(tensors):
    """Keywords of `pmaf.less`."""
    tensors = dict(tensors)
    if "diagonal" in tensors:
        tensors["M"] = Diagonal(tensors.pop("diagonal"))
    return tensors


def by_torch(monkeypatch):
    """Switch the kernels of this file off."""
    monkeypatch.setattr(less, "short_recipe", lambda *_: None)
    monkeypatch.setattr(native, "takes_units", lambda *_: False)


def derivatives(call, tensors):
    """The results of a call, and gradients of a function of them."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    found = call(**arguments(leaves))
    results = found if isinstance(found, tuple) else (found,)
    pairs = zip(results, itertools.count())
    loss = sum((x * torch.cos(torch.ones_like(x.real).cumsum(-1) + k)).real.sum() for x, k in pairs)
    gradients = torch.autograd.grad(loss, tuple(leaves.values()))
    return [x.detach() for x in results], dict(zip(leaves, gradients))


def reported(ball):
    def call(A, b, **given):
        solution = pmaf.solve(pmaf.SphereLeastSquares(A, b, ball=ball, **given))
        assert solution.converged.all()
        return solution.value, solution.multiplier, solution.gap.detach()

    return call


def assert_equal(found, wanted, roundings):
    """Results and gradients agree up to so many roundings of the largest number of each tensor."""
    for x, y in zip(found[0], wanted[0]):
        close(x, y, roundings)
    for name, x in found[1].items():
        close(x, wanted[1][name], roundings, name)


def close(x, y, roundings, name=""):
    eps = torch.finfo(x.dtype).eps
    size = y.abs().amax().clamp_min(1)
    error = (x - y).abs().amax() / size
    assert error <= roundings * eps, f"{name} differs by {float(error / eps):.0f} roundings"


def condition(tensors, ball):
    """The roundings that a gradient may differ by: those of the inputs, magnified.

    Where a minimiser is not unique, the gap is zero, and nothing is divided by it.
    """
    given = dict(tensors)
    A, w, M = (given.get(name) for name in ("A", "weights", "M"))
    values = torch.linalg.svdvals(A if w is None else w.sqrt().unsqueeze(-1) * A)
    metric = 1.0 if M is None else float(torch.linalg.cond(M).amax())
    gap = pmaf.solve(pmaf.SphereLeastSquares(**arguments(given), ball=ball)).gap
    top = values[..., 0].square()
    inverse = torch.where(gap > 0, top / gap, 1)
    return 64 * metric * float(torch.maximum(inverse, top / values[..., -1].square()).amax())


@options
@balls
@sizes
@pytest.mark.parametrize("length", [0.1, 3.0], ids=["short", "long"])
def test_what_torch_finds(m, n, ball, use, length, monkeypatch):
    for dtype in (T, torch.float32, torch.complex128, torch.complex64):
        tensors = inputs(m, n, use, 4, dtype=dtype, length=length)
        roundings = condition(tensors, ball)
        calls = [lambda A, b, **given: pmaf.less(A, b, ball=ball, **given)]
        if not dtype.is_complex:
            calls.append(reported(ball))
        found = [derivatives(call, tensors) for call in calls]
        with monkeypatch.context() as patch:
            by_torch(patch)
            wanted = [derivatives(call, tensors) for call in calls]
        for x, y in zip(found, wanted):
            assert_equal(x, y, roundings)


@pytest.mark.parametrize("family", SQUARES)
@pytest.mark.parametrize("batch", [1, 1000])
def test_families_and_batches(family, batch, monkeypatch):
    """Ill-conditioned and hard problems; entries of a batch do not influence each other."""
    for m, n in ((8, 3), (9, 9), (32, 32)):
        A, b = SQUARES[family](batch, m, n, torch.Generator().manual_seed(n))
        for dtype, use in ((T, ()), (torch.float32, ("weights",)), (T, ("weights",))):
            weights = {"weights": randn(batch, m, dtype=dtype).abs()} if use else {}
            tensors = {"A": A.to(dtype), "b": b.to(dtype), **weights}
            (u,), gradients = derivatives(pmaf.less, tensors)
            problem = pmaf.SphereLeastSquares(**arguments(tensors))
            assert pmaf.certify(problem, u).holds(256 * torch.finfo(dtype).eps).all()
            one = {name: x[-1:] for name, x in tensors.items()}
            (last,), alone = derivatives(pmaf.less, one)
            close(u[-1:], last, 64)
            assert all(x.isfinite().all() for x in gradients.values())
            if family == "inner" or family == "outer":
                for name, x in alone.items():
                    close(gradients[name][-1:], x, 1e3)


@balls
@options
def test_gradients_are_central_differences(ball, use):
    """Inside of the ball, outside of it, and with a rank that is not full."""
    for length, rank in ((0.05, 3), (5.0, 3), (0.05, 2), (5.0, 2)):
        tensors = inputs(6, 3, use, dtype=T, length=length)
        if rank < 3:
            tensors["A"] = tensors["A"] @ torch.diag(torch.tensor([1.0, 1.0, 0], dtype=T))
        names = [name for name in tensors if rank == 3 or name != "A"]
        if rank < 3 and (not ball or "M" in use or "diagonal" in use) and length < 1:
            continue  # there is a sphere of minimisers, or one of them moves with M

        def call(*leaves, names=names, tensors=tensors):
            return pmaf.less(**arguments(tensors | dict(zip(names, leaves))), ball=ball)

        leaves = [tensors[name].clone().requires_grad_() for name in names]
        assert gradcheck(call, leaves)
        assert gradgradcheck(call, leaves, fast_mode=True)


def test_the_gradient_of_least_norm_is_that_of_the_pseudoinverse():
    """Of a matrix of rank two, in the ball, at constant rank."""
    left, right = randn(7, 2), randn(2, 4, seed=1)
    b, w = 0.1 * randn(7, seed=2), randn(7, seed=3).abs() + 0.5

    def found(left, right, b, w):
        return pmaf.less(left @ right, b, ball=True, weights=w)

    def wanted(left, right, b, w):
        root = w.sqrt().unsqueeze(-1)
        inverse = torch.linalg.pinv(right) @ torch.linalg.pinv(root * left)
        return inverse @ (root.squeeze(-1) * b)

    leaves = [x.requires_grad_() for x in (left, right, b, w)]
    u, v = found(*leaves), wanted(*leaves)
    torch.testing.assert_close(u, v, rtol=1e-12, atol=1e-14)
    for x, y in zip(*(torch.autograd.grad(y.cos().sum(), leaves) for y in (u, v))):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("exponent", [-150, -75, 75, 150])
@balls
def test_scales(exponent, ball):
    """The units of A and b, of the weights, of M and of the radius change nothing."""
    power = 2.0 ** int(exponent * 3.32)
    tensors = inputs(6, 3, ("weights", "radius", "M"), 3, length=2.0)
    (u,), gradients = derivatives(lambda **x: pmaf.less(ball=ball, **x), tensors)
    for names, factor in ((("A", "b"), 1.0), (("weights",), 1.0), (("b", "radius"), power)):
        scaled = {name: x * power if name in names else x for name, x in tensors.items()}
        (v,), other = derivatives(lambda **x: pmaf.less(ball=ball, **x), scaled)
        close(v / factor, u, 64)
        for name, x in other.items():
            change = (power if name in names else 1.0) / factor
            close(x * change, gradients[name], 1e4, name)
    # A metric that is four times as large halves the vector.
    root = 2.0 ** int(exponent * 1.66)
    scaled = tensors | {"M": tensors["M"] * root * root, "radius": tensors["radius"] * root}
    (v,), _ = derivatives(lambda **x: pmaf.less(ball=ball, **x), scaled)
    close(v, u, 64)


@pytest.mark.parametrize("tiny", [0.0, 1e-100, 1e-300])
def test_a_tiny_b_and_none(tiny):
    """The solution is the last singular vector, on the side of b."""
    A, w = randn(6, 3), randn(6, seed=3).abs() + 0.1
    last = torch.linalg.svd(w.sqrt().unsqueeze(-1) * A).Vh[-1]
    b = (tiny * randn(6, seed=1)).requires_grad_()
    leaf = A.clone().requires_grad_()
    u = pmaf.less(leaf, b, weights=w)
    torch.testing.assert_close((u @ last).abs().detach(), torch.ones((), dtype=T))
    if tiny:
        torch.testing.assert_close(pmaf.less(A, -b.detach(), weights=w), -u.detach())
    # The derivative in b is that of the direction, whatever the size of b.
    gradients = torch.autograd.grad(u[0], (leaf, b))
    near = (1e-9 * randn(6, seed=1)).requires_grad_()
    v = pmaf.less(leaf, near, weights=w)
    if tiny:
        for x, y in zip(gradients, torch.autograd.grad(v[0], (leaf, near))):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
    assert all(x.isfinite().all() for x in gradients)


def test_rows_that_are_left_out():
    A, b = randn(5, 9, 3), randn(5, 9, seed=1)
    w = randn(5, 9, seed=3).abs()
    w[:, 5:] = 0
    leaves = [x.requires_grad_() for x in (A, b, w)]
    u = pmaf.less(A, b, weights=w)
    part = [x[:, :5].detach().requires_grad_() for x in leaves]
    v = pmaf.less(part[0], part[1], weights=part[2])
    torch.testing.assert_close(u, v, rtol=1e-11, atol=1e-12)
    whole, wanted = (torch.autograd.grad(y.cos().sum(), x) for y, x in ((u, leaves), (v, part)))
    for x, y in zip(whole, wanted):
        torch.testing.assert_close(x[:, :5], y, rtol=1e-9, atol=1e-10)
    assert not whole[0][:, 5:].any()
    assert not whole[1][:, 5:].any()
    # A weight of zero has a derivative, though its row has none.
    assert whole[2][:, 5:].abs().amin() > 0


def test_the_edge_of_the_ball():
    """The derivative is that of the outer side where the least-norm solution is on the sphere."""
    A, b = with_singular_values([3.0, 2.0, 1.0], 6)[0], randn(6, seed=1)
    least = torch.linalg.lstsq(A, b.unsqueeze(-1)).solution.squeeze(-1)
    b = (b / least.norm()).requires_grad_()
    u = pmaf.less(A, b, ball=True)
    torch.testing.assert_close(u.detach(), least / least.norm(), rtol=1e-12, atol=1e-13)
    (g,) = torch.autograd.grad(u.cos().sum(), b)
    (outer,) = torch.autograd.grad(pmaf.less(A, 1.000001 * b, ball=True).cos().sum(), b)
    torch.testing.assert_close(g, outer, rtol=1e-4, atol=1e-5)


def ways(call, caplog):
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="pmaf"):
        result = call()
    return [x.getMessage() for x in caplog.records], result


def test_the_ways_that_are_taken(caplog):
    tensors = inputs(6, 3, ("weights",))
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    A, b, w = leaves.values()
    for call in (
        lambda: pmaf.less(A, b, weights=w),
        lambda: pmaf.less(A, b),
        lambda: pmaf.solve(pmaf.SphereLeastSquares(A, b, weights=w)).value,
        lambda: pmaf.solve(pmaf.SphereLeastSquares(A, b)).value,
    ):
        taken, u = ways(call, caplog)
        assert taken == ["less: decomposition, compiled"]
        taken, g = ways(lambda u=u: torch.autograd.grad(u.sum(), A, retain_graph=True), caplog)
        assert taken == ["tangent: compiled"]
        # Derivatives that are recorded are those of the common path, with the same values.
        taken, again = ways(lambda u=u: torch.autograd.grad(u.sum(), A, create_graph=True), caplog)
        assert "tangent: compiled" not in taken
        torch.testing.assert_close(again[0].detach(), g[0], rtol=1e-10, atol=1e-11)
    taken, _ = ways(lambda: pmaf.less(A.float(), b.float(), ball=True), caplog)
    assert taken == ["less: decomposition, compiled"]
    # Large matrices are left to the threads of torch.
    m, n = native.UNIT_ENTRIES // 8, 9
    taken, _ = ways(lambda: pmaf.less(randn(m, n), randn(m, seed=1), ball=True), caplog)
    assert taken == ["less: constrained, singular vectors"]


def test_many_problems_with_one_matrix(caplog):
    A, b = randn(6, 3).requires_grad_(), randn(50, 6, seed=1).requires_grad_()
    taken, u = ways(lambda: pmaf.less(A, b, ball=True), caplog)
    assert taken == ["less: decomposition, compiled"]
    g = torch.autograd.grad(u.cos().sum(), (A, b))
    each = [pmaf.less(A, x, ball=True) for x in b]
    torch.testing.assert_close(u, torch.stack(each), rtol=1e-11, atol=1e-12)
    wanted = torch.autograd.grad(torch.stack(each).cos().sum(), (A, b))
    for x, y in zip(g, wanted):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)


def test_options_that_broadcast():
    A, b = randn(4, 6, 3), randn(4, 6, seed=1)
    w, M = randn(6, seed=3).abs().requires_grad_(), 2 * torch.eye(3, dtype=T)
    radius = torch.tensor(1.5, dtype=T, requires_grad=True)
    u = pmaf.less(A, b, weights=w, M=M, radius=radius)
    g = torch.autograd.grad(u.cos().sum(), (w, radius))
    each = [pmaf.less(x, y, weights=w, M=M, radius=radius) for x, y in zip(A, b)]
    torch.testing.assert_close(u, torch.stack(each), rtol=1e-12, atol=1e-13)
    wanted = torch.autograd.grad(torch.stack(each).cos().sum(), (w, radius))
    for x, y in zip(g, wanted):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, T], ids=str)
def test_a_radius_that_is_a_parameter(dtype):
    A, b = randn(6, 3, dtype=dtype), randn(6, dtype=dtype, seed=1)
    layer = pmaf.LESS(radius=torch.nn.Parameter(torch.ones((), dtype=dtype)))
    (found,) = torch.autograd.grad(layer(A, b).sum(), layer.radius)
    wide = torch.ones((), dtype=T, requires_grad=True)
    u = pmaf.solve(pmaf.SphereLeastSquares(A.double(), b.double(), wide)).value
    allowed = 64 * torch.finfo(dtype).eps / torch.finfo(T).eps
    close(found.double(), torch.autograd.grad(u.sum(), wide)[0], allowed)


def test_a_batch_of_none():
    A, b = randn(0, 6, 3).requires_grad_(), randn(0, 6)
    u = pmaf.less(A, b, ball=True)
    assert u.shape == (0, 3)
    (g,) = torch.autograd.grad(u.sum(), A)
    assert g.shape == A.shape


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (dict(weights=-torch.ones(6, dtype=T)), "weights must not be negative"),
        (dict(weights=torch.full((6,), torch.nan, dtype=T)), "weights has non-finite values"),
        (dict(radius=torch.zeros((), dtype=T)), "radius must be positive"),
        (dict(M=-torch.eye(3, dtype=T)), "M is not positive definite"),
        (dict(M=Diagonal(-torch.ones(3, dtype=T))), "M is not positive definite"),
        (dict(M=torch.eye(4, dtype=T)), "needs M of shape"),
        (dict(weights=torch.ones(6)), "weights is torch.float32"),
        (dict(ball=1), "ball must be True or False"),
    ],
)
def test_errors_are_those_of_the_common_path(wrong, words):
    with pytest.raises((ValueError, TypeError), match=words):
        pmaf.less(randn(6, 3), randn(6, seed=1), **wrong)


def test_one_entry_that_is_wrong_among_many():
    A, b = randn(5, 6, 3), randn(5, 6, seed=1)
    b[3, 2] = torch.inf
    with pytest.raises(pmaf.NonFiniteError, match="b has non-finite values in 1 of 5"):
        pmaf.less(A, b, ball=True)


_PROGRAM = """
import json, torch, pmaf
g = torch.Generator().manual_seed(0)
A, b, w = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((7, 6, 3), (7, 6), (7, 6)))
leaves = [x.requires_grad_() for x in (A, b, w.exp())]
found = []
for ball in (False, True):
    u = pmaf.less(leaves[0], leaves[1], weights=leaves[2], ball=ball)
    found += [u, *torch.autograd.grad(u.cos().sum(), leaves)]
print(json.dumps([pmaf.native.about, [x.flatten().tolist() for x in found]]))
"""


@pytest.mark.xdist_group("instruction sets")
@pytest.mark.parametrize("setting", ["baseline", "avx2", "0"])
def test_the_same_without_kernels_and_on_other_processors(setting):
    def run(variables):
        ended = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(ended.stdout)

    (about, found), (_, wanted) = run(variables_of(setting)), run({})
    if setting != "0" and about != setting:
        pytest.skip(about)
    for x, y in zip(found, wanted):
        torch.testing.assert_close(torch.tensor(x), torch.tensor(y), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            torch.tensor(x, dtype=T), torch.tensor(y, dtype=T), rtol=1e-9, atol=1e-11
        )
