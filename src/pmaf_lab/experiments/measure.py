"""Times, peak memory, and the environment they were measured in."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def seconds(
    run: Callable[[], object],
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Wall-clock time of one call, without Python's garbage collector, as in `timeit`.

    With `clock=time.process_time` it is the processor's, which other processes do not change.

    A collection takes 0.1 s beside the libraries of the races, and competitors that take turns
    allocate in the same order again and again, so that it comes in the turn of the same one.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        _synchronise(device)
        start = clock()
        run()
        _synchronise(device)
        return clock() - start
    finally:
        if collects:
            gc.enable()


def median_seconds(
    run: Callable[[], object],
    device: torch.device,
    *,
    budget: float = 1.0,
    repeats: int = 30,
) -> float:
    """Median of up to `repeats` calls, as many as fit in `budget` seconds, at least one.

    Not `torch.utils.benchmark`: its timer sets the number of threads, after which batched
    LU decompositions fail in the build of torch these figures were first taken with.
    """
    times: list[float] = []
    while not times or (len(times) < repeats and sum(times) < budget):
        times.append(seconds(run, device))
    return statistics.median(times)


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most that one call holds at a time beyond what was there before.

    On the CPU from torch's record of every allocation, so what a library allocates
    behind torch's back is not in it.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    peak = current = 0
    events: list[Any] = record.profiler.kineto_results.events()  # pyright: ignore
    for event in events:
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    return peak


def peak_resident() -> int | None:
    """The most memory this process has held so far, None where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def free_memory() -> int | None:
    """Bytes of the machine's memory that are free to use, None where it does not say."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    (line,) = (line for line in text.splitlines() if line.startswith("MemAvailable"))
    return 1024 * int(line.split()[1])


def environment(device: torch.device) -> dict[str, Any]:
    """The versions and the machine behind a measurement."""
    import pmaf

    found: dict[str, Any] = {
        "pmaf": pmaf.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found["memory"] = f"{total / 2**30:.0f} GiB"
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
