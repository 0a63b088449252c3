"""What a reduction is."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torch import Tensor

# The tensors of a call by the names of its arguments, among them operators, None and sign rules.
Tensors = dict[str, Any]
# A solution, its multiplier, and vectors that belong to those of the solution, as left ones do.
# Several vectors are columns `(*, n, k)`.
Found = tuple[Tensor, ...]


class Report(NamedTuple):
    """What is known of a solve besides the solution, one row per batch entry."""

    residual: Tensor
    gap: Tensor
    iterations: Tensor
    converged: Tensor


class Reduction:
    """One step of a recipe: it turns a problem into an equivalent one, and its solution back.

    It is the same for all calls with one signature, so that it holds no tensor. What it computes
    with numbers and needs again is among the tensors that it returns. All directions are made of
    differentiable operations. Each method has the default of a step that changes nothing.
    """

    # What the step does, for `pmaf.explain`; nothing where a signature leaves nothing to do.
    words: ClassVar[str] = ""

    def apply(self, given: Tensors) -> Tensors:
        """The tensors of the equivalent problem."""
        return given

    def outline(self, given: Tensors) -> Tensors:
        """The same for tensors on the device "meta", which have no numbers."""
        return self.apply(given)

    def back(self, found: Found, given: Tensors, posed: Tensors) -> Found:
        """The solution of the problem that was `given`, from that of the equivalent one."""
        return found

    def forth(self, vectors: Tensor, given: Tensors, posed: Tensors) -> Tensor:
        """The vectors of the equivalent problem for a start, or for a solution to certify."""
        return vectors

    def report(self, report: Report, found: Found, given: Tensors, posed: Tensors) -> Report:
        """The report on the given problem; `found` is the solution of the equivalent one."""
        return report


def posed_by(steps: tuple[Reduction, ...], given: Tensors) -> list[Tensors]:
    """The tensors before the first step and after each one."""
    stages = [given]
    for step in steps:
        posed = step.apply(given)
        start = given.get("init")
        if start is not None:
            posed = {**posed, "init": step.forth(start, given, posed)}
        stages.append(posed)
        given = posed
    return stages


def brought_back(steps: tuple[Reduction, ...], stages: list[Tensors], found: Found) -> Found:
    """The solution of the problem that was given first."""
    for i in range(len(steps) - 1, -1, -1):
        found = steps[i].back(found, stages[i], stages[i + 1])
    return found
