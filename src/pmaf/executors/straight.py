"""Executors for devices without compiled kernels: straight-line programs, with one look at the end.

What follows from shapes, dtypes and options is found when an executor is made. A call runs one
program of `straight/`, reads its evidence, and leaves one node in the graph. Where the evidence
fails, the common path takes the call, asks the device as often as it has to, and raises the errors.
The derivative is another program, which asks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from pmaf import native
from pmaf.autograd.eager import may_compile
from pmaf.autograd.node import Saved, attach_solved
from pmaf.executors.base import IMPLICIT, Account, Common, Executor, records, solved_again
from pmaf.executors.singular import Triplets
from pmaf.linalg.symmetry import look_at_symmetry
from pmaf.reductions.base import Found, Tensors
from pmaf.runtime.checks import looks
from pmaf.runtime.log import took
from pmaf.runtime.modes import full_precision
from pmaf.solvers.auto import BATCHED, BATCHED_GRAM, BATCHED_MINIMUM
from pmaf.straight import eigenvectors, least_squares, singular
from pmaf.straight.evidence import Evidence
from pmaf.straight.form import Form
from pmaf.tangent.kept import Basis, Kept, Whole

_DERIVATIVE = (
    f"{IMPLICIT!r}: a program without questions to the device, and operations of torch where the "
    "gradient is differentiated again"
)
_FAILS = "the one number that the host reads says that a result is not proved"
_Result = TypeVar("_Result")


def _run(device: torch.device, program: Callable[..., _Result], *given: Any) -> _Result | None:
    """The result of a program; None where a decomposition fails, as for numbers that are nan."""
    try:
        with full_precision(device):
            return program(*given)
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        return None


def _proved(way: str, evidence: Evidence, parts: Found, dims: int) -> Found | None:
    """The parts of a result if it is proved; where nobody looks, nan takes the place of others.

    Args:
        dims: how many dimensions the batch has.
    """
    if not looks(evidence.numbers):
        marks = evidence.marks(dims)
        parts = tuple(x + marks.reshape(*marks.shape, *(1,) * (x.dim() - dims)) for x in parts)
    elif not evidence.holds():
        return None
    took(way)
    return parts


class StraightEigenvectors(Executor):
    """Eigenvectors of matrices, real or complex, from all of them.

    Args:
        signed: whether signs or phases are chosen here, and not by a step.
    """

    kind: type[Kept] = Whole
    fails: ClassVar[str] = _FAILS

    def __init__(self, problem: Any, signed: bool, pair: bool = False) -> None:
        names = ("A", "M") if pair else ("A",)
        super().__init__(problem, names, "pairs: straight" if pair else "ied: straight")
        self.columns, self.looked = problem.k is not None, False
        self.form = Form(problem.k or 1, problem.largest, signed)
        self.program: Any = eigenvectors.of_pair if pair else eigenvectors.of_matrix
        self.reverse: Any = eigenvectors.pull_pair if pair else eigenvectors.pull_matrix

    def account(self, tensors: Tensors) -> Account:
        return Account("Dense(): batched decomposition", BATCHED.reason, Whole.words, _DERIVATIVE)

    def solve(self, tensors: Tensors) -> Found | None:
        given = [tensors[name] for name in self.names]
        if not self.looked and looks(given[0]):
            self.looked = True
            look_at_symmetry(given[0])
        found = _run(given[0].device, self.program, *(x.detach() for x in given), self.form)
        if found is None:
            return None
        rows, values = found.rows, found.values
        parts = (rows.mT, values) if self.columns else (rows.squeeze(-2), values.squeeze(-1))
        parts = _proved(self.way, found.evidence, parts, values.dim() - 1)
        if parts is None or not records(*given):
            return parts
        return attach_solved(self, parts, (found.every_row, found.every_value), *given)

    def differentiate(
        self,
        tensors: Sequence[Tensor],
        y: Tensor,
        multiplier: Tensor,
        kept: Kept,
        v: Tensor | None,
        d_multiplier: Tensor | None,
        needs: Sequence[bool],
    ) -> native.Gradients:
        if not kept:  # a hook on saved tensors has changed it
            found = self.program(*tensors, self.form)
            kept = Whole(found.every_row, found.every_value)
        if not self.columns:
            y, multiplier = y.unsqueeze(-2), multiplier.unsqueeze(-1)
            v = None if v is None else v.unsqueeze(-2)
            d_multiplier = None if d_multiplier is None else d_multiplier.unsqueeze(-1)
        if v is not None and v.is_complex() and self.form.signed:
            v = eigenvectors.turned(v, y)
        with full_precision(y.device):
            found = self.reverse(y, multiplier, *kept, v, d_multiplier, self.form)
        return native.Gradients(found, None)


class StraightLeastSquares(Executor):
    """Least squares with any of its options.

    Args:
        again: solves the problem of a start and of tensors in the order of `least_squares.Data` by
            solvers, for whatever is not a first derivative.
    """

    fails: ClassVar[str] = _FAILS

    def __init__(self, again: Callable[..., Tensor], form: least_squares.Kind) -> None:
        super().__init__(again, least_squares.Data._fields, "less: straight")
        self.form = form

    def account(self, tensors: Tensors) -> Account:
        words = "Secular(): batched decomposition, and a fixed number of steps for one number"
        return Account(words, BATCHED_MINIMUM.reason, Basis.words, _DERIVATIVE)

    def solve(self, tensors: Tensors) -> Found | None:
        given = [x if isinstance(x := tensors[name], Tensor) else None for name in self.names]
        data = least_squares.Data(*(None if x is None else x.detach() for x in given))  # pyright: ignore
        found = _run(data.A.device, least_squares.minimum, data, self.form)
        if found is None:
            return None
        parts = _proved(self.way, found.evidence, (found.u,), found.u.dim() - 1)
        if parts is None or not records(*given):
            return parts
        return attach_solved(self, parts, tuple(found.kept), *given)

    def pull(
        self, saved: Saved, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """The derivative of the node, whose one output is the minimiser."""
        tensors, (u,), held, same = saved
        (v,) = grads
        assert v is not None
        if not may_compile(v, None):
            took("tangent: common path")
            return solved_again(lambda x: (self.problem(u.detach(), *x),), tensors, grads, needs)
        data, kept = least_squares.Data(*tensors), least_squares.Kept(*held)
        with full_precision(v.device):
            if not same:
                kept = least_squares.minimum(data, self.form).kept
            return least_squares.gradients(data, self.form, kept, v, needs)


class StraightSingularVectors(Executor):
    """Right singular vectors, with row weights or without, from all of them.

    Args:
        signed: whether signs or phases are chosen here, and not by a step.
        common: finds complex vectors on the common path, whose rule is one for real matrices.
    """

    kind: type[Kept] = Whole
    fails: ClassVar[str] = _FAILS

    def __init__(
        self, problem: Any, names: tuple[str, ...], signed: bool, common: Common | None
    ) -> None:
        super().__init__(problem, names, "singular: straight")
        self.columns, self.common = problem.k is not None, common
        apart = common is not None and (problem.k or 1) > 1
        self.form = Form(problem.k or 1, problem.largest, signed, problem.single, apart)

    def account(self, tensors: Tensors) -> Account:
        return Account(_BY_GRAM, BATCHED_GRAM.reason, Whole.words, _DERIVATIVE)

    def solve(self, tensors: Tensors) -> Found | None:
        given = [tensors[name] for name in self.names]
        found = self._found(x.detach() for x in given)
        if found is None:
            return None
        rows, values = found.rows, found.values
        parts = (rows.mT, values) if self.columns else (rows.squeeze(-2), values.squeeze(-1))
        parts = _proved(self.way, found.evidence, parts, values.dim() - 1)
        if parts is None or not records(*given):
            return parts
        return attach_solved(self, parts, (found.every_row, found.every_value), *given)

    def _found(self, tensors: Any) -> singular.Right | None:
        A, weights = (*tensors, None)[:2]
        assert A is not None
        return _run(A.device, singular.right_vectors, A, weights, self.form)

    def pull(
        self, saved: Saved, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        v, d_values = grads
        if v is not None and d_values is None and may_compile(v, None):
            return self._pulled(saved, v, needs)
        if self.common is not None:
            common, names = self.common, self.names
            return solved_again(lambda x: common(dict(zip(names, x))), saved.tensors, grads, needs)
        return super().pull(saved, grads, needs)

    compiles = False  # `differentiate` is not asked

    def _pulled(self, saved: Saved, v: Tensor, needs: Sequence[bool]) -> Sequence[Tensor | None]:
        tensors, (y, _), held, same = saved
        if not same:
            found = self._found(tensors)
            assert found is not None
            held = found.every_row, found.every_value
        if self.columns:
            y, v = y.mT, v.mT
        else:
            y, v = y.unsqueeze(-2), v.unsqueeze(-2)
        if v.is_complex() and self.form.signed:
            v = eigenvectors.turned(v, y)
        rows, values = held
        with full_precision(v.device):
            return singular.pull_right(tensors, y, rows, values, v, self.form, needs)


class StraightTriplets(Triplets):
    """Triplets of matrices with at least as many rows as columns.

    Args:
        by_left: whether the sign of a triplet is that of its left vector, for the transpose of a
            wide matrix.
        common: finds complex triplets on the common path, as right vectors, values and left ones.
    """

    def __init__(
        self, problem: Any, columns: bool, signed: bool, by_left: bool, common: Common | None
    ) -> None:
        Executor.__init__(self, problem, ("A",), "singular: straight")
        self.columns, self.common, self.whole, self.paired = columns, common, True, False
        k, apart = problem.width, problem.width > 1
        self.form = Form(k, problem.largest, signed, problem.single, apart, by_left)

    def account(self, tensors: Tensors) -> Account:
        return Account(_BY_GRAM, BATCHED_GRAM.reason, Whole.words, _DERIVATIVE)

    def solve(self, tensors: Tensors) -> Found | None:
        A = tensors["A"]
        found = _run(A.device, singular.triplets, A.detach(), self.form)
        if found is None:
            return None
        values = found.values
        parts: Any = found.rows, values, found.left
        if self.columns:
            parts = parts[0].mT, parts[1], parts[2].mT
        else:
            parts = parts[0].squeeze(-2), parts[1].squeeze(-1), parts[2].squeeze(-2)
        parts = _proved(self.way, found.evidence, parts, values.dim() - 1)
        if parts is None or not records(A):
            return parts
        return attach_solved(self, parts, (found.every_row, found.every_value), A)

    def _apart(
        self,
        A: Tensor,
        found: tuple[Tensor, Tensor, Tensor],
        incoming: Sequence[Tensor | None],
        held: Sequence[Tensor] | None,
    ) -> Tensor | None:
        if held is None:
            return None
        rows, values = held
        with full_precision(A.device):
            return singular.pull_triplets(A, found, (rows, values), incoming, self.form)


_BY_GRAM = "SVD(): batched decomposition of AᵀA"
