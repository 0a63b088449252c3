"""The optimality conditions of singular triplets, for the implicit rule.

A triplet `Av = σu`, `Aᵀu = σv` is an eigenvector `(u, v)` of the symmetric matrix

    J = [ 0   A ]
        [ Aᵀ  0 ]

with the eigenvalue `σ`, and `(u, −v)` is one with `−σ`. So nothing is squared. An incoming gradient
`g` of `(u, v)` requires the solution `z` of `(σI − J)z = g` on the complement of both, and

    ∂L/∂A = z_u vᵀ + u z_vᵀ + (∂L/∂σ) u vᵀ.

The part of `z` along `(u, −v)` would not change the result, because `u vᵀ − u vᵀ = 0`. Without it
nothing divides by the sum of `σ` and itself, so that a square matrix may be singular.
All divisors are differences and sums of `σ` and other singular values, and `σ` itself for a matrix
that is not square. Matrices have at least as many rows as columns here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf import native
from pmaf.gradients.base import Reverse
from pmaf.gradients.eigenvectors import unknown
from pmaf.linalg.products import norm
from pmaf.linalg.singular import accuracy, nearest, pair_basis
from pmaf.runtime.constant import constant
from pmaf.runtime.log import took
from pmaf.runtime.modes import plain
from pmaf.tangent.bordered import BorderedSystem, State, Tensors, coupled, tangent_solve
from pmaf.tangent.complement import COMPILED_ROWS
from pmaf.tangent.kept import SingularBasis


def halves(rows: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The left and the right part of rows `(*, k, m + n)`."""
    return rows[..., :m], rows[..., m:]


def _both(y: Tensor, m: int) -> Tensor:
    """The unit rows `(u, v)/√2`, then `(u, −v)/√2`, `(*, 2k, m + n)`."""
    u, v = halves(y * 0.5**0.5, m)
    return torch.cat([torch.cat([u, v], -1), torch.cat([u, -v], -1)], -2)


def _times(z: Tensor, A: Tensor) -> Tensor:
    """`J` times rows."""
    left, right = halves(z, A.shape[-2])
    return torch.cat([right @ A.mT, left @ A], -1)


