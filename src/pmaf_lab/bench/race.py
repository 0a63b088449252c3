"""Competitors run in turn, so that noise hits all of them alike."""

from __future__ import annotations

import importlib.util
import statistics
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pmaf_lab.bench.growth import Growth, Sweep, growth_findings, growth_table
from pmaf_lab.bench.present import (
    OURS,
    is_off,
    ratio,
    ratios_table,
    rows_of,
    shape,
    sizes_figure,
    skipped,
    summary_tables,
)
from pmaf_lab.bench.present import seconds as seconds_of
from pmaf_lab.experiments import Cell, Experiment, Finding, Measured, Row, Scale, Section
from pmaf_lab.experiments.measure import seconds

Result = tuple[Tensor, ...]
Judge = Callable[[Result, Result | None], dict[str, float | None]]


@dataclass(frozen=True)
class Competitor:
    """Something a user would use instead.

    Attributes:
        solve: From the inputs to the outputs.
        differentiable: Whether gradients flow through `solve`.
        largest: Entries of the first input above which a run would take minutes.
        needs: The module it is made of, where that is optional.
    """

    solve: Callable[..., Result]
    differentiable: bool = True
    largest: float = float("inf")
    needs: str = "torch"

    def reason(self, size: int) -> str | None:
        """Why it does not take part, None if it does."""
        if importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        return None if size <= self.largest else "takes minutes at this size"


class Task(NamedTuple):
    """What every competitor is given: inputs that require gradients, a vector for the loss."""

    inputs: Result
    c: Tensor


class Race(Experiment):
    """Competitors on families of problems, each family at many shapes.

    The first competitor is ours, the second the one it is held against.
    """

    competitors: ClassVar[Mapping[str, Competitor]]
    families: ClassVar[Sequence[str]]
    quick_families: ClassVar[Sequence[str]]
    shapes: ClassVar[Mapping[Scale, Sequence[tuple[int, ...]]]]
    errors: ClassVar[Sequence[str]]
    sweeps: ClassVar[Sequence[Sweep]] = ()
    compared: ClassVar[Sequence[str]] = ("both",)  # passes to sum up against the second
    # What the axes of a shape are, as the tables say it, and the panels of the figures.
    axes: ClassVar[str]
    panel: ClassVar[Sweep]

    @abstractmethod
    def task(self, family: str, shape: Sequence[int], device: torch.device) -> Task:
        """A problem of a family."""

    @abstractmethod
    def loss(self, outputs: Result, c: Tensor) -> Tensor:
        """A scalar, to differentiate."""

    @abstractmethod
    def judge(self, task: Task) -> Judge:
        """From outputs and gradients to their errors, as named in `errors`."""

    def findings(self, by_family: Mapping[str, Sequence[Row]]) -> list[Finding]:
        """What was promised of this race, and what came of it."""
        return []

    def cells(self, scale: Scale) -> list[Cell]:
        families, budget = (
            (self.quick_families, 0.15) if scale == "quick" else (self.families, 0.25)
        )
        return [
            Cell(
                {"family": family, "shape": list(shape), "budget": budget},
                1 + budget * len(self.competitors),
            )
            for family in families
            for shape in self.shapes[scale]
        ]

    def measure(
        self, device: torch.device, *, family: str, shape: list[int], budget: float
    ) -> dict[str, Any]:
        task = self.task(family, shape, device)
        loss = partial(self.loss, c=task.c)
        results = race(self.competitors, task.inputs, loss, device, budget)
        judge = self.judge(task)
        found: dict[str, Any] = {}
        for name, result in results.items():
            if "skipped" in result:
                found[name] = result
            else:
                outputs, gradients = result.pop("outputs"), result.pop("gradients")
                found[name] = result | judge(outputs, gradients)
        return found

    def present(self, rows: Sequence[Row]) -> Section:
        by_family = {
            family: sorted(found, key=lambda row: row.params["shape"])
            for family in self.families
            if (found := rows_of(rows, family=family))
        }
        panels = {
            family: chosen
            for family, found in by_family.items()
            if (chosen := self.panel.of(found))
        }
        names = list(self.competitors)
        other = names[1]
        growth = [
            entry
            for sweep in self.sweeps
            for family, found in by_family.items()
            if (entry := Growth.of(sweep, family, found, other)) is not None
        ]
        figures = [
            sizes_figure(
                f"bench-{self.name}",
                f"Both passes, {self.panel.label}, as multiples of ours (forward alone of what has "
                "no gradient); above the line is slower than ours.",
                panels,
                names,
                ratio,
                "time ÷ ours",
            ),
            sizes_figure(
                f"bench-{self.name}-times",
                f"Both passes, {self.panel.label}: seconds against n.",
                panels,
                names,
                seconds_of,
                "seconds",
            ),
        ]
        tables = [
            table
            for part in self.compared
            for table in summary_tables(f"bench-{self.name}-{part}", by_family, other, part)
        ]
        tables += [
            ratios_table(
                f"bench-{self.name}-{family}", f"{family}, {self.axes}", found, names, self.errors
            )
            for family, found in by_family.items()
        ]
        if growth:
            tables.append(growth_table(f"bench-{self.name}-growth", growth, other))
        return Section(
            findings=[*self.findings(by_family), *growth_findings(self.title, growth, other)],
            figures=figures if panels else [],
            tables=tables,
            notes=skipped([row for found in by_family.values() for row in found]),
        )

    def measured(self, row: Row) -> Measured:
        """Ours in seconds, the others as multiples of it, and errors of ours and the second."""
        found = row.values
        first, second, *_ = self.competitors
        numbers: dict[str, float | None] = {
            f"{OURS} {part}": seconds_of(found, OURS, part) for part in ("forward", "backward")
        }
        for name, competitor in self.competitors.items():
            if name == first or "forward" not in found.get(name, {}):
                continue
            for part in self.compared if competitor.differentiable else ("forward",):
                numbers[f"{name} {part}"] = ratio(found, name, part)
            if is_off(found, name, self.errors):
                numbers[f"{name} off"] = True
        for who in (first, second):
            for error in self.errors:
                numbers[f"{who} {error}"] = found.get(who, {}).get(error)
        return Measured(row.params["family"], shape(row), numbers)


