"""Every PyTorch transform × every layer: the table behind the tests and the docs.

    python -m tests.transforms > docs/transforms.md

`ROWS` has a check for each transform, `COLUMNS` the layers it is run on. A cell without a
check is `EAGER_ONLY`: there the call has to raise an error that says so.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import pmaf
from pmaf import native
from pmaf.gradients import DDN, IFT, Unroll
from pmaf.solvers import (
    Adaptive,
    Cholesky,
    Lanczos,
    PowerIteration,
    ProjectedGradient,
    SimultaneousIteration,
)
from tests.compilers import BACKEND
from tests.quadratic import Quadratic

T = torch.float64


@dataclass(frozen=True)
class Column:
    """A layer as a function of its inputs to one tensor, and a batch of inputs for it."""

    name: str
    call: Callable[..., Tensor]
    module: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    eager_only: bool = False  # cannot be traced or mapped
    eager_backward: bool = False  # its backward pass cannot, other than inside of an operator
    reverse_only: bool = False  # rules for reverse mode
    no_half: bool = False  # complex numbers have no short dtype that is supported
    tolerance: float = 1e-8
    takes: str | None = None  # the way that every solve has to take, as it is logged
    takes_forward: str | None = None  # the way that it takes in forward mode, if that is another
    printed: tuple[str, ...] = ("solver=", "gradient=")  # what the module prints

    def loss(self, *inputs: Tensor) -> Tensor:
        out = self.call(*inputs)
        return (
            out * torch.cos(torch.arange(out.numel(), dtype=out.dtype)).reshape(out.shape)
        ).sum()


FLAGS = ("eager_only", "eager_backward", "reverse_only")


def _seeded(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(8), dtype=T)


def _less(name: str, **options: Any) -> Column:
    flags = {key: options.pop(key, False) for key in FLAGS}
    return Column(
        name,
        lambda A, b: pmaf.less(A, b, **options),
        lambda: pmaf.LESS(**options),
        lambda: (_seeded(4, 5, 3), _seeded(4, 5).flip(0)),
        **flags,
    )


class Constrained(nn.Module):
    """Weighted least squares in or on an ellipsoid; the last input is turned into its matrix."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = pmaf.LESS(**options)

    def forward(self, A: Tensor, b: Tensor, w: Tensor, rho: Tensor, X: Tensor) -> Tensor:
        # Not a product of matrices, which autocast would round.
        M = (X.unsqueeze(-1) * X.unsqueeze(-2)).sum(-3) / 4 + torch.eye(3).to(X)
        weights = w * w  # none negative, and one of them zero
        options = {"ball": self.layer.ball, "solver": self.layer.solver}
        return pmaf.less(A, b, radius=rho.exp().squeeze(-1), M=M, weights=weights, **options)


def _constrained(name: str, **options: Any) -> Column:
    """Some of the solutions in a ball are inside of it."""

    def inputs() -> tuple[Tensor, ...]:
        A, w = _seeded(4, 5, 3), _seeded(4, 5) * (torch.arange(5) != 2)
        b = _seeded(4, 5).flip(0) * torch.tensor([0.1, 2.0, 0.3, 4.0], dtype=T).unsqueeze(-1)
        return A, b, w, _seeded(4, 1) / 4, _seeded(4, 4, 3)

    layer = Constrained(**options)
    return Column(name, lambda *x: layer(*x), lambda: Constrained(**options), inputs)


def _ied(name: str, k: int | None = None, **options: Any) -> Column:
    flags = {key: options.pop(key, False) for key in FLAGS}

    def call(A: Tensor) -> Tensor:
        values, vectors = pmaf.ied(A, k, **options)
        return vectors + (values.unsqueeze(-1) if k is None else values.unsqueeze(-2))

    def inputs() -> tuple[Tensor, ...]:
        A = _seeded(4, 4, 4)
        return (A.abs() if not options.get("symmetric", True) else A + 3 * torch.diag(
            torch.arange(4.0, dtype=T)),)  # fmt: skip

    return Column(name, call, lambda: pmaf.IED(k, **options), inputs, **flags)


