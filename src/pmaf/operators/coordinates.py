"""Coordinates in which an ellipsoid `uᵀMu = 1` is the unit sphere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pmaf import errors
from pmaf.linalg.products import rmatvec, symmetric_part
from pmaf.operators.base import Operator
from pmaf.operators.diagonal import Diagonal
from pmaf.runtime.modes import plain

class Coordinates(NamedTuple):
    """`M = LLᵀ` as `L`, `(*, n, n)`, or, if `M` is diagonal, as its square roots `(*, n)`."""

    lower: Tensor | None
    roots: Tensor | None

    @classmethod
    def of(cls, M: Tensor | Diagonal, dtype: torch.dtype) -> Coordinates:
        """Factor `M`, which must be positive definite."""
        if isinstance(M, Diagonal):
            d = M.d.to(dtype)
            if plain(d):
                _require_definite(~((d > 0) & torch.isfinite(d)).all(-1))
            return cls(None, d.sqrt())
        whole = symmetric_part(M.to(dtype))
        if not plain(whole):
            return cls(torch.linalg.cholesky(whole), None)
        errors.require_finite(M=(whole, 2))
        lower, info = torch.linalg.cholesky_ex(whole)
        _require_definite(info > 0)
        return cls(lower, None)

    def of_matrix(self, A: Tensor) -> Tensor:
        """`AL⁻ᵀ` for `A` of shape `(*, m, n)`, which is `L⁻¹` times each row."""
        if self.lower is None:
            assert self.roots is not None
            return A / self.roots.unsqueeze(-2)
        return torch.linalg.solve_triangular(self.lower, A.mT, upper=False).mT

    def of_vector(self, u: Tensor) -> Tensor:
        """`Lᵀu`, the new coordinates of a vector."""
        if self.lower is None:
            assert self.roots is not None
            return self.roots * u
        return rmatvec(self.lower, u)

    def back(self, w: Tensor) -> Tensor:
        """`L⁻ᵀw`, the vector that has these coordinates."""
        return self.back_rows(w.unsqueeze(-2)).squeeze(-2)

    def back_rows(self, rows: Tensor) -> Tensor:
        """`back` for every row, `(*, p, n)`."""
        if self.lower is None:
            assert self.roots is not None
            return rows / self.roots.unsqueeze(-2)
        return torch.linalg.solve_triangular(self.lower.mT, rows.mT, upper=True).mT


def _require_definite(failed: Tensor) -> None:
    if failed.any():
        where = f" in {int(failed.sum())} of {failed.numel()} batch entries" * bool(failed.dim())
        raise ValueError(
            f"M is not positive definite{where}, so that uᵀMu = radius² is no ellipsoid; "
            "add a multiple of the identity to it"
        )


class InCoordinates(Operator):
    """`AL⁻ᵀ`, for an operator `A`."""

    def __init__(self, part: Operator, coordinates: Coordinates) -> None:
        self.part, self.coordinates = part, coordinates

    @property
    def shape(self) -> torch.Size:
        factor = self.coordinates.lower
        roots = self.coordinates.roots
        batch = factor.shape[:-2] if factor is not None else torch.Size()
        batch = roots.shape[:-1] if roots is not None else batch
        whole = torch.broadcast_shapes(self.part.batch_shape, batch)
        return torch.Size((*whole, *self.part.shape[-2:]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.part.tensors, *(x for x in self.coordinates if x is not None)

    def with_tensors(self, tensors: Sequence[Tensor]) -> InCoordinates:
        *own, factor = tensors
        lower = self.coordinates.lower is not None
        coordinates = Coordinates(factor if lower else None, None if lower else factor)
        return InCoordinates(self.part.with_tensors(own), coordinates)

    def claims(self) -> Iterator[Operator]:
        return self.part.claims()

    def matvec(self, rows: Tensor) -> Tensor:
        return self.part.matvec(self.coordinates.back_rows(rows))

    def rmatvec(self, rows: Tensor) -> Tensor:
        return self.coordinates.of_matrix(self.part.rmatvec(rows))

    def __repr__(self) -> str:
        return repr(self.part)
