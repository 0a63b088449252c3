"""Where one way to a solution overtakes another: what the default settings are set by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import pmaf
from pmaf.solvers import Adaptive, Cholesky, Dense, Reduction, Secular
from pmaf_lab.bench import eigen, least_squares
from pmaf_lab.bench.growth import Sweep
from pmaf_lab.bench.race import Competitor
from pmaf_lab.experiments import Finding, Row, Scale

_NEVER = float("inf")
_POWER = Adaptive(power_from=0, power_size=1, krylov_from=_NEVER, compiled=False)
_KRYLOV = Adaptive(power_from=_NEVER, krylov_from=0, krylov_size=32, compiled=False)


class EigenCrossover(eigen.EigenRace):
    name = "ied-crossover"
    title = "IED: which way is fastest where"
    about = (
        "The attempts of the default solver, each made alone and at any size: a decomposition "
        "(“dense”), compiled kernels, power steps, and a Krylov space proved by a Cholesky "
        "factorisation, the last two followed by a decomposition where they fail. “ours” is what "
        "the default makes of them; where the lines cross is where its constants should be."
    )
    reduced = "three families, sizes 32, 128 and 256."
    competitors: ClassVar[Mapping[str, Competitor]] = {
        "ours": eigen.COMPETITORS["ours"],
        "eigh": eigen.COMPETITORS["eigh"],
        "dense": Competitor(lambda A: tuple(pmaf.ied(A, solver=Dense()))),
        "compiled": Competitor(lambda A: tuple(pmaf.ied(A, solver=Reduction()))),
        "power": Competitor(lambda A: tuple(pmaf.ied(A, solver=_POWER))),
        "krylov": Competitor(lambda A: tuple(pmaf.ied(A, solver=_KRYLOV))),
    }
    shapes: ClassVar[Mapping[Scale, Sequence[tuple[int, ...]]]] = {
        "quick": [(5, 32), (5, 128), (5, 256)],
        "full": [(5, n) for n in (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)],
    }
    sweeps = ()

    def findings(self, by_family: Mapping[str, Sequence[Row]]) -> list[Finding]:
        return []


class LessCrossover(least_squares.LessRace):
    name = "less-crossover"
    title = "LESS: which way is fastest where"
    about = (
        "The solvers behind the default, on 500 and on 5 problems of 2n×n: where they cross is "
        "where it changes from one to the other."
    )
    reduced = "two families, three sizes."
    competitors: ClassVar[Mapping[str, Competitor]] = {
        "ours": least_squares.COMPETITORS["ours"],
        "lstsq": least_squares.COMPETITORS["lstsq"],
        "Reduction()": Competitor(lambda A, b: (pmaf.less(A, b, solver=Reduction()),)),
        "Cholesky()": Competitor(lambda A, b: (pmaf.less(A, b, solver=Cholesky()),)),
        "Secular()": Competitor(lambda A, b: (pmaf.less(A, b, solver=Secular()),)),
    }
    shapes: ClassVar[Mapping[Scale, Sequence[tuple[int, ...]]]] = {
        "quick": [(500, 2 * n, n) for n in (4, 12, 32)],
        "full": [
            *((500, 2 * n, n) for n in (2, 4, 8, 12, 16, 24, 32, 64)),
            *((5, 2 * n, n) for n in (8, 16, 32, 64, 128, 256)),
        ],
    }
    sweeps = ()
    panel = Sweep("500×2n×n", lambda size: size[0] == 500)

    def findings(self, by_family: Mapping[str, Sequence[Row]]) -> list[Finding]:
        return []
