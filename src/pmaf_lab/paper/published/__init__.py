"""The figures the paper prints, as data."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


@cache
def table(name: str) -> pd.DataFrame:
    """A table of the paper; what it leaves out is missing here.

    Args:
        name: "less_table" (the appendix table; columns `code_*` are what the released
            code gives when run again), "less_backward" (Table 2) or "ied_costs" (the six
            computational tables, seconds and megabytes).
    """
    import pandas as pd

    with (files(__name__) / f"{name}.csv").open() as file:
        return pd.read_csv(file)
