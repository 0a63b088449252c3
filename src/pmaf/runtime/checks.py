"""Whether the host waits for a device, to look at what a solve proves of its result."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor


class checks:  # noqa: N801 (a function that is also a context, as torch.no_grad is)
    """Whether calls on a device look at their results: `"always"`, or `"never"`.

    A call on a device asks it one question, at its end: whether the result is finite and proved.
    For the answer the host waits, so that nothing can be enqueued ahead, and a CUDA graph cannot be
    captured. With `"never"` nobody asks. An entry whose result is not proved is nan then, instead
    of being solved in another way, and inputs that are not finite raise no error. Inside of the
    capture of a CUDA graph it is always `"never"`. Decompositions of torch still ask on their own.

    It is a context, or, called alone, holds until the next call, in this thread. On the CPU, where
    nobody waits, everything is looked at.

    >>> import pmaf
    >>> with pmaf.checks("never"):
    ...     pass
    """

    def __init__(self, when: str) -> None:
        if when not in ("always", "never"):
            raise ValueError(f"checks are made 'always' or 'never'; got {when!r}")
        self.before = is_asked()
        _STATE.asked = when == "always"

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        _STATE.asked = self.before


class _State(threading.local):
    asked = True


_STATE = _State()


def is_asked() -> bool:
    """Whether this thread looks at results."""
    return _STATE.asked


def looks(x: Tensor) -> bool:
    """Whether the host looks at numbers of a result on this device."""
    if x.is_cpu:
        return True
    if not _STATE.asked:
        return False
    if not x.is_cuda or not torch.cuda.is_initialized():
        return True
    return not torch.cuda.is_current_stream_capturing()
