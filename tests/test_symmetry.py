"""A matrix that is clearly not symmetric has a symmetric part that its user may not have meant."""

import warnings

import pytest
import torch

import pmaf
from pmaf import recipe
from pmaf.linalg import symmetry
from pmaf.operators import Matrix


@pytest.fixture(autouse=True)
def nothing_looked_at(monkeypatch):
    monkeypatch.setattr(symmetry, "_LOOKED", set())
    recipe._recipe.cache_clear()


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def heard(call):
    with warnings.catch_warnings(record=True, action="always") as caught:
        call()
    assert all(x.filename == __file__ for x in caught)
    return [str(x.message) for x in caught]


LAYERS = {
    "one": pmaf.ied,
    "several": lambda A: pmaf.ied(A, 2),
    "smallest": lambda A: pmaf.ied(A, largest=False),
    "options": lambda A: pmaf.ied(A, 2, reference=0),
    "pair": lambda A: pmaf.ied(A, M=torch.eye(A.shape[-1], dtype=A.dtype)),
    "pair, options": lambda A: pmaf.ied(A, M=torch.eye(A.shape[-1], dtype=A.dtype), reference=0),
    "operator": lambda A: pmaf.ied(Matrix(A)),
    "module": pmaf.IED(),
    "problem": lambda A: pmaf.solve(pmaf.PrincipalEigenvectors(A)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("n", [2, 5, 40])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_matrix_that_is_not_symmetric_warns_once(layer, n, dtype):
    A = random(n, n, dtype=dtype)
    share = torch.linalg.matrix_norm(A - A.mH) / torch.linalg.matrix_norm(A)
    (message,) = heard(lambda: LAYERS[layer](A))
    assert f"{float(share):.1e} of ‖A‖" in message
    assert not heard(lambda: LAYERS[layer](A))


@pytest.mark.parametrize("layer", LAYERS)
def test_what_is_symmetric_up_to_rounding_does_not_warn(layer):
    for dtype in (torch.float32, torch.float64, torch.complex64):
        A = random(8, 8, dtype=dtype)
        S = A + A.mH
        rounded = S + 100 * torch.finfo(dtype).eps * random(8, 8, dtype=dtype, seed=1)
        assert not heard(lambda rounded=rounded: LAYERS[layer](rounded))


def test_the_worst_entry_of_a_batch_counts():
    A = random(3, 6, 6)
    A[:2] += A[:2].mT.clone()
    (message,) = heard(lambda: pmaf.ied(A))
    share = torch.linalg.matrix_norm(A - A.mT) / torch.linalg.matrix_norm(A)
    assert f"{float(share[2]):.1e} of ‖A‖" in message


def test_other_calls_do_not_warn():
    A = 0.1 * random(5, 5) + 1
    assert not heard(lambda: pmaf.ied(A, symmetric=False))
    assert not heard(lambda: torch.func.vmap(lambda A: pmaf.ied(A).values)(A.expand(2, 5, 5)))
    assert not heard(lambda: pmaf.ied(torch.zeros(5, 5)))
    assert not heard(lambda: pmaf.nullspace(A))