def race(
    competitors: Mapping[str, Competitor],
    inputs: Result,
    loss: Callable[[Result], Tensor],
    device: torch.device,
    budget: float,
    repeats: int = 60,
    turn: float = 0.004,
    clock: Callable[[], float] | None = None,
) -> dict[str, dict[str, Any]]:
    """Median seconds of both passes, the outputs and the gradients, of every competitor.

    They take turns. A turn of short runs has several, and the first of them does not count, lest
    what the last competitor left behind, threads that still spin or an empty cache, be counted as
    the time of this one. The speed of a shared machine changes from round to round, by up to a
    factor of two. So the times of the others are compared with those of the first competitor in the
    same round: they are the median of these ratios, times the median of the first.

    Args:
        inputs: Tensors that require gradients.
        loss: A scalar of the outputs, to differentiate. It is not timed.
        budget: Seconds after which a competitor drops out of the next round, but not before it has
            had three turns, unless its first run took longer.
        repeats: Rounds in which everybody has a turn.
        turn: Seconds after which no other run of a turn begins.
        clock: What tells the time, that of the wall unless given.
    """
    results: dict[str, dict[str, Any]] = {}
    runs: dict[str, Runs] = {}
    times: dict[str, tuple[list[float], list[float]]] = {}
    turns: dict[str, list[Turn]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a solver that stops early shows in its error
        for name, competitor in competitors.items():
            reason = competitor.reason(inputs[0].numel())
            if reason is None:
                try:
                    first = runs[name] = Runs(competitor, inputs, loss, device, clock)
                    results[name] = dict(first.first)
                    taken = first.forward, first.backward
                    # The first run warms up; one that takes very long has to do.
                    long = sum(taken) > _VERY_LONG * budget
                    times[name] = ([taken[0]], [taken[1]]) if long else ([], [])
                    continue
                except Exception as error:  # whatever it is, the others go on
                    reason = f"{type(error).__name__}: {error}".splitlines()[0]
            results[name] = {"skipped": reason}
        # SciPy comes last: its threads are not torch's, and spin beside them for a while.
        groups = [
            [name for name in times if foreign == (competitors[name].needs == "scipy")]
            for foreign in (False, True)
        ]
        for name in (name for group in groups for _ in range(repeats) for name in group):
            (forward, backward), run = times[name], runs[name]
            # One run may have been held up by another process: it takes three to tell.
            enough = _FEWEST if run.warming < budget else 0
            if len(turns.get(name, ())) >= enough and sum(forward) + sum(backward) >= budget:
                continue
            if not forward or forward[-1] + backward[-1] < _LONG:
                run.again()
            spent, begin = 0.0, len(forward)
            while spent == 0 or spent < turn:
                run.again()
                forward.append(run.forward)
                backward.append(run.backward)
                spent += run.forward + run.backward
            turns.setdefault(name, []).append(
                Turn(statistics.median(forward[begin:]), statistics.median(backward[begin:]))
            )
    whole = {
        name: Turn(*(statistics.median(x) for x in measured)) for name, measured in times.items()
    }
    first = next(iter(times), "")
    for name, taken in whole.items():
        rounds = list(zip(turns.get(name, []), turns.get(first, [])))
        if name in groups[0] and name != first and len(rounds) > 1:
            taken = Turn(*map(partial(_relative, rounds, whole[first]), range(2)))
        results[name]["forward"] = taken.forward
        results[name]["backward"] = taken.backward if competitors[name].differentiable else None
    return results


class Turn(NamedTuple):
    """Median seconds of the runs of a turn."""

    forward: float
    backward: float


def _relative(rounds: Sequence[tuple[Turn, Turn]], first: Turn, part: int) -> float:
    """Seconds of a pass, from its ratios to that of the first competitor in the same rounds."""
    ratios = [turn[part] / other[part] for turn, other in rounds if other[part] > 0]
    if not ratios:
        return statistics.median(turn[part] for turn, _ in rounds)
    return statistics.median(ratios) * first[part]


# Seconds of a run beside which that does not matter.
_LONG = 0.05
_FEWEST = 3  # turns
# A run is measured by its first, and only, if it takes so many times what there is time for.
_VERY_LONG = 8


class Runs:
    """The runs of one competitor, and what came of the first.

    The gradients of the loss in the outputs are computed once. They are the same in every run.
    """

    def __init__(
        self,
        competitor: Competitor,
        inputs: Result,
        loss: Callable[[Result], Tensor],
        device: torch.device,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.competitor, self.inputs = competitor, inputs
        timed = seconds if clock is None else partial(seconds, clock=clock)
        self.seconds = partial(timed, device=device)
        self.outputs: Result = ()
        self.gradients: Result | None = None
        self.forward, self.backward = self.seconds(self._solve), 0.0
        if competitor.differentiable:
            recorded = [i for i, x in enumerate(self.outputs) if x.requires_grad]
            # Of copies: one output may be computed from another, whose graph this would free.
            given = [x.detach().requires_grad_(x.requires_grad) for x in self.outputs]
            incoming = torch.autograd.grad(
                loss(tuple(given)), [given[i] for i in recorded], allow_unused=True
            )
            self.incoming = {i: v for i, v in zip(recorded, incoming) if v is not None}
            self.backward = self.seconds(self._differentiate)
        self.warming = self.forward + self.backward
        self.first = {
            "outputs": tuple(x.detach() for x in self.outputs),
            "gradients": self.gradients,
        }

    def again(self) -> None:
        """Another run."""
        self.forward = self.seconds(self._solve)
        if self.competitor.differentiable:
            self.backward = self.seconds(self._differentiate)

    def _solve(self) -> None:
        self.outputs = self.competitor.solve(*self.inputs)

    def _differentiate(self) -> None:
        used = [self.outputs[i] for i in self.incoming]
        self.gradients = torch.autograd.grad(used, self.inputs, [*self.incoming.values()])


def mean(x: Tensor) -> float | None:
    """Of what is finite throughout, and there at all."""
    return float(x.mean()) if x.numel() and bool(x.isfinite().all()) else None
