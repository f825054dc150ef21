"""Where a training run goes on from, and whether it can: asked before any process starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ndbench.config import Config
from ndbench.parallel.state_huggingface import hf_tensors
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
        found = whole_checkpoints(folder)
        if not found:
            return None
        path = found[-1][1]
    else:
        path = Path(config.resume).expanduser()
    progress = read_index(path).rest["progress"]
    model, mine = progress["config"]["model"], dataclasses.asdict(config.model)
    differing = [f"{key} {model[key]} there, {mine[key]} here" for key in SHAPE if model[key] != mine[key]]
    if differing:
        raise ValueError(f"{path} is a checkpoint of another model: {', '.join(differing)}")
    train, _ = build_split(config, prepared if prepared.is_dir() else None)
    if progress["data"] != train.identity:
        raise ValueError(
            f"{path} was trained on other data: data=, training.sequence_length or evaluation.fraction differ, so that "
            "its position in them means nothing here"
        )
    return path, int(progress["step"])
