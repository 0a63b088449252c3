"""Which small problems of a device are solved on the host."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from pmaf import native
from pmaf.recipe import Place, Recipe, ShortWay
from pmaf.reductions.host import Host
from pmaf.solvers.auto import HOST_ENTRIES, is_general_and_small


def on_host(
    way: ShortWay, posed: Any, init: Tensor | None, place: Place, most: int = HOST_ENTRIES
) -> Recipe | None:
    """The recipe on the host, with one copy each way, for at most so many entries of all matrices.

    Of general matrices a device has no batched decomposition. In the capture of a CUDA graph the
    host cannot wait.
    """
    general = is_general_and_small(posed)
    entries = math.prod(posed.batch_shape) * math.prod(posed.A.shape[-2:])
    small = native.available and entries <= most
    if not place.waits or not (general or small):
        return None
    found = way(posed, init, None)
    return found and found._replace(steps=(Host(place.device), *found.steps))
