"""What a principal eigenvector and its gradient cost, by every way there is.

    python benchmarks/ied_crossover.py [--family F …] [--n N …] [--batch B …] [--k K]
                                       [--nonsymmetric] [--json FILE]

Forward and backward of the sum of the vectors, in float32, medians of interleaved runs, in
milliseconds; "fastest" is the ratio of the fastest runs, which a busy machine disturbs less.
"eigh" is torch.linalg.eigh with its own derivative. "dense", "power" and "krylov" are what
`pmaf.ied` does if other attempts are left out and this one is made at any size: where their
columns cross is where the constants of `pmaf.solvers.adaptive` come from. "ours" is the
default. Errors are the largest of a batch against float64: of the value (relative to ‖A‖),
the vector, and the gradient (relative), of eigh / of ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import pmaf
from pmaf.experiments.measure import environment, seconds
from pmaf.experiments.store import write_whole
from pmaf.paper.ied import METHODS, matrices
from pmaf.solvers import Dense, adaptive

CPU = torch.device("cpu")


def _gap(size: float) -> Callable[[int, int, torch.Generator], Tensor]:
    def build(batch: int, n: int, g: torch.Generator) -> Tensor:
        q = torch.linalg.qr(torch.randn(batch, n, n, generator=g))[0]
        values = torch.cat([torch.ones(1), torch.linspace(1 - size, -0.5, n - 1)])
        A = (q * values) @ q.mT
        return 0.5 * (A + A.mT)

    return build


def _wishart(rows: float) -> Callable[[int, int, torch.Generator], Tensor]:
    def build(batch: int, n: int, g: torch.Generator) -> Tensor:
        X = torch.randn(batch, max(1, int(rows * n)), n, generator=g)
        return X.mT @ X / X.shape[-2]

    return build


def _goe(batch: int, n: int, g: torch.Generator) -> Tensor:
    X = torch.randn(batch, n, n, generator=g) / (2 * n) ** 0.5
    return X + X.mT


def _spiked(batch: int, n: int, g: torch.Generator) -> Tensor:
    x = torch.nn.functional.normalize(torch.randn(batch, n, 1, generator=g), dim=-2)
    return _goe(batch, n, g) + 6 * x @ x.mT


def _laplacian(batch: int, n: int, g: torch.Generator) -> Tensor:
    W = (torch.rand(batch, n, n, generator=g) < min(1.0, 8 / n)).float().triu(1)
    W = W + W.mT
    return torch.diag_embed(W.sum(-1)) - W


FAMILIES: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "paper": lambda batch, n, g: matrices(n, batch=batch),
    "Wishart, tall": _wishart(4),
    "Wishart, rank n/4": _wishart(0.25),
    "GOE": _goe,
    "spiked": _spiked,
    "gap 0.3": _gap(0.3),
    "gap 1e-2": _gap(1e-2),
    "gap 1e-4": _gap(1e-4),
    "Laplacian": _laplacian,
}

Pairs = tuple[Tensor, Tensor]


def by_eigh(A: Tensor, k: int) -> Pairs:
    values, vectors = torch.linalg.eigh(A)
    return values[..., -k:].flip(-1), vectors[..., -k:].flip(-1)


def forced(power: float, krylov: float) -> Callable[[Tensor, int], Pairs]:
    """The default with other constants: an attempt at any size, or at none."""
    never = float("inf")
    sizes = {"_POWER_FROM": min(power, krylov), "_KRYLOV_FROM": krylov, "_KRYLOV_SIZE": 32}

    def run(A: Tensor, k: int) -> Pairs:
        with mock.patch.multiple(adaptive, **sizes):
            if power == never:
                with mock.patch.object(adaptive, "dominant", return_value=None):
                    return pmaf.ied(A, k)
            return pmaf.ied(A, k)

    return run


def contenders(symmetric: bool) -> dict[str, Callable[[Tensor, int], Pairs]]:
    if not symmetric:
        return {
            "eig": lambda A, k: pmaf.ied(A, symmetric=False, solver=Dense()),
            "PI-IFT-E": lambda A, k: METHODS["PI-IFT-E"](A, False),
            "ours": lambda A, k: pmaf.ied(A, symmetric=False),
        }
    never = float("inf")
    return {
        "eigh": by_eigh,
        "PI-IFT-E": lambda A, k: METHODS["PI-IFT-E"](A),
        "dense": lambda A, k: pmaf.ied(A, k, solver=Dense()),
        "power": forced(0, never),
        "krylov": forced(never, 0),
        "ours": pmaf.ied,
    }


def errors(
    method: Callable[[Tensor, int], Pairs], A: Tensor, k: int, symmetric: bool
) -> list[float]:
    """Of value, vector and gradient, the largest of the batch."""
    exact, leaf = A.double().requires_grad_(), A.clone().requires_grad_()
    truth = pmaf.ied(exact, k, symmetric=symmetric, solver=Dense())
    values, vectors = method(leaf, k)
    vectors = vectors.reshape(truth.vectors.shape)
    # In which direction a vector points is a convention, not an error.
    signs = torch.sign((vectors.detach() * truth.vectors.detach()).sum(-2, keepdim=True))
    (found,) = torch.autograd.grad((vectors * signs).sum(), leaf)
    (wanted,) = torch.autograd.grad(truth.vectors.sum(), exact)
    size = torch.linalg.matrix_norm(exact.detach())
    value = (values.reshape(truth.values.shape) - truth.values).abs().amax(-1) / size
    vector = torch.linalg.matrix_norm(vectors * signs - truth.vectors)
    gradient = torch.linalg.matrix_norm(found - wanted) / torch.linalg.matrix_norm(wanted)
    return [float(x.detach().amax()) for x in (value, vector, gradient)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", nargs="+", default=["paper", "GOE"], choices=FAMILIES)
    parser.add_argument("--n", nargs="+", type=int, default=[2, 8, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--batch", nargs="+", type=int, default=[5])
    parser.add_argument("--k", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="about so long for each row")
    parser.add_argument("--nonsymmetric", action="store_true", help="the paper's data only")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    symmetric = not options.nonsymmetric
    methods = contenders(symmetric)
    warnings.simplefilter("ignore", pmaf.ConvergenceWarning)  # of the paper's hundred steps
    if options.k > 1:
        methods = {name: methods[name] for name in methods if name not in ("PI-IFT-E", "power")}
    rows: list[dict[str, Any]] = []
    families = options.family if symmetric else ["paper"]
    cells = [(f, b, n) for f in families for b in options.batch for n in options.n]
    for family, batch, n in track(cells, "Matrices"):
        generator = torch.Generator().manual_seed(0)
        A = (
            FAMILIES[family](batch, n, generator)
            if symmetric
            else matrices(n, batch=batch, symmetric=False)
        )
        k = options.k
        leaf = A.clone().requires_grad_()
        times: dict[str, list[float]] = {name: [] for name in methods}

        def both(method: Callable[[Tensor, int], Pairs], leaf: Tensor = leaf, k: int = k) -> None:
            torch.autograd.grad(method(leaf, k)[1].sum(), leaf)

        spent = 0.0
        while spent < options.seconds or len(times["ours"]) < 4:
            for name, method in methods.items():
                times[name].append(seconds(lambda method=method: both(method), CPU))
                spent += times[name][-1]
        row: dict[str, Any] = {"family": family, "batch": batch, "n": n, "k": k}
        # The first run of each warms up.
        row |= {name: 1e3 * statistics.median(found[1:]) for name, found in times.items()}
        baseline = next(iter(methods))
        row["speedup"] = row[baseline] / row["ours"]
        row["speedup of fastest"] = min(times[baseline]) / min(times["ours"])
        for name in (baseline, "ours"):
            row[f"errors of {name}"] = errors(methods[name], A, k, symmetric)
        rows.append(row)
    baseline = next(iter(methods))
    table = Table("family", "batch", "n", title=f"Forward and backward, k = {options.k}, ms")
    for name in (*methods, f"{baseline} / ours", "fastest", "value", "vector", "gradient"):
        table.add_column(name, justify="right")
    for row in rows:
        pairs = zip(row[f"errors of {baseline}"], row["errors of ours"])
        table.add_row(
            row["family"],
            str(row["batch"]),
            str(row["n"]),
            *(f"{row[name]:.2f}" for name in methods),
            f"{row['speedup']:.2f}",
            f"{row['speedup of fastest']:.2f}",
            *(f"{x:.0e} / {y:.0e}" for x, y in pairs),
        )
    console = Console(width=160)
    console.print(table)
    console.print(environment(CPU))
    if options.json:
        content = {"environment": environment(CPU), "rows": rows}
        write_whole(options.json, json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
