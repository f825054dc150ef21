"""What a key's value may be: the names it may have and the numbers between which it means something.

Plain tables over the schema's keys; ``keys`` turns them into refusals. Every numeric key stands here, so that a new
one is given a range when it is added.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from ndbench.config import ModelConfig
from ndbench.matrix.durations import seconds
from ndbench.matrix.sources import close_to
from ndbench.parallel.config import DATA_COLLECTIVES
from ndbench.parallel.styles import STYLES

VALUES: dict[str, tuple[str, ...]] = {
    "hardware.device": ("cpu", "cuda"),
    "training.precision": ("fp32", "bf16", "fp8"),
    "training.optimizer": ("adamw", "sgd"),
    "training.schedule": ("constant", "linear", "cosine", "wsd"),
    "training.activation_checkpointing": ("none", "full", "selective", "attention"),
    "data.name": ("markov", "source", "text", "dataset"),
    "data.documents": ("stream", "packed", "padded"),
    "checkpoint.mode": ("sharded", "async", "full", "hf"),
    "gate.mode": ("auto", "require", "off"),
    "gate.confirm": ("auto", "on", "off"),
    "parallelism.cp_method": ("ring", "ulysses"),
    "parallelism.data_collectives": DATA_COLLECTIVES,
    "launcher.name": ("local",),
    "launcher.start_method": ("forkserver", "spawn"),
    "tracker.name": ("none", "wandb"),
    "tracker.mode": ("auto", "online", "offline"),
}
"""Keys with a fixed set of values."""

OR_DOTTED = ("training.optimizer",)
"""Of these, keys that may also be the dotted path of a class."""

MOST_WHOLE = 2**31 - 1
"""Of most whole numbers: a size or a count beyond it is a slip, and would only fail later."""

MOST_BYTES = 2**63 - 1
MOST_RATE = 1e18
"""FLOP/s or bytes/s of one device: a thousand times what any has."""
MOST_SECONDS = 10_000_000
POSITIVE = math.ulp(0.0)
"""As a least value: anything above 0."""
BELOW_1 = math.nextafter(1.0, 0.0)

RANGES: dict[str, tuple[float, float]] = {
    "world_size": (1, 100_000),
    "model.vocab_size": (2, MOST_WHOLE),
    "model.hidden_size": (1, MOST_WHOLE),
    "model.intermediate_size": (1, MOST_WHOLE),
    "model.num_hidden_layers": (1, MOST_WHOLE),
    "model.num_attention_heads": (1, MOST_WHOLE),
    "model.num_key_value_heads": (1, MOST_WHOLE),
    "model.head_dim": (1, MOST_WHOLE),
    "model.sliding_window": (1, MOST_WHOLE),
    "model.max_position_embeddings": (1, MOST_WHOLE),
    "model.initializer_range": (POSITIVE, 1000),
    "hardware.device_count": (1, 100_000),
    "hardware.gpus_per_node": (1, 100_000),
    "hardware.memory_bytes": (1, MOST_BYTES),
    "hardware.peak_flops": (POSITIVE, MOST_RATE),
    "hardware.memory_bandwidth": (POSITIVE, MOST_RATE),
    "hardware.link_bandwidth": (POSITIVE, MOST_RATE),
    "parallelism.dp_replicate_size": (-1, MOST_WHOLE),
    "parallelism.dp_shard_size": (-1, MOST_WHOLE),
    "parallelism.cp_size": (-1, MOST_WHOLE),
    "parallelism.tp_size": (-1, MOST_WHOLE),
    "parallelism.kept_blocks": (0, 100_000),
    "training.steps": (1, 10_000_000),
    "training.global_batch_size": (1, MOST_WHOLE),
    "training.micro_batch_size": (1, MOST_WHOLE),
    "training.sequence_length": (2, MOST_WHOLE),
    "training.learning_rate": (0, 1e6),
    "training.weight_decay": (0, 1e6),
    "training.betas": (0, BELOW_1),
    "training.momentum": (0, 1),
    "training.warmup_steps": (0, MOST_WHOLE),
    "training.decay_steps": (0, MOST_WHOLE),
    "training.min_learning_rate_ratio": (0, 1),
    "training.max_grad_norm": (POSITIVE, 1e30),
    "training.max_grad_value": (POSITIVE, 1e30),
    "training.loss_chunk_size": (1, MOST_WHOLE),
    "training.seed": (0, MOST_BYTES),
    "data.max_bytes": (1, MOST_BYTES),
    "data.valid_fraction": (1e-6, 1),
    "data.seed": (0, MOST_BYTES),
    "measure.repeats": (1, 10_000),
    "measure.warmup": (0, MOST_WHOLE),
    "measure.timeout": (1, MOST_SECONDS),
    "measure.handicap": (0, 1000),
    "measure.shuffle_seed": (0, MOST_BYTES),
    "gate.min_effect": (0, 10),
    "gate.alpha": (1e-6, 0.5),
    "gate.resolve": (0, 10),
    "gate.residency": (1, 100_000),
    "launcher.omp_num_threads": (1, 1024),
    "launcher.stall_timeout": (1, MOST_SECONDS),
    "tracker.timeout": (1, MOST_SECONDS),
    "checkpoint.every": (1, MOST_WHOLE),
    "checkpoint.keep": (1, MOST_WHOLE),
    "evaluation.every": (1, MOST_WHOLE),
    "evaluation.batches": (1, MOST_WHOLE),
    "evaluation.fraction": (0, 0.5),
}
"""Numeric key -> the least and the greatest value; of a list or mapping, those of each item."""

DEGREES = tuple(key for key, (least, _) in RANGES.items() if least == -1)
"""Degrees of parallelism, where -1 is the rest of the world."""

DURATIONS = ("measure.budget",)
"""Keys whose text is a length of time."""

OWNED = {field.name for field in dataclasses.fields(ModelConfig)} - {
    "name",
    "hf",
    "path",
    "target",
    "kwargs",
    "tp_plan",
    "blocks",
}
"""Fields of a model that carry transformers' names: in ``model.hf`` they would win over what the record tells."""

