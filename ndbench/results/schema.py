"""The record: what one repeat of one cell measured, as plain JSON data, and the check that a record is whole.

A record is the only thing that passes from measuring to comparing and reporting. This module knows its fields and
versions; it knows nothing of files, statistics or torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from ndbench.results.checks import (
    CELL,
    FLAG,
    INTEGER,
    NUMBER,
    NUMBERS,
    OPEN,
    TEXT,
    Check,
    RecordError,
    fields,
    holding,
    list_of,
    mapping_of,
    nullable,
    one_of,
)

Record = dict[str, Any]
"""A validated record; see :data:`FIELDS` for its keys."""

SCHEMA_VERSION = 1

OUTCOMES = ("ok", "oom", "timeout", "failed", "invalid", "skipped")
DIRECTIONS = ("higher", "lower", "none")
COMPILE_CACHE = ("cold", "warm", "off")

MIGRATIONS: dict[int, Callable[[Record], Record]] = {}
"""From a version to the next one: ``MIGRATIONS[1]`` turns a record of version 1 into one of version 2."""


_SECONDS = holding({})
_BYTES = nullable(NUMBERS)
_COLLECTIVE = holding({"op": TEXT, "axis": TEXT, "count": INTEGER, "bytes": NUMBER, "where": list_of(TEXT)})


def _cell(value: Any, where: str) -> None:
    CELL(value, where)
    holding({"suite": TEXT, "engine": TEXT})(value, where)


FIELDS: dict[str, Check] = {
    "schema_version": INTEGER,
    "run": TEXT,
    "session": TEXT,
    "suite": TEXT,
    "cell": _cell,
    "cell_id": TEXT,
    "cell_version": TEXT,
    "repeat": INTEGER,
    "seed": INTEGER,
    "start": TEXT,
    "end": TEXT,
    "outcome": one_of(*OUTCOMES),
    "reason": nullable(TEXT),
    "log_tail": nullable(TEXT),
    "code": fields({"commit": nullable(TEXT), "dirty": nullable(FLAG)}),
    "fingerprint": fields({"hardware": OPEN, "software": OPEN, "informational": OPEN}),
    "world": holding({"size": INTEGER, "degrees": OPEN, "layout": TEXT}),
    "steps": nullable(
        fields(
            {
                "seconds": nullable(NUMBERS),
                "loss": nullable(NUMBERS),
                "grad_norm": nullable(NUMBERS),
                "nonfinite": list_of(INTEGER),
                "first_timed": nullable(INTEGER),
                "steady": nullable(FLAG),
            },
            {"rank_medians": nullable(NUMBERS)},
        )
    ),
    "tokens": nullable(fields({"per_step": nullable(INTEGER), "valid": nullable(list_of(nullable(INTEGER)))})),
    "data_hash": nullable(TEXT),
    "memory": nullable(fields({"allocated": _BYTES, "reserved": _BYTES, "device": _BYTES, "rss": _BYTES})),
    "structure": nullable(holding({"collectives": list_of(_COLLECTIVE)})),
    "yardstick": nullable(fields({"before": nullable(_SECONDS), "after": nullable(_SECONDS)})),
    "compile_cache": one_of(*COMPILE_CACHE),
    "engine": OPEN,
    "metrics": mapping_of(
        fields({"value": nullable(NUMBER), "unit": TEXT, "direction": one_of(*DIRECTIONS)}, {"reason": nullable(TEXT)})
    ),
}

_WHOLE = fields(FIELDS)

SHORTEST_STEP, LONGEST_STEP = 1e-9, 1e9
"""Seconds: what no clock tells apart, and thirty years."""


def validate(record: Any, where: str = "record") -> Record:
    """The record itself when it is whole, else a ``RecordError`` naming the missing, unknown or wrong-typed field.

    An ``ok`` record must also hold what every comparison needs: step times from ``first_timed`` on, and losses.
    """
    _WHOLE(record, where)
    checked: Record = record
    if checked["schema_version"] != SCHEMA_VERSION:
        raise RecordError(f"{where} has schema {checked['schema_version']}, this program writes {SCHEMA_VERSION}")
    if checked["outcome"] == "ok":
        _validate_ok(checked, where)
    return checked


def _validate_ok(record: Record, where: str) -> None:
    steps = record["steps"]
    for name in ("steps", "tokens", "memory"):
        if record[name] is None:
            raise RecordError(f"{where}.{name} is null in a record whose outcome is ok")
    for name in ("seconds", "loss"):
        if not steps[name]:
            raise RecordError(f"{where}.steps.{name} is empty in a record whose outcome is ok")
    bad = [i for i, s in enumerate(steps["seconds"]) if s is None or not SHORTEST_STEP <= s <= LONGEST_STEP]
    if bad:
        raise RecordError(
            f"{where}.steps.seconds[{bad[0]}] must be a number of seconds from {SHORTEST_STEP:g} to {LONGEST_STEP:g}"
        )
    for name in ("start", "end"):
        try:
            datetime.fromisoformat(record[name])
        except ValueError as error:
            raise RecordError(f"{where}.{name} '{record[name]}' is not a time") from error
    first = steps["first_timed"]
    if first is None or not 0 <= first < len(steps["seconds"]):
        raise RecordError(f"{where}.steps.first_timed is {first}, of {len(steps['seconds'])} steps")


def migrate(record: Any, where: str = "record") -> Record:
    """A record of any known version as one of the current version, validated.

    Raises ``RecordError`` naming both versions when the record is newer than this program.
    """
    version = record.get("schema_version") if isinstance(record, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise RecordError(f"{where} is not a record: it has no integer schema_version")
    check_version(version, where)
    while record["schema_version"] < SCHEMA_VERSION:
        record = MIGRATIONS[record["schema_version"]](record)
    return validate(record, where)


def check_version(version: int, where: str) -> None:
    """Raises ``RecordError`` when a file's schema version is one this program cannot read."""
    if version > SCHEMA_VERSION:
        raise RecordError(
            f"{where} has schema {version}, this ndbench reads up to {SCHEMA_VERSION}: it was written by a newer one"
        )
    if version < SCHEMA_VERSION and version not in MIGRATIONS:
        raise RecordError(f"{where} has schema {version}, which no ndbench wrote (current: {SCHEMA_VERSION})")


