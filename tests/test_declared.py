"""A problem that is declared, not programmed, has everything that the layers have."""

import functools
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import pmaf
from pmaf.gradients import DDN
from pmaf.operators import Diagonal, FromMatvec, LowRank, Matrix
from pmaf.solvers import Krylov, Secular
from tests.quadratic import Quadratic, SphereQuadratic, quadratic, reference

T = torch.float64


def posed(*batch, n=5, dtype=T, seed=0):
    g = torch.Generator().manual_seed(seed)
    Q = torch.randn(*batch, n, n, generator=g, dtype=T)
    c = torch.randn(*batch, n, generator=g, dtype=T)
    return (Q + Q.mT).to(dtype), c.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize("n", [1, 2, 5, 40])
def test_the_global_minimum(n, dtype):
    Q, c = posed(3, n=n, dtype=dtype)
    problem = SphereQuadratic(Q, c)
    found = pmaf.solve(problem)
    eps = torch.finfo(dtype).eps
    assert found.converged.all()
    assert pmaf.certify(problem, found).holds(64 * eps).all()
    for i in range(3):
        u, multiplier = reference(Q[i], c[i])
        size = float(torch.linalg.matrix_norm(Q[i], 2) + c[i].norm())
        # The solution moves with its data by at most their rounding over the gap.
        bound = 64 * eps * size / float(found.gap[i])
        assert float((found.value[i].double() - u).norm()) <= bound
        assert abs(float(found.multiplier[i]) - multiplier) <= 64 * eps * size


@pytest.mark.parametrize("c", [0.0, 1e-3], ids=["no pull", "a pull beside the lowest direction"])
def test_the_hard_case(c):
    Q = torch.diag(torch.tensor([-2.0, -1.0, 3.0], dtype=T))
    pull = torch.tensor([0.0, c, c], dtype=T)
    problem = SphereQuadratic(Q, pull)
    found = pmaf.solve(problem)
    assert float(found.gap) == 0.0
    assert float(found.multiplier) == pytest.approx(2.0, rel=1e-14)
    assert pmaf.certify(problem, found).holds(1e-13)


@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_derivatives_of_any_order(batch):
    Q, c = (x.requires_grad_() for x in posed(*batch, n=4))

    def both(Q, c):
        solution = pmaf.solve(SphereQuadratic(0.5 * (Q + Q.mT), c))
        return solution.value, solution.multiplier

    assert gradcheck(both, (Q, c))
    assert gradgradcheck(both, (Q, c))


def test_a_matrix_for_a_whole_batch():
    Q, _ = posed(n=4)
    _, c = posed(3, n=4)
    Q, c = Q.requires_grad_(), c.requires_grad_()
    assert gradcheck(Quadratic(), (Q, c))
    (found,) = torch.autograd.grad(quadratic(Q, c).sum(), Q)
    expected = sum(torch.autograd.grad(quadratic(Q, x).sum(), Q)[0] for x in c)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("solver", [None, Secular(), Krylov()], ids=repr)
def test_solvers_agree(solver):
    Q, c = (x.requires_grad_() for x in posed(3, n=6))
    found = quadratic(Q, c, solver)
    expected = quadratic(Q, c)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    weights = torch.cos(torch.arange(18.0, dtype=T)).reshape(3, 6)
    ours = torch.autograd.grad((found * weights).sum(), (Q, c))
    theirs = torch.autograd.grad((expected * weights).sum(), (Q, c))
    for x, y in zip(ours, theirs):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-8)


def test_the_papers_rule():
    Q, c = (x.requires_grad_() for x in posed(3, n=6))
    rules = [
        torch.autograd.grad(quadratic(Q, c, gradient=rule).cos().sum(), (Q, c))
        for rule in (None, DDN(), DDN(exploit=False))
    ]
    for other in rules[1:]:
        for x, y in zip(rules[0], other):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