@dataclass(frozen=True)
class _PairSystem(BorderedSystem):
    """Bordered systems of `Σ − J`, coupled where singular values are equal."""

    largest: bool
    single: bool  # whether the numbers of `A` are those of a float32 matrix

    # Whether operations are linear in `v`, and carry its derivatives. `v` may be zero then, and its
    # derivatives are not. So nothing in it counts as rounding.
    linear: bool = False

    def _clearing(self, v: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        """Takes out parts along `(u, −v)`, of other vectors where they are rounding."""
        mirrors = y[..., v.shape[-2] :, :]
        zero = torch.eye(v.shape[-2], dtype=torch.bool, device=v.device)
        if not self.linear:
            # Rounding along (u, −v) is divided by 2σ, and has to be cleared for the other requested
            # vectors, too, where there is nothing but rounding: for a function of complex left
            # vectors that does not depend on their phases, along (iu, −iv).
            zero = unknown(v @ mirrors.mT, v) | zero
        return lambda x: x - torch.where(zero, x @ mirrors.mT, 0) @ mirrors

    def solve_in_basis(self, v: Tensor, y: Tensor, tensors: Tensors, state: State) -> Tensor:
        clear = self._clearing(v, y)
        return clear(self._in_basis(tensors[0], clear(v), state.shift, *state.kept))

    def solve_anew(self, v: Tensor, y: Tensor, tensors: Tensors, state: State) -> Tensor:
        (A,), clear = tensors, self._clearing(v, y)
        v = clear(v)
        if self.single and A.shape[-1] <= COMPILED_ROWS and plain(v) and native.takes(A):
            return clear(self._compiled(A, v, y, state.shift))
        return clear(self._decomposed(A, v, state.shift))

    def _in_basis(
        self, A: Tensor, g: Tensor, shift: Tensor, rows: Tensor, values: Tensor
    ) -> Tensor:
        m, n = A.shape[-2:]
        z = self._along(g, shift, rows, values, values[..., :1].unsqueeze(-1), m)
        if m == n:
            return z
        # Left vectors beside the columns of A have the eigenvalue zero.
        u = rows[..., :m]
        left = g[..., :m]
        rest = left - (left @ u.mT) @ u
        zero = shift <= accuracy(g.dtype, self.single) * values[..., :1]
        rest = (rest / torch.where(zero, 1, shift).unsqueeze(-1)).masked_fill(zero.unsqueeze(-1), 0)
        return z + torch.cat([rest, torch.zeros_like(g[..., m:])], -1)

    def linked(self, tensors: Tensors, state: State) -> Tensor | None:
        values = state.shift
        k = values.shape[-1]
        if k == 1:
            return None
        top = state.kept.size(lambda: torch.linalg.matrix_norm(tensors[0], keepdim=True))
        itself = torch.eye(k, dtype=torch.bool, device=values.device)
        mirrored = self._equal(values, -values, top) | itself
        return torch.cat([self._equal(values, values, top), mirrored], -1)

    def product(self, z: Tensor, tensors: Tensors, shift: Tensor) -> Tensor:
        return shift @ z - _times(z, tensors[0])

    def pullback(
        self, w: Tensor, z: Tensor, tensors: Tensors, shift: Tensor
    ) -> tuple[tuple[Tensor | None, ...], Tensor]:
        return (pulled(-w, z, tensors[0]),), w @ z.mT

    def _decomposed(self, A: Tensor, g: Tensor, shift: Tensor) -> Tensor:
        rows, values = pair_basis(A)
        # Hooks on saved tensors may have left the shifts fewer digits than tell values apart.
        return self._in_basis(A, g, nearest(shift, values), rows, values)

    def _along(
        self, g: Tensor, shift: Tensor, rows: Tensor, values: Tensor, top: Tensor, m: int
    ) -> Tensor:
        """The part of `z` in the span of triplets `(u, v)` and `(u, −v)`."""
        u, v = halves(rows, m)
        a, b = g[..., :m] @ u.mT, g[..., m:] @ v.mT
        difference, total = _minus(shift, values), _minus(shift, -values)
        rounding = accuracy(top.dtype, self.single) * top
        same, opposite = difference.abs() <= rounding, total.abs() <= rounding
        plus = (0.5 * (a + b) / torch.where(same, 1, difference)).masked_fill(same, 0)
        minus = (0.5 * (a - b) / torch.where(opposite, 1, total)).masked_fill(opposite, 0)
        return torch.cat([(plus + minus) @ u, (plus - minus) @ v], -1)

    def _compiled(self, A: Tensor, g: Tensor, y: Tensor, shift: Tensor) -> Tensor:
        """`z` by a factorisation of `AᵀA` in float64, which has all digits of a float32 matrix."""
        m, n = A.shape[-2:]
        batch, k = g.shape[:-2], g.shape[-2]
        u, v = halves(y[..., :k, :] * 2**0.5, m)
        top = torch.linalg.matrix_norm(A, keepdim=True)
        z = self._along(g, shift, torch.cat([u, v], -1), shift, top, m) if k > 1 else None
        left, right = halves(g, m)
        left, right = left - (left @ u.mT) @ u, right - (right @ v.mT) @ v
        # Elimination of z_u gives (σ²I − AᵀA)z_v = σg_v + Aᵀg_u. The kernels take the largest
        # eigenvalues.
        sign, column = 1.0 if self.largest else -1.0, shift.unsqueeze(-1)
        parts = sign * (A.mT @ A), sign * shift.square(), v, column * right + left @ A
        took("tangent: compiled")
        flat = (x.reshape(-1, *x.shape[len(batch) :]).contiguous() for x in parts)
        found, failed = native.complement_solve(*flat)
        found = sign * found.reshape(*batch, k, n)
        safe = torch.where(shift > 0, shift, 1).unsqueeze(-1)
        rest = torch.cat([(left + found @ A.mT) / safe, found], -1)
        failed = torch.zeros(batch, dtype=torch.bool) if failed is None else failed.reshape(batch)
        # The division by σ loses digits of a small one. And were all other singular values further
        # away than those that count as equal, z would be shorter than this.
        lost = shift < _SMALL * top.squeeze(-1)
        close = accuracy(g.dtype, self.single) * top.squeeze(-1)
        far = norm(rest) > norm(g) / close.clamp_min(torch.finfo(g.dtype).tiny)
        failed = failed | (lost | far).any(-1) | (shift <= 0).any(-1)
        z = rest if z is None else z + rest
        if bool(failed.any()):
            took("tangent: decomposition")
            some = A[failed]
            z[failed] = self._decomposed(some, g[failed], shift[failed])
        return z

    def _equal(self, first: Tensor, second: Tensor, top: Tensor) -> Tensor:
        return _minus(first, second).abs() <= accuracy(top.dtype, self.single) * top


# Singular values below this, relative to the norm, are not found by `AᵀA` in float64.
_SMALL = 1e-3


def _minus(first: Tensor, second: Tensor) -> Tensor:
    return first.unsqueeze(-1) - second.unsqueeze(-2)


def pulled(z: Tensor, y: Tensor, A: Tensor) -> Tensor:
    """The gradient of `Σ zᵀJy` over rows in `A`, of rank 2k."""
    (z_u, z_v), (u, v) = (halves(x, A.shape[-2]) for x in (z, y))
    return torch.cat([z_u, u], -2).mT @ torch.cat([v, z_v], -2)


@dataclass(frozen=True, eq=False)
class TripletConditions:
    """Optimality conditions of requested triplets, all of them at once."""

    given: Reverse  # left and right vectors as rows (*, k, m + n), the values as shifts (*, k)
    largest: bool
    single: bool

    def tangent_solve(self, g: Tensor | None) -> Tensor:
        """`z` for the incoming gradients `g` of the vectors and those of the values."""
        (A,), y, state, _, _, d_values, _ = self.given
        along = None if d_values is None else 0.5 * d_values.unsqueeze(-1) * y
        if g is None:
            assert along is not None
            return along
        u, v = halves(y, A.shape[-2])
        shift = coupled(state.shift, lambda: u @ A @ v.mT)
        system, border = _PairSystem(self.largest, self.single), _both(y, A.shape[-2])
        z = tangent_solve(system, g, border, (A,), shift, state)
        return z if along is None else z + along

    def pullback(self, z: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        return (pulled(z, self.given.y, self.given.tensors[0]),)


def triplet_newton(
    A: Tensor, fixed: Tensor, found: Any, largest: bool, single: bool
) -> Callable[[Tensor], Tensor]:
    """Newton's step for triplets as rows `(*, k, m + n)`, from a solution for `fixed`."""
    kept, m, k = found.kept, A.shape[-2], found.multiplier.shape[-1]
    kept = SingularBasis(*kept.singular(lambda: pair_basis(fixed)))
    system = _PairSystem(largest, single, linear=True)
    state = State(found.multiplier, found.gap, kept)
    border = _both(found.value, m)
    linked = system.linked((fixed,), state)
    linked = None if linked is None else linked[..., :k]

    def only_linked(x: Tensor) -> Tensor:
        return x if linked is None else torch.where(linked, x, 0)

    def step(y: Tensor) -> Tensor:
        u, v = halves(y, m)
        within = u @ A @ v.mT
        rest = _times(y, A) - only_linked(0.5 * (within + within.mT)) @ y
        moved = kept.solve(system, rest, border, (fixed,), state)
        # Its value is rounding, divided by gaps. Only its derivatives are multiplied below.
        u, v = halves(y + (moved - constant(moved)), m)
        # Newton's step towards orthonormal rows, whose error is the square of the last step.
        u, v = (1.5 * x - 0.5 * only_linked(x @ x.mT) @ x for x in (u, v))
        return torch.cat([u, v], -1)

    return step
