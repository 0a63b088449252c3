"""Solves by products alone, at sizes no dense matrix has, beside what is used for them today."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

import pmaf
from pmaf_lab.bench.present import OURS
from pmaf_lab.experiments import (
    Cell,
    Experiment,
    Figure,
    Finding,
    Measured,
    Row,
    Scale,
    Section,
    Table,
)
from pmaf_lab.experiments.measure import median_seconds, peak_resident

if TYPE_CHECKING:
    pass

Solve = Callable[[], Any]


@dataclass(frozen=True)
class Question:
    """A matrix whose top eigenvector is asked for.

    Attributes:
        leaf: What gradients are wanted for.
        problem: The same question to us, given the leaf.
        product: With a vector `(n,)` in float64, to judge answers by.
        others: Forward passes of the competitors; they return a vector.
    """

    leaf: Tensor
    problem: Callable[[Tensor], pmaf.PrincipalEigenvectors]
    product: Callable[[Tensor], Tensor]
    others: Mapping[str, Solve]

    def residual(self, vector: Any) -> float:
        """`‖Ay − λy‖/|λ|`, in float64."""
        if not isinstance(vector, Tensor):
            vector = torch.tensor(vector.copy())  # whose strides may be negative
        y = vector.detach().double().flatten()
        y = y / y.norm()
        image = self.product(y)
        value = y @ image
        return float((image - value * y).norm() / value.abs())


class ByProducts(Experiment):
    """Times of both passes and of others' forward passes, the residual of each beside it."""

    sizes: ClassVar[Mapping[Scale, Sequence[Any]]]
    families: ClassVar[Sequence[str]]
    others: ClassVar[Sequence[str]]

    @abstractmethod
    def question(self, family: str, size: Any) -> Question: ...

    @abstractmethod
    def entries(self, size: Any) -> int:
        """Numbers that a product reads."""

    def cells(self, scale: Scale) -> list[Cell]:
        return [
            Cell({"family": family, "size": size}, cost=1 + self.entries(size) / 2e5)
            for family in self.families
            for size in self.sizes[scale]
        ]

    def measure(self, device: torch.device, *, family: str, size: Any) -> dict[str, Any]:
        asked = self.question(family, size)
        leaf = asked.leaf.requires_grad_()
        problem = asked.problem(leaf)
        found: list[pmaf.Solution] = []

        def forward() -> None:
            found[:] = [pmaf.solve(problem)]

        def backward() -> None:
            (gradient,) = torch.autograd.grad(found[0].value.sum(), leaf, retain_graph=True)
            del gradient

        options: dict[str, Any] = dict(budget=_BUDGET, repeats=_REPEATS)
        forward()
        backward()
        peak = peak_resident()
        noise = torch.randn(problem.n, generator=torch.Generator().manual_seed(1))
        near = found[0].value.detach() + 0.01 * noise / noise.norm()
        warm = pmaf.solve(problem, init=near)
        values: dict[str, Any] = {
            OURS: {
                "forward": median_seconds(forward, device, **options),
                "backward": median_seconds(backward, device, **options),
                "products": int(found[0].iterations),
                "products warm": int(warm.iterations),
                "products backward": found[0].backward and found[0].backward.iterations,
                "residual": asked.residual(found[0].value),
            },
            "peak": peak,
            "leaf": leaf.numel() * leaf.element_size(),
        }
        for name, solve in asked.others.items():
            answers: list[Any] = []

            def run(solve: Solve = solve, answers: list[Any] = answers) -> None:
                answers[:] = [solve()]

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # how far they come is in the residual
                try:
                    spent = median_seconds(run, device, **options)
                except Exception as error:  # what they cannot do is an answer, too
                    values[name] = {"skipped": f"{type(error).__name__}: {error}".splitlines()[0]}
                    continue
            values[name] = {"forward": spent, "residual": asked.residual(answers[0])}
        return values

    def present(self, rows: Sequence[Row]) -> Section:
        done = [row for row in rows if row.status == "done"]
        if not done:
            return Section()
        notes = dict.fromkeys(
            f"{name}: {entry['skipped']}."
            for row in done
            for name, entry in row.values.items()
            if isinstance(entry, dict) and "skipped" in entry
        )
        return Section(
            findings=self.findings(done),
            figures=self.figures(done),
            tables=[self.table(done)],
            notes=list(notes),
        )

    def table(self, rows: Sequence[Row]) -> Table:
        ours = ("forward, s", "backward, s", "products", "warm", "backward")
        columns = [("", "matrix"), ("", "size"), *((OURS, part) for part in ours)]
        columns += [("forward ÷ ours", other) for other in self.others]
        columns += [("residual", who) for who in (OURS, *self.others)]
        lines = []
        for row in rows:
            mine = row.values[OURS]
            line: list[Any] = [row.params["family"], self.label(row.params["size"])]
            line += [f"{mine[part]:.3f}" for part in ("forward", "backward")]
            line += [mine[f"products{part}"] for part in ("", " warm", " backward")]
            others = [row.values.get(other, {}) for other in self.others]
            line += [
                f"{other['forward'] / mine['forward']:.2f}" if "forward" in other else None
                for other in others
            ]
            line += [
                f"{entry['residual']:.0e}" if "residual" in entry else None
                for entry in (mine, *others)
            ]
            lines.append(line)
        note = "Warm: from a start that is off by 1 %; a product is one of two vectors then."
        return Table.of(f"bench-{self.name}", self.title, columns, lines, note=note)

    def label(self, size: Any) -> str:
        return f"{size:,}"

    def findings(self, rows: Sequence[Row]) -> list[Finding]:
        return [
            Finding(
                f"{self.title}: {family}, fastest of the others with a residual like ours",
                "ours ahead",
                self._closest(rows, family),
                self._ahead(rows, family),
            )
            for family in self.families
        ]

    def _margins(self, rows: Sequence[Row], family: str) -> list[tuple[float, str, str]]:
        """Time of others ÷ ours, of those that are about as accurate."""
        return [
            (entry["forward"] / mine["forward"], name, self.label(row.params["size"]))
            for row in rows
            if row.params["family"] == family
            for mine in (row.values[OURS],)
            for name in self.others
            for entry in (row.values.get(name, {}),)
            if "forward" in entry and entry["residual"] <= 10 * mine["residual"]
        ]

    def _closest(self, rows: Sequence[Row], family: str) -> str:
        margins = self._margins(rows, family)
        if not margins:
            return "none is as accurate"
        least, name, size = min(margins)
        return f"{name} takes {least:.2f}× our time at {size}"

    def _ahead(self, rows: Sequence[Row], family: str) -> bool:
        return all(margin[0] >= 1 for margin in self._margins(rows, family))

    def figures(self, rows: Sequence[Row]) -> list[Figure]:
        return []

    def measured(self, row: Row) -> Measured:
        """Ours in seconds, the others as multiples of it, products, residuals and memory."""
        mine, peak = row.values[OURS], row.values["peak"]
        numbers: dict[str, float | None] = {
            f"{OURS} {name}": mine[name]
            for name in ("forward", "backward", "products", "products warm", "products backward")
        }
        numbers[f"{OURS} residual"] = mine["residual"]
        for name in self.others:
            entry = row.values.get(name, {})
            if "forward" in entry:
                numbers[f"{name} forward"] = entry["forward"] / mine["forward"]
                numbers[f"{name} residual"] = entry["residual"]
        if peak is not None:
            numbers["peak, GB"] = peak / 1e9
            numbers["peak beyond data and gradient, GB"] = (peak - 2 * row.values["leaf"]) / 1e9
        return Measured(row.params["family"], self.label(row.params["size"]), numbers)


# A pass is repeated for so many seconds, at most so many times.
_BUDGET, _REPEATS = 4.0, 5
