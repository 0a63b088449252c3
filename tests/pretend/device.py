"""The device itself: its tensors, and what serves calls that make some without having one."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._mode_utils import no_dispatch

from pmaf.runtime.modes import take_as_numbers
from tests.pretend import costs, tf32
from tests.pretend.counts import add, capturing
from tests.pretend.rules import copies_to_meet

NAME = "pretend"
_CPU = torch.device("cpu")
_DOUBLES = (torch.float64, torch.complex128)
_doubles: list[bool] = [True]


def _register() -> torch.device:
    """Make the device known to torch, once in a process."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        backend_registration._setup_privateuseone_for_python_backend(NAME)
    return torch.device(NAME, 0)


DEVICE = _register()


class Pretend(Tensor):
    """A tensor on the device; `inner` has its numbers, on the CPU."""

    inner: Tensor

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
    return x.detach().inner if isinstance(x, Pretend) else x.detach()


@contextmanager
def options(*, doubles: bool = True, capture: bool = False) -> Iterator[None]:
    """What the device can do in this context.

    Args:
        doubles: whether it has float64 and complex128; MPS has none, and raises a TypeError.
        capture: whether a CUDA graph is captured, in which the host must not wait.
    """
    _doubles.append(doubles)
    with ExitStack() as stack:
        stack.callback(_doubles.pop)
        stack.enter_context(capturing(capture))
        yield


# How calls run.


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """One ATen call, some of whose tensors are on the device."""
    name: str = func._schema.name.partition("::")[2]
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    add("copy", name, copies_to_meet(func, args, Pretend, tensors))
    _require_generator_of_device(name, kwargs)
    inside: Any = pytree.tree_map_only(Pretend, lambda x: x.inner, (args, kwargs))
    inner_args, inner_kwargs = inside
    there = True
    if (wanted := kwargs.get("device")) is not None:
        there = torch.device(wanted).type == NAME
        inner_kwargs = {**inner_kwargs, "device": _CPU} if there else inner_kwargs
    if name in tf32.PRODUCTS and tf32.allowed():
        *others, left, right = inner_args
        inner_args = (*others, tf32.rounded(left), tf32.rounded(right))
    found = func(*inner_args, **inner_kwargs)
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():  # the wrapper gets its new shape as well
            return func(*args, **kwargs)
    _count(func, name, args, tensors, there, found)
    known = {id(x.inner): x for x in tensors if isinstance(x, Pretend)}
    # In inference mode, a view of a tensor from outside is none of its tensors.
    outside = func.is_view and not tensors[0].is_inference()

    def wrapped(x: Tensor) -> Tensor:
        if (same := known.get(id(x))) is not None:
            if same.shape != x.shape:
                raise NotImplementedError(f"{func} changes the shape of a tensor in place")
            return same
        if not there or any(x is y for y in tensors):
            return x
        with torch.inference_mode(False) if outside else nullcontext():
            return _wrapped(x)

    return pytree.tree_map_only(Tensor, wrapped, found)


def _wrapped(x: Tensor) -> Pretend:
    if not _doubles[-1] and x.dtype in _DOUBLES:
        raise TypeError(
            f"Cannot convert a MPS Tensor to {x.dtype} dtype as the MPS framework doesn't support "
            "float64. Please use float32 instead."
        )
    return Pretend(x)


def _count(
    func: Any, name: str, args: Sequence[Any], tensors: list[Tensor], there: bool, found: Any
) -> None:
    """Count what a call costs that has run."""
    if name in costs.FREE or func.is_view:
        return
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
        implicit = torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd")
        makes = any(x.name == "device" for x in arguments)
        if makes and not implicit and not any("Tensor" in str(x.type) for x in arguments):
            library.impl(name, _factory(func), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    return library


def _factory(func: Any) -> Callable[..., Tensor]:
    name: str = func._schema.name.partition("::")[2]

    def make(*args: Any, **kwargs: Any) -> Tensor:
        _require_generator_of_device(name, kwargs)
        kwargs = {**kwargs, "device": _CPU, "pin_memory": None}
        found = _wrapped(func(*args, **kwargs))
        _count(func, name, args, [], True, found)
        return found

    return make


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """How `torch.tensor(numbers, device=)` copies, where the classes of tensors are not asked."""
    assert isinstance(target, Pretend)
    target.inner.copy_(source)
    add("copy", "_copy_from the host")
    return target


_library = _serve()
