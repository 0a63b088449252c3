"""Least squares on the sphere and its gradients, by everything a user would pick instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import pmaf
from pmaf.bench.families import SQUARES
from pmaf.bench.present import ratio, ratios_figure, ratios_table, rows_of, seconds, shape
from pmaf.bench.race import Competitor, Result, race
from pmaf.experiments import Cell, Experiment, Finding, Row, Scale, Section
from pmaf.gradients import DDN, Gradient, Unroll
from pmaf.paper import less

UNCONSTRAINED = ("lstsq", "Cholesky")


def _ours(A: Tensor, b: Tensor) -> Result:
    return (pmaf.less(A, b),)


def _lstsq(A: Tensor, b: Tensor) -> Result:
    return (torch.linalg.lstsq(A, b.unsqueeze(-1)).solution.squeeze(-1),)


def _cholesky(A: Tensor, b: Tensor) -> Result:
    """`A⁺b` from one Cholesky factor of the smaller Gram matrix."""
    if A.shape[-2] >= A.shape[-1]:
        factor = torch.linalg.cholesky_ex(A.mT @ A).L
        return (torch.cholesky_solve((b.unsqueeze(-2) @ A).mT, factor).squeeze(-1),)
    factor = torch.linalg.cholesky_ex(A @ A.mT).L
    return ((A.mT @ torch.cholesky_solve(b.unsqueeze(-1), factor)).squeeze(-1),)


def _paper(method: str, gradient: Gradient) -> Any:
    return lambda A, b: (pmaf.less(A, b, solver=less.METHODS[method], gradient=gradient),)


def _scipy(method: str) -> Any:
    def solve(A: Tensor, b: Tensor) -> Result:
        import numpy as np
        from scipy.optimize import minimize

        sphere = {"type": "eq", "fun": lambda x: x @ x - 1, "jac": lambda x: 2 * x}
        points = []
        for a, c in zip(A.detach().double().numpy(), b.detach().double().numpy()):
            start = np.linalg.lstsq(a, c)[0]
            found = minimize(
                lambda x, a=a, c=c: 0.5 * np.sum((a @ x - c) ** 2),
                start / np.linalg.norm(start),
                jac=lambda x, a=a, c=c: a.T @ (a @ x - c),
                method=method,
                constraints=sphere,
            )
            points.append(torch.from_numpy(found.x / np.linalg.norm(found.x)))
        return (torch.stack(points).to(A.dtype),)

    return solve


COMPETITORS: dict[str, Competitor] = {
    "ours": Competitor(_ours),
    "lstsq": Competitor(_lstsq),
    "Cholesky": Competitor(_cholesky),
    "TWD, DDN-E": Competitor(_paper("PGD+RM+TWD", DDN()), largest=6e5),
    "BLS, DDN-E": Competitor(_paper("PGD+RM+BLS", DDN()), largest=6e5),
    "TWD, DDN-J": Competitor(_paper("PGD+RM+TWD", DDN(exploit=False)), largest=1.5e5),
    "TWD, unrolled": Competitor(_paper("PGD+RM+TWD", Unroll())),
    "SLSQP": Competitor(_scipy("SLSQP"), differentiable=False, largest=2e4, needs="scipy"),
    "trust-constr": Competitor(
        _scipy("trust-constr"), differentiable=False, largest=2e3, needs="scipy"
    ),
}
SHAPES: dict[str, list[tuple[int, int, int]]] = {
    "quick": [(1000, 2, 2), (64, 64, 32), (256, 8, 64)],
    "full": [
        (1, 8, 3),
        (5, 64, 32),
        (64, 8, 3),
        (1000, 2, 2),
        (1000, 64, 32),
        (256, 128, 64),
        (100, 1024, 256),
        (5, 2048, 1024),
        (256, 8, 64),
        (256, 16, 128),
    ],
}
ERRORS = ("objective error", "gradient error")


class LessRace(Experiment):
    name = "less"
    title = "LESS beside everything else"
    about = (
        "Least squares on the sphere and the gradient of cᵀu, float32, medians of runs "
        "interleaved between the competitors. lstsq and Cholesky (normal equations with one "
        "factor) solve the *unconstrained* problem: they are the price to beat, not an "
        "alternative. The error of the objective is relative to the global minimum, that of the "
        "gradient to the certified solution's in float64; means over the batch."
    )

    def cells(self, scale: Scale) -> list[Cell]:
        families = ("inner", "outer") if scale == "quick" else tuple(SQUARES)
        budget = 0.3 if scale == "quick" else 1.0
        return [
            Cell(
                {"family": family, "shape": list(shape), "budget": budget},
                2 + budget * len(COMPETITORS),
            )
            for family in families
            for shape in SHAPES[scale]
        ]

    def measure(
        self, device: torch.device, *, family: str, shape: list[int], budget: float
    ) -> dict[str, Any]:
        batch, m, n = shape
        generator = torch.Generator().manual_seed(0)
        A, b = (x.to(device) for x in SQUARES[family](batch, m, n, generator))
        c = torch.randn(n, generator=generator).to(device)
        inputs = (A.requires_grad_(), b.requires_grad_())
        results = race(COMPETITORS, inputs, lambda out: (out[0] @ c).sum(), device, budget)
        exact = tuple(x.detach().double().requires_grad_() for x in inputs)
        problem = pmaf.SphereLeastSquares(exact[0].detach(), exact[1].detach())
        solution = pmaf.solve(problem, throw=True)
        least = problem.objective(solution.value)
        truth = torch.autograd.grad((pmaf.less(*exact) @ c.double()).sum(), exact)
        # Where the minimiser is not unique up to the rounding of the data there is no gradient.
        spread = torch.linalg.matrix_norm(problem.A, 2).square()
        unique = solution.gap > torch.finfo(A.dtype).eps ** 0.5 * spread
        found = {}
        for name, result in results.items():
            if "skipped" in result:
                found[name] = result
                continue
            entry = {"forward": result["forward"], "backward": result["backward"]}
            if name not in UNCONSTRAINED:
                u = result["outputs"][0].double()
                # The objective relative to where it starts, lest a tiny minimum blow it up.
                scale = torch.maximum(least, 0.5 * problem.b.square().sum(-1))
                entry["objective error"] = _mean((problem.objective(u) - least).abs() / scale)
                if result["gradients"] is not None:
                    error = (result["gradients"][0].double() - truth[0]).flatten(1).norm(dim=-1)
                    norms = truth[0].flatten(1).norm(dim=-1)
                    entry["gradient error"] = _mean((error / norms)[unique])
            found[name] = entry
        return found

    def present(self, rows: Sequence[Row]) -> Section:
        by_family = {
            family: sorted(found, key=lambda row: row.params["shape"])
            for family in SQUARES
            if (found := rows_of(rows, family=family))
        }
        names = list(COMPETITORS)
        return Section(
            findings=_findings(by_family),
            figures=[
                ratios_figure(
                    "bench-less",
                    "Both passes as multiples of ours (forward alone for SciPy); above the line "
                    "is slower than ours.",
                    by_family,
                    names,
                )
            ]
            if by_family
            else [],
            tables=[
                ratios_table(f"bench-less-{family}", f"{family}, batch×m×n", found, names, ERRORS)
                for family, found in by_family.items()
            ],
        )


def _mean(x: Tensor) -> float | None:
    return float(x.mean()) if x.numel() and bool(x.isfinite().all()) else None


def _findings(by_family: dict[str, list[Row]]) -> list[Finding]:
    findings = []
    slowest: dict[str, tuple[float, str]] = {}
    dearest: tuple[float, str] | None = None
    for family, rows in by_family.items():
        for row in rows:
            where = f"{family}, {shape(row)}"
            speed = ratio(row.values, "lstsq", "forward")
            if speed is not None:
                entry = (1 / speed, where)
                slowest["lstsq"] = max(slowest.get("lstsq", entry), entry)
            forward = seconds(row.values, "ours", "forward")
            backward = seconds(row.values, "ours", "backward")
            if forward is not None and backward is not None:
                entry = (backward / forward, where)
                dearest = max(dearest or entry, entry)
    if slowest:
        value, where = slowest["lstsq"]
        findings.append(
            Finding(
                "LESS forward against lstsq, which solves less, most",
                "at most 1.0×",
                f"{value:.2f}× ({where})",
                value <= 1,
            )
        )
    if dearest is not None:
        value, where = dearest
        findings.append(
            Finding(
                "LESS backward against its forward, most",
                "at most 1.0×",
                f"{value:.2f}× ({where})",
                value <= 1,
            )
        )
    return findings
