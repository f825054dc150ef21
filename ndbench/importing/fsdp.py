"""What Accelerate and Axolotl say alike: the keys of FSDP (versions 1 and 2), DeepSpeed's stages, and the degrees.

Both hand these to the same library, with and without the prefix ``fsdp_``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ndbench.importing.findings import LOST, UNDERSTOOD, Findings, Remark
from ndbench.parallel.config import AXES

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""FSDP 1's, in the order of their numbers from 1."""

RESHARD = "parallelism.reshard_after_forward"
OFFLOAD = "parallelism.cpu_offload"
CHECKPOINTING = "training.activation_checkpointing"
ACTIVATION_OFFLOAD = "training.activation_offload"

WHOLE_ACTIVATIONS = "it keeps activations whole between the matmuls; ndbench can shard them: leave this out to try"

FSDP_REMARKS: tuple[Remark, ...] = tuple(
    (f"fsdp_config.{prefix}{key}", status, why)
    for prefix in ("fsdp_", "")
    for key, status, why in (
        ("version", UNDERSTOOD, "ndbench shards with FSDP 2 (fully_shard) always"),
        ("fsdp_version", UNDERSTOOD, "ndbench shards with FSDP 2 (fully_shard) always"),
        ("transformer_layer_cls_to_wrap", UNDERSTOOD, "the model's own blocks are sharded one by one"),
        ("min_num_params", LOST, "ndbench shards by transformer blocks, not by size"),
        ("backward_prefetch*", UNDERSTOOD, "FSDP 2 prefetches the next block in backward by itself"),
        ("forward_prefetch", UNDERSTOOD, "FSDP 2 prefetches the next block in forward by itself"),
        ("limit_all_gathers", UNDERSTOOD, "FSDP 2 has no such switch: it needs no limit"),
        ("use_orig_params", UNDERSTOOD, "always so in FSDP 2"),
        ("sync_module_states", UNDERSTOOD, "all ranks draw the same weights from the seed"),
        ("cpu_ram_efficient_loading", UNDERSTOOD, "each rank fills its own shards only"),
        ("cpu_offload_pin_memory", LOST, "the offload's memory is pinned where CUDA is"),
        (
            "state_dict_type",
            UNDERSTOOD,
            "how checkpoints are written: no part of a step (ndbench train: checkpoint.mode)",
        ),
        ("final_state_dict_type", UNDERSTOOD, "how checkpoints are written: no part of a step"),
        ("ignored_modules", LOST, "ndbench shards every module"),
        ("mixed_precision_policy", LOST, "the precision is taken from the other keys (training.precision)"),
        ("xla*", LOST, "ndbench does not run on XLA"),
    )
)


@dataclass
class Degrees:
    """Of the four axes; None where the file does not say."""

    dp_replicate: int | None = None
    dp_shard: int | None = None
    cp: int | None = None
    tp: int | None = None

    def resolved(self, world: int, sharded: bool, path: str) -> Degrees:
        """All four. What the file leaves open gets the rest of ``world``: the shards if ``sharded``, else the replicas.

        Raises ``ValueError`` with the numbers when they do not make ``world``.
        """
        full = Degrees(self.dp_replicate, self.dp_shard, self.cp or 1, self.tp or 1)
        known = full.product
        rest, remainder = divmod(world, known)
        if not remainder and rest >= 1:
            if full.dp_shard is None and full.dp_replicate in (None, 1) and sharded:
                full.dp_shard, rest = rest, 1
            elif full.dp_replicate is None:
                full.dp_replicate, rest = rest, 1
            elif full.dp_shard is None and sharded:
                full.dp_shard, rest = rest, 1
        if remainder or rest != 1:
            degrees = " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) is not None)
            raise ValueError(f"{path}: {degrees or 'no axis'} = {known} processes, but there are {world}")
        full.dp_replicate, full.dp_shard = full.dp_replicate or 1, full.dp_shard or 1
        return full

    @property
    def product(self) -> int:
        known = 1
        for axis in AXES:
            known *= getattr(self, axis) or 1
        return known

    @property
    def batch_ranks(self) -> int:
        return (self.dp_replicate or 1) * (self.dp_shard or 1)

    def overrides(self) -> dict[str, Any]:
        return {"world_size": self.product} | {f"parallelism.{axis}_size": getattr(self, axis) or 1 for axis in AXES}


