"""Triton's language, or names that stand for it where Triton is missing.

Every file of kernels imports from here, so that tools which import all files do so anywhere.
"""

from types import SimpleNamespace
from typing import Any


def _nothing(function: Any) -> Any:
    """A kernel that nobody can launch."""
    return function


try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    available = True
except ImportError:
    triton: Any = SimpleNamespace(jit=_nothing)
    tl: Any = SimpleNamespace(constexpr=int)
    available = False

jit: Any = triton.jit


@jit
def touch(x):
    """The smallest kernel, to ask whether any compiles."""
    tl.store(x, 0.0)


__all__ = ["available", "jit", "tl", "touch"]
