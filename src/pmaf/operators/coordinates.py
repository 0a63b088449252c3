"""Coordinates in which an ellipsoid `uᵀMu = 1` is the unit sphere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pmaf import errors
from pmaf.linalg.decompositions import cholesky, cholesky_or_error
from pmaf.linalg.products import broadcast, rmatvec, symmetric_part
from pmaf.operators.base import Operator, Wrapping
from pmaf.operators.diagonal import Diagonal
from pmaf.runtime.modes import plain


class Coordinates(NamedTuple):
    """`M = LLᵀ` as `L`, `(*, n, n)`, or, if `M` is diagonal, as its square roots `(*, n)`."""

    lower: Tensor | None
    roots: Tensor | None

    @classmethod
    def of(cls, M: Tensor | Diagonal, fixed: bool = False) -> Coordinates:
        """Factor `M`, which must be positive definite; `fixed` coordinates get no gradient."""
        if isinstance(M, Diagonal):
            d = M.d.detach() if fixed else M.d
            if plain(d):
                _require_definite(~((d > 0) & torch.isfinite(d)).all(-1))
            return cls(None, d.sqrt())
        whole = symmetric_part(M.detach() if fixed else M)
        if not plain(whole):
            return cls(cholesky_or_error(whole), None)
        errors.require_finite(M=(whole, 2))
        lower, info = cholesky(whole)
        _require_definite(info > 0)
        return cls(lower, None)

    def of_metric(self, M: Tensor | Diagonal) -> Tensor:
        """`L⁻¹ML⁻ᵀ` for the `M` that has been factored: the identity, with the derivative of `M`.

        It is `(*, n, n)`, or the diagonal, `(*, 1, n)`.
        """
        if isinstance(M, Diagonal):
            fixed = M.d.detach()
            return (1 + (M.d - fixed) / fixed).unsqueeze(-2)
        whole = symmetric_part(M - M.detach())
        eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
        return eye + self.of_matrix(self.of_matrix(whole).mT)

    @property
    def batch_shape(self) -> torch.Size:
        if self.lower is None:
            assert self.roots is not None
            return self.roots.shape[:-1]
        return self.lower.shape[:-2]

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


def in_dtype(M: Tensor | Diagonal, dtype: torch.dtype) -> Tensor | Diagonal:
    return Diagonal(M.d.to(dtype)) if isinstance(M, Diagonal) else M.to(dtype)


class InCoordinates(Wrapping):
    """`AL⁻ᵀ`, for an operator `A`."""

    def __init__(self, part: Operator, coordinates: Coordinates) -> None:
        super().__init__(part)
        self.coordinates, self.symmetric = coordinates, False

    @property
    def shape(self) -> torch.Size:
        batch = broadcast(self.part.batch_shape, self.coordinates.batch_shape)
        return torch.Size((*batch, *self.part.shape[-2:]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.part.tensors, *(x for x in self.coordinates if x is not None)

    def with_tensors(self, tensors: Sequence[Tensor]) -> InCoordinates:
        *own, factor = tensors
        dense = self.coordinates.lower is not None
        coordinates = Coordinates(factor, None) if dense else Coordinates(None, factor)
        return InCoordinates(self.part.with_tensors(own), coordinates)

    def matvec(self, rows: Tensor) -> Tensor:
        return self.part.over_batch(self.part.matvec, self.coordinates.back_rows(rows))

    def rmatvec(self, rows: Tensor) -> Tensor:
        return self.coordinates.of_matrix(self.part.over_batch(self.part.rmatvec, rows))


class WithRowFactors(Wrapping):
    """`diag(f)A` for an operator `A` and factors `f` of shape `(*, m)`."""

    def __init__(self, part: Operator, factors: Tensor) -> None:
        super().__init__(part)
        self.factors, self.symmetric = factors, False

    @property
    def shape(self) -> torch.Size:
        batch = broadcast(self.part.batch_shape, self.factors.shape[:-1])
        return torch.Size((*batch, *self.part.shape[-2:]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.part.tensors, self.factors

    def with_tensors(self, tensors: Sequence[Tensor]) -> WithRowFactors:
        *own, factors = tensors
        return WithRowFactors(self.part.with_tensors(own), factors)

    def matvec(self, rows: Tensor) -> Tensor:
        return self.part.over_batch(self.part.matvec, rows) * self.factors.unsqueeze(-2)

    def rmatvec(self, rows: Tensor) -> Tensor:
        return self.part.over_batch(self.part.rmatvec, rows * self.factors.unsqueeze(-2))
