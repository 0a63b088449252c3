"""Solves of small matrices by compiled kernels, each planned once for a signature.

These are the executors at the end of a recipe (`recipe.py`). What follows from shapes, dtypes and
options is found when they are made; a call allocates, calls a kernel, and leaves one node in the
graph. Kernels differentiate once. Where the derivative is to be differentiated again, or a kernel
fails, the rule of the problem takes their place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pmaf import native
from pmaf.autograd.eager import completed, may_compile
from pmaf.autograd.node import Saved, attach_solved
from pmaf.gradients import Implicit
from pmaf.gradients.base import Reverse
from pmaf.gradients.singular import SingularSystem, pulled
from pmaf.linalg.decompositions import cholesky
from pmaf.reductions.base import Found, Tensors
from pmaf.runtime.log import took
from pmaf.runtime.modes import full_precision
from pmaf.tangent.bordered import State
from pmaf.tangent.kept import NOTHING, Exact, Kept, Tridiagonal

# Finds vectors and values for tensors by name on the common path, differentiably.
Common = Callable[[Tensors], Found]


class Compiled:
    """What the executors have in common.

    Args:
        problem: without its tensors; its rule differentiates what kernels do not.
        names: of the tensors that the kernels take.
        way: for the log.
    """

    columns = False  # whether several vectors are columns, as the user sees them

    def __init__(self, problem: Any, names: tuple[str, ...], way: str) -> None:
        self.problem, self.names, self.way = problem, names, way

    @property
    def words(self) -> str:
        """What solves and what differentiates, for `pmaf.explain`."""
        raise NotImplementedError

    def solve(self, tensors: Tensors) -> Found | None:
        """A solution and its multiplier, or None where the common path has to find all of it."""
        raise NotImplementedError

    def kept(self, held: tuple[Any, ...]) -> Kept:
        """What the solve has kept, from the tensors that were saved."""
        return NOTHING

    def kept_again(self, tensors: Sequence[Tensor]) -> Kept:
        """The same after hooks on saved tensors have changed it."""
        return NOTHING

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
        """The gradients by kernels; several vectors are rows."""
        raise NotImplementedError

    def pull(
        self, saved: Saved, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """The derivative of the node; see `autograd/node.py`."""
        tensors, (y, multiplier), held, same = saved
        v, d_multiplier = grads
        kept = self.kept(held) if same else self.kept_again(tensors)
        if self.columns:
            y, v = y.mT, None if v is None else v.mT
        compiled = None
        if may_compile(v, d_multiplier):
            compiled = self.differentiate(tensors, y, multiplier, kept, v, d_multiplier, needs)
            if compiled.failed is None:
                return compiled.tensors
        state = State(multiplier, multiplier.new_full(tensors[0].shape[:-2], math.nan), kept)
        given = Reverse(tensors, y, state, _IMPLICIT, v, d_multiplier, needs)
        if compiled is not None:
            return completed(self.problem, given, compiled)
        with full_precision(y.device):
            return self.problem.gradients(given)


_IMPLICIT = Implicit()


def _records(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


class CompiledEigenvectors(Compiled):
    """Eigenvectors of one matrix, real or complex, at one end."""

    def __init__(self, problem: Any, shape: torch.Size, dtype: torch.dtype, common: Common) -> None:
        super().__init__(
            problem, ("A",), "ied: complex reduction" if dtype.is_complex else "ied: reduction"
        )
        k, largest = problem.k, problem.largest
        self.columns, self.common = k is not None, common
        self.plan = native.forward_plan(shape, dtype, k, largest)
        self.reverse = native.backward_plan(shape, dtype, k or 1, k or 1, largest)
        numbers = native.reduction_numbers(shape[-1], dtype, k)
        # The shape of what is kept of the forward pass, None if it is nothing.
        self.size = (*shape[:-2], numbers) if numbers else None

    @property
    def words(self) -> str:
        kept = "the reduction is kept" if self.size else "nothing is kept"
        return (
            "Reduction(): compiled kernels, Householder's reduction and Laguerre's method; "
            f"{kept}; backward: compiled kernels"
        )

    def solve(self, tensors: Tensors) -> Found | None:
        A = tensors["A"]
        recorded = A.requires_grad and torch.is_grad_enabled()
        numbers = None
        if recorded and self.size is not None:
            numbers = A.new_empty(self.size, dtype=torch.float64)
        values, vectors, failed = native.planned_pairs(A, self.plan, True, numbers)
        if failed is not None:
            # Complex entries whose phase is not determined take the common path by themselves,
            # which embeds them in matrices of twice the size.
            if not A.is_complex() or bool(failed.all()) or not bool(A[failed].isfinite().all()):
                return None
            took(self.way)
            return self._some(tensors, (vectors, values), (), failed)
        took(self.way)
        if not recorded:
            return vectors, values
        return attach_solved(self, (vectors, values), () if numbers is None else (numbers,), A)

    def kept(self, held: tuple[Any, ...]) -> Kept:
        return Tridiagonal(*held) if held else NOTHING

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
        took("tangent: compiled")
        reduction = kept.numbers if isinstance(kept, Tridiagonal) else None
        (A,) = tensors
        # A part of a batch has a plan of its own.
        reverse = self.reverse
        if A.numel() != reverse.entries:
            k = self.problem.k or 1
            reverse = native.backward_plan(A.shape, A.dtype, k, k, self.problem.largest)
        return native.planned_gradient(A, y, v, d_multiplier, reverse, reduction)

    def _some(self, tensors: Tensors, found: Found, held: tuple[Any, ...], failed: Tensor) -> Found:
        """The solution where kernels have failed in some entries, which the common path finds."""
        took(f"{self.way.partition(':')[0]}: common path for some")
        given = [tensors[name] for name in self.names]
        good = ~failed
        parts = found[0][good], found[1][good]
        if _records(*given):
            held = tuple(x[good] for x in held)
            parts = attach_solved(self, parts, held, *(x[good] for x in given))
        others = self.common({name: x[failed] for name, x in zip(self.names, given)})
        vectors, values = (
            whole.index_put((good,), part).index_put((failed,), other)
            for whole, part, other in zip(found, parts, others)
        )
        return vectors, values


class CompiledPairs(CompiledEigenvectors):
    """Eigenvectors of a pair of dense matrices, real or complex, at one end."""

    def __init__(self, problem: Any, shape: torch.Size, dtype: torch.dtype, common: Common) -> None:
        Compiled.__init__(self, problem, ("A", "M"), "pairs: compiled")
        self.columns, self.common = problem.k is not None, common

    @property
    def words(self) -> str:
        return (
            "Reduction(): compiled kernels, a factor of M and Householder's reduction; both are "
            "kept; backward: compiled kernels"
        )

    def solve(self, tensors: Tensors) -> Found | None:
        A, M, problem = tensors["A"], tensors["M"], self.problem
        recorded = _records(A, M)
        fixed = A.detach(), M.detach()
        found, kept = native.largest_of_pair(*fixed, problem.k, problem.largest, recorded)
        values, vectors, failed = found
        if failed is not None:
            if bool(failed.all()) or not _are_proper(*fixed, failed):
                return None
            took(self.way)
            return self._some(tensors, (vectors, values), kept or (), failed)
        took(self.way)
        return attach_solved(self, (vectors, values), kept, A, M) if recorded else (vectors, values)

    def kept(self, held: tuple[Any, ...]) -> Kept:
        return native.Reduced(*held) if held else NOTHING

    def kept_again(self, tensors: Sequence[Tensor]) -> Kept:
        A, M = (x.detach() for x in tensors)
        _, kept = native.largest_of_pair(A, M, self.problem.k, self.problem.largest, keep=True)
        return kept or NOTHING

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
        assert isinstance(kept, native.Reduced)
        took("pairs: compiled gradient")
        dtype = tensors[0].dtype
        return native.pair_gradients(kept, v, d_multiplier, dtype, self.problem.largest, needs)


def _are_proper(A: Tensor, M: Tensor, mask: Tensor) -> bool:
    """Whether these entries are finite, and positive definite in `M`."""
    A, M = A[mask], M[mask]
    finite = bool(A.isfinite().all()) and bool(M.isfinite().all())
    return finite and not bool(cholesky(0.5 * (M + M.mH))[1].any())


class CompiledLeastSquares(Compiled):
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
        recorded = _records(A, b)
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


class CompiledSingularVectors(Compiled):
    """Right singular vectors, of numbers that float32 holds in tensors of float64.

    The Gram matrix of such numbers has all their digits in float64. There may be row weights.
    """

    def __init__(self, problem: Any, shape: torch.Size, names: tuple[str, ...]) -> None:
        super().__init__(problem, names, "singular: reduction")
        *batch, _, n = shape
        k, largest = problem.k, problem.largest
        self.columns = k is not None
        self.plan = native.forward_plan(torch.Size((*batch, n, n)), torch.float64, k, largest)

    @property
    def words(self) -> str:
        return (
            "Reduction(): compiled kernels, Householder's reduction of the Gram matrix in float64; "
            "nothing is kept; backward: compiled kernels"
        )

    def solve(self, tensors: Tensors) -> Found | None:
        given = [tensors[name] for name in self.names]
        A, *weights = (x.detach() for x in given)
        left = A if not weights else A * weights[0].unsqueeze(-1)
        if weights and not float(weights[0].amin()) >= 0:
            return None  # the common path says what is wrong
        gram = left.mT @ A
        squares, vectors, failed = native.planned_pairs(gram, self.plan, True, None)
        if failed is not None:
            return None
        took(self.way)
        if not math.isfinite(float(squares.sum())):
            return None
        # Squares of zero are rounding, which may be negative.
        values = squares.clamp_min(0).sqrt()
        if not _records(*given):
            return vectors, values
        return attach_solved(self, (vectors, values), (), *given)

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
        if d_multiplier is not None or v is None:  # of no call that has a recipe
            none = torch.ones(multiplier.shape[: tensors[0].dim() - 2], dtype=torch.bool)
            return native.Gradients(tuple(torch.empty_like(x) for x in tensors), none)
        if not self.columns:
            y, v, multiplier = y.unsqueeze(-2), v.unsqueeze(-2), multiplier.unsqueeze(-1)
        given = tuple(tensors)
        z = SingularSystem(self.problem.largest, single=True).compiled(v, y, given, multiplier)
        return native.Gradients(pulled(z, y, given, needs), None)
