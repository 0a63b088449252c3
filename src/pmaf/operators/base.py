"""A matrix that is known by its products."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pmaf.linalg.products import matvec
from pmaf.runtime.ranks import cuts_matrices, whole


class Operator(ABC):
    """A matrix `(*, m, n)` that is known by its products.

    Vectors are rows throughout: `(*, p, n)` stands for p of them. A subclass defines its tensors
    (`tensors`), the same operator with other tensors (`with_tensors`), and its products. Autograd
    then gives gradients of the products; where there is a faster way, override `pullback`. If the
    tensors are DTensors, so are the rows, so that a product written for one machine is right on
    many.

    Operators can be added, and multiplied by numbers: `damping * P + teleport`.
    """

    symmetric: bool = False  # whether it is so by construction, or Hermitian if it is complex

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """`(*, m, n)`."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the operator, which receive gradients."""

    @abstractmethod
    def with_tensors(self, tensors: Sequence[Tensor]) -> Operator:
        """The same operator with other tensors, in the order of `tensors`."""

    @abstractmethod
    def matvec(self, rows: Tensor) -> Tensor:
        """`A x` for every row, `(*, p, n)` to `(*, p, m)`."""

    def rmatvec(self, rows: Tensor) -> Tensor:
        """`Aᵀ x` for every row, `(*, p, m)` to `(*, p, n)`; `Aᴴ x` of a complex matrix."""
        if self.symmetric:
            return self.matvec(rows)
        raise NotImplementedError(
            f"{type(self).__name__} has no product with the transpose, which this needs; "
            "implement rmatvec"
        )

    def solve(self, rows: Tensor) -> Tensor:
        """`A⁻¹ x` for every row, `(*, p, n)` to `(*, p, n)`; most operators have no such product.

        It serves a symmetric positive definite operator in the place of `M`, and may have errors
        up to `√eps`. No gradient goes through it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no product with its inverse")

    @property
    def solvable(self) -> bool:
        """Whether there is a `solve`."""
        return type(self).solve is not Operator.solve

    def diagonal(self) -> Tensor | None:
        """The diagonal, `(*, n)`, of a square operator; None where it takes more than a look."""
        return None

    def pullback(self, left: Tensor, right: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        """Gradients of `Σ leftᵀ A right` over rows, in the tensors; None where not needed.

        Those of `Re Σ leftᴴ A right` for a complex matrix, in torch's convention.
        """
        leaves = [x.detach().requires_grad_(need) for x, need in zip(self.tensors, needs)]
        wanted = [x for x, need in zip(leaves, needs) if need]
        if not wanted:
            return [None for _ in needs]
        with torch.enable_grad():
            image = self.with_tensors(leaves).matvec(right)
            if not image.requires_grad:
                raise RuntimeError(
                    f"autograd sees no way from the products of {type(self).__name__} to its "
                    "tensors, whose gradients are wanted; multiply by operations it can follow, or "
                    "implement pullback"
                )
            found = iter(torch.autograd.grad(image, wanted, left, allow_unused=True))
        return [next(found) if need else None for need in needs]

    def claims(self) -> Iterator[Operator]:
        """The operators in it whose products with the transpose have to be checked.

        Their class is not part of pmaf, and has its own `rmatvec` or sets `symmetric`.
        """
        kind = type(self)
        ours = all(f.__module__.startswith("pmaf.") for f in (kind.matvec, kind.rmatvec))
        if not ours and (self.symmetric or kind.rmatvec is not Operator.rmatvec):
            yield self

    def in_units(self, rows: Tensor) -> tuple[Operator, Tensor]:
        """The operator over a power of two, so that its products with `rows` are about one.

        Returns it and the exponents, `(*,)`. An operator that squares its tensors, such as `Gram`,
        scales these first, because a product that has overflowed cannot be scaled back.
        """
        from pmaf.operators.combined import TimesPowers

        size = whole(self.matvec(rows)).abs().amax((-2, -1))
        exponents = torch.where(size > 0, size, 1).log2().floor()
        return TimesPowers(self, -exponents), exponents

    def __call__(self, u: Tensor) -> Tensor:
        """`A u` for one vector of each batch entry, `(*, n)` to `(*, m)`."""
        return self._one_by_one(self.matvec, u)

    def transposed(self, u: Tensor) -> Tensor:
        """`Aᵀ u`, or `Aᴴ u`, for one vector of each batch entry, `(*, m)` to `(*, n)`."""
        return self._one_by_one(self.rmatvec, u)

    def _one_by_one(self, product: Callable[[Tensor], Tensor], u: Tensor) -> Tensor:
        # A matrix without a batch takes a batch of vectors as its rows.
        if not self.batch_shape:
            rows = product(u.reshape(-1, u.shape[-1]))
            return rows.reshape(*u.shape[:-1], rows.shape[-1])
        return product(u.unsqueeze(-2)).squeeze(-2)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def batch_shape(self) -> torch.Size:
        return self.shape[:-2]

    def __add__(self, other: Any) -> Operator:
        from pmaf.operators.combined import Sum

        return Sum(self, as_operator(other))

    def __radd__(self, other: Any) -> Operator:
        # The sum() of Python starts from zero.
        if isinstance(other, int) and other == 0:
            return self
        return self + other

    def __sub__(self, other: Any) -> Operator:
        return self + -1 * as_operator(other)

    def __rsub__(self, other: Any) -> Operator:
        return -1 * self + other

    def __truediv__(self, factor: float) -> Operator:
        return self * (1 / factor)

    def __neg__(self) -> Operator:
        return -1 * self

    def __mul__(self, factor: float) -> Operator:
        from pmaf.operators.combined import Scaled

        return Scaled(self, factor)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        return f"{type(self).__name__}({shape})"


def multiply(A: Tensor | Operator, u: Tensor) -> Tensor:
    """`A u` for one vector of each batch entry, `(*, n)` to `(*, m)`, whatever `A` is."""
    return A(u) if isinstance(A, Operator) else matvec(A, u)


def multiply_rows(A: Tensor | Operator, rows: Tensor) -> Tensor:
    """`A x` for every row, `(*, p, n)` to `(*, p, m)`, whatever `A` is."""
    return A.matvec(rows) if isinstance(A, Operator) else rows @ A.mT


def number(name: str, x: Any) -> float:
    """`x` as a float; an error for a tensor that requires a gradient, which would be lost."""
    if isinstance(x, Tensor) and x.requires_grad:
        raise TypeError(
            f"{name} is a number here, and a tensor that requires a gradient would get none; "
            "multiply the tensors that the operator is made of instead"
        )
    if isinstance(x, bool) or not isinstance(x, (int, float, Tensor)):
        raise TypeError(f"{name} must be a number; got {type(x).__name__}")
    return float(x)


def known_by_products(A: Any) -> bool:
    """Whether solvers use products with `A` alone: operators, sparse and sharded matrices."""
    if isinstance(A, Tensor):
        return A.layout in (torch.sparse_csr, torch.sparse_coo) or cuts_matrices(A)
    return isinstance(A, Operator)


def as_operator(A: Any) -> Operator:
    """`A` itself if it is an operator; a dense or sparse tensor as an operator."""
    from pmaf.operators.matrix import Matrix
    from pmaf.operators.sparse import Sparse

    if isinstance(A, Operator):
        return A
    if isinstance(A, Tensor) and A.layout == torch.strided:
        return Matrix(A)
    if isinstance(A, Tensor) and A.layout in (torch.sparse_csr, torch.sparse_coo):
        return Sparse(A)
    given = f"a tensor of layout {A.layout}" if isinstance(A, Tensor) else type(A).__name__
    raise TypeError(
        "expected a dense tensor, a sparse CSR or COO tensor, or an operator of "
        f"pmaf.operators; got {given}"
    )
