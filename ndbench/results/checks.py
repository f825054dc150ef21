"""Checks of plain JSON data that name the field and what is wrong with it; the record's schema is made of them.

Know JSON and nothing of records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


class RecordError(ValueError):
    """A record that lacks a field, has one too many, one of a wrong type, or a newer schema than this program."""


Check = Callable[[Any, str], None]
"""Raises RecordError when the value (first argument) at the dotted path (second) is not as it must be."""


def _describe(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {value!r}"[:80]


def _is(kind: str, *types: type) -> Check:
    def check(value: Any, where: str) -> None:
        # bool is an int to Python, never to this schema
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise RecordError(f"{where} must be {kind}, got {_describe(value)}")

    return check


TEXT = _is("text", str)
INTEGER = _is("an integer", int)
FLAG = _is("true or false", bool)
OPEN = _is("an object", dict)


def NUMBER(value: Any, where: str) -> None:
    _is("a number", int, float)(value, where)
    if not math.isfinite(value):
        raise RecordError(f"{where} is {value}; a non-finite number is stored as null and its step in steps.nonfinite")


def one_of(*allowed: str) -> Check:
    def check(value: Any, where: str) -> None:
        if value not in allowed:
            raise RecordError(f"{where} must be one of {', '.join(allowed)}, got {_describe(value)}")

    return check


def nullable(inner: Check) -> Check:
    def check(value: Any, where: str) -> None:
        if value is not None:
            inner(value, where)

    return check


def list_of(inner: Check) -> Check:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, list):
            raise RecordError(f"{where} must be a list, got {_describe(value)}")
        for index, item in enumerate(value):
            inner(item, f"{where}[{index}]")

    return check


_EACH = list_of(nullable(NUMBER))


def NUMBERS(value: Any, where: str) -> None:
    """A list of numbers and nulls. Most lists are plain floats, and most of a record is such lists."""
    if isinstance(value, list) and all(type(item) is float for item in value) and all(map(math.isfinite, value)):
        return
    _EACH(value, where)


def fields(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    known = {**required, **(optional or {})}

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise RecordError(f"{where} must be an object, got {_describe(value)}")
        missing = [key for key in required if key not in value]
        unknown = [key for key in value if key not in known]
        if missing or unknown:
            parts = [f"lacks {', '.join(missing)}"] if missing else []
            parts += [f"has unknown {', '.join(map(str, unknown))}"] if unknown else []
            raise RecordError(f"{where} {' and '.join(parts)}")
        for key, item in value.items():
            known[key](item, f"{where}.{key}")

    return check


def holding(required: Mapping[str, Check]) -> Check:
    """An object that has at least these fields; what else stands in it is its writer's business."""

    def check(value: Any, where: str) -> None:
        OPEN(value, where)
        for key, inner in required.items():
            if key not in value:
                raise RecordError(f"{where} lacks {key}")
            inner(value[key], f"{where}.{key}")

    return check


def mapping_of(inner: Check) -> Check:
    def check(value: Any, where: str) -> None:
        OPEN(value, where)
        for key, item in value.items():
            inner(item, f"{where}.{key}")

    return check


GROUPS = ("model", "hardware", "parallelism", "training", "data", "measure", "gate", "tracker", "engine_config")


def CELL(value: Any, where: str) -> None:
    """A cell in its JSON form, as far as whoever compares and reports goes into it: its name and groups of settings."""
    OPEN(value, where)
    if "name" not in value:
        raise RecordError(f"{where} lacks name")
    TEXT(value["name"], f"{where}.name")
    for key in GROUPS:
        OPEN(value.get(key, {}), f"{where}.{key}")
    hardware = value.get("hardware", {})
    TEXT(hardware.get("name", ""), f"{where}.hardware.name")
    nullable(INTEGER)(hardware.get("device_count"), f"{where}.hardware.device_count")
