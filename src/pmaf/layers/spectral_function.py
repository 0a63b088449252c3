"""The problem of functions of the spectrum: reports and certificates of `pmaf.spectral`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, nn

from pmaf import errors, native
from pmaf.autograd.traced import is_traced
from pmaf.certificate import certify_function
from pmaf.executors.base import BY_PRODUCTS, Account
from pmaf.executors.direct import Ended
from pmaf.executors.spectral import DIFFERENCES, WholeSpectrum
from pmaf.gradients import Gradient
from pmaf.layers.eigenvectors import PrincipalEigenvectors
from pmaf.layers.host import on_host
from pmaf.layers.spectral import (
    COARSER,
    Function,
    find_by_products,
    function_of,
    is_few,
    require_few,
    require_square,
    scalar_of,
    size_of,
    takes_group,
)
from pmaf.linalg.decompositions import eigenvalues
from pmaf.linalg.divided_differences import NAMED, Scalar
from pmaf.linalg.matrix_function import MatrixFunction
from pmaf.linalg.products import frobenius, one_if_zero
from pmaf.linalg.roundings import HALF, widened
from pmaf.linalg.symmetric_part import fixed_rows
from pmaf.operators import LowRank, Operator, as_operator
from pmaf.operators.base import known_by_products
from pmaf.problem import Problem
from pmaf.recipe import AUTO, IMPLICIT, Place, Recipe, register, run, short_recipe
from pmaf.reductions.base import Report, Tensors
from pmaf.reductions.precision import of_short
from pmaf.runtime import ranks
from pmaf.runtime.modes import derivatives_around, forward_mode, full_precision, plain
from pmaf.runtime.text import abbreviated
from pmaf.solution import Certificate
from pmaf.solvers import Reduction, Solver
from pmaf.solvers.auto import BATCHED, EIGENPAIRS, chosen
from pmaf.tangent.kept import Decomposition


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
    options = ("function", "k", "largest")
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
        values = _eigenvalues(fixed).flip(-1)
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
            x = scalar.settled(posed.of_group(values), rounding)
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
        row = fixed_rows[n, A.dtype.to_real(), A.device][1].flip(-1)
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
        size = widened(size_of(A, group.mT).squeeze(-1))
        outside = images - S @ inside
        beside = sum(torch.linalg.matrix_norm(outside @ x).square() for x in (small, small.mH))
        beside = widened(torch.as_tensor(beside)).sqrt() / one_if_zero(size)
        of_group = self._of_group(COARSER * size.unsqueeze(-1))
        return certify_function(inside, small, of_group, k, self.largest, beside, size)


def _eigenvalues(A: Tensor) -> Tensor:
    """All eigenvalues of Hermitian matrices in ascending order."""
    if isinstance(chosen(EIGENPAIRS, SpectralFunction(A, "one")).solver, Reduction) and plain(A):
        values, _, failed = native.largest_pairs(A, A.shape[-1], largest=False)
        if failed is None:
            return values
    return eigenvalues(A)


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
        place = None if A.is_cpu else Place(A.device, True)
        short = _short_way(self.problem.changed(A=A), None, place)
        if short is not None:
            return short.account({"A": A})
        complexes, n = A.is_complex(), A.shape[-1]
        k = None if k == n else k
        copies, words = (2, " of the real embedding, twice the size") if complexes else (1, "")
        like = A
        if complexes:
            like = torch.ones((), dtype=A.dtype.to_real(), device=A.device)
            like = like.expand(*A.shape[:-2], 2 * n, 2 * n)
            k = None if k is None else 2 * k
        whole = f"decomposition{words}"
        derivative = DIFFERENCES
        if not takes_group(like, k):
            why = "all eigenpairs are asked for, or so many that a decomposition finds them faster"
            return Account(whole, why, Decomposition.words, derivative)
        problem = PrincipalEigenvectors(like, k, copies=copies)
        _, solver, why = problem.choice()
        first, then = problem.course(solver)
        kinds = dict.fromkeys(kind.words for kind in problem.may_keep(solver))
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


def _short_way(posed: SpectralFunction, init: Any, place: Place | None) -> Recipe | None:
    """The recipe of a named function of a dense matrix all of whose eigenpairs are found."""
    found = None if place is None else on_host(_short_way, posed, init, place)
    if found is not None:
        return found
    A, name = posed.A, posed.function
    assert isinstance(A, Tensor)
    if A.numel() == 0 or not isinstance(name, str):
        return None
    steps = of_short(A.dtype)
    dtype = torch.float32 if steps else A.dtype
    function = _posed(NAMED[name], posed.k, posed.largest, A.shape[-1])
    line = BATCHED if place is not None else chosen(EIGENPAIRS, posed.changed(A=A.to(dtype)))
    kernels = isinstance(line.solver, Reduction)
    if place is None and not kernels and (dtype.is_complex or is_few(A, function.k)):
        return None
    common = functools.partial(function_of, posed=function)
    bare = posed.bare()
    return Recipe(
        tuple(steps), WholeSpectrum(bare, function, A.shape, dtype, kernels, line.reason, common)
    )


register(SpectralFunction, _way, lambda problem: ([], problem.bare()), _short_way)


@overload
def spectral(
    A: Tensor, function: Function, k: int | None = None, *, largest: bool = True
) -> Tensor: ...


@overload
def spectral(
    A: Operator, function: Function, k: int | None = None, *, largest: bool = True
) -> LowRank: ...


def spectral(
    A: Tensor | Operator, function: Function, k: int | None = None, *, largest: bool = True
) -> Tensor | LowRank:
    """`V f(Λ) Vᵀ` of all eigenpairs of a symmetric matrix, or of the k top ones, differentiable.

    Derivatives are exact where eigenvalues repeat, inside the group of the k eigenvalues and
    outside. The group itself has to be apart from the other eigenvalues; where the k-th
    eigenvalue equals the next, there is no derivative, and gradients are finite.

    Args:
        A: `(*, n, n)`, of float32 or float64; float16 and bfloat16 are computed in float32. Its
            symmetric part is used, and gradients are symmetric. Of complex64 or complex128 the
            Hermitian part is used. Or, with k, a sparse tensor or an operator of
            `pmaf.operators`.
        function: "sqrt", "inverse", "inverse_sqrt", "log", "exp", "square", "identity", "one", or
            a function from tensors to tensors of the same shape, element by element, that torch
            can differentiate. Gradients reach the parameters of such a function.
        k: how many eigenpairs; None for all.
        largest: those of the largest eigenvalues, or of the smallest.

    Returns:
        `(*, n, n)`, symmetric or Hermitian; for an operator or a sparse tensor the same matrix as a
        `pmaf.operators.LowRank`, which is not formed.

    >>> import torch, pmaf
    >>> pmaf.spectral(torch.diag(torch.tensor([9.0, 4.0, 4.0])), "sqrt", 1)
    tensor([[3., 0., 0.],
            [0., 0., 0.],
            [0., 0., 0.]])
    """
    # A function may close over tensors, which no cache may hold.
    if isinstance(function, str):
        given = {"A": A, "init": None}
        recipe = short_recipe(SpectralFunction, given, (function, k, largest), None, None)
        if recipe is not None:
            with full_precision(A.device):
                found = recipe.run(given)
            if found is not None:
                return found[0]
    return _commonly(A, function, k, largest)


def _commonly(
    A: Tensor | Operator, function: Function, k: int | None, largest: bool
) -> Tensor | LowRank:
    scalar = scalar_of(function)
    if known_by_products(A):
        return find_by_products(as_operator(A), scalar, k, largest)[0]
    require_square(A, k)
    assert isinstance(A, Tensor)
    if not plain(A) and isinstance(function, str) and _is_whole(A):
        return run(SpectralFunction(A, function, k, largest), report=False).value
    if ranks.is_spread(A):
        parts = ranks.Parts(A.shape[:-2], {"A": (A, 2)})
        return parts.join(spectral(parts.inputs["A"], function, k, largest=largest))
    if A.dtype in HALF:
        return spectral(A.float(), function, k, largest=largest).to(A.dtype)
    with full_precision(A.device):
        return function_of(A, _posed(scalar, k, largest, A.shape[-1]))


def _is_whole(A: Tensor) -> bool:
    """Whether one operator stands for the call in a trace, which differentiates it at most once."""
    again = torch.compiler.is_compiling() and derivatives_around() > 0
    return is_traced(A) and not again and not forward_mode(A)


def _posed(scalar: Scalar, k: int | None, largest: bool, n: int) -> MatrixFunction:
    return MatrixFunction(scalar, None if k == n else k, largest)


class Spectral(nn.Module):
    """`pmaf.spectral` as a module; a function that is a module is a part of it.

    >>> import torch, pmaf
    >>> pmaf.Spectral("inverse_sqrt", k=3)
    Spectral(function='inverse_sqrt', k=3, largest=True)
    """

    def __init__(self, function: Function, k: int | None = None, *, largest: bool = True) -> None:
        super().__init__()
        scalar_of(function)
        errors.require_count("k", k)
        self.function, self.k, self.largest = function, k, largest

    def forward(self, A: Tensor) -> Tensor:
        return spectral(A, self.function, self.k, largest=self.largest)

    def __prepare_scriptable__(self) -> None:
        errors.refuse_script(self)

    def extra_repr(self) -> str:
        names = ("k", "largest")
        if not isinstance(self.function, nn.Module):
            names = ("function", *names)
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def _fixed(A: Operator) -> Operator:
    """The operator without its graph, in float32 if it has fewer digits."""
    parts = (x.detach() for x in A.tensors)
    return A.with_tensors([x.float() if x.dtype in HALF else x for x in parts])
