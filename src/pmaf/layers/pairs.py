"""Pairs of matrices: `Ay = λMy` with `yᵀMy = 1`, for a symmetric positive definite `M`.

A factor `M = TTᵀ` reduces the pair to the matrix `C = T⁻¹AT⁻ᵀ`, whose eigenvectors are `x = Tᵀy`.
Here are the pairs whose derivative goes through the factor: an operator `A` with a dense or a
diagonal `M`. `dense_pairs.py` and `operator_pairs.py` have the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pmaf import errors
from pmaf.autograd.entries import entries
from pmaf.gradients import Gradient, Implicit, Unroll
from pmaf.layers.eigenvectors import PrincipalEigenvectors
from pmaf.linalg import sphere
from pmaf.linalg.decompositions import cholesky
from pmaf.linalg.products import symmetric_part
from pmaf.linalg.roundings import HALF
from pmaf.operators.base import Operator
from pmaf.operators.congruent import Congruent, solve_root
from pmaf.operators.diagonal import Diagonal
from pmaf.operators.matrix import Matrix
from pmaf.problem import in_dtype
from pmaf.runtime import ranks
from pmaf.runtime.log import took
from pmaf.runtime.modes import full_precision, plain
from pmaf.solution import Certificate, Solution
from pmaf.solvers import Solver

# Up to this many rows, the entries of an operator M without a solve are formed where A is an
# operator, too.
_FORMED = 2048


@PrincipalEigenvectors.case(lambda x: x.M is not None and not x.A.dtype.is_complex)
@dataclass(frozen=True, eq=False)
class Pair(PrincipalEigenvectors):
    """`PrincipalEigenvectors` of two real matrices, both of which get gradients."""

    inputs: ClassVar[dict[str, int]] = {"A": 2, "M": 2}

    @classmethod
    def of(cls, problem: Any) -> Any:
        pair = super().of(problem)
        A, M = pair.A, pair.M
        if _cut(pair):
            return pair
        if isinstance(M, Matrix):
            return pair.changed(M=M.A)
        if not isinstance(M, Operator) or isinstance(M, Diagonal):
            return pair
        if isinstance(A, Operator) and (M.solvable or pair.n > _FORMED):
            return pair
        took("pairs: entries of M")
        return pair.changed(M=entries(M))

    def instead(self, solver: Solver, gradient: Gradient, init: Tensor | None) -> Any:
        if not isinstance(gradient, (Implicit, Unroll)):
            raise TypeError(
                f"gradient={gradient!r} is a rule for one matrix; use Implicit() or Unroll() with M"
            )
        return super().instead(solver, gradient, init)

    def directions(self, rows: Tensor) -> Tensor:
        return sphere.project(rows)

    def alone(self, C: Tensor | Operator) -> PrincipalEigenvectors:
        """The problem of one matrix, with the options of the pair except for its reference."""
        return PrincipalEigenvectors.like(self, A=C, M=None, reference=None)

    def certified(self, value: Tensor) -> Certificate:
        """A certificate for the matrix to which the pair reduces.

        `feasibility` is the largest entry of `YᵀMY − I`. For dense matrices everything is in
        float64.
        """
        pair, value = self.with_flat([x.detach() for x in self.flat]), value.detach()
        if not isinstance(self.A, Operator):
            pair, value = pair.with_flat([x.double() for x in pair.flat]), value.double()
        change = _Change(pair.M)
        x = change.forth(self.columns(value).to(pair.dtype))
        inner = self.alone(change.reduced(pair.A))
        return inner.certify(x.squeeze(-1) if self.k is None else x)


class _Change:
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


def _cut(pair: Any) -> bool:
    """Whether matrices of the pair are cut over ranks, so that nothing can be factored."""
    return pair.operator is not None and ranks.mesh_of(*pair.flat) is not None


def is_search(pair: Any) -> bool:
    """Whether a real pair is searched in the inner product of `M`."""
    return _cut(pair) or (isinstance(pair.M, Operator) and not isinstance(pair.M, Diagonal))


def is_complex_search(problem: Any) -> bool:
    """The same for a problem that may be a complex pair: `A` or `M` is known by products."""
    A, M = problem.A, problem.M
    if M is None or not A.dtype.is_complex:
        return False
    return isinstance(A, Operator) or (isinstance(M, Operator) and not isinstance(M, Diagonal))


def _reduces(pair: Any) -> bool:
    if _cut(pair):
        return False
    return isinstance(pair.A, Operator) and isinstance(pair.M, (Tensor, Diagonal))


@Pair.case(_reduces)
@dataclass(frozen=True, eq=False)
class FactoredPair(Pair):
    """A pair that is solved as the matrix to which it reduces, with derivatives by the factor."""

    def instead(self, solver: Solver, gradient: Gradient, init: Tensor | None) -> Any:
        super().instead(solver, gradient, init)
        if init is not None:
            self.require_start(init)
            init = init.detach()
        pair = self
        if self.dtype in HALF:
            init = None if init is None else init.float()
            pair = self.with_flat([x.float() for x in self.flat])
        if not torch.compiler.is_compiling():  # a trace cannot follow a log
            took(f"pairs: {self.way}")
        with full_precision(self.device):
            change = _Change(pair.M)
            start = None if init is None else self._shaped(change.forth(self.columns(init)))
            inner = self.alone(change.reduced(pair.A))

        def convert(found: Solution) -> Solution:
            with full_precision(self.device):
                rows = change.back(self.columns(found.value)).mT
                signs = pair.signs(self.directions(rows.detach()), False)
                y = self._shaped((rows * signs.unsqueeze(-1)).mT)
            return in_dtype(self.dtype, replace(found, value=y))

        return inner, start, convert

    def _shaped(self, columns: Tensor) -> Tensor:
        return columns.squeeze(-1) if self.k is None else columns

    @property
    def way(self) -> str:
        """How the pair is solved, for the log."""
        return "diagonal" if isinstance(self.M, Diagonal) else "factor and products"
