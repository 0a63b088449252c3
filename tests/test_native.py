"""Compiled kernels: right for every size, shape, dtype, instruction set and number of threads."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import pmaf
from pmaf import native, recipe
from pmaf.solvers import Dense, Reduction, Secular
from pmaf_lab.bench.families import EIGEN, SQUARES
from tests.builds import variables_of
from tests.ied_cases import with_eigenvalues

pytestmark = pytest.mark.skipif(not native.available, reason=f"no kernels: {native.about}")
T = torch.float64
# From the smallest to those beyond the lanes of vectors, and beyond one vector.
SIZES = (1, 2, 3, 4, 5, 9, 16, 17, 31, 64, 130)
TALL_AND_WIDE = [(1, 1), (5, 1), (1, 5), (2, 2), (8, 3), (100, 9), (8, 9), (8, 64), (16, 128)]
TALL_AND_WIDE += [(17, 17), (64, 32), (20, 50), (3000, 5), (5, 3000)]


def matrices(family, batch, n, dtype=torch.float32):
    g = torch.Generator().manual_seed(n)
    return EIGEN[family](batch, n, g).to(dtype)


def gradient_of(A, k, v, d_values, **options):
    """The truth, in double precision, from all eigenvectors."""
    A = A.double().requires_grad_()
    values, vectors = pmaf.ied(A, k, solver=Dense(), **options)
    return torch.autograd.grad((vectors * v).sum() + (values * d_values).sum(), A)[0]


@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("dtype", [torch.float32, T], ids=str)
@pytest.mark.parametrize("batch", [1, 13])
@pytest.mark.parametrize("family", EIGEN)
def test_eigenpairs_and_gradients(family, batch, dtype, largest):
    eps = torch.finfo(dtype).eps
    for n in SIZES:
        if family == "wishart-deficient" and n < 4:
            continue
        A = matrices(family, batch, n, dtype)
        S = A.double()
        spectrum = torch.linalg.eigvalsh(S)
        size = spectrum.abs().amax(-1, keepdim=True).clamp_min(1e-300)
        for k in (1, 3)[: 1 + (n >= 9)]:
            leaf = A.clone().requires_grad_()
            values, vectors = pmaf.ied(leaf, k, largest=largest, descending=largest)
            rows = vectors.detach().double().mT
            exact = spectrum.flip(-1)[:, :k] if largest else spectrum[:, :k]
            # The error of a reduction grows with the size of the matrix, in double precision.
            bound = 4 * eps + 4 * n * torch.finfo(T).eps
            assert ((values.detach() - exact).abs() <= bound * size).all()
            rest = rows @ S - values.detach().double().unsqueeze(-1) * rows
            assert (rest.norm(dim=-1) <= 2 * bound * size).all()
            eye = torch.eye(k, dtype=T)
            assert ((rows @ rows.mT - eye).abs() <= 2 * bound).all()
            # A gradient has the error of a vector, which is that of the matrix over the gap.
            asked = torch.cat([exact, exact[:, -1:]], -1)
            if n > k:
                beyond = spectrum[:, -k - 1] if largest else spectrum[:, k]
                asked[:, -1] = beyond
                gap = asked.diff(dim=-1).abs().amin(-1)
            else:
                gap = size[:, 0]
            v, d = torch.cos(torch.arange(n * k, dtype=T)).reshape(n, k), torch.ones(k, dtype=T)
            loss = (vectors * v.to(dtype)).sum() + values.sum()
            (found,) = torch.autograd.grad(loss, leaf)
            # The sum of a vector may be zero: then rounding decides the sign of the truth.
            known = vectors.detach().double()
            options = dict(largest=largest, descending=largest, reference=known)
            wanted = gradient_of(A, k, v.to(dtype), d, **options)
            error = (found.double() - wanted).norm(dim=(-2, -1))
            allowed = 16 * bound * (size[:, 0] / gap.clamp_min(1e-300)) * wanted.norm(dim=(-2, -1))
            apart = gap > 1e3 * eps * size[:, 0]
            assert (error <= allowed + bound)[apart].all(), (n, k)
            assert found.isfinite().all()


@pytest.mark.parametrize("family", [*SQUARES, "zero"])
@pytest.mark.parametrize("batch", [1, 11])
def test_least_squares(family, batch):
    """Against a decomposition in double precision of the same float32 numbers."""
    eps = torch.finfo(torch.float32).eps
    for m, n in TALL_AND_WIDE:
        g = torch.Generator().manual_seed(m + n)
        A, b = SQUARES["outer" if family == "zero" else family](batch, m, n, g)
        b = 0 * b if family == "zero" else b
        solution = pmaf.solve(pmaf.SphereLeastSquares(A, b), solver=Reduction())
        assert solution.converged.all()
        assert ((solution.value.norm(dim=-1) - 1).abs() <= 4 * eps).all()
        wide = pmaf.SphereLeastSquares(A.double(), b.double())
        exact = pmaf.solve(wide, solver=Secular())
        scale = wide.scale()
        # A multiplier that float32 takes for that of the hard case is off by the noise of b.
        noise = 8 * eps * A.double().norm(dim=(-2, -1)) * b.double().norm(dim=-1)
        bound = 16 * eps * scale + noise
        assert ((solution.multiplier - exact.multiplier).abs() <= bound).all(), (m, n)
        assert (solution.gap >= 0).all()
        assert ((solution.gap - exact.gap).abs() <= bound).all(), (m, n)
        objective = wide.objective(solution.value.double()) - wide.objective(exact.value)
        assert (objective <= bound).all(), (m, n)
        assert (solution.residual <= 64 * eps).all()


def reduced(A, k=None, largest=True):
    """Eigenvectors as rows, and the reduction that the forward pass keeps."""
    numbers = native.reduction_numbers(A.shape[-1], A.dtype, k)
    reduction = A.new_empty((*A.shape[:-2], numbers), dtype=T)
    _, rows, failed = native.largest_pairs(A, k, largest, reduction=reduction)
    assert failed is None
    return rows, reduction


@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("dtype", [torch.float32, T], ids=str)
@pytest.mark.parametrize(("n", "k"), [(17, None), (20, 1), (32, 3), (63, 9), (128, None)])
def test_gradients_from_the_reduction_of_the_forward_pass(n, k, dtype, largest):
    """They are those that Cholesky's factorisation gives, and need no matrix."""
    A = matrices("goe", 5, n, dtype)
    y, reduction = reduced(A, k, largest)
    v, d = torch.cos(torch.arange(y.numel()).to(A)).view_as(y), y[..., 0]
    given = k or 1, v, d, largest
    wanted = native.eigenvector_gradient(A, y, *given).tensors[0]
    found = native.eigenvector_gradient(A, y, *given, reduction).tensors[0]
    blind = native.eigenvector_gradient(torch.zeros_like(A), y, *given, reduction).tensors[0]
    assert torch.equal(found, blind)
    spectrum = torch.linalg.eigvalsh(A.double())
    asked = (spectrum if largest else -spectrum.flip(-1))[:, -(k or 1) - 1 :]
    gap = asked.diff(dim=-1).amin(-1) / spectrum.abs().amax(-1)
    # Both have the errors of a reduction or of a factorisation in double precision, over the gap.
    rounding = 16 * n * torch.finfo(T).eps / gap + 2 * torch.finfo(dtype).eps
    error = (found - wanted).double().norm(dim=(-2, -1)) / wanted.double().norm(dim=(-2, -1))
    assert (error <= rounding).all()


