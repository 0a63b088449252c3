"""The paper's measures of how good a solution is."""

from __future__ import annotations

from torch import Tensor

from pmaf._linalg import matvec, norm


def fixed_point_distance(A: Tensor, y: Tensor, b: Tensor) -> Tensor:
    """`‖Ay − b‖`, the distance that a LESS solution leaves.

    Args:
        A: `(*, m, n)`.
        y: `(*, n)`, the solution.
        b: `(*, m)`.
    """
    return norm(matvec(A, y) - b)


def mean_relative_error(values: Tensor, reference: Tensor) -> Tensor:
    """Mean of `(values − reference)/reference` over all entries, in percent.

    Negative where `values`, objectives or distances to be small, beat the reference.

    >>> import torch, pmaf
    >>> pmaf.metrics.mean_relative_error(torch.tensor([1.1, 2.0]), torch.tensor([1.0, 2.0]))
    tensor(5.0000)
    """
    return 100 * ((values - reference) / reference).mean()
