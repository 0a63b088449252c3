"""The problem of right singular vectors, at either end of the spectrum."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pmaf import errors, native
from pmaf.executors.singular import CompiledSingularVectors, DecomposedSingularVectors
from pmaf.gradients import Gradient
from pmaf.gradients.base import Reverse
from pmaf.gradients.singular import SingularConditions, singular_newton
from pmaf.layers.eigenvectors import PrincipalEigenvectors
from pmaf.linalg.products import broadcast, dot, frobenius
from pmaf.linalg.roundings import HALF, blame_range, rank_tolerance, square_range
from pmaf.linalg.singular import accuracy, weighted, weighted_gram
from pmaf.operators import Gram, Matrix, Operator
from pmaf.problem import Problem, in_dtype
from pmaf.recipe import Recipe
from pmaf.reductions.base import Reduction, Tensors
from pmaf.reductions.end import End, Sign
from pmaf.reductions.phases import phases
from pmaf.reductions.precision import Precision
from pmaf.runtime import ranks
from pmaf.solution import Certificate, Solution
from pmaf.solvers import Solver
from pmaf.solvers.auto import best_singular
from pmaf.solvers.base import Outcome, SingularVectors
from pmaf.solvers.reduction import are_few
from pmaf.tangent.complement import COMPILED_ROWS


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

    inputs: ClassVar[dict[str, int]] = {"A": 2, "weights": 1}
    compared: ClassVar[bool] = False
    form: ClassVar[type] = SingularVectors
    degree: ClassVar[int | None] = 1
    copies: ClassVar[int] = 1  # how often each singular value occurs by construction

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

    @property
    def flipped(self) -> bool:
        """Whether the requested order is the reverse of that of the solvers."""
        return self._posed().flipped

    def signs(self, rows: Tensor) -> Tensor:
        """The sign or phase for each row `(*, k, n)`, in the order of the solution, `(*, k)`."""
        if rows.is_complex():
            return phases(rows, self._posed().reference_rows(rows, False)).squeeze(-1)
        return self._posed().signs(rows, False)

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
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (*self.batch_shape, self.n, *self.vectors), (*self.batch_shape, *self.vectors)

    def hints(self) -> dict[str, tuple[Tensor | None, int]]:
        return self._posed().hints()

    def dims_of(self, vectors: Tensor | None) -> int:
        return self._posed().dims_of(vectors)

    def require_start(self, init: Tensor) -> None:
        self._posed().require_start(init)

    def best_solver(self) -> Solver:
        return best_singular(self)

    def certified(self, value: Tensor) -> Certificate:
        """A certificate from all eigenvalues of `AᵀWA` in float64, or by products."""
        if isinstance(self.A, Operator):
            return self._by_products().certify(value)
        A, weights = self.matrix.detach().double(), self.weights
        # All three measures are relative; in these units nothing over- or underflows.
        A = A / frobenius(A)
        if weights is not None:
            weights = weights.detach().double()
            most = weights.amax(-1, keepdim=True)
            weights = weights / torch.where(most > 0, most, 1)
        gram = weighted_gram(A, weights)
        return PrincipalEigenvectors(gram, self.k, self.largest).certify(value)

    # Differentiation.

    def gradients(self, given: Reverse) -> tuple[Tensor | None, ...]:
        given = given.as_rows() if self.k is None else given
        conditions: Any = SingularConditions(given, self.largest, self.single)
        return given.rule.pullback(conditions, given.v, given.needs)  # pyright: ignore

    def newton(
        self, fixed: Any, found: Outcome, solve: Callable[..., Outcome]
    ) -> Callable[[Tensor], Tensor]:
        if self.k is None:
            found = found._replace(multiplier=found.multiplier.unsqueeze(-1))
        step = singular_newton(self.tensors, fixed.tensors, found, self.single)
        return step if self.k is not None else lambda u: step(u.unsqueeze(-2)).squeeze(-2)

    def multiplier_at(self, u: Tensor) -> Tensor:
        A, weights = self.matrix, self.weights
        rows = u.unsqueeze(-2) if self.k is None else u
        images = rows @ A.mT
        squares = dot(weighted(images, weights), images)
        size = frobenius(A.detach()).squeeze((-2, -1)).unsqueeze(-1)
        if weights is not None:
            size = size * weights.detach().amax(-1, keepdim=True).sqrt()
        values = _root(squares, accuracy(u.dtype, self.single) * size)
        return values.squeeze(-1) if self.k is None else values

    # From the problem to its solution.

    def instead(self, solver: Solver, gradient: Gradient, init: Tensor | None) -> Any:
        if self.operator is None and not getattr(solver, "matrix_free", False):
            return None
        self._require_weights()
        return self._by_products(), init, self._of_squares

    def _of_squares(self, found: Solution) -> Solution:
        """The solution, given that for `AᵀWA`."""
        squares, gap = found.multiplier, found.gap
        top = squares.detach().amax(-1, keepdim=True) if self.k is not None else squares.detach()
        values = _root(squares, rank_tolerance(squares.dtype) * top.clamp_min(0).sqrt())
        edge = values.detach()
        if self.k is not None:
            edge = edge.amin(-1) if self.largest else edge.amax(-1)
        # From a difference of squares to one of singular values.
        beyond = edge.square() - gap if self.largest else edge.square() + gap
        gap = (edge - beyond.clamp_min(0).sqrt()).abs()
        return replace(found, multiplier=values, gap=gap)

    def _by_products(self) -> PrincipalEigenvectors:
        A = self.A if isinstance(self.A, Operator) else Matrix(self.A)
        gram = Gram(A, weights=self.weights)
        return PrincipalEigenvectors(
            gram, self.k, self.largest, True, self.descending, self.reference
        )

    def _require_weights(self) -> None:
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

    def reduced(
        self, init: Tensor | None, solver: Solver
    ) -> tuple[Any, Tensor | None, Callable[..., Solution]]:
        problem, single = self, self.single
        # In float64 the square of a float32 matrix keeps all its digits.
        if self.dtype != torch.float64:
            single = self.device.type != "mps"  # has no float64
            wide = torch.float64 if single else torch.float32
            problem = self.with_tensors(*(x.to(wide) for x in self.tensors))
        problem = problem.changed(reference=None, descending=True, single=single)
        return problem, None, lambda outcome: in_dtype(self.dtype, self.present(outcome))

    def solved_by(self, solver: Solver, init: Tensor | None, report: bool) -> Outcome:
        self._require_weights()
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

    def divided(self, unit: Tensor) -> Any:
        # The units may be in float64, and the numbers remain those that float32 holds.
        A, weights = self.matrix / unit[..., None, None], self.weights
        weights = None if weights is None else weights.to(unit.dtype)
        single = self.single or A.dtype != self.dtype
        return self.changed(A=A, weights=weights, single=single)

    def finished(self, outcome: Outcome) -> Outcome:
        return _unposed(self.k, self.largest).finished(outcome)

    def present(self, outcome: Outcome) -> Solution:
        """An outcome as the user sees it."""
        # The multipliers of the smallest eigenvalues are those of the negative matrix.
        if not self.largest:
            outcome = outcome._replace(multiplier=-outcome.multiplier)
        dtype = self.dtype
        found = self._posed().present(outcome)
        return replace(found, residual=found.residual.to(dtype), gap=found.gap.to(dtype))


def way_of_singular_vectors(
    tensors: Tensors, k: int | None, largest: bool, descending: bool | None
) -> Recipe | None:
    """The recipe for right singular vectors that compiled kernels find, without numbers."""
    A, weights, reference, init = (tensors[x] for x in ("A", "weights", "reference", "init"))
    posed = PrincipalSingularVectors(A, weights, k, largest, descending, reference)
    if init is not None:
        posed.require_start(init)
    n, dtype = posed.n, A.dtype
    names = ("A",) if weights is None else ("A", "weights")
    if A.numel() == 0 or (weights is not None and weights.shape != A.shape[:-1]):
        return None
    # Only numbers that float32 holds have a Gram matrix that kernels may work on.
    single = dtype in (*HALF, torch.float32)
    if dtype.is_complex or (single and not is_compiled_shape(k, n)):
        return None
    steps: list[Reduction] = [Precision(dtype, torch.float64)] if single else []
    if reference is not None:
        block = isinstance(reference, Tensor) and posed.dims_of(reference) == 2
        steps.append(Sign(k is None, block, unit=True))
    if posed.flipped:
        steps.append(End(0, True, False))
    problem = PrincipalSingularVectors.read({"k": k, "largest": largest, "single": single})
    executor = CompiledSingularVectors if single else DecomposedSingularVectors
    return Recipe(tuple(steps), executor(problem, A.shape, names))


def is_compiled_shape(k: int | None, n: int) -> bool:
    """Whether kernels find k right singular vectors faster than a decomposition."""
    return native.available and n <= COMPILED_ROWS and are_few(k or 1, n)


def _unposed(k: int | None, largest: bool) -> Any:
    """The problem of eigenvectors without its matrix."""
    options = {"k": k, "largest": largest, "symmetric": True, "descending": True}
    return PrincipalEigenvectors.read(options)


def _root(squares: Tensor, rounding: Tensor) -> Tensor:
    """The square root, whose derivative is zero where it is not above rounding."""
    zero = squares.detach() <= rounding.square()
    root = torch.where(zero, 1, squares).sqrt()
    return torch.where(zero, squares.detach().clamp_min(0).sqrt(), root)
