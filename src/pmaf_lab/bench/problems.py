"""Null vectors, pairs of matrices and complex matrices, beside what code bases run today."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

import pmaf
from pmaf_lab.bench.families import EIGEN
from pmaf_lab.bench.growth import Sweep
from pmaf_lab.bench.present import ratio, shape
from pmaf_lab.bench.race import Competitor, Judge, Race, Result, Task, mean
from pmaf_lab.experiments import Finding, Row, Scale

# A vector is unique up to rounding if the relative gap of its eigenvalue is above this.
_SIMPLE = 1e-3


class VectorRace(Race):
    """One vector of each matrix, and the gradient of Σ cᵢ|yᵢ|²."""

    errors = ("vector error", "gradient error")
    panel = Sweep("all sizes", lambda size: True)
    baseline: ClassVar[str]
    targets: ClassVar[Mapping[str, float]]  # the least time of the baseline over ours, by shape
    hermitian: ClassVar[bool] = True  # whether only that part of a gradient has a meaning

    @abstractmethod
    def exact(self, inputs: Result, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The vector, the gradient of the first input, and where the vector is unique.

        They come from a whole decomposition in double precision, without autograd.
        """

    def loss(self, outputs: Result, c: Tensor) -> Tensor:
        y = outputs[0]
        return ((y * y.conj()).real @ c).sum()

    def judge(self, task: Task) -> Judge:
        exact = [x.detach().to(torch.promote_types(x.dtype, torch.float64)) for x in task.inputs]
        vector, gradient, simple = self.exact(tuple(exact), task.c.double())

        def judge(outputs: Result, gradients: Result | None) -> dict[str, float | None]:
            y = outputs[0].to(vector.dtype)
            along = (y.conj() * vector).sum(-1, keepdim=True)
            phase = along / along.abs().clamp_min(torch.finfo(torch.float64).tiny)
            found = {"vector error": mean((y * phase - vector).norm(dim=-1)[simple])}
            if gradients is not None:
                G = gradients[0].to(gradient.dtype)
                difference = (0.5 * (G + G.mH) if self.hermitian else G) - gradient
                error = difference.norm(dim=(-2, -1)) / gradient.norm(dim=(-2, -1))
                found["gradient error"] = mean(error[simple])
            return found

        return judge

    def findings(self, by_family: Mapping[str, Sequence[Row]]) -> list[Finding]:
        found: dict[str, list[tuple[float, str]]] = {}
        for family, rows in by_family.items():
            for row in rows:
                speed = ratio(row.values, self.baseline, "both")
                if speed is not None:
                    found.setdefault(shape(row), []).append((speed, family))
        return [
            Finding(
                f"{self.title}, {size}: {self.baseline} over ours, both passes, least",
                f"at least {target:g}×",
                f"{min(found[size])[0]:.2f}× ({min(found[size])[1]})",
                min(found[size])[0] >= target,
            )
            for size, target in self.targets.items()
            if size in found
        ]


def _tangent(values: Tensor, vectors: Tensor, wanted: int, c: Tensor) -> tuple[Tensor, Tensor]:
    """`y` and `z` of a Hermitian matrix for the gradient `2cᵢyᵢ`, from all its eigenpairs."""
    y = vectors[..., wanted]
    distances = values[..., wanted].unsqueeze(-1) - values
    weights = torch.where(distances != 0, 1 / distances, 0)
    along = (vectors.mH @ (2 * c * y).unsqueeze(-1)).squeeze(-1)
    return y, (vectors @ (weights * along).unsqueeze(-1)).squeeze(-1)


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return x.unsqueeze(-1) * y.conj().unsqueeze(-2)


