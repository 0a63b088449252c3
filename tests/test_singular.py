"""Null spaces and singular triplets, against decompositions, differences and 50 digits."""

import logging

import pytest
import torch
from mpmath import mp
from torch.autograd import gradcheck, gradgradcheck

import pmaf
from pmaf import native
from pmaf.operators import FromMatvec, Gram, Matrix
from pmaf.operators.transposed import Transposed
from pmaf.solvers import SVD, Krylov, Reduction
from tests import oracles

T = torch.float64
EPS = torch.finfo(T).eps
SHAPES = [(7, 4), (4, 4), (3, 5), (8, 9), (5, 9)]


def randn(*shape, seed=0, dtype=T):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def weights(x):
    return torch.cos(torch.arange(1.0, 1 + x.numel(), dtype=x.dtype)).reshape(x.shape)


def with_values(m, n, values, seed=0, dtype=T):
    """A matrix with given singular values."""
    U, V = (torch.linalg.qr(randn(x, x, seed=seed + x, dtype=dtype))[0] for x in (m, n))
    S = torch.zeros(m, n, dtype=dtype)
    S.diagonal().copy_(torch.tensor(values, dtype=T))
    return U @ S @ V.mH


def span(x):
    """What depends on the space of vectors alone; for one vector, the vector."""
    return x @ x.mT if x.dim() > 1 and x.shape[-1] < x.shape[-2] else x


def ways(caplog):
    return [x.getMessage() for x in caplog.records if x.name == "pmaf"]


# Solutions.


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_solutions_are_those_of_svd(shape, largest, k, dtype, weighted):
    A = randn(2, 3, *shape).to(dtype)
    w = randn(3, shape[0], seed=1).square().to(dtype) if weighted else None
    problem = pmaf.PrincipalSingularVectors(A, w, k=k, largest=largest, descending=True)
    found = pmaf.solve(problem)
    whole = A.double() if w is None else A.double() * w.double().sqrt().unsqueeze(-1)
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
    V, W = found.value.double(), vh[..., part, :].mT
    error = torch.linalg.matrix_norm(V @ V.mT - W @ W.mT, 2)
    assert (error <= 32 * eps * s[..., 0] / gap + 4 * eps).all()
    assert found.value.dtype == found.gap.dtype == dtype
    assert found.converged.all()
    assert (found.residual <= 16 * eps).all()
    assert pmaf.certify(problem, found).holds(32 * eps).all()
    wrong = found.value.roll(1, -2)
    assert not pmaf.certify(problem, wrong).holds(1e-3).any()


@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triplets_are_those_of_svd(shape, largest, dtype):
    A, k = randn(4, *shape).to(dtype), 2
    left, values, right = pmaf.isvd(A, k, largest=largest, descending=True)
    u, s, vh = torch.linalg.svd(A.double(), full_matrices=False)
    part = slice(0, k) if largest else slice(-k, None)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(values.double(), s[:, part], rtol=0, atol=16 * eps * float(s.max()))
    eye = torch.eye(k, dtype=dtype).expand(4, k, k)
    for x in (left, right):
        torch.testing.assert_close(x.mT @ x, eye, rtol=0, atol=32 * eps)
    between = (s[:, :-1] - s[:, 1:]).amin(-1, keepdim=True)
    bound = 64 * eps * s[:, :1] / torch.minimum(between, s[:, -1:])
    signs = (right.double() * vh[:, part].mT).sum(-2, keepdim=True).sign()
    for x, y in ((left, u[..., part]), (right, vh[:, part].mT)):
        assert ((x.double() - y * signs).norm(dim=-2) <= bound).all()
    assert (right.sum(-2) >= 0).all()
    one = pmaf.isvd(A, largest=largest)
    column = 0 if largest else -1
    for x, y in zip(one, (left[..., column], values[..., column], right[..., column])):
        torch.testing.assert_close(x, y, rtol=0, atol=float(bound.max()) * float(y.abs().max()))


def test_which_way_is_taken(caplog):
    caplog.set_level(logging.DEBUG, logger="pmaf")
    A = randn(3, 8, 9)
    kernels = native.available
    gram = "singular: reduction" if kernels else "singular: gram"
    double = "less: decomposition, compiled" if kernels else "singular: svd"
    weighted = double if kernels else gram
    large = randn(1, 30, 40)
    cases = [
        (A, None, None, double),
        (A, 2, None, "singular: svd"),
        (A, None, A[..., 0].abs(), double),
        (A.float(), None, None, "less: reduction" if kernels else gram),
        (A.float(), None, A[..., 0].abs().float(), weighted),
        (A.float().repeat(6, 1, 1), None, A[..., 0].abs().float().repeat(6, 1), gram),
        (A.float()[:, :7], None, None, gram),
        (A.float(), 4, None, gram),
        (A.bfloat16(), 4, None, gram),
        (large.float(), 2, None, gram),
        (large.float(), 20, None, "singular: gram"),
    ]
    for x, k, weights, way in cases:
        caplog.clear()
        pmaf.nullspace(x, k, weights=weights)
        assert ways(caplog) == [way]


