"""The base class of problems: what is solved, and what follows from that; `recipe.py` solves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from pmaf import errors
from pmaf.certificate import certify_minimum, certify_minimum_by_products
from pmaf.gradients.base import Reverse
from pmaf.gradients.by_products import Incoming, declared_gradients
from pmaf.gradients.minimum import MinimumConditions
from pmaf.linalg import sphere
from pmaf.linalg.decompositions import eigenvalues
from pmaf.linalg.products import broadcast, dot, norm, one_if_zero, symmetric_part
from pmaf.linalg.roundings import square_range
from pmaf.native import Gradients
from pmaf.operators import Diagonal, Operator, as_operator
from pmaf.operators.base import known_by_products
from pmaf.runtime import ranks
from pmaf.runtime.text import Named, encode_options
from pmaf.runtime.trees import register_tree
from pmaf.solution import Certificate
from pmaf.solvers import Outcome, Solver
from pmaf.solvers.auto import MINIMUM, SECULAR, Line, chosen
from pmaf.solvers.base import Course, Minimum
from pmaf.tangent.basis import TangentSolver
from pmaf.tangent.bordered import State
from pmaf.tangent.kept import NOTHING, Factor, Kept


@dataclass(frozen=True, eq=False)
class Problem(Named):
    """A minimum of `f(u) = ½uᵀMu − gᵀu` on the unit sphere, one per batch entry.

    A subclass is a frozen dataclass with `eq=False`. Its first fields are one or two tensors, or
    operators, named in `inputs` with the number of dimensions of one batch entry; all other
    fields are options that have a literal. It declares

    * `force(u, *inputs)`, which is `−∇f(u) = g − Mu` for `u` of shape `(*, n)`;
    * `curvature(rows)`, which is `M` times rows `(*, p, n)`.

    The multiplier `uᵀ force(u)`, the certificate, both modes of differentiation to any order, the
    search by products, batches, traces and transforms follow from these two. A subclass may
    override a method, such as `gradients`, for which it has a faster way.

    >>> import torch, pmaf
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, eq=False)
    ... class Quadratic(pmaf.Problem):  # ½uᵀQu − cᵀu on the unit sphere
    ...     Q: torch.Tensor
    ...     c: torch.Tensor
    ...     inputs = {"Q": 2, "c": 1}
    ...     def force(self, u, Q, c):
    ...         return c - (Q @ u.unsqueeze(-1)).squeeze(-1)
    ...     def curvature(self, rows):
    ...         return rows @ self.Q.mT
    >>> pmaf.solve(Quadratic(torch.eye(2), torch.tensor([3.0, 4.0]))).value.round(decimals=3)
    tensor([0.6000, 0.8000])
    """

    inputs: ClassVar[dict[str, int]] = {}
    parts_found: ClassVar[int] = 2  # a solution, its multiplier, and what is found beside them
    options: ClassVar[tuple[str, ...]] = ()  # the fields on which cached recipes depend
    form: ClassVar[type] = Minimum
    # Multiplier and gap are homogeneous of this degree in the first inputs; None if they are not.
    degree: ClassVar[int | None] = None
    # How many inputs these are, None for all.
    homogeneous: ClassVar[int | None] = None
    # Whether `force` and `curvature` are compared at a solution; those of the library need not be.
    compared: ClassVar[bool] = True
    # Whether forward mode takes as many steps as there are derivatives, and no more.
    few_steps: ClassVar[bool] = False
    # Whether the matrix is symmetric; solvers with `always_converges` converge if it is.
    symmetric = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register_tree(cls, cls.kind)

    def force(self, u: Tensor, *inputs: Any) -> Tensor:
        """`−∇f(u)`, `(*, n)`."""
        raise NotImplementedError(f"{type(self).__name__} declares no force")

    def curvature(self, rows: Tensor) -> Tensor:
        """`∇²f` times rows `(*, p, n)`."""
        raise NotImplementedError(f"{type(self).__name__} declares no curvature")

    # Inputs and options.

    def __post_init__(self) -> None:
        missing = [name for name in self.inputs if not hasattr(self, name)]
        if missing or not self.inputs:
            raise TypeError(
                f"{type(self).__name__}.inputs names the tensors of the problem, such as "
                f'{{"Q": 2, "c": 1}}, each of them a field; '
                + (f"there is no field {missing[0]!r}" if missing else "it is empty")
            )
        if len(self.inputs) > 2:
            raise TypeError(
                f"{type(self).__name__}.inputs names {len(self.inputs)} tensors, "
                f"{', '.join(self.inputs)}; a problem has one or two: put two of them into one "
                "tensor, as by torch.cat, and take it apart in force and curvature"
            )
        first, *others = self.inputs
        for name, dims in self.inputs.items():
            if dims == 2:
                self.require_matrix(name, or_complex=False)
            else:
                errors.require_vector(name, getattr(self, name), "n")
        A = getattr(self, first)
        for name in others:
            x = getattr(self, name)
            errors.require_alike(first, A, name, x)
            errors.require_broadcast(first, self._batch_of(first), name, self._batch_of(name))

    def require_matrix(self, name: str, letters: str = "m, n", or_complex: bool = True) -> Any:
        """The field as a dense tensor, which is checked, or as an operator."""
        x = getattr(self, name)
        errors.refuse_trace()
        if known_by_products(x):
            x = as_operator(x)
            object.__setattr__(self, name, x)
        else:
            errors.require_matrix(name, x, letters, or_complex=or_complex)
        return x

    def _batch_of(self, name: str) -> torch.Size:
        shape = getattr(self, name).shape
        return shape[: len(shape) - self.inputs[name]]

    @property
    def first(self) -> Any:
        """The first of the inputs."""
        return getattr(self, next(iter(self.inputs)))

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The inputs, tensors or operators."""
        return tuple(getattr(self, name) for name in self.inputs)

    @property
    def operator(self) -> Operator | None:
        """The first of the inputs that is an operator, if any is."""
        return next((x for x in self.tensors if isinstance(x, Operator)), None)

    @property
    def flat(self) -> list[Tensor]:
        """All tensors, including those of operators."""
        parts = (x.tensors if isinstance(x, Operator) else (x,) for x in self.tensors)
        return [x for part in parts for x in part]

    @property
    def matrix(self) -> Tensor:
        """The first input, which must be a dense tensor and no operator."""
        found = self.first
        assert isinstance(found, Tensor)
        return found

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    @property
    def device(self) -> torch.device:
        return self.first.device

    @property
    def batch_shape(self) -> torch.Size:
        return broadcast(*(self._batch_of(name) for name in self.inputs))

    @property
    def n(self) -> int:
        return self.first.shape[-1]

    @property
    def vectors(self) -> tuple[int, ...]:
        """`(k,)` if a solver returns k vectors, `()` if it returns a single one."""
        return ()

    @property
    def rank(self) -> int:
        """How many eigenvectors a basis of the curvature has."""
        return self.n

    @property
    def basis_batch(self) -> torch.Size:
        """The batch shape of a basis of the curvature."""
        return self.batch_shape

    @property
    def start_dims(self) -> int:
        """Dimensions of one start, as the solvers take it."""
        return 1

    def with_tensors(self, *tensors: Any) -> Any:
        """The same problem with other inputs, which are not checked again."""
        return self.changed(**dict(zip(self.inputs, tensors)))

    def changed(self, **others: Any) -> Any:
        """The same problem with other values of some fields, which are not checked again.

        A tensor that takes the place of a diagonal matrix is its diagonal.
        """
        other = object.__new__(type(self))
        for field in fields(self):  # a trace knows the fields of an instance only
            name = field.name
            value = old = getattr(self, name)
            if name in others:
                value = others[name]
                if isinstance(old, Diagonal) and isinstance(value, Tensor):
                    value = Diagonal(value)
            object.__setattr__(other, name, value)
        return other

    @property
    def named(self) -> dict[str, Any]:
        """The inputs and all other fields that may be tensors, by name."""
        return {name: getattr(self, name) for name in self.inputs}

    def parts(self) -> dict[str, tuple[Tensor, int]]:
        """All tensors of `named`, none an operator, and the dimensions of one batch entry."""
        return {name: (getattr(self, name), dims) for name, dims in self.inputs.items()}

    def bare(self) -> Any:
        """The problem without its tensors."""
        return self.changed(**dict.fromkeys(self.named))

    def with_flat(self, tensors: Sequence[Tensor]) -> Any:
        """The same problem with other tensors, in the order of `flat`."""
        left = iter(tensors)
        return self.with_tensors(
            *(
                x.with_tensors([next(left) for _ in x.tensors])
                if isinstance(x, Operator)
                else next(left)
                for x in self.tensors
            )
        )

    @classmethod
    def read(cls, options: dict[str, Any]) -> Any:
        bare = object.__new__(cls)
        for field in fields(cls):
            object.__setattr__(bare, field.name, options.get(field.name))
        return bare

    def encoded(self) -> str:
        """The class and its options as text; see `pmaf.runtime.text`."""
        return encode_options(self.kind, self._others())

    def _others(self) -> dict[str, Any]:
        """The fields that are neither tensors nor operators."""
        names = (field.name for field in fields(self) if field.name not in self.inputs)
        others = {name: getattr(self, name) for name in names}
        return {k: x for k, x in others.items() if not isinstance(x, (Tensor, Operator))}

    @property
    def is_described(self) -> bool:
        """Whether all options have a literal, so that the problem can be written as text."""
        return all(x is None or isinstance(x, (int, float, str)) for x in self._others().values())

    # Properties of the problem.

    def quadratic(self) -> tuple[Tensor, Tensor]:
        """`M` as a matrix, `(*, n, n)`, and `g`, `(*, n)`."""
        like, batch = self.first, self.batch_shape
        eye = torch.eye(self.n, dtype=like.dtype, device=like.device)
        M = self.curvature(eye.expand(*batch, self.n, self.n))
        zero = torch.zeros((*batch, self.n), dtype=like.dtype, device=like.device)
        return M, self.force(zero, *self.tensors)

    def multiplier_at(self, u: Tensor) -> Tensor:
        """`uᵀ force(u)`, `(*,)`."""
        return dot(u, self.force(u, *self.tensors))

    def curvature_range(self) -> tuple[Tensor, Tensor, Tensor]:
        """The smallest and the largest eigenvalue of `M`, and a scale for residuals."""
        M, g = self.quadratic()
        values = eigenvalues(symmetric_part(M))
        return values[..., 0], values[..., -1], values.abs().amax(-1) + norm(g)

    def choice(self) -> Line:
        """The solver that `Auto()` uses, and the reason."""
        return chosen(MINIMUM, self)

    def certified(self, value: Tensor) -> Certificate:
        """Evidence about a solution in the coordinates of solvers, from these alone."""
        by_products = self.operator is not None
        return (certify_minimum_by_products if by_products else certify_minimum)(self, value)

    def may_keep(self, solver: Solver) -> tuple[type[Kept], ...]:
        """The types of what a solver may keep of this problem for the backward pass."""
        return solver.may_keep(self)

    def course(self, solver: Solver) -> Course:
        """What a solver does for this problem, in words; no number is looked at."""
        return solver.course(self)

    def may_fail(self, solver: Solver) -> bool:
        """Whether entries may not converge, so that `converged` has to be looked at."""
        return not (solver.always_converges and self.symmetric)

    def advice(self, solver: Solver) -> str:
        """What to try where a solver has not converged."""
        return solver.advice()

    def require_value(self, value: Tensor) -> None:
        """Raise an error unless `value` has the shape of a solution."""
        shape = self.shapes[0]
        if value.shape != shape:
            raise ValueError(
                f"a solution of this problem has shape {shape}; got {errors.shape_of(value)}"
            )

    # Differentiation.

    def conditions(self, tensors: tuple[Tensor, ...], y: Tensor, state: State) -> MinimumConditions:
        """The optimality conditions at a solution, as the gradient rules use them."""
        return MinimumConditions(self, tensors, y, state)

    def gradients(self, given: Reverse) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs, given those of the solution and of its multiplier."""
        state = given.state._replace(shift=given.state.shift.unsqueeze(-1))
        conditions = self.conditions(given.tensors, given.y, state)
        return conditions.gradients(given.rule, given.v, given.d_multiplier, given.needs)

    def is_differentiated(
        self, tensors: tuple[Tensor, ...], kept: Kept, d_multiplier: Tensor | None
    ) -> bool:
        """Whether compiled kernels differentiate a solution once, given what was kept of it."""
        return False

    def kept_again(self, tensors: tuple[Tensor, ...], kind: type[Kept]) -> Kept:
        """What a solve had kept, of this kind, after hooks on saved tensors have changed it.

        Nothing is always right: the backward pass then solves its linear system from the inputs.
        """
        return NOTHING

    def first_gradients(
        self,
        tensors: Sequence[Tensor],
        y: Tensor,
        multiplier: Tensor,
        kept: Kept,
        v: Tensor | None,
        d_multiplier: Tensor | None,
        needs: Sequence[bool],
    ) -> Gradients:
        """The result of `gradients` by compiled kernels, where these differentiate.

        The arguments are fields of `Reverse`. Around a small matrix, the object itself would take
        as long as the kernel.
        """
        raise NotImplementedError

    def forward_solver(self, solver: Solver) -> Solver:
        """The solver to use in forward mode, where Newton's steps are taken in an eigenbasis."""
        return SECULAR if solver.keeps(self) is Factor else solver

    def newton(
        self, fixed: Any, found: Outcome, solve: Callable[..., Outcome]
    ) -> Callable[[Tensor], Tensor]:
        """Newton's step from a solution of the problem `fixed`, with the linear system there."""
        basis, gap = found.kept.basis, found.gap
        if basis is None:
            helper = solve(fixed, None, SECULAR, False, False)
            basis, gap = helper.basis, found.multiplier + (helper.gap - helper.multiplier)
        correct = TangentSolver(basis.rows, basis.spread, gap, found.value)

        def step(u: Tensor) -> Tensor:
            force = self.force(u, *self.tensors)
            return sphere.project(u + correct(sphere.tangent(u, force)))

        return step

    def gradients_by_products(self, given: Incoming) -> Sequence[Tensor | None]:
        """Gradients of `flat`, by products alone."""
        return declared_gradients(self, given)

    # How solvers are run.

    def solved_by(self, solver: Solver, init: Tensor | None, report: bool) -> Outcome:
        """The outcome of a solver; raises `OutOfRangeError` if other units are needed."""
        outcome = solver.solve(self, init=init, report=report)
        if self.compared:
            self.require_quadratic(outcome.value)
        return outcome

    def solved_by_products(self, solver: Solver, init: Tensor | None) -> tuple[Outcome, Any]:
        """The outcome of a solver for an operator, and the products for the backward pass."""
        outcome, seen = solver.solve_by_products(self, init)
        if self.compared:
            self.require_quadratic(outcome.value)
        return outcome, seen

    def for_solver(self, solver: Solver) -> Any:
        """The problem with its tensors in the form that a solver takes."""
        return self

    def columns(self, vectors: Tensor) -> Tensor:
        """A solution in the shape of several, as its certificate takes it."""
        return vectors

    def found(self, value: Tensor, multiplier: Tensor) -> tuple[Tensor, ...]:
        """The vectors of an outcome and their multipliers as users see them, or parts of them."""
        return value, multiplier

    @torch.no_grad()
    def require_quadratic(self, u: Tensor) -> None:
        """Raise an error unless `force` is `g − Mu` with the curvature, at `u` and another point.

        Otherwise solution, derivative and certificate would be those of another problem.
        """
        mesh = ranks.mesh_of(*self.flat)
        fixed = self.with_flat([x.detach() for x in self.flat])
        other = torch.arange(1, self.n + 1, dtype=u.dtype, device=u.device).cos()
        points = [u.detach(), sphere.project(other).expand_as(u)]
        points = [ranks.replicate(x, mesh) for x in points]
        forces = [ranks.whole(fixed.force(x, *fixed.tensors)) for x in points]
        images = [ranks.whole(fixed.curvature(x.unsqueeze(-2)).squeeze(-2)) for x in points]
        u, other = (ranks.whole(x) for x in points)
        # In units in which squares neither over- nor underflow.
        unit = torch.stack([x.abs().amax(-1, True) for x in (*forces, *images)]).amax(0)
        self._require_squares(unit)
        unit = one_if_zero(unit)
        (force, there), images = ([x / unit for x in parts] for parts in (forces, images))
        size = norm(force) + norm(there) + norm(images[0]) + norm(images[1])
        # Force and curvature may be sums of larger terms, of which each has its rounding.
        allowed = torch.finfo(u.dtype).eps ** 0.5 * size
        rest = norm(force - there + images[0] - images[1])
        if bool((rest > allowed).any()):
            raise ValueError(
                f"{type(self).__name__} is not quadratic, or its curvature is not that of its "
                f"force: between two points the force changes by {float((rest / size).max()):.1e} "
                "(relative) more than the curvature says; a pmaf.Problem minimises ½uᵀMu − gᵀu, "
                "with force g − Mu and curvature M"
            )
        turn = (dot(u, images[1]) - dot(other, images[0])).abs()
        if bool((turn > allowed).any()):
            raise ValueError(
                f"the curvature of {type(self).__name__} is not symmetric, by "
                f"{float((turn / size).max()):.1e} (relative), and a second derivative is; use the "
                "symmetric part of the matrix, 0.5 * (Q + Q.mT), in force and curvature"
            )

    def _require_squares(self, sizes: Tensor) -> None:
        """Raise an error where solvers, which take squares, would be given zeros or infinities."""
        low, _ = square_range(sizes.dtype)
        high = torch.finfo(sizes.dtype).max ** 0.5 / (4 * self.n)  # sums of squares are finite
        bad = (sizes > 0) & sizes.isfinite() & ~((sizes > low) & (sizes < high))
        if bool(bad.any()):
            raise ValueError(
                f"squares of the entries of {type(self).__name__} leave the range of the dtype: "
                f"force or curvature is about {float(sizes[bad][0]):.1e}; scale the problem, or "
                "use float64"
            )

    def dims_of(self, vectors: Tensor | None) -> int:
        """The dimensions of one batch entry of a start or a reference."""
        return 1

    def require_start(self, init: Tensor) -> None:
        """Raise an error unless `init` has the shape of a solution, or broadcasts to it."""
        first = next(iter(self.inputs))
        errors.require_vector("init", init, "n", or_complex=True)
        errors.require_alike("init", init, first, self.first)
        if init.shape[-1] != self.n:
            raise ValueError(
                f"init must have shape (*, {self.n}) to start a problem with {first} of shape "
                f"{errors.shape_of(self.first)}; got {errors.shape_of(init)}"
            )
        errors.require_fits("init", init.shape[:-1], self.batch_shape)

    @property
    def length(self) -> int:
        """The number of components of a vector of a solver."""
        return self.n

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a solution, of its multiplier and of what is found beside them."""
        return (*self.batch_shape, self.n), tuple(self.batch_shape)

    @property
    def has_several(self) -> bool:
        """Whether the vectors of a solution are columns."""
        return False

    def blank(self) -> tuple[Tensor, ...]:
        """A solution, its multiplier and what is found beside them, without numbers."""
        value, multiplier, *others = self.shapes
        first, like = self.first.new_empty(value), self.first
        values = like.new_empty(multiplier, dtype=like.dtype.to_real())
        return first, values, *(like.new_empty(shape) for shape in others)
