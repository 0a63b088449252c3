"""Up to which size compiled kernels find all eigenpairs faster than LAPACK, for `pmaf.spectral`.

    python benchmarks/spectral_whole.py

Prints the processor time of `torch.linalg.eigh` over that of the kernels, as the median ratio of
interleaved runs on one thread: above one, the kernels are faster. Beside it stand the errors of
`VΛVᴴ` in units of `n·eps‖A‖`, of the kernels and of LAPACK.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from pmaf import native

SIZES = (2, 3, 6, 9, 12, 16, 20, 24, 32, 48)
BATCHES = (1, 2, 4, 8, 64)
SECONDS = 0.2  # for each number


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def ratio(first: Callable[[], object], second: Callable[[], object]) -> float:
    for run in (first, second):
        run()
    found, start = [], time.process_time()
    while len(found) < 5 or time.process_time() - start < SECONDS:
        found.append(seconds(first) / max(seconds(second), 1e-9))
    return statistics.median(found)


def error(A: torch.Tensor, values: torch.Tensor, vectors: torch.Tensor) -> float:
    rest = (vectors * values.unsqueeze(-2)) @ vectors.mH - A
    size = torch.linalg.matrix_norm(A, 2)
    worst = (torch.linalg.matrix_norm(rest, 2) / size).max()
    return float(worst) / (A.shape[-1] * torch.finfo(A.dtype).eps)


def main() -> None:
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        print(f"{dtype}: batches of {BATCHES}, errors of the kernels and of LAPACK")
        for n in SIZES:
            line, worst = [], [0.0, 0.0]
            for batch in BATCHES:
                drawn = torch.Generator().manual_seed(n)
                X = torch.randn(batch, n, n, dtype=dtype, generator=drawn)
                A = 0.5 * (X + X.mH)
                plan = native.forward_plan(A.shape, dtype, n, False)
                both = (
                    lambda A=A, plan=plan: native.planned_pairs(A, plan, True, None)[:2],
                    lambda A=A: torch.linalg.eigh(A),
                )
                line.append(ratio(both[1], both[0]))
                worst = [max(x, error(A, *run())) for x, run in zip(worst, both)]
            numbers = "  ".join(f"{x:6.2f}" for x in line)
            print(f"{n:4}  {numbers}    {worst[0]:.2f}  {worst[1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