class NullspaceRace(VectorRace):
    name = "nullspace"
    title = "Null vectors"
    about = (
        "The right singular vector of the smallest singular value and the gradient of Σ cᵢyᵢ², "
        "float32, as in the eight-point algorithm (8×9, 100×9), triangulation (4×4) and pose "
        "(200×12), beside the last row of svd's Vh and eigh of AᵀA. Errors are against a whole "
        "decomposition in float64. The gradient of svd is zero for wide matrices."
    )
    reduced = "one family, two shapes."
    axes = "batch×m×n"
    baseline = "svd"
    hermitian = False
    competitors: ClassVar[Mapping[str, Competitor]] = {
        "ours": Competitor(lambda A: (pmaf.nullspace(A),)),
        "svd": Competitor(lambda A: (torch.linalg.svd(A).Vh[..., -1, :],)),
        "eigh of AᵀA": Competitor(lambda A: (torch.linalg.eigh(A.mT @ A).eigenvectors[..., 0],)),
    }
    families = ("noise", "nearly singular")
    quick_families = ("noise",)
    shapes: ClassVar[Mapping[Scale, Sequence[tuple[int, ...]]]] = {
        "quick": [(1000, 8, 9), (100, 100, 9)],
        "full": [(10_000, 8, 9), (1000, 100, 9), (100_000, 4, 4), (1000, 200, 12), (64, 64, 32)],
    }
    targets: ClassVar[Mapping[str, float]] = {"10000×8×9": 4, "1000×100×9": 4, "100000×4×4": 4}

    def task(self, family: str, shape: Sequence[int], device: torch.device) -> Task:
        batch, m, n = shape
        generator = torch.Generator().manual_seed(0)
        A = torch.randn(batch, m, n, generator=generator)
        if family == "nearly singular" and m >= n:  # as rows of correct correspondences are
            x = torch.nn.functional.normalize(torch.randn(batch, n, 1, generator=generator), dim=-2)
            A = A - 0.99 * (A @ x) @ x.mT
        c = torch.randn(n, generator=generator).to(device)
        return Task((A.to(device).requires_grad_(),), c)

    def exact(self, inputs: Result, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (A,) = inputs
        _, S, Vh = torch.linalg.svd(A)
        squares = S.new_zeros((*S.shape[:-1], A.shape[-1]))
        squares[..., : S.shape[-1]] = S.square()
        y, z = _tangent(squares, Vh.mT, -1, c)
        rows = A @ torch.stack([z, y], -1)
        gradient = _outer(rows[..., 0], y) + _outer(rows[..., 1], z)
        simple = squares[..., -2] - squares[..., -1] > _SIMPLE * squares[..., 0]
        return y, gradient, simple


class PairsRace(VectorRace):
    name = "pairs"
    title = "Pairs of matrices"
    about = (
        "The top eigenvector of Ay = λMy with yᵀMy = 1 and the gradient of Σ cᵢyᵢ², float32, "
        "beside Cholesky's factor of M, two triangular solves and eigh, by autograd. Errors are "
        "against a whole decomposition in float64; those of gradients are of ∂L/∂A."
    )
    reduced = "one family, one shape."
    axes = "batch×n"
    baseline = "Cholesky and eigh"
    families = ("goe", "wishart", "laplacian")
    quick_families = ("goe",)
    shapes: ClassVar[Mapping[Scale, Sequence[tuple[int, ...]]]] = {
        "quick": [(64, 32)],
        "full": [(1000, 4), (1000, 9), (64, 32), (5, 128)],
    }
    targets: ClassVar[Mapping[str, float]] = {"64×32": 3}

    @staticmethod
    def _by_hand(A: Tensor, M: Tensor) -> Result:
        L = torch.linalg.cholesky(M)
        left = torch.linalg.solve_triangular(L, A, upper=False)
        C = torch.linalg.solve_triangular(L, left.mT, upper=False)
        x = torch.linalg.eigh(C).eigenvectors[..., -1:]
        return (torch.linalg.solve_triangular(L.mT, x, upper=True).squeeze(-1),)

    competitors: ClassVar[Mapping[str, Competitor]] = {
        "ours": Competitor(lambda A, M: (pmaf.ied(A, M=M).vectors,)),
        "Cholesky and eigh": Competitor(_by_hand),
    }

    def task(self, family: str, shape: Sequence[int], device: torch.device) -> Task:
        batch, n = shape
        generator = torch.Generator().manual_seed(0)
        A = EIGEN[family](batch, n, generator)
        X = torch.randn(batch, 2 * n, n, generator=generator)
        M = X.mT @ X / (2 * n) + 0.1 * torch.eye(n)
        c = torch.randn(n, generator=generator).to(device)
        return Task((A.to(device).requires_grad_(), M.to(device).requires_grad_()), c)

    def exact(self, inputs: Result, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        A, M = inputs
        L = torch.linalg.cholesky(M)
        C = torch.linalg.solve_triangular(L, A, upper=False)
        C = torch.linalg.solve_triangular(L, C.mT, upper=False)
        values, X = torch.linalg.eigh(0.5 * (C + C.mT))
        V = torch.linalg.solve_triangular(L.mT, X, upper=True)
        y, z = _tangent(values, V, -1, c)
        half = 0.5 * _outer(z, y)
        gap = values[..., -1] - values[..., -2]
        return y, half + half.mT, gap > _SIMPLE * values.abs().amax(-1)


class HermitianRace(VectorRace):
    name = "hermitian"
    title = "Complex matrices"
    about = (
        "The top eigenvector of complex Hermitian matrices and the gradient of Σ cᵢ|yᵢ|², "
        "complex64, as in beamforming (257 frequencies, six microphones) and interferometry "
        "(15 images), beside complex eigh. Errors are against complex128."
    )
    reduced = "one family, one shape."
    axes = "batch×n"
    baseline = "eigh"
    competitors: ClassVar[Mapping[str, Competitor]] = {
        "ours": Competitor(lambda A: (pmaf.ied(A).vectors,)),
        "eigh": Competitor(lambda A: (torch.linalg.eigh(A).eigenvectors[..., -1],)),
    }
    families = ("noise", "one source")
    quick_families = ("noise",)
    shapes: ClassVar[Mapping[Scale, Sequence[tuple[int, ...]]]] = {
        "quick": [(500, 6)],
        "full": [(500, 4), (500, 6), (2000, 6), (2000, 15)],
    }
    targets: ClassVar[Mapping[str, float]] = {"500×6": 3}

    def task(self, family: str, shape: Sequence[int], device: torch.device) -> Task:
        batch, n = shape
        generator = torch.Generator().manual_seed(0)
        X = torch.randn(batch, n, 2 * n, generator=generator, dtype=torch.complex64)
        if family == "one source":
            x = torch.randn(batch, n, 1, generator=generator, dtype=torch.complex64)
            X = x @ X[..., :1, :] + 0.1 * X
        A = (X @ X.mH / (2 * n)).to(device)
        c = torch.randn(n, generator=generator).to(device)
        return Task(((0.5 * (A + A.mH)).requires_grad_(),), c)

    def exact(self, inputs: Result, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (A,) = inputs
        values, vectors = torch.linalg.eigh(A)
        y, z = _tangent(values, vectors, -1, c)
        half = 0.5 * _outer(z, y)
        gap = values[..., -1] - values[..., -2]
        return y, half + half.mH, gap > _SIMPLE * values.abs().amax(-1)
