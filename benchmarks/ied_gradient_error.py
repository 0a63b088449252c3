"""How far each gradient rule is from the true gradient, symmetric and nonsymmetric.

    python benchmarks/ied_gradient_error.py [--seeds N] [--json FILE]

The truth is central differences of the eigenvector itself, on 16×16 |N(0,1)| matrices
in float64. Errors are relative, in the Frobenius norm; medians over the seeds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from _measure import environment, write_json
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import pmaf
from pmaf.gradients import DDN, IFT, Implicit
from pmaf.paper.ied import matrices

N = 16


def published_ift(A: Tensor, v: Tensor, average: bool) -> Tensor:
    """The rule with `H` where the formula has its transpose, as the published code solves it."""
    value, y = pmaf.ied(A, symmetric=False)
    P = torch.eye(N, dtype=A.dtype) - torch.outer(y, y)
    k = torch.linalg.solve(torch.eye(N, dtype=A.dtype) - P @ A / value, v)
    gradient = torch.outer(P @ k / value, y)
    return 0.5 * (gradient + gradient.mT) if average else gradient


def truth(A: Tensor, v: Tensor, symmetric: bool) -> Tensor:
    step = 1e-6
    result = torch.zeros_like(A)
    for i in range(N):
        for j in range(N):
            shift = torch.zeros_like(A)
            shift[i, j] = step
            up, down = (
                pmaf.ied(A + sign * shift, symmetric=symmetric).vectors @ v for sign in (1, -1)
            )
            result[i, j] = (up - down) / (2 * step)
    return result


def by_rule(rule: pmaf.gradients.Gradient, symmetric: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def gradient(A: Tensor, v: Tensor) -> Tensor:
        A = A.clone().requires_grad_()
        y = pmaf.ied(A, symmetric=symmetric, gradient=rule).vectors
        return torch.autograd.grad(y @ v, A)[0]

    return gradient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    rows = []
    for symmetric in (True, False):
        kind = "symmetric" if symmetric else "nonsymmetric"
        rules: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "Implicit()": by_rule(Implicit(), symmetric),
            "IFT(), solving with Hᵀ": by_rule(IFT(), symmetric),
            "DDN()": by_rule(DDN(), symmetric),
        }
        if not symmetric:
            rules["IFT as published, solving with H"] = lambda A, v: published_ift(A, v, False)
            rules["the same, symmetrised as published"] = lambda A, v: published_ift(A, v, True)
        errors: dict[str, list[float]] = {name: [] for name in rules}
        for seed in track(range(options.seeds), f"{kind} matrices"):
            A = matrices(N, seed, symmetric=symmetric, batch=1, dtype=torch.float64)[0]
            v = torch.randn(N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            exact = truth(A, v, symmetric)
            for name, rule in rules.items():
                errors[name].append(float((rule(A, v) - exact).norm() / exact.norm()))
        rows += [
            {"matrix": kind, "rule": name, "relative_error": statistics.median(found)}
            for name, found in errors.items()
        ]
    table = Table("matrix", "rule", title=f"Error of the gradient of the eigenvector, {N}×{N}")
    table.add_column("relative error", justify="right")
    for row in rows:
        table.add_row(row["matrix"], row["rule"], f"{row['relative_error']:.1e}")
    console = Console()
    console.print(table)
    console.print(environment())
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
