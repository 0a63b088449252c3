"""Principal pooling: features by the direction that most of them share."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from pmaf import errors
from pmaf.autograd.node import exactly
from pmaf.layers.eigenvectors import PrincipalEigenvectors
from pmaf.layers.ied import ied
from pmaf.linalg import sphere
from pmaf.linalg.products import broadcast, norm, one_if_zero, rmatvec
from pmaf.linalg.roundings import HALF, noise_tolerance, power_of_two, rank_tolerance, square_range
from pmaf.linalg.singular import rooted, weighted_gram
from pmaf.operators import Gram
from pmaf.reductions.end import reference_rows
from pmaf.runtime import precision
from pmaf.runtime.log import took
from pmaf.runtime.modes import (
    forward_mode,
    full_precision,
    plain,
    recorded,
    transformed,
    untraced,
)

# The largest matrix of second moments, channels×channels or tokens×tokens, that is formed: above,
# products with the features are faster. `pmaf bench pool`.
_FORMED = 256

# `precision.turn` is odd inside of `full_precision` if that has had to change a setting. Only then
# a product has to be a node of the graph by itself, so that its derivatives keep all digits.
_TIMES = (torch.matmul, functools.partial(exactly, torch.matmul))

_PATHS = ("channels", "tokens", "products")
_SCALES = ("unit", "root")


class PrincipalPool(nn.Module):
    """The principal vector of the features of each batch entry, `(*, tokens, channels)` to
    `(*, channels)`, where average pooling returns their mean.

    It is the unit vector `u` that maximises `Σ wᵢ(xᵢᵀu)²`, the top eigenvector of the second
    moments of the features, differentiated implicitly. Directions in which the features have no
    extent, as all have if features or weights are zero, are returned as zero.

    Args:
        k: how many vectors, `(*, channels, k)`, by descending extent; None for one, without a
            dimension for it.
        centre: subtract the mean first: the eigenvector of the covariance matrix.
        scale: `"unit"` for unit vectors, `"root"` for their multiples by the square roots of the
            eigenvalues, which are the extents of the features in these directions. If all features
            of an entry are the same vector, `"root"` returns it, as average pooling does.
        maps: features are maps, `(*, channels, height, width)`, and weights `(*, height, width)`.
        reference: what the sign of a vector is chosen by: `"mean"`, for a positive product with the
            mean of the features; an integer, for that component to be positive; or `"largest"`,
            for the component of largest modulus to be.
        path: what is decomposed: the matrix of moments of `"channels"`, channels×channels; that of
            `"tokens"`, tokens×tokens; or neither, by `"products"` with the features. None for the
            fastest, by their sizes.

    >>> import torch, pmaf
    >>> pool = pmaf.PrincipalPool()
    >>> pool(torch.tensor([[3.0, 4.0], [6.0, 8.0], [0.0, 0.0]]))
    tensor([0.6000, 0.8000])
    """

    def __init__(
        self,
        k: int | None = None,
        *,
        centre: bool = False,
        scale: str = "unit",
        maps: bool = False,
        reference: int | str = "mean",
        path: str | None = None,
    ) -> None:
        super().__init__()
        if k is not None:
            errors.require_at_least("k", k, 1)
        if scale not in _SCALES:
            raise ValueError(f'scale must be "unit" or "root"; got {scale!r}')
        if path is not None and path not in _PATHS:
            raise ValueError(f"path must be None or one of {', '.join(_PATHS)}; got {path!r}")
        if isinstance(reference, bool) or not isinstance(reference, (int, str)):
            raise TypeError(
                'reference must be "mean", "largest" or the index of a channel; got '
                f"{type(reference).__name__} (a tensor is an argument of the call)"
            )
        if isinstance(reference, str) and reference not in ("mean", "largest"):
            raise ValueError(
                f'reference must be "mean", "largest" or the index of a channel; got {reference!r}'
            )
        self.k, self.centre, self.scale, self.maps = k, centre, scale, maps
        self.reference, self.path = reference, path

    def forward(
        self,
        features: Tensor,
        weights: Tensor | None = None,
        *,
        reference: Tensor | int | str | None = None,
        init: Tensor | None = None,
    ) -> Tensor:
        """Pool features.

        Args:
            features: `(*, tokens, channels)`, or maps, of float32 or float64; float16 and bfloat16
                are computed in float32.
            weights: `(*, tokens)`, none negative, such as attention or a mask; they get gradients,
                also where they are zero. Only their ratios matter.
            reference: `(*, channels)` or `(*, channels, k)`, towards which signs are chosen, such
                as the result of the last step of training; or as in the constructor.
            init: `(*, channels)` or `(*, channels, k)`, the start of a search by products.
        """
        X, weights = self._tokens(features, weights)
        reference = self.reference if reference is None else reference
        path = self.path or _fastest(X, weights)
        # A trace cannot follow a search, whose length depends on the numbers.
        pool = untraced(self._pool) if path == "products" else self._pool
        return pool(X, weights, reference, init, path)

    def outline(self, features: Tensor, weights: Tensor | None) -> tuple[str, Any]:
        """What is decomposed, in words, and a matrix of its shape, or an operator."""
        X, weights = self._tokens(features, weights)
        path = self.path or _fastest(X, weights)
        dtype = torch.float32 if X.dtype in HALF else X.dtype
        if path == "products":
            return "features -> products with their second moments", Gram(X.to(dtype))
        batch = X.shape[:-2] if weights is None else broadcast(X.shape[:-2], weights.shape[:-1])
        n = X.shape[-1 if path == "channels" else -2]
        moments = torch.ones((), dtype=dtype, device=X.device).expand(*batch, n, n)
        return f"features -> the matrix of second moments of {path}, {n}×{n}", moments

    def _pool(
        self,
        X: Tensor,
        weights: Tensor | None,
        reference: Tensor | int | str,
        init: Tensor | None,
        path: str,
    ) -> Tensor:
        dtype = X.dtype
        by_mean = isinstance(reference, str) and reference == "mean"
        posed = None
        if not by_mean or init is not None:
            posed = _posed(X, weights, self.k, None if by_mean else reference)
        if init is not None and posed is not None:
            posed.require_start(init)
        if dtype in HALF:
            X = X.float()
            init = None if init is None else init.float()
        with full_precision(X.device):
            shares = None if weights is None else _shares(weights.to(X.dtype))
            if shares is None:
                mean = X.mean(-2)
            else:
                mean = exactly(rmatvec, X, shares) if precision.turn & 1 else rmatvec(X, shares)
            moments = _Moments(X - mean.unsqueeze(-2) if self.centre else X, shares, self.k or 1)
            extents, rows = moments.principal(path, init, mean if self.centre else None)
            if posed is None or by_mean:
                signs = _towards(rows, mean, extents)
            else:
                block = isinstance(reference, Tensor) and posed.has_columns(reference)
                signs = sphere.signs(rows, reference_rows(reference, block, rows.dtype))
            rows = rows * signs.unsqueeze(-1)
            if self.scale == "root":
                rows = rows * extents.unsqueeze(-1)
        return (rows.squeeze(-2) if self.k is None else rows.mT).to(dtype)

    def _tokens(self, features: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Features `(*, tokens, channels)` and weights `(*, tokens)`, checked."""
        X, w = features, weights
        if self.maps:
            X = _flattened(X)
        errors.require_matrix("features", X, "tokens, channels")
        tokens, channels = X.shape[-2:]
        if self.k is not None and self.k > min(tokens, channels):
            raise ValueError(
                f"k must be at most min(tokens, channels) = {min(tokens, channels)} for features "
                f"of shape {errors.shape_of(features)}; got {self.k}"
            )
        if w is None:
            return X, w
        if not isinstance(w, Tensor) or not (w.is_floating_point() or w.dtype == torch.bool):
            kind = w.dtype if isinstance(w, Tensor) else type(w).__name__
            raise TypeError(f"weights must be a tensor of floating-point or bool; got {kind}")
        each = features.shape[-2:] if self.maps else features.shape[-2:-1]
        if w.shape[w.dim() - len(each) :] != each:
            wanted = ", ".join(str(size) for size in each)
            raise ValueError(
                f"features of shape {errors.shape_of(features)} need weights of shape "
                f"(*, {wanted}); got {errors.shape_of(w)}"
            )
        w = w.flatten(-2) if self.maps else w
        errors.require_broadcast("features", X.shape[:-2], "weights", w.shape[:-1])
        return X, w

    def __prepare_scriptable__(self) -> None:
        errors.refuse_script(self)

    def extra_repr(self) -> str:
        names = ("k", "centre", "scale", "maps", "reference", "path")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