OPERATORS = {
    "Matrix": lambda Q, d: Matrix(Q) + Diagonal(d),
    "FromMatvec": lambda Q, d: FromMatvec(
        lambda u, Q, d: (Q @ u.unsqueeze(-1)).squeeze(-1) + d * u, Q.shape, (Q, d)
    ),
    "LowRank": lambda Q, d: Diagonal(d) - LowRank(Q, Q),
}
DENSE = {
    "Matrix": lambda Q, d: Q + torch.diag_embed(d),
    "FromMatvec": lambda Q, d: Q + torch.diag_embed(d),
    "LowRank": lambda Q, d: torch.diag_embed(d) - Q.mT @ Q,
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_operators(name, batch):
    Q, c = posed(*batch, n=8)
    _, d = posed(*batch, n=8, seed=1)
    leaves = [x.requires_grad_() for x in (Q, d, c)]
    results = []
    for make in (OPERATORS[name], DENSE[name]):
        problem = SphereQuadratic(make(Q, d), c)
        found = pmaf.solve(problem)
        assert found.converged.all()
        assert pmaf.certify(problem, found).holds(1e-9).all()
        loss = found.value.cos().sum() + found.multiplier.sin().sum()
        results.append([found.value, found.gap, *torch.autograd.grad(loss, leaves)])
    for x, y in zip(*results):
        torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-8)


