"""The families of the benchmarks, and LESS problems with a name of their own, in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pmaf_lab.bench.families import SQUARES, Squares

Case = Callable[[], tuple[Tensor, Tensor]]


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(m: int, n: int, length: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gaussian A, and b for which ‖A⁺b‖ is `length`, plus a part outside the range of A."""
    g = _generator(seed)
    A = torch.randn(m, n, generator=g, dtype=torch.float64)
    x = torch.linalg.pinv(A) @ torch.randn(m, generator=g, dtype=torch.float64)
    b = A @ (length * x / x.norm())
    noise = torch.randn(m, generator=g, dtype=torch.float64)
    return A, b + 0.3 * (noise - A @ (torch.linalg.pinv(A) @ noise))


def with_singular_values(s: list[float], m: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """A with the given singular values, and its singular vectors as columns."""
    g = _generator(seed)
    n = len(s)
    left = torch.linalg.qr(torch.randn(m, n, generator=g, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64))[0]
    return left * torch.tensor(s, dtype=torch.float64) @ right.T, left, right


def hard(tau: bool = True) -> tuple[Tensor, Tensor]:
    """b has no part along the smallest singular vector; `tau` says whether y has one."""
    A, left, _ = with_singular_values([3.0, 2.0, 1.0], 5)
    weight = 1.0 if tau else 4.0
    return A, weight * (left[:, 0] + 0.5 * left[:, 1])


def drawn(family: Squares, m: int = 8, n: int = 5) -> Case:
    def build() -> tuple[Tensor, Tensor]:
        A, b = family(1, m, n, _generator())
        return A[0].double(), b[0].double()

    return build


# Rounding of the float32 numbers that they are drawn as makes the hard case an ordinary one, nearly
# hard, whose derivatives have few digits; `hard` is one in float64.
FAMILIES = {name: drawn(family) for name, family in SQUARES.items() if name != "hard"}

REGULAR: dict[str, Case] = {
    **{f"{name}, 8x5": case for name, case in FAMILIES.items()},
    "inner": lambda: gaussian(6, 4, 0.4),
    "outer": lambda: gaussian(6, 4, 3.0),
    "on the sphere": lambda: gaussian(6, 4, 1.0),
    "square inner": lambda: gaussian(3, 3, 0.5),
    "square outer": lambda: gaussian(3, 3, 2.0),
    "2x2": lambda: gaussian(2, 2, 2.0),
    "wide outer": lambda: gaussian(3, 5, 2.0),
    "one row, outer": lambda: gaussian(1, 4, 2.0),
    "one column": lambda: gaussian(4, 1, 0.5),
    "1x1": lambda: (torch.tensor([[2.0]]).double(), torch.tensor([-3.0]).double()),
    "past the hard case": lambda: hard(tau=False),
    "repeated singular values": lambda: (
        with_singular_values([2.0, 1.0, 1.0], 5)[0],
        torch.arange(1.0, 6.0).double(),
    ),
}

# Solutions that are not the only ones, or where the derivative of the global
# minimiser does not exist.
DEGENERATE: dict[str, Case] = {
    "b = 0": lambda: (gaussian(5, 3, 1.0)[0], torch.zeros(5).double()),
    "hard case": lambda: hard(),
    "wide inner": lambda: gaussian(2, 4, 0.5),
    "wide inner, one dimension free": lambda: gaussian(3, 4, 0.5),
    "A = 0": lambda: (torch.zeros(4, 3).double(), torch.ones(4).double()),
    "A = 0, b = 0": lambda: (torch.zeros(4, 3).double(), torch.zeros(4).double()),
    "identity, b = 0": lambda: (torch.eye(3).double(), torch.zeros(3).double()),
    "repeated smallest, hard": lambda: (
        torch.diag(torch.tensor([2.0, 1.0, 1.0])).double(),
        torch.tensor([0.1, 0.0, 0.0]).double(),
    ),
    "rank deficient": lambda: (
        torch.ones(4, 3).double(),
        torch.tensor([1.0, 0.5, 0.2, 0.1]).double(),
    ),
    "one column, b = 0": lambda: (gaussian(4, 1, 0.5)[0], torch.zeros(4).double()),
}

ALL = REGULAR | DEGENERATE
