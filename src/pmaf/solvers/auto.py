"""The default solver, which chooses another solver for each problem.

Each choice is a table. Its lines are asked in order, and the first that applies says which solver
runs; `pmaf.explain` prints the reason that stands beside it. The conditions look at shapes, dtypes,
devices and options, never at numbers. The comment on each threshold names the benchmark that it was
measured with; other machines may need other thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pmaf import native
from pmaf.operators.base import Operator
from pmaf.runtime.modes import plain
from pmaf.solvers.adaptive import Adaptive
from pmaf.solvers.base import Eigenvectors, Minimum, Outcome, SingularVectors, Solver
from pmaf.solvers.cholesky import Cholesky
from pmaf.solvers.dense import Dense
from pmaf.solvers.krylov import Krylov
from pmaf.solvers.reduction import Reduction, are_few, is_compiled, takes_least_squares
from pmaf.solvers.secular import Secular
from pmaf.solvers.singular import SVD


@dataclass(frozen=True)
class Auto(Solver):
    """The fastest solver for the problem at hand among those that are globally optimal.

    >>> import torch, pmaf
    >>> A = torch.diag(torch.tensor([3.0, 1.0, 2.0]))
    >>> pmaf.ied(A, solver=pmaf.solvers.Auto()).values.round(decimals=3)
    tensor(3.)
    """

    solves = (Minimum, Eigenvectors, SingularVectors)

    def solve(self, problem: Any, *, init: Tensor | None = None, report: bool = True) -> Outcome:
        return self.resolve(problem).solve(problem, init=init, report=report)

    def resolve(self, problem: Any) -> Solver:
        return problem.choice().solver


class Line(NamedTuple):
    """A line of a table: where `applies` is true, `solver` runs, for the `reason`."""

    applies: Callable[..., bool]
    solver: Solver
    reason: str


Table = tuple[Line, ...]


def chosen(table: Table, problem: Any) -> Line:
    """The first line that applies; the last one always does."""
    for line in table:
        if line.applies(problem):
            return line
    raise AssertionError("the last line of a table applies to every problem")


# Created at import: constructing a solver serialises it to text, which costs more than a small
# solve.
AUTO, KRYLOV, SECULAR = Auto(), Krylov(), Secular()
DENSE, _CHOLESKY, _ADAPTIVE, _REDUCTION = Dense(), Cholesky(), Adaptive(), Reduction()
_SVD = SVD()

# The least number of columns, and of entries of all Gram matrices together, for which a Cholesky
# factor is faster than an eigendecomposition: `pmaf bench less-crossover`.
_FACTORED_COLUMNS, _FACTORED_ENTRIES = 12, 40_000
# The most rows for which compiled kernels are faster than power steps on a matrix with a dominant
# eigenvalue: `pmaf bench ied`, family "paper".
_REDUCED_ROWS = 128
# The largest min(m, n) for which compiled kernels solve least squares faster than two Cholesky
# factors: `pmaf bench less-crossover`.
_REDUCED_COLUMNS = 256
# The most rows for which compiled kernels find all eigenpairs of one matrix faster than LAPACK, and
# those of several: `python benchmarks/spectral_whole.py`.
_WHOLE_ROWS, _WHOLE_ROWS_OF_MANY, _MANY = 12, 32, 4
# The most matrices of float32 with weights whose null vectors are faster found one by one, around a
# decomposition, than several at a time from Gram matrices: `pmaf bench calls`, "nullspace weights".
DECOMPOSED_ALONE = 16
# The entries of all general matrices together from which on power steps pay: `pmaf bench calls`,
# "ied symmetric=False".
_GENERAL_ENTRIES = 20_000
# A trace has to know in advance whether a solve returns an eigenbasis. Below this many rows it
# takes a decomposition; above, power steps are faster in `pmaf bench ied-crossover`.
_TRACED_ROWS = 128


# Conditions.


def _is_any(problem: Any) -> bool:
    return True


def _is_on_device(problem: Any) -> bool:
    """Whether a symmetric problem is on an accelerator, and its numbers are known."""
    return problem.symmetric and not problem.A.is_cpu and plain(problem.A)


def _is_known_by_products(problem: Any) -> bool:
    return isinstance(problem.A, Operator)


def _is_pair_of_products(problem: Any) -> bool:
    """The same for a pair, one of whose matrices may be dense."""
    return isinstance(problem.A, Operator) or isinstance(problem.M, Operator)


def _has_operator(problem: Any) -> bool:
    return problem.operator is not None


def _is_reduced_minimum(problem: Any) -> bool:
    """Whether compiled kernels are the fastest for a batch of least squares."""
    A = problem.A
    small = are_reduced_columns(*A.shape[-2:]) and A.shape[:-2] == problem.batch_shape
    return small and plain(A) and takes_least_squares(A)


def are_reduced_columns(m: int, n: int) -> bool:
    """The same for matrices of this shape, if there are kernels for them."""
    return min(m, n) <= _REDUCED_COLUMNS


def are_decomposed(shape: torch.Size, dtype: torch.dtype, sphere: bool) -> bool:
    """Whether kernels around a decomposition are the fastest for least squares of this shape.

    `sphere` says that there are no options.
    """
    *batch, m, n = shape
    entries = 4 * m * n if dtype.is_complex else m * n
    if not native.available or entries > native.UNIT_ENTRIES:
        return False
    if not sphere or dtype.is_complex:
        return True
    factored = m >= n >= _FACTORED_COLUMNS and math.prod(batch) * n * n >= _FACTORED_ENTRIES
    return dtype == torch.float64 and not factored


def _is_not_factored(problem: Any) -> bool:
    """Whether a Cholesky factor does not serve least squares."""
    A, batch = problem.A, problem.batch_shape
    m, n = A.shape[-2:]
    return not (m >= n >= _FACTORED_COLUMNS and A.shape[:-2] == batch)


def _is_factored_slowly(problem: Any) -> bool:
    """Whether there are few entries, where the size of the batch is known."""
    # A traced program may run on batches of any size, so that their size must not decide.
    n, A = problem.A.shape[-1], problem.A
    return plain(A) and problem.batch_shape.numel() * n * n < _FACTORED_ENTRIES


def _is_reduced(problem: Any) -> bool:
    """Whether compiled kernels are the fastest for eigenvectors of matrices like `A`."""
    if not problem.symmetric:
        return False
    A = problem.A
    # One vector of a pair of copies gives the other.
    k = 1 if problem.copies == 2 == problem.width else problem.width
    if plain(A):
        return are_reduced(k, A.shape[-1]) and native.takes_eigenvectors(A)
    return is_compiled(A, k)


def are_reduced(k: int, n: int) -> bool:
    """The same for k eigenvectors of matrices with n rows, if there are kernels for them."""
    return n <= _REDUCED_ROWS and are_few(k, n)


def _has_reduced_spectrum(problem: Any) -> bool:
    """Whether compiled kernels find all eigenpairs of a matrix faster than a decomposition."""
    A = problem.A
    whole = is_reduced_whole(A.shape[-1], A.shape[:-2].numel())
    return whole and native.available and A.dtype in native.EIGENVECTORS


def is_reduced_whole(n: int, count: int) -> bool:
    """The same for so many matrices with n rows, if there are kernels for them."""
    return n <= _WHOLE_ROWS or (n <= _WHOLE_ROWS_OF_MANY and count >= _MANY)


def is_general_and_small(problem: Any) -> bool:
    """Whether there are too few entries of general matrices for power steps."""
    small = problem.A.numel() < _GENERAL_ENTRIES
    return small and not problem.symmetric and problem.A.shape[-1] > 1


def _is_traced_and_small(problem: Any) -> bool:
    A = problem.A
    return problem.symmetric and A.shape[-1] < _TRACED_ROWS and not plain(A)


def _is_mixed(problem: Any) -> bool:
    """Whether several singular values occur twice, whose vectors kernels would mix."""
    return problem.copies == 2 and problem.width > 2


def _is_double(problem: Any) -> bool:
    # Only numbers that float32 holds have a Gram matrix that kernels may work on.
    return not problem.single


def _is_reduced_gram(problem: Any) -> bool:
    return is_compiled(problem.A, 1 if problem.copies == 2 else problem.width)


# Lines that recipes by compiled kernels share with a table, or have alone.

REDUCED_MINIMUM = Line(
    _is_reduced_minimum,
    _REDUCTION,
    f"for float32 and min(m, n) up to {_REDUCED_COLUMNS} compiled kernels are the fastest, if no "
    "two problems share a matrix",
)
DECOMPOSED_MINIMUM = Line(
    are_decomposed,
    SECULAR,
    f"up to {native.UNIT_ENTRIES:,} entries of a matrix, compiled kernels around a decomposition "
    "are faster than operations of torch",
)
REDUCED = Line(
    _is_reduced,
    _REDUCTION,
    f"up to {_REDUCED_ROWS} rows compiled kernels, which compute few eigenpairs and no others, are "
    "faster than power steps or a decomposition",
)
REDUCED_GRAM = Line(
    _is_reduced_gram,
    _REDUCTION,
    "in float64 AᵀA has all digits of a matrix of float32, and compiled kernels compute few "
    "eigenpairs of it and no others",
)
EXACT_SVD = Line(
    _is_double, _SVD, "in this dtype AᵀA would lose digits of A, so that A itself is decomposed"
)
GENERAL = Line(
    is_general_and_small,
    DENSE,
    "of a small general matrix a decomposition finds the dominant eigenvector faster than power "
    "steps prove one",
)
# The most entries of all matrices for which compiled kernels on the host, with a copy each way, are
# taken instead of the launches of a straight-line program, of which least squares have most. They
# follow from counts: at 6 µs a launch and 20 µs a wait, kernels solve about as many in that time.
HOST_ENTRIES, HOST_MINIMUM_ENTRIES = 1 << 10, 1 << 13
# On a device without compiled kernels. Nothing was measured there: the reasons are counts of
# launches and waits (docs/devices.md).
BATCHED = Line(
    _is_on_device,
    DENSE,
    "on a device one batched decomposition takes fewer launches and waits than several attempts",
)
BATCHED_MINIMUM = Line(
    _is_on_device,
    SECULAR,
    "on a device one batched decomposition and a fixed number of steps take the fewest launches "
    "and waits",
)
BATCHED_GRAM = Line(
    _is_on_device,
    _SVD,
    "on a device eigenvectors of AᵀA are found for all matrices together, and singular vectors of "
    "A, if it is not small, one matrix after the other",
)
_BY_PRODUCTS = "A is known by its products, and this search needs nothing else"

# Tables.

# A quadratic function on the sphere.
MINIMUM: Table = (
    Line(_has_operator, KRYLOV, _BY_PRODUCTS),
    Line(_is_any, SECULAR, "in its eigenvectors every quadratic function is a scalar equation"),
)
# Least squares on the sphere.
LEAST_SQUARES: Table = (
    Line(_is_known_by_products, KRYLOV, _BY_PRODUCTS),
    REDUCED_MINIMUM,
    BATCHED_MINIMUM,
    # Problems with one matrix share its eigendecomposition; a factor depends on their μ.
    Line(
        _is_not_factored,
        SECULAR,
        f"matrices that are wide, have fewer than {_FACTORED_COLUMNS} columns, or belong to "
        "several problems are decomposed once",
    ),
    Line(
        _is_factored_slowly,
        SECULAR,
        f"for fewer than {_FACTORED_ENTRIES:,} entries of all AᵀA together an eigendecomposition "
        "is faster than two Cholesky factors",
    ),
    Line(
        _is_any,
        _CHOLESKY,
        f"from {_FACTORED_ENTRIES:,} entries of all AᵀA together on, and in traces, two Cholesky "
        "factors are faster than an eigendecomposition",
    ),
)
# Eigenvectors.
EIGENVECTORS: Table = (
    Line(_is_pair_of_products, KRYLOV, _BY_PRODUCTS),
    REDUCED,
    BATCHED,
    Line(
        _is_traced_and_small,
        DENSE,
        "a trace has to know in advance what a solve returns, and a decomposition always returns "
        "the same",
    ),
    Line(
        _is_any,
        _ADAPTIVE,
        "the numbers decide what is fastest, and an attempt takes little time compared with the "
        "next one",
    ),
)
# All eigenpairs, for functions of the spectrum.
EIGENPAIRS: Table = (
    Line(
        _has_reduced_spectrum,
        _REDUCTION,
        f"up to {_WHOLE_ROWS} rows, and {_WHOLE_ROWS_OF_MANY} in batches, compiled kernels find "
        "all eigenpairs faster than a decomposition",
    ),
    Line(
        _is_any,
        DENSE,
        "all eigenpairs are asked for, or so many that a decomposition finds them faster",
    ),
)
# Right singular vectors, and triplets.
SINGULAR: Table = (
    Line(_is_known_by_products, KRYLOV, _BY_PRODUCTS),
    Line(
        _is_mixed,
        _SVD,
        "every singular value of a complex matrix occurs twice, and kernels would mix the vectors "
        "of several",
    ),
    EXACT_SVD,
    REDUCED_GRAM,
    Line(
        _is_any,
        _SVD,
        "for so many columns or vectors a whole decomposition is faster than compiled kernels, or "
        "there are none",
    ),
)
