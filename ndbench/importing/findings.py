"""What became of each key of an imported file, and the overrides that all of them make together.

A translator asks for typed values and reports on every key; ``finish`` accounts for those that nobody reported on.
Knows no tool's key names.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

TRANSLATED, UNDERSTOOD, LOST, ASSUMED = "translated", "understood", "not carried over", "assumed"
"""Became overrides; needs none, ndbench does the same or the step does not depend on it; lost, with the reason; not in
the file, the tool's own default."""

SHOWN = 60
"""Characters of a value that are shown."""

LOOKED_UP = 50
"""Unknown keys for which a known one of a similar name is looked for: each takes milliseconds."""

Remark = tuple[str, str, str]
"""(pattern of keys, status, why): what to say of keys that need no code."""


@dataclass(frozen=True)
class Finding:
    key: str
    """As in the file, dotted below a section."""
    value: str
    status: str
    overrides: tuple[str, ...]
    why: str


@dataclass
class Findings:
    """Of one file. ``values``: its keys, dotted below a section."""

    path: str
    values: dict[str, Any]
    found: list[Finding] = field(default_factory=list)
    overrides: dict[str, Any] = field(default_factory=dict)
    """Group or dotted key -> value, for a benchmark and for ``ndbench train``."""
    train: dict[str, Any] = field(default_factory=dict)
    """What only ``ndbench train`` reads."""
    notes: list[str] = field(default_factory=list)
    missing_model: str | None = None
    """What to say when the model cannot be named."""
    _open: set[str] = field(default_factory=set)
    _asked: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._open = set(self.values)

    def __contains__(self, key: str) -> bool:
        return self.value(key) is not None

    def value(self, key: str) -> Any:
        """As the file has it; None where it has not. What is asked for here is known to the translator."""
        self._asked.add(key)
        return self.values.get(key)

    def rename(self, key: str, name: str) -> None:
        """Take a key for another, where that is not given as well."""
        if name not in self.values:
            self.values[name] = self.values.pop(key)
            self._open.discard(key)
            self._open.add(name)

    # values, typed

    def whole(self, key: str, least: int = 1) -> int | None:
        """Raises ``ValueError`` naming file, key and value for anything but null or a whole number of ``least`` up."""
        number = self._number(key)
        if number is None:
            return None
        if not (math.isfinite(number) and number.is_integer() and least <= number < 2**31):
            raise self._unfit(key, f"a whole number of at least {least}")
        return int(number)

    def number(self, key: str) -> float | None:
        """Raises ``ValueError`` for anything but null or a finite number."""
        number = self._number(key)
        if number is not None and not math.isfinite(number):
            raise self._unfit(key, "a number")
        return number

    def _number(self, key: str) -> float | None:
        """NaN for what is no number."""
        value = self.value(key)
        if value is None:
            return None
        try:
            return math.nan if isinstance(value, bool) else float(value)  # YAML reads 2e-6 as text
        except (TypeError, ValueError, OverflowError):
            return math.nan

    def flag(self, key: str) -> bool | None:
        value = self.value(key)
        known = {
            "true": True,
            "yes": True,
            "on": True,
            "1": True,
            "false": False,
            "no": False,
            "off": False,
            "0": False,
        }
        if value is None or isinstance(value, bool):
            return value
        if str(value).lower() not in known:
            raise self._unfit(key, "true or false")
        return known[str(value).lower()]

    def text(self, key: str) -> str | None:
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool | dict | list) or not str(value).isprintable():
            raise self._unfit(key, "one line of text")
        return str(value)

    def _unfit(self, key: str, wanted: str) -> ValueError:
        return ValueError(f"{self.path}: {key} is {shown(self.values[key])}, expected {wanted}")

    # what became of a key

    def translated(self, key: str, overrides: Mapping[str, Any], why: str = "", *, train: bool = False) -> None:
        """``train``: only ``ndbench train`` has a use for it."""
        (self.train if train else self.overrides).update(overrides)
        self._report(key, TRANSLATED, overrides, f"{why} (ndbench train)".strip() if train else why)

    def understood(self, key: str, why: str) -> None:
        self._report(key, UNDERSTOOD, {}, why)

    def lost(self, key: str, why: str, overrides: Mapping[str, Any] | None = None) -> None:
        """``overrides``: the nearest that there is."""
        self.overrides.update(overrides or {})
        self._report(key, LOST, overrides or {}, why)

    def assumed(self, what: str, overrides: Mapping[str, Any], why: str, *, train: bool = False) -> None:
        """Something the file leaves to its tool."""
        (self.train if train else self.overrides).update(overrides)
        self.found.append(Finding(what, "", ASSUMED, words(overrides), why))

    def finish(self, remarks: Iterable[Remark], tool: str) -> None:
        """Report on every key that is still open: by ``remarks``, else as unknown."""
        known = list(remarks)
        names = sorted(self._asked | {pattern for pattern, _, _ in known if not set(pattern) & set("*?[")})
        unknown = 0
        for key in [key for key in self.values if key in self._open]:
            if self.values[key] is None or self.values[key] in ({}, []):
                self.understood(key, f"empty: {tool}'s own default")
                continue
            for pattern, status, why in known:
                if fnmatch.fnmatchcase(key, pattern):
                    off = self.values[key] is False and status == LOST
                    self._report(key, UNDERSTOOD if off else status, {}, "off: nothing to set" if off else why)
                    break
            else:
                unknown += 1
                near = difflib.get_close_matches(key, names, n=1, cutoff=0.8) if unknown <= LOOKED_UP else []
                meant = f" (did you mean {near[0]}?)" if near else ""
                self.lost(key, f"not a key of {tool} that is known here{meant}")

    def _report(self, key: str, status: str, overrides: Mapping[str, Any], why: str) -> None:
        self._asked.add(key)
        if key not in self._open:
            return  # not in the file, or reported on already
        self._open.discard(key)
        self.found.append(Finding(key, shown(self.values[key]), status, words(overrides), why))


def words(overrides: Mapping[str, Any]) -> tuple[str, ...]:
    """``KEY=VALUE`` as the command line takes them."""
    return tuple(f"{key}={_written(value)}" for key, value in overrides.items())


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(_written(item) for item in value)}]"
    return str(value)


def shown(value: Any) -> str:
    """A value of the file on one line; what is inside a list or mapping is counted, not shown."""
    if isinstance(value, dict | list):
        text = f"{{{len(value)} keys}}" if isinstance(value, dict) else f"[{len(value)} items]"
    else:
        text = " ".join(_written(value).split())
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
