"""The metric of a pair in the form that a solver takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pmaf.reductions.base import Found, Tensors


@dataclass(frozen=True)
class DenseMetric:
    """A diagonal `M` becomes a matrix, whose gradient has the diagonal alone."""

    words = "diagonal M -> dense M"

    def apply(self, tensors: Tensors) -> Tensors:
        return {**tensors, "M": torch.diag_embed(tensors["M"])}

    def back(self, found: Found, given: Tensors) -> Found:
        return found
