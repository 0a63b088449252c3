"""Whether torch may leave out digits of the factors of float32 products, and a context without it.

`torch.set_float32_matmul_precision("high")`, `torch.backends.cuda.matmul.allow_tf32` and the
settings `torch.backends.*.fp32_precision` let graphics cards round the factors to TF32, which has
three decimal digits, and some processors to bfloat16, which has two. A network does not notice. An
eigenvector loses its last four digits, and iterations do not converge.

The settings belong to the process. So all threads that are in a layer are counted: the first one
takes the setting of the user away, and the last one brings it back. The settings also depend on
each other: that of products on a device is inherited, if it is "none", from that of the device, and
this from one for all devices. The two kinds of functions that change them write to the same places
and complain about states that only the other kind can reach, so that reading is in a fixed order.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch

# Every call of a layer asks the first of them, so that they are not looked up each time.
matmul_precision: Any = torch._C._get_float32_matmul_precision
_set_matmul_precision: Any = torch._C._set_float32_matmul_precision
_get: Any = torch._C._get_fp32_precision_getter
_set: Any = torch._C._set_fp32_precision_setter
# It is None where torch is built without XPU.
onednn_tf32: Any = torch._C._get_onednn_allow_tf32
HAS_XPU = onednn_tf32() is not None

HIGHEST = "highest"
_BACKENDS = ("cuda", "mkldnn")

# It is odd while a thread is in `exact`, and grows when the first one enters and the last one
# leaves. Whoever finds the same even number before and after a look at the settings knows that
# these are the user's.
turn = 0


class _Settings(NamedTuple):
    """The settings that `exact` changes, as the user has them."""

    matmul: str  # "highest", "high" or "medium"
    products: tuple[str, ...]  # of the backends, where "none" is inherited
    onednn: bool | None


def is_reduced() -> bool:
    """Whether torch may leave out digits, or a thread in `exact` hides that it may."""
    before = turn
    try:
        usual = matmul_precision() == HIGHEST and not (HAS_XPU and onednn_tf32())
    except RuntimeError:  # a state that only `fp32_precision` can reach, and not the usual one
        return True
    return not usual or bool(before & 1) or turn != before


class Exact:
    """A context in which float32 products keep all digits; threads may enter it again and again."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._before: _Settings | None = None

    def __enter__(self) -> None:
        global turn
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                turn += 1
                self._before = _taken()

    def __exit__(self, *error: object) -> None:
        global turn
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                before, self._before = self._before, None
                if before is not None:
                    _bring_back(before)
                turn += 1


exact = Exact()


def _taken() -> _Settings:
    """The settings of the user, which are replaced by those without loss."""
    products = tuple(_own(backend) for backend in _BACKENDS)
    for backend in _BACKENDS:
        _set(backend, "matmul", "ieee")
    matmul = matmul_precision()  # raises no error for these products
    _set_matmul_precision(HIGHEST)  # which leaves "ieee" for the products
    onednn = onednn_tf32()
    if onednn:
        torch._C._set_onednn_allow_tf32(False)
    return _Settings(matmul, products, onednn)


def _own(backend: str) -> str:
    """The setting for products on a backend, "none" if it is inherited."""
    found = _get(backend, "matmul")
    every, whole = _get("generic", "all"), _get(backend, "all")
    if found == "none" or every == whole == "none":
        return found
    # A setting that changes with those above it is inherited. The other one is no less exact.
    other = "none" if whole == "ieee" else "ieee"
    _set("generic", "all", other)
    if _get(backend, "all") == other:
        whole = "none"
    other = "none" if found == "ieee" else "ieee"
    _set("generic", "all", other)
    _set(backend, "all", other)
    inherits = _get(backend, "matmul") == other
    _set(backend, "all", whole)
    _set("generic", "all", every)
    return "none" if inherits else found


def _bring_back(before: _Settings) -> None:
    """The settings as they were, except those that somebody has changed meanwhile.

    A change to "highest" or "ieee" is not seen, because that is what the settings were.
    """
    now = [_get(backend, "matmul") for backend in _BACKENDS]
    for backend in _BACKENDS:
        _set(backend, "matmul", "ieee")
    matmul = matmul_precision()
    products = now
    if matmul == HIGHEST:
        matmul = before.matmul
        products = [was if x == "ieee" else x for was, x in zip(before.products, now)]
    _set_matmul_precision(matmul)
    for backend, x in zip(_BACKENDS, products):
        _set(backend, "matmul", x)
    if before.onednn:
        torch._C._set_onednn_allow_tf32(True)