@pytest.mark.parametrize("k", [None, 2])
def test_a_kept_reduction_serves_every_backward_pass(k):
    """Another of the same graph, one of a transposed matrix, and one that is differentiated."""
    A = matrices("gap-0.3", 2, 17, T)
    leaf, other = A.clone().requires_grad_(), A.clone().requires_grad_()

    def solve(x):
        return tuple(pmaf.ied(x + x.mT, k))

    assert gradcheck(solve, leaf, fast_mode=True)
    assert gradgradcheck(solve, leaf, fast_mode=True)
    loss = pmaf.ied(leaf, k).vectors.sum()
    first, second = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    (turned,) = torch.autograd.grad(pmaf.ied(other.mT, k).vectors.sum(), other)
    torch.testing.assert_close(turned, first)


@pytest.mark.parametrize("k", [None, 1, 3])
def test_repeated_eigenvalues_are_not_differentiated_by_the_reduction(k):
    """It has no solution of least norm; the other way has, and one entry does not change others."""
    n = 20
    simple, repeated = torch.arange(n) + 1.0, torch.arange(n) + 1.0
    repeated[-1 - (k or 1) :] = n
    A = torch.stack([with_eigenvalues(x.tolist(), 1) for x in (simple, repeated, simple)])
    y, reduction = reduced(A, k)
    v = torch.cos(torch.arange(y.numel()).to(A)).view_as(y)
    by_factor = native.eigenvector_gradient(A, y, k or 1, v, None).tensors[0]
    found = native.eigenvector_gradient(A, y, k or 1, v, None, True, reduction).tensors[0]
    assert torch.equal(found[1], by_factor[1])
    assert not torch.equal(found[0], by_factor[0])
    blind = A * torch.tensor([0.0, 1.0, 0.0]).to(A).view(3, 1, 1)
    again = native.eigenvector_gradient(blind, y, k or 1, v, None, True, reduction).tensors[0]
    assert torch.equal(found, again)


@pytest.mark.parametrize("n", [9, 17, 40])
@pytest.mark.parametrize("k", [None, 2])
def test_matrices_that_are_solved_together_do_not_touch_each_other(n, k):
    """Of many, the tridiagonal matrices are in the lanes of vectors; of few, lanes are empty."""
    A = torch.cat([matrices(family, 3, n) for family in EIGEN])
    every = native.largest_pairs(A, k)
    for few in (3, 5):
        part = native.largest_pairs(A[:few], k)
        assert torch.equal(part.vectors, every.vectors[:few])
        assert torch.equal(part.values, every.values[:few])


@pytest.mark.parametrize("n", [17, 40])
@pytest.mark.parametrize("k", [None, 2, 3])
def test_matrices_that_are_differentiated_together_do_not_touch_each_other(n, k):
    """Their tridiagonal systems are in lanes, and some are refined, or left to Cholesky's way."""
    values = torch.arange(n) + 1.0
    repeated, close = values.clone(), values.clone()
    repeated[-1 - (k or 1) :] = n
    close[-1 - (k or 1)] = close[-(k or 1)] - 1e-5
    made = [with_eigenvalues(x.tolist(), i) for i, x in enumerate((values, repeated, close))]
    A = torch.cat([torch.stack(made), *(matrices(family, 3, n, T) for family in EIGEN)])
    y, reduction = reduced(A, k)
    v, d = torch.cos(torch.arange(y.numel()).to(A)).view_as(y), y[..., 0]
    every, failed = native.eigenvector_gradient(A, y, k or 1, v, d, True, reduction)
    assert failed is None
    for count in (1, 2, 3, 7, 9):
        for start in (0, 1, len(A) - count):
            part = slice(start, start + count)
            given = y[part], k or 1, v[part], d[part], True, reduction[part]
            (alone,), failed = native.eigenvector_gradient(A[part], *given)
            assert failed is None
            assert torch.equal(alone, every[0][part])


