"""Tensors in unusual memory: what hooks return for saved tensors, and zeros without memory."""

import contextlib
import functools

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import pmaf
from pmaf import native
from pmaf.operators import Gram, Matrix
from tests.quadratic import SphereQuadratic


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype)


def tall(*batch, m, n, dtype=torch.float32, seed=0):
    """Matrices with singular values 1, 2, …, so that gradients are well conditioned."""
    u, _, v = torch.linalg.svd(random(*batch, m, n, dtype=dtype, seed=seed), full_matrices=False)
    return (u * torch.arange(1.0, n + 1)) @ v / n


def symmetric(*batch, n, dtype=torch.float32, seed=0):
    q = torch.linalg.qr(random(*batch, n, n, dtype=dtype, seed=seed))[0]
    S = (q * torch.arange(1.0, n + 1)) @ q.mH / n
    return 0.5 * (S + S.mH)


def definite(*batch, n, dtype=torch.float32, seed=1):
    eye = torch.eye(n, dtype=dtype)
    return symmetric(*batch, n=n, dtype=dtype, seed=seed) + eye


F32, F64, C64 = torch.float32, torch.float64, torch.complex64
# A call, and its inputs. In each, the kernels read what was saved, or did so in the forward pass.
CALLS = {
    "less": (pmaf.less, tall(50, m=8, n=3), random(50, 8)),
    "less, kept reduction": (pmaf.less, tall(6, m=30, n=20), random(6, 30)),
    "less, wide": (pmaf.less, tall(6, m=9, n=4).mT.contiguous(), 9 * random(6, 4)),
    "less, float64": (pmaf.less, tall(5, m=8, n=3, dtype=F64), random(5, 8, dtype=F64)),
    "less, large": (pmaf.less, tall(2, m=300, n=260), random(2, 300)),
    "less, radius": (functools.partial(pmaf.less, radius=2.0), tall(5, m=8, n=3), random(5, 8)),
    "less, ball": (functools.partial(pmaf.less, ball=True), tall(5, m=8, n=3), random(5, 8)),
    "less, weights": (
        lambda A, b, w: pmaf.less(A, b, weights=w),
        tall(5, m=8, n=3),
        random(5, 8),
        random(5, 8).exp(),
    ),
    "less, report": (
        lambda A, b: pmaf.solve(pmaf.SphereLeastSquares(A, b)).value,
        tall(5, m=8, n=3),
        random(5, 8),
    ),
    "ied": (lambda A: pmaf.ied(A).vectors, symmetric(7, n=5)),
    "ied, values": (lambda A: pmaf.ied(A, 2).values, symmetric(7, n=7)),
    "ied, 3×3": (lambda A: pmaf.ied(A).vectors, symmetric(100, n=3)),
    "ied, float64": (lambda A: pmaf.ied(A, 3).vectors, symmetric(7, n=9, dtype=F64)),
    "ied, kept reduction": (lambda A: pmaf.ied(A, 2).vectors, symmetric(6, n=20)),
    "ied, large": (lambda A: pmaf.ied(A).vectors, symmetric(2, n=300)),
    "ied, reference": (lambda A: pmaf.ied(A, 2, reference=0).vectors, symmetric(6, n=20)),
    "ied, complex": (lambda A: pmaf.ied(A, 2).vectors, symmetric(6, n=7, dtype=C64)),
    "ied, general": (
        lambda A: pmaf.ied(A, symmetric=False).vectors,
        1 + 0.1 * random(3, 5, 5),
    ),
    "pair": (lambda A, M: pmaf.ied(A, 2, M=M).vectors, symmetric(6, n=7), definite(6, n=7)),
    "pair, smallest": (
        lambda A, M: pmaf.ied(A, largest=False, M=M).vectors,
        symmetric(6, n=20),
        definite(6, n=20),
    ),
    "pair, skip": (
        lambda A, M: pmaf.ied(A, 2, skip=1, M=M).vectors,
        symmetric(6, n=7),
        definite(6, n=7),
    ),
    "pair, complex": (
        lambda A, M: pmaf.ied(A, 2, M=M).vectors,
        symmetric(4, n=7, dtype=C64),
        definite(4, n=7, dtype=C64),
    ),
    "nullspace": (pmaf.nullspace, tall(7, m=8, n=4)),
    "nullspace, wide": (lambda A: pmaf.nullspace(A, 5), tall(7, m=9, n=4).mT.contiguous()),
    "nullspace, float64": (lambda A: pmaf.nullspace(A, 2), tall(7, m=8, n=4, dtype=F64)),
    "nullspace, weights": (
        lambda A, w: pmaf.nullspace(A, weights=w),
        tall(7, m=8, n=4, dtype=F64),
        random(7, 8, dtype=F64).exp(),
    ),
    "isvd": (lambda A: pmaf.isvd(A, 2).left, tall(7, m=8, n=4)),
    "isvd, float64": (lambda A: pmaf.isvd(A, 2).left, tall(7, m=8, n=4, dtype=F64)),
    "isvd, complex": (lambda A: pmaf.isvd(A, 2).left, tall(7, m=8, n=4, dtype=torch.complex128)),
    "isvd, operator": (lambda A: pmaf.isvd(Matrix(A), 2).left, tall(7, m=8, n=4, dtype=F64)),
    "spectral": (lambda A: pmaf.spectral(A, "sqrt"), definite(7, n=4)),
    "spectral, group": (lambda A: pmaf.spectral(A, "sqrt", k=2), definite(7, n=20)),
    "Gram": (lambda X: pmaf.ied(Gram(X)).vectors, tall(m=30, n=6)),
    "declared": (
        lambda Q, c: pmaf.solve(SphereQuadratic(Q, c)).value,
        definite(4, n=5),
        random(4, 5),
    ),
}


