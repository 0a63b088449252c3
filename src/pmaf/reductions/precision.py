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
    """

    given: torch.dtype
    computed: torch.dtype

    @property
    def words(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"{self.given} -> {self.computed}".replace("torch.", "")

    def apply(self, given: Tensors) -> Tensors:
        return {name: self._computed(x) for name, x in given.items()}

    def _computed(self, x: Any) -> Any:
        if isinstance(x, Operator):
            return x.with_tensors([self._computed(part) for part in x.tensors])
        return x.to(self.computed) if isinstance(x, Tensor) and x.dtype is self.given else x

    def back(self, found: Found, given: Tensors, posed: Tensors) -> Found:
        return tuple(x.to(self.given) for x in found)

    def forth(self, vectors: Tensor, given: Tensors, posed: Tensors) -> Tensor:
        return self._computed(vectors)

    def report(self, report: Report, found: Found, given: Tensors, posed: Tensors) -> Report:
        # Of short dtypes a report keeps all digits.
        dtype = torch.promote_types(self.given, torch.float32)
        return report._replace(residual=report.residual.to(dtype), gap=report.gap.to(dtype))
