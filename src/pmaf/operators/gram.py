"""`XᵀX` and `XᵀWX`, or `XᴴX`, of given or of centred data, without forming them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pmaf.errors import require_broadcast, require_row_weights
from pmaf.linalg.products import broadcast, one_if_zero
from pmaf.linalg.singular import weighted
from pmaf.operators.base import Operator, Wrapping, as_operator, number
from pmaf.operators.broadcasting import broadcast_product
from pmaf.operators.shifted import Shifted
from pmaf.runtime.ranks import mesh_of, replicate


class Gram(Wrapping):
    """`scale·XᵀX` for `X` of shape `(*, m, n)`, or `XᴴX` if it is complex.

    With `centre=True` it is `scale·(X − mean)ᵀ(X − mean)`: `pmaf.ied(Gram(X, centre=True))` is PCA.
    A product costs O(mn), and a gradient of `X` is of rank two for each vector.

    The centred data are not kept. A dense tensor is centred in each product, one block of rows
    after another, so that a mean far from zero costs no digits: a block has up to a sixteenth of
    `X`, or a quarter of a million numbers. A sparse tensor, one that is spread over ranks, and an
    operator are multiplied as they are, and what the mean contributes is subtracted. Rounding
    errors are then relative to the mean; if it is far larger than the spread, use float64.

    Args:
        X: a tensor, dense, sparse or spread over ranks by rows as a DTensor; or an operator.
        scale: `1/(m − 1)` makes it a covariance.
        weights: `(*, m)`, of the rows of `X`, the diagonal of `W` in `scale·XᵀWX`; they get
            gradients, too.
        centre: subtract the mean of the rows, weighted if there are weights.

    >>> import torch, pmaf
    >>> X = torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    >>> pmaf.ied(pmaf.operators.Gram(X)).values.round(decimals=4)
    tensor(9.)
    >>> pmaf.ied(pmaf.operators.Gram(X, centre=True)).vectors.round(decimals=4)
    tensor([ 0.9487, -0.3162])
    """

    def __init__(
        self, X: Any, scale: float = 1.0, weights: Tensor | None = None, *, centre: bool = False
    ) -> None:
        super().__init__(as_operator(X))
        if not isinstance(centre, bool):
            raise TypeError(
                f"centre is True, for the mean of the rows, or False; got {type(centre).__name__}; "
                "to subtract another row c, pass Gram(X - c)"
            )
        self.scale, self.weights, self.symmetric = number("scale", scale), weights, True
        self.centre = centre
        if weights is None:
            return
        require_row_weights(weights, "X", self.part)
        require_broadcast("X", self.part.batch_shape, "weights", weights.shape[:-1])

    @property
    def shape(self) -> torch.Size:
        n = self.part.shape[-1]
        batch = self.part.batch_shape
        if self.weights is not None:
            batch = broadcast(batch, self.weights.shape[:-1])
        return torch.Size((*batch, n, n))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.part.tensors if self.weights is None else (*self.part.tensors, self.weights)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Gram:
        count = len(self.part.tensors)
        part = self.part.with_tensors(tensors[:count])
        return Gram(part, self.scale, *tensors[count:], centre=self.centre)

    def in_units(self, rows: Tensor) -> tuple[Operator, Tensor]:
        X, exponents = self.part.in_units(rows)
        mantissa, power = math.frexp(self.scale)
        return Gram(X, mantissa, self.weights, centre=self.centre), 2 * exponents + power

    def matvec(self, rows: Tensor) -> Tensor:
        image = self._data.rmatvec(weighted(self._images(rows), self.weights))
        return image if self.scale == 1 else self.scale * image

    def pullback(self, left: Tensor, right: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        if not any(needs):
            return [None for _ in needs]
        both = torch.cat([left, right], -2)
        swapped = torch.cat([right, left], -2)
        images, count = self._images(both), len(self.part.tensors)
        scaled = weighted(self.scale * images, self.weights)
        # Weighted images of centred data sum to zero, so that the mean, which depends on the data
        # and on the weights, has no part in either gradient.
        found = self.part.pullback(scaled, swapped, needs[:count])
        if self.weights is None:
            return found
        dw = None
        if needs[count]:
            first, second = images.chunk(2, -2)
            products = torch.real(first.conj() * second)
            dw = (self.scale * products.sum(-2)).sum_to_size(self.weights.shape)
        return [*found, dw]

    def _images(self, rows: Tensor) -> Tensor:
        """`X` times rows, or centred `X` times rows."""
        images = self._data.matvec(rows)
        if not self.centre:
            return images
        if self.weights is None:
            return images - images.mean(-1, keepdim=True)
        return images - weighted(images, self._shares(self.weights)).sum(-1, keepdim=True)

    @staticmethod
    def _shares(weights: Tensor) -> Tensor:
        """Weights that sum to one, or are all zero."""
        return weights / one_if_zero(weights.sum(-1, keepdim=True))

    @cached_property
    def _data(self) -> Operator:
        """`X`; if it is to be centred, minus a row near its mean.

        No centred product depends on that row, so that it is a constant for derivatives, and may
        be the same for all weights of one `X`.
        """
        if not self.centre:
            return self.part
        X, m = self.part, self.part.shape[-2]
        with torch.no_grad():
            weights = self.weights
            if weights is None:
                weights = torch.ones(m, dtype=X.dtype.to_real(), device=X.device)
                weights = replicate(weights, mesh_of(*X.tensors))
            shares = self._shares(weights).to(X.dtype).unsqueeze(-2)
            mean = broadcast_product(X.rmatvec, X.batch_shape, shares).conj()
            more = mean.dim() - len(X.batch_shape) - 2
            mean = mean.mean(tuple(range(more))) if more else mean
            for i, size in enumerate(X.batch_shape):
                mean = mean.mean(i, keepdim=True) if size == 1 else mean
        return Shifted(X, mean)

    def __repr__(self) -> str:
        found = Operator.__repr__(self)
        return f"{found[:-1]}, centre=True)" if self.centre else found