COMPLEX = [
    ("nullspace", (8, 9), {}),
    ("nullspace", (8, 6), {"k": 2}),
    ("nullspace", (5, 6), {}),
    ("nullspace", (8, 6), {"reference": 1}),
    ("nullspace", (8, 6), {"weights": True}),
    ("isvd", (8, 9), {}),
    ("isvd", (9, 6), {"k": 3}),
    ("isvd", (6, 9), {"k": 2, "largest": False}),
    ("isvd", (9, 6), {"k": 2, "descending": False, "reference": "largest"}),
    ("isvd", (6, 6), {"k": 6}),
]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("call", COMPLEX, ids=str)
def test_short_and_common_ways_agree_for_complex_matrices(call, dtype, caplog):
    """Values, gradients and gradients of gradients."""
    caplog.set_level(logging.DEBUG, logger="pmaf")
    name, shape, options = call
    g = torch.Generator().manual_seed(3)
    A = torch.randn(3, *shape, generator=g, dtype=torch.complex128).to(dtype)
    given = [A]
    if options.get("weights"):
        given.append(torch.rand(3, shape[0], generator=g, dtype=T).to(dtype.to_real()) + 0.5)
    options = {key: x for key, x in options.items() if key != "weights"}
    short = "singular: reduction" if dtype == torch.complex64 else "singular: svd"
    found = []
    for solver in (None, SVD()):
        caplog.clear()
        leaves = [x.clone().requires_grad_() for x in given]
        weights = {"weights": leaves[1]} if len(leaves) > 1 else {}
        out = getattr(pmaf, name)(leaves[0], solver=solver, **weights, **options)
        outs = out if isinstance(out, tuple) else (out,)
        if solver is None and native.available:
            assert ways(caplog) == [short]
        total = sum(
            (x * torch.linspace(1, 2, x.numel()).reshape(x.shape)).abs().cos().sum()
            + (x.real * x.imag if x.is_complex() else x).sum()
            for x in outs
        )
        first = torch.autograd.grad(total, leaves, create_graph=True)
        squares = sum(x.abs().square().sum() for x in first)
        again = torch.autograd.grad(squares, leaves, retain_graph=True)
        caplog.clear()
        plain = torch.autograd.grad(total, leaves)
        found.append((*outs, *first, *plain, *again))
    # The gap of these singular values is a twentieth of the largest; it is squared in the last.
    eps = torch.finfo(dtype).eps
    for i, (x, y) in enumerate(zip(*found, strict=True)):
        last = i >= len(found[0]) - len(given)
        bound = (2e6 if last else 2e4) * eps * (1 + float(y.detach().abs().max()))
        torch.testing.assert_close(x.detach(), y.detach(), rtol=0, atol=bound)


def test_which_way_is_differentiated(caplog):
    caplog.set_level(logging.DEBUG, logger="pmaf")
    A, large = randn(3, 8, 9), randn(1, 40, 30)
    gram = ["singular: reduction"] if native.available else ["singular: svd"]
    further = [*gram, "tangent: compiled"] if native.available else gram
    cases = [
        (A, None, ["singular: svd"]),
        (A, 2, ["singular: svd"]),
        (A.float(), None, gram),
        (A.float(), 4, gram),
        (large.float(), None, further),
    ]
    for x, k, way in cases:
        caplog.clear()
        x = x.clone().requires_grad_()
        pmaf.isvd(x, k).left.sum().backward()
        assert ways(caplog) == way


def test_solvers_agree():
    A = randn(3, 8, 5).float()
    expected = pmaf.nullspace(A, 2)
    for solver in (SVD(), Reduction(), Krylov()):
        torch.testing.assert_close(pmaf.nullspace(A, 2, solver=solver), expected, rtol=0, atol=1e-4)
        for x, y in zip(pmaf.isvd(A, 2, solver=solver), pmaf.isvd(A, 2)):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-4)


def test_the_first_vector_is_that_of_the_smallest_value():
    A = randn(6, 4)
    several = pmaf.nullspace(A, 3)
    torch.testing.assert_close(several[:, 0], pmaf.nullspace(A))
    sizes = (A @ several).norm(dim=0)
    assert (sizes[1:] > sizes[:-1]).all()


