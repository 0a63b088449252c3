"""How precise the solvers are: shared by the random matrices and those of a network."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import pmaf
from pmaf.layers.eigenvectors import Eigenpairs
from pmaf.metrics import eigen_distance, fixed_point_distance
from pmaf.solvers import Auto, Solver
from pmaf_lab.experiments.plots import Theme, legend_below, sizes_axis
from pmaf_lab.paper.ied import PI, SI

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

SOLVERS: dict[str, Solver | None] = {"eigh": None, "PI": PI, "SI": SI, "ours": Auto()}
MEASURES = {"eigen": "eigen distance", "fixed": "fixed-point distance"}
MARKERS = {"eigh": "s", "PI": "o", "SI": "^", "ours": "D"}


def pairs(A: Tensor, solver: str, symmetric: bool) -> Eigenpairs:
    """The principal eigenpair as a solver finds it.

    "eigh" is called as the paper does, on nonsymmetric matrices too, of which it reads
    the lower triangle.
    """
    method = SOLVERS[solver]
    if method is None:
        values, vectors = torch.linalg.eigh(A)
        return Eigenpairs(values[..., -1], vectors[..., -1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pmaf.ConvergenceWarning)  # the distances show it
        return pmaf.ied(A, symmetric=symmetric, solver=method)


def distances(A: Tensor, solver: str, symmetric: bool) -> dict[str, list[float]]:
    """Eigen distance and FPD of each matrix.

    Evaluated in float64: in float32 the rounding of the measure would hide that of the
    solution.
    """
    value, y = (x.double() for x in pairs(A, solver, symmetric))
    wide = A.double()
    return {
        "eigen": eigen_distance(wide, value, y).flatten().tolist(),
        "fixed": fixed_point_distance(wide, y).flatten().tolist(),
    }


def draw(
    panels: Sequence[Sequence[tuple[str, Callable[[str], dict[int, float]]]]],
    sizes: list[int],
    theme: Theme,
) -> Drawing:
    """Distances against size, one panel a setting, one line a solver.

    Args:
        panels: Rows of panels, each a title and the means by size of a named solver.
    """
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(
        len(panels),
        len(panels[0]),
        figsize=(2.9 * len(panels[0]) + 0.4, 2.6 * len(panels) + 0.5),
        layout="constrained",
        squeeze=False,
    )
    for line, cells in zip(grid, panels):
        for axes, (title, means) in zip(line, cells):
            _lines(axes, means, theme)
            axes.set_title(title)
            axes.set_yscale("log")
            sizes_axis(axes, sizes, "m")
    legend_below(figure, grid[0, 0], len(SOLVERS))
    plt.close(figure)
    return figure


def _lines(axes: Axes, means: Callable[[str], dict[int, float]], theme: Theme) -> None:
    for solver in SOLVERS:
        found = means(solver)
        options: dict[str, Any] = {"color": theme.series(solver), "marker": MARKERS[solver]}
        if solver == "ours":  # drawn last and hollow: what it covers stays visible
            options |= {"markerfacecolor": "none", "markersize": 7, "linestyle": "--"}
        axes.plot(list(found), list(found.values()), label=solver, **options)
