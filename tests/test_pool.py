"""Principal pooling, against decompositions in float64, differences, and average pooling."""

import logging
import pickle

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import pmaf
from tests import oracles
from tests.test_training import train

T = torch.float64
PATHS = ("channels", "tokens", "products")
SHAPES = [(7, 4), (4, 7), (5, 5), (40, 3), (3, 40)]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=T)


def features(*shape, seed=0):
    """Features that share a direction, beside noise."""
    n = shape[-1]
    return randn(*shape, seed=seed) + 1.5 * torch.cos(torch.arange(n, dtype=T))


def ways(caplog):
    found = [x.getMessage() for x in caplog.records if x.name == "pmaf"]
    return {way for way in found if way.startswith("pool")}


def oracle(X, weights=None, k=1, centre=False):
    """Extents `(*, k)`, vectors `(*, n, k)` with signs towards the mean, and all extents."""
    X = X.double()
    w = torch.ones(X.shape[:-1], dtype=T) if weights is None else weights.double()
    w = (w / w.sum(-1, keepdim=True)).expand(X.shape[:-1])
    mean = (w.unsqueeze(-1) * X).sum(-2)
    if centre:
        X = X - mean.unsqueeze(-2)
    _, s, vh = torch.linalg.svd(X * w.sqrt().unsqueeze(-1), full_matrices=False)
    V = vh[..., :k, :].mT
    return s[..., :k], V * (mean.unsqueeze(-2) @ V).sign(), s


def bound(s, k, eps):
    """How far rounding of the moments may move each vector: by the distance to its neighbours."""
    squares = torch.nn.functional.pad(s.square(), (0, 1))
    gaps = (squares[..., :-1] - squares[..., 1:])[..., :k]
    nearest = torch.minimum(gaps, torch.nn.functional.pad(gaps, (1, 0), value=torch.inf)[..., :-1])
    return 64 * eps * squares[..., :1] / nearest