def test_references_choose_signs():
    A = randn(3, 6, 4)
    for x in (randn(4, seed=4), randn(4, 2, seed=5)):
        towards = x if x.dim() == 2 else x.unsqueeze(-1)
        assert ((pmaf.nullspace(A, 2, reference=x) * towards).sum(-2) > 0).all()
        left, values, right = pmaf.isvd(A, 2, reference=x)
        assert ((right * towards).sum(-2) > 0).all()
        torch.testing.assert_close(A @ right, left * values.unsqueeze(-2))
        turned = pmaf.isvd(A.mT, 2, reference=randn(6, seed=6))
        assert ((turned.right * randn(6, seed=6).unsqueeze(-1)).sum(-2) > 0).all()
        torch.testing.assert_close(A.mT @ turned.right, turned.left * turned.values.unsqueeze(-2))


# Derivatives.


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("k", [None, 1, 3])
@pytest.mark.parametrize("shape", [(5, 4), (4, 4), (3, 4)], ids=str)
def test_derivatives_of_right_vectors(shape, k, largest, weighted):
    A = randn(*shape).requires_grad_()
    w = (0.2 + randn(shape[0], seed=1).abs()).requires_grad_()

    def both(A, *w):
        problem = pmaf.PrincipalSingularVectors(A, *w, k=k, largest=largest)
        solution = pmaf.solve(problem)
        # At zero, a singular value has no derivative; its square has.
        return solution.value, solution.multiplier.square()

    inputs = (A, w) if weighted else (A,)
    assert gradcheck(both, inputs)
    assert gradgradcheck(both, inputs, fast_mode=True)


@pytest.mark.parametrize("shape", [(4, 5), (2, 5)], ids=str)
def test_derivatives_of_null_spaces(shape):
    A, w = randn(*shape).requires_grad_(), (0.2 + randn(shape[0]).abs()).requires_grad_()
    k = shape[1] - shape[0]

    def space(A, w):
        V = pmaf.nullspace(A, k, weights=w)
        return V @ V.mT

    assert gradcheck(space, (A, w))
    assert gradgradcheck(space, (A, w), fast_mode=True)


@pytest.mark.parametrize("k", [None, 1, 3])
@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("shape", [(5, 3), (4, 4), (3, 4)], ids=str)
def test_derivatives_of_triplets(shape, k, largest):
    A = randn(*shape).requires_grad_()
    assert gradcheck(lambda A: pmaf.isvd(A, k, largest=largest), (A,))
    assert gradgradcheck(lambda A: pmaf.isvd(A, k, largest=largest), (A,), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize("k", [None, 2])
def test_weights_of_zero(k, dtype):
    """First and second derivatives where a weight is zero, where √w has none."""
    A = randn(7, 4).requires_grad_()
    w = torch.tensor([1.0, 0.0, 0.5, 2.0, 0.0, 1.5, 0.3], dtype=T).requires_grad_()

    def by_eigh(A, w):
        vectors = torch.linalg.eigh(A.mT @ (w.unsqueeze(-1) * A)).eigenvectors[:, : k or 1]
        vectors = vectors * vectors.detach().sum(0).sign()
        return vectors.squeeze(-1) if k is None else vectors

    def ours(A, w):
        return pmaf.nullspace(A.to(dtype), k, weights=w.to(dtype)).to(T)

    found, expected = [], []
    for layer, results in ((ours, found), (by_eigh, expected)):
        out = layer(A, w)
        first = torch.autograd.grad((out * weights(out)).sum(), (A, w), create_graph=True)
        total = sum((x * weights(x)).sum() for x in first)
        results += [out, *first, *torch.autograd.grad(total, (A, w))]
    for x, y in zip(found, expected):
        tolerance = 1e3 * torch.finfo(dtype).eps * float(y.detach().abs().max())
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance)
    roots = w.detach().sqrt().requires_grad_()
    if dtype == T:  # with w = r², second derivatives at r = 0 are twice ∂L/∂w
        assert gradgradcheck(lambda r: pmaf.nullspace(A.detach(), k, weights=r.square()), (roots,))


@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize("shape", [(5, 9), (7, 9), (8, 9)], ids=str)
def test_null_vectors_have_the_gradient_that_svd_does_not(shape, dtype):
    A, k = randn(*shape).to(dtype).requires_grad_(), shape[1] - shape[0]
    target = weights(torch.empty(9, 9, dtype=T))

    def loss(V):
        return (V @ V.mT * target.to(V)).sum()

    their_space = torch.linalg.svd(A, full_matrices=True).Vh[shape[0] :].mT
    (theirs,) = torch.autograd.grad(loss(their_space), A)
    assert float(theirs.abs().max()) == 0.0

    V = pmaf.nullspace(A, k)
    torch.testing.assert_close(loss(V), loss(their_space), rtol=0, atol=1e-4)
    (ours,) = torch.autograd.grad(loss(V), A)
    truth = oracles.differences(lambda x: loss(pmaf.nullspace(x, k)), A.detach().double())
    scale = float(truth.abs().max())
    assert scale > 0.1
    torch.testing.assert_close(
        ours.double(), truth, rtol=0, atol=max(1e-8, 1e3 * torch.finfo(dtype).eps) * scale
    )
    # The formula of the theory: −(A⁺)ᵀ(I − VVᵀ)gVᵀ.
    B, W = A.detach().double(), V.detach().double()
    g = (target + target.mT) @ W
    formula = -torch.linalg.pinv(B).mT @ (g - W @ (W.mT @ g)) @ W.mT
    torch.testing.assert_close(
        ours.double(), formula, rtol=0, atol=1e3 * torch.finfo(dtype).eps * scale
    )


