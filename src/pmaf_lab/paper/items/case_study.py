"""Paths of the first-order methods on the circle: the case study and eight samples."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

import pmaf
from pmaf.metrics import fixed_point_distance
from pmaf.solvers import Auto, ProjectedGradient, Solver
from pmaf_lab.experiments import Cell, Experiment, Figure, Finding, Row, Scale, Section, Table
from pmaf_lab.paper import less

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

    from pmaf_lab.experiments.plots import Theme

OURS = "ours"
SEEDS = (19, 38, 41, 66, 70, 72, 92, 170)
SIX = ("PGD", "PGD+DW", "PGD+RM", "PGD+RM+BLSOne", "PGD+RM+BLS", "PGD+RM+TWD")

Window = tuple[tuple[float, float], tuple[float, float]]
WHOLE: Window = ((-1.9, 1.9), (-1.9, 1.9))
CLOSE: Window = ((-1.05, -0.25), (0.45, 1.25))  # around the start and the minimum


def solved(problem: pmaf.SphereLeastSquares, solver: Solver) -> dict[str, Any]:
    """The path of a solver, a single point for a direct one, and how it ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pmaf.ConvergenceWarning)  # the table shows it
        solution = pmaf.solve(problem, solver=solver)
    first_order = isinstance(solver, ProjectedGradient)
    points = less.path(problem, solver) if first_order else solution.value.unsqueeze(0)
    certificate = pmaf.certify(problem, solution)
    return {
        "path": points.tolist(),
        "iterations": int(solution.iterations),
        "converged": bool(solution.converged),
        "fpd": float(fixed_point_distance(problem.matrix, solution.value, problem.b)),
        "stationarity": float(certificate.stationarity),
        "global": bool(certificate.holds(1e-3)),
    }


def values(
    problem: pmaf.SphereLeastSquares, solvers: dict[str, Solver], device: torch.device
) -> dict[str, Any]:
    """What a figure needs of one problem."""
    problem = pmaf.SphereLeastSquares(problem.matrix.to(device), problem.b.to(device))
    return {
        "A": problem.matrix.tolist(),
        "b": problem.b.tolist(),
        "unconstrained": problem.unconstrained().tolist(),
        "methods": {name: solved(problem, solver) for name, solver in solvers.items()},
    }


def steps(found: dict[str, Any]) -> str:
    if found["converged"] and not found["iterations"]:
        return "direct"  # a solver that does not iterate
    return f"{found['iterations']} steps" + ("" if found["converged"] else " (limit)")


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


class CaseStudy(Experiment):
    name = "case-study"
    title = "LESS: one problem on the circle"
    about = (
        "The 2×2 problem whose A and b the paper prints, solved by its nine methods and by the "
        "default here. A method that reaches 100 iterations has failed. FPD is ‖Au − b‖ at the "
        "end; a certificate proves the global minimum without trusting the solver."
    )

    def cells(self, scale: Scale) -> list[Cell]:
        return [Cell({"problem": "example"}, 1)]

    def measure(self, device: torch.device, **params: Any) -> dict[str, Any]:
        solvers: dict[str, Solver] = {**less.METHODS, OURS: Auto()}
        return values(less.example(), solvers, device)

    def present(self, rows: Sequence[Row]) -> Section:
        done = [row for row in rows if row.status == "done"]
        if not done:
            return Section()
        found = done[0].values
        lines = [
            [name, m["iterations"], *(_yes(m[key]) for key in ("converged", "global")), m["fpd"],
             m["stationarity"]]
            for name, m in found["methods"].items()
        ]  # fmt: skip
        labels = ("method", "iterations", "converged", "global minimum", "FPD", "stationarity")
        columns = [("", label) for label in labels]
        formats = {"FPD": "{:.5f}", "stationarity": "{:.0e}"}
        methods = found["methods"]
        fast, slow = methods["PGD+RM+TWD"]["iterations"], methods["PGD"]["iterations"]
        one = methods["PGD+RM+BLSOne"]["iterations"]
        return Section(
            findings=[
                Finding(
                    "Case study: BLSOne and TWD need fewer iterations than PGD",
                    "fewer",
                    f"{one} and {fast} against {slow}; ours {methods[OURS]['iterations']}",
                    max(one, fast) < slow,
                )
            ],
            figures=[
                Figure(
                    "case-study",
                    "One problem, ten methods. Each path is drawn before and after every "
                    "projection; where the dashed level line touches the circle, the end is a "
                    "minimum. The inset is the neighbourhood of the start.",
                    lambda theme: _case_figure(found, theme),
                )
            ],
            tables=[
                Table.of("case-study", "How each method ends", columns, lines, formats=formats)
            ],
        )


