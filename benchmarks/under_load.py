"""Many small problems beside a process that keeps a core busy, as on a machine with data loaders.

    python benchmarks/under_load.py

Prints the median time of each solve beside that of what torch has for a similar task, first on
a machine left alone and then with one busy process for each core but one.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable

import torch

import pmaf

RUNS = 9


def spin() -> None:
    while True:
        pass


def median(call: Callable[[], object]) -> float:
    """Milliseconds."""
    call()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def both_passes(call: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Callable[[], object]:
    """Without a loss: beside a busy process, torch's own sum of 40,000 numbers takes up to 8 ms."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    incoming = torch.ones_like(call(*leaves))
    return lambda: torch.autograd.grad(call(*leaves), leaves, incoming)


def report(where: str) -> None:
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(10_000, 6, 4, generator=generator)
    b = torch.randn(10_000, 6, generator=generator)
    S = torch.randn(1_000, 3, 3, generator=generator)
    S = S + S.mT
    R = torch.randn(1_000, 9, 9, generator=generator)
    R = R + R.mT
    C, d = torch.randn(200, 64, 32, generator=generator), torch.randn(200, 64, generator=generator)
    rows = {
        "less, 10,000 of 6×4": lambda: pmaf.less(A, b),
        "  torch.linalg.lstsq": lambda: torch.linalg.lstsq(A, b.unsqueeze(-1)),
        "less, both passes": both_passes(pmaf.less, A, b),
        "ied, 1,000 of 3×3": lambda: pmaf.ied(S),
        "  torch.linalg.eigh": lambda: torch.linalg.eigh(S),
        "ied, both passes": both_passes(lambda S: pmaf.ied(S).vectors, S),
        "ied, 1,000 of 9×9": lambda: pmaf.ied(R),
        "  both passes": both_passes(lambda R: pmaf.ied(R).vectors, R),
        "less, 200 of 64×32": lambda: pmaf.less(C, d),
        "  both passes ": both_passes(pmaf.less, C, d),
    }
    print(f"\n{where}, {torch.get_num_threads()} threads")
    for name, call in rows.items():
        print(f"  {name:24} {median(call):9.2f} ms")


if __name__ == "__main__":
    report("alone")
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=spin, daemon=True) for _ in range(max(1, (os.cpu_count() or 2) - 1))
    ]
    for process in others:
        process.start()
    try:
        report(f"beside {len(others)} busy processes")
    finally:
        for process in others:
            process.terminate()
