"""Kernels for batches of small matrices on a device, one launch a pass, in Triton, optional.

A launch and a wait for the device cost more than the work on small matrices. Here a whole forward
pass is one launch, and so is its first derivative, and the host waits for neither. Matrices have at
most 32 columns. All numbers are float64 inside, also for inputs of float32. An entry of a batch
that is not finite becomes nan, and so does its gradient.

Nothing here was ever timed, and nothing was run on a GPU: the kernels run in Triton's interpreter
on a CPU, and they are compiled for devices that are not there.
"""

from __future__ import annotations

import functools
import os
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

COLUMNS = 32  # at most


@functools.cache
def modules() -> Any:
    """The kernels of all problems, by the names of their files."""
    from pmaf.launched.kernels import eigenvectors, language, least_squares, null_vectors

    return Kernels(eigenvectors, null_vectors, least_squares, language)


class Kernels(NamedTuple):
    """Modules of kernels; Triton is imported with them."""

    eigenvectors: Any
    null_vectors: Any
    least_squares: Any
    language: Any


def launch(kernel: Any, programs: int, first: Tensor, *others: Any, **constants: Any) -> None:
    """Launch a kernel on the device of a tensor. Every launch of the library goes through here.

    Products are rounded before they are added, as in the interpreter, so that symmetric results are
    symmetric to the last bit.
    """
    if programs > 0:
        with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
            kernel[(programs,)](first, *others, **constants, enable_fp_fusion=False)


def takes(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are kernels for matrices of this shape and dtype, and the device runs them.

    On others than those of CUDA, Triton's interpreter runs them if the variables
    `TRITON_INTERPRET=1` and `PMAF_LAUNCHED=interpret` are set; that is for tests.
    """
    small = len(shape) >= 2 and 1 <= shape[-1] <= COLUMNS and shape[-2] >= 1
    if not small or dtype not in (torch.float32, torch.float64):
        return False
    if device.type == "cuda":
        return compiles(device.index)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    asked = os.environ.get("PMAF_LAUNCHED") == "interpret"
    return device.type != "meta" and interpreted and asked and modules().language.available


@functools.cache
def compiles(index: int | None) -> bool:
    """Whether Triton is there, and compiles a kernel for this device of CUDA; nothing runs."""
    if torch.version.hip is not None or not modules().language.available:
        return False
    try:
        with torch.cuda.device(index):
            modules().language.touch.warmup(torch.float64, grid=(1,))
    except Exception:  # a compiler, a driver or a header is missing, or the device is too old
        return False
    return True
