"""The six computational tables: time and memory of every way to an eigenvector."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

import pmaf
from pmaf.experiments import Cell, Experiment, Figure, Finding, Row, Scale, Section, Table
from pmaf.experiments.measure import median_seconds, peak_bytes
from pmaf.gradients import Implicit
from pmaf.paper import published
from pmaf.paper.ied import METHODS, Method, matrices
from pmaf.solvers import Auto

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

    from pmaf.experiments.plots import Theme

OURS = "ours"
ROWS: dict[str, Method] = {**METHODS, OURS: Method(Auto(), Implicit())}
SIZES = (32, 64, 128, 256, 512, 1024)
MATRICES = ("symmetric", "nonsymmetric")
PASSES = ("forward", "backward")
MEGABYTE = 2**20

Found = dict[tuple[str, int, str], Row]


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
        A = matrices(n, symmetric=symmetric).to(device).requires_grad_()
        warnings.simplefilter("ignore", pmaf.ConvergenceWarning)  # 100 steps, come what may

        def forward() -> torch.Tensor:
            return ROWS[method](A, symmetric).vectors

        kept: list[torch.Tensor] = []
        memory = {"forward_bytes": peak_bytes(lambda: kept.append(forward()), device)}
        loss = kept.pop().sum()

        def backward() -> torch.Tensor:
            return torch.autograd.grad(loss, A, retain_graph=True)[0]

        memory["backward_bytes"] = peak_bytes(backward, device)
        return {
            **memory,
            "backward_seconds": median_seconds(backward, device, budget=budget),
            "forward_seconds": median_seconds(forward, device, budget=budget),
            "bytes_A": A.numel() * A.element_size(),
        }

    def present(self, rows: Sequence[Row]) -> Section:
        found: Found = {
            (row.params["matrix"], row.params["n"], row.params["method"]): row for row in rows
        }
        sizes = [n for n in SIZES if any(key[1] == n for key in found)]
        device = next((str(row.environment.get("device")) for row in rows), "cpu")
        tables = [
            make(found, matrix, n, device)
            for matrix in MATRICES
            for make in (_times, _memory)
            for n in sizes
        ]
        shown = [matrix for matrix in MATRICES if any(key[0] == matrix for key in found)]
        return Section(
            findings=_findings(found, sizes, device),
            figures=[
                Figure(
                    f"ied-cost-{matrix}",
                    f"{matrix.capitalize()} matrices, batch of five, float32: time and peak memory "
                    "of one pass. Colour is the solver, line style the gradient.",
                    lambda theme, matrix=matrix: _figure(found, matrix, sizes, theme),
                )
                for matrix in shown
            ],
            tables=tables,
            notes=[
                "“–” marks what was not measured: the reasons are listed below. The paper has no "
                "CPU times beyond 5×256. On nonsymmetric matrices the AutoDiff rows decompose "
                "another, symmetric matrix, and DDN's gradient is not the true one (see the last "
                "section); their times are shown as the paper shows them."
            ],
        )


def _seconds(n: int, method: str) -> float:
    """Roughly what a cell takes on two cores."""
    cost = 0.3
    if method.startswith("SI"):
        cost += 130 * (n / 1024) ** 2.5
    if method.endswith("J") and n <= 512:
        cost += 40 * (n / 512) ** 3
    return cost


def _paper(matrix: str, quantity: str, device: str, method: str, n: int, part: str) -> float | None:
    table = published.table("ied_costs")
    match = table[
        (table.matrix == matrix)
        & (table.quantity == quantity)
        & (table.device == device)
        & (table.method == method)
        & (table.n == n)
    ]
    value = math.nan if match.empty else float(match.iloc[0][part])
    return None if math.isnan(value) else value


def _here(found: Found, matrix: str, n: int, method: str, key: str) -> float | None:
    row = found.get((matrix, n, method))
    return row.values[key] if row is not None and row.status == "done" else None


def _ratio(here: float | None, paper: float | None) -> float | None:
    return None if here is None or paper is None or paper == 0 else here / paper


def _times(found: Found, matrix: str, n: int, device: str) -> Table:
    columns = [("", "method")]
    for part in PASSES:
        columns += [(f"{part}, s", x) for x in ("paper CPU", "CPU", "÷", "paper GPU", "GPU")]
    columns.append(("both", "÷ ours"))
    ours = _total(found, matrix, n, OURS)
    lines = []
    for method in ROWS:
        line: list[Any] = [method]
        for part in PASSES:
            here = _here(found, matrix, n, method, f"{part}_seconds")
            cpu = _paper(matrix, "time", "cpu", method, n, part)
            gpu = _paper(matrix, "time", "gpu", method, n, part)
            on_gpu = device.startswith("cuda")
            line += [
                cpu,
                "not measured" if on_gpu else here,
                None if on_gpu else _ratio(here, cpu),
                gpu,
                here if on_gpu else "not measured",
            ]
        total = _total(found, matrix, n, method)
        line.append(_ratio(total, ours))
        lines.append(line)
    return Table.of(
        f"ied-cost-time-{matrix}-{n}",
        f"Time, {matrix}, 5×{n}",
        columns,
        lines,
        formats={
            "paper CPU": "{:.4f}",
            "paper GPU": "{:.4f}",
            "CPU": "{:.4f}",
            "GPU": "{:.4f}",
            "÷": "{:.2f}",
            "÷ ours": "{:.1f}×",
        },
        note="÷ is the time here over the paper's; the last column sets both passes against ours.",
        folded=True,
    )


def _memory(found: Found, matrix: str, n: int, device: str) -> Table:
    columns = [("", "method")]
    here_label = "GPU" if device.startswith("cuda") else "CPU"
    for part in PASSES:
        columns += [(f"{part}, MB", x) for x in ("paper GPU", here_label, "÷", "× A")]
    lines = []
    for method in ROWS:
        line: list[Any] = [method]
        for part in PASSES:
            here = _here(found, matrix, n, method, f"{part}_bytes")
            size = _here(found, matrix, n, method, "bytes_A")
            paper = _paper(matrix, "memory", "gpu", method, n, part)
            megabytes = None if here is None else here / MEGABYTE
            line += [paper, megabytes, _ratio(megabytes, paper), _ratio(here, size)]
        lines.append(line)
    return Table.of(
        f"ied-cost-memory-{matrix}-{n}",
        f"Memory, {matrix}, 5×{n}",
        columns,
        lines,
        formats={
            "paper GPU": "{:.2f}",
            here_label: "{:.2f}",
            "÷": "{:.2f}",
            "× A": "{:.1f}",
        },
        note="Peak allocations of one pass; “× A” sets them against the bytes of the matrices.",
        folded=True,
    )


def _total(found: Found, matrix: str, n: int, method: str) -> float | None:
    parts = [_here(found, matrix, n, method, f"{part}_seconds") for part in PASSES]
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _findings(found: Found, sizes: list[int], device: str) -> list[Finding]:
    findings: list[Finding] = []
    for matrix in MATRICES:
        for quantity in ("time", "memory"):
            findings += _structure(found, matrix, quantity, sizes, device)
        findings += _ahead(found, matrix, sizes)
    return findings


def _structure(
    found: Found, matrix: str, quantity: str, sizes: list[int], device: str
) -> list[Finding]:
    """What exploiting structure saves in a backward pass, at the largest size both have."""
    unit = {"time": "seconds", "memory": "bytes"}[quantity]
    where = "cpu" if quantity == "time" and not device.startswith("cuda") else "gpu"
    for n in reversed(sizes):
        paper: list[float | None] = []
        here: list[float | None] = []
        for rule in ("DDN", "IFT"):
            j, e = f"PI-{rule}-J", f"PI-{rule}-E"
            paper.append(
                _ratio(
                    _paper(matrix, quantity, where, j, n, "backward"),
                    _paper(matrix, quantity, where, e, n, "backward"),
                )
            )
            here.append(
                _ratio(
                    _here(found, matrix, n, j, f"backward_{unit}"),
                    _here(found, matrix, n, e, f"backward_{unit}"),
                )
            )
        known = [(a, b) for a, b in zip(paper, here) if a is not None and b is not None]
        if len(known) == 2:
            (a, b), (c, d) = known
            return [
                Finding(
                    f"IED {matrix}, 5×{n}: {quantity} of J over E, backward, PI with DDN and IFT",
                    f"{a:,.0f}× and {c:,.0f}×",
                    f"{b:,.0f}× and {d:,.0f}×",
                    min(b, d) > 2,
                )
            ]
    return []


def _ahead(found: Found, matrix: str, sizes: list[int]) -> list[Finding]:
    """Ours against the fastest row that solves the same problem."""
    ratios: dict[int, float] = {}
    for n in sizes:
        ours = _total(found, matrix, n, OURS)
        others = [
            total
            for method in METHODS
            if matrix == "symmetric" or not method.startswith("AutoDiff")
            if (total := _total(found, matrix, n, method)) is not None
        ]
        if ours and others:
            ratios[n] = min(others) / ours
    if not ratios:
        return []
    words = ", ".join(f"{ratio:.1f}× at {n}" for n, ratio in ratios.items())
    which = "all twelve rows" if matrix == "symmetric" else "the ten rows that solve this problem"
    return [
        Finding(
            f"IED {matrix}: ours, both passes, against the fastest of {which}",
            "no such row",
            words,
            min(ratios.values()) > 1,
        )
    ]


def _figure(found: Found, matrix: str, sizes: list[int], theme: Theme) -> Drawing:
    import matplotlib.pyplot as plt

    from pmaf.experiments.plots import legend_below, sizes_axis

    panels = (
        ("forward_seconds", 1.0, "forward, seconds"),
        ("backward_seconds", 1.0, "backward, seconds"),
        ("forward_bytes", 1 / MEGABYTE, "forward, peak MB"),
        ("backward_bytes", 1 / MEGABYTE, "backward, peak MB"),
    )
    styles = {"unroll": (":", "x"), "J": ("--", "^"), "E": ("-", "o"), OURS: ("-", "D")}
    figure, grid = plt.subplots(2, 2, figsize=(9.0, 7.4), layout="constrained")
    for axes, (key, unit, title) in zip(grid.flat, panels):
        for method in ROWS:
            line, marker = styles[method.split("-")[-1]]
            points = {
                n: value * unit
                for n in sizes
                if (value := _here(found, matrix, n, method, key)) is not None
            }
            bold = {"linewidth": 3.0, "zorder": 5} if method == OURS else {}
            # DDN and IFT share colour and line: the marker's filling tells them apart.
            filling = {"markerfacecolor": "none"} if "DDN" in method else {}
            axes.plot(
                list(points),
                list(points.values()),
                line,
                marker=marker,
                color=theme.series(method),
                label=method,
                **bold,
                **filling,
            )
        axes.set(yscale="log", title=title)
        sizes_axis(axes, sizes, "m")
    legend_below(figure, grid[0, 0], 5)
    plt.close(figure)
    return figure
