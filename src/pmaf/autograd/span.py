"""`VVᴴ` of eigenvectors, which depends on their span alone.

Derivatives of the vectors have parts inside the span that grow with one over the differences of the
eigenvalues, and that cancel in `VVᴴ`. Rounding errors of the parts do not cancel. The first
gradient does not see them. For higher derivatives and forward mode the span is written as the graph
of a linear map: let `V₀` be a constant copy of the vectors, `B = V₀⁺V` and `W = VB⁻¹ = V₀ + E`.
Then `E` maps outside of the span and has small derivatives, and `VVᴴ = W(I + EᴴE)⁻¹Wᴴ` for
orthonormal vectors. Of a pair with `VᴴMV = I`, the matrix in the middle is `BBᴴ`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from pmaf.autograd.node import Saved, Solved, attach_solved, exactly
from pmaf.errors import ConvergenceWarning
from pmaf.linalg.roundings import merge_tolerance, noise_tolerance
from pmaf.runtime.caller import warn
from pmaf.runtime.constant import constant
from pmaf.runtime.modes import forward_mode, full_precision, has_numbers, plain, unwrapped


def span_product(values: Tensor, vectors: Tensor) -> Tensor:
    """`VVᴴ`, `(*, n, n)`, of eigenvectors `(*, n, k)` with values `(*, k)`."""
    V = vectors
    with full_precision(V.device):
        if V.shape[-1] > 1 and forward_mode(V):
            _warn_of_close(values)
            return _by_graph(V)
        if V.shape[-1] > 1 and plain(V) and V.requires_grad and torch.is_grad_enabled():
            fixed = V.detach()
            return attach_solved(_SPAN, (fixed @ fixed.mH,), (values.detach(),), V)[0]
        return exactly(lambda V: V @ V.mH, V)


def _by_graph(V: Tensor) -> Tensor:
    fixed, eye = constant(V), torch.eye(V.shape[-1], dtype=V.dtype, device=V.device)
    lengths = fixed.mH @ fixed
    B = torch.linalg.solve(lengths, fixed.mH @ V)
    E = torch.linalg.solve(B, V - fixed @ B, left=False)
    W = fixed + E
    middle = torch.where(_are_orthonormal(fixed), torch.linalg.inv(eye + E.mH @ E), B @ B.mH)
    return W @ middle @ W.mH


def _are_orthonormal(V: Tensor) -> Tensor:
    """Whether the vectors are orthonormal, `(*, 1, 1)`, and not those of a pair."""
    eye = torch.eye(V.shape[-1], dtype=V.dtype, device=V.device)
    off = (V.mH @ V - eye).abs().amax((-2, -1), keepdim=True)
    return off <= V.shape[-2] * noise_tolerance(V.dtype)


def _inside(V: Tensor, x: Tensor) -> Tensor:
    return V @ (V.mH @ x)


class _Span:
    """The derivative of `VVᴴ`."""

    uses_found = False

    def pull(
        self, saved: Saved, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        (V,), _, (values,), _ = saved
        (g,) = grads
        assert g is not None
        with full_precision(V.device):
            if not torch.is_grad_enabled():
                return [(g + g.mH) @ V]
            (found,) = torch.autograd.grad(_by_graph(V), V, g, create_graph=True)
            # This gradient is outside of the span of orthonormal vectors. Rounding errors inside
            # would be divided by differences of eigenvalues.
            with torch.no_grad():
                inside = _inside(V, found) + _inside(V, found - _inside(V, found))
                inside = torch.where(_are_orthonormal(V), inside, 0)
            return [_again(found - inside, values, _warn_of_close)]


_SPAN = _Span()


class _Again:
    """Gradients that warn when they are differentiated."""

    uses_found = False

    def __init__(self, warning: Callable[[Tensor], None]) -> None:
        self.warning = warning

    def pull(
        self, saved: Saved, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        self.warning(*saved.held)
        return grads


def _again(gradient: Tensor, values: Tensor, warning: Callable[[Tensor], None]) -> Tensor:
    attach: Any = Solved.apply
    return attach(_Again(warning), (gradient.detach(),), (values,), gradient)[0]


def warn_of_triplets(values: Tensor) -> None:
    """The same for second derivatives of singular triplets, and of functions of their spans."""
    least = _closest(values, 1 / 4)
    if least is not None:
        eps = torch.finfo(values.dtype).eps
        warn(
            f"requested singular values differ by {least:.0e} of the largest, so that second "
            "derivatives of their vectors, and of UVᵀ, have relative errors of up to "
            f"{eps / least**3:.0e}; with J = [[0, A], [Aᵀ, 0]], the upper right block of "
            '2·pmaf.spectral(J, "one", k) is UVᵀ, and exact',
            ConvergenceWarning,
        )


def again_of_triplets(gradients: Sequence[Tensor | None], values: Tensor) -> tuple[Any, ...]:
    """Gradients of singular triplets that warn when they are differentiated again."""
    if not (torch.is_grad_enabled() and values.shape[-1] > 1 and plain(values)):
        return (*gradients,)
    return tuple(x if x is None else _again(x, values, warn_of_triplets) for x in gradients)


def _warn_of_close(values: Tensor) -> None:
    """Warn of derivatives beyond the first gradient where eigenvalues nearly repeat."""
    least = _closest(values, 1 / 3)
    if least is not None:
        eps = torch.finfo(values.dtype).eps
        warn(
            f"eigenvalues inside the group differ by {least:.0e} of the largest, so that forward "
            "mode and second derivatives of projector() have relative errors of up to "
            f"{eps / least:.0e} and {eps / least**2:.0e}; "
            'pmaf.spectral(A, "one", k) is exact there',
            ConvergenceWarning,
        )


def _closest(values: Tensor, power: float) -> float | None:
    """The least difference that is not rounding, relative to the largest value, if it is small."""
    numbers = unwrapped(values).detach()
    if is_compiling() or not has_numbers(numbers) or numbers.is_meta:
        return None  # there is nothing to look at
    away = (numbers.unsqueeze(-1) - numbers.unsqueeze(-2)).abs()
    size, eps = numbers.abs().amax(-1)[..., None, None], torch.finfo(numbers.dtype).eps
    close = (away > merge_tolerance(numbers.dtype) * size) & (away < eps**power * size)
    return float((away / size)[close].min()) if bool(close.any()) else None
