"""Implicit singular value decomposition: one or a few triplets `Av = σu`, `Aᵀu = σv`.

Those of a complex matrix are `Av = σu`, `Aᴴu = σv`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from pmaf import errors
from pmaf.layers.eigenvectors import requested_first
from pmaf.layers.triplets import PrincipalTriplets
from pmaf.operators import Operator
from pmaf.recipe import AUTO, end, short_recipe
from pmaf.solvers import Auto, Solver


class SingularTriplets(NamedTuple):
    """Left vectors, singular values and right vectors, as `torch.linalg.svd` returns them.

    `(*, m)`, `(*,)` and `(*, n)`, or `(*, m, k)`, `(*, k)` and `(*, n, k)`.

    >>> import torch, pmaf
    >>> pmaf.isvd(torch.diag(torch.tensor([3.0, 2.0])), k=2).values
    tensor([3., 2.])
    """

    left: Tensor
    values: Tensor
    right: Tensor


def isvd(
    A: Tensor | Operator,
    k: int | None = None,
    *,
    largest: bool = True,
    descending: bool | None = None,
    reference: Any = None,
    solver: Solver | None = None,
    init: Tensor | None = None,
) -> SingularTriplets:
    """Singular triplets, one or k of them, differentiable.

    Gradients are finite and exact whenever the requested singular values are simple, however often
    other singular values repeat; of a real square matrix also where one of them is zero.

    Args:
        A: `(*, m, n)`, tall, square or wide, of float32 or float64, complex64 or complex128;
            float16 and bfloat16 are computed in float32. Or a sparse tensor, a DTensor, or an
            operator of `pmaf.operators`.
        k: how many, at most `min(m, n)`; None for one, without a dimension for it.
        largest: the largest singular values, or the smallest.
        descending: order of the singular values if there are several. Unless given, the requested
            end is first: they descend from the largest, or ascend from the smallest.
        reference: `(*, n)` or `(*, n, k)`, towards which the sign of each right vector is chosen,
            or its phase if it is complex, as in `pmaf.ied`; the left vector follows.
        solver: one of `pmaf.solvers`; `Auto()` unless given.
        init: `(*, n)` or `(*, n, k)`, right vectors, the start of a search by products.

    Returns:
        `SingularTriplets(left, values, right)`, `(*, m)`, `(*,)` and `(*, n)`, or `(*, m, k)`,
        `(*, k)` and `(*, n, k)`.

    >>> import torch, pmaf
    >>> left, values, right = pmaf.isvd(torch.tensor([[0.0, 2.0], [0.0, 0.0], [1.0, 0.0]]))
    >>> left.abs(), values, right
    (tensor([1., 0., 0.]), tensor(2.), tensor([0., 1.]))
    """
    if descending is None:
        descending = largest
    given = {"A": A, "reference": reference, "init": init}
    recipe = short_recipe(PrincipalTriplets, given, (k, largest, descending), solver, None)
    short = None if recipe is None else recipe.run(given)
    if short is None:
        problem = PrincipalTriplets(A, None, k, largest, descending, reference)
        short = end(problem, solver or AUTO, init=init, report=False).found
    right, values, left = short
    return SingularTriplets(left, values, right)


class ISVD(nn.Module):
    """`pmaf.isvd` as a module, with the same keywords and results.

    >>> import torch, pmaf
    >>> pmaf.ISVD(k=3)
    ISVD(k=3, largest=True, descending=True, solver=Auto())
    """

    def __init__(
        self,
        k: int | None = None,
        *,
        largest: bool = True,
        descending: bool | None = None,
        solver: Solver | None = None,
    ) -> None:
        super().__init__()
        errors.require_count("k", k)
        self.k, self.largest, self.solver = k, largest, solver or Auto()
        self.descending = requested_first(descending, largest)

    def forward(
        self,
        A: Tensor | Operator,
        reference: Tensor | int | str | None = None,
        init: Tensor | None = None,
    ) -> SingularTriplets:
        return isvd(
            A,
            self.k,
            largest=self.largest,
            descending=self.descending,
            reference=reference,
            solver=self.solver,
            init=init,
        )

    def __prepare_scriptable__(self) -> None:
        errors.refuse_script(self)

    def extra_repr(self) -> str:
        names = ("k", "largest", "descending", "solver")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
