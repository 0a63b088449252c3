"""TF32, in which CUDA computes products of float32 where the process allows it."""

from __future__ import annotations

import torch
from torch import Tensor

# General products of matrices, real and complex. Products of vectors (`mv`, `dot`) and of sparse
# matrices are computed in float32 by routines that have no other way.
PRODUCTS = {"mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "_addmm_activation"}


def allowed() -> bool:
    """Whether a product may be computed in TF32 now, by the settings that CUDA's products read."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def rounded(x: Tensor) -> Tensor:
    """The numbers with the ten bits of mantissa that tensor cores read, to nearest.

    This is the worst case: small products may be computed in float32 all the same.
    """
    if x.layout != torch.strided:
        return x
    if x.dtype == torch.complex64:
        return torch.view_as_complex(rounded(torch.view_as_real(x.resolve_conj())))
    if x.dtype != torch.float32:
        return x
    bits = x.resolve_neg().contiguous().view(torch.int32)
    short = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(x.isfinite() & short.isfinite(), short, x)
