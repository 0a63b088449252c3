"""Straight-line programs give what the layers give, prove it by one number, and ask nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pmaf
from pmaf.layers.ied import _way_on_device
from pmaf.linalg.decompositions import eigh
from pmaf.solvers import auto
from pmaf.straight import eigenvectors, least_squares, secular, singular
from pmaf.straight.form import Form
from pmaf.straight.least_squares import Data, Kind, Method
from tests import pretend

F32, F64 = torch.float32, torch.float64


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def error(x: Tensor, y: Tensor) -> float:
    """The largest difference in an entry of a batch, relative to its size."""
    x, y = (z.detach().reshape(len(z), -1) for z in (x, y))
    wide = torch.complex128 if x.is_complex() else F64
    size = y.to(wide).norm(dim=1)
    # What is far below the other entries is rounding, such as the gradient of a weight whose row
    # has no residual.
    size = torch.where(size > 1e-9 * size.max(), size, 1)
    return float(((x.to(wide) - y.to(wide)).norm(dim=1) / size).max())


# The secular equation.


def equations(p: int, seed: int = 0) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Spreads that ascend from zero, and coefficients, some of them at every known difficulty."""
    generator = torch.Generator().manual_seed(seed)
    B = 200 if p < 100 else 20

    def powers(reach: float) -> Tensor:
        u = torch.rand(B, p, generator=generator, dtype=F64)
        return (-reach * math.log(10) * u).exp()

    near = torch.rand(B, p, generator=generator, dtype=F64).sort(-1).values
    near = near - near[:, :1]
    near = near / near[:, -1:].clamp_min(1e-300)
    normal = torch.randn(B, p, generator=generator, dtype=F64)
    yield "random", near, normal
    yield "large b", near, 1e60 * normal
    far = powers(15).sort(-1).values
    far[:, 0] = 0
    far = far / far[:, -1:].clamp_min(1e-300)
    c = normal * powers(30)
    yield "many scales", far, c
    yield "tiny b", far, 1e-40 * c
    least = secular.LEAST
    yield "hard", far, torch.cat([torch.full_like(c[:, :1], least), c[:, 1:]], 1)
    if p == 1:
        return
    inside = normal * far
    inside[:, 0] = 0
    inside = inside / (inside / torch.where(far > 0, far, 1)).norm(dim=1, keepdim=True)
    for excess in (1e-2, -1e-2, 1e-8, 1e-15):
        for first in (least, 1e-9):
            critical = (1 + excess) * inside
            critical[:, 0] = first
            yield f"critical {excess:g}, {first:g}", far, critical
    ladder = 10 ** (-(30 / p) * torch.arange(p - 1, -1, -1, dtype=F64))
    ladder[0] = 0
    steps = ladder.clone()
    steps[0] = ladder[1]
    for size in (1.0, 0.3, 0.1, 0.01):
        yield f"plateaus {size:g}", ladder[None], size * steps[None]


@pytest.mark.parametrize("p", [1, 2, 3, 9, 32, 256, 1024])
@pytest.mark.parametrize("plan", secular._PLANS, ids=str)
def test_the_secular_equation_is_solved_by_a_fixed_number_of_steps(
    p: int, plan: secular.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secular, "planned", lambda shape, device: plan)
    eps = torch.finfo(F64).eps
    for name, spread, c in equations(p):
        c = torch.where((spread == 0) & (c == 0), secular.LEAST, c)
        for single, allowed in ((False, 16 * eps), (True, 1e-8)):
            u, t = secular.root(spread, c, single)
            # ‖u‖ falls at least as fast as any of its terms, so that it bounds the error of t.
            worst = float((u.norm(dim=-1) - 1).abs().max())
            assert worst <= allowed, f"{name}: {worst:.1e}"
            assert bool((t >= 0).all()), name


def test_the_bound_of_every_plan_ends_below_rounding() -> None:
    for plan in secular._PLANS:
        relative = math.log(1e42) / (plan.points + 1) ** plan.sections
        errors = [relative]
        for _ in range(plan.steps):
            errors.append(1.5 * errors[-1] ** 2)
        assert errors[-1] <= torch.finfo(F64).eps, plan
        assert errors[-2] <= 1e-8, plan


