"""Tables, figures and findings of the computational tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pmaf_lab.experiments import Finding, Row, Table
from pmaf_lab.paper import published
from pmaf_lab.paper.ied import METHODS

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

    from pmaf_lab.experiments.plots import Theme

OURS = "ours"
PASSES = ("forward", "backward")
NOT_MEASURED = "not measured"
MEGABYTE = 2**20

Found = dict[tuple[str, int, str], Row]


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


def times_table(found: Found, matrix: str, n: int, device: str) -> Table:
    columns = [("", "method")]
    for part in PASSES:
        columns += [(f"{part}, s", x) for x in ("paper CPU", "CPU", "÷", "paper GPU", "GPU")]
    columns.append(("both", "÷ ours"))
    ours = _total(found, matrix, n, OURS)
    lines = []
    for method in (*METHODS, OURS):
        line: list[Any] = [method]
        for part in PASSES:
            here = _here(found, matrix, n, method, f"{part}_seconds")
            cpu = _paper(matrix, "time", "cpu", method, n, part)
            gpu = _paper(matrix, "time", "gpu", method, n, part)
            on_gpu = device.startswith("cuda")
            line += [
                cpu,
                NOT_MEASURED if on_gpu else here,
                None if on_gpu else _ratio(here, cpu),
                gpu,
                here if on_gpu else NOT_MEASURED,
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


def memory_table(found: Found, matrix: str, n: int, device: str) -> Table:
    columns = [("", "method")]
    for part in PASSES:
        columns += [(f"{part}, MB", x) for x in ("paper GPU", "CPU", "GPU", "÷", "× A")]
    on_gpu = device.startswith("cuda")
    lines = []
    for method in (*METHODS, OURS):
        line: list[Any] = [method]
        for part in PASSES:
            here = _here(found, matrix, n, method, f"{part}_bytes")
            size = _here(found, matrix, n, method, "bytes_A")
            paper = _paper(matrix, "memory", "gpu", method, n, part)
            megabytes = None if here is None else here / MEGABYTE
            both = (NOT_MEASURED, megabytes) if on_gpu else (megabytes, NOT_MEASURED)
            line += [paper, *both, _ratio(megabytes, paper), _ratio(here, size)]
        lines.append(line)
    return Table.of(
        f"ied-cost-memory-{matrix}-{n}",
        f"Memory, {matrix}, 5×{n}",
        columns,
        lines,
        formats={
            "paper GPU": "{:.2f}",
            "CPU": "{:.2f}",
            "GPU": "{:.2f}",
            "÷": "{:.2f}",
            "× A": "{:.1f}",
        },
        note=(
            "Peak allocations of one pass on this device; ÷ sets them against the paper's on a "
            "GPU, “× A” against the bytes of the matrices."
        ),
        folded=True,
    )


def _total(found: Found, matrix: str, n: int, method: str) -> float | None:
    parts = [_here(found, matrix, n, method, f"{part}_seconds") for part in PASSES]
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def findings(found: Found, matrix: str, sizes: list[int], device: str) -> list[Finding]:
    """What structure saves, and how far ours is ahead."""
    return [
        *_structure(found, matrix, "time", sizes, device),
        *_structure(found, matrix, "memory", sizes, device),
        *_ahead(found, matrix, sizes),
    ]


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
    which = "the paper's rows" if matrix == "symmetric" else "the rows that solve this problem"
    return [
        Finding(
            f"IED {matrix}: ours, both passes, against the fastest of {which}",
            "no such row",
            words,
            min(ratios.values()) > 1,
        )
    ]


def cost_figure(found: Found, matrix: str, sizes: list[int], theme: Theme) -> Drawing:
    import matplotlib.pyplot as plt

    from pmaf_lab.experiments.plots import legend_below, sizes_axis

    panels = (
        ("forward_seconds", 1.0, "forward, seconds"),
        ("backward_seconds", 1.0, "backward, seconds"),
        ("forward_bytes", 1 / MEGABYTE, "forward, peak MB"),
        ("backward_bytes", 1 / MEGABYTE, "backward, peak MB"),
    )
    styles = {"unroll": (":", "x"), "J": ("--", "^"), "E": ("-", "o"), OURS: ("-", "D")}
    figure, grid = plt.subplots(2, 2, figsize=(9.0, 7.4), layout="constrained")
    for axes, (key, unit, title) in zip(grid.flat, panels):
        for method in (*METHODS, OURS):
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
