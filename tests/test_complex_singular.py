"""Null spaces and singular triplets of complex matrices, and functions of Hermitian ones."""

import logging

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import pmaf
from pmaf import native
from pmaf.linalg.embedding import complex_matrix, real_matrix
from pmaf.operators import FromMatvec, Gram, Matrix, Sparse
from pmaf.solvers import SVD, Krylov, Reduction

F64, C64, C128 = torch.float64, torch.complex64, torch.complex128
EPS = torch.finfo(F64).eps
SHAPES = [(7, 4), (4, 4), (3, 5), (8, 9), (5, 9)]
ENDS = pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])


def drawn(*shape, seed=0, dtype=C128):
    g = torch.Generator().manual_seed(seed)
    parts = torch.randn(2, *shape, generator=g, dtype=F64)
    return torch.complex(*parts).to(dtype)


def positive(*shape, seed=0):
    return 0.2 + drawn(*shape, seed=seed).abs()


def with_values(m, n, values, seed=0):
    """A matrix with given singular values."""
    U, V = (torch.linalg.qr(drawn(x, x, seed=seed + x))[0] for x in (m, n))
    S = torch.zeros(m, n, dtype=C128)
    S.diagonal().copy_(torch.tensor(values, dtype=C128))
    return U @ S @ V.mH


def weights(x):
    """Numbers of the dtype of `x`, so that a loss depends on every phase."""
    angles = torch.arange(1.0, 1 + x.numel(), dtype=F64).reshape(x.shape)
    return torch.polar(1 + angles.sin() / 2, angles).to(x.dtype) if x.is_complex() else angles.cos()


def total(*outputs):
    """A real loss, of all real and imaginary parts."""
    return sum((x * weights(x)).sum().real for x in outputs)


def ways(caplog):
    return [x.getMessage() for x in caplog.records if x.name == "pmaf"]


def test_the_embedding_can_be_undone():
    A = drawn(2, 3, 4)
    assert torch.equal(complex_matrix(real_matrix(A)), A)


# Solutions.


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("dtype", [C64, C128])
@pytest.mark.parametrize("k", [1, 3])
@ENDS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_solutions_are_those_of_svd(shape, largest, k, dtype, weighted):
    A = drawn(2, 3, *shape).to(dtype)
    real = dtype.to_real()
    w = positive(3, shape[0], seed=1).to(real) if weighted else None
    problem = pmaf.PrincipalSingularVectors(A, w, k=k, largest=largest, descending=True)
    found = pmaf.solve(problem)
    whole = A.to(C128) if w is None else A.to(C128) * w.double().sqrt().unsqueeze(-1)
    _, s, vh = torch.linalg.svd(whole, full_matrices=True)
    n, eps = shape[1], torch.finfo(dtype).eps
    s = torch.nn.functional.pad(s, (0, n - s.shape[-1]))
    part = slice(0, k) if largest else slice(n - k, n)
    atol = 16 * eps * float(s.max())
    torch.testing.assert_close(found.multiplier.double(), s[..., part], rtol=0, atol=atol)
    edge, beyond = (k - 1, k) if largest else (n - k, n - k - 1)
    gap = (s[..., edge] - s[..., beyond]).abs()
    torch.testing.assert_close(found.gap.double(), gap, rtol=0, atol=atol)
    # The space moves with rounding of the matrix, divided by its distance to the next.
    V, W = found.value.to(C128), vh[..., part, :].mH
    error = torch.linalg.matrix_norm(V @ V.mH - W @ W.mH, 2)
    apart = gap > atol
    assert (error <= 64 * eps * s[..., 0] / gap + 8 * eps)[apart].all()
    assert apart.any() or (shape == (5, 9) and not largest) or (shape == (3, 5) and k == 1)
    eye = torch.eye(k, dtype=C128).expand(2, 3, k, k)
    torch.testing.assert_close(V.mH @ V, eye, rtol=0, atol=32 * eps)
    assert (found.value.dtype, found.multiplier.dtype, found.gap.dtype) == (dtype, real, real)
    assert found.converged.all()
    assert (found.residual <= 32 * eps).all()
    # The product with all ones is positive.
    sums = V.sum(-2)
    assert (sums.imag.abs() <= 32 * eps * n).all()
    assert (sums.real > 0).all()
    assert pmaf.certify(problem, found).holds(64 * eps).all()
    assert not pmaf.certify(problem, found.value.roll(1, -2)).holds(1e-3).any()


