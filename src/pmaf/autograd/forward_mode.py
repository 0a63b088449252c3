"""Forward-mode derivatives of a solution.

An opaque solve has no tangents. Newton steps from its solution on the optimality
conditions, with the linear system of the solution itself, move nothing (they start at
the root) and carry the derivatives, each step those of one order more: four steps are
exact for up to fourth derivatives, in any mix of modes. They are plain torch operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pmaf.autograd.ied_rules import lifted, size_of
from pmaf.gradients import Gradient, Implicit
from pmaf.linalg import sphere
from pmaf.linalg.gram import TangentSolver, merge_tolerance
from pmaf.linalg.products import matvec, norm, rmatvec, symmetric_part
from pmaf.solvers import Outcome, Secular, Solver
from pmaf.solvers.base import encode

STEPS = 4
_SECULAR = Secular()


def forward_mode(*tensors: Tensor | None) -> bool:
    """Whether one of the tensors has a tangent, or a transform around the call may give it one.

    The level of `forward_ad` is shared by all threads, so that it alone says nothing of this one.
    """
    if forward_ad._current_level < 0:
        return False
    if torch.compiler.is_compiling():
        return True  # a trace belongs to one thread
    if torch._C._functorch.maybe_current_level() is not None:  # pyright: ignore
        stack = torch._C._functorch.get_interpreter_stack() or ()  # pyright: ignore
        kind = torch._C._functorch.TransformType.Jvp  # pyright: ignore
        if any(transform.key() == kind for transform in stack):
            return True
    return any(x is not None and _has_tangent(x) for x in tensors)


def _has_tangent(x: Tensor) -> bool:
    while torch._C._functorch.is_functorch_wrapped_tensor(x):  # pyright: ignore
        x = torch._C._functorch.get_unwrapped(x)  # pyright: ignore
    return forward_ad.unpack_dual(x).tangent is not None


def require_forward(gradient: Gradient) -> None:
    """Forward mode knows one rule."""
    if not isinstance(gradient, Implicit):
        raise TypeError(
            f"gradient={gradient!r} is a rule for reverse mode; "
            "use gradient=Implicit() with torch.func.jvp, jacfwd or hessian"
        )


def constant(x: Tensor) -> Tensor:
    """A copy without derivatives of any kind, whatever transforms are at work."""
    return _Constant.apply(x)  # pyright: ignore[reportReturnType]


class _Constant(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        return None


def forward_less(
    A: Tensor, b: Tensor, init: Tensor | None, solver: Solver, report: bool, throw: bool
) -> Outcome:
    """LESS on the unit sphere with tangents."""
    fixed = constant(A), constant(b), None if init is None else constant(init)
    # The Newton steps are taken in the basis of `Secular`.
    solver = _SECULAR if solver.keeps_factor else solver
    found = Outcome(*torch.ops.pmaf.less(*fixed, encode(solver), report, throw))
    helper, gap = found, found.gap
    if not solver.keeps_basis:
        helper = Outcome(*torch.ops.pmaf.less(*fixed, encode(_SECULAR), False, False))
        gap = found.multiplier + (helper.gap - helper.multiplier)
    solve = TangentSolver(helper.basis, helper.spread, gap, found.value)
    u = found.value
    for _ in range(STEPS):
        force = -rmatvec(A, matvec(A, u) - b)
        u = sphere.project(u + solve(sphere.tangent(u, force)))
    return found._replace(value=u)


def forward_ied(
    A: Tensor,
    init: Tensor | None,
    k: int,
    symmetric: bool,
    solver: Solver,
    report: bool,
    throw: bool,
) -> Outcome:
    """IED with tangents; for a symmetric matrix at the price of a full decomposition."""
    fixed = constant(A)
    init = None if init is None else constant(init)
    found = Outcome(*torch.ops.pmaf.ied(fixed, init, k, symmetric, encode(solver), report, throw))
    step = _symmetric_step if symmetric else _general_step
    values, rows = step(A, fixed, found)
    return found._replace(value=rows, multiplier=values)


def _symmetric_step(A: Tensor, fixed: Tensor, found: Outcome) -> tuple[Tensor, Tensor]:
    S = symmetric_part(A)
    values, vectors = torch.linalg.eigh(symmetric_part(fixed))
    rise = found.multiplier.unsqueeze(-1) - values.unsqueeze(-2)
    scale = values.abs().amax(-1)[..., None, None]
    apart = rise.abs() > merge_tolerance(A.dtype) * scale
    inverse = torch.where(apart, 1 / torch.where(apart, rise, 1), 0)
    y = found.value
    difference = found.multiplier.unsqueeze(-1) - found.multiplier.unsqueeze(-2)
    # Vectors with one eigenvalue move together: of them the span has derivatives, not each.
    linked = difference.abs() <= merge_tolerance(A.dtype) * scale
    for _ in range(STEPS):
        image = y @ S
        rest = image - torch.where(linked, image @ y.mT, 0) @ y
        y = y + ((rest @ vectors) * inverse) @ vectors.mT
        # Newton's step towards orthonormal rows, which are off by the square of the last step.
        y = 1.5 * y - 0.5 * torch.where(linked, y @ y.mT, 0) @ y
    return (y @ S * y).sum(-1), y


def _general_step(A: Tensor, fixed: Tensor, found: Outcome) -> tuple[Tensor, Tensor]:
    y = found.value
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    matrix = lifted(fixed, found.multiplier, y, size_of(fixed))
    # Singular where the eigenvalue is not simple, and there is no derivative.
    singular = torch.linalg.lu_factor_ex(matrix).info != 0
    matrix = torch.where(singular[..., None, None], eye, matrix)
    inverse_y = torch.linalg.solve(matrix, y.mT)
    start = y
    for _ in range(STEPS):
        image = y @ A.mT
        rest = image - (image * y).sum(-1, keepdim=True) * y
        move = torch.linalg.solve(matrix, rest.mT)
        move = move - inverse_y * ((start @ move) / (start @ inverse_y))
        y = y + move.mT
        y = y / norm(y).unsqueeze(-1)
    return (y @ A.mT * y).sum(-1), y