def test_close_eigenvalues_of_a_matrix_that_does_not_fall_into_blocks():
    """Twisted factorisations give vectors that depend on each other; inverse iteration does not."""
    A = matrices("laplacian", 1000, 9)
    values, rows, failed = native.largest_pairs(A, 3)
    assert failed is None
    rows, values = rows.double(), values.double()
    eps, eye = torch.finfo(torch.float32).eps, torch.eye(3, dtype=T)
    size = values.abs().amax(-1)[:, None, None]
    assert ((rows @ rows.mT - eye).abs() <= 4 * eps).all()
    assert ((rows @ A.double() - values.unsqueeze(-1) * rows).abs() <= 8 * eps * size).all()


def triples():
    """Three eigenvalues: apart at either end, equal, or as close as 1 and 1 − 2^−i."""
    close = [(1.0, 1 - 2.0**-i, other) for i in range(1, 54) for other in (-2.0, -1.0, 0.0, 0.5)]
    low = [(-a, -b, -c) for a, b, c in close]
    equal = [(1, 1, 1), (0, 0, 0), (1, 1, -2), (2, -1, -1), (1, 0, -1), (1, 0, 0), (0, 0, -1)]
    far = [(1e30, 1, 1), (1, 1, -1e30), (1 + 2.0**-40, 1, 1 - 2.0**-40), (1e-30, 0, -1e-30)]
    return torch.tensor([*close, *low, *equal, *far], dtype=T)


@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("scale", [1.0, 2.0**-900, 2.0**900])
def test_three_eigenvalues_however_close(scale, largest):
    """3×3 matrices have a way of their own, in closed form, which has to keep all digits."""
    values = triples().sort(-1).values
    g = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(len(values), 3, 3, dtype=T, generator=g)).Q
    A = (Q * values.unsqueeze(-2)) @ Q.mT
    A = 0.5 * (A + A.mT)
    eps, size = torch.finfo(T).eps, values.abs().amax(-1).clamp_min(1e-300)
    leaf = (scale * A).requires_grad_()
    found, y = pmaf.ied(leaf, largest=largest)
    exact = torch.linalg.eigvalsh(A)[:, -1 if largest else 0]
    assert ((found.detach() / scale - exact).abs() <= 16 * eps * size).all()
    assert ((y.detach().norm(dim=-1) - 1).abs() <= 4 * eps).all()
    rest = (A @ y.detach().unsqueeze(-1)).squeeze(-1) - (found / scale).detach().unsqueeze(-1) * y
    assert (rest.norm(dim=-1) <= 16 * eps * size).all()
    v = torch.randn(len(values), 3, dtype=T, generator=g)
    (dA,) = torch.autograd.grad((y * v).sum(), leaf)
    assert dA.isfinite().all()
    gaps = (values - values[:, -1:] if largest else values[:, :1] - values).abs()
    gap = gaps.sort(-1).values[:, 1]
    simple = gap > 1e-6 * size
    truth = gradient_of(A[simple], None, v[simple], torch.zeros(1, dtype=T), largest=largest)
    error = (scale * dA[simple] - truth).flatten(1).norm(dim=-1)
    # Rounding of A turns y by eps/gap, and changes the gap by as much, relatively.
    condition = size[simple] / gap[simple]
    assert (error <= 64 * eps * condition * v[simple].norm(dim=-1) / gap[simple]).all()


@pytest.mark.parametrize(("m", "n"), [s for s in TALL_AND_WIDE if s[1] < 200], ids=str)
@pytest.mark.parametrize("family", ["inner", "outer", "ill-conditioned", "zero"])
def test_gradients_of_least_squares(family, m, n):
    eps = torch.finfo(torch.float32).eps
    g = torch.Generator().manual_seed(m + n)
    A, b = SQUARES["outer" if family == "zero" else family](7, m, n, g)
    b = 0 * b if family == "zero" else b
    v = torch.randn(7, n, generator=g)

    def gradients(dtype, solver):
        leaves = [x.to(dtype).requires_grad_() for x in (A, b)]
        u = pmaf.less(*leaves, solver=solver)
        return u.detach(), torch.autograd.grad((u * v.to(dtype)).sum(), leaves)

    u, found = gradients(torch.float32, Reduction())
    short, same = gradients(torch.float32, None)  # the short call takes the same kernels
    assert all(torch.equal(x, y) for x, y in zip((u, *found), (short, *same), strict=True))
    exact, wanted = gradients(T, Secular())
    torch.testing.assert_close(u.double(), exact, rtol=0, atol=1e4 * eps)
    # The roundings E of A and δ of u give dA and db errors of ‖E‖‖z‖ and of ‖A‖ times that of z,
    # and z is divided by the smallest curvature on the tangent space.
    H = A.double().mT @ A.double()
    solution = pmaf.solve(pmaf.SphereLeastSquares(A.double(), b.double()), solver=Secular())
    H = H + solution.multiplier[:, None, None] * torch.eye(n, dtype=T)
    P = torch.eye(n, dtype=T) - exact.unsqueeze(-1) * exact.unsqueeze(-2)
    inverse = torch.linalg.pinv(P @ H @ P, rtol=1e-9, hermitian=True)
    condition = torch.linalg.matrix_norm(inverse, 2) * torch.linalg.matrix_norm(H, 2)
    for x, y in zip(found, wanted, strict=True):
        size = (A.double().norm(dim=(-2, -1)) + b.double().norm(dim=-1)) * v.norm(dim=-1)
        size = size * torch.linalg.matrix_norm(inverse, 2)
        error = (x.double() - y).flatten(1).norm(dim=-1)
        assert (error <= 64 * eps * (1 + condition) * size).all()


