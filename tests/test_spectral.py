"""Functions of the spectrum: values, derivatives where eigenvalues repeat, and bad input."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
import torch
from mpmath import mp, mpf
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jacfwd, jacrev

import pmaf
from pmaf import native
from pmaf.layers import spectral as layer
from pmaf.linalg import matrix_function
from pmaf.linalg.divided_differences import (
    NAMED,
    divided_difference,
    gauss_legendre,
    of_callable,
    simplex_rule,
)
from tests.ied_cases import with_eigenvalues
from tests.oracles import differences

# Tracing and forward mode raise torch's own deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

T = torch.float64
EPS = torch.finfo(T).eps

EXACT = {
    "sqrt": mp.sqrt,
    "inverse": lambda x: 1 / x,
    "inverse_sqrt": lambda x: 1 / mp.sqrt(x),
    "log": mp.log,
    "exp": mp.exp,
    "square": lambda x: x * x,
    "identity": lambda x: x,
    "one": lambda x: mpf(1),
}


def pole(x):
    return 1 / (x + 0.125)


def wave(x):
    return torch.sin(8 * x)


CALLABLES = {
    "tanh": (torch.tanh, mp.tanh),
    "pole": (pole, lambda x: 1 / (x + mpf(0.125))),
    "wave": (wave, lambda x: mp.sin(8 * x)),
}
FUNCTIONS = [*NAMED, torch.tanh, pole]


def name_of(function):
    return function if isinstance(function, str) else function.__name__


def weights(x):
    return torch.cos(torch.arange(x.numel(), dtype=T) + 1).to(x.dtype).reshape(x.shape)


def exact_difference(f, points):
    """A divided difference in as many digits as mpmath has."""
    if points[0] == points[-1]:
        order = len(points) - 1
        return mp.diff(f, points[0], order) / mp.factorial(order)
    return (exact_difference(f, points[1:]) - exact_difference(f, points[:-1])) / (
        points[-1] - points[0]
    )


class TestDividedDifferences:
    GAPS = (0.0, 1e-15, 1e-9, 1e-4, 0.03, 0.2, 1.0, 30.0)

    @pytest.mark.parametrize("order", [1, 2, 3])
    @pytest.mark.parametrize("name", [*EXACT, *CALLABLES])
    def test_they_have_all_digits_at_any_distance(self, name, order):
        scalar = NAMED[name] if name in NAMED else of_callable(CALLABLES[name][0])
        f = EXACT[name] if name in EXACT else CALLABLES[name][1]
        steps = self.GAPS if order < 3 else self.GAPS[::2]
        cases = list(itertools.product(steps, repeat=order))
        points = torch.tensor([[0.75, *case] for case in cases], dtype=T).cumsum(-1)
        found = divided_difference(scalar, points.unbind(-1))
        # A quotient of points that are too far apart for a quadrature loses one digit an order.
        # It is relative to the terms, of which those of a wave cancel.
        bound = 16 * EPS * 16 ** (order - 1)
        with mp.workdps(100):
            for x, value in zip(points.tolist(), found.tolist()):
                exact = exact_difference(f, [mpf(t) for t in x])
                size = abs(exact)
                if name in ("wave", "tanh"):
                    width = max(mpf(x[-1]) - mpf(x[0]), mpf(0.125))
                    size = max(size, width ** (-order))
                assert abs(value - exact) <= bound * max(size, mpf(1e-300)), (x, value, exact)

    def test_what_happens_between_the_nodes_of_both_rules_is_not_missed(self):
        """Both rules see the flat part of the function only, and agree."""
        low, high = torch.tensor([0.5, 1e4], dtype=T)
        found = float(divided_difference(of_callable(torch.tanh), [low, high]))
        assert found == pytest.approx(float((high.tanh() - low.tanh()) / (high - low)), rel=4 * EPS)

    def test_a_kink_between_the_points(self):
        low, high = torch.tensor([-1.0, 3.0], dtype=T)
        found = float(divided_difference(of_callable(torch.relu), [low, high]))
        assert found == 0.75

    @pytest.mark.parametrize("count", [1, 5, 8])
    def test_rules_are_exact_for_polynomials(self, count):
        w, t = (np.array(x) for x in gauss_legendre(count))
        for degree in range(2 * count):
            assert (w * t**degree).sum() == pytest.approx(1 / (degree + 1), rel=16 * EPS)

    @pytest.mark.parametrize("order", [1, 2, 3])
    def test_the_rule_of_a_simplex(self, order):
        """The integral of `t₁ᵃ t₂ᵇ …` is `a! b! … / (m + a + b + …)!` (Dirichlet)."""
        w, t = (np.array(x) for x in simplex_rule(order, 5))
        for powers in itertools.product(range(3), repeat=order):
            exact = mp.fprod(mp.factorial(p) for p in powers) / mp.factorial(order + sum(powers))
            found = (w * np.prod(t ** np.array(powers), -1)).sum()
            assert found == pytest.approx(float(exact), rel=64 * EPS)


class TestValues:
    def posed(self, *batch, n=5, dtype=T):
        X = torch.randn(*batch, n, 2 * n, dtype=T, generator=torch.Generator().manual_seed(n))
        A = X @ X.mT / n + 0.5 * torch.eye(n, dtype=T)
        return A.to(dtype)

    @pytest.mark.parametrize("dtype", [torch.float32, T])
    @pytest.mark.parametrize("n", [1, 2, 5, 40])
    def test_what_the_names_mean(self, n, dtype):
        A = self.posed(3, n=n, dtype=dtype)
        eye = torch.eye(n, dtype=dtype).expand_as(A)
        root, inverse, white, log = (
            pmaf.spectral(A, name) for name in ("sqrt", "inverse", "inverse_sqrt", "log")
        )
        cond = float(torch.linalg.cond(A.double()).max())
        close = dict(rtol=0, atol=64 * n * torch.finfo(dtype).eps * cond * float(A.abs().max()))
        torch.testing.assert_close(root @ root, A, **close)
        torch.testing.assert_close(inverse @ A, eye, **close)
        torch.testing.assert_close(white @ A @ white, eye, **close)
        torch.testing.assert_close(torch.linalg.matrix_exp(log), A, **close)
        torch.testing.assert_close(pmaf.spectral(log, "exp"), A, **close)
        torch.testing.assert_close(pmaf.spectral(A, "square"), A @ A, **close)
        torch.testing.assert_close(pmaf.spectral(A, "identity"), A, **close)
        torch.testing.assert_close(pmaf.spectral(A, "one"), eye, **close)

    @pytest.mark.parametrize("largest", [True, False])
    @pytest.mark.parametrize("k", [1, 3, 5])
    @pytest.mark.parametrize("function", ["one", "sqrt", torch.tanh], ids=name_of)
    def test_of_k_eigenpairs(self, function, k, largest):
        A = self.posed(2, 3)
        found = pmaf.spectral(A, function, k, largest=largest)
        f = {"one": np.ones_like, "sqrt": np.sqrt}.get(function, np.tanh)
        for matrix, value in zip(A.flatten(0, 1).numpy(), found.flatten(0, 1).numpy()):
            x, V = np.linalg.eigh(matrix)
            part = slice(5 - k, 5) if largest else slice(0, k)
            gap = 1.0 if k == 5 else float(np.diff(x)[4 - k if largest else k - 1])
            expected = (V[:, part] * f(x[part])) @ V[:, part].T
            assert np.abs(value - expected).max() <= 64 * EPS * x[-1] * f(x).max() / min(gap, 1)

    def test_of_the_symmetric_part(self):
        A = torch.randn(4, 4, dtype=T) + 5 * torch.eye(4, dtype=T)
        S = (0.5 * (A + A.mT)).requires_grad_()
        A.requires_grad_()
        first, second = pmaf.spectral(A, "log"), pmaf.spectral(S, "log")
        assert torch.equal(first, second)
        assert torch.equal(first, first.mT)
        (dA,) = torch.autograd.grad((first * weights(first)).sum(), A)
        (dS,) = torch.autograd.grad((second * weights(second)).sum(), S)
        assert torch.equal(dA, dS)
        assert torch.equal(dA, dA.mT)

    def test_a_value_of_its_own(self):
        A = self.posed(2)
        out = pmaf.spectral(A.requires_grad_(), "identity")
        out.mul_(2).sum().backward()
        assert A.grad is not None
        torch.testing.assert_close(A.grad, torch.full_like(A, 2.0))

    def test_many_small_matrices(self):
        A = self.posed(10_000, n=3, dtype=torch.float32).requires_grad_()
        B = A.detach().double().requires_grad_()
        for X in (A, B):
            (pmaf.spectral(X, "inverse_sqrt") * weights(X)).sum().backward()
        # The condition of the gradient is at most that of A to the power 3/2.
        cond = float(torch.linalg.cond(B.detach()).max()) ** 1.5
        error = float((A.grad - B.grad).abs().max() / B.grad.abs().max())
        assert error <= 64 * torch.finfo(torch.float32).eps * cond

    @pytest.mark.parametrize("batch", [(0,), (2, 0)], ids=str)
    def test_empty_batches(self, batch):
        A = torch.ones(*batch, 3, 3, requires_grad=True)
        out = pmaf.spectral(A, "sqrt", 2)
        assert out.shape == A.shape
        out.sum().backward()
        assert A.grad.shape == A.shape

    @pytest.mark.parametrize("scale", [1e15, 1e-15, 1e150, 1e-150, 1e300, 1e-300])
    @pytest.mark.parametrize(("name", "power"), [("sqrt", 0.5), ("one", 0.0), ("identity", 1.0)])
    @pytest.mark.parametrize("k", [None, 2])
    def test_any_scale(self, k, name, power, scale):
        results = []
        for unit in (1.0, scale):
            A = (self.posed(2) * unit).requires_grad_()
            out = pmaf.spectral(A, name, k)
            (dA,) = torch.autograd.grad((out * weights(out)).sum(), A)
            results.append((out.detach() / unit**power, dA / unit ** (power - 1)))
        for x, y in zip(*results):
            torch.testing.assert_close(x, y, rtol=0, atol=1e3 * EPS * float(y.abs().max()))


# Eigenvalues, and groups of them that are apart from the rest.
CASES = [
    ([2.0, 2.0, 2.0, 2.0], None, True),
    ([3.0, 3.0, 1.0, 0.5], None, True),
    ([3.0, 1.0, 1.0, 1.0], 1, True),
    ([3.0, 3.0, 1.0, 0.5], 1, False),
    ([3.0, 3.0, 1.0, 0.5], 3, True),
    ([3.0, 1.0, 1.0, 0.5], 3, False),
]


class TestDerivatives:
    @pytest.mark.parametrize(("values", "k", "largest"), CASES, ids=str)
    @pytest.mark.parametrize("function", FUNCTIONS, ids=name_of)
    def test_first_and_second(self, function, values, k, largest):
        A = with_eigenvalues(values).requires_grad_()

        def call(A):
            return pmaf.spectral(A, function, k, largest=largest)

        assert gradcheck(call, A)
        assert gradgradcheck(call, A, fast_mode=True)

    @pytest.mark.parametrize("function", ["sqrt", "log", torch.tanh], ids=name_of)
    def test_exactly_diagonal(self, function):
        """The matrices of the design: `2I`, `diag(3, 3, 1, ½)`, `diag(2, 1, 1, 0)` + 1."""
        for values in ([2.0, 2, 2], [3.0, 3, 1, 0.5], [3.0, 2, 2, 1]):
            A = torch.diag(torch.tensor(values, dtype=T)).requires_grad_()
            assert gradcheck(lambda A: pmaf.spectral(A, function), A)
            assert gradgradcheck(lambda A: pmaf.spectral(A, function), A, fast_mode=True)

    def test_torch_has_none_there(self):
        A = torch.diag(torch.tensor([3.0, 3.0, 1.0, 0.5], dtype=T)).requires_grad_()
        values, vectors = torch.linalg.eigh(A)
        out = vectors * values.sqrt() @ vectors.mT
        (theirs,) = torch.autograd.grad((out * weights(out)).sum(), A)
        ours = pmaf.spectral(A, "sqrt")
        (dA,) = torch.autograd.grad((ours * weights(ours)).sum(), A)
        assert theirs.isnan().any()
        expected = differences(
            lambda A: (pmaf.spectral(A, "sqrt") * weights(A)).sum(), A.detach(), step=1e-5
        )
        torch.testing.assert_close(dA, expected, rtol=0, atol=1e-8)

    def test_of_the_reconstruction(self):
        """The sum of all entries of `V Λ Vᵀ` has the gradient of all ones, also at `I`."""
        A = torch.eye(3, dtype=T, requires_grad=True)
        pmaf.spectral(A, "identity").sum().backward()
        torch.testing.assert_close(A.grad, torch.ones(3, 3, dtype=T), rtol=0, atol=8 * EPS)

    @pytest.mark.parametrize("gap", [1e-3, 1e-8, 1e-15])
    @pytest.mark.parametrize(("k", "largest"), [(None, True), (3, True), (3, False)])
    @pytest.mark.parametrize("name", ["sqrt", "inverse", "inverse_sqrt", "log", "exp", "pole"])
    def test_nearly_repeated(self, name, k, largest, gap):
        """First and second derivatives beside those of the same matrix in 50 digits."""
        rest = 6.0 if k is not None and not largest else 0.5
        A = with_eigenvalues([2.0, 2.0 + gap, 2.0 + 3 * gap, rest], seed=3)
        A = 0.5 * (A + A.mT)
        G, W = (
            with_eigenvalues(x, seed=s) for s, x in enumerate(([1.0, -1, 2, 0], [2.0, 1, 1, -1]))
        )
        function, f = (name, EXACT[name]) if name in EXACT else CALLABLES[name]
        leaf, direction = A.clone().requires_grad_(), G.clone().requires_grad_()
        out = pmaf.spectral(leaf, function, k, largest=largest)
        (first,) = torch.autograd.grad(out, leaf, direction, create_graph=True)
        (second,) = torch.autograd.grad(first, leaf, W)
        exact = exact_derivatives(A, f, k, largest, G, W)
        # The distances to the rest are 1.5 and 4; the derivatives of f grow by less than tenfold
        # an order.
        for found, wanted in zip((out.detach(), first.detach(), second), exact):
            size = float(wanted.abs().max())
            assert float((found - wanted).abs().max()) <= 512 * EPS * size

    @pytest.mark.parametrize("function", ["sqrt", torch.tanh], ids=name_of)
    @pytest.mark.parametrize(("values", "k", "largest"), CASES, ids=str)
    def test_forward_mode(self, function, values, k, largest):
        A = with_eigenvalues(values)

        def loss(A):
            out = pmaf.spectral(A, function, k, largest=largest)
            return (out * weights(out)).sum()

        expected = jacrev(jacrev(loss))(A)
        for found in (jacfwd(jacrev(loss))(A), jacrev(jacfwd(loss))(A), jacfwd(jacfwd(loss))(A)):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e4 * EPS)
        torch.testing.assert_close(jacfwd(loss)(A), jacrev(loss)(A), rtol=0, atol=1e3 * EPS)

    def test_third_derivatives_in_any_mix_of_modes(self):
        A = with_eigenvalues([3.0, 3.0, 1.0])
        E = weights(A) + weights(A).mT

        def along(t):
            out = pmaf.spectral(A + t * E, "log")
            return (out * weights(out)).sum()

        zero = torch.zeros((), dtype=T)
        # Of the second derivative by central differences; the fifth derivative is below 10⁴.
        second, step = jacrev(jacrev(along)), 1e-4
        expected = (second(zero + step) - second(zero - step)) / (2 * step)
        for modes in itertools.product((jacfwd, jacrev), repeat=3):
            third = along
            for mode in modes:
                third = mode(third)
            assert float(third(zero)) == pytest.approx(float(expected), rel=1e-3)

    def test_forward_mode_inside_reverse_mode(self):
        """A tangent by `forward_ad`, differentiated by autograd."""
        A, E = with_eigenvalues([3.0, 3.0, 1.0]), weights(torch.empty(3, 3))
        leaf = A.clone().requires_grad_()
        _, tangent = torch.func.jvp(lambda A: pmaf.spectral(A, "log"), (leaf,), (E,))
        (found,) = torch.autograd.grad((tangent * weights(tangent)).sum(), leaf)

        def along(A):
            return (
                torch.func.jvp(lambda A: pmaf.spectral(A, "log"), (A,), (E,))[1] * weights(A)
            ).sum()

        torch.testing.assert_close(found, jacrev(along)(A), rtol=0, atol=1e3 * EPS)

    @pytest.mark.parametrize("function", ["log", torch.tanh], ids=name_of)
    def test_sums_in_parts(self, function, monkeypatch):
        """No array of n³ numbers: the sum over inner indices is taken in parts."""
        A = torch.stack([with_eigenvalues([3.0, 3.0, 1.0, 0.5], seed=s) for s in (0, 1)])

        def hessian_product():
            leaf = A.clone().requires_grad_()
            out = pmaf.spectral(leaf, function, 3)
            (first,) = torch.autograd.grad((out * weights(out)).sum(), leaf, create_graph=True)
            return torch.autograd.grad((first * weights(first)).sum(), leaf)[0]

        whole, sizes = hessian_product(), []
        inner = matrix_function.MatrixFunction._differences

        def counted(self, values, index):
            found = inner(self, values, index)
            sizes.append(found.numel())
            return found

        monkeypatch.setattr(matrix_function.MatrixFunction, "_differences", counted)
        monkeypatch.setattr(matrix_function, "_NUMBERS", 1)
        parts = hessian_product()
        assert sizes == [2 * 4 * 4] * 4
        torch.testing.assert_close(parts, whole, rtol=0, atol=64 * EPS * float(whole.abs().max()))

    def test_square_root_of_a_matrix_without_full_rank(self):
        """`(XᵀX)^½` is differentiable in X, though the square root is not at zero."""
        X = torch.randn(2, 5, dtype=T, requires_grad=True)
        assert gradcheck(lambda X: pmaf.spectral(X.mT @ X, "sqrt"), X)
        A = (X.mT @ X).detach()
        root = pmaf.spectral(A, "sqrt")
        # Rounding of zero eigenvalues is not magnified by the root.
        assert float((root @ root - A).abs().max()) <= 64 * EPS * float(A.abs().max())
        assert int((torch.linalg.eigvalsh(root) > 64 * EPS).sum()) == 2

    @pytest.mark.parametrize("k", [1, 3])
    def test_a_group_that_is_not_apart(self, k):
        A = torch.diag(torch.tensor([2.0, 2.0, 1.0, 1.0], dtype=T)).requires_grad_()
        out = pmaf.spectral(A, "sqrt", k)
        (first,) = torch.autograd.grad(out.sum(), A, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), A)
        assert torch.isfinite(first).all()
        assert torch.isfinite(second).all()


def exact_derivatives(A, f, k, largest, G, W):
    """`V f(Λ) Vᵀ`, its derivative along G, and its second derivative along G and W."""
    n = len(A)
    with mp.workdps(60):
        x, V = mp.eigsy(mp.matrix(A.tolist()))
        first = 0 if k is None or not largest else n - k
        group = range(n) if k is None else range(first, first + k)
        g, w = (V.T * mp.matrix(X.tolist()) * V for X in (G, W))

        def value(i):
            return f(x[i]) if i in group else mpf(0)

        def two(i, j):
            return mp.diff(f, x[i]) if i == j and i in group else (
                mpf(0) if i == j else (value(i) - value(j)) / (x[i] - x[j])
            )  # fmt: skip

        def three(*index):
            i, j, o = sorted(index, key=lambda t: (x[t], t))
            if i == o:
                return mp.diff(f, x[i], 2) / 2 if i in group else mpf(0)
            return (two(i, j) - two(j, o)) / (x[i] - x[o])

        def turned(entry):
            inner = mp.matrix(n, n)
            for i, j in itertools.product(range(n), repeat=2):
                inner[i, j] = entry(i, j)
            rows = (V * inner * V.T).tolist()
            return torch.tensor([[float(t) for t in row] for row in rows], dtype=T)

        def entry(i, j):
            return mp.fsum(
                three(i, j, o) * (g[i, o] * w[o, j] + w[i, o] * g[o, j]) for o in range(n)
            )

        return (
            turned(lambda i, j: value(i) if i == j else mpf(0)),
            turned(lambda i, j: two(i, j) * g[i, j]),
            turned(entry),
        )


@pytest.mark.parametrize(
    "derive",
    [
        lambda loss: torch.func.grad(loss),
        lambda loss: lambda A: torch.func.jvp(loss, (A,), (weights(A),))[1],
        lambda loss: jacrev(jacrev(loss)),
    ],
    ids=["grad", "jvp", "jacrev of jacrev"],
)
def test_transforms_inside_a_trace(derive):
    torch._dynamo.reset()
    A = with_eigenvalues([3.0, 3.0, 1.0])

    def loss(A):
        out = pmaf.spectral(A, "sqrt")
        return (out * weights(out)).sum()

    found = torch.compile(derive(loss), fullgraph=True, backend="aot_eager")(A)
    torch.testing.assert_close(found, derive(loss)(A), rtol=0, atol=1e3 * EPS)
    assert float(found.abs().max()) > 1e6 * EPS


def test_autograd_around_a_transform_in_a_trace():
    torch._dynamo.reset()
    A = with_eigenvalues([3.0, 3.0, 1.0])

    def first(A):
        return torch.func.grad(lambda A: (pmaf.spectral(A, "sqrt") * weights(A)).sum())(A)

    results = []
    for call in (first, torch.compile(first, fullgraph=True, backend="aot_eager")):
        leaf = A.clone().requires_grad_()
        results.append(torch.autograd.grad((call(leaf) * weights(A)).sum(), leaf)[0])
    torch.testing.assert_close(*results, rtol=0, atol=1e3 * EPS)


class Filter(torch.nn.Module):
    """A learned function of one number."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(1, 4, dtype=T), torch.nn.Linear(4, 1, dtype=T)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x.unsqueeze(-1)))).squeeze(-1)


