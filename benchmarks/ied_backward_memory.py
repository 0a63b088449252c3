"""Peak extra memory of the backward pass of IED at the paper's largest size, 5×1024.

python benchmarks/ied_backward_memory.py [--json FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from _measure import environment, peak_bytes, write_json
from rich.console import Console
from rich.progress import track
from rich.table import Table

import pmaf
from pmaf.paper.ied import METHODS, Method, matrices
from pmaf.solvers import Auto

CASES = [("ours", True), ("ours", False), ("PI-DDN-E", True), ("PI-IFT-E", True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    rows = []
    for name, symmetric in track(CASES, "Backward passes"):
        A = matrices(1024, symmetric=symmetric).requires_grad_()
        method = METHODS.get(name, Method(Auto(), pmaf.gradients.Implicit()))
        values, vectors = method(A, symmetric)
        loss = vectors.sum() + values.sum()
        peak = peak_bytes(lambda loss=loss, A=A: torch.autograd.grad(loss, A, retain_graph=True))
        rows.append(
            {
                "method": name,
                "symmetric": symmetric,
                "megabytes": peak / 2**20,
                "peak_over_A": peak / (A.numel() * A.element_size()),
            }
        )
    table = Table("method", "matrix", title="IED backward, 5×1024, float32")
    table.add_column("peak MB", justify="right")
    table.add_column("peak / A", justify="right")
    for row in rows:
        kind = "symmetric" if row["symmetric"] else "nonsymmetric"
        table.add_row(row["method"], kind, f"{row['megabytes']:.1f}", f"{row['peak_over_A']:.2f}")
    console = Console()
    console.print(table)
    console.print(environment())
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
