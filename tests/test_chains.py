"""Chains of reductions: which steps lead from a problem to a solver, and that they lead back."""

from typing import Any

import pytest
import torch

import pmaf
from pmaf import recipe
from pmaf.executors.direct import Direct
from pmaf.operators import Diagonal, FromMatvec, Matrix
from pmaf.recipe import AUTO, IMPLICIT, Recipe
from pmaf.reductions.units import Units
from tests.quadratic import SphereQuadratic

T, C = torch.float64, torch.complex128
EYE = torch.eye(3, dtype=T)
A = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=T))
M = EYE + 0.1


def products(matrix, solve=None):
    return FromMatvec(
        lambda u, X: X @ u, tuple(matrix.shape), (matrix,), lambda u, X: X.mT @ u, solve=solve
    )


SOLVABLE = products(M, solve=lambda u, X: torch.linalg.solve(X, u))
B = torch.ones(3, dtype=T)
EIGEN, PAIR = "PrincipalEigenvectors", "Pair"
SINGULAR, LEAST = "PrincipalSingularVectors", "SphereLeastSquares"
# Each problem, the names of its steps beyond order and signs, and the problem that is solved.
EXAMPLES: dict[str, tuple[Any, str, str]] = {
    "real": (pmaf.PrincipalEigenvectors(A), "", EIGEN),
    "half": (pmaf.PrincipalEigenvectors(A.half()), "Precision", EIGEN),
    "smallest": (pmaf.PrincipalEigenvectors(A, largest=False), "Smallest", EIGEN),
    "operator": (pmaf.PrincipalEigenvectors(Matrix(A)), "", EIGEN),
    "general": (pmaf.PrincipalEigenvectors(A, symmetric=False), "", EIGEN),
    "complex": (pmaf.PrincipalEigenvectors(A.to(C)), "EmbeddedVectors", EIGEN),
    "complex operator": (pmaf.PrincipalEigenvectors(Matrix(A.to(C))), "EmbeddedVectors", EIGEN),
    "pair": (pmaf.PrincipalEigenvectors(A, M=M), "", PAIR),
    "pair, matrix": (pmaf.PrincipalEigenvectors(A, M=Matrix(M)), "RowMetric", PAIR),
    "pair, M by products": (
        pmaf.PrincipalEigenvectors(A, M=products(M)),
        "EntriesOfMetric",
        PAIR,
    ),
    "pair, A by products": (
        pmaf.PrincipalEigenvectors(products(A), M=M),
        "FactoredMetric",
        EIGEN,
    ),
    "pair, diagonal": (pmaf.PrincipalEigenvectors(A, M=Diagonal(B)), "RowMetric", PAIR),
    "pair, A by products, diagonal": (
        pmaf.PrincipalEigenvectors(products(A), M=Diagonal(B)),
        "FactoredMetric",
        EIGEN,
    ),
    "pair, both by products": (
        pmaf.PrincipalEigenvectors(products(A), M=products(M)),
        "EntriesOfMetric FactoredMetric",
        EIGEN,
    ),
    "pair, with a solve": (
        pmaf.PrincipalEigenvectors(products(A), M=SOLVABLE),
        "Operators",
        PAIR,
    ),
    "complex pair": (
        pmaf.PrincipalEigenvectors(A.to(C), M=M.to(C)),
        "EmbeddedVectors",
        PAIR,
    ),
    "singular": (pmaf.PrincipalSingularVectors(A), "", SINGULAR),
    "complex singular": (pmaf.PrincipalSingularVectors(A.to(C)), "EmbeddedVectors", SINGULAR),
    "complex singular, operator": (
        pmaf.PrincipalSingularVectors(Matrix(A.to(C))),
        "Squares EmbeddedVectors",
        EIGEN,
    ),
    "least squares": (pmaf.SphereLeastSquares(A, B), "RadiusAndUnits", LEAST),
    "ball": (
        pmaf.SphereLeastSquares(A, B, ball=True),
        "Ellipsoid Stacked",
        "ConstrainedLeastSquares",
    ),
    "weights": (
        pmaf.SphereLeastSquares(A, B, weights=B),
        "Ellipsoid Stacked",
        "ConstrainedLeastSquares",
    ),
    "complex ball": (
        pmaf.SphereLeastSquares(A.to(C), B.to(C), ball=True),
        "EmbeddedLeastSquares Ellipsoid Stacked",
        "ConstrainedLeastSquares",
    ),
    "complex least squares": (
        pmaf.SphereLeastSquares(A.to(C), B.to(C)),
        "EmbeddedLeastSquares RadiusAndUnits",
        LEAST,
    ),
    "declared": (SphereQuadratic(A, B), "", "SphereQuadratic"),
}


