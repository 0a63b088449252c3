"""Telling a plain call from one that is traced or transformed."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def plain(x: Tensor) -> bool:
    """Whether nobody traces, transforms or intercepts the call, and there are numbers to see.

    Such a call needs no opaque operator around what depends on data.
    """
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, nn.Parameter)
        and torch._C._functorch.maybe_current_level() is None  # pyright: ignore
        and torch._C._len_torch_dispatch_stack() == 0
        and not x.is_meta
    )
