"""Principal eigenvectors and their gradients, by everything a user would pick instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

import pmaf
from pmaf_lab.bench.families import EIGEN
from pmaf_lab.bench.growth import Sweep
from pmaf_lab.bench.present import ratio, shape
from pmaf_lab.bench.race import Competitor, Judge, Race, Result, Task, mean
from pmaf_lab.experiments import Finding, Row, Scale
from pmaf_lab.paper.ied import METHODS

STEPS = 100
_SIMPLE = 1e-6
_PAPER = ("PI-DDN-E", "PI-IFT-E", "SI-DDN-E", "SI-IFT-E")


def ours(A: Tensor, k: int | None = None) -> Result:
    return tuple(pmaf.ied(A, k))


def top(A: Tensor, k: int = 1) -> Result:
    values, vectors = torch.linalg.eigh(A)
    return values[..., -k:].flip(-1), vectors[..., -k:].flip(-1)


def _eigh_one(A: Tensor) -> Result:
    values, vectors = torch.linalg.eigh(A)
    return values[..., -1], vectors[..., -1]


def _lobpcg(A: Tensor, k: int = 1) -> Result:
    generator = torch.Generator(A.device).manual_seed(1)
    size = (*A.shape[:-1], k)
    start = torch.randn(size, dtype=A.dtype, device=A.device, generator=generator)
    values, vectors = torch.lobpcg(A, X=start, largest=True)
    return values, vectors


def unrolled(A: Tensor) -> Result:
    """Power iteration as people write it, differentiated by autograd."""
    y = torch.ones_like(A[..., :1])
    for _ in range(STEPS):
        y = A @ y
        y = y / y.norm(dim=-2, keepdim=True)
    value = (y.mT @ A @ y).squeeze(-1).squeeze(-1)
    return value, y.squeeze(-1)


def _scipy_dense(A: Tensor, k: int = 1) -> Result:
    from scipy.linalg import eigh

    n = A.shape[-1]
    return _stacked([eigh(a, subset_by_index=[n - k, n - 1]) for a in A.detach().numpy()])


def _scipy_sparse(A: Tensor, k: int = 1) -> Result:
    from scipy.sparse.linalg import eigsh

    return _stacked([eigsh(a, k=k, which="LA") for a in A.detach().numpy()])


def _stacked(pairs: list[Any]) -> Result:
    """Values and vectors, ascending as SciPy has them, descending."""
    values, vectors = (torch.stack([torch.as_tensor(part) for part in x]) for x in zip(*pairs))
    return values.flip(-1), vectors.flip(-1)


def _xitorch(A: Tensor, k: int = 1) -> Result:
    from xitorch import LinearOperator
    from xitorch.linalg import symeig

    values, vectors = symeig(LinearOperator.m(A, is_hermitian=True), neig=k, mode="uppest")
    return values.flip(-1), vectors.flip(-1)


def paper_rows(symmetric: bool) -> dict[str, Competitor]:
    """The paper's exploiting rows; SI orthogonalises n columns a hundred times."""
    return {
        name: Competitor(
            lambda A, method=METHODS[name]: tuple(method(A, symmetric)),
            largest=5 * 128**2 if name.startswith("SI") else float("inf"),
        )
        for name in _PAPER
    }


COMPETITORS: dict[str, Competitor] = {
    "ours": Competitor(ours),
    "eigh": Competitor(_eigh_one),
    "lobpcg": Competitor(_lobpcg),
    "scipy eigh": Competitor(_scipy_dense, differentiable=False, needs="scipy"),
    "scipy eigsh": Competitor(_scipy_sparse, differentiable=False, needs="scipy"),
    "xitorch": Competitor(_xitorch, largest=2e6, needs="xitorch"),
    "unrolled PI": Competitor(unrolled),
    **paper_rows(symmetric=True),
}
SIZES = (2, 3, 8, 16, 32, 64, 128, 256, 512, 1024)
FIVE = Sweep("batch 5", lambda size: size[0] == 5)
SWEEPS = (
    Sweep("n to 64, batch 5", lambda size: size[0] == 5 and 8 <= size[1] <= 64),
    Sweep("n from 128, batch 5", lambda size: size[0] == 5 and size[1] >= 128),
    Sweep("batch, n = 8", lambda size: size[1] == 8, lambda size: size[0]),
    Sweep("batch, n = 32", lambda size: size[1] == 32, lambda size: size[0]),
    Sweep("batch, n = 128", lambda size: size[1] == 128, lambda size: size[0]),
)