class TestParameters:
    @staticmethod
    def power(A, p, k=None):
        return pmaf.spectral(A, lambda x: p[1] * x ** p[0], k)

    @pytest.mark.parametrize("k", [None, 2])
    def test_derivatives_in_the_matrix_and_in_the_parameters(self, k):
        A = with_eigenvalues([3.0, 3.0, 1.0, 0.5]).requires_grad_()
        p = torch.tensor([0.7, 0.3], dtype=T, requires_grad=True)
        assert gradcheck(lambda A, p: self.power(A, p, k), (A, p))
        assert gradgradcheck(lambda A, p: self.power(A, p, k), (A, p))

    def test_in_any_mode(self):
        A, p = with_eigenvalues([3.0, 3.0, 1.0]), torch.tensor([0.7, 0.3], dtype=T)

        def loss(A, p):
            return (self.power(A, p) * weights(A)).sum()

        expected = None
        for outer, inner in itertools.product((jacrev, jacfwd), repeat=2):
            blocks = outer(inner(loss, (0, 1)), (0, 1))(A, p)
            found = torch.cat([x.flatten() for row in blocks for x in row])
            expected = found if expected is None else expected
            torch.testing.assert_close(found, expected, rtol=0, atol=1e3 * EPS)

    def test_a_third_derivative_is_an_error(self):
        A = with_eigenvalues([3.0, 3.0, 1.0]).requires_grad_()
        p = torch.tensor([0.7, 0.3], dtype=T, requires_grad=True)
        (first,) = torch.autograd.grad(self.power(A, p).sum(), p, torch.ones(()), create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), A, create_graph=True)
        with pytest.raises(RuntimeError, match="third derivatives"):
            torch.autograd.grad(second.square().sum(), A)

    def test_a_module_inside_a_module_compiled(self):
        torch._dynamo.reset()
        layer = pmaf.Spectral(Filter(), 2)
        A = with_eigenvalues([3.0, 3.0, 1.0]).requires_grad_()
        leaves = [A, *layer.parameters()]
        assert len(leaves) == 5
        results = []
        # The graph is what is tested, and not the code that is made from it.
        for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
            out = call(A)
            results.append(torch.autograd.grad((out * weights(out)).sum(), leaves))
        for x, y in zip(*results):
            assert float(x.abs().max()) > 0
            torch.testing.assert_close(x, y, rtol=0, atol=64 * EPS)


