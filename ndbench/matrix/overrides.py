"""What the user asked for: ``KEY=VALUE`` words to group choices, typed values and sweeps.

Hydra's grammar reads the values; the schema says which keys there are. Composes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from ndbench.matrix.keys import takes_list, type_of, typed
from ndbench.matrix.reading import read_yaml
from ndbench.matrix.sources import GROUPS, Sources

FREE_TEXT = (
    "cells",
    "shard",
    "baseline",
    "resume",
    "results.dir",
    "checkpoint.dir",
    "checkpoint.weights",
    "engine.command",
    "measure.handicap_cells",
    "measure.budget",
)
"""Keys whose value is taken as it stands: commas, blanks and ``=`` in it mean nothing to Hydra."""

PATHS = ("model.path", "model.target", "engine.target", "data.tokenizer", "data.dataset")
"""Keys taken as they stand too, unless ``-m`` sweeps over them."""


@dataclass
class Request:
    """The command line, read."""

    overrides: list[str]
    groups: dict[str, str] = field(default_factory=dict)
    """Group -> name of the chosen file."""
    values: dict[str, Any] = field(default_factory=dict)
    """Dotted key -> typed value."""
    sweeps: dict[str, list[Any]] = field(default_factory=dict)
    """``-m``: group or dotted key -> its values."""

    @property
    def suite(self) -> str | None:
        return self.groups.get("suite")


def parse_overrides(overrides: Sequence[str], sources: Sources, sweep: bool = False) -> Request:
    """Raises ``ValueError``, one line, for a word that is no override, an unknown key or name, or a wrong type."""
    request = Request(list(overrides))
    parser = OverridesParser.create()
    for text in overrides:
        key, equals, raw = text.partition("=")
        if not equals:
            raise ValueError(f"'{text}' is not KEY=VALUE")
        if key.startswith("~"):
            raise ValueError(f"'{text}': keys cannot be deleted; set {key[1:]}=null")
        key = key.lstrip("+").strip()
        if key in FREE_TEXT or (key in PATHS and not (sweep and "," in raw)):
            if key != "engine.command" and not raw.strip("'\""):  # an unset variable of a script, say
                raise ValueError(f"{text}: the value is empty; leave {key} out, or write {key}=null")
            _set(request, key, typed(key, _plain(raw)))
            continue
        if key not in GROUPS:
            type_of(key)
        override = _parse(parser, text)
        if not override.is_sweep_override():
            _choose(request, key, override.value(), sources)
            continue
        if not sweep:
            lists = key not in GROUPS and takes_list(key)
            raise ValueError(
                f"{text} names several values: "
                + (f"write a list as {key}=[{raw}]" if lists else "sweep over them with -m (--multirun)")
                if override.is_choice_sweep()
                else f"{text} is a sweep: it needs -m (--multirun)"
            )
        if not override.is_discrete_sweep() or key == "suite":
            raise ValueError(f"{text} cannot be swept over")
        values = [_python(value) for value in override.sweep_iterator()]
        if key in GROUPS:
            request.sweeps[key] = [str(value) for value in values]
            for value in request.sweeps[key]:
                choose(key, value, sources)
        else:
            request.sweeps[key] = [typed(key, value) for value in values]
    if "model" not in request.groups and "model" not in request.sweeps:
        if {"model.path", "model.target"} & {*request.values, *request.sweeps}:
            request.groups["model"] = "custom"
    elif request.groups.get("model") != "custom" and "model.path" in request.values:
        path = request.values["model.path"]
        raise ValueError(
            f"model={request.groups.get('model')} and model.path={path} both give the shape: leave one out"
        )
    return request


def choose(group: str, name: str, sources: Sources) -> tuple[str, dict[str, Any]]:
    """(file of the group, values that come with it) for a name: ``h100_x8`` is ``h100`` with 8 devices, a Hugging
    Face folder or ``package.module:callable`` is a model, an entry point or ``package.module:Class`` an engine.

    Raises ``ValueError`` with close names.
    """
    if name in sources.files[group]:
        return name, {}
    if group == "hardware":
        return _choose_hardware(name, sources)
    if group == "model" and (Path(name).expanduser() / "config.json").is_file():
        return "custom", {"model.path": name}
    if group == "model" and ("/" in name or name.startswith(("~", "."))) and ":" not in name:
        raise ValueError(_no_folder(name))
    if group == "model" and ":" in name:
        return "custom", {"model.target": name}
    if group == "engine" and ":" in name:
        return "ndbench", {"engine.target": name, "engine.name": name.rpartition(":")[2]}
    if group == "engine" and any(entry.name == name for entry in entry_points(group="ndbench.engines")):
        return "ndbench", {"engine.name": name}
    sources.require(group, name)
    raise AssertionError("require raises")


def _no_folder(name: str) -> str:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return f"model={name}: the folder {folder.absolute()} has no config.json"
    if folder.exists():
        return f"model={name}: {folder.absolute()} is a file; a model is a folder with a config.json"
    hint = ""
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        hint = f"; of a hub's model, get the shape first: hf download {name} config.json --local-dir FOLDER"
    return f"model={name}: there is no folder {folder.absolute()}{hint}"


def _choose_hardware(name: str, sources: Sources) -> tuple[str, dict[str, Any]]:
    if name == "auto":
        from ndbench.measure.devices import detect, visible_devices

        devices = visible_devices()
        files = {stem: read_yaml(path) for stem, path in sources.files["hardware"].items()} if devices else {}
        found = detect(files, devices)
        return found, {"hardware.device_count": len(devices)} if devices else {}
    counted = re.fullmatch(r"(.+)_x([1-9][0-9]*)", name)
    if counted is None:
        sources.require("hardware", name)
    assert counted is not None, "require raises"
    option, values = choose("hardware", counted[1], sources)
    return option, values | {"hardware.device_count": int(counted[2])}


def _choose(request: Request, key: str, value: Any, sources: Sources) -> None:
    if key not in GROUPS:
        _set(request, key, typed(key, value))
    elif key == "suite" and value is None:
        return
    elif isinstance(value, dict | list) or value is None:
        raise ValueError(f"{key}={value}: {key} is a group, choose one of {', '.join(sources.names(key))}")
    else:
        option, values = choose(key, str(value), sources)
        if request.groups.get(key, option) != option:
            raise ValueError(f"{key} is given twice: {request.groups[key]} and {option}")
        request.groups[key] = option
        for name, implied in values.items():
            request.values.setdefault(name, implied)


def _set(request: Request, key: str, value: Any) -> None:
    request.values[key] = value


def _parse(parser: OverridesParser, text: str) -> Override:
    try:
        return parser.parse_override(text)
    except (HydraException, ValueError) as error:  # a number of thousands of digits is Python's own error
        reason = str(error).splitlines()[1:2] or [str(error)]
        text = text if len(text) < 200 else f"{text[:80]}…"
        raise ValueError(
            f"'{text}' cannot be read: {reason[0].split(';')[0]} (quote the value: {text.partition('=')[0]}=\"'…'\")"
        ) from error


def _plain(raw: str) -> str | None:
    if raw in ("null", ""):
        return None
    quoted = len(raw) > 1 and raw[0] == raw[-1] and raw[0] in "'\""
    return raw[1:-1] if quoted else raw


def _python(value: Any) -> Any:
    return getattr(value, "text", value)