class Samples(Experiment):
    name = "samples"
    title = "LESS: eight samples on the circle"
    about = (
        "Random 2×2 problems, one a row of the figure, seeds 19, 38, 41, 66, 70, 72, 92 and 170, "
        "by six of the paper's methods. The ring marks the global minimum, which the default here "
        "finds and certifies."
    )

    def cells(self, scale: Scale) -> list[Cell]:
        return [Cell({"seed": seed}, 1) for seed in SEEDS]

    def measure(self, device: torch.device, *, seed: int) -> dict[str, Any]:
        batch = less.problems(2, 2, [seed])
        problem = pmaf.SphereLeastSquares(batch.matrix[0], batch.b[0])
        solvers: dict[str, Solver] = {**{name: less.METHODS[name] for name in SIX}, OURS: Auto()}
        return values(problem, solvers, device)

    def present(self, rows: Sequence[Row]) -> Section:
        done = {row.params["seed"]: row.values for row in rows if row.status == "done"}
        samples = {seed: done[seed] for seed in SEEDS if seed in done}
        if not samples:
            return Section()
        names = [*SIX, OURS]
        columns = [("", "seed")]
        columns += [(name, label) for name in names for label in ("iterations", "FPD")]
        lines = []
        for seed, found in samples.items():
            line: list[Any] = [seed]
            for name in names:
                method = found["methods"][name]
                line += [method["iterations"], method["fpd"]]
            lines.append(line)
        median = {
            name: statistics.median(s["methods"][name]["iterations"] for s in samples.values())
            for name in names
        }
        others = min(median[name] for name in SIX if name not in ("PGD+RM+BLSOne", "PGD+RM+TWD"))
        best = max(median["PGD+RM+BLSOne"], median["PGD+RM+TWD"])
        certified = sum(bool(s["methods"][OURS]["global"]) for s in samples.values())
        return Section(
            findings=[
                Finding(
                    "Eight samples: BLSOne and TWD need fewer iterations than the other four",
                    "much fewer",
                    f"median {median['PGD+RM+BLSOne']:g} and {median['PGD+RM+TWD']:g}, "
                    f"others at least {others:g}; ours {median[OURS]:g}, certified on "
                    f"{certified} of {len(samples)}",
                    best < others,
                )
            ],
            figures=[
                Figure(
                    "samples",
                    "Rows are samples, columns the paper's methods, with iterations and FPD. "
                    "A star that is not inside the ring is not the global minimum.",
                    lambda theme: _samples_figure(samples, theme),
                )
            ],
            tables=[
                Table.of(
                    "samples",
                    "Iterations and FPD",
                    columns,
                    lines,
                    formats={"FPD": "{:.4f}"},
                    folded=True,
                )
            ],
        )


def _case_figure(found: Mapping[str, Any], theme: Theme) -> Drawing:
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(2, 5, figsize=(12.0, 6.0), layout="constrained")
    for axes, (name, method) in zip(grid.flat, found["methods"].items()):
        _draw(axes, found, name, WHOLE, theme)
        _draw(axes.inset_axes((0.53, 0.03, 0.44, 0.44)), found, name, CLOSE, theme)
        axes.set_title(name)
        axes.set_xlabel(f"{steps(method)}, FPD {method['fpd']:.4f}", fontsize=9)
    _key(figure, theme, 8)
    plt.close(figure)
    return figure


