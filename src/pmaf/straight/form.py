"""What the programs for vectors depend on besides tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Form(NamedTuple):
    """Which vectors are requested, of all that a decomposition finds in ascending order."""

    k: int
    largest: bool
    signed: bool  # whether signs or phases are chosen, so that sums of components are positive
    single: bool = False  # whether the numbers have the digits of float32, and are in float64
    apart: bool = False  # whether requested values that repeat are left to another way
    by_left: bool = False  # whether sums are those of left vectors, and not of right ones

    def end(self, x: Tensor) -> Tensor:
        """The k entries of the last dimension at the requested end, that end first."""
        n = x.shape[-1]
        if not self.largest:
            return x[..., : self.k]
        return x[..., n - self.k :] if self.k == 1 else x[..., n - self.k :].flip(-1)

    def of(self, x: Tensor) -> Tensor:
        """The same entries in ascending order, as a view."""
        n = x.shape[-1]
        return x[..., n - self.k :] if self.largest else x[..., : self.k]