def chain(problem):
    return recipe.ways_of(type(problem)).solved(problem, AUTO, IMPLICIT, None)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_problem_has_a_chain(name):
    problem, steps, solved = EXAMPLES[name]
    found = chain(problem)
    names = [type(step).__name__ for step in found.steps]
    assert [name for name in names if name not in ("Sign", "End")] == steps.split()
    assert type(found.executor.problem).__name__ == solved


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_chain_holds_no_tensor_and_leads_back(name):
    problem, *_ = EXAMPLES[name]
    found = chain(problem)
    for step in (*found.steps, found.executor.problem):
        assert not [x for x in vars(step).values() if isinstance(x, torch.Tensor)], step
    solution = pmaf.solve(problem)
    assert solution.value.shape == problem.shapes[0]
    assert solution.value.dtype == problem.dtype
    eps = torch.finfo(problem.dtype).eps
    tolerance = 1e3 * eps**0.5 if problem.operator is not None else min(1e3 * eps, 0.1)
    assert pmaf.certify(problem, solution).holds(tolerance)
    wrong = solution.value.roll(1, -1)
    assert not pmaf.certify(problem, wrong).holds(tolerance)


def test_errors_name_the_problem_of_the_user():
    for problem in (A.to(C), A):
        with pytest.raises(TypeError, match="does not serve PrincipalEigenvectors;"):
            pmaf.solve(pmaf.PrincipalEigenvectors(problem), solver=pmaf.solvers.Secular())
    with pytest.raises(TypeError, match="does not serve SphereLeastSquares;"):
        pmaf.solve(pmaf.SphereLeastSquares(A, B, ball=True), solver=pmaf.solvers.Dense())


def test_a_batch_of_metrics_with_one_matrix_is_certified():
    problem = pmaf.PrincipalEigenvectors(A, M=torch.stack([M, EYE]))
    solution = pmaf.solve(problem)
    assert solution.value.shape == (2, 3)
    assert pmaf.certify(problem, solution).holds(1e3 * torch.finfo(T).eps).all()


def test_a_chain_for_a_class_of_the_user():
    class Own(SphereQuadratic):
        """A class with a chain of its own, which `SphereQuadratic` does not get."""

    class Later(Own):
        """A subclass has the chain of its base."""

    class Doubled(recipe.Reduction):
        """The same minimisers, and multipliers that are twice as large."""

        words = "f -> 2f"

        def apply(self, given):
            return {**given, "Q": 2 * given["Q"], "c": 2 * given["c"]}

        def back(self, found, given, posed):
            value, multiplier = found
            return value, 0.5 * multiplier

        def report(self, report, found, given, posed):
            return report._replace(gap=0.5 * report.gap)

    def way(problem, solver, gradient, init):
        return Recipe((Doubled(),), Direct(problem.bare(), solver, gradient))

    recipe.register(Own, way, lambda problem: ([Doubled()], problem.bare()))
    expected = pmaf.solve(SphereQuadratic(A, B))
    for kind in (Own, Later):
        assert [step.words for step in chain(kind(A, B)).steps] == ["f -> 2f"]
        found = pmaf.solve(kind(A, B))
        for name in ("value", "multiplier", "residual", "gap"):
            x, y = getattr(found, name), getattr(expected, name)
            torch.testing.assert_close(x, y, rtol=0, atol=1e2 * torch.finfo(T).eps)
        assert pmaf.certify(kind(A, B), found).holds(1e3 * torch.finfo(T).eps)
    assert chain(SphereQuadratic(A, B)).steps == ()


def test_other_units_are_a_step_that_one_call_adds():
    problem = pmaf.PrincipalEigenvectors(1e-160 * A)
    assert not [step for step in chain(problem).steps if isinstance(step, Units)]
    found = pmaf.solve(problem)
    torch.testing.assert_close(found.multiplier / 1e-160, torch.tensor(3.0, dtype=T))
    torch.testing.assert_close(found.gap / 1e-160, torch.tensor(1.0, dtype=T))
