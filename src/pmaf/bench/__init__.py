"""Races against everything a user would pick instead, each runnable alone by its name."""

from pmaf.bench.eigen import EigenRace
from pmaf.bench.least_squares import LessRace
from pmaf.experiments import Collection

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
    experiments=(LessRace(), EigenRace()),
)
