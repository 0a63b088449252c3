"""The paper's rows for IED: all twelve, on its data."""

import pytest
import torch

import pmaf
from pmaf.metrics import eigen_distance, fixed_point_distance
from pmaf.solvers import Dense
from pmaf_lab.paper.ied import METHODS, PI, SI, matrices


def test_the_registry_has_the_papers_twelve_rows():
    assert len(METHODS) == 12
    assert {name.split("-")[0] for name in METHODS} == {"AutoDiff", "PI", "SI"}


@pytest.mark.parametrize("name", METHODS)
def test_every_row_agrees_with_the_true_gradient_of_symmetric_matrices(name):
    A = matrices(12, dtype=torch.float64).requires_grad_()
    weights = torch.cos(torch.arange(12.0).double())
    values, vectors = METHODS[name](A)
    (found,) = torch.autograd.grad((vectors @ weights).sum() + values.sum(), A)
    exact = pmaf.ied(A)
    (expected,) = torch.autograd.grad((exact.vectors @ weights).sum() + exact.values.sum(), A)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in METHODS if not name.startswith("AutoDiff")])
def test_rows_for_nonsymmetric_matrices_are_exact_but_for_ddn(name):
    A = matrices(12, symmetric=False, dtype=torch.float64).requires_grad_()
    weights = torch.cos(torch.arange(12.0).double())

    def gradient(pairs):
        return torch.autograd.grad((pairs.vectors @ weights).sum(), A)[0]

    found = gradient(METHODS[name](A, symmetric=False))
    exact = gradient(pmaf.ied(A, symmetric=False))
    error = (found - exact).norm() / exact.norm()
    if "DDN" in name:
        assert error > 0.3
    else:
        assert error < 1e-8


@pytest.mark.parametrize("distribution", ["gaussian", "uniform", "vonmises", "choice"])
def test_data_is_nonnegative_and_reproducible(distribution):
    A = matrices(8, 3, distribution=distribution)
    assert (A >= 0).all()
    assert torch.equal(A, A.mT)
    assert torch.equal(A, matrices(8, 3, distribution=distribution))
    with pytest.raises(ValueError, match="must be one of gaussian"):
        matrices(8, distribution="cauchy")


@pytest.mark.parametrize("n", [32, 64, 128])
def test_power_iteration_is_more_precise_than_eigh_in_float32(n):
    """The paper's precision figures, measured in float64."""
    distances = {"eigh": [], "PI": [], "SI": []}
    for seed in range(2):
        A = matrices(n, seed)
        for name, solver in (("eigh", Dense()), ("PI", PI), ("SI", SI)):
            value, y = (x.double() for x in pmaf.ied(A, solver=solver))
            wide = A.double()
            distances[name].append(
                torch.stack([eigen_distance(wide, value, y), fixed_point_distance(wide, y)])
            )
    means = {name: torch.cat(found, -1).mean(-1) for name, found in distances.items()}
    assert (means["PI"] < means["eigh"]).all()
    assert (means["SI"] < means["eigh"]).all()
