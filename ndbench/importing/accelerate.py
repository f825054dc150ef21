"""An Accelerate configuration (``accelerate config``, ``accelerate launch --config_file``) as overrides.

It says how ranks are laid out and in which precision they compute; model, data, batch and optimizer are in the script.
"""

from __future__ import annotations

from typing import Any

from ndbench.engines.bundled_refusals import PRECISIONS
from ndbench.importing.findings import LOST, UNDERSTOOD, Findings, Remark
from ndbench.importing.fsdp import (
    CHECKPOINTING,
    FSDP_REMARKS,
    OFFLOAD,
    WHOLE_ACTIVATIONS,
    Degrees,
    Sharding,
    read_fsdp,
    read_stage,
)

MESH = "parallelism_config.parallelism_config_"
DEEPSPEED = "deepspeed_config."
MEGATRON = "megatron_lm_config.megatron_lm_"

IN_THE_SCRIPT = (
    "an Accelerate configuration names no model, batch, sequence length or optimizer, they are in your script: add "
    "model=…, training.sequence_length=…, training.global_batch_size=…, training.micro_batch_size=…"
)

_LAUNCH = "ndbench starts its ranks itself"

REMARKS: tuple[Remark, ...] = (
    *FSDP_REMARKS,
    ("compute_environment", UNDERSTOOD, _LAUNCH),
    ("debug", UNDERSTOOD, "checks of Accelerate's own, no part of a step"),
    ("machine_rank", UNDERSTOOD, _LAUNCH),
    ("main_process_*", UNDERSTOOD, _LAUNCH),
    ("main_training_function", UNDERSTOOD, "ndbench measures its own loop; engine=command measures your script"),
    ("rdzv_*", UNDERSTOOD, _LAUNCH),
    ("same_network", UNDERSTOOD, _LAUNCH),
    ("gpu_ids", LOST, "set CUDA_VISIBLE_DEVICES to choose among the GPUs"),
    ("enable_cpu_affinity", LOST, "ndbench does not bind its ranks to cores"),
    ("tpu_*", UNDERSTOOD, "no part of a run on GPUs or CPUs"),
    ("commands", LOST, "for TPU pods only"),
    ("command_file", LOST, "for TPU pods only"),
    ("downcast_bf16", UNDERSTOOD, "for TPUs only"),
    ("ipex_config*", LOST, "ndbench does not use Intel's extension"),
    ("mpirun_config*", LOST, _LAUNCH),
    ("fp8_config*", LOST, "how fp8 scales is the engine's own affair"),
    ("dynamo_config.*", LOST, "blocks are compiled one by one, with torch.compile's defaults"),
    ("parallelism_config.*_cp_backend", UNDERSTOOD, "ndbench has attention over cp of its own"),
    ("parallelism_config.*_sp_backend", UNDERSTOOD, "ndbench has attention over cp of its own"),
    ("parallelism_config.*_sp_seq_length_is_variable", UNDERSTOOD, "sequences of a benchmark have one length"),
    ("parallelism_config.*_sp_attn_implementation", UNDERSTOOD, "ndbench calls torch's flash kernels itself"),
    (f"{DEEPSPEED}zero3_init_flag", UNDERSTOOD, "each rank fills its own shards only"),
    (f"{DEEPSPEED}zero3_save_16bit_model", UNDERSTOOD, "how checkpoints are written: no part of a step"),
    (f"{DEEPSPEED}deepspeed_config_file", LOST, "another file, which is not read: say here what it sets"),
    (f"{DEEPSPEED}deepspeed_multinode_launcher", UNDERSTOOD, _LAUNCH),
    (f"{DEEPSPEED}deepspeed_hostfile", LOST, "ndbench starts its ranks on one machine"),
    (f"{DEEPSPEED}deepspeed_*clusion_filter", LOST, "ndbench starts its ranks on one machine"),
    (f"{DEEPSPEED}deepspeed_moe_layer_cls_names", LOST, "ndbench does not shard experts"),
    (f"{DEEPSPEED}seq_parallel_communication_data_type", LOST, "activations travel in the precision of the compute"),
    (f"{DEEPSPEED}offload_*_nvme_path", LOST, "ndbench offloads to host memory only"),
    (f"{MEGATRON}num_micro_batches", LOST, "micro-batches of a pipeline; ndbench has none"),
    (f"{MEGATRON}use_distributed_optimizer", LOST, "FSDP is ndbench's way to shard an optimizer (parallelism=fsdp)"),
)

_NOT_HERE = {"XLA": "TPUs", "TPU": "TPUs", "MULTI_XPU": "Intel GPUs", "MULTI_NPU": "Ascend NPUs", "MULTI_MLU": "MLUs"}


def translate(found: Findings) -> None:
    """Fill ``found`` from the keys it holds. Raises ``ValueError`` in one line for a value that cannot be."""
    _move_flat_keys(found)
    on_cpu = _machine(found)
    _precision(found)
    kind = (found.text("distributed_type") or "NO").upper().removeprefix("DISTRIBUTEDTYPE.")
    sharding = _kind(found, kind)
    degrees = _degrees(found, sharding, 1 if kind == "NO" else None)
    _context(found)
    _rest(found)
    found.assumed("(the script's)", {"training": "default" if on_cpu else "gpu"}, "steps, sequences and optimizer")
    _batch(found, degrees)
    found.finish(REMARKS, "Accelerate")


