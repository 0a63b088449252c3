"""Precision of the eigenvector solvers on the paper's data: eigen distance and FPD.

    python benchmarks/ied_precision.py [--seeds N] [--json FILE]

Means over seeds and a batch of five; evaluated in float64, so that what is compared is
the solution and not the rounding of the measure. Nonsymmetric matrices leave out eigh,
which decomposes another matrix.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from _measure import environment, write_json
from rich.console import Console
from rich.progress import track
from rich.table import Table

import pmaf
from pmaf.metrics import eigen_distance, fixed_point_distance
from pmaf.paper.ied import PI, SI, matrices
from pmaf.solvers import Auto, Dense, Solver

SIZES = [32, 64, 128, 256, 512]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    rows = []
    cells = [
        (dtype, symmetric, n)
        for dtype in (torch.float32, torch.float64)
        for symmetric in (True, False)
        for n in SIZES
    ]
    for dtype, symmetric, n in track(cells, "Matrices"):
        solvers: dict[str, Solver] = {"eigh": Dense(), "PI": PI, "SI": SI, "ours": Auto()}
        if not symmetric:
            solvers.pop("eigh")
        if n > 256:
            solvers.pop("SI")  # a full QR of every iterate: minutes
        for name, solver in solvers.items():
            distances = []
            for seed in range(options.seeds):
                A = matrices(n, seed, symmetric=symmetric, dtype=dtype)
                value, y = (x.double() for x in pmaf.ied(A, symmetric=symmetric, solver=solver))
                A = A.double()
                distances.append(
                    torch.stack([eigen_distance(A, value, y), fixed_point_distance(A, y)])
                )
            eigen, fixed = torch.cat(distances, -1).mean(-1).tolist()
            rows.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "symmetric": symmetric,
                    "n": n,
                    "solver": name,
                    "eigen_distance": eigen,
                    "fixed_point_distance": fixed,
                }
            )
    table = Table("dtype", "matrix", "n", title="Mean eigen distance / fixed-point distance")
    names = ["eigh", "PI", "SI", "ours"]
    for name in names:
        table.add_column(name, justify="right")
    for dtype, symmetric, n in cells:
        label = str(dtype).removeprefix("torch.")
        found = {
            r["solver"]: f"{r['eigen_distance']:.1e} / {r['fixed_point_distance']:.1e}"
            for r in rows
            if (r["dtype"], r["symmetric"], r["n"]) == (label, symmetric, n)
        }
        kind = "symmetric" if symmetric else "nonsymmetric"
        table.add_row(label, kind, str(n), *(found.get(name, "–") for name in names))
    console = Console(width=120)
    console.print(table)
    console.print(environment())
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
