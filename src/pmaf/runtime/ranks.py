"""Tensors that are spread over ranks, DTensors, and plain ones beside them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor


def is_spread(x: object) -> bool:
    """Whether `x` is a DTensor; none exists before its module is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def mesh_of(*tensors: Any) -> Any:
    """The device mesh that some of the tensors are spread over, None if none is."""
    meshes = {x.device_mesh for x in tensors if is_spread(x)}
    if len(meshes) > 1:
        raise ValueError(f"tensors are spread over different device meshes: {meshes}")
    return next(iter(meshes), None)


def replicate(x: Tensor, mesh: Any) -> Tensor:
    """A tensor that every rank has, as a DTensor; `x` itself where there is no mesh."""
    if mesh is None or is_spread(x):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def whole(x: Tensor) -> Tensor:
    """All of a tensor on every rank, as a plain one."""
    return x.full_tensor() if is_spread(x) else x  # pyright: ignore[reportAttributeAccessIssue]


def local(x: Tensor) -> Tensor:
    """The part of a tensor on this rank."""
    return x.to_local() if is_spread(x) else x  # pyright: ignore[reportAttributeAccessIssue]


def alike(x: Tensor, other: Tensor) -> Tensor:
    """`x` with the placements of `other`, if that is spread."""
    if not is_spread(other):
        return x
    return replicate(x, mesh_of(other)).redistribute(placements=other.placements)  # pyright: ignore


def cuts_matrices(A: Tensor) -> bool:
    """Whether matrices `(*, m, n)` are cut into pieces, not only a batch of them."""
    return is_spread(A) and any(
        placement.is_shard() and placement.dim >= A.dim() - 2  # pyright: ignore
        for placement in A.placements  # pyright: ignore[reportAttributeAccessIssue]
    )


class Parts:
    """A batch of problems that is spread over ranks; every rank solves its own part.

    Args:
        batch: shape of the whole batch.
        inputs: tensors by name, each with the number of dimensions of one entry; the first ones
            decide how the batch is spread.
    """

    def __init__(self, batch: torch.Size, inputs: dict[str, tuple[Tensor | None, int]]) -> None:
        given = {name: (x, own) for name, (x, own) in inputs.items() if x is not None}
        self.batch = batch
        self.mesh = mesh_of(*(x for x, _ in given.values()))
        # Which batch dimension each dimension of the mesh cuts, counted from the last.
        self.cuts: list[int | None] = [None] * self.mesh.ndim
        for x, own in given.values():
            if is_spread(x):
                for axis, placement in enumerate(x.placements):  # pyright: ignore
                    if placement.is_shard() and self.cuts[axis] is None:
                        self.cuts[axis] = placement.dim - (x.dim() - own)
        self.inputs = {name: self._local(name, x, own) for name, (x, own) in given.items()}

    def _local(self, name: str, x: Tensor, own: int) -> Tensor:
        from torch.distributed.tensor import Partial, Replicate, Shard

        rank = x.dim() - own
        here, backward = [], []
        for cut in self.cuts:
            if cut is not None and cut >= 0:
                raise ValueError(f"{name} is cut along dimension {cut - own}, not along its batch")
            has_it = cut is not None and -cut <= rank and x.shape[rank + cut] != 1
            here.append(Shard(rank + cut) if has_it and cut is not None else Replicate())
            # A tensor that all ranks share gets a part of its gradient from each rank.
            backward.append(here[-1] if has_it or cut is None else Partial())
        spread: Any = replicate(x, self.mesh)
        return spread.redistribute(placements=here).to_local(grad_placements=backward)

    def join_all(self, found: Any) -> Any:
        """`join` for every tensor of a data class."""
        return replace_tensors(found, self.join)

    def join(self, x: Tensor) -> Tensor:
        """The results of all ranks as one DTensor."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        rank = len(self.batch)
        places = [Replicate() if cut is None else Shard(rank + cut) for cut in self.cuts]
        shape = torch.Size((*self.batch, *x.shape[rank:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            x.contiguous(), self.mesh, places, run_check=False, shape=shape, stride=stride
        )


def replace_tensors(found: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A data class with its tensors changed."""
    named = {field.name: getattr(found, field.name) for field in fields(found)}
    return replace(found, **{k: change(x) for k, x in named.items() if isinstance(x, Tensor)})


def agreed(done: Tensor, mesh: Any) -> bool:
    """Whether all entries are done, as every rank sees it.

    The results of ranks may differ by rounding, and a rank that stops while another goes on leaves
    that one waiting for ever. So all ranks decide together.
    """
    return bool(_on_all_ranks(done.all(), mesh))


def answers(masks: Tensor, mesh: Any) -> list[bool]:
    """The same for each mask, `(q, *)`, with one question to the device and the other ranks."""
    return _on_all_ranks(masks.flatten(1).all(-1), mesh).bool().tolist()


def _on_all_ranks(flags: Tensor, mesh: Any) -> Tensor:
    if mesh is None:
        return flags
    import torch.distributed as dist

    flags = flags.to(torch.int32)
    for axis in range(mesh.ndim):
        dist.all_reduce(flags, dist.ReduceOp.MIN, group=mesh.get_group(axis))
    return flags
