"""The keys that an override may name, from the dataclasses of the schema, and the typed setting of one.

Knows the schema only: no files, no Hydra.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any, Union

from ndbench.config import Config
from ndbench.matrix.durations import seconds
from ndbench.matrix.sources import GROUPS, close_to

VALUES: dict[str, tuple[str, ...]] = {
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
    "launcher.start_method": ("forkserver", "spawn"),
}
"""Keys with a fixed set of values."""

LEAST: dict[str, float] = {
    "world_size": 1,
    "training.steps": 1,
    "training.global_batch_size": 1,
    "training.micro_batch_size": 1,
    "training.sequence_length": 2,
    "training.loss_chunk_size": 1,
    "training.learning_rate": 0,
    "training.warmup_steps": 0,
    "training.decay_steps": 0,
    "training.min_learning_rate_ratio": 0,
    "measure.repeats": 1,
    "measure.warmup": 0,
    "measure.handicap": 0,
    "measure.timeout": 1,
    "hardware.device_count": 1,
    "hardware.gpus_per_node": 1,
    "model.vocab_size": 2,
    "model.hidden_size": 1,
    "model.num_hidden_layers": 1,
    "model.num_attention_heads": 1,
    "model.num_key_value_heads": 1,
    "data.valid_fraction": 1e-6,
    "data.max_bytes": 1,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
    "evaluation.every": 1,
    "evaluation.batches": 1,
    "evaluation.fraction": 0,
    "launcher.stall_timeout": 1,
    "gate.alpha": 1e-6,
    "gate.min_effect": 0,
    "gate.resolve": 0,
    "gate.residency": 1,
}
"""Keys whose numbers have a least value."""

MOST: dict[str, float] = {
    "data.valid_fraction": 1,
    "training.min_learning_rate_ratio": 1,
    "gate.alpha": 0.5,
    "gate.min_effect": 10,
    "gate.resolve": 10,
    "evaluation.fraction": 0.5,
    "world_size": 100_000,
    "hardware.device_count": 100_000,
    "hardware.gpus_per_node": 100_000,
    "training.steps": 10_000_000,
    "measure.repeats": 10_000,
    "measure.timeout": 10_000_000,
    "launcher.stall_timeout": 10_000_000,
    "tracker.timeout": 10_000_000,
    "gate.residency": 100_000,
    "hardware.memory_bytes": 2**63 - 1,
    "data.max_bytes": 2**63 - 1,
    "training.seed": 2**63 - 1,
    "data.seed": 2**63 - 1,
    "measure.shuffle_seed": 2**63 - 1,
}
"""Keys whose numbers have a greatest value."""

MOST_WHOLE = 2**31 - 1
"""Of every other whole number: a size or a count beyond it is a slip, and would only fail later."""

LISTS = ("data.files",)
"""Keys of a list that one text alone is a value of, too."""

DURATIONS = ("measure.budget",)
"""Keys whose text is a length of time."""


@cache
def _fields(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def all_keys(cls: type = Config, prefix: str = "") -> Iterator[str]:
    """Every settable key, dotted."""
    for name, kind in _fields(cls).items():
        if dataclasses.is_dataclass(kind):
            yield from all_keys(typing.cast(type, kind), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


@cache
def type_of(key: str) -> Any:
    """Annotated type of a key. Raises ``ValueError`` with close names when there is no such key."""
    kind: Any = Config
    parts = key.split(".")
    for index, part in enumerate(parts):
        if dataclasses.is_dataclass(kind):
            hints = _fields(typing.cast(type, kind))
            if part not in hints:
                known = [*all_keys(), *GROUPS]
                raise ValueError(f"there is no key '{key}'{close_to(key, known)}")
            kind = hints[part]
        elif index and _is_mapping(kind):
            kind = _mapping_values(kind)
        else:
            raise ValueError(f"'{'.'.join(parts[:index])}' is a single value, it has no '{part}'")
    if dataclasses.is_dataclass(kind):
        raise ValueError(f"'{key}' is a group of keys: set one of {', '.join(_fields(typing.cast(type, kind)))}")
    return kind


def takes_list(key: str) -> bool:
    """Whether a list is a value of ``key``."""
    return any(typing.get_origin(member) in (list, tuple) for member in _members(type_of(key)))


def _members(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


def _is_mapping(kind: Any) -> bool:
    return any(typing.get_origin(member) is dict for member in _members(kind)) or kind is Any


def _mapping_values(kind: Any) -> Any:
    found = [typing.get_args(member)[1] for member in _members(kind) if typing.get_origin(member) is dict]
    return found[0] if found else Any


def typed(key: str, value: Any) -> Any:
    """``value`` as the type of ``key``. Raises ``ValueError`` naming key, value and type when it is not one."""
    kind = type_of(key)
    if key in LISTS and isinstance(value, str):
        value = [value]
    if value is False and "off" in VALUES.get(key, ()):
        value = "off"  # YAML reads a bare off as false
    for member in _members(kind):
        converted = _convert(member, value)
        if converted is not _NO:
            return _in_range(key, converted)
    wanted = " or ".join(_said(member) for member in _members(kind))
    raise ValueError(f"{key}={_shown(value)} is not {wanted}")


_NO = object()


def _convert(kind: Any, value: Any) -> Any:
    if kind is Any:
        return value if _finite(value) else _NO
    if kind is type(None):
        return None if value is None else _NO
    if kind is bool:
        return value if isinstance(value, bool) else _NO
    if kind is int:
        whole = isinstance(value, float) and value.is_integer()
        return int(value) if (isinstance(value, int) and not isinstance(value, bool)) or whole else _NO
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return float(value) if number else _NO
    if kind is str:
        return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else _NO
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is list:
        items = [_convert(arguments[0], item) for item in value] if isinstance(value, list | tuple) else [_NO]
        return _NO if any(item is _NO for item in items) else items
    if not isinstance(value, dict):
        return _NO
    pairs = {str(name): _convert(arguments[1], item) for name, item in value.items()}
    return _NO if any(item is _NO for item in pairs.values()) else pairs


def _finite(value: Any) -> bool:
    """Whether JSON can hold it: no NaN or infinity anywhere inside."""
    if isinstance(value, list | dict):
        return all(_finite(item) for item in (value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _said(kind: Any) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        type(None): "null",
        Any: "a finite number, text, list or mapping",
    }
    fallback = "a list" if typing.get_origin(kind) is list else "a mapping"
    return names.get(kind, fallback)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _in_range(key: str, value: Any) -> Any:
    if value is None:
        return value
    if key in VALUES and value not in VALUES[key]:
        near = close_to(str(value), VALUES[key])
        raise ValueError(f"{key}={value} is not one of {', '.join(VALUES[key])}{near}")
    if key in LEAST and value < LEAST[key]:
        raise ValueError(f"{key}={value} must be at least {LEAST[key]}")
    most = MOST.get(key, MOST_WHOLE if isinstance(value, int) and not isinstance(value, bool) else math.inf)
    if isinstance(value, int | float) and value > most:
        raise ValueError(f"{key}={_number(value)} must be at most {most}")
    if key in DURATIONS:
        seconds(key, value)
    return value


def _number(value: float) -> str:
    """As it can be read: a number of a hundred digits by its size."""
    return str(value) if abs(value) < 10**18 else f"{value:.3g}" if abs(value) < 10**300 else "a number beyond 1e300"


def get_value(config: Config, key: str) -> Any:
    """Value of a dotted key; None below a mapping that lacks it."""
    found: Any = config
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else getattr(found, part, None)
    return found


def set_value(config: Config, key: str, value: Any) -> None:
    """Set a dotted key to an already typed value; mappings on the way are made."""
    *path, last = key.split(".")
    target: Any = config
    for part in path:
        if isinstance(target, dict):
            target = target.setdefault(part, {})
        elif getattr(target, part) is None:
            setattr(target, part, {})
            target = getattr(target, part)
        else:
            target = getattr(target, part)
    if isinstance(target, dict):
        target[last] = value
    else:
        setattr(target, last, value)