@pytest.mark.parametrize("dtype", [torch.float32, T])
def test_triplets_where_others_repeat(dtype):
    A = with_values(5, 4, [3.0, 1.0, 1.0, 1.0])
    A = A if dtype == T else torch.diag(torch.tensor([3.0, 1, 1, 1], dtype=T))

    def loss(x):
        return sum((y * weights(y)).sum() for y in pmaf.isvd(x))

    leaf = A.to(dtype, copy=True).requires_grad_()
    (found,) = torch.autograd.grad(loss(leaf), leaf)
    truth = oracles.differences(loss, A)
    tolerance = max(1e-8, 100 * torch.finfo(dtype).eps)
    torch.testing.assert_close(found.double(), truth, rtol=0, atol=tolerance * 3)
    D = torch.diag(torch.tensor([3.0, 1.0, 1.0, 1.0], dtype=T)).requires_grad_()
    u, _, vh = torch.linalg.svd(D)
    (theirs,) = torch.autograd.grad(u[:, 0].sum() + vh[0].sum(), D)
    assert not torch.isfinite(theirs).all()


@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (4, 4)], ids=str)
def test_functions_of_a_space_of_repeated_values(shape, k, dtype):
    """The space of the first k is apart from the rest, and values inside repeat."""
    values = [2.0, 2.0, 1.0, 0.5] if k == 2 else [2.0, 2.0, 2.0, 0.5]
    A = with_values(*shape, values)

    def loss(x):
        u, _, v = pmaf.isvd(x, k)
        # The second depends on both, and is the same for each choice of vectors.
        return sum((y * weights(y)).sum() for y in (u @ u.mT, u @ v.mT, v @ v.mT))

    leaf = A.to(dtype, copy=True).requires_grad_()
    (found,) = torch.autograd.grad(loss(leaf), leaf)
    truth = oracles.differences(loss, A)
    tolerance = max(1e-7, 300 * torch.finfo(dtype).eps) * float(truth.abs().max())
    torch.testing.assert_close(found.double(), truth, rtol=0, atol=tolerance)


SINGULAR = {
    "zero": torch.zeros(4, 3, dtype=T),
    "identity": torch.eye(4, dtype=T),
    "rank one": torch.outer(randn(5), randn(3, seed=1)),
    "zeros below": torch.diag(torch.tensor([2.0, 0.0, 0.0], dtype=T)),
    "wide": torch.eye(3, 5, dtype=T),
}


@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("name", SINGULAR)
def test_gradients_are_finite_where_there_is_no_derivative(name, k, largest, dtype):
    A = SINGULAR[name].to(dtype).requires_grad_()
    left, values, right = pmaf.isvd(A, k, largest=largest)
    total = sum((x * weights(x)).sum() for x in (left, values, right))
    total = total + pmaf.nullspace(A, k).sum()
    (first,) = torch.autograd.grad(total, A, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), A, allow_unused=True)
    assert torch.isfinite(first).all()
    assert second is None or torch.isfinite(second).all()
    for x in (left, right):
        x = x.unsqueeze(-1) if k is None else x
        eye = torch.eye(x.shape[-1], dtype=dtype)
        torch.testing.assert_close(x.mT @ x, eye, rtol=0, atol=64 * torch.finfo(dtype).eps)


def test_left_null_vectors_of_singular_matrices():
    """The epipoles of a fundamental matrix: both of its null vectors, with gradients."""
    F = with_values(3, 3, [2.0, 1.0, 0.0]).requires_grad_()
    left, value, right = pmaf.isvd(F, largest=False)
    assert float(value.detach()) <= 8 * EPS
    assert float((F.mT @ left).detach().norm()) <= 16 * EPS
    assert float((F @ right).detach().norm()) <= 16 * EPS

    def outer(F):
        u, _, v = pmaf.isvd(F, largest=False)
        return u.unsqueeze(-1) * u, v.unsqueeze(-1) * v

    assert gradcheck(outer, (F,))


# Precision.


