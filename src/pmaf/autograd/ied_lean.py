"""IED of one vector of symmetric matrices, in as few calls as it can be written.

Up to a few hundred rows a solve costs what its calls into PyTorch cost. The general code
serves any solver, any number of vectors and any reference, and takes two or three times as
many of them. The mathematics is the same: power steps where they prove to suffice, else a
decomposition.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pmaf.autograd.forward_mode import forward_mode
from pmaf.autograd.ied_attach import blame_range, full_precision, pullback
from pmaf.autograd.ied_rules import EigenConditions, symmetric_product
from pmaf.gradients import Implicit
from pmaf.krylov.power import Start, dominant
from pmaf.linalg import sphere
from pmaf.linalg.eigh import eigh
from pmaf.linalg.gram import merge_tolerance
from pmaf.linalg.products import square_range, symmetric_part
from pmaf.linalg.symmetric import FORM_TO, fixed_rows
from pmaf.runtime.log import took
from pmaf.runtime.modes import plain
from pmaf.runtime.threads import OneThread
from pmaf.solvers.adaptive import TOLERANCE, Adaptive
from pmaf.tangent.bordered import Helper
from pmaf.tangent.deflated import deflated_solve
from pmaf.tangent.series import neumann


def suits(A: Tensor) -> bool:
    """Whether `A` is a plain batch of square matrices of the sizes this is for.

    On other devices than the CPU a decomposition does not cope with every range of numbers.
    """
    return (
        plain(A)
        and A.dim() >= 2
        and A.shape[-1] == A.shape[-2] <= FORM_TO
        and A.numel() > 0
        and A.dtype in (torch.float32, torch.float64)
        and A.is_cpu
        and A.layout == torch.strided
        and not torch.is_autocast_enabled("cpu")
        and not forward_mode(A)
    )


def solve_lean(A: Tensor, largest: bool, way: Adaptive) -> tuple[Tensor, Tensor] | None:
    """The largest or smallest eigenvalue of each `½(A + Aᵀ)`, and its vector.

    None where a Krylov space should be tried, after power steps have been.
    """
    work, n, steps = A.numel(), A.shape[-1], None
    tried = work >= way.power_from and n >= _POWER_SIZE
    flat = False
    if largest and not tried and work >= _FLAT_FROM and n >= _FLAT_SIZE:
        flat = _is_flat(A.detach())
    if tried or flat:
        steps = _power(A.detach(), largest, flat)
        if steps is None and way.takes_krylov(work, n, 1):
            return None
    with OneThread(A):
        return _Lean.apply(A, largest, steps)  # pyright: ignore[reportReturnType]


def _is_flat(A: Tensor) -> bool:
    """Whether most of the matrices is a constant, as where entries are counts or distances.

    Then power steps suffice, which can be said in two calls.
    """
    mean, size = float(A.sum()) / A.numel(), float(torch.linalg.vector_norm(A))
    return mean > 0 and mean**2 * A.numel() > _FLAT * size**2


class _Steps(NamedTuple):
    """What power steps found of `±½(A + Aᵀ)`."""

    matrix: Tensor  # (B, n, n), of Frobenius norm one
    size: Tensor  # (B, 1, 1), its norm before
    share: Tensor  # (B, 1, 1), eigenvalue of the matrix
    rows: Tensor  # (B, 1, n)
    rate: float


def _power(A: Tensor, largest: bool, flat: bool) -> _Steps | None:
    n = A.shape[-1]
    A = A if A.dim() == 3 else A.reshape(-1, n, n)
    matrix = A + A.mT
    size = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    matrix.div_(size if largest else -size)

    def product(x: Tensor) -> Tensor:
        return torch.bmm(x, matrix)

    # A start without structure has about a part of n^-½ along the vector.
    before = 1.0 if flat else n**0.5
    y = _starts(len(A), n, A.dtype)[0 if flat else 1]
    for _ in range(_FIRST):
        y = torch.bmm(y, matrix)
    start = Start(y, None, _FIRST, before)
    found = dominant(product, product, start, TOLERANCE * torch.finfo(A.dtype).eps, True)
    if found is None or not float(size.amin()) > square_range(A.dtype)[0]:
        return None
    size = size if largest else -size
    return _Steps(matrix, 0.5 * size, found.values, found.rows, found.rate)


@functools.lru_cache(maxsize=64)
def _starts(batch: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All ones, and without structure, `(batch, 1, n)`."""
    with torch.inference_mode(False):
        ones = torch.ones(n, dtype=dtype, device="cpu").expand(batch, 1, n)
        return ones, fixed_rows(n, dtype, ones.device)[:1].expand(batch, 1, n)


# Below this size an attempt in vain costs too much of a decomposition.
_POWER_SIZE = 24
# Products before the first look at how fast they converge.
_FIRST = 3
# Entries of all matrices together, and rows of each, from which flat ones are looked for, and
# how flat: above the share of one half by which power steps prove themselves.
_FLAT_FROM, _FLAT_SIZE = 4_000, 12
_FLAT = 0.6


