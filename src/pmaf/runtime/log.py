"""Which of several methods a solve has used: log messages, and words for a report.

logging.basicConfig(); logging.getLogger("pmaf").setLevel(logging.DEBUG)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident

_LOG = logging.getLogger("pmaf")
_is_enabled = _LOG.isEnabledFor
# The lists that reports of this moment collect the methods in, by thread; mostly there is none.
_collected: dict[int, list[str]] = {}


def took(way: str) -> None:
    """Log a method at level DEBUG. Traced code must not call this."""
    if _collected:
        _collected.get(get_ident(), []).append(way)
    if _is_enabled(logging.DEBUG):
        _LOG.debug(way)


@contextmanager
def collected() -> Iterator[list[str]]:
    """A list of the methods that this thread uses inside."""
    thread = get_ident()
    outer, ways = _collected.get(thread), []
    _collected[thread] = ways
    try:
        yield ways
    finally:
        if outer is None:
            del _collected[thread]
        else:
            _collected[thread] = outer


def in_words(solver: str, ways: Sequence[str]) -> str:
    """A solver and the methods that it has used, each once, for a report."""
    # Methods of the backward pass belong to another report.
    words = (_WORDS.get(way, way) for way in ways if not way.startswith("tangent"))
    known = ", ".join(dict.fromkeys(words))
    return f"{solver}: {known}" if solver and known else solver or known


# The words for messages of the log that are not plain enough, or repeat the name of the layer.
_WORDS = {
    "ied: complex reduction": "compiled kernels",
    "ied: decomposition": "decomposition",
    "ied: decomposition of some": "decomposition of some entries",
    "ied: Krylov space": "Krylov space",
    "ied: launched": "one launch of a kernel",
    "ied: mixed pairs": "equal eigenvalues",
    "ied: power steps": "power steps",
    "ied: reduction": "compiled kernels",
    "isvd: search for left vectors": "a search for left vectors",
    "less: constrained, eigenvectors": "eigenvectors",
    "less: constrained, singular vectors": "singular vectors",
    "less: decomposition, compiled": "compiled kernels around a decomposition",
    "less: eigenvectors": "eigenvectors",
    "less: eigenvectors, in float64": "eigenvectors, in float64",
    "less: eigenvectors, rescaled": "eigenvectors, in other units",
    "less: factor": "Cholesky factors",
    "less: factor, in float64": "Cholesky factors, in float64",
    "less: launched": "one launch of a kernel",
    "less: probes": "a Krylov space with a second start",
    "less: reduction": "compiled kernels",
    "less: singular vectors": "singular vectors",
    "products": "products with A",
    "quadratic: eigenvectors": "eigenvectors",
    "singular: gram": "Gram matrix",
    "singular: launched": "one launch of a kernel",
    "singular: reduction": "compiled kernels",
    "singular: svd": "singular value decomposition",
    "singular: svd of some": "singular value decomposition of some entries",
    "spectral: group": "a group of eigenpairs",
}
