"""What the benchmarks share: times, peak memory, the environment, safe writing."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def seconds(run: Callable[[], object], device: str = "cpu") -> float:
    """Wall-clock time of one call."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_bytes(run: Callable[[], object]) -> int:
    """Peak of the CPU allocations of one call, from the record of every allocation."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    peak = current = 0
    events: list[Any] = record.profiler.kineto_results.events()  # pyright: ignore
    for event in events:
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    return peak


def environment() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


def write_json(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows and environment, whole or not at all."""
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))
    temporary.replace(path)