@pytest.mark.parametrize("dtype", [C64, C128])
@pytest.mark.parametrize("k", [None, 1, 3])
@ENDS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triplets_are_those_of_svd(shape, largest, k, dtype):
    A, several = drawn(4, *shape).to(dtype), k or 1
    left, values, right = pmaf.isvd(A, k, largest=largest, descending=True)
    assert (left.dtype, values.dtype, right.dtype) == (dtype, dtype.to_real(), dtype)
    if k is None:
        left, values, right = (x.unsqueeze(-1) for x in (left, values, right))
    u, s, vh = torch.linalg.svd(A.to(C128), full_matrices=False)
    part = slice(0, several) if largest else slice(-several, None)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(values.double(), s[:, part], rtol=0, atol=16 * eps * float(s.max()))
    between = (s[:, :-1] - s[:, 1:]).amin(-1, keepdim=True)
    bound = 64 * eps * s[:, :1] / torch.minimum(between, s[:, -1:])
    # The product with all ones is positive, and the left vector follows the right one.
    sums = vh[:, part].conj().sum(-1)
    turns = (sums.conj() / sums.abs()).unsqueeze(-2)
    limit = bound / sums.abs().amin(-1, keepdim=True).clamp_max(1)
    for x, y in ((left, u[..., part]), (right, vh[:, part].mH)):
        assert ((x.to(C128) - y * turns).norm(dim=-2) <= limit).all()
    close = dict(rtol=0, atol=float(16 * eps * s.max()))
    torch.testing.assert_close(A @ right, left * values.unsqueeze(-2), **close)


def test_references_fix_phases():
    A = drawn(3, 6, 4)
    for r in (drawn(4, seed=4), drawn(4, 2, seed=5)):
        towards = r if r.dim() == 2 else r.unsqueeze(-1)
        for right in (pmaf.nullspace(A, 2, reference=r), pmaf.isvd(A, 2, reference=r).right):
            products = (towards.conj() * right).sum(-2)
            assert (products.real > 0).all()
            assert (products.imag.abs() <= 64 * EPS).all()
    for reference in (2, "largest"):
        left, values, right = pmaf.isvd(A, 2, reference=reference)
        null = pmaf.nullspace(A, 2, reference=reference)
        for x in (right, null):
            place = x.abs().argmax(-2, keepdim=True) if reference == "largest" else torch.full(
                (3, 1, 2), 2)  # fmt: skip
            chosen = x.gather(-2, place)
            assert (chosen.real > 0).all()
            assert (chosen.imag.abs() <= 8 * EPS).all()
        torch.testing.assert_close(A @ right, left * values.unsqueeze(-2))


def test_which_way_is_taken(caplog):
    caplog.set_level(logging.DEBUG, logger="pmaf")
    A = drawn(3, 8, 9)
    small = "singular: reduction" if native.available else "singular: gram"
    large = drawn(1, 30, 40).to(C64)
    for x, k, way in (
        (A, None, "singular: svd"),
        (A.to(C64), None, small),
        (A.to(C64), 4, small),
        (large, 4, "singular: gram"),
    ):
        caplog.clear()
        pmaf.nullspace(x, k)
        assert ways(caplog) == [way]
    caplog.clear()
    leaf = A.to(C64).requires_grad_()
    total(*pmaf.isvd(leaf)).backward()
    assert ways(caplog) == ["singular: reduction" if native.available else "singular: svd"]
    # Of values that repeat, another solve may find other vectors.
    caplog.clear()
    pmaf.isvd(torch.eye(5, dtype=C64)[:, :4] * torch.tensor([3.0, 2.0, 2.0, 1.0]), 3)
    assert ways(caplog)[-1] == "singular: svd"


