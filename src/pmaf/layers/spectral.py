"""Functions of the spectrum: `V f(Λ) Vᵀ` of the eigenpairs of a symmetric matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from pmaf import errors
from pmaf.autograd.attach import find, solve_opaquely
from pmaf.autograd.forward_mode import constant
from pmaf.autograd.image import image
from pmaf.autograd.spectral import (
    Group,
    differentiable,
    differentiable_group,
    forward,
    outside,
)
from pmaf.certificate import certify_function
from pmaf.gradients import Gradient, Implicit
from pmaf.layers.eigenvectors import PrincipalEigenvectors
from pmaf.layers.hermitian import EmbeddedEigenvectors
from pmaf.linalg import sphere
from pmaf.linalg.decompositions import eigenvalues
from pmaf.linalg.divided_differences import NAMED, Scalar, of_callable
from pmaf.linalg.embedding import complex_matrix, real_matrix
from pmaf.linalg.matrix_function import MatrixFunction
from pmaf.linalg.products import frobenius, norm, one_if_zero, symmetric_part
from pmaf.linalg.roundings import EQUAL, LOOSE, SEARCHED, OutOfRangeError, merge_tolerance
from pmaf.linalg.symmetric_part import fixed_rows
from pmaf.operators import LowRank, Operator, as_operator
from pmaf.operators.base import known_by_products
from pmaf.runtime import ranks
from pmaf.runtime.log import took
from pmaf.runtime.modes import (
    derivatives_around,
    forward_mode,
    full_precision,
    plain,
    recorded,
    transformed,
)
from pmaf.runtime.threads import OneThread
from pmaf.solution import Certificate, Solution
from pmaf.solvers import Auto, Solver
from pmaf.solvers.auto import DENSE
from pmaf.tangent.kept import Decomposition

Function = str | Callable[[Tensor], Tensor]

_AUTO, _IMPLICIT = Auto(), Implicit()


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
    scalar = _scalar(function)
    if known_by_products(A):
        return _by_products(as_operator(A), scalar, k, largest)[0]
    _require(A, k)
    assert isinstance(A, Tensor)
    if ranks.is_spread(A):
        parts = ranks.Parts(A.shape[:-2], {"A": (A, 2)})
        return parts.join(spectral(parts.inputs["A"], function, k, largest=largest))
    if A.dtype in _HALF:
        return spectral(A.float(), function, k, largest=largest).to(A.dtype)
    return _dense(A, MatrixFunction(scalar, None if k == A.shape[-1] else k, largest))


_HALF = (torch.float16, torch.bfloat16)


def _dense(A: Tensor, posed: MatrixFunction) -> Tensor:
    """The function of a tensor, real or complex."""
    if not A.is_complex():
        return _real(A, posed, PrincipalEigenvectors)
    # Every eigenvalue of the embedding occurs twice.
    posed = replace(posed, k=None if posed.k is None else 2 * posed.k)
    return complex_matrix(_real(real_matrix(A), posed, EmbeddedEigenvectors))


def _real(A: Tensor, posed: MatrixFunction, kind: type[PrincipalEigenvectors]) -> Tensor:
    """The function of a tensor of float32 or float64; `kind` finds the vectors of a group."""
    if 0 in A.shape:
        return symmetric_part(A)
    with full_precision(A.device), OneThread(A):
        found = _group(A, posed, kind) if _takes_group(A, posed) else None
        if isinstance(found, Group):
            took("spectral: group")
            return differentiable_group(posed, A, found, _decomposition)
        values, vectors = _decomposition(A) if found is None else found
        known = posed.scalar.derivative(posed.arguments(values), 0)
        if plain(A):
            _check(posed, values, known)
        learned = torch.is_grad_enabled() and recorded(known)
        # A function that closes over a tensor of a transform cannot be called by the backward
        # pass of another transform.
        traced = torch.compiler.is_compiling() and derivatives_around() > 0
        if traced or forward_mode(A, known) or (learned and transformed()):
            return forward(posed, A, values, vectors)
        return differentiable(replace(posed, learned=learned), A, values, vectors)


def _takes_group(A: Tensor, posed: MatrixFunction) -> bool:
    """Whether k eigenpairs and a linear system are faster than a whole decomposition."""
    n, k = A.shape[-1], posed.k
    few = k is not None and k <= min(_GROUP_MOST, n // _GROUP_SHARE)
    return few and plain(A) and not forward_mode(A)


# The largest k, and the least n/k, for which this is so: `python benchmarks/spectral_group.py`.
_GROUP_MOST, _GROUP_SHARE = 8, 3


def _group(
    A: Tensor, posed: MatrixFunction, kind: type[PrincipalEigenvectors]
) -> Group | tuple[Tensor, Tensor] | None:
    """The eigenpairs of the group; None where all are needed, or these if they are known."""
    scalar, fixed = posed.scalar, A.detach()
    # The solvers find the largest eigenvalues.
    problem = kind(fixed if posed.largest else -fixed, posed.k)
    try:
        found = find(problem, None, problem.best_solver(), False, False)
    except OutOfRangeError:  # a decomposition changes units
        return None
    if isinstance(found.kept, Decomposition):
        rows, values = found.kept
        return (values, rows.mT) if posed.largest else (-values.flip(-1), rows.flip(-2).mT)
    values = found.multiplier if posed.largest else -found.multiplier
    if scalar.domain != "any":
        # Whether an eigenvalue counts as zero depends on the norm of the matrix.
        size = frobenius(fixed).squeeze(-1)
        if bool((values.abs() <= merge_tolerance(A.dtype) * size).any()):
            return None
    known = scalar.derivative(scalar.settled(values, torch.zeros_like(values)), 0)
    # A decomposition raises the errors, and differentiates parameters.
    proper = isinstance(known, Tensor) and known.shape == values.shape
    if not proper or not bool(torch.isfinite(known).all()):
        return None
    if torch.is_grad_enabled() and recorded(known):
        return None
    _require_single(scalar, values, known)
    return Group(values, found.value, found.gap, found.kept)


def _by_products(
    A: Operator, scalar: Scalar, k: int | None, largest: bool
) -> tuple[LowRank, Solution]:
    """`V C Vᴴ` with `C = f(VᴴAV)`, of which nothing is formed but `C`, and the search for `V`."""
    _require_few(A, k)
    dtype = A.dtype
    if dtype in _HALF:
        A = A.with_tensors([x.float() for x in A.tensors])
    mesh = ranks.mesh_of(*A.tensors)
    found = PrincipalEigenvectors(A, k, largest).run(_AUTO, _IMPLICIT, report=False)
    V = outside(ranks.whole(found.value))
    rows = V.detach().mT
    # The eigenvalues as a matrix: where they repeat, only this one has a derivative.
    inside = rows.conj() @ image(A, rows).mT
    C = _dense(inside, MatrixFunction(scalar, None, largest, size=_COARSER * _size(A, rows)))
    parts = V.mT, C @ V.mH
    return LowRank(*(ranks.replicate(x.to(dtype), mesh) for x in parts)), found


# The eigenvalues of a search have errors of more than one decomposition.
_COARSER = SEARCHED / EQUAL


def _size(A: Operator, rows: Tensor) -> Tensor:
    """About the spectral norm of a symmetric operator, from below, `(*, 1)`."""
    x = sphere.references(rows.real)[1].to(rows).expand_as(rows[..., :1, :])
    mesh, length = ranks.mesh_of(*A.tensors), norm(x)
    with torch.no_grad(), full_precision(A.device):
        for _ in range(3):
            x = ranks.replicate(x / one_if_zero(length).unsqueeze(-1), mesh)
            x = ranks.whole(A.matvec(x))
            length = norm(x)
    return length


@dataclass(frozen=True, eq=False)
class SpectralFunction:
    """The problem of `pmaf.spectral`, for `pmaf.solve` and `pmaf.certify`.

    The solution is `F = V f(Λ) Vᵀ`. Its multipliers are the eigenvalues of the group, in descending
    order and without gradients, its residual is `‖AF − FA‖ / ‖A‖‖F‖`, and its gap is the distance
    from the group to the next eigenvalue, infinite if there is none.

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

    def __post_init__(self) -> None:
        _scalar(self.function)
        if known_by_products(self.A):
            A = as_operator(self.A)
            object.__setattr__(self, "A", A)
            _require_few(A, self.k)
        else:
            _require(self.A, self.k)

    @property
    def width(self) -> int:
        """Number of eigenpairs."""
        return self.A.shape[-1] if self.k is None else self.k

    def run(
        self,
        solver: Solver,
        gradient: Gradient,
        *,
        init: Tensor | None = None,
        report: bool = True,
        throw: bool = False,
    ) -> Solution:
        """The value of `pmaf.spectral` with a report; `pmaf.solve` calls this."""
        given = {"solver": solver, "gradient": gradient, "init": init}
        for name, usual in (("solver", _AUTO), ("gradient", _IMPLICIT), ("init", None)):
            if given[name] != usual:
                raise TypeError(
                    f"{name}={given[name]!r} does not serve SpectralFunction, which has one way to "
                    "its solution; leave it out"
                )
        value: Any
        A, k, largest = self.A, self.width, self.largest
        if isinstance(A, Operator):
            value, found = _by_products(A, _scalar(self.function), k, largest)
            order = found.multiplier.detach().sort(-1, descending=True).values
            return replace(found, value=value, multiplier=order, gap=self._gap_by_products(A))
        value = spectral(A, self.function, self.k, largest=largest)
        fixed = ranks.whole(A.detach())
        fixed = fixed.float() if fixed.dtype in _HALF else fixed
        fixed, F = 0.5 * (fixed + fixed.mH), ranks.whole(value.detach()).to(fixed)
        values = eigenvalues(fixed).flip(-1)
        n = values.shape[-1]
        blank = torch.zeros_like(values[..., 0])
        gap = torch.full_like(blank, torch.inf)
        if k < n:
            gap = (values[..., :-1] - values[..., 1:])[..., k - 1 if largest else n - k - 1]
        product = frobenius(fixed) * frobenius(F)
        return Solution(
            value=value,
            multiplier=values[..., :k] if largest else values[..., n - k :],
            residual=torch.linalg.matrix_norm((fixed @ F - F @ fixed) / product),
            gap=gap,
            iterations=blank.to(torch.int64),
            converged=torch.isfinite(F).all(-1).all(-1),
        )

    def _gap_by_products(self, A: Operator) -> Tensor:
        """The distance from the group to the next eigenvalue, from a search that finds it, too."""
        A, k = _fixed(A), self.width
        if k == A.shape[-1]:
            return torch.full(A.batch_shape, torch.inf, dtype=A.dtype.to_real(), device=A.device)
        more = PrincipalEigenvectors(A, k + 1, self.largest).run(_AUTO, _IMPLICIT)
        values = more.multiplier.sort(-1, descending=self.largest).values
        return (values[..., k - 1] - values[..., k]).abs()

    def certify(self, value: Any) -> Certificate:
        """Evidence about a matrix, or about a `LowRank` for an operator."""
        shape = (*self.A.shape[:-2], *self.A.shape[-1:] * 2)
        wanted: Any = LowRank if isinstance(self.A, Operator) else Tensor
        if not isinstance(value, wanted) or value.shape != shape:
            got = tuple(value.shape) if hasattr(value, "shape") else type(value).__name__
            raise ValueError(
                f"a solution of this problem is a {wanted.__name__} of shape {shape}; got "
                f"{type(value).__name__} {got}"
            )
        with torch.no_grad(), full_precision(self.A.device):
            if isinstance(self.A, Operator):
                return self._certify_by_products(self.A, value)
            A, F = ranks.whole(self.A.detach()), ranks.whole(value.detach())
            return certify_function(A, F, self._of_group(), self.width, self.largest)

    def _of_group(self, size: Tensor | float = 0.0) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """From eigenvalues to the function at those of the group, and to a distance of rounding."""
        scalar = _scalar(self.function)
        posed = MatrixFunction(scalar, self.width, self.largest, size=size)
        dtype = torch.float32 if self.A.dtype in _HALF else self.A.dtype.to_real()

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
        found = PrincipalEigenvectors(A, k, self.largest).run(
            _AUTO, _IMPLICIT, init=start, report=False
        )
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
        size = _size(A, group.mT).squeeze(-1).double()
        outside = images - S @ inside
        beside = sum(torch.linalg.matrix_norm(outside @ x).square() for x in (small, small.mH))
        beside = torch.as_tensor(beside).double().sqrt() / one_if_zero(size)
        of_group = self._of_group(_COARSER * size.unsqueeze(-1))
        return certify_function(inside, small, of_group, k, self.largest, beside, size)


