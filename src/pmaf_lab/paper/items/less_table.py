"""The appendix table: a thousand random problems of three sizes, ten methods."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import torch

import pmaf
from pmaf.solvers import Auto
from pmaf_lab.experiments import Cell, Experiment, Figure, Finding, Row, Scale, Section, Table
from pmaf_lab.paper import less, published

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

    from pmaf_lab.experiments.plots import Theme

OURS = "ours"
SCIPY = "SciPy"
SIZES = ((2, 2), (64, 32), (1024, 256))
COUNTS = {
    "quick": {(2, 2): 1000, (64, 32): 100, (1024, 256): 2},
    "full": {(2, 2): 1000, (64, 32): 1000, (1024, 256): 1000},
}
# Problems a cell, so that an interruption loses little and a batch fits into memory.
BLOCK = {(2, 2): 1000, (64, 32): 1000, (1024, 256): 100}
# Seconds a problem, for SciPy on one core and for one of ours.
COST = {(2, 2): (0.01, 0.001), (64, 32): (0.03, 0.003), (1024, 256): (0.4, 0.1)}
NOTHING = "–"
FIGURES = ("In", "Out", "Imp.", "MRE %")


class LessTable(Experiment):
    name = "less-table"
    title = "LESS: a thousand random problems of three sizes"
    about = (
        "The paper's appendix table. In and Out count the runs that reach 100 iterations, by "
        "where the unconstrained solution lies; Imp. counts objectives no larger than SciPy's "
        "(SLSQP), up to six digits; MRE is the mean relative error of the objective against "
        "SciPy's, in percent. “Above” is not in the paper: how many solutions are more than 1e-5 "
        "(relative) above the global minimum, which float64 and a certificate give. What float32 "
        "cannot hold does not count: where rounding the exact minimiser to float32 raises the "
        "objective, as it does most where the minimum is nearly zero, that objective is compared "
        "with. All counts are per 1,000 problems."
    )
    reduced = "all 1,000 problems of 2×2, the first 100 of 64×32, the first 2 of 1024×256."
    needs = ("scipy",)

    def cells(self, scale: Scale) -> list[Cell]:
        cells = []
        for size, count in COUNTS[scale].items():
            for method in (SCIPY, *less.METHODS, OURS):
                for first in range(0, count, BLOCK[size]):
                    block = min(BLOCK[size], count - first)
                    cost = 0.3 + COST[size][method != SCIPY] * block
                    m, n = size
                    params = {"m": m, "n": n, "method": method, "first": first, "count": block}
                    cells.append(Cell(params, cost))
        return cells

    def measure(
        self, device: torch.device, *, m: int, n: int, method: str, first: int, count: int
    ) -> dict[str, Any]:
        problem = less.problems(m, n, range(first, first + count))
        if method == SCIPY:
            workers = 1 if m * n * count < 500_000 else torch.get_num_threads()
            u = less.scipy_points(problem, workers)
            iterations = torch.zeros(count)
        else:
            there = pmaf.SphereLeastSquares(problem.matrix.to(device), problem.b.to(device))
            solver = Auto() if method == OURS else less.METHODS[method]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", pmaf.ConvergenceWarning)  # the table shows it
                solution = pmaf.solve(there, solver=solver)
            u, iterations = solution.value.cpu(), solution.iterations.cpu()
        exact = pmaf.SphereLeastSquares(problem.matrix.double(), problem.b.double())
        found = {
            "inner": less.is_inner(problem).tolist(),
            "iterations": iterations.int().tolist(),
            "objective": problem.objective(u.to(problem.matrix.dtype)).tolist(),
            "exact_objective": exact.objective(u.double()).tolist(),
        }
        if method == OURS:
            solution = pmaf.solve(exact, throw=True)
            if not pmaf.certify(exact, solution).holds(1e-12).all():
                raise RuntimeError("a solution in float64 is not certified to be the minimum")
            # Rounding may also shorten the vector, and so lower the objective below the minimum.
            rounded = exact.objective(solution.value.to(problem.matrix.dtype).double())
            found["least"] = torch.maximum(exact.objective(solution.value), rounded).tolist()
        return found

    def present(self, rows: Sequence[Row]) -> Section:
        tables: list[Table] = []
        findings: list[Finding] = []
        shown: dict[tuple[int, int], dict[str, Summary]] = {}
        for size in SIZES:
            found = _summaries([r for r in rows if (r.params["m"], r.params["n"]) == size])
            if SCIPY in found and len(found) > 1:
                shown[size] = found
                tables.append(_table(size, found))
                findings += _findings(size, found)
        return Section(
            findings=findings,
            figures=[
                Figure(
                    "less-table",
                    "Runs that reach the limit of 100 iterations, of 1,000: the paper's counts "
                    "and those here.",
                    lambda theme: _figure(shown, theme),
                )
            ]
            if shown
            else [],
            tables=tables,
            notes=[
                "Counts of runs that end near the limit move with rounding, those of “+DW” most "
                "of all: the released code, run again, also differs from the paper there. With a "
                "single problem of tiny objective among them, means of relative errors move too.",
            ],
        )


class Summary:
    """One method on the problems of a size that SciPy, too, has solved."""

    def __init__(
        self,
        found: dict[int, dict[str, Any]],
        reference: dict[int, float],
        least: dict[int, float],
    ) -> None:
        self.seeds = sorted(found.keys() & reference.keys())
        entries = [found[seed] for seed in self.seeds]
        self.count = len(entries)
        inner = torch.tensor([entry["inner"] for entry in entries])
        self.row = less.table_row(
            torch.tensor([entry["objective"] for entry in entries], dtype=torch.float64),
            torch.tensor([entry["iterations"] for entry in entries]),
            inner,
            torch.tensor([reference[seed] for seed in self.seeds], dtype=torch.float64),
        )
        self.inner = int(inner.sum())
        self.above: int | None = None
        if least.keys() >= set(self.seeds):
            excess = [found[seed]["exact_objective"] / least[seed] - 1 for seed in self.seeds]
            self.above = sum(x > 1e-5 for x in excess)

    def figures(self) -> tuple[float, float, float, float]:
        """In, Out and Imp. per 1,000 problems, and MRE."""
        *counts, error = astuple(self.row)
        inner, outer, improved = (1000 * count / self.count for count in counts)
        return inner, outer, improved, error


def _summaries(rows: Sequence[Row]) -> dict[str, Summary]:
    """By method, what each found on every problem; those SciPy has not solved do not count."""
    found: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        if row.status == "done":
            for k in range(row.params["count"]):
                entry = {name: values[k] for name, values in row.values.items()}
                found[row.params["method"]][row.params["first"] + k] = entry
    reference = {seed: entry["objective"] for seed, entry in found[SCIPY].items()}
    least = {seed: entry["least"] for seed, entry in found[OURS].items()}
    return {
        name: Summary(found[name], reference, least)
        for name in (SCIPY, *less.METHODS, OURS)
        if found[name].keys() & reference.keys()
    }


def _paper(size: tuple[int, int], method: str, prefix: str = "") -> tuple[float | None, ...] | None:
    """The paper's figures of a row, or the released code's, per 1,000 problems."""
    table = published.table("less_table")
    m, n = size
    match = table[(table.m == m) & (table.n == n) & (table.method == method)]
    if match.empty:
        return None
    names = ("failed_inner", "failed_outer", "improved", "mean_relative_error")
    scale = 1000 / float(match.iloc[0]["code_problems"]) if prefix else 1
    figures = [float(match.iloc[0][prefix + name]) for name in names]
    *counts, error = (None if math.isnan(figure) else figure for figure in figures)
    return (*(None if count is None else scale * count for count in counts), error)


def _table(size: tuple[int, int], found: dict[str, Summary]) -> Table:
    columns = [("", "method")]
    columns += [(name, label) for name in FIGURES for label in ("paper", "code", "here", "diff")]
    columns.append(("here", "above"))
    lines = []
    for method, summary in found.items():
        line: list[Any] = [method]
        printed = _paper(size, method) or (None,) * 4
        released = _paper(size, method, "code_") or (None,) * 4
        for paper, code, here in zip(printed, released, summary.figures()):
            if method == SCIPY:
                line += [None] * 4  # it is what the others are measured against
            else:
                line += [paper, code, here, None if paper is None else here - paper]
        above = summary.above
        line.append(None if above is None else 1000 * above / summary.count)
        lines.append(line)
    whole = {
        (name, label): "{:+.0f}" if label == "diff" else "{:.0f}"
        for name, label in columns
        if name in FIGURES[:3]
    }
    shares = {("MRE %", label): "{:.2f}" for label in ("paper", "code", "here")}
    first = next(iter(found.values()))
    counts = {summary.count for summary in found.values()}
    spread = f"{min(counts):,}" if len(counts) == 1 else f"{min(counts):,} to {max(counts):,}"
    m, n = size
    return Table.of(
        f"less-table-{m}x{n}",
        f"{m}×{n}: {first.inner} inner and {first.count - first.inner} outer problems",
        columns,
        lines,
        formats={**whole, **shares, ("MRE %", "diff"): "{:+.2f}", "above": "{:.0f}"},
        note=(
            f"From {spread} of the paper's 1,000 problems, counts scaled to 1,000. “Code” is the "
            "released code, run again"
            + (" on the first 100 problems." if size == (1024, 256) else ".")
        ),
    )


def _findings(size: tuple[int, int], found: dict[str, Summary]) -> list[Finding]:
    m, n = size
    worst, where = 0.0, ""
    for method, summary in found.items():
        paper = _paper(size, method)
        if paper is None or "DW" in method:
            continue
        for a, b, name in zip(paper[:3], summary.figures(), FIGURES):
            if a is not None and abs(a - b) > worst:
                worst, where = abs(a - b), f"{method}, {name}"
    first = next(iter(found.values()))
    findings = [
        Finding(
            f"LESS table {m}×{n}: counts of the rows without DW, per 1,000",
            "as printed",
            f"all within {worst:.0f}{f' ({where})' if worst else ''}, from {first.count:,}",
            # A few problems have a spread of their own, which proves nothing.
            worst <= 30 if first.count >= 500 else None,
        )
    ]
    if OURS in found and found[OURS].above is not None:
        above = {name: s.above for name, s in found.items() if s.above is not None}
        ours = above.pop(OURS)
        best = min(above, key=lambda name: above[name], default=SCIPY)
        findings.append(
            Finding(
                f"LESS table {m}×{n}: more than 1e-5 above the global minimiser in float32",
                "not stated",
                f"ours {ours} of {found[OURS].count}; next best {best}, {above.get(best, NOTHING)}",
                ours <= min(above.values(), default=ours),
            )
        )
    return findings


def _figure(shown: dict[tuple[int, int], dict[str, Summary]], theme: Theme) -> Drawing:
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(
        1, len(shown), figsize=(3.6 * len(shown) + 1.2, 3.9), layout="constrained", sharey=True
    )
    names = [*less.METHODS, OURS]
    height = {name: len(names) - k for k, name in enumerate(names)}
    for axes, (size, found) in zip([grid] if len(shown) == 1 else grid, shown.items()):
        for name, summary in found.items():
            if name == SCIPY:
                continue
            inner, outer, *_ = summary.figures()
            colour = theme.ours if name == OURS else theme.blue
            here = inner + outer
            paper = _paper(size, name)
            if paper is not None:
                printed = (paper[0] or 0) + (paper[1] or 0)
                axes.plot(
                    [printed, here], [height[name]] * 2, color=theme.faint, linewidth=1, zorder=1
                )
                axes.plot(
                    printed, height[name], "D", color=theme.grey, markerfacecolor="none",
                    label="paper" if name == "PGD" else None,
                )  # fmt: skip
            label = "here" if name == "PGD" else "ours" if name == OURS else None
            axes.plot(here, height[name], "o", color=colour, label=label)
        axes.set(xlim=(-40, 1040), title=f"{size[0]}×{size[1]}", xlabel="failed, of 1,000")
        axes.set_yticks(list(height.values()), list(height))
    from pmaf_lab.experiments.plots import legend_below

    legend_below(figure, figure.axes[0], 3)
    plt.close(figure)
    return figure