def test_solvers_agree():
    A = drawn(3, 8, 5).to(C64)
    for k in (None, 2):
        expected, triplets = pmaf.nullspace(A, k), pmaf.isvd(A, k)
        for solver in (SVD(), Reduction(), Krylov()):
            found = pmaf.nullspace(A, k, solver=solver)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
            for x, y in zip(pmaf.isvd(A, k, solver=solver), triplets):
                torch.testing.assert_close(x, y, rtol=0, atol=1e-4)


def test_a_real_matrix_that_is_stored_as_complex():
    A = drawn(3, 6, 4).real.clone().requires_grad_()
    w = positive(6, seed=1)
    for k in (None, 2):
        for call in (
            lambda A, k=k: (pmaf.nullspace(A, k, weights=w),),
            lambda A, k=k: pmaf.isvd(A, k),
        ):
            outputs = call(A)
            (wanted,) = torch.autograd.grad(sum((x * weights(x.real)).sum() for x in outputs), A)
            leaf = A.detach().to(C128).requires_grad_()
            found = call(leaf)
            for x, y in zip(found, outputs):
                torch.testing.assert_close(x, y.to(x.dtype), rtol=0, atol=1e-12)
            loss = sum((x.real * weights(x.real)).sum() for x in found)
            (dA,) = torch.autograd.grad(loss, leaf)
            torch.testing.assert_close(dA, wanted.to(C128), rtol=0, atol=1e-11)


