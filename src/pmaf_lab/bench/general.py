"""Principal eigenvectors of matrices that are not symmetric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

import pmaf
from pmaf_lab.bench.eigen import FIVE, SWEEPS, EigenRace, paper_rows, unrolled
from pmaf_lab.bench.families import GENERAL
from pmaf_lab.bench.present import ratio, shape
from pmaf_lab.bench.race import Competitor, Result, Task
from pmaf_lab.experiments import Finding, Row, Scale


def _ours(A: Tensor) -> Result:
    return tuple(pmaf.ied(A, symmetric=False))


def _eig(A: Tensor) -> Result:
    """The eigenpair of largest real part from a whole decomposition."""
    values, vectors = torch.linalg.eig(A)
    top = values.real.argmax(-1)[:, None]
    y = vectors.take_along_dim(top[:, None], -1).squeeze(-1)
    y = (y * y.sum(-1, keepdim=True).conj()).real  # of any phase
    return values.real.take_along_dim(top, -1).squeeze(-1), y / y.norm(dim=-1, keepdim=True)


def _scipy_sparse(A: Tensor) -> Result:
    from scipy.sparse.linalg import eigs

    pairs: list[Any] = [eigs(a, k=1, which="LR") for a in A.detach().numpy()]
    values, vectors = (torch.stack([torch.as_tensor(part) for part in x]) for x in zip(*pairs))
    y = vectors.squeeze(-1)
    y = (y * y.sum(-1, keepdim=True).conj()).real
    return values.real.squeeze(-1), y / y.norm(dim=-1, keepdim=True)


class GeneralRace(EigenRace):
    name = "ied-nonsymmetric"
    title = "IED without symmetry beside everything else"
    about = (
        "The top eigenpair of nonsymmetric matrices and the gradient of Σ cᵢyᵢ², as above; errors "
        "against eig in float64 and its derivative. DDN's gradient is not the true one here."
    )
    reduced = "one family, two sizes."
    competitors: ClassVar[Mapping[str, Competitor]] = {
        "ours": Competitor(_ours),
        "eig": Competitor(_eig),
        "scipy eigs": Competitor(_scipy_sparse, differentiable=False, needs="scipy"),
        "unrolled PI": Competitor(unrolled),
        **paper_rows(symmetric=False),
    }
    families = tuple(GENERAL)
    quick_families = ("paper",)
    shapes: ClassVar[Mapping[Scale, Sequence[tuple[int, ...]]]] = {
        "quick": [(5, 32), (5, 128)],
        "full": [
            *((5, n) for n in (2, 8, 32, 64, 128, 256, 512)),
            *((batch, 32) for batch in (1, 64, 256)),
        ],
    }
    sweeps = (*SWEEPS[:2], SWEEPS[3])
    panel = FIVE
    symmetric = False

    def task(self, family: str, shape: Sequence[int], device: torch.device) -> Task:
        batch, n = shape
        generator = torch.Generator().manual_seed(0)
        A = GENERAL[family](batch, n, generator).to(device).requires_grad_()
        return Task((A,), torch.randn(n, generator=generator).to(device))

    def truth(self, A: Tensor, c: Tensor) -> dict[str, Tensor]:
        leaf = A.clone().requires_grad_()
        value, y = _eig(leaf)
        (gradient,) = torch.autograd.grad(self.loss((value, y), c), leaf)
        return {
            "values": value.detach().unsqueeze(-1),
            "norm": value.detach().abs(),
            "simple": gradient.isfinite().all(-1).all(-1),
            "vectors": y.detach().unsqueeze(-1),
            "gradient": gradient,
        }

    def findings(self, by_family: Mapping[str, Sequence[Row]]) -> list[Finding]:
        speeds = [
            (speed, f"{family}, {shape(row)}")
            for family, rows in by_family.items()
            for row in rows
            if (speed := ratio(row.values, "eig", "both")) is not None
        ]
        if not speeds:
            return []
        speed, where = min(speeds)
        return [
            Finding(
                "IED, nonsymmetric, any size: both passes against eig, least",
                "at least 0.9×",
                f"{speed:.2f}× ({where})",
                speed >= 0.9,
            )
        ]
