"""Bad input is refused before any work, in words that say what to do."""

import pytest
import torch

import pmaf
from pmaf.gradients import DDN, Implicit, Unroll
from pmaf.solvers import Auto, Backtracking, ProjectedGradient, Secular, TangentDecay

A, b = torch.randn(4, 3), torch.randn(4)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (dict(A=[[1.0]]), TypeError, r"A must be a torch.Tensor; got list"),
        (dict(A=A[0]), ValueError, r"A must have shape \(\*, m, n\); got \(3,\)"),
        (dict(b=torch.tensor(1.0)), ValueError, r"b must have shape \(\*, m\); got a scalar"),
        (dict(b=torch.randn(3)), ValueError, r"\(4, 3\) needs b of shape \(\*, 4\); got \(3,\)"),
        (dict(b=torch.randn(4, 1)), ValueError, r"drop its last dimension with b.squeeze\(-1\)"),
        (
            dict(A=torch.randn(2, 4, 3), b=torch.randn(3, 4)),
            ValueError,
            r"batch dimensions \(2,\) of A and \(3,\) of b do not broadcast",
        ),
        (dict(A=A.int()), TypeError, r"A has dtype torch.int32, which is not floating-point"),
        (dict(b=b.to(torch.complex64)), TypeError, r"convert A with .to\(torch.complex64\)"),
        (dict(b=b.double()), TypeError, r"A is torch.float32 but b is torch.float64"),
        (dict(b=b.to("meta")), ValueError, r"A is on cpu but b is on meta"),
        (dict(A=torch.randn(4, 0)), ValueError, r"at least one row and one column; got \(4, 0\)"),
        (dict(A=torch.randn(0, 3), b=torch.randn(0)), ValueError, r"got \(0, 3\)"),
        (dict(radius=0.0), ValueError, r"radius must be positive and finite; got 0.0"),
        (dict(radius=-1), ValueError, r"got -1"),
        (dict(radius=float("nan")), ValueError, r"got nan"),
        (dict(radius="1"), TypeError, r"radius must be a number; got str"),
        (dict(init=torch.ones(4)), ValueError, r"init must have shape \(\*, 3\)"),
        (dict(init=torch.ones(2, 3)), ValueError, r"\(2,\) of init do not fit the batch \(\)"),
        (dict(init=torch.ones(3).double()), TypeError, r"init is torch.float64 but A is"),
        (dict(solver=Secular), TypeError, r"does not serve SphereLeastSquares; pass an instance"),
        (dict(solver="secular"), TypeError, r"choose one of .*Secular\(\)"),
        (dict(gradient=Secular()), TypeError, r"choose one of .*Implicit\(\)"),
        (
            dict(gradient=Unroll()),
            TypeError,
            r"use ProjectedGradient\(\), or gradient=Implicit\(\)",
        ),
    ],
)
def test_wrong_arguments(arguments, kind, words):
    with pytest.raises(kind, match=words):
        pmaf.less(**(dict(A=A, b=b) | arguments))


@pytest.mark.parametrize("solver", [Auto(), ProjectedGradient()], ids=repr)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_entries_are_counted_by_argument(solver, bad):
    left, right = torch.randn(5, 4, 3), torch.randn(5, 4)
    left[1, 2, 0] = left[3, 0, 0] = bad
    with pytest.raises(ValueError, match="A has non-finite values in 2 of 5 batch entries"):
        pmaf.less(left, right, solver=solver)
    right[0, 0] = bad
    with pytest.raises(ValueError, match=r"in 2 of 5 .*b has non-finite values in 1 of 5"):
        pmaf.less(left, right, solver=solver)
    with pytest.raises(ValueError, match="b has non-finite values in 1 of 4 numbers"):
        pmaf.less(A, right[0], solver=solver)
    with pytest.raises(ValueError, match="init has non-finite"):
        pmaf.less(A, b, init=torch.full((3,), bad), solver=solver)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Backtracking(alpha=0.0),
        lambda: Backtracking(beta=1.0),
        lambda: TangentDecay(beta=-0.1),
        lambda: ProjectedGradient(step="newton"),
        lambda: pmaf.LESS(radius=0.0),
    ],
)
def test_wrong_options(build):
    with pytest.raises(ValueError, match="must"):
        build()


def test_options_are_values():
    assert ProjectedGradient(search=Backtracking(0.5, 0.8)) == ProjectedGradient(
        search=Backtracking(alpha=0.5, beta=0.8)
    )
    assert hash(Secular()) == hash(Secular())
    assert repr(DDN(exploit=False)) == "DDN(exploit=False)"
    assert Implicit() != DDN()


@pytest.mark.parametrize(
    "solver",
    [Auto(), Secular(max_iterations=9), ProjectedGradient(False, "unit", TangentDecay(0.5, 1e-3))],
    ids=repr,
)
def test_a_solver_survives_as_text(solver):
    from pmaf.runtime.text import decode, encode

    assert decode(encode(solver)) == solver


def test_module_twin_has_the_same_results():
    u = pmaf.less(A, b, radius=2.0, solver=Secular(), gradient=DDN())
    layer = pmaf.LESS(radius=2.0, solver=Secular(), gradient=DDN())
    assert torch.equal(layer(A, b), u)
    assert "radius=2.0, solver=Secular(" in repr(layer)
