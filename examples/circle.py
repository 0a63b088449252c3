"""The paper's 2×2 example: solve it with every method, differentiate it, draw it.

    python examples/circle.py [FOLDER]

Writes `circle.png` and `circle.pdf` into the folder (`out` unless given).
"""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from rich.console import Console
from rich.progress import track
from rich.table import Table

import pmaf
from pmaf.metrics import fixed_point_distance
from pmaf.paper import less as paper
from pmaf.solvers import Auto, Solver

INK, RING, CONTOUR, PATH, START = "#222222", "#c0392b", "#9fb8d3", "#2e7d32", "#c0392b"
CENTRE = "#3a6ea5"

Window = tuple[tuple[float, float], tuple[float, float]]
WHOLE: Window = ((-1.9, 1.9), (-1.9, 1.9))
CLOSE: Window = ((-1.05, -0.25), (0.45, 1.25))  # around the start and the minimum


def draw(
    axes: Axes, problem: pmaf.SphereLeastSquares, points: torch.Tensor, window: Window
) -> None:
    """Contours of the objective, the circle, the path over it, where it starts and ends."""
    (left, right), (bottom, top) = window
    x, y = torch.meshgrid(
        torch.linspace(left, right, 241), torch.linspace(bottom, top, 241), indexing="xy"
    )
    distance = fixed_point_distance(problem.A, torch.stack([x, y], -1), problem.b)
    final = float(fixed_point_distance(problem.A, points[-1], problem.b))
    levels = [0.125, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    axes.contour(x, y, distance, levels=levels, colors=CONTOUR, linewidths=0.7)
    # The level of the solution touches the circle there if the solution is a minimum.
    axes.contour(x, y, distance, levels=[final], colors=PATH, linewidths=0.9, linestyles="dashed")
    angle = torch.linspace(0, 2 * math.pi, 400)
    axes.plot(angle.cos(), angle.sin(), color=RING, linewidth=1.1)
    axes.plot(*points.T, color=PATH, linewidth=0.9)
    axes.plot(*problem.unconstrained(), marker="+", color=CENTRE, markersize=8)
    if len(points) > 1:
        axes.plot(*points[0], marker="o", color=START, markersize=5)
    axes.plot(*points[-1], marker="*", color=INK, markersize=10)
    axes.set(xlim=window[0], ylim=window[1], aspect="equal", xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_color("#bbbbbb")


def report(problem: pmaf.SphereLeastSquares, solver: Solver) -> tuple[torch.Tensor, pmaf.Solution]:
    """The path a solver takes, a single point for a direct one, and its solution."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pmaf.ConvergenceWarning)  # the table shows it
        solution = pmaf.solve(problem, solver=solver)
    if isinstance(solver, pmaf.solvers.ProjectedGradient):
        return paper.path(problem, solver), solution
    return solution.value.unsqueeze(0), solution


def gradient_error(problem: pmaf.SphereLeastSquares, solver: Solver) -> float:
    """Largest difference between the gradient of the angle and central differences of it."""
    A, b = problem.A.double().requires_grad_(), problem.b.double()

    def angle(A: torch.Tensor) -> torch.Tensor:
        u = pmaf.less(A, b, solver=solver)
        return torch.atan2(u[1], u[0])

    (found,) = torch.autograd.grad(angle(A), A)
    step = 1e-6
    worst = 0.0
    for i in range(4):
        shift = torch.zeros(4, dtype=torch.float64)
        shift[i] = step
        up, down = (angle(A.detach() + sign * shift.reshape(2, 2)) for sign in (1, -1))
        worst = max(worst, abs(float((up - down) / (2 * step) - found.flatten()[i])))
    return worst


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    problem = paper.example()
    solvers: dict[str, Solver] = {**paper.METHODS, "Auto (ours)": Auto()}
    table = Table("method", title="min ½‖Au − b‖² on the circle, the paper's 2×2 example")
    for column in ("iterations", "‖Au − b‖", "stationarity", "certified global"):
        table.add_column(column, justify="right")
    figure, grid = plt.subplots(2, 5, figsize=(12.5, 6.1), layout="constrained")
    for axes, (name, solver) in track(
        list(zip(grid.flat, solvers.items())), "Solving and drawing", console=console
    ):
        points, solution = report(problem, solver)
        certificate = pmaf.certify(problem, solution)
        distance = float(fixed_point_distance(problem.A, solution.value, problem.b))
        steps = f"{int(solution.iterations)}" + ("" if solution.converged else " (limit)")
        holds = bool(certificate.holds(1e-3))
        stationarity = f"{float(certificate.stationarity):.1e}"
        table.add_row(name, steps, f"{distance:.4f}", stationarity, "yes" if holds else "no")
        draw(axes, problem, points, WHOLE)
        draw(axes.inset_axes((0.53, 0.03, 0.44, 0.44)), problem, points, CLOSE)
        axes.set_title(name, fontsize=10, color=INK)
        axes.set_xlabel(f"{steps} iterations, FPD {distance:.4f}", fontsize=9, color=INK)
    figure.legend(
        handles=[
            Line2D([], [], color=RING, label="circle"),
            Line2D([], [], color=CONTOUR, label="‖Au − b‖"),
            Line2D([], [], color=PATH, linestyle="--", label="its level at the solution"),
            Line2D([], [], color=PATH, label="path, before and after projection"),
            Line2D([], [], color=CENTRE, marker="+", linestyle="", label="A⁺b"),
            Line2D([], [], color=START, marker="o", linestyle="", label="start"),
            Line2D([], [], color=INK, marker="*", linestyle="", label="end"),
        ],
        loc="outside lower center",
        ncols=7,
        frameon=False,
        fontsize=9,
    )
    for suffix in ("png", "pdf"):
        figure.savefig(folder / f"circle.{suffix}", dpi=160)
    console.print(table)
    error = gradient_error(problem, Auto())
    console.print(f"Gradient of the solution's angle: within {error:.0e} of central differences.")
    console.print(f"Figure: {folder / 'circle.png'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("out"))
