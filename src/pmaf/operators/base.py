"""Matrices that are known by their products, and their sums and multiples."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import reduce
from itertools import chain
from operator import add
from typing import Any, TypeVar

import torch
from torch import Tensor

from pmaf.errors import require_alike, require_broadcast, shape_of
from pmaf.linalg.products import broadcast, matvec
from pmaf.operators.broadcasting import broadcast_product
from pmaf.runtime.ranks import cuts_matrices, mesh_of, replicate, whole

_Kind = TypeVar("_Kind", bound="type[Operator]")


class Operator(ABC):
    """A matrix `(*, m, n)` that is known by its products.

    Vectors are rows throughout: `(*, p, n)` stands for p of them. A subclass defines its tensors
    (`tensors`), the same operator with other tensors (`with_tensors`), and its products. Autograd
    then gives gradients of the products; where there is a faster way, override `pullback`. If the
    tensors are DTensors, so are the rows, so that a product written for one machine is right on
    many.

    Operators can be added, and multiplied by numbers, vectors and matrices:
    `(damping * P + teleport) @ x`.

    >>> import torch, pmaf
    >>> class Shifted(pmaf.operators.Operator):  # d times the components, which move by one
    ...     shape = property(lambda self: torch.Size([len(self.d), len(self.d)]))
    ...     tensors = property(lambda self: (self.d,))
    ...     def __init__(self, d):
    ...         self.d = d
    ...     def with_tensors(self, tensors):
    ...         return Shifted(*tensors)
    ...     def matvec(self, rows):
    ...         return self.d * rows.roll(1, -1)
    ...     def rmatvec(self, rows):
    ...         return (self.d * rows).roll(-1, -1)
    >>> d = torch.tensor([2.0, 2.0, 2.0], requires_grad=True)
    >>> value = pmaf.ied(Shifted(d)).values  # of the symmetric part
    >>> value.backward()
    >>> value.detach().round(decimals=3), d.grad.round(decimals=3)
    (tensor(2.), tensor([0.3330, 0.3330, 0.3330]))
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
        size = whole(self.matvec(rows)).abs().amax((-2, -1))
        exponents = torch.where(size > 0, size, 1).log2().floor()
        return TimesPowers(self, -exponents), exponents

    def __matmul__(self, x: Tensor) -> Tensor:
        """`A x` as for two tensors: a vector `(n,)`, or matrices `(*, n, p)` that broadcast.

        Two dimensions or more are those of matrices, as in torch; `A(x)` is for a batch of vectors.
        """
        if isinstance(x, Operator):
            raise TypeError(
                f"{self!r} @ {x!r} is no operator yet; multiply by one after the other, A @ (B @ x)"
                ", or make one of both with FromMatvec(lambda u: A(B(u)), shape)"
            )
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            kind = f"layout {x.layout}" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{self!r} @ x needs a dense tensor; got {kind}")
        require_alike("x", x, repr(self), self)
        n, vector = self.shape[-1], x.dim() == 1
        if x.dim() == 0 or x.shape[-1 if vector else -2] != n:
            batch = x.dim() > 1 and x.shape[-1] == n
            hint = "; for a batch of vectors (*, n) call A(x)" if batch else ""
            raise ValueError(
                f"{self!r} @ x needs x of shape ({n},) or (*, {n}, p); got {shape_of(x)}{hint}"
            )
        rows = x.unsqueeze(0) if vector else x.mT
        require_broadcast(repr(self), self.batch_shape, "x", rows.shape[:-2])
        if rows.numel() == 0:  # many products do not take no rows
            batch = torch.broadcast_shapes(self.batch_shape, rows.shape[:-2])
            return rows.new_zeros(*batch, self.shape[-2], rows.shape[-2]) + rows.sum()
        image = broadcast_product(self.matvec, self.batch_shape, rows)
        return image.squeeze(-2) if vector else image.mT

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

    def over_batch(self, product: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """A product with rows `(*, p, n)`, which may have a batch where the operator has none."""
        if self.batch_shape or rows.dim() == 2:
            return product(rows)
        image = product(rows.reshape(-1, rows.shape[-1]))
        return image.reshape(*rows.shape[:-1], image.shape[-1])

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
        return Scaled(self, factor)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        return f"{type(self).__name__}({shape})"


class Wrapping(Operator):
    """An operator that is made of another one, `part`, and has its shape and its tensors.

    A subclass defines its products; one that has tensors of its own or another shape says so.
    """

    def __init__(self, part: Operator) -> None:
        self.part, self.symmetric = part, part.symmetric

    @property
    def shape(self) -> torch.Size:
        return self.part.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.part.tensors

    @property
    def dtype(self) -> torch.dtype:
        return self.part.dtype

    @property
    def device(self) -> torch.device:
        return self.part.device

    def around(self, part: Operator) -> Any:
        """The same operator made of another part."""
        other = copy(self)
        other.part = part
        return other

    def with_tensors(self, tensors: Sequence[Tensor]) -> Operator:
        return self.around(self.part.with_tensors(tensors))

    def claims(self) -> Iterator[Operator]:
        return self.part.claims()

    def __repr__(self) -> str:
        return repr(self.part)  # what the user has given


class Sum(Operator):
    """`A + B + …`.

    >>> import torch
    >>> from pmaf.operators import Diagonal, LowRank
    >>> (Diagonal(torch.ones(2)) + LowRank(torch.ones(1, 2), torch.ones(1, 2)))(torch.ones(2))
    tensor([3., 3.])
    """

    def __init__(self, *parts: Operator) -> None:
        if not parts:
            raise ValueError("a sum has at least one part; got none")
        first, *others = parts
        for part in others:
            if part.shape[-2:] != first.shape[-2:]:
                raise ValueError(f"{first!r} and {part!r} do not add up: their shapes differ")
            require_alike(repr(part), part, repr(first), first)
            require_broadcast(repr(first), first.batch_shape, repr(part), part.batch_shape)
        self.parts = parts
        self.symmetric = all(part.symmetric for part in parts)

    @property
    def shape(self) -> torch.Size:
        batch = broadcast(*(part.batch_shape for part in self.parts))
        return torch.Size((*batch, *self.parts[0].shape[-2:]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(x for part in self.parts for x in part.tensors)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def with_tensors(self, tensors: Sequence[Tensor]) -> Sum:
        pairs = zip(self.parts, _split(self.parts, tensors))
        return Sum(*(part.with_tensors(own) for part, own in pairs))

    def claims(self) -> Iterator[Operator]:
        return chain.from_iterable(part.claims() for part in self.parts)

    def in_units(self, rows: Tensor) -> tuple[Operator, Tensor]:
        found = [part.in_units(rows) for part in self.parts]
        largest = reduce(torch.maximum, (exponents for _, exponents in found))
        return Sum(*(TimesPowers(A, exponents - largest) for A, exponents in found)), largest

    def matvec(self, rows: Tensor) -> Tensor:
        return reduce(add, (part.matvec(rows) for part in self.parts))

    def rmatvec(self, rows: Tensor) -> Tensor:
        return reduce(add, (part.rmatvec(rows) for part in self.parts))

    def diagonal(self) -> Tensor | None:
        found = [part.diagonal() for part in self.parts]
        known = [d for d in found if d is not None]
        return reduce(add, known) if len(known) == len(found) else None

    def pullback(self, left: Tensor, right: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        pairs = zip(self.parts, _split(self.parts, needs))
        return [dx for part, own in pairs for dx in part.pullback(left, right, own)]

    def __repr__(self) -> str:
        return f"Sum({', '.join(map(repr, self.parts))})"


def _split(parts: Sequence[Operator], items: Sequence) -> list[Sequence]:
    """As many items for each part as it has tensors."""
    found, at = [], 0
    for part in parts:
        found.append(items[at : at + len(part.tensors)])
        at += len(part.tensors)
    return found


class _Multiple(Wrapping):
    """A multiple of an operator; `times` multiplies rows by the factor."""

    def times(self, rows: Tensor) -> Tensor:
        raise NotImplementedError

    def matvec(self, rows: Tensor) -> Tensor:
        return self.times(self.part.matvec(rows))

    def rmatvec(self, rows: Tensor) -> Tensor:
        return self.times(self.part.rmatvec(rows))

    def pullback(self, left: Tensor, right: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        return self.part.pullback(self.times(left), right, needs)


class Scaled(_Multiple):
    """A number times an operator.

    >>> import torch
    >>> from pmaf.operators import Diagonal
    >>> (0.5 * Diagonal(torch.tensor([2.0, 4.0])))(torch.ones(2))
    tensor([1., 2.])
    """

    def __init__(self, part: Operator, factor: float) -> None:
        super().__init__(part)
        self.factor = number("the factor of an operator", factor)

    def in_units(self, rows: Tensor) -> tuple[Operator, Tensor]:
        part, exponents = self.part.in_units(rows)
        mantissa, power = math.frexp(self.factor)
        return Scaled(part, mantissa), exponents + power

    def times(self, rows: Tensor) -> Tensor:
        return self.factor * rows

    def solve(self, rows: Tensor) -> Tensor:
        return self.part.solve(rows) / self.factor

    @property
    def solvable(self) -> bool:
        return self.part.solvable and self.factor != 0

    def diagonal(self) -> Tensor | None:
        found = self.part.diagonal()
        return None if found is None else self.factor * found

    def __repr__(self) -> str:
        return f"Scaled({self.part!r}, {self.factor})"


class TimesPowers(_Multiple):
    """An operator times a power of two for each batch entry, with exponents `(*,)`."""

    def __init__(self, part: Operator, exponents: Tensor) -> None:
        super().__init__(part)
        self.exponents = exponents

    def times(self, rows: Tensor) -> Tensor:
        power = self.exponents.to(rows.dtype.to_real()).exp2()[..., None, None]
        return rows * replicate(power, mesh_of(rows))


def multiply(A: Tensor | Operator, u: Tensor) -> Tensor:
    """`A u` for one vector of each batch entry, `(*, n)` to `(*, m)`, whatever `A` is.

    >>> import torch, pmaf
    >>> pmaf.operators.multiply(torch.diag(torch.tensor([1.0, 2.0])), torch.ones(2))
    tensor([1., 2.])
    """
    return A(u) if isinstance(A, Operator) else matvec(A, u)


def multiply_rows(A: Tensor | Operator, rows: Tensor) -> Tensor:
    """`A x` for every row, `(*, p, n)` to `(*, p, m)`, whatever `A` is.

    >>> import torch, pmaf
    >>> pmaf.operators.multiply_rows(torch.diag(torch.tensor([1.0, 2.0])), torch.ones(3, 2)).shape
    torch.Size([3, 2])
    """
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


# The classes of operators for tensors of a layout.
_KINDS: dict[torch.layout, Callable[[Tensor], Operator]] = {}


def represents(*layouts: torch.layout) -> Callable[[_Kind], _Kind]:
    """Declare a class as the operator for tensors of these layouts."""

    def declare(kind: _Kind) -> _Kind:
        _KINDS.update(dict.fromkeys(layouts, kind))
        return kind

    return declare


def as_operator(A: Any) -> Operator:
    """`A` itself if it is an operator; a dense or sparse tensor as an operator.

    >>> import torch, pmaf
    >>> pmaf.operators.as_operator(torch.eye(3))
    Matrix(3, 3)
    """
    if isinstance(A, Operator):
        return A
    if isinstance(A, Tensor) and A.layout in _KINDS:
        return _KINDS[A.layout](A)
    given = f"a tensor of layout {A.layout}" if isinstance(A, Tensor) else type(A).__name__
    raise TypeError(
        "expected a dense tensor, a sparse CSR or COO tensor, or an operator of "
        f"pmaf.operators; got {given}"
    )
