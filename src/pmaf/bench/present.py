"""Ratios of a race as tables and figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pmaf.experiments import Figure, Row, Table
from pmaf.experiments.plots import Theme, legend_below

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

OURS = "ours"
PASSES = ("forward", "backward", "both")
Found = Mapping[str, Mapping[str, Any]]


def seconds(found: Found, name: str, part: str) -> float | None:
    """What a competitor took, None where it did not take part or has no such pass."""
    entry = found.get(name, {})
    if entry.get("forward") is None:
        return None
    if part == "forward":
        return entry["forward"]
    if entry["backward"] is None:
        return None
    return entry["backward"] + (entry["forward"] if part == "both" else 0.0)


def ratio(found: Found, name: str, part: str) -> float | None:
    """How many times as long as ours."""
    theirs, ours = seconds(found, name, part), seconds(found, OURS, part)
    return None if theirs is None or ours is None else theirs / ours


def rows_of(rows: Sequence[Row], **params: Any) -> list[Row]:
    """The finished rows with these parameters."""
    return [
        row
        for row in rows
        if row.status == "done" and all(row.params[key] == value for key, value in params.items())
    ]


def shape(row: Row) -> str:
    return "×".join(str(size) for size in row.params["shape"])


def ratios_table(
    name: str, title: str, rows: Sequence[Row], names: Sequence[str], errors: Sequence[str]
) -> Table:
    """Ours in milliseconds, the others as multiples of it, and the errors beside."""
    columns = [("", "shape"), ("ours, ms", "forward"), ("ours, ms", "backward")]
    others = [other for other in names if other != OURS]
    columns += [("time ÷ ours, both passes", other) for other in others]
    baseline = others[0]
    columns += [(error, who) for error in errors for who in (OURS, baseline)]
    lines = []
    for row in rows:
        line: list[Any] = [shape(row)]
        for part in ("forward", "backward"):
            ours = seconds(row.values, OURS, part)
            line.append(None if ours is None else f"{1e3 * ours:.2f}")
        for other in others:
            both = ratio(row.values, other, "both")
            alone = ratio(row.values, other, "forward")
            if both is not None:
                line.append(f"{both:.2f}")
            else:
                line.append(None if alone is None else f"({alone:.2f})")
        for error in errors:
            for who in (OURS, baseline):
                value = row.values.get(who, {}).get(error)
                line.append(None if value is None else f"{value:.0e}")
        lines.append(line)
    return Table.of(
        name,
        title,
        columns,
        lines,
        note="In parentheses: forward alone, of what has no gradient.",
        folded=True,
    )


def ratios_figure(
    name: str, caption: str, panels: Mapping[str, Sequence[Row]], names: Sequence[str]
) -> Figure:
    """Times of both passes over ours against size, one panel a family."""
    return Figure(name, caption, lambda theme: _draw(panels, names, theme))


def _draw(panels: Mapping[str, Sequence[Row]], names: Sequence[str], theme: Theme) -> Drawing:
    import matplotlib.pyplot as plt

    wide = min(3, len(panels))
    tall = math.ceil(len(panels) / wide)
    figure, grid = plt.subplots(
        tall,
        wide,
        figsize=(3.3 * wide + 0.4, 2.8 * tall + 0.7),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    markers = "sov^D<>pX*"
    palette = [theme.grey, theme.blue, theme.green, theme.red, theme.ink]
    for axes, (title, rows) in zip(grid.flat, panels.items()):
        for k, other in enumerate(name for name in names if name != OURS):
            points = {
                row.params["shape"][-1]: value
                for row in rows
                for part in ("both" if row.values.get(other, {}).get("backward") else "forward",)
                if (value := ratio(row.values, other, part)) is not None
            }
            axes.plot(
                list(points),
                list(points.values()),
                marker=markers[k % len(markers)],
                linestyle="-" if k < len(palette) else "--",
                color=palette[k % len(palette)],
                label=other,
            )
        axes.axhline(1, color=theme.ours, linewidth=2.5, label=OURS)
        axes.set(xscale="log", yscale="log", title=title, xlabel="n")
    for axes in grid[:, 0]:
        axes.set_ylabel("time ÷ ours")
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    legend_below(figure, grid[0, 0], 5)
    plt.close(figure)
    return figure
