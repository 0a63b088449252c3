"""Learn feature weights through a distributed PCA
===============================================

The data are spread over processes, none of which holds all of it.

    torchrun --nproc-per-node 2 examples/distributed_pca.py
    torchrun --nproc-per-node 4 examples/distributed_pca.py --rows 400000

Every rank makes its own rows and keeps them. A loud nuisance hides a quiet signal; weights of
the features are learnt until the first principal direction is the signal. The gradient goes
through the eigenvector, forward and backward by products with the rows where they are: what
ranks send each other is one vector of `--features` numbers for each product.

On GPUs the same script runs over NCCL; nothing in it says which.
"""

from __future__ import annotations

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import pmaf
from pmaf.operators import Gram


def my_rows(rows: int, features: int, rank: int, device: torch.device) -> torch.Tensor:
    """Noise, a quiet signal in the first half of the features, a loud nuisance in the second."""
    generator = torch.Generator(device).manual_seed(rank)
    X = torch.randn(rows, features, generator=generator, device=device)
    half = features // 2
    X[:, :half] += torch.randn(rows, 1, generator=generator, device=device)
    X[:, half:] += 3 * torch.randn(rows, 1, generator=generator, device=device)
    return X


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000, help="of all ranks together")
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--timeout", type=float, default=60, help="seconds a rank waits for others")
    options = parser.parse_args()

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    # Without a timeout of one's own a rank that is waited for is waited for half an hour.
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

    y = None
    for step in range(options.steps):
        weighted = X * logits.exp()
        problem = pmaf.PrincipalEigenvectors(Gram(weighted, scale=1 / X.shape[0]))
        solution = pmaf.solve(problem, init=y)
        y = solution.value.detach()
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
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
