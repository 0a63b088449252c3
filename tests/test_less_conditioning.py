"""Ill-conditioned LESS problems, against 50-digit arithmetic.

What the condition number allows is measured, not guessed: it is how far the exact
solution and the exact gradient move when the inputs are rounded.
"""

import numpy as np
import pytest
import torch

import pmaf
from pmaf.linalg.gram import singular_spectrum
from pmaf.tangent.basis import amplification
from tests import oracles
from tests.less_cases import with_singular_values

DRAWS = 6
SLACK = 30  # of our error over the largest effect of rounding the inputs


def make(condition, length, noise, dtype):
    exponents = np.linspace(0, -np.log10(condition), 5)
    A = with_singular_values((10.0**exponents).tolist(), 8)[0]
    g = torch.Generator().manual_seed(7)
    x = torch.randn(5, generator=g, dtype=torch.float64)
    b = A @ (length * x / x.norm()) + noise * torch.randn(8, generator=g, dtype=torch.float64)
    return A.to(dtype), b.to(dtype)


def allowed(A, b, v, eps):
    """The largest change of the exact answers when the inputs are rounded to `eps`."""
    g = np.random.default_rng(0)
    exact = oracles.exact_less(A, b, v)
    moved = [
        oracles.exact_less(
            A * (1 + eps * g.uniform(-1, 1, A.shape)), b * (1 + eps * g.uniform(-1, 1, b.shape)), v
        )
        for _ in range(DRAWS)
    ]
    return exact, [
        max(np.linalg.norm(near[i] - exact[i]) for near in moved) + eps * np.linalg.norm(exact[i])
        for i in range(3)
    ]


@pytest.mark.parametrize(("dtype", "condition"), [(torch.float64, 1e6), (torch.float32, 1e3)])
@pytest.mark.parametrize(
    ("length", "noise"),
    [(1.0, 0.0), (1.0, 1e-3), (3.0, 0.1), (0.3, 0.1), (0.99, 0.0), (1.01, 0.0)],
    ids=["consistent", "nearly consistent", "outer", "inner", "just inside", "just outside"],
)
def test_no_digits_are_lost_to_the_gram_matrix(dtype, condition, length, noise):
    A, b = (x.requires_grad_() for x in make(condition, length, noise, dtype))
    v = torch.linspace(-1, 2, 5, dtype=dtype)
    y = pmaf.less(A, b)
    dA, db = torch.autograd.grad(y @ v, (A, b))
    found = [x.detach().double().numpy() for x in (y, dA, db)]
    exact, bounds = allowed(
        *(x.detach().double().numpy() for x in (A, b, v)), eps=torch.finfo(dtype).eps
    )
    for name, x, truth, bound in zip(("y", "dA", "db"), found, exact, bounds):
        assert np.linalg.norm(x - truth) <= SLACK * bound, name


@pytest.mark.parametrize("gap", [1e-6, 1e-2, 1.0])
@pytest.mark.parametrize("place", ["lowest", "second", "all", "all but the lowest"])
def test_how_much_a_tangent_solve_magnifies(place, gap):
    """It is bounded by the parts along and beside the lowest direction, twice the larger one."""
    A, _, right = with_singular_values([3.0, 2.0, 1.0], 5)
    coordinates = {
        "lowest": [0.0, 0.0, 1.0],
        "second": [0.0, 1.0, 0.0],
        "all": [0.6, 0.5, 1.0],
        "all but the lowest": [1.0, 1.0, 0.0],
    }
    y = right @ torch.tensor(coordinates[place], dtype=torch.float64)
    y = y / y.norm()
    spectrum = singular_spectrum(A)[0]
    H = A.mT @ A + (gap - 1) * torch.eye(3, dtype=torch.float64)
    across = torch.linalg.svd(y.unsqueeze(0)).Vh[1:]  # an orthonormal basis of the tangent space
    least = torch.linalg.eigvalsh(across @ H @ across.mT)[0]
    found = amplification(spectrum, torch.tensor(gap, dtype=torch.float64), y)
    # The top of AᵀA is nine; the least curvature is known up to a rounding of that over the gap.
    allowed = 1 + 64 * 9 * torch.finfo(torch.float64).eps / gap
    assert float(9 / least) <= 2 * float(found) * allowed
