"""The layers: a problem, a function and a module each, and the cases of the problems.

A case is known once its file has been imported, so that all of them are imported here.
"""

from pmaf.layers import (
    complex_least_squares,
    complex_singular,
    constrained,
    dense_pairs,
    hermitian,
    operator_pairs,
    pairs,
)

__all__ = [
    "complex_least_squares",
    "complex_singular",
    "constrained",
    "dense_pairs",
    "hermitian",
    "operator_pairs",
    "pairs",
]
