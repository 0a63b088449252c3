"""Small least squares on the unit sphere by compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pmaf import native
from pmaf.autograd.node import attach_solved
from pmaf.executors.base import Executor, records
from pmaf.reductions.base import Found, Tensors
from pmaf.runtime.log import took
from pmaf.tangent.kept import Exact, Kept


class CompiledLeastSquares(Executor):
    """Least squares on the unit sphere, of float32."""

    def __init__(self, problem: Any) -> None:
        super().__init__(problem, ("A", "b"), "less: reduction")

    @property
    def words(self) -> str:
        return (
            "Reduction(): compiled kernels, the reduction of the smaller of AᵀA and AAᵀ and "
            "Newton's method on the secular equation; backward: compiled kernels"
        )

    def solve(self, tensors: Tensors) -> Found | None:
        A, b = tensors["A"], tensors["b"]
        recorded = records(A, b)
        u, multiplier, gap, numbers, failed = native.least_squares(A, b, recorded)
        if failed is not None:
            return None
        if tensors.get("init") is not None and not bool(gap.all()):
            return None  # where there are several minimisers, the start chooses one
        took(self.way)
        if not recorded:
            return u, multiplier
        return attach_solved(self, (u, multiplier), (multiplier, numbers), A, b)

    def kept(self, held: tuple[Any, ...]) -> Kept:
        return Exact(*held)

    def kept_again(self, tensors: Sequence[Tensor]) -> Kept:
        A, b = (x.detach() for x in tensors)
        found = native.least_squares(A, b.expand(*A.shape[:-1]))
        return Exact(found.multiplier, found.numbers)

    def differentiate(
        self,
        tensors: Sequence[Tensor],
        y: Tensor,
        multiplier: Tensor,
        kept: Kept,
        v: Tensor | None,
        d_multiplier: Tensor | None,
        needs: Sequence[bool],
    ) -> native.Gradients:
        assert isinstance(kept, Exact)
        assert v is not None
        took("tangent: compiled")
        A, b = tensors
        return native.least_squares_gradient(A, b, y, v, *kept, needs)
