"""The optimality conditions of eigenvectors, for the gradient rules.

For a symmetric matrix with requested eigenvectors as the rows of `Y`, an incoming gradient `v` of
row `j` requires the solution `z` of a bordered system of its own,

    (λⱼI − A) z = v − Σ yᵢyᵢᵀv,   yᵢᵀz = 0,   the sum over all i with λᵢ = λⱼ,

and `∂L/∂A = ½(ZᵀY + YᵀZ) + Yᵀdiag(∂L/∂λ)Y`. The border of the system of a simple eigenvalue has its
own vector only. So no derivative, of any order, depends on the choice of eigenvectors where other
eigenvalues repeat. Inside span(Y) the system is solved in closed form; outside it is positive
definite. All denominators are gaps between a requested eigenvalue and another.

For a group of equal eigenvalues, the matrix `Λ` of all `yᵢᵀAyⱼ` replaces `λⱼ`. It is diagonal, but
its derivative is not.

For a nonsymmetric matrix and one vector, eigenvector and eigenvalue are differentiated
together: `[[λI − A, y], [yᵀ, 0]]ᵀ [w; ·] = [v; ∂L/∂λ]`, `∂L/∂A = w yᵀ`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from pmaf.gradients.base import Gradient, contract
from pmaf.gradients.implicit import Implicit
from pmaf.linalg import sphere
from pmaf.linalg.decompositions import eigh
from pmaf.linalg.products import frobenius, norm, one_if_zero, symmetric_part
from pmaf.linalg.roundings import merge_tolerance, noise_tolerance
from pmaf.runtime.modes import plain, require_eager
from pmaf.tangent.bordered import BorderedSystem, State, Tensors, coupled, tangent_solve
from pmaf.tangent.complement import complement_solve
from pmaf.tangent.general import dominant_solve


@dataclass(frozen=True)
class _ShiftedSystem(BorderedSystem):
    """Bordered systems of `Λ − ½(A + Aᵀ)`, coupled where eigenvalues are equal."""

    def solve_anew(self, v: Tensor, y: Tensor, tensors: Tensors, state: State) -> Tensor:
        z = complement_solve(tensors[0], state.shift, y, v, state.kept, state.gap)
        return z if y.shape[-2] == 1 else z + self._within(v, y, tensors, state)

    def solve_in_basis(self, v: Tensor, y: Tensor, tensors: Tensors, state: State) -> Tensor:
        (rows, values), k = state.kept, y.shape[-2]
        rise = state.shift.unsqueeze(-1) - values.unsqueeze(-2)
        size = rise if k == 1 else rise.abs()  # no eigenvalue is above the largest
        equal = size <= merge_tolerance(v.dtype) * self.scale(tensors, state)
        product = torch.bmm if v.dim() == rows.dim() == 3 else torch.matmul
        along = product(v, rows.mT)
        if k > 1:
            # The requested vectors are the last.
            index = torch.arange(along.shape[-1], device=v.device)
            equal = equal | (unknown(along, v) & (index >= along.shape[-1] - k))
        return product((along / rise).masked_fill(equal, 0), rows)

    def linked(self, tensors: Tensors, state: State) -> Tensor | None:
        """A mask `(*, k, k)` of the vectors in the border of each system; None for k = 1."""
        if state.shift.shape[-1] == 1:
            return None
        return ~self._apart(tensors, state)[1]

    def product(self, z: Tensor, tensors: Tensors, shift: Tensor) -> Tensor:
        (matrix,) = tensors
        return shift @ z - 0.5 * (z @ matrix + z @ matrix.mT)

    def pullback(
        self, w: Tensor, z: Tensor, tensors: Tensors, shift: Tensor
    ) -> tuple[tuple[Tensor | None, ...], Tensor]:
        return (-symmetric_product(w, z),), w @ z.mT

    def _within(self, v: Tensor, y: Tensor, tensors: Tensors, state: State) -> Tensor:
        """The part of the solution in the span of the requested vectors."""
        difference, apart = self._apart(tensors, state)
        inside = v @ y.mT
        apart = apart & ~unknown(inside, v)
        return torch.where(apart, inside / torch.where(apart, difference, 1), 0) @ y

    def _apart(self, tensors: Tensors, state: State) -> tuple[Tensor, Tensor]:
        """Differences `λⱼ − λᵢ` of the requested eigenvalues, and which of them are not zero."""
        return differences(state.shift, self.scale(tensors, state))

    def scale(self, tensors: Tensors, state: State) -> Tensor:
        """The spectral norm `‖A‖`, `(*, 1, 1)`, which rounding of eigenvalues is relative to."""
        return state.kept.size(lambda: largest_modulus(tensors[0], state.shift))


def differences(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """`λⱼ − λᵢ` of eigenvalues `(*, k)`, and which of them are above rounding of `scale`."""
    difference = values.unsqueeze(-1) - values.unsqueeze(-2)
    return difference, difference.abs() > merge_tolerance(values.dtype) * scale


def unknown(inside: Tensor, v: Tensor) -> Tensor:
    """Which products of the rows of `v` with unit vectors have no correct digit.

    Divided by the difference of two eigenvalues that nearly repeat, such a product would be a
    large wrong number. For a function of the span of the vectors it stands for zero.
    """
    # Squares of large gradients overflow, so these are in units of their largest entries.
    unit = one_if_zero(v.abs().amax(-1, keepdim=True))
    return (inside / unit).abs() <= noise_tolerance(v.dtype) * norm(v / unit).unsqueeze(-1)


def turn_inside(v: Tensor, y: Tensor) -> Tensor:
    """The antisymmetric part of `N = VYᵀ`, with zero for pairs where it has no correct digit."""
    unit = one_if_zero(v.abs().amax((-2, -1), keepdim=True))
    inside = (v / unit) @ y.mT
    turn = 0.5 * (inside - inside.mT)
    length = norm(v / unit)
    length = torch.maximum(length.unsqueeze(-1), length.unsqueeze(-2))
    return unit * torch.where(turn.abs() <= noise_tolerance(v.dtype) * length, 0, turn)


def normal_part(inside: Tensor, A: Tensor, values: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """The symmetric part of `N = VYᵀ`, and which pairs of vectors it is for, `(*, k, k)`.

    Vectors stay orthonormal, so that gradients do not depend on this part. Its quotients by the
    differences of eigenvalues cancel, and would leave their rounding errors, so it is taken out.

    If the result is to be differentiated, it is zero for pairs of vectors whose eigenvalues are
    more than `√eps` apart: for these it couples the gradients of two vectors, of which the second
    may have no derivative where the first has. Closer vectors have second derivatives without a
    correct digit, and only functions of their span matter.
    """
    normal = 0.5 * inside + 0.5 * inside.mT  # a sum of large gradients may overflow
    if not torch.is_grad_enabled():
        return normal, torch.ones_like(normal, dtype=torch.bool)
    scale = _ShiftedSystem().scale((A.detach(),), state)
    difference, _ = differences(values.detach(), scale)
    near = difference.abs() <= torch.finfo(A.dtype).eps ** 0.5 * scale
    return torch.where(near, normal, 0), near


def without(v: Tensor, y: Tensor, normal: Tensor, near: Tensor) -> Tensor:
    """`v` without its normal part, and without rounding of `N = VYᵀ` for near pairs.

    Rounding of `N` is relative to the lengths of `v`, and is removed as a constant, so that the
    derivatives are those of a projection.
    """
    still, row = v.detach(), y.detach()
    turn = turn_inside(still, row)
    v = v - normal @ y
    # Where little is left of v, what the projection leaves inside the span is rounding, too.
    for _ in range(2):
        rest = torch.where(near, v.detach() @ row.mT - turn, 0)
        v = v - rest @ row
    return v


def largest_modulus(A: Tensor, values: Tensor) -> Tensor:
    """A lower estimate of the spectral norm of `½(A + Aᵀ)`, `(*, 1, 1)`.

    It comes from the known eigenvalues `values` and from three products with a vector without
    structure. The Frobenius norm would be too large by a factor of up to `√n`.
    """
    x = _probe(A)
    for _ in range(3):
        x = x / norm(x).unsqueeze(-1).clamp_min(torch.finfo(A.dtype).tiny)
        x = 0.5 * (x @ A + x @ A.mT)
    return torch.maximum(values.abs().amax(-1, keepdim=True), norm(x)).unsqueeze(-1)


class EigenConditions(NamedTuple):
    """Optimality conditions of requested eigenvectors, all of them at once."""

    A: Tensor
    y: Tensor  # (*, k, n), the vectors as rows
    values: Tensor  # (*, k)
    d_values: Tensor | None  # (*, k), incoming gradient of the values
    symmetric: bool
    state: State

    def tangent_solve(self, v: Tensor | None) -> Tensor:
        """`z` for the incoming gradients `v` of the vectors and `d_values` of the values."""
        if not self.symmetric:
            return self._bordered_solve(v)
        y, k = self.y, self.values.shape[-1]
        along = None if self.d_values is None else self.d_values.unsqueeze(-1) * y
        if v is None:
            return torch.zeros_like(y) if along is None else along
        if k > 1:
            v = without(v, y, *normal_part(v @ y.mT, self.A, self.values, self.state))
        z = self.solve(v)
        return z if along is None else z + along

    def solve(self, v: Tensor) -> Tensor:
        """`z` for a symmetric matrix and rows `v` without their normal part."""
        y = self.y
        shift = coupled(self.values, lambda: y @ self.A @ y.mT)
        return tangent_solve(_ShiftedSystem(), v, y, (self.A,), shift, self.state)

    def _bordered_solve(self, v: Tensor | None) -> Tensor:
        """`(λI − A)ᵀw + αy = v` with `yᵀw = ∂L/∂λ`, without a matrix larger than `A`.

        `(λI − A)ᵀ + σyyᵀ` is regular when `λ` is simple, and solves the bordered system up to a
        multiple of `y` on the right-hand side. Where it is singular up to rounding, `λ` is not
        simple, there is no derivative, and zero is returned.
        """
        if plain(self.A) and not torch.is_grad_enabled():
            gap = self.state.gap
            _, rate, _ = self.state.kept.for_products(gap, self.values)
            w = dominant_solve(self.A, self.values, self.y, v, self.d_values, gap, rate)
            if w is not None:
                return w
        v = torch.zeros_like(self.y) if v is None else v
        d_values = torch.zeros_like(self.values) if self.d_values is None else self.d_values
        target = d_values.unsqueeze(-1)
        size = size_of(self.A.detach())
        matrix = lifted(self.A, self.values, self.y, size).mT
        both = torch.cat([v + size * target * self.y, self.y], -2)
        factor, pivots, info = torch.linalg.lu_factor_ex(matrix.detach())
        probe = _probe(v).expand_as(self.y.detach())
        # The norm of the solution for `size·probe` bounds the condition number from below. Where it
        # exceeds 1/merge_tolerance, the solution has no correct digits.
        length = norm(torch.linalg.lu_solve(factor, pivots, (size * probe).mT).mT).unsqueeze(-1)
        repeated = ~(length * merge_tolerance(v.dtype) < 1) | (info != 0)[..., None, None]
        if torch.is_grad_enabled():
            eye = torch.eye(self.A.shape[-1], dtype=v.dtype, device=v.device)
            solved = torch.linalg.solve(torch.where(repeated, eye, matrix), both.mT)
        else:
            solved = torch.linalg.lu_solve(factor, pivots, both.mT)
        p, q = torch.where(repeated, 0, solved).mT.split(1, -2)
        along = (self.y * q).sum(-1, keepdim=True)
        alpha = ((self.y * p).sum(-1, keepdim=True) - target) / torch.where(along == 0, 1, along)
        return torch.where(repeated, 0, p - alpha * q)

    def gradients(self, rule: Gradient, v: Tensor | None) -> Tensor:
        """The gradient of `A`, given those of the vectors, or None, and of the values."""
        if isinstance(rule, Implicit):
            z = self.tangent_solve(v)
            return symmetric_product(z, self.y) if self.symmetric else z.mT @ self.y
        # One vector at a time. The value is yᵀAy, in which `rule` differentiates y.
        A, y, d_values = self.A, self.y, self.d_values
        v = torch.zeros_like(y) if v is None else v
        dA = torch.zeros_like(A)
        if d_values is not None:
            weighted = d_values.unsqueeze(-1)
            v = v + weighted * (y @ A + y @ A.mT)
            dA = (weighted * y).mT @ y
        for j, column in enumerate(self.columns()):
            (term,) = rule.pullback(column, v[..., j, :], (True,))
            dA = dA if term is None else dA + term
        return dA

    def columns(self) -> list[ColumnConditions]:
        """The conditions of each vector by itself, as the paper's rules use them."""
        A = 0.5 * (self.A + self.A.mT) if self.symmetric else self.A
        return [
            ColumnConditions(A, self.y[..., j, :], self.values[..., j], self.symmetric)
            for j in range(self.y.shape[-2])
        ]


