"""Small least squares by compiled kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pmaf import native
from pmaf.autograd.eager import may_compile
from pmaf.autograd.node import Saved, attach_solved
from pmaf.executors.base import COMPILED, Account, Executor, records, solved_again
from pmaf.reductions.base import Found, Tensors
from pmaf.runtime.log import took
from pmaf.solvers.auto import DECOMPOSED_MINIMUM, REDUCED_MINIMUM
from pmaf.tangent.kept import Basis, Exact


class CompiledLeastSquares(Executor):
    """Least squares on the unit sphere, of float32."""

    kind = Exact

    def __init__(self, problem: Any) -> None:
        super().__init__(problem, ("A", "b"), "less: reduction")

    fails = "the lowest singular value repeats in an entry, or a start chooses among minimisers"

    def account(self, tensors: Tensors) -> Account:
        return Account(
            "Reduction(): compiled kernels, the reduction of the smaller of AᵀA and AAᵀ, and "
            "Newton's method for one number",
            REDUCED_MINIMUM.reason,
            Exact.words,
            COMPILED,
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

    def differentiate(
        self: Any,
        tensors: Sequence[Tensor],
        y: Tensor,
        multiplier: Tensor,
        kept: Any,
        v: Tensor | None,
        d_multiplier: Tensor | None,
        needs: Sequence[bool],
    ) -> native.Gradients:
        assert v is not None
        took("tangent: compiled")
        A, b = tensors
        return native.least_squares_gradient(A, b, y, v, *kept, needs=needs)


class DecomposedLeastSquares(Executor):
    """Least squares with options: a decomposition, and compiled kernels around it.

    Units and coordinates belong to the kernels, in both passes.

    Args:
        again: solves the problem of a start and of tensors in the order of `_SLOTS` by solvers,
            for whatever is not a first derivative.
    """

    def __init__(self, again: Callable[..., Tensor], plan: native.Posed, dims: int) -> None:
        super().__init__(again, _SLOTS, "less: decomposition, compiled")
        self.plan, self.dims = plan, (2, 1, 1, 0, dims)

    fails = "the kernels do not converge"

    def account(self, tensors: Tensors) -> Account:
        return Account(
            "Secular(): compiled kernels around a decomposition",
            DECOMPOSED_MINIMUM.reason,
            Basis.words,
            COMPILED,
        )

    def solve(self, tensors: Tensors) -> Found | None:
        batch = tensors["A"].shape[:-2]
        whole = []
        for name, dims in zip(_SLOTS, self.dims):
            x = tensors[name] if isinstance(tensors[name], Tensor) else None
            if x is not None and x.shape[: x.dim() - dims] != batch:
                x = x.expand(*batch, *x.shape[x.dim() - dims :])
            whole.append(x)
        fixed = [None if x is None else x.detach() for x in whole]
        found = native.solve_posed(self.plan, *fixed)
        if found is None:
            return None
        took(self.way)
        u, kept = found
        if not records(*whole):
            return (u,)
        return attach_solved(self, (u,), (kept,), *whole)

    def pull(
        self, saved: Saved, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """The derivative of the node, whose one output is the minimiser."""
        tensors, (y,), (kept,), same = saved
        (v,) = grads
        assert v is not None
        if may_compile(v, None):
            if not same:
                given = (None if x is None else x.detach() for x in tensors)
                again = native.solve_posed(self.plan, *given)
                kept = None if again is None else again[1]
            if kept is not None:
                took("tangent: compiled")
                found = native.posed_gradients(self.plan, kept, v, tensors, needs)
                if found is not None:
                    return found
        took("tangent: common path")
        return solved_again(lambda x: (self.problem(y.detach(), *x),), tensors, grads, needs)


_SLOTS = ("A", "b", "weights", "radius", "M")
