"""How times grow with a size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pmaf_lab.bench.present import OURS, seconds
from pmaf_lab.experiments import Finding, Row, Table


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

    def exponent(self, rows: Sequence[Row], name: str) -> float | None:
        """Of `seconds ~ size ** exponent`, by least squares on the logarithms of both passes."""
        points = [
            (math.log(self.size(row.params["shape"])), math.log(spent))
            for row in self.of(rows)
            if (spent := seconds(row.values, name, "both")) is not None
        ]
        return statistics.linear_regression(*zip(*points)).slope if len(points) > 2 else None


@dataclass(frozen=True)
class Growth:
    """How our time grows beside another's, in one sweep of one family."""

    sweep: str
    family: str
    sizes: Sequence[int]
    ours: float
    other: float

    @classmethod
    def of(cls, sweep: Sweep, family: str, rows: Sequence[Row], other: str) -> Growth | None:
        """None where there are too few sizes to say."""
        ours, theirs = sweep.exponent(rows, OURS), sweep.exponent(rows, other)
        if ours is None or theirs is None:
            return None
        sizes = [sweep.size(row.params["shape"]) for row in sweep.of(rows)]
        return cls(sweep.label, family, sizes, ours, theirs)


def growth_findings(title: str, growth: Sequence[Growth], other: str) -> list[Finding]:
    """Where ours grows faster than the other, by most."""
    if not growth:
        return []
    worst = max(growth, key=lambda entry: entry.ours - entry.other)
    return [
        Finding(
            f"{title}: exponent of growth beside {other}'s, most",
            "not above",
            f"{worst.ours:.2f} beside {worst.other:.2f} ({worst.family}, {worst.sweep})",
            worst.ours <= worst.other,
        )
    ]


def growth_table(name: str, growth: Sequence[Growth], other: str) -> Table:
    """The exponents, ours beside the other's."""
    columns = [("", "family"), ("", "what grows"), ("", "from"), ("", "to")]
    columns += [("exponent", OURS), ("exponent", other)]
    return Table.of(
        name,
        "Growth of the time of both passes",
        columns,
        [[g.family, g.sweep, g.sizes[0], g.sizes[-1], g.ours, g.other] for g in growth],
        formats={("exponent", OURS): "{:.2f}", ("exponent", other): "{:.2f}"},
        note="Time ~ size to this power, fitted by least squares to the logarithms.",
        folded=True,
    )
