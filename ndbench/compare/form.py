"""Whether plain data read from a file has the types that a dataclass declares."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from functools import cache
from typing import Any, Union


def check_types(value: Any, where: str) -> None:
    """Raises ``ValueError`` naming the first field of the dataclass ``value``, or of one in it, of another type."""
    cls: Any = type(value)
    for name, kind in _hints(cls).items():
        _check(kind, getattr(value, name), f"{where}.{name}" if where else name)


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _check(kind: Any, value: Any, where: str) -> None:
    if not _is(kind, value):
        raise ValueError(f"{where} is {str(value)[:60]!r}, which is not what stands there")
    if dataclasses.is_dataclass(value):
        check_types(value, where)
    inner = typing.get_args(kind)
    if isinstance(value, list | tuple) and inner:
        for index, item in enumerate(value):
            _check(inner[0], item, f"{where}[{index}]")


def _is(kind: Any, value: Any) -> bool:
    origin = typing.get_origin(kind)
    if kind is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_is(member, value) for member in typing.get_args(kind))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return (isinstance(value, int) and not isinstance(value, bool)) or (type(value) is float and value.is_integer())
    if origin is tuple:
        return isinstance(value, list | tuple)
    return isinstance(value, origin or kind)
