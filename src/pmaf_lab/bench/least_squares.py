"""Least squares on the sphere and its gradients, by everything a user would pick instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

import pmaf
from pmaf.gradients import DDN, Gradient, Unroll
from pmaf_lab.bench.families import SQUARES
from pmaf_lab.bench.growth import Sweep
from pmaf_lab.bench.present import ratio, seconds, shape
from pmaf_lab.bench.race import Competitor, Judge, Race, Result, Task, mean
from pmaf_lab.experiments import Finding, Row, Scale
from pmaf_lab.paper import less

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


class LessRace(Race):
    name = "less"
    title = "LESS beside everything else"
    about = (
        "Least squares on the sphere and the gradient of cᵀu, float32, medians of runs "
        "interleaved between the competitors. lstsq and Cholesky (normal equations with one "
        "factor) solve the problem without the constraint: they are the price to beat, not an "
        "alternative. The error of the objective is relative to the global minimum, that of the "
        "gradient to the certified solution's in float64; means over the batch."
    )
    reduced = "two families, three shapes, and 0.15 s a competitor instead of 0.25 s."
    competitors = COMPETITORS
    families = tuple(SQUARES)
    quick_families = ("inner", "outer")
    shapes: ClassVar[Mapping[Scale, Sequence[tuple[int, ...]]]] = {
        "quick": [(1000, 2, 2), (64, 64, 32), (256, 8, 64)],
        "full": [
            *((5, 2 * n, n) for n in (2, 3, 8, 32, 128, 512, 1024)),
            *((batch, 64, 32) for batch in (1, 64, 256, 1000)),
            *((batch, 2, 2) for batch in (1, 64, 256, 1000)),
            (256, 128, 64),
            (100, 1024, 256),
            (256, 8, 64),
            (256, 16, 128),
            *((10_000, m, n) for m, n in ((8, 9), (6, 4))),
            *((1000, m, n) for m, n in ((100, 9), (200, 12))),
        ],
    }
    errors = ("objective error", "gradient error")
    sweeps = (
        Sweep("n to 32, 5×2n×n", lambda size: _tall_five(size) and size[-1] <= 32),
        Sweep("n from 32, 5×2n×n", lambda size: _tall_five(size) and size[-1] >= 32),
        Sweep("batch, 2×2", lambda size: tuple(size[1:]) == (2, 2), lambda size: size[0]),
        Sweep("batch, 64×32", lambda size: tuple(size[1:]) == (64, 32), lambda size: size[0]),
    )
    compared = ("forward", "both")
    axes = "batch×m×n"
    panel = Sweep("5×2n×n", lambda size: _tall_five(size))

    def task(self, family: str, shape: Sequence[int], device: torch.device) -> Task:
        batch, m, n = shape
        generator = torch.Generator().manual_seed(0)
        A, b = (x.to(device) for x in SQUARES[family](batch, m, n, generator))
        c = torch.randn(n, generator=generator).to(device)
        return Task((A.requires_grad_(), b.requires_grad_()), c)

    def loss(self, outputs: Result, c: Tensor) -> Tensor:
        return (outputs[0] @ c).sum()

    def judge(self, task: Task) -> Judge:
        exact = tuple(x.detach().double().requires_grad_() for x in task.inputs)
        problem = pmaf.SphereLeastSquares(exact[0].detach(), exact[1].detach())
        solution = pmaf.solve(problem, throw=True)
        least = problem.objective(solution.value)
        (truth,) = torch.autograd.grad((pmaf.less(*exact) @ task.c.double()).sum(), exact[:1])
        # The objective relative to where it starts, lest a tiny minimum blow it up.
        scale = torch.maximum(least, 0.5 * problem.b.square().sum(-1))
        # Where the minimiser is not unique up to the rounding of the data there is no gradient.
        spread = torch.linalg.matrix_norm(problem.A, 2).square()
        unique = solution.gap > torch.finfo(task.c.dtype).eps ** 0.5 * spread

        def judge(outputs: Result, gradients: Result | None) -> dict[str, float | None]:
            above = (problem.objective(outputs[0].double()) - least).abs()
            found = {"objective error": mean(above / scale)}
            if gradients is not None:
                error = (gradients[0].double() - truth).norm(dim=(-2, -1))
                found["gradient error"] = mean((error / truth.norm(dim=(-2, -1)))[unique])
            return found

        return judge

    def measure(
        self, device: torch.device, *, family: str, shape: list[int], budget: float
    ) -> dict[str, Any]:
        found = super().measure(device, family=family, shape=shape, budget=budget)
        for name in UNCONSTRAINED:  # another problem, hence another solution
            for error in self.errors:
                found.get(name, {}).pop(error, None)
        return found

    def findings(self, by_family: Mapping[str, Sequence[Row]]) -> list[Finding]:
        return _findings(by_family)


def _tall_five(size: Sequence[int]) -> bool:
    return size[0] == 5 and size[1] == 2 * size[2]


# What the forward pass may take, as a share of lstsq, where ‖A⁺b‖ > 1; elsewhere as much as lstsq.
NAMED = {
    "1000×2×2": 0.5,
    "1000×64×32": 0.5,
    "256×128×64": 0.5,
    "100×1024×256": 0.8,
    "5×2048×1024": 0.8,
    "256×8×64": 0.5,
    "256×16×128": 0.5,
    "10000×8×9": 0.5,
    "1000×100×9": 0.5,
}


def _findings(by_family: Mapping[str, Sequence[Row]]) -> list[Finding]:
    """The family "outer" of every shape, and the dearest of the others."""
    rows = [(family, row) for family, found in by_family.items() for row in found]
    findings = []
    for name, target in NAMED.items():
        speeds = [
            (1 / speed, family)
            for family, row in rows
            if shape(row) == name and (speed := ratio(row.values, "lstsq", "forward")) is not None
        ]
        easy = [entry for entry in speeds if entry[1] == "outer"]
        hard = [entry for entry in speeds if entry[1] != "outer"]
        what = f"LESS forward, {name}, against lstsq"
        findings += [_at_most(what, *max(x), most) for x, most in ((easy, target), (hard, 1)) if x]
    shares = [
        (backward / forward, f"{family}, {shape(row)}")
        for family, row in rows
        if (forward := seconds(row.values, "ours", "forward")) is not None
        and (backward := seconds(row.values, "ours", "backward")) is not None
    ]
    if shares:
        findings.append(_at_most("LESS backward against its forward", *max(shares), 0.5))
    return findings


def _at_most(what: str, value: float, where: str, most: float) -> Finding:
    return Finding(f"{what}, most", f"at most {most}×", f"{value:.2f}× ({where})", value <= most)
