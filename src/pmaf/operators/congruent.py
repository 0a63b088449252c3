"""An operator in other variables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pmaf.linalg.products import broadcast
from pmaf.operators.base import Operator, Wrapping


class Congruent(Wrapping):
    """`T⁻¹ A T⁻ᵀ`; gradients reach the tensors of `A`, and `T`.

    Args:
        A: an operator `(*, n, n)`.
        T: `(*, n)`, a diagonal matrix, or `(*, n, n)`, a lower triangular one.
        dims: of one batch entry of `T`, 1 or 2.
    """

    def __init__(self, A: Operator, T: Tensor, dims: int) -> None:
        super().__init__(A)
        self.T, self.dims = T, dims

    @property
    def shape(self) -> torch.Size:
        lead = self.T.shape[: self.T.dim() - self.dims]
        return torch.Size((*broadcast(self.part.batch_shape, lead), *self.part.shape[-2:]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.part.tensors, self.T)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Congruent:
        *others, T = tensors
        return Congruent(self.part.with_tensors(others), T, self.dims)

    def matvec(self, rows: Tensor) -> Tensor:
        return solve_root(
            self.T, self.part.over_batch(self.part.matvec, self._inner(rows)), self.dims
        )

    def rmatvec(self, rows: Tensor) -> Tensor:
        return solve_root(
            self.T, self.part.over_batch(self.part.rmatvec, self._inner(rows)), self.dims
        )

    def pullback(self, left: Tensor, right: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        *others, need = needs
        inner, outer = self._inner(right), self._inner(left)
        found = self.part.pullback(self._lifted(outer), self._lifted(inner), others)
        if not need:
            return [*found, None]
        # With l = T⁻ᵀ left and r = T⁻ᵀ right, the derivative of lᵀAr in T comes by l and by r.
        image = self.part.over_batch(self.part.matvec, inner)
        other = self.part.over_batch(self.part.rmatvec, outer)
        with torch.enable_grad():
            T = self.T.detach().requires_grad_()
            both = (solve_root(T, x, self.dims, transposed=True) for x in (left, right))
            total = sum((x * y).sum() for x, y in zip(both, (image, other)))
            assert isinstance(total, Tensor)
            (dT,) = torch.autograd.grad(total, T)
        return [*found, dT]

    def _inner(self, rows: Tensor) -> Tensor:
        return solve_root(self.T, rows, self.dims, transposed=True)

    def _lifted(self, rows: Tensor) -> Tensor:
        # A matrix without a batch takes the rows of all batch entries.
        return rows if self.part.batch_shape else rows.reshape(-1, rows.shape[-1])

    def __repr__(self) -> str:
        return f"Congruent({self.part!r})"


def solve_root(T: Tensor, rows: Tensor, dims: int, transposed: bool = False) -> Tensor:
    """`T⁻¹x`, or `T⁻ᵀx`, for every row `(*, p, n)`; see `Congruent`."""
    if dims == 1:
        return rows / T.unsqueeze(-2)
    # Rows xᵀ with xᵀTᵀ or xᵀT given.
    return torch.linalg.solve_triangular(
        T if transposed else T.mT, rows, upper=not transposed, left=False
    )
