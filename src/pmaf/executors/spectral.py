"""Functions of the spectrum of dense matrices, from all eigenpairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from pmaf import native
from pmaf.autograd.node import Saved, attach_solved
from pmaf.executors.base import Account, Executor, records, solved_again
from pmaf.linalg.decompositions import eigh
from pmaf.linalg.matrix_function import MatrixFunction
from pmaf.linalg.products import symmetric_part
from pmaf.reductions.base import Found, Tensors
from pmaf.runtime.log import took
from pmaf.runtime.modes import full_precision
from pmaf.tangent.kept import Decomposition


class WholeSpectrum(Executor):
    """A named function of the eigenvalues, all of which are found with their vectors.

    It multiplies by operations of torch, so that `solve` is to run inside of `full_precision`.

    Args:
        function: of the eigenvalues, without parameters.
        kernels: whether compiled kernels find the eigenpairs, and not a decomposition.
        why: this is so.
        common: the function of a matrix on the common path, differentiable any number of times.
    """

    def __init__(
        self,
        problem: Any,
        function: MatrixFunction,
        shape: torch.Size,
        dtype: torch.dtype,
        kernels: bool,
        why: str,
        common: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(problem, ("A",), "ied: reduction" if kernels else "ied: decomposition")
        self.function, self.common, self.why = function, common, why
        self.plan = native.forward_plan(shape, dtype, shape[-1], False) if kernels else None

    uses_found = False
    fails = "the kernels or LAPACK fail, or the function is not finite at an eigenvalue"

    def account(self, tensors: Tensors) -> Account:
        first = "Dense(): decomposition"
        if self.plan is not None:
            first = "Reduction(): compiled kernels, Householder's reduction and Laguerre's method"
        return Account(first, self.why, Decomposition.words, DIFFERENCES)

    def solve(self, tensors: Tensors) -> Found | None:
        A = tensors["A"]
        pairs = self._pairs(A.detach())
        if pairs is None:
            return None
        values, vectors = pairs
        function = self.function
        images = function.scalar.derivative(function.arguments(values), 0)
        if not math.isfinite(float(images.sum())):
            return None  # the common path says what is wrong
        took(self.way)
        V = function.of_group(vectors)
        F = (V * images.unsqueeze(-2)) @ V.mH
        F = 0.5 * (F + F.mH)
        return attach_solved(self, (F,), (values, vectors), A) if records(A) else (F,)

    def _pairs(self, A: Tensor) -> tuple[Tensor, Tensor] | None:
        """All eigenvalues in ascending order, and eigenvectors as columns."""
        if self.plan is not None:
            values, vectors, failed = native.planned_pairs(A, self.plan, True, None)
            return (values, vectors) if failed is None else None
        with suppress(torch.linalg.LinAlgError):  # pyright: ignore[reportPrivateImportUsage]
            return eigh(symmetric_part(A))
        return None

    def pull(
        self, saved: Saved, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        (A,), _, (values, vectors), _ = saved
        (dF,) = grads
        assert dF is not None
        with full_precision(A.device):
            if torch.is_grad_enabled():
                return solved_again(lambda x: (self.common(x[0]),), (A,), grads, needs)
            # The adjoint of a part that is left out needs a symmetric matrix.
            dF = dF if self.function.k is None else symmetric_part(dF)
            return (symmetric_part(self.function.first(values, vectors, dF)),)


DIFFERENCES = "Implicit(): divided differences of the function"
