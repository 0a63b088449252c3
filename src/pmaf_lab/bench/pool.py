"""Principal pooling of features: which path is fastest where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

import pmaf
from pmaf_lab.bench.growth import Sweep
from pmaf_lab.bench.problems import VectorRace
from pmaf_lab.bench.race import Competitor, Result, Task
from pmaf_lab.experiments import Scale

_SIMPLE = 1e-3


def _pool(path: str | None) -> Competitor:
    pool = pmaf.PrincipalPool(path=path)
    return Competitor(lambda X: (pool(X),))


class PoolRace(VectorRace):
    name = "pool"
    title = "Principal pooling"
    about = (
        "The principal vector of tokens×channels features and the gradient of Σ cᵢyᵢ², float32: "
        "the default, eigh of XᵀX, and each path of PrincipalPool alone. Where the lines of "
        "“tokens” or “channels”, whichever is less, and “products” cross is where the default "
        "changes from one to the other. "
        "Run with OMP_NUM_THREADS=1, so that other work on the machine matters least."
    )
    reduced = "two families, four shapes."
    axes = "batch×tokens×channels"
    panel = Sweep("batch 4, as many tokens as channels", lambda size: size[0] == 4)
    baseline = "eigh"
    hermitian = False
    competitors: ClassVar[Mapping[str, Competitor]] = {
        "ours": _pool(None),
        "eigh": Competitor(
            lambda X: (torch.linalg.eigh(X.mT @ X).eigenvectors[..., -1],), largest=2e6
        ),
        "channels": _pool("channels"),
        "tokens": _pool("tokens"),
        "products": _pool("products"),
    }
    families = ("positive", "factors", "noise")
    quick_families = ("positive", "noise")
    shapes: ClassVar[Mapping[Scale, Sequence[tuple[int, ...]]]] = {
        "quick": [(1000, 8, 8), (64, 49, 64), (16, 196, 256), (4, 512, 512)],
        "full": [
            (1000, 8, 8),
            (64, 49, 64),
            (64, 196, 64),
            (16, 49, 256),
            (16, 49, 2048),
            (16, 196, 768),
            (8, 1024, 256),
            (8, 1024, 512),
            *((4, n, n) for n in (64, 128, 192, 256, 320, 384, 512, 768, 1024)),
        ],
    }
    targets: ClassVar[Mapping[str, float]] = {}

    def task(self, family: str, shape: Sequence[int], device: torch.device) -> Task:
        batch, m, n = shape
        generator = torch.Generator().manual_seed(0)
        X = torch.randn(batch, m, n, generator=generator)
        if family == "positive":  # as features are after ReLU
            X = X.relu()
        if family == "factors":
            scores = torch.randn(batch, m, 10, generator=generator)
            X = X + scores @ torch.randn(batch, 10, n, generator=generator)
        c = torch.randn(n, generator=generator).to(device)
        return Task((X.to(device).requires_grad_(),), c)

    def exact(self, inputs: Result, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (X,) = inputs
        _, S, Vh = torch.linalg.svd(X, full_matrices=False)
        squares, y = S.square(), Vh[..., 0, :]
        v = 2 * c * y
        along = (Vh @ v.unsqueeze(-1)).squeeze(-1)
        distances = squares[..., :1] - squares
        weights = torch.where(distances != 0, 1 / distances, 0)
        # Outside of the space of the tokens the moments are zero.
        outside = v - (along.unsqueeze(-2) @ Vh).squeeze(-2)
        z = ((along * weights).unsqueeze(-2) @ Vh).squeeze(-2) + outside / squares[..., :1]
        rows = X @ torch.stack([z, y], -1)
        gradient = rows[..., :1] * y.unsqueeze(-2) + rows[..., 1:] * z.unsqueeze(-2)
        if S.shape[-1] == 1:
            return y, gradient, torch.ones_like(S[..., 0], dtype=torch.bool)
        return y, gradient, squares[..., 0] - squares[..., 1] > _SIMPLE * squares[..., 0]
