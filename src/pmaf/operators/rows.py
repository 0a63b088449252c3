"""Products of an operator with the rows that solvers work on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pmaf.errors import NonFiniteError, require_finite
from pmaf.linalg.products import dot, inner, long_norm, one_if_zero
from pmaf.linalg.roundings import LOPSIDED, power_of_two
from pmaf.linalg.symmetric_part import fixed_rows
from pmaf.operators import Operator
from pmaf.operators.base import as_operator
from pmaf.operators.matrix import Matrix
from pmaf.runtime import ranks


class Rows:
    """Products with rows `(B, p, n)`, as plain tensors that every rank has.

    Only this class depends on the layout of a batch and on whether the operator is spread over
    ranks; the code between two products does not.
    """

    def __init__(self, A: Operator, batch: torch.Size) -> None:
        self.A, self.entries = A, batch.numel()
        self.mesh = ranks.mesh_of(*A.tensors)
        # Results of a search for the backward pass: ‖A‖, and whether the solution is unique.
        self.scale = torch.zeros(self.entries, device=A.device)
        self.unique = torch.ones(self.entries, dtype=torch.bool, device=A.device)
        # Eigenvalues of the operator in the units of the search, and the exponents of these units.
        self.values: Tensor | None = None
        self.exponents: Tensor | None = None
        # The `Entries` with which LESS solves its backward pass where products do not suffice.
        self.by_entries: Any = None

    def __call__(self, rows: Tensor) -> Tensor:
        return self.lower(self.A.matvec(self.lift(rows)), rows)

    def transposed(self, rows: Tensor) -> Tensor:
        return self.lower(self.A.rmatvec(self.lift(rows)), rows)

    def symmetric_part(self, rows: Tensor) -> Tensor:
        lifted = self.lift(rows)
        return self.lower(self.A.matvec(lifted) + self.A.rmatvec(lifted), rows).mul_(0.5)

    def solved(self, rows: Tensor) -> Tensor:
        """`A⁻¹` times rows, by the operator's own `solve`."""
        return self.lower(self.A.solve(self.lift(rows)), rows)

    def gram(self, rows: Tensor) -> Tensor:
        return self.lower(self.A.rmatvec(self.A.matvec(self.lift(rows))), rows)

    def pulled(self, b: Tensor) -> Tensor:
        """`Aᵀb`, `(B, 1, n)`, for `b` of shape `(*, m)`, which may be spread itself."""
        b = b.reshape(*self.A.batch_shape, -1, b.shape[-1])
        pulled = self.A.rmatvec(ranks.replicate(b, self.mesh))
        return ranks.whole(pulled).reshape(self.entries, 1, -1)

    def curvature_of(self, problem: Any) -> Callable[[Tensor], Tensor]:
        """Products with the curvature that a problem declares."""

        def product(rows: Tensor) -> Tensor:
            return self.lower(problem.curvature(self._posed(rows, problem)), rows)

        return product

    def pull_of(self, problem: Any) -> Tensor:
        """`force(0)`, `(B, 1, n)`."""
        zero = torch.zeros(
            (*problem.batch_shape, problem.n), dtype=self.A.dtype, device=self.A.device
        )
        force = problem.force(ranks.replicate(zero, self.mesh), *problem.tensors)
        return ranks.whole(force).reshape(self.entries, 1, -1)

    def _posed(self, rows: Tensor, problem: Any) -> Tensor:
        rows = rows.reshape(*problem.batch_shape, -1, rows.shape[-1])
        return ranks.replicate(rows, self.mesh)

    def look(self, product: Callable[[Tensor], Tensor], multipliers: Tensor) -> None:
        """Estimate the size of the matrix of these products, for a solver that does not report it.

        The estimate comes from three products with a pseudorandom vector and the multipliers.
        """
        n = self.A.shape[-1]
        row = fixed_rows[n, self.A.dtype, self.A.device][:1].expand(self.entries, 1, n)
        for _ in range(3):
            row = product(row / one_if_zero(long_norm(row)).unsqueeze(-1))
        self.values = multipliers.reshape(self.entries, -1)
        self.scale = torch.maximum(long_norm(row).squeeze(-1), self.values.abs().amax(-1))

    def lift(self, rows: Tensor) -> Tensor:
        """Rows in the shape that the operator takes."""
        # A matrix that all problems of a batch share takes one row for each problem.
        rows = rows.reshape(*self.A.batch_shape, -1, rows.shape[-1])
        return ranks.replicate(rows, self.mesh)

    def lower(self, images: Tensor, rows: Tensor) -> Tensor:
        return ranks.whole(images).reshape(self.entries, rows.shape[1], -1)

    def agreed(self, done: Tensor) -> bool:
        return ranks.agreed(done, self.mesh)

    def answers(self, masks: Tensor) -> list[bool]:
        return ranks.answers(masks, self.mesh)

    @cached_property
    def of_symmetric_part(self) -> Callable[[Tensor], Tensor]:
        """Products with `½(A + Aᵀ)`, or with `A` where that is symmetric."""
        return self if self.A.symmetric or not self._is_lopsided() else self.symmetric_part

    def _is_lopsided(self) -> bool:
        """Whether `xᵀAy` and `yᵀAx` differ by more than rounding, for one pair of vectors."""
        n = self.A.shape[-1]
        rows = fixed_rows[n, self.A.dtype, self.A.device].expand(self.entries, 2, n)
        images = self(rows)
        found = inner(rows, images)
        size = long_norm(images).amax(-1)
        difference = (found[:, 0, 1] - found[:, 1, 0]).abs()
        rounding = LOPSIDED * torch.finfo(images.dtype).eps
        return not self.agreed((difference <= rounding * size) | ~torch.isfinite(difference))

    def change_units(self, rows: Tensor) -> None:
        """Divide the operator by powers of two that bring its products into range."""
        self.A, exponents = self.A.in_units(self.lift(rows))
        self.exponents = exponents.expand(self.A.batch_shape).reshape(self.entries)
        self.__dict__.pop("of_symmetric_part", None)

    def back(self, x: Tensor) -> Tensor:
        """Convert numbers `(B, *)` from the units of the search to those of the given operator."""
        if self.exponents is None:
            return x
        half = (self.exponents / 2).floor()
        for part in (half, self.exponents - half):
            x = x * part.to(x.dtype).exp2().reshape(-1, *(1,) * (x.dim() - 1))
        return x

    def require_transposes(self, tolerance: float) -> None:
        """`⟨Ax, y⟩` and `⟨x, Aᵀy⟩` agree for operators whose transpose the user defines.

        The check takes one product with each. They may differ by `√eps`, so that functions with
        larger rounding errors pass, or by ten times the tolerance, which is the user's bound for
        the errors of products.
        """
        worth = max(torch.finfo(self.A.dtype).eps ** 0.5, 10 * tolerance)
        for A in self.A.claims():
            _require_transpose(A, self.mesh, worth)

    def unit(self, image: Tensor) -> Tensor:
        """Powers of two `(B,)` of the size of an image; an error if it is not finite."""
        size = image.abs().amax((-2, -1))
        if not torch.isfinite(size).all():
            self.require_finite()
            raise ValueError(
                f"a product with {self.A!r} overflows {image.dtype}; scale it down, or use float64"
            )
        return power_of_two(size)

    def pull_back(self, left: Tensor, right: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        """Gradients of `Σ leftᵀ A right`, for lifted rows, spread like the tensors of `A`."""
        found = self.A.pullback(left, right, needs)
        return [None if dx is None else ranks.alike(dx, x) for dx, x in zip(found, self.A.tensors)]

    def guarded(self, find: Callable[..., Any], *arguments: Any) -> Any:
        """The outcome of `find`, or an error that names the tensor that is not finite."""
        try:
            outcome = find(self, *arguments)
        except NonFiniteError:
            raise  # it names the tensor already
        except RuntimeError as error:
            # A decomposition of numbers that are not finite raises LinAlgError, or a RuntimeError
            # that mentions linalg.
            known = isinstance(error, torch.linalg.LinAlgError)  # pyright: ignore
            if not (known or "linalg" in str(error)):
                raise
            self._complain()
            raise
        if not torch.isfinite(outcome.multiplier).all():
            self._complain()
        return outcome

    def _complain(self) -> None:
        self.require_finite()
        where = "" if self.mesh is None else "; see what the other ranks say"
        raise NonFiniteError(
            f"a product with {self.A!r} has non-finite values{where}; if it overflows "
            f"{self.A.dtype}, scale down what it is made of, or use float64"
        ) from None

    def require_finite(self) -> None:
        """No tensor of the operator has numbers that are not finite."""
        for i, x in enumerate(self.A.tensors):
            here = ranks.local(x)
            require_finite(**{f"tensor {i} of {self.A!r}": (here, here.dim())})


def _require_transpose(A: Operator, mesh: Any, worth: float) -> None:
    m, n = A.shape[-2:]

    def drawn(row: int, width: int) -> Tensor:
        x = fixed_rows[width, A.dtype, A.device][row] / width**0.5
        return x.expand(*A.batch_shape, 1, width)

    def of(product: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        return ranks.whole(product(ranks.replicate(rows, mesh)))

    x = drawn(0, n)
    image = of(A.matvec, x)
    # In these units nothing over- or underflows.
    most = image.abs().amax(-1, keepdim=True)
    unit = torch.where(most > 0, most, 1)
    image = image / unit
    # y is a sum of Ax, in which a wrong sign or factor has full effect, and a pseudorandom vector.
    y = image / one_if_zero(long_norm(image)).unsqueeze(-1) + drawn(1, m)
    pulled = of(A.rmatvec, y) / unit
    left, right = dot(image, y), dot(x, pulled)
    size = torch.maximum(long_norm(image), long_norm(pulled))
    apart = (left - right).abs() > worth * size
    # Other checks report numbers that are not finite.
    apart = apart & torch.isfinite(left) & torch.isfinite(right)
    if ranks.agreed(~apart, mesh):
        return
    worst = ((left - right).abs() / one_if_zero(size)).nan_to_num(0).reshape(-1)
    at = int(worst.argmax())
    found = f"⟨Ax, y⟩ = {_number(left, unit, at)} but ⟨x, Aᵀy⟩ = {_number(right, unit, at)}"
    if A.symmetric and type(A).rmatvec is Operator.rmatvec:
        raise ValueError(
            f"{A!r} says that it is symmetric and is not: {found} for vectors without structure; "
            "leave out symmetric = True and implement rmatvec"
        )
    raise ValueError(
        f"rmatvec of {A!r} is not the transpose of its matvec: {found} for vectors without "
        "structure; correct it, or leave it out of FromMatvec, and autograd finds the transpose. "
        "If products are meant to be inexact, pass Krylov(tolerance=...) with what they are worth"
    )


def _number(x: Tensor, unit: Tensor, at: int) -> str:
    return f"{float(x.reshape(-1)[at]) * float(unit.reshape(-1)[at]):.6g}"


def rows_of(problem: Any) -> Rows:
    """Products with the operator of a problem, or with its first tensor as one."""
    A = as_operator(problem.operator or problem.tensors[0])
    batch = problem.batch_shape
    if A.batch_shape not in (batch, ()):
        A = Matrix(problem.matrix.expand(*batch, -1, -1))
    return Rows(A, batch)
