"""Why the bundled engine cannot run a cell: what the configuration says, and what only the model itself can tell.

One line a reason, with the numbers. It needs neither torch nor transformers, but for :func:`plan_refusals`.
"""

from __future__ import annotations

import importlib.util
import json
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ndbench.config import ModelConfig, TrainingConfig
from ndbench.parallel.config import (
    ATTENTION_KERNELS,
    CHECKPOINTING_MODES,
    FLASH4_PACKAGE,
    FLOAT8_MISSING,
    FLOAT8_MULTIPLE,
    FLOAT8_RECIPES,
    OFFLOADED_MODES,
    ParallelismConfig,
)
from ndbench.parallel.context import refuse_attention
from ndbench.training.graph_rules import graph_refusals
from ndbench.training.schedule import refuse_schedule

if TYPE_CHECKING:
    from ndbench.config import Cell

PRECISIONS = ("fp32", "bf16", "fp8")


def configuration_refusals(cell: Cell, attention: str | None, fp8: str) -> list[str]:
    """What the configuration of ``cell`` and the engine's options do not allow."""
    config = cell.config
    graphs = config.training.cuda_graphs
    return [
        *config.parallelism.refuse(config.model, config.training),
        *refuse_training(config.training, config.model),
        *_refuse_chunks(config.training, config.parallelism),
        *_refuse_kernel(attention),
        *_refuse_copy_engine(config.parallelism, config.hardware.device),
        *_refuse_float8(cell, fp8),
        *(graph_refusals(config.training, config.parallelism, config.hardware.device) if graphs else []),
        *_refuse_written_attention(config.model, config.parallelism),
    ]


def refuse_training(training: TrainingConfig, model: ModelConfig) -> list[str]:
    reasons = []
    if training.precision not in PRECISIONS:
        reasons.append(f"precision '{training.precision}' is not implemented; implemented: {', '.join(PRECISIONS)}")
    if training.activation_checkpointing not in CHECKPOINTING_MODES:
        known = ", ".join(CHECKPOINTING_MODES)
        reasons.append(f"activation_checkpointing '{training.activation_checkpointing}' is not known; known: {known}")
    elif training.activation_offload and training.activation_checkpointing not in OFFLOADED_MODES:
        reasons.append(
            f"activation_offload needs activation_checkpointing {' or '.join(OFFLOADED_MODES)}, here it is"
            f" '{training.activation_checkpointing}'"
        )
    if training.optimizer not in ("adamw", "sgd") and "." not in training.optimizer:
        reasons.append(f"optimizer '{training.optimizer}' is not known: adamw, sgd, or a dotted path")
    if len(training.betas) != 2 or not all(0 <= beta < 1 for beta in training.betas):
        reasons.append(f"betas {training.betas}: two numbers from 0 to below 1 are needed")
    chunk = training.loss_chunk_size
    if chunk is not None and chunk < 1:
        reasons.append(f"loss_chunk_size is {chunk}, it must be at least 1")
    if chunk is not None and model.target is not None:
        reasons.append("loss_chunk_size needs a transformers model; model.target has its own output head")
    for name, limit in (("max_grad_norm", training.max_grad_norm), ("max_grad_value", training.max_grad_value)):
        if limit is not None and limit <= 0:
            reasons.append(f"{name} is {limit}, it must be above 0, or null")
    return reasons + refuse_schedule(training)


def _refuse_kernel(name: str | None) -> list[str]:
    if name == "flash4" and next(iter(distributions(name=FLASH4_PACKAGE)), None) is None:
        return [f"engine.options.attention 'flash4' needs the package {FLASH4_PACKAGE}: pip install 'ndbench[flash4]'"]
    if name in (None, *ATTENTION_KERNELS):
        return []
    return [f"engine.options.attention '{name}' is not known; known: {', '.join(ATTENTION_KERNELS)}"]


