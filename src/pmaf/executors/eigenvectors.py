"""Eigenvectors of small matrices and pairs by compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pmaf import native
from pmaf.autograd.node import attach_solved
from pmaf.executors.base import COMPILED, Account, Common, Executor, records
from pmaf.linalg.decompositions import cholesky
from pmaf.linalg.symmetry import look_at_symmetry
from pmaf.reductions.base import Found, Tensors
from pmaf.runtime.log import took
from pmaf.solvers.auto import REDUCED
from pmaf.tangent.kept import Kept, Nothing, Reduced, Tridiagonal


class CompiledEigenvectors(Executor):
    """Eigenvectors of one matrix, real or complex, at one end."""

    def __init__(self, problem: Any, shape: torch.Size, dtype: torch.dtype, common: Common) -> None:
        super().__init__(
            problem, ("A",), "ied: complex reduction" if dtype.is_complex else "ied: reduction"
        )
        k, largest = problem.k, problem.largest
        self.columns, self.common, self.looked = k is not None, common, False
        self.plan = native.forward_plan(shape, dtype, k, largest)
        self.reverse = native.backward_plan(shape, dtype, k or 1, k or 1, largest)
        numbers = native.reduction_numbers(shape[-1], dtype, k)
        # The shape of what is kept of the forward pass, None if it is nothing.
        self.size = (*shape[:-2], numbers) if numbers else None
        self.kind = Tridiagonal if numbers else Nothing

    def account(self, tensors: Tensors) -> Account:
        return Account(
            "Reduction(): compiled kernels, Householder's reduction and Laguerre's method",
            REDUCED.reason,
            self.kind.words,
            COMPILED,
        )

    def solve(self, tensors: Tensors) -> Found | None:
        A = tensors["A"]
        if not self.looked:
            self.looked = True
            look_at_symmetry(A)
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
        (A,) = tensors
        # A part of a batch has a plan of its own.
        reverse = self.reverse
        if A.numel() != reverse.entries:
            k = self.problem.k or 1
            reverse = native.backward_plan(A.shape, A.dtype, k, k, self.problem.largest)
        return native.planned_gradient(A, y, v, d_multiplier, reverse, *kept)

    def _some(self, tensors: Tensors, found: Found, held: tuple[Any, ...], failed: Tensor) -> Found:
        """The solution where kernels have failed in some entries, which the common path finds."""
        pairs = len(self.names) > 1
        took("pairs: common path for some" if pairs else "ied: common path for some")
        given = [tensors[name] for name in self.names]
        good = ~failed
        parts = found[0][good], found[1][good]
        if records(*given):
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
        Executor.__init__(self, problem, ("A", "M"), "pairs: compiled")
        self.columns, self.common, self.looked = problem.k is not None, common, False
        self.kind, self.largest = Reduced, problem.largest

    def account(self, tensors: Tensors) -> Account:
        return Account(
            "Reduction(): compiled kernels, a Cholesky factor of M and Householder's reduction",
            REDUCED.reason,
            Reduced.words,
            COMPILED,
        )

    def solve(self, tensors: Tensors) -> Found | None:
        A, M, problem = tensors["A"], tensors["M"], self.problem
        if not self.looked:
            self.looked = True
            look_at_symmetry(A)
        recorded = records(A, M)
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
        took("pairs: compiled gradient")
        return native.pair_gradients(kept, v, d_multiplier, tensors[0].dtype, self.largest, needs)


def _are_proper(A: Tensor, M: Tensor, mask: Tensor) -> bool:
    """Whether these entries are finite, and positive definite in `M`."""
    A, M = A[mask], M[mask]
    finite = bool(A.isfinite().all()) and bool(M.isfinite().all())
    return finite and not bool(cholesky(0.5 * (M + M.mH))[1].any())
