"""Constrained least squares of matrices of every rank, against an oracle in float64.

The oracle changes coordinates so that the constraint is the unit sphere or ball, truncates the
singular values to the rank that is known, and bisects the secular equation. Derivatives are
compared with its differences along directions that keep the rank, as the docs promise.
"""

from dataclasses import replace

import pytest
import torch

import pmaf
from pmaf.operators import Diagonal

F32, F64, C64, C128 = torch.float32, torch.float64, torch.complex64, torch.complex128
DTYPES = [F32, F64, C64, C128]
SHAPES = {"column": (4, 1), "tall": (9, 5), "square": (6, 6), "wide": (4, 7), "large": (40, 20)}
OPTIONS = {
    "plain": (),
    "weights": ("weights",),
    "M": ("M",),
    "diagonal": ("diagonal",),
    "radius": ("radius",),
    "weights, M": ("weights", "M"),
    "all": ("weights", "M", "radius"),
}
# The length of A⁺b over the radius: in a ball, the constraint acts if it is above one.
LENGTHS = (0.4, 2.5)


def randn(*shape, dtype, g):
    return torch.randn(*shape, dtype=dtype, generator=g)


def unit_columns(m, r, dtype, g):
    return torch.linalg.qr(randn(m, r, dtype=dtype, g=g)).Q


def coordinates(given):
    """`B`, `c` and `T` of `min ‖Bx − c‖` in the unit ball, with `u = Tx`."""
    A, b, rho, M, w = (given[name] for name in ("A", "b", "radius", "M", "weights"))
    root = w.sqrt().to(A.dtype)
    T = rho * torch.linalg.inv(torch.linalg.cholesky(0.5 * (M + M.mH))).mH
    return root.unsqueeze(-1) * A @ T, root * b, T


def oracle(given, rank, ball):
    """The minimiser by singular values up to `rank`, all of them in float64."""
    B, c, T = coordinates(given)
    U, s, Vh = torch.linalg.svd(B, full_matrices=False)
    U, s, Vh = U[:, :rank], s[:rank], Vh[:rank]
    d = U.mH @ c
    least = d / s
    if not rank or (ball and float(torch.linalg.vector_norm(least)) <= 1):
        return T @ (Vh.mH @ least)
    low, high = torch.zeros((), dtype=F64), torch.linalg.vector_norm(s * d)
    for _ in range(200):
        middle = 0.5 * (low + high)
        long = torch.linalg.vector_norm(s * d / (s * s + middle)) > 1
        low, high = (middle, high) if long else (low, middle)
    x = s * d / (s * s + high)
    return T @ (Vh.mH @ x)


def drawn(m, n, rank, dtype, use, length, seed):
    """A problem as rounded numbers; `A⁺b` is `length` times as long as the radius, in `M`."""
    g, wide = torch.Generator().manual_seed(seed), torch.promote_types(dtype, F64)
    real = dtype.to_real() if dtype.is_complex else dtype
    positive = range(m)
    w = torch.ones(m, dtype=F64)
    if "weights" in use:
        w = 0.5 + torch.rand(m, generator=g, dtype=F64)
        # In turn, only as many rows are left as the rank needs, and a few less than there are.
        left = max(rank, 1) if rank % 2 else max(rank, m - 3)
        w[torch.randperm(m, generator=g)[: m - left]] = 0
        positive = w.nonzero().squeeze(-1).tolist()
    count = len(positive)
    A = randn(m, n, dtype=wide, g=g)
    values = 1 + torch.rand(rank, generator=g, dtype=F64)
    U, V = (unit_columns(x, rank, wide, g) for x in (count, n))
    A[list(positive)] = (U * values) @ V.mH
    X = randn(n, n, dtype=wide, g=g)
    M = torch.eye(n, dtype=wide)
    if "M" in use:
        M = X @ X.mH / n + 0.5 * torch.eye(n, dtype=wide)
    if "diagonal" in use:
        M = torch.diag(0.5 + torch.rand(n, generator=g, dtype=F64)).to(wide)
    given = {"A": A, "b": randn(m, dtype=wide, g=g), "M": M, "weights": w}
    kinds = {"A": dtype, "b": dtype, "M": dtype, "weights": real}
    given = {
        name: x.to(kinds[name]).to(wide if kinds[name] == dtype else F64)
        for name, x in given.items()
    }
    one = torch.ones((), dtype=F64)
    B, c, _ = coordinates(given | {"radius": one})
    left, s, _ = torch.linalg.svd(B, full_matrices=False)
    free = torch.linalg.vector_norm((left[:, :rank].mH @ c) / s[:rank]) if rank else one
    given["radius"] = (free / length).to(real).to(F64)
    return given, float(s[0] / s[rank - 1]) if rank else 1.0


