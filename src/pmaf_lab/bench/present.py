"""Ratios of a race as tables and figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pmaf_lab.experiments import Figure, Row, Table
from pmaf_lab.experiments.plots import Theme, legend_below, sizes_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

OURS = "ours"
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
            wrong = " ≠" if is_off(row.values, other, errors) else ""
            if both is not None:
                line.append(f"{both:.2f}{wrong}")
            else:
                line.append(None if alone is None else f"({alone:.2f}){wrong}")
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
        note="In parentheses: forward alone, of what has no gradient. ≠: another result, with an "
        f"error more than {_OFF:g} times ours.",
        folded=True,
    )


def is_off(found: Found, name: str, errors: Sequence[str]) -> bool:
    """Whether what a competitor found is not what was asked for; None is not finite."""
    ours, theirs = found[OURS], found[name]
    return any(
        error in theirs
        and ours.get(error) is not None
        and (theirs[error] is None or theirs[error] > max(_OFF * ours[error], _CLOSE))
        for error in errors
    )


# A result is another one if its error is so many times ours, and not small anyway.
_OFF, _CLOSE = 30, 1e-4


def skipped(rows: Sequence[Row]) -> list[str]:
    """Who did not take part, and why, in a line each."""
    reasons: dict[tuple[str, str], int] = {}
    for row in rows:
        for name, entry in row.values.items():
            if "skipped" in entry:
                key = name, entry["skipped"]
                reasons[key] = reasons.get(key, 0) + 1
    return [
        f"{name} is left out of {count} of {len(rows)} cells: {reason}."
        for (name, reason), count in reasons.items()
    ]


def summary_tables(
    name: str, by_family: Mapping[str, Sequence[Row]], other: str, part: str
) -> list[Table]:
    """How many times as long as ours another takes: families down, shapes across.

    One table for each batch size, or it would not fit a page.
    """
    found = {
        (family, tuple(row.params["shape"])): ratio(row.values, other, part)
        for family, rows in by_family.items()
        for row in rows
    }
    shapes = sorted({size for _, size in found})
    group = f"{other} ÷ ours, {'both passes' if part == 'both' else part}"
    tables = []
    for batch in dict.fromkeys(size[0] for size in shapes):
        chosen = [size for size in shapes if size[0] == batch]
        heads = ["×".join(str(size) for size in sizes[1:]) for sizes in chosen]
        tables.append(
            Table.of(
                f"{name}-{batch}",
                f"{group}, batch {batch}",
                [("", "family"), *((group, head) for head in heads)],
                [
                    [family, *(found.get((family, sizes)) for sizes in chosen)]
                    for family in by_family
                ],
                formats={(group, head): "{:.2f}" for head in heads},
            )
        )
    return tables


Value = Callable[[Found, str, str], "float | None"]


def sizes_figure(
    name: str,
    caption: str,
    panels: Mapping[str, Sequence[Row]],
    names: Sequence[str],
    value: Value,
    label: str,
) -> Figure:
    """A value of both passes, `ratio` or `seconds`, against size, one panel a family."""
    return Figure(name, caption, lambda theme: _draw(panels, names, value, label, theme))


def _draw(
    panels: Mapping[str, Sequence[Row]],
    names: Sequence[str],
    value: Value,
    label: str,
    theme: Theme,
) -> Drawing:
    import matplotlib.pyplot as plt

    wide = 2 if len(panels) == 4 else min(3, len(panels))
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
        for k, other in enumerate(other for other in names if other != OURS):
            axes.plot(
                *_points(rows, other, value),
                marker=markers[k % len(markers)],
                linestyle="-" if k < len(palette) else "--",
                color=palette[k % len(palette)],
                label=other,
            )
        axes.plot(*_points(rows, OURS, value), color=theme.ours, linewidth=2.5, label=OURS)
        sizes_axis(axes, _ticks(rows), "n")
        axes.set(yscale="log", title=title)
    for axes in grid[:, 0]:
        axes.set_ylabel(label)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    legend_below(figure, grid[0, 0], 5)
    plt.close(figure)
    return figure


def _ticks(rows: Sequence[Row]) -> list[int]:
    """The powers of two among the sizes, every other one if they are many."""
    sizes = sorted({row.params["shape"][-1] for row in rows})
    powers = [size for size in sizes if size & (size - 1) == 0] or sizes
    return powers[:: 1 + (len(powers) > 6)]


def _points(rows: Sequence[Row], name: str, value: Value) -> tuple[list[int], list[float]]:
    """By n: both passes, or forward alone of what has no gradient."""
    points = {
        row.params["shape"][-1]: found
        for row in rows
        for part in ("both" if row.values.get(name, {}).get("backward") else "forward",)
        if (found := value(row.values, name, part)) is not None
    }
    return list(points), list(points.values())
