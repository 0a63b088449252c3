"""Sparse tensors, with gradients in their stored values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pmaf.operators.base import Operator, represents
from pmaf.runtime.modes import has_numbers


@represents(torch.sparse_csr, torch.sparse_coo)
class Sparse(Operator):
    """A sparse CSR or COO tensor `(*, m, n)`; gradients reach the stored values only.

    Layers convert a sparse `A` to this class themselves. In a training loop over one pattern keep
    the operator and pass `operator.with_tensors([values])`, so that the pattern is sorted once.

    >>> import torch, pmaf
    >>> A = torch.diag(torch.tensor([3.0, 1.0, 2.0])).to_sparse_coo()
    >>> pmaf.ied(pmaf.operators.Sparse(A)).values.round(decimals=4)
    tensor(3.)
    """

    def __init__(self, A: Tensor) -> None:
        if A.layout not in (torch.sparse_csr, torch.sparse_coo) or A.dim() < 2:
            raise ValueError(
                "Sparse takes a sparse CSR or COO tensor of shape (*, m, n); "
                f"got layout {A.layout} and shape {tuple(A.shape)}"
            )
        if not (A.is_floating_point() or A.is_complex()):
            raise TypeError(f"A has dtype {A.dtype}; use float32 or float64, or complex64 or 128")
        if A.layout == torch.sparse_coo:
            if A.dense_dim():
                raise ValueError(f"A has {A.dense_dim()} dense dimensions; Sparse takes none")
            A = A.coalesce()
        self._shape = A.shape
        values = A.values()
        # torch forgets how the gradient of a sparse tensor depends on anything when it hands it on
        # to the tensors that the sparse one was made of.
        if values.requires_grad and A.grad_fn is not None:
            values.register_hook(_once)
            values = values.view_as(values)
        self._values = values
        self._pattern = _Pattern.of(A)
        self._known: dict[str, Any] = {}

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._values,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Sparse:
        (values,) = tensors
        if values.shape != self._values.shape:
            raise ValueError(
                f"{self!r} stores values of shape {tuple(self._values.shape)}; "
                f"got {tuple(values.shape)}"
            )
        if not has_numbers(values):
            raise TypeError(f"the values of a sparse matrix must be a plain tensor, not {values!r}")
        other = object.__new__(Sparse)
        other._shape, other._pattern, other._values = self._shape, self._pattern, values
        other._known = {}
        return other

    def matvec(self, rows: Tensor) -> Tensor:
        return self._times(self._matrix, rows, self.shape[-2])

    def rmatvec(self, rows: Tensor) -> Tensor:
        return self._times(self._transposed, rows, self.shape[-1])

    def pullback(self, left: Tensor, right: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        if not needs[0]:
            return [None]
        i, j = self._pattern.rows, self._pattern.columns
        total = None
        for x, y in zip(self._flat(left), self._flat(right)):
            term = x.index_select(0, i).mul_(y.index_select(0, j).conj())
            total = term if total is None else total.add_(term)
        assert total is not None
        return [total.reshape(self._values.shape)]

    def diagonal(self) -> Tensor:
        *batch, n = self.shape[:-1]
        i, j = self._pattern.rows, self._pattern.columns
        on = torch.nonzero(i == j).squeeze(-1)
        found = self._values.detach().new_zeros(torch.Size(batch).numel() * n)
        found.index_add_(0, i[on], self._values.detach().reshape(-1)[on])
        return found.reshape(*batch, n)

    @property
    def _matrix(self) -> Tensor:
        return self._remembered("matrix", lambda values: self._pattern.matrix(values))

    @property
    def _transposed(self) -> Tensor:
        return self._remembered(
            "transposed", lambda values: self._pattern.transposed.matrix(values.conj_physical())
        )

    def _remembered(self, name: str, matrix: Callable[[Tensor], Tensor]) -> Tensor:
        """A matrix of the values, cached until the values are written to."""
        version = 0 if self._values.is_inference() else self._values._version
        if self._known.get(name, (None,))[0] != version:
            self._known[name] = version, matrix(self._values.detach())
        return self._known[name][1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}}

    def _times(self, matrix: Tensor, rows: Tensor, width: int) -> Tensor:
        flat = self._flat(rows)
        # On the CPU a few vectors one by one are several times faster than a narrow matrix.
        if (len(flat) <= _NARROW and flat.device.type == "cpu") or len(flat) == 1:
            image = torch.stack([matrix @ x for x in flat])
        else:
            image = (matrix @ flat.T).T
        return self._unflat(image, rows, width)

    def _unflat(self, image: Tensor, rows: Tensor, width: int) -> Tensor:
        if self.batch_shape.numel() > 1:
            image = image.reshape(len(image), *self.batch_shape, width).movedim(0, -2)
        return image.reshape(*rows.shape[:-1], width)

    def _flat(self, rows: Tensor) -> Tensor:
        """Rows `(*, p, n)` as `(p, B·n)`, as a block-diagonal matrix takes them."""
        if self.batch_shape.numel() > 1:
            if rows.shape[:-2] != self.batch_shape:
                raise ValueError(f"{self!r} does not broadcast to the batch {rows.shape[:-2]}")
            return rows.movedim(-2, 0).reshape(rows.shape[-2], -1)
        return rows.reshape(-1, rows.shape[-1])


def _once(gradient: Tensor) -> None:
    """A hook on values that torch has taken from a sparse tensor."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True asks for second derivatives through a sparse tensor, which "
            "torch takes for zero; pass A as a dense tensor, or, for first derivatives alone, "
            "leave create_graph out or use Sparse(pattern).with_tensors([values])"
        )