def padded(x):
    """The same numbers, with others between them and before them."""
    wide = x.new_full((*x.shape, 3), 7)
    wide[..., 1] = x
    return wide[..., 1]


def permuted(x):
    """The same numbers, with the order of dimensions in memory reversed."""
    order = range(x.dim() - 1, -1, -1)
    return torch.empty_permuted(x.shape, tuple(order), dtype=x.dtype).copy_(x)


def shifted(x):
    """The same numbers, at an address that no vector has."""
    numbers = x.new_empty(x.numel() + 1)[1:]
    return numbers.copy_(x.reshape(-1)).view(x.shape)


def kept(x):
    return x


def real_to(dtype):
    """A conversion of real and complex numbers, and of nothing else."""
    complex_dtype = torch.promote_types(dtype, torch.complex64)

    def convert(x):
        if x.is_complex():
            return x.to(complex_dtype)
        return x.to(dtype) if x.is_floating_point() else x

    return convert


# A pack and an unpack function, and the dtype whose digits they leave.
HOOKS = {
    "float32": (real_to(F32), kept, F32),
    "float64": (real_to(F64), kept, F64),
    "shifted": (kept, shifted, F64),
    "padded": (kept, padded, F64),
    "permuted": (kept, permuted, F64),
    "offloaded": (
        lambda x: x.detach().resolve_conj().resolve_neg().numpy().copy(),
        torch.from_numpy,
        F64,
    ),
    "conjugated": (lambda x: x.conj(), lambda x: x.resolve_conj().conj(), F64),
    "negated": (lambda x: -x if x.dtype != torch.bool else x, lambda x: negated_view(x), F64),
}


def negated_view(x):
    """A view that stands for its negative."""
    return torch._neg_view(x) if x.dtype != torch.bool else x


def gradients(call, inputs, hooks=None):
    inputs = [x.detach().requires_grad_() for x in inputs]
    with saved_tensors_hooks(*hooks) if hooks else contextlib.nullcontext():
        found = call(*inputs)
    weights = torch.cos(torch.arange(found.numel()) + 1.0).reshape(found.shape)
    return torch.autograd.grad((found * weights.to(found.dtype)).real.sum(), inputs)


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("call", CALLS)
def test_what_hooks_return_is_converted_or_computed_again(call, hooks):
    call, *inputs = CALLS[call]
    pack, unpack, left = HOOKS[hooks]
    expected, found = gradients(call, inputs), gradients(call, inputs, (pack, unpack))
    digits = max(torch.finfo(left).eps, torch.finfo(inputs[0].dtype).eps)
    # Gaps between eigenvalues are at least 1/n of the largest, so that gradients magnify what
    # rounding does to the saved tensors by the square of n at most.
    n = max(inputs[0].shape[-2:])
    for x, y in zip(found, expected):
        assert x.dtype == y.dtype
        assert (x - y).norm() <= 10 * n**2 * digits * y.norm()


