"""The file of measured numbers: for each race its command, its environment and its rows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from pmaf_lab.experiments import Experiment, Row
from pmaf_lab.experiments.store import write_whole

NOTHING = "–"
Number = float | int | bool

STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "least": min,
    "median": statistics.median,
    "most": max,
}


class FigureError(ValueError):
    """A number cannot be recorded or found; the message says why."""


class Place(NamedTuple):
    """Which row of a race: the family of the matrices, and their size as tables write it."""

    family: str
    size: str

    @classmethod
    def of(cls, text: str) -> Place:
        """From `FAMILY SIZE`; a family may have blanks."""
        family, _, size = text.rpartition(" ")
        return cls(family, size)


@dataclass(frozen=True)
class Entry:
    """What one complete run of a race measured.

    Attributes:
        environment: Of all rows; what was not recorded is left out.
    """

    command: str
    scale: str
    environment: Mapping[str, Any]
    rows: Mapping[Place, Mapping[str, Number]] = field(default_factory=dict)

    def sizes(self) -> list[str]:
        """In the order in which they grow."""
        found = dict.fromkeys(place.size for place in self.rows)
        return sorted(found, key=lambda size: [int(x) for x in size.replace(",", "").split("×")])

    def of(self, size: str, column: str) -> dict[str, Number]:
        """The numbers of a column at a size, by family."""
        return {
            place.family: row[column]
            for place, row in self.rows.items()
            if place.size == size and column in row
        }

    def pick(self, size: str, column: str, family: str) -> Number | None:
        """The number of a family, or a statistic over all families; None if there is none."""
        found = self.of(size, column)
        if family in STATISTICS:
            return STATISTICS[family](list(found.values())) if found else None
        return found.get(family)

    def surroundings(self) -> str:
        """The environment in words."""
        about = self.environment
        words = [str(about["processor"])] if "processor" in about else []
        if "threads" in about:
            words.append(f"{about['threads']} thread{'s' if about['threads'] > 1 else ''}")
        words += [f"torch {about['torch']}"] if "torch" in about else []
        return ", ".join(words) or NOTHING


def entry_of(experiment: Experiment, rows: Sequence[Row], command: str, scale: str) -> Entry:
    """The numbers of a finished race.

    Raises:
        FigureError: If rows are missing or failed, or if they were not measured in one environment.
    """
    wrong = len(experiment.cells("quick" if scale == "quick" else "full")) - len(
        [row for row in rows if row.status != "failed"]
    )
    if wrong:
        raise FigureError(
            f"{wrong} cells of {experiment.name} are missing or failed; run the same command again"
        )
    done = [row for row in rows if row.status == "done"]
    environments = [dict(row.environment) for row in done]
    if any(environment != environments[0] for environment in environments):
        raise FigureError(
            f"the cells of {experiment.name} were not all measured in the same environment; delete "
            "the folder of the run and run the same command again"
        )
    found: dict[Place, Mapping[str, Number]] = {}
    for row in done:
        measured = experiment.measured(row)
        if measured is None:
            raise FigureError(f"{experiment.name} has no numbers for pages")
        family, size, numbers = measured
        found[Place(family, size)] = {
            name: _rounded(x) for name, x in numbers.items() if x is not None
        }
    return Entry(command, scale, environments[0] if environments else {}, found)


def _rounded(x: Number) -> Number:
    """To three digits: a second run changes the others."""
    return float(f"{x:.3g}") if isinstance(x, float) else x


class Record:
    """All entries, by the name of the race."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = dict(entries)

    @classmethod
    def read(cls, path: Path) -> Record:
        """From a file; nothing if there is none.

        Raises:
            FigureError: If the file is not one of these.
        """
        if not path.is_file():
            return cls({})
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                {
                    name: Entry(
                        entry["command"],
                        entry["scale"],
                        entry["environment"],
                        {Place.of(place): row for place, row in entry["rows"].items()},
                    )
                    for name, entry in found.items()
                }
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FigureError(
                f"{path} is not a file of figures ({error!r}); name another, or delete it"
            ) from error

    def with_entry(self, name: str, entry: Entry) -> Record:
        """With an entry in the place of the race's last one."""
        return Record({**self.entries, name: entry})

    def write(self, path: Path) -> None:
        """One line a row, so that differences are readable."""
        write_whole(path, self.text())

    def text(self) -> str:
        return "{\n" + ",\n".join(map(self._entry, sorted(self.entries))) + "\n}\n"

    def _entry(self, name: str) -> str:
        entry = self.entries[name]
        rows = ",\n".join(
            f"   {_json(f'{place.family} {place.size}')}: {_json(dict(row))}"
            for place, row in entry.rows.items()
        )
        return (
            f" {_json(name)}: {{\n"
            f'  "command": {_json(entry.command)},\n'
            f'  "scale": {_json(entry.scale)},\n'
            f'  "environment": {_json(dict(entry.environment))},\n'
            f'  "rows": {{\n{rows}\n  }}\n'
            " }"
        )

    def number(self, name: str) -> str:
        """What a page writes for a name, a dash if it was not measured.

        A name is `RACE/environment`, or `RACE/SIZES/COLUMN/FAMILY`, or the latter and `/STATISTIC`.
        `SIZES` is a size, or a pattern such as `1000*`. `FAMILY` is that of a row, or "least",
        "median" or "most" over the families. If several sizes match, `STATISTIC` is over the sizes.
        A competitor that found another result is marked by ≠.

        Raises:
            FigureError: If the name has another form.
        """
        wanted = Name.of(name)
        entry = self.entries.get(wanted.race)
        if entry is None:
            return NOTHING
        if wanted.column == "environment":
            return entry.surroundings()
        sizes = [size for size in entry.sizes() if fnmatchcase(size, wanted.sizes)]
        found = [entry.pick(size, wanted.column, wanted.family) for size in sizes]
        numbers = [x for x in found if x is not None]
        if not numbers:
            return NOTHING
        if wanted.over is None and len(numbers) > 1:
            raise FigureError(f"{name!r} matches {len(numbers)} sizes; end it with /least or so")
        text = two_digits(STATISTICS[wanted.over or "least"](numbers))
        competitor = wanted.column.rpartition(" ")[0]
        off = any(entry.pick(size, f"{competitor} off", wanted.family) for size in sizes)
        return f"{text} ≠" if off else text


@dataclass(frozen=True)
class Name:
    """The parts of the name of a number, as `Record.number` explains them."""

    race: str
    sizes: str
    column: str
    family: str
    over: str | None = None

    @classmethod
    def of(cls, text: str) -> Name:
        race, *parts = text.split("/")
        if parts == ["environment"]:
            return cls(race, "", "environment", "")
        if len(parts) not in (3, 4) or (len(parts) == 4 and parts[3] not in STATISTICS):
            raise FigureError(
                f"{text!r} is not the name of a number: write RACE/SIZE/COLUMN/FAMILY, "
                f"RACE/SIZES/COLUMN/FAMILY/{'|'.join(STATISTICS)}, or RACE/environment"
            )
        return cls(race, *parts)


def two_digits(x: Number) -> str:
    """A number as text writes it."""
    return _digits(x, 2)


def three_digits(x: Number) -> str:
    """A number as tables write it."""
    return _digits(x, 3)


def _digits(x: Number, count: int) -> str:
    if x == 0 or 1e-3 <= abs(x) < 1e7:
        rounded = float(f"{x:.{count}g}")
        return f"{rounded:,.0f}" if rounded >= 10 ** (count - 1) else f"{rounded:g}"
    return f"{x:.0e}"


def _json(x: Any) -> str:
    return json.dumps(x, ensure_ascii=False)
