"""Triton's language, or names that stand for it where Triton is missing.

Every file of kernels imports from here, so that tools which import all files do so anywhere.
"""

import importlib
from types import SimpleNamespace
from typing import Any


def _nothing(function: Any = None, **options: Any) -> Any:
    """What decorates a kernel that nobody can launch."""
    return _nothing if function is None else function


# By name, because the types that Triton gives to tiles in Python are not those that they have.
try:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
    available = True
except ImportError:
    triton = SimpleNamespace(jit=_nothing)
    tl = SimpleNamespace(constexpr=int)
    available = False

# For what kernels call.
jit: Any = triton.jit
# For kernels. They are compiled once for a size of matrices, and not again for a batch of one, or
# of a multiple of sixteen.
kernel: Any = triton.jit(
    do_not_specialize=("count", "size", "b_size", "l_size", "v_size", "w_size")
)


@kernel
def touch(x):
    """The smallest kernel, to ask whether any compiles."""
    tl.store(x, 0.0)


__all__ = ["available", "jit", "kernel", "tl", "touch"]
