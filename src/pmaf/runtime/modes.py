"""Tests whether a call is traced, transformed or under autocast."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from pmaf.runtime import precision


def plain(x: Tensor) -> bool:
    """Whether the call is not traced, transformed or intercepted, and `x` contains numbers.

    Such a call needs no opaque operator around operations that depend on data.
    """
    return (
        not is_compiling()
        and type(x) in _NUMBERS
        and _current_level() is None
        and not _len_torch_dispatch_stack()
        # The vmap of `torch.autograd.grad(is_grads_batched=True)` is not one of `torch.func`.
        and not is_grads_batch(x)
        and not x.is_meta
    )


def take_as_numbers(kind: type[Tensor]) -> None:
    """Treat tensors of a class as plain ones, for the rest of the process.

    A subclass of `Tensor` may be anything, a trace for example, so that layers leave everything
    that depends on numbers to opaque operators. This is for a class whose tensors always have
    numbers, and which computes as torch does: the tensors of a device that is written in Python.
    """
    global _NUMBERS
    if kind not in _NUMBERS:
        _NUMBERS = (*_NUMBERS, kind)


def has_numbers(x: Tensor) -> bool:
    """Whether the class of `x` is known for tensors of numbers, which no trace or transform has."""
    return type(x) in _NUMBERS


# Every call of a layer asks `plain`, so that these are not looked up in their modules each time. A
# tuple of few classes is searched faster than a set.
_NUMBERS: tuple[type[Tensor], ...] = (Tensor, nn.Parameter)
_current_level: Any = torch._C._functorch.maybe_current_level  # pyright: ignore
is_grads_batch: Any = torch._C._functorch.is_legacy_batchedtensor  # pyright: ignore


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast, in which float32 products keep all digits.

    Where neither is necessary, which is usual, it costs one look at each.
    """
    # Meta tensors have no numbers, and torch knows no autocast for them.
    cast = device.type != "meta" and _is_autocast_enabled(device.type)
    if is_compiling():  # a trace has no numbers, and the operators in it come here when they run
        return torch.autocast(device.type, enabled=False) if cast else _NOTHING
    # This is `precision.is_reduced`, without another call.
    before = precision.turn
    try:
        exact = _matmul_precision() == precision.HIGHEST and not before & 1
    except RuntimeError:
        exact = False
    if exact and precision.turn == before and not (precision.HAS_XPU and precision.onednn_tf32()):
        return torch.autocast(device.type, enabled=False) if cast else _NOTHING
    return _Both(device.type) if cast else precision.exact


class _Both:
    """A context without autocast and without TF32."""

    def __init__(self, kind: str) -> None:
        self.cast = torch.autocast(kind, enabled=False)

    def __enter__(self) -> None:
        precision.exact.__enter__()
        self.cast.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self.cast.__exit__(*error)
        finally:
            precision.exact.__exit__(*error)


_NOTHING = nullcontext()
_is_autocast_enabled = torch.is_autocast_enabled
_matmul_precision = precision.matmul_precision


def require_eager(what: str, instead: str, x: Tensor) -> None:
    """The call is not traced or transformed, and `x` contains numbers."""
    abstract = x.is_meta or isinstance(x, torch._subclasses.FakeTensor)
    if torch.compiler.is_compiling() or transformed() or abstract:
        raise RuntimeError(
            f"{what} runs in eager mode only, not under torch.compile or the transforms of "
            f"torch.func, nor on fake tensors; use {instead}"
        )


def forward_mode(*tensors: Any) -> bool:
    """Whether one of the tensors has a tangent, or a transform around the call may give it one.

    All threads share the level of `forward_ad`, so that the level alone is not enough.
    """
    if forward_ad._current_level < 0:
        return False
    if torch.compiler.is_compiling():
        return True  # a trace belongs to one thread
    if torch._C._functorch.maybe_current_level() is not None:  # pyright: ignore
        stack = torch._C._functorch.get_interpreter_stack() or ()  # pyright: ignore
        kind = torch._C._functorch.TransformType.Jvp  # pyright: ignore
        if any(transform.key() == kind for transform in stack):
            return True
    return any(isinstance(x, Tensor) and _has_tangent(x) for x in tensors)


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(unwrapped(x)).tangent is not None


def unwrapped(x: Tensor) -> Tensor:
    """The tensor inside of the wrappers of all transforms."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):  # pyright: ignore
        x = torch._C._functorch.get_unwrapped(x)  # pyright: ignore
    return x


def recorded(x: Tensor) -> bool:
    """Whether autograd records `x`, inside or outside of the transforms around the call."""
    while transformed() and torch._C._functorch.is_functorch_wrapped_tensor(x):  # pyright: ignore
        if x.requires_grad:
            return True
        x = torch._C._functorch.get_unwrapped(x)  # pyright: ignore
    return x.requires_grad


def transformed() -> bool:
    """Whether the call is inside a transform of `torch.func`, and not traced."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.maybe_current_level() is not None  # pyright: ignore


_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_in_traces(function: _Function) -> _Function:
    """Mark a function whose result a trace takes as it is, without following how it is found.

    This is `torch.compiler.assume_constant_result`, which also imports the compiler, and that takes
    longer than importing torch and this library together.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def untraced(function: _Function) -> _Function:
    """The function as a trace leaves it alone; `torch.compiler.disable`, if there is a compiler.

    Nothing is traced before the compiler is imported, and the decorator would import it.
    """
    if is_compiling() or "torch._dynamo" in sys.modules:
        return torch.compiler.disable(function)  # pyright: ignore[reportReturnType]
    return function


@constant_in_traces
def derivatives_around() -> int:
    """How many transforms of `torch.func` around the call differentiate it."""
    kinds = torch._C._functorch.TransformType  # pyright: ignore
    stack = torch._C._functorch.get_interpreter_stack() or ()  # pyright: ignore
    return sum(transform.key() in (kinds.Jvp, kinds.Grad) for transform in stack)


def require_traceable_derivatives() -> None:
    """A trace does not contain second derivatives by `torch.func`.

    A trace of torch 2.13 records the backward pass of a `Function` without gradients, so that
    the second derivative would be zero.
    """
    if torch.compiler.is_compiling() and derivatives_around() > 1:
        raise RuntimeError(
            "torch.compile cannot trace second derivatives of this layer by torch.func; compile "
            "the layer, and differentiate outside of torch.compile"
        )


def transforms_around(x: Tensor) -> int:
    """How often a call may be differentiated: transforms, a tangent, and autograd outside of all.

    Autograd counts once, if it records; around a trace it may.
    """
    count = derivatives_around()
    if torch.compiler.is_compiling():
        return max(count, 1) + 1
    while torch._C._functorch.is_functorch_wrapped_tensor(x):  # pyright: ignore
        x = torch._C._functorch.get_unwrapped(x)  # pyright: ignore
    return count + (forward_ad.unpack_dual(x).tangent is not None) + x.requires_grad
