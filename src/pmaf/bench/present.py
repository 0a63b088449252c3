"""Ratios of a race as tables and figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pmaf.experiments import Figure, Finding, Row, Table
from pmaf.experiments.plots import Theme, legend_below

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
            wrong = " ≠" if _is_off(row.values, other, errors) else ""
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


def _is_off(found: Found, name: str, errors: Sequence[str]) -> bool:
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


@dataclass(frozen=True)
class Sweep:
    """Shapes of which one size grows and nothing else.

    Attributes:
        label: What is chosen, as a figure says it.
        chosen: Whether a shape belongs to it.
        size: The size that grows.
    """

    label: str
    chosen: Callable[[Sequence[int]], bool]
    size: Callable[[Sequence[int]], int] = lambda shape: shape[-1]

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of it, by size."""
        found = [row for row in rows if self.chosen(row.params["shape"])]
        return sorted(found, key=lambda row: self.size(row.params["shape"]))


@dataclass(frozen=True)
class Growth:
    """How the time of a competitor grows with a size: `seconds ~ size ** exponent`."""

    sweep: str
    family: str
    name: str
    sizes: Sequence[int]
    exponent: float | None

    @classmethod
    def of(cls, sweep: Sweep, family: str, rows: Sequence[Row], name: str) -> Growth:
        """Fitted by least squares to the logarithms."""
        points = [
            (sweep.size(row.params["shape"]), spent)
            for row in rows
            if (spent := seconds(row.values, name, "both")) is not None
        ]
        exponent = None
        if len(points) > 2:
            xs, ys = ([math.log(x) for x in column] for column in zip(*points))
            exponent = statistics.linear_regression(xs, ys).slope
        return cls(sweep.label, family, name, [size for size, _ in points], exponent)

    @staticmethod
    def findings(title: str, growth: Sequence[Growth]) -> list[Finding]:
        """Where ours grows faster than what it is held against, by most."""
        pairs = [
            (ours.exponent - theirs.exponent, ours, theirs)
            for ours, theirs in zip(growth[::2], growth[1::2])
            if ours.exponent is not None and theirs.exponent is not None
        ]
        if not pairs:
            return []
        by, ours, theirs = max(pairs, key=lambda pair: pair[0])
        return [
            Finding(
                f"{title}: exponent of growth beside {theirs.name}'s, most",
                "not above",
                f"{ours.exponent:.2f} beside {theirs.exponent:.2f} ({ours.family}, {ours.sweep})",
                by <= 0,
            )
        ]


def growth_table(name: str, growth: Sequence[Growth]) -> Table:
    """The exponents, ours beside the other's."""
    other = growth[1].name
    columns = [("", "family"), ("", "what grows"), ("", "from"), ("", "to")]
    columns += [("exponent", OURS), ("exponent", other)]
    lines = [
        [ours.family, ours.sweep, ours.sizes[0], ours.sizes[-1], ours.exponent, theirs.exponent]
        for ours, theirs in zip(growth[::2], growth[1::2])
        if ours.sizes
    ]
    return Table.of(
        name,
        "Growth of the time of both passes",
        columns,
        lines,
        formats={("exponent", OURS): "{:.2f}", ("exponent", other): "{:.2f}"},
        note="Time ~ size to this power, fitted by least squares to the logarithms.",
        folded=True,
    )


Value = Callable[[Found, str, str], "float | None"]


def ratios_figure(
    name: str, caption: str, panels: Mapping[str, Sequence[Row]], names: Sequence[str]
) -> Figure:
    """Times of both passes over ours against size, one panel a family."""

    def draw(theme: Theme) -> Drawing:
        return _draw(panels, names, ratio, "time ÷ ours", theme)

    return Figure(name, caption, draw)


def times_figure(
    name: str, caption: str, panels: Mapping[str, Sequence[Row]], names: Sequence[str]
) -> Figure:
    """Times of both passes against size, one panel a family."""

    def draw(theme: Theme) -> Drawing:
        return _draw(panels, names, seconds, "seconds", theme)

    return Figure(name, caption, draw)


def _draw(
    panels: Mapping[str, Sequence[Row]],
    names: Sequence[str],
    value: Value,
    label: str,
    theme: Theme,
) -> Drawing:
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
        for k, other in enumerate(other for other in names if other != OURS):
            axes.plot(
                *_points(rows, other, value),
                marker=markers[k % len(markers)],
                linestyle="-" if k < len(palette) else "--",
                color=palette[k % len(palette)],
                label=other,
            )
        axes.plot(*_points(rows, OURS, value), color=theme.ours, linewidth=2.5, label=OURS)
        axes.set(xscale="log", yscale="log", title=title, xlabel="n")
    for axes in grid[:, 0]:
        axes.set_ylabel(label)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    legend_below(figure, grid[0, 0], 5)
    plt.close(figure)
    return figure


def _points(rows: Sequence[Row], name: str, value: Value) -> tuple[list[int], list[float]]:
    """By n: both passes, or forward alone of what has no gradient."""
    points = {
        row.params["shape"][-1]: found
        for row in rows
        for part in ("both" if row.values.get(name, {}).get("backward") else "forward",)
        if (found := value(row.values, name, part)) is not None
    }
    return list(points), list(points.values())