def _samples_figure(samples: dict[int, Any], theme: Theme) -> Drawing:
    import matplotlib.pyplot as plt

    size = (11.0, 1.95 * len(samples) + 0.6)
    figure, grid = plt.subplots(len(samples), len(SIX), figsize=size, layout="constrained")
    for line, (seed, found) in zip(grid.reshape(len(samples), -1), samples.items()):
        for axes, name in zip(line, SIX):
            method = found["methods"][name]
            _draw(axes, found, name, WHOLE, theme)
            axes.set_xlabel(f"{steps(method)}, FPD {method['fpd']:.4f}", fontsize=8.5)
        line[0].set_ylabel(f"seed {seed}", fontweight="bold")
    for axes, name in zip(grid.reshape(len(samples), -1)[0], SIX):
        axes.set_title(name)
    _key(figure, theme, 8)
    plt.close(figure)
    return figure


def _draw(axes: Axes, found: Mapping[str, Any], name: str, window: Window, theme: Theme) -> None:
    """Contours of the objective, the circle, the path over it, where it starts and ends."""
    A, b = torch.tensor(found["A"]), torch.tensor(found["b"])
    points = torch.tensor(found["methods"][name]["path"])
    (left, right), (bottom, top) = window
    x, y = torch.meshgrid(
        torch.linspace(left, right, 121), torch.linspace(bottom, top, 121), indexing="xy"
    )
    distance = fixed_point_distance(A, torch.stack([x, y], -1), b)
    final = float(fixed_point_distance(A, points[-1], b))
    levels = [0.125, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0]
    grid = (x.numpy(), y.numpy(), distance.numpy())
    axes.contour(*grid, levels=levels, colors=theme.faint, linewidths=0.7, linestyles="dotted")
    # The level of the solution touches the circle there if the solution is a minimum.
    axes.contour(*grid, levels=[final], colors=theme.green, linewidths=1.0, linestyles="dashed")
    angle = torch.linspace(0, 2 * math.pi, 400)
    axes.plot(angle.cos(), angle.sin(), color=theme.red, linewidth=1.0)
    axes.plot(*points.T, color=theme.blue, linewidth=0.9)
    axes.plot(*found["unconstrained"], marker="+", color=theme.grey, markersize=8)
    (best,) = found["methods"][OURS]["path"]
    axes.plot(*best, marker="o", color=theme.ours, markerfacecolor="none", markersize=11)
    if len(points) > 1:
        axes.plot(*points[0], marker="o", color=theme.red, markersize=4.5)
    axes.plot(*points[-1], marker="*", color=theme.ink, markersize=8)
    axes.set(xlim=window[0], ylim=window[1], aspect="equal", xticks=[], yticks=[])
    axes.spines[:].set_visible(True)


def _key(figure: Drawing, theme: Theme, columns: int) -> None:
    from matplotlib.lines import Line2D

    def mark(marker: str, colour: str, label: str, **options: Any) -> Line2D:
        return Line2D([], [], color=colour, marker=marker, linestyle="", label=label, **options)

    handles = [
        Line2D([], [], color=theme.red, label="circle"),
        Line2D([], [], color=theme.faint, linestyle=":", label="‖Au − b‖"),
        Line2D([], [], color=theme.green, linestyle="--", label="its level at the end"),
        Line2D([], [], color=theme.blue, label="path"),
        mark("+", theme.grey, "A⁺b"),
        mark("o", theme.red, "start"),
        mark("*", theme.ink, "end"),
        mark("o", theme.ours, "global minimum (ours)", markerfacecolor="none", markersize=9),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)
