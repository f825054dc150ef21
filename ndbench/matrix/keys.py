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
from ndbench.matrix.ranges import VALUES, check_range, shown_number
from ndbench.matrix.sources import GROUPS, close_to

LISTS = ("data.files",)
"""Keys of a list that one text alone is a value of, too."""


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
            check_range(key, converted)
            return converted
    wanted = " or ".join(_said(member) for member in _members(kind))
    raise ValueError(f"{key}={_shown(value)} is not {wanted}")


_NO = object()
MOST_FLOAT = 10**308
"""A whole number of YAML may be larger than any float."""


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
        number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST_FLOAT
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
    return shown_number(value) if isinstance(value, int | float) else str(value)


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