def ways(caplog):
    return [x.getMessage() for x in caplog.records if x.name == "pmaf"]


def spread_out(n, *values, dtype=T, seed=0):
    """A matrix with the given eigenvalues, and others between −1 and 1, of which some are equal."""
    rest = torch.linspace(-1, 1, n - len(values), dtype=T)
    rest[:2] = -1.0
    A = with_eigenvalues([*values, *rest.tolist()], seed=seed)
    if dtype.is_complex:
        phases = torch.polar(torch.ones(n, dtype=T), torch.arange(n, dtype=T))
        A = phases.unsqueeze(-1) * A * phases.conj()
    return A.to(dtype)


@pytest.fixture
def whole(monkeypatch):
    """A function that runs another one with whole decompositions only."""

    def run(call):
        with monkeypatch.context() as patch:
            patch.setattr(layer, "_GROUP_MOST", 0)
            return call()

    return run


C128 = torch.complex128
SAME = {
    "sqrt": torch.sqrt,
    "inverse": torch.reciprocal,
    "inverse_sqrt": torch.rsqrt,
    "log": torch.log,
    "exp": torch.exp,
    "square": torch.square,
    "identity": lambda x: 1 * x,
    "one": torch.ones_like,
}


class TestWholeSpectrum:
    """Named functions, whose eigenpairs are all found at once, against the same as callables."""

    SHAPES = ((1,), (2,), (2, 3), (9,), (12,), (13,), (5, 20), (40,))  # batch and n

    @pytest.mark.parametrize("name", SAME)
    @pytest.mark.parametrize("dtype", [torch.float32, T, torch.complex64, C128], ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_values_and_gradients(self, shape, dtype, name, caplog):
        caplog.set_level(logging.DEBUG, logger="pmaf")
        n = shape[-1]
        drawn = torch.Generator().manual_seed(n)
        Q = torch.linalg.qr(torch.randn(*shape, n, dtype=C128, generator=drawn)).Q
        Q = Q if dtype.is_complex else torch.linalg.qr(Q.real).Q
        # Eigenvalues that repeat, in the group and across its edge, and others.
        values = 1 + (torch.arange(n) // 2 * 2 / n)
        A = (Q * values) @ Q.mH
        A = (0.5 * (A + A.mH)).to(dtype)
        kernels = native.available and (n <= 12 or (n <= 32 and len(shape) > 1))
        for k, largest in {(None, True), (min(n, 2), True), (min(n, 2), False)}:
            if k is not None and n % 2:
                continue  # the edge of the group would be between equal eigenvalues
            found = []
            for function in (name, SAME[name]):
                caplog.clear()
                leaf = A.clone().requires_grad_()
                out = pmaf.spectral(leaf, function, k, largest=largest)
                if isinstance(function, str) and kernels:
                    assert ways(caplog) == ["ied: reduction"]
                (dA,) = torch.autograd.grad(out, leaf, weights(out))
                assert torch.equal(out, out.mH)
                assert torch.equal(dA, dA.mH) or not (isinstance(function, str) and kernels)
                found.append((out.detach(), dA))
            gap = 2 / n if k is not None and k < n else 1.0
            bound = 64 * n * torch.finfo(dtype).eps / gap
            for x, y in zip(*found, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=bound * (1 + float(y.abs().max())))

    @pytest.mark.parametrize("dtype", [T, C128], ids=str)
    @pytest.mark.parametrize("k", [None, 2])
    def test_second_derivatives(self, dtype, k):
        values = torch.tensor([1.0, 1.0, 2.0, 2.0])
        Q = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1))).Q
        A = ((Q * values) @ Q.mT).to(dtype)
        A = (0.5 * (A + A.mH)).requires_grad_()
        assert gradgradcheck(lambda A: pmaf.spectral(A, "exp", k), (A,), fast_mode=True)

    def test_a_result_that_is_written_into(self):
        A = torch.diag(torch.tensor([4.0, 1.0, 1.0])).requires_grad_()
        for k in (None, 1):
            out = pmaf.spectral(A, "sqrt", k)
            (plain,) = torch.autograd.grad(pmaf.spectral(A, "sqrt", k).sum(), A)
            (dA,) = torch.autograd.grad(out.mul_(2).sum(), A)
            torch.testing.assert_close(dA, 2 * plain)

    def test_batched_gradients(self):
        A = torch.diag(torch.tensor([4.0, 2.0, 1.0], dtype=T)).requires_grad_()
        out = pmaf.spectral(A, "log")
        rows = torch.eye(9, dtype=T).reshape(9, 3, 3)
        together = torch.autograd.grad(out, A, rows, is_grads_batched=True, retain_graph=True)
        alone = [torch.autograd.grad(out, A, row, retain_graph=True)[0] for row in rows]
        torch.testing.assert_close(together[0], torch.stack(alone))

    def test_what_the_function_is_not_defined_for(self):
        """The errors are those of all matrices, also of one in a batch."""
        A = torch.eye(3, dtype=T).expand(4, 3, 3).clone()
        A[2, 1, 1] = -1.0
        with pytest.raises(ValueError, match="log is not finite at the eigenvalue -1 of A"):
            pmaf.spectral(A, "log")
        A[2, 1, 1] = torch.nan
        with pytest.raises(pmaf.NonFiniteError):
            pmaf.spectral(A, "log")

    @pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e-20, 1e20, 1e150, 1e300])
    def test_any_scale(self, scale):
        Q = torch.linalg.qr(
            torch.randn(5, 5, dtype=T, generator=torch.Generator().manual_seed(2))
        ).Q
        values = torch.tensor([1.0, 2.0, 2.0, 3.0, 4.0], dtype=T)
        A = (Q * (scale * values)) @ Q.mT
        expected = (Q * values.sqrt()) @ Q.mT
        found = pmaf.spectral(A, "sqrt") / scale**0.5
        torch.testing.assert_close(found, expected, rtol=0, atol=64 * EPS)