KEPT_MINIMA = ["simple", "close", "nearly singular", "singular"]


def kept_minima(m, n, spectrum, kind, scale):
    """Problems whose smallest singular value is by itself, and whose b makes them of a kind."""
    g = torch.Generator().manual_seed(m + n)
    p, batch = min(m, n), 9
    left, right = (
        torch.linalg.qr(torch.randn(batch, size, p, generator=g, dtype=T)).Q for size in (m, n)
    )
    s = torch.linspace(2, 1, p, dtype=T)
    if spectrum == "close":
        s[-2] = 1 + 1e-4
    elif m >= n:
        s[-1] = {"simple": 1.0, "nearly singular": 1e-3, "singular": 0.0}[spectrum]
    parts = torch.randn(batch, p, generator=g, dtype=T)
    if kind == "hard":
        parts[:, -1] = 0
    parts *= {"inner": 0.5, "outer": 3.0, "hard": 0.5, "zero": 0.0}[kind] / norms(parts)
    A, b = (left * s) @ right.mT, (left @ (s * parts).unsqueeze(-1)).squeeze(-1)
    v = torch.randn(batch, n, generator=g)
    return (scale * A).float(), (scale * b).float(), v


def norms(x):
    return x.flatten(1).norm(dim=1)[:, None]


@pytest.mark.parametrize("scale", [1.0, 1e9, 1e-12])
@pytest.mark.parametrize("kind", ["inner", "outer", "hard", "zero"])
@pytest.mark.parametrize("spectrum", KEPT_MINIMA)
@pytest.mark.parametrize(("m", "n"), [(17, 17), (40, 18), (64, 33), (17, 40), (20, 21)])
def test_gradients_from_the_reduction_of_least_squares(m, n, spectrum, kind, scale):
    """Against its linear system, solved in double precision at the same u."""
    A, b, v = kept_minima(m, n, spectrum, kind, scale)
    u, multiplier, _, numbers, failed = native.least_squares(A, b)
    assert failed is None
    found = native.least_squares_gradient(A, b, u, v, multiplier, numbers, (True, True))
    assert found.failed is None
    # In units of the scale.
    W, c, mu = A.double() / scale, b.double() / scale, multiplier[:, None, None] / scale**2
    y = u.double() / norms(u.double())
    P = torch.eye(n, dtype=T) - y.unsqueeze(-1) * y.unsqueeze(-2)
    H = W.mT @ W + mu * torch.eye(n, dtype=T)
    # Where there are many minimisers the system is singular, and the shortest solution counts.
    inverse = torch.linalg.pinv(P @ H @ P, rtol=1e-9, hermitian=True)
    z = (inverse @ v.double().unsqueeze(-1)).squeeze(-1)
    image, r = (W @ z.unsqueeze(-1)).squeeze(-1), (W @ y.unsqueeze(-1)).squeeze(-1) - c
    dA = -(r.unsqueeze(-1) * z.unsqueeze(-2) + image.unsqueeze(-1) * y.unsqueeze(-2))
    # The results are rounded; before that there are errors of two solutions in double precision.
    bounds, norm = torch.linalg.matrix_norm(inverse, 2), torch.linalg.matrix_norm(H, 2)
    rounding = 64 * n * torch.finfo(T).eps * (bounds * norm).unsqueeze(-1)
    size = (torch.linalg.matrix_norm(W, 2).unsqueeze(-1) + norms(r)) * norms(z)
    for x, exact in zip(found.tensors, (dA, image), strict=True):
        error = norms(scale * x.double() - exact)
        assert (error <= torch.finfo(x.dtype).eps * norms(exact) + rounding * size).all()