def metric(value: float | None, unit: str, direction: str, reason: str | None = None) -> dict[str, Any]:
    """One entry of ``metrics``. A value that is null or not finite is stored as null and needs a ``reason``."""
    if value is not None and not math.isfinite(value):
        value, reason = None, reason or f"the value was {value}"
    entry: dict[str, Any] = {"value": value, "unit": unit, "direction": direction}
    if reason is not None:
        entry["reason"] = reason
    return entry


def finite_or_null(values: Iterable[float | None]) -> list[float | None]:
    """The values as JSON can hold them exactly: a NaN or infinity becomes null, everything else stays to the bit."""
    return [float(value) if value is not None and math.isfinite(value) else None for value in values]


def nonfinite_steps(*series: Iterable[float | None] | None) -> list[int]:
    """Indices of the steps at which any of the series is null, NaN or infinite."""
    found = {
        index
        for values in series
        for index, value in enumerate(values if values is not None else ())
        if value is None or not math.isfinite(value)
    }
    return sorted(found)


def new_record(
    *,
    run: str,
    suite: str,
    cell: dict[str, Any],
    cell_id: str,
    cell_version: str,
    repeat: int,
    seed: int,
    start: str,
    end: str,
    outcome: str,
    fingerprint: dict[str, Any],
    world: dict[str, Any],
    session: str | None = None,
    reason: str | None = None,
    log_tail: str | None = None,
    code: dict[str, Any] | None = None,
    steps: dict[str, Any] | None = None,
    tokens: dict[str, Any] | None = None,
    data_hash: str | None = None,
    memory: dict[str, Any] | None = None,
    structure: dict[str, Any] | None = None,
    yardstick: dict[str, Any] | None = None,
    compile_cache: str = "off",
    engine: dict[str, Any] | None = None,
    metrics: dict[str, dict[str, Any]] | None = None,
) -> Record:
    """A whole, validated record; what a repeat that is not ``ok`` did not measure stays null.

    ``cell`` is :meth:`ndbench.config.Cell.to_dict`; ``start`` and ``end`` are ISO-8601 UTC. Raises ``RecordError``.
    """
    return validate(
        {
            "schema_version": SCHEMA_VERSION,
            "run": run,
            "session": session or run,
            "suite": suite,
            "cell": cell,
            "cell_id": cell_id,
            "cell_version": cell_version,
            "repeat": repeat,
            "seed": seed,
            "start": start,
            "end": end,
            "outcome": outcome,
            "reason": reason,
            "log_tail": log_tail,
            "code": code or {"commit": None, "dirty": None},
            "fingerprint": fingerprint,
            "world": world,
            "steps": steps,
            "tokens": tokens,
            "data_hash": data_hash,
            "memory": memory,
            "structure": structure,
            "yardstick": yardstick,
            "compile_cache": compile_cache,
            "engine": engine or {},
            "metrics": metrics or {},
        },
        f"record {cell.get('name')}.r{repeat}",
    )
