"""A folder of finished cells."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pmaf_lab.experiments.experiment import Cell, Row


class StoreError(RuntimeError):
    """The folder cannot be used; the message says why and what to do."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that it is there whole or not at all.

    Raises:
        StoreError: If it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        reason = error.strerror or error
        raise StoreError(
            f"cannot write to {path.parent} ({reason}); make room or choose another folder "
            "with --out"
        ) from error


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
        if self._about.is_file():
            earlier = self.about()
            commands = [*earlier.pop("commands"), *commands]
            if earlier != dict(about):
                raise StoreError(
                    f"{self.folder} holds a run with {_words(earlier)}, not {_words(about)}; "
                    "choose another folder with --out"
                )
        unique = list(dict.fromkeys(commands))
        write_whole(self._about, json.dumps({**about, "commands": unique}, indent=1))

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
            return {"commands": [], **json.loads(self._about.read_text())}
        except (ValueError, TypeError, OSError) as error:
            raise StoreError(
                f"{self._about} cannot be read ({error}); delete it and run the same command again"
            ) from error

    def path(self, experiment: str, cell: Cell) -> Path:
        return self.folder / "cells" / experiment / f"{cell.key}.json"

    def row(self, experiment: str, cell: Cell) -> Row | None:
        """The saved row of a cell, None if there is none.

        Raises:
            StoreError: If there is one that cannot be read.
        """
        path = self.path(experiment, cell)
        try:
            return Row(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, OSError) as error:
            raise StoreError(f"{path} cannot be read ({error})") from error

    def save(self, experiment: str, cell: Cell, row: Row) -> None:
        write_whole(self.path(experiment, cell), json.dumps(asdict(row)))


def _words(about: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in about.items())