WITHOUT = pytest.mark.skipif(not native.available, reason="torch's operations keep it rounded")


@pytest.mark.parametrize(
    "call",
    [
        "less",
        "less, kept reduction",
        "less, wide",
        pytest.param("less, weights", marks=WITHOUT),
        "pair",
    ],
)
def test_what_was_kept_in_more_digits_is_computed_again(call):
    """Where the inputs have come back whole, the gradient has not changed by a rounding."""
    call, *inputs = CALLS[call]
    expected = gradients(call, inputs)
    found = gradients(call, inputs, (real_to(F32), kept))
    assert all(torch.equal(x, y) for x, y in zip(found, expected))


# The calls of whose backward pass the kernels do all, and what they say of it.
COMPILED = {
    "less": "tangent: compiled",
    "less, kept reduction": "tangent: compiled",
    "less, float64": "tangent: compiled",
    "less, ball": "tangent: compiled",
    "less, weights": "tangent: compiled",
    "ied": "tangent: compiled",
    "ied, 3×3": "tangent: compiled",
    "ied, kept reduction": "tangent: compiled",
    "ied, complex": "tangent: compiled",
    "pair": "pairs: compiled gradient",
    "pair, smallest": "pairs: compiled gradient",
    "pair, complex": "pairs: compiled gradient",
}