def _move_flat_keys(found: Findings) -> None:
    """The launcher's own flags (``parallelism_config_tp_size``, ``fsdp_version``) may stand outside their section."""
    for section, prefix in (("parallelism_config", "parallelism_config_"), ("fsdp_config", "fsdp_")):
        for key in [key for key in found.values if key.startswith(prefix) and "." not in key and key != section]:
            found.rename(key, f"{section}.{key}")


def _machine(found: Findings) -> bool:
    on_cpu = bool(found.flag("use_cpu")) or found.text("distributed_type") == "MULTI_CPU"
    found.translated("use_cpu", {"hardware": "cpu"}) if on_cpu else found.understood("use_cpu", "hardware=auto")
    if on_cpu:
        found.overrides["hardware"] = "cpu"
    machines = found.whole("num_machines") or 1
    if machines == 1:
        found.understood("num_machines", "ndbench starts its ranks on one machine")
    else:
        found.lost(
            "num_machines",
            f"ndbench starts its ranks on one machine: this layout needs one with all devices, or launching "
            f"{machines} machines yourself with engine=command; ndbench show plans for it",
        )
    return on_cpu


def _precision(found: Findings) -> None:
    value = found.values.get("mixed_precision")
    text = "no" if value is False else (found.text("mixed_precision") or "no").lower()
    if text == "no":
        found.translated("mixed_precision", {"training.precision": "fp32"})
        found.overrides["training.precision"] = "fp32"
    elif text in PRECISIONS:
        found.translated("mixed_precision", {"training.precision": text}, "gradients are reduced in fp32 here")
    elif text in ("fp16", "fp8"):
        found.lost("mixed_precision", f"ndbench has no {text}; bf16 is the nearest", {"training.precision": "bf16"})
    else:
        raise ValueError(f"{found.path}: mixed_precision is {text}, expected no, fp16, bf16 or fp8")


def _kind(found: Findings, kind: str) -> Sharding:
    key = "distributed_type"
    if kind == "FSDP":
        found.translated(key, {}, "the degrees below")
        return read_fsdp(found)
    if kind == "DEEPSPEED":
        found.translated(key, {}, "as FSDP 2, which shards the same")
        return _deepspeed(found)
    if kind in ("MULTI_GPU", "MULTI_CPU", "NO", "TP", "MEGATRON_LM"):
        found.translated(
            key, {}, "a copy of the model on every data rank" if kind.startswith("MULTI") else "the degrees below"
        )
        _megatron(found)
        return Sharding(sharded=False)
    if kind in _NOT_HERE:
        found.lost(key, f"ndbench does not run on {_NOT_HERE[kind]}; laid out as for as many GPUs")
        return read_fsdp(found) if any(name.startswith("fsdp_config.") for name in found.values) else Sharding(False)
    raise ValueError(f"{found.path}: distributed_type is {kind}, which is not one of Accelerate's that are known here")


def _deepspeed(found: Findings) -> Sharding:
    stage = found.whole(f"{DEEPSPEED}zero_stage", least=0)
    sharding = Sharding(sharded=True) if stage is None else read_stage(found, f"{DEEPSPEED}zero_stage", stage)
    if stage is None:
        found.assumed("zero_stage", {"parallelism.reshard_after_forward": True}, "not in the file: stage 3 is taken")
    keys = [f"{DEEPSPEED}offload_{what}_device" for what in ("optimizer", "param")]
    devices = [(found.text(key) or "none").lower() for key in keys]
    for key, device in zip(keys, devices, strict=True):
        if device == "none":
            found.understood(key, "everything stays on the device")
        elif set(devices) == {"cpu"}:
            found.translated(key, {OFFLOAD: True})
        else:
            why = "ndbench offloads parameters, gradients and optimizer together, to host memory, or none"
            found.lost(key, why, {OFFLOAD: True})
    clip = found.values.get(f"{DEEPSPEED}gradient_clipping")
    if clip is not None and clip != "auto":
        limit = found.number(f"{DEEPSPEED}gradient_clipping")
        found.translated(f"{DEEPSPEED}gradient_clipping", {"training.max_grad_norm": limit or None})
    return sharding


def _megatron(found: Findings) -> None:
    if (pipeline := found.whole(f"{MEGATRON}pp_degree")) is not None:
        if pipeline == 1:
            found.understood(f"{MEGATRON}pp_degree", "no pipeline here either")
        else:
            found.lost(f"{MEGATRON}pp_degree", "ndbench has no pipeline parallelism; its ranks become replicas")
    if (sequence := found.flag(f"{MEGATRON}sequence_parallelism")) is not None:
        found.translated(f"{MEGATRON}sequence_parallelism", {"parallelism.sequence_parallel": sequence})
    if (recompute := found.flag(f"{MEGATRON}recompute_activations")) is not None:
        found.translated(f"{MEGATRON}recompute_activations", {CHECKPOINTING: "selective" if recompute else "none"})
    if (clip := found.number(f"{MEGATRON}gradient_clipping")) is not None:
        found.translated(f"{MEGATRON}gradient_clipping", {"training.max_grad_norm": clip or None})