class Paired(nn.Module):
    """The eigenvectors of a pair, as a module of both matrices; a diagonal `M` is a vector."""

    def __init__(self, k: int | None = None, skip: int = 0) -> None:
        super().__init__()
        self.layer = pmaf.IED(k, skip=skip)

    def forward(self, A: Tensor, M: Tensor) -> pmaf.Eigenpairs:
        diagonal = M.dim() < A.dim()
        return self.layer(A, M=pmaf.operators.Diagonal(M) if diagonal else M)


def _paired(name: str, diagonal: bool, k: int | None = None, skip: int = 0) -> Column:
    module = Paired(k, skip)

    def call(A: Tensor, M: Tensor) -> Tensor:
        values, vectors = module(A, M)
        return vectors + (values.unsqueeze(-1) if k is None else values.unsqueeze(-2))

    def inputs() -> tuple[Tensor, ...]:
        A = _seeded(4, 4, 4) + 3 * torch.diag(torch.arange(4.0, dtype=T))
        noise = _seeded(4, 4, 4).flip(0)
        M = noise @ noise.mT / 4 + torch.eye(4, dtype=T)
        return A, M.diagonal(dim1=-2, dim2=-1).contiguous() if diagonal else M

    return Column(name, call, lambda: Paired(k, skip), inputs)