@pytest.mark.skipif(not native.available, reason="there are no kernels")
@pytest.mark.parametrize("hooks", ["float32", "float64", "shifted", "padded"])
@pytest.mark.parametrize("call", COMPILED)
def test_the_kernels_differentiate_what_hooks_return(call, hooks, caplog):
    way, (call, *inputs) = COMPILED[call], CALLS[call]
    with caplog.at_level("DEBUG", "pmaf"):
        gradients(call, inputs, HOOKS[hooks][:2])
    assert way in [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("moved", [shifted, padded, permuted])
@pytest.mark.parametrize("call", CALLS)
def test_inputs_in_any_memory(call, moved):
    """The numbers decide, not where they are."""
    call, *inputs = CALLS[call]
    expected, found = gradients(call, inputs), gradients(call, [moved(x) for x in inputs])
    n, eps = max(inputs[0].shape[-2:]), torch.finfo(inputs[0].dtype).eps
    for x, y in zip(found, expected):
        assert (x - y).norm() <= 10 * n**2 * eps * y.norm()


def half(x):
    return x[..., : x.shape[-1] // 2] if x.dim() else x


def flattened(x):
    return x.flatten().repeat(2)[: x.numel()]


WRONG = {
    "smaller": (half, "of shape"),
    "flattened": (flattened, "of shape"),
    "without numbers": (lambda x: x.to("meta"), "on meta"),
    "real": (lambda x: x.real if x.is_complex() else x.to(C64), "complex64|float32"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["less", "ied", "pair", "less, float64", "ied, complex"])
def test_what_cannot_be_converted_is_refused(name, wrong):
    call, *inputs = CALLS[name]
    unpack, message = WRONG[wrong]
    # Without kernels torch multiplies vectors by their signs, and reads what it saved for that.
    first = not name.startswith("less") and not native.available
    wanted = None if first else f"saved for the backward pass as .*{message}"
    with pytest.raises(RuntimeError, match=wanted):
        gradients(call, inputs, (kept, unpack))


@pytest.mark.parametrize("call", ["less", "ied", "pair", "less, float64", "isvd", "nullspace"])
def test_second_derivatives_through_hooks(call):
    call, *inputs = CALLS[call]

    def twice(hooks):
        xs = [x[:2].double().requires_grad_() for x in inputs]
        with saved_tensors_hooks(*hooks) if hooks else contextlib.nullcontext():
            found = call(*xs)
            first = torch.autograd.grad(found.square().sum() + found.sum(), xs, create_graph=True)
            total = sum(
                (x * torch.cos(torch.arange(x.numel()) + 1.0).view_as(x)).sum() for x in first
            )
        return torch.autograd.grad(total, xs)

    n = max(inputs[0].shape[-2:])
    for x, y in zip(twice((padded, kept)), twice(None)):
        # Each derivative magnifies errors by one over a gap once more.
        assert (x - y).norm() <= 10 * n**3 * torch.finfo(F64).eps * y.norm()


ZERO = torch._efficientzerotensor


@pytest.mark.parametrize("dtype", [F32, F64, C64, torch.complex128])
@pytest.mark.parametrize("shape", [(4, 4), (3, 5, 5), (2, 20, 20), (130, 130), (300, 300)])
def test_zeros_without_memory_are_zeros(shape, dtype):
    """Autograd makes such tensors, of which the address is zero."""
    thin, zeros = ZERO(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    A, b, n = random(*shape, dtype=dtype), ZERO(shape[:-1], dtype=dtype), shape[-1]
    S, M = A + A.mH, torch.eye(n, dtype=dtype).expand(shape).contiguous()
    for call in (
        lambda Z, b: pmaf.ied(Z),
        lambda Z, b: pmaf.ied(Z.mT, 2),
        lambda Z, b: pmaf.ied(Z, 2, reference=0),
        lambda Z, b: pmaf.ied(Z, 2, M=M),
        lambda Z, b: pmaf.less(Z, b),
        lambda Z, b: pmaf.less(A, b),
        lambda Z, b: pmaf.less(A, b, ball=True),
        lambda Z, b: pmaf.nullspace(Z),
        lambda Z, b: pmaf.isvd(Z, 2),
        lambda Z, b: pmaf.spectral(Z, "exp"),
        lambda Z, b: pmaf.less(Z, A[..., 0]),
    ):
        found, expected = call(thin, b), call(zeros, b.clone())
        for x, y in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, expected))):
            assert torch.equal(x, y)
    leaf = S.clone().requires_grad_()
    vectors = pmaf.ied(leaf, 2).vectors
    (none,) = torch.autograd.grad(vectors, leaf, ZERO(vectors.shape, dtype=dtype))
    assert torch.equal(none, torch.zeros_like(S))
    leaf = A.clone().requires_grad_()
    u = pmaf.less(leaf, A[..., 0])
    (none,) = torch.autograd.grad(u, leaf, ZERO(u.shape, dtype=dtype))
    assert torch.equal(none, torch.zeros_like(A))


def test_storage_that_was_freed():
    """Sharded training frees parameters between the passes: that is an error, and no crash.

    Without kernels a decomposition is kept, and the matrix is not read again.
    """
    A = symmetric(6, n=5).clone()
    (expected,) = torch.autograd.grad(pmaf.ied(A.requires_grad_()).vectors.sum(), A)
    leaf = A.detach().clone().requires_grad_()
    vectors = pmaf.ied(leaf).vectors
    leaf.untyped_storage().resize_(0)
    if not native.available:
        assert torch.equal(torch.autograd.grad(vectors.sum(), leaf)[0], expected)
        return
    with pytest.raises(RuntimeError, match=r"storage|out of bounds|memory"):
        torch.autograd.grad(vectors.sum(), leaf)


@pytest.mark.skipif(not native.available, reason="there are no kernels")
@pytest.mark.parametrize("wrong", ["dtype", "size", "device", "layout"])
def test_the_gate_of_the_kernels(wrong):
    """A tensor that does not fit is refused, whoever passes it."""
    A, b = tall(4, m=6, n=3), random(4, 6)
    found = native.least_squares(A, b)
    change = {
        "dtype": lambda x: x.to(F32 if x.dtype == F64 else F64),
        "size": lambda x: x[:-1],
        "device": lambda x: x.to("meta"),
        "layout": lambda x: x.to_sparse(),
    }[wrong]
    v = random(4, 3)
    given = dict(A=A, b=b, u=found.u, v=v, multiplier=found.multiplier, numbers=found.numbers)
    for name in ("b", "u", "v", "multiplier"):
        with pytest.raises(
            (RuntimeError, NotImplementedError), match=r"a kernel reads|data pointer"
        ):
            native.least_squares_gradient(
                **{**given, name: change(given[name])}, needs=(True, True)
            )
    S = symmetric(4, n=20)
    numbers = S.new_empty((4, native.reduction_numbers(20, F32, 2)), dtype=F64)
    pairs = native.largest_pairs(S, 2, reduction=numbers)
    given = dict(y=pairs.vectors, v=pairs.vectors, d_values=pairs.values, reduction=numbers)
    for name in given:
        with pytest.raises(
            (RuntimeError, NotImplementedError), match=r"a kernel reads|data pointer"
        ):
            native.eigenvector_gradient(S, k=2, **{**given, name: change(given[name])})
