"""What it costs to trace a layer, and what a traced layer costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from pmaf_lab.bench.calls import CALLS, Call, loss
from pmaf_lab.bench.present import seconds
from pmaf_lab.bench.race import Competitor, Result, race
from pmaf_lab.experiments import Cell, Experiment, Finding, Measured, Row, Scale, Section, Table

EAGER, COMPILED = "eager", "compiled"
# The most seconds of the processor that the first call may take, and times that of eager.
FIRST, SLOWER = 3.0, 1.2
# Without code generation: what is traced, not what is made of it.
BACKEND = "aot_eager"


def _empty(*inputs: Tensor) -> Result:
    """As many inputs, both passes, and next to nothing to trace."""
    total = inputs[0].square().sum()
    for x in inputs[1:]:
        total = total + x.square().sum()
    return (total,)


class Traces(Experiment):
    """A cell for each layer and shape, and one for a function of as many tensors that is empty.

    Each runs in a process of its own, so that every first call is one.
    """

    name = "traces"
    title = "Layers under torch.compile"
    about = (
        "Seconds of the processor for the first call of torch.compile(layer, backend="
        f'"{BACKEND}", fullgraph=True), both passes, in a fresh process that has imported the '
        "compiler, beyond those of an empty function of as many tensors; and both passes of later "
        "calls as multiples of those of the eager layer."
    )
    reduced = "four layers, one shape."
    layers: ClassVar[Sequence[str]] = (
        "less",
        "less weights",
        "ied",
        "ied k=3, reference tensor",
        "nullspace",
        "isvd k=2",
        "spectral sqrt",
        "pair M",
    )
    quick: ClassVar[Sequence[str]] = ("less", "ied", "ied k=3, reference tensor", "spectral sqrt")
    # The batch, and which of the sizes of a call: 3, 9 and 32 columns.
    shapes: ClassVar[Sequence[tuple[int, int]]] = ((64, 1), (5, 2), (1000, 0))

    def cells(self, scale: Scale) -> list[Cell]:
        names = self.quick if scale == "quick" else self.layers
        shapes = self.shapes[:1] if scale == "quick" else self.shapes
        return [
            Cell({"layer": name, "shape": _shape(name, *shape), "empty": empty}, cost)
            for shape in shapes
            for name in names
            for empty, cost in ((True, 2.0), (False, 20.0))
        ]

    def measure(
        self,
        device: torch.device,
        *,
        layer: str,
        shape: list[int],
        empty: bool,
        backend: str = BACKEND,
        budget: float = 0.25,
    ) -> dict[str, Any]:
        call = CALLS[layer]
        inputs = call.inputs(next(iter(call.source.families)), shape, device)
        known = call.known(inputs)
        eager = _empty if empty else _bound(call)
        compiled = torch.compile(eager, backend=backend, fullgraph=True)
        start = time.process_time()
        torch.autograd.grad(loss(compiled(*inputs, *known)), inputs)
        first = time.process_time() - start
        if empty:
            return {"first": first}
        competitors = {
            EAGER: Competitor(lambda *x: eager(*x, *known)),
            COMPILED: Competitor(lambda *x: compiled(*x, *known)),
        }
        # On one thread the time of the processor says the same, and others do not change it.
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        clock = time.process_time if alone else None
        found = race(competitors, inputs, loss, device, budget, clock=clock)
        for entry in found.values():
            entry.pop("outputs", None)
            entry.pop("gradients", None)
        return {"first": first, **found}

    def present(self, rows: Sequence[Row]) -> Section:
        found = _joined(rows)
        if not found:
            return Section()
        names = list(dict.fromkeys(name for name, _ in found))
        chosen = [(batch, n) for batch, n in self.shapes if any(key[1] == batch for key in found)]
        heads = [f"{batch}×{COLUMNS[n]}" for batch, n in chosen]
        lines = []
        for name in names:
            values = [found.get((name, batch), {}) for batch, _ in chosen]
            lines.append([name, *(x.get(key) for key in NUMBERS for x in values)])
        table = Table.of(
            "bench-traces",
            "The first call, and later calls as multiples of eager ones",
            [("", "layer"), *((key, head) for key in NUMBERS for head in heads)],
            lines,
            formats={(key, head): "{:.2f}" for key in NUMBERS for head in heads},
            note=f"Goals: at most {FIRST:g} s of the processor, and {SLOWER:g} times eager.",
        )
        findings = []
        for name in names:
            for key, goal, unit in ((BEYOND, FIRST, " s"), (LATER, SLOWER, "×")):
                values = [
                    (number, f"{batch}×{COLUMNS[n]}")
                    for batch, n in chosen
                    if (number := found.get((name, batch), {}).get(key)) is not None
                ]
                if values:
                    most, where = max(values)
                    findings.append(
                        Finding(
                            f"{name}: {key}, most",
                            f"at most {goal:g}{unit}",
                            f"{most:.2f}{unit} ({where})",
                            most <= goal,
                        )
                    )
        return Section(findings=findings, tables=[table])

    def measured(self, row: Row) -> Measured:
        """Of one cell alone; the page of a run has the differences to the empty functions."""
        numbers = {"first": row.values.get("first"), **_times(row.values)}
        name = f"{row.params['layer']}{', empty' if row.params['empty'] else ''}"
        return Measured(name, "×".join(str(x) for x in row.params["shape"]), numbers)


COLUMNS = (3, 9, 32)
BEYOND, LATER = "first call, s of the processor", "later calls ÷ eager"
NUMBERS = (BEYOND, LATER)


def _shape(layer: str, batch: int, which: int) -> list[int]:
    return [batch, *CALLS[layer].source.sizes[which]]


def _bound(call: Call) -> Callable[..., Result]:
    """A function that a trace can follow from its first line."""
    return lambda *x: call.ours(*x)


def _times(values: Mapping[str, Any]) -> dict[str, float | None]:
    """Both passes of later calls: of the eager layer in seconds, and how they compare."""
    eager, compiled = (seconds(values, name, "both") for name in (EAGER, COMPILED))
    slower = compiled / eager if eager and compiled is not None else None
    return {"eager": eager, LATER: slower}


def _joined(rows: Sequence[Row]) -> dict[tuple[str, int], dict[str, float | None]]:
    """`NUMBERS` by layer and batch."""
    done = [row for row in rows if row.status == "done"]
    empty = {_key(row): row.values["first"] for row in done if row.params["empty"]}
    found = {}
    for row in done:
        if not row.params["empty"]:
            numbers = _times(row.values)
            if _key(row) in empty:
                numbers[BEYOND] = row.values["first"] - empty[_key(row)]
            found[_key(row)] = numbers
    return found


def _key(row: Row) -> tuple[str, int]:
    return row.params["layer"], row.params["shape"][0]