class EigenRace(Race):
    name = "ied"
    title = "IED beside everything else"
    about = (
        "The top eigenpair of symmetric matrices and the gradient of Σ cᵢyᵢ², float32, medians of "
        "runs interleaved between the competitors. Errors are means over the batch against "
        "eigh in float64: of the value relative to ‖A‖, of the vector up to sign, and of the "
        "gradient, relative."
    )
    reduced = "three families, sizes to 256 at batch 5, and 0.15 s a competitor instead of 0.25 s."
    competitors = COMPETITORS
    families = tuple(EIGEN)
    quick_families = ("paper", "wishart", "goe")
    shapes: ClassVar[Mapping[Scale, Sequence[tuple[int, ...]]]] = {
        "quick": [(5, 8), (5, 32), (5, 128), (5, 256)],
        "full": [
            *((1, n) for n in (2, 8, 32, 128, 512, 2048)),
            *((5, n) for n in SIZES),
            *((64, n) for n in (8, 32, 128, 256)),
            *((256, n) for n in (8, 32, 128)),
            *((1000, n) for n in (2, 3, 8, 32)),
        ],
    }
    errors = ("value error", "vector error", "gradient error")
    sweeps = SWEEPS
    axes = "batch×n"
    panel = FIVE
    k = 1
    symmetric = True

    def task(self, family: str, shape: Sequence[int], device: torch.device) -> Task:
        batch, n = shape
        generator = torch.Generator().manual_seed(0)
        A = EIGEN[family](batch, n, generator).to(device).requires_grad_()
        c = torch.randn(n, generator=generator).to(device)
        return Task((A,), c)

    def loss(self, outputs: Result, c: Tensor) -> Tensor:
        return _loss(outputs[1], c)

    def judge(self, task: Task) -> Judge:
        truth = self.truth(task.inputs[0].detach().double(), task.c.double())
        return partial(_errors, truth=truth, symmetric=self.symmetric)

    def truth(self, A: Tensor, c: Tensor) -> dict[str, Tensor]:
        """Values, vectors and the gradient in the precision of `A`."""
        return symmetric_truth(A, c, self.k)

    def findings(self, by_family: Mapping[str, Sequence[Row]]) -> list[Finding]:
        return [*_against_eigh(by_family), *_against_paper(by_family), *_worst(by_family)]


class EigenvectorsRace(EigenRace):
    name = "ied-k"
    title = "The top four eigenvectors beside everything else"
    about = (
        "The top four eigenpairs of symmetric matrices and the gradient of Σⱼ j·Σᵢ cᵢyᵢⱼ², "
        "otherwise as above."
    )
    competitors: ClassVar[Mapping[str, Competitor]] = {
        "ours": Competitor(partial(ours, k=4)),
        "eigh": Competitor(partial(top, k=4)),
        "lobpcg": Competitor(partial(_lobpcg, k=4)),
        "scipy eigh": Competitor(partial(_scipy_dense, k=4), differentiable=False, needs="scipy"),
        "scipy eigsh": Competitor(partial(_scipy_sparse, k=4), differentiable=False, needs="scipy"),
        "xitorch": Competitor(partial(_xitorch, k=4), largest=2e6, needs="xitorch"),
    }
    families = ("paper", "wishart", "goe", "gap-1e-2")
    quick_families = ("wishart",)
    reduced = "one family, two sizes."
    shapes: ClassVar[Mapping[Scale, Sequence[tuple[int, ...]]]] = {
        "quick": [(5, 32), (5, 128)],
        "full": [(5, n) for n in (8, 32, 64, 128, 256, 512, 1024)],
    }
    sweeps = SWEEPS[:2]
    k = 4

    def findings(self, by_family: Mapping[str, Sequence[Row]]) -> list[Finding]:
        return _worst(by_family, "IED, k = 4")


