"""What there is to choose from: models, suites, machines, layouts and engines, as ``ndbench list`` prints them.

Reads the files as they are, without composing them, so that one broken file does not hide the others.
"""

from __future__ import annotations

import dataclasses
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.text import Text

from ndbench.arguments import LISTS
from ndbench.config import ModelConfig
from ndbench.matrix.sources import Sources, find_sources
from ndbench.measure.flops import parameter_count
from ndbench.parallel.config import AXES
from ndbench.report.columns import Column, print_columns

GROUP_OF = {what: {"models": "model", "suites": "suite", "engines": "engine"}.get(what, what) for what in LISTS}


def entries(what: str, config_dir: str | Path | None = None) -> list[dict[str, Any]]:
    """One entry a choice: ``name``, ``about``, ``file``, ``yours`` (from ``--config-dir``) and the facts of its kind.

    Raises ``ValueError`` when ``config_dir`` is no folder or one of its files has the name of a shipped one.
    """
    sources = find_sources(config_dir)
    if what == "engines":
        return _engines(sources)
    group = GROUP_OF[what]
    found = []
    for name in sources.names(group):
        path = sources.files[group][name]
        head = {"name": name, "about": _first_comment(path), "file": str(path), "yours": _is_yours(path, sources)}
        try:
            values = _values(path, sources.files[group])
        except ValueError as error:
            found.append(head | {"about": f"cannot be read: {error}"})
        else:
            found.append(head | _FACTS.get(group, _plain)(values))
    return found


def groups(config_dir: str | Path | None = None) -> list[dict[str, Any]]:
    """One entry a group: ``name`` (of the override), ``list`` (the word of this verb) and its ``choices``."""
    sources = find_sources(config_dir)
    return [
        {
            "name": group,
            "list": what,
            "choices": [entry["name"] for entry in _engines(sources)] if what == "engines" else sources.names(group),
        }
        for what, group in GROUP_OF.items()
    ]


def print_groups(found: list[dict[str, Any]], console: Console) -> None:
    columns = [Column("group"), Column("more of it"), Column("choices", prose=True)]
    rows = [[f"{one['name']}=", f"ndbench list {one['list']}", ", ".join(one["choices"])] for one in found]
    print_columns(console, columns, rows)


def print_entries(what: str, found: list[dict[str, Any]], console: Console) -> None:
    shown = _COLUMNS.get(what, (("name", what), ("about", "what it is"), ("sets", "sets")))
    columns = [column for column in shown if any(entry.get(column[0]) is not None for entry in found)]
    rows = []
    for entry in found:
        name = f"{entry['name']} *" if entry["yours"] else entry["name"]
        rows.append([name, *(_shown(key, entry.get(key)) for key, _ in columns[1:])])
    words = ("name", "about", "layout", "factory", "sets")
    prose = ("about", "sets")
    print_columns(console, [Column(title, key not in words, key in prose) for key, title in columns], rows)
    if any(entry["yours"] for entry in found):
        console.print(Text("* from your --config-dir"))
    for line in _USE.get(what, (f"{what}=NAME", f"{what}.KEY=VALUE sets one key")):
        console.print(Text(line), style="dim", soft_wrap=True)


