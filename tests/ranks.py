"""Functions that tests run on several ranks at once, and how to run them."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import pmaf
from pmaf.operators import Diagonal, FromMatvec, Gram, LowRank, Matrix
from pmaf_lab.experiments.measure import peak_bytes
from tests.quadratic import SphereQuadratic

F64 = torch.float64


def on_ranks(
    world: int, work: Callable[[DeviceMesh], Any], timeout: float | None = None
) -> list[Any]:
    """What `work(mesh)` returns on every rank, in their order; None from those that died."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, (world, folder, work, timeout), nprocs=world)
        files = [Path(folder) / f"{rank}.pt" for rank in range(world)]
        return [torch.load(file) if file.exists() else None for file in files]


def _run(
    rank: int, world: int, folder: str, work: Callable[[DeviceMesh], Any], timeout: float | None
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=5),
    )
    mesh = init_device_mesh("cpu", (world,))
    if timeout is not None:  # of what comes, not of starting processes on a busy machine
        group = dist.new_group(timeout=timedelta(seconds=timeout))
        mesh = DeviceMesh.from_group(group, "cpu")
        dist.barrier()
    torch.save(work(mesh), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
    # A thread of Gloo that releases its last tensor while the interpreter ends aborts the process
    # (torch 2.13). The results are in the file, and nothing is left that an interpreter has to do.
    os._exit(0)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def complex_randn(*shape: int) -> Tensor:
    return torch.complex(randn(*shape), randn(*shape, seed=9))


def weights(x: Tensor) -> Tensor:
    if x.is_complex():
        angles = torch.arange(x.numel(), dtype=F64)
        return torch.polar(torch.ones_like(angles), angles).reshape(x.shape)
    return torch.cos(torch.arange(x.numel(), dtype=x.dtype)).reshape(x.shape)


def by_rows(x: Tensor, mesh: DeviceMesh | None, dim: int = 0) -> Tensor:
    """A leaf, spread over the ranks of a mesh if there is one."""
    if mesh is None:
        return x.clone().requires_grad_()
    return distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_()


def everywhere(x: Tensor) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()


def gradients(outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Of a loss that every rank computes from the solution that it has."""
    plain = [x.to_local() if isinstance(x, DTensor) else x for x in outputs]
    loss = torch.stack([torch.real((weights(x) * x).sum()) for x in plain]).sum()
    found = torch.autograd.grad(loss, leaves)
    for dx, x in zip(found, leaves):
        if isinstance(x, DTensor):
            assert isinstance(dx, DTensor)
            assert dx.placements == x.placements
    return [everywhere(x) for x in (*outputs, *found)]


# Each takes a mesh, or None for a single process, and returns outputs and gradients.


def gram(mesh: DeviceMesh | None, **options: Any) -> list[Tensor]:
    X = by_rows(randn(53, 12), mesh)  # rows that do not come out even
    return gradients(list(pmaf.ied(Gram(X, scale=1 / 52), **options)), [X])


def gram_three(mesh: DeviceMesh | None) -> list[Tensor]:
    return gram(mesh, k=3)


def gram_smallest(mesh: DeviceMesh | None) -> list[Tensor]:
    return gram(mesh, largest=False)


def gram_warm(mesh: DeviceMesh | None) -> list[Tensor]:
    return gram(mesh, init=randn(12, seed=5))


def gram_batched(mesh: DeviceMesh | None) -> list[Tensor]:
    X = by_rows(randn(2, 53, 12), mesh, dim=1)
    return gradients(list(pmaf.ied(Gram(X))), [X])


def gram_centred(mesh: DeviceMesh | None) -> list[Tensor]:
    """Of data whose rows are spread, and of complex data, with and without weights."""
    X, Z = by_rows(randn(53, 12) + 3, mesh), by_rows(complex_randn(53, 6) + 2j, mesh)
    w = by_rows(randn(53, seed=1).square(), mesh)
    u = randn(2, 53, seed=2).square().requires_grad_()  # every rank has it
    return [
        *gradients(list(pmaf.ied(Gram(X, scale=1 / 52, centre=True), 2)), [X]),
        *gradients(list(pmaf.ied(Gram(X, weights=w, centre=True))), [X, w]),
        *gradients(list(pmaf.ied(Gram(X, weights=u, centre=True))), [X, u]),
        *gradients(list(pmaf.ied(Gram(Z, weights=w, centre=True))), [Z, w]),
    ]


def shifted(mesh: DeviceMesh | None) -> list[Tensor]:
    """A plain tensor that every rank has beside one that is spread."""
    X = by_rows(randn(53, 12), mesh)
    ones = by_rows(torch.ones(1, 53, dtype=F64), mesh, dim=1)
    shift = (everywhere(X).mean(0, keepdim=True) + 0.3).requires_grad_()
    operator = Gram(Matrix(X) - LowRank(ones, shift))
    return gradients(list(pmaf.ied(operator)), [X, shift])


def square(mesh: DeviceMesh | None) -> list[Tensor]:
    A = by_rows(randn(13, 13), mesh)
    return gradients(list(pmaf.ied(A)), [A])


def square_by_columns(mesh: DeviceMesh | None) -> list[Tensor]:
    A = by_rows(randn(13, 13).abs(), mesh, dim=1)
    return gradients(list(pmaf.ied(A, symmetric=False)), [A])


def least_squares(mesh: DeviceMesh | None, length: float) -> list[Tensor]:
    A, b = by_rows(randn(53, 12), mesh), by_rows(length * randn(53, seed=1), mesh)
    return gradients([pmaf.less(A, b, radius=1.3)], [A, b])


def least_squares_inner(mesh: DeviceMesh | None) -> list[Tensor]:
    return least_squares(mesh, 0.1)


def least_squares_outer(mesh: DeviceMesh | None) -> list[Tensor]:
    return least_squares(mesh, 20.0)


def least_squares_of_zero(mesh: DeviceMesh | None) -> list[Tensor]:
    return least_squares(mesh, 0.0)


def least_squares_in_a_ball(mesh: DeviceMesh | None) -> list[Tensor]:
    """A matrix that is spread, with weights; in the large ball the solution is inside."""
    A, b, w = by_rows(randn(50, 8), mesh), randn(50, seed=1), randn(50, seed=2).square()
    leaves = [A, b.requires_grad_(), w.requires_grad_()]
    problems = [pmaf.SphereLeastSquares(A, b, rho, True, None, w) for rho in (0.1, 9.0)]
    small, large = (pmaf.solve(problem) for problem in problems)
    return gradients([small.value, small.multiplier, large.value], leaves)


def declared(mesh: DeviceMesh | None) -> list[Tensor]:
    """A problem that the library does not know, with an operator that is spread."""
    X, c = by_rows(randn(53, 12), mesh), randn(12, seed=3).requires_grad_()
    solution = pmaf.solve(SphereQuadratic(Gram(X, scale=1 / 52), c))
    return gradients([solution.value, solution.multiplier], [X, c])


def gram_complex(mesh: DeviceMesh | None) -> list[Tensor]:
    X = by_rows(complex_randn(53, 6), mesh)
    return gradients(list(pmaf.ied(Gram(X, scale=1 / 52), k=2)), [X])


def square_complex(mesh: DeviceMesh | None) -> list[Tensor]:
    A = by_rows(complex_randn(7, 7), mesh)
    return gradients(list(pmaf.ied(A, largest=False)), [A])


def least_squares_complex(mesh: DeviceMesh | None) -> list[Tensor]:
    A, b = by_rows(complex_randn(53, 6), mesh), by_rows(complex_randn(53), mesh)
    return gradients([pmaf.less(A, b, radius=1.3)], [A, b])


def null_space(mesh: DeviceMesh | None) -> list[Tensor]:
    A, w = by_rows(randn(53, 12), mesh), by_rows(randn(53, seed=1).square(), mesh)
    return gradients([pmaf.nullspace(A, weights=w)], [A, w])


def triplets(mesh: DeviceMesh | None) -> list[Tensor]:
    A = by_rows(randn(53, 12), mesh)
    return gradients(list(pmaf.isvd(A, 2)), [A])


def triplets_wide(mesh: DeviceMesh | None) -> list[Tensor]:
    A = by_rows(randn(12, 53), mesh, dim=1)
    return gradients(list(pmaf.isvd(A)), [A])


def _definite(n: int, X: Tensor) -> Tensor:
    return X.mT.conj() @ X / len(X) + torch.eye(n, dtype=X.dtype)


def pair(mesh: DeviceMesh | None, **options: Any) -> list[Tensor]:
    """Two matrices, both cut into rows."""
    A = by_rows(randn(13, 13), mesh)
    M = by_rows(_definite(13, randn(40, 13, seed=1)), mesh)
    return gradients(list(pmaf.ied(Matrix(A), M=Matrix(M), **options)), [A, M])


def pair_three(mesh: DeviceMesh | None) -> list[Tensor]:
    return pair(mesh, k=3, skip=1)


def pair_smallest(mesh: DeviceMesh | None) -> list[Tensor]:
    return pair(mesh, k=2, largest=False)


def pair_of_data(mesh: DeviceMesh | None) -> list[Tensor]:
    """Two Gram matrices of data whose rows are spread; no diagonal is known."""
    X, Y = by_rows(randn(53, 12), mesh), by_rows(randn(61, 12, seed=2), mesh)
    return gradients(list(pmaf.ied(Gram(X), 2, M=Gram(Y))), [X, Y])


def pair_with_a_diagonal(mesh: DeviceMesh | None) -> list[Tensor]:
    X, d = by_rows(randn(53, 12), mesh), by_rows(randn(12, seed=3).exp(), mesh)
    return gradients(list(pmaf.ied(Gram(X), 2, M=Diagonal(d))), [X, d])


def pair_with_a_plain_matrix(mesh: DeviceMesh | None) -> list[Tensor]:
    """Every rank has `M`, as a plain tensor; or `A`, and `M` is spread."""
    X, M = by_rows(randn(53, 12), mesh), _definite(12, randn(40, 12, seed=1)).requires_grad_()
    found = gradients(list(pmaf.ied(Gram(X), M=M)), [X, M])
    A, Y = randn(12, 12, seed=4).requires_grad_(), by_rows(randn(61, 12, seed=2), mesh)
    return found + gradients(list(pmaf.ied(A, M=Gram(Y))), [A, Y])


def pair_complex(mesh: DeviceMesh | None) -> list[Tensor]:
    X = by_rows(complex_randn(53, 6), mesh)
    M = by_rows(_definite(6, complex_randn(40, 6) + 1), mesh)
    return gradients(list(pmaf.ied(Gram(X), 2, M=Matrix(M))), [X, M])


ROWS = (
    pair,
    pair_three,
    pair_smallest,
    pair_of_data,
    pair_with_a_diagonal,
    pair_with_a_plain_matrix,
    pair_complex,
    null_space,
    triplets,
    triplets_wide,
    declared,
    least_squares_in_a_ball,
    gram,
    gram_three,
    gram_smallest,
    gram_warm,
    gram_batched,
    gram_centred,
    shifted,
    square,
    square_by_columns,
    least_squares_inner,
    least_squares_outer,
    least_squares_of_zero,
    gram_complex,
    square_complex,
    least_squares_complex,
)


def whole_loss(outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Of a loss over a batch of which every rank has a part: DTensors all the way."""
    loss = torch.stack([_cubes(x) for x in outputs]).sum()
    found = torch.autograd.grad(loss, leaves)
    return [everywhere(x) for x in (*outputs, *found)]


def _cubes(x: Tensor) -> Tensor:
    """The sum of third powers, also of real and imaginary parts, by operations of DTensors."""
    return x.pow(3).sum() if not x.is_complex() else (x - 0.5j).abs().pow(3).sum()


def batch_of_hermitian(mesh: DeviceMesh | None) -> list[Tensor]:
    A, reference = by_rows(complex_randn(5, 4, 4), mesh), complex_randn(5, 4)
    found = whole_loss(list(pmaf.ied(A, k=2, reference=reference)), [A])
    assert mesh is None or pmaf.ied(A).vectors.placements == (Shard(0),)
    return found


def batch_of_complex_problems(mesh: DeviceMesh | None) -> list[Tensor]:
    A, b = by_rows(complex_randn(5, 8, 3), mesh), by_rows(complex_randn(5, 8), mesh)
    return whole_loss([pmaf.less(A, b)], [A, b])


def batch_of_declared(mesh: DeviceMesh | None) -> list[Tensor]:
    Q, c = by_rows(randn(5, 6, 6), mesh), by_rows(randn(5, 6, seed=2), mesh)
    solution = pmaf.solve(SphereQuadratic(Q + Q.mT, c))
    return whole_loss([solution.value, solution.multiplier], [Q, c])


def batch_of_matrices(mesh: DeviceMesh | None) -> list[Tensor]:
    A = by_rows(randn(5, 6, 6), mesh)  # of four ranks the last has one, or none
    found = whole_loss(list(pmaf.ied(A, k=2)), [A])
    assert mesh is None or pmaf.ied(A).vectors.placements == (Shard(0),)
    return found


def batch_of_roots(mesh: DeviceMesh | None) -> list[Tensor]:
    X = randn(5, 4, 4)
    A = by_rows(X @ X.mT + torch.eye(4, dtype=F64), mesh)
    return whole_loss([pmaf.spectral(A, "sqrt"), pmaf.spectral(A, torch.tanh, 2)], [A])


def batch_with_references(mesh: DeviceMesh | None) -> list[Tensor]:
    A, reference = by_rows(randn(5, 6, 6), mesh), randn(5, 6, seed=1)
    return whole_loss(list(pmaf.ied(A, reference=reference)), [A])


def batch_of_problems(mesh: DeviceMesh | None) -> list[Tensor]:
    A, b = by_rows(randn(5, 8, 3), mesh), by_rows(randn(5, 8, seed=1), mesh)
    return whole_loss([pmaf.less(A, b)], [A, b])


def batch_with_one_matrix(mesh: DeviceMesh | None) -> list[Tensor]:
    """Every rank has the matrix, and contributes a part of its gradient."""
    A, b = randn(8, 3).requires_grad_(), by_rows(randn(5, 8, seed=1), mesh)
    if mesh is not None:
        A = distribute_tensor(A.detach(), mesh, [Replicate()]).requires_grad_()
    return whole_loss([pmaf.less(A, b)], [A, b])


def batch_of_null_spaces(mesh: DeviceMesh | None) -> list[Tensor]:
    A, w = by_rows(randn(5, 8, 4), mesh), by_rows(randn(5, 8, seed=1).square(), mesh)
    return whole_loss([pmaf.nullspace(A, 2, weights=w)], [A, w])


def batch_of_triplets(mesh: DeviceMesh | None) -> list[Tensor]:
    A, reference = by_rows(randn(5, 3, 8), mesh), randn(5, 8, seed=1)
    return whole_loss(list(pmaf.isvd(A, 2, reference=reference)), [A])


def batch_with_options(mesh: DeviceMesh | None) -> list[Tensor]:
    """Everything that has a batch is spread; the matrix of the ellipsoid is on every rank."""
    A, b = by_rows(randn(5, 8, 3), mesh), by_rows(randn(5, 8, seed=1), mesh)
    rho, w = by_rows(randn(5, seed=2).exp(), mesh), by_rows(randn(5, 8, seed=3).abs(), mesh)
    X = randn(3, 3, seed=4)
    M = (X @ X.mT + torch.eye(3, dtype=F64)).requires_grad_()
    if mesh is not None:
        M = distribute_tensor(M.detach(), mesh, [Replicate()]).requires_grad_()
    d = by_rows(randn(5, 3, seed=5).exp(), mesh)
    inside = pmaf.solve(pmaf.SphereLeastSquares(A, b, rho, True, M, w))
    outside = pmaf.less(A, b, radius=rho, weights=w, M=Diagonal(d))
    return whole_loss([inside.value, inside.multiplier, outside], [A, b, rho, M, w, d])


BATCHES = (
    batch_of_null_spaces,
    batch_of_triplets,
    batch_with_options,
    batch_of_declared,
    batch_of_matrices,
    batch_of_roots,
    batch_with_references,
    batch_of_problems,
    batch_with_one_matrix,
    batch_of_hermitian,
    batch_of_complex_problems,
)


def all_cases(mesh: DeviceMesh) -> dict[str, list[Tensor]]:
    """Every case in one go: starting processes takes longer than all of them."""
    return {case.__name__: case(mesh) for case in (*ROWS, *BATCHES)}


class Net(nn.Module):
    """Both layers on learnt features, dense and by products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Linear(6, 4, dtype=F64)
        self.ied, self.less = pmaf.IED(), pmaf.LESS()

    def forward(self, x: Tensor) -> Tensor:
        f = self.features(x)
        return self.ied(f.mT @ f).vectors + self.ied(Gram(f)).vectors + self.less(f, x[..., 0])


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    model(x).pow(3).sum(-1).mean().backward()
    return [everywhere(p.grad) for p in model.parameters() if p.grad is not None]


def wrapped(mesh: DeviceMesh) -> dict[str, list[Tensor]]:
    """Gradients of a model in data parallel and in fully sharded data parallel training."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mine = randn(8, 9, 6).chunk(mesh.size())[mesh.get_rank()]
    return {
        "DDP": trained(DistributedDataParallel(Net()), mine),
        "FSDP": trained(fully_shard(Net(), mesh=mesh), mine),
    }


def collectives(mesh: DeviceMesh) -> dict[str, Any]:
    """What a solve sends, and how many products it took."""
    from torch.distributed.tensor.debug import CommDebugMode

    X = by_rows(randn(400, 12), mesh)
    with CommDebugMode() as sent:
        solution = pmaf.solve(pmaf.PrincipalEigenvectors(Gram(X)))
    counts = {str(name): count for name, count in sent.get_comm_counts().items()}
    return {"counts": counts, "products": int(solution.iterations.full_tensor())}


def collectives_of_a_pair(mesh: DeviceMesh) -> tuple[list[str], int]:
    """What a solve of a pair sends, and the most numbers of one message."""
    from torch.distributed.tensor.debug import CommDebugMode

    class Largest(CommDebugMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "c10d" in str(func) and isinstance(args[0], Tensor):
                self.most = max(self.most, args[0].numel())
            return super().__torch_dispatch__(func, types, args, kwargs)

    A = by_rows(randn(60, 60), mesh)
    M = by_rows(_definite(60, randn(100, 60, seed=1)), mesh)
    with Largest() as sent:
        pmaf.ied(Matrix(A), M=Matrix(M)).vectors.to_local().sum().backward()
    return [str(name) for name, count in sent.get_comm_counts().items() if count], sent.most


def certified_pair(mesh: DeviceMesh) -> list[Tensor]:
    """The certificates of a solution, and of one of the wrong length."""
    X, Y = by_rows(randn(53, 12), mesh), by_rows(randn(61, 12, seed=2), mesh)
    problem = pmaf.PrincipalEigenvectors(Gram(X), 2, M=Gram(Y))
    found = pmaf.solve(problem).value
    good, bad = (pmaf.certify(problem, x) for x in (found, 1.01 * found))
    return [good.holds(1e-10), bad.holds(1e-10), bad.feasibility]


def indefinite(mesh: DeviceMesh) -> str:
    """A metric that is negative in the rows of one rank. Every rank has to hear of it."""
    d = torch.ones(12, dtype=F64)
    d[-1] = -1
    try:
        pmaf.ied(Gram(by_rows(randn(53, 12), mesh)), M=Matrix(by_rows(torch.diag(d), mesh)))
    except ValueError as error:
        return str(error)
    return ""


def memory(mesh: DeviceMesh) -> int:
    """Bytes of a rank's share of X, and the most that both passes hold beside it."""
    rows = 40_000 // mesh.size()
    generator = torch.Generator().manual_seed(mesh.get_rank())
    mine = torch.randn(rows, 50, generator=generator)
    X = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False).requires_grad_()

    def run() -> None:
        pmaf.ied(Gram(X)).vectors.to_local().sum().backward()

    run()  # the first time imports and caches things
    X.grad = None
    return mine.numel() * mine.element_size() + peak_bytes(run, torch.device("cpu"))


def poisoned(mesh: DeviceMesh) -> str:
    """One rank has a number that is not finite. Every rank has to hear of it."""
    X = randn(40, 6)
    X[-1, 2] = torch.nan
    try:
        pmaf.ied(Gram(by_rows(X, mesh)))
    except ValueError as error:
        return str(error)
    return ""


def deserted(mesh: DeviceMesh) -> str:
    """The last rank dies between two products. The others have to hear of it."""
    return _interrupted(mesh, lambda: os._exit(0))


def held_up(mesh: DeviceMesh) -> str:
    """The last rank hangs between two products, for longer than the others wait."""
    return _interrupted(mesh, lambda: time.sleep(8))


def _interrupted(mesh: DeviceMesh, trouble: Callable[[], None]) -> str:
    products = 0
    X = by_rows(randn(40, 6), mesh)

    def matvec(u: Tensor, X: Tensor) -> Tensor:
        nonlocal products
        products += 1
        if products == 3 and mesh.get_rank() == mesh.size() - 1:
            trouble()
        return (u.unsqueeze(-2) @ X.mT @ X).squeeze(-2)

    try:
        pmaf.ied(FromMatvec(matvec, (6, 6), [X], matvec))
    except RuntimeError as error:
        return str(error)
    return ""


def mistaken(mesh: DeviceMesh) -> str:
    """A transpose that is wrong in the rows of one rank. Every rank has to hear of it."""
    X = by_rows(randn(40, 6), mesh)
    signs = torch.ones(40, dtype=F64)
    signs[-3:] = -1
    flipped = by_rows(randn(40, 6) * signs[:, None], mesh)

    def matvec(u: Tensor, X: Tensor, _: Tensor) -> Tensor:
        return (u.unsqueeze(-2) @ X.mT).squeeze(-2)

    def rmatvec(u: Tensor, _: Tensor, X: Tensor) -> Tensor:
        return (u.unsqueeze(-2) @ X).squeeze(-2)

    try:
        pmaf.ied(Gram(FromMatvec(matvec, (40, 6), [X, flipped], rmatvec)))
    except ValueError as error:
        return str(error)
    return ""


def ill_conditioned(mesh: DeviceMesh | None) -> list[Tensor]:
    """In float32, where products with the square of the matrix have no digits of the solution."""
    left, right = (torch.linalg.qr(randn(n, 12, seed=n))[0] for n in (53, 12))
    A = left * torch.logspace(-3.5, 0, 12, dtype=F64) @ right.mT
    b = 0.5 * A @ right.sum(-1) / 12**0.5
    leaves = [by_rows(x.float(), mesh) for x in (A, b)]
    return gradients([pmaf.less(Matrix(leaves[0]), leaves[1])], leaves)
