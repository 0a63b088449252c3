"""The six computational tables: time and memory of every way to an eigenvector."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

import pmaf
from pmaf.gradients import Implicit
from pmaf.solvers import Auto
from pmaf_lab.experiments import Cell, Experiment, Figure, Row, Scale, Section
from pmaf_lab.experiments.measure import free_memory, median_seconds, peak_bytes, seconds
from pmaf_lab.paper.ied import METHODS, Method, matrices
from pmaf_lab.paper.items.ied_cost_report import (
    OURS,
    Found,
    cost_figure,
    findings,
    memory_table,
    times_table,
)

ROWS: dict[str, Method] = {**METHODS, OURS: Method(Auto(), Implicit())}
SIZES = (32, 64, 128, 256, 512, 1024)
BATCH = 5
LONG = 10.0  # seconds
MATRICES = ("symmetric", "nonsymmetric")


class EigenCost(Experiment):
    name = "ied-cost"
    title = "IED: time and memory"
    about = (
        "The paper's six computational tables: five matrices of |N(0,1)| entries in float32, "
        "twelve ways to the top eigenvector and its gradient, and the default here. “AutoDiff” "
        "is eigh; PI and SI take 100 iterations; “unroll” differentiates them, “J” builds "
        "Jacobians by autodiff, “E” exploits their structure. Every cell runs in a process of its "
        "own. Memory is the peak of what a pass allocates; the paper's is that of a GPU."
    )

    reduced = "sizes 32 and 128, and 0.2 s of timing a pass instead of 1 s."

    def cells(self, scale: Scale) -> list[Cell]:
        sizes, budget = ((32, 128), 0.2) if scale == "quick" else (SIZES, 1.0)
        return [
            Cell(
                {"matrix": matrix, "n": n, "method": method, "budget": budget},
                2 * budget + _seconds(n, method),
            )
            for matrix in MATRICES
            for n in sizes
            for method in ROWS
        ]

    def measure(
        self, device: torch.device, *, matrix: str, n: int, method: str, budget: float
    ) -> dict[str, Any]:
        symmetric = matrix == "symmetric"
        _require_memory(n, method)
        A = matrices(n, symmetric=symmetric).to(device).requires_grad_()
        warnings.simplefilter("ignore", pmaf.ConvergenceWarning)  # 100 steps, come what may

        def forward() -> torch.Tensor:
            return ROWS[method](A, symmetric).vectors

        kept: list[torch.Tensor] = []
        first: dict[str, float] = {}

        def once(name: str, run: Callable[[], torch.Tensor]) -> None:
            first[name] = seconds(lambda: kept.append(run()), device)

        memory = {"forward_bytes": peak_bytes(lambda: once("forward", forward), device)}
        loss = kept.pop().sum()

        def backward() -> torch.Tensor:
            return torch.autograd.grad(loss, A, retain_graph=True)[0]

        memory["backward_bytes"] = peak_bytes(lambda: once("backward", backward), device)
        kept.clear()
        # A pass of many seconds is long beside what recording its memory costs: once will do.
        times = {
            f"{name}_seconds": first[name]
            if first[name] > LONG
            else median_seconds(run, device, budget=budget)
            for name, run in (("backward", backward), ("forward", forward))
        }
        return {
            **memory,
            **times,
            "bytes_A": A.numel() * A.element_size(),
        }

    def present(self, rows: Sequence[Row]) -> Section:
        found: Found = {
            (row.params["matrix"], row.params["n"], row.params["method"]): row for row in rows
        }
        sizes = [n for n in SIZES if any(key[1] == n for key in found)]
        device = next((row.environment["device"] for row in rows if row.environment), "cpu")
        shown = [matrix for matrix in MATRICES if any(key[0] == matrix for key in found)]
        tables = [
            make(found, matrix, n, device)
            for matrix in shown
            for make in (times_table, memory_table)
            for n in sizes
        ]
        return Section(
            findings=[
                finding for matrix in shown for finding in findings(found, matrix, sizes, device)
            ],
            figures=[
                Figure(
                    f"ied-cost-{matrix}",
                    f"{matrix.capitalize()} matrices, batch of five, float32: time and peak memory "
                    "of one pass. Colour is the solver, line style the gradient.",
                    lambda theme, matrix=matrix: cost_figure(found, matrix, sizes, theme),
                )
                for matrix in shown
            ],
            tables=tables,
            notes=[
                "The J rows here build one matrix of a batch at a time, as torch's jacobian "
                "does; the paper's DDN-J takes a batch at once, hence the different time ratio.",
                "“–” marks what the paper does not have, such as CPU times beyond 5×256, and what "
                "was not measured here, with the reasons at the end of the section. On "
                "nonsymmetric matrices the AutoDiff rows decompose another, symmetric matrix, and "
                "DDN's gradient is not the true one; their costs are shown as the paper shows "
                "them.",
            ],
        )


def _require_memory(n: int, method: str) -> None:
    """Spare the machine a row whose tensor of n × n × n entries a matrix cannot fit."""
    available, needed = free_memory(), BATCH * n**3 * 4
    if method.endswith("J") and available is not None and needed > 0.85 * available:
        raise MemoryError(
            f"its Jacobian takes {needed / 2**30:.0f} GiB, {available / 2**30:.0f} GiB are free"
        )


def _seconds(n: int, method: str) -> float:
    """Roughly what a cell takes on two cores."""
    cost = 0.3
    if method.startswith("SI"):
        cost += 60 * (n / 1024) ** 2.5
    if method.endswith("J") and n <= 512:
        cost += 50 * (n / 512) ** 3
    return cost
