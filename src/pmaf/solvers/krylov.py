"""Both problems from products alone, in a space that grows where the residual points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf.errors import require_at_least, require_tolerance
from pmaf.runtime.log import took
from pmaf.solvers.base import Outcome, Solver


@dataclass(frozen=True)
class Krylov(Solver):
    """Thick-restart Lanczos, Arnoldi, or least squares in a Krylov space, whichever fits.

    The `Auto()` of operators, of sparse tensors and of matrices spread over ranks. Nothing
    n×n is formed, forward or backward.

    Args:
        dimension: vectors of the space; twice as many are held in memory. More take fewer
            products when eigenvalues are close. Unless given, 40, or all there are if that is
            not above 256.
        max_products: at most so many, forward and again backward.
        tolerance: on the residual relative to the matrix, as reported; a few roundings
            unless given.
    """

    serves = ("PrincipalEigenvectors", "SphereLeastSquares")
    matrix_free = True

    dimension: int | None = None
    max_products: int = 5000
    tolerance: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dimension is not None:
            require_at_least("dimension", self.dimension, 4)
        require_at_least("max_products", self.max_products, 1)
        require_tolerance("tolerance", self.tolerance)

    def solve(self, problem: Any, *, init: Tensor | None = None, report: bool = True) -> Outcome:
        took("products")
        return problem.search(self, init)

    def size(self, n: int, k: int = 1) -> int:
        """Of the space for k vectors of length n."""
        return max(self.dimension or (n if n <= 256 else 40), 4 * k + 8)

    def tolerance_of(self, dtype: torch.dtype) -> float:
        return 16 * torch.finfo(dtype).eps if self.tolerance is None else self.tolerance

    def advice(self) -> str:
        return (
            "raise max_products or dimension, start from the last solution with init, or set "
            "tolerance to what the products are worth"
        )
