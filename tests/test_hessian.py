"""Hessians of losses: products, eigenvalues, and third derivatives that reach the parameters."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import pmaf
from pmaf.operators import Diagonal, FromMatvec, Hessian

F64 = torch.float64


def drawn(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


INPUTS, TARGETS = drawn(20, 3), drawn(20, 2, seed=1)


def network(p, x):
    """Two layers, whose parameters are in a dictionary with a list in it."""
    (A, a), (B, b) = p["first"], p["second"]
    return torch.tanh(x @ A.mT + a) @ B.mT + b


def loss_of_tree(p):
    return mse_loss(network(p, INPUTS), TARGETS) + 0.05 * p["first"][0].pow(4).sum()


def tree(dtype=F64):
    return {
        "first": [drawn(4, 3, seed=2, dtype=dtype), drawn(4, seed=3, dtype=dtype)],
        "second": (drawn(2, 4, seed=4, dtype=dtype), drawn(2, seed=5, dtype=dtype)),
    }


def loss_of_tensor(w):
    return mse_loss(torch.tanh(INPUTS @ w), TARGETS) + 0.1 * w.pow(4).sum()


class MLP(nn.Module):
    """A network with a frozen parameter, tied weights, and a buffer that training changes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4, dtype=F64), nn.BatchNorm1d(4, dtype=F64)
        self.middle, self.last = nn.Linear(4, 4, dtype=F64), nn.Linear(4, 2, dtype=F64)
        self.again = self.middle
        self.last.bias.requires_grad_(False)
        for i, x in enumerate(self.parameters()):
            x.data = 0.7 * drawn(*x.shape, seed=10 + i)

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(torch.tanh(self.again(torch.tanh(self.middle(x)))))


def loss_of_module(module):
    return mse_loss(module(INPUTS), TARGETS)


def leaves_of(params):
    if isinstance(params, nn.Module):
        return [x for x in params.parameters() if x.requires_grad]
    return torch.utils._pytree.tree_leaves(params)


def dense(loss, params):
    """The Hessian in float64, by torch."""
    leaves = [x.detach().clone() for x in leaves_of(params)]
    if isinstance(params, nn.Module):
        names = [name for name, x in params.named_parameters() if x.requires_grad]

        def of_leaves(*leaves):
            other = copy.deepcopy(params)
            return torch.func.functional_call(
                _Loss(other, loss), {f"module.{k}": x for k, x in zip(names, leaves)}, ()
            )
    else:
        _, spec = torch.utils._pytree.tree_flatten(params)

        def of_leaves(*leaves):
            return loss(torch.utils._pytree.tree_unflatten(leaves, spec))

    blocks = torch.autograd.functional.hessian(of_leaves, tuple(leaves))
    rows = [
        torch.cat([blocks[i][j].reshape(x.numel(), -1) for j in range(len(leaves))], 1)
        for i, x in enumerate(leaves)
    ]
    return torch.cat(rows)


class _Loss(nn.Module):
    def __init__(self, module, loss):
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self):
        return self.loss(self.module)


CASES = {
    "tensor": (loss_of_tensor, lambda: drawn(3, 2, seed=6)),
    "tree": (loss_of_tree, tree),
    "module": (loss_of_module, MLP),
    "module, evaluated": (loss_of_module, lambda: MLP().eval()),
    "linear in one": (
        lambda p: p[0].pow(3).sum() + p[1].sum() + p[0][0] * p[1][0],
        lambda: [drawn(3), drawn(2)],
    ),
    "unused": (lambda p: (p["a"] ** 4).sum(), lambda: {"a": drawn(3), "b": drawn(2)}),
    "a number": (lambda x: x**4, lambda: torch.tensor(2.0, dtype=F64)),
    "one number of one dimension": (lambda x: x.square().sum(0, keepdim=True), lambda: drawn(3)),
}
case = pytest.mark.parametrize(("loss", "params"), CASES.values(), ids=CASES.keys())