class ColumnConditions(NamedTuple):
    """Optimality conditions of one eigenvector `y` as the maximiser of `yᵀAy`."""

    A: Tensor
    y: Tensor  # (*, n)
    value: Tensor  # (*,)
    symmetric: bool

    def hessian(self) -> Tensor:
        """`2λI − (A + Aᵀ)` plus a multiple of `yyᵀ`.

        Without the multiple of `yyᵀ` the matrix is singular along `y`. `𝒦` depends on the tangent
        space only, where `yyᵀ` is zero.
        """
        n = self.A.shape[-1]
        eye = torch.eye(n, dtype=self.A.dtype, device=self.A.device)
        value = self.value[..., None, None]
        lift = 2 * frobenius(self.A.detach())
        outer = self.y.unsqueeze(-1) * self.y.unsqueeze(-2)
        return 2 * value * eye - (self.A + self.A.mT) + lift * outer

    def contract(
        self, k: Tensor, exploit: bool, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        if not exploit:
            return (contract(k, _per_entry(_slope, self.A, self.y)),)
        rows = k.unsqueeze(-2), self.y.unsqueeze(-2)
        return (-2 * symmetric_product(*rows),)

    def _divisor(self) -> Tensor:
        """The eigenvalue, or one where it is zero, so that there is no fixed point."""
        return torch.where(self.value == 0, torch.ones_like(self.value), self.value)

    def fixed_point_hessian(self, exploit: bool) -> Tensor:
        """Derivative of `y − Ay/‖Ay‖` in `y`, `I − (I − yyᵀ)A/λ`."""
        if not exploit:
            return _per_entry(lambda y, A: _fixed_point(A, y), self.y, self.A)
        eye = torch.eye(self.A.shape[-1], dtype=self.A.dtype, device=self.A.device)
        image = self.A / self._divisor()[..., None, None]
        row = self.y.unsqueeze(-2)
        return eye - image + row.mT @ (row @ image)

    def fixed_point_contract(self, w: Tensor, exploit: bool) -> Tensor:
        """`−wᵀ` times the derivative of `y − Ay/‖Ay‖` in `A`."""
        if not exploit:
            full = -contract(w, _per_entry(_fixed_point, self.A, self.y))
        else:
            along = (w * self.y).sum(-1, keepdim=True)
            left = (w - along * self.y) / self._divisor().unsqueeze(-1)
            full = left.unsqueeze(-1) * self.y.unsqueeze(-2)
        return 0.5 * (full + full.mT) if self.symmetric else full


def _probe(like: Tensor) -> Tensor:
    """A unit row without structure, `(1, n)`, by operations that can be traced."""
    return sphere.project(sphere.references(like)[1]).unsqueeze(0)


def size_of(A: Tensor) -> Tensor:
    """`‖Ax‖` for a unit vector without structure, or the largest entry if that is larger.

    The result, `(*, 1, 1)`, is at most the spectral norm, and one for a matrix of zeros. No square
    in it over- or underflows.
    """
    largest = A.abs().amax((-2, -1), keepdim=True)
    safe = torch.where(largest == 0, 1, largest)
    return safe * norm(_probe(A) @ (A / safe).mT).unsqueeze(-1).clamp_min(1)


def lifted(A: Tensor, values: Tensor, y: Tensor, size: Tensor) -> Tensor:
    """`λI − A + σyyᵀ`, regular where the eigenvalue `λ` of the unit row `y` is simple."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    return torch.addcmul((size * y).mT @ y - A, eye, values.unsqueeze(-1))


def symmetric_product(z: Tensor, y: Tensor) -> Tensor:
    """`½(ZᵀY + YᵀZ)` for rows `Z`, `Y`, as one product."""
    z = 0.5 * z
    return torch.cat([z, y], -2).mT @ torch.cat([y, z], -2)


def _slope(A: Tensor, y: Tensor) -> Tensor:
    """Gradient of `−yᵀAy` in `y`, by autodiff."""
    y = y if y.requires_grad else y.detach().requires_grad_()
    return torch.autograd.grad(-(y @ (A @ y)), y, create_graph=True)[0]


def _fixed_point(A: Tensor, y: Tensor) -> Tensor:
    image = A @ y
    # A negative eigenvalue flips the iterate, so that y is a fixed point up to its sign.
    image = torch.where(image @ y < 0, -image, image)
    return y - image / image.norm()


def _per_entry(function, x: Tensor, other: Tensor) -> Tensor:
    """Jacobian in `x` of a function of `x` and `other`, one batch entry at a time."""
    require_eager("A gradient rule with exploit=False", "exploit=True or Implicit()", x)
    keep = torch.is_grad_enabled()
    batch = x.shape[: x.dim() - (1 if x.dim() < other.dim() else 2)]
    if not keep:
        x, other = x.detach(), other.detach()
    with torch.enable_grad():
        xs, others = (
            x.reshape(-1, *x.shape[len(batch) :]),
            other.reshape(-1, *other.shape[len(batch) :]),
        )
        rows = [
            jacobian(lambda a, o=o: function(a, o), entry, create_graph=keep)
            for entry, o in zip(xs, others)
        ]
    stacked = torch.stack(rows)
    return stacked.reshape(*batch, *stacked.shape[1:])


def _itself(rows: Tensor) -> Tensor:
    return rows


_OfRows = Callable[[Tensor], Tensor]


def symmetric_newton(
    A: Tensor, fixed: Tensor, found: Any, pair: tuple[_OfRows, _OfRows] = (_itself, _itself)
) -> Callable[[Tensor], Tensor]:
    """Newton's step for eigenvectors as rows `(*, k, n)`, from a solution for `fixed`.

    For a pair of `A` and `M = TTᵀ`, `fixed` is the matrix to which the fixed pair reduces, and
    `pair` has the products of rows with `M`, and of eigenvectors of `fixed` with `T⁻ᵀ`. Residuals
    are those of the given matrices, so that further steps correct errors of `T`.
    """
    S, shift = symmetric_part(A), found.multiplier
    known = found.kept.decomposition
    values, vectors = (
        eigh(symmetric_part(fixed)) if known is None else (known.values, known.rows.mT)
    )
    rise = shift.unsqueeze(-1) - values.unsqueeze(-2)
    scale = values.abs().amax(-1)[..., None, None]
    apart = rise.abs() > merge_tolerance(A.dtype) * scale
    inverse = torch.where(apart, 1 / torch.where(apart, rise, 1), 0)
    # The vectors of a repeated eigenvalue move together: only their span has derivatives.
    linked = ~differences(shift, scale)[1]
    dual, back = pair
    return newton_in_basis(lambda y: y @ S, back(vectors.mT), inverse, linked, dual)


def newton_in_basis(
    product: _OfRows, basis: Tensor, inverse: Tensor, linked: Tensor, dual: _OfRows = _itself
) -> _OfRows:
    """Newton's step for eigenvectors as rows, where the fixed problem has eigenvectors `basis`.

    Args:
        product: rows times the matrix.
        inverse: `1/(λⱼ − λᵢ)` for each row and each vector of the basis, or zero.
        linked: which vectors move together.
    """

    def step(y: Tensor) -> Tensor:
        image = product(y)
        rest = image - torch.where(linked, image @ y.mT, 0) @ dual(y)
        y = y + ((rest @ basis.mT) * inverse) @ basis
        # Newton's step towards orthonormal rows, whose error is the square of the last step.
        return 1.5 * y - 0.5 * torch.where(linked, dual(y) @ y.mT, 0) @ y

    return step


def general_newton(A: Tensor, fixed: Tensor, found: Any) -> Callable[[Tensor], Tensor]:
    """The same for the dominant eigenvector of a matrix that is not symmetric."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    matrix = lifted(fixed, found.multiplier, found.value, size_of(fixed))
    # The matrix is singular where the eigenvalue is not simple, and there is no derivative.
    singular = torch.linalg.lu_factor_ex(matrix).info != 0
    matrix = torch.where(singular[..., None, None], eye, matrix)

    def step(y: Tensor) -> Tensor:
        image = y @ A.mT
        rest = image - (image * y).sum(-1, keepdim=True) * y
        # The part of the step along y changes only the length of y.
        y = y + torch.linalg.solve(matrix, rest.mT).mT
        return y / norm(y).unsqueeze(-1)

    return step
