"""An Axolotl configuration as overrides: model, layout, precision and memory. ``axolotl_training`` has the step.

What such a file leaves out is Axolotl's default, which is not ndbench's: it is written down too.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ndbench.engines.bundled_refusals import PRECISIONS
from ndbench.importing.axolotl_keys import REMARKS
from ndbench.importing.axolotl_training import translate_batch, translate_optimizer, translate_schedule, translate_train
from ndbench.importing.findings import Findings, shown
from ndbench.importing.fsdp import (
    ACTIVATION_OFFLOAD,
    CHECKPOINTING,
    OFFLOAD,
    RESHARD,
    WHOLE_ACTIVATIONS,
    Degrees,
    Sharding,
    read_fsdp,
    read_stage,
    read_strategy,
)
from ndbench.importing.models import find_model, how_to_name
from ndbench.measure.devices import visible_devices

SIZES = {
    "dp_replicate": ("dp_replicate_size",),
    "dp_shard": ("dp_shard_size",),
    "cp": ("context_parallel_size", "sequence_parallel_degree"),
    "tp": ("tensor_parallel_size",),
}
"""Axis -> keys that give its degree, the current name first."""

ASSUMED_WORLD = 8
"""Processes where neither the file nor this machine's GPUs say how many."""


def translate(found: Findings, world: int | None) -> None:
    """Fill ``found`` from the keys it holds; ``world``: how many processes it is launched with, where that is known.

    Raises ``ValueError`` in one line for a value that cannot be.
    """
    _model(found)
    found.assumed("(a GPU run)", {"training": "gpu"}, "30 steps; what follows replaces the rest")
    degrees = _layout(found, world)
    _precision(found)
    _recomputation(found)
    _loss(found, degrees)
    translate_batch(found, degrees.batch_ranks)
    translate_optimizer(found)
    translate_schedule(found)
    translate_train(found)
    found.finish(REMARKS, "Axolotl")
    for key in ("adapter", "load_in_4bit", "load_in_8bit"):
        if found.values.get(key):
            found.notes.append(f"{key}: this run trains all parameters in full, the original does not")
            break


def _model(found: Findings) -> None:
    name = found.text("base_model")
    if name is None:
        found.missing_model = "base_model is not in the file: add model=NAME or model=FOLDER"
        return
    known = find_model(name, Path(found.path).parent)
    if known is None:
        found.missing_model = how_to_name(name)
        found.lost("base_model", "no model of this name is known here: add model=FOLDER")
    else:
        found.translated("base_model", *known)
    if f"{name}" == found.text("base_model_config"):
        found.understood("base_model_config", "the same as base_model")


def _layout(found: Findings, world: int | None) -> Degrees:
    sharding = _sharding(found)
    sizes: dict[str, int | None] = {}
    for axis, keys in SIZES.items():
        given = [size for key in keys if (size := found.whole(key)) is not None]
        sizes[axis] = max(given) if given else None
    asked = Degrees(**sizes)
    if asked.dp_shard == 1 and asked.dp_replicate is None and not sharding.sharded:
        asked.dp_shard = None
    known = asked.dp_shard is not None or (asked.dp_replicate is not None and not sharding.sharded)
    total = world or (asked.product if known else _assumed_world(asked.product))
    if not world:
        why = f"the file does not say how many: {'the sizes make' if known else 'taken are'} {total} (--world-size N)"
        found.assumed("(processes)", {"world_size": total}, why)
    degrees = asked.resolved(total, sharding.sharded, found.path)
    found.overrides |= degrees.overrides()
    for axis, keys in SIZES.items():
        for key in keys:
            found.translated(key, {f"parallelism.{axis}_size": getattr(degrees, axis)})
    if degrees.cp is not None and degrees.cp > 1:
        method = {"parallelism.cp_method": "ring"}
        found.translated("ring_attn_func", method, "ndbench's ring is balanced for causal masks (zigzag)")
        if "parallelism.cp_method" not in found.overrides:
            found.assumed("(ring-flash-attn)", method, "Axolotl's context parallelism is a ring")
    else:
        found.understood("ring_attn_func", "no context parallelism")
    if degrees.tp != 1:
        found.assumed("(transformers' plan)", {"parallelism.sequence_parallel": False}, WHOLE_ACTIVATIONS)
    return degrees


