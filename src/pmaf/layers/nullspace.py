"""Null spaces: right singular vectors of the smallest singular values."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pmaf import errors
from pmaf.layers.singular_vectors import PrincipalSingularVectors
from pmaf.operators import Operator
from pmaf.recipe import AUTO, run, short_recipe
from pmaf.solvers import Auto, Solver


def nullspace(
    A: Tensor | Operator,
    k: int | None = None,
    *,
    weights: Tensor | None = None,
    reference: Any = None,
    solver: Solver | None = None,
    init: Tensor | None = None,
) -> Tensor:
    """Right singular vectors of the smallest singular values, differentiable.

    They minimise `‖√W A u‖` over unit vectors: the solution of every homogeneous system `Au ≈ 0`.
    For a wide matrix and `k = n − m` they are a basis of its null space, and functions of the
    space have exact gradients, where `torch.linalg.svd` returns zero (docs/nullspace.md).

    Args:
        A: `(*, m, n)`, tall, square or wide, of float32 or float64, complex64 or complex128;
            float16 and bfloat16 are computed in float32. Or a sparse tensor, a DTensor, or an
            operator of `pmaf.operators`.
        k: how many; None for one, without a dimension for it. The first belongs to the smallest
            singular value.
        weights: `(*, m)`, of the rows of `A`, real and none negative; they get gradients, also
            where they are zero. Their batch dimensions and those of `A` broadcast.
        reference: towards which the sign of each vector is chosen, or its phase if it is complex,
            as in `pmaf.ied`.
        solver: one of `pmaf.solvers`; `Auto()` unless given.
        init: `(*, n)` or `(*, n, k)`, the start of a search by products.

    Returns:
        `(*, n)`, or `(*, n, k)`.

    >>> import torch, pmaf
    >>> pmaf.nullspace(torch.tensor([[3.0, -4.0], [6.0, -8.0]]))
    tensor([0.8000, 0.6000])
    """
    given = {"A": A, "weights": weights, "reference": reference, "init": init}
    recipe = short_recipe(PrincipalSingularVectors, given, (k, False, False), solver, None)
    found = None if recipe is None else recipe.run(given)
    if found is not None:
        return found[0]
    problem = PrincipalSingularVectors(A, weights, k, largest=False, reference=reference)
    return run(problem, solver or AUTO, init=init, report=False).value


class NullSpace(nn.Module):
    """`pmaf.nullspace` as a module, with the same keywords and results.

    >>> import torch, pmaf
    >>> pmaf.NullSpace(k=4)
    NullSpace(k=4, solver=Auto())
    """

    def __init__(self, k: int | None = None, *, solver: Solver | None = None) -> None:
        super().__init__()
        errors.require_count("k", k)
        self.k, self.solver = k, solver or Auto()

    def forward(
        self,
        A: Tensor | Operator,
        weights: Tensor | None = None,
        reference: Tensor | int | str | None = None,
        init: Tensor | None = None,
    ) -> Tensor:
        return nullspace(
            A, self.k, weights=weights, reference=reference, solver=self.solver, init=init
        )

    def __prepare_scriptable__(self) -> None:
        errors.refuse_script(self)

    def extra_repr(self) -> str:
        return f"k={self.k!r}, solver={self.solver!r}"
