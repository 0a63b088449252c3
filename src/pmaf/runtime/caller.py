"""Warnings that point at the line of the user."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

import torch

_INSIDE = ("pmaf", "torch")
# The files of programs that torch.compile writes, and that are no modules.
_GENERATED = ("<eval_with_key>", os.path.join(os.path.dirname(torch.__file__), ""))


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the first line outside of this package and of torch.

    The layer may have been called by `nn.Module.__call__`, by a transform or by a backward pass,
    which are frames of torch. In a thread without any other frame the outermost one is taken.
    """
    level, frame = 1, sys._getframe()
    while _is_inside(frame) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_inside(frame: FrameType) -> bool:
    # By module, because other programs that torch.compile writes are files elsewhere.
    module = frame.f_globals.get("__name__") or ""
    inside = module.partition(".")[0] in _INSIDE
    return inside or frame.f_code.co_filename.startswith(_GENERATED)