@pytest.mark.parametrize(("m", "n"), [(40, 18), (64, 33), (80, 40)])
def test_gradients_from_the_reduction_of_ill_conditioned_least_squares(m, n):
    """Rounding errors of the reduction, times the condition of `AᵀA`, are removed by products.

    The singular values of `A` itself have errors of its condition alone.
    """
    g = torch.Generator().manual_seed(m)
    left, right = (
        torch.linalg.qr(torch.randn(20, size, n, generator=g, dtype=T)).Q for size in (m, n)
    )
    A = (left * torch.logspace(0, -5, n, dtype=T) @ right.mT).float()
    x, v = (torch.randn(20, n, generator=g) for _ in range(2))
    # Slightly beyond the sphere, the multiplier is small.
    b = (A.double() @ (1.1 * x / norms(x)).double().unsqueeze(-1)).squeeze(-1).float()
    u, multiplier, _, numbers, failed = native.least_squares(A, b)
    assert failed is None
    found = native.least_squares_gradient(A, b, u, v, multiplier, numbers, (True, True)).tensors
    U, S, Vh = torch.linalg.svd(A.double(), full_matrices=False)
    y = u.double() / norms(u.double())
    into, seen = ((Vh @ x.double().unsqueeze(-1)).squeeze(-1) for x in (v, y))
    D = S.square() + multiplier[:, None]
    into, along = into / D, seen / D
    z = into - (seen * into).sum(-1, keepdim=True) / (seen * along).sum(-1, keepdim=True) * along
    image = (U @ (S * z).unsqueeze(-1)).squeeze(-1)
    z, r = (z.unsqueeze(-2) @ Vh).squeeze(-2), (A.double() @ y.unsqueeze(-1)).squeeze(-1) - b
    dA = -(r.unsqueeze(-1) * z.unsqueeze(-2) + image.unsqueeze(-1) * y.unsqueeze(-2))
    assert (D.amax(-1) > 1e8 * D.amin(-1)).any()  # beyond what the reduction alone solves
    # The results are rounded to nearest.
    bound = torch.finfo(A.dtype).eps / 2 + 64 * n * torch.finfo(T).eps * (S[:, :1] / S[:, -1:])
    for x, exact in zip(found, (dA, image), strict=True):
        assert (norms(x.double() - exact) <= bound * norms(exact)).all()


@pytest.mark.parametrize(("m", "n"), [(40, 20), (20, 40)])
def test_the_reduction_of_least_squares_is_what_is_differentiated(m, n):
    """One that is marked as missing is replaced by a factor, with the same result; others are used.

    What is kept serves every backward pass, and is not written to.
    """
    A, b, v = kept_minima(m, n, "simple", "outer", 1.0)
    u, multiplier, _, numbers, _ = native.least_squares(A, b)
    before = numbers.clone()

    def gradients(kept):
        return native.least_squares_gradient(A, b, u, v, multiplier, kept, (True, True)).tensors

    found = gradients(numbers)
    assert all(torch.equal(x, y) for x, y in zip(found, gradients(numbers), strict=True))
    assert torch.equal(numbers, before)
    missing = native.least_squares(torch.full_like(A, torch.nan), b)
    assert missing.failed is not None
    for kept in (missing.numbers, None):
        for x, y in zip(found, gradients(kept), strict=True):
            assert (norms((x - y).double()) <= 4 * torch.finfo(x.dtype).eps * norms(y)).all()
    other = native.least_squares(2 * A, b).numbers
    assert not torch.allclose(gradients(other)[0], found[0], rtol=1e-2)


def test_no_reduction_of_least_squares_is_kept_without_a_graph(monkeypatch):
    A, b, _ = kept_minima(40, 20, "simple", "outer", 1.0)
    asked, solve = [], native.least_squares
    monkeypatch.setattr(native, "least_squares", lambda *x: asked.append(x[2]) or solve(*x))
    pmaf.less(A, b)
    with torch.no_grad():
        pmaf.less(A.requires_grad_(), b)
    pmaf.less(A, b)
    assert asked == [False, False, True]


@pytest.mark.parametrize(("m", "n"), [(6, 4), (3, 5)])
def test_gradients_of_least_squares_that_fail_take_the_common_path_alone(m, n, caplog):
    """Every u is a minimiser for a matrix of zeros."""
    caplog.set_level("DEBUG", logger="pmaf")
    g = torch.Generator().manual_seed(0)
    A, b, v = (torch.randn(1000, *shape, generator=g) for shape in ((m, n), (m,), (n,)))
    A[[3, 998]] = 0

    def gradients(chosen, **options):
        leaves = [x[chosen].clone().requires_grad_() for x in (A, b)]
        return torch.autograd.grad((pmaf.less(*leaves, **options) * v[chosen]).sum(), leaves)

    whole = gradients(slice(None))
    taken = {x.getMessage() for x in caplog.records}
    assert {"less: reduction", "tangent: compiled", "tangent: common path for some"} <= taken
    for chosen, options in (([3, 998], {"solver": Secular()}), ([2, 4, 997, 999], {})):
        for x, y in zip(whole, gradients(chosen, **options), strict=True):
            bound = 64 * torch.finfo(x.dtype).eps * (1 + float(y.abs().max()))
            torch.testing.assert_close(x[chosen], y, rtol=0, atol=bound)


def test_second_derivatives():
    A = with_eigenvalues([2.0, 1.0, 0.4, -0.3, -1.0, -2.0]).requires_grad_()
    for k in (None, 2):
        assert gradcheck(lambda A, k=k: pmaf.ied(A, k, solver=Reduction()), A)
        assert gradgradcheck(lambda A, k=k: pmaf.ied(A, k, solver=Reduction()), A)
    g = torch.Generator().manual_seed(0)
    A, b = torch.randn(3, 6, 4, generator=g), torch.randn(3, 6, generator=g)

    def second(dtype, solver, scale):
        x = (scale * A).to(dtype).requires_grad_()
        c = (scale * b).to(dtype).requires_grad_()
        loss = pmaf.less(x, c, solver=solver).sin().sum()
        first = torch.autograd.grad(loss, (x, c), create_graph=True)
        total = sum((d * scale).square().sum() for d in first)
        return [scale * d for d in torch.autograd.grad(total, (x, c))]

    for scale in (1.0, 2.0**80, 2.0**-80):  # at the last two, squares leave the range of float32
        exact = second(T, Secular(), scale)
        for solver in (Reduction(), None):
            for x, y in zip(second(torch.float32, solver, scale), exact, strict=True):
                torch.testing.assert_close(x.double(), y, rtol=1e-3, atol=1e-3)


