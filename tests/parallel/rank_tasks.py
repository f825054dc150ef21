"""What ranks run in the tests of mesh, gradients, weights and collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from ndbench.parallel.collectives import Group, gather_sequence, own_part, scatter_partials
from ndbench.parallel.config import ParallelismConfig
from ndbench.parallel.gradients import Gradients
from ndbench.parallel.mesh import build_mesh


def mesh_facts(config: ParallelismConfig) -> dict[str, Any]:
    mesh = build_mesh(config, "cpu")
    facts: dict[str, Any] = {view: getattr(mesh, view).size() for view in ("batch", "loss", "fsdp", "tp", "cp")}
    return facts | {
        "fsdp_mesh": mesh.fsdp_mesh.shape,
        "batch_rank": mesh.batch_rank,
        "batch_size": mesh.batch_size,
        "labels": set(mesh.axis_of_group.values()),
        "cached": build_mesh(config, "cpu").world is mesh.world,
    }


def wrong_world() -> str:
    try:
        build_mesh(ParallelismConfig(2, 4), "cpu")
    except ValueError as error:
        return str(error)
    return ""


def norms(clip: float | None = None) -> dict[str, Any]:
    """Gradients of known size on a (2, 2) mesh: sharded twice, over tp only, replicated, and plain."""
    mesh = build_mesh(ParallelismConfig(1, 2, 1, 2), "cpu").world["dp_shard", "tp"]
    model = nn.Module()
    placements = {"both": (Shard(0), Shard(1)), "tp": (Replicate(), Shard(0)), "copies": (Replicate(), Replicate())}
    for name, placement in placements.items():
        value = DTensor.from_local(torch.zeros(2, 3), mesh, placement, run_check=False)
        model.register_parameter(name, nn.Parameter(value))
        model.get_parameter(name).grad = DTensor.from_local(torch.ones(2, 3), mesh, placement, run_check=False)
    model.register_parameter("plain", nn.Parameter(torch.zeros(6)))
    model.get_parameter("plain").grad = torch.ones(6)
    gradients = Gradients(model, group=dist.group.WORLD, device=torch.device("cpu"))
    norm, (also,) = gradients.norm(torch.tensor(float(dist.get_rank())))
    if clip is not None:
        gradients.clip(norm.float(), clip)
    largest = max(
        float(p.grad.to_local().max() if isinstance(p.grad, DTensor) else p.grad.max()) for p in model.parameters()
    )  # type: ignore[union-attr]
    return {"norm": norm.item(), "also": also.item(), "largest": largest}


class _Copies(TorchDispatchMode):
    """Names of the operators that write a tensor anew."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("aten::cat", "aten::clone", "aten::copy_", "aten::_to_copy"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def sequence_exchange(batch: int) -> dict[str, Any]:
    """Gather of shards of the sequence and scatter of partial sums, both ways, for [batch, 6, 2] on all ranks."""
    assert dist.group.WORLD is not None
    group = Group(dist.group.WORLD)
    whole = torch.arange(batch * 6 * 2, dtype=torch.float32).view(batch, 6, 2)
    mine = own_part(whole, group, 1).contiguous().requires_grad_()
    partial = (whole * (group.rank + 1)).requires_grad_()
    with _Copies() as copies:
        gathered = gather_sequence(mine, group)
        gathered.backward(partial.detach())
        scattered = scatter_partials(partial, group)
        scattered.backward(mine.detach())
    total = sum(range(1, group.size + 1))
    assert mine.grad is not None
    assert partial.grad is not None
    return {
        "gathered": torch.equal(gathered, whole) and torch.equal(partial.grad, whole),
        "scattered": torch.equal(scattered, own_part(whole * total, group, 1))
        and torch.equal(mine.grad, own_part(whole * total, group, 1)),
        "copies": copies.seen,
    }
