"""LESS, least squares on the sphere: `min ½‖Au − b‖²` subject to `‖u‖ = radius`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pmaf import errors
from pmaf.autograd.certify_operator import certify_minimiser
from pmaf.autograd.forward_mode import forward_less, forward_mode, require_forward
from pmaf.autograd.ied_attach import OutOfRangeError
from pmaf.autograd.less_attach import attach
from pmaf.autograd.less_operator import attach_less_operator, find_minimiser
from pmaf.autograd.less_range import in_range, scaled
from pmaf.gradients import Gradient, Implicit, Unroll
from pmaf.linalg import sphere
from pmaf.linalg.products import dot, matvec, norm, rmatvec
from pmaf.operators import Matrix, Operator, as_operator
from pmaf.operators.base import known_by_products
from pmaf.operators.rows import Rows, joined
from pmaf.runtime.modes import plain
from pmaf.runtime.ranks import Parts, is_spread, whole
from pmaf.runtime.threads import OneThread
from pmaf.solution import Certificate, Solution, announce, require_products_suffice, require_rules
from pmaf.solvers import Auto, Cholesky, Krylov, Outcome, Secular, Solver

# From this many columns on a Cholesky factor is cheaper than an eigendecomposition.
_SMALLEST_FACTORED = 12
# Entries of all Gram matrices together below which the calls around a factor cost more than
# it saves.
_FACTORED_FROM = 40_000


@dataclass(frozen=True, eq=False)
class SphereLeastSquares:
    """The problem `min ½‖Au − b‖²` subject to `‖u‖ = radius`, one per batch entry.

    Args:
        A: `(*, m, n)`, tall, square or wide, a tensor or an operator.
        b: `(*, m)`; the batch dimensions of `A` and `b` broadcast.
        radius: of the sphere, above zero.
    """

    A: Tensor | Operator
    b: Tensor
    radius: float = 1.0

    def __post_init__(self) -> None:
        A, b = self.A, self.b
        if known_by_products(A):
            A = as_operator(A)
            object.__setattr__(self, "A", A)
        else:
            errors.require_matrix("A", A)
        errors.require_vector("b", b, "m")
        errors.require_alike("A", A, "b", b)
        object.__setattr__(self, "radius", errors.require_positive("radius", self.radius))
        info = torch.finfo(A.dtype)
        if not info.tiny <= self.radius <= info.max:
            raise ValueError(
                f"radius must be a number that {A.dtype} can hold, {info.tiny} to {info.max}; "
                f"got {self.radius}"
            )
        if A.shape[-2] != b.shape[-1]:
            column = b.dim() > 1 and b.shape[-1] == 1 and b.shape[-2] == A.shape[-2]
            raise ValueError(
                f"A of shape {errors.shape_of(A)} needs b of shape (*, {A.shape[-2]}); "
                f"got {errors.shape_of(b)}"
                + ("; drop its last dimension with b.squeeze(-1)" if column else "")
            )
        errors.require_broadcast("A", A.shape[:-2], "b", b.shape[:-1])

    @property
    def batch_shape(self) -> torch.Size:
        return torch.broadcast_shapes(self.A.shape[:-2], self.b.shape[:-1])

    @property
    def n(self) -> int:
        return self.A.shape[-1]

    @property
    def matrix(self) -> Tensor:
        """`A` as a dense tensor, which an operator is not."""
        assert isinstance(self.A, Tensor)
        return self.A

    def objective(self, u: Tensor) -> Tensor:
        """`½‖Au − b‖²`, `(*,)`."""
        r = matvec(self.matrix, u) - self.b
        return 0.5 * dot(r, r)

    def unconstrained(self) -> Tensor:
        """The solution without the constraint, `A⁺b`, `(*, n)`."""
        A = self.matrix.expand(*self.batch_shape, *self.A.shape[-2:])
        b = self.b.expand(*self.batch_shape, -1)
        return torch.linalg.lstsq(A, b.unsqueeze(-1)).solution.squeeze(-1)

    def scale(self) -> Tensor:
        """`‖A‖² + ‖Aᵀb‖/radius`, what residuals are measured against."""
        size = self.matrix.square().sum((-2, -1)) + norm(rmatvec(self.matrix, self.b)) / self.radius
        return torch.where(size == 0, torch.ones_like(size), size)

    def smallest_curvature(self) -> Tensor:
        """The smallest eigenvalue of `AᵀA`, `(*,)`."""
        if self.A.shape[-2] < self.n:
            return self.matrix.new_zeros(self.A.shape[:-2])
        return torch.linalg.svdvals(self.matrix)[..., -1].square()

    def best_solver(self) -> Solver:
        """What `Auto()` stands for."""
        if isinstance(self.A, Operator):
            return _KRYLOV
        m, n = self.A.shape[-2:]
        # One eigendecomposition serves all problems that share a matrix; a factor does not.
        if not (m >= n >= _SMALLEST_FACTORED and self.A.shape[:-2] == self.batch_shape):
            return _SECULAR
        # A trace has to serve batches of any size.
        few = plain(self.matrix) and self.batch_shape.numel() * n * n < _FACTORED_FROM
        return _SECULAR if few else _CHOLESKY

    def certify(self, value: Tensor) -> Certificate:
        errors.require_vector("value", value, "n")
        if isinstance(self.A, Operator):
            return certify_minimiser(self, value)
        if value.shape != (*self.batch_shape, self.n):
            raise ValueError(
                f"a solution of this problem has shape {(*self.batch_shape, self.n)}; "
                f"got {errors.shape_of(value)}"
            )
        A, b, y = self.A.double(), self.b.double(), value.double()
        # All three measures are relative; in these units nothing over- or underflows.
        unit = torch.maximum(A.abs().amax((-2, -1)), b.abs().amax(-1) / self.radius)
        unit = torch.where(unit > 0, unit, torch.ones_like(unit))
        A, b = A / unit[..., None, None], b / unit.unsqueeze(-1)
        scaled = type(self)(A, b, self.radius)
        force = -rmatvec(A, matvec(A, y) - b)
        length = norm(y)
        multiplier = dot(y, force) / length.square()
        top = torch.linalg.matrix_norm(A, 2).square()
        top = torch.where(top > 0, top, torch.ones_like(top))
        return Certificate(
            feasibility=(length / self.radius - 1).abs(),
            stationarity=norm(sphere.tangent(sphere.project(y), force))
            / (self.radius * scaled.scale()),
            optimality=(multiplier + scaled.smallest_curvature()) / top,
        )

    def run(
        self, solver: Solver, gradient: Gradient, *, init: Tensor | None, report: bool, throw: bool
    ) -> Solution:
        require_rules(self, solver, gradient)
        A, b = self.A, self.b
        if init is not None:
            self._require_init(init)
            init = init.detach()  # the solution does not depend on where the search began
        if isinstance(A, Operator):
            run: Any = torch.compiler.disable(self._run_operator)
            return run(A, solver.resolve(self), gradient, init, throw)
        if is_spread(A) or is_spread(b):
            parts = Parts(self.batch_shape, dict(A=(A, 2), b=(b, 1), init=(init, 1)))
            mine = SphereLeastSquares(parts.inputs["A"], parts.inputs["b"], self.radius)
            start = parts.inputs.get("init")
            found = mine.run(solver, gradient, init=start, report=report, throw=throw)
            return parts.join_all(found)
        if 0 in self.batch_shape:
            return self._empty()
        dtype = A.dtype
        if dtype in (torch.float16, torch.bfloat16):
            A, b = A.float(), b.float()
            init = None if init is None else init.float()
        # On the sphere of radius ρ, u = ρw with w the solution of (A, b/ρ) on the unit
        # sphere: same multiplier, same gap. So only the unit sphere is ever solved.
        with OneThread(A):
            A, b, units = in_range(A, b, self.radius)
            outcome = self._run_unit(A, b, solver, gradient, init, report, throw)
        if units is not None:
            outcome = outcome._replace(
                multiplier=scaled(outcome.multiplier, units), gap=scaled(outcome.gap, units)
            )
        value = outcome.value if self.radius == 1 else self.radius * outcome.value
        # The compiler of torch 2.7 cannot slice a named tuple.
        _, multiplier, residual, gap, iterations, converged, *_ = outcome
        return Solution(value.to(dtype), multiplier, residual, gap, iterations, converged)

    def _run_unit(
        self,
        A: Tensor,
        b: Tensor,
        solver: Solver,
        gradient: Gradient,
        init: Tensor | None,
        report: bool,
        throw: bool,
    ) -> Outcome:
        """Solve for tensors in float32 or float64, on the unit sphere."""
        if isinstance(gradient, Unroll):
            errors.require_eager("gradient=Unroll()", "gradient=Implicit()", A)
            if init is not None:
                errors.require_finite(init=(init, 1))
            with torch.autocast(A.device.type, enabled=False):
                outcome = solver.solve(SphereLeastSquares(A, b), init=init, report=report)
            outcome = Outcome(outcome.value, *(x.detach() for x in outcome[1:]))
            announce(outcome, solver, throw)
            return outcome
        if forward_mode(A, b):
            require_forward(gradient)
            return forward_less(A, b, init, solver.resolve(self), report, throw)
        return attach(A, b, init, solver.resolve(self), gradient, report, throw)

    def _run_operator(
        self, A: Operator, solver: Solver, gradient: Gradient, init: Tensor | None, throw: bool
    ) -> Solution:
        require_products_suffice(A, solver, gradient)
        batch = self.batch_shape
        if A.batch_shape not in (batch, ()):
            raise ValueError(
                f"{A!r} has the batch {tuple(A.batch_shape)} and the problem {tuple(batch)}; "
                "an operator needs the whole batch, or none"
            )
        if 0 in batch:
            raise ValueError(f"{A!r} has an empty batch; leave the layer out where it is")
        dtype, b = A.dtype, self.b.expand(*batch, -1)
        if dtype in (torch.float16, torch.bfloat16):
            A, b = A.with_tensors([x.float() for x in A.tensors]), b.float()
            init = None if init is None else init.float()
        b = b if self.radius == 1 else b / self.radius
        assert isinstance(solver, Krylov)
        init = None if init is None else whole(init)
        try:
            outcome, backward = attach_less_operator(A, b, solver, init, throw)
        except OutOfRangeError as found:
            # The solution for (A/c, b/c) is the same; multiplier and gap are c² times theirs.
            unit = float(found.unit)
            A, b = A / unit, b / unit
            outcome, backward = attach_less_operator(A, b, solver, init, throw)
            outcome = outcome._replace(
                multiplier=outcome.multiplier * unit * unit, gap=outcome.gap * unit * unit
            )
        value = self.radius * outcome.value  # not what the backward pass keeps, which is read-only
        return joined(Solution(value.to(dtype), *outcome[1:6], backward), A, b)

    def search(self, solver: Krylov, init: Tensor | None) -> Outcome:
        """By products alone, whatever `A` is."""
        batch = self.batch_shape
        A = as_operator(self.A)
        A = A if A.batch_shape in (batch, ()) else Matrix(self.matrix.expand(*batch, -1, -1))
        return find_minimiser(Rows(A, batch), self.b.expand(*batch, -1), solver, init)

    def _require_init(self, init: Tensor) -> None:
        errors.require_vector("init", init, "n")
        errors.require_alike("init", init, "A", self.A)
        if init.shape[-1] != self.n:
            raise ValueError(
                f"init must have shape (*, {self.n}) to start a problem with A of shape "
                f"{errors.shape_of(self.A)}; got {errors.shape_of(init)}"
            )
        errors.require_fits("init", init.shape[:-1], self.batch_shape)

    def _empty(self) -> Solution:
        value = self.matrix.sum(-2) + self.b.sum(-1, keepdim=True)
        blank = value.detach().sum(-1)
        count = blank.to(torch.int64)
        return Solution(value, blank, blank, blank, count, count.bool())


def less(
    A: Tensor | Operator,
    b: Tensor,
    *,
    radius: float = 1.0,
    solver: Solver | None = None,
    gradient: Gradient | None = None,
    init: Tensor | None = None,
) -> Tensor:
    """Least squares with the solution on a sphere: the global minimiser, differentiable.

    Minimises `½‖Au − b‖²` over all `u` with `‖u‖ = radius`.

    Args:
        A: `(*, m, n)`, tall, square or wide, of float32 or float64; float16 and bfloat16
            are computed in float32. Or a sparse tensor, a DTensor, or an operator of
            `pmaf.operators`.
        b: `(*, m)`; the batch dimensions of `A` and `b` broadcast.
        radius: of the sphere.
        solver: one of `pmaf.solvers`; `Auto()` unless given.
        gradient: one of `pmaf.gradients`; `Implicit()` unless given.
        init: `(*, n)`, the start of an iterative solver; a direct one prefers the
            solution nearest to it where there are several.

    Returns:
        The solution, `(*, n)`.

    >>> import torch, pmaf
    >>> A = torch.tensor([[2.0, 0.0], [0.0, 1.0]], requires_grad=True)
    >>> pmaf.less(A, torch.tensor([2.0, 0.0])).detach()
    tensor([1., 0.])
    """
    problem = SphereLeastSquares(A, b, radius)
    return problem.run(
        solver or _AUTO, gradient or _IMPLICIT, init=init, report=False, throw=False
    ).value


# Made once: they write themselves down, which takes longer than to solve a small problem.
_AUTO, _IMPLICIT, _CHOLESKY, _SECULAR = Auto(), Implicit(), Cholesky(), Secular()
_KRYLOV = Krylov()


class LESS(nn.Module):
    """`pmaf.less` as a module, with the same keywords and results.

    >>> import torch, pmaf
    >>> pmaf.LESS(radius=2.0)
    LESS(radius=2.0, solver=Auto(), gradient=Implicit())
    """

    def __init__(
        self,
        *,
        radius: float = 1.0,
        solver: Solver | None = None,
        gradient: Gradient | None = None,
    ) -> None:
        super().__init__()
        self.radius = errors.require_positive("radius", radius)
        self.solver = solver or Auto()
        self.gradient = gradient or Implicit()

    def forward(self, A: Tensor | Operator, b: Tensor, init: Tensor | None = None) -> Tensor:
        return less(A, b, radius=self.radius, solver=self.solver, gradient=self.gradient, init=init)

    def __prepare_scriptable__(self) -> None:
        errors.refuse_script(self)

    def extra_repr(self) -> str:
        return f"radius={self.radius}, solver={self.solver!r}, gradient={self.gradient!r}"
