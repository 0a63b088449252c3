"""Competitors run in turn, so that noise hits all of them alike."""

from __future__ import annotations

import importlib.util
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf.experiments.measure import seconds

Result = tuple[Tensor, ...]


@dataclass(frozen=True)
class Competitor:
    """Something a user would use instead.

    Attributes:
        solve: From the inputs to the outputs.
        differentiable: Whether gradients flow through `solve`.
        largest: Entries of the first input above which a run would take minutes.
        needs: The module it is made of, where that is optional.
    """

    solve: Callable[..., Result]
    differentiable: bool = True
    largest: float = float("inf")
    needs: str = "torch"

    def reason(self, size: int) -> str | None:
        """Why it does not take part, None if it does."""
        if importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        return None if size <= self.largest else "takes minutes at this size"


def race(
    competitors: Mapping[str, Competitor],
    inputs: Result,
    loss: Callable[[Result], Tensor],
    device: torch.device,
    budget: float,
    repeats: int = 25,
) -> dict[str, dict[str, Any]]:
    """Median seconds of both passes, the outputs and the gradients, of every competitor.

    Args:
        inputs: Tensors that require gradients.
        loss: A scalar of the outputs, to differentiate.
        budget: Seconds after which a competitor drops out of the next round.
    """
    results: dict[str, dict[str, Any]] = {}
    times: dict[str, tuple[list[float], list[float]]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a solver that stops early shows in its error
        for name, competitor in competitors.items():
            reason = competitor.reason(inputs[0].numel())
            if reason is None:
                try:
                    results[name] = _once(competitor, inputs, loss, device)
                    times[name] = ([], [])
                    continue
                except Exception as error:  # whatever it is, the others go on
                    reason = f"{type(error).__name__}: {error}".splitlines()[0]
            results[name] = {"skipped": reason}
        for _ in range(repeats):
            for name, (forward, backward) in times.items():
                if sum(forward) + sum(backward) < budget:
                    again = _once(competitors[name], inputs, loss, device)
                    forward.append(again["forward"])
                    backward.append(again["backward"])
    for name, (forward, backward) in times.items():
        results[name]["forward"] = statistics.median(forward)
        results[name]["backward"] = (
            statistics.median(backward) if competitors[name].differentiable else None
        )
    return results


def _once(
    competitor: Competitor,
    inputs: Result,
    loss: Callable[[Result], Tensor],
    device: torch.device,
) -> dict[str, Any]:
    outputs: Result = ()
    gradients: Result | None = None

    def forward() -> None:
        nonlocal outputs
        outputs = competitor.solve(*inputs)

    def backward() -> None:
        nonlocal gradients
        gradients = torch.autograd.grad(loss(outputs), inputs)

    found: dict[str, Any] = {"forward": seconds(forward, device), "backward": 0.0}
    if competitor.differentiable:
        found["backward"] = seconds(backward, device)
    found["outputs"] = tuple(x.detach() for x in outputs)
    found["gradients"] = gradients
    return found