class TestGroups:
    """A few eigenpairs, found and differentiated without the others."""

    @pytest.mark.parametrize("largest", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, T, torch.complex64, C128])
    @pytest.mark.parametrize(
        ("n", "values"),
        [
            (6, [3.0, 3.0]),
            (30, [3.0]),
            (30, [3.0, 3.0, 2.0]),
            (30, [3.0, 3.0 + 1e-9, 2.0]),
            (450, [3.0, 2.5, 2.0]),
        ],
        ids=str,
    )
    def test_both_ways_agree(self, n, values, dtype, largest, whole, caplog):
        if n > 100 and dtype.is_complex:  # the real matrices are enough
            n = 40
        caplog.set_level(logging.DEBUG, logger="pmaf")
        A = spread_out(n, *values, dtype=dtype)
        A = A if largest else -A
        k, G = len(values), weights(torch.empty(n, n, dtype=T)).to(dtype)
        for function in ("exp", torch.tanh, "square"):

            def call(function=function):
                leaf = A.clone().requires_grad_()
                out = pmaf.spectral(leaf, function, k, largest=largest)
                (dA,) = torch.autograd.grad(out, leaf, G)
                return out.detach(), dA

            caplog.clear()
            found = call()
            taken = ways(caplog)
            # Kernels find all eigenpairs of a small matrix; without them it is decomposed.
            small = n == 6 and isinstance(function, str)
            grouped = (native.available and not small) or n == 450
            assert ("ied: reduction" in taken) == (native.available and n < 450)
            assert ("spectral: group" in taken) == grouped
            assert any(way.startswith("tangent: ") for way in taken) == grouped
            assert ("ied: Krylov space" in taken) == (n == 450)
            caplog.clear()
            expected = whole(call)
            assert "spectral: group" not in ways(caplog)
            # The distance of the group to the rest is one or more, the norm of the matrix three.
            for x, y in zip(found, expected):
                close = 256 * torch.finfo(dtype).eps * float(y.abs().max())
                torch.testing.assert_close(x, y, rtol=0, atol=close)
            assert torch.equal(found[0], found[0].mH)

    @pytest.mark.parametrize("largest", [True, False])
    @pytest.mark.parametrize("dtype", [T, C128])
    @pytest.mark.parametrize("values", [[3.0], [3.0, 3.0], [3.0, 2.0]], ids=str)
    def test_derivatives(self, values, dtype, largest, caplog):
        caplog.set_level(logging.DEBUG, logger="pmaf")
        A = spread_out(7, *values, dtype=dtype)
        A = (A if largest else -A).requires_grad_()
        for function in ("exp", torch.tanh):

            def call(A, function=function):
                return pmaf.spectral(A, function, len(values), largest=largest)

            assert gradcheck(call, A)
            assert gradgradcheck(call, A, atol=1e-4, fast_mode=True)
        # Without kernels, a small matrix is decomposed.
        assert (ways(caplog).count("spectral: group") > 4) == native.available

    def test_gradients_in_batches(self):
        """`torch.autograd` maps over incoming gradients with vmap."""
        A = spread_out(6, 3.0).requires_grad_()
        out = pmaf.spectral(A, "exp", 1)
        directions = torch.randn(3, 6, 6, dtype=T)
        (found,) = torch.autograd.grad(out, A, directions, is_grads_batched=True, retain_graph=True)
        for x, direction in zip(found, directions):
            (alone,) = torch.autograd.grad(out, A, direction, retain_graph=True)
            torch.testing.assert_close(x, alone, rtol=0, atol=1e3 * EPS * float(alone.abs().max()))

    def test_gradients_of_eigenvectors_in_batches(self):
        A = spread_out(6, 3.0).requires_grad_()
        out, directions = pmaf.ied(A).vectors, torch.randn(3, 6, dtype=T)
        (found,) = torch.autograd.grad(out, A, directions, is_grads_batched=True, retain_graph=True)
        for x, direction in zip(found, directions):
            (alone,) = torch.autograd.grad(out, A, direction, retain_graph=True)
            torch.testing.assert_close(x, alone, rtol=0, atol=1e3 * EPS * float(alone.abs().max()))

    def test_which_functions_need_all_eigenvalues(self, caplog):
        caplog.set_level(logging.DEBUG, logger="pmaf")
        X = torch.randn(2, 20, dtype=T, generator=torch.Generator().manual_seed(0))
        A = X.mT @ X
        power = torch.tensor(0.7, dtype=T, requires_grad=True)
        cases = [
            # The square root of rounding is zero, which depends on the norm of the matrix.
            ("sqrt", 2, False, False),
            ("exp", 2, False, True),
            ("sqrt", 2, True, True),
            (lambda x: x**power, 2, True, False),
            ("one", 7, True, False),
        ]
        for function, k, largest, grouped in cases:
            caplog.clear()
            found = pmaf.spectral(A, function, k, largest=largest)
            assert ("spectral: group" in ways(caplog)) == (grouped and native.available)
            assert found.isfinite().all()
        # Exactly zero, not the root of rounding.
        assert float(pmaf.spectral(A, "sqrt", 2, largest=False).abs().max()) == 0.0
        rounding = torch.diag(torch.tensor([1.0, 1, 1, 1, 1e-17, 1e-17], dtype=T))
        assert float(pmaf.spectral(rounding, "sqrt", 2, largest=False).abs().max()) == 0.0
        with pytest.raises(ValueError, match="log is not finite at the eigenvalue"):
            pmaf.spectral(A, "log", 2, largest=False)
        with pytest.raises(ValueError, match="each eigenvalue alone"):
            pmaf.spectral(A, lambda x: x / x.sum(-1, keepdim=True), 2)
        with pytest.raises(ValueError, match="of the shape of its argument"):
            pmaf.spectral(A, torch.sum, 2)

    @pytest.mark.parametrize("largest", [True, False])
    def test_a_decomposition_that_is_known(self, largest, whole, caplog):
        """A search that ends with a decomposition has all eigenpairs."""
        caplog.set_level(logging.DEBUG, logger="pmaf")
        A = spread_out(300, 3.0, 3.0, 2.0)
        A = A if largest else -A

        def call():
            leaf = A.clone().requires_grad_()
            out = pmaf.spectral(leaf, "exp", 3, largest=largest)
            (dA,) = torch.autograd.grad((out * weights(out)).sum(), leaf)
            return out.detach(), dA

        found = call()
        assert ways(caplog) == ["ied: decomposition"]
        for x, y in zip(found, whole(call)):
            torch.testing.assert_close(x, y, rtol=0, atol=256 * EPS * float(y.abs().max()))

    def test_a_group_that_is_not_apart_has_finite_gradients(self):
        for n in (7, 300):
            A = torch.diag(torch.ones(n, dtype=T)).requires_grad_()
            out = pmaf.spectral(A, "exp", 2)
            (dA,) = torch.autograd.grad((out * weights(out)).sum(), A)
            assert dA.isfinite().all()

    @pytest.mark.parametrize("k", [1, 2])
    def test_batches_are_their_entries(self, k):
        A = torch.stack([spread_out(9, 3.0, 2.5, seed=s) for s in range(6)]).reshape(2, 3, 9, 9)
        A.requires_grad_()
        out = pmaf.spectral(A, "exp", k)
        (dA,) = torch.autograd.grad((out * weights(out[0, 0])).sum(), A)
        one = A.detach()[1, 2].clone().requires_grad_()
        alone = pmaf.spectral(one, "exp", k)
        (da,) = torch.autograd.grad((alone * weights(alone)).sum(), one)
        for x, y in ((out[1, 2], alone), (dA[1, 2], da)):
            torch.testing.assert_close(x, y, rtol=0, atol=1e3 * EPS * float(y.detach().abs().max()))


