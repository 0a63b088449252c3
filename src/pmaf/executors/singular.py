"""Singular vectors and triplets of small matrices, by compiled kernels or by LAPACK."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pmaf import native
from pmaf.autograd.eager import may_compile
from pmaf.autograd.node import Saved, attach_solved
from pmaf.executors.base import COMPILED, IMPLICIT, OF_TORCH, Account, Executor, records
from pmaf.gradients.base import Reverse
from pmaf.gradients.singular import SingularSystem, pulled
from pmaf.linalg import sphere
from pmaf.linalg.products import norm
from pmaf.linalg.roundings import square_range
from pmaf.linalg.singular import accuracy, pair_basis, singular_basis
from pmaf.reductions.base import Found, Tensors
from pmaf.runtime.log import took
from pmaf.runtime.modes import full_precision
from pmaf.solvers.auto import EXACT_SVD, REDUCED_GRAM
from pmaf.tangent.bordered import State
from pmaf.tangent.kept import NOTHING, Kept, Nothing, SingularBasis


class DecomposedSingularVectors(Executor):
    """Right singular vectors by a singular value decomposition, which is kept."""

    compiles, kind = False, SingularBasis

    def __init__(self, problem: Any, shape: torch.Size, names: tuple[str, ...]) -> None:
        super().__init__(problem, names, "singular: svd")
        self.columns = problem.k is not None
        self.range = square_range(torch.float64)

    fails = "units have to be others"

    def account(self, tensors: Tensors) -> Account:
        return _decomposed(OF_TORCH)

    def solve(self, tensors: Tensors) -> Found | None:
        given = [tensors[name] for name in self.names]
        A, *weights = (x.detach() for x in given)
        if weights and not float(weights[0].amin()) >= 0:
            return None  # the common path says what is wrong
        try:
            rows, spectrum = singular_basis(A, *weights)
        except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
            return None
        least, most = spectrum[..., 0].aminmax()
        if not (self.range[0] < float(least) and float(most) < self.range[1]):
            return None  # in other units
        took(self.way)
        k = self.problem.k or 1
        if self.problem.largest:
            chosen, values = rows[..., :k, :], spectrum[..., :k]
        else:
            chosen, values = rows[..., -k:, :].flip(-2), spectrum[..., -k:].flip(-1)
        signed = chosen * sphere.signs(chosen).unsqueeze(-1)
        vectors = signed.mT if self.columns else signed.squeeze(-2)
        values = values.clone() if self.columns else values.squeeze(-1).clone()
        if not records(*given):
            return vectors, values
        return attach_solved(self, (vectors, values), (rows, spectrum), *given)


class CompiledSingularVectors(Executor):
    """Right singular vectors, of numbers that float32 holds in tensors of float64.

    The Gram matrix of such numbers has all their digits in float64. There may be row weights.
    """

    def __init__(self, problem: Any, shape: torch.Size, names: tuple[str, ...]) -> None:
        super().__init__(problem, names, "singular: reduction")
        *batch, _, n = shape
        k, largest = problem.k, problem.largest
        self.columns = k is not None
        self.plan = native.forward_plan(torch.Size((*batch, n, n)), torch.float64, k, largest)

    def account(self, tensors: Tensors) -> Account:
        return _reduced("Householder's reduction of the Gram matrix AᵀA in float64", COMPILED)

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
        if not records(*given):
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


def _decomposed(derivative: str) -> Account:
    words = SingularBasis.words
    return Account("SVD(): singular value decomposition", EXACT_SVD.reason, words, derivative)


def _reduced(how: str, derivative: str) -> Account:
    words = f"Reduction(): compiled kernels, {how}"
    return Account(words, REDUCED_GRAM.reason, Nothing.words, derivative)


class Triplets(Executor):
    """Triplets of matrices of float64 with at least as many rows as columns.

    Of numbers that float32 holds compiled kernels find right vectors, unless a singular value is so
    small that left vectors would lose digits. Everything else is decomposed, and kept.
    """

    def __init__(self, problem: Any, shape: torch.Size, columns: bool) -> None:
        way = "singular: reduction" if problem.single else "singular: svd"
        super().__init__(problem, ("A",), way)
        self.m, n = shape[-2:]
        self.columns, self.range = columns, square_range(torch.float64)
        self.plan = None
        if problem.single:
            gram = torch.Size((*shape[:-2], n, n))
            self.plan = native.forward_plan(gram, torch.float64, problem.k, problem.largest)

    fails = "a singular value is small, or units have to be others"

    def account(self, tensors: Tensors) -> Account:
        if self.plan is None:
            return _decomposed(OF_TORCH)
        several = self.problem.width > 1
        how = "right vectors from the Gram matrix AᵀA in float64, and left ones from these"
        return _reduced(how, OF_TORCH if several else COMPILED)

    def solve(self, tensors: Tensors) -> Found | None:
        A = tensors["A"]
        fixed = A.detach()
        found = self._decomposed(fixed) if self.plan is None else self._compiled(fixed)
        if found is None:
            return None
        took(self.way)
        parts, held = found
        if self.columns:
            parts = parts[0].mT, parts[1], parts[2].mT
        else:
            parts = parts[0].squeeze(-2), parts[1].squeeze(-1), parts[2].squeeze(-2)
        return attach_solved(self, parts, held, A) if records(A) else parts

    def _compiled(self, A: Tensor) -> tuple[Found, tuple[Tensor, ...]] | None:
        """Right vectors, values and left vectors as rows."""
        assert self.plan is not None
        gram = A.mT @ A
        _, right, failed = native.planned_pairs(gram, self.plan, False, None)
        if failed is not None:
            return None
        images = right @ A.mT
        values = norm(images)
        size = gram.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True).sqrt()
        # Of a smaller singular value the image has too few digits for a left vector.
        if not bool((values > _SMALL * size).all()):
            return None
        return (right, values, images / values.unsqueeze(-1)), ()

    def _decomposed(self, A: Tensor) -> tuple[Found, tuple[Tensor, ...]] | None:
        try:
            rows, spectrum = pair_basis(A)
        except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
            return None
        least, most = spectrum[..., 0].aminmax()
        if not (self.range[0] < float(least) and float(most) < self.range[1]):
            return None  # in other units
        k = self.problem.k or 1
        if self.problem.largest:
            chosen, values = rows[..., :k, :], spectrum[..., :k].clone()
        else:
            chosen, values = rows[..., -k:, :].flip(-2), spectrum[..., -k:].flip(-1)
        # The sign of a triplet is that of its right vector.
        right = chosen[..., self.m :]
        signs = sphere.signs(right).unsqueeze(-1)
        return (signs * right, values, signs * chosen[..., : self.m]), (rows, spectrum)

    def pull(
        self, saved: Saved, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """The derivative of the node, whose outputs are right vectors, values and left vectors."""
        tensors, (right, values, left), held, same = saved
        g_right, d_values, g_left = grads
        if self.columns:
            right, left = right.mT, left.mT
            g_right, g_left = (None if x is None else x.mT for x in (g_right, g_left))
        else:
            right, left, values = right.unsqueeze(-2), left.unsqueeze(-2), values.unsqueeze(-1)
            g_right, g_left = (None if x is None else x.unsqueeze(-2) for x in (g_right, g_left))
            d_values = None if d_values is None else d_values.unsqueeze(-1)
        v = None
        if g_right is not None or g_left is not None:
            g_right = torch.zeros_like(right) if g_right is None else g_right
            v = torch.cat([torch.zeros_like(left) if g_left is None else g_left, g_right], -1)
        if self.plan is not None and right.shape[-2] == 1 and may_compile(v, d_values):
            dA = self._of_one(tensors[0], right, values, left, g_right, d_values, g_left)
            if dA is not None:
                return (dA,)
        kept = SingularBasis(*held) if held and same else NOTHING
        state = State(values, values[..., 0], kept)
        y = torch.cat([left, right], -1)
        with full_precision(y.device):
            return self.problem.gradients(Reverse(tensors, y, state, IMPLICIT, v, d_values, needs))

    def _of_one(
        self,
        A: Tensor,
        right: Tensor,
        values: Tensor,
        left: Tensor,
        g_right: Tensor | None,
        d_values: Tensor | None,
        g_left: Tensor | None,
    ) -> Tensor | None:
        """The gradient for one triplet, by `u = Av/σ`; None where singular values nearly repeat.

        With the part `h` of the gradient of `u` that is orthogonal to `u`, `g = g_v + Aᵀh/σ` and
        `(σ²I − AᵀA)z = g`, it is `(Az + h/σ + ∂L/∂σ u)vᵀ + σu zᵀ`.
        """
        column = values.unsqueeze(-1)
        side = None if d_values is None else d_values.unsqueeze(-1) * left
        g = g_right
        if g_left is not None:
            h = (g_left - (g_left * left).sum(-1, keepdim=True) * left) / column
            side = h if side is None else side + h
            g = h @ A if g is None else g + h @ A
        if g is None:
            assert side is not None
            return side.mT @ right
        gram, squares = A.mT @ A, values.square()
        took("tangent: compiled")
        if self.problem.largest:
            z, failed = native.complement_solve(gram, squares, right, g)
        else:
            z, failed = native.complement_solve(-gram, -squares, right, -g)
        # Were all other singular values further away than those that count as equal, z would be
        # shorter than this.
        size = gram.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True).sqrt()
        close = accuracy(g.dtype, single=True) * size
        if failed is not None or not bool(
            (norm(z) * close * (2 * values + close) <= norm(g)).all()
        ):
            return None
        rows = z @ A.mT
        rows = rows if side is None else rows + side
        return torch.cat([rows, column * left], -2).mT @ torch.cat([right, z], -2)


# Of a smaller singular value, relative to the norm, `Av/σ` has too few digits.
_SMALL = 1e-3