class Complex(nn.Module):
    """A layer on complex matrices, as a function of their real and imaginary parts."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, real: Tensor, imaginary: Tensor) -> Tensor:
        if real.dtype == torch.bfloat16:  # of which torch has no complex numbers
            real, imaginary = real.half(), imaginary.half()
        A = torch.view_as_complex(torch.stack([real, imaginary], -1))
        if isinstance(self.layer, pmaf.LESS):
            return torch.view_as_real(self.layer(A[..., 1:], 2 * A[..., 0])).flatten(-2)
        if isinstance(self.layer, pmaf.Spectral):
            return torch.view_as_real(self.layer(A)).flatten(-2)
        if isinstance(self.layer, Triplets):
            return self.layer(A[..., 1:])
        values, vectors = self.layer(A)
        several = values.dim() > A.dim() - 2
        parts = torch.view_as_real(vectors.mT if several else vectors).flatten(-2)
        return parts + values.unsqueeze(-1)


def _complex(name: str, layer: Callable[[], nn.Module], *printed: str) -> Column:
    return Column(
        name,
        Complex(layer()),
        lambda: Complex(layer()),
        lambda: (_seeded(4, 4, 4) + torch.diag(torch.arange(4.0, dtype=T)), _seeded(4, 4, 4).mT),
        no_half=True,
        printed=printed or ("solver=", "gradient="),
    )


def _spectral(name: str, function: Any, k: int | None = None, **options: Any) -> Column:
    """Positive definite matrices, in which float16 keeps the eigenvalues apart."""

    def inputs() -> tuple[Tensor, ...]:
        X = _seeded(4, 4, 6)
        return (X @ X.mT / 6 + torch.diag(torch.arange(1.0, 5.0, dtype=T)),)

    return Column(
        name,
        lambda A: pmaf.spectral(A, function, k, **options),
        lambda: pmaf.Spectral(function, k, **options),
        inputs,
        printed=("function=", "k=", "largest="),
    )


class Space(nn.Module):
    """`pmaf.NullSpace` as a function of the space if there are several vectors."""

    def __init__(self, k: int | None = None, reference: Any = None) -> None:
        super().__init__()
        self.layer, self.reference = pmaf.NullSpace(k), reference

    def forward(self, A: Tensor, *weights: Tensor) -> Tensor:
        found = self.layer(A, *weights, reference=self.reference)
        several = self.layer.k is not None
        return (found.unsqueeze(-2) * found.unsqueeze(-3)).sum(-1) if several else found


class Triplets(nn.Module):
    """`pmaf.ISVD`, all three tensors in one, of real numbers."""

    def __init__(self, k: int | None = None) -> None:
        super().__init__()
        self.layer = pmaf.ISVD(k)

    def forward(self, A: Tensor) -> Tensor:
        left, values, right = self.layer(A)
        if self.layer.k is None:
            left, values, right = left.unsqueeze(-1), values.unsqueeze(-1), right.unsqueeze(-1)
        if A.is_complex():
            left, right = (torch.view_as_real(x.mT).flatten(-2).mT for x in (left, right))
        return torch.cat([left, values.unsqueeze(-2), right], -2)


def _singular(
    name: str, kind: type[Space | Triplets], k: int | None, *shape: int, **options: Any
) -> Column:
    def inputs() -> tuple[Tensor, ...]:
        A = _seeded(4, *shape)
        return (A, 0.5 + _seeded(4, shape[0]).abs()) if "weights" in name else (A,)

    module = lambda: kind(k, **options)  # noqa: E731
    return Column(name, module(), module, inputs, printed=("k=", "solver="))


def _pooled(name: str, takes: str, *shape: int, **options: Any) -> Column:
    def inputs() -> tuple[Tensor, ...]:
        # A direction that the features share keeps the eigenvalues apart in float16.
        X = _seeded(4, *shape) + 2 * torch.cos(torch.arange(shape[-1], dtype=T))
        return (X, 0.5 + _seeded(4, shape[0]).abs()) if "weights" in name else (X,)

    pool = pmaf.PrincipalPool(**options)
    module = lambda: pmaf.PrincipalPool(**options)  # noqa: E731
    printed = ("k=", "centre=", "scale=", "path=")
    return Column(name, lambda *x: pool(*x), module, inputs, takes=takes, printed=printed)


class Family(nn.Module):
    """Matrices of real size as a function of three numbers, and a layer on them.

    So sized, whole Jacobians and Hessians are three numbers wide, and every check can be made.
    """

    def __init__(self, base: Tensor, layer: nn.Module, known: Tensor | None = None) -> None:
        super().__init__()
        # Numbers that float16 and bfloat16 can hold.
        self.base = base.bfloat16().to(T)
        noise = _seeded(3, *base.shape)
        self.slopes = (noise + (noise.mT if base.shape[-1] == base.shape[-2] else 0)) / 64
        self.known = known if known is None else known.bfloat16().to(T)
        self.layer = layer

    def forward(self, c: Tensor) -> Tensor:
        # Not a product of matrices, which autocast would round.
        A = self.base.to(c) + (c[..., None, None] * self.slopes.to(c)).sum(-3)
        if self.known is not None:
            b = self.known.to(c) * (1 + c.sum(-1, keepdim=True) / 8)
            return self.layer(A, b)
        values, vectors = self.layer(A)
        return vectors + (values.unsqueeze(-1) if vectors.shape[-1] == A.shape[-1] else 0)


def _sized(
    name: str, takes: str, base: Tensor, layer: Callable[[], nn.Module], *known: Tensor
) -> Column:
    family = Family(base, layer(), *known)
    return Column(
        name,
        lambda c: family(c),
        lambda: copy.deepcopy(family),
        lambda: (_seeded(4, 3).sin() / 4,),
        takes=takes,
    )


def _spiked(n: int, *values: float) -> Tensor:
    """A symmetric matrix with the given eigenvalues above a Wigner bulk in ±1."""
    noise = _seeded(n, n)
    vectors = torch.linalg.qr(noise)[0][:, : len(values)]
    return (noise + noise.mT) / (8 * n) ** 0.5 + vectors * torch.tensor(
        values, dtype=T
    ) @ vectors.mT


# What small matrices are solved by, with compiled kernels and without.
COMPILED = "ied: reduction" if native.available else "ied: decomposition"
# One size for every way that a solve may take, in eager mode and under a transform alike.
SIZED = [
    _sized(
        "ied, power steps, n = 128",
        "ied: power steps",
        _seeded(128, 128).abs() / 64,
        lambda: pmaf.IED(solver=Adaptive()),
    ),
    _sized(
        "ied, nonsymmetric, power steps, n = 30",
        "ied: power steps",
        _seeded(30, 30).abs() / 16,
        lambda: pmaf.IED(symmetric=False, solver=Adaptive()),
    ),
    _sized(
        "ied, decomposition, n = 130",
        "ied: decomposition",
        _spiked(130, 2.0),
        lambda: pmaf.IED(solver=pmaf.solvers.Dense()),
    ),
    # Forward mode needs all eigenvectors.
    replace(
        _sized("ied, compiled, n = 100", COMPILED, _spiked(100, 2.0), pmaf.IED),
        takes_forward="ied: decomposition",
    ),
    replace(
        _sized("ied, k=2, compiled, n = 40", COMPILED, _spiked(40, 3.0, 2.0), lambda: pmaf.IED(2)),
        takes_forward="ied: decomposition",
    ),
    _sized("ied, Krylov space, n = 450", "ied: Krylov space", _spiked(450, 3.0, 2.0), pmaf.IED),
    _sized(
        "ied, k=2, Krylov space, n = 450",
        "ied: Krylov space",
        _spiked(450, 8.0, 5.0),
        lambda: pmaf.IED(2),
    ),
    _sized(
        "ied, products, n = 60",
        "products",
        _spiked(60, 3.0, 2.0),
        lambda: pmaf.IED(solver=pmaf.solvers.Krylov()),
    ),
    _sized(
        "less, products, 90×60",
        "products",
        _seeded(90, 60),
        lambda: pmaf.LESS(solver=pmaf.solvers.Krylov()),
        2 * _seeded(90),
    ),
    replace(
        _sized(
            "less, factor, 300×210",
            "less: factor",
            _seeded(300, 210),
            lambda: pmaf.LESS(solver=Cholesky()),
            3 * _seeded(300),
        ),
        takes_forward="less: eigenvectors",
    ),
]

# Always as many steps, so that rounding does not decide how often to differentiate.
PATIENT = ProjectedGradient(regulariser=1e-30, tolerance=0.0, max_iterations=300)

COLUMNS = [
    _less("less"),
    _constrained("less, radius, M, weights"),
    _constrained("less, ball, radius, M, weights", ball=True),
    # A problem that the library does not know, declared by its force and its curvature.
    Column(
        "declared",
        Quadratic(),
        Quadratic,
        lambda: (_seeded(4, 4, 4), _seeded(4, 4).flip(0)),
    ),
    replace(_less("less, ProjectedGradient", solver=PATIENT), tolerance=1e-5),
    _less("less, DDN", gradient=DDN(), reverse_only=True),
    _less("less, DDN J", gradient=DDN(exploit=False), eager_backward=True, reverse_only=True),
    _less("less, Unroll", solver=PATIENT, gradient=Unroll(), eager_only=True),
    _ied("ied"),
    _ied("ied, k=3", 3),
    _ied("ied, k=2, skip=1", 2, skip=1),
    _paired("ied, M", False),
    _paired("ied, k=2, M, skip=1", False, 2, 1),
    _paired("ied, k=2, diagonal M", True, 2),
    _ied("ied, nonsymmetric", symmetric=False),
    _complex("ied, complex", pmaf.IED),
    _complex("ied, k=2, complex", lambda: pmaf.IED(2, largest=False)),
    _complex("less, complex", pmaf.LESS),
    _ied("ied, Lanczos", 2, solver=Lanczos()),
    _ied("ied, PowerIteration", solver=PowerIteration(iterations=5000)),
    _ied("ied, SimultaneousIteration", 2, solver=SimultaneousIteration(iterations=5000)),
    _ied("ied, DDN", gradient=DDN(), reverse_only=True),
    _ied("ied, IFT", gradient=IFT(), reverse_only=True),
    _ied("ied, IFT J", gradient=IFT(exploit=False), eager_backward=True, reverse_only=True),
    _ied("ied, Unroll", solver=pmaf.solvers.Dense(), gradient=Unroll(), eager_only=True),
    # Of the bottom eigenpairs and a function without a name, which takes all of the code.
    _spectral("spectral", torch.nn.functional.softplus, 2, largest=False),
    _singular("nullspace, weights", Space, None, 5, 3),
    _singular("nullspace, wide, k=2", Space, 2, 3, 5),
    _singular("nullspace, wide, weights, reference", Space, None, 3, 4, reference=0),
    _singular("isvd", Triplets, None, 5, 3),
    _singular("isvd, wide, k=2", Triplets, 2, 3, 5),
    _pooled("pool, weights", "pool: channels", 5, 3),
    _pooled("pool, wide, k=2", "pool: tokens", 4, 6, k=2, centre=True, scale="root"),
    _complex("isvd, k=2, complex", lambda: Triplets(2), "k=", "solver="),
    # Of one eigenpair of four, which eager calls find without the others.
    _complex("spectral, k=1, complex", lambda: pmaf.Spectral(torch.tanh, 1), "function=", "k="),
]


COLUMNS += SIZED


def close(found: Any, expected: Any, column: Column) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=column.tolerance * (1 + float(y.abs().max())))


def plain_gradient(column: Column, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(column.loss(*leaves), leaves)


def numbers(column: Column) -> tuple[int, ...]:
    return tuple(range(len(column.inputs())))


def check_grad(column: Column) -> None:
    inputs = column.inputs()
    expected = plain_gradient(column, inputs)
    close(grad(column.loss, numbers(column))(*inputs), expected, column)
    out, pullback = vjp(column.loss, *inputs)
    close(pullback(torch.ones_like(out)), expected, column)


def check_jacrev(column: Column) -> None:
    inputs = tuple(x[0] for x in column.inputs())
    jacobians = jacrev(column.call, numbers(column))(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = column.call(*leaves)
    weights = torch.ones_like(out)
    expected = torch.autograd.grad(out, leaves, weights)
    found = [J.sum(tuple(range(out.dim()))) for J in jacobians]
    close(found, expected, column)


def check_hessian(column: Column) -> None:
    inputs = tuple(x[0] for x in column.inputs())
    found = hessian(column.loss)(*inputs)
    expected = jacrev(jacrev(column.loss))(*inputs)
    close([found], [expected], column)
    close([jacfwd(jacfwd(column.loss))(*inputs)], [expected], column)


def check_forward(column: Column) -> None:
    inputs = tuple(x[0] for x in column.inputs())
    every = numbers(column)
    expected = jacrev(column.call, every)(*inputs)
    close(jacfwd(column.call, every)(*inputs), expected, column)
    tangents = tuple(torch.cos(x) for x in inputs)
    _, found = jvp(column.call, inputs, tangents)
    by_reverse = sum(
        (J * t).flatten(found.dim()).sum(-1) for J, t in zip(expected, tangents, strict=True)
    )
    close([found], [by_reverse], column)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents, strict=True)]
        dual = forward_ad.unpack_dual(column.call(*duals)).tangent
        close([dual], [by_reverse], column)


def check_third(column: Column) -> None:
    x, *rest = (x[0] for x in column.inputs())
    direction = torch.cos(x)

    def along(t: Tensor) -> Tensor:
        return column.loss(x + t * direction, *rest)

    second = jacrev(jacrev(along))
    zero = torch.zeros((), dtype=T)
    third = jacrev(second)(zero)
    step = 1e-4
    difference = (second(zero + step) - second(zero - step)) / (2 * step)
    assert abs(float(third - difference)) <= 1e-4 * (1 + abs(float(third)))


def check_vmap(column: Column) -> None:
    inputs = column.inputs()
    count = len(inputs[0])
    loop = torch.stack([column.call(*(x[i] for x in inputs)) for i in range(count)])
    close([vmap(column.call)(*inputs)], [loop], column)
    last = tuple(x.movedim(0, -1) for x in inputs)
    close([vmap(column.call, in_dims=-1)(*last)], [loop], column)
    nested = vmap(vmap(column.call))(*(x.reshape(2, 2, *x.shape[1:]) for x in inputs))
    close([nested.flatten(0, 1)], [loop], column)
    for only in range(len(inputs)):
        mixed = tuple(x if i == only else x[0] for i, x in enumerate(inputs))
        dims = tuple(0 if i == only else None for i in range(len(inputs)))
        some = torch.stack(
            [column.call(*(x[j] if i == only else x for i, x in enumerate(mixed)))
             for j in range(count)]
        )  # fmt: skip
        close([vmap(column.call, dims)(*mixed)], [some], column)


def check_per_sample(column: Column) -> None:
    inputs = column.inputs()
    every = numbers(column)
    found = vmap(grad(column.loss, every))(*inputs)
    singly = [plain_gradient(column, tuple(x[i] for x in inputs)) for i in range(len(inputs[0]))]
    close(found, [torch.stack(parts) for parts in zip(*singly, strict=True)], column)


# The columns for which the tests compile C++, at least one for each layer and for each way of a
# solve. Elsewhere they trace and run both passes without code; `make test-long` generates all.
GENERATED = (
    "less",
    "declared",
    "ied",
    "ied, M",
    "ied, nonsymmetric",
    "spectral",
    "nullspace, weights",
    "isvd",
    "pool, weights",
    "ied, power steps, n = 128",
    "ied, k=2, Krylov space, n = 450",
    "less, factor, 300×210",
)


def backend_of(column: Column) -> str:
    return BACKEND if column.name in GENERATED else "aot_eager"


def check_compile(column: Column, backend: str | None = None) -> None:
    torch._dynamo.reset()
    backend = backend or backend_of(column)
    compiled = torch.compile(column.loss, fullgraph=True, dynamic=True, backend=backend)
    for count in (4, 3):
        leaves = [x[:count].clone().requires_grad_() for x in column.inputs()]
        out = compiled(*leaves)
        close([out.detach()], [column.loss(*leaves).detach()], column)
        found = torch.autograd.grad(out, leaves)
        close(found, plain_gradient(column, tuple(x[:count] for x in column.inputs())), column)


def check_compiled_gradient(column: Column) -> None:
    torch._dynamo.reset()
    inputs = column.inputs()
    gradient = grad(column.loss, numbers(column))
    found = torch.compile(gradient, fullgraph=True, backend="aot_eager")(*inputs)
    close(found, plain_gradient(column, inputs), column)


class Wrapped(nn.Module):
    """A layer behind a trainable scale."""

    def __init__(self, column: Column) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=T))
        self.layer = column.module()

    def forward(self, A: Tensor, *rest: Tensor) -> Tensor:
        out = self.layer(self.scale * A, *rest)
        return out if isinstance(out, Tensor) else out.vectors


def check_module_step(column: Column, backend: str = "aot_eager") -> None:
    """Both passes of the module, traced for fixed shapes."""
    torch._dynamo.reset()
    inputs = column.inputs()
    results = []
    for wrap in (lambda m: m, lambda m: torch.compile(m, fullgraph=True, backend=backend)):
        module = Wrapped(column)
        runner = wrap(module)
        optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimiser.zero_grad()
            runner(*inputs).square().mean().backward()
            optimiser.step()
        results.append(module.scale.detach())
    close(results[:1], results[1:], column)


def check_export(column: Column) -> None:
    inputs = column.inputs()
    module = Wrapped(column)
    program = torch.export.export(module, inputs)
    close([program.module()(*inputs).detach()], [module(*inputs).detach()], column)


def check_autocast(column: Column) -> None:
    inputs = tuple(x.float() for x in column.inputs())
    expected, gradients = column.call(*inputs), plain_gradient(column, inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = column.call(*inputs)
        loss = column.loss(*leaves)
    found = torch.autograd.grad(loss, leaves)
    # Computed in bfloat16 they would differ by a hundred times as much.
    for x, y in zip((out, *found), (expected, *gradients), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-4 * (1 + float(y.abs().max())))


def check_half(column: Column) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        leaves = [x.to(dtype).requires_grad_() for x in column.inputs()]
        wide = [x.detach().float().requires_grad_() for x in leaves]
        out, truth = column.call(*leaves), column.call(*wide)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), truth, rtol=2e-2, atol=2e-2)
        scale = 2.0**6  # a loss scale changes nothing but the scale
        once = torch.autograd.grad(out.float().sum(), leaves, retain_graph=True)
        scaled = torch.autograd.grad(scale * out.float().sum(), leaves)
        for x, y in zip(once, scaled, strict=True):
            assert x.dtype == dtype
            torch.testing.assert_close(y.float() / scale, x.float(), rtol=2e-2, atol=2e-2)


def check_modes(column: Column) -> None:
    inputs = column.inputs()
    expected = column.call(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    with torch.no_grad():
        assert not column.call(*leaves).requires_grad
    with torch.inference_mode():
        close([column.call(*inputs).clone()], [expected], column)
    out = torch.utils.checkpoint.checkpoint(column.loss, *leaves, use_reentrant=False)
    close(torch.autograd.grad(out, leaves), plain_gradient(column, inputs), column)
    for only in range(len(inputs)):
        mixed = [x.clone().requires_grad_(i == only) for i, x in enumerate(inputs)]
        column.loss(*mixed).backward()
        assert [x.grad is not None for x in mixed] == [i == only for i in range(len(inputs))]


def check_fake(column: Column) -> None:
    inputs = column.inputs()
    real = column.call(*inputs)
    meta = column.call(*(x.to("meta") for x in inputs))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = column.call(*(mode.from_tensor(x) for x in inputs))
    for x in (meta, fake):
        assert (x.shape, x.dtype, x.stride()) == (real.shape, real.dtype, real.stride())


def check_round_trip(column: Column) -> None:
    inputs = column.inputs()
    module = Wrapped(column)
    expected = module(*inputs)
    stored = io.BytesIO()
    torch.save(module, stored)
    stored.seek(0)
    clones = [
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(stored, weights_only=False),
    ]
    clones[0].load_state_dict(module.state_dict())
    for clone in clones:
        close([clone(*inputs).detach()], [expected.detach()], column)
        assert repr(clone) == repr(module)
    assert all(word in repr(module) for word in column.printed)


def check_threads(column: Column) -> None:
    inputs = column.inputs()
    expected = plain_gradient(column, inputs)
    results: list[Any] = [None] * 4

    def work(i: int) -> None:
        results[i] = plain_gradient(column, inputs)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found in results:
        close(found, expected, column)


@dataclass(frozen=True)
class Row:
    """A transform: what it is called, its check, and what it asks of a layer."""

    name: str
    check: Callable[[Column], None]
    traces: bool = False  # compiles, exports or maps: not for what is eager only
    forwards_only: bool = False  # without a backward pass
    forward: bool = False  # propagates tangents: not for rules of reverse mode
    half: bool = False  # in short floats
    whole: bool = False  # one operator, inside of which a call runs as in eager mode
    sampled: bool = False  # takes long, so that `make test` has one column for each layer


ROWS = [
    Row("`torch.func.grad`, `vjp`", check_grad, traces=True),
    Row("`torch.func.jacrev`", check_jacrev, traces=True),
    Row("`torch.func.hessian`, and forward over forward", check_hessian, traces=True, forward=True),
    Row("`torch.func.jvp`, `jacfwd`, `forward_ad`", check_forward, traces=True, forward=True),
    Row("third derivatives", check_third, traces=True),
    Row("`vmap`: any input, any dimension, nested", check_vmap, traces=True, forwards_only=True),
    Row("`vmap(grad(…))`, per-sample gradients", check_per_sample, traces=True),
    Row("`torch.compile(fullgraph=True)`, dynamic shapes", check_compile, traces=True, whole=True),
    Row(
        "`torch.compile(torch.func.grad(…))`",
        check_compiled_gradient,
        traces=True,
        whole=True,
        sampled=True,
    ),
    Row(
        "`torch.compile` of a module in a training step", check_module_step, traces=True, whole=True
    ),
    Row("`torch.export`", check_export, traces=True, forwards_only=True),
    Row("`torch.autocast`", check_autocast),
    Row("float16 and bfloat16, loss scaling", check_half, half=True),
    Row("`no_grad`, `inference_mode`, `checkpoint`, one input only", check_modes),
    Row("fake and meta tensors", check_fake, traces=True, forwards_only=True),
    Row("`deepcopy`, `pickle`, `torch.save`, `state_dict`, `repr`", check_round_trip),
    Row("several threads", check_threads),
]


def excused(row: Row, column: Column) -> bool:
    """Whether this cell raises an error instead of working."""
    backward = not (row.forwards_only or row.whole)
    eager = column.eager_only or (column.eager_backward and backward)
    forward = row.forward and column.reverse_only
    return (row.traces and eager) or forward or (row.half and column.no_half)


def page() -> str:
    """The table in Markdown: which columns a row excuses, since most work everywhere."""
    lines = [
        "# Which PyTorch transforms work with what",
        "",
        "Made from the table that the tests run, by `python -m tests.transforms`.",
        f"Each of the {len(ROWS)} transforms is tested with each of the {len(COLUMNS)} calls",
        "listed below: to work, or to raise an error that says what to use instead.",
        "",
        "| transform | works with | raises an error with |",
        "|---|---|---|",
    ]
    for row in ROWS:
        out = [column.name for column in COLUMNS if excused(row, column)]
        works = f"{len(COLUMNS) - len(out)} of {len(COLUMNS)}" if out else "all"
        lines.append(f"| {row.name} | {works} | {'; '.join(out) or '–'} |")
    lines += [
        "",
        "Forward mode is exact up to fourth derivatives, in any mix with reverse mode; for a",
        "symmetric eigenproblem it costs a full decomposition. Reverse mode is exact to any order.",
        "Operators, sparse tensors and DTensors are not in this table: they have first derivatives",
        "by autograd, and no transforms ([operators](operators.md)).",
        "",
        "In a trace, by `torch.compile`, `torch.export` or `make_fx`, a call is one operator,",
        "`pmaf::solve`, and its derivative another, `pmaf::pull`, whatever the layer, its options,",
        "its solver and its rule. Inside of them it runs as in eager mode, with the same checks",
        "and warnings. Gradients are taken once: a second derivative inside of a trace raises an",
        "error. Three calls are traced in more operations: forward mode; `pmaf.spectral` of a",
        "function without a name, and any problem with an option that is no number, string or",
        "bool; and `pmaf.PrincipalPool`, whose moments are torch's own operations.",
        "",
        "## The calls",
        "",
        '"Declared" is a problem that the library does not know ([more](declare.md)). The last',
        "ones have sizes at which every method of the default solvers is taken.",
        "",
        *(f"- {column.name}" for column in COLUMNS),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
