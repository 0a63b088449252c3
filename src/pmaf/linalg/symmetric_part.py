"""Products of row vectors with batches of matrices, in as few passes over memory as possible.

A row times a matrix is one pass over memory; forming a transpose, or a symmetric part, takes as
long as many such products. Rows are `(B, p, n)` here, matrices `(B, n, n)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pmaf.linalg.products import symmetric_part
from pmaf.runtime.cached import CachedOnCPU

# Up to this size forming the symmetric part costs no more than a few products.
FORM_TO = 256


class SymmetricPart:
    """Products of rows with `½(A + Aᵀ)`.

    If one product from each side shows that a large matrix `A` is symmetric up to rounding, `A`
    itself is used. `exact` averages both sides nevertheless, so that a final check detects an
    asymmetry that this test missed.
    """

    def __init__(self, A: Tensor, known: Tensor | None = None) -> None:
        n = A.shape[-1]
        if known is not None:
            self.matrix, self.one_sided = known, False
            return
        # A and its transpose have the same symmetric part.
        A = A if A.is_contiguous() else A.mT.contiguous()
        self.one_sided = False
        if n <= FORM_TO:
            self.matrix = symmetric_part(A)
            return
        self.matrix = A
        x = fixed_rows[n, A.dtype, A.device][:1].expand(len(A), 1, n)
        left, right = torch.bmm(x, A), right_product(A, x)
        difference, size = torch.linalg.vector_norm(torch.cat([left - right, left], -2), dim=-1).T
        if (difference <= n**0.5 * torch.finfo(A.dtype).eps * size).all():
            self.one_sided = True
            return
        self.matrix = _formed(A)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.matrix)

    def exact(self, x: Tensor) -> Tensor:
        image = torch.bmm(x, self.matrix)
        return image.add_(right_product(self.matrix, x)).mul_(0.5) if self.one_sided else image

    def formed(self, of: Tensor | None = None) -> Tensor:
        """The symmetric part as a matrix; `of` selects entries.

        A factorisation reads one triangle, and would take an asymmetry that the products with the
        first vector missed for a part of the matrix.
        """
        matrix = self.matrix if of is None else self.matrix[of]
        return _formed(matrix) if self.one_sided else matrix


def _formed(A: Tensor) -> Tensor:
    found = torch.empty_like(A)
    for symmetric, given in zip(found, A):  # torch transposes single matrices in blocks
        symmetric.copy_(given.T).add_(given).mul_(0.5)
    return found


def right_product(A: Tensor, x: Tensor) -> Tensor:
    """`A xᵀ` for rows `(B, p, n)`, as rows."""
    image = torch.bmm(A, x.mT)
    # The strides of the rows change the speed of the next product by up to a factor of ten.
    return image.view(x.shape) if x.shape[-2] == 1 else image.mT.contiguous()


def _fixed_rows(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return fixed_normal(2, n).to(dtype) if device.type == "cpu" else made_there(n, dtype, device)


def made_there(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Two directions without structure, made on a device: the host would wait for a copy.

    Phases that grow like squares have no period, and where they are large, their rounding is
    disorder as well.
    """
    wide = torch.promote_types(dtype.to_real(), torch.float32)
    index = torch.arange(1, 2 * n + 1, dtype=wide, device=device)
    return (index * index).cos_().mul_(2**0.5).reshape(2, n).to(dtype)


# Two pseudorandom directions `(2, n)` by `[n, dtype, device]`, the same for every call.
fixed_rows = CachedOnCPU(_fixed_rows)


def fixed_normal(*shape: int) -> Tensor:
    """Normal numbers in float64 on the CPU, the same for every call, whatever torch's defaults."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
