"""Every problem on the sphere declares its force and its curvature."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import pmaf
from pmaf.operators import Diagonal, FromMatvec, Matrix
from tests.quadratic import SphereQuadratic

T, C = torch.float64, torch.complex128
EPS = torch.finfo(T).eps


def drawn(*shape, dtype=T, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def products(A):
    return FromMatvec(
        lambda u, X: u @ X.mT, tuple(A.shape), (A,), rmatvec=lambda u, X: u @ X.conj()
    )


SQUARE, TALL, WEIGHTS = drawn(2, 5, 5), drawn(2, 7, 5), drawn(2, 7, seed=1).square()
PROBLEMS = {
    "largest": lambda: pmaf.PrincipalEigenvectors(SQUARE),
    "smallest": lambda: pmaf.PrincipalEigenvectors(SQUARE, largest=False),
    "several": lambda: pmaf.PrincipalEigenvectors(SQUARE, 2),
    "general": lambda: pmaf.PrincipalEigenvectors(SQUARE.abs(), symmetric=False),
    "operator": lambda: pmaf.PrincipalEigenvectors(Matrix(SQUARE)),
    "products": lambda: pmaf.PrincipalEigenvectors(products(SQUARE[0]), largest=False),
    "complex": lambda: pmaf.PrincipalEigenvectors(drawn(2, 5, 5, dtype=C)),
    "complex operator": lambda: pmaf.PrincipalEigenvectors(Matrix(drawn(2, 5, 5, dtype=C))),
    "pair": lambda: pmaf.PrincipalEigenvectors(SQUARE, M=Diagonal(torch.arange(1.0, 6, dtype=T))),
    "singular": lambda: pmaf.PrincipalSingularVectors(TALL, WEIGHTS),
    "smallest singular": lambda: pmaf.PrincipalSingularVectors(TALL.mT, largest=False),
    "singular operator": lambda: pmaf.PrincipalSingularVectors(Matrix(TALL), WEIGHTS),
    "complex singular": lambda: pmaf.PrincipalSingularVectors(drawn(2, 7, 5, dtype=C)),
}
LESS = {
    "least squares": lambda: pmaf.SphereLeastSquares(TALL, drawn(2, 7, seed=2)),
    "weights": lambda: pmaf.SphereLeastSquares(TALL, drawn(2, 7, seed=2), weights=WEIGHTS),
    "declared": lambda: SphereQuadratic(SQUARE + SQUARE.mT, drawn(2, 5, seed=3)),
}


@pytest.mark.parametrize("name", [*PROBLEMS, *LESS])
def test_the_force_is_linear_with_the_curvature(name):
    """`force(u) = g − Mu`: its differences are the curvature, which is symmetric."""
    problem = (PROBLEMS | LESS)[name]()
    dtype, n = problem.dtype, problem.n
    u, v = drawn(2, n, dtype=dtype, seed=4), drawn(2, n, dtype=dtype, seed=5)
    rise = problem.force(u + v, *problem.tensors) - problem.force(u, *problem.tensors)
    image = problem.curvature(v.unsqueeze(-2)).squeeze(-2)
    size = 64 * EPS * float(image.abs().max() + rise.abs().max())
    torch.testing.assert_close(rise, -image, rtol=0, atol=size)
    if name != "general":
        other = problem.curvature(u.unsqueeze(-2)).squeeze(-2)
        left, right = (u.conj() * image).sum(-1), (other.conj() * v).sum(-1)
        torch.testing.assert_close(left, right, rtol=0, atol=size)


@pytest.mark.parametrize("name", PROBLEMS)
def test_solutions_are_stationary(name):
    """At a solution the force is a multiple of the normal, `Mu` for a pair."""
    problem = PROBLEMS[name]()
    solution = pmaf.solve(problem)
    value, multiplier = solution.value, solution.multiplier
    if problem.vectors:
        value, multiplier = value[..., 0], multiplier[..., 0]
    if name.endswith("singular") or name.startswith("singular"):
        multiplier = multiplier.square()
    sign = 1 if problem.largest else -1
    normal = value * (problem.M.d if name == "pair" else 1)
    force = problem.force(value, *problem.tensors)
    by_products = problem.operator is not None
    size = float(problem.quadratic()[0].abs().max())
    close = 1e3 * EPS * (EPS**-0.5 if by_products else 1) * size
    torch.testing.assert_close(force, sign * multiplier.unsqueeze(-1) * normal, rtol=0, atol=close)


@pytest.mark.parametrize("largest", [True, False])
def test_what_follows_from_them_is_the_same_minimum(largest):
    """A problem that declares these two, and nothing else, has the same solution."""
    like = pmaf.PrincipalEigenvectors(SQUARE, largest=largest)

    @dataclass(frozen=True, eq=False)
    class Declared(pmaf.Problem):
        A: torch.Tensor
        inputs: ClassVar[dict[str, int]] = {"A": 2}

        def force(self, u, A):
            return like.force(u, A)

        def curvature(self, rows):
            return like.with_tensors(self.A).curvature(rows)

    own, found = pmaf.solve(Declared(SQUARE)), pmaf.solve(like)
    sign = 1 if largest else -1
    torch.testing.assert_close(own.multiplier, sign * found.multiplier)
    assert pmaf.certify(Declared(SQUARE), found.value).holds(1e3 * EPS).all()
    alike = (own.value * found.value).sum(-1).abs()
    torch.testing.assert_close(alike, torch.ones(2, dtype=T))
    M, g = like.quadratic()
    assert not g.any()
    torch.testing.assert_close(torch.linalg.eigvalsh(M)[..., 0], -sign * found.multiplier)