@case
def test_products_are_those_of_the_matrix(loss, params):
    params = params()
    H, A = dense(loss, params), Hessian(loss, params)
    assert A.shape == H.shape
    assert A.symmetric
    assert repr(A) == f"Hessian({len(H)}, {len(H)})"
    eps = torch.finfo(F64).eps
    x = drawn(len(H), 3, seed=7)
    bound = 256 * eps * float(H.abs().sum(-1).amax()) + eps
    torch.testing.assert_close(A @ x, H @ x, rtol=0, atol=bound)
    torch.testing.assert_close(A(x.mT), (H @ x).mT, rtol=0, atol=bound)
    torch.testing.assert_close(A.transposed(x[:, 0]), H @ x[:, 0], rtol=0, atol=bound)


@pytest.mark.parametrize("options", [dict(), dict(k=3), dict(k=2, largest=False)], ids=str)
@pytest.mark.parametrize("name", ["tensor", "tree", "module", "module, evaluated"])
def test_eigenvalues_are_those_of_the_matrix(name, options):
    loss, params = CASES[name][0], CASES[name][1]()
    H = dense(loss, params)
    values, vectors = pmaf.ied(Hessian(loss, params), **options)
    wanted = torch.linalg.eigvalsh(H)
    k, largest = options.get("k") or 1, options.get("largest", True)
    wanted = (wanted.flip(-1) if largest else wanted)[:k]
    eps, size = torch.finfo(F64).eps, float(wanted.abs().amax())
    found = values.detach().reshape(-1).sort(descending=largest).values
    torch.testing.assert_close(found, wanted, rtol=0, atol=1024 * eps * size)
    y = vectors.detach().reshape(len(H), -1)
    residual = H @ y - y * values.detach().reshape(-1)
    assert float(residual.norm(dim=0).amax()) <= 1024 * eps * size


@pytest.mark.parametrize("name", ["tensor", "tree", "module, evaluated"])
def test_gradients_of_the_largest_eigenvalue_against_differences(name):
    require_gradients(CASES[name][0], CASES[name][1]())


def require_gradients(loss, params):
    """Third derivatives of the loss, in the direction of a random change of all parameters."""
    leaves = leaves_of(params)
    for x in leaves:
        x.requires_grad_()
    sharpness = pmaf.ied(Hessian(loss, params)).values
    found = torch.autograd.grad(sharpness, leaves)
    for x, dx in zip(leaves, found):
        assert dx.shape == x.shape
    steps = [drawn(*x.shape, seed=20 + i) for i, x in enumerate(leaves)]
    slope = sum((dx * d).sum() for dx, d in zip(found, steps))

    def at(t):
        with torch.no_grad():
            for x, d in zip(leaves, steps):
                x += t * d
        value = torch.linalg.eigvalsh(dense(loss, params))[-1]
        with torch.no_grad():
            for x, d in zip(leaves, steps):
                x -= t * d
        return value

    h = 1e-4  # of fourth order: errors of h⁴ and of rounding over h
    differences = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
    torch.testing.assert_close(slope, differences, rtol=1e-7, atol=1e-9 * float(sharpness.detach()))


def test_gradients_of_eigenvectors_are_those_of_the_matrix():
    w = drawn(3, 2, seed=6).requires_grad_()
    weights = torch.cos(torch.arange(12.0, dtype=F64)).reshape(6, 2)

    def by_torch(w):
        return torch.autograd.functional.hessian(loss_of_tensor, w, create_graph=True).reshape(6, 6)

    found = []
    for A in (Hessian(loss_of_tensor, w), by_torch(w)):
        values, vectors = pmaf.ied(A, 2, reference="largest")
        loss = (weights * vectors).sum() + values[0] - 2 * values[1]
        found.append(torch.autograd.grad(loss, w)[0])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-10)


class Standardised(nn.Module):
    """A normalisation over the last dimension, in plain operations."""

    def forward(self, x):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        return (x - mean) / (variance + 1e-5).sqrt()


NORMS = {
    "LayerNorm": lambda: nn.LayerNorm(4, dtype=F64),
    "BatchNorm": lambda: nn.BatchNorm1d(4, dtype=F64),
    "BatchNorm without averages": lambda: nn.BatchNorm1d(
        4, track_running_stats=False, dtype=F64
    ).eval(),
    "InstanceNorm": lambda: nn.Sequential(
        nn.Unflatten(-1, (2, 2)), nn.InstanceNorm1d(2, dtype=F64), nn.Flatten()
    ),
    "BatchNorm, evaluated": lambda: nn.BatchNorm1d(4, dtype=F64).eval(),
    "GroupNorm": lambda: nn.GroupNorm(1, 4, dtype=F64),
    "RMSNorm": lambda: nn.RMSNorm(4, dtype=F64),
    "operations": Standardised,
}


