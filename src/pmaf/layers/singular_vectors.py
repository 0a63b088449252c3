"""The problem of right singular vectors, at either end of the spectrum."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from pmaf import errors, native
from pmaf.executors.direct import Direct
from pmaf.executors.launched import LaunchedNullVectors
from pmaf.executors.least_squares import CompiledLeastSquares
from pmaf.executors.singular import SingularVectors as Executor
from pmaf.executors.straight import StraightSingularVectors
from pmaf.gradients import Gradient
from pmaf.gradients.base import Reverse
from pmaf.gradients.constrained import times
from pmaf.gradients.singular import SingularConditions, singular_newton
from pmaf.launched import takes
from pmaf.layers.eigenvectors import PrincipalEigenvectors
from pmaf.layers.host import on_host
from pmaf.layers.ied import coordinates as coordinates_of_eigenvectors
from pmaf.layers.ied import way_of_eigenvectors
from pmaf.layers.least_squares import UNIT, SphereLeastSquares, normal_product
from pmaf.layers.less import short_way_of_least_squares
from pmaf.linalg.embedding import complex_rows, paired_rows
from pmaf.linalg.products import broadcast, dot, frobenius, matvec
from pmaf.linalg.roundings import (
    HALF,
    blame_range,
    square_range,
    widened,
    working_dtype,
)
from pmaf.linalg.singular import accuracy, weighted, weighted_gram
from pmaf.operators import Gram, Matrix, Operator
from pmaf.problem import Problem
from pmaf.recipe import Place, Recipe, register, run
from pmaf.reductions.base import Found, Reduction, Tensors
from pmaf.reductions.end import End, Sign
from pmaf.reductions.field import EmbeddedVectors
from pmaf.reductions.gram import NullVector, Squares, root_of
from pmaf.reductions.precision import Precision, of_short
from pmaf.runtime import ranks
from pmaf.solution import Certificate
from pmaf.solvers import SVD, Solver
from pmaf.solvers import Reduction as Compiled
from pmaf.solvers.auto import (
    DECOMPOSED_ALONE,
    SINGULAR,
    Line,
    are_reduced_columns,
    chosen,
    is_reduced_whole,
)
from pmaf.solvers.base import Course, Eigenvectors, Outcome, SingularVectors
from pmaf.solvers.reduction import are_few
from pmaf.tangent.complement import COMPILED_ROWS
from pmaf.tangent.kept import Kept


@dataclass(frozen=True, eq=False)
class PrincipalSingularVectors(Problem):
    """The problem `max ‖√W A u‖²` subject to `uᵀu = I`, or its minimum, one per batch entry.

    The solution consists of right singular vectors of `√W A`, with `W` the diagonal matrix of the
    weights; the multipliers are the singular values, and `gap` is the distance from them to the
    next one.

    Args:
        A: `(*, m, n)`, tall, square or wide, real or complex, a tensor or an operator.
        weights: `(*, m)`, of the rows of `A`, real and none negative; ones unless given.
        k: how many vectors, at most n; None for one, without a dimension for it.
        largest: those of the largest singular values, or of the smallest. A wide matrix has
            `n − m` singular vectors of the singular value zero, its null space.
        descending: order of the singular values if there are several; None for the requested end
            first.
        reference: towards which the sign of each vector is chosen, as in `PrincipalEigenvectors`.
        single: set by the library, for numbers that float32 holds in tensors of float64.
        copies: set by the library: how often each singular value occurs by construction.

    >>> import torch, pmaf
    >>> problem = pmaf.PrincipalSingularVectors(torch.diag(torch.tensor([3.0, 2.0])), largest=False)
    >>> pmaf.solve(problem).multiplier, pmaf.solve(problem).gap
    (tensor(2.), tensor(1.))
    """

    A: Tensor | Operator
    weights: Tensor | None = None
    k: int | None = None
    largest: bool = True
    descending: bool | None = None
    reference: Any = None
    single: bool = field(default=False, repr=False)
    copies: int = field(default=1, repr=False)

    inputs: ClassVar[dict[str, int]] = {"A": 2, "weights": 1}
    options = ("k", "largest", "descending")
    compared: ClassVar[bool] = False
    decomposed: ClassVar[type] = SingularVectors  # the form of a dense matrix
    degree: ClassVar[int | None] = 1
    homogeneous: ClassVar[int | None] = 1  # of degree one half in the weights

    def __post_init__(self) -> None:
        A, weights = self.require_matrix("A"), self.weights
        if weights is not None:
            errors.require_row_weights(weights, "A", A)
            errors.require_broadcast("A", A.shape[:-2], "weights", weights.shape[:-1])
        # Checks k and the reference, and settles the order.
        posed = self._posed()
        object.__setattr__(self, "descending", posed.descending)
        object.__setattr__(self, "reference", posed.reference)

    def _posed(self) -> PrincipalEigenvectors:
        """The same vectors as eigenvectors, for everything that is not the solve: order and signs.

        Its matrix has the shape of `AᵀWA`, and no numbers.
        """
        like = self.A
        blank = torch.empty((1, 1), dtype=like.dtype, device=like.device)
        blank = blank.expand(*self.batch_shape, self.n, self.n)
        return PrincipalEigenvectors(
            blank, self.k, self.largest, True, self.descending, self.reference
        )

    def for_solver(self, solver: Solver) -> Any:
        dense = self.operator is None and getattr(solver, "matrix_free", False)
        return self.changed(A=Matrix(self.matrix)) if dense else self

    def squares(self) -> PrincipalEigenvectors:
        """The same vectors as eigenvectors of `AᵀWA`, without a copy of a matrix."""
        assert isinstance(self.A, Operator)
        gram = Gram(self.A, weights=self.weights)
        order = self.descending, self.reference
        return PrincipalEigenvectors(gram, self.k, self.largest, True, *order)

    @property
    def form(self) -> type:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.decomposed if self.operator is None else Eigenvectors

    @property
    def flipped(self) -> bool:
        """Whether the requested order is the reverse of that of the solvers."""
        return self._posed().flipped

    @property
    def named(self) -> dict[str, Any]:
        return {"A": self.A, "weights": self.weights, "reference": self.reference}

    def parts(self) -> dict[str, tuple[Tensor, int]]:
        found: dict[str, tuple[Tensor, int]] = {"A": (self.matrix, 2)}
        if self.weights is not None:
            found["weights"] = self.weights, 1
        if isinstance(self.reference, Tensor):
            found["reference"] = self.reference, self.dims_of(self.reference)
        return found

    def has_columns(self, reference: Tensor) -> bool:
        """As for eigenvectors."""
        return self._posed().has_columns(reference)

    def columns(self, vectors: Tensor) -> Tensor:
        return vectors.unsqueeze(-1) if self.k is None else vectors

    def found(self, value: Tensor, multiplier: Tensor) -> tuple[Tensor, ...]:
        return value.mT, multiplier

    @property
    def tensors(self) -> tuple[Any, ...]:
        return (self.A,) if self.weights is None else (self.A, self.weights)

    @property
    def batch_shape(self) -> torch.Size:
        batch = self.A.shape[:-2]
        return batch if self.weights is None else broadcast(batch, self.weights.shape[:-1])

    @property
    def width(self) -> int:
        """Number of vectors."""
        return 1 if self.k is None else self.k

    @property
    def vectors(self) -> tuple[int, ...]:
        return () if self.k is None else (self.k,)

    @property
    def start_dims(self) -> int:
        return 2

    @property
    def has_several(self) -> bool:
        return self.k is not None

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return (*self.batch_shape, self.n, *self.vectors), (*self.batch_shape, *self.vectors)

    def dims_of(self, vectors: Tensor | None) -> int:
        return self._posed().dims_of(vectors)

    def require_start(self, init: Tensor) -> None:
        self._posed().require_start(init)

    def choice(self) -> Line:
        return chosen(SINGULAR, self)

    def certified(self, value: Tensor) -> Certificate:
        """A certificate from all eigenvalues of `AᵀWA` in float64, or by products."""
        A, weights = widened(self.matrix.detach()), self.weights
        # All three measures are relative; in these units nothing over- or underflows.
        A = A / frobenius(A)
        if weights is not None:
            weights = widened(weights.detach())
            most = weights.amax(-1, keepdim=True)
            weights = weights / torch.where(most > 0, most, 1)
        gram = weighted_gram(A, weights)
        return PrincipalEigenvectors(gram, self.k, self.largest).certified(value)

    def force(self, u: Tensor, *inputs: Any) -> Tensor:
        """Minus the gradient of `∓½‖√W Au‖²`: `AᴴWAu`, or minus that for the smallest ones.

        At a singular vector it is `±σ²u`.
        """
        A, weights = inputs[0], (*inputs[1:], None)[0]
        if isinstance(A, Operator):
            image = A.transposed(times(weights, A(u)))
        else:
            image = matvec(A.mH, times(weights, matvec(A, u)))
        return image if self.largest else -image

    def curvature(self, rows: Tensor) -> Tensor:
        product = normal_product(self.A, self.weights, rows)
        return -product if self.largest else product

    # Differentiation.

    def gradients(self, given: Reverse) -> tuple[Tensor | None, ...]:
        given = given.as_rows() if self.k is None else given
        conditions: Any = SingularConditions(given, self.largest, self.single)
        return given.rule.pullback(conditions, given.v, given.needs)  # pyright: ignore

    def newton(
        self, fixed: Any, found: Outcome, solve: Callable[..., Outcome]
    ) -> Callable[[Tensor], Tensor]:
        return singular_newton(self.tensors, fixed.tensors, found, self.single)

    def multiplier_at(self, u: Tensor) -> Tensor:
        A, weights = self.matrix, self.weights
        images = u @ A.mT
        squares = dot(weighted(images, weights), images)
        size = frobenius(A.detach()).squeeze((-2, -1)).unsqueeze(-1)
        if weights is not None:
            size = size * weights.detach().amax(-1, keepdim=True).sqrt()
        return root_of(squares, accuracy(u.dtype, self.single) * size)

    def require_weights(self) -> None:
        """No weight is negative; this looks at every number."""
        if self.weights is None:
            return
        weights = ranks.whole(self.weights.detach())
        if weights.numel() > 0 and not float(weights.amin()) >= 0:
            errors.require_finite(weights=(weights, 1))
            raise ValueError(
                f"weights must be zero or positive; got {float(weights.amin()):.6g} in "
                f"{int((weights < 0).sum())} of {weights.numel()} numbers; clamp them, or pass "
                "the squares of factors of the rows"
            )

    def solved_by(self, solver: Solver, init: Tensor | None, report: bool) -> Outcome:
        problem, solver = self._alone(solver)
        outcome = problem._searched(solver, report)
        if problem is self:
            return outcome
        rows, values = outcome.value, outcome.multiplier
        if rows.shape[-2] == self.width:
            return outcome
        # One vector of a pair gives the other.
        pairs, values = paired_rows(complex_rows(rows)), values.repeat_interleave(2, -1)
        return outcome._replace(value=pairs, multiplier=values)

    def _alone(self, solver: Solver) -> tuple[Any, Solver]:
        """The problem of which vectors are found, and the solver that does it."""
        if self.copies == 1:
            return self, solver
        if self.width > 2:
            # Kernels would mix the vectors of equal singular values.
            return self, _SVD if isinstance(solver, Compiled) else solver
        return self.changed(k=1), solver

    def course(self, solver: Solver) -> Course:
        problem, solver = self._alone(solver)
        return solver.course(problem)

    def may_keep(self, solver: Solver) -> tuple[type[Kept], ...]:
        problem, solver = self._alone(solver)
        return solver.may_keep(problem)

    def _searched(self, solver: Solver, report: bool) -> Outcome:
        self.require_weights()
        A = self.matrix
        try:
            outcome = solver.solve(self, report=report)
        except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
            self._blame()
            raise
        low, high = square_range(A.dtype)
        least, most = outcome.multiplier[..., 0].aminmax()
        usual = low < float(least) and float(most) < high
        if not usual:
            if not math.isfinite(float(most) - float(least)):
                self._blame()
            # A singular value of zero does not tell the size of the matrix.
            size = torch.linalg.vector_norm(A, math.inf, (-2, -1))
            if not (float(size.amin()) > low and float(size.amax()) < high):
                blame_range(A)
        return outcome

    def _blame(self) -> None:
        """Raise an error that explains a result that is not finite, if the inputs cause it."""
        if self.weights is not None:
            errors.require_finite(weights=(self.weights, 1))
        blame_range(self.matrix)


def coordinates(problem: PrincipalSingularVectors) -> tuple[list[Reduction], Any]:
    """The steps to a problem that solvers take, and this problem without its tensors."""
    k, steps = problem.width, []
    if problem.operator is not None:
        more, bare = coordinates_of_eigenvectors(problem.squares())
        return [Squares(problem.k is None, problem.largest), *more], bare
    bare = problem.bare().changed(k=k, descending=True)
    if problem.dtype.is_complex:
        steps.append(EmbeddedVectors(k, averaged=False))
        bare = bare.changed(k=2 * k, copies=2)
    return steps, bare


def way_of_singular_vectors(
    problem: PrincipalSingularVectors, solver: Solver, gradient: Gradient, init: Tensor | None
) -> Recipe:
    """The recipe for right singular vectors by solvers."""
    if problem.operator is not None:
        problem.require_weights()
        recipe = way_of_eigenvectors(problem.squares(), solver, gradient, init)
        return recipe._replace(steps=(Squares(problem.k is None, problem.largest), *recipe.steps))
    return Recipe(*with_signs(problem, *coordinates(problem), solver, gradient))


def with_signs(
    problem: Any, steps: list[Reduction], bare: Any, solver: Solver, gradient: Gradient
) -> tuple[tuple[Reduction, ...], Direct]:
    """The chain with order, signs and precision around changes of coordinates."""
    reference, single = problem.reference, problem.k is None
    block = isinstance(reference, Tensor) and problem.has_columns(reference)
    sign = Sign(single, block, True, reference is not None)
    dtype = problem.dtype
    short: list[Reduction] = []
    if dtype.to_real() != torch.float64:
        # In float64 the square of a float32 matrix keeps all its digits.
        computed = working_dtype(dtype, problem.device)
        short.append(Precision(dtype, computed))
        bare = bare.changed(single=problem.single or computed.to_real() == torch.float64)
    # Signs are chosen with all digits that are computed.
    chain = [*short, sign, End(0, problem.flipped, single, signed=True), *steps]
    return tuple(chain), Direct(bare, solver, gradient)


def short_way_of_singular_vectors(
    posed: PrincipalSingularVectors, init: Tensor | None, place: Place | None
) -> Recipe | None:
    """The recipe for right singular vectors by kernels, or by a straight-line program."""
    if place is not None:
        found = _way_on_device(posed, place.device, launched=True)
        found = found or on_host(short_way_of_singular_vectors, posed, init, place)
        return found or _way_on_device(posed, place.device, launched=False)
    A, weights, k = posed.matrix, posed.weights, posed.k
    dtype = A.dtype
    names = ("A",) if weights is None else ("A", "weights")
    if A.numel() == 0 or (weights is not None and weights.shape != A.shape[:-1]):
        return None
    # Only numbers that float32 holds have a Gram matrix that kernels may work on.
    single = dtype in (*HALF, torch.float32, torch.complex64)
    if single and not is_compiled_shape(k, A):
        return None
    ends = signs_of(posed)
    if k is None and not (posed.largest or dtype.is_complex) and is_alone(A.shape):
        alone = _way_of_null_vector(posed, ends)
        if alone is not None:
            return alone
    double = torch.complex128 if dtype.is_complex else torch.float64
    steps: list[Reduction] = [Precision(dtype, double)] if single else []
    steps += ends
    if posed.flipped:
        steps.append(End(0, True, False))
    problem = posed.bare().changed(single=single)
    common = functools.partial(_solve_commonly, k=k, largest=posed.largest)
    complexes = common if dtype.is_complex else None
    return Recipe(tuple(steps), Executor(problem, A.shape, double, names, complexes))


def _way_on_device(
    posed: PrincipalSingularVectors, device: torch.device, launched: bool
) -> Recipe | None:
    """The recipe by one launch of a kernel, or by a straight-line program."""
    A, weights, k = posed.matrix, posed.weights, posed.k
    names = ("A",) if weights is None else ("A", "weights")
    if A.numel() == 0 or (weights is not None and weights.shape != A.shape[:-1]):
        return None
    steps, single = doubled(A.dtype, device)
    if launched:  # in which AᵀA has all digits of float32
        steps = of_short(A.dtype)
        dtype = torch.float32 if steps else A.dtype
        if dtype != torch.float32 or not takes(A.shape, dtype, device):
            return None
    signs = signs_of(posed)
    steps += signs
    if posed.flipped:
        steps.append(End(0, True, False))
    if launched:
        return Recipe(tuple(steps), LaunchedNullVectors(posed.bare(), names))
    common = functools.partial(_solve_commonly, k=k, largest=posed.largest)
    bare, complexes = posed.bare().changed(single=single), common if A.is_complex() else None
    # What the common path finds again has phases of its own, which these have to be.
    signed = A.is_complex() or not signs
    return Recipe(tuple(steps), StraightSingularVectors(bare, names, signed, complexes))


def doubled(dtype: torch.dtype, device: torch.device) -> tuple[list[Reduction], bool]:
    """The step to a dtype in which squares keep all digits, and whether there is one."""
    single = dtype.to_real() != torch.float64
    computed = working_dtype(dtype, device)
    steps: list[Reduction] = [Precision(dtype, computed)] if computed != dtype else []
    return steps, single and computed.to_real() == torch.float64


def signs_of(posed: Any) -> list[Reduction]:
    """The step that chooses signs by a reference, if there is one."""
    reference = posed.reference
    if reference is None:
        return []
    block = isinstance(reference, Tensor) and posed.dims_of(reference) == 2
    return [Sign(posed.k is None, block, unit=True)]


def _solve_commonly(tensors: Tensors, k: int | None, largest: bool) -> Found:
    """Vectors and values by solvers, the requested end first."""
    problem = PrincipalSingularVectors(tensors["A"], tensors.get("weights"), k, largest)
    found = run(problem, report=False)
    return found.value, found.multiplier


def _way_of_null_vector(posed: PrincipalSingularVectors, ends: list[Reduction]) -> Recipe | None:
    """The recipe for one vector as least squares, where there are kernels for that."""
    A, weights = posed.matrix, posed.weights
    short = of_short(A.dtype)
    dtype = torch.float32 if short else A.dtype
    if dtype == torch.float32 and weights is None:
        return Recipe((*short, *ends, NullVector()), CompiledLeastSquares(UNIT))
    # The kernels for Gram matrices of float32 solve several matrices at a time.
    if dtype == torch.float32 and A.shape[:-2].numel() > DECOMPOSED_ALONE:
        return None
    A, weights = A.to(dtype), None if weights is None else weights.to(dtype)
    b = A.new_zeros(A.shape[:-1])
    found = short_way_of_least_squares(SphereLeastSquares(A, b, weights=weights), None, None)
    return found and found._replace(steps=(*short, *ends, NullVector(), *found.steps))


def is_alone(shape: torch.Size) -> bool:
    """Whether matrices of this shape have one null vector at most, unless their rank is lower."""
    m, n = shape[-2:]
    return m >= n - 1 and are_reduced_columns(m, n)


def is_compiled_shape(k: int | None, A: Tensor) -> bool:
    """Whether kernels find k right singular vectors faster than a decomposition."""
    n, count = A.shape[-1], A.shape[:-2].numel()
    # The system of the backward pass has kernels for real matrices.
    few = n <= COMPILED_ROWS and are_few(k or 1, n) and not A.is_complex()
    return native.available and (few or is_reduced_whole(n, count))


_SVD = SVD()
register(
    PrincipalSingularVectors,
    way_of_singular_vectors,
    coordinates,
    short_way_of_singular_vectors,
)
