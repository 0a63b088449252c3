"""The problem of principal eigenvectors: `max tr(uᵀAu)` subject to `uᵀu = I`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from pmaf.linalg import sphere
from pmaf.linalg.decompositions import eigenvalues
from pmaf.linalg.products import norm, symmetric_part
from pmaf.linalg.roundings import blame_range, require_range
from pmaf.linalg.symmetry import look_at_symmetry
from pmaf.operators.base import Operator
from pmaf.operators.matrix import Matrix
from pmaf.problem import Problem, in_dtype
from pmaf.runtime import ranks
from pmaf.runtime.log import took
from pmaf.runtime.modes import plain
from pmaf.runtime.ranks import whole
from pmaf.solution import Certificate, Solution
from pmaf.solvers import Reduction, Solver
from pmaf.solvers.auto import DENSE, best_eigenvectors
from pmaf.solvers.base import Eigenvectors, Outcome
from pmaf.tangent.complement import COMPILED_ROWS
from pmaf.tangent.kept import Decomposition, Kept, Nothing, Tridiagonal


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

    inputs: ClassVar[dict[str, int]] = {"A": 2}
    compared: ClassVar[bool] = False
    form: ClassVar[type] = Eigenvectors
    degree: ClassVar[int | None] = 1
    copies: ClassVar[int] = 1  # how often each eigenvalue occurs by construction

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
        # What the library poses itself, it has made symmetric, or looked at before.
        given = type(self) is PrincipalEigenvectors and self.symmetric
        if given and isinstance(A, (Tensor, Matrix)):
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
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
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

    def best_solver(self) -> Solver:
        return best_eigenvectors(self)

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
        free = isinstance(kept, Nothing)
        return free and small and self.symmetric and native.takes_eigenvectors(A)

    def first_gradients(
        self,
        tensors: tuple[Tensor, ...],
        y: Tensor,
        kept: Kept,
        v: Tensor | None,
        d_multiplier: Tensor | None,
        needs: Sequence[bool],
    ) -> native.Gradients:
        took("tangent: compiled")
        k = (self.k or 1) + self.skip
        reduction = kept.numbers if isinstance(kept, Tridiagonal) else None
        return native.eigenvector_gradient(
            tensors[0], y, k, v, d_multiplier, self.largest, reduction
        )

    def gradients(self, given: Reverse) -> tuple[Tensor | None, ...]:
        given = given.as_rows() if self.single else given
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
        if self.single:
            rows, values = found.value.unsqueeze(-2), found.multiplier.unsqueeze(-1)
            found = found._replace(value=rows, multiplier=values)
        newton = symmetric_newton if self.symmetric else general_newton
        step = newton(self.matrix, fixed.matrix, found)
        return step if not self.single else lambda u: step(u.unsqueeze(-2)).squeeze(-2)

    def multiplier_at(self, u: Tensor) -> Tensor:
        rows = u.unsqueeze(-2) if self.single else u
        image = rows @ (symmetric_part(self.matrix) if self.symmetric else self.matrix.mT)
        values = (image * rows).sum(-1)
        return values.squeeze(-1) if self.single else values

    def gradients_by_products(self, given: Incoming) -> Sequence[Tensor | None]:
        return eigenvector_gradients(self, given)

    def reduced(
        self, init: Tensor | None, solver: Solver
    ) -> tuple[Any, Tensor | None, Callable[..., Solution]]:
        problem, init, _ = super().reduced(self.columns(init), solver)
        self.require_reference()
        if not (self.largest and self.descending and self.reference is None):
            # The smallest eigenvalues are the largest of −A, in the opposite order.
            A = problem.A if self.largest else -problem.A
            problem = self.changed(A=A, largest=True, descending=True, reference=None)
        return problem, init, lambda outcome: in_dtype(self.dtype, self.present(outcome))

    def columns(self, vectors: Tensor | None) -> Any:
        """A start or a solution as columns, `(*, n, k)`, or `(*, n, 1)`."""
        if vectors is None or self.dims_of(vectors) == 2:
            return vectors
        return vectors.unsqueeze(-1)

    def require_reference(self) -> None:
        """Raise an error if the reference for an operator is not finite, on all ranks or none."""
        if isinstance(self.A, Operator) and isinstance(self.reference, Tensor):
            errors.require_finite(reference=(ranks.whole(self.reference), 1))

    def solved_by(self, solver: Solver, init: Tensor | None, report: bool) -> Outcome:
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
        kept = outcome.kept
        total = (kept.values if isinstance(kept, Decomposition) else outcome.multiplier).sum()
        if not math.isfinite(float(total.detach() if total.requires_grad else total)):
            blame_range(A)
        return outcome

    def finished(self, outcome: Outcome) -> Outcome:
        if not self.single:
            return outcome
        # The sign is chosen and the dimension dropped here, where autograd does not record: that
        # saves two nodes of the graph.
        y = outcome.value.squeeze(-2)
        value = y * sphere.signs(self.directions(y)).unsqueeze(-1)
        return outcome._replace(value=value, multiplier=outcome.multiplier.squeeze(-1).clone())

    def present(self, outcome: Outcome) -> Solution:
        """An outcome for `A`, or `−A` if the smallest are asked for, as the user sees it."""
        vectors, values, residual, gap, iterations, converged = outcome.tensors
        # New tensors, not views: a user may write into what a layer returns.
        if self.skip:
            vectors, values = vectors[..., self.skip :, :], values[..., self.skip :]
        if self.k is not None:
            signs = self.signs(vectors, self.flipped)
            if self.flipped:
                values, vectors, signs = values.flip(-1), vectors.flip(-2), signs.flip(-1)
            vectors = vectors.mT * signs.unsqueeze(-2)
            values = values.clone()
        elif self.skip:
            signs = self.signs(vectors, False)
            vectors, values = (vectors * signs.unsqueeze(-1)).squeeze(-2), values.squeeze(-1)
        elif self.reference is not None:
            vectors = vectors * self.signs(vectors.unsqueeze(-2), False)
        values = values if self.largest else -values
        reported = residual, gap, iterations, converged
        return Solution(vectors, values, *reported, method=outcome.method)

    @property
    def flipped(self) -> bool:
        """Whether the requested order is the reverse of that of the solvers."""
        return self.descending != self.largest and self.count > 1

    def signs(self, rows: Tensor, flipped: bool) -> Tensor:
        """The sign for each row, `(*, k)`, of vectors in the requested order or its reverse."""
        return sphere.signs(self.directions(rows), self.reference_rows(rows, flipped))

    def reference_rows(self, like: Tensor, flipped: bool) -> Any:
        """The reference; a tensor as rows of the dtype of `like`, in this order or its reverse."""
        reference = self.reference
        if not isinstance(reference, Tensor):
            return reference
        reference = whole(reference.detach()).to(like)
        if not self.has_columns(reference):
            return reference.unsqueeze(-2)
        return reference.mT.flip(-2) if flipped else reference.mT

    def directions(self, rows: Tensor) -> Tensor:
        """Unit vectors in the directions of rows that a solver has found."""
        return rows

    def hints(self) -> dict[str, tuple[Tensor | None, int]]:
        if not isinstance(self.reference, Tensor):
            return {}
        return {"reference": (self.reference, self.dims_of(self.reference))}

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


def requested_first(descending: bool | None, largest: bool) -> bool:
    """Whether values descend; None has the requested end first."""
    return largest if descending is None else descending


# The kernels factor the matrix once for each vector.
COMPILED_VECTORS = 32


@functools.lru_cache(maxsize=64)
def unposed(kind: type[PrincipalEigenvectors], k: int | None, largest: bool) -> Any:
    """The problem of a default call, without its matrices."""
    options = {"k": k, "largest": largest, "symmetric": True, "descending": largest, "skip": 0}
    return kind.read(options)