def _loss(vectors: Tensor, c: Tensor) -> Tensor:
    """`Σⱼ j·Σᵢ cᵢyᵢⱼ²`, which does not depend on the signs of the vectors."""
    if vectors.dim() == 2:
        return (vectors.square() @ c).sum()
    along = c @ vectors.square()
    return (along * torch.arange(1, along.shape[-1] + 1, device=c.device)).sum()


def symmetric_truth(A: Tensor, c: Tensor, k: int) -> dict[str, Tensor]:
    """From a whole decomposition, without autograd."""
    values, vectors = (x.flip(-1) for x in torch.linalg.eigh(A))
    gradient = torch.zeros_like(A)
    for j in range(k):
        y = vectors[..., j]
        distances = values[..., j : j + 1] - values
        weights = torch.where(distances != 0, 1 / distances, 0)  # also drops the vector itself
        along = ((j + 1) * c * y).unsqueeze(-2) @ vectors
        z = (weights.unsqueeze(-2) * along) @ vectors.mT
        half = z.mT * y.unsqueeze(-2)
        gradient += half + half.mT
    norm = values.abs().amax(-1)
    gaps = values[..., :k] - values[..., 1 : k + 1]
    return {
        "values": values[..., :k],
        "norm": norm,
        # Where an eigenvalue repeats there is no vector to compare with.
        "simple": gaps.amin(-1) > _SIMPLE * norm,
        "vectors": vectors[..., :k],
        "gradient": gradient,
    }


def _errors(
    outputs: Result, gradients: Result | None, truth: dict[str, Tensor], symmetric: bool
) -> dict[str, float | None]:
    exact, simple = truth["vectors"], truth["simple"]
    values = outputs[0].double().reshape(truth["values"].shape)
    vectors = outputs[1].double().reshape(exact.shape)
    signs = (vectors * exact).sum(-2, keepdim=True).sign()
    found = {
        "value error": mean((values - truth["values"]).abs().amax(-1) / truth["norm"]),
        "vector error": mean((signs * vectors - exact).norm(dim=(-2, -1))[simple]),
    }
    if gradients is not None:
        G, wanted = gradients[0].double(), truth["gradient"]
        G = 0.5 * (G + G.mT) if symmetric else G  # only this part has a meaning
        error = (G - wanted).norm(dim=(-2, -1)) / wanted.norm(dim=(-2, -1))
        found["gradient error"] = mean(error[simple])
    return found


def _against_eigh(by_family: Mapping[str, Sequence[Row]]) -> list[Finding]:
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
    return findings


def _against_paper(by_family: Mapping[str, Sequence[Row]]) -> list[Finding]:
    """The fastest of the paper's exploiting rows, where it is closest to ours."""
    speeds = [
        (min(found), shape(row))
        for row in by_family.get("paper", [])
        if row.params["shape"][0] == 5 and row.params["shape"][1] >= 32
        if (found := [x for name in _PAPER if (x := ratio(row.values, name, "both")) is not None])
    ]
    if not speeds:
        return []
    speed, where = min(speeds)
    return [
        Finding(
            "IED, the paper's data, batch 5, n of 32 and more: against the paper's rows, least",
            "at least 4×",
            f"{speed:.1f}× ({where})",
            speed >= 4,
        )
    ]


def _worst(by_family: Mapping[str, Sequence[Row]], what: str = "IED") -> list[Finding]:
    """Where eigh is closest to ours, or ahead of it."""
    speeds = [
        (speed, f"{family}, {shape(row)}", row.params["shape"][-1], family)
        for family, rows in by_family.items()
        for row in rows
        if (speed := ratio(row.values, "eigh", "both")) is not None
    ]
    groups = {
        "any size": (0.9, speeds),
        "n of 512 and more": (3.0, [entry for entry in speeds if entry[2] >= 512]),
        "a gap of 0.3, n of 512 and more": (
            10.0,
            [entry for entry in speeds if entry[2] >= 512 and entry[3] in ("gap-0.3", "spiked")],
        ),
    }
    return [
        Finding(
            f"{what}, all families, {group}: both passes against eigh, least",
            f"at least {target:g}×",
            f"{min(found)[0]:.2f}× ({min(found)[1]})",
            min(found)[0] >= target,
        )
        for group, (target, found) in groups.items()
        if found
    ]