def problem_of(given, dtype, use, ball):
    """The problem in a dtype, and its tensors by name."""
    real = dtype.to_real() if dtype.is_complex else dtype
    tensors = {
        name: x.to(dtype if name in ("A", "b", "M") else real).detach().clone().requires_grad_()
        for name, x in given.items()
    }
    if "diagonal" in use:
        tensors["M"] = given["M"].diagonal().to(dtype).detach().clone().requires_grad_()
    M = Diagonal(tensors["M"]) if "diagonal" in use else tensors["M"] if "M" in use else None
    problem = pmaf.SphereLeastSquares(
        tensors["A"],
        tensors["b"],
        tensors["radius"] if "radius" in use else float(given["radius"]),
        ball,
        M,
        tensors["weights"] if "weights" in use else None,
    )
    names = ["A", "b", *(x for x in ("weights", "M", "radius") if x in use)]
    names += ["M"] if "diagonal" in use else []
    return problem, {name: tensors[name] for name in names}


def directions(given, use, g):
    """A direction for each input, along which the rank of `√w A` stays."""
    A, b, w = given["A"], given["b"], given["weights"]
    n, wide = A.shape[-1], A.dtype
    Y = randn(n, n, dtype=wide, g=g)
    rows = randn(A.shape[-2], dtype=F64, g=g)
    H = randn(n, n, dtype=wide, g=g)
    H = torch.diag(H.diagonal().real).to(wide) if "diagonal" in use else 0.5 * (H + H.mH)
    return {
        "A": rows.unsqueeze(-1) * A + A @ Y,
        "b": randn(*b.shape, dtype=wide, g=g),
        "weights": torch.where(w > 0, randn(*w.shape, dtype=F64, g=g), 0) * w,
        "M": 0.2 * H,
        "radius": given["radius"],
    }


def ranks(m, n):
    return range(min(m, n) + 1) if min(m, n) < 10 else (1, 3, 19, 20)


@pytest.mark.parametrize("ball", [True, False], ids=["ball", "sphere"])
@pytest.mark.parametrize("use", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_derivatives_at_every_rank(dtype, shape, use, ball):
    if not ball and not use:
        use = ("radius",)  # without options it is another solver
    (m, n), eps, step = shape, torch.finfo(dtype).eps, 1e-5
    for rank in ranks(m, n):
        for length in LENGTHS:
            if not ball and length < 1:
                continue  # one of many minimisers on the sphere, or an inner problem
            given, condition = drawn(m, n, rank, dtype, use, length, seed=100 * rank + n)
            if not rank:
                given["radius"] = torch.ones((), dtype=F64)
            problem, leaves = problem_of(given, dtype, use, ball)
            if not rank and not ball:
                continue  # every point of the sphere is a minimiser
            solution = pmaf.solve(problem)
            exact = oracle(given, rank, ball)
            size = float(torch.linalg.vector_norm(exact)) + float(given["radius"])
            wide = exact.dtype
            error = float(torch.linalg.vector_norm(solution.value.detach().to(wide) - exact))
            # Noise of singular values that are zero is a rounding of the largest.
            assert error <= 32 * eps * condition**2 * n**0.5 * size, (rank, length, error / size)
            assert bool(solution.converged.all())
            certificate = pmaf.certify(problem, solution)
            assert bool(certificate.holds(64 * eps * condition**2).all()), certificate
            g = torch.Generator().manual_seed(rank)
            v = randn(n, dtype=wide, g=g)
            loss = (v.to(dtype).conj() * solution.value).sum().real
            found = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))
            if not rank:
                assert all(bool(torch.isfinite(x).all()) for x in found.values())
                continue
            for name, direction in directions(given, use, g).items():
                if name not in found:
                    continue
                ends = []
                for t in (step, -step):
                    end = oracle(given | {name: given[name] + t * direction}, rank, ball)
                    ends.append(float((v.conj() * end).sum().real))
                slope = (ends[0] - ends[1]) / (2 * step)
                gradient = found[name].detach()
                if name == "M" and "diagonal" in use:
                    direction = direction.diagonal()
                gradient = gradient.to(direction.dtype)
                mine = float((gradient.conj() * direction).sum().real)
                scale = float(torch.linalg.vector_norm(v)) * size * condition**3 * n**0.5
                scale *= 1 + float(torch.linalg.vector_norm(direction))
                bound = (64 * eps + 64 * step**2) * scale
                assert abs(mine - slope) <= bound, (name, rank, length, mine, slope)