# Derivatives.


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("reference", [None, "given", 1])
@ENDS
@pytest.mark.parametrize("k", [None, 1, 3])
@pytest.mark.parametrize("shape", [(5, 4), (3, 4)], ids=str)
def test_derivatives_of_right_vectors(shape, k, largest, reference, weighted):
    A, w = drawn(*shape).requires_grad_(), positive(shape[0], seed=1).requires_grad_()
    r = drawn(4, seed=2) if reference == "given" else reference

    def both(A, *w):
        problem = pmaf.PrincipalSingularVectors(A, *w, k=k, largest=largest, reference=r)
        if not w:
            problem = pmaf.PrincipalSingularVectors(A, k=k, largest=largest, reference=r)
        solution = pmaf.solve(problem)
        # At zero, a singular value has no derivative; its square has.
        return solution.value, solution.multiplier.square()

    inputs = (A, w) if weighted else (A,)
    assert gradcheck(both, inputs)
    assert gradgradcheck(both, inputs, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("shape", [(5, 9), (8, 9), (2, 4)], ids=str)
def test_derivatives_of_null_spaces(shape):
    """Functions of the space; one null vector is a function of it, too."""
    A, w = drawn(*shape).requires_grad_(), positive(shape[0]).requires_grad_()
    k = shape[1] - shape[0]

    def space(A, w):
        V = pmaf.nullspace(A, k, weights=w)
        return V if k == 1 else V @ V.mH

    assert gradcheck(space, (A, w), fast_mode=shape[1] == 9)
    assert gradgradcheck(space, (A, w), atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("dtype", [C64, C128])
@pytest.mark.parametrize("shape", [(5, 9), (7, 9)], ids=str)
def test_null_spaces_have_the_gradient_of_the_theory(shape, dtype):
    """`−(A⁺)ᴴ(I − VVᴴ)gVᴴ`, which `torch.linalg.svd` does not return."""
    A, k = drawn(*shape).to(dtype).requires_grad_(), shape[1] - shape[0]
    V = pmaf.nullspace(A, k)
    target = weights(torch.empty(9, 9, dtype=dtype))
    (found,) = torch.autograd.grad((target.conj() * (V @ V.mH)).sum().real, A)
    B, W, G = (x.detach().to(C128) for x in (A, V, target))
    g = (G + G.mH) @ W
    formula = -torch.linalg.pinv(B).mH @ (g - W @ (W.mH @ g)) @ W.mH
    close = dict(rtol=0, atol=1e3 * torch.finfo(dtype).eps * float(formula.abs().max()))
    torch.testing.assert_close(found.to(C128), formula, **close)


@ENDS
def test_the_gradient_is_the_formula_of_the_textbook(largest):
    """`v + i·r·Im(vᴴy)/(rᴴy)` comes in, the pseudoinverse of `σ²I − AᴴWA` solves."""
    A, w, v, r = drawn(7, 5), positive(7), drawn(5, seed=1), drawn(5, seed=2)
    leaf, factors = A.clone().requires_grad_(), w.clone().requires_grad_()
    problem = pmaf.PrincipalSingularVectors(leaf, factors, largest=largest, reference=r)
    solution = pmaf.solve(problem)
    y, value = solution.value, solution.multiplier
    dA, dw = torch.autograd.grad((v.conj() * y).sum().real + value, (leaf, factors))
    y, value = y.detach(), value.detach()
    right = v + 1j * r * (v.conj() @ y).imag / (r.conj() @ y)
    gram = A.mH @ (w.unsqueeze(-1) * A)
    H = value**2 * torch.eye(5, dtype=C128) - gram
    z = torch.linalg.pinv(H, rtol=1e-9, hermitian=True) @ right + y / (2 * value)
    inner = torch.outer(A @ z, y.conj()) + torch.outer(A @ y, z.conj())
    torch.testing.assert_close(dA, w.unsqueeze(-1) * inner, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dw, ((A @ z).conj() * (A @ y)).real, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [C64, C128])
@pytest.mark.parametrize("k", [None, 2])
def test_weights_of_zero(k, dtype):
    """First and second derivatives where a weight is zero, where √w has none."""
    A = drawn(7, 4).requires_grad_()
    w = torch.tensor([1.0, 0.0, 0.5, 2.0, 0.0, 1.5, 0.3], dtype=F64).requires_grad_()

    def by_ied(A, w):
        gram = A.mH @ (w.unsqueeze(-1) * A)
        return pmaf.ied(gram, k, largest=False).vectors

    def ours(A, w):
        return pmaf.nullspace(A.to(dtype), k, weights=w.to(dtype.to_real())).to(C128)

    found, expected = [], []
    for layer, results in ((ours, found), (by_ied, expected)):
        first = torch.autograd.grad(total(layer(A, w)), (A, w), create_graph=True)
        results += [layer(A, w), *first, *torch.autograd.grad(total(*first), (A, w))]
    for x, y in zip(found, expected):
        tolerance = 4e3 * torch.finfo(dtype).eps * float(y.detach().abs().max())
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance)


@pytest.mark.parametrize("reference", [None, "given", 1])
@pytest.mark.parametrize("k", [None, 1, 3])
@ENDS
@pytest.mark.parametrize("shape", [(5, 3), (4, 4), (3, 4)], ids=str)
def test_derivatives_of_triplets(shape, k, largest, reference):
    A = drawn(*shape).requires_grad_()
    r = drawn(shape[1], seed=2) if reference == "given" else reference

    def layer(A):
        return pmaf.isvd(A, k, largest=largest, reference=r)

    assert gradcheck(layer, (A,))
    assert gradgradcheck(layer, (A,), atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("dtype", [C64, C128])
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)], ids=str)
def test_gradients_are_those_of_svd_where_the_phase_has_no_effect(shape, k, dtype):
    A = drawn(3, *shape).to(dtype).requires_grad_()
    wide = A.detach().to(C128).requires_grad_()

    def loss(left, values, right):
        return total(left @ right.mH, left.abs().square(), values)

    u, s, vh = torch.linalg.svd(wide, full_matrices=False)
    several = k or 1
    truth = (u[..., :several], s[..., :several], vh[..., :several, :].mH)
    (wanted,) = torch.autograd.grad(loss(*truth), wide)
    found = pmaf.isvd(A, k)
    found = tuple(x.unsqueeze(-1) for x in found) if k is None else found
    (dA,) = torch.autograd.grad(loss(*found), A)
    gaps = s.detach().diff(dim=-1).abs().amin()
    cond = float(s.detach().max() / torch.minimum(gaps, s.detach().min())) ** 2
    close = dict(rtol=0, atol=64 * torch.finfo(dtype).eps * cond * float(wanted.abs().max()))
    torch.testing.assert_close(dA.to(C128), wanted, **close)


