"""
PCA of data that no single process holds
========================================

A loud nuisance hides a quiet signal in data that are too large for one machine. Weights of the
features are to be learnt until the first principal direction is the signal. Today one would gather
the covariance matrix on every machine, which takes n² numbers for n features, and differentiate
``eigh`` there.

Here every rank makes its own rows and keeps them. The gradient goes through the eigenvector, and
forward and backward pass take products with the rows where they are: what ranks send each other is
one vector of n numbers for each product. Nothing in the script says whether they are CPUs or GPUs
(on GPUs it has not been tried). It is started by ``torchrun``, with one process for each part of
the data::

    torchrun --nproc-per-node 2 examples/distributed_pca.py
    torchrun --nproc-per-node 4 examples/distributed_pca.py --rows 400000

The first of these prints::

    20,000 × 64 on 2 ranks, 10,000 rows each
    step  0  alignment 0.0000  6 products forward, 4 backward
    step  1  alignment 0.0001  4 products forward, 5 backward
    step  2  alignment 0.0003  4 products forward, 5 backward
    step  3  alignment 0.0106  4 products forward, 5 backward
    step  4  alignment 0.9988  4 products forward, 6 backward
    ...
    step 14  alignment 1.0000  6 products forward, 5 backward
"""

from __future__ import annotations

import argparse
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import pmaf
from pmaf.operators import Gram

# %%
# The rows of a rank
# ------------------


def my_rows(rows: int, features: int, rank: int, device: torch.device) -> torch.Tensor:
    """Noise, a quiet signal in the first half of the features, a loud nuisance in the second."""
    generator = torch.Generator(device).manual_seed(rank)
    X = torch.randn(rows, features, generator=generator, device=device)
    half = features // 2
    X[:, :half] += torch.randn(rows, 1, generator=generator, device=device)
    X[:, half:] += 3 * torch.randn(rows, 1, generator=generator, device=device)
    return X


# %%
# Learning the weights
# --------------------
#
# The rows are declared to be parts of one matrix, a DTensor. From then on the code is what it would
# be on one machine: ``Gram(weighted)`` stands for the second moments, which are never formed, and
# ``init`` starts each search from the last direction, which saves products.


def main() -> None:
    parser = argparse.ArgumentParser(description="PCA of data that no single process holds")
    parser.add_argument("--rows", type=int, default=20_000, help="of all ranks together")
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--timeout", type=float, default=60, help="seconds a rank waits for others")
    options = parser.parse_args()

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    # By default the others would wait half an hour for a rank that hangs.
    dist.init_process_group(timeout=timedelta(seconds=options.timeout))
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(
        device_type, rank % torch.cuda.device_count() if device_type == "cuda" else 0
    )

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    mine = my_rows(options.rows // world, options.features, rank, device)
    X = DTensor.from_local(mine, mesh, [Shard(0)])
    say(f"{X.shape[0]:,} × {X.shape[1]} on {world} ranks, {mine.shape[0]:,} rows each")

    half = options.features // 2
    signal = torch.zeros(options.features, device=device)
    signal[:half] = half**-0.5
    signal = distribute_tensor(signal, mesh, [Replicate()])
    start = torch.zeros(options.features, device=device)
    logits = distribute_tensor(start, mesh, [Replicate()]).requires_grad_()
    optimiser = torch.optim.Adam([logits], lr=0.2)

    direction = None
    for step in range(options.steps):
        weighted = X * logits.exp()
        problem = pmaf.PrincipalEigenvectors(Gram(weighted, scale=1 / X.shape[0]))
        solution = pmaf.solve(problem, init=direction)
        direction = solution.value.detach()
        alignment = (solution.value * signal).sum().square()
        optimiser.zero_grad()
        (1 - alignment).backward()
        optimiser.step()
        say(
            f"step {step:2d}  alignment {float(alignment.full_tensor().detach()):.4f}  "
            f"{int(solution.iterations.full_tensor())} products forward, "
            f"{solution.backward.iterations} backward"
        )
    dist.barrier()  # no rank leaves while another is still talking to it
    # A thread of Gloo still releases the tensors of collectives before that barrier. If it does so
    # while the interpreter ends, it aborts the process (torch 2.13).
    time.sleep(0.2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
