"""What the paper does not show: how far each gradient is from the true one."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import pmaf
from pmaf.gradients import Implicit
from pmaf.solvers import Auto
from pmaf_lab.experiments import Cell, Experiment, Figure, Finding, Row, Scale, Section, Table
from pmaf_lab.paper.ied import METHODS, Method, matrices

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

    from pmaf_lab.experiments.plots import Theme

N = 16
MATRICES = ("symmetric", "nonsymmetric")
ROWS: dict[str, Method] = {**METHODS, "ours": Method(Auto(), Implicit())}
RELEASED = "IFT-E as released"
AVERAGED = "IFT-E as released, symmetrised"


class GradientError(Experiment):
    name = "gradient-error"
    title = "IED: error of every gradient"
    about = (
        "Not in the paper. The gradient of a linear function of the top eigenvector of a 16×16 "
        "|N(0,1)| matrix in float64, by every row of the paper's tables, against central "
        "differences of the eigenvector itself: relative error in the Frobenius norm, median over "
        "seeds. For nonsymmetric matrices the released code solves with H where the formula has "
        "its transpose, and its rows for symmetric use average the result; both are here too."
    )

    reduced = "three seeds instead of twenty."

    def cells(self, scale: Scale) -> list[Cell]:
        seeds = 3 if scale == "quick" else 20
        return [
            Cell({"matrix": matrix, "seed": seed}, 1.0)
            for matrix in MATRICES
            for seed in range(seeds)
        ]

    def measure(self, device: torch.device, *, matrix: str, seed: int) -> dict[str, Any]:
        warnings.simplefilter("ignore", pmaf.ConvergenceWarning)  # 100 steps, come what may
        symmetric = matrix == "symmetric"
        A = matrices(N, seed, symmetric=symmetric, batch=1, dtype=torch.float64)[0].to(device)
        generator = torch.Generator().manual_seed(seed)
        v = torch.randn(N, generator=generator, dtype=torch.float64).to(device)
        rules = {name: _by_row(row, symmetric) for name, row in ROWS.items()}
        if not symmetric:
            rules[RELEASED] = lambda A, v: _released(A, v, average=False)
            rules[AVERAGED] = lambda A, v: _released(A, v, average=True)
        exact = truth(A, v, symmetric)
        return {
            name: float((rule(A, v) - exact).norm() / exact.norm()) for name, rule in rules.items()
        }

    def present(self, rows: Sequence[Row]) -> Section:
        found: dict[str, dict[str, float]] = {}
        for matrix in MATRICES:
            done = [r.values for r in rows if r.status == "done" and r.params["matrix"] == matrix]
            names = done[0] if done else []
            found[matrix] = {
                name: statistics.median(values[name] for values in done) for name in names
            }
        found = {matrix: errors for matrix, errors in found.items() if errors}
        if not found:
            return Section()
        names = [*ROWS, RELEASED, AVERAGED]
        columns = [("", "gradient"), *(("relative error", matrix) for matrix in found)]
        lines = [[name, *(errors.get(name) for errors in found.values())] for name in names]
        return Section(
            findings=[
                Finding(
                    f"Gradient of IED, {matrix}: ours is the true one",
                    "not measured",
                    f"relative error {errors['ours']:.0e}; largest, {worst}: {errors[worst]:.0e}",
                    errors["ours"] < 1e-8,
                )
                for matrix, errors in found.items()
                for worst in [max(errors, key=lambda name: errors[name])]
            ],
            figures=[
                Figure(
                    "gradient-error",
                    "Relative error of the gradient against central differences, which are good "
                    "to about 1e-9; a bar that reaches 1 is no gradient at all.",
                    lambda theme: _figure(found, theme),
                )
            ],
            tables=[
                Table.of(
                    "gradient-error",
                    "Relative error",
                    columns,
                    lines,
                    formats=dict.fromkeys(MATRICES, "{:.0e}"),
                )
            ],
            notes=[
                "On nonsymmetric matrices the AutoDiff rows differentiate the eigenvector of the "
                "symmetric part, and DDN assumes that A's left eigenvector is its right one."
            ],
        )


def _by_row(row: Method, symmetric: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def gradient(A: Tensor, v: Tensor) -> Tensor:
        A = A.clone().requires_grad_()
        y = row(A, symmetric).vectors
        return torch.autograd.grad(y @ v, A)[0]

    return gradient


def _released(A: Tensor, v: Tensor, average: bool) -> Tensor:
    """IFT with `H` where the formula has its transpose."""
    value, y = pmaf.ied(A, symmetric=False)
    identity = torch.eye(N, dtype=A.dtype, device=A.device)
    P = identity - torch.outer(y, y)
    k = torch.linalg.solve(identity - P @ A / value, v)
    gradient = torch.outer(P @ k / value, y)
    return 0.5 * (gradient + gradient.mT) if average else gradient


def truth(A: Tensor, v: Tensor, symmetric: bool) -> Tensor:
    """Central differences of `y @ v` in every entry of `A`, all in one batch."""
    step = 1e-4  # rounding and curvature are about equal here
    shifts = step * torch.eye(N * N, dtype=A.dtype, device=A.device).reshape(-1, N, N)
    up, down = (pmaf.ied(A + sign * shifts, symmetric=symmetric).vectors @ v for sign in (1, -1))
    return ((up - down) / (2 * step)).reshape(N, N)


def _figure(found: dict[str, dict[str, float]], theme: Theme) -> Drawing:
    import matplotlib.pyplot as plt

    names = [*ROWS, RELEASED, AVERAGED][::-1]
    figure, grid = plt.subplots(
        1, len(found), figsize=(4.0 * len(found) + 1.6, 4.4), layout="constrained", sharey=True
    )
    for axes, (matrix, errors) in zip([grid] if len(found) == 1 else grid, found.items()):
        for k, name in enumerate(names):
            if name in errors:
                axes.barh(k, errors[name], color=theme.series(name), height=0.65)
        axes.set(xscale="log", xlabel="relative error", title=matrix, xlim=(1e-11, 10))
        axes.axvline(1, color=theme.red, linewidth=1)
        axes.set_yticks(range(len(names)), names)
        axes.grid(axis="y", visible=False)
    plt.close(figure)
    return figure
