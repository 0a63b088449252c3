"""The base class of problems, and the way from a problem to its solution."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from pmaf import errors
from pmaf.autograd.attach import attach
from pmaf.autograd.forward_mode import forward, require_forward
from pmaf.autograd.products import attach_products
from pmaf.certificate import certify_minimum, certify_minimum_by_products
from pmaf.gradients import Gradient, Unroll
from pmaf.gradients.base import Reverse
from pmaf.gradients.by_products import Incoming, declared_gradients
from pmaf.gradients.minimum import MinimumConditions
from pmaf.linalg import sphere
from pmaf.linalg.decompositions import eigenvalues
from pmaf.linalg.products import broadcast, dot, norm, symmetric_part
from pmaf.linalg.roundings import HALF, OutOfRangeError
from pmaf.native import Gradients
from pmaf.operators import Operator, as_operator
from pmaf.operators.base import TimesPowers, known_by_products
from pmaf.runtime import ranks
from pmaf.runtime.modes import (
    forward_mode,
    full_precision,
    require_eager,
    require_traceable_derivatives,
    untraced,
)
from pmaf.runtime.text import Named, abbreviated, encode_options
from pmaf.runtime.threads import OneThread
from pmaf.runtime.trees import register_tree
from pmaf.solution import (
    Certificate,
    Solution,
    announce,
    require_products_suffice,
    require_rules,
)
from pmaf.solvers import Outcome, Solver
from pmaf.solvers.auto import SECULAR, best_minimum
from pmaf.solvers.base import Minimum
from pmaf.tangent.basis import TangentSolver
from pmaf.tangent.bordered import State
from pmaf.tangent.kept import NOTHING, Basis, Decomposition, Factor, Kept, SingularBasis

_Kind = TypeVar("_Kind", bound="type[Problem]")


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
    override a method, such as `gradients`, for which it has a faster way, or declare itself as a
    `case` of another problem.

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
    form: ClassVar[type] = Minimum
    # Multiplier and gap are homogeneous of this degree in the inputs; None if they are not.
    degree: ClassVar[int | None] = None
    # Whether `force` and `curvature` are compared at a solution; those of the library need not be.
    compared: ClassVar[bool] = True
    # Whether forward mode takes as many steps as there are derivatives, and no more.
    few_steps: ClassVar[bool] = False
    # Whether the matrix is symmetric; solvers with `always_converges` converge if it is.
    symmetric = True
    # Classes that solve some of these problems in another way, and which; see `case`.
    cases: ClassVar[tuple[tuple[Callable[[Any], bool], type[Problem]], ...]] = ()
    # The class of which this one is a case, for messages.
    general: ClassVar[type[Problem] | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register_tree(cls, cls.kind)

    def force(self, u: Tensor, *inputs: Any) -> Tensor:
        """`−∇f(u)`, `(*, n)`."""
        raise NotImplementedError(f"{type(self).__name__} declares no force")

    def curvature(self, rows: Tensor) -> Tensor:
        """`∇²f` times rows `(*, p, n)`."""
        raise NotImplementedError(f"{type(self).__name__} declares no curvature")

    # Special cases.

    @classmethod
    def case(cls, applies: Callable[[Any], bool]) -> Callable[[_Kind], _Kind]:
        """Declare a class as the one that solves and certifies the problems that `applies` names.

        The class has the same fields. It may pose another problem, whose solution it converts; and
        it may have cases of its own. A problem belongs to at most one case of a class.
        """

        def declare(kind: _Kind) -> _Kind:
            # A class that is defined again, as in a notebook, takes the place of the first.
            names = kind.__module__, kind.__qualname__
            others = (x for x in cls.cases if (x[1].__module__, x[1].__qualname__) != names)
            cls.cases = (*others, (applies, kind))
            kind.cases, kind.general = (), cls.general or cls
            return kind

        return declare

    @classmethod
    def of(cls, problem: Any) -> Any:
        """A problem as one of this class, which is a case of it."""
        return cls.like(problem)

    @classmethod
    def like(cls, problem: Any, **others: Any) -> Any:
        """A problem as one of this class, with other values of some fields; nothing is checked."""
        other = object.__new__(cls)
        for field in fields(problem):  # a trace knows the fields of an instance only
            name = field.name
            value = others[name] if name in others else getattr(problem, name)
            object.__setattr__(other, name, value)
        return other

    def special(self) -> Any:
        """The problem as the case to which it belongs; the problem itself if there is none."""
        for applies, kind in self.cases:
            if applies(self):
                return kind.of(self).special()
        return self

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
        """The same problem with other values of some fields, which are not checked again."""
        return self.like(self, **others)

    def bare(self) -> Any:
        """The problem without its inputs."""
        return self.with_tensors(*(None for _ in self.inputs))

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
        names = (field.name for field in fields(self) if field.name not in self.inputs)
        options = {name: getattr(self, name) for name in names}
        return encode_options(
            self.kind, {name: x for name, x in options.items() if not isinstance(x, Tensor)}
        )

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

    def on_the_unit_sphere(self, value: Tensor) -> tuple[Any, Tensor]:
        """The problem and its solution, rescaled to the unit sphere."""
        return self, value

    def curvature_range(self) -> tuple[Tensor, Tensor, Tensor]:
        """The smallest and the largest eigenvalue of `M`, and a scale for residuals."""
        M, g = self.quadratic()
        values = eigenvalues(symmetric_part(M))
        return values[..., 0], values[..., -1], values.abs().amax(-1) + norm(g)

    def best_solver(self) -> Solver:
        """The solver that `Auto()` uses."""
        return best_minimum(self)

    def certify(self, value: Tensor) -> Certificate:
        """Evidence about a solution, from the problem and the solution alone."""
        special = self.special()
        special.require_value(value)
        return special.certified(value)

    def certified(self, value: Tensor) -> Certificate:
        """`certify` for a value of the right shape."""
        by_products = self.operator is not None
        return (certify_minimum_by_products if by_products else certify_minimum)(self, value)

    def may_fail(self, solver: Solver) -> bool:
        """Whether entries may not converge, so that `converged` has to be looked at."""
        return not (solver.always_converges and self.symmetric)

    def advice(self, solver: Solver) -> str:
        """What to try where a solver has not converged."""
        return solver.advice()

    def require_value(self, value: Tensor) -> None:
        """Raise an error unless `value` has the shape of a solution."""
        shape, _ = self.shapes
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
        tensors: tuple[Tensor, ...],
        y: Tensor,
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
        kept, gap = found.kept, found.gap
        if not isinstance(kept, Basis):
            helper = solve(fixed, None, SECULAR, False, False)
            kept, gap = helper.kept, found.multiplier + (helper.gap - helper.multiplier)
        assert isinstance(kept, Basis)
        correct = TangentSolver(*kept, gap, found.value)

        def step(u: Tensor) -> Tensor:
            force = self.force(u, *self.tensors)
            return sphere.project(u + correct(sphere.tangent(u, force)))

        return step

    def gradients_by_products(self, given: Incoming) -> Sequence[Tensor | None]:
        """Gradients of `flat`, by products alone."""
        return declared_gradients(self, given)

    # From the problem to its solution.

    def instead(
        self, solver: Solver, gradient: Gradient, init: Tensor | None
    ) -> tuple[Any, Tensor | None, Callable[[Solution], Solution]] | None:
        """Another problem to run, a start of it, and a function from its solution; None for none.

        The conversion is differentiable.
        """
        return None

    def reduced(
        self, init: Tensor | None, solver: Solver
    ) -> tuple[Any, Tensor | None, Callable[..., Solution]]:
        """The problem as solvers take it, a start, and a function from outcomes to solutions.

        Solvers compute in float32 or float64, and on the unit sphere only. This conversion is
        differentiable.
        """
        dtype, problem = self.dtype, self
        if dtype in HALF:
            problem = self.with_flat([x.float() for x in self.flat])
            init = None if init is None else init.float()
        return problem, init, lambda outcome: in_dtype(dtype, as_solution(outcome))

    def solved_by(self, solver: Solver, init: Tensor | None, report: bool) -> Outcome:
        """The outcome of a solver; raises `OutOfRangeError` if other units are needed."""
        return solver.solve(self, init=init, report=report)

    def solved_by_products(self, solver: Solver, init: Tensor | None) -> tuple[Outcome, Any]:
        """The outcome of a solver for an operator, and the products for the backward pass."""
        return solver.solve_by_products(self, init)

    def finished(self, outcome: Outcome) -> Outcome:
        """The outcome of a solver after a last change that is not differentiated."""
        if self.compared:
            self._require_quadratic(outcome.value)
        return outcome

    @torch.no_grad()
    def _require_quadratic(self, u: Tensor) -> None:
        """Raise an error unless `force` is `g − Mu` with the curvature, at `u` and another point.

        Otherwise solution, derivative and certificate would be those of another problem.
        """
        mesh = ranks.mesh_of(*self.flat)
        fixed = self.with_flat([x.detach() for x in self.flat])
        other = torch.arange(1, self.n + 1, dtype=u.dtype, device=u.device).cos()
        points = [u.detach(), sphere.project(other).expand_as(u)]
        points = [ranks.replicate(x, mesh) for x in points]
        force, there = (ranks.whole(fixed.force(x, *fixed.tensors)) for x in points)
        images = [ranks.whole(fixed.curvature(x.unsqueeze(-2)).squeeze(-2)) for x in points]
        u, other = (ranks.whole(x) for x in points)
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

    def divided(self, unit: Tensor) -> Any:
        """The same problem in other units, if multiplier and gap have a degree in the inputs."""
        if self.degree is None:
            raise ValueError(
                f"squares of the entries of {type(self).__name__} leave the range of "
                f"{self.dtype}; scale the problem, or use float64"
            )
        parts = []
        for name, x in zip(self.inputs, self.tensors):
            if isinstance(x, Operator):
                parts.append(TimesPowers(x, -unit.log2()))
            else:
                parts.append(x / unit.reshape(*unit.shape, *(1,) * self.inputs[name]))
        return self.with_tensors(*parts)

    def multiplied(self, found: Any, unit: Tensor) -> Any:
        """Convert an outcome or a solution from other units to those of the problem."""
        multiplier, gap = found.multiplier, found.gap
        column = unit.unsqueeze(-1) if multiplier.dim() > gap.dim() else unit
        for _ in range(self.degree or 0):
            multiplier, gap = multiplier * column, gap * unit
        if isinstance(found, Solution):
            return in_dtype(self.dtype, replace(found, multiplier=multiplier, gap=gap))
        kept = found.kept
        power = self.degree or 0
        if isinstance(kept, (Basis, Decomposition, SingularBasis)):
            kept = type(kept)(kept[0], kept[1] * unit.unsqueeze(-1) ** power)
        if isinstance(kept, Factor):
            kept = Factor(kept.lower * unit[..., None, None] ** (0.5 * power))
        return found._replace(multiplier=multiplier, gap=gap, kept=kept)

    def run(
        self,
        solver: Solver,
        gradient: Gradient,
        *,
        init: Tensor | None = None,
        report: bool = True,
        throw: bool = False,
    ) -> Solution:
        """Solve with a solver, and attach a rule for the gradient; `pmaf.solve` calls this."""
        special = self.special()
        if special is not self:
            return special.run(solver, gradient, init=init, report=report, throw=throw)
        other = self.instead(solver, gradient, init)
        if other is not None:
            problem, start, convert = other
            return convert(problem.run(solver, gradient, init=start, report=report, throw=throw))
        require_rules(self, solver, gradient)
        if init is not None:
            self.require_start(init)
            # The solution does not depend on the start, and the graph of the start is not needed.
            init = init.detach()
        if self.operator is not None:
            run = untraced(self._run_products)
            return run(solver.resolve(self), gradient, init, throw)
        if any(ranks.is_spread(x) for x in (*self.tensors, *(x for x, _ in self.hints().values()))):
            return self._run_parts(solver, gradient, init, report, throw)
        if 0 in self.batch_shape:
            return self._empty()
        try:
            with OneThread(self.matrix):
                problem, start, finish = self.reduced(init, solver)
                return finish(problem._run(solver, gradient, start, report, throw))
        except OutOfRangeError as found:
            unit = found.unit
        other = self.divided(unit)
        start = None if init is None else init.to(other.dtype)
        return self.multiplied(
            other.run(solver, gradient, init=start, report=report, throw=throw), unit
        )

    def run_finite(
        self,
        solver: Solver,
        gradient: Gradient,
        *,
        init: Tensor | None = None,
        report: bool = True,
        throw: bool = False,
    ) -> Solution:
        """Solve the entries of the batch whose inputs are finite, and report nan of the others."""
        special = self.special()
        if special.operator is not None:
            raise TypeError('nonfinite="report" is for tensors, and the problem has an operator')
        require_eager('nonfinite="report"', 'nonfinite="raise"', special.matrix)
        batch = special.batch_shape
        named = {name: (getattr(special, name), dims) for name, dims in special.inputs.items()}
        named |= special.hints()
        named["init"] = (init, special.dims_of(init))
        whole = {
            name: x.expand(*batch, *x.shape[x.dim() - dims :])
            for name, (x, dims) in named.items()
            if x is not None
        }
        good = torch.ones(batch, dtype=torch.bool, device=special.device)
        for x in whole.values():
            good = good & x.detach().isfinite().reshape(*batch, -1).all(-1)
        if bool(good.all()):
            return special.run(solver, gradient, init=init, report=report, throw=throw)
        parts = {name: x[good] for name, x in whole.items()}
        start = parts.pop("init", None)
        found = special.with_parts(parts).run(
            solver, gradient, init=start, report=report, throw=throw
        )

        def spread(x: Tensor) -> Tensor:
            fill = math.nan if x.is_floating_point() or x.is_complex() else 0
            whole = x.new_full((*batch, *x.shape[1:]), fill)
            return whole.index_put((good,), x) if batch else whole

        return ranks.replace_tensors(found, spread)

    def _run(
        self, solver: Solver, gradient: Gradient, init: Tensor | None, report: bool, throw: bool
    ) -> Outcome:
        """Solve for tensors in float32 or float64, on the unit sphere."""
        if isinstance(gradient, Unroll):
            require_eager("gradient=Unroll()", "gradient=Implicit()", self.matrix)
            if init is not None:
                errors.require_finite(init=(init, self.start_dims))
            with full_precision(self.device):
                found = self.finished(self.solved_by(solver, init, report))
            value, multiplier, *others = found.tensors
            found = Outcome.of((value, multiplier, *(x.detach() for x in others)))
            announce(found, solver, throw)
            return found._replace(method=abbreviated(solver))
        way = solver.resolve(self)
        require_traceable_derivatives()
        if forward_mode(*self.tensors):
            require_forward(gradient)
            way = self.forward_solver(way)
            found = forward(self, init, way, report, throw)
        else:
            found = attach(self, init, way, gradient, report, throw)
        return found._replace(method=abbreviated(way)) if report else found

    def _run_products(
        self, solver: Solver, gradient: Gradient, init: Tensor | None, throw: bool
    ) -> Solution:
        A, batch = self.operator, self.batch_shape
        assert A is not None
        require_products_suffice(A, solver, gradient)
        if A.batch_shape not in (batch, ()):
            raise ValueError(
                f"{A!r} has the batch {tuple(A.batch_shape)} and the problem {tuple(batch)}; "
                "an operator needs the whole batch, or none"
            )
        if 0 in batch:
            raise ValueError(f"{A!r} has an empty batch; leave the layer out where it is")
        mesh = ranks.mesh_of(*self.flat)
        start = None if init is None else ranks.whole(init)
        problem, start, finish = self.reduced(start, solver)
        try:
            outcome, backward = attach_products(problem, start, solver, throw)
        except OutOfRangeError as found:
            other = problem.divided(found.unit)
            outcome, backward = attach_products(other, start, solver, throw)
            outcome = self.multiplied(outcome, found.unit)
        method = abbreviated(solver)
        solution = replace(finish(outcome), backward=backward, method=method)
        if mesh is None:
            return solution
        return ranks.replace_tensors(solution, lambda x: ranks.replicate(x, mesh))

    def _run_parts(
        self, solver: Solver, gradient: Gradient, init: Tensor | None, report: bool, throw: bool
    ) -> Solution:
        """Every rank solves the part of the batch that it has."""
        named: dict[str, tuple[Tensor | None, int]] = {
            name: (getattr(self, name), dims) for name, dims in self.inputs.items()
        }
        named |= self.hints()
        named["init"] = (init, self.dims_of(init))
        parts = ranks.Parts(self.batch_shape, named)
        start = parts.inputs.pop("init", None)
        mine = self.with_parts(parts.inputs)
        return parts.join_all(mine.run(solver, gradient, init=start, report=report, throw=throw))

    def hints(self) -> dict[str, tuple[Tensor | None, int]]:
        """Tensors besides the inputs, by field, and the dimensions of one batch entry of each."""
        return {}

    def with_parts(self, parts: dict[str, Tensor]) -> Any:
        """The same problem with the parts of its tensors that this rank has."""
        return replace(self, **parts)

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

    def _empty(self) -> Solution:
        """The solution of no problems, whose gradients are zero."""
        total = sum(x.sum() for x in self.tensors)
        assert isinstance(total, Tensor)
        size = torch.real(total)  # multipliers are real for complex inputs, too
        value, multiplier = (x + x.new_zeros(s) for x, s in zip((total, size), self.shapes))
        blank = size.detach().new_zeros(self.batch_shape)
        count = blank.to(torch.int64)
        return Solution(value, multiplier, blank, blank.clone(), count, count.bool())

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of a solution and of its multiplier, as the user sees them."""
        return (*self.batch_shape, self.n), tuple(self.batch_shape)


def as_solution(outcome: Outcome) -> Solution:
    """An outcome of one vector as the user sees it."""
    value, multiplier, residual, gap, iterations, converged = outcome.tensors
    return Solution(value, multiplier, residual, gap, iterations, converged, method=outcome.method)


def in_dtype(dtype: torch.dtype, found: Solution) -> Solution:
    if found.value.dtype == dtype:
        return found
    return replace(found, value=found.value.to(dtype), multiplier=found.multiplier.to(dtype))
