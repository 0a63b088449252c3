"""The device itself: its tensors, and what serves calls that make some without having one."""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._mode_utils import no_dispatch

from pmaf.linalg.roundings import WITHOUT_DOUBLE, has_double
from pmaf.runtime.modes import take_as_numbers
from tests.pretend import costs, tf32
from tests.pretend.counts import active, add, capturing
from tests.pretend.rules import copies_to_meet

NAME = "pretend"
_CPU = torch.device("cpu")
_DOUBLES = (torch.float64, torch.complex128)


class _Module(backend_registration._DummyBackendModule):
    """What torch asks a device for by name, as `torch.cuda` for CUDA."""

    def get_rng_state(self, *_: object) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, *_: object) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def _register() -> torch.device:
    """Make the device known to torch, once in a process."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    return torch.device(NAME, 0)


DEVICE = _register()


class Pretend(Tensor):
    """A tensor on the device; `inner` has its numbers, on the CPU."""

    inner: Tensor  # pyright: ignore (the method of this name is `torch.inner`, too)

    @staticmethod
    def __new__(cls, inner: Tensor) -> Pretend:
        options: dict[str, Any] = {"dtype": inner.dtype, "layout": inner.layout, "device": DEVICE}
        if inner.layout == torch.strided:
            options |= {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        elif inner.layout != torch.sparse_coo:
            options["layout"] = torch.strided  # torch has no wrappers of CSR; see `layout`
        self = Tensor._make_wrapper_subclass(cls, inner.shape, **options)
        torch._C._set_conj(self, inner.is_conj())
        torch._C._set_neg(self, inner.is_neg())
        self.inner = inner
        return self

    # Functions of torch treat it as a tensor, and do not ask the class first.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore
    layout = property(lambda self: self.inner.layout)  # pyright: ignore

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("aten", "prims", "prim"):
            return _run(func, args, kwargs)
        # An operator of the library is a function of Python, which runs on tensors of the device.
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
        return func.redispatch(keys, *args, **kwargs)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() to copy the "
            "tensor to host memory first."
        )

    def data_ptr(self) -> int:
        raise RuntimeError("memory of the device is asked for, which only a kernel there can use")

    def __deepcopy__(self, memo: dict[int, Any]) -> Pretend:
        found = put(self).requires_grad_(self.requires_grad)
        found._is_param = getattr(self, "_is_param", False)  # pyright: ignore
        return memo.setdefault(id(self), found)

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"Pretend({tuple(self.shape)}, {self.dtype}{grad})"


take_as_numbers(Pretend)


# The device's thread of the autograd engine releases its last tensors after a backward pass has
# ended, and torch aborts the process if the interpreter is being finalized by then.
atexit.register(time.sleep, 0.2)


def put(x: Tensor) -> Pretend:
    """A copy of the tensor on the device; it is not counted, and autograd does not record it."""
    return _wrapped(on_host(x).clone())


def on_host(x: Tensor) -> Tensor:
    """The numbers of a tensor of any device; this is not counted."""
    return x.inner.detach() if isinstance(x, Pretend) else x.detach()


@contextmanager
def options(*, doubles: bool = True, capture: bool = False) -> Iterator[None]:
    """What the device can do in this context.

    Args:
        doubles: whether it has float64 and complex128; MPS has none, and raises a TypeError.
        capture: whether a CUDA graph is captured, in which the host must not wait.
    """
    before = has_double(DEVICE)
    take_doubles(not doubles)
    try:
        with capturing(capture):
            yield
    finally:
        take_doubles(not before)


def take_doubles(away: bool = True) -> None:
    """Let the device be without float64, or give it back."""
    if away:
        WITHOUT_DOUBLE.add(NAME)
    else:
        WITHOUT_DOUBLE.discard(NAME)


# How calls run.


class _Known(NamedTuple):
    """What does not change from one use of an ATen call to the next."""

    name: str
    views: bool  # the result shares memory with the first argument
    reshapes: bool  # the first argument gets another shape
    silent: bool  # it starts nothing, and the host does not wait
    random: bool  # it takes a generator
    composite: bool  # it is made of other calls; torch takes it apart, but not in inference mode


@functools.cache
def _known(func: Any) -> _Known:
    name: str = func._schema.name.partition("::")[2]
    return _Known(
        name,
        func.is_view,
        torch.Tag.inplace_view in func.tags,
        func.is_view or name in costs.FREE,
        any(x.name == "generator" for x in func._schema.arguments),
        # The parts of sparse tensors have such a kernel for tensors that have none.
        name not in costs.FREE and _is_composite(func.name()),
    )


def _is_composite(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """One ATen call, some of whose tensors are on the device."""
    known = _known(func)
    if known.composite:
        return func.decompose(*args, **kwargs)
    tensors: list[Tensor] = []
    inner_args = [_inside(x, tensors) for x in args]
    inner_kwargs = {name: _inside(x, tensors) for name, x in kwargs.items()}
    here = [x for x in tensors if isinstance(x, Pretend)]
    if len(here) < len(tensors):
        add("copy", known.name, copies_to_meet(func, args, Pretend, tensors))
    if known.random:
        _require_generator_of_device(known.name, kwargs)
    there = True
    if (wanted := kwargs.get("device")) is not None:
        there = torch.device(wanted).type == NAME
        if there:
            inner_kwargs["device"] = _CPU
    if known.name in tf32.PRODUCTS and tf32.allowed():
        inner_args[-2:] = map(tf32.rounded, inner_args[-2:])
    found = func(*inner_args, **inner_kwargs)
    if known.reshapes:
        with no_dispatch():  # the wrapper gets its new shape as well
            return func(*args, **kwargs)
    if not known.silent and active():
        _count(known.name, args, tensors, there, found)

    def wrapped(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return [wrapped(y) for y in x] if isinstance(x, list | tuple) else x
        for y in here:
            if y.inner is x:
                if y.shape != x.shape:
                    raise NotImplementedError(f"{func} changes the shape of a tensor in place")
                return y
        if not there or any(x is y for y in tensors):
            return x
        if known.views and not tensors[0].is_inference():
            # In inference mode, a view of a tensor from outside is none of its tensors.
            with torch.inference_mode(False):
                return _wrapped(x)
        return _wrapped(x)

    return tuple(map(wrapped, found)) if isinstance(found, tuple) else wrapped(found)


def _inside(x: Any, tensors: list[Tensor]) -> Any:
    """An argument for the CPU; its tensors, as they are outside, are appended to a list."""
    if isinstance(x, Tensor):
        tensors.append(x)
        return x.inner if isinstance(x, Pretend) else x
    if isinstance(x, list | tuple):
        return [_inside(y, tensors) for y in x]
    return x


def _wrapped(x: Tensor) -> Pretend:
    if x.dtype in _DOUBLES and not has_double(DEVICE):
        raise TypeError(
            f"Cannot convert a MPS Tensor to {x.dtype} dtype as the MPS framework doesn't support "
            "float64. Please use float32 instead."
        )
    return Pretend(x)


def _count(name: str, args: Sequence[Any], tensors: list[Tensor], there: bool, found: Any) -> None:
    """Count what a call costs that has run."""
    if name in ("copy_", "_to_copy", "_copy_from"):
        _count_copy(name, tensors, there, found)
        return
    results = [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]
    add("wait", name, costs.waits(name, args))
    if results and all(x.numel() == 0 for x in results):
        return  # no kernel is started for nothing
    add("launch", name, costs.launches(name, args))
    if name in costs.DECOMPOSITIONS:
        short = name.lstrip("_").replace("linalg_", "")
        add("linalg", short, costs.calls(name, tensors[0]))


def _count_copy(name: str, tensors: list[Tensor], there: bool, found: Any) -> None:
    target, source = (tensors[0], tensors[1]) if name == "copy_" else (found, tensors[0])
    to_device = isinstance(target, Pretend) if name == "copy_" else there
    if isinstance(source, Pretend) and not to_device:
        add("wait", f"{name} to the host")
    elif not isinstance(source, Pretend) and to_device:
        add("copy", f"{name} from the host")
    elif name == "copy_" or source.dtype != found.dtype:
        add("launch", name)  # else it is a `to` the device on which the tensor is


def _require_generator_of_device(name: str, kwargs: dict[str, Any]) -> None:
    """Torch's own error for a generator of another device; this device has none but the default."""
    generator = kwargs.get("generator")
    if isinstance(generator, torch.Generator) and generator.device.type != NAME:
        raise RuntimeError(
            f"Expected a '{NAME}' device type for generator but found '{generator.device.type}' "
            f"(in {name})"
        )