@pytest.mark.parametrize("first", [True, False], ids=["of data", "of features"])
@pytest.mark.parametrize("name", NORMS)
def test_third_derivatives_that_torch_computes_wrongly_are_an_error(name, first):
    """Those of some normalisations are; where data are normalised, all are right."""
    norm = NORMS[name]()
    before, after = nn.Linear(3, 4, dtype=F64), nn.Linear(4, 2, dtype=F64)
    for i, x in enumerate([*before.parameters(), *norm.parameters(), *after.parameters()]):
        x.data = drawn(*x.shape, seed=30 + i)
    layers = [norm, nn.Tanh(), after] if first else [before, norm, nn.Tanh(), after]
    module, inputs = nn.Sequential(*layers), drawn(20, 4) if first else INPUTS

    def loss(module):
        return mse_loss(module(inputs), TARGETS) + sum(x.pow(4).sum() for x in module.parameters())

    H = dense(loss, module)
    found = pmaf.ied(Hessian(loss, module)).values
    torch.testing.assert_close(found.detach(), torch.linalg.eigvalsh(H)[-1])
    wrong = name in ("LayerNorm", "BatchNorm", "BatchNorm without averages", "InstanceNorm")
    if wrong and not first:
        with pytest.raises(RuntimeError, match=r"LayerNorm|BatchNorm, whose third derivatives"):
            found.backward()
    else:
        require_gradients(loss, module)


def test_parameters_of_a_module_get_gradients_and_nothing_else_changes():
    module = MLP()
    before = copy.deepcopy(module.state_dict())
    kept = list(module.parameters())
    assert module.norm.training
    pmaf.ied(Hessian(loss_of_module, module))
    for name, x in module.state_dict().items():
        assert torch.equal(x, before[name]), name  # also the averages of the batches

    def broken(module):
        module(INPUTS)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pmaf.ied(Hessian(broken, module))
    module.eval()
    pmaf.ied(Hessian(loss_of_module, module)).values.backward()
    assert all(x is y for x, y in zip(module.parameters(), kept, strict=True))
    assert module.again.weight is module.middle.weight
    for name, x in module.state_dict().items():
        assert torch.equal(x, before[name]), name  # also the averages of the batches
    for name, x in module.named_parameters():
        assert (x.grad is not None) == x.requires_grad, name
        if x.grad is not None:
            assert torch.isfinite(x.grad).all()


def test_frozen_parameters_are_left_out():
    module = MLP()
    count = sum(x.numel() for x in module.parameters() if x.requires_grad)
    assert Hessian(loss_of_module, module).shape == (count, count)
    for x in (module.norm.weight, module.norm.bias):
        x.requires_grad_(False)
    assert Hessian(loss_of_module, module).shape == (count - 8, count - 8)


def test_a_penalty_trains_a_module_towards_a_flat_minimum():
    """Parameters get their gradients from the loss and from its sharpness together."""

    def train(penalty):
        module = MLP().eval()
        optimiser = torch.optim.SGD([x for x in module.parameters() if x.requires_grad], 0.02)
        for _ in range(10):
            sharpness = pmaf.ied(Hessian(loss_of_module, module)).values
            optimiser.zero_grad()
            (loss_of_module(module) + penalty * sharpness).backward()
            optimiser.step()
        return pmaf.ied(Hessian(loss_of_module, module)).values.item()

    assert train(0.2) < 0.9 * train(0.0)


