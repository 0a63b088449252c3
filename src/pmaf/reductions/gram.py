"""Singular vectors as solutions of other problems: eigenvectors of `AᵀWA`, and least squares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pmaf.linalg.roundings import rank_tolerance
from pmaf.operators import Gram
from pmaf.reductions.base import Found, Reduction, Report, Tensors


@dataclass(frozen=True)
class Squares(Reduction):
    """Right singular vectors are eigenvectors of `AᵀWA`, whose eigenvalues are squares.

    Args:
        single: whether there is one vector, without a dimension for it.
        largest: at which end of the spectrum.
    """

    single: bool
    largest: bool

    words = (
        "singular vectors of A -> eigenvectors of AᵀA by products, with weights if there are any"
    )

    def apply(self, given: Tensors) -> Tensors:
        return {**given, "A": Gram(given["A"], weights=given["weights"]), "M": None}

    def back(self, found: Found, given: Tensors, posed: Tensors) -> Found:
        vectors, squares = found
        top = squares.detach() if self.single else squares.detach().amax(-1, keepdim=True)
        rounding = rank_tolerance(squares.dtype) * top.clamp_min(0).sqrt()
        return vectors, root_of(squares, rounding)

    def report(self, report: Report, found: Found, given: Tensors, posed: Tensors) -> Report:
        edge = self.back(found, given, posed)[1].detach()
        if not self.single:
            edge = edge.amin(-1) if self.largest else edge.amax(-1)
        # From a difference of squares to one of singular values.
        beyond = edge.square() - report.gap if self.largest else edge.square() + report.gap
        return report._replace(gap=(edge - beyond.clamp_min(0).sqrt()).abs())


class NullVector(Reduction):
    """The right singular vector of the smallest singular value minimises `‖Au‖` on the sphere.

    So it is least squares with `b = 0`, whose multiplier is `−σ²`, with weights if there are any.
    """

    words = "smallest singular vector -> least squares with b = 0"

    def apply(self, given: Tensors) -> Tensors:
        A = given["A"]
        return {"radius": None, "M": None, **given, "b": A.new_zeros(A.shape[:-1])}

    def back(self, found: Found, given: Tensors, posed: Tensors) -> Found:
        # Some executors find the minimiser alone.
        u, *multiplier = found
        return u, *[(-x).clamp_min(0).sqrt().to(u.dtype) for x in multiplier]


def root_of(squares: Tensor, rounding: Tensor) -> Tensor:
    """The square root, whose derivative is zero where it is not above rounding."""
    zero = squares.detach() <= rounding.square()
    root = torch.where(zero, 1, squares).sqrt()
    return torch.where(zero, squares.detach().clamp_min(0).sqrt(), root)
