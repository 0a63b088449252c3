"""What ATen calls cost on CUDA: kernels and waits, with the reason for each number.

The numbers come from the sources of ATen for CUDA, as far as they were read; none was measured.
A call that is not named here starts one kernel, and the host does not wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Nothing is started: memory is allocated or renamed. Calls whose schema says that they return a
# view are free as well, and are not listed.
FREE = {
    *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"),
    *("resize_", "set_", "detach", "alias", "lift", "lift_fresh", "_unsafe_view", "_reshape_alias"),
    *("_conj", "_neg_view", "_fw_primal", "_make_dual", "_has_same_storage_numel"),
    "_efficientzerotensor",
    *("is_same_size", "record_stream", "_version"),
    # Sparse tensors are made of their parts, and give them back.
    *("values", "indices", "_values", "_indices", "crow_indices", "col_indices", "_nnz"),
    *("is_coalesced", "_coalesced_", "sparse_dim", "dense_dim"),
    *("sparse_compressed_tensor", "_sparse_compressed_tensor_unsafe", "_sparse_coo_tensor_unsafe"),
    *("_sparse_csr_tensor_unsafe", "_sparse_coo_tensor_with_dims_and_tensors"),
}

# Calls of more than one kernel.
LAUNCHES = {
    "eye": 2,  # zeros, then the diagonal
    "diag_embed": 2,  # the same
    "masked_fill": 2,  # a copy, into which numbers are written, as in all of these
    "index_put": 2,
    "index_add": 2,
    "index_fill": 2,
    "scatter": 2,
    "select_scatter": 2,
    "slice_scatter": 2,
    "select_backward": 2,  # zeros, into which the gradient of the part is written
    "slice_backward": 2,
    "diagonal_backward": 2,
    "repeat": 2,  # a copy in every direction, with memory in between
    "equal": 2,  # a comparison and a reduction
    "sort": 2,  # of segments: their bounds, and the sort itself
    "topk": 2,  # a selection, and a sort of what is selected
    "nonzero": 4,  # a reduction of two kernels, a selection, and the indices that it writes
    "repeat_interleave": 3,  # a sum, its total, and the indices
    "bincount": 3,  # the least and the largest number, and the counts
    "_coalesce": 6,  # keys, a sort, the unique ones, sums
}
MASK_LAUNCHES = LAUNCHES["nonzero"]  # a boolean mask is turned into indices

# Calls in which the host waits, and how often: they read a number back.
WAITS = {
    "_local_scalar_dense": 1,  # `item`, `bool`, `float`
    "equal": 1,  # the result is a bool of Python
    "nonzero": 1,  # how many there are, which is the shape of the result
    "masked_select": 1,  # the same
    "_unique2": 1,
    "unique_dim": 1,
    "unique_consecutive": 1,
    "bincount": 2,  # the least and the largest number
    "_coalesce": 1,  # how many indices differ
    "_linalg_check_errors": 1,  # `info` of what has no `_ex` in its name
    "_linalg_eigh": 1,  # `info`
    "_linalg_svd": 2,  # `info`, and once more whether Jacobi's method has converged
    "linalg_eig": 1,  # `info`
    "linalg_eigvals": 1,
}

DECOMPOSITIONS = {
    *("_linalg_eigh", "_linalg_svd", "linalg_eig", "linalg_eigvals", "linalg_cholesky_ex"),
    *("linalg_inv_ex", "_linalg_solve_ex", "linalg_lu_factor_ex", "linalg_lu_solve", "linalg_lu"),
    *("linalg_qr", "geqrf", "linalg_householder_product", "orgqr", "ormqr", "linalg_lstsq"),
    *("linalg_solve_triangular", "triangular_solve", "cholesky_solve", "cholesky_inverse"),
    *("linalg_ldl_factor_ex", "linalg_ldl_solve", "_linalg_det", "_linalg_slogdet", "lu_unpack"),
}
# These have no batched routine, and torch calls cuSOLVER for one matrix after the other. `eig` is
# one of them since torch 2.10 (pull request 183806); of `qr` it is the part that forms Q.
LOOPED = {"linalg_eig", "linalg_eigvals", "linalg_qr", "geqrf", "linalg_ldl_factor_ex"}

# Calls that index, whose second argument is the list of indices and masks.
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


def launches(name: str, args: Sequence[Any]) -> int:
    """The number of kernels of an ATen call."""
    if name == "_local_scalar_dense":
        return 0  # a copy of one number
    return LAUNCHES.get(name, 1) + MASK_LAUNCHES * masks(name, args)


def waits(name: str, args: Sequence[Any]) -> int:
    """How often the host waits in an ATen call, copies between devices left out."""
    if name == "repeat_interleave" and len(args) == 1:
        return 1  # the total, which is the size of the result, unless it is given
    return WAITS.get(name, 0) + masks(name, args)


def masks(name: str, args: Sequence[Any]) -> int:
    """How many masks an indexing call turns into indices."""
    if name not in INDEXED:
        return 0
    places = [x for x in args[1] if isinstance(x, Tensor)]
    found = [x for x in places if x.dtype in (torch.bool, torch.uint8)]
    # One number written to one mask is a `masked_fill`.
    written = name not in ("index", "_unsafe_index")
    if written and len(found) == len(places) == 1 and args[2].numel() == 1:
        return 0
    return len(found)


def calls(name: str, A: Tensor) -> int:
    """How many calls of cuSOLVER a decomposition takes for a batch.

    `eigh` is batched for every size since torch 2.12 (pull request 175403), SVD up to 32 by 32,
    `lstsq` for batches of small matrices; Cholesky and LU always are.
    """
    count, (m, n) = math.prod(A.shape[:-2]), A.shape[-2:]
    if name in LOOPED:
        return count
    if name == "linalg_lstsq":
        return 1 if m <= 256 and count >= max(2, m // 16) else count
    if name == "_linalg_svd":
        return 1 if max(m, n) <= 32 else count
    return 1
