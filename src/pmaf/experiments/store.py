"""A folder of finished cells."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pmaf.experiments.experiment import Cell, Row


class StoreError(RuntimeError):
    """The folder cannot be used; the message says why and what to do."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class Store:
    """Rows in `FOLDER/cells/EXPERIMENT/CELL.json`, and what was run in `FOLDER/run.json`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, about: Mapping[str, Any], commands: list[str]) -> None:
        """Say what is going to be run here.

        Args:
            about: What all cells of the folder have in common.
            commands: Added to those that have filled the folder before.

        Raises:
            StoreError: If the folder cannot be written, or holds something else.
        """
        earlier: dict[str, Any] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._about.exists():
                earlier = self.about()
                commands = [*earlier["commands"], *commands]
            other = {key: earlier[key] for key in about if key in earlier}
            if other and other != dict(about):
                raise StoreError(
                    f"{self.folder} holds a run with {_words(other)}, not {_words(about)}; "
                    "choose another folder with --out"
                )
            unique = list(dict.fromkeys(commands))
            write_whole(self._about, json.dumps({**about, "commands": unique}, indent=1))
        except OSError as error:
            reason = error.strerror or error
            raise StoreError(
                f"cannot write to {self.folder} ({reason}); choose another folder with --out"
            ) from error

    @property
    def _about(self) -> Path:
        return self.folder / "run.json"

    def about(self) -> dict[str, Any]:
        """What was run here.

        Raises:
            StoreError: If nothing was.
        """
        if not self._about.is_file():
            raise StoreError(f"{self.folder} holds no run; make one with: pmaf reproduce --out DIR")
        try:
            return json.loads(self._about.read_text())
        except (ValueError, OSError) as error:
            raise StoreError(f"{self._about} cannot be read ({error})") from error

    def path(self, experiment: str, cell: Cell) -> Path:
        return self.folder / "cells" / experiment / f"{cell.key}.json"

    def row(self, experiment: str, cell: Cell) -> Row | None:
        """The saved row of a cell, None if there is none."""
        path = self.path(experiment, cell)
        return self._read(path) if path.exists() else None

    def rows(self, experiment: str) -> list[Row]:
        """All saved rows of an experiment."""
        return [
            self._read(path)
            for path in sorted((self.folder / "cells" / experiment).glob("[!.]*.json"))
        ]

    def save(self, experiment: str, cell: Cell, row: Row) -> None:
        write_whole(self.path(experiment, cell), json.dumps(asdict(row)))

    def _read(self, path: Path) -> Row:
        try:
            return Row(**json.loads(path.read_text()))
        except (ValueError, TypeError, OSError) as error:
            raise StoreError(
                f"{path} cannot be read ({error}); delete it, and the next run measures it again"
            ) from error


def _words(about: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in about.items())
