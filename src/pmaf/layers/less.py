"""LESS, least squares on the sphere: `min ½‖Au − b‖²` subject to `‖u‖ = radius`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from pmaf import errors, native
from pmaf.autograd.attach import attach_found
from pmaf.gradients import Gradient, Implicit
from pmaf.layers.least_squares import SphereLeastSquares
from pmaf.operators import Diagonal
from pmaf.operators.base import Operator
from pmaf.runtime.log import took
from pmaf.runtime.modes import forward_mode, plain
from pmaf.solvers import Auto, Solver
from pmaf.solvers.auto import are_reduced_columns
from pmaf.tangent.kept import Exact

# Created at import: constructing a solver serialises it to text, which costs more than a small
# solve.
_AUTO, _IMPLICIT = Auto(), Implicit()


# The problem of a default call, without its tensors.
_UNPOSED: Any = SphereLeastSquares.read({"radius": 1.0, "ball": False})


def _small(A: Tensor, b: Tensor) -> Tensor | None:
    """The forward pass of the default call, without the objects in between.

    It calls the kernels that `Reduction` calls; the backward pass is the common one. Returns None
    where the common forward pass is needed: for other tensors, and for entries that the kernels do
    not solve, or that are not finite.
    """
    if not (plain(A) and plain(b)) or forward_mode(A, b):  # asked first: a trace compares no sizes
        return None
    if not (A.is_cpu and b.is_cpu and A.layout is b.layout is _STRIDED):
        return None
    if not _is_reduced(A.shape, b.shape, A.dtype, b.dtype):
        return None
    recorded = (A.requires_grad or b.requires_grad) and torch.is_grad_enabled()
    u, multiplier, _, numbers, failed = native.least_squares(A, b, recorded)
    if failed is not None:
        return None
    took("less: reduction")
    if recorded:
        u, _ = attach_found(A, b, (u, multiplier), Exact(multiplier, numbers), _UNPOSED)
    return u


_STRIDED = torch.strided


# What follows from the shapes is found once for all calls with tensors of these shapes.
@functools.lru_cache(maxsize=1024)
def _is_reduced(A: torch.Size, b: torch.Size, dtype: torch.dtype, other_dtype: torch.dtype) -> bool:
    """Whether compiled kernels are used for tensors of these shapes."""
    # The sizes in a trace of TorchScript are tensors, which are in no cache.
    errors.refuse_trace()
    alike = len(A) > 1 and A[:-1] == b and dtype == other_dtype and A.numel() > 0
    return alike and native.available and dtype == torch.float32 and are_reduced_columns(*A[-2:])


def less(
    A: Tensor | Operator,
    b: Tensor,
    *,
    radius: float | Tensor = 1.0,
    ball: bool = False,
    M: Tensor | Diagonal | None = None,
    weights: Tensor | None = None,
    solver: Solver | None = None,
    gradient: Gradient | None = None,
    init: Tensor | None = None,
) -> Tensor:
    """Least squares with the solution on a sphere: the global minimiser, differentiable.

    Minimises `½‖Au − b‖²` over all `u` with `‖u‖ = radius`. With `ball=True` the constraint is
    `‖u‖ ≤ radius`, with `M` it is `uᵀMu = radius²`, with both it is `uᵀMu ≤ radius²`. With
    `weights` the objective is `½Σᵢ wᵢ(aᵢu − bᵢ)²`.

    Args:
        A: `(*, m, n)`, tall, square or wide, of float32 or float64; float16 and bfloat16
            are computed in float32, and for complex64 and complex128 `u` is complex. Or a sparse
            tensor, a DTensor, or an operator of `pmaf.operators`.
        b: `(*, m)`; the batch dimensions of all tensors broadcast.
        radius: of the sphere, a number, or a tensor `(*,)`, which gets a gradient.
        ball: whether the solution may be inside of the sphere. Where the least-norm solution
            `A⁺b` is in the ball, it is the solution, and the multiplier is zero.
        M: `(*, n, n)`, symmetric and positive definite, or `pmaf.operators.Diagonal`. Of a
            matrix that is not symmetric, the symmetric part is used.
        weights: `(*, m)`, one for each row, none negative; zero leaves the row out.
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
    if (
        (solver is None or solver == _AUTO)
        and (gradient is None or gradient == _IMPLICIT)
        and type(radius) in (int, float)
        and radius == 1
        and not ball
        and M is None
        and weights is None
        and init is None
        and isinstance(A, Tensor)
        and isinstance(b, Tensor)
    ):
        found = _small(A, b)
        if found is not None:
            return found
    problem = SphereLeastSquares(A, b, radius, ball, M, weights)
    return problem.run(
        solver or _AUTO, gradient or _IMPLICIT, init=init, report=False, throw=False
    ).value


class LESS(nn.Module):
    """`pmaf.less` as a module, with the same keywords and results.

    `radius` may be a parameter, which is then trained. `M` and `weights` are inputs, as `A` and `b`
    are.

    >>> import torch, pmaf
    >>> pmaf.LESS(radius=2.0)
    LESS(radius=2.0, solver=Auto(), gradient=Implicit())
    """

    def __init__(
        self,
        *,
        radius: float | Tensor = 1.0,
        ball: bool = False,
        solver: Solver | None = None,
        gradient: Gradient | None = None,
    ) -> None:
        super().__init__()
        if isinstance(radius, Tensor) and not isinstance(radius, nn.Parameter):
            self.register_buffer("radius", radius)
        else:
            number = not isinstance(radius, Tensor)
            self.radius = errors.require_positive("radius", radius) if number else radius
        self.ball = ball
        self.solver = solver or Auto()
        self.gradient = gradient or Implicit()

    def forward(
        self,
        A: Tensor | Operator,
        b: Tensor,
        init: Tensor | None = None,
        *,
        M: Tensor | Diagonal | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        return less(
            A,
            b,
            radius=self.radius,
            ball=self.ball,
            M=M,
            weights=weights,
            solver=self.solver,
            gradient=self.gradient,
            init=init,
        )

    def __prepare_scriptable__(self) -> None:
        errors.refuse_script(self)

    def extra_repr(self) -> str:
        radius = self.radius
        if isinstance(radius, Tensor):
            radius = f"{type(radius).__name__}{tuple(radius.shape)}"
        ball = "ball=True, " * self.ball
        return f"radius={radius}, {ball}solver={self.solver!r}, gradient={self.gradient!r}"
