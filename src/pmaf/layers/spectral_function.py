"""The problem of functions of the spectrum: reports and certificates of `pmaf.spectral`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pmaf.certificate import certify_function
from pmaf.executors.base import BY_PRODUCTS, Account
from pmaf.executors.direct import Ended
from pmaf.gradients import Gradient
from pmaf.layers.eigenvectors import PrincipalEigenvectors
from pmaf.layers.spectral import (
    COARSER,
    PROBLEM,
    Function,
    find_by_products,
    require_few,
    require_square,
    scalar_of,
    size_of,
    spectral,
    takes_group,
)
from pmaf.linalg.decompositions import eigenvalues
from pmaf.linalg.divided_differences import NAMED
from pmaf.linalg.matrix_function import MatrixFunction
from pmaf.linalg.products import frobenius, one_if_zero
from pmaf.linalg.roundings import HALF
from pmaf.linalg.symmetric_part import fixed_rows
from pmaf.operators import LowRank, Operator, as_operator
from pmaf.operators.base import known_by_products
from pmaf.problem import Problem
from pmaf.recipe import AUTO, IMPLICIT, Recipe, register, run
from pmaf.reductions.base import Report, Tensors
from pmaf.runtime import ranks
from pmaf.runtime.modes import full_precision
from pmaf.runtime.text import abbreviated
from pmaf.solution import Certificate
from pmaf.solvers import Solver
from pmaf.tangent.kept import IN_WORDS, Decomposition


@dataclass(frozen=True, eq=False)
class SpectralFunction(Problem):
    """The problem of `pmaf.spectral`, for `pmaf.solve` and `pmaf.certify`.

    The solution is `F = V f(Λ) Vᵀ`. Its multipliers are the eigenvalues of the group, the requested
    end first and without gradients, its residual is `‖AF − FA‖ / ‖A‖‖F‖`, and its gap is the
    distance from the group to the next eigenvalue, infinite if there is none.

    The certificate of a matrix `F` says how far it is from Hermitian (`feasibility`), from a
    function of `A` (`stationarity`, the residual), and from the one that is meant (`optimality`,
    minus the distance), all relative to `F`. The distance is to a matrix computed in another way.

    Args:
        A: `(*, n, n)`, as in `pmaf.spectral`; of a sparse tensor or an operator the solution is a
            `pmaf.operators.LowRank`.
        function: a name or a function, as in `pmaf.spectral`.
        k: how many eigenpairs; None for all.
        largest: those of the largest eigenvalues, or of the smallest.

    >>> import torch, pmaf
    >>> problem = pmaf.SpectralFunction(torch.diag(torch.tensor([9.0, 4.0, 1.0])), "sqrt", 2)
    >>> solution = pmaf.solve(problem)
    >>> solution.multiplier, solution.gap
    (tensor([9., 4.]), tensor(3.))
    >>> pmaf.certify(problem, solution).holds(1e-6)
    tensor(True)
    """

    A: Tensor | Operator
    function: Function
    k: int | None = None
    largest: bool = True

    inputs: ClassVar[dict[str, int]] = {"A": 2}
    compared: ClassVar[bool] = False

    def __post_init__(self) -> None:
        scalar_of(self.function)
        if known_by_products(self.A):
            A = as_operator(self.A)
            object.__setattr__(self, "A", A)
            require_few(A, self.k)
        else:
            require_square(self.A, self.k)

    @property
    def width(self) -> int:
        """Number of eigenpairs."""
        return self.A.shape[-1] if self.k is None else self.k

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        batch, n = self.A.shape[:-2], self.A.shape[-1]
        return (*batch, n, n), (*batch, self.width)

    def require_value(self, value: Any) -> None:
        shape = self.shapes[0]
        wanted: Any = LowRank if isinstance(self.A, Operator) else Tensor
        if not isinstance(value, wanted) or value.shape != shape:
            got = tuple(value.shape) if hasattr(value, "shape") else type(value).__name__
            raise ValueError(
                f"a solution of this problem is a {wanted.__name__} of shape {shape}; got "
                f"{type(value).__name__} {got}"
            )

    def blank(self) -> tuple[Tensor, Tensor]:
        value, values = super().blank()
        # The eigenvalues keep all digits that are computed.
        return value, values.float() if values.dtype in HALF else values

    def solution(self, report: bool) -> Ended:
        """The function, with a report if there is to be one."""
        A, k, largest = self.A, self.width, self.largest
        if isinstance(A, Operator):
            F, found = find_by_products(A, scalar_of(self.function), k, largest)
            order = found.multiplier.detach().sort(-1, descending=largest).values
            gap = self._gap_by_products(A)
            known = Report(found.residual, gap, found.iterations, found.converged)
            both: Any = F, order
            return Ended(both, known, found.method, found.backward)
        value = spectral(A, self.function, self.k, largest=largest)
        if not report:
            blank = value.detach().new_full(A.shape[:-2], torch.nan, dtype=A.dtype.to_real())
            count = torch.zeros_like(blank, dtype=torch.int64)
            return Ended((value,), Report(blank, blank, count, count.bool()), "pmaf.spectral")
        fixed = A.detach()
        fixed = fixed.float() if fixed.dtype in HALF else fixed
        fixed, F = 0.5 * (fixed + fixed.mH), value.detach().to(fixed)
        values = eigenvalues(fixed).flip(-1)
        n = values.shape[-1]
        blank = torch.zeros_like(values[..., 0])
        gap = torch.full_like(blank, torch.inf)
        if k < n:
            gap = (values[..., :-1] - values[..., 1:])[..., k - 1 if largest else n - k - 1]
        product = frobenius(fixed) * frobenius(F)
        known = Report(
            residual=torch.linalg.matrix_norm((fixed @ F - F @ fixed) / product),
            gap=gap,
            iterations=blank.to(torch.int64),
            converged=torch.isfinite(F).all(-1).all(-1),
        )
        order = values[..., :k] if largest else values[..., n - k :].flip(-1)
        return Ended((value, order), known, "pmaf.spectral")

    def _gap_by_products(self, A: Operator) -> Tensor:
        """The distance from the group to the next eigenvalue, from a search that finds it, too."""
        A, k = _fixed(A), self.width
        if k == A.shape[-1]:
            return torch.full(A.batch_shape, torch.inf, dtype=A.dtype.to_real(), device=A.device)
        more = run(PrincipalEigenvectors(A, k + 1, self.largest))
        values = more.multiplier
        return (values[..., k - 1] - values[..., k]).abs()

    def certified(self, value: Any) -> Certificate:
        """Evidence about a matrix, or about a `LowRank` for an operator."""
        with torch.no_grad(), full_precision(self.A.device):
            if isinstance(self.A, Operator):
                return self._certify_by_products(self.A, value)
            A, F = ranks.whole(self.A.detach()), ranks.whole(value.detach())
            return certify_function(A, F, self._of_group(), self.width, self.largest)

    def _of_group(self, size: Tensor | float = 0.0) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """From eigenvalues to the function at those of the group, and to a distance of rounding."""
        scalar = scalar_of(self.function)
        posed = MatrixFunction(scalar, self.width, self.largest, size=size)
        dtype = torch.float32 if self.A.dtype in HALF else self.A.dtype.to_real()

        def of_group(values: Tensor) -> tuple[Tensor, Tensor]:
            rounding = posed.rounding(values.to(dtype)).to(values)
            x = scalar.settled(posed.group(values), rounding)
            # A function may have parameters of the dtype of the matrix.
            x = x if scalar.name in NAMED else x.to(dtype)
            return scalar.derivative(x, 0).to(values), rounding

        return of_group

    def _certify_by_products(self, A: Operator, F: LowRank) -> Certificate:
        """The certificate in a small space that contains `F` and the eigenvectors of the group.

        These come from a second search, with another start than the first.
        """
        A = _fixed(A)
        k, n, mesh = self.width, A.shape[-1], ranks.mesh_of(*A.tensors)
        row = fixed_rows(n, A.dtype.to_real(), A.device)[1].flip(-1)
        start = torch.stack([row.roll(i) for i in range(k)], -1).to(A.dtype)
        found = run(PrincipalEigenvectors(A, k, self.largest), init=start, report=False)
        left, right = (ranks.whole(x.detach()).to(A.dtype) for x in F.tensors)
        group = ranks.whole(found.value)
        batch = A.batch_shape
        columns = [x.expand(*batch, *x.shape[-2:]) for x in (left.mT, right.mH, group)]
        S = torch.linalg.qr(torch.cat(columns, -1)).Q
        rows = ranks.replicate(S.mT, mesh)
        images = ranks.whole(A.matvec(rows)).mT
        if not A.symmetric:
            images = 0.5 * (images + ranks.whole(A.rmatvec(rows)).mT)
        inside, small = S.mH @ images, (S.mH @ left.mT) @ (right @ S)
        size = size_of(A, group.mT).squeeze(-1).double()
        outside = images - S @ inside
        beside = sum(torch.linalg.matrix_norm(outside @ x).square() for x in (small, small.mH))
        beside = torch.as_tensor(beside).double().sqrt() / one_if_zero(size)
        of_group = self._of_group(COARSER * size.unsqueeze(-1))
        return certify_function(inside, small, of_group, k, self.largest, beside, size)


class FunctionOfSpectrum:
    """The one way to a function of the spectrum, at the end of its recipe."""

    def __init__(self, problem: SpectralFunction) -> None:
        self.problem = problem

    def account(self, tensors: Tensors) -> Account:
        A, k = tensors["A"], self.problem.k
        group = "the eigenpairs that are asked for"
        if isinstance(A, Operator):
            _, solver, why = PrincipalEigenvectors(A, k).choice()
            how = f"{abbreviated(solver)}: products with A for {group}, and a small decomposition"
            return Account(how, why, group, f"{IMPLICIT!r}: {BY_PRODUCTS}")
        complexes, n = A.is_complex(), A.shape[-1]
        k = None if k == n else k
        copies, words = (2, " of the real embedding, twice the size") if complexes else (1, "")
        like = A
        if complexes:
            like = torch.ones((), dtype=A.dtype.to_real(), device=A.device)
            like = like.expand(*A.shape[:-2], 2 * n, 2 * n)
            k = None if k is None else 2 * k
        whole = f"decomposition{words}"
        derivative = f"{IMPLICIT!r}: divided differences of the function"
        if not takes_group(like, k):
            why = "all eigenpairs are asked for, or so many that a decomposition finds them faster"
            return Account(whole, why, IN_WORDS[Decomposition], derivative)
        problem = PrincipalEigenvectors(like, k, copies=copies)
        _, solver, why = problem.choice()
        first, then = problem.course(solver)
        kinds = dict.fromkeys(IN_WORDS[kind] for kind in problem.may_keep(solver))
        return Account(
            f"{abbreviated(solver)}: {first}, for {group}{words}",
            why,
            ", or ".join([group, *kinds]),
            f"{derivative} inside of the group, and outside {IMPLICIT.words}",
            (*then, f"a {whole} where eigenvalues count as zero or parameters get gradients"),
        )

    def run(self, tensors: Tensors, report: bool, throw: bool) -> Ended:
        return self.problem.changed(A=tensors["A"]).solution(report)


def _way(problem: SpectralFunction, solver: Solver, gradient: Gradient, init: Any) -> Recipe:
    given = {"solver": (solver, AUTO), "gradient": (gradient, IMPLICIT), "init": (init, None)}
    for name, (x, usual) in given.items():
        if x is not usual and x != usual:
            raise TypeError(
                f"{name}={x!r} does not serve SpectralFunction, which has one way to its "
                "solution; leave it out"
            )
    return Recipe((), FunctionOfSpectrum(problem.bare()))


register(SpectralFunction, _way, lambda problem: ([], problem.bare()))
PROBLEM.append(SpectralFunction)


def _fixed(A: Operator) -> Operator:
    """The operator without its graph, in float32 if it has fewer digits."""
    parts = (x.detach() for x in A.tensors)
    return A.with_tensors([x.float() if x.dtype in HALF else x for x in parts])