def test_vectors_have_the_shapes_of_the_parameters():
    params = tree()
    A = Hessian(loss_of_tree, params)
    flat = torch.cat([x.reshape(-1) for x in leaves_of(params)])
    again = A.unflatten(flat)
    assert type(again["first"]) is list
    assert type(again["second"]) is tuple
    for x, y in zip(leaves_of(again), leaves_of(params)):
        assert torch.equal(x, y)
    columns = pmaf.ied(A, 2).vectors
    parts = A.unflatten(columns.mT)
    assert parts["first"][0].shape == (2, 4, 3)
    assert torch.equal(parts["first"][0][1].reshape(-1), columns[:12, 1])
    module = MLP()
    named = Hessian(loss_of_module, module).unflatten(
        pmaf.ied(Hessian(loss_of_module, module)).vectors
    )
    wanted = {name: x.shape for name, x in module.named_parameters() if x.requires_grad}
    assert {name: x.shape for name, x in named.items()} == wanted
    number = Hessian(lambda x: x**4, torch.tensor(2.0))
    assert number.unflatten(torch.ones(1)).shape == ()
    for bad, message in (
        (columns, r"has shape \(\*, 26\); got \(26, 2\); pass the transpose"),
        (torch.ones(3), r"got \(3,\)$"),
        ([1.0], "got list"),
    ):
        with pytest.raises(ValueError, match=message):
            A.unflatten(bad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda x: x.__name__)
def test_no_gradients_are_needed_around_it(mode):
    w = drawn(3, 2, seed=6)
    wanted = pmaf.ied(Hessian(loss_of_tensor, w)).values
    with mode():
        found = pmaf.ied(Hessian(loss_of_tensor, w)).values
        assert not found.requires_grad
        product = Hessian(loss_of_tensor, w) @ drawn(6)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(product, Hessian(loss_of_tensor, w) @ drawn(6))


def test_parameters_that_are_computed_pass_gradients_on():
    """A gradient goes through the parameters to what they were made of."""
    scale = torch.tensor(1.5, dtype=F64, requires_grad=True)
    pmaf.ied(Hessian(loss_of_tensor, scale * drawn(3, 2, seed=6))).values.backward()

    def at(s):
        return torch.linalg.eigvalsh(dense(loss_of_tensor, s * drawn(3, 2, seed=6)))[-1]

    h = 1e-5
    differences = (at(1.5 + h) - at(1.5 - h)) / (2 * h)
    torch.testing.assert_close(scale.grad, differences, rtol=1e-7, atol=0)


def test_products_are_differentiable_in_the_vector_and_in_the_parameters():
    w, x = drawn(3, 2, seed=6).requires_grad_(), drawn(6).requires_grad_()
    assert torch.autograd.gradcheck(lambda w, x: Hessian(loss_of_tensor, w) @ x, (w, x))
    assert torch.autograd.gradgradcheck(lambda w, x: Hessian(loss_of_tensor, w) @ x, (w, x))


def test_it_is_an_operator_among_others():
    w = drawn(3, 2, seed=6)
    H = dense(loss_of_tensor, w)
    A = Hessian(loss_of_tensor, w)
    damped = pmaf.ied(2.0 * A + Diagonal(torch.full((6,), 0.3, dtype=F64))).values
    torch.testing.assert_close(damped, 2 * torch.linalg.eigvalsh(H)[-1] + 0.3)
    M = H @ H + torch.eye(6, dtype=F64)
    pair = pmaf.ied(A, M=M).values
    L = torch.linalg.cholesky(M)
    inner = torch.linalg.solve_triangular(L, H, upper=False)
    inner = torch.linalg.solve_triangular(L, inner.mT, upper=False)
    torch.testing.assert_close(pair, torch.linalg.eigvalsh(inner)[-1])
    # A step of Newton's method with a bound on its length.
    g = torch.autograd.functional.jacobian(loss_of_tensor, w).reshape(-1)
    step = pmaf.less(A, -g, radius=0.1)
    torch.testing.assert_close(step, pmaf.less(H, -g, radius=0.1))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_dtypes(dtype):
    def loss(p):
        inputs, targets = INPUTS.to(p["first"][0].dtype), TARGETS.to(p["first"][0].dtype)
        return mse_loss(network(p, inputs), targets) + 0.05 * p["first"][0].pow(4).sum()

    found = pmaf.ied(Hessian(loss, tree(dtype))).values
    assert found.dtype == dtype
    wanted = torch.linalg.eigvalsh(dense(loss, tree()))[-1]
    rtol = 1024 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), wanted, rtol=rtol, atol=0)


