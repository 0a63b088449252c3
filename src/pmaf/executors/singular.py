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
from pmaf.executors.base import (
    COMPILED,
    IMPLICIT,
    OF_TORCH,
    Account,
    Common,
    Executor,
    records,
    solved_again,
)
from pmaf.gradients.base import Reverse
from pmaf.gradients.singular import SingularSystem, pulled
from pmaf.linalg import sphere
from pmaf.linalg.products import norm
from pmaf.linalg.roundings import merge_tolerance, square_range
from pmaf.linalg.singular import accuracy, pair_basis, singular_basis, weighted_gram
from pmaf.reductions.base import Found, Tensors
from pmaf.runtime.log import took
from pmaf.runtime.modes import full_precision
from pmaf.solvers.auto import EXACT_SVD, REDUCED_GRAM, is_reduced_whole
from pmaf.tangent.bordered import State
from pmaf.tangent.kept import NOTHING, Kept, Nothing, SingularBasis


class SingularVectors(Executor):
    """Right singular vectors of matrices of float64 or complex128, with row weights or without.

    The Gram matrix of numbers that float32 holds has all their digits in float64, and compiled
    kernels find its eigenvectors: those of small matrices all, and they are kept, and of others
    those that are asked for. Everything else is decomposed, and kept.

    Args:
        common: finds complex vectors on the common path, whose rule is one for real matrices.
    """

    def __init__(
        self,
        problem: Any,
        shape: torch.Size,
        dtype: torch.dtype,
        names: tuple[str, ...],
        common: Common | None,
    ) -> None:
        way = "singular: reduction" if problem.single else "singular: svd"
        super().__init__(problem, names, way)
        self.columns, self.range, self.common = problem.k is not None, _RANGE, common
        self.plan = _plan(problem, shape, dtype) if problem.single else None
        self.whole = self.plan is None or _is_whole(shape)
        self.kind = SingularBasis if self.whole else Nothing
        self.system = SingularSystem(problem.largest, problem.single)

    def account(self, tensors: Tensors) -> Account:
        derivative = OF_TORCH if self.whole else COMPILED
        if self.plan is None:
            return _decomposed(derivative)
        return _reduced("Householder's reduction of AᵀA in float64", self.kind, derivative)

    def solve(self, tensors: Tensors) -> Found | None:
        given = [tensors[name] for name in self.names]
        fixed = [x.detach() for x in given]
        if len(fixed) > 1 and not float(fixed[1].amin()) >= 0:
            return None  # the common path says what is wrong
        found = _by_kernels(fixed, self.plan) if self.plan else _by_svd(fixed, self.range)
        if found is None:
            return None
        took(self.way)
        rows, spectrum = found
        held = found if self.whole else ()
        if self.whole:
            k = self.problem.k or 1
            top = spectrum[..., :1]
            rows, spectrum = _requested(rows, k, -2, self), _requested(spectrum, k, -1, self)
            if k > 1 and self.common is not None and _repeat(spectrum, top, self):
                return None
        if self.plan is None:
            factors = _factors(rows)
            if factors is None:
                return None  # another reference decides
            rows = rows * factors
        vectors = rows.mT if self.columns else rows.squeeze(-2)
        # Not views of what is kept: a user may write into them.
        vectors = vectors.clone() if self.plan else vectors
        values = spectrum.clone() if self.columns else spectrum.squeeze(-1).clone()
        if not records(*given):
            return vectors, values
        return attach_solved(self, (vectors, values), held, *given)

    def pull(
        self, saved: Saved, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        v, d_values = grads
        if self.common is None or (may_compile(v, None) and v is not None and d_values is None):
            return super().pull(saved, grads, needs)
        common, names = self.common, self.names
        return solved_again(lambda x: common(dict(zip(names, x))), saved.tensors, grads, needs)

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
            blank = (torch.empty_like(x) if need else None for x, need in zip(tensors, needs))
            return native.Gradients(tuple(blank), none)
        if not self.columns:
            y, v, multiplier = y.unsqueeze(-2), v.unsqueeze(-2), multiplier.unsqueeze(-1)
        if v.is_complex():
            v = _turned(v, y, (v.conj() * y).sum(-1, keepdim=True).imag)
        given = tuple(tensors)
        z = kept.solve(self.system, v, y, given, State(multiplier, multiplier, kept))
        return native.Gradients(pulled(z, y, given, needs), None)


def _is_whole(shape: torch.Size) -> bool:
    """Whether kernels find all right singular vectors of matrices of this shape."""
    return is_reduced_whole(shape[-1], shape[:-2].numel())


def _plan(problem: Any, shape: torch.Size, dtype: torch.dtype) -> native.ForwardPlan:
    """The eigenvectors of Gram matrices that kernels find: all of them, the largest first."""
    *batch, _, n = shape
    whole = _is_whole(shape)
    k, largest = (n, True) if whole else (problem.k or 1, problem.largest)
    return native.forward_plan(torch.Size((*batch, n, n)), dtype, k, largest)


def _by_kernels(
    tensors: Sequence[Tensor], plan: native.ForwardPlan
) -> tuple[Tensor, Tensor] | None:
    """Right singular vectors of `√W A` as rows, and their values, by its Gram matrix."""
    squares, rows, failed = native.planned_pairs(weighted_gram(*tensors), plan, False, None)
    if failed is not None or not math.isfinite(float(squares.sum())):
        return None
    # Squares of zero are rounding, which may be negative.
    return rows, squares.clamp_min(0).sqrt()


def _by_svd(tensors: Sequence[Tensor], limits: tuple[float, float]) -> tuple[Tensor, Tensor] | None:
    """The same by a decomposition; None where it fails, or units have to be others."""
    try:
        found = singular_basis(*tensors)
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        return None
    return found if _are_within(found[1], limits) else None


def _are_within(spectrum: Tensor, limits: tuple[float, float]) -> bool:
    """Whether the largest singular values, which come first, have squares."""
    least, most = spectrum[..., 0].aminmax()
    return limits[0] < float(least) and float(most) < limits[1]


def _factors(rows: Tensor) -> Tensor | None:
    """What makes the sums of rows positive, `(*, k, 1)`; None if a complex one is rounding."""
    if not rows.is_complex():
        return sphere.signs(rows).unsqueeze(-1)
    total = rows.sum(-1, keepdim=True)
    size = total.abs()
    known = bool((size > merge_tolerance(rows.dtype) * rows.shape[-1] ** 0.5).all())
    return total.conj() / size if known else None


def _turned(v: Tensor, y: Tensor, turn: Tensor) -> Tensor:
    """Incoming gradients of complex rows `y` whose phases make their sums positive.

    A change of `y` changes its phase, too, and by that the loss: `turn`, `(*, k, 1)`, is the
    derivative of the loss in the phase.
    """
    return v + torch.complex(torch.zeros_like(turn), turn / y.sum(-1, keepdim=True).real)


def _repeat(values: Tensor, top: Tensor, executor: Any) -> bool:
    """Whether requested singular values repeat.

    Another solve, as second derivatives of complex vectors take it, may find other vectors in their
    span.
    """
    near = accuracy(values.dtype, executor.problem.single) * top
    return bool((values.diff(dim=-1).abs() <= near).any())


def _requested(x: Tensor, k: int, dim: int, executor: Any) -> Tensor:
    """The k first ones of the requested end, of all that there are."""
    if executor.problem.largest:
        return x.narrow(dim, 0, k)
    return x.narrow(dim, x.shape[dim] - k, k).flip(dim)


def _decomposed(derivative: str) -> Account:
    words = SingularBasis.words
    return Account("SVD(): singular value decomposition", EXACT_SVD.reason, words, derivative)


def _reduced(how: str, kept: type[Kept], derivative: str) -> Account:
    words = f"Reduction(): compiled kernels, {how}"
    return Account(words, REDUCED_GRAM.reason, kept.words, derivative)


class Triplets(Executor):
    """Triplets of matrices of float64 or complex128 with at least as many rows as columns.

    Of numbers that float32 holds compiled kernels find right vectors, unless a singular value is so
    small that left vectors would lose digits. Everything else is decomposed, and kept.

    Args:
        common: finds complex triplets on the common path, as right vectors, values and left ones.
    """

    def __init__(
        self,
        problem: Any,
        shape: torch.Size,
        dtype: torch.dtype,
        columns: bool,
        common: Common | None,
    ) -> None:
        way = "singular: reduction" if problem.single else "singular: svd"
        super().__init__(problem, ("A",), way)
        self.m, self.columns, self.range, self.common = shape[-2], columns, _RANGE, common
        self.ambiguous = common is not None and problem.width > 1
        self.plan = _plan(problem, shape, dtype) if problem.single else None
        self.paired = self.plan is None
        self.whole = self.plan is None or _is_whole(shape)

    fails = "a singular value is small, or units have to be others"

    def account(self, tensors: Tensors) -> Account:
        if self.plan is None:
            return _decomposed(OF_TORCH)
        compiled = not self.whole and self.problem.width == 1
        how = "right vectors from the Gram matrix AᵀA in float64, and left ones from these"
        kept = SingularBasis if self.whole else Nothing
        return _reduced(how, kept, COMPILED if compiled else OF_TORCH)

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
        found = _by_kernels([A], self.plan)
        if found is None:
            return None
        right, top = found[0], found[1][..., :1]
        if self.whole:
            right = _requested(right, self.problem.k or 1, -2, self).clone()
        elif not self.problem.largest:
            top = torch.linalg.matrix_norm(A).unsqueeze(-1)
        images = right @ A.mT
        values = norm(images)
        # Of a smaller singular value the image has too few digits for a left vector.
        if not bool((values > _SMALL * top).all()):
            return None
        if self.ambiguous and _repeat(values, top, self):
            return None
        return (right, values, images / values.unsqueeze(-1)), found if self.whole else ()

    def _decomposed(self, A: Tensor) -> tuple[Found, tuple[Tensor, ...]] | None:
        try:
            rows, spectrum = pair_basis(A)
        except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
            return None
        if not _are_within(spectrum, self.range):
            return None  # in other units
        k = self.problem.k or 1
        chosen, values = _requested(rows, k, -2, self), _requested(spectrum, k, -1, self).clone()
        if self.ambiguous and _repeat(values, spectrum[..., :1], self):
            return None
        # The sign of a triplet is that of its right vector.
        right = chosen[..., self.m :]
        factors = _factors(right)
        if factors is None:
            return None  # another reference decides
        return (factors * right, values, factors * chosen[..., : self.m]), (rows, spectrum)

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
        any_of_them = g_right if g_right is not None else g_left
        if may_compile(any_of_them, d_values) and (self.whole or right.shape[-2] == 1):
            found, incoming = (right, values, left), (g_right, d_values, g_left)
            dA = self._apart(tensors[0], found, incoming, held if same else None)
            if dA is not None:
                return (dA,)
        if self.common is not None:
            common = self.common
            return solved_again(lambda x: common({"A": x[0]}), tensors, grads, needs)
        v = None
        if any_of_them is not None:
            g_right = torch.zeros_like(right) if g_right is None else g_right
            v = torch.cat([torch.zeros_like(left) if g_left is None else g_left, g_right], -1)
        kept = SingularBasis(*held) if self.paired and same else NOTHING
        state = State(values, values[..., 0], kept)
        y = torch.cat([left, right], -1)
        with full_precision(y.device):
            return self.problem.gradients(Reverse(tensors, y, state, IMPLICIT, v, d_values, needs))

    def _apart(
        self,
        A: Tensor,
        found: tuple[Tensor, Tensor, Tensor],
        incoming: Sequence[Tensor | None],
        held: Sequence[Tensor] | None,
    ) -> Tensor | None:
        """The gradient by `u = Av/σ`; None where singular values nearly repeat, or vanish.

        With the part `h` of the gradient of `u` that is orthogonal to `u`, `g = g_v + Aᴴh/σ` and
        `(σ²I − AᴴA)z = g`, it is `(Az + h/σ + ∂L/∂σ u)vᴴ + σu zᴴ`.
        """
        (right, values, left), (g, d_values, g_left) = found, incoming
        column = values.unsqueeze(-1)
        side = None if d_values is None else d_values.unsqueeze(-1) * left
        if A.is_complex():
            pairs = ((x, y) for x, y in ((g, right), (g_left, left)) if x is not None)
            turn = sum((x.conj() * y).sum(-1, keepdim=True).imag for x, y in pairs)
            if isinstance(turn, Tensor):
                g = _turned(torch.zeros_like(right) if g is None else g, right, turn)
        if g_left is not None:
            along = (g_left.conj() * left).real.sum(-1, keepdim=True)
            h = (g_left - along * left) / column
            side = h if side is None else side + h
            back = h @ A.conj()
            g = back if g is None else g + back
        if g is None:
            assert side is not None
            return side.mT @ right.conj()
        z = self._by_kernels(A, right, values, g) if not self.whole else None
        if self.whole and held is not None:
            z = self._in_basis(values, g, *held)
        if z is None:
            return None
        rows = z @ A.mT
        rows = rows if side is None else rows + side
        return torch.cat([rows, column * left], -2).mT @ torch.cat([right, z], -2).conj()

    def _in_basis(self, values: Tensor, g: Tensor, rows: Tensor, spectrum: Tensor) -> Tensor | None:
        """`z` from all triplets."""
        V = rows[..., -g.shape[-1] :]
        first, others, top = values.unsqueeze(-1), spectrum.unsqueeze(-2), spectrum[..., :1]
        difference = first - others
        same = difference.abs() <= accuracy(g.dtype, self.problem.single) * top.unsqueeze(-1)
        # Each value is equal to itself, and to no other.
        if int(same.sum()) != values.numel() or not bool((values > _SMALL * top).all()):
            return None
        rise = (difference * (first + others)).masked_fill(same, math.inf)
        return ((g @ V.mH) / rise) @ V

    def _by_kernels(self, A: Tensor, right: Tensor, values: Tensor, g: Tensor) -> Tensor | None:
        """`z` for one triplet, by a factorisation of `σ²I − AᵀA`."""
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
        short = norm(z) * close * (2 * values + close) <= norm(g)
        return z if failed is None and bool(short.all()) else None


_RANGE = square_range(torch.float64)
# Of a smaller singular value, relative to the norm, `Av/σ` has too few digits.
_SMALL = 1e-3
