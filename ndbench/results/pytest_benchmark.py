"""Records to and from the JSON format of pytest-benchmark, so that its tools read ours and ours compare with it.

One benchmark is one cell; its data are the step times of the repeats, each the median of its timed steps. Coming from
there, every value is a repeat of its own: the format does not say which values share a process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, quantiles, stdev
from typing import Any

from ndbench.results.schema import Record

VERSION = "5.1.0"
"""The version of pytest-benchmark whose format this is."""


def to_pytest_benchmark(records: Sequence[Record]) -> dict[str, Any]:
    """The document for all ``ok`` repeats, a benchmark a cell. Raises ``ValueError`` when there is none."""
    by_cell: dict[str, list[Record]] = {}
    for record in records:
        if record["outcome"] == "ok":
            by_cell.setdefault(record["cell"]["name"], []).append(record)
    if not by_cell:
        raise ValueError("no repeat ran to its end: there is nothing to export")
    first = next(iter(by_cell.values()))[0]
    return {
        "machine_info": {
            **first["fingerprint"]["hardware"],
            "node": first["fingerprint"]["informational"].get("host"),
            "python_version": first["fingerprint"]["software"].get("python"),
        },
        "commit_info": {"id": first["code"]["commit"], "dirty": first["code"]["dirty"]},
        "benchmarks": [_benchmark(name, group) for name, group in by_cell.items()],
        "datetime": first["start"],
        "version": VERSION,
    }


def _benchmark(name: str, records: Sequence[Record]) -> dict[str, Any]:
    data = [_step_time(record) for record in records]
    first = records[0]
    assert first["tokens"] is not None, "an ok record has tokens"
    return {
        "group": first["suite"],
        "name": name,
        "fullname": f"{first['suite']}::{name}",
        "params": None,
        "param": None,
        "extra_info": {"cell_id": first["cell_id"], "tokens_per_step": first["tokens"]["per_step"]},
        "options": {"disable_gc": False, "timer": "perf_counter", "min_rounds": len(data), "warmup": True},
        "stats": _stats(data),
    }


def _step_time(record: Record) -> float:
    steps = record["steps"]
    assert steps is not None, "an ok record has steps"
    return float(median(steps["seconds"][steps["first_timed"] :]))


def _stats(data: list[float]) -> dict[str, Any]:
    q1, middle, q3 = quantiles(data, n=4, method="inclusive") if len(data) > 1 else data * 3
    mean, spread = fmean(data), stdev(data) if len(data) > 1 else 0.0
    low, high = q1 - 1.5 * (q3 - q1), q3 + 1.5 * (q3 - q1)
    far = sum(not low <= value <= high for value in data)
    wide = sum(abs(value - mean) > spread for value in data)
    return {
        "min": min(data),
        "max": max(data),
        "mean": mean,
        "stddev": spread,
        "rounds": len(data),
        "median": middle,
        "iqr": q3 - q1,
        "q1": q1,
        "q3": q3,
        "ld15iqr": min((value for value in data if value >= low), default=low),
        "hd15iqr": max((value for value in data if value <= high), default=high),
        "iqr_outliers": far,
        "stddev_outliers": wide,
        "outliers": f"{wide};{far}",
        "ops": 1 / mean,
        "total": math.fsum(data),
        "iterations": 1,
        "data": data,
    }


def read_pytest_benchmark(document: Any, where: str) -> dict[str, list[float]]:
    """Seconds by benchmark name. Raises ``ValueError`` naming a benchmark without data or with what is no time."""
    if not isinstance(document, dict) or not isinstance(document.get("benchmarks"), list):
        raise ValueError(f"{where} is not a file of pytest-benchmark: it has no benchmarks")
    found: dict[str, list[float]] = {}
    for entry in document["benchmarks"]:
        name, data = entry.get("name"), (entry.get("stats") or {}).get("data")
        if not isinstance(name, str) or not isinstance(data, list) or not data:
            raise ValueError(f"{where}: benchmark {name!r} has no data (it was saved without --benchmark-save-data)")
        bad = [value for value in data if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0]
        if bad:
            raise ValueError(f"{where}: benchmark {name} holds {bad[0]!r}, which is not a time")
        found[name] = [float(value) for value in data]
    return found
