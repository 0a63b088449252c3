"""Tensors that are made once, where that is safe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Made = TypeVar("_Made")


class CachedOnCPU(dict[tuple[Any, ...], _Made]):
    """What a function makes for `[*arguments, device]`; it is cached for the CPU alone.

    On other devices a tensor may be made in the memory of a CUDA graph that is captured, which the
    next replay overwrites, or on a stream for which the next call does not wait. So it is made for
    every call there, and should take few operations, and no copy from the host, which waits.

    It is a dictionary because a look into one takes no call of Python.
    """

    def __init__(self, make: Callable[..., _Made]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: tuple[Any, ...]) -> _Made:
        if key[-1].type != "cpu":
            return self._make(*key)
        # Autograd refuses inference tensors, and these are cached for later training steps.
        with torch.inference_mode(False):
            made = self._make(*key)
        if len(self) >= _MOST:
            self.clear()
        self[key] = made
        return made


_MOST = 64