def _fixed(A: Operator) -> Operator:
    """The operator without its graph, in float32 if it has fewer digits."""
    parts = (x.detach() for x in A.tensors)
    return A.with_tensors([x.float() if x.dtype in _HALF else x for x in parts])


class Spectral(nn.Module):
    """`pmaf.spectral` as a module; a function that is a module is a part of it.

    >>> import torch, pmaf
    >>> pmaf.Spectral("inverse_sqrt", k=3)
    Spectral(function='inverse_sqrt', k=3, largest=True)
    """

    def __init__(self, function: Function, k: int | None = None, *, largest: bool = True) -> None:
        super().__init__()
        _scalar(function)
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


def _scalar(function: Function) -> Scalar:
    if isinstance(function, str):
        if function not in NAMED:
            names = ", ".join(repr(name) for name in NAMED)
            raise ValueError(f"function must be one of {names}, or callable; got {function!r}")
        return NAMED[function]
    if not callable(function):
        raise TypeError(
            f"function must be a name or a function of a tensor; got {type(function).__name__}"
        )
    return of_callable(function)


def _require_few(A: Operator, k: int | None) -> None:
    if k is None:
        raise TypeError(
            f"{A!r} is known by its products, and a function of all its eigenvalues is a dense "
            "matrix; pass k, or A as a dense tensor"
        )
    PrincipalEigenvectors(A, k)  # checks both