class TestComplex:
    @pytest.mark.parametrize("dtype", [torch.complex64, C128])
    @pytest.mark.parametrize("name", ["sqrt", "inverse_sqrt", "log", "exp", "one"])
    @pytest.mark.parametrize(("k", "largest"), [(None, True), (2, True), (1, False), (4, False)])
    def test_values_are_those_of_eigh(self, k, largest, name, dtype):
        X = torch.randn(3, 5, 9, dtype=C128, generator=torch.Generator().manual_seed(1))
        A = (X @ X.mH).to(dtype)
        found = pmaf.spectral(A, name, k, largest=largest)
        values, V = torch.linalg.eigh(A.to(C128))
        part = slice(None) if k is None else slice(5 - k, 5) if largest else slice(0, k)
        f = NAMED[name].derivative(values, 0)
        expected = (V[..., part] * f[..., part].unsqueeze(-2)) @ V[..., part].mH
        gap = 1.0 if k is None else float(values.diff(dim=-1).amin())
        cond = float(values.max() / values.min()) / min(gap, 1.0)
        close = 64 * torch.finfo(dtype).eps * cond * float(f.abs().max())
        torch.testing.assert_close(found.to(C128), expected, rtol=0, atol=close)
        assert found.dtype == dtype
        assert torch.equal(found, found.mH)

    @pytest.mark.parametrize(("values", "k", "largest"), CASES, ids=str)
    @pytest.mark.parametrize("function", ["sqrt", "log", torch.tanh], ids=name_of)
    def test_derivatives(self, function, values, k, largest):
        turn = torch.polar(torch.ones(4, dtype=T), torch.arange(4, dtype=T))
        A = turn.unsqueeze(-1) * with_eigenvalues(values) * turn.conj()
        A.requires_grad_()

        def call(A):
            return pmaf.spectral(A, function, k, largest=largest)

        assert gradcheck(call, A)
        assert gradgradcheck(call, A, fast_mode=True)

    def test_parameters_and_the_hermitian_part(self):
        A = torch.randn(4, 4, dtype=C128, generator=torch.Generator().manual_seed(2))
        A.requires_grad_()
        power = torch.tensor(1.5, dtype=T, requires_grad=True)

        def call(A, power):
            return pmaf.spectral(A @ A.mH, lambda x: x**power)

        assert gradcheck(call, (A, power))
        assert gradgradcheck(call, (A, power), fast_mode=True)
        (dA,) = torch.autograd.grad(pmaf.spectral(A, "exp").real.sum(), A)
        assert torch.equal(dA, dA.mH)
        torch.testing.assert_close(pmaf.spectral(A, "identity"), 0.5 * (A + A.mH))


