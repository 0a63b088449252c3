"""Whether matrices of which the symmetric part is used are symmetric."""

from __future__ import annotations

import torch
from torch import Tensor

from pmaf.runtime.caller import warn
from pmaf.runtime.modes import plain

# The forms of the matrices that have been looked at, which is not done twice.
_LOOKED: set[tuple[torch.Size, torch.dtype]] = set()


def look_at_symmetry(A: Tensor) -> None:
    """Warn if a matrix of a new form is clearly not symmetric, because its symmetric part is used.

    To look takes as long as to solve for a small matrix, so that the first of each shape and dtype
    stands for the others. A matrix that rounding has made asymmetric is not clearly so.
    """
    if not plain(A) or (A.shape, A.dtype) in _LOOKED or 0 in A.stride() or not A.numel():
        return
    if len(_LOOKED) < _FORMS:
        _LOOKED.add((A.shape, A.dtype))
    with torch.no_grad():
        off, size = torch.linalg.matrix_norm(torch.stack([A - A.mH, A])).unbind()
        clear = off > torch.finfo(A.dtype).eps ** 0.25 * size
        if bool(clear.any()):
            share = float((off / torch.where(size > 0, size, 1))[clear].max())
            warn(
                f"A is not symmetric: ‖A − Aᴴ‖ is {share:.1e} of ‖A‖. With symmetric=True, the "
                "default, eigenvectors of its symmetric part are found; pass 0.5 * (A + A.mH) if "
                "that is wanted, or symmetric=False for the dominant eigenvector of A itself",
                UserWarning,
            )


_FORMS = 4096
