"""Vectors of one matrix and of pairs are orthonormal, whichever eigenvalues repeat or nearly do.

The oracle is a decomposition of `L⁻¹AL⁻ᴴ`, `M = LLᴴ`, in float64.
"""

import math
from dataclasses import replace

import pytest
import torch

import pmaf
from pmaf.layers import pairs as layer
from pmaf.layers.eigenvectors import PrincipalEigenvectors
from pmaf.operators import Diagonal
from pmaf.solvers import Dense

F32, F64, C64, C128 = torch.float32, torch.float64, torch.complex64, torch.complex128
DTYPES = [F32, F64, C64, C128]
CONDITIONS = (1.0, 3.0, 1e2, 1e4)
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 40)
METRICS = ("none", "dense", "diagonal")


def spectra(n, eps):
    """Eigenvalues that repeat, are zero, or are as close as rounding lets them be."""
    i = torch.arange(n, dtype=F64)
    yield torch.ones(n, dtype=F64)
    yield torch.zeros(n, dtype=F64)
    for rank in sorted({1, 2, max(1, n // 2), max(1, n - 1)}):
        first = i < rank
        yield torch.where(first, 1 + i, 0)
        yield torch.where(first, 2.0, 1.0)
        yield torch.where(first, -1.0, 1.0)
    for gap in (eps, 10 * eps, 1000 * eps, eps**0.5):
        yield 1 + gap * i
        yield i // 2 + gap * (i % 2)
        yield torch.where(i < n - 1, gap * i, 1.0)
    yield 10 ** (-i / 2)


def unitary(n, dtype, g):
    return torch.linalg.qr(torch.randn(n, n, dtype=dtype, generator=g)).Q


def pairs(n, dtype, diagonal):
    """A batch of pairs, one for each spectrum; the conditions of `M` differ from one to the next.

    The first matrix `A` is a multiple of `M`, without a rounding error.
    """
    g, wide = torch.Generator().manual_seed(n), torch.promote_types(dtype, F64)
    found = []
    for place, values in enumerate(spectra(n, torch.finfo(dtype).eps)):
        condition = CONDITIONS[(place + n) % len(CONDITIONS)]
        masses = condition ** (-torch.arange(n, dtype=F64) / max(n - 1, 1))
        U = torch.eye(n, dtype=wide) if diagonal else unitary(n, wide, g)
        V = masses.sqrt().unsqueeze(-1) * unitary(n, wide, g)
        for_both = U @ ((V * values) @ V.mH) @ U.mH, (U * masses) @ U.mH
        found.append([(0.5 * (x + x.mH)).to(dtype) for x in for_both])
    A, M = (torch.stack(x) for x in zip(*found))
    A[0] = 2 * M[0]
    return A, M


def counts(n):
    return range(1, n + 1) if n <= 5 else (1, 2, n // 3, n // 2, n - 1, n)


def reduced_values(A, M):
    """All eigenvalues of pairs in float64, ascending, and the norms of the reduced matrices."""
    L = torch.linalg.cholesky(M)
    half = torch.linalg.solve_triangular(L, A, upper=False)
    C = torch.linalg.solve_triangular(L, half.mH, upper=False)
    values = torch.linalg.eigvalsh(0.5 * (C + C.mH))
    return values, values.abs().amax(-1)


def assert_eigenpairs(A, M, values, Y, exact):
    """Orthonormal to rounding, with residuals of rounding, and with the values of the oracle.

    To round vectors changes `yᴴMx` by eps times `‖M‖‖y‖‖x‖`, which is at most the condition of M,
    and a residual by eps times `(‖A‖ + |λ|‖M‖)‖y‖`. Refinement leaves four and one roundings of
    this size; norms of products of n random errors grow with the root of n. The reduced matrix has
    rounding errors of its own size times the condition of M.
    """
    n, k, rounding = A.shape[-1], Y.shape[-1], 8 * A.shape[-1] ** 0.5 * torch.finfo(A.dtype).eps
    wide = torch.promote_types(A.dtype, F64)
    A, M, Y, values = A.to(wide), M.to(wide), Y.to(wide), values.to(F64)
    size, mass = (torch.linalg.matrix_norm(x, 2)[:, None] for x in (A, M))
    lengths = torch.linalg.vector_norm(Y, dim=-2)
    skew = (Y.mH @ M @ Y - torch.eye(k, dtype=wide)).abs()
    allowed = mass.unsqueeze(-1) * lengths.unsqueeze(-1) * lengths.unsqueeze(-2)
    assert bool((skew <= rounding * allowed).all()), (n, k, float((skew / allowed).max()))
    rest = torch.linalg.vector_norm(A @ Y - (M @ Y) * values.unsqueeze(-2), dim=-2)
    allowed = (size + values.abs() * mass) * lengths
    assert bool((rest <= rounding * allowed).all()), (n, k, float((rest / allowed).max()))
    allowed = rounding * torch.linalg.cond(M) * reduced_values(A, M)[1]
    assert bool(((values - exact).abs() <= allowed.unsqueeze(-1)).all()), (n, k)


def posed(A, M, metric):
    """`M` as an option and as a matrix."""
    if metric == "none":
        return None, torch.eye(A.shape[-1], dtype=A.dtype).expand_as(A)
    if metric == "diagonal":
        d = M.diagonal(dim1=-2, dim2=-1).clone()
        return Diagonal(d), torch.diag_embed(d)
    return M, M


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_repeated_and_close_eigenvalues(dtype, skip, largest, metric):
    """By the default call, and by the common path, which skips vectors, too."""
    wide = torch.promote_types(dtype, F64)
    for n in SIZES:
        A, M = pairs(n, dtype, metric == "diagonal")
        option, M = posed(A, M, metric)
        spectrum, _ = reduced_values(A.to(wide), M.to(wide))
        spectrum = spectrum.flip(-1) if largest else spectrum
        for k in counts(n):
            if k < 1 or k + skip > n:
                continue
            exact = spectrum[:, skip : skip + k]
            options = dict(largest=largest, descending=largest, M=option)
            solution = pmaf.solve(pmaf.PrincipalEigenvectors(A, k, skip=skip, **options))
            assert bool(solution.converged.all())
            assert_eigenpairs(A, M, solution.multiplier, solution.value, exact)
            if not skip:
                assert_eigenpairs(A, M, *pmaf.ied(A, k, **options), exact)


@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_discriminants(dtype, largest):
    """The scatter between classes has few dimensions, and k may be more than that."""
    wide = torch.promote_types(dtype, F64)
    for n in (8, 16, 32):
        for rank in (1, 2, 5):
            g = torch.Generator().manual_seed(100 * n + rank)
            B = torch.randn(12, n, rank, dtype=dtype, generator=g)
            X = torch.randn(12, n, 2 * n, dtype=dtype, generator=g)
            A, M = B @ B.mH, X @ X.mH / (2 * n)
            A, M = 0.5 * (A + A.mH), 0.5 * (M + M.mH)
            spectrum, _ = reduced_values(A.to(wide), M.to(wide))
            spectrum = spectrum.flip(-1) if largest else spectrum
            for k in (rank, rank + 1, n - 1, n):
                found = pmaf.ied(A, k, M=M, largest=largest, descending=largest)
                assert_eigenpairs(A, M, *found, spectrum[:, :k])
                # One after the other, as an entry of a batch, and by another solver.
                alone = pmaf.ied(
                    A[0], k, M=M[0], largest=largest, descending=largest, solver=Dense()
                )
                assert_eigenpairs(A[:1], M[:1], *(x[None] for x in alone), spectrum[:1, :k])


@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize(("dtype", "condition"), [(F32, 1e3), (C64, 1e3), (F64, 1e6), (C128, 1e6)])
def test_graded_pairs_with_equal_eigenvalues(dtype, condition, largest):
    """Both matrices are ill-conditioned, and in turn `A` has a null space of two dimensions.

    Vectors of values that differ by many orders are refined beside those of equal values.
    """
    wide = torch.promote_types(dtype, F64)
    for n in (4, 6, 8):
        i = torch.arange(n, dtype=F64)
        found = []
        for seed in range(12):
            g = torch.Generator().manual_seed(seed)
            values = condition ** (-(i // 2) / (n / 2 - 1)) * (-1) ** (i * (seed % 2))
            values[-2:] *= float(seed % 3 == 0)
            U, V = unitary(n, wide, g), unitary(n, wide, g)
            both = (U * values) @ U.mH, (V * condition ** (-i / (n - 1))) @ V.mH
            found.append([(0.5 * (x + x.mH)).to(dtype) for x in both])
        A, M = (torch.stack(x) for x in zip(*found))
        spectrum, _ = reduced_values(A.to(wide), M.to(wide))
        spectrum = spectrum.flip(-1) if largest else spectrum
        for k in (n // 2, n):
            values, Y = pmaf.ied(A, k, M=M, largest=largest, descending=largest)
            assert_eigenpairs(A, M, values, Y, spectrum[:, :k])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_vectors_of_one_eigenvalue(dtype):
    """Of a matrix of zeros, and of a multiple of the identity, whose range is rounding."""
    for n in (39, 45, 60, 100):
        for k in (12, 13, 14, n // 3):
            for A in (torch.zeros(n, n, dtype=dtype), 3 * torch.eye(n, dtype=dtype)):
                M, exact = torch.eye(n, dtype=dtype), A.diagonal()[:k].real.double()
                for metric in (None, M):
                    found = pmaf.ied(A, k, M=metric)
                    assert_eigenpairs(A[None], M[None], *(x[None] for x in found), exact)


@pytest.mark.parametrize("dtype", [C64, C128], ids=str)
def test_a_large_eigenvalue_beside_many_close_ones(dtype):
    """The embedding mixes the vectors of close eigenvalues, and all others stay."""
    eps = torch.finfo(dtype).eps
    for n in (10, 20, 40):
        for gap in (10 * eps, 1e3 * eps, 1e5 * eps):
            values = gap * torch.arange(n, dtype=F64) ** 2
            values[-1] = 1.0
            Q = unitary(n, C128, torch.Generator().manual_seed(n))
            A = (Q * values) @ Q.mH
            A = (0.5 * (A + A.mH)).to(dtype)[None]
            exact = torch.linalg.eigvalsh(A.to(C128))
            for k in (n // 2, n - 1, n):
                values_found, Y = pmaf.ied(A, k, largest=False, descending=False)
                eye = torch.eye(n, dtype=dtype)[None]
                assert_eigenpairs(A, eye, values_found, Y, exact[:, :k])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vectors_that_are_not_orthonormal_have_not_converged(dtype, monkeypatch):
    """Those of one spoilt entry of a batch, if no refinement repairs them."""
    A, M = (x[2:6] for x in pairs(6, dtype, False))
    problem = pmaf.PrincipalEigenvectors(A, 4, M=M)
    solve = PrincipalEigenvectors.solved_by

    spoils = []

    def spoilt(*arguments):
        found = solve(*arguments)
        value = found.value.clone()
        spoils.append(value.shape)
        value[1, -1] = value[1, 0]
        return found._replace(value=value)

    monkeypatch.setattr(PrincipalEigenvectors, "solved_by", spoilt)
    monkeypatch.setattr(layer, "_REFINEMENTS", 0)
    with pytest.warns(pmaf.ConvergenceWarning, match="1 of 4 solves.*M is nearly singular"):
        solution = pmaf.solve(problem)
    assert solution.converged.tolist() == [True, False, True, True]
    assert not bool(pmaf.certify(problem, solution).holds(1e-3)[1])
    with pytest.raises(pmaf.ConvergenceError, match="use float64"):
        pmaf.solve(problem, throw=True)
    assert len(spoils) == 2


def projector(A, M, k, largest):
    """`YYᴴ` of the first k vectors, in float64, by a decomposition of the reduced matrix."""
    inverse = torch.linalg.inv(torch.linalg.cholesky(M))
    C = inverse @ A @ inverse.mH
    X = torch.linalg.eigh(0.5 * (C + C.mH)).eigenvectors
    Y = inverse.mH @ (X[..., -k:] if largest else X[..., :k])
    return Y @ Y.mH


def hermitian(n, dtype, g):
    G = torch.randn(n, n, dtype=dtype, generator=g)
    return 0.5 * (G + G.mH)


GROUPS = {  # eigenvalues, and how many make whole groups at both ends
    "(2, 1, 1)": ((2.0, 1.0, 1.0), (1,), (2,)),
    "(1, 1, 0)": ((1.0, 1.0, 0.0), (2,), (1,)),
    "(1, 0, 0, 0, 0, 0, 0)": ((1.0, *(0.0,) * 6), (1,), (6,)),
    "groups of five": ((*(3.0,) * 5, *(1.0,) * 5, *(-1.0,) * 5), (5, 10), (5, 10)),
    "all": ((2.0,) * 5, (5,), (5,)),
}


@pytest.mark.parametrize("default", [True, False], ids=["default", "common"])
@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_gradients_of_projectors(group, dtype, largest, default):
    """Against differences, in which the eigenvalues of a group move apart."""
    values, top, bottom = GROUPS[group]
    n, wide, eps = len(values), torch.promote_types(dtype, F64), torch.finfo(dtype).eps
    step = 1e-5
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        masses = 4 ** (-torch.arange(n, dtype=F64) / max(n - 1, 1))
        U, V = unitary(n, wide, g), masses.sqrt().unsqueeze(-1) * unitary(n, wide, g)
        both = U @ ((V * torch.tensor(values, dtype=F64)) @ V.mH) @ U.mH, (U * masses) @ U.mH
        A, M = ((0.5 * (x + x.mH)).to(dtype) for x in both)
        for k in top if largest else bottom:
            G = hermitian(n, wide, g)
            leaves = A.clone().requires_grad_(), M.clone().requires_grad_()
            reference = None if default else 0
            Y = pmaf.ied(leaves[0], k, M=leaves[1], largest=largest, reference=reference).vectors
            loss = (G.to(dtype).conj() * (Y @ Y.mH)).sum().real
            found = torch.autograd.grad(loss, leaves)
            for which in (0, 1):
                D = hermitian(n, wide, g)
                ends = []
                for sign in (1, -1):
                    moved = [A.to(wide), M.to(wide)]
                    moved[which] = moved[which] + sign * step * D
                    ends.append(projector(*moved, k, largest))
                exact = float((G.conj() * (ends[0] - ends[1])).sum().real / (2 * step))
                mine = float((found[which].to(wide).conj() * D).sum().real)
                # Gaps are at least one, M⁻¹ is at most four; both act twice, and so does G.
                bound = 4**3 * max(abs(x) for x in values) * math.sqrt(n)
                bound *= float(torch.linalg.matrix_norm(G) * torch.linalg.matrix_norm(D))
                assert abs(mine - exact) <= (8 * eps + 10 * step**2) * bound, (k, which)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_gradients_of_vectors_of_a_repeated_eigenvalue_are_of_least_norm(group, dtype):
    """Nothing is divided by differences of eigenvalues that are rounding."""
    values, top, bottom = GROUPS[group]
    n, wide = len(values), torch.promote_types(dtype, F64)
    masses = 4 ** (-torch.arange(n, dtype=F64) / max(n - 1, 1))
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        U, V = unitary(n, wide, g), masses.sqrt().unsqueeze(-1) * unitary(n, wide, g)
        both = U @ ((V * torch.tensor(values, dtype=F64)) @ V.mH) @ U.mH, (U * masses) @ U.mH
        leaves = [(0.5 * (x + x.mH)).to(dtype).requires_grad_() for x in both]
        for largest, ks in ((True, top), (False, bottom)):
            for k in ks:
                Y = pmaf.ied(leaves[0], k, M=leaves[1], largest=largest).vectors
                # No phase is in this loss, and no function of the span is it.
                w = torch.randn(n, k, dtype=Y.real.dtype, generator=g)
                found = torch.autograd.grad((w * Y.abs().square()).sum(), leaves)
                # Gaps are at least one, M⁻¹ is at most four, and vectors are of length two.
                most = 4 * 4**2 * max(1.0, *map(abs, values)) * float(w.square().sum().sqrt())
                assert all(float(x.abs().max()) <= most for x in found)


def test_a_spoilt_solution_is_not_certified():
    """Feasibility is that of `YᵀMY`, of each pair of vectors."""
    A, M = pairs(5, F64, False)
    problem = pmaf.PrincipalEigenvectors(A, 3, M=M)
    solution = pmaf.solve(problem)
    assert bool(pmaf.certify(problem, solution).holds(1e-10).all())
    value = solution.value.clone()
    value[..., 0] += 1e-3 * value[..., 1]
    assert not bool(pmaf.certify(problem, replace(solution, value=value)).holds(1e-4).any())
