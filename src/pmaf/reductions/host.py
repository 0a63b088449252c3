"""Small problems of a device on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmaf.operators.diagonal import Diagonal
from pmaf.reductions.base import Found, Reduction, Tensors


@dataclass(frozen=True)
class Host(Reduction):
    """All tensors come to the host in one copy for each dtype, and the solution goes back in one.

    So does what is differentiated, in the opposite direction.
    """

    device: torch.device

    words = "tensors of the device -> the host, in one copy, and back"

    def apply(self, given: Tensors) -> Tensors:
        parts = {
            name: x.d if isinstance(x, Diagonal) else x
            for name, x in given.items()
            if isinstance(x, (Tensor, Diagonal))
        }
        moved: Tensors = dict(zip(parts, _moved([*parts.values()], torch.device("cpu"))))
        return {name: _alike(moved.get(name, x), x) for name, x in given.items()}

    def outline(self, given: Tensors) -> Tensors:
        return given

    def back(self, found: Found, given: Tensors, posed: Tensors) -> Found:
        return tuple(_moved([*found], self.device))


def _alike(moved: Any, given: Any) -> Any:
    return Diagonal(moved) if isinstance(given, Diagonal) else moved


def _moved(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors on another device; those of one dtype are copied together."""
    found = [*tensors]
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        places = [i for i, x in enumerate(tensors) if x.dtype is dtype]
        parts = [tensors[i] for i in places]
        if len(parts) == 1:
            found[places[0]] = parts[0].to(device)
            continue
        whole = torch.cat([x.reshape(-1) for x in parts]).to(device)
        for i, x in zip(places, whole.split([x.numel() for x in parts])):
            found[i] = x.view(tensors[i].shape)
    return found