def exact(A, w, g, k, largest):
    """`VVᴴ`, and the gradients of `Re⟨g, VVᴴ⟩` in A and w, in 50 digits, then rounded."""
    A_, g_ = mp.matrix(A.tolist()), mp.matrix(((g + g.mH) / 2).tolist())
    W = mp.diag(w.tolist())
    m, n = A_.rows, A_.cols
    values, vectors = mp.eighe(A_.H * W * A_)
    wanted = range(n - k, n) if largest else range(k)
    S, P = mp.zeros(n), mp.zeros(n)
    inside = vectors.H * g_ * vectors
    for i in wanted:
        P += vectors[:, i] * vectors[:, i].H
        for j in set(range(n)) - set(wanted):
            pair = vectors[:, i] * vectors[:, j].H * (inside[i, j] / (values[i] - values[j]))
            S += pair + pair.H
    dA = 2 * W * A_ * S
    dw = mp.matrix([mp.re((A_[i, :] * S * A_[i, :].H)[0]) for i in range(m)])
    return [
        torch.tensor([complex(z) for z in x], dtype=torch.complex128).reshape(shape)
        for x, shape in ((P, (n, n)), (dA, (m, n)), (dw, (m,)))
    ]


# The shape, the singular values, how many vectors, and whether those of the largest values.
ILL = {
    "tall, cond 1e6": (7, 4, [1.0, 1e-2, 1e-4, 1e-6], 1, False),
    "square, cond 1e6": (4, 4, [1.0, 0.9, 0.8, 1e-6], 1, False),
    "two small": (6, 4, [1.0, 0.5, 3e-6, 1e-6], 1, False),
    "nearly repeated": (6, 4, [1.0, 0.5, 0.1 + 1e-6, 0.1], 1, False),
    "nearly repeated, largest": (6, 4, [1.0 + 1e-6, 1, 0.1, 0.1], 1, True),
    "nearly rank-deficient, wide": (3, 5, [1.0, 0.5, 1e-6], 2, False),
    "largest, cond 1e6": (5, 4, [1.0, 0.5, 1e-3, 1e-6], 2, True),
}


@pytest.mark.parametrize("dtype", [T, torch.complex128], ids=["real", "complex"])
@pytest.mark.parametrize("name", ILL)
def test_errors_are_those_of_rounding_the_inputs(name, dtype):
    m, n, values, k, largest = ILL[name]
    A = with_values(m, n, values, dtype=dtype)
    w = 0.5 + randn(m, seed=7).abs()
    g = randn(n, n, seed=8, dtype=dtype)
    truth = exact(A, w, g, k, largest)
    moved = [0.0, 0.0, 0.0]
    for _ in range(3):
        noise = [1 + EPS * (2 * torch.rand(x.shape, dtype=T) - 1) for x in (A, w)]
        other = exact(A * noise[0], w * noise[1], g, k, largest)
        moved = [max(m, float((x - y).norm())) for m, x, y in zip(moved, truth, other)]
    a, b = A.clone().requires_grad_(), w.clone().requires_grad_()
    V = pmaf.solve(pmaf.PrincipalSingularVectors(a, b, k=k, largest=largest)).value
    P = V @ V.mH
    found = [P.detach(), *torch.autograd.grad((P.conj() * g).sum().real, (a, b))]
    size = max(float(x.norm()) for x in truth)
    for x, y, bound in zip(found, truth, moved):
        # What is zero, or moves by less, is known to rounding of the numbers around it.
        assert float((x - y).norm()) <= 30 * max(bound, EPS * size)
    # Left vectors: of a square matrix they are null vectors of the adjoint.
    if m == n:
        ones = torch.ones_like(w)
        truth = exact(A.mH, ones, g, k, largest)
        a = A.clone().requires_grad_()
        u = pmaf.isvd(a, k, largest=False).left
        (da,) = torch.autograd.grad(((u @ u.mH).conj() * g).sum().real, a)
        others = (A * (1 + EPS * randn(m, n, seed=i)) for i in range(2))
        moved = max(float((truth[1] - exact(x.mH, ones, g, k, largest)[1]).norm()) for x in others)
        assert float((da.mH - truth[1]).norm()) <= 30 * max(moved, EPS * float(da.norm()))


@pytest.mark.parametrize("shape", [(8, 9), (100, 9), (9, 9), (7, 9), (20, 12)], ids=str)
@pytest.mark.parametrize("k", [None, 2])
def test_float32_is_float64_rounded(shape, k):
    if shape == (7, 9) and k is None:
        pytest.skip("one vector of a plane is not unique")
    A, w = randn(3, *shape).float(), (0.1 + randn(3, shape[0], seed=1).abs()).float()
    results = []
    for dtype in (torch.float32, T):
        a, b = (x.to(dtype, copy=True).requires_grad_() for x in (A, w))
        V = pmaf.nullspace(a, k, weights=b)
        P = V if k is None else V @ V.mT
        t = pmaf.isvd(a, k)
        total = (P * weights(P)).sum() + sum((x * weights(x)).sum() for x in t)
        (first,) = torch.autograd.grad(total, a, create_graph=True)
        second = torch.autograd.grad((first * weights(first)).sum(), (a, b))
        results.append([x.detach() for x in (P, *t, first, *second)])
    s = torch.linalg.svdvals((A * w.sqrt().unsqueeze(-1)).double())
    closest = float(((s[:, :-1] - s[:, 1:]).amin(-1) / s[:, 0]).min())
    for x, y in zip(*results):
        assert x.dtype == torch.float32
        error = float((x.double() - y).abs().max())
        size = float(y.abs().max())
        assert error <= 8 * torch.finfo(torch.float32).eps / min(closest, 0.1) ** 2 * max(size, 1)