class TestShortCallOfLeastSquares:
    """The default call on plain float32 tensors skips the objects of the common path."""

    def problem(self, *batch):
        g = torch.Generator().manual_seed(5)
        return torch.randn(*batch, 6, 4, generator=g), torch.randn(*batch, 6, generator=g)

    @pytest.fixture
    def common(self, monkeypatch):
        """The calls that take the common path."""
        calls, end = [], recipe.end

        def counted(problem, *args, **kwargs):
            calls.append(problem)
            return end(problem, *args, **kwargs)

        monkeypatch.setattr(recipe, "end", counted)
        return calls

    def test_it_is_taken_where_it_may_be(self, caplog, common):
        caplog.set_level("DEBUG", logger="pmaf")
        A, b = self.problem(3)
        for leaves in ((True, True), (True, False), (False, True)):
            given = [x.clone().requires_grad_(need) for x, need in zip((A, b), leaves)]
            u = pmaf.less(*given)
            assert not common
            caplog.clear()
            u.sum().backward()
            assert caplog.messages == ["tangent: compiled"]
            assert [x.grad is not None for x in given] == list(leaves)

    @pytest.mark.parametrize(
        "change",
        [
            lambda A, b: (A[0], b),  # one matrix for many b
            lambda A, b: (A, b[0]),
            lambda A, b: (A.to_sparse(), b),
            lambda A, b: (A[:0], b[:0]),
        ],
        ids=["shared A", "shared b", "sparse", "no entries"],
    )
    def test_other_calls_take_the_common_path(self, change, common):
        A, b = change(*self.problem(3))
        if A.layout != torch.strided:
            A, b = self.problem()[0].to_sparse(), self.problem()[1]
        u = pmaf.less(A, b.requires_grad_())
        assert common
        dense = A.to_dense() if A.layout != torch.strided else A
        problem = pmaf.SphereLeastSquares(dense.double(), b.detach().double())
        exact = pmaf.solve(problem, solver=Secular()).value
        # The solve is in float32 or better, by products for the sparse matrix; then u is rounded.
        computed = torch.finfo(torch.promote_types(A.dtype, torch.float32)).eps
        atol = 1e3 * computed + torch.finfo(A.dtype).eps
        torch.testing.assert_close(u.detach().double(), exact, rtol=0, atol=atol)

    def test_entries_that_kernels_do_not_solve(self):
        """Both lowest singular values of one entry are equal, and its b is zero."""
        A, b = self.problem(3)
        A[1], b[1] = torch.eye(6, 4), 0
        found, again = pmaf.less(A, b), pmaf.less(A, b, solver=Reduction())
        assert torch.equal(found, again)

    @pytest.mark.parametrize(
        ("A", "b", "message"),
        [
            (torch.ones(3, 2), torch.ones(2), r"needs b of shape \(\*, 3\)"),
            (torch.ones(3), torch.ones(3), "A must"),
            (torch.ones(3, 2), torch.tensor(1.0), "b must"),
            (torch.ones(3), torch.tensor(1.0), "A must"),
            (torch.ones(3, 2), torch.ones(3).double(), "float64"),
        ],
    )
    def test_wrong_arguments_get_the_usual_messages(self, A, b, message):
        with pytest.raises((TypeError, ValueError), match=message):
            pmaf.less(A, b)

    def test_true_is_no_radius(self):
        with pytest.raises(TypeError, match="radius must be a number; got bool"):
            pmaf.less(*self.problem(), radius=True)


@pytest.mark.parametrize("n", [2, 3, 9, 20])
@pytest.mark.parametrize("scale", [1.0, 1e-38, 1e-30, 1e30, 1e38])
def test_equal_and_nearly_equal_eigenvalues_at_any_scale(n, scale):
    """Zero, multiples of the identity, small integers whose eigenvalues repeat exactly."""
    g = torch.Generator().manual_seed(4)
    x = torch.randint(-9, 10, (200, n, 1), generator=g).float()
    c, d = torch.randint(-9, 10, (2, 200, 1, 1), generator=g).float()
    A = c * x @ x.mT + d * torch.eye(n)
    A[0], A[1], A[2] = 0, torch.eye(n), torch.ones(n, n)
    A = A / A.abs().amax() / n * scale  # so that no eigenvalue overflows
    exact = torch.linalg.eigvalsh(A.double())
    size = exact.abs().amax(-1).clamp_min(1e-300)
    eps = torch.finfo(torch.float32).eps
    for largest, value in ((True, exact[:, -1]), (False, exact[:, 0])):
        leaf = A.clone().requires_grad_()
        values, vectors = pmaf.ied(leaf, largest=largest)
        subnormal = torch.finfo(torch.float32).tiny * eps
        assert ((values.detach() - value).abs() <= 2 * eps * size + subnormal).all()
        y = vectors.detach().double()
        rest = (A.double() @ y.unsqueeze(-1)).squeeze(-1) - value.unsqueeze(-1) * y
        assert (rest.norm(dim=-1) <= 4 * n * eps * size + subnormal).all()
        (gradient,) = torch.autograd.grad((vectors.sum() + values.sum()), leaf)
        assert gradient.isfinite().all() or scale < 1e-30  # 1/gap is out of range there


