"""From degrees to a DeviceMesh with its flattened views, and the rank grid as text.

One root mesh with four axes; every other mesh is a view of it, so that FSDP and DTensor can combine them. It knows
nothing of models or of what the views are used for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ndbench.parallel.config import AXES, ParallelismConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

VIEWS = {
    "batch": ("dp_replicate", "dp_shard"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
    "fsdp": ("dp_shard", "cp"),
}
"""Flattened views: who gets different data, who shares one loss, who shares one copy of the parameters."""


@dataclass(frozen=True)
class Mesh:
    """The root mesh of a layout and its views; a view of size 1 exists too."""

    config: ParallelismConfig
    device_type: str
    world: DeviceMesh
    """4-D, axes :data:`AXES`."""
    batch: DeviceMesh
    loss: DeviceMesh
    fsdp: DeviceMesh
    fsdp_mesh: DeviceMesh
    """What ``fully_shard`` gets: 1-D, or 2-D (dp_replicate, fsdp) with replicas; (N, 1) when nothing is sharded."""
    tp: DeviceMesh
    cp: DeviceMesh
    batch_rank: int
    batch_size: int
    """This rank's index among, and the number of, the ranks with different data."""
    axis_of_group: dict[str, str]
    """Process group name -> axis label: an axis, ``batch``, ``loss``, ``fsdp`` or ``world``."""


_built: dict[tuple[Any, ...], Mesh] = {}


def build_mesh(config: ParallelismConfig, device_type: str) -> Mesh:
    """The mesh of ``config``, whose degrees are resolved; the default process group must exist.

    Collective: every rank calls it. A layout's process groups are made once a process: DTensor caches their names.
    """
    import torch.distributed as dist

    if dist.get_world_size() != config.world_size:
        raise ValueError(
            f"{config.layout} needs {config.world_size} ranks, the process group has {dist.get_world_size()}"
        )
    key = (*config.sizes.values(), device_type, id(dist.group.WORLD))
    if key not in _built:
        _built[key] = _build(config, device_type)
    return replace(_built[key], config=config)


def _build(config: ParallelismConfig, device_type: str) -> Mesh:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from ndbench.parallel._torch_private import concatenate, flatten, group_name

    sizes = config.sizes
    root = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=AXES)
    flat: dict[tuple[str, ...], DeviceMesh] = {}
    label = {group_name(dist.group.WORLD): "world"}  # type: ignore[arg-type]

    def view(name: str) -> DeviceMesh:
        active = tuple(axis for axis in VIEWS[name] if sizes[axis] > 1) or VIEWS[name][-1:]
        if len(active) == 1:
            return root[active[0]]
        if active not in flat:
            flat[active] = flatten(root[active], name)
            label[group_name(flat[active].get_group())] = name
        return flat[active]

    fsdp, batch, loss = view("fsdp"), view("batch"), view("loss")
    for axis in AXES:
        # An axis as large as the world shares the default group; its own name says more than "world".
        if sizes[axis] > 1:
            label[group_name(root[axis].get_group())] = axis
    if config.dp_replicate_size == 1:
        fsdp_mesh = fsdp
    elif fsdp.mesh_dim_names == ("fsdp",):
        fsdp_mesh = concatenate([root["dp_replicate"], fsdp])
    else:
        assert fsdp.mesh_dim_names is not None, "every axis of the root has a name"
        fsdp_mesh = root["dp_replicate", fsdp.mesh_dim_names[0]]
    return Mesh(
        config=config,
        device_type=device_type,
        world=root,
        batch=batch,
        loss=loss,
        fsdp=fsdp,
        fsdp_mesh=fsdp_mesh,
        tp=root["tp"],
        cp=root["cp"],
        batch_rank=batch.get_local_rank(),
        batch_size=config.batch_size,
        axis_of_group=label,
    )


def rank_grid(config: ParallelismConfig) -> list[list[list[list[int]]]]:
    """Ranks as nested lists [dp_replicate][dp_shard][cp][tp]."""
    replicate, shard, cp, tp = config.sizes.values()
    return [
        [[[((r * shard + s) * cp + c) * tp + t for t in range(tp)] for c in range(cp)] for s in range(shard)]
        for r in range(replicate)
    ]


def rank_grid_text(config: ParallelismConfig) -> str:
    """The grid for people: a line a group of cp and tp ranks, tp ranks side by side, cp groups divided by ``|``."""
    lines = [f"{config.layout}: " + " x ".join(f"{axis} {size}" for axis, size in config.sizes.items())]
    for r, replica in enumerate(rank_grid(config)):
        for s, shard in enumerate(replica):
            groups = " | ".join(" ".join(f"{rank:3d}" for rank in tp_ranks) for tp_ranks in shard)
            lines.append(f"  dp_replicate {r}  dp_shard {s}: {groups}")
    return "\n".join(lines)