@pytest.mark.parametrize("scale", [1e-15, 1e15, 1e-200, 1e200])
def test_scale_does_not_matter(scale):
    A = randn(6, 4)

    def both(A, scale):
        leaf = (A * scale).requires_grad_()
        V = pmaf.nullspace(leaf, 2)
        left, values, right = pmaf.isvd(leaf)
        outputs = V, left, values / scale, right
        total = sum((x * weights(x)).sum() for x in outputs)
        (dA,) = torch.autograd.grad(total, leaf)
        return *outputs, dA * scale

    for x, y in zip(both(A, scale), both(A, 1.0)):
        torch.testing.assert_close(x, y, rtol=0, atol=1e4 * EPS * float(y.detach().abs().max()))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_does_not_matter_in_float32(scale):
    A = randn(3, 6, 4).float()
    torch.testing.assert_close(pmaf.nullspace(A * scale), pmaf.nullspace(A), rtol=0, atol=1e-5)
    leaf = (A * scale).requires_grad_()
    pmaf.nullspace(leaf)[..., 0].sum().backward()
    other = A.clone().requires_grad_()
    pmaf.nullspace(other)[..., 0].sum().backward()
    torch.testing.assert_close(leaf.grad * scale, other.grad, rtol=1e-3, atol=1e-4)


