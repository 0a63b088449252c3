"""Which of several ways a solve took, for whoever wants to know.

logging.basicConfig(); logging.getLogger("pmaf").setLevel(logging.DEBUG)
"""

from __future__ import annotations

import logging

_LOG = logging.getLogger("pmaf")


def took(way: str) -> None:
    """Say so at level DEBUG. Not for code that is traced: a trace cannot follow it."""
    if _LOG.isEnabledFor(logging.DEBUG):
        _LOG.debug(way)
