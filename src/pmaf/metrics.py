"""The paper's measures of the accuracy of a solution."""

from __future__ import annotations

from torch import Tensor

from pmaf.linalg.products import matvec, norm


def fixed_point_distance(A: Tensor, y: Tensor, b: Tensor | None = None) -> Tensor:
    """How far a solution is from the fixed point that defines it.

    With `b`, that of LESS, `‖Ay − b‖`; without, that of IED, `‖y − Ay/‖Ay‖‖`.

    Args:
        A: `(*, m, n)`, square for IED.
        y: `(*, n)`, the solution.
        b: `(*, m)`.

    >>> import torch, pmaf
    >>> pmaf.metrics.fixed_point_distance(torch.eye(2), torch.tensor([0.6, 0.8]), torch.zeros(2))
    tensor(1.)
    """
    image = matvec(A, y)
    if b is not None:
        return norm(image - b)
    return norm(y - image / norm(image).unsqueeze(-1))


def eigen_distance(A: Tensor, value: Tensor, y: Tensor) -> Tensor:
    """`‖Ay − λy‖`, how far from an eigenpair.

    >>> import torch, pmaf
    >>> pmaf.metrics.eigen_distance(torch.eye(2), torch.tensor(3.0), torch.tensor([0.0, 1.0]))
    tensor(2.)
    """
    return norm(matvec(A, y) - value.unsqueeze(-1) * y)


def mean_relative_error(values: Tensor, reference: Tensor) -> Tensor:
    """Mean of `(values − reference)/reference` over all entries, in percent.

    It is negative if the `values`, such as objectives or distances, are below the reference.

    >>> import torch, pmaf
    >>> pmaf.metrics.mean_relative_error(torch.tensor([1.1, 2.0]), torch.tensor([1.0, 2.0]))
    tensor(5.0000)
    """
    return 100 * ((values - reference) / reference).mean()
