"""Cases of problems: classes that are declared for some of the problems of another class."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import pmaf
from pmaf.operators import Diagonal, FromMatvec, Matrix
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
EXAMPLES: dict[str, tuple[Any, str]] = {
    "real": (pmaf.PrincipalEigenvectors(A), "PrincipalEigenvectors"),
    "operator": (pmaf.PrincipalEigenvectors(Matrix(A)), "PrincipalEigenvectors"),
    "general": (pmaf.PrincipalEigenvectors(A, symmetric=False), "PrincipalEigenvectors"),
    "complex": (pmaf.PrincipalEigenvectors(A.to(C)), "ComplexEigenvectors"),
    "complex operator": (pmaf.PrincipalEigenvectors(Matrix(A.to(C))), "ComplexEigenvectors"),
    "pair": (pmaf.PrincipalEigenvectors(A, M=M), "PairedEigenvectors"),
    "pair, matrix": (pmaf.PrincipalEigenvectors(A, M=Matrix(M)), "PairedEigenvectors"),
    "pair, M by products": (pmaf.PrincipalEigenvectors(A, M=products(M)), "PairedEigenvectors"),
    "pair, A by products": (pmaf.PrincipalEigenvectors(products(A), M=M), "FactoredPair"),
    "pair, diagonal": (pmaf.PrincipalEigenvectors(A, M=Diagonal(B)), "DiagonalPair"),
    "pair, A by products, diagonal": (
        pmaf.PrincipalEigenvectors(products(A), M=Diagonal(B)),
        "FactoredPair",
    ),
    "pair, both by products": (
        pmaf.PrincipalEigenvectors(products(A), M=products(M)),
        "FactoredPair",
    ),
    "pair, with a solve": (pmaf.PrincipalEigenvectors(products(A), M=SOLVABLE), "PairOfOperators"),
    "complex pair": (pmaf.PrincipalEigenvectors(A.to(C), M=M.to(C)), "ComplexPair"),
    "singular": (pmaf.PrincipalSingularVectors(A), "PrincipalSingularVectors"),
    "complex singular": (pmaf.PrincipalSingularVectors(A.to(C)), "ComplexSingularVectors"),
    "complex singular, operator": (
        pmaf.PrincipalSingularVectors(Matrix(A.to(C))),
        "PrincipalSingularVectors",
    ),
    "least squares": (pmaf.SphereLeastSquares(A, B), "SphereLeastSquares"),
    "ball": (pmaf.SphereLeastSquares(A, B, ball=True), "LeastSquaresWithOptions"),
    "weights": (pmaf.SphereLeastSquares(A, B, weights=B), "LeastSquaresWithOptions"),
    "complex ball": (
        pmaf.SphereLeastSquares(A.to(C), B.to(C), ball=True),
        "ComplexLeastSquares",
    ),
    "complex least squares": (pmaf.SphereLeastSquares(A.to(C), B.to(C)), "ComplexLeastSquares"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_problem_belongs_to_one_case(name):
    problem, expected = EXAMPLES[name]
    special = problem.special()
    assert type(special).__name__ == expected
    assert special.special() is special
    while problem.cases:
        kinds = [kind for applies, kind in problem.cases if applies(problem)]
        assert len(kinds) <= 1, kinds
        if not kinds:
            break
        problem = kinds[0].of(problem)
    assert type(problem) is type(special)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_general_problem_is_solved_and_certified_as_its_case(name):
    problem, _ = EXAMPLES[name]
    solution = pmaf.solve(problem)
    again = pmaf.solve(problem.special())
    torch.testing.assert_close(solution.value, again.value, rtol=0, atol=0)
    tolerance = 1e3 * torch.finfo(T).eps ** (0.5 if problem.operator is not None else 1.0)
    assert pmaf.certify(problem, solution).holds(tolerance)
    wrong = solution.value.roll(1, -1)
    assert not pmaf.certify(problem, wrong).holds(tolerance)


def test_errors_name_the_general_problem():
    problem = pmaf.PrincipalEigenvectors(A.to(C))
    with pytest.raises(TypeError, match="does not serve PrincipalEigenvectors;"):
        pmaf.solve(problem, solver=pmaf.solvers.Secular())


def test_a_batch_of_metrics_with_one_matrix_is_certified():
    problem = pmaf.PrincipalEigenvectors(A, M=torch.stack([M, EYE]))
    solution = pmaf.solve(problem)
    assert solution.value.shape == (2, 3)
    assert pmaf.certify(problem, solution).holds(1e3 * torch.finfo(T).eps).all()


def test_a_case_of_a_class_of_the_user():
    seen = []

    class Own(SphereQuadratic):
        """A class with a case of its own, which `SphereQuadratic` does not get."""

    @Own.case(lambda x: not x.c.any())
    @dataclass(frozen=True, eq=False)
    class Homogeneous(Own):
        def solved_by(self, solver, init, report):
            seen.append(type(self))
            return super().solved_by(solver, init, report)

    zero = torch.zeros(3, dtype=T)
    solution = pmaf.solve(Own(A, zero))
    assert seen == [Homogeneous]
    torch.testing.assert_close(solution.value.abs(), torch.tensor([0.0, 0.0, 1.0], dtype=T))
    assert pmaf.certify(Own(A, zero), solution).holds(1e3 * torch.finfo(T).eps)
    pmaf.solve(Own(A, B))
    pmaf.solve(SphereQuadratic(A, zero))
    assert seen == [Homogeneous]

    class Later(Own):
        """A subclass has the cases of its base."""

    pmaf.solve(Later(A, zero))
    assert seen == [Homogeneous] * 2


def test_a_case_that_is_defined_again_takes_the_place_of_the_first():
    class Own(SphereQuadratic):
        pass

    def define(name):
        @Own.case(lambda x: True)
        @dataclass(frozen=True, eq=False)
        class Case(Own):
            version = name

        return Case

    define("first")
    again = define("second")
    assert [kind for _, kind in Own.cases] == [again]
    assert Own(A, B).special().version == "second"
