"""LESS beside plain least squares, and the two default solvers beside each other.

    python benchmarks/less_crossover.py [--repeats N] [--json FILE]

The first table has the forward pass beside `torch.linalg.lstsq` and beside the normal equations
with one Cholesky factor, which is the least that any direct method does, and the backward pass
beside the forward one. The second has `Cholesky` beside `Secular` for tall matrices of growing
width: where the default changes from one to the other. Times are medians of runs interleaved
between the competitors; memory is the peak of what the backward pass allocates, as a multiple
of A and b.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import pmaf
from pmaf.experiments.measure import environment, peak_bytes, seconds
from pmaf.experiments.store import write_whole
from pmaf.solvers import Cholesky, Secular

CPU = torch.device("cpu")

# Batch, rows, columns and the length of b: with fewer rows than columns the minimiser is not
# unique for a short one.
SIZES = [
    (1000, 2, 2, 1),
    (1000, 64, 32, 1),
    (256, 128, 64, 1),
    (100, 1024, 256, 1),
    (5, 2048, 1024, 1),
    (256, 8, 64, 1),
    (256, 8, 64, 16),
    (256, 16, 128, 1),
    (256, 16, 128, 16),
]
WIDTHS = [2, 4, 8, 12, 16, 24, 32, 64]


def normal_equations(A: Tensor, b: Tensor) -> Tensor:
    """`A⁺b` from one Cholesky factor of the smaller Gram matrix."""
    if A.shape[-2] >= A.shape[-1]:
        factor, _ = torch.linalg.cholesky_ex(A.mT @ A)
        return torch.cholesky_solve((b.unsqueeze(-2) @ A).mT, factor)
    factor, _ = torch.linalg.cholesky_ex(A @ A.mT)
    return A.mT @ torch.cholesky_solve(b.unsqueeze(-1), factor)


def medians(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Milliseconds of each, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            spent = seconds(run, CPU)
            if repeat:  # the first one warms up
                times[name].append(spent)
    return {name: 1e3 * statistics.median(spent) for name, spent in times.items()}


def gaussian(batch: int, m: int, n: int, length: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(batch, m, n, generator=generator)
    return A, length * torch.randn(batch, m, generator=generator)


def compare(batch: int, m: int, n: int, length: float, repeats: int) -> dict[str, Any]:
    A, b = gaussian(batch, m, n, length)
    leaves = A.clone().requires_grad_(), b.clone().requires_grad_()
    u = pmaf.less(*leaves)
    v = torch.ones_like(u)

    def backward() -> object:
        return torch.autograd.grad(u, leaves, v, retain_graph=True)

    found = medians(
        {
            "lstsq": lambda: torch.linalg.lstsq(A, b.unsqueeze(-1)),
            "normal": lambda: normal_equations(A, b),
            "forward": lambda: pmaf.less(A, b),
            "backward": backward,
        },
        repeats,
    )
    held = (A.numel() + b.numel()) * A.element_size()
    return {
        "size": [batch, m, n],
        "length": length,
        **found,
        "peak": peak_bytes(backward, CPU) / held,
    }


def cross(n: int, repeats: int) -> dict[str, Any]:
    A, b = gaussian(500, 2 * n, n, 1)
    solvers = {"Cholesky": Cholesky(), "Secular": Secular()}
    runs: dict[str, Callable[[], object]] = {
        name: partial(pmaf.less, A, b, solver=solver) for name, solver in solvers.items()
    }
    return {"size": [500, 2 * n, n], **medians(runs, repeats)}


def size_of(row: dict[str, Any]) -> str:
    return "×".join(map(str, row["size"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    console = Console(width=120)

    rows = [compare(*size, options.repeats) for size in SIZES]
    table = Table("size", title="LESS, float32, median ms")
    for column in ("b ×", "lstsq", "normal eq.", "forward", "of lstsq"):
        table.add_column(column, justify="right")
    for column in ("backward", "of forward", "peak / (A, b)"):
        table.add_column(column, justify="right")
    for row in rows:
        lstsq, normal, forward = row["lstsq"], row["normal"], row["forward"]
        table.add_row(
            size_of(row),
            f"{row['length']}",
            *(f"{x:.2f}" for x in (lstsq, normal, forward, forward / lstsq)),
            *(f"{x:.2f}" for x in (row["backward"], row["backward"] / forward, row["peak"])),
        )
    console.print(table)

    crossing = [cross(n, options.repeats) for n in WIDTHS]
    table = Table("size", title="LESS forward by solver, float32, median ms")
    for column in ("Cholesky", "Secular", "Cholesky/Secular"):
        table.add_column(column, justify="right")
    for row in crossing:
        own, other = row["Cholesky"], row["Secular"]
        table.add_row(size_of(row), f"{own:.2f}", f"{other:.2f}", f"{own / other:.2f}")
    console.print(table)
    console.print(environment(CPU))
    if options.json:
        content = {"environment": environment(CPU), "rows": rows + crossing}
        write_whole(options.json, json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
