"""Races against everything a user would pick instead, each runnable alone by its name."""

from pmaf_lab.bench.calls import CallsRace
from pmaf_lab.bench.crossover import EigenCrossover, LessCrossover
from pmaf_lab.bench.eigen import EigenRace, EigenvectorsRace
from pmaf_lab.bench.general import GeneralRace
from pmaf_lab.bench.graphs import Graphs
from pmaf_lab.bench.least_squares import LessRace
from pmaf_lab.bench.memory import MemoryRace
from pmaf_lab.bench.pca import PrincipalComponents
from pmaf_lab.bench.pool import PoolRace
from pmaf_lab.bench.problems import HermitianRace, NullspaceRace, PairsRace
from pmaf_lab.bench.traces import Traces
from pmaf_lab.bench.users import UsersLessRace, UsersRace, UsersRaceOfThree
from pmaf_lab.experiments import Collection

_LEAD = (
    "The default settings beside everything a user would pick instead, in one process and in "
    "turn, with the errors beside the times: a fast wrong answer is not ahead. "
)

BENCHMARKS = Collection(
    command="bench",
    title="Beside everything else",
    lead={
        "quick": _LEAD + "This is a quick run: few families and sizes.",
        "full": _LEAD + "This is a full run.",
    },
    source="target",
    extra="bench",
    experiments=(
        LessRace(),
        MemoryRace(
            LessRace(),
            {
                "quick": [(1000, 2, 2), (256, 8, 64)],
                "full": [
                    (1000, 2, 2),
                    (1000, 64, 32),
                    (256, 128, 64),
                    (100, 1024, 256),
                    (5, 2048, 1024),
                    (256, 8, 64),
                    (256, 16, 128),
                ],
            },
        ),
        UsersLessRace(),
        LessCrossover(),
        EigenRace(),
        MemoryRace(
            EigenRace(),
            {
                "quick": [(5, 32), (5, 128)],
                "full": [*((5, n) for n in (32, 128, 256, 512, 1024)), (1000, 2), (64, 128)],
            },
        ),
        UsersRace(),
        UsersRaceOfThree(),
        EigenvectorsRace(),
        GeneralRace(),
        EigenCrossover(),
        NullspaceRace(),
        PairsRace(),
        HermitianRace(),
        PoolRace(),
        Graphs(),
        PrincipalComponents(),
        CallsRace(),
        Traces(),
    ),
)