@pytest.mark.parametrize("k", [None, 1])
def test_where_other_values_repeat(k):
    A = with_values(5, 4, [3.0, 1.0, 1.0, 1.0]).requires_grad_()
    assert gradcheck(lambda A: pmaf.isvd(A, k), A)
    assert gradgradcheck(lambda A: pmaf.isvd(A, k), A, atol=1e-4, fast_mode=True)
    B = with_values(5, 4, [3.0, 3.0, 3.0, 1.0]).requires_grad_()
    assert gradcheck(lambda B: pmaf.nullspace(B, k), B)
    assert gradgradcheck(lambda B: pmaf.nullspace(B, k), B, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (4, 4)], ids=str)
def test_functions_of_a_space_of_repeated_values(shape):
    A = with_values(*shape, [2.0, 2.0, 1.0, 0.5]).requires_grad_()

    def spaces(A):
        u, _, v = pmaf.isvd(A, 2)
        return u @ u.mH, u @ v.mH, v @ v.mH

    assert gradcheck(spaces, A)
    assert gradgradcheck(spaces, A, atol=1e-4, fast_mode=True)


SINGULAR = {
    "zero": torch.zeros(4, 3, dtype=C128),
    "identity": torch.eye(4, dtype=C128),
    "rank one": torch.outer(drawn(5), drawn(3, seed=1)),
    "zeros below": torch.diag(torch.tensor([2.0, 0.0, 0.0], dtype=C128)),
    "a singular matrix": with_values(3, 3, [2.0, 1.0, 0.0]),
    "wide": torch.eye(3, 5, dtype=C128),
}


@pytest.mark.parametrize("dtype", [C64, C128])
@ENDS
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("name", SINGULAR)
def test_gradients_are_finite_where_there_is_no_derivative(name, k, largest, dtype):
    A = SINGULAR[name].to(dtype).requires_grad_()
    left, values, right = pmaf.isvd(A, k, largest=largest)
    (first,) = torch.autograd.grad(
        total(left, values, right, pmaf.nullspace(A, k)), A, create_graph=True
    )
    (second,) = torch.autograd.grad(first.abs().square().sum(), A, allow_unused=True)
    assert torch.isfinite(torch.view_as_real(first)).all()
    assert second is None or torch.isfinite(torch.view_as_real(second)).all()
    for x in (left, right):
        x = x.unsqueeze(-1) if k is None else x
        eye = torch.eye(x.shape[-1], dtype=dtype)
        torch.testing.assert_close(x.mH @ x, eye, rtol=0, atol=64 * torch.finfo(dtype).eps)


def test_spaces_of_both_null_vectors_of_a_singular_matrix():
    """Their phases are free of each other, but `uuᴴ` and `vvᴴ` have derivatives."""
    F = with_values(3, 3, [2.0, 1.0, 0.0]).requires_grad_()

    def spaces(F):
        u, _, v = pmaf.isvd(F, largest=False)
        return torch.outer(u, u.conj()), torch.outer(v, v.conj())

    assert gradcheck(spaces, F)


