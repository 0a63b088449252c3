"""What `test_launched.py` runs in a process in which Triton interprets kernels."""

from __future__ import annotations

import math

import pytest
import torch

import pmaf
from pmaf import launched
from pmaf.executors.launched import (
    LaunchedEigenvectors,
    LaunchedLeastSquares,
    LaunchedNullVectors,
)
from pmaf.launched import calls
from pmaf.layers.least_squares import UNIT
from pmaf.linalg import sphere
from pmaf.linalg.roundings import merge_tolerance
from pmaf.recipe import Recipe

DTYPES = [torch.float32, torch.float64]
# The interpreter takes seconds for the largest ones.
SIZES = [(n, dtype) for n in (1, 2, 3, 8, 9, 16) for dtype in DTYPES]
SIZES += [(31, torch.float32), (32, torch.float64)]


def rotated(values: torch.Tensor) -> torch.Tensor:
    """A symmetric matrix with these eigenvalues, in float64."""
    Q = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64)).Q
    return (Q * values) @ Q.mT


def families(n: int) -> dict[str, torch.Tensor]:
    """Symmetric matrices of order n, `(n, n)` of float64, some of which have repeated eigenvalues.

    Names with a star are those whose first two eigenvalues at the large end are simple.
    """
    x = torch.randn(n, n, dtype=torch.float64)
    top = torch.ones(n, dtype=torch.float64)
    top[0] = 3
    both = top.clone()
    both[:2] = torch.tensor([3.0, 2.0])[: min(n, 2)]
    pair = torch.linspace(0.1, 1, n, dtype=torch.float64)
    pair[:2] = 2
    row = torch.arange(1, n + 1, dtype=torch.float64)
    return {
        "random*": x + x.mT,
        "large*": 1e30 * (x + x.mT),
        "small*": 1e-30 * (x + x.mT),
        "others repeat*": torch.diag(both),
        "others repeat, rotated*": rotated(both),
        "second repeats": torch.diag(top),
        "requested repeat": rotated(pair),
        "identity": torch.eye(n, dtype=torch.float64),
        "zero": torch.zeros(n, n, dtype=torch.float64),
        "rank one": row[:, None] * row,
        "ones": torch.ones(n, n, dtype=torch.float64),
    }


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest deviation of an entry, relative to the largest entry of each last dimension."""
    found, expected = found.detach().double(), expected.detach().double()
    size = expected.abs().amax()
    return float((found - expected).abs().amax() / (size if size > 0 else 1))


def counted(monkeypatch):
    """A list of the grids of all launches."""
    grids, inner = [], launched.launch

    def launch(kernel, grid, *args, **constants):
        grids.append(grid)
        inner(kernel, grid, *args, **constants)

    monkeypatch.setattr(launched, "launch", launch)
    return grids


def eigenvectors_of(k, largest=True, n=3):
    problem = pmaf.PrincipalEigenvectors(torch.eye(n), k, largest).bare()
    recipe = Recipe((), LaunchedEigenvectors(problem))

    def solve(A):
        vectors, values = recipe.run({"A": A})
        return values, vectors

    return solve


def test_they_are_interpreted():
    device, shape = torch.device("cpu"), torch.Size((5, 9, 32))
    assert launched.takes(shape, torch.float32, device)
    assert not launched.takes(torch.Size((5, 9, 33)), torch.float32, device)
    assert not launched.takes(shape, torch.float16, device)
    assert not launched.takes(shape, torch.float32, torch.device("meta"))


@pytest.mark.parametrize(("n", "dtype"), SIZES)
def test_eigenvectors_of_all_families(n, dtype):
    k, eps = min(2, n), torch.finfo(dtype).eps
    cases = families(n)
    # Entries of float32 are not symmetric to the last bit; the symmetric part is what counts.
    A = torch.stack([*cases.values()]).to(dtype)
    values, vectors, kept = calls.eigenvectors(A, k, True, True)
    exact = 0.5 * (A + A.mT).double()
    size = torch.linalg.matrix_norm(exact, 2)[:, None].clamp_min(torch.finfo(dtype).tiny)
    expected = torch.linalg.eigvalsh(exact).flip(-1)
    assert ((values - expected[:, :k]).abs() <= 4 * n * eps * size).all()
    V = vectors.double()
    residual = exact @ V - V * values.double().unsqueeze(-2)
    assert (residual.norm(dim=-2) <= 4 * n * eps * size).all()
    assert error(V.mT @ V, torch.eye(k).expand(len(A), k, k)) <= 4 * n * eps
    assert (sphere.signs(vectors.mT) == 1).all()
    assert (kept[:, :n, :k].mT.shape[-1]) == n

    dl, dv = torch.randn_like(values), torch.randn_like(vectors)
    dA = calls.eigenvectors_gradient(kept, dtype, dl, dv)
    assert dA.isfinite().all()
    assert (dA == dA.mT).all()
    for index, name in enumerate(cases):
        if not name.endswith("*"):
            continue
        a = exact[index].clone().requires_grad_()
        found = pmaf.ied(a, k)
        unit = size[index]
        near = expected[index].diff().abs()[:k].min() / unit if n > 1 else 1.0
        assert error(vectors[index], found.vectors) <= 16 * n * eps / near, name
        loss = (found.values * dl[index]).sum() + (found.vectors * dv[index]).sum()
        (expected_dA,) = torch.autograd.grad(loss, a)
        assert error(dA[index], expected_dA) <= 64 * n * eps / near**2, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_small_end_and_many_vectors(dtype):
    eps = torch.finfo(dtype).eps
    x = torch.randn(2, 5, 5, dtype=dtype)
    for k in (1, 3, 5):
        values, vectors, kept = calls.eigenvectors(x, k, False, True)
        a = (0.5 * (x + x.mT)).double().requires_grad_()
        found = pmaf.ied(a, k, largest=False)
        near = torch.linalg.eigvalsh(a.detach()).diff(dim=-1).min()
        assert error(values, found.values) <= 32 * eps
        assert error(vectors, found.vectors) <= 64 * eps / near
        dl, dv = torch.randn_like(values), torch.randn_like(vectors)
        loss = (found.values * dl).sum() + (found.vectors * dv).sum()
        (expected,) = torch.autograd.grad(loss, a)
        dA = calls.eigenvectors_gradient(kept, dtype, dl, dv)
        assert error(dA, expected) <= 256 * eps / near**2
        # Each of them alone.
        only = calls.eigenvectors_gradient(kept, dtype, dl, None)
        both = only + calls.eigenvectors_gradient(kept, dtype, None, dv)
        assert error(both, expected) <= 256 * eps / near**2


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_the_span_of_a_repeated_eigenvalue_matters(dtype):
    eps = torch.finfo(dtype).eps
    values = torch.tensor([2.0, 2, 1, 0.5, 0.25], dtype=torch.float64)
    A, weight = rotated(values).to(dtype), torch.randn(5, 5, dtype=torch.float64)
    _, vectors, kept = calls.eigenvectors(A, 2, True, True)
    V = vectors.double().requires_grad_()
    (dv,) = torch.autograd.grad(((V @ V.mT) * weight).sum(), V)
    dA = calls.eigenvectors_gradient(kept, dtype, None, dv.to(dtype))
    a = A.double().requires_grad_()
    projector = pmaf.spectral(a, lambda x: torch.ones_like(x), 2)
    (expected,) = torch.autograd.grad((projector * weight).sum(), a)
    assert error(dA, 0.5 * (expected + expected.mT)) <= 256 * eps


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_of_the_range(dtype):
    info = torch.finfo(dtype)
    x = torch.randn(3, 3, dtype=torch.float64)
    x = (x + x.mT) / x.abs().amax()
    subnormal = info.tiny * 2.0**-6 if dtype == torch.float32 else info.tiny * 2.0**-20
    for scale in (info.max / 8, info.tiny, subnormal):
        A = (scale * x).to(dtype)
        values, vectors, kept = calls.eigenvectors(A, 2, True, True)
        # The entries of the smallest matrix have few digits themselves.
        found = pmaf.ied(A.double() / scale, 2)
        assert error(vectors, found.vectors) <= 64 * info.eps
        smallest = info.tiny * info.eps / scale
        assert error(values.double() / scale, found.values) <= max(8 * info.eps, smallest)
        dA = calls.eigenvectors_gradient(kept, dtype, None, torch.zeros_like(vectors))
        assert (dA == 0).all()
        dA = calls.eigenvectors_gradient(kept, dtype, torch.ones_like(values), None)
        assert error(dA, found.vectors @ found.vectors.mT) <= 64 * info.eps


@pytest.mark.parametrize("n", [2, 3, 9])
def test_an_entry_that_is_not_finite_stays_alone(n):
    A = torch.randn(5, n, n)
    A[1, 0, -1], A[3, -1, 0] = math.nan, math.inf
    good = torch.tensor([0, 2, 4])
    values, vectors, kept = calls.eigenvectors(A, 1, True, True)
    expected = calls.eigenvectors(A[good], 1, True, False)
    dA = calls.eigenvectors_gradient(kept, A.dtype, values, vectors)
    for x in (values, vectors, dA):
        assert x[good].isfinite().all()
        assert x[[1, 3]].isnan().all()
    assert (values[good] == expected[0]).all()
    assert (vectors[good] == expected[1]).all()


def test_layouts_of_a_batch(monkeypatch):
    x = torch.randn(2, 3, 2, 5, 5, dtype=torch.float64)
    x = x + x.mT
    cases = {
        "one": x[0, 0, 0],
        "batch": x[0, 0],
        "batches": x,
        "transposed": x.mT,
        "parts": x[:, ::2, :, 1:4, 1:4],
        "expanded": x[0, 0, 0].expand(3, 2, 5, 5),
        "permuted": x.permute(1, 0, 2, 3, 4),
        "last": x.permute(3, 4, 0, 1, 2).contiguous().permute(2, 3, 4, 0, 1),
        "empty": x[:, :0],
    }
    for name, A in cases.items():
        grids = counted(monkeypatch)
        solve = eigenvectors_of(2)
        A = A.detach().requires_grad_()
        values, vectors = solve(A)
        expected = pmaf.ied(A, 2)
        assert values.shape == expected.values.shape, name
        assert vectors.shape == expected.vectors.shape, name
        assert error(vectors, expected.vectors) <= 1e-12 if A.numel() else True, name
        # The gradient of a sum is expanded.
        (dA,), (dB,) = (
            torch.autograd.grad(x.sum() + y[..., 0].sum(-1).square().sum(), A)
            for x, y in ((values, vectors), expected)
        )
        assert dA.shape == A.shape
        if A.numel():
            assert error(dA, dB) <= 1e-11, name
            assert len(grids) == 2, name
        monkeypatch.undo()


def test_strides_of_gradients():
    A = torch.randn(2, 3, 4, 4)
    kept = calls.eigenvectors(A, 3, True, True)[2]
    dv = torch.randn(2, 4, 3, 3).permute(0, 2, 1, 3)
    expected = calls.eigenvectors_gradient(kept, A.dtype, None, dv.contiguous())
    assert (calls.eigenvectors_gradient(kept, A.dtype, None, dv) == expected).all()
    rows = dv.mT.contiguous().mT
    assert (calls.eigenvectors_gradient(kept, A.dtype, None, rows) == expected).all()


def test_the_executor_of_eigenvectors(monkeypatch):
    grids = counted(monkeypatch)
    solve = eigenvectors_of(None)
    A = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    values, vectors = solve(A)
    assert values.shape == (2,)
    assert vectors.shape == (2, 3)
    assert torch.autograd.gradcheck(solve, A)
    assert not solve(A.detach())[0].requires_grad
    assert set(grids) == {1}
    # What is differentiated twice takes the rule of the problem.
    assert torch.autograd.gradgradcheck(solve, A[:1], fast_mode=True)
    two = eigenvectors_of(2, largest=False)
    assert torch.autograd.gradcheck(two, A[:1], fast_mode=True)
    assert torch.autograd.gradgradcheck(two, A[:1], fast_mode=True)


def test_hooks_on_saved_tensors():
    A = torch.randn(2, 3, 3, requires_grad=True)
    solve = eigenvectors_of(None)
    (expected,) = torch.autograd.grad(solve(A)[1].square().sum() + solve(A)[1][0, 0], A)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.half(), lambda x: x.float()):
        _, vectors = solve(A)
    (found,) = torch.autograd.grad(vectors.square().sum() + vectors[0, 0], A)
    assert error(found, expected) <= 0.1


def nullspace_of(m, n, k=None, weighted=False):
    weights = torch.ones(m) if weighted else None
    names = ("A", "weights") if weighted else ("A",)
    problem = pmaf.PrincipalSingularVectors(torch.ones(m, n), weights, k, largest=False).bare()
    recipe = Recipe((), LaunchedNullVectors(problem, names))
    return lambda *given: recipe.run(dict(zip(names, given)))[0]


@pytest.mark.parametrize(
    ("m", "n"), [(1, 1), (2, 2), (1, 3), (5, 3), (9, 8), (8, 9), (20, 16), (33, 32)]
)
def test_null_vectors(m, n):
    eps = torch.finfo(torch.float32).eps
    A, weights = torch.randn(2, m, n), 0.5 + torch.rand(2, m)
    dv = torch.randn(2, n)
    for given in ((A,), (A, weights)):
        if len(given) == 2 and n > 16:
            continue
        mine = [x.clone().requires_grad_() for x in given]
        exact = [x.double().requires_grad_() for x in given]
        if m < n - 1:  # any vector of the null space
            assert error(A @ nullspace_of(m, n)(A).unsqueeze(-1), torch.zeros(2, m, 1)) <= 8 * eps
            continue
        u = nullspace_of(m, n, weighted=len(given) == 2)(*mine)
        expected = pmaf.nullspace(exact[0], weights=exact[1] if len(given) == 2 else None)
        root = exact[0] * exact[1].sqrt().unsqueeze(-1) if len(given) == 2 else exact[0]
        s = torch.linalg.svd(root.detach()).S
        s = torch.cat([s, s.new_zeros(2, n - m)], -1) if m < n else s
        near = float(((s[:, -2] - s[:, -1]) / s[:, 0]).min()) if n > 1 else 1.0
        assert error(u, expected) <= 8 * eps / near
        found = torch.autograd.grad((u * dv).sum(), mine)
        others = torch.autograd.grad((expected * dv).sum(), exact)
        size = max(float(x.abs().max()) for x in others) + float(dv.abs().max())
        for x, y in zip(found, others):
            assert (x - y).abs().max() <= 32 * eps / near**2 * size


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(5, 9, 4), (2, 4, 2), (9, 5, 2), (6, 3, 3)])
def test_spans_of_null_vectors(m, n, k, weighted):
    eps = torch.finfo(torch.float32).eps
    A, weights, W = torch.randn(2, m, n), 0.5 + torch.rand(2, m), torch.randn(n, n)
    given = (A, weights) if weighted else (A,)
    mine = [x.clone().requires_grad_() for x in given]
    exact = [x.double().requires_grad_() for x in given]
    V = nullspace_of(m, n, k, weighted)(*mine)
    X = pmaf.nullspace(exact[0], k, weights=exact[1] if weighted else None)
    root = exact[0] * exact[1].sqrt().unsqueeze(-1) if weighted else exact[0]
    s = torch.linalg.svd(root.detach()).S
    above = s[:, -k - 1] if m >= n and k < n else s[:, -1]
    below = s[:, -k] if m >= n and k < n else 0
    near = float(((above - below) / s[:, 0]).min())
    assert error(V @ V.mT, X @ X.mT) <= 16 * eps / near
    found = torch.autograd.grad(((V @ V.mT) * W).sum(), mine)
    others = torch.autograd.grad(((X @ X.mT) * W).sum(), exact)
    size = 1 + max(float(x.abs().max()) for x in others)
    for x, y in zip(found, others):
        assert (x - y).abs().max() <= 64 * eps / near**2 * size


def test_null_vectors_that_are_special():
    A = torch.randn(7, 6, 4)
    A[0], A[1] = 0, 1
    A[2] = torch.cat([torch.eye(4), torch.zeros(2, 4)])
    A[3, 2, 2] = math.nan
    A[4], A[5] = 1e30 * A[4], 1e-30 * A[4]
    weights = torch.ones(7, 6)
    weights[6, 2] = -1
    given = A.clone().requires_grad_(), weights.requires_grad_()
    u = nullspace_of(6, 4, weighted=True)(*given)
    good = torch.tensor([0, 1, 2, 4, 5])
    assert u[good].isfinite().all()
    assert u[[3, 6]].isnan().all()
    assert error(u[5], u[4].double()) <= 1e-5
    dA, dw = torch.autograd.grad((u * torch.randn_like(u))[good].sum(), given)
    assert dA[good].isfinite().all()
    assert dw[good].isfinite().all()


def test_singular_values_have_gradients():
    A = torch.randn(3, 6, 4)
    values, _, kept = calls.null_vectors(A, None, 2, False, True)
    a = A.double().requires_grad_()
    expected = torch.linalg.svdvals(a).flip(-1)[:, :2]
    assert error(values, expected) <= 1e-6
    d = torch.randn_like(values)
    dA, none = calls.null_vectors_gradient(kept, A, None, d, None)
    assert none is None
    assert error(dA, torch.autograd.grad((expected * d).sum(), a)[0]) <= 1e-6


def less_of():
    recipe = Recipe((), LaunchedLeastSquares(UNIT))
    return lambda A, b: recipe.run({"A": A, "b": b})[0]


@pytest.mark.parametrize(("m", "n"), [(2, 1), (2, 2), (5, 3), (8, 9), (9, 8), (20, 16), (40, 31)])
def test_least_squares(m, n):
    eps = torch.finfo(torch.float32).eps
    A, b = torch.randn(3, m, n), torch.randn(3, m)
    b[1] *= 20 * n**0.5  # outside of the sphere, and inside
    b[2] *= 0.2
    if m < n:
        b[2] *= 500  # the minimiser is not unique for short vectors
        b[0] *= 20 * n**0.5
    mine = A.clone().requires_grad_(), b.clone().requires_grad_()
    exact = A.double().requires_grad_(), b.double().requires_grad_()
    u, expected = less_of()(*mine), pmaf.less(*exact)
    assert (u.double().norm(dim=-1) - 1).abs().max() <= 4 * eps
    # Of all eigenvalues of the curvature on the tangent space the least decides.
    S = exact[0].detach().mT @ exact[0].detach()
    y = expected.detach()
    mu = (
        (
            y
            * ((exact[0] @ y.unsqueeze(-1)).squeeze(-1) - exact[1])
            .unsqueeze(-2)
            .matmul(exact[0])
            .squeeze(-2)
        )
        .sum(-1)
        .detach()
    )
    H = S - mu[:, None, None] * torch.eye(n, dtype=torch.float64)
    P = torch.eye(n, dtype=torch.float64) - y.unsqueeze(-1) * y.unsqueeze(-2)
    curved = torch.linalg.eigvalsh(
        P @ H @ P + H.norm(dim=(-2, -1))[:, None, None] * y.unsqueeze(-1) * y.unsqueeze(-2)
    )
    worst = float((curved[:, -1] / curved[:, 0]).max())
    assert error(u, expected) <= 4 * eps * worst
    v = torch.randn_like(u)
    found = torch.autograd.grad((u * v).sum(), mine)
    others = torch.autograd.grad((expected * v).sum(), exact)
    for x, y in zip(found, others):
        assert error(x, y) <= 8 * eps * worst


# A multiplier of 1e60 is infinite in float32.
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_hard_and_special_cases_of_least_squares():
    eps = torch.finfo(torch.float32).eps
    A, b = torch.randn(9, 6, 4), torch.randn(9, 6)
    A[0] = 0
    b[1] = 0
    A[2] = torch.cat([torch.diag(torch.tensor([3.0, 2, 2, 1])), torch.zeros(2, 4)])
    b[2] = torch.tensor([0.5, 0, 0, 0, 1, 2])  # no part along the smallest singular vector
    A[3] = torch.cat([torch.diag(torch.tensor([3.0, 2, 1, 1])), torch.zeros(2, 4)])
    b[3] = torch.tensor([0.5, 0.1, 0, 0, 0, 0])
    A[4] = 1
    A[5] *= 1e30
    b[5] *= 1e30
    A[6] *= 1e-37
    b[6] *= 1e-37
    A[7, 1, 1] = math.nan
    b[8, 2] = math.inf
    mine = A.clone().requires_grad_(), b.clone().requires_grad_()
    u = less_of()(*mine)
    assert u[:7].isfinite().all()
    assert u[7:].isnan().all()
    exact = A[:7].double(), b[:7].double()
    expected = pmaf.less(*exact)

    def objective(u):
        return ((exact[0] @ u.double().unsqueeze(-1)).squeeze(-1) - exact[1]).norm(dim=-1)

    size = exact[0].norm(dim=(-2, -1)) + exact[1].norm(dim=-1)
    assert (objective(u[:7]) <= objective(expected) + 4 * eps * size).all()
    single = pmaf.less(A[:7], b[:7])
    assert error(u[:7], single) <= 1e-4
    found = torch.autograd.grad((u * torch.randn_like(u))[:7].sum(), mine)
    assert all(x[:7].isfinite().all() for x in found)


def test_wide_least_squares_without_a_unique_solution():
    A, b = torch.randn(2, 3, 7, requires_grad=True), 0.05 * torch.randn(2, 3)
    u = less_of()(A, b)
    assert error(u.norm(dim=-1), torch.ones(2)) <= 1e-6
    assert ((A @ u.unsqueeze(-1)).squeeze(-1) - b).abs().max() <= 1e-5
    assert error(u, pmaf.less(A, b)) <= 1e-4
    (dA,) = torch.autograd.grad((u * torch.randn_like(u)).sum(), A)
    assert dA.isfinite().all()


def test_second_derivatives_of_float32():
    A, b = torch.randn(2, 5, 3, requires_grad=True), torch.randn(2, 5, requires_grad=True)
    v = torch.randn(2, 3)

    def twice(solve, *given):
        found = torch.autograd.grad((solve(*given) * v).sum(), given, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in found), given)

    for x, y in zip(twice(less_of(), A, b), twice(pmaf.less, A, b)):
        assert error(x, y) <= 1e-3
    for x, y in zip(twice(nullspace_of(5, 3), A), twice(pmaf.nullspace, A)):
        assert error(x, y) <= 1e-3


def test_one_launch_a_pass(monkeypatch):
    grids = counted(monkeypatch)
    A, b = torch.randn(4, 5, 3, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    weights = torch.rand(4, 5, requires_grad=True)
    less_of()(A, b).sum().backward()
    assert len(grids) == 2
    nullspace_of(5, 3, weighted=True)(A, weights).sum().backward()
    assert len(grids) == 4
    # Of inputs that need no gradient none is computed.
    less_of()(A.detach(), b).sum().backward()
    less_of()(A, b.detach()).sum().backward()
    nullspace_of(5, 3, weighted=True)(A.detach(), weights).sum().backward()
    assert len(grids) == 10


def test_accounts_say_what_is_known():
    problem = pmaf.PrincipalEigenvectors(torch.eye(3)).bare()
    for executor in (
        LaunchedEigenvectors(problem),
        LaunchedNullVectors(problem, ("A",)),
        LaunchedLeastSquares(UNIT),
    ):
        account = executor.account({})
        assert "one launch" in account.solver
        assert "never timed" in account.why
        assert "float64" in account.kept
    assert merge_tolerance(torch.float32) > 0
