"""Decompositions of symmetric matrices: the only calls of `eigh` and Cholesky in the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Eigen(NamedTuple):
    """Eigenvalues in ascending order, `(*, n)`, and eigenvectors as columns, `(*, n, n)`."""

    values: Tensor
    vectors: Tensor


class Factored(NamedTuple):
    """`L` with `A = LLᵀ`, `(*, n, n)`, and a number that is zero where there is one, `(*,)`."""

    lower: Tensor
    info: Tensor


def eigh(A: Tensor) -> Eigen:
    """All eigenvalues and eigenvectors, of the lower triangle."""
    return Eigen(*in_pieces(torch.linalg.eigh, A))


def eigenvalues(A: Tensor) -> Tensor:
    """All eigenvalues in ascending order, `(*, n)`."""
    (values,) = in_pieces(lambda A: (torch.linalg.eigvalsh(A),), A)
    return values


def cholesky(A: Tensor) -> Factored:
    """The lower Cholesky factor, without an error where there is none."""
    return Factored(*in_pieces(torch.linalg.cholesky_ex, A))


def cholesky_in_place(A: Tensor) -> Factored:
    """The same in the memory of `A`, which is stored by columns. It takes half of the time."""
    if limited(A):
        return cholesky(A)
    info = torch.empty(A.shape[:-2], dtype=torch.int32, device=A.device)
    torch.linalg.cholesky_ex(A, out=(A, info))
    return Factored(A, info)


def cholesky_or_error(A: Tensor) -> Tensor:
    """The lower Cholesky factor, `(*, n, n)`; torch raises an error where there is none."""
    (lower,) = in_pieces(lambda A: (torch.linalg.cholesky(A),), A)
    return lower


def in_pieces(function: Callable[[Tensor], Any], A: Tensor) -> tuple[Tensor, ...]:
    """The results of a function for a batch, computed in parts where the device has a limit."""
    if not limited(A) or A.shape[:-2].numel() <= MOST_MATRICES:
        return tuple(function(A))
    parts = [function(part) for part in A.flatten(0, -3).split(MOST_MATRICES)]
    return tuple(torch.cat(x).unflatten(0, A.shape[:-2]) for x in zip(*parts))


def limited(A: Tensor) -> bool:
    """Whether the library of the device takes a limited number of matrices at once."""
    return A.is_cuda and not torch.compiler.is_compiling()


# cuSOLVER's batched routines fail with CUSOLVER_STATUS_INVALID_VALUE beyond about 32,000 matrices.
# Not measured here: it is reported by kornia, VGGSfM and cupy (issue 7261).
MOST_MATRICES = 28_000
