"""The precision figures: eigen distance and FPD of PI, SI, eigh and ours."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch

from pmaf_lab.experiments import Cell, Experiment, Figure, Finding, Row, Scale, Section, Table
from pmaf_lab.paper.ied import matrices
from pmaf_lab.paper.items.precision import MEASURES, SOLVERS, distances, draw

SIZES = (32, 64, 128, 256, 512, 1024)
DISTRIBUTIONS = ("gaussian", "uniform", "vonmises", "choice")
MATRICES = ("symmetric", "nonsymmetric")
DTYPES = ("float32", "float64")
# Seconds of a hundred full QR decompositions of a batch of five.
SI_COST = {32: 0.1, 64: 0.3, 128: 0.8, 256: 2, 512: 8, 1024: 60}


class EigenPrecision(Experiment):
    name = "ied-precision"
    title = "IED: precision"
    about = (
        "Distance of the top eigenpair from being one, ‖Ay − λy‖ (eigen distance) and "
        "‖y − Ay/‖Ay‖‖ (FPD), for entrywise nonnegative random matrices of four distributions; "
        "means over seeds and a batch of five, evaluated in float64. PI and SI take 100 "
        "iterations without a stopping test, as in the paper. eigh is called on nonsymmetric "
        "matrices too, as in the paper; it then decomposes the symmetric matrix that their lower "
        "triangle defines, which is another one."
    )

    reduced = "Gaussian matrices of sizes 32 to 128, two seeds."

    def cells(self, scale: Scale) -> list[Cell]:
        quick = scale == "quick"
        cells = []
        for distribution in DISTRIBUTIONS[: 1 if quick else None]:
            for matrix in MATRICES:
                for dtype in DTYPES:
                    for n in (32, 64, 128) if quick else SIZES:
                        for solver in SOLVERS:
                            if solver == "SI" and n > 256 and distribution != "gaussian":
                                continue
                            seeds = _seeds(quick, n, solver)
                            wide = 2 if dtype == "float64" else 1
                            cost = SI_COST[n] if solver == "SI" else SI_COST[n] / 20
                            params = {
                                "distribution": distribution,
                                "matrix": matrix,
                                "dtype": dtype,
                                "n": n,
                                "solver": solver,
                                "seeds": seeds,
                            }
                            cells.append(Cell(params, 0.2 + wide * cost * seeds))
        return cells

    def measure(
        self,
        device: torch.device,
        *,
        distribution: str,
        matrix: str,
        dtype: str,
        n: int,
        solver: str,
        seeds: int,
    ) -> dict[str, Any]:
        symmetric = matrix == "symmetric"
        found: dict[str, list[float]] = {measure: [] for measure in MEASURES}
        for seed in range(seeds):
            A = matrices(
                n,
                seed,
                symmetric=symmetric,
                distribution=distribution,
                dtype=getattr(torch, dtype),
            ).to(device)
            for measure, values in distances(A, solver, symmetric).items():
                found[measure] += values
        return found

    def present(self, rows: Sequence[Row]) -> Section:
        found = {
            (p["distribution"], p["matrix"], p["dtype"], p["n"], p["solver"]): row.values
            for row in rows
            if row.status == "done"
            for p in [row.params]
        }
        sizes = [n for n in SIZES if any(key[3] == n for key in found)]
        shown = [d for d in DISTRIBUTIONS if any(key[0] == d for key in found)]
        figures = [
            Figure(
                f"ied-precision-{matrix}",
                f"{matrix.capitalize()} matrices: mean distances, lower is better.",
                lambda theme, matrix=matrix: draw(
                    [
                        [
                            _panel(found, d, matrix, dtype, measure)
                            for dtype in DTYPES
                            for measure in MEASURES
                        ]
                        for d in shown
                    ],
                    sizes,
                    theme,
                ),
            )
            for matrix in MATRICES
            if any(key[1] == matrix for key in found)
        ]
        return Section(
            findings=_findings(found, sizes, shown),
            figures=figures,
            tables=[_table(found, d, matrix, sizes) for d in shown for matrix in MATRICES],
            notes=[
                "The paper shows these results as curves without printed numbers, so what is "
                "compared is their order. " + _settings(rows)
            ],
        )


def _seeds(quick: bool, n: int, solver: str) -> int:
    if solver == "SI" and n > 256:
        return 1
    return 2 if quick else 3


def _settings(rows: Sequence[Row]) -> str:
    """How many matrices the means are over, and what is left out."""
    seeds = sorted({row.params["seeds"] for row in rows if row.params["solver"] != "SI"})
    words = f"Means are over {' or '.join(map(str, seeds))} seeds, five matrices each."
    if any(row.params["n"] > 256 for row in rows):
        words += (
            " SI takes a full QR decomposition of every iterate: beyond 256 it has one seed, "
            "of the Gaussian matrices only."
        )
    return words


def _means(found: dict[Any, Any], *key: str) -> dict[int, float]:
    distribution, matrix, dtype, measure, solver = key
    return {
        n: fmean(found[distribution, matrix, dtype, n, solver][measure])
        for n in SIZES
        if (distribution, matrix, dtype, n, solver) in found
    }


def _panel(
    found: dict[Any, Any], distribution: str, matrix: str, dtype: str, measure: str
) -> tuple[str, Any]:
    title = f"{distribution}, {dtype}\n{MEASURES[measure]}"
    return title, lambda solver: _means(found, distribution, matrix, dtype, measure, solver)


def _table(found: dict[Any, Any], distribution: str, matrix: str, sizes: list[int]) -> Table:
    columns = [("", "dtype"), ("", "m")]
    columns += [(words, solver) for words in MEASURES.values() for solver in SOLVERS]
    lines = []
    for dtype in DTYPES:
        for n in sizes:
            line: list[Any] = [dtype, n]
            for measure in MEASURES:
                for solver in SOLVERS:
                    means = _means(found, distribution, matrix, dtype, measure, solver)
                    line.append(means.get(n))
            lines.append(line)
    return Table.of(
        f"ied-precision-{matrix}-{distribution}",
        f"{matrix.capitalize()}, {distribution}",
        columns,
        lines,
        formats=dict.fromkeys(SOLVERS, "{:.1e}"),
        folded=True,
    )


def _findings(found: dict[Any, Any], sizes: list[int], shown: list[str]) -> list[Finding]:
    findings = []
    for matrix in MATRICES:
        for dtype in DTYPES:
            ahead = total = ours = compared = 0
            for distribution in shown:
                for measure in MEASURES:
                    means = {
                        solver: _means(found, distribution, matrix, dtype, measure, solver)
                        for solver in SOLVERS
                    }
                    for n in sizes:
                        if n not in means["eigh"]:
                            continue
                        for solver in ("PI", "SI"):
                            if n in means[solver]:
                                total += 1
                                ahead += means[solver][n] < means["eigh"][n]
                        if n in means["ours"]:
                            compared += 1
                            ours += means["ours"][n] <= 1.05 * means["eigh"][n]
            if total:
                findings.append(
                    Finding(
                        f"IED precision, {matrix}, {dtype}: PI and SI are closer than eigh",
                        "yes",
                        f"in {ahead} of {total} comparisons; ours no worse than eigh in {ours} "
                        f"of {compared}",
                        ahead == total,
                    )
                )
    return findings
