"""Both layers at the sizes that users have: small matrices, one or many at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from pmaf_lab.bench import eigen, least_squares
from pmaf_lab.bench.growth import Sweep
from pmaf_lab.bench.present import ratio, shape
from pmaf_lab.bench.race import Competitor, Judge, Result, Task
from pmaf_lab.experiments import Finding, Row, Scale

# The least time of eigh over ours, both passes, for every family.
TARGETS = {
    (1, 3): 1.5,
    (1, 8): 1.5,
    (1, 32): 2,
    (1, 128): 2,
    (5, 8): 2,
    (5, 32): 4,
    (5, 64): 4,
    (5, 128): 3,
    (5, 256): 2,
    (64, 9): 5,
    (64, 32): 6,
    (64, 128): 3,
    (1000, 3): 8,
    (1000, 4): 6,
    (1000, 9): 6,
    (1000, 12): 6,
    (1000, 16): 5,
    (10_000, 9): 7,
    (10_000, 12): 6,
    (100_000, 3): 10,
    (100_000, 4): 8,
}
TARGETS_OF_THREE = {(5, 32): 3, (64, 9): 4, (1000, 9): 4}


def _read(A: Tensor, *_: Tensor) -> Result:
    """What has to be done at the least: all numbers of `A` are read once."""
    return (A.detach().sum(),)


class UsersRace(eigen.EigenRace):
    name = "ied-users"
    title = "IED at the sizes that users have"
    about = (
        "The top eigenpair of small matrices, many at a time: normals and tensors (3×3), "
        "quaternions (4×4), two views (9×9), pose (12×12), pooling (16 to 128), beside eigh and "
        "beside the time to read A once. OMP_NUM_THREADS=1 shows what one thread does."
    )
    reduced = "three families and eight sizes."
    competitors: ClassVar[Mapping[str, Competitor]] = {
        "ours": eigen.COMPETITORS["ours"],
        "eigh": eigen.COMPETITORS["eigh"],
        "read A": Competitor(_read, differentiable=False),
    }
    quick_families = ("paper", "goe", "gap-1e-4")
    shapes: ClassVar[Mapping[Scale, Sequence[tuple[int, ...]]]] = {
        "quick": [(1, 8), (5, 32), (64, 9), (64, 32), (1000, 3), (1000, 9), (100_000, 4)],
        "full": list(TARGETS),
    }
    sweeps = ()
    panel = Sweep("batch 1000", lambda size: size[0] == 1000)
    targets: ClassVar[Mapping[tuple[int, int], float]] = TARGETS

    def judge(self, task: Task) -> Judge:
        judge = super().judge(task)
        return lambda outputs, gradients: judge(outputs, gradients) if len(outputs) > 1 else {}

    def findings(self, by_family: Mapping[str, Sequence[Row]]) -> list[Finding]:
        found: dict[tuple[int, int], list[tuple[float, str]]] = {}
        for family, rows in by_family.items():
            for row in rows:
                speed = ratio(row.values, "eigh", "both")
                if speed is not None:
                    batch, n = row.params["shape"]
                    found.setdefault((batch, n), []).append((speed, f"{family}, {shape(row)}"))
        return [
            Finding(
                f"IED, k = {self.k}, {size[0]}×{size[1]}, all families: eigh over ours, least",
                f"at least {target:g}×",
                f"{min(found[size])[0]:.2f}× ({min(found[size])[1]})",
                min(found[size])[0] >= target,
            )
            for size, target in self.targets.items()
            if size in found
        ]


class UsersRaceOfThree(UsersRace):
    name = "ied-users-k"
    title = "The top three eigenvectors at the sizes that users have"
    about = "The top three eigenpairs, otherwise as above."
    reduced = "three families."
    competitors: ClassVar[Mapping[str, Competitor]] = {
        "ours": Competitor(lambda A: eigen.ours(A, 3)),
        "eigh": Competitor(lambda A: eigen.top(A, 3)),
        "read A": Competitor(_read, differentiable=False),
    }
    shapes: ClassVar[Mapping[Scale, Sequence[tuple[int, ...]]]] = {
        "quick": list(TARGETS_OF_THREE),
        "full": list(TARGETS_OF_THREE),
    }
    targets = TARGETS_OF_THREE
    k = 3


class UsersLessRace(least_squares.LessRace):
    name = "less-users"
    title = "LESS at the sizes that users have"
    about = (
        "Least squares on the sphere of small matrices, one or many at a time, beside lstsq, which "
        "solves the problem without the constraint, and beside the time to read A once."
    )
    reduced = "two families and seven sizes."
    competitors: ClassVar[Mapping[str, Competitor]] = {
        "ours": least_squares.COMPETITORS["ours"],
        "lstsq": least_squares.COMPETITORS["lstsq"],
        "read A": Competitor(_read, differentiable=False),
    }
    shapes: ClassVar[Mapping[Scale, Sequence[tuple[int, ...]]]] = {
        "quick": [
            (1, 2, 2),
            (1, 64, 32),
            (5, 16, 8),
            (64, 64, 32),
            (1000, 2, 2),
            (1000, 100, 9),
            (10_000, 8, 9),
        ],
        "full": [
            *((1, m, n) for m, n in ((2, 2), (16, 8), (64, 32))),
            *((5, 2 * n, n) for n in (2, 3, 8, 32, 128)),
            *((64, m, n) for m, n in ((2, 2), (64, 32))),
            *((256, m, n) for m, n in ((128, 64), (8, 64), (16, 128))),
            *((1000, m, n) for m, n in ((2, 2), (64, 32), (100, 9), (200, 12))),
            *((10_000, m, n) for m, n in ((8, 9), (6, 4))),
        ],
    }
    sweeps = ()
    panel = Sweep("batch 1000", lambda size: size[0] == 1000)

    def judge(self, task: Task) -> Judge:
        judge = super().judge(task)
        return lambda outputs, gradients: judge(outputs, gradients) if outputs[0].dim() else {}
