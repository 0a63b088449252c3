"""Numbers are computed in a dtype of more digits than they are given in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf.linalg.roundings import HALF
from pmaf.operators import Operator
from pmaf.reductions.base import Found, Reduction, Report, Tensors


def of_short(dtype: torch.dtype) -> list[Reduction]:
    """The step for a dtype that is computed in float32, if it is one."""
    return [Precision(dtype, torch.float32)] if dtype in HALF else []


@dataclass(frozen=True)
class Precision(Reduction):
    """Tensors of `given` become those of `computed`, and the solution one of `given`.

    Half precision is computed in float32; float32 in float64 where squares need all their digits.
    Beside complex tensors, the real ones of their precision follow.
    """

    given: torch.dtype
    computed: torch.dtype

    @property
    def words(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"{self.given} -> {self.computed}".replace("torch.", "")

    def apply(self, given: Tensors) -> Tensors:
        return {name: x if x is None else self._computed(x) for name, x in given.items()}

    def _computed(self, x: Any) -> Any:
        if isinstance(x, Operator):
            return x.with_tensors([self._computed(part) for part in x.tensors])
        if not isinstance(x, Tensor):
            return x
        if x.dtype is self.given:
            return x.to(self.computed)
        alike = self.given.is_complex and x.dtype is self.given.to_real()
        return x.to(self.computed.to_real()) if alike else x

    def back(self, found: Found, given: Tensors, posed: Tensors) -> Found:
        dtype = self.given
        if not dtype.is_complex:
            return (*[x.to(dtype) for x in found],)
        return (*[x.to(dtype if x.is_complex() else dtype.to_real()) for x in found],)

    def forth(self, vectors: Tensor, given: Tensors, posed: Tensors) -> Tensor:
        return self._computed(vectors)

    def report(self, report: Report, found: Found, given: Tensors, posed: Tensors) -> Report:
        # Of short dtypes a report keeps all digits.
        dtype = torch.promote_types(self.given.to_real(), torch.float32)
        return report._replace(residual=report.residual.to(dtype), gap=report.gap.to(dtype))
