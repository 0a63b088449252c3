"""Wide matrices by their transposes."""

from __future__ import annotations

from torch import Tensor

from pmaf.operators import Operator
from pmaf.operators.transposed import Transposed
from pmaf.reductions.base import Found, Reduction, Tensors
from pmaf.runtime import ranks


class Wide(Reduction):
    """Triplets of a wide matrix are those of its adjoint with left and right exchanged."""

    words = "wide matrix -> its transpose"

    def apply(self, given: Tensors) -> Tensors:
        A = given["A"]
        return {**given, "A": Transposed(A) if isinstance(A, Operator) else A.mH}

    def back(self, found: Found, given: Tensors, posed: Tensors) -> Found:
        right, values, left = found
        return left, values, right

    def forth(self, vectors: Tensor, given: Tensors, posed: Tensors) -> Tensor:
        """The left vectors `Av` of right ones, which are columns; their lengths do not matter."""
        A = given["A"]
        if not isinstance(A, Operator):
            return A.detach() @ vectors
        rows = ranks.replicate(vectors.detach().mT, ranks.mesh_of(*A.tensors))
        return ranks.whole(A.matvec(rows)).mT
