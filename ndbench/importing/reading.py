"""A YAML file of another tool: its keys, whose they are, and what is wrong with it, in one line.

Only plain data is built from it (``yaml.SafeLoader``).
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

LARGEST = 2**20
"""Bytes of a file that is still taken for a configuration."""

MARKS: dict[str, tuple[str, ...]] = {
    "accelerate": ("compute_environment", "distributed_type", "num_processes", "num_machines", "parallelism_config"),
    "axolotl": ("base_model", "sequence_len", "micro_batch_size", "datasets", "pretraining_dataset", "dp_shard_size"),
}
"""Keys at the top of a file that only one of the tools has."""

ONLY = "only Accelerate and Axolotl files are read, which are YAML"

NAMES = {"accelerate": "Accelerate", "axolotl": "Axolotl"}


def read_file(path: Path) -> tuple[str, dict[str, Any], list[str]]:
    """(tool, keys dotted below a section, keys that are given twice). Raises ``ValueError`` in one line."""
    try:
        if path.is_fifo() or path.is_socket() or path.is_char_device():
            raise ValueError(f"{path} cannot be read: it is not a regular file")
        size = path.stat().st_size
        if size > LARGEST:
            raise ValueError(f"{path} has {size} bytes: that is no configuration (at most {LARGEST} are read)")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if path.suffix == ".toml" or _is_toml(text):
        raise ValueError(f"{path} is TOML: {ONLY}")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()  # read once: of what it makes, keys that stand twice are gone
        content = loader.construct_document(node) if node is not None else None
        twice = list(_twice(node))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is not YAML that can be read: {reason[:200]}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a mapping of keys to values: {ONLY}")
    return tool_of(path, content), flattened(content), twice


def _is_toml(text: str) -> bool:
    try:
        return bool(tomllib.loads(text))
    except (ValueError, RecursionError):
        return False


def tool_of(path: Path, content: dict[Any, Any]) -> str:
    """By the marks of which there are more. Raises ``ValueError`` when there is none, or as many of both."""
    count = {tool: len(set(marks) & {str(key) for key in content}) for tool, marks in MARKS.items()}
    best = max(count, key=lambda tool: count[tool])
    if list(count.values()).count(count[best]) > 1:
        told = "neither" if count[best] == 0 else "as much"
        also = "nor" if count[best] == 0 else "as"
        raise ValueError(
            f"{path} looks like {told} an Accelerate configuration ({', '.join(MARKS['accelerate'][:3])}, …) "
            f"{also} an Axolotl one ({', '.join(MARKS['axolotl'][:3])}, …): {ONLY}"
        )
    return best


def flattened(content: dict[Any, Any]) -> dict[str, Any]:
    """``{"fsdp_config": {"version": 2}}`` as ``{"fsdp_config.version": 2}``; one level, an empty section stays."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict) and value:
            flat.update({f"{key}.{name}": item for name, item in value.items()})
        else:
            flat[str(key)] = value
    return flat


def _twice(node: yaml.Node | None) -> Iterator[str]:
    """Keys that stand twice in one mapping, at the top or in a section; YAML takes the last in silence."""
    if not isinstance(node, yaml.MappingNode):
        return
    for prefix, mapping in [("", node), *((f"{_name(key)}.", value) for key, value in node.value)]:
        if isinstance(mapping, yaml.MappingNode):
            counts = Counter(_name(key) for key, _ in mapping.value)
            yield from (f"{prefix}{name}" for name, count in counts.items() if count > 1)


def _name(node: yaml.Node) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else "?"