@pytest.mark.parametrize("n", [3, 9, 40])
def test_one_bad_entry_is_named_and_others_are_not_lost(n):
    A = matrices("goe", 100, n)
    A[7, 0, 1] = torch.nan
    with pytest.raises(ValueError, match="A has non-finite values in 1 of 100"):
        pmaf.ied(A)
    with pytest.raises(ValueError, match="A has non-finite values in 1 of 100"):
        pmaf.less(A, torch.ones(100, n))
    # Equal requested eigenvalues are decomposed; their neighbours in the batch are not affected.
    A = matrices("goe", 100, n)
    A[7] = torch.eye(n)
    if n >= 9:
        all_, others = pmaf.ied(A, 3), pmaf.ied(A[8:], 3)
        torch.testing.assert_close(all_.vectors[8:], others.vectors)
        V = all_.vectors[7]
        torch.testing.assert_close(V.mT @ V, torch.eye(3))


PROGRAM = """
import hashlib, json, sys, torch, pmaf
from pmaf import native
from pmaf_lab.bench.families import EIGEN, SQUARES
out = {"about": native.about}
def pair(batch, n, dtype):
    g = torch.Generator().manual_seed(n)
    A, X = (torch.randn(batch, n, n, generator=g, dtype=dtype) for _ in range(2))
    return A + A.mH, X @ X.mH / n + torch.eye(n, dtype=dtype)
for threads in (1, 2, 4):
    torch.set_num_threads(threads)
    digest = hashlib.sha256()
    for batch, n, k in [(2000, 3, None), (500, 9, None), (500, 9, 3), (9, 64, None), (5, 128, 2)]:
        A = EIGEN["goe"](batch, n, torch.Generator().manual_seed(n)).requires_grad_()
        values, vectors = pmaf.ied(A, k)
        (vectors.sum() + values.sum()).backward()
        for x in (values, vectors, A.grad):
            digest.update(x.detach().numpy().tobytes())
    for batch, m, n in [(1000, 2, 2), (300, 100, 9), (200, 8, 64), (40, 64, 32)]:
        A, b = SQUARES["outer"](batch, m, n, torch.Generator().manual_seed(n))
        A.requires_grad_()
        u = pmaf.less(A, b)
        u.sum().backward()
        for x in (u, A.grad):
            digest.update(x.detach().numpy().tobytes())
    for batch, n, k in [(2000, 3, None), (500, 9, 3), (40, 33, None), (9, 64, 2)]:
        for dtype in (torch.float32, torch.complex64):
            A, M = pair(batch, n, dtype)
            A.requires_grad_()
            M.requires_grad_()
            for metric in (None, M):
                values, vectors = pmaf.ied(A, k, M=metric)
                (vectors.real.sum() + values.sum()).backward()
                for x in (values, vectors, A.grad):
                    digest.update(x.detach().numpy().tobytes())
            digest.update(M.grad.numpy().tobytes())
    out[threads] = digest.hexdigest()
A = EIGEN["wishart"](40, 12, torch.Generator().manual_seed(0))
out["values"] = pmaf.ied(A).values.tolist()
for name, dtype in (("real", torch.float64), ("complex", torch.complex128)):
    for n in (6, 20):
        A, M = pair(5, n, dtype)
        A.requires_grad_()
        M.requires_grad_()
        for metric in (None, M):
            values, vectors = pmaf.ied(A, 2, M=metric)
            ((vectors * vectors.conj()).real[:, 0].sum() + vectors.real.sum()).backward()
            parts = (values + 0j, vectors + 0j, A.grad + 0j)
            flat = [torch.view_as_real(x.detach()).flatten() for x in parts]
            out[f"{name} {n} {metric is None}"] = torch.cat(flat).tolist()
print(json.dumps(out))
"""


CLOSE = {"rtol": 1e-8, "atol": 1e-8}
NAMES = [
    f"{name} {n} {one}" for name in ("real", "complex") for n in (6, 20) for one in (True, False)
]


def run(setting):
    environment = os.environ | variables_of(setting)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(ended.stdout)


@pytest.mark.xdist_group("instruction sets")
def test_the_same_bits_with_any_number_of_threads_and_the_same_answers_without_kernels():
    plain = run("0")
    assert "PMAF_NATIVE=0" in plain["about"]
    seen = 0
    for setting in ("baseline", "avx2", "avx512"):
        found = run(setting)
        if found["about"] != setting:  # the processor does not have it, and `about` says so
            assert setting in found["about"]
            continue
        seen += 1
        assert found["1"] == found["2"] == found["4"]
        torch.testing.assert_close(torch.tensor(found["values"]), torch.tensor(plain["values"]))
        for name in NAMES:
            # Gaps and sums are at least 1e-2, so that gradients lose at most half of the digits.
            wanted = torch.tensor(plain[name], dtype=T)
            torch.testing.assert_close(torch.tensor(found[name], dtype=T), wanted, **CLOSE)
    assert seen > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_solves_too():
    """As the workers of a data loader do, which have none of the threads of their parent."""
    A = matrices("goe", 20_000, 9)
    wanted = pmaf.ied(A).values
    # A fresh process, because torch's own threads do not survive a fork, and this one has them.
    program = """
import os, sys, torch, pmaf
from pmaf_lab.bench.families import EIGEN
A = EIGEN["goe"](20_000, 9, torch.Generator().manual_seed(9))
first = pmaf.ied(A).values.sum()
for threads in (1, 2):
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(threads)
        os._exit(0 if pmaf.ied(A).values.sum() == first else 1)
    assert os.waitpid(pid, 0)[1] == 0
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
    assert wanted.isfinite().all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_before_threads_were_used_has_all_of_them():
    """As those that `pmaf bench` measures in."""
    program = """
