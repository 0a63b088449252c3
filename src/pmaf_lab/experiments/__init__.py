"""Experiments that run cell by cell, keep what they finish, and report on it.

An `Experiment` lists its cells, measures one at a time, and turns the saved rows into
tables, figures and findings. It knows nothing of folders, processes or progress bars:
`runner.run` does the measuring, `store.Store` keeps the rows, `report.write` makes the
report from the rows alone.
"""

from pmaf_lab.experiments.experiment import (
    Cell,
    Collection,
    Experiment,
    Figure,
    Finding,
    Measured,
    Row,
    Scale,
    Section,
    Table,
)

__all__ = [
    "Cell",
    "Collection",
    "Experiment",
    "Figure",
    "Finding",
    "Measured",
    "Row",
    "Scale",
    "Section",
    "Table",
]