@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)], ids=str)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_is_reverse_mode(shape, k):
    A, E = drawn(*shape), drawn(*shape, seed=1)

    def parts(A):
        found = (*pmaf.isvd(A, k), pmaf.solve(pmaf.PrincipalSingularVectors(A, k=k or 1)).value)
        return [torch.view_as_real(x) if x.is_complex() else x for x in found]

    _, tangents = torch.func.jvp(parts, (A,), (E,))
    leaf = A.clone().requires_grad_()
    for x, tangent in zip(parts(leaf), tangents):
        v = weights(x)
        (dA,) = torch.autograd.grad(x, leaf, v, retain_graph=True)
        expected, found = (dA.conj() * E).sum().real, (v * tangent).sum()
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_vmap_is_a_loop():
    A, w = drawn(4, 6, 3), positive(4, 6)
    for k in (None, 2):
        for call in (
            lambda A, w, k=k: pmaf.nullspace(A, k, weights=w),
            lambda A, w, k=k: torch.cat(
                [x if x.dim() == (1 if k is None else 2) else x.unsqueeze(-2 if k else -1)
                 for x in pmaf.isvd(A, k)], 0),
        ):  # fmt: skip
            loop = torch.stack([call(a, b) for a, b in zip(A, w)])
            close = dict(rtol=0, atol=64 * EPS * float(loop.abs().max()))
            torch.testing.assert_close(torch.func.vmap(call)(A, w), loop, **close)

            def loss(A, w, call=call):
                return total(call(A, w))

            found = torch.func.vmap(torch.func.grad(loss))(A, w)
            leaves = [a.clone().requires_grad_() for a in A]
            grads = [torch.autograd.grad(loss(a, b), a)[0] for a, b in zip(leaves, w)]
            wanted = torch.stack(grads)
            close = dict(rtol=0, atol=1e3 * EPS * float(wanted.abs().max()))
            torch.testing.assert_close(found, wanted, **close)


# Sizes, scales and batches.


@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("shape", [(8, 9), (100, 9), (9, 9), (20, 12)], ids=str)
def test_single_precision_is_double_precision_rounded(shape, k):
    A = drawn(6, *shape).to(C64).requires_grad_()
    wide = A.detach().to(C128).requires_grad_()
    results = []
    for x in (A, wide):
        # All of the null space, so that it is apart from the rest.
        V = pmaf.nullspace(x, k) if shape[0] >= shape[1] or k is None else pmaf.nullspace(x, 1)
        results.append((V, *torch.autograd.grad(total(V), x)))
    s = torch.linalg.svdvals(wide.detach())
    gaps = (s[:, :-1] - s[:, 1:])[:, -3:] if shape[0] >= shape[1] else s[:, -1:]
    # The phase divides by the sum of a vector.
    sums = results[1][0].detach().reshape(6, 9 if shape[1] == 9 else 12, -1).sum(1).abs().amin()
    cond = float((s[:, :1] / gaps).max()) / min(1.0, float(sums))
    for x, y, order in zip(*results, (1, 2)):
        bound = 16 * torch.finfo(C64).eps * cond**order * float(y.detach().abs().max())
        torch.testing.assert_close(x.to(C128), y, rtol=0, atol=bound)


@pytest.mark.parametrize("scale", [1e-15, 1e15, 1e-200, 1e200])
def test_scale_does_not_matter(scale):
    A, results = drawn(2, 6, 4), []
    for c in (1.0, scale):
        leaf = (c * A).requires_grad_()
        left, values, right = pmaf.isvd(leaf, 2)
        null = pmaf.nullspace(leaf)
        (dA,) = torch.autograd.grad(total(left, right, null), leaf)
        results.append((left, values / c, right, null, dA * c))
    for x, y in zip(*results):
        torch.testing.assert_close(x, y, rtol=0, atol=1e3 * EPS * float(y.detach().abs().max()))