def test_a_loss_of_classes_and_functions_written_for_eager_mode():
    """Losses need not go through the transforms of torch.func."""
    labels = torch.arange(20) % 4

    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, *grads):
            return 2 * ctx.saved_tensors[0] * grads[0]

    def loss(w):
        scores = Squared.apply(INPUTS @ w)
        if float(scores.detach().max()) > 0:  # a look at the numbers
            scores = scores / 2
        return cross_entropy(scores, labels)

    w = drawn(3, 4, seed=6)
    wanted = dense(lambda w: cross_entropy((INPUTS @ w) ** 2 / 2, labels), w)
    torch.testing.assert_close(pmaf.ied(Hessian(loss, w)).values, torch.linalg.eigvalsh(wanted)[-1])


def test_a_function_does_the_same():
    """The recipe by `FromMatvec` that `Hessian` stands for."""
    w = drawn(6, seed=6).requires_grad_()

    def loss(w):
        return loss_of_tensor(w.reshape(3, 2))

    def product(u, w):
        return torch.func.vjp(torch.func.grad(loss), w)[1](u)[0]

    found = []
    for A in (Hessian(loss, w), FromMatvec(product, (6, 6), [w], rmatvec=product)):
        solution = pmaf.solve(pmaf.PrincipalEigenvectors(A))
        gradient = torch.autograd.grad(solution.multiplier, w)[0]
        found.append((solution.value, solution.multiplier, gradient))
    for x, y in zip(*found):
        torch.testing.assert_close(x, y)


def test_a_minibatch_that_changes_is_noticed():
    """A loss that is another one each time has no Hessian to converge to."""
    generator = torch.Generator().manual_seed(0)

    def loss(w):
        rows = torch.randint(20, (5,), generator=generator)
        return mse_loss(torch.tanh(INPUTS[rows] @ w), TARGETS[rows])

    with warnings.catch_warnings(record=True, action="always") as caught:
        solver = pmaf.solvers.Krylov(max_products=100)
        pmaf.ied(Hessian(loss, drawn(3, 2, seed=6)), solver=solver)
    assert any(issubclass(x.category, pmaf.ConvergenceWarning) for x in caught)


def test_copies_and_pickles():
    A = Hessian(loss_of_tree, tree())
    x = drawn(26)
    for other in (copy.deepcopy(A), pickle.loads(pickle.dumps(A))):
        torch.testing.assert_close(other @ x, A @ x)


BAD = {
    "no function": (lambda: Hessian(drawn(3), drawn(3)), TypeError, "loss must be a function"),
    "a module for a loss": (
        lambda: Hessian(MLP(), drawn(3)),
        TypeError,
        r"got MLP.*Hessian\(lambda module",
    ),
    "integers": (lambda: Hessian(sum, [torch.arange(3)]), TypeError, "got torch.int64"),
    "complex": (lambda: Hessian(sum, drawn(3) + 0j), TypeError, "got torch.complex128"),
    "a list of numbers": (lambda: Hessian(sum, [1.0]), TypeError, "got float"),
    "a generator": (lambda: Hessian(sum, MLP().parameters()), TypeError, "got generator"),
    "nothing": (lambda: Hessian(sum, []), ValueError, "nothing to differentiate in"),
    "empty": (lambda: Hessian(sum, drawn(0)), ValueError, "all tensors are empty"),
    "a frozen module": (
        lambda: Hessian(loss_of_module, MLP().requires_grad_(False)),
        ValueError,
        "a module without parameters that require a gradient",
    ),
    "two dtypes": (
        lambda: Hessian(sum, [drawn(3), drawn(3).float()]),
        TypeError,
        "torch.float64 on cpu and torch.float32 on cpu",
    ),
    "several losses": (
        lambda: pmaf.ied(Hessian(lambda w: w * w, drawn(3))),
        TypeError,
        r"one real number as a tensor; got a tensor of shape \(3,\).*take its mean\(\)",
    ),
    "a number that is no tensor": (
        lambda: pmaf.ied(Hessian(lambda w: float(w.detach().sum()), drawn(3))),
        TypeError,
        "got float",
    ),
    "no way for autograd": (
        lambda: pmaf.ied(Hessian(lambda w: (w.detach() ** 2).sum(), drawn(3))),
        RuntimeError,
        "autograd sees no way from the parameters to the loss",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_told_what_is_wrong(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_a_loss_that_is_linear_has_a_hessian_of_zeros():
    A = Hessian(lambda w: 3 * w.sum(), drawn(4))
    assert not (A @ drawn(4, 2)).any()