def test_many_small_matrices():
    A = torch.randn(100_000, 4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    v = pmaf.nullspace(A)
    (found,) = torch.autograd.grad(v[:, 0].sum(), A)
    assert torch.isfinite(found).all()
    s = torch.linalg.svdvals(A.detach()[:1000].double())
    sizes = (A.detach()[:1000].double() @ v.detach()[:1000].double().unsqueeze(-1)).norm(dim=-2)
    eps = torch.finfo(torch.float32).eps
    assert (sizes.squeeze(-1) - s[:, -1] <= 8 * eps * s[:, 0]).all()
    part = A.detach()[:8].double().requires_grad_()
    (expected,) = torch.autograd.grad(pmaf.nullspace(part)[:, 0].sum(), part)
    torch.testing.assert_close(found[:8].double(), expected, rtol=1e-3, atol=1e-3)


def test_a_space_that_is_not_apart_from_the_rest_in_float32(caplog):
    """Kernels would divide by a difference that is rounding of the matrix."""
    caplog.set_level(logging.DEBUG, logger="pmaf")
    Q = torch.linalg.qr(randn(9, 9))[0].float().requires_grad_()
    (found,) = torch.autograd.grad(pmaf.nullspace(Q).sum(), Q)
    # The least norm of what remains after merging is that of no derivative at all.
    assert float(found.norm()) <= 1.0
    (found,) = torch.autograd.grad(pmaf.isvd(Q).right.sum(), Q)
    assert float(found.norm()) <= 10.0
    if native.available:
        assert "tangent: decomposition" in ways(caplog)


# Shapes.


def test_shapes_and_broadcasting():
    A, w = randn(2, 1, 5, 3), randn(4, 5, seed=1).square()
    assert pmaf.nullspace(A, weights=w).shape == (2, 4, 3)
    assert pmaf.nullspace(A, 2, weights=w).shape == (2, 4, 3, 2)
    expected = pmaf.nullspace(A[1, 0], 2, weights=w[3])
    torch.testing.assert_close(pmaf.nullspace(A, 2, weights=w)[1, 3], expected)
    shared = A[0, 0].clone().requires_grad_()
    pmaf.nullspace(shared, weights=w).sum().backward()
    total = torch.zeros_like(shared)
    for row in w:
        leaf = A[0, 0].clone().requires_grad_()
        pmaf.nullspace(leaf, weights=row).sum().backward()
        total += leaf.grad
    torch.testing.assert_close(shared.grad, total)
    assert [x.shape for x in pmaf.isvd(A, 2)] == [(2, 1, 5, 2), (2, 1, 2), (2, 1, 3, 2)]
    assert [x.shape for x in pmaf.isvd(A.mT)] == [(2, 1, 3), (2, 1), (2, 1, 5)]


def test_empty_batches_and_single_columns():
    for shape in ((0, 5, 3), (2, 0, 3, 5)):
        A = torch.zeros(*shape, requires_grad=True)
        V, triplets = pmaf.nullspace(A, 2), pmaf.isvd(A, 2)
        assert V.shape == (*shape[:-2], shape[-1], 2)
        assert triplets.left.shape == (*shape[:-2], shape[-2], 2)
        assert triplets.right.shape == (*shape[:-2], shape[-1], 2)
        (V.sum() + triplets.values.sum()).backward()
        assert A.grad.shape == shape
    A = torch.tensor([[3.0], [4.0]], dtype=T, requires_grad=True)
    assert pmaf.nullspace(A).tolist() == [1.0]
    left, value, _ = pmaf.isvd(A)
    torch.testing.assert_close(left, torch.tensor([0.6, 0.8], dtype=T))
    assert float(value.detach()) == pytest.approx(5.0)
    assert float(pmaf.solve(pmaf.PrincipalSingularVectors(A)).gap) == float("inf")
    assert gradcheck(lambda A: pmaf.isvd(A), (A,))
    assert gradcheck(lambda A: pmaf.isvd(A.mT), (A,))


# By products.


@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("kind", ["Matrix", "FromMatvec", "csr", "coo", "Transposed"])
def test_operators(kind, largest):
    A = randn(20, 8)
    made = {
        "Matrix": Matrix,
        "FromMatvec": lambda A: FromMatvec(lambda u, A: u @ A.mT, (20, 8), [A]),
        "csr": lambda A: A.to_sparse_csr(),
        "coo": lambda A: A.to_sparse_coo(),
        "Transposed": lambda A: Transposed(Matrix(A.mT)),
    }[kind]
    w = (0.1 + randn(20, seed=1).abs()).requires_grad_()
    dense, leaf = A.clone().requires_grad_(), A.clone().requires_grad_()
    for k in (None, 2):
        problems = [pmaf.PrincipalSingularVectors(x, w, k=k, largest=largest)
                    for x in (made(leaf), dense)]  # fmt: skip
        ours, theirs = (pmaf.solve(problem) for problem in problems)
        torch.testing.assert_close(ours.value, theirs.value, rtol=0, atol=1e-9)
        torch.testing.assert_close(ours.multiplier, theirs.multiplier, rtol=1e-10, atol=0)
        if k is None:
            torch.testing.assert_close(ours.gap, theirs.gap, rtol=1e-6, atol=1e-9)
        assert pmaf.certify(problems[0], ours).holds(1e-7).all()
        totals = [(weights(x.value) * x.value).sum() + x.multiplier.sum() for x in (ours, theirs)]
        found = torch.autograd.grad(totals[0], (leaf, w))
        expected = torch.autograd.grad(totals[1], (dense, w))
        for x, y in zip(found, expected):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-7 * float(y.abs().max()))
        for wide in (False, True):
            turned = made(leaf)
            if wide:
                turned = made(leaf.mT.contiguous()) if kind in ("Matrix", "csr", "coo") else (
                    Transposed(turned))  # fmt: skip
            ours = pmaf.isvd(turned, k, largest=largest)
            theirs = pmaf.isvd(dense.mT if wide else dense, k, largest=largest)
            for x, y in zip(ours, theirs):
                torch.testing.assert_close(x, y, rtol=0, atol=1e-9)
            totals = [sum((weights(x) * x).sum() for x in part) for part in (ours, theirs)]
            (found,), (expected,) = (
                torch.autograd.grad(totals[0], leaf),
                torch.autograd.grad(totals[1], dense),
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


def test_gram_with_weights():
    X, w = randn(9, 5).requires_grad_(), randn(9, seed=1).square().requires_grad_()
    for shape in ((), (3,)):
        W = w.expand(*shape, 9)
        operator = Gram(X, scale=0.5, weights=W)
        rows = randn(*shape, 2, 5, seed=2)
        dense = 0.5 * X.mT @ (W.unsqueeze(-1) * X)
        torch.testing.assert_close(operator.matvec(rows), rows @ dense)
        ours = torch.autograd.grad(pmaf.ied(operator).vectors.cos().sum(), (X, w))
        theirs = torch.autograd.grad(pmaf.ied(dense).vectors.cos().sum(), (X, w))
        for x, y in zip(ours, theirs):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-8)
    with pytest.raises(ValueError, match=r"needs weights of shape \(\*, 9\)"):
        Gram(X, weights=w[:4])


