"""Peak memory of both passes, every competitor in a process of its own."""

from __future__ import annotations

import tracemalloc
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pmaf_lab.bench.present import OURS, shape
from pmaf_lab.bench.race import Race, Result
from pmaf_lab.experiments import (
    Cell,
    Experiment,
    Finding,
    Measured,
    Row,
    Scale,
    Section,
    Table,
)
from pmaf_lab.experiments.measure import peak_bytes


class MemoryRace(Experiment):
    """The competitors of a race on its first family, at shapes of its own."""

    reduced = "the first shapes only."

    def __init__(self, race: Race, shapes: Mapping[Scale, Sequence[tuple[int, ...]]]) -> None:
        self.race, self.shapes = race, shapes
        self.name = f"{race.name}-memory"
        self.title = f"{race.title}: memory"
        self.about = (
            "The most a pass holds at a time beyond what was there before it, as a multiple of "
            "the inputs, each competitor in a process of its own. Of torch's allocations; of "
            "NumPy's for SciPy."
        )
        self.needs = (type(race).__module__,)

    def cells(self, scale: Scale) -> list[Cell]:
        return [
            Cell({"shape": list(shape), "competitor": name})
            for shape in self.shapes[scale]
            for name in self.race.competitors
        ]

    def measure(self, device: torch.device, *, shape: list[int], competitor: str) -> dict[str, Any]:
        task = self.race.task(self.race.families[0], shape, device)
        entrant = self.race.competitors[competitor]
        reason = entrant.reason(task.inputs[0].numel())
        if reason is not None:
            return {"skipped": reason}
        warnings.simplefilter("ignore")  # a solver that stops early shows in the other race
        outputs: list[Result] = []
        held = sum(x.numel() * x.element_size() for x in task.inputs)
        peak = _allocated if not entrant.differentiable else partial(peak_bytes, device=device)
        try:
            forward = peak(lambda: outputs.append(entrant.solve(*task.inputs)))
        except Exception as error:  # what it cannot do is an answer, not a failure of ours
            return {"skipped": f"{type(error).__name__}: {error}".splitlines()[0]}
        if not entrant.differentiable:
            return {"forward": forward / held, "backward": None}
        loss = self.race.loss(outputs.pop(), task.c)
        try:
            backward = peak(lambda: torch.autograd.grad(loss, task.inputs))
        except Exception as error:
            return {"skipped": f"{type(error).__name__}: {error}".splitlines()[0]}
        return {"forward": forward / held, "backward": backward / held}

    def present(self, rows: Sequence[Row]) -> Section:
        done = [row for row in rows if row.status == "done"]
        found = {(shape(row), row.params["competitor"]): row.values for row in done}
        shapes = list(dict.fromkeys(size for size, _ in found))
        lines = [
            [name, *(found.get((size, name), {}).get(part) for size in shapes for part in _PARTS)]
            for name in self.race.competitors
        ]
        columns = [("", ""), *((size, part) for size in shapes for part in _PARTS)]
        table = Table.of(
            f"bench-{self.name}",
            f"Peak memory ÷ inputs, {self.race.axes}",
            columns,
            lines,
            formats=dict.fromkeys(_PARTS, "{:.1f}"),
        )
        most = [
            (values["backward"], size)
            for (size, name), values in found.items()
            if name == OURS and values.get("backward") is not None
        ]
        if not most:
            return Section(tables=[table] if done else [])
        peak, where = max(most)
        finding = Finding(
            f"{self.race.title}: peak of the backward, most",
            "at most 2.0× the inputs",
            f"{peak:.1f}× ({where})",
            peak <= 2,
        )
        return Section(findings=[finding], tables=[table])

    def measured(self, row: Row) -> Measured:
        """Peaks as multiples of the inputs; competitors take the place of families."""
        numbers = {part: row.values.get(part) for part in _PARTS}
        return Measured(row.params["competitor"], shape(row), numbers)


_PARTS = ("forward", "backward")


def _allocated(run: Callable[[], object]) -> int:
    """The most that NumPy holds at a time during a call."""
    tracemalloc.start()
    run()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak
