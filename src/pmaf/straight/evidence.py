"""What a program proves of its own result, in numbers that the host reads once."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Evidence(NamedTuple):
    """Numbers, one for each entry of a batch, that lie between two bounds where a result is right.

    They are nan where a result is not finite, or was not proved. Zero is right: it is the size of
    a matrix of zeros.
    """

    numbers: Tensor
    low: float = 0.0
    high: float = math.inf

    def holds(self) -> bool:
        """Whether every entry is right; the host waits for the device, once."""
        if self.numbers.numel() == 0:
            return True
        least, most = torch.stack(self.numbers.aminmax()).tolist()
        return (self.low < least or least == 0) and most < self.high

    def marks(self) -> Tensor:
        """Zero where an entry is right, and nan elsewhere, `(*,)`; the host does not wait."""
        x = self.numbers
        right = ((x > self.low) | (x == 0)) & (x < self.high)
        return torch.where(right, 0.0, math.nan)


def where_proved(proved: Tensor, size: Tensor) -> Tensor:
    """The sizes `(*,)` where a mask says that a result is right, and nan elsewhere."""
    return torch.where(proved, size, math.nan)