def test_a_minimum_that_the_pull_does_not_show():
    """The lowest eigenvector is orthogonal to c, so that no power of Q times c has a part of it."""
    values = torch.linspace(-1, 1, 300, dtype=T)
    values[0] = -3.0
    c = torch.cat([torch.zeros(1, dtype=T), torch.full((299,), 1e-2, dtype=T)])
    problem = SphereQuadratic(Diagonal(values), c)
    found = pmaf.solve(problem)
    assert float(found.multiplier) == pytest.approx(3.0, rel=1e-9)
    assert pmaf.certify(problem, found).holds(1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    Q, c = (x.to(dtype).requires_grad_() for x in posed(2, n=4))
    u = quadratic(Q, c)
    assert u.dtype == dtype
    assert all(x.dtype == dtype for x in torch.autograd.grad(u.sum(), (Q, c)))


def test_no_problems():
    Q, c = posed(0, n=4)
    u = quadratic(Q.requires_grad_(), c)
    assert u.shape == (0, 4)
    u.sum().backward()
    assert Q.grad.shape == Q.shape


def test_errors_name_what_is_wrong():
    Q, c = posed(n=4)
    with pytest.raises(TypeError, match=r"c is torch.float32 but|Q is torch.float64 but c"):
        SphereQuadratic(Q, c.float())
    with pytest.raises(ValueError, match="do not broadcast"):
        SphereQuadratic(Q.expand(3, 4, 4), c.expand(2, 4))
    with pytest.raises(
        TypeError, match=r"does not serve SphereQuadratic; choose one of Secular\(\)"
    ):
        quadratic(Q, c, pmaf.solvers.Cholesky())
    with pytest.raises(ValueError, match="non-finite"):
        quadratic(Q * torch.nan, c)


@pytest.mark.parametrize(
    ("names", "words"), [({}, "it is empty"), ({"Q": 2, "P": 2}, "there is no field 'P'")]
)
def test_inputs_name_the_fields(names, words):
    class Named(SphereQuadratic):
        inputs = names

    with pytest.raises(TypeError, match=rf"Named.inputs names the tensors.*; {words}"):
        Named(*posed(n=4))


def test_a_start_prefers_one_of_several():
    Q, c = torch.eye(3, dtype=T), torch.zeros(3, dtype=T)
    init = torch.tensor([0.0, 0.6, 0.8], dtype=T)
    torch.testing.assert_close(quadratic(Q, c, init=init), init)


def test_a_class_that_declares_nothing():
    class Empty(pmaf.Problem):
        inputs = SphereQuadratic.inputs
        Q, c = posed(n=3)

    with pytest.raises(NotImplementedError, match="Empty declares no curvature"):
        pmaf.solve(Empty())


@dataclass(frozen=True, eq=False)
class Quartic(SphereQuadratic):
    """The same plus a term whose force is `−strength u³`, with the curvature of the others."""

    strength: float = 1.0

    def force(self, u, Q, c):
        return super().force(u, Q, c) - self.strength * u**3


@dataclass(frozen=True, eq=False)
class Halved(SphereQuadratic):
    """The curvature of another problem."""

    def curvature(self, rows):
        return 0.5 * super().curvature(rows)


def traced(problem):
    return torch.compile(lambda Q, c: pmaf.solve(problem(Q, c)).value, backend="aot_eager")


SOLVES = {
    "eager": lambda problem: lambda Q, c: pmaf.solve(problem(Q, c)).value,
    "vmap": lambda problem: torch.func.vmap(lambda Q, c: pmaf.solve(problem(Q, c)).value),
    "forward mode": lambda problem: (
        lambda Q, c: torch.func.jvp(lambda c: pmaf.solve(problem(Q, c)).value, (c,), (c,))
    ),
    "products": lambda problem: lambda Q, c: pmaf.solve(problem(Matrix(Q), c)).value,
    "traced": traced,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in jvp and traces
@pytest.mark.parametrize("solve", SOLVES)
@pytest.mark.parametrize("dtype", [torch.float32, T])
@pytest.mark.parametrize("strength", [1.0, -1e-2])
def test_a_problem_that_is_not_quadratic_is_refused(strength, dtype, solve):
    """Its solution would satisfy other conditions, and no report would show it."""
    Q, c = posed(3, n=4, dtype=dtype)
    problem = functools.partial(Quartic, strength=strength)
    with pytest.raises(ValueError, match="Quartic is not quadratic"):
        SOLVES[solve](problem)(Q, c)
    # Below the digits of the comparison nothing is to be seen.
    SOLVES[solve](functools.partial(Quartic, strength=0.0))(Q, c)


def test_a_curvature_of_another_force_is_refused():
    with pytest.raises(ValueError, match="its curvature is not that of its force"):
        pmaf.solve(Halved(*posed(3, n=4)))


@pytest.mark.parametrize("solve", ["eager", "products"])
def test_a_curvature_that_is_not_symmetric_is_refused(solve):
    Q, c = posed(3, n=4)
    with pytest.raises(ValueError, match=r"curvature of SphereQuadratic is not symmetric"):
        SOLVES[solve](SphereQuadratic)(Q + 0.1 * Q.triu(1), c)


@pytest.mark.parametrize("scale", [1e-100, 1e100])
def test_units_do_not_matter_to_the_comparison(scale):
    Q, c = posed(3, n=4)
    problem = functools.partial(Quartic, strength=scale)
    with pytest.raises(ValueError, match=r"is not quadratic|leave the range"):
        pmaf.solve(problem(scale * Q, scale * c))


@pytest.mark.parametrize(
    ("dtype", "scales"), [(T, (1e-170, 1e-300, 1e160)), (torch.float32, (1e-25, 1e25))]
)
def test_numbers_whose_squares_leave_the_range_are_refused(dtype, scales):
    """Those of a correct problem, which solvers would take for zeros or infinities."""
    Q, c = (x.to(dtype) for x in posed(3, n=4))
    for scale in scales:
        with pytest.raises(ValueError, match="SphereQuadratic leave the range of the dtype"):
            pmaf.solve(SphereQuadratic(scale * Q, scale * c))


def test_three_tensors_are_refused_when_the_problem_is_made():
    @dataclass(frozen=True, eq=False)
    class Three(SphereQuadratic):
        d: torch.Tensor
        inputs: ClassVar[dict[str, int]] = {"Q": 2, "c": 1, "d": 1}

    Q, c = posed(3, n=4)
    with pytest.raises(TypeError, match=r"Three\.inputs names 3 tensors, Q, c, d"):
        Three(Q, c, c)


def test_a_module_trains():
    Q, c = posed(4, n=5)
    layer = Quadratic()
    scale = torch.ones((), dtype=T, requires_grad=True)
    optimiser = torch.optim.SGD([scale], lr=0.1)
    losses = []
    for _ in range(5):
        optimiser.zero_grad()
        loss = layer(scale * Q, c)[:, 0].square().mean()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