def test_shapes_broadcasting_and_empty_batches():
    A, w = drawn(2, 1, 6, 4).requires_grad_(), positive(3, 6).requires_grad_()
    assert pmaf.nullspace(A, weights=w).shape == (2, 3, 4)
    V = pmaf.nullspace(A, 2, weights=w)
    assert V.shape == (2, 3, 4, 2)
    dA, dw = torch.autograd.grad(total(V), (A, w))
    assert (dA.shape, dw.shape, dw.dtype) == (A.shape, w.shape, F64)
    alone = A.detach()[1, 0].clone().requires_grad_()
    parts = [pmaf.nullspace(alone, 2, weights=x.detach()) for x in w]
    spread = weights(V)[1]
    (da,) = torch.autograd.grad(sum((x * y).sum().real for x, y in zip(parts, spread)), alone)
    torch.testing.assert_close(da, dA[1, 0], rtol=1e-10, atol=1e-10)
    empty = torch.empty(0, 6, 4, dtype=C128, requires_grad=True)
    left, values, right = pmaf.isvd(empty, 2)
    assert (left.shape, values.shape, right.shape) == ((0, 6, 2), (0, 2), (0, 4, 2))
    assert values.dtype == F64
    assert pmaf.nullspace(empty).shape == (0, 4)
    total(left, values, right).backward()
    assert empty.grad.shape == empty.shape
    one = pmaf.isvd(drawn(5, 1))
    assert one.right.dtype == C128
    torch.testing.assert_close(one.right, torch.ones(1, dtype=C128))


def test_an_optimiser_takes_the_gradients():
    A = torch.nn.Parameter(drawn(4, 6))
    optimiser = torch.optim.Adam([A])
    total(*pmaf.isvd(A), pmaf.nullspace(A)).backward()
    before = A.detach().clone()
    optimiser.step()
    assert not torch.equal(A.detach(), before)


# By products.


@pytest.mark.parametrize("kind", ["Matrix", "FromMatvec", "csr"])
@pytest.mark.parametrize("shape", [(9, 6), (6, 9)], ids=str)
@ENDS
def test_operators(kind, shape, largest):
    A = with_values(*shape, [5.0, 4.0, 3.0, 2.0, 1.0, 0.5]).requires_grad_()
    x = A
    if kind == "Matrix":
        x = Matrix(A)
    elif kind == "FromMatvec":
        x = FromMatvec(lambda u, A: u @ A.mT, A.shape, (A,), rmatvec=lambda u, A: u @ A.conj())
    else:
        # Of which none is zero.
        x = Sparse(A.detach().to_sparse_csr()).with_tensors([A.reshape(-1)])
    r = drawn(shape[1], seed=3)
    results = [pmaf.isvd(x, 2, largest=largest, reference=r) for x in (x, A)]
    gradients = [torch.autograd.grad(total(*found), A, retain_graph=True)[0] for found in results]
    # Products with AᴴA square the condition number, which is ten.
    for found, wanted in (*zip(*results), gradients):
        close = dict(rtol=0, atol=1e5 * EPS * float(wanted.detach().abs().max()))
        torch.testing.assert_close(found, wanted, **close)


def test_weights_of_operators():
    A, w = with_values(7, 4, [4.0, 3.0, 2.0, 1.0]).requires_grad_(), positive(7).requires_grad_()
    results = []
    for x in (Matrix(A), A):
        V = pmaf.nullspace(x, 2, weights=w)
        results.append((V, *torch.autograd.grad(total(V), (A, w))))
    for found, wanted in zip(*results):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e6 * EPS)
    values = pmaf.ied(Gram(A, weights=w), 2).values
    exact = torch.linalg.svdvals(A.detach() * w.detach().sqrt().unsqueeze(-1)).square()[:2]
    torch.testing.assert_close(values.detach(), exact, rtol=64 * EPS, atol=0)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda A: pmaf.nullspace(A, weights=A[:, 0]), TypeError, "weights has dtype.*complex"),
        (lambda A: pmaf.nullspace(A, weights=torch.ones(6)), TypeError, "weights is torch.float32"),
        (lambda A: pmaf.nullspace(A, reference=A[0].real), TypeError, "make both complex"),
        (lambda A: pmaf.isvd(A.mT, 5), ValueError, r"min\(m, n\) = 4; got 5"),
        (lambda A: pmaf.isvd(A / 0), ValueError, "A has non-finite values"),
        (
            lambda A: pmaf.isvd(A.to(torch.complex32)),
            TypeError,
            "complex32, which is not supported",
        ),
        (lambda A: pmaf.spectral(A, "exp"), ValueError, "must be square"),
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_errors_say_what_to_do(call, kind, words):
    with pytest.raises(kind, match=words):
        call(drawn(6, 4))