class TestProducts:
    """Operators: the same matrix, of low rank, not formed."""

    def posed(self, kind, A):
        if kind == "FromMatvec":
            return pmaf.operators.FromMatvec(
                lambda u, A: u @ A.mT, A.shape, (A,), rmatvec=lambda u, A: u @ A.conj()
            )
        return pmaf.operators.Matrix(A)

    @pytest.mark.parametrize("dtype", [T, C128])
    @pytest.mark.parametrize("kind", ["Matrix", "FromMatvec"])
    @pytest.mark.parametrize("largest", [True, False])
    @pytest.mark.parametrize("values", [[3.0], [3.0, 3.0], [3.0, 3.0 + 1e-9, 2.0]], ids=str)
    def test_they_are_their_matrices(self, values, largest, kind, dtype):
        A, k = spread_out(8, *values, dtype=dtype), len(values)
        A = A if largest else -A
        x = weights(torch.empty(2, 8, dtype=T)).to(dtype)
        for function in ("exp", "square", "one", torch.tanh):
            results = []
            for pose in (lambda A: self.posed(kind, A), lambda A: A):
                leaf = A.clone().requires_grad_()
                F = pmaf.spectral(pose(leaf), function, k, largest=largest)
                if isinstance(F, pmaf.operators.Operator):
                    assert isinstance(F, pmaf.operators.LowRank)
                    assert F.shape == (8, 8)
                    image = F.matvec(x)
                else:
                    image = x @ F.mT
                (dA,) = torch.autograd.grad((image.conj() * x.flip(0)).sum().real, leaf)
                results.append((image.detach(), 0.5 * (dA + dA.mH)))
            # A search stops at a residual of 16 eps of the norm, and the gaps are one or more.
            for found, expected in zip(*results):
                close = 4096 * EPS * max(1.0, float(expected.abs().max()))
                torch.testing.assert_close(found, expected, rtol=0, atol=close)

    def test_vectors_times_values_have_another_gradient(self):
        """What `pmaf.ied` gives is not exact where eigenvalues repeat."""
        A, x = spread_out(8, 3.0, 3.0), weights(torch.empty(8, dtype=T))

        def both(leaf):
            found = pmaf.ied(leaf, 2)
            by_vectors = found.vectors * found.values.exp() @ (found.vectors.mT @ x)
            return by_vectors, pmaf.spectral(pmaf.operators.Matrix(leaf), "exp", 2)(x)

        leaf = A.clone().requires_grad_()
        wrong, right = (torch.autograd.grad((y * x.flip(0)).sum(), leaf)[0] for y in both(leaf))
        expected = differences(lambda A: (both(A)[1] * x.flip(0)).sum(), A)
        expected = 0.5 * (expected + expected.mT)
        torch.testing.assert_close(right, expected, rtol=0, atol=1e-7)
        assert float((wrong - expected).abs().max()) > 1e-2

    def test_of_data_sparse_matrices_and_batches(self):
        X = torch.randn(3, 20, 6, dtype=T, generator=torch.Generator().manual_seed(3))
        X = (X * torch.arange(1.0, 7.0, dtype=T)).requires_grad_()
        u = weights(torch.empty(3, 6, dtype=T))
        white = pmaf.spectral(pmaf.operators.Gram(X, 0.05), "inverse_sqrt", 2)
        dense = pmaf.spectral(0.05 * X.mT @ X, "inverse_sqrt", 2)
        expected = (dense @ u.unsqueeze(-1)).squeeze(-1)
        results = []
        for image in (white(u), expected):
            results.append((image.detach(), *torch.autograd.grad(image.square().sum(), X)))
        for x, y in zip(*results):
            torch.testing.assert_close(x, y, rtol=0, atol=1e6 * EPS * float(y.abs().max()))
        A = spread_out(8, 3.0, 2.0)
        F = pmaf.spectral(A.to_sparse(), "exp", 2)
        torch.testing.assert_close(F.left.mT @ F.right, pmaf.spectral(A, "exp", 2))
        half = pmaf.spectral(pmaf.operators.Matrix(A.bfloat16()), "exp", 2)
        assert half.dtype == torch.bfloat16

    def test_rounding_of_zero_counts_as_zero(self):
        X = torch.randn(2, 8, dtype=T, generator=torch.Generator().manual_seed(4))
        F = pmaf.spectral(pmaf.operators.Gram(X), "sqrt", 2, largest=False)
        assert float(F.right.abs().max()) == 0.0
        with pytest.raises(ValueError, match="inverse is not finite"):
            pmaf.spectral(pmaf.operators.Gram(X), "inverse", 2, largest=False)

    def test_second_derivatives_are_refused(self):
        A = spread_out(8, 3.0, 2.0).requires_grad_()
        image = pmaf.spectral(pmaf.operators.Matrix(A), "exp", 2)(torch.ones(8, dtype=T))
        (dA,) = torch.autograd.grad(image.sum(), A, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            dA.square().sum().backward()


class TestErrors:
    @pytest.mark.parametrize(
        ("A", "function", "options", "message"),
        [
            (torch.eye(3), "root", {}, r"one of 'sqrt', .*; got 'root'"),
            (torch.eye(3), 2, {}, "a name or a function of a tensor; got int"),
            (torch.ones(3), "sqrt", {}, r"A must have shape \(\*, n, n\)"),
            (torch.ones(2, 3), "sqrt", {}, r"square, .*got \(2, 3\)"),
            (torch.eye(3), "sqrt", dict(k=4), "between 1 and n = 3; got 4"),
            (torch.eye(3), "sqrt", dict(k=0), "between 1 and n = 3; got 0"),
            (torch.eye(3), "sqrt", dict(k=1.0), "k must be None or an integer"),
            (torch.eye(3, dtype=torch.int64), "sqrt", {}, "use float32 or float64"),
            (torch.eye(3).to_sparse(), "sqrt", {}, r"Sparse\(3, 3\) is known by its products.*k"),
            (pmaf.operators.Gram(torch.eye(3)), "sqrt", {}, "pass k, or A as a dense tensor"),
            (pmaf.operators.Gram(torch.eye(3)), "sqrt", dict(k=4), "between 1 and n = 3; got 4"),
            (torch.full((3, 3), torch.nan), "sqrt", {}, "nan_to_num"),
            (-torch.eye(3), "sqrt", {}, "sqrt is not finite at the eigenvalue -1 "),
            (torch.diag(torch.tensor([1.0, 0.0])), "log", {}, "multiple of the identity"),
            (torch.diag(torch.tensor([1.0, 0.0])), "inverse", {}, "count as zero"),
            (torch.diag(torch.tensor([1.0, -1e-9])), "inverse_sqrt", {}, "count as zero"),
            (-torch.eye(3), torch.log, {}, "function is not finite at the eigenvalue -1 "),
            (torch.eye(3), torch.sum, {}, r"of the shape of its argument, \(3,\); got \(\)"),
            (torch.eye(3), lambda x: 1.0, {}, "of the shape of its argument.*got float"),
            (torch.eye(4), lambda x: x / x.sum(-1, keepdim=True), {}, "each eigenvalue alone"),
        ],
    )
    def test_bad_input(self, A, function, options, message):
        with pytest.raises((TypeError, ValueError), match=message):
            pmaf.spectral(A, function, **options)

    def test_outside_the_domain_a_trace_returns_nan(self):
        A = torch.diag(torch.tensor([1.0, -1.0])).expand(2, 2, 2)
        assert torch.func.vmap(lambda A: pmaf.spectral(A, "sqrt"))(A).isnan().all()
        A = torch.diag(torch.tensor([1.0, 0.0])).expand(2, 2, 2)
        assert torch.func.vmap(lambda A: pmaf.spectral(A, "inverse_sqrt"))(A).isnan().all()

    def test_outside_the_group_the_function_need_not_be_defined(self):
        A = with_eigenvalues([3.0, 2.0, 0.0, -1.0]).requires_grad_()
        for function in ("log", "inverse_sqrt", torch.log):
            assert gradcheck(lambda A, f=function: pmaf.spectral(A, f, 2), A)
            assert gradgradcheck(lambda A, f=function: pmaf.spectral(A, f, 2), A, fast_mode=True)

    def test_rounding_of_zero_counts_as_zero(self):
        A = torch.diag(torch.tensor([1.0, -1e-17], dtype=T)).requires_grad_()
        out = pmaf.spectral(A, "sqrt")
        torch.testing.assert_close(out, torch.diag(torch.tensor([1.0, 0.0], dtype=T)))
        out.sum().backward()
        # f[1, 0] = 1/(√1 + √0); between zero and zero there is no derivative.
        torch.testing.assert_close(A.grad, torch.tensor([[0.5, 1.0], [1.0, 0.0]], dtype=T))
