"""One style for every figure, on light paper and on dark screens."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import NullLocator


@dataclass(frozen=True)
class Theme:
    """Colours that can be told apart by everybody, and in grey."""

    name: str
    paper: str
    ink: str
    faint: str
    ours: str
    blue: str
    green: str
    grey: str
    red: str

    def series(self, label: str) -> str:
        """The colour of a method, the same in all figures."""
        head = label.split("-")[0]
        known = {
            "ours": self.ours,
            "AutoDiff": self.grey,
            "eigh": self.grey,
            "PI": self.blue,
            "SI": self.green,
        }
        return known.get(head, self.ink)

    def settings(self) -> dict[str, Any]:
        return {
            "figure.facecolor": self.paper,
            "axes.facecolor": self.paper,
            "savefig.facecolor": self.paper,
            "text.color": self.ink,
            "axes.edgecolor": self.faint,
            "axes.labelcolor": self.ink,
            "axes.titlecolor": self.ink,
            "xtick.color": self.faint,
            "ytick.color": self.faint,
            "xtick.labelcolor": self.ink,
            "ytick.labelcolor": self.ink,
            "grid.color": self.faint,
            "grid.alpha": 0.35,
            "grid.linewidth": 0.6,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "axes.labelsize": 10,
            "xtick.labelsize": 9,
            "ytick.labelsize": 9,
            "legend.fontsize": 9,
            "legend.frameon": False,
            "font.size": 10,
            "lines.linewidth": 1.6,
            "lines.markersize": 5,
            "pdf.fonttype": 42,  # text stays text
        }


LIGHT = Theme(
    "light", "#ffffff", "#1d2129", "#a9b0bb", "#d1480b", "#1769aa", "#1f8a5b", "#7a828e", "#b3261e"
)
DARK = Theme(
    "dark", "#15181d", "#e7e9ec", "#5c6470", "#ff8a4c", "#6cb4ee", "#5fcf9b", "#a7aeb8", "#ff8f85"
)


@contextmanager
def drawn(theme: Theme) -> Iterator[None]:
    """Draw in a theme, without a screen."""
    settings: dict[Any, Any] = {"backend": "agg", **theme.settings()}
    with matplotlib.rc_context(settings):
        yield


def picture(drawing: Drawing, kind: str) -> bytes:
    """A drawing as the content of a file, the same bytes for the same drawing."""
    buffer = io.BytesIO()
    metadata = {"CreationDate": None} if kind == "pdf" else None
    drawing.savefig(buffer, format=kind, dpi=144, metadata=metadata)
    drawing.set_layout_engine("none")  # it is laid out now, and takes long for many panels
    return buffer.getvalue()


def sizes_axis(axes: Axes, sizes: list[int], label: str) -> None:
    """A logarithmic axis whose ticks are the sizes measured."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def legend_below(drawing: Drawing, axes: Axes, columns: int) -> None:
    """One legend for all panels."""
    handles, labels = axes.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=columns)