def _require(A: Any, k: int | None) -> None:
    errors.require_matrix("A", A, "n, n", or_complex=True)
    n = A.shape[-1]
    if A.shape[-2] != n:
        raise ValueError(f"A must be square, of shape (*, n, n); got {errors.shape_of(A)}")
    if k is not None and (isinstance(k, bool) or not isinstance(k, int)):
        raise TypeError(f"k must be None or an integer; got {k!r}")
    if k is not None and not 1 <= k <= n:
        raise ValueError(f"k must lie between 1 and n = {n}; got {k}")


def _decomposition(A: Tensor) -> tuple[Tensor, Tensor]:
    """All eigenvalues and eigenvectors, as constants."""
    eager = plain(A)
    fixed = A.detach() if eager or torch.compiler.is_compiling() else constant(A)
    problem = PrincipalEigenvectors(fixed)
    try:
        solve = find if eager else solve_opaquely
        found = solve(problem, None, DENSE, False, False)
    except OutOfRangeError:  # the operator changes units
        found = solve_opaquely(problem, None, DENSE, False, False)
    assert isinstance(found.kept, Decomposition)
    return found.kept.values, found.kept.rows.mT


def _check(posed: MatrixFunction, values: Tensor, found: Any) -> None:
    """The function is defined at the eigenvalues, and acts on each of them alone."""
    scalar, x = posed.scalar, posed.group(values)
    named = scalar.name in NAMED
    if not isinstance(found, Tensor) or found.shape != x.shape:
        got = errors.shape_of(found) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"function must return a tensor of the shape of its argument, {errors.shape_of(x)}; "
            f"got {got}"
        )
    bad = ~torch.isfinite(found.detach())
    if bad.any():
        worst = float(x[bad][0])
        size = float(values.abs().amax())
        remedy = "choose another function"
        if named:
            remedy = (
                f"add a multiple of the identity to A, or ask for the k eigenvalues that are "
                f"larger (eigenvalues up to {merge_tolerance(x.dtype):.1e} times the largest "
                "count as zero)"
            )
        raise ValueError(
            f"{scalar.name if named else 'function'} is not finite at the eigenvalue {worst:.3g} "
            f"of A, whose largest eigenvalue in modulus is {size:.3g}; {remedy}"
        )
    _require_single(scalar, x, found)


def _require_single(scalar: Scalar, x: Tensor, found: Tensor) -> None:
    """A function of one half of the numbers gives the same as a function of all of them."""
    half = x.shape[-1] // 2
    if scalar.name in NAMED or half == 0:
        return
    with torch.no_grad():
        again = torch.cat([scalar.derivative(y, 0) for y in (x[..., :half], x[..., half:])], -1)
    difference = (again - found.detach()).abs()
    if (difference > LOOSE * torch.finfo(x.dtype).eps * found.detach().abs().amax()).any():
        raise ValueError(
            "function must act on each eigenvalue alone, but its results change with the other "
            "eigenvalues; multiply the result of pmaf.spectral by what depends on all of them"
        )