def _values(path: Path, group: dict[str, Path], above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Content of a file on top of the files of its group that its ``defaults`` name."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    if not isinstance(content, dict):
        raise ValueError("it is not a mapping of keys to values")
    merged: dict[str, Any] = {}
    for parent in content.pop("defaults", None) or []:
        if isinstance(parent, str) and parent in group and group[parent] not in (*above, path):
            merged |= _values(group[parent], group, (*above, path))
    return merged | content


def _first_comment(path: Path) -> str | None:
    """The comment that a file begins with."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").rstrip())
    return " ".join(lines) or None


def _is_yours(path: Path, sources: Sources) -> bool:
    return sources.config_dir is not None and path.is_relative_to(sources.config_dir)


def _model(values: dict[str, Any]) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    shape = {key: values.get(key) for key in ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")}
    heads = values.get("num_attention_heads")
    model = ModelConfig(**{key: value for key, value in values.items() if key in known})
    try:
        parameters = parameter_count(model)
    except (TypeError, ValueError):  # a shape that is not whole yet: shown as far as it goes
        parameters = None
    heads_of_both = f"{heads}/{values.get('num_key_value_heads') or heads}" if heads else None
    return shape | {"heads": heads_of_both, "parameters": parameters}


def _hardware(values: dict[str, Any]) -> dict[str, Any]:
    peaks = values.get("peak_flops") or {}
    facts = {key: values.get(key) for key in ("device", "device_count", "gpus_per_node", "memory_bytes", "source")}
    return facts | {"peak_flops": peaks, "bf16": peaks.get("bf16"), "link_bandwidth": values.get("link_bandwidth")}


def _parallelism(values: dict[str, Any]) -> dict[str, Any]:
    degrees = {f"{axis}_size": values.get(f"{axis}_size", 1) for axis in AXES}
    return degrees | {key: value for key, value in values.items() if key not in degrees}


def _suite(values: dict[str, Any]) -> dict[str, Any]:
    return {"about": values.get("description")}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Of a group without facts of its own: the keys that the file sets."""
    settings = {key: value for key, value in values.items() if key != "name"}
    return {
        "settings": settings,
        "sets": ", ".join(f"{key}={_written(value)}" for key, value in settings.items()) or None,
    }


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{','.join(_written(item) for item in value)}]" if isinstance(value, list) else str(value)


def _engines(sources: Sources) -> list[dict[str, Any]]:
    points = {point.name: point.value for point in entry_points(group="ndbench.engines")}
    names = sorted({*points, *sources.files["engine"]})
    found = []
    for name in names:
        path = sources.files["engine"].get(name)
        found.append(
            {
                "name": name,
                "about": _first_comment(path) if path else "installed with another package",
                "file": str(path) if path else None,
                "yours": path is not None and _is_yours(path, sources),
                "factory": points.get(name),
            }
        )
    return found


_FACTS = {"model": _model, "hardware": _hardware, "parallelism": _parallelism, "suite": _suite}

_COLUMNS = {
    "models": (
        ("name", "model"),
        ("parameters", "parameters"),
        ("model_type", "type"),
        ("num_hidden_layers", "layers"),
        ("hidden_size", "hidden"),
        ("heads", "heads/kv"),
        ("vocab_size", "vocabulary"),
    ),
    "suites": (("name", "suite"), ("about", "what it measures")),
    "hardware": (
        ("name", "hardware"),
        ("device", "device"),
        ("gpus_per_node", "a node"),
        ("memory_bytes", "memory"),
        ("bf16", "bf16 peak"),
        ("link_bandwidth", "link"),
    ),
    "parallelism": (
        ("name", "parallelism"),
        *((f"{axis}_size", axis) for axis in AXES),
        ("about", "what it is"),
    ),
    "engines": (("name", "engine"), ("about", "what it is"), ("factory", "class")),
}

_USE: dict[str, tuple[str, ...]] = {
    "models": (
        "model=NAME",
        "model=FOLDER (a local Hugging Face folder)",
        "model=package.module:callable",
    ),
    "suites": (
        "suite=NAME",
        "ndbench show suite=NAME lists its cells",
    ),
    "hardware": ("hardware=NAME, NAME_xN for N devices (h100_x8), or auto (the default)",),
    "parallelism": (
        "parallelism=NAME",
        "-1 is the rest of the ranks",
        "parallelism.tp_size=2 and so on set one degree",
    ),
    "engines": (
        "engine=NAME",
        "engine=package.module:Class",
        "engine=command engine.command='python train.py'",
    ),
}


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "parameters":
        return next(
            (f"{value / size:.1f} {unit}" for size, unit in ((1e9, "B"), (1e6, "M")) if value >= size), str(value)
        )
    if key == "memory_bytes":
        return f"{value / 2**30:.0f} GiB"
    if key == "bf16":
        return f"{value / 1e12:,.0f} TFLOP/s"
    if key == "link_bandwidth":
        return f"{value / 1e9:,.0f} GB/s"
    return str(value)