def _assumed_world(product: int) -> int:
    """As many as there are GPUs here, or 8, but a multiple of the degrees that the file has."""
    devices = len(visible_devices()) or ASSUMED_WORLD
    return max(devices // product, 1) * product


def _sharding(found: Findings) -> Sharding:
    """Which of FSDP 2, FSDP 1, DeepSpeed or DDP it is."""
    deepspeed = found.values.get("deepspeed")
    if deepspeed is not None or any(key.startswith("deepspeed.") for key in found.values):
        for key in found.values:
            if (key == "fsdp" and found.values[key]) or key.startswith("fsdp_config."):
                found.lost(key, "deepspeed is given too, and wins: nothing of fsdp is set")
        return _deepspeed(found, deepspeed)
    options = found.values.get("fsdp")
    words = [str(word) for word in options] if isinstance(options, list) else str(options or "").split()
    section = any(key.startswith("fsdp_config.") for key in found.values)
    if not words and not section:
        sized = any(found.values.get(key) is not None for axis in ("dp_shard", "cp") for key in SIZES[axis])
        what = "FSDP over the ranks of the sizes given" if sized else "a copy of the model on every data rank (DDP)"
        found.assumed("(no fsdp_config)", {}, what)
        return Sharding(sharded=False)
    sharding = read_fsdp(found)
    for word in words:
        if word.lower() in ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"):
            sharding = read_strategy(found, "fsdp", word)
            if sharding.hybrid:
                found.notes.append(
                    "fsdp hybrid_shard: add dp_replicate_size, or parallelism.dp_replicate_size=MACHINES"
                )
        elif word.lower() == "offload":
            found.overrides[OFFLOAD] = True
        elif word.lower() != "auto_wrap":
            raise ValueError(f"{found.path}: fsdp names {shown(word)}, which is no option of FSDP that is known here")
    found.translated("fsdp", {key: found.overrides[key] for key in (RESHARD, OFFLOAD) if key in found.overrides})
    return sharding


def _deepspeed(found: Findings, value: Any) -> Sharding:
    if not isinstance(value, str):
        found.assumed("(deepspeed)", {RESHARD: True}, "an inline section is not read: ZeRO stage 3 is taken")
        return Sharding(sharded=True)
    stage = re.search(r"zero([0-3])", Path(value).name)
    if stage is None:
        found.lost(
            "deepspeed", "another file, which is not read, of no known name: ZeRO stage 3 is taken", {RESHARD: True}
        )
        return Sharding(sharded=True)
    if "cpuoffload" in Path(value).name:
        found.overrides[OFFLOAD] = True
    return read_stage(found, "deepspeed", int(stage[1]), "by its name, the file is not read")


def _precision(found: Findings) -> None:
    def on(key: str) -> bool:
        value = found.values.get(key)
        return value in ("auto", "full") or bool(found.flag(key))

    precision = {"training.precision": "bf16"}
    if on("fp8"):
        if "fp8" in PRECISIONS:
            found.translated("fp8", {"training.precision": "fp8"})
        else:
            found.lost("fp8", "ndbench has no fp8; bf16 is the nearest", precision)
    else:
        found.understood("fp8", "not used")
    for key in ("fp16", "float16"):
        if on(key):
            found.lost(key, "ndbench has no fp16; bf16 is the nearest", precision)
        else:
            found.understood(key, "not used")
    if on("bfloat16") or found.values.get("bf16") == "full":
        why = "parameters stay in fp32 and are computed with in bf16: more memory than pure bf16"
        for key in ("bfloat16", "bf16"):
            if key in found:
                found.lost(key, why, precision)
    elif on("bf16"):
        why = "computed in bf16, fp32 parameters, gradients reduced in fp32"
        found.translated("bf16", {"training.precision": found.overrides.get("training.precision", "bf16")}, why)
    if "training.precision" not in found.overrides:
        if "bf16" not in found and not on("float32"):
            found.assumed("bf16", precision, "Axolotl's default is auto: bf16 where the GPU has it")
        else:
            found.overrides["training.precision"] = "fp32"
    for key in ("bf16", "float32", "bfloat16"):
        found.translated(key, {"training.precision": found.overrides["training.precision"]})
    if found.flag("tf32"):
        fp32 = found.overrides["training.precision"] == "fp32"
        found.lost("tf32", "ndbench computes fp32 in full") if fp32 else found.understood("tf32", "matmuls are in bf16")
    else:
        found.understood("tf32", "not used here either")


def _recomputation(found: Findings) -> None:
    key = "gradient_checkpointing"
    if found.values.get(key) == "offload":
        found.translated(key, {CHECKPOINTING: "full", ACTIVATION_OFFLOAD: True})
    elif found.values.get(key) in ("offload_disk", "unsloth"):
        why = "recomputed in full, what is kept waits in host memory"
        found.lost(key, why, {CHECKPOINTING: "full", ACTIVATION_OFFLOAD: True})
    elif (recompute := found.flag(key)) is not None:
        already = found.overrides.get(CHECKPOINTING) == "full"
        found.translated(key, {CHECKPOINTING: "full" if recompute or already else "none"})
    _offloading(found)
    if "torch_compile" in found:
        compiled = found.values["torch_compile"] == "auto" or bool(found.flag("torch_compile"))
        found.translated("torch_compile", {"training.compile": compiled}, "block by block" if compiled else "")


def _offloading(found: Findings) -> None:
    key = "activation_offloading"
    elsewhere = found.values.get(key) in ("legacy", "disk")
    if not elsewhere and not found.flag(key):
        return
    if found.overrides.get(CHECKPOINTING, "none") == "none":
        found.lost(key, "ndbench offloads what recomputed blocks keep, and these are not recomputed")
    elif found.values[key] == "disk":
        found.lost(key, "to host memory, not to a disk", {ACTIVATION_OFFLOAD: True})
    else:
        found.translated(key, {ACTIVATION_OFFLOAD: True}, "the inputs of all blocks")


def _loss(found: Findings, degrees: Degrees) -> None:
    """Whether all logits are held at once."""
    plugins = found.values.get("plugins")
    names = [str(name) for name in plugins] if isinstance(plugins, list) else []
    cutting = any("CutCrossEntropy" in name for name in names) and found.values.get("cut_cross_entropy") is not False
    keys = [key for key in ("chunked_cross_entropy", "liger_fused_linear_cross_entropy") if found.flag(key)]
    chunks = {"training.loss_chunk_size": 2048}
    why = "the loss in chunks of tokens, so that the logits are never whole"
    for key in keys:
        found.translated(key, chunks, why)
    others = [name.rpartition(".")[2] for name in names if "CutCrossEntropy" not in name]
    if cutting:
        found.translated("cut_cross_entropy", chunks, why)
        left = f"; left out: {', '.join(others)}" if others else ""
        found.lost("plugins", why + left, chunks) if others else found.translated("plugins", chunks, why)
    elif names:
        found.lost("plugins", "code of Axolotl's own, which ndbench does not run")
    if not cutting and not keys:
        found.assumed("(loss)", {"training.loss_chunk_size": None}, "all logits at once, as transformers does")
        if degrees.tp != 1:
            found.assumed("(loss)", {"parallelism.loss_parallel": False}, "transformers gathers the logits over tp")
