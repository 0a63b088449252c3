"""What an experiment is made of."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    import matplotlib.figure
    import pandas as pd

    from pmaf_lab.experiments.plots import Theme

Scale = Literal["quick", "full"]
Status = Literal["done", "unreachable", "failed"]


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        params: What is measured; keyword arguments of `Experiment.measure`, JSON.
        cost: Roughly its seconds on two cores. Steers the time left, nothing else.
    """

    params: Mapping[str, Any]
    cost: float = 1.0

    @property
    def key(self) -> str:
        """The name of the file it is saved in."""
        text = "_".join(str(value) for value in self.params.values())
        return re.sub(r"[^\w.+-]", "-", text)


@dataclass(frozen=True)
class Row:
    """What became of a cell.

    Attributes:
        status: "unreachable" where the machine is too small for the cell, which is an
            answer; "failed" where something went wrong, which the next run tries again.
        values: What was measured, JSON; empty unless done.
        error: Why it was not.
    """

    params: Mapping[str, Any]
    status: Status
    values: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0
    environment: Mapping[str, Any] = field(default_factory=dict)


class Measured(NamedTuple):
    """What pages may show of a row: the family of its matrices, their size, numbers by name."""

    family: str
    size: str
    numbers: Mapping[str, float | None]


@dataclass(frozen=True)
class Finding:
    """Something that was claimed, and what was found here."""

    claim: str
    claimed: str
    found: str
    holds: bool | None = None


@dataclass(frozen=True)
class Table:
    """A table of numbers.

    Attributes:
        frame: One row a line; columns are `(group, label)` pairs.
        formats: How numbers are written, by label or by group and label.
        folded: Shown on demand only, in the HTML report.
    """

    name: str
    title: str
    frame: pd.DataFrame
    formats: Mapping[str | tuple[str, str], str] = field(default_factory=dict)
    note: str = ""
    folded: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        title: str,
        columns: Sequence[tuple[str, str]],
        lines: Sequence[Sequence[Any]],
        **options: Any,
    ) -> Table:
        """A table from its lines; options as of the class."""
        import pandas as pd

        frame = pd.DataFrame(lines, columns=pd.MultiIndex.from_tuples(columns), dtype=object)
        return cls(name, title, frame, **options)


@dataclass(frozen=True)
class Figure:
    """A figure, drawn once for light backgrounds and once for dark ones."""

    name: str
    caption: str
    draw: Callable[[Theme], matplotlib.figure.Figure]


@dataclass(frozen=True)
class Section:
    """What an experiment has to say."""

    findings: Sequence[Finding] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Collection:
    """Experiments that are run and reported on together.

    Attributes:
        command: The subcommand that runs them.
        lead: What the report begins with, by scale.
        source: Whose claims the findings are held against.
        extra: The extra that brings what the experiments need.
    """

    command: str
    title: str
    lead: Mapping[str, str]
    source: str
    extra: str
    experiments: Sequence[Experiment]

    def choose(self, names: Sequence[str]) -> list[Experiment]:
        """The named experiments, all if none is named, in their own order."""
        known = [experiment.name for experiment in self.experiments]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"there is no item {unknown[0]!r}; choose from {', '.join(known)}")
        return [e for e in self.experiments if not names or e.name in names]


class Experiment(ABC):
    """Something to measure, cell by cell."""

    name: str
    title: str
    about: str
    # What the quick scale leaves out.
    reduced: str = ""
    # Modules beyond torch that a cell imports.
    needs: tuple[str, ...] = ()

    @abstractmethod
    def cells(self, scale: Scale) -> list[Cell]:
        """Every cell, in the order to measure them in."""

    @abstractmethod
    def measure(self, device: torch.device, *args: Any, **params: Any) -> dict[str, Any]:
        """The values of the cell with these `params`. Runs in a process of its own."""

    @abstractmethod
    def present(self, rows: Sequence[Row]) -> Section:
        """Tables and figures of the rows there are."""

    def measured(self, row: Row) -> Measured | None:
        """The numbers of a finished row that pages may show; None if pages show none."""
        return None
