"""The first principal component without a covariance matrix, beside scikit-learn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

import pmaf
from pmaf.operators import Gram, LowRank, Matrix
from pmaf_lab.bench.matrix_free import ByProducts, Question, Solve
from pmaf_lab.experiments import Finding, Row, Scale


class PrincipalComponents(ByProducts):
    name = "pca"
    needs = ("sklearn", "pmaf_lab.bench.pca")
    title = "IED of XᵀX without forming it"
    about = (
        "The first principal direction of m×n data in float32, ten factors and noise: "
        "ied(Gram(X)), and the same of centred data. The others run forward only; "
        "TruncatedSVD does not centre, PCA does."
    )
    reduced = "up to four million numbers."
    families = ("Gram", "centred")
    others = ("PCA randomized", "PCA arpack", "TruncatedSVD randomized", "TruncatedSVD arpack")
    sizes: ClassVar[Mapping[Scale, Sequence[list[int]]]] = {
        "quick": [[20_000, 100], [2_000, 2_000]],
        "full": [[200_000, 100], [20_000, 2_000], [2_000, 20_000], [2_000, 200_000]],
    }

    def entries(self, size: list[int]) -> int:
        return math.prod(size) // 10

    def label(self, size: list[int]) -> str:
        return "×".join(f"{side:,}" for side in size)

    def question(self, family: str, size: list[int]) -> Question:
        X = factors(*size)
        m = len(X)

        def problem(X: Tensor) -> pmaf.PrincipalEigenvectors:
            if family == "Gram":
                return pmaf.PrincipalEigenvectors(Gram(X))
            centred = Matrix(X) - LowRank(torch.ones(1, m), X.mean(0, keepdim=True))
            return pmaf.PrincipalEigenvectors(Gram(centred))

        mean = torch.zeros(X.shape[1]).double()
        if family == "centred":
            mean = sum(part.double().sum(0) for part in X.split(_ROWS)) / m

        def product(y: Tensor) -> Tensor:
            total = torch.zeros_like(y)
            for part in X.detach().split(_ROWS):
                rows = part.double() - mean
                total += rows.mT @ (rows @ y)
            return total

        return Question(X, problem, product, self._others(family, X))

    def _others(self, family: str, X: Tensor) -> dict[str, Solve]:
        from sklearn.decomposition import PCA, TruncatedSVD

        data = X.detach().numpy()
        if family == "centred":
            return {
                f"PCA {way}": lambda way=way: (
                    PCA(1, svd_solver=way, random_state=0).fit(data).components_
                )
                for way in ("randomized", "arpack")
            }
        return {
            f"TruncatedSVD {way}": lambda way=way: (
                TruncatedSVD(1, algorithm=way, random_state=0).fit(data).components_
            )
            for way in ("randomized", "arpack")
        }

    def findings(self, rows: Sequence[Row]) -> list[Finding]:
        largest = max(
            (row for row in rows if row.params["family"] == "Gram"),
            key=lambda row: row.values["leaf"],
            default=None,
        )
        if largest is None or largest.values["peak"] is None:
            return super().findings(rows)
        beside = largest.values["peak"] - 2 * largest.values["leaf"]
        memory = Finding(
            f"{self.title}: memory of the process at {self.label(largest.params['size'])}, "
            "beyond X and its gradient",
            "at most 2 GB",
            f"{beside / 1e9:.2f} GB",
            beside <= 2e9,
        )
        return [memory, *super().findings(rows)]


def factors(m: int, n: int) -> Tensor:
    """Ten factors of falling weight, noise, and a mean."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(m, n, generator=generator)
    weights = torch.linspace(1, 0.1, 10) * 2 * (1 + (m / n) ** 0.5) / m**0.5
    scores = torch.randn(m, 10, generator=generator) * weights
    loadings = torch.randn(10, n, generator=generator)
    return torch.addmm(X, scores, loadings, out=X).add_(0.1)


# Rows in float64 at a time.
_ROWS = 200
