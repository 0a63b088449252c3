"""Precision on the features of a ResNet-50 that ends in a matrix."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from pmaf.errors import require_extra
from pmaf_lab.experiments import Cell, Experiment, Figure, Finding, Row, Scale, Section, Table
from pmaf_lab.paper.items.precision import MEASURES, SOLVERS, distances, draw

SIZES = (32, 64, 128)
MATRICES = ("symmetric", "nonsymmetric")
CHECKPOINT = "microsoft/resnet-50"
FEATURES = 2048 * 8 * 8  # of a 256×256 image


class MatrixResNet(nn.Module):
    """A ResNet-50 without pooling whose last layer gives a nonnegative m×m matrix."""

    def __init__(self, m: int) -> None:
        super().__init__()
        self.m = m
        self.body, self.weights = _resnet50()
        self.head = nn.Linear(FEATURES, m * m)

    def forward(self, images: Tensor, symmetric: bool) -> Tensor:
        features = self.body(images).last_hidden_state.flatten(1)
        A = self.head(features).reshape(-1, self.m, self.m).abs()
        return A + A.mT if symmetric else A


def _resnet50() -> tuple[nn.Module, str]:
    """The network and where its weights come from; nothing is downloaded."""
    require_extra("transformers", "paper")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import ResNetConfig, ResNetModel

    with contextlib.suppress(OSError):
        model = ResNetModel.from_pretrained(CHECKPOINT, local_files_only=True)
        return model.eval(), f"pretrained ({CHECKPOINT})"
    return ResNetModel(ResNetConfig()).eval(), "random, seeded"


class EigenResNet(Experiment):
    name = "ied-resnet"
    title = "IED: precision on a modified ResNet-50"
    about = (
        "Matrices as a network makes them: images of standard normal noise (5×3×256×256) through a "
        "ResNet-50 without pooling, a fully connected layer from its 2048×8×8 features to m² "
        "numbers, their absolute values as an m×m matrix, and A + Aᵀ where it is to be symmetric. "
        "float32; eigen distance ‖Ay − λy‖ and FPD ‖y − Ay/‖Ay‖‖, evaluated in float64."
    )
    reduced = "m = 32 alone."
    needs = ("transformers",)

    def cells(self, scale: Scale) -> list[Cell]:
        sizes = SIZES[:1] if scale == "quick" else SIZES
        return [Cell({"m": m}, 6 + 60 * (m / 128) ** 2) for m in sizes]

    def measure(self, device: torch.device, *, m: int) -> dict[str, Any]:
        torch.manual_seed(0)
        network = MatrixResNet(m).to(device)
        images = torch.randn(5, 3, 256, 256, generator=torch.Generator().manual_seed(1))
        found: dict[str, Any] = {"weights": network.weights}
        for matrix in MATRICES:
            symmetric = matrix == "symmetric"
            with torch.no_grad():
                A = network(images.to(device), symmetric)
            found[matrix] = {solver: distances(A, solver, symmetric) for solver in SOLVERS}
        return found

    def present(self, rows: Sequence[Row]) -> Section:
        found = {row.params["m"]: row.values for row in rows if row.status == "done"}
        if not found:
            return Section()
        sizes = sorted(found)

        def means(matrix: str, measure: str, solver: str) -> dict[int, float]:
            return {m: fmean(found[m][matrix][solver][measure]) for m in sizes}

        def panel(matrix: str, measure: str) -> tuple[str, Any]:
            title = f"{matrix}\n{MEASURES[measure]}"
            return title, lambda solver: means(matrix, measure, solver)

        columns = [("", "matrix"), ("", "m")]
        columns += [(words, solver) for words in MEASURES.values() for solver in SOLVERS]
        lines = [
            [matrix, m]
            + [means(matrix, measure, solver)[m] for measure in MEASURES for solver in SOLVERS]
            for matrix in MATRICES
            for m in sizes
        ]
        weights = " and ".join(sorted({values["weights"] for values in found.values()}))
        return Section(
            findings=[self._finding(matrix, sizes, means) for matrix in MATRICES],
            figures=[
                Figure(
                    "ied-resnet",
                    f"Matrices from a ResNet-50 (weights: {weights}), float32; lower is better.",
                    lambda theme: draw(
                        [[panel(matrix, measure) for matrix in MATRICES for measure in MEASURES]],
                        sizes,
                        theme,
                    ),
                )
            ],
            tables=[
                Table.of(
                    "ied-resnet",
                    "Distances",
                    columns,
                    lines,
                    formats=dict.fromkeys(SOLVERS, "{:.1e}"),
                )
            ],
            notes=[f"Weights of the ResNet-50: {weights}. The fully connected layer is random."],
        )

    def _finding(self, matrix: str, sizes: list[int], means: Any) -> Finding:
        pairs = [
            (means(matrix, measure, solver)[m], means(matrix, measure, "eigh")[m])
            for measure in MEASURES
            for solver in ("PI", "SI")
            for m in sizes
        ]
        ahead = sum(a < b for a, b in pairs)
        return Finding(
            f"ResNet-50, {matrix}: PI and SI are closer than eigh",
            "yes",
            f"in {ahead} of {len(pairs)} comparisons",
            ahead == len(pairs),
        )
