"""What ranks run in the tests of mesh, gradients and weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

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
