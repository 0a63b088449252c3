"""From which size on `pmaf.spectral` takes the k eigenpairs of a group, and not all.

    python benchmarks/spectral_group.py

Prints the processor time of both passes by a whole decomposition over that by the group, as the
median ratio of interleaved runs on one thread: above one, the group is faster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from pmaf.layers import spectral as layer
from pmaf.linalg.divided_differences import NAMED
from pmaf.linalg.matrix_function import MatrixFunction

SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
COUNTS = (1, 2, 4, 8, 16, 32)  # of eigenpairs, up to n/2
ENTRIES = 1 << 15  # of all matrices of a batch together
SECONDS = 0.3  # for each number


def matrices(name: str, n: int, k: int, batch: int, dtype: torch.dtype) -> torch.Tensor:
    """Covariances of noise, whose k-th eigenvalue is close to the next, or spikes beside noise."""
    generator = torch.Generator().manual_seed(n)
    X = torch.randn(batch, n, n, generator=generator, dtype=torch.float64)
    if name == "covariance":
        return (X @ X.mT / n).to(dtype)
    Q = torch.linalg.qr(X)[0][..., :k]
    spikes = Q * torch.linspace(3, 2, k, dtype=torch.float64) @ Q.mT
    return ((X + X.mT) / (8 * n) ** 0.5 + spikes).to(dtype)


def both_passes(A: torch.Tensor, k: int, most: int) -> Callable[[], object]:
    """Both passes, by the group for up to `most` eigenpairs."""
    leaf, weights = A.clone().requires_grad_(), torch.cos(torch.arange(A.shape[-1]).to(A))
    posed = MatrixFunction(NAMED["exp"], k, True)

    def run() -> object:
        layer._GROUP_MOST, layer._GROUP_SHARE = most, 1
        return torch.autograd.grad((layer.function_of(leaf, posed) * weights).sum(), leaf)

    return run


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def ratio(A: torch.Tensor, k: int) -> float:
    whole, group = both_passes(A, k, 0), both_passes(A, k, k)
    for run in (whole, group):
        run()
    found, start = [], time.process_time()
    while len(found) < 3 or time.process_time() - start < SECONDS:
        found.append(seconds(whole) / max(seconds(group), 1e-9))
    return statistics.median(found)


def main() -> None:
    torch.set_num_threads(1)
    for name in ("covariance", "spikes"):
        for dtype in (torch.float32, torch.float64):
            print(f"{name}, {dtype}: columns are k = {COUNTS}")
            for n in SIZES:
                batches = sorted({1, max(1, ENTRIES // n**2)})
                for batch in batches:
                    counts = [k for k in COUNTS if k <= n // 2]
                    few = [ratio(matrices(name, n, k, batch, dtype), k) for k in counts]
                    print(f"{batch:5} × {n:3}  " + "  ".join(f"{x:5.2f}" for x in few), flush=True)


if __name__ == "__main__":
    main()