class _Pattern:
    """The pattern of a block-diagonal matrix, with one block for each batch entry."""

    def __init__(
        self, starts: Tensor, columns: Tensor, width: int, order: Tensor | None = None
    ) -> None:
        self.starts, self.columns, self.width = starts, columns, width
        self.order = order  # of the values, None if as stored

    @staticmethod
    def of(A: Tensor) -> _Pattern:
        *batch, m, n = A.shape
        B = torch.Size(batch).numel()
        if A.layout == torch.sparse_coo:
            *lead, i, j = A.indices()
            entry = torch.zeros_like(i)
            for size, index in zip(batch, lead):
                entry = entry * size + index
            # Coalesced indices are sorted, so they are already in the order of CSR.
            starts = _starts(entry * m + i, B * m)
            return _Pattern(*_narrow(starts, entry * n + j, B * n), B * n)
        crow, col = A.crow_indices().reshape(B, m + 1), A.col_indices().reshape(B, -1)
        entry = torch.arange(B, device=col.device, dtype=torch.int64).unsqueeze(-1)
        starts = (crow[:, :-1] + entry * col.shape[-1]).reshape(-1)
        starts = torch.cat([starts, starts.new_full((1,), col.numel())])
        return _Pattern(*_narrow(starts, (col + entry * n).reshape(-1), B * n), B * n)

    @cached_property
    def rows(self) -> Tensor:
        """The row of each entry."""
        counts = self.starts.diff()
        index = torch.arange(len(counts), device=counts.device, dtype=self.starts.dtype)
        return index.repeat_interleave(counts)

    @cached_property
    def transposed(self) -> _Pattern:
        order = torch.argsort(self.columns, stable=True)
        starts = _starts(self.columns, self.width).to(self.starts.dtype)
        return _Pattern(starts, self.rows[order], len(self.starts) - 1, order)

    def matrix(self, values: Tensor) -> Tensor:
        values = values.reshape(-1) if self.order is None else values.reshape(-1)[self.order]
        shape = (len(self.starts) - 1, self.width)
        return torch.sparse_csr_tensor(
            self.starts,
            self.columns,
            values,
            shape,
            device=values.device,  # not the default device
            check_invariants=False,
        )


def _starts(sorted_or_not: Tensor, size: int) -> Tensor:
    """Where each row begins, given the row of every entry."""
    counts = torch.bincount(sorted_or_not, minlength=size)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _narrow(starts: Tensor, columns: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """In 32 bits where they suffice: half the memory, and twice as fast on the CPU."""
    if max(columns.numel(), width, starts.numel()) < 2**31:
        return starts.int(), columns.int()
    return starts, columns


def _hear_out() -> None:
    """Trigger and ignore torch's warning that CSR tensors are a beta feature.

    torch warns once in a process, so doing this at import suffices. Ignoring the warning around
    every product would change the filters of the whole process, and those of other threads with
    them.
    """
    index, values = torch.zeros(2, dtype=torch.int64, device="cpu"), torch.empty(0, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(
            index, index[:0], values, (1, 1), device="cpu", check_invariants=False
        )


_hear_out()

_NARROW = 8
