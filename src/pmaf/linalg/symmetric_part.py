"""Products of row vectors with batches of matrices, in as few passes over memory as they take.

A row times a matrix is one streaming pass; forming a transpose, or a symmetric part, costs
as much as many of them. Rows are `(B, p, n)` here, matrices `(B, n, n)`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from pmaf.linalg.products import symmetric_part

# Up to this size forming the symmetric part costs no more than a few products.
FORM_TO = 256


class SymmetricPart:
    """Products of rows with `½(A + Aᵀ)`.

    A large matrix that one product from each side shows to be symmetric, to rounding, is
    used as it is; `exact` takes both sides nevertheless, so that a final check is not
    fooled by what the first glance missed.
    """

    def __init__(self, A: Tensor, known: Tensor | None = None) -> None:
        n = A.shape[-1]
        if known is not None:
            self.matrix, self.one_sided = known, False
            return
        # The symmetric part of the transpose is the same.
        A = A if A.is_contiguous() else A.mT.contiguous()
        self.one_sided = False
        if n <= FORM_TO:
            self.matrix = symmetric_part(A)
            return
        self.matrix = A
        x = fixed_rows(n, A.dtype, A.device)[:1].expand(len(A), 1, n)
        left, right = torch.bmm(x, A), right_product(A, x)
        difference, size = torch.linalg.vector_norm(torch.cat([left - right, left], -2), dim=-1).T
        if (difference <= n**0.5 * torch.finfo(A.dtype).eps * size).all():
            self.one_sided = True
            return
        self.matrix = torch.empty_like(A)
        for symmetric, given in zip(self.matrix, A):  # one by one, transposes go in blocks
            symmetric.copy_(given.T).add_(given).mul_(0.5)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.matrix)

    def exact(self, x: Tensor) -> Tensor:
        image = torch.bmm(x, self.matrix)
        return image.add_(right_product(self.matrix, x)).mul_(0.5) if self.one_sided else image


def right_product(A: Tensor, x: Tensor) -> Tensor:
    """`A xᵀ` for rows `(B, p, n)`, as rows."""
    image = torch.bmm(A, x.mT)
    # The strides of a row decide how the next product reads it, a factor of ten at worst.
    return image.view(x.shape) if x.shape[-2] == 1 else image.mT.contiguous()


@functools.lru_cache(maxsize=64)
def fixed_rows(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Two directions `(2, n)` without structure, the same for every call."""
    # Inference tensors could not be used in a later training step.
    with torch.inference_mode(False):
        return fixed_normal(2, n).to(device, dtype)


def fixed_normal(*shape: int) -> Tensor:
    """Normal numbers in float64 on the CPU, the same for every call, whatever torch's defaults."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
