"""Functions `V f(Λ) Vᵀ` of symmetric matrices, and their derivatives of any order.

In the basis of the eigenvectors, the m-th derivative in the directions `X, …, Z` is the sum

    Σ f[λᵢ, λₐ, …, λⱼ] Xᵢₐ … Zₒⱼ   over all inner indices a, …, o and all orders of the directions

with divided differences of f (Daleckii and Krein). Denominators vanish nowhere: f[λ, λ] = f′(λ).
For a group of eigenvalues the function is f inside the group and zero outside; its divided
differences have the distances between the group and the rest in denominators, and no others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pmaf.linalg.divided_differences import Scalar, divided_difference
from pmaf.linalg.roundings import merge_tolerance


@dataclass(frozen=True)
class MatrixFunction:
    """A scalar function, and the eigenvalues it is applied to.

    Eigenvalues come as `(*, n)`, in ascending order, and eigenvectors as columns `(*, n, n)`.
    """

    scalar: Scalar
    k: int | None  # how many eigenvalues the group has; None for all
    largest: bool
    learned: bool = False  # whether the function has parameters that autograd records
    # (*, 1), the norm of the matrix, where the eigenvalues are not all that it has.
    size: Tensor | float = 0.0

    def arguments(self, values: Tensor) -> Tensor:
        """The eigenvalues of the group, as the scalar function takes them."""
        return self.scalar.settled(self.of_group(values), self.rounding(values))

    def rounding(self, values: Tensor) -> Tensor:
        """The distance of eigenvalues that count as equal, `(*, 1)`."""
        largest = torch.linalg.vector_norm(values, math.inf, -1, keepdim=True)
        if isinstance(self.size, Tensor) or self.size > 0:
            largest = largest.clamp_min(self.size)
        return merge_tolerance(values.dtype) * largest

    def value(self, values: Tensor, vectors: Tensor) -> Tensor:
        """`V f(Λ) Vᵀ`."""
        V = self.of_group(vectors)
        return (V * self.scalar.derivative(self.arguments(values), 0).unsqueeze(-2)) @ V.mH

    def first(self, values: Tensor, vectors: Tensor, direction: Tensor) -> Tensor:
        """The first derivative; its symmetric part, to be exact."""
        V = self.of_group(vectors)
        x = self.arguments(values)
        inner = self.inner(x, V.mH @ direction @ V)
        if self.k is None:
            return V @ inner @ V.mH
        rest, others = self._of_rest(values), self._of_rest(vectors)
        gap = self.of_group(values).unsqueeze(-1) - rest.unsqueeze(-2)
        apart = gap.abs() > self.rounding(values).unsqueeze(-1)
        scale = self.scalar.derivative(self.arguments(values), 0).unsqueeze(-1)
        outer = scale * torch.where(apart, (V.mH @ direction @ others) / _or_one(gap, apart), 0)
        # The adjoint of the second part is left out, so that the part is doubled.
        return V @ (inner @ V.mH + 2 * outer @ others.mH)

    def inner(self, x: Tensor, direction: Tensor) -> Tensor:
        """The first derivative inside the group, in its eigenbasis, at the arguments `x`."""
        return self._pairs(x) * direction

    def slopes(self, values: Tensor) -> Tensor:
        """The divided differences of the first derivative, `(*, n, n)`."""
        return self._differences(values, []).squeeze(-2)

    def word(self, values: Tensor, directions: Sequence[Tensor]) -> Tensor:
        """The sum for one order of the directions, which are `(*, n, n)` in the eigenbasis."""
        return self._summed(values, [tuple(directions)])

    def words(self, values: Tensor, directions: Tensor) -> Tensor:
        """The sum for all orders of the directions, `(*, m, n, n)`."""
        return self._summed(values, list(itertools.permutations(directions.unbind(-3))))

    def _summed(self, values: Tensor, words: list[tuple[Tensor, ...]]) -> Tensor:
        n, order = values.shape[-1], len(words[0])
        count, chunk = n ** (order - 1), self._chunk(values, order)
        total = None
        for start in range(0, count, chunk):
            # The inner indices, all combinations of which are numbered.
            number = torch.arange(start, min(start + chunk, count), device=values.device)
            inner = [number // n ** (order - 2 - i) % n for i in range(order - 1)]
            products = sum(_path(word, inner) for word in words)
            part = (self._differences(values, inner) * products).sum(-2)
            total = part if total is None else total + part
        assert total is not None
        return total

    def _chunk(self, values: Tensor, order: int) -> int:
        """How many combinations of inner indices are summed at a time."""
        n = values.shape[-1]
        batch = 1 if torch.compiler.is_compiling() else math.prod(values.shape[:-1])
        return max(1, _NUMBERS // max(1, batch * n * n * 8**order))

    def _differences(self, values: Tensor, inner: list[Tensor]) -> Tensor:
        """Divided differences for all outer and some inner indices, `(*, n, c, n)`."""
        n = values.shape[-1]
        every = torch.arange(n, device=values.device)
        parts = (every[:, None, None], *(x[:, None] for x in inner), every)
        # In ascending order, as the eigenvalues are.
        index = torch.stack(torch.broadcast_tensors(*parts), -1).sort(-1).values.unbind(-1)
        if self.k is None:
            x = self.arguments(values)
            return divided_difference(self.scalar, [x[..., i] for i in index])
        first = n - self.k if self.largest else 0
        member = (every >= first) & (every < first + self.k)
        # The function need not be defined outside the group: its edge stands in.
        x = self.arguments(values)
        edge = x[..., :1] if self.largest else x[..., -1:]
        edges = edge.expand(*values.shape[:-1], n - self.k)
        x = torch.cat((edges, x) if self.largest else (x, edges), -1)
        return divided_difference(
            self.scalar,
            [x[..., i] for i in index],
            [values[..., i] for i in index],
            [member[i] for i in index],
            self.rounding(values)[..., None, None],
        )

    def _pairs(self, x: Tensor) -> Tensor:
        """`f[xᵢ, xⱼ]`, `(*, k, k)`."""
        left, right = x.unsqueeze(-1), x.unsqueeze(-2)
        points = torch.minimum(left, right), torch.maximum(left, right)
        return divided_difference(self.scalar, points)

    def of_group(self, x: Tensor) -> Tensor:
        """What belongs to the eigenvalues of the group, in the last dimension of `x`."""
        if self.k is None:
            return x
        return x[..., x.shape[-1] - self.k :] if self.largest else x[..., : self.k]

    def _of_rest(self, x: Tensor) -> Tensor:
        assert self.k is not None
        return x[..., : x.shape[-1] - self.k] if self.largest else x[..., self.k :]


# How many numbers a sum holds at a time.
_NUMBERS = 1 << 22


def _path(word: tuple[Tensor, ...], inner: list[Tensor]) -> Tensor:
    """`Xᵢₐ … Zₒⱼ` for all i and j and some inner indices, `(*, n, c, n)`."""
    if len(word) == 1:
        return word[0].unsqueeze(-2)
    left, right = word[0][..., inner[0]], word[-1][..., inner[-1], :]
    for x, i, j in zip(word[1:-1], inner, inner[1:]):
        left = left * x[..., i, j].unsqueeze(-2)
    return left.unsqueeze(-1) * right.unsqueeze(-3)


def _or_one(x: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, x, 1)
