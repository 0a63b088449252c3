"""What a program proves of its own result, in numbers that the host reads once."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Evidence(NamedTuple):
    """Numbers, any of each entry of a batch, that lie between two bounds where a result is right.

    They are nan or infinite where a result is not finite, or was not proved.
    """

    numbers: Tensor
    low: float = 0.0
    high: float = math.inf
    zero: bool = True  # whether zero is right, too, as the size of a matrix of zeros is

    def holds(self) -> bool:
        """Whether every entry is right; the host waits for the device, once."""
        if self.numbers.numel() == 0:
            return True
        least, most = torch.stack(self.numbers.aminmax()).tolist()
        return (self.low < least or (self.zero and least == 0)) and most < self.high

    def marks(self, dims: int) -> Tensor:
        """Zero where an entry is right, and nan elsewhere; the host does not wait.

        Args:
            dims: how many dimensions the batch has.
        """
        x = self.numbers
        right = (x > self.low) & (x < self.high)
        right = right | (x == 0) if self.zero else right
        right = right.flatten(dims).all(-1) if x.dim() > dims else right
        return torch.where(right, 0.0, math.nan)


def where_proved(proved: Tensor, size: Tensor) -> Tensor:
    """The sizes where a mask says that a result is right, and infinity or nan elsewhere."""
    return size / proved
