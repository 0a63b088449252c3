"""The phases of complex vectors, as signs are those of real ones (`linalg/sphere.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from pmaf.linalg import sphere
from pmaf.linalg.products import norm
from pmaf.linalg.roundings import merge_tolerance
from pmaf.runtime.modes import plain


def phases(y: Tensor, reference: Tensor | int | str | None) -> Tensor:
    """The factors `(*, k, 1)` that give unit rows `(*, k, n)` their phases, differentiably.

    They make `rᴴy` positive for a reference `r` that broadcasts to the rows, all ones unless given,
    or the component that `reference` names. Where that is rounding, the same fixed direction as for
    real vectors takes the place of the reference, and if that product is rounding, too, the
    component of largest modulus is made positive.
    """
    length = y.shape[-1] ** 0.5
    modulus = y.detach().abs()
    # Ties in modulus, up to rounding, go to the lowest index.
    least = (1 - merge_tolerance(y.dtype)) * modulus.amax(-1, keepdim=True)
    largest = (modulus >= least).to(modulus.dtype).argmax(-1, keepdim=True)
    last = y.gather(-1, largest).squeeze(-1)
    # Sums, not products of matrices, which start threads for a few numbers.
    if reference is None:
        first = y.sum(-1)
    elif isinstance(reference, str):
        first = last
    elif isinstance(reference, int):
        first, length = y[..., reference], 1.0
    else:
        first, length = (reference.conj() * y).sum(-1), norm(reference)
    tolerance = merge_tolerance(y.dtype)
    known = first.detach().abs() > tolerance * length
    if not (plain(y) and bool(known.all())):
        second = (sphere.references(y.real)[1] * y).sum(-1)
        second = torch.where(second.detach().abs() > tolerance * y.shape[-1] ** 0.5, second, last)
        first = torch.where(known, first, second)
    return (first.conj() / first.abs()).unsqueeze(-1)
