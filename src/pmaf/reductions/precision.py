"""Numbers are computed in a dtype of more digits than they are given in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pmaf.reductions.base import Found, Tensors


@dataclass(frozen=True)
class Precision:
    """Tensors of `given` become those of `computed`, and the solution one of `given`.

    Half precision is computed in float32; float32 in float64 where squares need all their digits.
    """

    given: torch.dtype
    computed: torch.dtype

    @property
    def words(self) -> str:
        return f"{self.given} -> {self.computed}".replace("torch.", "")

    def apply(self, tensors: Tensors) -> Tensors:
        dtype = self.given
        return {
            name: x.to(self.computed) if isinstance(x, Tensor) and x.dtype is dtype else x
            for name, x in tensors.items()
        }

    def back(self, found: Found, given: Tensors) -> Found:
        return tuple(x.to(self.given) for x in found)
