"""The families of the benchmarks, and matrices with a name of their own, in float64."""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx
import torch
from torch import Tensor

from pmaf_lab.bench.families import EIGEN, GENERAL, Eigen


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_eigenvalues(values: list[float], seed: int = 0) -> Tensor:
    q = torch.linalg.qr(_randn(len(values), len(values), seed=seed))[0]
    return q * torch.tensor(values, dtype=torch.float64) @ q.T


def drawn(family: Eigen, n: int = 12) -> Callable[[], Tensor]:
    return lambda: family(1, n, torch.Generator().manual_seed(0))[0].double()


def relative_gap(gap: float, n: int = 12) -> Tensor:
    rest = torch.linspace(1 - gap, -0.5, n - 1, dtype=torch.float64).tolist()
    return with_eigenvalues([1.0, *rest])


def graph(kind: str, matrix: str) -> Tensor:
    G = nx.karate_club_graph() if kind == "karate" else nx.grid_2d_graph(4, 5)
    array = nx.to_numpy_array(G, weight=None) if matrix == "adjacency" else (
        nx.laplacian_matrix(G, weight=None).toarray()
    )  # fmt: skip
    return torch.from_numpy(array).double()


def wishart(rows: int, n: int) -> Tensor:
    X = _randn(rows, n, seed=3)
    return X.T @ X / rows


SYMMETRIC: dict[str, Callable[[], Tensor]] = {
    **{name: drawn(family) for name, family in EIGEN.items()},
    "Wishart, square": lambda: wishart(12, 12),
    "gap 1e-6": lambda: relative_gap(1e-6),
    "negative definite": lambda: -wishart(60, 12) - torch.eye(12),
    "|λ_min| > λ_max": lambda: with_eigenvalues([2.0, 1.0, 0.5, -1.0, -7.0]),
    "karate, adjacency": lambda: graph("karate", "adjacency"),
    "karate, Laplacian": lambda: graph("karate", "Laplacian"),
    "grid, adjacency": lambda: graph("grid", "adjacency"),
    "grid, Laplacian": lambda: graph("grid", "Laplacian"),
    "rank one": lambda: torch.outer(x := _randn(8), x),
    "1x1": lambda: torch.tensor([[-2.0]]).double(),
    "2x2": lambda: torch.tensor([[2.0, 1.0], [1.0, -3.0]]).double(),
}

# Top eigenvalue simple, others repeated: torch.linalg.eigh has NaN gradients here.
REPEATED_ELSEWHERE: dict[str, Callable[[], Tensor]] = {
    "diag(3,1,1,1)": lambda: torch.diag(torch.tensor([3.0, 1.0, 1.0, 1.0])).double(),
    "I + 5xxᵀ": lambda: torch.eye(4).double() + 5 * torch.outer(x := _randn(4), x) / (x @ x),
    "equal blocks": lambda: torch.block_diag(
        torch.tensor([[5.0]]).double(), *[torch.tensor([[2.0, 1.0], [1.0, 2.0]]).double()] * 2
    ),
}

REPEATED_TOP: dict[str, Callable[[], Tensor]] = {
    "identity": lambda: torch.eye(5).double(),
    "zero": lambda: torch.zeros(5, 5).double(),
    "double top": lambda: with_eigenvalues([3.0, 3.0, 1.0, 0.0]),
    "exactly double top": lambda: torch.diag(torch.tensor([3.0, 3.0, 1.0])).double(),
}

NONSYMMETRIC: dict[str, Callable[[], Tensor]] = {
    **{name: drawn(family) for name, family in GENERAL.items()},
    "Perron, 3x3": lambda: _randn(3, 3).abs() + 0.1,
    "positive, stochastic": lambda: (P := _randn(8, 8).abs()) / P.sum(0),
    "negative dominant": lambda: -_randn(6, 6).abs(),
    "1x1": lambda: torch.tensor([[-2.0]]).double(),
    "triangular": lambda: torch.triu(_randn(5, 5)) + torch.diag(torch.arange(5.0).double() * 3),
}
