"""An operator with a function that solves with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pmaf.operators.base import Operator, Wrapping, as_operator


class WithSolve(Wrapping):
    """`A` together with a function for `A⁻¹x`, such as the solve of a sparse factorisation.

    Gradients reach the tensors of `A`. As the `M` of a pair, it is solved by the function.

    Args:
        A: `(*, n, n)`, a tensor, dense or sparse, or an operator; symmetric positive definite.
        solve: rows `(*, p, n)` to rows; it belongs to the present values of `A`, and gets no
            gradient.

    >>> import torch, pmaf
    >>> A = torch.diag(torch.tensor([3.0, 1.0, 2.0])).to_sparse_csr()
    >>> M = pmaf.operators.WithSolve(2.0 * A, lambda rows: rows / torch.tensor([6.0, 2.0, 4.0]))
    >>> pmaf.ied(A, M=M).values.round(decimals=4)
    tensor(0.5000)
    """

    def __init__(self, A: Any, solve: Callable[[Tensor], Tensor]) -> None:
        super().__init__(as_operator(A))
        self.function = solve
        if self.part.shape[-2] != self.part.shape[-1]:
            raise ValueError(f"solve is for square matrices; got {self.part!r}")
        if not callable(solve):
            raise TypeError(f"solve must be a function of rows; got {type(solve).__name__}")

    def in_units(self, rows: Tensor) -> tuple[Operator, Tensor]:
        return self.part.in_units(rows)

    def matvec(self, rows: Tensor) -> Tensor:
        return self.part.matvec(rows)

    def rmatvec(self, rows: Tensor) -> Tensor:
        return self.part.rmatvec(rows)

    def solve(self, rows: Tensor) -> Tensor:
        found = self.function(rows)
        if not isinstance(found, Tensor):
            raise TypeError(
                f"solve returned {type(found).__name__} for rows of shape {tuple(rows.shape)}; "
                f"return a torch.Tensor of {rows.dtype}"
                + (" (torch.from_numpy converts it)" if hasattr(found, "__array__") else "")
            )
        if found.shape != rows.shape or found.dtype != rows.dtype or found.device != rows.device:
            raise ValueError(
                f"solve returned shape {tuple(found.shape)} of {found.dtype} on {found.device} for "
                f"rows of shape {tuple(rows.shape)} of {rows.dtype} on {rows.device}; return rows "
                "of the same kind"
            )
        return found

    def diagonal(self) -> Tensor | None:
        return self.part.diagonal()

    def pullback(self, left: Tensor, right: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        return self.part.pullback(left, right, needs)

    def __repr__(self) -> str:
        return f"WithSolve({self.part!r})"