import os, torch, pmaf
from pmaf import native
from pmaf_lab.bench.families import EIGEN
torch.set_num_threads(2)
for early in (False, True):
    pid = os.fork()
    if pid == 0:
        if early:
            native.forked_early()
        pmaf.ied(EIGEN["goe"](20_000, 9, torch.Generator().manual_seed(9)))
        os._exit(0 if native._library.pmaf_regions() == early else 1)
    assert os.waitpid(pid, 0)[1] == 0
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)


def test_calls_do_not_gather_memory():
    resource = pytest.importorskip("resource")
    A, b = matrices("goe", 8, 6), torch.ones(8, 6)

    def many(times):
        for _ in range(times):
            leaf = A.clone().requires_grad_()
            (pmaf.ied(leaf).vectors.sum() + pmaf.less(leaf, b).sum()).backward()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = many(300)
    after = many(3000)
    assert after - before < 4096  # kilobytes; one float a call would be more than that by 10⁶ calls


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_a_million_calls_do_not_gather_memory():
    """Resident memory grows by less than one byte a call, which is less than any leak."""
    calls, page = 10**6, os.sysconf("SC_PAGESIZE")
    A, b = matrices("goe", 2, 3), torch.ones(2, 3)
    v, y = torch.ones(2, 3), native.largest_pairs(A, None).vectors
    M = 2 * torch.eye(3).expand(2, 3, 3).contiguous()
    kept = native.largest_of_pair(A, M, None, True, True)[1]
    u, multiplier, _, gram, _ = native.least_squares(A, b)
    needs = True, True
    assert kept is not None
    functions = [
        lambda: native.largest_pairs(A, None),
        lambda: native.eigenvector_gradient(A, y, 1, v, None),
        lambda: native.largest_of_pair(A, M, None, True, True),
        lambda: native.pair_gradients(kept, v, None, A.dtype, True, needs),
        lambda: native.least_squares(A, b),
        lambda: native.least_squares_gradient(A, b, u, v, multiplier, gram, needs),
    ]

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * page

    sizes = []
    for many in (calls // 10, calls - calls // 10):
        for i in range(many):
            functions[i % len(functions)]()
        sizes.append(resident())
    assert sizes[1] - sizes[0] < calls - calls // 10


def test_transposed_and_strided_inputs():
    A = matrices("goe", 6, 12)
    for given in (A.mT, A[::2], A[:, ::2, ::2], A.expand(2, 6, 12, 12)):
        leaf = given.clone().requires_grad_()
        view = given.detach().requires_grad_()
        found, wanted = pmaf.ied(view), pmaf.ied(leaf)
        torch.testing.assert_close(found.vectors, wanted.vectors)
        (x,) = torch.autograd.grad(found.vectors.sum(), view)
        (y,) = torch.autograd.grad(wanted.vectors.sum(), leaf)
        torch.testing.assert_close(x, y)


def test_a_start_chooses_among_several_minimisers():
    g = torch.Generator().manual_seed(3)
    A, b = torch.randn(6, 7, 4, generator=g), torch.zeros(6, 7)
    b[3:] = torch.randn(3, 7, generator=g)
    found = pmaf.less(A, b)
    again = pmaf.less(A, b, init=-found)
    torch.testing.assert_close(again[:3], -found[:3])  # ±u are both minimisers where b is zero
    torch.testing.assert_close(again[3:], found[3:])


@pytest.mark.parametrize("n", [1024, 1030])
def test_matrices_beyond_the_sizes_of_the_kernels(n, caplog):
    caplog.set_level("DEBUG", logger="pmaf")
    A = matrices("spiked", 1, n)
    values, _ = pmaf.ied(A, solver=Reduction())
    assert caplog.messages == ["ied: reduction" if n <= 1024 else "ied: decomposition"]
    exact = torch.linalg.eigvalsh(A.double())[:, -1]
    torch.testing.assert_close(values.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("layer", ["ied", "pair", "less", "nullspace", "isvd"])
def test_views_that_stand_for_their_negatives(layer):
    """`x.conj().imag` shares the memory of `x`, with opposite signs."""
    A = torch.randn(4, 5, 5, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    A = A + A.mT
    M, b = A @ A + torch.eye(5), A[..., 0].clone()
    run = {
        "ied": lambda A, M, b: pmaf.ied(A).vectors,
        "pair": lambda A, M, b: pmaf.ied(A, M=M).vectors,
        "less": lambda A, M, b: pmaf.less(A, b),
        "nullspace": lambda A, M, b: pmaf.nullspace(A),
        "isvd": lambda A, M, b: pmaf.isvd(A).left,
    }[layer]

    def negated(x):
        view = torch.complex(torch.zeros_like(x), -x).conj().imag
        assert view.is_neg()
        return view

    def both(given, v):
        leaves = [x.clone().requires_grad_() for x in (A, M, b)]
        y = run(*(given(x) for x in leaves))
        return y, *(
            g for g in torch.autograd.grad(y, leaves, v, allow_unused=True) if g is not None
        )

    v = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    truth = both(lambda x: x, v)
    for found in (both(negated, v), both(lambda x: x, torch._neg_view(-v))):
        for x, y in zip(found, truth):
            # The smallest relative gap is a tenth, and the common path has several roundings of it.
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
