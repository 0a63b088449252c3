"""Recipes: calls with options find what the common path finds, in fewer steps."""

import gc
import importlib
import itertools
import weakref

import pytest
import torch

import pmaf
from pmaf import native, recipe
from pmaf.gradients import Implicit
from pmaf.operators import Diagonal, Matrix
from pmaf.solvers import Auto, Dense

# The names of the modules are those of the layers, too.
isvd, nullspace = (importlib.import_module(f"pmaf.layers.{x}") for x in ("isvd", "nullspace"))

pytestmark = pytest.mark.skipif(not native.available, reason="recipes end in compiled kernels")

F32, F64, C64, C128 = torch.float32, torch.float64, torch.complex64, torch.complex128


def drawn(*shape, dtype=F32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def spaced(n, dtype, seed=0):
    """Three symmetric or Hermitian matrices whose eigenvalues are apart."""
    q = torch.linalg.qr(drawn(3, n, n, dtype=dtype, seed=seed)).Q
    values = torch.linspace(-2, 3, n).to(dtype)
    A = (q * values) @ q.mH
    return 0.5 * (A + A.mH)


def definite(n, dtype):
    X = drawn(3, n, n, dtype=dtype, seed=7)
    return 0.5 * (X @ X.mH / n + (X @ X.mH / n).mH) + torch.eye(n, dtype=dtype)


def gradients(found, leaves):
    """Those of a loss that every output takes part in, which signs and phases change."""
    loss = 0.0
    for x in found:
        weights = torch.arange(1.0, x.numel() + 1).cos().reshape(x.shape).to(x.real.dtype)
        loss = loss + (x.real * weights).sum()
        if x.is_complex():
            loss = loss + (x.imag * weights.flip(-1)).sum()
    return torch.autograd.grad(loss, leaves)


@pytest.fixture
def common(monkeypatch):
    """The problems that take the common path."""
    calls, end = [], recipe.end

    def counted(problem, *args, **kwargs):
        calls.append(problem)
        return end(problem, *args, **kwargs)

    monkeypatch.setattr(recipe, "end", counted)
    monkeypatch.setattr(isvd, "end", counted)
    return calls


def references(n, k, dtype):
    yield from (None, 0, n - 1, "largest", drawn(n, dtype=dtype, seed=3))
    yield drawn(3, n, dtype=dtype, seed=4)
    if k is not None:
        yield drawn(n, k, dtype=dtype, seed=5)


OPTIONS = [
    dict(k=k, skip=skip, largest=largest, descending=descending)
    for k, skip, largest, descending in itertools.product(
        (None, 1, 2), (0, 1), (True, False), (None, True, False)
    )
]


@pytest.mark.parametrize("metric", ["one", "dense", "diagonal"])
@pytest.mark.parametrize("dtype", [F32, F64, C64, C128])
def test_eigenvectors_with_options_are_those_of_the_common_path(dtype, metric, common):
    n = 12
    A, eps = spaced(n, dtype), torch.finfo(dtype).eps
    leaves = [A.clone().requires_grad_()]
    if metric != "one":
        M = definite(n, dtype)
        d = M.diagonal(dim1=-2, dim2=-1).real.to(dtype).contiguous()
        leaves.append((M if metric == "dense" else d).clone().requires_grad_())

    def problem(options):
        M = None if metric == "one" else leaves[1]
        return leaves[0], Diagonal(M) if metric == "diagonal" else M, options

    cases = [
        {**options, "reference": reference}
        for i, options in enumerate(OPTIONS)
        for j, reference in enumerate(references(n, options["k"], dtype))
        if (i + j) % 5 == 0  # every option meets every reference
    ]
    for options in cases:
        A, M, given = problem(options)
        k = given["k"]
        common.clear()
        values, vectors = pmaf.ied(A, M=M, **given)
        assert not common, given
        posed = pmaf.PrincipalEigenvectors(A, M=M, **given)
        exact = recipe.run(posed, Dense(), Implicit(), report=False)
        assert values.shape == exact.multiplier.shape
        assert vectors.shape == exact.value.shape
        bound = 1e3 * eps
        torch.testing.assert_close(values, exact.multiplier, rtol=0, atol=bound)
        torch.testing.assert_close(vectors, exact.value, rtol=0, atol=bound)
        found = gradients((values, vectors), leaves)
        for x, y in zip(found, gradients((exact.multiplier, exact.value), leaves)):
            size = float(y.abs().max())
            torch.testing.assert_close(x, y, rtol=0, atol=1e2 * bound * size, msg=str((k, given)))


@pytest.fixture
def forced(monkeypatch):
    """A function that calls a layer on the common path, as if it had no recipe."""

    def call(layer, *args, **kwargs):
        with monkeypatch.context() as patched:
            for module in (isvd, nullspace):
                patched.setattr(module, "short_recipe", lambda *_: None)
            return layer(*args, **kwargs)

    return call


def spread(m, n, dtype):
    """Three matrices whose singular values are 1, 2, … apart from rounding."""
    k = min(m, n)
    u, v = (torch.linalg.qr(drawn(3, x, k, dtype=F64, seed=x)).Q for x in (m, n))
    return ((u * torch.arange(1.0, k + 1)) @ v.mT / k).to(dtype)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("shape", [(14, 9), (9, 9), (9, 14)], ids=str)
def test_singular_vectors_are_those_of_the_common_path(shape, dtype, common, forced):
    A, w = spread(*shape, dtype), drawn(3, shape[0], dtype=dtype, seed=2).square() + 0.5
    leaves = [A.requires_grad_(), w.requires_grad_()]
    bound = 1e3 * torch.finfo(dtype).eps
    for k in (None, 1, 2, 3):
        for reference in (None, 0, drawn(shape[1], dtype=dtype)):
            calls = [(pmaf.nullspace, leaves, {"k": k, "weights": w, "reference": reference})]
            calls += [(pmaf.nullspace, leaves[:1], {"k": k, "reference": reference})]
            calls += [
                (pmaf.isvd, leaves[:1], {"k": k, "reference": reference, **order})
                for order in (
                    dict(largest=True),
                    dict(largest=False),
                    dict(largest=True, descending=False),
                )
            ]
            for layer, given, options in calls:
                common.clear()
                found, exact = layer(A, **options), forced(layer, A, **options)
                assert len(common) == 1, (layer, options)
                found, exact = (x if isinstance(x, tuple) else (x,) for x in (found, exact))
                if layer is pmaf.nullspace and k is not None and shape[0] < shape[1]:
                    # Null vectors are one group, and any orthonormal ones of it will do.
                    found, exact = ([x @ x.mT for x in y] for y in (found, exact))
                for x, y in zip(found, exact, strict=True):
                    torch.testing.assert_close(x, y, rtol=0, atol=bound)
                for x, y in zip(gradients(found, given), gradients(exact, given), strict=True):
                    size = float(y.abs().max())
                    torch.testing.assert_close(x, y, rtol=0, atol=1e2 * bound * size)


def test_second_derivatives_of_triplets():
    A = spread(6, 4, F64)[0].requires_grad_()
    for k in (None, 2):
        assert torch.autograd.gradcheck(lambda A, k=k: tuple(pmaf.isvd(A, k)), A)
        assert torch.autograd.gradgradcheck(lambda A, k=k: tuple(pmaf.isvd(A, k)), A)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_triplets_of_float32_whose_singular_values_nearly_repeat(scale, common):
    """One gradient has no correct digits, and the rule of the problem says which part is left."""
    A = torch.zeros(2, 5, 4)
    A[0, :4] = torch.diag(torch.tensor([2.0, 2.0 * (1 + 1e-7), 1.0, 0.5]))
    A[1, :4] = torch.diag(torch.tensor([4.0, 2.0, 1.0, 0.5]))
    A = (scale * A).requires_grad_()
    left, _, right = pmaf.isvd(A)
    assert not common
    (dA,) = torch.autograd.grad((left[:, 2] + right[:, 3]).sum(), A)
    assert torch.isfinite(dA).all()
    # dv₃ = (σ₁ dA₁₄ …)/(σ₁² − σ₄²) for the matrix whose values are apart.
    expected = 4.0 / (16 - 0.25) / scale
    torch.testing.assert_close(dA[1, 0, 3], torch.tensor(expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_dtypes_are_computed_in_float32(dtype, common):
    A = spaced(9, F32).to(dtype).requires_grad_()
    values, vectors = pmaf.ied(A, 2, reference=0)
    assert not common
    assert values.dtype == vectors.dtype == dtype
    exact = pmaf.ied(A.detach().double(), 2, reference=0)
    torch.testing.assert_close(
        vectors.detach().double(), exact.vectors, rtol=0, atol=torch.finfo(dtype).eps
    )
    (dA,) = gradients((values, vectors), [A])
    assert dA.dtype == dtype
    B, b = drawn(3, 8, 5).to(dtype), drawn(3, 8).to(dtype)
    u = pmaf.less(B, b)
    assert not [x for x in common if isinstance(x, pmaf.SphereLeastSquares)]
    exact = pmaf.less(B.double(), b.double())
    torch.testing.assert_close(u.double(), exact, rtol=0, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("radius", [2, 0.5, 1e10])
def test_least_squares_on_a_sphere_of_any_radius(radius, common):
    A, b = drawn(3, 8, 5).requires_grad_(), drawn(3, 8, seed=1).requires_grad_()
    u = pmaf.less(A, b, radius=radius)
    assert not common
    exact = pmaf.solve(pmaf.SphereLeastSquares(A.double(), b.double(), radius)).value
    eps = torch.finfo(F32).eps
    torch.testing.assert_close(u.double(), exact, rtol=0, atol=1e2 * eps * radius)
    for x, y in zip(gradients([u], (A, b)), gradients([exact], (A, b))):
        torch.testing.assert_close(x, y, rtol=0, atol=1e3 * eps * float(y.abs().max()))


@pytest.mark.parametrize(
    "options",
    [dict(skip=1), dict(k=2, skip=1), dict(k=2, descending=False), dict(k=2, reference=0)],
    ids=str,
)
def test_what_options_return_may_be_written_into(options):
    A = spaced(9, F32).requires_grad_()
    found = pmaf.ied(A, **options)
    expected = gradients(found, [A])
    values, vectors = pmaf.ied(A, **options)

    vectors.detach().zero_()
    for x, y in zip(gradients((values, vectors), [A]), expected):
        assert torch.equal(x, y)


def test_the_cache_holds_no_tensor_and_knows_true_from_one():
    A = spaced(9, F32)
    recipe._recipe.cache_clear()
    d = definite(9, F32).diagonal(dim1=-2, dim2=-1).clone()
    given = drawn(9, seed=1), drawn(9, seed=2), d
    pmaf.ied(A, 1, reference=1, M=Diagonal(given[2]))
    pmaf.ied(A, 1, reference=given[0], init=given[1])
    assert recipe._recipe.cache_info().currsize == 2
    seen = [weakref.ref(x) for x in given]
    del given, d
    gc.collect()
    assert [x() for x in seen] == [None] * 3
    # The signatures that True would be taken for.
    for options in ({}, {"reference": 1}, {"skip": 1}):
        pmaf.ied(A, 1, **options)
    with pytest.raises(TypeError, match="k must be None or an integer; got True"):
        pmaf.ied(A, True)
    with pytest.raises(ValueError, match="reference must be a tensor"):
        pmaf.ied(A, 1, reference=True)
    with pytest.raises(TypeError, match="skip must be an integer"):
        pmaf.ied(A, 1, skip=True)


def test_what_has_no_recipe_takes_the_common_path(common):
    A = spaced(9, F32)
    for call in (
        lambda: pmaf.ied(A, solver=Dense()),
        lambda: pmaf.ied(Matrix(A)),
        lambda: pmaf.ied(A, 8),
        lambda: pmaf.ied(A[:0]),
        lambda: torch.func.vmap(pmaf.ied)(A),
        lambda: pmaf.ied(A, gradient=pmaf.gradients.DDN()),
    ):
        common.clear()
        call()
        assert common
    common.clear()
    pmaf.ied(A, solver=Auto(), gradient=Implicit())
    assert not common


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(bad):
    A = spaced(9, F32)
    wrong = drawn(9)
    wrong[3] = bad
    for options in ({"reference": wrong}, {"init": wrong}, {"reference": wrong, "k": 2}):
        with pytest.raises(pmaf.NonFiniteError, match="non-finite"):
            pmaf.ied(A, **options)
    spoilt = A.clone()
    spoilt[1, 2, 2] = bad
    with pytest.raises(pmaf.NonFiniteError, match="A has non-finite values in 1 of 3 batch"):
        pmaf.ied(spoilt, reference=0)
