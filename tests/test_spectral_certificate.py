"""The certificate of a function of the spectrum: what holds, and what is wrong in which respect."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap

import pmaf
from pmaf import certificate
from pmaf.linalg.roundings import DECOMPOSED, SEARCHED
from pmaf.operators import Gram, LowRank, Matrix
from tests.ied_cases import with_eigenvalues

T, C = torch.float64, torch.complex128
EXACT = {"sqrt": torch.sqrt, "inverse": torch.reciprocal, "one": torch.ones_like, "log": torch.log}
FUNCTIONS = [*EXACT, torch.tanh]
# Off by this much, the matrices below do not hold to a tenth of it.
WRONG = 1e-3


def randn(*shape, dtype=T, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def posed(*batch, n=8, dtype=T):
    wide = C if dtype.is_complex else T
    Q = torch.linalg.qr(randn(*batch, n, n, dtype=wide)).Q
    values = torch.linspace(0.5, 3, n, dtype=T).expand(*batch, n)
    return ((Q * values.unsqueeze(-2)) @ Q.mH).to(dtype)


def name_of(function):
    return function if isinstance(function, str) else function.__name__


def condition(A, function, k, largest):
    """`1 + ‖f′(A)‖‖A‖/‖f(A)‖`: how much relative errors of `A` grow, with divided differences."""
    f = EXACT.get(function, function)
    A = A.to(C if A.is_complex() else T)
    values = torch.linalg.eigvalsh(A).reshape(-1, A.shape[-1])[0]
    member = torch.ones_like(values, dtype=torch.bool)
    if k is not None:
        member[: len(values) - k if largest else len(values)] = not largest
        member[k if not largest else len(values) :] = False
    heights = torch.where(member, f(values), 0)
    slopes = torch.where(member, vmap(grad(f))(values), 0).abs()
    across = (heights[:, None] - heights).abs() / (values[:, None] - values).abs()
    largest_slope = torch.cat([slopes, across[~torch.eye(len(values), dtype=bool)]]).nan_to_num(0)
    return float(1 + largest_slope.max() * values.norm() / heights.norm())


@pytest.mark.parametrize("dtype", [torch.float32, T, torch.complex64, C])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [None, 1, 3, 8])
@pytest.mark.parametrize("function", FUNCTIONS, ids=name_of)
class TestWhatIsRight:
    def test_of_a_matrix(self, function, k, largest, dtype):
        A = posed(3, dtype=dtype)
        problem = pmaf.SpectralFunction(A, function, k, largest)
        found = pmaf.solve(problem)
        evidence = pmaf.certify(problem, found)
        eps = torch.finfo(dtype).eps
        # Both matrices have the residual of a decomposition, that of a matrix of the size of A + I.
        rounding = 4 * DECOMPOSED * eps
        assert evidence.feasibility.max() <= rounding
        assert evidence.stationarity.max() <= rounding
        assert -evidence.optimality.min() <= rounding * condition(A, function, k, largest)
        assert found.residual.max() <= rounding

    def test_of_an_operator(self, function, k, largest, dtype):
        if k is None:
            pytest.skip("a function of all eigenvalues of an operator is an error")
        A = posed(3, dtype=dtype)
        problem = pmaf.SpectralFunction(Matrix(A), function, k, largest)
        evidence = pmaf.certify(problem, pmaf.solve(problem))
        # Both searches stop at this residual, for each of k vectors.
        rounding = 2 * SEARCHED * k**0.5 * torch.finfo(dtype).eps
        assert evidence.feasibility.max() <= rounding
        assert evidence.stationarity.max() <= rounding
        assert -evidence.optimality.min() <= rounding * condition(A, function, k, largest)


def wrong_matrices(A, k, largest):
    """Matrices beside the root of a group, and the measures that see them."""
    values, V = torch.linalg.eigh(A)
    n = len(values)
    index = list(range(n - k, n) if largest else range(k))
    inner, outer = (0, -1) if largest else (-1, 0)

    def of(places, heights=None):
        W = V[:, places]
        heights = values[index].sqrt() if heights is None else heights
        return (W * heights) @ W.mH

    right = of(index)
    neighbours = list(index)
    neighbours[inner] += -1 if largest else 1
    noise = randn(n, n, dtype=A.dtype, seed=5)
    noise = noise / noise.norm() * right.norm()
    skew, even = 0.5 * (noise - noise.mH), 0.5 * (noise + noise.mH)
    others = [n - 1 - i for i in index]
    return right, {
        "the other end": (of(others, values[others].sqrt()), {"optimality"}),
        # They have the same eigenvalues, and commute with A.
        "a vector of the next eigenvalue": (of(neighbours), {"optimality"}),
        "one vector is missing": (
            of(index, values[index].sqrt().index_fill(0, torch.tensor(outer % k), 0)),
            {"optimality"},
        ),
        "values in the wrong order": (
            of(index, values[index].sqrt().flip(0)),
            set() if k == 1 else {"optimality"},
        ),
        "another sign": (-right, {"optimality"}),
        "another function": (of(index, values[index]), {"optimality"}),
        "a factor": ((1 + 2 * WRONG) * right, {"optimality"}),
        "Hermitian noise": (right + 2 * WRONG * even, {"stationarity", "optimality"}),
        "antihermitian noise": (
            right + 2 * WRONG * skew,
            {"feasibility", "stationarity", "optimality"},
        ),
        "not a number": (right * torch.nan, {"feasibility", "stationarity", "optimality"}),
    }


def failing(evidence, tolerance):
    parts = {
        "feasibility": evidence.feasibility <= tolerance,
        "stationarity": evidence.stationarity <= tolerance,
        "optimality": evidence.optimality >= -tolerance,
    }
    return {name for name, fine in parts.items() if not fine.all()}


@pytest.mark.parametrize("dtype", [T, C])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("kind", ["dense", "operator"])
def test_what_is_wrong_and_in_which_respect(kind, k, largest, dtype):
    A = posed(dtype=dtype)
    right, wrong = wrong_matrices(A, k, largest)
    given, tolerance = A, WRONG / 10

    def value(F):
        return F

    if kind == "operator":
        given = Matrix(A)

        def value(F):
            """A product of two factors, neither of which is orthonormal."""
            return LowRank(torch.eye(len(F), dtype=F.dtype) * 2, F / 2)

    problem = pmaf.SpectralFunction(given, "sqrt", k, largest)
    assert failing(pmaf.certify(problem, value(right)), tolerance) == set()
    for name, (F, measures) in wrong.items():
        if name == "not a number" and kind == "operator":
            continue  # torch raises an error about it
        evidence = pmaf.certify(problem, value(F))
        assert failing(evidence, tolerance) == measures, name
        assert not evidence.holds(tolerance) or not measures


def test_all_eigenvalues_of_a_wrong_matrix():
    A = posed()
    right = pmaf.spectral(A, "sqrt")
    problem = pmaf.SpectralFunction(A, "sqrt")
    values, V = torch.linalg.eigh(A)
    for F in (-right, right + WRONG * A, (V * values.sqrt().flip(0)) @ V.mT, right + WRONG):
        assert not pmaf.certify(problem, F).holds(WRONG / 10)


def test_one_entry_of_a_batch_is_wrong():
    A = posed(2, 3)
    problem = pmaf.SpectralFunction(A, "log", 2)
    F = pmaf.spectral(A, "log", 2)
    F[1, 2] *= 1 + WRONG
    expected = torch.ones(2, 3, dtype=torch.bool)
    expected[1, 2] = False
    assert torch.equal(pmaf.certify(problem, F).holds(WRONG / 10), expected)


def test_it_is_not_the_algorithm_of_the_solvers(monkeypatch):
    """So an error of that algorithm would be seen."""
    A = posed()
    problem = pmaf.SpectralFunction(A, "sqrt", 3)
    F = pmaf.spectral(A, "sqrt", 3)

    def refuse(*_):
        raise AssertionError("a symmetric decomposition")

    monkeypatch.setattr(certificate, "eigh", refuse)
    monkeypatch.setattr(torch.linalg, "eigh", refuse)
    monkeypatch.setattr(torch.linalg, "eigvalsh", refuse)
    assert pmaf.certify(problem, F).holds(1e-10)


@pytest.mark.parametrize("kind", [lambda A: A, Matrix], ids=["dense", "operator"])
@pytest.mark.parametrize("largest", [True, False])
class TestRepeated:
    """The norm of A is one, and its groups are 1 apart: nothing is ill-conditioned."""

    def test_inside_the_group_any_basis_is_the_same_matrix(self, kind, largest):
        values = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0] if largest else [0.0, 0.0, 0.0, -1.0, -1.0, -1.0]
        A = with_eigenvalues(values)
        sign = 1.0 if largest else -1.0
        problem = pmaf.SpectralFunction(kind(A), torch.cos, 3, largest)
        F = torch.cos(torch.tensor(1.0, dtype=T)) * sign * A
        F = F if kind is not Matrix else LowRank(torch.eye(6, dtype=T), F)
        rounding = 4 * SEARCHED * torch.finfo(T).eps
        assert pmaf.certify(problem, F).holds(rounding)

    def test_at_the_edge_any_choice_is_right_and_any_other_rank_is_wrong(self, kind, largest):
        values = [2.0, 1.0, 1.0, 1.0, 0.0, 0.0]
        A = with_eigenvalues(values if largest else [-x for x in values])
        problem = pmaf.SpectralFunction(kind(A), torch.exp, 3, largest)
        V = torch.linalg.qr(randn(6, 6)).Q  # the basis of `with_eigenvalues`
        first, second = (torch.tensor([2.0, 1.0], dtype=T) * (1 if largest else -1)).exp()
        rounding = 8 * SEARCHED * torch.finfo(T).eps
        for seed in range(3):
            W = V[:, 1:4] @ torch.linalg.qr(randn(3, 3, seed=seed)).Q

            def of(count, height, W=W):
                F = first * V[:, :1] @ V[:, :1].mT + height * W[:, :count] @ W[:, :count].mT
                return F if kind is not Matrix else LowRank(torch.eye(6, dtype=T), F)

            assert pmaf.certify(problem, of(2, second)).holds(rounding)
            assert not pmaf.certify(problem, of(1, second)).holds(0.1)
            assert not pmaf.certify(problem, of(3, second)).holds(0.1)
            assert not pmaf.certify(problem, of(2, second * (1 + WRONG))).holds(WRONG / 10)


def test_roots_of_a_singular_matrix_hold_where_rounding_counts_as_zero():
    x = randn(6, 2)
    A = x @ x.mT
    problem = pmaf.SpectralFunction(A, "sqrt")
    tolerance = 4 * DECOMPOSED * torch.finfo(T).eps * float(torch.linalg.cond(x)) ** 2
    assert pmaf.certify(problem, pmaf.spectral(A, "sqrt")).holds(tolerance)


def test_products_of_data_that_are_not_formed():
    X = randn(30, 200)
    problem = pmaf.SpectralFunction(Gram(X), "sqrt", 3)
    found = pmaf.solve(problem)
    values = torch.linalg.svdvals(X).square()
    # Errors of eigenvalues are of second order in the residual of the search.
    torch.testing.assert_close(found.multiplier, values[:3], rtol=64 * torch.finfo(T).eps, atol=0)
    gap = float(values[2] - values[3])
    rounding = SEARCHED * torch.finfo(T).eps
    assert float(found.gap) == pytest.approx(gap, abs=2 * rounding * float(values[0]))
    tolerance = 4 * rounding * float(values[0]) / gap
    assert pmaf.certify(problem, found).holds(tolerance)
    left, right = found.value.tensors
    assert not pmaf.certify(problem, LowRank(left[:2], right[:2])).holds(WRONG)
    assert found.iterations > 0
    assert found.converged


def test_what_lies_outside_of_the_small_space_counts():
    """In the space of the group and `F`, this `F` commutes with `A`; in the whole space not."""
    values = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0], dtype=T)
    x = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0], dtype=T) / 3**0.5
    problem = pmaf.SpectralFunction(Matrix(values.diag()), "identity", 1)
    found = pmaf.certify(problem, LowRank(x[None], x[None])).stationarity
    F = torch.outer(x, x)
    exact = torch.linalg.matrix_norm(values.diag() @ F - F @ values.diag()) / 4
    # The norm of an operator is an estimate from below, by three products.
    assert exact <= float(found) * (1 + 64 * torch.finfo(T).eps)
    assert float(found) <= 1.5 * exact


def test_the_symmetric_part_of_an_operator_is_meant():
    skew = randn(8, 8, seed=3)
    A = posed() + (skew - skew.mT)
    problem = pmaf.SpectralFunction(Matrix(A), "sqrt", 2)
    found, alone = pmaf.solve(problem), pmaf.SpectralFunction(Matrix(posed()), "sqrt", 2)
    tolerance = 4 * SEARCHED * torch.finfo(T).eps * condition(posed(), "sqrt", 2, True)
    assert pmaf.certify(problem, found).holds(tolerance * float(torch.linalg.matrix_norm(skew)))
    assert pmaf.certify(alone, found).holds(tolerance * float(torch.linalg.matrix_norm(skew)))


class TestReport:
    @pytest.mark.parametrize("largest", [True, False])
    @pytest.mark.parametrize("k", [None, 1, 2, 4])
    @pytest.mark.parametrize("kind", [lambda A: A, Matrix], ids=["dense", "operator"])
    def test_eigenvalues_and_the_gap_of_the_group(self, kind, k, largest):
        if kind is Matrix and k is None:
            return
        values = torch.tensor([5.0, 5.0, 2.0, 1.0], dtype=T)
        A = with_eigenvalues(values.tolist()).requires_grad_()
        found = pmaf.solve(pmaf.SpectralFunction(kind(A), "one", k, largest))
        count = 4 if k is None else k
        expected = values[:count] if largest else values.flip(0)[:count]
        rounding = SEARCHED * torch.finfo(T).eps * 5
        torch.testing.assert_close(found.multiplier, expected, rtol=0, atol=rounding)
        gap = {1: 0.0, 2: 3.0}.get(count) if largest else {1: 1.0, 2: 3.0}.get(count)
        assert float(found.gap) == pytest.approx(
            torch.inf if gap is None else gap, abs=2 * rounding
        )
        assert not found.multiplier.requires_grad
        assert found.converged

    def test_the_value_is_that_of_the_layer_with_its_gradient(self):
        A = posed(2).requires_grad_()
        found = pmaf.solve(pmaf.SpectralFunction(A, "log", 2)).value
        direct = pmaf.spectral(A, "log", 2)
        assert torch.equal(found, direct)
        (first,) = torch.autograd.grad(found.cos().sum(), A)
        (second,) = torch.autograd.grad(direct.cos().sum(), A)
        assert torch.equal(first, second)

    def test_a_function_with_parameters_of_the_dtype_of_the_matrix(self):
        net = torch.nn.Linear(1, 1)
        problem = pmaf.SpectralFunction(
            posed(dtype=torch.float32), lambda x: net(x.unsqueeze(-1)).squeeze(-1)
        )
        tolerance = 64 * torch.finfo(torch.float32).eps
        assert pmaf.certify(problem, pmaf.solve(problem)).holds(tolerance)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision(self, dtype):
        problem = pmaf.SpectralFunction(posed(dtype=torch.float32).to(dtype), "sqrt", 2)
        found = pmaf.solve(problem)
        assert found.value.dtype == dtype
        assert pmaf.certify(problem, found).holds(4 * torch.finfo(dtype).eps)


class TestErrors:
    def test_what_has_no_choice(self):
        problem = pmaf.SpectralFunction(posed(), "sqrt")
        with pytest.raises(TypeError, match=r"solver=Dense\(\) does not serve SpectralFunction"):
            pmaf.solve(problem, solver=pmaf.solvers.Dense())
        with pytest.raises(TypeError, match=r"gradient=Unroll\(\) does not serve"):
            pmaf.solve(problem, gradient=pmaf.gradients.Unroll())
        with pytest.raises(TypeError, match=r"init=.* does not serve"):
            pmaf.solve(problem, init=torch.ones(8, dtype=T))

    def test_problems_that_the_layer_does_not_take(self):
        with pytest.raises(ValueError, match="function must be one of"):
            pmaf.SpectralFunction(posed(), "cube")
        with pytest.raises(ValueError, match="k must lie between 1 and n = 8; got 9"):
            pmaf.SpectralFunction(posed(), "sqrt", 9)
        with pytest.raises(TypeError, match="pass k, or A as a dense tensor"):
            pmaf.SpectralFunction(Matrix(posed()), "sqrt")
        with pytest.raises(ValueError, match="k must lie between"):
            pmaf.SpectralFunction(Matrix(posed()), "sqrt", 9)

    def test_values_of_another_kind(self):
        problem = pmaf.SpectralFunction(posed(2), "sqrt", 2)
        with pytest.raises(ValueError, match=r"Tensor of shape \(2, 8, 8\); got Tensor \(8, 8\)"):
            pmaf.certify(problem, posed())
        with pytest.raises(ValueError, match=r"a LowRank of shape \(8, 8\); got Tensor \(8, 8\)"):
            pmaf.certify(pmaf.SpectralFunction(Matrix(posed()), "sqrt", 2), posed())
