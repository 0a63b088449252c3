"""Principal eigenvectors and their gradients, by everything a user would pick instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import pmaf
from pmaf.bench.families import EIGEN
from pmaf.bench.present import ratio, ratios_figure, ratios_table, rows_of, shape
from pmaf.bench.race import Competitor, Result, race
from pmaf.experiments import Cell, Experiment, Finding, Row, Scale, Section
from pmaf.paper.ied import METHODS

STEPS = 100
_SIMPLE = 1e-6


def _ours(A: Tensor) -> Result:
    return tuple(pmaf.ied(A))


def _eigh(A: Tensor) -> Result:
    values, vectors = torch.linalg.eigh(A)
    return values[..., -1], vectors[..., -1]


def _lobpcg(A: Tensor) -> Result:
    n = A.shape[-1]
    start = torch.ones(*A.shape[:-1], 1, dtype=A.dtype, device=A.device)
    start = start + torch.arange(n, dtype=A.dtype, device=A.device).unsqueeze(-1) / n
    values, vectors = torch.lobpcg(A, X=start, largest=True)
    return values[..., 0], vectors[..., 0]


def _unrolled(A: Tensor) -> Result:
    """Power iteration as people write it, differentiated by autograd."""
    y = torch.ones_like(A[..., :1])
    for _ in range(STEPS):
        y = A @ y
        y = y / y.norm(dim=-2, keepdim=True)
    value = (y.mT @ A @ y).squeeze(-1).squeeze(-1)
    return value, y.squeeze(-1)


def _scipy_dense(A: Tensor) -> Result:
    from scipy.linalg import eigh

    n = A.shape[-1]
    pairs = [eigh(a, subset_by_index=[n - 1, n - 1]) for a in A.detach().numpy()]
    return _stacked(pairs)


def _scipy_sparse(A: Tensor) -> Result:
    from scipy.sparse.linalg import eigsh

    return _stacked([eigsh(a, k=1, which="LA") for a in A.detach().numpy()])


def _stacked(pairs: list[Any]) -> Result:
    values = torch.stack([torch.as_tensor(value[0]) for value, _ in pairs])
    return values, torch.stack([torch.as_tensor(vectors[:, 0]) for _, vectors in pairs])


def _xitorch(A: Tensor) -> Result:
    from xitorch import LinearOperator
    from xitorch.linalg import symeig

    values, vectors = symeig(LinearOperator.m(A, is_hermitian=True), neig=1, mode="uppest")
    return values[..., 0], vectors[..., 0]


COMPETITORS: dict[str, Competitor] = {
    "ours": Competitor(_ours),
    "eigh": Competitor(_eigh),
    "lobpcg": Competitor(_lobpcg),
    "scipy eigh": Competitor(_scipy_dense, differentiable=False, needs="scipy"),
    "scipy eigsh": Competitor(_scipy_sparse, differentiable=False, needs="scipy"),
    "xitorch": Competitor(_xitorch, largest=2e6, needs="xitorch"),
    "unrolled PI": Competitor(_unrolled),
    "PI-DDN-E": Competitor(lambda A: tuple(METHODS["PI-DDN-E"](A))),
    "PI-IFT-E": Competitor(lambda A: tuple(METHODS["PI-IFT-E"](A))),
    "SI-IFT-E": Competitor(lambda A: tuple(METHODS["SI-IFT-E"](A)), largest=5 * 256**2),
}

SHAPES: dict[str, list[tuple[int, int]]] = {
    "quick": [(5, 8), (5, 32), (5, 128), (5, 256)],
    "full": [
        *((1, n) for n in (2, 8, 32, 128, 512, 2048)),
        *((5, n) for n in (2, 3, 8, 32, 64, 128, 256, 512, 1024)),
        *((64, n) for n in (2, 3, 8, 32, 128, 256)),
        *((256, n) for n in (2, 8, 32, 128)),
        *((1000, n) for n in (2, 3, 8, 32)),
    ],
}
ERRORS = ("value error", "vector error", "gradient error")


class EigenRace(Experiment):
    name = "ied"
    title = "IED beside everything else"
    about = (
        "The top eigenpair of symmetric matrices and the gradient of (cᵀy)², float32, medians of "
        "runs interleaved between the competitors. Errors are means over the batch against "
        "eigh in float64: of the value relative to ‖A‖, of the vector up to sign, and of the "
        "gradient, relative."
    )

    def cells(self, scale: Scale) -> list[Cell]:
        families = ("paper", "wishart", "goe") if scale == "quick" else tuple(EIGEN)
        budget = 0.3 if scale == "quick" else 1.0
        return [
            Cell(
                {"family": family, "shape": list(shape), "budget": budget},
                1 + budget * len(COMPETITORS),
            )
            for family in families
            for shape in SHAPES[scale]
        ]

    def measure(
        self, device: torch.device, *, family: str, shape: list[int], budget: float
    ) -> dict[str, Any]:
        batch, n = shape
        generator = torch.Generator().manual_seed(0)
        A = EIGEN[family](batch, n, generator).to(device).requires_grad_()
        c = torch.randn(n, generator=generator).to(device)
        results = race(COMPETITORS, (A,), lambda out: _loss(out[1], c), device, budget)
        truth = _truth(A.detach().double(), c.double())
        return {name: _summary(result, truth) for name, result in results.items()}

    def present(self, rows: Sequence[Row]) -> Section:
        families = [family for family in EIGEN if rows_of(rows, family=family)]
        names = list(COMPETITORS)
        by_family = {
            family: sorted(rows_of(rows, family=family), key=lambda row: row.params["shape"])
            for family in families
        }
        panels = {
            family: five
            for family, found in by_family.items()
            if (five := [row for row in found if row.params["shape"][0] == 5])
        }
        return Section(
            findings=_findings(by_family),
            figures=[
                ratios_figure(
                    "bench-ied",
                    "Both passes at batch 5, as multiples of ours (forward alone for SciPy); "
                    "above the line is slower than ours.",
                    panels,
                    names,
                )
            ]
            if panels
            else [],
            tables=[
                ratios_table(f"bench-ied-{family}", f"{family}, batch×n", found, names, ERRORS)
                for family, found in by_family.items()
            ],
        )


def _loss(y: Tensor, c: Tensor) -> Tensor:
    """Does not depend on the sign of the vector."""
    return (y @ c).square().sum()


def _truth(A: Tensor, c: Tensor) -> dict[str, Tensor]:
    """Value, vector and gradient from a whole decomposition, without autograd."""
    values, vectors = torch.linalg.eigh(A)
    y, top = vectors[..., -1], values[..., -1:]
    distances = top - values
    weights = torch.where(distances > 0, 1 / distances, 0)  # also drops y itself
    z = (vectors * (weights * (c @ vectors)).unsqueeze(-2)).sum(-1)
    half = ((y @ c).unsqueeze(-1) * z).unsqueeze(-1) * y.unsqueeze(-2)
    norm = values.abs().amax(-1)
    return {
        "value": values[..., -1],
        "norm": norm,
        # Where the top eigenvalue repeats there is no vector to compare with.
        "simple": (values[..., -1] - values[..., -2]) > _SIMPLE * norm,
        "vector": y,
        "gradient": half + half.mT,
    }


def _summary(result: dict[str, Any], truth: dict[str, Tensor]) -> dict[str, Any]:
    """Times and errors of a competitor, ready to save."""
    if "skipped" in result:
        return result
    value, y = (x.double() for x in result["outputs"])
    sign = (y * truth["vector"]).sum(-1, keepdim=True).sign()
    found = {
        "forward": result["forward"],
        "backward": result["backward"],
        "value error": _mean((value - truth["value"]).abs() / truth["norm"]),
        "vector error": _mean((sign * y - truth["vector"]).norm(dim=-1)[truth["simple"]]),
    }
    if result["gradients"] is not None:
        G = result["gradients"][0].double()
        G = 0.5 * (G + G.mT)  # of a symmetric matrix only this part has a meaning
        exact = truth["gradient"]
        error = (G - exact).flatten(1).norm(dim=-1) / exact.flatten(1).norm(dim=-1)
        found["gradient error"] = _mean(error[truth["simple"]])
    return found


def _mean(x: Tensor) -> float | None:
    return float(x.mean()) if x.numel() and bool(x.isfinite().all()) else None


def _findings(by_family: dict[str, list[Row]]) -> list[Finding]:
    findings = []
    targets = {32: 1.2, 128: 4.0, 256: 8.0, 512: 15.0, 1024: 15.0}
    for row in by_family.get("paper", []):
        batch, n = row.params["shape"]
        speed = ratio(row.values, "eigh", "both")
        if batch == 5 and n in targets and speed is not None:
            findings.append(
                Finding(
                    f"IED, the paper's data, 5×{n}: both passes against eigh",
                    f"at least {targets[n]:g}×",
                    f"{speed:.1f}×",
                    speed >= targets[n],
                )
            )
    worst: dict[str, tuple[float, str]] = {}
    for family, rows in by_family.items():
        for row in rows:
            speed = ratio(row.values, "eigh", "both")
            if speed is not None:
                large = row.params["shape"][-1] >= 512
                key = "n of 512 and more" if large else "any size"
                for group in {key, "any size"}:
                    entry = (speed, f"{family}, {shape(row)}")
                    worst[group] = min(worst.get(group, entry), entry)
    for group, target in (("any size", 0.9), ("n of 512 and more", 3.0)):
        if group in worst:
            speed, where = worst[group]
            findings.append(
                Finding(
                    f"IED, all families, {group}: both passes against eigh, least",
                    f"at least {target:g}×",
                    f"{speed:.2f}× ({where})",
                    speed >= target,
                )
            )
    return findings