# Solutions.


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("centre", [False, True], ids=["", "centre"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_solutions_are_those_of_svd(shape, path, centre, k, dtype, weighted):
    X = features(2, 3, *shape).to(dtype)
    w = randn(3, shape[0], seed=1).square().to(dtype) if weighted else None
    width, eps = k or 1, torch.finfo(dtype).eps
    extents, expected, s = oracle(X, w, width, centre)
    found = pmaf.PrincipalPool(k, centre=centre, path=path)(X, w)
    assert found.dtype == dtype
    found = found.double() if k else found.double().unsqueeze(-1)
    error = torch.linalg.vector_norm(found - expected, dim=-2)
    assert (error <= bound(s, width, eps)).all()
    unit = torch.linalg.vector_norm(found, dim=-2)
    torch.testing.assert_close(unit, torch.ones_like(unit), rtol=0, atol=4 * eps)
    scaled = pmaf.PrincipalPool(k, centre=centre, path=path, scale="root")(X, w).double()
    scaled = scaled if k else scaled.unsqueeze(-1)
    torch.testing.assert_close(scaled, found * extents.unsqueeze(-2), rtol=64 * eps, atol=64 * eps)


@pytest.mark.parametrize(
    ("shape", "path"),
    [
        ((1000, 8, 8), "channels"),
        ((3, 300, 256), "channels"),
        ((3, 256, 300), "tokens"),
        ((64, 49, 2048), "tokens"),
        ((2, 257, 257), "products"),
        ((2, 300, 400), "products"),
        ((1, 1), "channels"),
    ],
    ids=str,
)
def test_the_path_is_that_of_the_smaller_side(shape, path, caplog):
    X = features(*shape).float().requires_grad_()
    caplog.set_level(logging.DEBUG, logger="pmaf")
    y = pmaf.PrincipalPool()(X)
    assert ways(caplog) == {f"pool: {path}"}
    y.square().cumsum(-1).sum().backward()
    assert X.grad.isfinite().all()
    expected = oracle(X.detach())[1].squeeze(-1)
    assert (expected * y.detach().double()).sum(-1).min() > 1 - 1e-6


def test_weights_with_gradients_take_no_roots(caplog):
    """The derivative of the root of a weight is infinite at zero."""
    X, w = features(2, 4, 9), torch.tensor([1.0, 0.0, 2.0, 3.0], dtype=T)
    caplog.set_level(logging.DEBUG, logger="pmaf")
    pool = pmaf.PrincipalPool()
    pool(X, w)
    assert ways(caplog) == {"pool: tokens"}
    caplog.clear()
    pool(X, w.clone().requires_grad_())
    assert ways(caplog) == {"pool: channels"}
    caplog.clear()
    pool(features(2, 4, 300), w.clone().requires_grad_())
    assert ways(caplog) == {"pool: products"}
    with pytest.raises(ValueError, match="no derivative at zero"):
        pmaf.PrincipalPool(path="tokens")(X, w.requires_grad_())


def test_nothing_of_the_size_of_the_channels_squared_is_formed(monkeypatch):
    def never(*_):
        raise AssertionError("a matrix of moments was formed")

    monkeypatch.setattr("pmaf.layers.pool.weighted_gram", never)
    monkeypatch.setattr("pmaf.layers.pool.rooted", never)
    pmaf.PrincipalPool()(features(300, 5000))
    with pytest.raises(AssertionError, match="was formed"):
        pmaf.PrincipalPool()(features(300, 20))


# Derivatives.


@pytest.mark.parametrize("scale", ["unit", "root"])
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("centre", [False, True], ids=["", "centre"])
@pytest.mark.parametrize("path", PATHS)
def test_derivatives(path, centre, k, scale):
    X = features(2, 6, 4).requires_grad_()
    pool = pmaf.PrincipalPool(k, centre=centre, scale=scale, path=path)
    assert gradcheck(pool, (X,))
    if path != "products":
        assert gradgradcheck(pool, (X,))
    if path != "tokens":
        w = (0.5 + randn(6, seed=2).abs()).requires_grad_()
        assert gradcheck(pool, (X, w))
        if path == "channels":
            assert gradgradcheck(pool, (X[:1], w))


@pytest.mark.parametrize("path", ["channels", "products"])
@pytest.mark.parametrize("centre", [False, True], ids=["", "centre"])
def test_gradients_of_weights_that_are_zero(centre, path):
    """Against the same function of weights in closed form, which may be negative."""
    X, c = features(6, 4), randn(4, seed=3)
    w = torch.tensor([1.0, 0.0, 0.5, 0.0, 2.0, 1.0], dtype=T)

    def loss(w):
        p = w / w.sum()
        Y = X - p @ X if centre else X
        y = torch.linalg.eigh(Y.mT @ (p.unsqueeze(-1) * Y)).eigenvectors[:, -1]
        return c @ y * (p @ X @ y).sign()

    leaf = w.clone().requires_grad_()
    (found,) = torch.autograd.grad(c @ pmaf.PrincipalPool(centre=centre, path=path)(X, leaf), leaf)
    torch.testing.assert_close(found, oracles.differences(loss, w), rtol=1e-6, atol=1e-8)


def test_gradients_where_other_eigenvalues_repeat():
    X = torch.diag(torch.tensor([3.0, 1.0, 1.0, 1.0], dtype=T)).requires_grad_()
    assert gradcheck(pmaf.PrincipalPool(path="channels"), (X,))
    assert gradcheck(pmaf.PrincipalPool(path="tokens"), (X,))


def test_paths_agree():
    X = features(2, 30, 20).float()
    w = randn(2, 30, seed=4).square().float()
    c = torch.cos(torch.arange(20.0))
    found = []
    for path in PATHS:
        leaf = X.clone().requires_grad_()
        y = pmaf.PrincipalPool(centre=True, scale="root", path=path)(leaf, w)
        found.append((y.detach(), *torch.autograd.grad((y * c).sum(), leaf)))
    s = oracle(X, w, centre=True)[2]
    tolerance = float(bound(s, 1, torch.finfo(torch.float32).eps).max())
    for other in found[1:]:
        for x, y in zip(found[0], other):
            size = float(x.abs().max())
            torch.testing.assert_close(x, y, rtol=0, atol=tolerance * size)


# What pooling promises.


def test_features_that_are_all_alike_are_returned():
    x = randn(3, 5)
    X = x.unsqueeze(-2).expand(3, 8, 5)
    torch.testing.assert_close(pmaf.PrincipalPool(scale="root")(X), x)
    torch.testing.assert_close(pmaf.PrincipalPool()(X), x / x.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("scale", ["unit", "root"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("k", [None, 3])
def test_no_extent_is_zero(k, path, scale):
    """All features zero, all weights zero, all features alike, and a rank below k."""
    pool = pmaf.PrincipalPool(k, path=path, scale=scale, centre=k is not None)
    X = features(4, 6, 5).float()
    X[1] = 0
    X[2] = X[2, :1]
    X[3, 2:] = X[3, 0]
    w = torch.ones(4, 6)
    w[0] = 0
    X.requires_grad_()
    y = pool(X, w)
    y.sum().backward()
    assert X.grad.isfinite().all()
    assert not y[:2].any()
    assert not X.grad[:2].any()
    if k is None:
        assert y[2:].any(-1).all()
    else:
        assert not y[2].any()  # no distance from their mean
        assert y[3].any(-2).tolist() == [True, False, False]  # two points


def test_a_step_of_features_never_flips_signs_that_the_mean_decides():
    """After ReLU, vectors and mean are nonnegative."""
    X = features(50, 9, 7).relu() + 0.01
    assert (pmaf.PrincipalPool()(X) >= 0).all()
    start, end = features(9, 7), features(9, 7, seed=1)
    path = torch.linspace(0, 1, 400, dtype=T)[:, None, None]
    y = pmaf.PrincipalPool()(start + path * (end - start))
    assert ((y[1:] * y[:-1]).sum(-1) > 0.9).all()


def test_signs_of_features_without_a_mean_are_not_those_of_rounding():
    X = features(6, 5).float()
    X = torch.cat([X, -X])
    pool = pmaf.PrincipalPool()
    first = pool(X)
    for seed in range(20):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
        noise = 1e-7 * randn(5, seed=seed).float()
        assert pool(X[order] + noise) @ first > 0.99


def test_references():
    X = features(3, 9, 5)
    y = pmaf.PrincipalPool(reference=2)(X)
    assert (y[:, 2] > 0).all()
    y = pmaf.PrincipalPool(2, reference="largest")(X)
    assert (y.gather(-2, y.abs().argmax(-2, keepdim=True)) > 0).all()
    pool = pmaf.PrincipalPool()
    torch.testing.assert_close(pool(X, reference=-pool(X)), -pool(X))
    pool = pmaf.PrincipalPool(2)
    flip = pool(X) * torch.tensor([1.0, -1.0], dtype=T)
    torch.testing.assert_close(pool(X, reference=flip), flip)
    assert (pool(X, reference=-4)[:, 1] > 0).all()


def test_starts_save_products():
    X = features(2, 400, 300).float()
    pool = pmaf.PrincipalPool()
    y = pool(X)
    again = pool(X, init=y)
    torch.testing.assert_close(again, y, rtol=0, atol=1e-5)
    assert pool(X[:, :20], init=y).shape == (2, 300)  # where no search needs it
    with pytest.raises(ValueError, match="init must have shape"):
        pool(X, init=y[:, 1:])


def test_maps():
    F = features(2, 3, 4, 5, 6)
    w = randn(2, 3, 5, 6, seed=1).square()
    pool, plain = pmaf.PrincipalPool(maps=True), pmaf.PrincipalPool()
    X = F.flatten(-2).mT
    torch.testing.assert_close(pool(F), plain(X))
    torch.testing.assert_close(pool(F, w), plain(X, w.flatten(-2)))
    assert gradcheck(pool, (F[0, :1].requires_grad_(),))


def test_masks_leave_tokens_out():
    X = features(3, 8, 4)
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[:, 5:] = False
    torch.testing.assert_close(pmaf.PrincipalPool()(X, mask), pmaf.PrincipalPool()(X[:, :5]))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e15, 1e30])
def test_scale(size, path):
    X = features(2, 9, 6).float()
    scaled = (X * size).requires_grad_()
    unit, root = (pmaf.PrincipalPool(path=path, scale=s) for s in ("unit", "root"))
    c = torch.cos(torch.arange(6.0))
    torch.testing.assert_close(unit(scaled), unit(X))
    torch.testing.assert_close(root(scaled) / size, root(X))
    leaf = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad((root(leaf) * c).sum(), leaf)
    (found,) = torch.autograd.grad((root(scaled) * c).sum(), scaled)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_dtypes(dtype):
    X = features(2, 9, 6).to(dtype)
    expected = oracle(X)[1].squeeze(-1)
    found = pmaf.PrincipalPool()(X, torch.ones(9))  # weights may have another dtype
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2 * torch.finfo(dtype).eps)
    start = pmaf.PrincipalPool(path="products")(X, init=found)
    torch.testing.assert_close(start, found)


def test_autocast_does_not_round():
    X = features(2, 300, 40).float()
    pool = pmaf.PrincipalPool()
    expected = pool(X)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(pool(X), expected, rtol=0, atol=0)


def test_one_channel_one_token_and_no_batch():
    pool = pmaf.PrincipalPool(scale="root")
    torch.testing.assert_close(pool(torch.tensor([[-3.0]])), torch.tensor([-3.0]))
    torch.testing.assert_close(pool(torch.tensor([[3.0, 4.0]])), torch.tensor([3.0, 4.0]))
    assert not pmaf.PrincipalPool(centre=True)(torch.tensor([[3.0, 4.0]])).any()
    assert pool(torch.zeros(0, 5, 3)).shape == (0, 3)


@pytest.mark.parametrize("shape", [(3, 12, 5), (3, 5, 12), (1, 300, 280)], ids=str)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled(shape):
    """Without fullgraph=True, also where the graph breaks around products."""
    torch._dynamo.reset()
    X = features(*shape).requires_grad_()
    pool = pmaf.PrincipalPool(scale="root")
    c = torch.cos(torch.arange(shape[-1], dtype=T))
    compiled = torch.compile(pool, backend="aot_eager")
    both = [torch.autograd.grad((f(X) * c).sum(), X)[0] for f in (pool, compiled)]
    torch.testing.assert_close(compiled(X), pool(X))
    torch.testing.assert_close(*both)


def test_products_under_transforms_are_an_error():
    X = features(2, 300, 280)
    with pytest.raises(RuntimeError, match=r'eager mode only.*path="channels"'):
        torch.func.vmap(pmaf.PrincipalPool())(X)
    found = torch.func.vmap(pmaf.PrincipalPool(path="channels"))(X)
    torch.testing.assert_close(found, pmaf.PrincipalPool()(X))


@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (270, 260)], ids=str)
def test_training_from_step_to_step(shape):
    W = features(*shape).float().requires_grad_()
    optimiser = torch.optim.SGD([W], lr=1e-3)
    pool, last = pmaf.PrincipalPool(scale="root"), None

    def step():
        nonlocal last
        optimiser.step()
        optimiser.zero_grad()
        last = pool(W, init=last, reference=last)
        return last

    if shape[0] < 100:
        train(step)
    else:
        for _ in range(20):
            step().square().cumsum(-1).sum().backward()
        assert W.isfinite().all()