@dataclass
class Sharding:
    """What the sections of FSDP or DeepSpeed ask for."""

    sharded: bool
    hybrid: bool = False
    """Shards within a machine, replicas across machines."""


def read_fsdp(found: Findings) -> Sharding:
    """The section ``fsdp_config``, with prefixed keys or without."""
    sharding = Sharding(sharded=True)
    for key in [key for key in found.values if key.startswith("fsdp_config.")]:
        name = key.removeprefix("fsdp_config.").removeprefix("fsdp_")
        if name == "offload_params" and (offload := found.flag(key)) is not None:
            found.translated(key, {OFFLOAD: offload})
        elif name == "activation_checkpointing" and (recompute := found.flag(key)) is not None:
            found.translated(key, {CHECKPOINTING: "full" if recompute else "none"})
        elif name == "sharding_strategy" or (name == "reshard_after_forward" and _is_strategy(found.values[key])):
            _strategy(found, key, found.text(key) or "FULL_SHARD", sharding)
        elif name == "reshard_after_forward" and (reshard := found.flag(key)) is not None:
            found.translated(key, {RESHARD: reshard})
        elif name == "auto_wrap_policy" and (policy := found.text(key)) is not None:
            if policy == "TRANSFORMER_BASED_WRAP":
                found.understood(key, "the model's own blocks are sharded one by one")
            else:
                found.lost(key, "ndbench shards by transformer blocks")
    return sharding


def read_strategy(found: Findings, key: str, text: str) -> Sharding:
    """A strategy of FSDP 1 by its name or number, in any case."""
    sharding = Sharding(sharded=True)
    _strategy(found, key, text, sharding)
    return sharding


def _is_strategy(value: Any) -> bool:
    return str(value).upper() in STRATEGIES


def _strategy(found: Findings, key: str, text: str, sharding: Sharding) -> None:
    name = STRATEGIES[int(text) - 1] if text in ("1", "2", "3", "4", "5") else text.upper()
    if name not in STRATEGIES:
        raise ValueError(f"{found.path}: {key} is {text}, expected one of {', '.join(STRATEGIES)}")
    sharding.sharded, sharding.hybrid = name != "NO_SHARD", name.startswith("HYBRID")
    reshard = name in ("FULL_SHARD", "HYBRID_SHARD")
    why = {"NO_SHARD": "every rank keeps a copy (DDP)", "FULL_SHARD": ""}.get(name, "")
    if sharding.hybrid:
        why = "shards within a machine, replicas across machines"
    found.translated(key, {RESHARD: reshard} if sharding.sharded else {}, why)


def read_stage(found: Findings, key: str, stage: int, why: str = "") -> Sharding:
    """A ZeRO stage of DeepSpeed as the FSDP that shards the same."""
    if stage > 3:
        raise ValueError(f"{found.path}: {key} is {stage}, expected 0, 1, 2 or 3")
    note = f"{why}: " if why else ""
    if stage == 0:
        found.translated(key, {}, f"{note}stage 0 keeps a copy on every rank (DDP)")
    elif stage == 1:
        found.lost(
            key,
            f"{note}stage 1 shards the optimizer alone; FSDP that gathers once a step is the nearest",
            {RESHARD: False},
        )
    else:
        what = "gradients and optimizer" if stage == 2 else "parameters, gradients and optimizer"
        found.translated(key, {RESHARD: stage == 3}, f"{note}stage {stage} shards {what}; here with FSDP 2")
    return Sharding(sharded=stage > 0)
