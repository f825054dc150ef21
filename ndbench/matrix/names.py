"""Readable, unique names of cells: the layout and what varies, fit for a file name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from ndbench.config import Config
from ndbench.parallel.config import ParallelismConfig

_SHORT = {
    "sequence_length": "seq",
    "global_batch_size": "batch",
    "micro_batch_size": "micro",
    "num_hidden_layers": "layers",
    "learning_rate": "lr",
    "activation_checkpointing": "ac",
}
_LONGEST = 100


def token(key: str, value: Any) -> str:
    """The part of a name that says ``key=value``: ``bf16``, ``seq4096``, ``compile``, ``no_compile``."""
    last = key.rpartition(".")[2]
    if isinstance(value, bool):
        return last if value else f"no_{last}"
    if value is None or isinstance(value, int | float):
        number = "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        return f"{_SHORT.get(last, last)}{number}"
    if isinstance(value, list | dict):
        return f"{last}_{hashlib.sha256(repr(value).encode()).hexdigest()[:6]}"
    return f"{_SHORT[last]}_{value}" if last in _SHORT else str(value)


def cell_name(layout: str, tokens: Sequence[str]) -> str:
    """``fsdp8``, ``hsdp2x4-bf16``: letters, digits, ``._-`` only and at most 100 characters."""
    parts = [layout, *(part for part in tokens if part and part != layout)]
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(parts)).strip("_.")
    if len(name) > _LONGEST:
        name = f"{name[: _LONGEST - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return name


def layout_name(parallelism: ParallelismConfig) -> str:
    """The layout, or the degrees as given when they have no product to stand for (``dp1x-1_cp1_tp3``)."""
    if min(parallelism.sizes.values()) >= 1:
        return parallelism.layout
    replicate, shard, cp, tp = parallelism.sizes.values()
    return f"dp{replicate}x{shard}_cp{cp}_tp{tp}"


def script_name(config: Config, named: bool) -> str:
    """``command_x2``, or ``command_ddp2`` where the user says (``named``) what layout the script has: it is not known
    otherwise, and the default of ``parallelism`` would be a false claim."""
    name = layout_name(config.parallelism) if named else f"x{config.world_size}"
    return f"{config.engine.name}_{name}"
