"""Fill every null default of a cell's configuration, and say why it cannot run: its rules, its memory, its devices.

Pure but for a look at this machine's devices and a local ``config.json``; imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from ndbench.config import Cell, Config, ModelConfig
from ndbench.counted import counted
from ndbench.engines.protocol import Engine, UnknownOptionError, asking, load_engine
from ndbench.matrix.keys import all_keys, get_value, set_value, typed
from ndbench.matrix.ranges import OWNED
from ndbench.measure import fingerprint

CPU_RANKS = 8
"""Ranks on a CPU whose hardware file gives no count."""

ASSUMED_DEVICES = 8
"""Devices of a GPU machine that is not this one and whose file gives no count."""

_NOT_SHAPE = re.compile(
    r"^_|^(architectures|torch_dtype|dtype|transformers_version|use_cache|model_type|auto_map)$|_token_id$"
)


def check_ranges(config: Config) -> None:
    """Values that came from files have their types from Hydra; here their ranges. Raises ``ValueError``."""
    _check_finite(dataclasses.asdict(config), "")
    for key in all_keys():
        set_value(config, key, typed(key, get_value(config, key)))


def _check_finite(value: Any, where: str) -> None:
    """A NaN or infinity cannot stand in a record; text that reads like one (``nan``) must be quoted."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_finite(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, which is not a number; quote it if it is text: {where}=\"'{value}'\"")


def fill_model(model: ModelConfig, given: set[str]) -> None:
    """The shape from ``model.path``'s config.json (but for the fields in ``given``), and the derived widths.

    Raises ``ValueError`` for a folder that is none, or a custom model whose vocabulary is not known.
    """
    if model.path is not None:
        _read_folder(model, given)
    if model.target is not None and model.name == "custom":
        model.name = re.split(r"[.:]", model.target)[-1]
    if model.path is None and model.target is None and model.model_type is None:
        raise ValueError(f"model={model.name} needs model.path=FOLDER, model.target=package.module:callable or a shape")
    if model.target is not None and model.vocab_size is None:
        raise ValueError(f"model.target={model.target} needs model.vocab_size: the data draws its tokens from it")
    if model.target is None:
        missing = [
            name
            for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
            if getattr(model, name) is None
        ]
        if missing:
            raise ValueError(f"model={model.name} lacks {', '.join(f'model.{name}' for name in missing)}")
    if model.num_key_value_heads is None:
        model.num_key_value_heads = model.num_attention_heads
    if model.head_dim is None and model.hidden_size and model.num_attention_heads:
        model.head_dim, rest = divmod(model.hidden_size, model.num_attention_heads)
        if rest and model.target is None:
            raise ValueError(
                f"model.hidden_size {model.hidden_size} is not a multiple of the {model.num_attention_heads} heads; "
                "set model.head_dim"
            )


@cache
def _folder_config(path: str) -> dict[str, Any]:
    file = Path(path) / "config.json"
    if file.exists() and not file.is_file():
        raise ValueError(f"model.path: {file} is not a regular file")
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"model.path: {file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"model.path: {file} is not a mapping")
    nested = content.get("text_config")
    return nested if isinstance(nested, dict) and "hidden_size" not in content else content


def _read_folder(model: ModelConfig, given: set[str]) -> None:
    assert model.path is not None, "asked for"
    folder = Path(model.path).expanduser().resolve()
    content = _folder_config(str(folder))
    model.path = str(folder)
    if "name" not in given and model.name == "custom":
        model.name = folder.name
    for name in sorted(OWNED & set(content) - given):
        value = content[name]
        if name == "sliding_window" and content.get("use_sliding_window") is False:
            value = None
        if value is not None or getattr(model, name) is not None:
            setattr(model, name, typed(f"model.{name}", value))
    rest = {name: value for name, value in content.items() if name not in OWNED and not _NOT_SHAPE.search(name)}
    model.hf = {**rest, **model.hf}


@cache
def visible(match: str | None) -> int:
    """GPUs of this machine that a hardware file's ``match`` finds (all of them without one)."""
    from ndbench.measure.devices import visible_devices

    found = visible_devices()
    return sum(1 for device in found if match is None or re.search(match, str(device["name"]), re.IGNORECASE))


def fill_world(config: Config) -> int:
    """Fill the device count and the world size (the product of the degrees when all are given and the machine has as
    many devices, else all devices); returns the latter."""
    hardware = config.hardware
    if hardware.device_count is None:
        if hardware.device == "cpu":
            hardware.device_count = CPU_RANKS
        else:
            hardware.device_count = visible(hardware.match) or hardware.gpus_per_node or ASSUMED_DEVICES
    if config.world_size is None:
        degrees = config.parallelism
        fixed = min(degrees.sizes.values()) >= 1 and degrees.world_size <= hardware.device_count
        config.world_size = degrees.world_size if fixed else hardware.device_count
    return config.world_size


