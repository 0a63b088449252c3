"""IED, implicit eigen decomposition: `max tr(uᵀAu)` subject to `uᵀu = I`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pmaf import errors
from pmaf.autograd.certify_operator import certify_eigenvectors
from pmaf.autograd.forward_mode import forward_ied, forward_mode, require_forward
from pmaf.autograd.ied_attach import OutOfRangeError, attach, require_range
from pmaf.autograd.ied_lean import solve_lean, suits
from pmaf.autograd.ied_operator import attach_operator
from pmaf.autograd.ied_plain import attach_plain
from pmaf.autograd.ied_search import find_eigenvectors
from pmaf.gradients import Gradient, Implicit, Unroll
from pmaf.linalg import sphere
from pmaf.linalg.products import norm, symmetric_part
from pmaf.operators import Operator, as_operator
from pmaf.operators.base import known_by_products
from pmaf.operators.rows import Rows, joined
from pmaf.runtime.modes import plain
from pmaf.runtime.ranks import Parts, is_spread, whole
from pmaf.solution import Certificate, Solution, announce, require_products_suffice, require_rules
from pmaf.solvers import Adaptive, Auto, Dense, Krylov, Outcome, Solver


class Eigenpairs(NamedTuple):
    """Eigenvalues and eigenvectors: `(*,)` and `(*, n)`, or `(*, k)` and `(*, n, k)`."""

    values: Tensor
    vectors: Tensor


@dataclass(frozen=True, eq=False)
class PrincipalEigenvectors:
    """The problem `max tr(uᵀAu)` subject to `uᵀu = I`, one per batch entry.

    Args:
        A: `(*, n, n)`, a tensor or an operator. With `symmetric=True` its symmetric part is
            used.
        k: how many eigenvectors; None for one, without a dimension for it.
        largest: the largest eigenvalues, or the smallest.
        symmetric: False for the dominant real eigenvalue of a general matrix, the largest
            in modulus; only for one vector.
        descending: order of the eigenvalues if there are several.
        reference: `(*, n)` or `(*, n, k)`, what each eigenvector is turned towards; all
            ones unless given. Pass the previous solution to keep signs through training.
    """

    A: Tensor | Operator
    k: int | None = None
    largest: bool = True
    symmetric: bool = True
    descending: bool = True
    reference: Tensor | None = None

    def __post_init__(self) -> None:
        A, k = self.A, self.k
        if known_by_products(A):
            A = as_operator(A)
            object.__setattr__(self, "A", A)
        else:
            errors.require_matrix("A", A, "n, n")
        if A.shape[-1] != A.shape[-2]:
            raise ValueError(
                f"A must be square, of shape (*, n, n); got {errors.shape_of(A)}"
                " (for the principal directions of a data matrix X, pass pmaf.operators.Gram(X))"
            )
        if k is not None and (isinstance(k, bool) or not isinstance(k, int)):
            raise TypeError(f"k must be None or an integer; got {k!r}")
        if k is not None and not 1 <= k <= A.shape[-1]:
            raise ValueError(f"k must lie between 1 and n = {A.shape[-1]}; got {k}")
        if not self.symmetric and (k is not None and k > 1):
            raise ValueError(
                f"symmetric=False finds the dominant eigenvector only; got k={k}, use k=1 or None"
            )
        if not self.symmetric and not self.largest:
            raise ValueError(
                "largest=False needs symmetric=True: the eigenvalues of a general matrix are "
                "ordered by modulus, and the smallest is the dominant one of the inverse"
            )
        if self.reference is not None:
            self._require_reference(self.reference)
            # It decides signs, which have no derivative; its graph would be kept for nothing.
            object.__setattr__(self, "reference", self.reference.detach())

    @property
    def batch_shape(self) -> torch.Size:
        return self.A.shape[:-2]

    @property
    def n(self) -> int:
        return self.A.shape[-1]

    @property
    def width(self) -> int:
        """Number of eigenvectors."""
        return 1 if self.k is None else self.k

    @property
    def matrix(self) -> Tensor:
        """`A` as a dense tensor, which an operator is not."""
        assert isinstance(self.A, Tensor)
        return self.A

    def with_matrix(self, A: Tensor) -> PrincipalEigenvectors:
        """The same question about other matrices."""
        return PrincipalEigenvectors(A, self.k, symmetric=self.symmetric)

    def operand(self) -> Tensor:
        """The matrix whose eigenvectors are asked for."""
        return symmetric_part(self.matrix) if self.symmetric else self.matrix

    def spectrum(self) -> Tensor:
        """All eigenvalues of the symmetric part, descending, `(*, n)`."""
        return torch.linalg.eigvalsh(self.operand().detach()).flip(-1)

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
        """What `Auto()` stands for."""
        if isinstance(self.A, Operator):
            return _KRYLOV
        # Where a trace has to know in advance whether there will be an eigenbasis, one is
        # worth its price up to some size.
        small = self.symmetric and self.n < _TRACED_FROM
        return _DENSE if small and not plain(self.A) else _ADAPTIVE

    def certify(self, value: Tensor) -> Certificate:
        """Checked against all eigenvalues, in float64.

        `optimality` is by how much the eigenvalues found exceed the true ones (fall short
        of them, for the smallest), relative to the matrix: zero at best.
        """
        shape = (*self.batch_shape, self.n, *(() if self.k is None else (self.k,)))
        if value.shape != shape:
            raise ValueError(
                f"a solution of this problem has shape {shape}; got {errors.shape_of(value)}"
            )
        if isinstance(self.A, Operator):
            return certify_eigenvectors(self, value)
        A = self.A.double()
        # All three measures are relative; in these units nothing over- or underflows.
        unit = A.abs().amax((-2, -1), keepdim=True)
        A = A / torch.where(unit > 0, unit, torch.ones_like(unit))
        A = symmetric_part(A) if self.symmetric else A
        Y = (value.unsqueeze(-1) if self.k is None else value).double()
        size = torch.linalg.matrix_norm(A)
        size = torch.where(size == 0, torch.ones_like(size), size)
        image = A @ Y
        values = (Y * image).sum(-2) / (Y * Y).sum(-2)
        eye = torch.eye(self.width, dtype=A.dtype, device=A.device)
        if self.symmetric:
            exact = torch.linalg.eigvalsh(A)
            exact = exact[..., -self.width :] if self.largest else exact[..., : self.width]
            surplus = values.sort(-1).values - exact
            surplus = surplus if self.largest else -surplus
        else:
            surplus = values.abs() - torch.linalg.eigvals(A).abs().amax(-1, keepdim=True)
        return Certificate(
            feasibility=(Y.mT @ Y - eye).abs().amax((-2, -1)),
            stationarity=torch.linalg.vector_norm(image - Y * values.unsqueeze(-2), dim=-2).amax(-1)
            / size,
            optimality=surplus.amin(-1) / size,
        )

    def run(
        self, solver: Solver, gradient: Gradient, *, init: Tensor | None, report: bool, throw: bool
    ) -> Solution:
        require_rules(self, solver, gradient)
        if init is not None:
            self._require_reference(init, "init")
            init = init.detach()  # the solution does not depend on where the search began
        if isinstance(self.A, Operator):
            run: Any = torch.compiler.disable(self._run_operator)
            return run(self.A, solver.resolve(self), gradient, init, throw)
        if is_spread(self.A):
            return self._run_parts(self.A, solver, gradient, init, report, throw)
        A, dtype = self.A, self.A.dtype
        if 0 in self.batch_shape:
            return self._empty()
        if init is not None:
            init = init if self._is_block(init) else init.unsqueeze(-1)
        if dtype in (torch.float16, torch.bfloat16):
            A, init = A.float(), None if init is None else init.float()
        # The smallest eigenvalues are the largest of −A, in the opposite order.
        A = A if self.largest else -A
        try:
            return self._run_dense(A, solver, gradient, init, report, throw)
        except OutOfRangeError as found:
            return self._run_in_units(found.unit, solver, gradient, init, report, throw)

    def _run_in_units(
        self,
        unit: Tensor,
        solver: Solver,
        gradient: Gradient,
        init: Tensor | None,
        report: bool,
        throw: bool,
    ) -> Solution:
        """The same for `A/unit`, in which nothing leaves the range of the dtype."""
        scaled = replace(self, A=self.matrix.to(unit.dtype) / unit[..., None, None])
        init = init if init is None or self.k is not None else init.squeeze(-1)
        found = scaled.run(solver, gradient, init=init, report=report, throw=throw)
        factor = unit if self.k is None else unit.unsqueeze(-1)
        found = replace(found, multiplier=found.multiplier * factor, gap=found.gap * unit)
        return _in(self.matrix.dtype, found)

    def _run_dense(
        self,
        A: Tensor,
        solver: Solver,
        gradient: Gradient,
        init: Tensor | None,
        report: bool,
        throw: bool,
    ) -> Solution:
        """Solve for `A`, the problem's own or its negative, in float32 or float64."""
        dtype = self.matrix.dtype
        if isinstance(gradient, Unroll):
            errors.require_eager("gradient=Unroll()", "gradient=Implicit()", A)
            require_range(A)
            problem = PrincipalEigenvectors(A, self.width, symmetric=self.symmetric)
            with torch.autocast(A.device.type, enabled=False):
                outcome = solver.solve(problem, init=init, report=report)
            outcome = Outcome(*outcome[:2], *(x.detach() for x in outcome[2:]))
            announce(outcome, solver, throw)
        elif forward_mode(A):
            require_forward(gradient)
            way = solver.resolve(self)
            outcome = forward_ied(A, init, self.width, self.symmetric, way, report, throw)
        elif plain(A):
            found = attach_plain(self, A, init, solver.resolve(self), gradient, report, throw)
            return _in(dtype, found)
        else:
            way = solver.resolve(self)
            outcome = attach(A, init, self.width, self.symmetric, way, gradient, report, throw)
        return _in(dtype, self.present(outcome))

    def _run_operator(
        self, A: Operator, solver: Solver, gradient: Gradient, init: Tensor | None, throw: bool
    ) -> Solution:
        require_products_suffice(A, solver, gradient)
        if self.reference is not None and is_spread(self.reference):
            # Every rank looks at all of it, so that all of them raise the error or none.
            errors.require_finite(reference=(whole(self.reference), 1))
        if 0 in self.batch_shape:
            raise ValueError(f"{A!r} has an empty batch; leave the layer out where it is")
        if init is not None:
            # A start has no gradient, and would hold on to the graph of the step it comes from.
            init = whole(init.detach() if self._is_block(init) else init.detach().unsqueeze(-1))
        dtype = A.dtype
        if dtype in (torch.float16, torch.bfloat16):
            A = A.with_tensors([x.float() for x in A.tensors])
            init = None if init is None else init.float()
        # The smallest eigenvalues are the largest of −A, in the opposite order.
        A = A if self.largest else -A
        assert isinstance(solver, Krylov)
        outcome, backward = attach_operator(A, self.width, self.symmetric, solver, init, throw)
        found = replace(_in(dtype, self.present(outcome)), backward=backward)
        return joined(found, A)

    def _run_parts(
        self,
        A: Tensor,
        solver: Solver,
        gradient: Gradient,
        init: Tensor | None,
        report: bool,
        throw: bool,
    ) -> Solution:
        """Every rank solves the part of the batch that it has."""

        def own(x: Tensor | None) -> tuple[Tensor | None, int]:
            return x, 2 if x is not None and self._is_block(x) else 1

        inputs = dict(A=(A, 2), reference=own(self.reference), init=own(init))
        parts = Parts(self.batch_shape, inputs)
        mine = replace(self, A=parts.inputs["A"], reference=parts.inputs.get("reference"))
        start = parts.inputs.get("init")
        found = mine.run(solver, gradient, init=start, report=report, throw=throw)
        return parts.join_all(found)

    def search(self, solver: Krylov, init: Tensor | None) -> Outcome:
        """By products alone, whatever `A` is."""
        rows = Rows(as_operator(self.A), self.batch_shape)
        return find_eigenvectors(rows, self.width, self.symmetric, solver, init)

    def present(self, outcome: Outcome) -> Solution:
        """An outcome for `A`, or `−A` if the smallest are asked for, as the user sees it."""
        values, rows = outcome.multiplier, outcome.value
        signs = self._signs(rows)
        if self.flipped:
            values, rows, signs = values.flip(-1), rows.flip(-2), signs.flip(-1)
        # New tensors, not views: a user may write into what a layer returns.
        if self.k is None:
            values, vectors = values.squeeze(-1), rows.squeeze(-2) * signs
        else:
            vectors = rows.mT * signs.unsqueeze(-2)
        values = values.clone() if self.largest else -values
        # The compiler of torch 2.7 cannot slice a named tuple.
        _, _, residual, gap, iterations, converged, *_ = outcome
        return Solution(vectors, values, residual, gap, iterations, converged)

    @property
    def flipped(self) -> bool:
        """Whether the order asked for is not that of the solvers."""
        return self.descending != self.largest and self.width > 1

    def _signs(self, rows: Tensor) -> Tensor:
        """Which way to turn each row, `(*, k)`.

        Towards the reference. Where that is orthogonal, the paper leaves the sign alone;
        towards a fixed direction first, so that what is left alone is reproducible.
        """
        rows = rows.detach()
        both = _references(rows)
        tolerance = 8 * torch.finfo(rows.dtype).eps
        if self.reference is None:
            dots, second = (rows @ both).unbind(-1)
            tolerance = tolerance * self.n**0.5
        else:
            reference = whole(self.reference.detach()).to(rows)
            if self._is_block(reference):
                reference = reference.mT
                reference = reference.flip(-2) if self.flipped else reference
            else:
                reference = reference.unsqueeze(-2)
            dots, second = (rows * reference).sum(-1), rows @ both[:, 1]
            tolerance = tolerance * norm(reference)
        dots = torch.where(dots.abs() <= tolerance, second, dots)
        return torch.copysign(both[0, 0], dots)  # which is one

    def _is_block(self, reference: Tensor) -> bool:
        """Whether a reference, `(*, n, k)` or `(*, n)`, is of the first kind.

        Where both readings fit, it is the second, with one vector for each batch entry.
        """
        if self.k is None:
            return False
        batch, shape = self.batch_shape, reference.shape
        fits = all(x in (1, y) for x, y in zip(shape[:-1], batch))
        if reference.dim() == len(batch) + 1 and shape[-1] == self.n and fits:
            return False
        return reference.dim() > 1 and shape[-2:] == (self.n, self.k)

    def _require_reference(self, reference: Tensor, name: str = "reference") -> None:
        errors.require_vector(name, reference, "n")
        errors.require_alike(name, reference, "A", self.A)
        block = self._is_block(reference)
        if reference.shape[-2:] != (self.n, self.k) if block else reference.shape[-1] != self.n:
            wanted = f"(*, {self.n})" + ("" if self.k is None else f" or (*, {self.n}, {self.k})")
            raise ValueError(f"{name} must have shape {wanted}; got {errors.shape_of(reference)}")
        lead = reference.shape[:-2] if block else reference.shape[:-1]
        errors.require_fits(name, lead, self.batch_shape)
        if plain(reference):
            errors.require_finite(**{name: (reference, 2 if block else 1)})

    def _empty(self) -> Solution:
        row = self.matrix.sum(-2)
        vectors = row if self.k is None else row.unsqueeze(-1).expand(*row.shape, self.k)
        values = row.sum(-1) if self.k is None else row[..., : self.k]
        blank = row.detach().sum(-1)
        count = blank.to(torch.int64)
        return Solution(vectors, values, blank, blank, count, count.bool())


