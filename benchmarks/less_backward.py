"""Backward pass of LESS: ours beside the paper's two ways of building 𝓑 (its Table 2).

    python benchmarks/less_backward.py [--repeats N] [--json FILE]

Times are medians of runs interleaved between the rules; memory is the peak of what the
backward pass allocates, as torch's own profiler sees it, as a multiple of A.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from _measure import environment, peak_bytes, seconds, write_json
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import pmaf
from pmaf.gradients import DDN, Gradient, Implicit

SIZES = [(256, 8, 64), (256, 16, 128)]
RULES: dict[str, Gradient] = {
    "𝓑 by autodiff": DDN(exploit=False),
    "𝓑 by structure": DDN(exploit=True),
    "ours": Implicit(),
}


def backward(A: torch.Tensor, b: torch.Tensor, rule: Gradient) -> Callable[[], object]:
    """A call that runs the backward pass alone, as often as it is called."""
    u = pmaf.less(A, b, gradient=rule)
    v = torch.ones_like(u)
    return lambda: torch.autograd.grad(u, (A, b), v, retain_graph=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    console = Console()
    rows = []
    with Progress(console=console) as progress:
        task = progress.add_task("Backward passes", total=len(SIZES) * options.repeats)
        for batch, m, n in SIZES:
            generator = torch.Generator().manual_seed(0)
            A = torch.randn(batch, m, n, generator=generator).requires_grad_()
            # Long enough for ‖A⁺b‖ > 1: otherwise, with fewer rows than columns, the
            # minimiser is not unique and there is no gradient to compare.
            b = (16 * torch.randn(batch, m, generator=generator)).requires_grad_()
            runs = {name: backward(A, b, rule) for name, rule in RULES.items()}
            times: dict[str, list[float]] = {name: [] for name in runs}
            for name, run in runs.items():
                if name != "𝓑 by autodiff":
                    run()  # warm up
            for repeat in range(options.repeats):
                for name, run in runs.items():
                    # Autodiff takes seconds, which three runs measure well enough.
                    if name != "𝓑 by autodiff" or repeat < 3:
                        times[name].append(seconds(run))
                progress.advance(task)
            reference = runs["ours"]()
            for name, run in runs.items():
                found = run()
                error = max(
                    float((x - y).abs().max() / y.abs().max())
                    for x, y in zip(found, reference)  # pyright: ignore
                )
                rows.append(
                    {
                        "size": [batch, m, n],
                        "rule": name,
                        "milliseconds": 1e3 * statistics.median(times[name]),
                        "peak_over_A": peak_bytes(run) / (A.numel() * A.element_size()),
                        "difference_to_ours": error,
                    }
                )
    table = Table("size", "rule", title="LESS backward, float32")
    for column in ("median ms", "slower than ours", "peak memory / A", "difference"):
        table.add_column(column, justify="right")
    for row in rows:
        ours = next(r for r in rows if r["size"] == row["size"] and r["rule"] == "ours")
        table.add_row(
            "×".join(map(str, row["size"])),
            row["rule"],
            f"{row['milliseconds']:.2f}",
            f"{row['milliseconds'] / ours['milliseconds']:,.1f}×",
            f"{row['peak_over_A']:.2f}",
            f"{row['difference_to_ours']:.0e}",
        )
    console.print(table)
    console.print(environment())
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
