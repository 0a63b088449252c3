"""Problems whose numbers have squares outside of the range of their dtype, in other units.

Units are powers of two, so that no digit changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pmaf.operators import Operator
from pmaf.operators.base import TimesPowers
from pmaf.reductions.base import Found, Reduction, Report, Tensors
from pmaf.solvers.base import Outcome


class Units(Reduction):
    """The tensors in which a problem is homogeneous are divided by `unit`, one per batch entry.

    Whether other units are needed depends on numbers, so that this step is in no recipe:
    `recipe.py` adds it for one call where a solver raises `OutOfRangeError`.
    """

    words = "entries whose squares leave the range of the dtype -> other units"

    def __init__(self, problem: Any, unit: Tensor) -> None:
        """For a problem without its tensors."""
        if problem.degree is None:
            raise ValueError(
                f"squares of the entries of {type(problem).__name__} leave the range of the "
                "dtype; scale the problem, or use float64"
            )
        self.degree, self.unit, self.several = problem.degree, unit, bool(problem.vectors)
        self.dims = dict([*problem.inputs.items()][: problem.homogeneous])

    def apply(self, given: Tensors) -> Tensors:
        return {name: self._divided(name, x) for name, x in given.items()}

    def _divided(self, name: str, x: Any) -> Any:
        unit = self.unit
        if name not in self.dims:
            real = isinstance(x, Tensor) and x.is_floating_point()
            return x.to(torch.promote_types(x.dtype, unit.dtype)) if real else x
        if isinstance(x, Operator):
            return TimesPowers(x, -unit.log2())
        return x / unit.reshape(*unit.shape, *(1,) * self.dims[name])

    def back(self, found: Found, given: Tensors, posed: Tensors) -> Found:
        vectors, multiplier, *others = found
        dtype = given[next(iter(self.dims))].dtype
        multiplier = self._multiplied(multiplier, self.several)
        return tuple(x.to(dtype) for x in (vectors, multiplier, *others))

    def report(self, report: Report, found: Found, given: Tensors, posed: Tensors) -> Report:
        return report._replace(gap=self._multiplied(report.gap))

    def outcome(self, found: Outcome) -> Outcome:
        """An outcome in the units of the problem, whose graph is not needed."""
        return found._replace(
            multiplier=self._multiplied(found.multiplier, self.several),
            gap=self._multiplied(found.gap),
            kept=found.kept.in_units(self.unit, self.degree),
        )

    def _multiplied(self, x: Tensor, several: bool = False) -> Tensor:
        unit = self.unit.unsqueeze(-1) if several else self.unit
        for _ in range(self.degree):
            x = x * unit
        return x