def _degrees(found: Findings, sharding: Sharding, world: int | None) -> Degrees:
    asked: dict[str, int] = {}
    for axis in ("dp_replicate", "dp_shard", "cp", "tp", "sp"):
        if (size := found.whole(f"{MESH}{axis}_size")) is not None:
            asked[axis] = size
    if asked.get("sp", 1) > 1 and asked.get("cp", 1) > 1:
        raise ValueError(f"{found.path}: cp_size {asked['cp']} and sp_size {asked['sp']}: Accelerate takes one of them")
    for key in ("tp_config.tp_size", f"{MEGATRON}tp_degree"):
        if (size := found.whole(key)) is not None:
            asked.setdefault("tp", size)
            found.translated(key, {"parallelism.tp_size": size})
    machines = found.whole("num_machines") or 1
    named = any(size > 1 for axis, size in asked.items())
    count = found.values.get("num_processes")
    processes = None if count in (None, -1, "-1") else found.whole("num_processes")
    data = {axis: asked.get(axis) for axis in ("dp_replicate", "dp_shard")}
    if not named or (found.text("distributed_type") in ("TP", "MEGATRON_LM") and not any(data.values())):
        data = {"dp_replicate": None, "dp_shard": None}
    elif named:  # the sizes of the mesh stand, and what is not named is 1, as for Accelerate
        data = {axis: size or 1 for axis, size in data.items()}
    degrees = Degrees(**data, cp=max(asked.get("cp", 1), asked.get("sp", 1)), tp=asked.get("tp", 1))
    total = processes or world or (degrees.product if named else 8)
    if sharding.hybrid and not named:
        if total % machines:
            raise ValueError(f"{found.path}: {total} processes do not divide by {machines} machines")
        degrees.dp_replicate, degrees.dp_shard = machines, total // machines
    degrees = degrees.resolved(total, sharding.sharded, found.path)
    if processes is None:
        found.assumed("num_processes", {}, f"not in the file: {total} are taken")
        found.understood("num_processes", f"not fixed: {total} are taken")
    found.translated("num_processes", {"world_size": total})
    found.overrides |= degrees.overrides()
    for axis in ("dp_replicate", "dp_shard", "cp", "tp"):
        found.translated(f"{MESH}{axis}_size", {f"parallelism.{axis}_size": getattr(degrees, axis)})
    if degrees.tp != 1 and "parallelism.sequence_parallel" not in found.overrides:
        found.assumed("(transformers' plan)", {"parallelism.sequence_parallel": False}, WHOLE_ACTIVATIONS)
    return degrees


def _context(found: Findings) -> None:
    sequence = found.whole(f"{MESH}sp_size")
    if sequence is not None:
        method = {"parallelism.cp_size": sequence, "parallelism.cp_method": "ulysses"}
        found.translated(f"{MESH}sp_size", method if sequence > 1 else {}, "Ulysses: all-to-all over heads")
    if (length := found.whole(f"{MESH}sp_seq_length", least=2)) is not None:
        found.translated(f"{MESH}sp_seq_length", {"training.sequence_length": length})
    if f"{MESH}cp_comm_strategy" in found:
        method = {"parallelism.cp_method": "ring"}
        why = "ndbench passes keys and values round the ring, overlapped with the compute"
        found.translated(f"{MESH}cp_comm_strategy", method if found.overrides["parallelism.cp_size"] != 1 else {}, why)


def _rest(found: Findings) -> None:
    backend = found.text("dynamo_config.dynamo_backend") or found.text("dynamo_backend") or "NO"
    compiled: dict[str, Any] = {"training.compile": backend.upper() not in ("NO", "EAGER")}
    for key in ("dynamo_config.dynamo_backend", "dynamo_backend"):
        if backend.upper() in ("NO", "INDUCTOR"):
            found.translated(key, compiled, "block by block" if compiled["training.compile"] else "")
        else:
            found.lost(key, "ndbench compiles with inductor, or not at all", compiled)


def _batch(found: Findings, degrees: Degrees) -> None:
    key = f"{DEEPSPEED}gradient_accumulation_steps"
    count = None if found.values.get(key) == "auto" else found.whole(key)
    ranks = degrees.batch_ranks
    if count is not None and count > 1:
        micro = {"training.micro_batch_size": 1, "training.global_batch_size": count * ranks}
        found.translated(key, micro, "of one sequence each: the script's micro-batch is not in the file")
    elif count == 1:
        found.understood(key, "no accumulation here either")
    if 16 % ranks and "training.global_batch_size" not in found.overrides:
        found.assumed(
            "(the script's)", {"training.global_batch_size": ranks}, f"a sequence for each of {ranks} data ranks"
        )
