"""Operators from functions that multiply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pmaf.operators.base import Operator


class FromMatvec(Operator):
    """A function `matvec(u, *params)` as a matrix; gradients reach `params`.

    Args:
        matvec: linear in `u`, `(*, n)` to `(*, m)`, with `*` the batch of `shape`;
            differentiable in `params`.
        shape: `(*, m, n)`.
        params: the tensors that gradients are wanted for. Any other tensor that `matvec` uses
            is a constant.
        rmatvec: the same for the transpose, the conjugate one of a complex matrix. Unless given,
            it comes from autograd, one vector–Jacobian product of `matvec` in `u`.
        solve: the same for the inverse, if this is the `M` of a pair (docs/pairs.md).
        dtype: of the vectors; that of the first of `params` with one, or torch's default.
        device: of the vectors; that of the same tensor, or the CPU.

    >>> import torch, pmaf
    >>> weights = torch.tensor([3.0, 1.0, 2.0], requires_grad=True)
    >>> A = pmaf.operators.FromMatvec(lambda u, w: w * u, (3, 3), [weights])
    >>> pmaf.ied(A).values.backward()
    >>> weights.grad.round(decimals=5)
    tensor([1., 0., 0.])
    """

    def __init__(
        self,
        matvec: Callable[..., Tensor],
        shape: Sequence[int],
        params: Sequence[Tensor] = (),
        rmatvec: Callable[..., Tensor] | None = None,
        *,
        solve: Callable[..., Tensor] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(shape, Sequence):
            raise TypeError(f"shape must be (*, m, n); got {shape!r}, pass ({shape}, {shape})")
        if len(shape) < 2 or min(shape[-2:]) < 1:
            raise ValueError(f"shape must be (*, m, n), with m and n at least 1; got {shape}")
        if isinstance(params, Tensor):
            raise TypeError("params must be a sequence of tensors; got one tensor, pass [tensor]")
        if solve is not None and shape[-2] != shape[-1]:
            raise ValueError(f"solve is for square matrices; got the shape {tuple(shape)}")
        self._matvec, self._rmatvec, self._shape = matvec, rmatvec, torch.Size(shape)
        self._solve = solve
        self.params = tuple(params)
        floating = [x for x in self.params if x.is_floating_point() or x.is_complex()]
        # Without params the vectors live on the CPU, whatever torch.set_default_device says.
        first = (floating or [torch.empty(0, device="cpu")])[0]
        self._dtype, self._device = dtype or first.dtype, torch.device(device or first.device)

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.params

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._device

    def with_tensors(self, tensors: Sequence[Tensor]) -> FromMatvec:
        same = all(x.dtype == y.dtype for x, y in zip(tensors, self.params))
        # The dtype that the user gave is kept, unless the params change theirs.
        dtype = self._dtype if same else None
        return FromMatvec(
            self._matvec,
            self._shape,
            tensors,
            self._rmatvec,
            solve=self._solve,
            dtype=dtype,
            device=self._device,
        )

    def claims(self) -> Iterator[Operator]:
        # A transpose that autograd derives from matvec needs no check.
        if self._rmatvec is not None:
            yield self

    def matvec(self, rows: Tensor) -> Tensor:
        return self._by_row("matvec", self._matvec, rows, self._shape[-2])

    def rmatvec(self, rows: Tensor) -> Tensor:
        if self._rmatvec is not None:
            return self._by_row("rmatvec", self._rmatvec, rows, self._shape[-1])
        return self._by_row("matvec", self._transposed, rows, self._shape[-1])

    def solve(self, rows: Tensor) -> Tensor:
        if self._solve is None:
            return super().solve(rows)
        return self._by_row("solve", self._solve, rows, self._shape[-1])

    @property
    def solvable(self) -> bool:
        return self._solve is not None

    def _transposed(self, x: Tensor, *params: Tensor) -> Tensor:
        # The vector–Jacobian product of a linear function does not depend on the point.
        params = tuple(p.detach() for p in params)
        u = torch.zeros_like(x[..., :1].expand(*x.shape[:-1], self._shape[-1]))
        with torch.enable_grad():
            u.requires_grad_()
            image = self._checked("matvec", self._matvec, u, params, self._shape[-2])
            if not image.requires_grad:
                raise NotImplementedError(
                    "autograd cannot see through matvec, so there is no product with the "
                    "transpose; pass rmatvec"
                )
            return torch.autograd.grad(image, u, x)[0]

    def _by_row(
        self, name: str, function: Callable[..., Tensor], rows: Tensor, width: int
    ) -> Tensor:
        images = [self._checked(name, function, row, self.params, width) for row in rows.unbind(-2)]
        return images[0].unsqueeze(-2) if len(images) == 1 else torch.stack(images, -2)

    def _checked(
        self,
        name: str,
        function: Callable[..., Tensor],
        u: Tensor,
        params: Sequence[Tensor],
        width: int,
    ) -> Tensor:
        image = function(u, *params)
        # Without these checks a wrong result would cause an error in the search that does not name
        # the function. DTensors are tensors, too.
        if not isinstance(image, Tensor):
            raise TypeError(
                f"{name} returned {'None' if image is None else type(image).__name__} for u of "
                f"shape {tuple(u.shape)}; return a torch.Tensor of {u.dtype}"
                + (" (torch.from_numpy converts it)" if hasattr(image, "__array__") else "")
            )
        if image.dtype != u.dtype or image.device != u.device:
            raise TypeError(
                f"{name} returned {image.dtype} on {image.device} for u of {u.dtype} on {u.device};"
                " return the dtype and the device of u, for example with .to(u), or say what they "
                f"are with FromMatvec(..., dtype={image.dtype})"
            )
        if image.shape != (*u.shape[:-1], width):
            raise ValueError(
                f"{name} returned shape {tuple(image.shape)} for u of shape {tuple(u.shape)}; an "
                f"operator of shape {tuple(self._shape)} needs {(*u.shape[:-1], width)}"
            )
        return image
