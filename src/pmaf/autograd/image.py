"""Products with an operator, and its entries, differentiable in its tensors and in the vectors.

Autograd cannot follow the products of every operator; `pullback` is their derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pmaf.autograd.node import Saved, Solved
from pmaf.autograd.products import first_order
from pmaf.operators import Operator
from pmaf.runtime import ranks
from pmaf.runtime.modes import full_precision


def image(A: Operator, rows: Tensor) -> Tensor:
    """`A x` for every row, `(*, p, n)` to `(*, p, m)`, as tensors that every rank has."""
    mesh = ranks.mesh_of(*A.tensors)
    spread = [ranks.replicate(x, mesh) for x in A.tensors]
    fixed = A.with_tensors([x.detach() for x in spread])
    with torch.no_grad(), full_precision(A.device):
        found = ranks.whole(fixed.matvec(ranks.replicate(rows.detach(), mesh)))
    attach: Any = Solved.apply
    return attach(_Image(fixed, mesh), (found,), (), rows, *spread)[0]


def entries(A: Operator) -> Tensor:
    """The entries of an operator, `(*, m, n)`, by n products, with gradients to its tensors."""
    n = A.shape[-1]
    eye = torch.eye(n, dtype=A.dtype, device=A.device)
    return image(A, eye.expand(*A.batch_shape, n, n)).mT.contiguous()


class _Image:
    """The derivative of products, once."""

    uses_found = False

    def __init__(self, A: Operator, mesh: Any) -> None:
        self.A, self.mesh = A, mesh

    def pull(
        self, saved: Saved, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        rows, *tensors = saved.tensors
        assert grads[0] is not None
        right, left = (ranks.replicate(x, self.mesh) for x in (rows, grads[0]))
        with torch.no_grad(), full_precision(self.A.device):
            found = self.A.pullback(left, right, needs[1:])
            parts = [None if dx is None else ranks.alike(dx, x) for dx, x in zip(found, tensors)]
            back = ranks.whole(self.A.rmatvec(left)) if needs[0] else None
        return first_order([back, *parts], (grads[0], rows, *tensors))
