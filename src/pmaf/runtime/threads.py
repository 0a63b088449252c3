"""Running many small steps on one thread.

A solve of many small matrices is some hundred short operations. Run by several threads, each
operation ends when the last thread has had its turn on a core; on a machine with other work, such
as data loaders, that takes a time slice of the scheduler, which is longer than the operation itself
by orders of magnitude. One thread never waits.
"""

from __future__ import annotations

import torch
from torch import Tensor


class OneThread:
    """A context in which torch uses one thread if `A` is a batch of small matrices.

    The number of threads belongs to the calling thread, except that a thread that uses torch
    for the first time while another is in here starts out with one.
    """

    def __init__(self, A: Tensor) -> None:
        rows, columns = A.shape[-2:]
        small = not torch.compiler.is_compiling() and A.is_cpu
        small = small and rows <= _ROWS and columns <= _COLUMNS and _FROM <= A.numel() <= _TO
        self.threads = torch.get_num_threads() if small else 1

    def __enter__(self) -> None:
        if self.threads > 1:
            torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        if self.threads > 1:
            torch.set_num_threads(self.threads)


# Larger matrices are decomposed by several threads inside LAPACK.
_ROWS, _COLUMNS = 64, 32
# Below _FROM, no operation is shared between threads; above _TO, each takes long enough to be
# shared. Both come from `pmaf bench ied less` with and without another process.
_FROM, _TO = 1 << 10, 1 << 18