def test_a_network_learns():
    """Which of two directions the features of an entry lie along, whatever their signs."""
    g = torch.Generator().manual_seed(0)
    label = torch.randint(2, (256,), generator=g)
    direction = torch.nn.functional.one_hot(label, 6).float()
    size = torch.randn(256, 20, 1, generator=g)
    X = size * direction.unsqueeze(-2) + 0.1 * torch.randn(256, 20, 6, generator=g)
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(6, 6, bias=False),
        pmaf.PrincipalPool(reference="largest"),
        torch.nn.Linear(6, 2),
    )
    optimiser = torch.optim.Adam(network.parameters(), 0.02)
    for _ in range(300):
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(X), label)
        loss.backward()
        optimiser.step()
    assert loss < 0.05


# The module, and errors.


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_module():
    pool = pmaf.PrincipalPool(2, centre=True, scale="root", reference="largest")
    text = "k=2, centre=True, scale='root', maps=False, reference='largest', path=None"
    assert repr(pool) == f"PrincipalPool({text})"
    again = pickle.loads(pickle.dumps(pool))
    X = features(3, 9, 5)
    torch.testing.assert_close(again(X), pool(X), rtol=0, atol=0)
    assert not list(pool.parameters())
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script"):
        torch.jit.script(pool)


X = torch.ones(2, 5, 3)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: pmaf.PrincipalPool(0), ValueError, "k must be an integer of at least 1"),
        (lambda: pmaf.PrincipalPool(scale="sqrt"), ValueError, '"unit" or "root"; got \'sqrt\''),
        (lambda: pmaf.PrincipalPool(path="dense"), ValueError, "path must be None or one of"),
        (lambda: pmaf.PrincipalPool(reference="all"), ValueError, "reference must be"),
        (lambda: pmaf.PrincipalPool(reference=torch.ones(3)), TypeError, "argument of the call"),
        (lambda: pmaf.PrincipalPool()(X[:, :0]), ValueError, r"got \(2, 0, 3\)"),
        (lambda: pmaf.PrincipalPool()(torch.ones(3)), ValueError, "tokens, channels"),
        (lambda: pmaf.PrincipalPool()(X.long()), TypeError, "not floating-point"),
        (lambda: pmaf.PrincipalPool(maps=True)(X[0]), ValueError, "channels, height, width"),
        (lambda: pmaf.PrincipalPool(4)(X), ValueError, r"min\(tokens, channels\) = 3"),
        (lambda: pmaf.PrincipalPool(reference=3)(X), ValueError, "a vector has n = 3"),
        (lambda: pmaf.PrincipalPool()(X, X), ValueError, r"need weights of shape \(\*, 5\)"),
        (lambda: pmaf.PrincipalPool()(X, torch.ones(3, 5)), ValueError, "do not broadcast"),
        (lambda: pmaf.PrincipalPool()(X, torch.ones(5).long()), TypeError, "weights must be"),
        (lambda: pmaf.PrincipalPool()(X, -torch.ones(5)), ValueError, "zero or positive; got -1"),
        (lambda: pmaf.PrincipalPool()(X / 0), ValueError, "features has non-finite values"),
        (
            lambda: pmaf.PrincipalPool(path="products")(X / 0),
            ValueError,
            "features has non-finite values",
        ),
        (
            lambda: pmaf.PrincipalPool()(X, torch.ones(5) * torch.nan),
            ValueError,
            "weights has non-finite values",
        ),
    ],
)
def test_errors(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