def null_vector(given, rank):
    """A unit vector of the null space of `√w A` in the norm of `M`, times the radius."""
    B, _, T = coordinates(given)
    Vh = torch.linalg.svd(B, full_matrices=True).Vh
    return T @ Vh[rank:].mH.sum(-1) / (len(Vh) - rank) ** 0.5


@pytest.mark.parametrize("form", ["dense", "products"])
@pytest.mark.parametrize("use", [x for x in OPTIONS.values() if "diagonal" not in x], ids=str)
@pytest.mark.parametrize("shape", [(9, 5), (6, 6), (4, 7)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_the_minimiser_of_least_norm_is_certified(dtype, shape, use, form):
    """Others have the same residual, whether they are in the ball or on its sphere."""
    (m, n), eps = shape, torch.finfo(dtype).eps
    for rank in range(min(n - 1, m) + 1):
        given, condition = drawn(m, n, rank, dtype, use, 0.4, seed=7 * rank + n)
        if not rank:
            given["radius"] = torch.ones((), dtype=F64)
        problem, _ = problem_of(given, dtype, use, True)
        if form == "products":
            A = problem.A.detach()
            problem = replace(problem, A=pmaf.operators.Matrix(A))
        exact = oracle(given, rank, True)
        tolerance = 256 * eps * condition**2
        assert bool(pmaf.certify(problem, exact.to(dtype)).holds(tolerance)), rank
        null = null_vector(given, rank)
        length = 0.4 if rank else 0.0
        for part in (0.3, (1 - length**2) ** 0.5):
            spoilt = (exact + part * null).to(dtype)
            certificate = pmaf.certify(problem, spoilt)
            assert float(certificate.feasibility) <= tolerance
            assert float(certificate.stationarity) <= tolerance
            assert not bool(certificate.holds(0.9 * part))
            assert bool(certificate.holds(1.1 * part))


@pytest.mark.parametrize("ball", [True, False], ids=["ball", "sphere"])
@pytest.mark.parametrize("use", [x for x in OPTIONS.values() if x], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_of_every_rank(dtype, use, ball):
    """By products, real and complex, and their gradients, which are those of their entries."""
    (m, n), eps = (9, 5), torch.finfo(dtype).eps
    for rank in range(1, n + 1):
        # Where no constraint acts on a singular operator, the backward pass warns.
        for length in LENGTHS if ball and rank == n else (LENGTHS[1],):
            given, condition = drawn(m, n, rank, dtype, use, length, seed=3 * rank)
            exact = oracle(given, rank, ball)
            size = float(torch.linalg.vector_norm(exact))
            results = []
            for wrapped in (False, True):
                problem, leaves = problem_of(given, dtype, use, ball)
                if wrapped:
                    problem = replace(problem, A=pmaf.operators.Matrix(leaves["A"]))
                u = pmaf.solve(problem).value
                error = float(torch.linalg.vector_norm(u.detach().to(exact.dtype) - exact))
                assert error <= 64 * eps * condition**2 * n**0.5 * size, (rank, length, wrapped)
                v = torch.linspace(-1, 1, n).to(dtype)
                loss = (v * u).sum().real
                results.append(torch.autograd.grad(loss, list(leaves.values())))
            most = max(float(x.abs().max()) for x in results[0])
            for one, other in zip(*results):
                bound = 256 * eps * condition**3 * most
                torch.testing.assert_close(one, other, rtol=0, atol=bound)


def test_a_batch_of_ranks():
    """Each problem of a batch is that of its own rank, with its own constraint."""
    m, n, use = 8, 5, ("weights", "M", "radius")
    drawn_ones = [
        (rank, length, drawn(m, n, rank, F32, use, length, seed=rank)[0])
        for rank in range(1, n + 1)
        for length in LENGTHS
    ]
    tensors = [
        torch.stack([given[name].to(F32) for *_, given in drawn_ones])
        for name in ("A", "b", "radius", "M", "weights")
    ]
    A, b, rho, M, w = (x.requires_grad_() for x in tensors)
    problem = pmaf.SphereLeastSquares(A, b, rho, True, M, w)
    solution = pmaf.solve(problem)
    assert bool(solution.converged.all())
    assert bool(pmaf.certify(problem, solution).holds(1e-4).all())
    solution.value.sum().backward()
    for i, (rank, length, given) in enumerate(drawn_ones):
        exact = oracle(given, rank, True)
        torch.testing.assert_close(solution.value[i].detach().double(), exact, rtol=0, atol=1e-4)
        assert bool(solution.multiplier[i] > 0) == (length > 1)
        alone, leaves = problem_of(given, F32, use, True)
        pmaf.solve(alone).value.sum().backward()
        for name, x in zip(("A", "b", "radius", "M", "weights"), (A, b, rho, M, w)):
            one, other = x.grad[i], leaves[name].grad
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
