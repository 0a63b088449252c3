"""Tensors without numbers, which have the shapes of a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pmaf.operators import Diagonal, Matrix, Operator
from pmaf.runtime.modes import forward_mode, plain


def without_numbers(x: Any) -> Any:
    """A tensor, or a matrix that holds one, on the device "meta"; everything else as it is."""
    if isinstance(x, (Diagonal, Matrix)):
        return x.with_tensors([without_numbers(part) for part in x.tensors])
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def standing_for(x: Any, device: torch.device | None = None) -> Any:
    """A tensor of the same shape in the memory of one number, with that number everywhere.

    It takes the place of tensors that contain numbers, and of those on the device "meta", which
    count as tensors on the CPU unless another device is given. What is traced, transformed, sparse
    or spread over ranks stays as it is, and so does an operator that has numbers.
    """
    if isinstance(x, Operator):
        if not any(part.is_meta for part in x.tensors):
            return x
        return x.with_tensors([standing_for(part, device) for part in x.tensors])
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        return x
    if not x.is_meta and (not plain(x) or forward_mode(x)):
        return x
    if device is None or device.type == "meta":
        device = torch.device("cpu") if x.is_meta else x.device
    return torch.ones((), dtype=x.dtype, device=device).expand(x.shape)