def fill(config: Config, given: set[str]) -> list[str]:
    """Fill the defaults of one cell in place; what is wrong with its degrees, empty when they stand for a layout."""
    fill_model(config.model, given)
    world_size = fill_world(config)
    gpu = config.hardware.device != "cpu"
    if config.engine.target is not None and config.engine.name == "ndbench":
        config.engine.name = re.split(r"[.:]", config.engine.target)[-1]
    steps, warmup = config.training.steps, config.measure.warmup
    if warmup is not None and warmup >= steps:
        raise ValueError(f"measure.warmup {warmup} leaves no timed step of training.steps {steps}")
    if config.measure.repeats is None:
        config.measure.repeats = 5 if gpu else 3
    if config.gate.min_effect is None:
        config.gate.min_effect = 0.01 if gpu else 0.05
    if config.launcher.omp_num_threads is None:
        config.launcher.omp_num_threads = max(1, fingerprint.usable_cpus() // world_size)
    try:
        config.parallelism = config.parallelism.resolved(world_size)
    except ValueError as error:
        return [str(error), *_refusals_without_world(config)]
    if config.training.micro_batch_size is None:
        config.training.micro_batch_size = max(1, config.training.global_batch_size // config.parallelism.batch_size)
    return []


def _refusals_without_world(config: Config) -> list[str]:
    layout = dataclasses.replace(config.parallelism)
    for axis, size in layout.sizes.items():
        setattr(layout, f"{axis}_size", 1 if size == -1 else size)
    if min(layout.sizes.values()) < 1 or config.engine.name != "ndbench":
        return []
    return layout.refuse(config.model, config.training)


@cache
def _engine(name: str, target: str | None, options: str) -> Engine:
    return load_engine(name, target, **json.loads(options))


def refusals(cell: Cell) -> list[str]:
    """Why the cell's engine cannot run it, whatever the machine."""
    training = cell.config.training
    if training.momentum and training.optimizer != "sgd" and cell.config.engine.command is None:
        return [f"training.momentum={training.momentum} is of no use to training.optimizer={training.optimizer}"]
    return _lines(cell, "refuse")


def plan_refusals(cell: Cell) -> list[str]:
    """What an engine can tell only when a run is about to start, for it loads the model's code."""
    return _lines(cell, "refuse_plan")


def _lines(cell: Cell, question: str) -> list[str]:
    named = cell.config.engine
    with asking(cell):
        try:
            engine = _engine(named.name, named.target, json.dumps(named.options, sort_keys=True))
        except UnknownOptionError as error:
            return [str(error)]
        # refuse_plan is optional
        reason = getattr(engine, question)(cell) if question == "refuse" or hasattr(engine, question) else None
        if reason is not None and not isinstance(reason, str):
            raise ValueError(
                f"engine {named.target or named.name}: {question}() returned {reason!r}, not a line or None"
            )
    return [] if reason is None else [reason]


def shortages(cell: Cell, here: bool) -> list[str]:
    """Why the machine cannot hold the cell. ``here``: this machine, not the one the hardware file describes."""
    from ndbench.measure.flops import memory_estimate

    hardware, world = cell.config.hardware, cell.world_size
    gpu = hardware.device != "cpu"
    assert hardware.device_count is not None, "filled"
    if gpu and here and visible(hardware.match) < min(world, hardware.device_count):
        return [f"needs {counted(world, f'{hardware.name} device')}, this machine shows {visible(hardware.match)}"]
    if gpu and world > hardware.device_count:  # ranks on a CPU are processes: there is no limit
        return [f"needs {counted(world, 'device')}, {hardware.name} has {hardware.device_count}"]
    needed = memory_estimate(cell)
    if needed is None:
        return []
    if hardware.memory_bytes is not None and needed > hardware.memory_bytes:
        # no room is kept free: an estimate above what would have run costs more than a launch out of memory
        return [f"needs about {_gib(needed)} a device, {hardware.name} has {_gib(hardware.memory_bytes)}"]
    # a CPU without a size can only be this one, whatever its name
    if not gpu and hardware.memory_bytes is None and needed * world > _physical_memory():
        return [
            f"needs about {_gib(needed * world)} for {counted(world, 'rank')}, "
            f"this machine has {_gib(_physical_memory())}"
        ]
    return []


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"


@cache
def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def crossing(cell: Cell) -> str | None:
    """A warning when a tp or cp group would span two nodes, whose link is far slower."""
    nodes, world = cell.config.hardware.gpus_per_node, cell.world_size
    if nodes is None or world <= nodes:
        return None
    tp, cp = cell.parallelism.tp_size, cell.parallelism.cp_size
    for axis, span in (("tp", tp), ("cp", tp * cp if cp > 1 else 1)):
        if nodes % span:
            return (
                f"{cell.name}: a {axis} group spans {span} ranks and crosses hardware.gpus_per_node {nodes}: "
                "its traffic leaves the node"
            )
    return None