# Least squares.


def options(name: str, B: int, m: int, n: int) -> dict[str, Tensor]:
    """The tensors of the options that a name contains."""
    found: dict[str, Tensor] = {}
    if "weights" in name:
        weights = drawn(B, m, seed=1).abs()
        weights[:, 0] *= m <= n  # a weight of zero, if enough others are left
        found["weights"] = weights
    if "radius" in name:
        found["radius"] = 0.5 + drawn(B, seed=2).abs()
    if "metric" in name:
        X = drawn(B, n, n, seed=3)
        found["M"] = X @ X.mT / n + torch.eye(n, dtype=F64)
    if "diagonal" in name:
        found["M"] = 0.5 + drawn(B, n, seed=3).abs()
    return found


def layer(data: Data, name: str) -> Tensor:
    M: Any = data.M
    if "diagonal" in name:
        M = pmaf.operators.Diagonal(M)
    radius: Any = 1.0 if data.radius is None else data.radius
    return pmaf.less(data.A, data.b, radius=radius, weights=data.weights, M=M, ball="ball" in name)


CASES = ["", "weights", "radius", "metric", "diagonal", "ball", "metric ball"]
CASES += ["weights radius metric", "weights radius diagonal ball", "weights radius metric ball"]
SHAPES = [(8, 5), (64, 32), (5, 9), (8, 9), (3, 1), (1, 1), (4, 4)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", [*Method], ids=lambda x: x.name)
def test_least_squares_are_those_of_the_layer(
    name: str, shape: tuple[int, int], method: Method
) -> None:
    B, (m, n) = 6, shape
    if "ball" in name and m < n:
        pytest.skip("inside of the ball a wide matrix leaves the solution to another way")
    dtype = F32 if method is Method.PROMOTED else F64
    # Inner and outer problems; of inner ones that are wide the minimisers form a sphere.
    sizes = torch.tensor([0.1, 0.1, 1, 1, 10, 10], dtype=F64) if m >= n else 10 * torch.ones(B)
    b = sizes.unsqueeze(-1) * drawn(B, m, seed=4)
    parts = {"A": drawn(B, m, n), "b": b.to(F64), **options(name, B, m, n)}
    data = Data(**{key: x.to(dtype) for key, x in parts.items()})
    kind = Kind(F64, method, "ball" in name, "diagonal" in name, 1.0)
    found = least_squares.minimum(data, kind)
    assert found.evidence.holds()
    v = drawn(B, n, seed=5)
    needs = [x is not None for x in data]
    ours = least_squares.gradients(data, kind, found.kept, v.to(dtype), needs)
    leaves = Data(*(None if x is None else x.double().requires_grad_() for x in data))  # type: ignore
    u = layer(leaves, name)
    theirs = torch.autograd.grad(u, [x for x in leaves if x is not None], v)
    eps = torch.finfo(dtype).eps
    # A condition of the problem: how much the tangent system magnifies, from what is kept.
    low = (found.kept.spread[..., 1:2] if n > 1 else found.kept.over) + found.kept.t.unsqueeze(-1)
    worst = float(1 / low.min().clamp_min(1e-12)) if n > 1 else 1.0
    allowed = 64 * eps if dtype == F32 else 64 * eps * max(worst, 1.0)
    assert error(found.u, u) <= allowed
    for x, y in zip((x for x in ours if x is not None), theirs):
        if float(y.abs().max()) > 1e-9:
            assert error(x, y) <= 16 * allowed


def hard(coefficient: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Problems whose `b` has this coefficient in the lowest left singular vector."""
    U, V = (torch.linalg.qr(drawn(4, k, 5, seed=k)).Q for k in (8, 5))
    s = torch.tensor([3.0, 2.0, 1.5, 1.0, 0.3], dtype=F64)
    A = (U * s) @ V.mT
    b = (U * torch.tensor([0.3, 0.2, 0.1, 0.2, coefficient], dtype=F64)).sum(-1)
    return A.to(dtype), b.to(dtype)


@pytest.mark.parametrize("method", [Method.REFINED, Method.EXACT], ids=lambda x: x.name)
@pytest.mark.parametrize("coefficient", [0.0, 1e-12, 1e-8, 1e-4, -1e-4])
def test_hard_and_nearly_hard_cases(method: Method, coefficient: float) -> None:
    A, b = hard(coefficient, F64)
    kind = Kind(F64, method, False, False, 1.0)
    found = least_squares.minimum(Data(A, b), kind)
    # The Gram matrix does not tell a coefficient of zero from a small one.
    assert found.evidence.holds() == (coefficient != 0 or method is Method.EXACT)
    assert error(found.u, pmaf.less(A, b)) <= 1e3 * torch.finfo(F64).eps
    problem = pmaf.SphereLeastSquares(A, b)
    solution = pmaf.solve(problem)
    assert torch.allclose(problem.objective(found.u), problem.objective(solution.value))


def test_a_hard_case_of_float32_is_that_of_its_own_numbers() -> None:
    A, b = (torch.diag(torch.tensor([2.0, 1.0, 0.5])).expand(2, 3, 3), torch.zeros(2, 3))
    found = least_squares.minimum(Data(A, b), Kind(F64, Method.PROMOTED, False, False, 1.0))
    assert torch.equal(found.u, torch.tensor([0.0, 0.0, 1.0]).expand(2, 3))
    b = torch.tensor([1.0, 0.25, 0.0]).expand(2, 3)
    found = least_squares.minimum(Data(A, b), Kind(F64, Method.PROMOTED, False, False, 1.0))
    # (G + μI)u = g with μ = −0.25: 2/3.75 and 0.25/0.75, and the rest of the length is positive.
    first, second = 2 / 3.75, 0.25 / 0.75
    third = (1 - first**2 - second**2) ** 0.5
    wanted = torch.tensor([first, second, third], dtype=F64)
    assert error(found.u, wanted.expand(2, 3)) <= torch.finfo(F32).eps


BAD: dict[str, Callable[[Data], Data]] = {
    "b is nan": lambda x: x._replace(b=x.b * torch.nan),
    "A is infinite": lambda x: x._replace(A=x.A / 0),
    "A is zero": lambda x: x._replace(A=0 * x.A),
    "a weight is negative": lambda x: x._replace(weights=-torch.ones_like(x.b)),
    "a radius is negative": lambda x: x._replace(radius=-torch.ones_like(x.b[:, 0])),
    "M is indefinite": lambda x: x._replace(M=-torch.eye(3, dtype=F64).expand(4, 3, 3)),
    "squares overflow": lambda x: x._replace(A=1e200 * x.A),
}


@pytest.mark.parametrize("name", BAD)
def test_the_evidence_fails(name: str) -> None:
    data = BAD[name](Data(drawn(4, 5, 3), drawn(4, 5)))
    try:
        found = least_squares.minimum(data, Kind(F64, Method.REFINED, False, False, 1.0))
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        return
    assert not found.evidence.holds()
    assert bool(found.evidence.marks(1).isnan().any())


# Eigenvectors and singular vectors.


def matrices(name: str, dtype: torch.dtype) -> Tensor:
    if name == "random":
        A = drawn(5, 6, 6, dtype=dtype)
        return A + A.mH
    if name == "others repeat":
        return torch.diag(torch.tensor([3.0, 1, 1, 1, 1, 1], dtype=F64)).to(dtype).expand(2, 6, 6)
    if name == "requested repeat":
        Q = torch.linalg.qr(drawn(2, 6, 6, dtype=dtype)).Q
        return (Q * torch.tensor([3.0, 3, 1, 0.5, 0.2, 0], dtype=F64)) @ Q.mH
    if name == "zero":
        return torch.zeros(2, 6, 6, dtype=dtype)
    assert name == "small"
    return 1e-30 * matrices("random", dtype)


TWO = Form(2, largest=True, signed=True)
NAMES = ["random", "others repeat", "requested repeat", "zero", "small"]


def spans(rows: Tensor) -> Tensor:
    return rows.mT @ rows.conj()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [F64, torch.complex128], ids=str)
@pytest.mark.parametrize("k", [1, 2, 6])
@pytest.mark.parametrize("largest", [True, False])
def test_eigenvectors(name: str, dtype: torch.dtype, k: int, largest: bool) -> None:
    A, form = matrices(name, dtype), Form(k, largest, signed=True)
    found = eigenvectors.of_matrix(A, form)
    assert found.evidence.holds()
    values, _ = eigh(A)
    top = values[..., -k:].flip(-1) if largest else values[..., :k]
    eps = torch.finfo(F64).eps
    size = float(values.abs().max())
    assert float((found.values - top).abs().max()) <= 64 * eps * size
    eye = torch.eye(k, dtype=dtype)
    assert float((found.rows @ found.rows.mH - eye).abs().max()) <= 64 * eps
    rest = found.rows @ A.mT - found.values.unsqueeze(-1) * found.rows
    assert float(rest.abs().max()) <= 64 * eps * size
    if name in ("random", "small"):
        leaf = A.detach().clone().requires_grad_()
        pairs = pmaf.ied(leaf, k, largest=largest)
        v, d = drawn(5, 6, k, seed=6, dtype=dtype), drawn(5, k, seed=7)
        (theirs,) = torch.autograd.grad((pairs.vectors, pairs.values), leaf, (v, d))
        rows = found.rows
        incoming = eigenvectors.turned(v.mT, rows) if dtype.is_complex else v.mT
        (ours,) = eigenvectors.pull_matrix(
            rows, found.values, found.every_row, found.every_value, incoming, d, form
        )
        assert error(rows.mT, pairs.vectors) <= 1e4 * eps
        assert error(ours, theirs) <= 1e5 * eps


@pytest.mark.parametrize("name", ["others repeat", "requested repeat", "zero"])
def test_gradients_are_finite_where_values_repeat(name: str) -> None:
    A = matrices(name, F64)
    found = eigenvectors.of_matrix(A, TWO)
    v = drawn(*found.rows.shape)
    (dA,) = eigenvectors.pull_matrix(
        found.rows, found.values, found.every_row, found.every_value, v, None, TWO
    )
    assert bool(dA.isfinite().all())
    # A function of the span, whose derivative exists: tr(C VVᵀ), by differences.
    if name == "requested repeat":
        C, E = drawn(6, 6), drawn(6, 6, seed=8)
        C, E = C + C.mT, E + E.mT
        v = 2 * found.rows @ C
        (dA,) = eigenvectors.pull_matrix(
            found.rows, found.values, found.every_row, found.every_value, v, None, TWO
        )
        h = 1e-5
        up, down = (
            (C * spans(eigenvectors.of_matrix(A + s * E, TWO).rows)).sum((-2, -1)) for s in (h, -h)
        )
        # The error of a central difference is of second order, and its rounding eps over h.
        assert torch.allclose((dA * E).sum((-2, -1)), (up - down) / (2 * h), rtol=1e-6)


@pytest.mark.parametrize("dtype", [F64, torch.complex128], ids=str)
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("largest", [True, False])
def test_pairs(dtype: torch.dtype, k: int, largest: bool) -> None:
    A, X = matrices("random", dtype), drawn(5, 6, 6, seed=9, dtype=dtype)
    M = X @ X.mH / 6 + torch.eye(6, dtype=dtype)
    form = Form(k, largest, signed=True)
    found = eigenvectors.of_pair(A, M, form)
    assert found.evidence.holds()
    a, m = A.clone().requires_grad_(), M.clone().requires_grad_()
    pairs = pmaf.ied(a, k, M=m, largest=largest)
    eps = torch.finfo(F64).eps
    assert error(found.rows.mT, pairs.vectors) <= 1e5 * eps
    v, d = drawn(5, 6, k, seed=6, dtype=dtype), drawn(5, k, seed=7)
    theirs = torch.autograd.grad((pairs.vectors, pairs.values), (a, m), (v, d))
    incoming = eigenvectors.turned(v.mT, found.rows) if dtype.is_complex else v.mT
    ours = eigenvectors.pull_pair(
        found.rows, found.values, found.every_row, found.every_value, incoming, d, form
    )
    for x, y in zip(ours, theirs):
        assert error(x, y) <= 1e6 * eps


def test_an_indefinite_metric_has_no_evidence() -> None:
    A, M = matrices("random", F64), torch.diag(torch.tensor([1.0, 1, 1, 1, 1, -1], dtype=F64))
    found = eigenvectors.of_pair(A, M.expand(5, 6, 6), Form(1, True, True))
    assert not found.evidence.holds()


def test_an_ill_conditioned_metric_has_no_evidence() -> None:
    A = matrices("random", F64)
    M = torch.diag(10.0 ** -torch.arange(0, 18, 3, dtype=F64)).expand(5, 6, 6)
    Q = torch.linalg.qr(drawn(5, 6, 6, seed=3)).Q
    found = eigenvectors.of_pair(A, Q @ M @ Q.mT, Form(1, True, True))
    assert not found.evidence.holds()


@pytest.mark.parametrize("shape", [(9, 5), (8, 9), (5, 5), (40, 6)], ids=str)
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_null_vectors(shape: tuple[int, int], k: int | None, weighted: bool) -> None:
    A = drawn(4, *shape, dtype=F32)
    weights = drawn(4, shape[0], seed=1, dtype=F32).abs() if weighted else None
    parts = [x.double() for x in (A, weights) if x is not None]
    form = Form(k or 1, largest=False, signed=True, single=True)
    found = singular.right_vectors(parts[0], parts[1] if weighted else None, form)
    assert found.evidence.holds()
    leaves = [x.clone().requires_grad_() for x in parts]
    vectors = pmaf.nullspace(leaves[0], k, weights=leaves[1] if weighted else None)
    vectors = vectors if k else vectors.unsqueeze(-1)
    v = drawn(*vectors.shape, seed=2)
    if k and shape[1] - shape[0] > 0:
        return  # more than one vector of the null space of wide matrices
    theirs = torch.autograd.grad(vectors, leaves, v)
    needs = [True] * len(parts)
    every = found.every_row, found.every_value
    ours = singular.pull_right(parts, found.rows, *every, v.mT, form, needs)
    assert error(found.rows.mT, vectors) <= torch.finfo(F32).eps
    for x, y in zip(ours, theirs):
        assert x is not None
        # Weights have no effect on an exact null vector, and its gradient is rounding.
        if float(y.abs().max()) > 1e-9:
            assert error(x, y) <= torch.finfo(F32).eps


@pytest.mark.parametrize("shape", [(9, 8), (40, 6)], ids=str)
@pytest.mark.parametrize("dtype", [F64, torch.complex128], ids=str)
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("by_left", [True, False])
def test_triplets(shape: tuple[int, int], dtype: torch.dtype, largest: bool, by_left: bool) -> None:
    # Among so many matrices there is one whose singular values differ from norms by many roundings.
    A = drawn(300, *shape, dtype=dtype)
    form = Form(1, largest, signed=True, by_left=by_left)
    found = singular.triplets(A, form)
    proved = found.evidence.marks(1) == 0
    assert float(proved.double().mean()) > 0.9
    leaf = A.clone().requires_grad_()
    right, values, left = leaf, None, None
    if by_left:
        right, values, left = pmaf.isvd(leaf.mH, largest=largest)
    else:
        left, values, right = pmaf.isvd(leaf, largest=largest)
    parts = found.rows[:, 0], found.values[:, 0], found.left[:, 0]
    for x, y in zip(parts, (right, values, left)):
        assert error(x[proved], y[proved]) <= 1e5 * torch.finfo(F64).eps
    v = [drawn(*x.shape, seed=i, dtype=x.dtype) for i, x in enumerate(parts)]
    (theirs,) = torch.autograd.grad((right, values, left), leaf, v)
    incoming = [x.unsqueeze(1) for x in v]
    rows = found.rows, found.values, found.left
    every = found.every_row, found.every_value
    ours = singular.pull_triplets(A, rows, every, incoming, form)
    assert error(ours[proved], theirs[proved]) <= 1e6 * torch.finfo(F64).eps


# Calls on a device.


def seed_of(x: Tensor) -> Tensor:
    """The incoming gradient of a result, the same numbers for each precision."""
    return drawn(*x.shape, seed=3, dtype=torch.complex64 if x.is_complex() else F32).to(x.dtype)


def on_device(call: Callable[..., Any], *tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients of a call on the pretend device, back on the CPU."""
    leaves = [pretend.put(x).requires_grad_() for x in tensors]
    found = call(*leaves)
    found = [x for x in (found if isinstance(found, tuple) else (found,)) if x.requires_grad]
    seeds = [pretend.put(seed_of(x)) for x in found]
    grads = torch.autograd.grad(found, leaves, seeds)
    return [x.detach().cpu() for x in found], [x.cpu() for x in grads]


def on_cpu(call: Callable[..., Any], *tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    found = call(*leaves)
    found = [x for x in (found if isinstance(found, tuple) else (found,)) if x.requires_grad]
    seeds = [seed_of(x) for x in found]
    return [x.detach() for x in found], list(torch.autograd.grad(found, leaves, seeds))


CALLS: dict[str, tuple[str, Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "less": ("less: straight", pmaf.less, ((300, 6, 5), (300, 6))),
    "ied": ("ied: straight", lambda A: pmaf.ied(A + A.mT), ((300, 4, 4),)),
    "ied k": ("ied: straight", lambda A: pmaf.ied(A + A.mT, 2, skip=1), ((300, 4, 4),)),
    "ied smallest": (
        "ied: straight",
        lambda A: pmaf.ied(A + A.mT, largest=False, reference=1),
        ((300, 4, 4),),
    ),
    "pair": (
        "pairs: straight",
        lambda A, B: pmaf.ied(A + A.mT, M=B @ B.mT + torch.eye(4, dtype=A.dtype, device=A.device)),
        ((300, 4, 4), (300, 4, 4)),
    ),
    "nullspace": ("singular: straight", pmaf.nullspace, ((300, 7, 4),)),
    "isvd": ("singular: straight", pmaf.isvd, ((300, 7, 4),)),
    "isvd wide": ("singular: straight", pmaf.isvd, ((300, 4, 7),)),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_on_a_device_take_the_straight_way(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    way, call, shapes = CALLS[name]
    given = [drawn(*shape, seed=i) for i, shape in enumerate(shapes)]
    caplog.set_level(logging.DEBUG, logger="pmaf")
    found, grads = on_device(call, *given)
    ways = [x.getMessage() for x in caplog.records]
    assert ways == [way]
    theirs, others = on_cpu(call, *given)
    # The worst of 300 random matrices has a gap of about 1e-3; derivatives divide by it twice.
    for x, y in zip((*found, *grads), (*theirs, *others)):
        assert error(x, y) <= 1e6 * 64 * torch.finfo(F64).eps


@pytest.mark.parametrize("name", CALLS)
def test_products_on_a_device_keep_all_digits(name: str) -> None:
    """The pretend device rounds factors to ten bits where the process allows TF32."""
    _, call, shapes = CALLS[name]

    # The sums and products of these calls are the user's own, and are made before.
    given = [drawn(*shape, seed=i, dtype=F32) for i, shape in enumerate(shapes)]
    if name.startswith(("ied", "pair")):
        given[0] = given[0] + given[0].mT
    if name == "pair":
        B = given[1]
        given[1] = B @ B.mT + torch.eye(4)
    plain: dict[str, Callable[..., Any]] = {
        "pair": lambda A, M: pmaf.ied(A, M=M),
        "ied": pmaf.ied,
        "ied k": lambda A: pmaf.ied(A, 2, skip=1),
        "ied smallest": lambda A: pmaf.ied(A, largest=False, reference=1),
    }
    call = plain.get(name, call)
    found, grads = on_device(call, *given)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        again, others = on_device(call, *given)
    finally:
        torch.set_float32_matmul_precision(before)
    for x, y in zip((*found, *grads), (*again, *others)):
        assert torch.equal(x, y)


def test_autocast_does_not_reach_into_a_program() -> None:
    """The pretend device has no autocast; the executor is the same on the CPU."""
    A, v = matrices("random", F64).float(), drawn(5, 6, dtype=F32)
    posed = pmaf.PrincipalEigenvectors(A)
    recipe = _way_on_device(posed, torch.device("cpu"), launched=False)
    assert recipe is not None

    def both() -> tuple[Tensor, ...]:
        leaf = A.clone().requires_grad_()
        found = recipe.run({"A": leaf, "M": None, "reference": None, "init": None})
        assert found is not None
        return *found, *torch.autograd.grad(found[0], leaf, v)

    wanted = both()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = both()
    for x, y in zip(found, wanted):
        assert torch.equal(x, y)


@pytest.mark.parametrize("shape", [(100_000, 4, 3), (2, 100_000, 3)], ids=str)
def test_many_matrices_and_many_rows(
    shape: tuple[int, int, int], caplog: pytest.LogCaptureFixture
) -> None:
    A, b = drawn(*shape, dtype=F32), drawn(*shape[:2], seed=1, dtype=F32)
    caplog.set_level(logging.DEBUG, logger="pmaf")
    found, grads = on_device(pmaf.less, A, b)
    assert [x.getMessage() for x in caplog.records] == ["less: straight"]
    # In float64 the problem of the same numbers has more digits than the result.
    theirs, others = on_cpu(pmaf.less, A.double(), b.double())
    for x, y in zip((*found, *grads[1:]), (*theirs, *others[1:])):
        assert error(x, y) <= 8 * torch.finfo(F32).eps


def test_training_on_a_device() -> None:
    """The matrix learns a direction in 300 steps, through repeated eigenvalues at the start."""
    A = pretend.put(torch.eye(4).repeat(300, 1, 1)).requires_grad_()
    with torch.no_grad():
        A[:, 0, 0] += 1e-3
    target = pretend.put(torch.tensor([0.5, 0.5, 0.5, 0.5]))
    optimizer = torch.optim.SGD([A], lr=0.05)
    losses = []
    for _ in range(300):
        optimizer.zero_grad()
        loss = (1 - (pmaf.ied(A).vectors @ target).square()).sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach().cpu()))
    assert bool(A.detach().cpu().isfinite().all())
    assert losses[-1] < 0.5 * losses[0]


def test_small_problems_of_a_device_go_to_the_host(caplog: pytest.LogCaptureFixture) -> None:
    if not pmaf.native.available:
        pytest.skip("without compiled kernels the host has no faster way")
    A, b = drawn(4, 6, 5, dtype=F32), drawn(4, 6, seed=1, dtype=F32)
    caplog.set_level(logging.DEBUG, logger="pmaf")
    found, grads = on_device(pmaf.less, A, b)
    assert "less: reduction" in [x.getMessage() for x in caplog.records]
    theirs, others = on_cpu(pmaf.less, A, b)
    for x, y in zip((*found, *grads), (*theirs, *others)):
        assert torch.equal(x, y)


def test_second_derivatives_on_a_device() -> None:
    A, b = drawn(300, 4, 3), drawn(300, 4, seed=1)

    def twice(A: Tensor, b: Tensor) -> Tensor:
        u = pmaf.less(A, b)
        (dA,) = torch.autograd.grad(u.pow(3).sum(), A, create_graph=True)
        return dA

    (found,), grads = on_device(twice, A, b)
    (wanted,), others = on_cpu(twice, A, b)
    for x, y in zip((found, *grads), (wanted, *others)):
        assert error(x, y) <= 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda A, b: (A * torch.nan, b), "A has .*(nan|non-finite|not finite)|finite"),
        (lambda A, b: (A, b / 0), "finite"),
    ],
)
def test_bad_numbers_raise_on_a_device_as_elsewhere(
    change: Callable[..., tuple[Tensor, Tensor]], message: str
) -> None:
    A, b = change(drawn(300, 6, 5), drawn(300, 6))
    with pytest.raises(ValueError, match=message):
        pmaf.less(pretend.put(A), pretend.put(b))


def test_a_matrix_of_zeros_beside_others_on_a_device() -> None:
    A, b = drawn(300, 6, 5), drawn(300, 6)
    A[7] = 0
    u = pmaf.less(pretend.put(A), pretend.put(b)).cpu()
    assert error(u, pmaf.less(A, b)) <= 1e-9


def test_nobody_looks_where_checks_are_never_made() -> None:
    A, b = drawn(300, 6, 5), drawn(300, 6)
    b[7, 0] = torch.nan
    there = pretend.put(A), pretend.put(b)
    with pmaf.checks("never"), pretend.counted() as counts:
        u = pmaf.less(*there)
    assert {x.call for x in counts.events if x.kind == "wait"} <= {"_linalg_eigh", "_linalg_svd"}
    found = u.cpu()
    assert bool(found[7].isnan().all())
    assert bool(found[:7].isfinite().all())
    with pytest.raises(ValueError, match="finite"):
        pmaf.less(*there)


def test_a_report_says_that_nobody_looked() -> None:
    A, b = drawn(300, 6, 5), drawn(300, 6)
    problem = pmaf.SphereLeastSquares(pretend.put(A), pretend.put(b))
    with pmaf.checks("never"):
        assert pmaf.solve(problem).method.endswith("not looked at")
    assert not pmaf.solve(problem).method.endswith("not looked at")
    with pmaf.checks("never"):
        assert not pmaf.solve(pmaf.SphereLeastSquares(A, b)).method.endswith("not looked at")


def test_calls_on_a_device_are_explained() -> None:
    A, b = pretend.put(drawn(300, 6, 5)), pretend.put(drawn(300, 6))
    square = pretend.put(matrices("random", F64).repeat(60, 1, 1))
    for call, why in (
        ((pmaf.less, A, b), auto.BATCHED_MINIMUM),
        ((pmaf.ied, square), auto.BATCHED),
        ((pmaf.ied, square, 2), auto.BATCHED),
        ((pmaf.nullspace, A), auto.BATCHED_GRAM),
        ((pmaf.isvd, A, 2), auto.BATCHED_GRAM),
        ((pmaf.spectral, square, "exp"), auto.BATCHED),
    ):
        assert pmaf.explain(*call).why == why.reason, call[0]
    posed = pmaf.SphereLeastSquares(A, b), pmaf.PrincipalEigenvectors(square)
    for problem, line in zip(posed, (auto.BATCHED_MINIMUM, auto.BATCHED)):
        assert pmaf.explain(problem).why == line.reason
    if pmaf.native.available:
        found = str(pmaf.explain(pmaf.less, A[:2], b[:2]))
        assert "tensors of the device -> the host" in found


def test_checks_have_two_values() -> None:
    with pytest.raises(ValueError, match="'sometimes'"):
        pmaf.checks("sometimes")


# In graphs.


def program(name: str) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """A whole pass in both directions, as a function of tensors alone."""
    if name == "least squares":
        kind = Kind(F64, Method.REFINED, False, False, 1.0)

        def both(A: Tensor, b: Tensor, v: Tensor) -> Any:
            found = least_squares.minimum(Data(A, b), kind)
            needs = (True, True, False, False, False)
            grads = least_squares.gradients(Data(A, b), kind, found.kept, v, needs)
            return found.u, grads[0], grads[1], found.evidence.numbers

        return both, (drawn(64, 8, 5), drawn(64, 8, seed=1), drawn(64, 5, seed=2))

    def vectors(A: Tensor, v: Tensor) -> Any:
        found = eigenvectors.of_matrix(A, TWO)
        (dA,) = eigenvectors.pull_matrix(
            found.rows, found.values, found.every_row, found.every_value, v, None, TWO
        )
        return found.values, found.rows.mT @ found.rows, dA, found.evidence.numbers

    return vectors, (matrices("random", F64), drawn(5, 2, 6, seed=1))


@pytest.mark.parametrize("name", ["least squares", "eigenvectors"])
def test_programs_are_one_graph(name: str) -> None:
    function, given = program(name)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(*given), function(*given)):
        assert torch.allclose(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["least squares", "eigenvectors"])
def test_programs_are_fused(name: str) -> None:
    function, given = program(name)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    for x, y in zip(compiled(*given), function(*given)):
        assert torch.allclose(x, y, rtol=1e-10, atol=1e-10)
