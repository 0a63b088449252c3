"""Table 2: what the backward pass of LESS costs with and without its structure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

import pmaf
from pmaf.gradients import DDN, Gradient, Implicit
from pmaf_lab.experiments import Cell, Experiment, Figure, Finding, Row, Scale, Section, Table
from pmaf_lab.experiments.measure import median_seconds, peak_bytes
from pmaf_lab.paper import published

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

    from pmaf_lab.experiments.plots import Theme

SIZES = ((256, 8, 64), (256, 16, 128))
RULES: dict[str, Gradient] = {
    "AutoDiff": DDN(exploit=False),
    "LESS": DDN(exploit=True),
    "ours": Implicit(),
}
WORDS = {
    "AutoDiff": "𝓑 by autodiff (“AutoDiff”)",
    "LESS": "𝓑 by structure (“LESS”)",
    "ours": "two rank-one terms (ours)",
}


class LessBackward(Experiment):
    name = "less-backward"
    title = "LESS: time and memory of the backward pass"
    about = (
        "The paper's Table 2. All three rules differentiate the same solution, the global "
        "minimum: by a tensor 𝓑 of size n × m × n built by autodiff, by the same tensor built from "
        "its structure, and by two rank-one terms without it. float32; medians; memory is the "
        "peak of what the backward pass allocates. The entries of b have a standard deviation of "
        "16, so that the minimiser is unique although there are fewer rows than columns."
    )
    reduced = "256×8×64 alone, and no memory of autodiff, whose record takes half a minute."

    def cells(self, scale: Scale) -> list[Cell]:
        sizes = SIZES[:1] if scale == "quick" else SIZES
        return [
            # The record of the two million allocations of autodiff takes half a minute.
            Cell(
                {"size": list(size), "rule": rule, "memory": rule != "AutoDiff" or scale == "full"},
                (10 if scale == "quick" else 50) if rule == "AutoDiff" else 3,
            )
            for size in sizes
            for rule in RULES
        ]

    def measure(
        self, device: torch.device, *, size: list[int], rule: str, memory: bool
    ) -> dict[str, Any]:
        batch, m, n = size
        generator = torch.Generator().manual_seed(0)
        A = torch.randn(batch, m, n, generator=generator).to(device).requires_grad_()
        b = (16 * torch.randn(batch, m, generator=generator)).to(device).requires_grad_()

        found: tuple[torch.Tensor, ...] = ()

        def backward() -> None:
            nonlocal found
            found = torch.autograd.grad(u, (A, b), torch.ones_like(u), retain_graph=True)

        u = pmaf.less(A, b, gradient=RULES[rule])
        peak = peak_bytes(backward, device) if memory else None
        time = median_seconds(backward, device, budget=2, repeats=50)
        exact = pmaf.less(A.double(), b.double())
        truth = torch.autograd.grad(exact, (A, b), torch.ones_like(exact))
        error = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, truth))
        return {"seconds": time, "bytes": peak, "bytes_A": A.numel() * 4, "error": error}

    def present(self, rows: Sequence[Row]) -> Section:
        found = {
            (tuple(row.params["size"]), row.params["rule"]): row.values
            for row in rows
            if row.status == "done"
        }
        sizes = [size for size in SIZES if any((size, rule) in found for rule in RULES)]
        lines, findings = [], []
        for size in sizes:
            for rule in RULES:
                if (size, rule) in found:
                    lines.append(_line(size, rule, found))
            if all((size, rule) in found for rule in RULES):
                findings += _findings(size, found)
        columns = [
            ("", "size"),
            ("", "rule"),
            ("time, s", "paper"),
            ("time, s", "here"),
            ("time, s", "here ÷ paper"),
            ("time, s", "÷ ours"),
            ("memory, MB", "paper (GPU)"),
            ("memory, MB", "this device"),
            ("memory, MB", "× A"),
            ("gradient", "error"),
        ]
        formats = {
            "paper": "{:.2f}",
            "here": "{:.4f}",
            "here ÷ paper": "{:.2f}",
            "÷ ours": "{:,.1f}×",
            "paper (GPU)": "{:.1f}",
            "this device": "{:.2f}",
            "× A": "{:.1f}",
            "error": "{:.0e}",
        }
        return Section(
            findings=findings,
            figures=[
                Figure(
                    "less-backward",
                    "Time and peak memory of one backward pass, logarithmic, beside the paper's.",
                    lambda theme: _figure(sizes, found, theme),
                )
            ]
            if sizes
            else [],
            tables=[
                Table.of("less-backward", "The backward pass", columns, lines, formats=formats)
            ],
            notes=[
                "Either way of building 𝓑 holds it at the peak, so their memory is nearly the "
                "same; the paper's figures are those of a GPU."
            ],
        )


def _published(size: tuple[int, ...], rule: str) -> tuple[float, float] | None:
    table = published.table("less_backward")
    batch, m, n = size
    match = table[(table.batch == batch) & (table.m == m) & (table.n == n) & (table.method == rule)]
    return None if match.empty else tuple(match.iloc[0][["seconds", "megabytes"]])


def _line(size: tuple[int, ...], rule: str, found: dict[Any, Any]) -> list[Any]:
    here, ours = found[size, rule], found.get((size, "ours"))
    seconds, megabytes = _published(size, rule) or (None, None)
    return [
        "×".join(map(str, size)),
        WORDS[rule],
        seconds,
        here["seconds"],
        seconds and here["seconds"] / seconds,
        ours and here["seconds"] / ours["seconds"],
        megabytes,
        here["bytes"] and here["bytes"] / 2**20,
        here["bytes"] and here["bytes"] / here["bytes_A"],
        here["error"],
    ]


def _findings(size: tuple[int, ...], found: dict[Any, Any]) -> list[Finding]:
    auto, structured, ours = (found[size, rule] for rule in ("AutoDiff", "LESS", "ours"))
    paper = {rule: _published(size, rule) for rule in ("AutoDiff", "LESS")}
    assert paper["AutoDiff"] is not None
    assert paper["LESS"] is not None
    name = "×".join(map(str, size))
    findings = [
        Finding(
            f"LESS backward {name}: structure is faster than autodiff",
            f"{paper['AutoDiff'][0] / paper['LESS'][0]:,.0f}×",
            f"{auto['seconds'] / structured['seconds']:,.0f}×",
            auto["seconds"] > structured["seconds"],
        ),
        Finding(
            f"LESS backward {name}: ours is faster than both",
            "no such row",
            f"{auto['seconds'] / ours['seconds']:,.0f}× autodiff, "
            f"{structured['seconds'] / ours['seconds']:,.0f}× structure",
            ours["seconds"] < min(auto["seconds"], structured["seconds"]),
        ),
    ]
    if auto["bytes"]:
        findings.append(
            Finding(
                f"LESS backward {name}: structure needs less memory",
                f"{paper['AutoDiff'][1] / paper['LESS'][1]:.1f}×",
                f"{auto['bytes'] / structured['bytes']:.1f}×; ours "
                f"{auto['bytes'] / ours['bytes']:,.0f}×",
                auto["bytes"] > 1.1 * structured["bytes"],
            )
        )
    return findings


def _figure(sizes: list[tuple[int, ...]], found: dict[Any, Any], theme: Theme) -> Drawing:
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    figure, grid = plt.subplots(
        2, len(sizes), figsize=(4.6 * len(sizes) + 1.6, 3.6), layout="constrained", sharey=True
    )
    colours = {"AutoDiff": theme.grey, "LESS": theme.blue, "ours": theme.ours}
    quantities = (("seconds", 1.0, 0, "seconds"), ("bytes", 2.0**-20, 1, "peak megabytes"))
    for line, (key, unit, place, label) in zip(grid.reshape(2, -1), quantities):
        for axes, size in zip(line, sizes):
            for k, rule in enumerate(reversed(RULES)):
                if (size, rule) not in found:
                    continue
                value = found[size, rule][key]
                if value is not None:
                    axes.plot(value * unit, k, "o", color=colours[rule], markersize=9)
                printed = _published(size, rule)
                if printed is not None:
                    axes.plot(printed[place], k, "D", color=theme.ink)
            axes.set(xscale="log", xlabel=label)
            if place == 0:
                axes.set_title("×".join(map(str, size)))
            axes.set_yticks(range(len(RULES)), ["ours", "structure", "autodiff"])
            axes.set_ylim(-0.6, len(RULES) - 0.4)
    marks = [
        Line2D([], [], color=theme.grey, marker="o", linestyle="", markersize=9, label="here"),
        Line2D([], [], color=theme.ink, marker="D", linestyle="", label="paper"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=2)
    plt.close(figure)
    return figure