BASES = ("git", "python", "set")
"""What a ``gate.base`` may begin with."""


def check_range(key: str, value: Any) -> None:
    """Raises ``ValueError`` naming key, value and what is expected where a typed ``value`` means nothing."""
    if value is None:
        return
    if key in VALUES and value not in VALUES[key] and not (key in OR_DOTTED and "." in str(value)):
        near = close_to(str(value), VALUES[key])
        raise ValueError(f"{key}={value} is not one of {', '.join(VALUES[key])}{near}")
    if key in RANGES:
        items = value.items() if isinstance(value, dict) else [("", value)]
        for name, item in items:
            for number in item if isinstance(item, list) else [item]:
                _check_number(f"{key}.{name}" if name else key, number, *RANGES[key])
    elif key.startswith("hardware.peak_flops."):
        _check_number(key, value, *RANGES["hardware.peak_flops"])
    if key in DURATIONS:
        seconds(key, value)
    _check_text(key, value)


def _check_number(key: str, value: float, least: float, most: float) -> None:
    if key in DEGREES and value < 1 and value != -1:
        raise ValueError(f"{key} is {shown_number(value)}, it must be at least 1, or -1 for the rest")
    if value < least:
        wanted = "above 0" if least == POSITIVE else f"at least {least}"
        raise ValueError(f"{key}={shown_number(value)} must be {wanted}")
    if value > most:
        raise ValueError(f"{key}={shown_number(value)} must be {'below 1' if most == BELOW_1 else f'at most {most}'}")


def _check_text(key: str, value: Any) -> None:
    if key == "training.betas" and len(value) != 2:
        raise ValueError(f"{key}={value}: two numbers from 0 to below 1 are needed")
    if key == "gate.base" and value != "here" and not (value.partition(":")[0] in BASES and value.partition(":")[2]):
        raise ValueError(f"{key}={value} is not git:REV, python:PATH, set:'KEY=VALUE …' or here")
    if key == "hardware.match":
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{key}={value} is not a regular expression: {error}") from error
    given = value if key == "model.hf" else (key.removeprefix("model.hf."),) if key.startswith("model.hf.") else ()
    if owned := sorted(OWNED.intersection(given)):
        raise ValueError(f"model.hf.{owned[0]}: use model.{owned[0]}")
    styles = value if key == "model.tp_plan" else {key: value} if key.startswith("model.tp_plan.") else {}
    for pattern, style in styles.items():
        if style not in STYLES:
            raise ValueError(
                f"{key}: '{style}' of '{pattern}' is not one of {', '.join(STYLES)}{close_to(str(style), STYLES)}"
            )


def shown_number(value: float) -> str:
    """As it can be read: a number of a hundred digits by its size."""
    if not abs(value) < 10**300:  # a NaN too
        return str(value) if isinstance(value, float) else "a number beyond 1e300"
    return str(value) if abs(value) < 10**18 else f"{value:.3g}"