# Calls without a tensor of the device.


def _serve() -> torch.library.Library:
    """Let all functions of ATen that make a tensor from nothing make one on the device."""
    library = torch.library.Library("aten", "IMPL")
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        base, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if space != "aten" or func is None:
            continue
        arguments = func._schema.arguments
        makes = any(x.name == "device" for x in arguments)
        if (
            makes
            and not _is_composite(full)
            and not any("Tensor" in str(x.type) for x in arguments)
        ):
            library.impl(name, _factory(func), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    return library


def _factory(func: Any) -> Callable[..., Tensor]:
    name: str = func._schema.name.partition("::")[2]
    if name == "_efficientzerotensor":
        # Tangents that are zero have no memory, which wrappers do not know of.
        func = torch.ops.aten.zeros.default

    def make(*args: Any, **kwargs: Any) -> Tensor:
        _require_generator_of_device(name, kwargs)
        kwargs = {**kwargs, "device": _CPU, "pin_memory": None}
        found = _wrapped(func(*args, **kwargs))
        if name not in costs.FREE and active():
            _count(name, args, [], True, found)
        return found

    return make


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """How `torch.tensor(numbers, device=)` copies, where the classes of tensors are not asked."""
    assert isinstance(target, Pretend)
    target.inner.copy_(source)
    add("copy", "_copy_from the host")
    return target


_library = _serve()
