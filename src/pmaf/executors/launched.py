"""Small problems by one launch of a kernel in each pass, on devices where a launch is what costs.

The host reads no number: the layout, the order and the signs of a solution are the kernel's, and an
entry of a batch that is not finite becomes nan. Nothing here was ever timed, and nothing was run on
a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pmaf import native
from pmaf.autograd.node import Saved, attach_solved
from pmaf.executors.base import IMPLICIT, Account, Executor, records
from pmaf.launched import calls
from pmaf.reductions.base import Found, Tensors
from pmaf.runtime.log import took
from pmaf.tangent.kept import Kept


class Launched(NamedTuple("Launched", [("numbers", Tensor)]), Kept):
    """An eigenbasis in float64, in a form of the kernels: rows `(*, n, n)` and rows of numbers."""

    __slots__ = ()
    words = "all eigenvectors and their numbers in float64, for the kernel of the backward pass"


class LaunchedExecutor(Executor):
    """What these executors have in common."""

    kind = Launched
    fails = "never"

    def again(self, tensors: Sequence[Tensor]) -> Tensor:
        """What a solve keeps, after hooks on saved tensors have changed it."""
        raise NotImplementedError

    def pull(
        self, saved: Saved, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        if not saved.same:
            saved = saved._replace(held=(self.again(saved.tensors),), same=True)
        return super().pull(saved, grads, needs)


class LaunchedEigenvectors(LaunchedExecutor):
    """Eigenvectors of one real matrix at one end, of at most 32 rows."""

    def __init__(self, problem: Any) -> None:
        super().__init__(problem, ("A",), "ied: launched")
        self.columns = problem.k is not None

    def account(self, tensors: Tensors) -> Account:
        return _account("eigenvectors_forward", "Jacobi's rotations", "eigenvectors_backward")

    def solve(self, tensors: Tensors) -> Found | None:
        A, problem = tensors["A"], self.problem
        recorded = records(A)
        values, vectors, kept = calls.eigenvectors(A, problem.k, problem.largest, recorded)
        took("ied: launched")
        if kept is None:
            return vectors, values
        return attach_solved(self, (vectors, values), (kept,), A)

    def again(self, tensors: Sequence[Tensor]) -> Tensor:
        problem = self.problem
        kept = calls.eigenvectors(tensors[0], problem.k, problem.largest, True)[2]
        assert kept is not None
        return kept

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
        took("tangent: launched")
        v, d_multiplier = _as_columns(v, d_multiplier, self.columns)
        dA = calls.eigenvectors_gradient(kept[0], tensors[0].dtype, d_multiplier, v)
        return native.Gradients((dA,), None)


class LaunchedNullVectors(LaunchedExecutor):
    """Right singular vectors of real matrices of float32, with row weights or without.

    Args:
        names: ("A",), or ("A", "weights").
    """

    def __init__(self, problem: Any, names: tuple[str, ...]) -> None:
        super().__init__(problem, names, "singular: launched")
        self.columns = problem.k is not None

    def account(self, tensors: Tensors) -> Account:
        how = "AᵀA in float64, and Jacobi's rotations"
        return _account("null_vectors_forward", how, "null_vectors_backward")

    def solve(self, tensors: Tensors) -> Found | None:
        given = [tensors[name] for name in self.names]
        values, vectors, kept = self._solved(given, records(*given))
        took("singular: launched")
        if kept is None:
            return vectors, values
        return attach_solved(self, (vectors, values), (kept,), *given)

    def _solved(self, given: Sequence[Tensor], keep: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        A, weights = (*given, None)[:2]
        assert A is not None
        problem = self.problem
        return calls.null_vectors(A, weights, problem.k, problem.largest, keep)

    def again(self, tensors: Sequence[Tensor]) -> Tensor:
        kept = self._solved(tensors, True)[2]
        assert kept is not None
        return kept

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
        took("tangent: launched")
        A, weights = (*tensors, None)[:2]
        assert A is not None
        v, d_multiplier = _as_columns(v, d_multiplier, self.columns)
        wanted = needs[0], weights is not None and needs[1]
        found = calls.null_vectors_gradient(kept[0], A, weights, d_multiplier, v, wanted)
        return native.Gradients(found[: len(tensors)], None)


class LaunchedLeastSquares(LaunchedExecutor):
    """Least squares on the unit sphere, of float32."""

    def __init__(self, problem: Any) -> None:
        super().__init__(problem, ("A", "b"), "less: launched")

    def account(self, tensors: Tensors) -> Account:
        how = "AᵀA in float64, Jacobi's rotations and Newton's method for one number"
        return _account("least_squares_forward", how, "least_squares_backward")

    def solve(self, tensors: Tensors) -> Found | None:
        A, b = tensors["A"], tensors["b"]
        recorded = records(A, b)
        u, multiplier, kept = calls.least_squares(A, b, recorded)
        took("less: launched")
        if kept is None:
            return u, multiplier
        return attach_solved(self, (u, multiplier), (kept,), A, b)

    def again(self, tensors: Sequence[Tensor]) -> Tensor:
        kept = calls.least_squares(tensors[0], tensors[1], True)[2]
        assert kept is not None
        return kept

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
        A, b = tensors
        if v is None or d_multiplier is not None:  # of no call that has a recipe
            none = torch.ones(multiplier.shape, dtype=torch.bool, device=A.device)
            blank = (torch.empty_like(x) if need else None for x, need in zip(tensors, needs))
            return native.Gradients(tuple(blank), none)
        took("tangent: launched")
        found = calls.least_squares_gradient(kept[0], A, b, v, (needs[0], needs[1]))
        return native.Gradients(found, None)


def _as_columns(
    v: Tensor | None, d_values: Tensor | None, columns: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Incoming gradients of vectors, which are rows if there are several, as columns."""
    if columns:
        return None if v is None else v.mT, d_values
    both = v, d_values
    return tuple(None if x is None else x.unsqueeze(-1) for x in both)  # pyright: ignore


def _account(forward: str, how: str, backward: str) -> Account:
    return Account(
        f"one launch of the kernel {forward}: {how}",
        "a launch and a wait cost more than the work on small matrices; never timed",
        Launched.words,
        f"{IMPLICIT!r}: one launch of the kernel {backward}, and operations of torch where the "
        "gradient is differentiated again",
    )
