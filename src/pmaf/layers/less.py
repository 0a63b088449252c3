"""LESS, least squares on the sphere: `min ½‖Au − b‖²` subject to `‖u‖ = radius`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from pmaf import errors, native
from pmaf.autograd.attach import attach_found
from pmaf.autograd.posed import FoundPosed
from pmaf.gradients import Gradient, Implicit
from pmaf.layers.least_squares import SphereLeastSquares
from pmaf.operators import Diagonal
from pmaf.operators.base import Operator
from pmaf.runtime.log import took
from pmaf.runtime.modes import forward_mode, plain
from pmaf.solvers import Auto, Solver
from pmaf.solvers.auto import SECULAR, are_decomposed, are_reduced_columns
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


def _with_options(
    A: Tensor,
    b: Tensor,
    radius: float | Tensor,
    ball: bool,
    M: Tensor | Diagonal | None,
    weights: Tensor | None,
) -> Tensor | None:
    """The same for calls with options, in float64, or with complex numbers.

    Here, too, None stands for the common path, which also explains what is wrong with an argument.
    """
    if type(ball) is not bool:  # a cache would take one for True
        return None
    resized, diagonal = isinstance(radius, Tensor), isinstance(M, Diagonal)
    length = 1.0 if isinstance(radius, Tensor) else float(radius)
    tensors: Any = A, b, weights, radius if resized else None, M.d if diagonal else M  # pyright: ignore
    given = [x for x in tensors if x is not None]
    if not all(isinstance(x, Tensor) and plain(x) for x in given) or forward_mode(*given):
        return None
    if not all(x.is_cpu and x.layout is _STRIDED for x in given):
        return None
    errors.refuse_trace()  # the sizes in such a trace are in no cache
    forms = (None if x is None else (x.shape, x.dtype) for x in tensors)
    plan = _plan(diagonal, ball, length, *forms)
    if plan is None:
        return None
    batch = A.shape[:-2]
    whole = [
        x
        if x is None or x.shape[: x.dim() - dims] == batch
        else x.expand(*batch, *x.shape[x.dim() - dims :])
        for x, dims in zip(tensors, (2, 1, 1, 0, 1 if diagonal else 2))
    ]
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    found = native.solve_posed(plan, *(None if x is None else x.detach() for x in whole))
    if found is None:
        return None
    took("less: decomposition, compiled")
    if not recorded:
        return found[0]
    again = functools.partial(_solved, length, ball, diagonal)
    return FoundPosed.apply(found, plan, again, *whole)


_Form = tuple[torch.Size, torch.dtype] | None


@functools.lru_cache(maxsize=1024)
def _plan(
    diagonal: bool,
    ball: bool,
    length: float,
    A: _Form,
    b: _Form,
    weights: _Form,
    radius: _Form,
    M: _Form,
) -> native.Posed | None:
    """How compiled kernels solve calls with tensors of these shapes; None if they do not."""
    assert A is not None
    assert b is not None
    shape, dtype = A
    if len(shape) < 2 or 0 in shape or b != (shape[:-1], dtype) or dtype not in _DTYPES:
        return None
    *batch, m, n = shape
    real = dtype.to_real() if dtype.is_complex else dtype
    wanted = (weights, (m,), real), (radius, (), real), (M, (n,) if diagonal else (n, n), dtype)
    for form, own, kind in wanted:
        if form is None:
            continue
        size, given = form
        ahead = len(size) - len(own)
        if given != kind or size[max(ahead, 0) :] != own or not _fits(size[: max(ahead, 0)], batch):
            return None
    plain_sphere = weights is radius is M is None and not ball
    info = torch.finfo(dtype)
    if not info.tiny <= length <= info.max:
        return None
    if not are_decomposed(shape, dtype, plain_sphere):
        return None
    metric = 0 if M is None else 1 if diagonal else 2
    steps = SECULAR.max_iterations, SECULAR.refinements
    weighted = weights is not None
    return native.posed_plan(shape, dtype, weighted, metric, ball, float(length), steps)


_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def _fits(ahead: torch.Size, batch: list[int]) -> bool:
    """Whether a batch shape expands to another."""
    padded = (1,) * (len(batch) - len(ahead)) + tuple(ahead)
    return len(padded) == len(batch) and all(x in (1, y) for x, y in zip(padded, batch))


def _solved(
    length: float,
    ball: bool,
    diagonal: bool,
    A: Tensor,
    b: Tensor,
    weights: Tensor | None,
    radius: Tensor | None,
    M: Any,
    init: Tensor,
) -> Tensor:
    """The same by the common path, from a start."""
    metric = Diagonal(M) if diagonal else M
    problem = SphereLeastSquares(A, b, length if radius is None else radius, ball, metric, weights)
    return problem.run(_AUTO, _IMPLICIT, init=init, report=False, throw=False).value


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
        and init is None
        and isinstance(A, Tensor)
        and isinstance(b, Tensor)
        and (isinstance(radius, Tensor) or type(radius) in (int, float))
    ):
        found = None
        sphere = ball is False and M is None and weights is None
        if sphere and not isinstance(radius, Tensor) and radius == 1:
            found = _small(A, b)
        if found is None and native.available:
            found = _with_options(A, b, radius, ball, M, weights)
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