def test_the_spectral_norm_of_a_convolution():
    kernel = randn(3, 2, 3, 3).requires_grad_()
    side = 6

    def convolve(u, kernel):
        image = u.reshape(-1, 2, side, side)
        out = torch.nn.functional.conv2d(image, kernel, padding=1)
        return out.reshape(*u.shape[:-1], 3 * side * side)

    n = 2 * side * side
    A = FromMatvec(convolve, (3 * side * side, n), [kernel])
    value = pmaf.isvd(A).values
    dense = convolve(torch.eye(n, dtype=T), kernel).mT
    torch.testing.assert_close(value, torch.linalg.matrix_norm(dense, 2))
    found, expected = (
        torch.autograd.grad(x, kernel)[0] for x in (value, torch.linalg.matrix_norm(dense, 2))
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


def test_second_derivatives_by_products_are_refused():
    A = randn(6, 4).requires_grad_()
    (first,) = torch.autograd.grad(pmaf.isvd(Matrix(A)).left.sum(), A, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        first.sum().backward()


def test_a_start_for_a_search():
    A = randn(40, 30)
    for x in (A, A.mT.contiguous()):
        cold = pmaf.isvd(Matrix(x), 2)
        for init in (cold.right, cold.right[:, 0]):
            k = None if init.dim() == 1 else 2
            warm = pmaf.isvd(Matrix(x), k, init=init)
            torch.testing.assert_close(warm.values, cold.values[..., : k or 1].squeeze(-1)
                                       if k is None else cold.values)  # fmt: skip


def test_modules_are_the_functions():
    A, w, r = randn(3, 6, 4), randn(3, 6, seed=1).square(), randn(4, seed=2)
    for k in (None, 2):
        found = pmaf.NullSpace(k)(A, w, r)
        assert torch.equal(found, pmaf.nullspace(A, k, weights=w, reference=r))
        assert torch.equal(pmaf.NullSpace(k)(A), pmaf.nullspace(A, k))
        for largest in (True, False):
            layer = pmaf.ISVD(k, largest=largest, solver=SVD())
            for x, y in zip(layer(A, r), pmaf.isvd(A, k, largest=largest, reference=r)):
                assert torch.equal(x, y)
            assert repr(layer) == (
                f"ISVD(k={k}, largest={largest}, descending={largest}, solver=SVD())"
            )
    start = pmaf.isvd(A, 2).right
    assert pmaf.ISVD(2, solver=Krylov())(A, init=start).right.shape == start.shape
    assert pmaf.NullSpace(2, solver=Krylov())(A, init=start).shape == start.shape
    assert repr(pmaf.NullSpace(solver=SVD())) == "NullSpace(k=None, solver=SVD())"


# Wrong input.


def test_wrong_input():
    A = randn(7, 5)
    cases = [
        (ValueError, "zero or positive; got -1", dict(weights=-torch.ones(7, dtype=T))),
        (ValueError, r"weights of shape \(\*, 7\)", dict(weights=torch.ones(5, dtype=T))),
        (ValueError, "do not broadcast", dict(weights=torch.ones(3, 7, dtype=T), A=randn(2, 7, 5))),
        (TypeError, "weights is torch.float32", dict(weights=torch.ones(7))),
        (TypeError, "weights must be a torch.Tensor", dict(weights=[1.0] * 7)),
        (ValueError, "weights has non-finite", dict(weights=torch.full((7,), torch.nan, dtype=T))),
        (ValueError, "between 1 and n = 5; got 6", dict(k=6)),
        (ValueError, "between 1 and n = 5; got 0", dict(k=0)),
        (TypeError, "k must be None or an integer", dict(k=1.5)),
        (
            ValueError,
            r"reference must have shape \(\*, 5\)",
            dict(reference=torch.ones(7, dtype=T)),
        ),
        (ValueError, "A has non-finite values", dict(A=A / 0)),
        (ValueError, "which has 1 dimension", dict(A=A[0])),
        (TypeError, "not floating-point", dict(A=A.int())),
        (TypeError, "does not serve PrincipalSingularVectors", dict(solver=pmaf.solvers.Dense())),
    ]
    for kind, message, options in cases:
        options = {"A": A, **options}
        with pytest.raises(kind, match=message):
            pmaf.nullspace(options.pop("A"), options.pop("k", None), **options)
    with pytest.raises(ValueError, match=r"min\(m, n\) = 5; got 6"):
        pmaf.isvd(A.mT, 6)
    with pytest.raises(ValueError, match="zero or positive"):
        pmaf.nullspace(Matrix(A), weights=-torch.ones(7, dtype=T))
    with pytest.raises(ValueError, match="zero or positive"):
        torch.func.vmap(pmaf.nullspace)(A.expand(2, 7, 5), weights=-torch.ones(2, 7, dtype=T))
    with pytest.raises(TypeError, match="does not serve"):
        pmaf.solve(pmaf.PrincipalSingularVectors(A), gradient=pmaf.gradients.DDN())
    with pytest.raises(ValueError, match="a solution of this problem has shape"):
        pmaf.certify(pmaf.PrincipalSingularVectors(A, k=2), A)
