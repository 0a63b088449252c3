"""Pairs of matrices: `Ay = λMy` with `yᵀMy = 1`, for a symmetric positive definite `M`.

A factor `M = TTᵀ` reduces the pair to the matrix `C = T⁻¹AT⁻ᵀ`, whose eigenvectors are `x = Tᵀy`.
For a dense pair `T` is Cholesky's factor, and the derivative does not go through it: with `z` from
`(λM − A)z = v − My(yᵀv)`, `yᵀMz = 0`,

    ∂L/∂A = ½(zyᵀ + yzᵀ) + ∂L/∂λ yyᵀ,   ∂L/∂M = −λ ∂L/∂A − ½(yᵀv) yyᵀ.

For several vectors with `N = YᵀV`, the symmetric part of `N` takes the place of `yᵀv`, and `z` has
a part inside the span for the antisymmetric part alone, so that functions of the span need no
division by the differences of the eigenvalues.

A pair of operators is searched in the inner product of `M`, by products with both and by solves
with `M`; nothing is factored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pmaf import errors, native
from pmaf.autograd.attach import attach_found, attach_some
from pmaf.autograd.entries import entries
from pmaf.certificate import certify_eigenvectors, certify_eigenvectors_by_products
from pmaf.gradients import Gradient, Implicit, Unroll
from pmaf.gradients.base import Reverse
from pmaf.gradients.by_products import Incoming, pair_gradients
from pmaf.gradients.eigenvectors import (
    EigenConditions,
    normal_part,
    symmetric_newton,
    symmetric_product,
    without,
)
from pmaf.layers.hermitian import reduced_pair, turned
from pmaf.layers.ied import Eigenpairs, PrincipalEigenvectors
from pmaf.linalg import sphere
from pmaf.linalg.decompositions import cholesky
from pmaf.linalg.products import symmetric_part
from pmaf.operators.base import Operator
from pmaf.operators.congruent import Congruent, solve_root
from pmaf.operators.diagonal import Diagonal
from pmaf.operators.inner import inner_product
from pmaf.operators.matrix import Matrix
from pmaf.operators.rows import Rows
from pmaf.problem import in_dtype
from pmaf.runtime import ranks
from pmaf.runtime.log import took
from pmaf.runtime.modes import forward_mode, full_precision, plain
from pmaf.solution import Certificate, Solution
from pmaf.solvers import Auto, Solver
from pmaf.solvers.auto import is_reduced
from pmaf.solvers.base import Outcome
from pmaf.solvers.krylov import Krylov, find_eigenvectors
from pmaf.tangent.kept import NOTHING, Congruence, Nothing
from pmaf.tangent.metric import Metric


@dataclass(frozen=True, eq=False)
class PairedEigenvectors(PrincipalEigenvectors):
    """`PrincipalEigenvectors` of two dense matrices, both of which get gradients."""

    inputs: ClassVar[dict[str, int]] = {"A": 2, "M": 2}

    def directions(self, rows: Tensor) -> Tensor:
        return sphere.project(rows)

    def solved_by(self, solver: Solver, init: Tensor | None, report: bool) -> Outcome:
        A, M = self.tensors
        took("pairs: Cholesky")
        inverse, C = congruence(A, M, checked=True)
        if init is not None:
            init = inverse @ (symmetric_part(M) @ init)
        found = _alone(self, C).solved_by(solver, init, report)
        kept = Congruence(inverse, C) if isinstance(found.kept, Nothing) else found.kept
        return found._replace(value=found.value @ inverse, kept=kept)

    def divided(self, unit: Tensor) -> Any:
        # Eigenvalues are proportional to A; in M they are of degree −1.
        return self.changed(A=self.matrix / unit[..., None, None])

    def first_gradients(self, given: Reverse) -> native.Gradients | None:
        return None

    def gradients(self, given: Reverse) -> tuple[Tensor | None, ...]:
        given = given.as_rows() if self.single else given
        tensors, y, state, _, v, d_multiplier, needs = given
        if not self.largest:  # the largest of −A
            tensors, state = (-tensors[0], tensors[1]), state._replace(shift=-state.shift)
            d_multiplier = None if d_multiplier is None else -d_multiplier
        along = None if d_multiplier is None else d_multiplier.unsqueeze(-1) * y
        z, normal = along, None
        if v is not None:
            A, M = tensors
            kept = state.kept
            if isinstance(kept, Congruence):
                state = state._replace(kept=NOTHING)
            if isinstance(kept, Congruence) and not torch.is_grad_enabled():
                inverse, C = kept
            else:
                inverse, C = congruence(A, M)
            x = y @ symmetric_part(M) @ inverse.mT
            # Products in the given variables have no rounding errors of the factor.
            normal, near = normal_part(v @ y.mT, C, state.shift, state)
            across = without(v @ inverse.mT, x, normal, near)
            conditions = EigenConditions(C, x, state.shift, None, True, state)
            z = conditions.tangent_solve(across) @ inverse
            z = z if along is None else z + along
        assert z is not None
        dA = symmetric_product(z, y) if needs[0] else None
        if dA is not None and not self.largest:
            dA = -dA
        if not needs[1]:
            return dA, None
        z = state.shift.unsqueeze(-1) * z
        z = z if normal is None else z + 0.5 * normal @ y
        return dA, -symmetric_product(z, y)

    def newton(
        self, fixed: Any, found: Outcome, solve: Callable[..., Outcome]
    ) -> Callable[[Tensor], Tensor]:
        A, M = self.tensors
        inverse, C = congruence(A, M)
        before, still = congruence(*fixed.tensors)
        metric = symmetric_part(M)
        y, values = found.value, found.multiplier
        if self.single:
            y, values = y.unsqueeze(-2), values.unsqueeze(-1)
        x = y @ symmetric_part(fixed.M) @ before.mT
        step = symmetric_newton(C, still, found._replace(value=x, multiplier=values))

        def paired(y: Tensor) -> Tensor:
            y = y.unsqueeze(-2) if self.single else y
            y = step(y @ metric @ inverse.mT) @ inverse
            return y.squeeze(-2) if self.single else y

        return paired

    def differentiate(
        self,
        tensors: tuple[Tensor, ...],
        y: Tensor,
        kept: Sequence[Tensor],
        v: Tensor | None,
        d_multiplier: Tensor | None,
        needs: Sequence[bool],
    ) -> native.Gradients:
        took("pairs: compiled gradient")
        reduced = native.Reduced(*kept)
        dtype = tensors[0].dtype
        return native.pair_gradients(reduced, v, d_multiplier, dtype, self.largest, needs)


@dataclass(frozen=True, eq=False)
class HermitianPair(PairedEigenvectors):
    """Eigenvectors of a pair of complex matrices, in the default phase, found by the kernels."""

    def gradients(self, given: Reverse) -> tuple[Tensor | None, ...]:
        # The common path, solved again, which can be differentiated again.
        (A, M), needs = given.tensors, given.needs
        wanted = [x for x, need in zip(given.tensors, needs) if need]
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            vectors, values = _solve_commonly(A, M, self.k, self.largest)
            rows = vectors if self.k is None else vectors.mT
            both = ((rows, given.v), (values, given.d_multiplier))
            outputs, incoming = zip(*((x, dx) for x, dx in both if dx is not None))
            gradients = torch.autograd.grad(outputs, wanted, incoming, create_graph=again)
        left = iter(gradients)
        return tuple(next(left) if need else None for need in needs)


@functools.lru_cache(maxsize=64)
def _found(k: int | None, largest: bool, hermitian: bool) -> Any:
    """The problem of a default call, without its matrices."""
    kind = HermitianPair if hermitian else PairedEigenvectors
    options = {"k": k, "largest": largest, "symmetric": True, "descending": largest, "skip": 0}
    return kind.read(options)


def small_pair(A: Tensor, M: Any, k: int | None, largest: bool) -> Eigenpairs | None:
    """The forward pass of the default call on a small dense pair, in one call of the kernels.

    Returns None where the common path is needed, which also says what is wrong with `M`.
    """
    if not (isinstance(M, Tensor) and A.shape == M.shape and A.dtype == M.dtype):
        return None
    shape = A.shape
    square = len(shape) > 1 and shape[-1] == shape[-2] and A.numel() > 0
    compiled = square and is_reduced(A, k or 1) and native.takes_eigenvectors(M)
    if not (compiled and plain(A) and plain(M)) or forward_mode(A, M):
        return None
    recorded = torch.is_grad_enabled() and (A.requires_grad or M.requires_grad)
    found, kept = native.largest_of_pair(A.detach(), M.detach(), k, largest, recorded)
    values, vectors, failed = found
    if failed is not None and (
        bool(failed.all()) or not _are_proper(A.detach(), M.detach(), failed)
    ):
        return None
    took("pairs: compiled")
    problem = _found(k, largest, A.is_complex())
    if failed is not None:
        took("pairs: common path for some")
        solve = functools.partial(_solve_commonly, k=k, largest=largest)
        both = (A, M), (vectors, values)
        vectors, values = attach_some(*both, kept or (), problem, failed, solve)
    elif recorded:
        vectors, values = attach_found(A, M, (vectors, values), kept, problem)
    return Eigenpairs(values, vectors)


def _are_proper(A: Tensor, M: Tensor, mask: Tensor) -> bool:
    """Whether these entries are finite, and positive definite in `M`."""
    A, M = A[mask], M[mask]
    finite = bool(A.isfinite().all()) and bool(M.isfinite().all())
    return finite and not bool(cholesky(0.5 * (M + M.mH))[1].any())


def _solve_commonly(A: Tensor, M: Tensor, k: int | None, largest: bool) -> tuple[Tensor, Tensor]:
    """Vectors and values by the common path."""
    problem = PrincipalEigenvectors(A, k, largest, descending=largest, M=M)
    found = run_pairs(problem, Auto(), Implicit(), init=None, report=False, throw=False)
    return found.value, found.multiplier


class Seen(Rows):
    """Products with the operator `A` of a pair, and with its `M`."""

    def __init__(self, A: Operator, batch: torch.Size, own: Rows, metric: Metric) -> None:
        super().__init__(A, batch)
        self.own, self.metric = own, metric


@dataclass(frozen=True, eq=False)
class PairOfOperators(PrincipalEigenvectors):
    """`PrincipalEigenvectors` of two operators, by products and solves with `M`."""

    inputs: ClassVar[dict[str, int]] = {"A": 2, "M": 2}

    def directions(self, rows: Tensor) -> Tensor:
        return sphere.project(rows)

    def solved_by_products(self, solver: Solver, init: Tensor | None) -> tuple[Outcome, Any]:
        if not isinstance(solver, Krylov):
            raise TypeError(
                f"{solver!r} does not know the inner product of {self.M!r}; use Auto() or Krylov()"
            )
        took("pairs: products, own solve" if self.M.solvable else "pairs: products")
        assert isinstance(self.A, Operator)
        seen = Seen(self.A, self.batch_shape, *self._inner_product(solver))
        return seen.guarded(find_eigenvectors, self, solver, init, seen.metric), seen

    def _inner_product(self, solver: Krylov) -> tuple[Rows, Metric]:
        own = Rows(self.M, self.batch_shape)
        return own, inner_product(own, solver.tolerance_of(self.dtype))

    def gradients_by_products(self, given: Incoming) -> Sequence[Tensor | None]:
        seen: Any = given.seen
        return pair_gradients(self, given, seen.own, seen.metric)

    def certify(self, value: Tensor) -> Certificate:
        fixed = self.with_flat([x.detach() for x in self.flat])
        _, metric = fixed._inner_product(Krylov())
        return certify_eigenvectors_by_products(fixed, value, metric)


def congruence(A: Tensor, M: Tensor, checked: bool = False) -> tuple[Tensor, Tensor]:
    """`L⁻¹` and `C = L⁻¹AL⁻ᵀ` for `M = LLᵀ`, of the symmetric parts; differentiable.

    `L⁻¹` is formed, because it is used six times in both passes, and products with it are several
    times faster than triangular solves. The errors of both are about cond(L) roundings.
    """
    lower, info = cholesky(symmetric_part(M))
    if checked and bool(info.any()):
        _refuse(M, info != 0)
    eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    inverse = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
    return inverse, symmetric_part(inverse @ symmetric_part(A) @ inverse.mT)


def _refuse(M: Tensor, bad: Tensor) -> None:
    """Raise the error of a matrix that is not positive definite."""
    errors.require_finite(M=(M, M.dim() - bad.dim()))
    where = f" in {int(bad.sum())} of {bad.numel()} batch entries" if bad.dim() else ""
    raise ValueError(
        f"M is not positive definite{where}, up to rounding in {M.dtype}; add a multiple of the "
        "identity to it, use float64, or exchange A and M if A is the positive definite one"
    )


class _Change:
    """The change of variables `x = Tᵀy` with `M = TTᵀ`, for a diagonal or a dense `M`."""

    def __init__(self, M: Tensor | Diagonal) -> None:
        self.dims = 1 if isinstance(M, Diagonal) else 2
        if isinstance(M, Diagonal):
            bad = ~(M.d > 0)
            if plain(M.d) and bool(bad.any()):
                _refuse(M.d, bad.any(-1))
            self.root = M.d.sqrt()
        else:
            self.root, info = cholesky(symmetric_part(M))
            if bool(info.any()):
                _refuse(M, info != 0)

    def reduced(self, A: Tensor | Operator) -> Tensor | Operator:
        """`T⁻¹AT⁻ᵀ`."""
        if isinstance(A, Operator):
            return Congruent(A, self.root, self.dims)
        assert self.dims == 1
        return A / self.root.unsqueeze(-1) / self.root.unsqueeze(-2)

    def forth(self, y: Tensor) -> Tensor:
        """`Tᵀy` for columns `(*, n, k)`."""
        return self.root.unsqueeze(-1) * y if self.dims == 1 else self.root.mT @ y

    def back(self, x: Tensor) -> Tensor:
        """`T⁻ᵀx` for columns `(*, n, k)`."""
        return solve_root(self.root, x.mT, self.dims, transposed=True).mT


# Up to this many rows, the entries of an operator M without a solve are formed where A is an
# operator, too.
_FORMED = 2048


def run_pairs(
    problem: PrincipalEigenvectors,
    solver: Solver,
    gradient: Gradient,
    *,
    init: Tensor | None,
    report: bool,
    throw: bool,
) -> Solution:
    """The solution of a problem that has an `M`, by the way that suits the kinds of `A` and `M`."""
    if not isinstance(gradient, (Implicit, Unroll)):
        raise TypeError(
            f"gradient={gradient!r} is a rule for one matrix; use Implicit() or Unroll() with M"
        )
    if init is not None:
        problem.require_start(init)
        init = init.detach()
    if problem.dtype.is_complex:
        return _run_complex(problem, solver, gradient, init, report, throw)
    posed = _posed(problem)
    options: dict[str, Any] = {"report": report, "throw": throw}
    if isinstance(posed, (PairedEigenvectors, PairOfOperators)):
        return posed.run(solver, gradient, init=init, **options)
    dtype = problem.dtype
    if dtype in (torch.float16, torch.bfloat16):
        init = None if init is None else init.float()
        posed = posed.changed(A=_in_float(posed.A), M=_in_float(posed.M))
    diagonal = isinstance(posed.M, Diagonal)
    if not torch.compiler.is_compiling():  # a trace cannot follow a log
        took("pairs: diagonal" if diagonal else "pairs: factor and products")
    # Autocast does not reach the quotients of a diagonal M, and meta tensors have none.
    with nullcontext() if diagonal else full_precision(problem.device):
        change = _Change(posed.M)
        columns = init if init is None or problem.dims_of(init) == 2 else init.unsqueeze(-1)
        start = None if columns is None else change.forth(columns)
        start = start.squeeze(-1) if start is not None and problem.k is None else start
        inner = posed.changed(A=change.reduced(posed.A), M=None, reference=None)
        found = inner.run(solver, gradient, init=start, **options)
        x = found.value.unsqueeze(-1) if problem.k is None else found.value
        y = change.back(x)
        signs = posed.signs(sphere.project(y.detach().mT), False)
        y = y * signs.unsqueeze(-2)
        y = y.squeeze(-1) if problem.k is None else y
    return in_dtype(dtype, replace(found, value=y))


def _run_complex(
    problem: PrincipalEigenvectors,
    solver: Solver,
    gradient: Gradient,
    init: Tensor | None,
    report: bool,
    throw: bool,
) -> Solution:
    """The solution of a pair of Hermitian matrices, whose derivatives go through the factor."""
    took("pairs: Cholesky, complex")
    C, L, bad = reduced_pair(*_dense_pair(problem))
    if plain(bad) and bool(bad.any()):
        _refuse(problem.M, bad)
    single = problem.k is None
    start = init
    if init is not None:
        columns = init if problem.dims_of(init) == 2 else init.unsqueeze(-1)
        start = L.mH @ columns
        start = start.squeeze(-1) if single else start
    inner = problem.changed(A=C, M=None, reference=None)
    found = inner.run(solver, gradient, init=start, report=report, throw=throw)
    x = found.value.unsqueeze(-1) if single else found.value
    y = turned(problem, torch.linalg.solve_triangular(L.mH, x, upper=True))
    return replace(found, value=y.squeeze(-1) if single else y)


def _dense_pair(problem: PrincipalEigenvectors) -> tuple[Tensor, Tensor]:
    """Both matrices of a complex pair as tensors."""
    A, M = problem.A, problem.M
    M = torch.diag_embed(M.d) if isinstance(M, Diagonal) else M
    for name, x in (("A", A), ("M", M)):
        if not isinstance(x, Tensor):
            raise TypeError(
                f"a pair of complex matrices needs both as dense tensors; {name} is {x!r}, which "
                "is known by its products"
            )
    return A, M  # pyright: ignore[reportReturnType]


def _in_float(x: Any) -> Any:
    return x.with_tensors([t.float() for t in x.tensors]) if isinstance(x, Operator) else x.float()


def _posed(problem: PrincipalEigenvectors) -> PrincipalEigenvectors:
    """The problem with a pair of dense matrices, or one whose `M` has a factor."""
    A, M = problem.A, problem.M
    flat = [x for part in (A, M) for x in (part.tensors if isinstance(part, Operator) else (part,))]
    products = any(isinstance(x, Operator) for x in (A, M))
    if products and ranks.mesh_of(*flat) is not None:
        raise NotImplementedError(
            "pairs whose matrices are cut over ranks are not supported; cut the batch instead, or "
            "divide A by the roots of a diagonal M"
        )
    if isinstance(M, Matrix):
        M = M.A
    if isinstance(M, Diagonal):
        return problem.changed(M=M)
    if isinstance(M, Operator):
        if isinstance(A, Operator) and (M.solvable or problem.n > _FORMED):
            return _pair_of_operators(problem)
        took("pairs: entries of M")
        M = entries(M)
    if isinstance(A, Operator):
        return problem.changed(M=M)
    x = problem
    return PairedEigenvectors(A, x.k, x.largest, True, x.descending, x.reference, x.skip, M)


def _pair_of_operators(problem: PrincipalEigenvectors) -> PairOfOperators:
    x, M, batch = problem, problem.M, problem.batch_shape
    posed = PairOfOperators(x.A, x.k, x.largest, True, x.descending, x.reference, x.skip, M)
    if M.batch_shape not in (posed.batch_shape, ()):
        raise ValueError(
            f"{M!r} has the batch {tuple(M.batch_shape)} and the problem {tuple(batch)}; "
            "an operator needs the whole batch, or none"
        )
    return posed


def certify_pairs(problem: PrincipalEigenvectors, value: Tensor) -> Certificate:
    """A certificate for the matrix to which the pair reduces.

    `feasibility` is the largest entry of `YᵀMY − I`. For dense matrices everything is in float64.
    """
    if problem.dtype.is_complex:
        C, L, _ = reduced_pair(*(x.detach() for x in _dense_pair(problem)))
        Y = value.detach().unsqueeze(-1) if problem.k is None else value.detach()
        X = L.mH @ Y
        inner: Any = problem.changed(A=C, M=None, reference=None)
        return inner.certify(X.squeeze(-1) if problem.k is None else X)
    posed = _posed(problem)
    if isinstance(posed, PairOfOperators):
        return posed.certify(value)
    Y = value.detach().unsqueeze(-1) if problem.k is None else value.detach()
    A, M = posed.A, posed.M
    if isinstance(A, Operator):
        change = _Change(M)
        inner = posed.changed(A=change.reduced(A), M=None)
        X = change.forth(Y.to(A.dtype))
        X = X.squeeze(-1) if problem.k is None else X
        return certify_eigenvectors_by_products(inner, X)
    dense = torch.diag_embed(M.d) if isinstance(M, Diagonal) else M
    change = _Change(dense.detach().double())
    _, C = congruence(A.detach().double(), dense.detach().double())
    X = change.forth(Y.double())
    return certify_eigenvectors(_alone(problem, C), X.squeeze(-1) if problem.k is None else X)


def _alone(problem: PrincipalEigenvectors, C: Tensor) -> PrincipalEigenvectors:
    """The problem of one matrix, with the options of a pair except for its reference."""
    bare = PrincipalEigenvectors.read({name: getattr(problem, name) for name in _OPTIONS})
    return bare.with_tensors(C)


_OPTIONS = ("k", "largest", "symmetric", "descending", "skip")
