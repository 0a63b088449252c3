"""The optimality conditions of a minimum on the sphere, for the gradient rules.

A minimum `y` of `f` on the unit sphere satisfies `force(y) = μy`, with `force = −∇f`. With `H` the
matrix `∇²f + μI`, an incoming gradient `v` requires the solution `z` of

    P H P z = P v,   yᵀz = 0,   P = I − yyᵀ,

and the gradient of each input is that of `zᵀ force(y)`, with `y` and `z` fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from pmaf.gradients.base import Gradient, Images, contract
from pmaf.gradients.implicit import Implicit
from pmaf.linalg.decompositions import eigh
from pmaf.linalg.gram import promoted, singular_spectrum
from pmaf.linalg.products import dot, matvec, outer_sum, symmetric_part
from pmaf.linalg.roundings import merge_tolerance, merged, noise_tolerance, widened
from pmaf.runtime.modes import require_eager
from pmaf.tangent.basis import solve_in_basis
from pmaf.tangent.bordered import BorderedSystem, State, Tensors, tangent_solve
from pmaf.tangent.factor import factored_solve, gap_above, gram_product
from pmaf.tangent.kept import Basis


class _MinimumSystem(BorderedSystem):
    """Bordered systems of one row."""

    def solve_in_basis(self, v: Tensor, y: Tensor, tensors: Tensors, state: State) -> Tensor:
        def product(z: Tensor) -> Tensor:
            return self.product(z, tensors, state.shift)

        basis: Any = state.kept
        refined = None if self.is_exact(tensors, basis) else product
        return solve_in_basis(basis, state.gap, y.squeeze(-2), v, refined)

    def is_exact(self, tensors: Tensors, basis: Basis) -> bool:
        """Whether a solution in the basis has all digits of the tensors."""
        return False


@dataclass(frozen=True)
class DeclaredSystem(_MinimumSystem):
    """Bordered systems of `∇²f + μI` for a problem that declares its curvature."""

    problem: Any  # without its tensors

    def solve_anew(self, v: Tensor, y: Tensor, tensors: Tensors, state: State) -> Tensor:
        basis, gap = self._decomposed(tensors, state.shift.squeeze(-1))
        return self.solve_in_basis(v, y, tensors, State(state.shift, gap, basis))

    def product(self, z: Tensor, tensors: Tensors, shift: Tensor) -> Tensor:
        return self.problem.with_tensors(*tensors).curvature(z) + shift.unsqueeze(-1) * z

    def pullback(
        self, w: Tensor, z: Tensor, tensors: Tensors, shift: Tensor
    ) -> tuple[tuple[Tensor | None, ...], Tensor]:
        def curved(*tensors: Tensor) -> Tensor:
            return self.problem.with_tensors(*tensors).curvature(z)

        return torch.func.vjp(curved, *tensors)[1](w), (w * z).sum(-1)

    def _decomposed(self, tensors: Tensors, shift: Tensor) -> tuple[Basis, Tensor]:
        M, _ = self.problem.with_tensors(*tensors).quadratic()
        values, vectors = eigh(symmetric_part(M))
        size = values.abs().amax(-1)
        tolerance = merge_tolerance(M.dtype)
        spread = merged(values - values[..., :1], size.unsqueeze(-1), tolerance)
        gap = shift + values[..., 0]
        gap = torch.where(gap.abs() > tolerance * size, gap, torch.zeros_like(gap))
        return Basis(vectors.mT, spread), gap


class GramSystem(_MinimumSystem):
    """Bordered systems of `AᵀA + μI`, solved with the basis or factor of the forward pass."""

    def is_exact(self, tensors: Tensors, basis: Basis) -> bool:
        A = tensors[0]
        return promoted(A.dtype, basis.rows.shape[-2], A.device)

    def solve_factored(self, v: Tensor, y: Tensor, tensors: Tensors, state: State) -> Tensor:
        shift, (lower,) = state.shift.squeeze(-1), state.kept
        return factored_solve(tensors[0], shift, state.gap, lower, y.squeeze(-2), v)

    def solve_anew(self, v: Tensor, y: Tensor, tensors: Tensors, state: State) -> Tensor:
        """By singular values of `A` in float64; in `AᵀA` the small ones are rounding."""
        dtype, A, shift = v.dtype, tensors[0], state.shift
        A, shift, y, v = (widened(x) for x in (A, shift, y, v))
        spectrum, _, _ = singular_spectrum(A)
        multiplier = shift.squeeze(-1)
        # The gap has the errors of the multiplier and of the squared singular values.
        gap = gap_above(spectrum, multiplier, noise_tolerance(dtype) * multiplier.abs())
        basis = Basis(spectrum.basis, spectrum.spread)
        return self.solve_in_basis(v, y, (A,), State(shift, gap, basis)).to(dtype)

    def product(self, z: Tensor, tensors: Tensors, shift: Tensor) -> Tensor:
        return gram_product(tensors[0], shift.squeeze(-1), z)

    def pullback(
        self, w: Tensor, z: Tensor, tensors: Tensors, shift: Tensor
    ) -> tuple[tuple[Tensor | None, ...], Tensor]:
        A, w_row, z_row = tensors[0], w.squeeze(-2), z.squeeze(-2)
        images = matvec(A, w_row), matvec(A, z_row)
        return (outer_sum(images, (z_row, w_row), A.shape),), (w * z).sum(-1)


@dataclass(frozen=True, eq=False)
class MinimumConditions:
    """Optimality conditions of a declared problem, at the solution `y`."""

    problem: Any  # without its tensors
    tensors: Tensors
    y: Tensor  # (*, n)
    state: State

    def force(self) -> Tensor:
        return self.problem.force(self.y, *self.tensors)

    def multiplier(self) -> Tensor:
        return dot(self.y, self.force())

    def curvature(self, u: Tensor) -> Tensor:
        """`∇²f u`, `(*, n)`."""
        rows = u.unsqueeze(-2)
        return self.problem.with_tensors(*self.tensors).curvature(rows).squeeze(-2)

    def system(self) -> tuple[BorderedSystem, Tensors]:
        return DeclaredSystem(self.problem), self.tensors

    def tangent_solve(self, v: Tensor) -> Tensor:
        """Differentiable solution `z` of the conditions' linearisation, given `v`."""
        system, tensors = self.system()
        shift = self.multiplier().unsqueeze(-1)
        rows = v.unsqueeze(-2), self.y.unsqueeze(-2)
        return tangent_solve(system, *rows, tensors, shift, self.state).squeeze(-2)

    def pullback(self, z: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Gradients of `zᵀ force(y)` in the inputs, without forming a Jacobian."""
        wanted = [x for x, need in zip(self.tensors, needs) if need]
        if not wanted:
            return tuple(None for _ in needs)

        def pulled(*wanted: Tensor) -> Tensor:
            left = iter(wanted)
            tensors = (next(left) if need else x for x, need in zip(self.tensors, needs))
            return self.problem.force(self.y, *tensors)

        found = iter(torch.func.vjp(pulled, *wanted)[1](z))
        return tuple(next(found) if need else None for need in needs)

    def gradients(
        self, rule: Gradient, v: Tensor | None, d_multiplier: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs, given those of the solution and of its multiplier.

        The multiplier is `yᵀ force(y)`. It depends on the inputs directly, and through `y`, in
        which its gradient is `force(y) − ∇²f y`; `force(y)` is normal to the sphere.
        """
        if d_multiplier is None:
            assert v is not None
            return rule.pullback(self, v, needs)
        along = d_multiplier.unsqueeze(-1) * self.y
        moved = self.curvature(along)
        v = -moved if v is None else v - moved
        if isinstance(rule, Implicit):
            return self.pullback(self.tangent_solve(v) + along, needs)
        pairs = zip(rule.pullback(self, v, needs), self.pullback(along, needs))
        return tuple(None if x is None or y is None else x + y for x, y in pairs)

    def hessian(self) -> Tensor:
        """`∇²f + μI` as a matrix, `(*, n, n)`."""
        M, _ = self.problem.with_tensors(*self.tensors).quadratic()
        eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
        return M + self.multiplier()[..., None, None] * eye

    def contract(
        self, k: Tensor, exploit: bool, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """`𝒦𝓑` with `𝓑 = ∂²f/∂input∂y`."""
        return self.pullback(-k, needs)


@dataclass(frozen=True, eq=False)
class LeastSquaresConditions(MinimumConditions):
    """Optimality conditions of LESS on the unit sphere, at the solution `y`."""

    image: Tensor  # Ay

    def residual(self) -> Tensor:
        return self.image - self.tensors[1]

    def multiplier(self) -> Tensor:
        return -dot(self.image, self.residual())

    def curvature(self, u: Tensor) -> Tensor:
        A = self.tensors[0]
        return matvec(A.mT, matvec(A, u))

    def system(self) -> tuple[BorderedSystem, Tensors]:
        return GramSystem(), self.tensors[:1]

    def pullback(self, z: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        A = self.tensors[0]
        images = Images(self.residual(), matvec(A, z), None)
        dA = outer_sum(*images.of_matrix(self.y, z), shape=A.shape) if needs[0] else None
        return dA, images.image if needs[1] else None

    def hessian(self) -> Tensor:
        A = self.tensors[0]
        eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        return A.mT @ A + self.multiplier()[..., None, None] * eye

    def contract(
        self, k: Tensor, exploit: bool, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        blocks = self._structured(needs) if exploit else self._autodiff(needs)
        return tuple(None if block is None else contract(k, block) for block in blocks)

    def _structured(self, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """`𝓑ᵢ = Aᵢyᵀ`, plus the residual in column `i`: the paper's Proposition 2.1."""
        A, _, y = self._expanded()
        block = None
        if needs[0]:
            block = A.mT.unsqueeze(-1) * y[..., None, None, :]
            r = self.residual()
            if torch.compiler.is_compiling():  # torch.compile cannot trace a write into a view
                eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).unsqueeze(-2)
                block = torch.addcmul(block, eye, r[..., None, :, None])
            else:
                block.diagonal(dim1=-3, dim2=-1).add_(r.unsqueeze(-1))
        return block, -A.mT if needs[1] else None

    def _autodiff(self, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """The same tensors by differentiating the objective twice, entry by entry."""
        require_eager("DDN(exploit=False)", "DDN() or Implicit()", self.tensors[0])
        keep = torch.is_grad_enabled()
        A, b, y = self._expanded() if keep else (x.detach() for x in self._expanded())
        batch, m, n = A.shape[:-2], *A.shape[-2:]
        with torch.enable_grad():
            rows = list(zip(A.reshape(-1, m, n), b.reshape(-1, m), y.reshape(-1, n)))
            in_A = [jacobian(lambda x, r=r: _slope(x, *r[1:]), r[0], keep) for r in rows * needs[0]]
            in_b = [
                jacobian(lambda x, r=r: _slope(r[0], x, r[2]), r[1], keep) for r in rows * needs[1]
            ]
        return (
            torch.stack(in_A).reshape(*batch, n, m, n) if needs[0] else None,
            torch.stack(in_b).reshape(*batch, n, m) if needs[1] else None,
        )

    def _expanded(self) -> tuple[Tensor, Tensor, Tensor]:
        """A, b and y with all batch dimensions written out."""
        A, b = self.tensors
        batch, (m, n) = self.y.shape[:-1], A.shape[-2:]
        return A.expand(*batch, m, n), b.expand(*batch, m), self.y


def _slope(A: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Gradient of the objective in `y`, by autodiff."""
    y = y if y.requires_grad else y.detach().requires_grad_()
    r = A @ y - b
    return torch.autograd.grad(0.5 * (r @ r), y, create_graph=True)[0]
