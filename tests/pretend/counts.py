"""What the host does to the device: events, the lines that cause them, and their numbers."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pmaf

Kind = Literal["launch", "wait", "copy", "linalg"]

LIBRARY = f"{Path(pmaf.__file__).parent}/"  # the files whose lines are named


@dataclass(frozen=True)
class Event:
    """One thing that the host does to the device."""

    kind: Kind
    call: str  # the ATen call
    count: int
    stack: tuple[str, ...]  # lines of the library, the innermost first

    @property
    def line(self) -> str:
        """The line of the library that causes it; calls of torch's own derivatives have none."""
        return self.stack[0] if self.stack else "torch"


@dataclass
class Counts:
    """Everything that a piece of code does to the device."""

    events: list[Event] = field(default_factory=list)

    @property
    def launches(self) -> int:
        return self.total("launch")

    @property
    def waits(self) -> int:
        """How often the host waits for the device; it does so in copies from pageable memory."""
        return self.total("wait") + self.total("copy")

    def total(self, kind: Kind) -> int:
        return sum(x.count for x in self.events if x.kind == kind)

    def by_line(self, kind: Kind) -> Counter[str]:
        return self._by(kind, "line")

    def by_call(self, kind: Kind) -> Counter[str]:
        return self._by(kind, "call")

    def _by(self, kind: Kind, name: str) -> Counter[str]:
        found: Counter[str] = Counter()
        for x in self.events:
            if x.kind == kind:
                found[getattr(x, name)] += x.count
        return found

    @property
    def decompositions(self) -> str:
        """The decompositions, each with the number of its calls of cuSOLVER."""
        found = self.by_call("linalg").items()
        return " ".join(f"{call}×{n}" if n > 1 else call for call, n in found)


class CaptureError(RuntimeError):
    """The host waits for the device while a CUDA graph is captured."""


# Events come from the threads of backward passes, too.
_lock = threading.Lock()
_counting: list[Counts] = []
_capturing: list[bool] = [False]


@contextmanager
def counted() -> Iterator[Counts]:
    """Count what all threads do to the device in this context, which may be inside of another."""
    counts = Counts()
    with _lock:
        _counting.append(counts)
    try:
        yield counts
    finally:
        with _lock:
            # Found by identity, because counts that are equal may be different ones.
            _counting[:] = [x for x in _counting if x is not counts]


@contextmanager
def capturing(wanted: bool) -> Iterator[None]:
    """Raise an error where the capture of a CUDA graph would fail."""
    _capturing.append(wanted)
    try:
        yield
    finally:
        _capturing.pop()


def launched(name: str, count: int = 1) -> None:
    """Count a kernel that somebody else has started, who reads and writes `Pretend.inner`."""
    add("launch", name, count)


def active() -> bool:
    """Whether events are counted, or may be errors."""
    return bool(_counting) or _capturing[-1]


def add(kind: Kind, call: str, count: int = 1) -> None:
    """Count an event, with the stack of the library above it."""
    capturing = _capturing[-1] and kind in ("wait", "copy")
    if not count or not active():
        return
    event = Event(kind, call, count, _stack())
    with _lock:
        for counts in _counting:
            counts.events.append(event)
    if capturing:
        raise CaptureError(
            f"the host waits in {call} while a graph is captured, at "
            + (" < ".join(event.stack[:4]) or "a line outside of the library")
        )


def _stack() -> tuple[str, ...]:
    lines: list[str] = []
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(LIBRARY):
            lines.append(f"{path.removeprefix(LIBRARY)}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(lines)
