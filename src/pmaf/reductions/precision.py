"""Numbers of half precision are computed in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pmaf.linalg.roundings import HALF
from pmaf.reductions.base import Found, Tensors


@dataclass(frozen=True)
class Precision:
    """Tensors of `dtype` become those of float32."""

    dtype: torch.dtype

    @property
    def words(self) -> str:
        return f"{self.dtype} -> float32".replace("torch.", "")

    def apply(self, tensors: Tensors) -> Tensors:
        return {
            name: x.float() if isinstance(x, Tensor) and x.dtype in HALF else x
            for name, x in tensors.items()
        }

    def back(self, found: Found, given: Tensors) -> Found:
        value, multiplier = found
        return value.to(self.dtype), multiplier.to(self.dtype)
