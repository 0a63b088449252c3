"""The suite's own tests with the layers on a device: `pytest --device pretend`, or cuda, mps, xpu.

The tests stay as they are. The public functions that solve are wrapped before tests are collected:
tensors of their arguments move to the device, with gradients, and results move back to the CPU.
Tests that cannot mean anything there are skipped, for the reasons below, which the summary lists.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

import pmaf
from pmaf import solving
from pmaf.linalg.roundings import has_double
from pmaf.operators import Operator, Sparse, sparse

_WRAPPED = ("less", "ied", "nullspace", "isvd", "spectral", "solve", "certify")
_METHODS: tuple[tuple[type, str], ...] = (
    (pmaf.PrincipalPool, "forward"),
    (pmaf.Eigenpairs, "projector"),
)
_INSIDE = "pmaf.on_device"
_DOUBLES = (torch.float64, torch.complex128)

KERNELS = "it is about the compiled kernels of the CPU, or about the time of a call"
TRACES = "it is about traces"
SURROUNDINGS = "it is about processes, threads, ranks, modules or the command line"
NO_LAYER = "it does not call a layer, or is about the pretend device itself"
WAY = "it asks which way the CPU takes, in words of logs, reports or errors"
THREAD = "a backward pass on a device runs in a thread of its own, which has no lines of the caller"
NESTED = "the vmap of is_grads_batched does not go around the wrappers of the pretend device"
CLOSURE = "its product or function uses a tensor of the CPU that is none of its operator"

# Files that are left out as a whole.
FILES = {
    **dict.fromkeys(
        (
            *("test_native.py", "test_native_basis.py", "test_native_build.py"),
            *("test_native_complex.py", "test_native_pairs.py", "test_calls.py", "test_walk.py"),
            *("test_bench.py", "test_bench_calls.py", "test_bench_matrix_free.py"),
        ),
        KERNELS,
    ),
    **dict.fromkeys(("test_traces.py", "test_transforms.py"), TRACES),
    **dict.fromkeys(
        ("test_distributed.py", "test_less_ranks.py", "test_surroundings.py", "test_reproduce.py"),
        SURROUNDINGS,
    ),
    **dict.fromkeys(
        (
            *("test_devices.py", "test_pretend.py", "test_house.py", "test_documentation.py"),
            *("test_figures.py", "test_gallery.py", "test_experiments.py", "test_clients.py"),
            "test_order.py",
        ),
        NO_LAYER,
    ),
    **dict.fromkeys(("test_explain.py", "test_recipe.py", "test_reports.py"), WAY),
}
# Parts of `file::test[parameters]`.
TESTS = {
    "test_ied_solution::test_what_is_not_a_problem_or_a_solution": WAY,
    "test_ied_small::test_large_ones_of_ordinary_spectrum_go_on_to_a_krylov_space": WAY,
    "test_less_errors::test_wrong_arguments[arguments9-": WAY,
    "test_nonfinite::test_one_class_of_errors[products-": CLOSURE,
    "test_spectral::TestGroups::test_gradients_of_eigenvectors_in_batches": NESTED,
    "test_singular::test_modules_are_the_functions": "a module calls a layer that is not wrapped",
    "test_singular::test_which_way_is_taken": WAY,
    "test_singular::test_which_way_is_differentiated": WAY,
    "test_spectral::TestGroups::test_both_ways_agree[450-[3.0, 2.5, 2.0]": WAY,
    "test_projector::test_derivatives_of_the_product_of_both_sides": THREAD,
    "test_force::test_solutions_are_stationary[products]": CLOSURE,
    "test_singular::test_the_spectral_norm_of_a_convolution": CLOSURE,
    "test_spectral::TestProducts::test_they_are_their_matrices": CLOSURE,
    "test_spectral::TestParameters::test_in_any_mode": CLOSURE,
    "test_spectral::TestParameters::test_a_module_inside_a_module_compiled": TRACES,
}


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("devices")
    group.addoption("--device", help="solve on this device: pretend, cuda, mps or xpu")
    group.addoption("--tf32", action="store_true", help="allow products in TF32 there")
    group.addoption("--no-doubles", action="store_true", help="a pretend device without float64")
    group.addoption(
        "--default-device", action="store_true", help="the device is torch's default inside calls"
    )


class _Running(threading.local):
    inside = False  # of a call on the device


_running = _Running()


class OnDevice:
    """The plugin that `--device` installs."""

    def __init__(self, config: pytest.Config) -> None:
        name = str(config.getoption("--device"))
        if name == "pretend":
            from tests import pretend  # makes the device known to torch

            if config.getoption("--no-doubles"):
                pretend.take_doubles()
        self.device = torch.device(name)
        self.default = bool(config.getoption("--default-device"))
        self.doubles = has_double(self.device)
        self.skipped: Counter[str] = Counter()
        if config.getoption("--tf32"):
            torch.set_float32_matmul_precision("high")
        self._wrap_layers()

    def _wrap_layers(self) -> None:
        """Put wrappers wherever a module of the library has one of the functions by name."""
        for name in _WRAPPED:
            function = getattr(pmaf, name)
            wrapper = self._wrapped(function)
            for module in [*sys.modules.values()]:
                # Inside of the library, `solving.solve` calls nothing that is wrapped.
                mine = getattr(module, "__name__", "").partition(".")[0] == "pmaf"
                if mine and module is not solving and vars(module).get(name) is function:
                    setattr(module, name, wrapper)
        for kind, name in _METHODS:
            setattr(kind, name, self._wrapped(getattr(kind, name)))

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def on_device(*args: Any, **kwargs: Any) -> Any:
            # Traces have tests of their own, and layers call layers.
            if is_compiling() or _running.inside:
                return function(*args, **kwargs)
            args = tuple(map(self.moved, args))
            kwargs = {name: self.moved(x) for name, x in kwargs.items()}
            default = torch.device(self.device) if self.default else nullcontext()
            _running.inside = True
            try:
                with default:
                    found = function(*args, **kwargs)
            finally:
                _running.inside = False
            return changed(found, _returned)

        # Warnings point at the first line outside of the library, to which this frame then belongs.
        # Traces look for the module.
        names = {**globals(), "__name__": _INSIDE}
        sys.modules[_INSIDE] = sys.modules[__name__]
        inside = FunctionType(on_device.__code__, names, closure=on_device.__closure__)
        return functools.wraps(function)(inside)

    def moved(self, x: Any) -> Any:
        """An argument with its tensors on the device."""
        return changed(x, self._sent)

    def _sent(self, x: Tensor) -> Tensor:
        if not _is_of_cpu(x):
            return x
        origin, version = getattr(x, "_on_device", (None, 0))
        if origin is not None and not x.is_inference() and x._version == version:
            return origin
        if not self.doubles and x.dtype in _DOUBLES:
            pytest.skip("the device has no float64")
        return x.to(self.device)

    # Hooks of pytest.

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            reason = reason_against(item)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section(f"on {self.device}")
        for reason, count in self.skipped.most_common():
            terminalreporter.line(f"{count:5d} skipped: {reason}")


def reason_against(item: pytest.Item) -> str | None:
    """Why a test makes no sense with layers on a device."""
    path = Path(str(item.path))
    if (reason := FILES.get(path.name)) is not None:
        return reason
    name = f"{path.stem}::" + item.nodeid.partition("::")[2]
    return next((reason for part, reason in TESTS.items() if name.startswith(part)), None)


def changed(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """An argument or a result with all its tensors changed, operators' and problems' included."""
    if isinstance(x, nn.Module | type):
        return x
    if isinstance(x, Tensor):
        if x.layout == torch.sparse_csr and x.requires_grad:
            # The pretend device's tensors in CSR are strided to C++, which refuses the gradient.
            return changed(Sparse(x), change)
        return change(x)
    if isinstance(x, torch.device):
        return change(torch.empty(0, device=x)).device
    if isinstance(x, Operator | sparse._Pattern):
        # `with_tensors` is for those that have gradients, and leaves a pattern where it is.
        found = object.__new__(type(x))
        vars(found).update({name: changed(y, change) for name, y in vars(x).items()})
        return found
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(changed(y, change) for y in x))
    if isinstance(x, list | tuple):
        return type(x)(changed(y, change) for y in x)
    if isinstance(x, dict):  # what an operator remembers, for one
        return {name: changed(y, change) for name, y in x.items()}
    if isinstance(x, pmaf.Problem):
        return x.changed(**_changed_fields(x, change))
    if isinstance(x, pmaf.Solution | pmaf.Certificate):
        found = object.__new__(type(x))
        vars(found).update({**vars(x), **_changed_fields(x, change)})
        return found
    return x


def _changed_fields(x: Any, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    assert is_dataclass(x)
    values = {field.name: getattr(x, field.name) for field in fields(x)}
    return {
        name: changed(value, change)
        for name, value in values.items()
        if isinstance(value, Tensor | Operator)
    }


def _is_of_cpu(x: Tensor) -> bool:
    """Whether a tensor has numbers on the CPU, perhaps inside of a transform."""
    inside = x
    while torch._C._functorch.is_functorch_wrapped_tensor(inside):  # pyright: ignore
        inside = torch._C._functorch.get_unwrapped(inside)  # pyright: ignore
    return type(inside) in (Tensor, nn.Parameter) and inside.device.type == "cpu"


def _returned(x: Tensor) -> Tensor:
    """A result on the CPU, which remembers where it comes from.

    The methods of results ask how a layer has made its tensors, of which a copy does not know.
    """
    found = x.cpu()
    if found is not x and type(found) is Tensor and not found.is_inference():
        found._on_device = x, found._version  # pyright: ignore
    return found


def install(config: pytest.Config) -> None:
    """Called when pytest is configured, before it imports the tests."""
    if config.getoption("--device") is not None:
        config.pluginmanager.register(OnDevice(config), "on_device")