def _in(dtype: torch.dtype, found: Solution) -> Solution:
    if found.value.dtype == dtype:
        return found
    return replace(found, value=found.value.to(dtype), multiplier=found.multiplier.to(dtype))


# Made once: they write themselves down, which takes longer than to solve a small problem.
_AUTO, _IMPLICIT, _DENSE, _ADAPTIVE = Auto(), Implicit(), Dense(), Adaptive()
_KRYLOV = Krylov()
_WITHOUT_POWER = replace(_ADAPTIVE, power_from=math.inf)

# See `best_solver`.
_TRACED_FROM = 128


def _references(rows: Tensor) -> Tensor:
    """`sphere.references` as columns, remembered where they are numbers."""
    if plain(rows):
        return _known_references(rows.shape[-1], rows.dtype, rows.device)
    return torch.stack(sphere.references(rows), -1)


@functools.lru_cache(maxsize=64)
def _known_references(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # or they would be of no use in a later training step
        return torch.stack(sphere.references(torch.empty(n, dtype=dtype, device=device)), -1)


def ied(
    A: Tensor | Operator,
    k: int | None = None,
    *,
    largest: bool = True,
    symmetric: bool = True,
    descending: bool = True,
    solver: Solver | None = None,
    gradient: Gradient | None = None,
    reference: Tensor | None = None,
    init: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Eigenpairs:
    """Principal eigenvectors and their eigenvalues, differentiable.

    Gradients are finite and exact whenever the requested eigenvalues are simple, however
    often other eigenvalues repeat. Where a requested eigenvalue repeats they are exact for
    functions of the span of its vectors, and not for functions of values and vectors together
    (docs/ied.md says why).

    Args:
        A: `(*, n, n)`, of float32 or float64; float16 and bfloat16 are computed in float32.
            With `symmetric=True` its symmetric part is used, and gradients are symmetric. Or a
            sparse tensor, a DTensor, or an operator of `pmaf.operators`.
        k: how many; None for one, without a dimension for it.
        largest: the largest eigenvalues, or the smallest.
        symmetric: False for the dominant real eigenvalue of a general matrix.
        descending: order of the eigenvalues if there are several.
        solver: one of `pmaf.solvers`; `Auto()` unless given.
        gradient: one of `pmaf.gradients`; `Implicit()` unless given.
        reference: `(*, n)` or `(*, n, k)`, what each eigenvector is turned towards; all
            ones unless given.
        init: `(*, n)` or `(*, n, k)`, the start of an iterative solver, such as the solution
            of the last step of training.
        generator: draws the start of an iterative solver; without it the start is fixed.

    Returns:
        `Eigenpairs(values, vectors)`, `(*,)` and `(*, n)`, or `(*, k)` and `(*, n, k)`.

    >>> import torch, pmaf
    >>> values, vectors = pmaf.ied(torch.diag(torch.tensor([3.0, 1.0, 1.0, 1.0])))
    >>> values, vectors
    (tensor(3.), tensor([1., 0., 0., 0.]))
    """
    if (
        k is None
        and symmetric
        and (solver is None or solver == _AUTO)
        and (gradient is None or gradient == _IMPLICIT)
        and reference is None
        and init is None
        and generator is None
        and isinstance(A, Tensor)
        and suits(A)
    ):
        try:
            found = solve_lean(A, largest, _ADAPTIVE)
        except OutOfRangeError:
            found, solver = None, _DENSE
        else:
            solver = _WITHOUT_POWER
        if found is not None:
            return Eigenpairs(*found)
    problem = PrincipalEigenvectors(A, k, largest, symmetric, descending, reference)
    if generator is not None and init is None:
        shape = (problem.n, problem.width)
        init = torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)
        init = init.to(problem.A.device, problem.A.dtype)
        init = init[..., 0] if k is None else init
    solution = problem.run(
        solver or _AUTO, gradient or _IMPLICIT, init=init, report=False, throw=False
    )
    return Eigenpairs(solution.multiplier, solution.value)


class IED(nn.Module):
    """`pmaf.ied` as a module, with the same keywords and results.

    >>> import torch, pmaf
    >>> pmaf.IED(k=3, largest=False)
    IED(k=3, largest=False, symmetric=True, descending=True, solver=Auto(), gradient=Implicit())
    """

    def __init__(
        self,
        k: int | None = None,
        *,
        largest: bool = True,
        symmetric: bool = True,
        descending: bool = True,
        solver: Solver | None = None,
        gradient: Gradient | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.k, self.largest, self.symmetric, self.descending = k, largest, symmetric, descending
        self.solver, self.gradient = solver or Auto(), gradient or Implicit()
        self.generator = generator

    def forward(
        self,
        A: Tensor | Operator,
        reference: Tensor | None = None,
        init: Tensor | None = None,
    ) -> Eigenpairs:
        return ied(
            A,
            self.k,
            largest=self.largest,
            symmetric=self.symmetric,
            descending=self.descending,
            solver=self.solver,
            gradient=self.gradient,
            reference=reference,
            init=init,
            generator=self.generator,
        )

    def __prepare_scriptable__(self) -> None:
        errors.refuse_script(self)

    def extra_repr(self) -> str:
        names = ("k", "largest", "symmetric", "descending", "solver", "gradient")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
