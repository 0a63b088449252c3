"""Log messages that say which of several methods a solve has used.

logging.basicConfig(); logging.getLogger("pmaf").setLevel(logging.DEBUG)
"""

from __future__ import annotations

import logging

_LOG = logging.getLogger("pmaf")
_is_enabled = _LOG.isEnabledFor


def took(way: str) -> None:
    """Log a method at level DEBUG. Traced code must not call this."""
    if _is_enabled(logging.DEBUG):
        _LOG.debug(way)