class _Lean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, A: Tensor, largest: bool, steps: _Steps | None) -> tuple[Tensor, Tensor]:
        took("ied: decomposition" if steps is None else "ied: power steps")
        if steps is None:
            values, vectors = _decomposed(A)
            end = -1 if largest else 0
            value, y = values.select(-1, end).clone(), _turned(vectors.select(-1, end))
            kept = (values, vectors)
        else:
            shape = A.shape[:-2]
            value = steps.share.reshape(shape) * steps.size.reshape(shape)
            y = _turned(steps.rows.reshape(A.shape[:-1]))
            kept = steps[:3]
            ctx.rate = steps.rate
        ctx.largest = largest
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(A, value, y, *kept)
        return value, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        d_value, v = grads
        nothing = None, None
        if d_value is None and v is None:
            return None, *nothing
        A, value, y, *kept = ctx.saved_tensors
        with full_precision(A), OneThread(A):
            if torch.is_grad_enabled():  # somebody will differentiate what follows
                return _differentiably(A, value, y, kept, d_value, v, ctx.largest), *nothing
            z, rows = None, y.unsqueeze(-2)
            if v is not None and len(kept) == 2:
                z = _basis_solve(kept[0], kept[1], v.unsqueeze(-2), ctx.largest)
            elif v is not None:
                z = _series_solve(A, value, rows, v.unsqueeze(-2), kept, ctx.rate, ctx.largest)
            if d_value is not None:
                along = d_value[..., None, None] * rows
                z = along if z is None else z + along
            assert z is not None
            return symmetric_product(z, rows), *nothing


def _decomposed(A: Tensor) -> tuple[Tensor, Tensor]:
    """All eigenvalues of `½(A + Aᵀ)`, ascending, and their vectors as columns."""
    try:
        values, vectors = eigh(symmetric_part(A))
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        blame_range(A)
        raise
    # Of matrices with infinite entries, or sums of them, LAPACK makes nothing but nan.
    if not math.isfinite(float(values.sum())):
        blame_range(A)
    return values, vectors


def _turned(y: Tensor) -> Tensor:
    """`y` or `−y`, whichever is on the side of all ones, or of a second direction."""
    both, tolerance, one = _references(y.shape[-1], y.dtype)
    first, second = (y @ both).unbind(-1)
    # The first unless it is zero up to rounding: what is left of it outweighs the second.
    side = torch.add(second, torch.hardshrink(first, tolerance), alpha=16 / tolerance)
    return y * torch.copysign(one, side).unsqueeze(-1)


def _basis_solve(values: Tensor, vectors: Tensor, v: Tensor, largest: bool) -> Tensor:
    """`z` with `(λI − A)z = v − yyᵀv`, `yᵀz = 0`, from all eigenvectors; zero where they merge."""
    product = torch.bmm if vectors.dim() == 3 else torch.matmul
    spectrum = values.unsqueeze(-2)
    rise = (spectrum[..., -1:] if largest else spectrum[..., :1]) - spectrum
    scale = torch.linalg.vector_norm(spectrum, math.inf, -1, keepdim=True)
    merged = (rise if largest else -rise) <= merge_tolerance(values.dtype) * scale
    return product((product(v, vectors) / rise).masked_fill_(merged, 0), vectors.mT)


def _series_solve(
    A: Tensor,
    value: Tensor,
    y: Tensor,
    v: Tensor,
    kept: list[Tensor],
    rate: float,
    largest: bool,
) -> Tensor:
    """The same from the series `Σ Aʲv/λʲ⁺¹`."""
    matrix, size, share = kept
    rows, right = y.reshape(-1, 1, y.shape[-1]), v.reshape(-1, 1, v.shape[-1])
    column = rows.mT
    for _ in range(2):  # what the first leaves of a gradient along y would stay in the sum
        right = torch.baddbmm(right, torch.bmm(right, column), rows, alpha=-1)
    z = neumann(lambda w: torch.bmm(w, matrix), share.squeeze(-1), right, rate)
    if z is None:
        if largest:
            return deflated_solve(A, value.unsqueeze(-1), y, v)
        return -deflated_solve(-A, -value.unsqueeze(-1), y, v)
    # What was left along y is in every term.
    z = torch.baddbmm(z, torch.bmm(z, column), rows, alpha=-1)
    return (z / size).view(v.shape)


def _differentiably(
    A: Tensor,
    value: Tensor,
    y: Tensor,
    kept: list[Tensor],
    d_value: Tensor | None,
    v: Tensor | None,
    largest: bool,
) -> Tensor:
    """The same by the general rules, whose result can be differentiated again."""
    if not largest:  # the smallest eigenvalue is the largest of −A
        A, value, d_value = -A, -value, None if d_value is None else -d_value
    unknown = torch.full_like(value.detach(), torch.nan)
    value = value.unsqueeze(-1)
    basis, spread = y.detach().unsqueeze(-2)[..., :0, :], value.detach()[..., :0]
    if len(kept) == 2:
        values, vectors = kept if largest else (-kept[0].flip(-1), kept[1].flip(-1))
        basis, spread = vectors.mT, values[..., -1:] - values
    helper = Helper(value.detach(), unknown, basis, spread)
    d_values = None if d_value is None else d_value.unsqueeze(-1)
    conditions = EigenConditions(A, y.unsqueeze(-2), value, d_values, True, helper)
    dA = pullback(conditions, _IMPLICIT, None if v is None else v.unsqueeze(-2))
    assert dA is not None
    return dA if largest else -dA


_IMPLICIT = Implicit()


@functools.lru_cache(maxsize=64)
def _references(n: int, dtype: torch.dtype) -> tuple[Tensor, float, Tensor]:
    """The two directions that decide the sign, what counts as zero along the first, and one."""
    with torch.inference_mode(False):  # or they would be of no use in a later training step
        both = torch.stack(sphere.references(torch.empty(n, dtype=dtype, device="cpu")), -1)
        one = torch.ones((), dtype=dtype, device="cpu")
        return both, 8 * torch.finfo(dtype).eps * n**0.5, one