def _refuse_float8(cell: Cell, recipe: str) -> list[str]:
    config, layout = cell.config, cell.parallelism
    if config.training.precision != "fp8":
        return []
    if importlib.util.find_spec("torchao") is None:
        return [FLOAT8_MISSING]
    reasons = []
    if recipe not in FLOAT8_RECIPES:
        reasons.append(f"engine.options.fp8 '{recipe}' is not known; known: {', '.join(FLOAT8_RECIPES)}")
    peaks = config.hardware.peak_flops
    if config.hardware.device != "cpu" and peaks and "fp8" not in peaks:
        reasons.append(
            f"precision 'fp8': hardware '{config.hardware.name}' has no FP8, its peaks are {', '.join(peaks)}"
        )
    if min(layout.sizes.values()) < 1:
        return reasons  # a refusal of its own
    sequences = config.training.micro_batch_size or config.training.global_batch_size // layout.batch_size
    tokens = sequences * config.training.sequence_length // layout.cp_size
    if tokens % FLOAT8_MULTIPLE:
        reasons.append(
            f"precision 'fp8' needs a multiple of {FLOAT8_MULTIPLE} tokens a forward, here {sequences} sequences of "
            f"{config.training.sequence_length} over cp {layout.cp_size} are {tokens}"
        )
    return reasons


def _refuse_copy_engine(parallelism: ParallelismConfig, device: str) -> list[str]:
    if parallelism.data_collectives == "copy_engine" and device == "cpu":
        return ["parallelism.data_collectives=copy_engine needs GPUs; hardware.device is cpu"]
    return []


def _refuse_chunks(training: TrainingConfig, parallelism: ParallelismConfig) -> list[str]:
    if training.loss_chunk_size is None or parallelism.tp_size == 1 or parallelism.loss_parallel:
        return []
    return [
        f"loss_chunk_size {training.loss_chunk_size} under tp {parallelism.tp_size} needs parallelism.loss_parallel: "
        "a chunk's logits are never gathered"
    ]


def _refuse_written_attention(model: ModelConfig, parallelism: ParallelismConfig) -> list[str]:
    """What the configuration says in so many words; a class's own defaults are known to :func:`plan_refusals`."""
    if model.target is not None:
        return []
    written: dict[str, Any] = {}
    if model.path is not None:
        file = Path(model.path) / "config.json"
        if not file.is_file():
            return [f"model.path {model.path} has no config.json"]
        written = json.loads(file.read_text())
    asked = SimpleNamespace(**{**written, **model.hf})
    return refuse_attention(asked, parallelism.cp_size, parallelism.cp_method)


def plan_refusals(model: ModelConfig, parallelism: ParallelismConfig, float8: bool = False) -> list[str]:
    """What the model's configuration class, its own tensor-parallel plan and its FP8 layers do not allow, by name.

    For the parent process before ranks start: imports torch and transformers, allocates nothing. With tp or FP8 it
    builds the model on meta.
    """
    from ndbench.parallel.float8 import float8_refusals
    from ndbench.training.models import build_model, transformers_config

    try:
        if model.target is None:
            config = transformers_config(model)
            if reasons := refuse_attention(config, parallelism.cp_size, parallelism.cp_method):
                return reasons
        if parallelism.tp_size == 1 and not float8:
            return []
        built = build_model(model)
    except ValueError as error:
        return [str(error)]
    plan = tensor_plan_of(built, model, parallelism) if parallelism.tp_size > 1 else None
    reasons = [] if plan is None else list(plan.refusals)
    return reasons + (float8_refusals(built.model, built.blocks, parallelism, plan) if float8 else [])


def tensor_plan_of(built: Any, model: ModelConfig, parallelism: ParallelismConfig) -> Any:
    """How tp shards ``built``, by its own plan or the user's."""
    from ndbench.parallel.plan import tensor_plan

    return tensor_plan(
        built.model,
        built.blocks,
        tp_size=parallelism.tp_size,
        sequence_parallel=parallelism.sequence_parallel,
        loss_parallel=parallelism.loss_parallel,
        user_plan=model.tp_plan,
    )
