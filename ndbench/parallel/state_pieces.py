"""What there is to save on this rank: pieces of named tensors, and which of the ranks that hold a piece writes it.

Everything follows from the layout, so no rank asks another. Names are those of the unwrapped model, a tied parameter
has one; the optimizer's tensors are ``optimizer/<parameter>/<key>``. It knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ndbench.parallel._torch_private import local_tensor, persistent_buffers
from ndbench.parallel.initialize import local_slice
from ndbench.parallel.state_files import Entry


@dataclass(frozen=True)
class Piece:
    """This rank's part of a tensor of global ``shape``; ``holders`` are the ranks that have just this part."""

    entry: Entry
    shape: tuple[int, ...]
    tensor: torch.Tensor
    holders: tuple[int, ...]


def reshard(model: nn.Module) -> None:
    """Free gathered parameters (an evaluation leaves the root's), so that the model shows its shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def model_pieces(model: nn.Module, world_size: int) -> dict[str, Piece]:
    """Parameters and persistent buffers of a resharded model, by name."""
    tensors = {**dict(model.named_parameters()), **persistent_buffers(model)}
    return {name: piece(name, tensor, tensor, world_size) for name, tensor in tensors.items()}


def piece(name: str, placed: torch.Tensor, tensor: torch.Tensor, world_size: int) -> Piece:
    """``tensor``, which lies over the ranks as ``placed`` does: the parameter itself, or a moment of the optimizer."""
    rows, columns = local_slice(placed)
    local = local_tensor(tensor).detach()
    first = (rows.start, columns.start if columns is not None else 0)
    offset = tuple(first[dim] if dim < 2 else 0 for dim in range(placed.ndim))
    entry = Entry(name, tensor.dtype, tuple(local.shape), offset)
    return Piece(entry, tuple(placed.shape), local, holders(placed, world_size))


def whole(name: str, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Piece:
    """A tensor that is not sharded."""
    size = tuple(tensor.shape)
    return Piece(Entry(name, tensor.dtype, size, (0,) * len(size)), size, local_tensor(tensor).detach(), ranks)


def holders(tensor: torch.Tensor, world_size: int) -> tuple[int, ...]:
    """The ranks, this one among them, that hold the same part of ``tensor`` as this one."""
    if not isinstance(tensor, DTensor):
        return tuple(range(world_size))
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank is part of the mesh"
    index = tuple(
        coordinate[dim] if hasattr(placement, "dim") else slice(None) for dim, placement in enumerate(tensor.placements)
    )
    here = mesh.mesh[index].reshape(-1)
    # A mesh of the fastest axes alone: replicas, a multiple of its size away, are no part of it.
    first, size = int(mesh.mesh.min()), mesh.size()
    assert mesh.mesh.max() - first == size - 1, f"a parameter lies on ranks {mesh.mesh.tolist()}, with gaps"
    return tuple(sorted(int(rank) - first + start for start in range(0, world_size, size) for rank in here))


def elect(pieces: Iterable[Piece], rank: int, spread: bool) -> list[Piece]:
    """The pieces that ``rank`` writes: each is written once.

    ``spread`` deals equal pieces out by their bytes among the ranks that hold them, else the lowest of these writes.
    """
    loads: dict[tuple[int, ...], list[int]] = {}
    mine = []
    for each in pieces:
        load = loads.setdefault(each.holders, [0] * len(each.holders))
        writer = load.index(min(load)) if spread else 0
        load[writer] += each.entry.bytes
        empty_part = not each.tensor.numel() and each.tensor.shape != each.shape
        if each.holders[writer] == rank and not empty_part:
            mine.append(each)
    return mine
