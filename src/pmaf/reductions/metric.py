"""The metric `M` of a pair `Ay = λMy` in the form that a solver takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pmaf import errors
from pmaf.linalg.decompositions import cholesky
from pmaf.linalg.products import symmetric_part
from pmaf.operators import Diagonal, Matrix, Operator
from pmaf.operators.congruent import Congruent, solve_root
from pmaf.reductions.base import Found, Reduction, Tensors
from pmaf.runtime.log import took
from pmaf.runtime.modes import plain


class DenseMetric(Reduction):
    """A diagonal `M` becomes a matrix, whose gradient has the diagonal alone."""

    words = "diagonal M -> dense M"

    def apply(self, given: Tensors) -> Tensors:
        return {**given, "M": torch.diag_embed(given["M"].d)}


class RowMetric(Reduction):
    """A diagonal `M` becomes its diagonal as a row `(*, 1, n)`, and a `Matrix` its tensor."""

    words = "M as an operator -> the tensor that it holds"

    def apply(self, given: Tensors) -> Tensors:
        M = given["M"]
        if isinstance(M, Matrix):
            return {**given, "M": M.A}
        return {**given, "M": M.d.unsqueeze(-2)}


class VectorMetric(Reduction):
    """A diagonal `M` becomes its diagonal `(*, n)`."""

    words = "diagonal M -> its diagonal"

    def apply(self, given: Tensors) -> Tensors:
        return {**given, "M": given["M"].d}


@dataclass(frozen=True)
class FactoredMetric(Reduction):
    """A factor `M = TTᵀ` reduces a pair to `T⁻¹AT⁻ᵀ`, whose eigenvectors are `x = Tᵀy`.

    The derivative goes through the factor. This step is for an operator `A` with a dense or a
    diagonal `M`; other pairs are differentiated without a factor (`layers/pairs.py`).
    """

    words = "pair of A and M -> one matrix, in coordinates of M = TTᵀ"

    def apply(self, given: Tensors) -> Tensors:
        A, M = given["A"], given["M"]
        took("pairs: diagonal" if isinstance(M, Diagonal) else "pairs: factor and products")
        change = Change(M)
        return {**given, "A": change.reduced(A), "M": None, "change": change}

    def back(self, found: Found, given: Tensors, posed: Tensors) -> Found:
        vectors, values = found
        return posed["change"].back(vectors), values

    def forth(self, vectors: Tensor, given: Tensors, posed: Tensors) -> Tensor:
        return posed["change"].forth(vectors)


class Change:
    """The change of variables `x = Tᵀy` with `M = TTᵀ`, for a diagonal or a dense `M`."""

    def __init__(self, M: Tensor | Diagonal) -> None:
        self.dims = 1 if isinstance(M, Diagonal) else 2
        if isinstance(M, Diagonal):
            self.root, bad = M.d.sqrt(), ~((M.d > 0) & M.d.isfinite())
            M, bad = M.d, bad.any(-1)
        else:
            self.root, info = cholesky(symmetric_part(M))
            bad = (info != 0) | ~self.root.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)
        if plain(bad) and bool(bad.any()):
            refuse_metric(M, bad)

    def reduced(self, A: Tensor | Operator) -> Tensor | Operator:
        """`T⁻¹AT⁻ᵀ`."""
        if isinstance(A, Operator):
            return Congruent(A, self.root, self.dims)
        if self.dims == 1:
            return A / self.root.unsqueeze(-1) / self.root.unsqueeze(-2)
        left = torch.linalg.solve_triangular(self.root, symmetric_part(A), upper=False)
        return torch.linalg.solve_triangular(self.root, left.mT, upper=False)

    def forth(self, y: Tensor) -> Tensor:
        """`Tᵀy` for columns `(*, n, k)`."""
        return self.root.unsqueeze(-1) * y if self.dims == 1 else self.root.mT @ y

    def back(self, x: Tensor) -> Tensor:
        """`T⁻ᵀx` for columns `(*, n, k)`."""
        return solve_root(self.root, x.mT, self.dims, transposed=True).mT


def refuse_metric(M: Tensor, bad: Tensor) -> None:
    """Raise the error of a matrix that is not positive definite."""
    errors.require_finite(M=(M, M.dim() - bad.dim()))
    where = f" in {int(bad.sum())} of {bad.numel()} batch entries" if bad.dim() else ""
    raise ValueError(
        f"M is not positive definite{where}, up to rounding in {M.dtype}; add a multiple of the "
        "identity to it, use float64, or exchange A and M if A is the positive definite one"
    )