class _Moments:
    """`Σ pᵢ xᵢxᵢᵀ`, of which one or a few eigenvectors are wanted, for each batch entry.

    Args:
        X: `(*, tokens, channels)`.
        shares: `(*, tokens)`, which sum to one; all alike if they are None.
        k: how many eigenvectors.
    """

    def __init__(self, X: Tensor, shares: Tensor | None, k: int) -> None:
        self.X, self.shares, self.k = X, shares, k

    def principal(
        self, path: str, init: Tensor | None, subtracted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Extents `(*, k)`, the roots of the eigenvalues, and unit vectors as rows `(*, k, n)`.

        Both are zero where an eigenvalue is zero up to rounding: of the matrix, and of the mean
        `(*, n)` that has been subtracted from the features.
        """
        if not torch.compiler.is_compiling():
            took(f"pool: {path}")
        if path == "products":
            unit = self._unit()
            values, rows = self._by_products(self._in_units(unit), init)
        else:
            values, rows, unit = self._formed(path == "tokens")
        known = values.detach()
        zero = known <= rank_tolerance(known.dtype) * known[..., :1].clamp_min(0)
        extents = torch.where(zero, 1, values).sqrt()
        if unit is not None:
            extents = extents * unit.squeeze(-1)
        if subtracted is not None:
            rounding = noise_tolerance(known.dtype) * norm(subtracted.detach())
            zero = zero | (extents.detach() <= rounding.unsqueeze(-1))
        return extents.masked_fill(zero, 0), rows.masked_fill(zero.unsqueeze(-1), 0)

    def _formed(self, of_tokens: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Eigenvalues, vectors and the unit of the features, from a matrix of moments."""
        form = self._of_tokens if of_tokens else self._of_channels
        unit, matrix = None, form(self.X)
        if not (plain(matrix) and _is_in_range(matrix)):
            unit = self._unit()
            matrix = form(self._in_units(unit))
        values, columns = ied(matrix, self.k)
        rows = columns.mT
        if of_tokens:
            times = _TIMES[precision.turn & 1]
            rows = times(rows, rooted(self._in_units(unit), self.shares))
            rows = rows / one_if_zero(norm(rows)).unsqueeze(-1)
        return values, rows, unit

    def _of_channels(self, X: Tensor) -> Tensor:
        given = X, self.shares
        gram = exactly(weighted_gram, *given) if precision.turn & 1 else weighted_gram(*given)
        return gram / X.shape[-2] if self.shares is None else gram

    def _of_tokens(self, X: Tensor) -> Tensor:
        if not _has_roots(self.shares):
            raise ValueError(
                'path="tokens" takes roots of the weights, which have no derivative at zero; for '
                'gradients of weights use path="channels", "products" or None'
            )
        A = rooted(X, self.shares)
        gram = _TIMES[precision.turn & 1](A, A.mT)
        return gram / X.shape[-2] if self.shares is None else gram

    def _by_products(self, X: Tensor, init: Tensor | None) -> tuple[Tensor, Tensor]:
        if transformed():
            raise RuntimeError(
                f"features of shape {errors.shape_of(X)} are pooled by products, which runs in "
                'eager mode only, not under the transforms of torch.func; with path="channels" or '
                'path="tokens" a matrix is formed instead'
            )
        shares = self.shares
        gram = Gram(X, 1 / X.shape[-2]) if shares is None else Gram(X, weights=shares)
        values, columns = ied(gram, self.k, init=init)
        return values, columns.mT

    def _unit(self) -> Tensor | None:
        """Powers of two `(*, 1, 1)` to divide features by; None where their squares need none."""
        X = self.X.detach()
        largest = X.abs().amax((-2, -1), keepdim=True)
        if plain(X) and largest.numel() > 0:
            low, high = square_range(X.dtype)
            least, most = (float(x) for x in largest.aminmax())
            if low < least and most < high:
                return None
            errors.require_finite(features=(X, 2))
        return power_of_two(largest)

    def _in_units(self, unit: Tensor | None) -> Tensor:
        return self.X if unit is None else self.X / unit


def _fastest(X: Tensor, weights: Tensor | None) -> str:
    """The fastest path for features and weights, by their sizes."""
    tokens, channels = X.shape[-2:]
    wide = tokens < channels and _has_roots(weights)
    if (tokens if wide else channels) > _FORMED:
        return "products"
    return "tokens" if wide else "channels"


def _has_roots(weights: Tensor | None) -> bool:
    """Whether roots of the weights need no derivative, which is infinite at zero."""
    w = weights
    return w is None or (plain(w) and not recorded(w) and not forward_mode(w))


def _flattened(maps: Tensor) -> Tensor:
    """Maps `(*, channels, height, width)` as tokens `(*, height·width, channels)`."""
    if not isinstance(maps, Tensor) or maps.dim() < 3:
        kind = errors.shape_of(maps) if isinstance(maps, Tensor) else type(maps).__name__
        raise ValueError(
            f"with maps=True features must have shape (*, channels, height, width); got {kind}"
        )
    return maps.flatten(-2).mT


def _is_in_range(matrix: Tensor) -> bool:
    """Whether the squares of the features are in the range of the dtype."""
    sums = matrix.detach().diagonal(dim1=-2, dim2=-1).sum(-1)
    if sums.numel() == 0:
        return True
    low, high = square_range(matrix.dtype)
    least, most = (float(x) for x in sums.aminmax())
    return low < least and most < high


def _towards(rows: Tensor, mean: Tensor, extents: Tensor) -> Tensor:
    """Signs that make products with the mean positive, unless the mean itself is rounding."""
    mean = mean.detach().unsqueeze(-2)
    size = norm(mean)
    zero = size <= noise_tolerance(rows.dtype) * extents.detach()[..., :1]
    return sphere.signs(rows, mean.masked_fill(zero.unsqueeze(-1), 0))


def _shares(weights: Tensor) -> Tensor:
    """Weights that sum to one, or are all zero."""
    if plain(weights) and weights.numel() > 0 and not float(weights.detach().amin()) >= 0:
        errors.require_finite(weights=(weights, 1))
        raise ValueError(
            f"weights must be zero or positive; got {float(weights.detach().amin()):.6g} in "
            f"{int((weights < 0).sum())} of {weights.numel()} numbers; clamp them"
        )
    return weights / one_if_zero(weights.sum(-1, keepdim=True))


def _posed(
    X: Tensor, weights: Tensor | None, k: int | None, reference: Tensor | int | str | None
) -> PrincipalEigenvectors:
    """The same vectors as eigenvectors of a matrix without numbers, to check and choose signs."""
    batch, n = X.shape[:-2], X.shape[-1]
    if weights is not None:
        batch = broadcast(batch, weights.shape[:-1])
    blank = torch.empty((1, 1), dtype=X.dtype, device=X.device).expand(*batch, n, n)
    return PrincipalEigenvectors(blank, k, reference=reference)
