"""Where a training run goes on from, and whether it can: asked before any process starts."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from ndbench.config import Config
from ndbench.parallel.state_files import CheckpointError, blocks, check_block
from ndbench.parallel.state_huggingface import WEIGHTS, WEIGHTS_INDEX, hf_tensors
from ndbench.parallel.state_index import read_index, whole_checkpoints
from ndbench.training.data import build_split

SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "target",
)
"""Fields of a model that its checkpoints depend on."""

SAME_LEARNING = (
    *("micro_batch_size", "loss_chunk_size", "activation_checkpointing", "activation_offload"),
    *("compile", "cuda_graphs", "deterministic", "name", "path", "tp_plan", "blocks", "files", "dataset"),
)
"""Settings of a model, its training or its data that change how a step is computed, not what it computes."""

VERIFY_SECONDS = 60.0
"""Of looking for a whole checkpoint where another is damaged."""


def start_of(config: Config, folder: Path, prepared: Path) -> tuple[Path, int] | None:
    """(checkpoint, its step) that ``resume`` means; None for a fresh start.

    Raises ``ValueError`` for one that is not whole, of another model, or of other data, and for ``checkpoint.weights``
    that are none.
    """
    if config.checkpoint.weights is not None:
        hf_tensors(Path(config.checkpoint.weights).expanduser())
    if config.resume is None:
        return None
    if config.resume == "auto":
        try:
            found = whole_checkpoints(folder)
        except CheckpointError as error:  # which one is the newest is not known
            raise _with_another(error, newest_whole(folder)) from error
        if not found:
            return None
        path = found[-1][1]
    else:
        path = Path(config.resume).expanduser()
    try:
        progress = read_index(path).rest["progress"]
    except CheckpointError as error:
        raise _with_another(error, newest_whole(folder, path)) from error
    model, mine = progress["config"]["model"], dataclasses.asdict(config.model)
    differing = [f"{key} {model[key]} there, {mine[key]} here" for key in SHAPE if model[key] != mine[key]]
    if differing:
        raise ValueError(f"{path} is a checkpoint of another model: {', '.join(differing)}")
    if (trained := progress["config"]["training"]["optimizer"]) != config.training.optimizer:
        raise ValueError(
            f"{path} has the state of training.optimizer={trained}, this run's is {config.training.optimizer}; "
            f"{_weights_alone(path)}"
        )
    train, _ = build_split(config, prepared if prepared.is_dir() else None)
    if progress["data"] != train.identity:
        raise ValueError(
            f"{path} was trained on other data: data=, training.sequence_length or evaluation.fraction differ, so that "
            f"its position in them means nothing here; {_weights_alone(path)}"
        )
    return path, int(progress["step"])


def changes_since(config: Config, checkpoint: Path) -> list[str]:
    """``training.global_batch_size 16 -> 8`` for every setting that a run goes on with other than it was left with.

    Only what changes what is learned: a layout, a kernel or a way to save memory may be another each time.
    """
    then = read_index(checkpoint).rest["progress"]["config"]
    now = dataclasses.asdict(config)
    return [
        f"{group}.{key} {_said(then[group][key])} -> {_said(value)}"
        for group in ("model", "training", "data")
        for key, value in now[group].items()
        if key in then.get(group, {}) and key not in SAME_LEARNING and then[group][key] != value
    ]


def _said(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)[:60]


def newest_whole(folder: Path, damaged: Path | None = None) -> Path | None:
    """The newest checkpoint in ``folder`` but ``damaged`` whose every byte is as it was written; None without one.

    Gives up on reading after ``VERIFY_SECONDS``: one that is right so far is taken then.
    """
    until = time.monotonic() + VERIFY_SECONDS
    for _, path in reversed(whole_checkpoints(folder, damaged=lambda _: None)):
        if (damaged is None or path.resolve() != damaged.resolve()) and _is_whole(path, until):
            return path
    return None


def _with_another(error: CheckpointError, other: Path | None) -> CheckpointError:
    return error if other is None else CheckpointError(f"{error}; {instead(other)}")


def instead(whole: Path) -> str:
    return f"the newest whole one is {whole}: go on from it with resume={whole}"


def _is_whole(path: Path, until: float) -> bool:
    try:
        for name, record in read_index(path).files.items():
            for block in blocks(record):
                if time.monotonic() > until:
                    return True
                check_block(path / name, record, block)
    except CheckpointError:
        return False
    return True


def _weights_alone(path: Path) -> str:
    if (path / WEIGHTS).is_file() or (path / WEIGHTS_INDEX).is_file():
        return f"checkpoint.weights={path} in place of resume= begins a new run with its weights"
    return "checkpoint.weights=FOLDER begins a new run with weights that checkpoint.mode=hf has written"
