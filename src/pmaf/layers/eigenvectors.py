"""The problem of principal eigenvectors: `max tr(uᵀAu)` subject to `uᵀu = I`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pmaf import errors, native
from pmaf.autograd.span import span_product
from pmaf.certificate import certify_eigenvectors, certify_eigenvectors_by_products
from pmaf.gradients.base import Reverse
from pmaf.gradients.by_products import Incoming, eigenvector_gradients
from pmaf.gradients.eigenvectors import (
    EigenConditions,
    general_newton,
    symmetric_newton,
)
from pmaf.linalg.decompositions import eigenvalues
from pmaf.linalg.embedding import (
    complex_rows,
    independent,
    means,
    paired_rows,
    real_matrix,
    real_rows,
)
from pmaf.linalg.products import broadcast, matvec, norm, symmetric_part
from pmaf.linalg.roundings import blame_range, require_range
from pmaf.linalg.symmetry import look_at_symmetry
from pmaf.operators.base import Operator
from pmaf.operators.diagonal import Diagonal
from pmaf.operators.matrix import Matrix
from pmaf.problem import Problem
from pmaf.runtime import ranks
from pmaf.runtime.log import took
from pmaf.runtime.modes import plain
from pmaf.solution import Certificate
from pmaf.solvers import Adaptive, Krylov, Reduction, Solver
from pmaf.solvers.auto import DENSE, EIGENVECTORS, Line, chosen
from pmaf.solvers.base import Course, Eigenvectors, Outcome
from pmaf.tangent.complement import COMPILED_ROWS
from pmaf.tangent.kept import NOTHING, Kept


class Eigenpairs(NamedTuple):
    """Eigenvalues and eigenvectors: `(*,)` and `(*, n)`, or `(*, k)` and `(*, n, k)`.

    >>> import torch, pmaf
    >>> pmaf.ied(torch.diag(torch.tensor([3.0, 1.0]))).values
    tensor(3.)
    """

    values: Tensor
    vectors: Tensor

    def projector(self) -> Tensor:
        """`VVᴴ`, `(*, n, n)`, the projector onto the span of the vectors; the density matrix of a
        pair.

        It depends on the span alone. Its gradient is exact wherever the span is apart from the
        other eigenvectors, also where eigenvalues inside the group repeat, or nearly repeat, and
        the vectors themselves have no derivative, or a large one. Forward mode and second
        derivatives lose digits where they nearly repeat, and warn; `pmaf.spectral(A, "one", k)` is
        exact there, too.

        >>> import torch, pmaf
        >>> pmaf.ied(torch.diag(torch.tensor([3.0, 3.0, 1.0])), k=2).projector()
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 0.]])
        """
        V = self.vectors if self._several else self.vectors.unsqueeze(-1)
        return span_product(self.values if self._several else self.values.unsqueeze(-1), V)

    @property
    def _several(self) -> bool:
        """Whether the vectors are columns `(*, n, k)`, and not one vector `(*, n)` an entry."""
        values, vectors = self.values.shape, self.vectors.shape
        if values != vectors[:-1]:
            return True
        # A batch of n single vectors has the shape of n columns. Layers return columns whose
        # entries are next to each other in memory.
        columns = len(vectors) > 1 and vectors[-2] == vectors[-1] == values[-1]
        return columns and self.vectors.stride(-2) == 1


@dataclass(frozen=True, eq=False)
class PrincipalEigenvectors(Problem):
    """The problem `max tr(uᵀAu)` subject to `uᵀu = I`, one per batch entry.

    Args:
        A: `(*, n, n)`, a tensor or an operator. With `symmetric=True` its symmetric part is
            used.
        k: how many eigenvectors; None for one, without a dimension for it.
        largest: the largest eigenvalues, or the smallest.
        symmetric: False for the dominant real eigenvalue of a general matrix, the largest
            in modulus; only for one vector.
        descending: order of the eigenvalues if there are several; None for the requested end
            first.
        reference: `(*, n)` or `(*, n, k)`, towards which the sign of each eigenvector is chosen;
            all ones unless given. Pass the previous solution to keep signs through training. Or
            an integer, for that component to be positive, or `"largest"`, for the component of
            largest modulus to be.
        skip: how many eigenvectors of the requested end to leave out, such as the constant
            vector of a Laplacian.
        M: `(*, n, n)`, symmetric positive definite, for pairs `Ay = λMy` with `yᵀMy = 1`: a
            tensor or an operator; None for the identity.
        copies: set by the library: how often each eigenvalue occurs by construction, twice in the
            embedding of a complex matrix.

    >>> import torch, pmaf
    >>> A = torch.diag(torch.tensor([3.0, 2.5, 1.0]))
    >>> pmaf.solve(pmaf.PrincipalEigenvectors(A, k=2)).multiplier
    tensor([3.0000, 2.5000])
    """

    A: Tensor | Operator
    k: int | None = None
    largest: bool = True
    symmetric: bool = True  # pyright: ignore[reportIncompatibleVariableOverride]
    descending: bool | None = None
    reference: Tensor | int | str | None = None
    skip: int = 0
    M: Any = None

    copies: int = field(default=1, repr=False)

    inputs: ClassVar[dict[str, int]] = {"A": 2}
    options = ("k", "largest", "symmetric", "descending", "skip")
    compared: ClassVar[bool] = False
    form: ClassVar[type] = Eigenvectors
    degree: ClassVar[int | None] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "descending", requested_first(self.descending, self.largest))
        A, k = self.require_matrix("A", "n, n"), self.k
        if A.shape[-1] != A.shape[-2]:
            raise ValueError(
                f"A must be square, of shape (*, n, n); got {errors.shape_of(A)}"
                " (for the principal directions of a data matrix X, pass pmaf.operators.Gram(X))"
            )
        errors.require_count("k", k)
        if k is not None and not 1 <= k <= A.shape[-1]:
            raise ValueError(f"k must lie between 1 and n = {A.shape[-1]}; got {k}")
        self._require_skip()
        if not self.symmetric and (k is not None and k > 1):
            raise ValueError(
                f"symmetric=False finds the dominant eigenvector only; got k={k}, use k=1 or None"
            )
        if not self.symmetric and A.dtype.is_complex:
            raise ValueError(
                f"symmetric=False finds real eigenvalues of real matrices; got A of {A.dtype}, of "
                "which symmetric=True takes the Hermitian part"
            )
        if not self.symmetric and not self.largest:
            raise ValueError(
                "largest=False needs symmetric=True: the eigenvalues of a general matrix are "
                "ordered by modulus, and the smallest is the dominant one of the inverse"
            )
        # An embedding has been looked at before.
        if self.copies == 1 and self.symmetric and isinstance(A, (Tensor, Matrix)):
            look_at_symmetry(A if isinstance(A, Tensor) else A.A)
        if self.M is not None:
            self._require_metric()
        if isinstance(self.reference, (int, str)):
            errors.require_sign_rule("reference", self.reference, A.shape[-1])
        elif self.reference is not None:
            self._require_reference(self.reference)
            # The reference decides signs, which have no derivative, so its graph is not needed.
            object.__setattr__(self, "reference", self.reference.detach())

    def _require_skip(self) -> None:
        skip, n = self.skip, self.A.shape[-1]
        if isinstance(skip, bool) or not isinstance(skip, int):
            raise TypeError(f"skip must be an integer; got {skip!r}")
        if not 0 <= skip <= n - self.count:
            raise ValueError(
                f"skip must lie between 0 and n - k = {n - self.count}, to leave k = {self.count} "
                f"of n = {n} eigenvectors; got {skip}"
            )
        if skip and not self.symmetric:
            raise ValueError(
                "skip needs symmetric=True: only the dominant eigenvector of a general matrix "
                f"is found; got skip={skip}"
            )

    def _require_metric(self) -> None:
        A = self.A
        errors.require_no_diagonal("M", self.M, self.n)
        M = self.require_matrix("M", "n, n")
        if M.shape[-2:] != A.shape[-2:]:
            raise ValueError(
                f"M must have shape (*, {self.n}, {self.n}) like A; got {errors.shape_of(M)}"
            )
        if not self.symmetric:
            raise ValueError(
                "M needs symmetric=True: of a general matrix A pass the product with the inverse "
                "of M, torch.linalg.solve(M, A), instead of a pair"
            )
        errors.require_alike("M", M, "A", A)
        errors.require_broadcast("A", A.shape[:-2], "M", M.shape[:-2])

    def force(self, u: Tensor, *inputs: Any) -> Tensor:
        """Minus the gradient of `∓½uᴴAu`: `Au`, or `−Au` for the smallest eigenvalues.

        At an eigenvector it is `±λu`, or `±λMu` for a pair. A general matrix has no objective; its
        eigenvectors are where this is along `u`.
        """
        A = inputs[0]
        if isinstance(A, Operator):
            image = A(u)
            if self.symmetric and not A.symmetric:
                image = 0.5 * (image + A.transposed(u))
        else:
            image = matvec(0.5 * (A + A.mH) if self.symmetric else A, u)
        return image if self.largest else -image

    def curvature(self, rows: Tensor) -> Tensor:
        A = self.A
        if isinstance(A, Operator):
            image = A.over_batch(A.matvec, rows)
            if self.symmetric and not A.symmetric:
                image = 0.5 * (image + A.over_batch(A.rmatvec, rows))
        else:
            image = rows @ (0.5 * (A + A.mH) if self.symmetric else A).mT
        return -image if self.largest else image

    @property
    def named(self) -> dict[str, Any]:
        return {"A": self.A, "M": self.M, "reference": self.reference}

    def parts(self) -> dict[str, tuple[Tensor, int]]:
        found: dict[str, tuple[Tensor, int]] = {"A": (self.matrix, 2)}
        if isinstance(self.M, Diagonal):
            found["M"] = self.M.d, 1
        elif isinstance(self.M, Tensor):
            found["M"] = self.M, 2
        if isinstance(self.reference, Tensor):
            found["reference"] = self.reference, self.dims_of(self.reference)
        return found

    @property
    def tensors(self) -> tuple[Any, ...]:
        return (self.A,) if self.M is None else (self.A, self.M)

    @property
    def operator(self) -> Operator | None:
        A, M = self.A, self.M
        if isinstance(A, Operator):
            return A
        # Beside a dense A the entries of M are known or formed, unless they are spread over ranks.
        spread = isinstance(M, Operator) and ranks.mesh_of(*M.tensors) is not None
        return M if spread and not isinstance(M, Diagonal) else None

    @property
    def batch_shape(self) -> torch.Size:
        batch = self.A.shape[:-2]
        return batch if self.M is None else broadcast(batch, self.M.shape[:-2])

    @property
    def count(self) -> int:
        """Number of requested eigenvectors."""
        return 1 if self.k is None else self.k

    @property
    def width(self) -> int:
        """Number of eigenvectors to find, including those that are skipped."""
        return self.count + self.skip

    @property
    def single(self) -> bool:
        """Whether one eigenvector is to be found, without a dimension for it."""
        return self.k is None and not self.skip

    @property
    def vectors(self) -> tuple[int, ...]:
        return () if self.single else (self.width,)

    @property
    def start_dims(self) -> int:
        return 2

    @property
    def has_several(self) -> bool:
        return self.k is not None

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        several = () if self.k is None else (self.k,)
        return (*self.batch_shape, self.n, *several), (*self.batch_shape, *several)

    def operand(self) -> Tensor:
        """The matrix whose eigenvectors are asked for."""
        return symmetric_part(self.matrix) if self.symmetric else self.matrix

    def spectrum(self) -> Tensor:
        """All eigenvalues of the symmetric part, descending, `(*, n)`."""
        return eigenvalues(self.operand().detach()).flip(-1)

    def modulus_gap(self, moduli: Tensor | None = None) -> Tensor:
        """Distance in modulus between the dominant eigenvalue and the next, `(*,)`."""
        known = torch.linalg.eigvals(self.matrix.detach()).abs() if moduli is None else moduli
        if self.n == 1:
            return torch.full_like(known[..., 0], torch.inf)
        first, second = known.topk(2, -1).values.unbind(-1)
        return first - second

    def residual(self, values: Tensor, rows: Tensor) -> Tensor:
        """`max ‖Ay − λy‖/‖A‖` over the vectors, `(*,)`."""
        M, rows = self.operand().detach(), rows.detach()
        size = torch.linalg.matrix_norm(M)
        rest = norm(rows @ M.mT - values.detach().unsqueeze(-1) * rows).amax(-1)
        return rest / torch.where(size == 0, torch.ones_like(size), size)

    def choice(self) -> Line:
        return chosen(EIGENVECTORS, self)

    def certified(self, value: Tensor) -> Certificate:
        """A certificate from all eigenvalues in float64, or by products if `A` is an operator.

        `optimality` is by how much the eigenvalues found exceed the true ones (fall short
        of them, for the smallest), relative to the matrix: zero at best.
        """
        by_products = isinstance(self.A, Operator)
        return (certify_eigenvectors_by_products if by_products else certify_eigenvectors)(
            self, value
        )

    def is_differentiated(
        self, tensors: tuple[Tensor, ...], kept: Kept, d_multiplier: Tensor | None
    ) -> bool:
        (A,) = tensors
        small = A.shape[-1] <= COMPILED_ROWS and self.width <= COMPILED_VECTORS
        return not kept and small and self.symmetric and native.takes_eigenvectors(A)

    def first_gradients(
        self,
        tensors: Sequence[Tensor],
        y: Tensor,
        multiplier: Tensor,
        kept: Kept,
        v: Tensor | None,
        d_multiplier: Tensor | None,
        needs: Sequence[bool],
    ) -> native.Gradients:
        took("tangent: compiled")
        k = (self.k or 1) + self.skip
        return native.eigenvector_gradient(tensors[0], y, k, v, d_multiplier, self.largest)

    def gradients(self, given: Reverse) -> tuple[Tensor | None, ...]:
        given = given.as_rows() if self.single else given
        if given.tensors[0].is_complex():
            return embedded_gradients(self, given)
        (A,), y, state, rule, v, d_multiplier, _ = given
        if not self.largest:  # the largest of −A
            A, state = -A, state._replace(shift=-state.shift)
            d_multiplier = None if d_multiplier is None else -d_multiplier
        conditions = EigenConditions(A, y, state.shift, d_multiplier, self.symmetric, state)
        dA = conditions.gradients(rule, v)
        return (dA if self.largest else -dA,)

    def forward_solver(self, solver: Solver) -> Solver:
        # Newton's steps need all eigenvectors.
        return DENSE if isinstance(solver, Reduction) else solver

    def newton(
        self, fixed: Any, found: Outcome, solve: Callable[..., Outcome]
    ) -> Callable[[Tensor], Tensor]:
        newton = symmetric_newton if self.symmetric else general_newton
        return newton(self.matrix, fixed.matrix, found)

    def multiplier_at(self, u: Tensor) -> Tensor:
        image = u @ (symmetric_part(self.matrix) if self.symmetric else self.matrix.mT)
        return (image * u).sum(-1)

    def gradients_by_products(self, given: Incoming) -> Sequence[Tensor | None]:
        return eigenvector_gradients(self, given)

    def solved_by(self, solver: Solver, init: Tensor | None, report: bool) -> Outcome:
        if self.copies == 1:
            return self._searched(solver, init, report)
        found = self._alone(solver)._searched(solver, init, report)
        return in_pairs(found, self.width)

    def _alone(self, solver: Solver) -> Any:
        """The problem of which a solver finds vectors of an embedding.

        One vector of a pair gives the other. But a search has to find both, to tell the next
        eigenvalue from the second copy of the first.
        """
        search = isinstance(solver, Krylov)
        search = search or (isinstance(solver, Adaptive) and self.n > COMPILED_ROWS)
        return self if self.width > 2 or search else self.changed(k=1, skip=0)

    def course(self, solver: Solver) -> Course:
        return solver.course(self if self.copies == 1 else self._alone(solver))

    def solved_by_products(self, solver: Solver, init: Tensor | None) -> tuple[Outcome, Any]:
        outcome, seen = super().solved_by_products(solver, init)
        return outcome if self.copies == 1 else in_pairs(outcome, self.width), seen

    def _searched(self, solver: Solver, init: Tensor | None, report: bool) -> Outcome:
        A = self.matrix
        # torch's own derivative of a recorded decomposition may over- or underflow.
        recorded = torch.is_grad_enabled() and A.requires_grad
        if recorded or not solver.takes_any_scale(self):
            require_range(A)
        try:
            outcome = solver.solve(self, init=init, report=report)
        except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
            blame_range(A)
            raise
        # LAPACK returns nan for a matrix with infinite entries or overflowing sums. Where a matrix
        # splits into blocks, the requested eigenvalue may be finite beside one that is nan.
        known = outcome.kept.decomposition
        total = (outcome.multiplier if known is None else known.values).sum()
        if not math.isfinite(float(total.detach() if total.requires_grad else total)):
            blame_range(A)
        return outcome

    def columns(self, vectors: Tensor) -> Tensor:
        return vectors.unsqueeze(-1) if self.k is None else vectors

    def found(self, value: Tensor, multiplier: Tensor) -> tuple[Tensor, ...]:
        return value.mT, multiplier

    @property
    def flipped(self) -> bool:
        """Whether the requested order is the reverse of that of the solvers."""
        return self.descending != self.largest and self.count > 1

    def dims_of(self, vectors: Tensor | None) -> int:
        return 2 if vectors is not None and self.has_columns(vectors) else 1

    def require_start(self, init: Tensor) -> None:
        self._require_reference(init, "init")

    def has_columns(self, reference: Tensor) -> bool:
        """Whether a reference, `(*, n, k)` or `(*, n)`, is of the first kind.

        Where both shapes fit, it counts as `(*, n)`, with one vector for each batch entry.
        """
        if self.k is None:
            return False
        batch, shape = self.batch_shape, reference.shape
        fits = all(x in (1, y) for x, y in zip(shape[:-1], batch))
        if reference.dim() == len(batch) + 1 and shape[-1] == self.n and fits:
            return False
        return reference.dim() > 1 and shape[-2:] == (self.n, self.k)

    def _require_reference(self, reference: Tensor, name: str = "reference") -> None:
        errors.require_vector(name, reference, "n", or_complex=True)
        errors.require_alike(name, reference, "A", self.A)
        block = self.has_columns(reference)
        if reference.shape[-2:] != (self.n, self.k) if block else reference.shape[-1] != self.n:
            wanted = f"(*, {self.n})" + ("" if self.k is None else f" or (*, {self.n}, {self.k})")
            raise ValueError(f"{name} must have shape {wanted}; got {errors.shape_of(reference)}")
        lead = reference.shape[:-2] if block else reference.shape[:-1]
        errors.require_fits(name, lead, self.batch_shape)
        if plain(reference):
            errors.require_finite(**{name: (reference, 2 if block else 1)})


def embedded_gradients(problem: Any, given: Reverse) -> tuple[Tensor | None, ...]:
    """Gradients of complex matrices, for vectors as rows that kernels have found.

    Kernels differentiate once. Other derivatives are those of the embedding: the default phase
    makes the sum of `y` real, so that an incoming gradient `v` counts as `v + i·Im(vᴴy)/Σy`, which
    is orthogonal to `iy`.
    """
    y, v, d = given.y, given.v, given.d_multiplier
    posed = problem.changed(k=2 * y.shape[-2], skip=0, copies=2)
    embedding: Any = torch.func.vjp(lambda *x: tuple(map(real_matrix, x)), *given.tensors)
    tensors, pull = embedding
    if v is not None:
        turn = (v.conj() * y).sum(-1, keepdim=True).imag / y.sum(-1, keepdim=True).real
        v = real_rows(v + torch.complex(torch.zeros_like(turn), turn))
        v = torch.stack([v, torch.zeros_like(v)], -2).flatten(-3, -2)
    if d is not None:
        d = torch.stack([d, torch.zeros_like(d)], -1).flatten(-2)
    shift = given.state.shift.repeat_interleave(2, -1)
    found = posed.gradients(
        given._replace(
            tensors=tensors,
            y=paired_rows(y),
            state=given.state._replace(shift=shift, kept=NOTHING),
            v=v,
            d_multiplier=d,
        )
    )
    zeros = (torch.zeros_like(x) if dx is None else dx for x, dx in zip(tensors, found))
    return tuple(None if dx is None else x for x, dx in zip(pull(tuple(zeros)), found))


def in_pairs(outcome: Outcome, width: int) -> Outcome:
    """The outcome of an embedding in pairs of `y` and `iy`, with exactly equal values.

    Args:
        width: how many rows are wanted; there may be one alone, which gives the other.
    """
    rows, (kept, values) = outcome.value, outcome.kept.in_pairs(outcome.multiplier)
    values = values[..., :width]
    if rows.shape[-2] == 1:
        y, values = complex_rows(rows), values[..., :1]
    else:
        y, values = independent(complex_rows(rows), values), means(values)
    return outcome._replace(
        value=paired_rows(y), multiplier=values.repeat_interleave(2, -1), kept=kept
    )


def requested_first(descending: bool | None, largest: bool) -> bool:
    """Whether values descend; None has the requested end first."""
    return largest if descending is None else descending


# The kernels factor the matrix once for each vector.
COMPILED_VECTORS = 32
