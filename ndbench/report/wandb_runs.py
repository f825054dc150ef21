"""What wandb is told about a stored run, as plain data: one run a repeat, one for the comparison, one for a baseline.

Pure functions of records and a verdict, and imports no wandb. Ids are hashes of what a run is, so that sending it
twice means the same run.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ndbench.compare.result import Comparison
from ndbench.report.intervals import interval_of
from ndbench.results.schema import Record
from ndbench.results.sessions import Session

STEP = "step"
"""The metric that every curve is drawn over."""
LONGEST_TAG = 64
SECRET = re.compile(
    r"(?i)(\b(?:[A-Z0-9]+_)*(?:api_?key|access_?key|token|password|passwd|secret)\s*[=:]\s*"
    r"|--(?:[a-z0-9]+-)*(?:api-?key|token|password)[= ]\s*)(?=\S{8})[^\s'\"]+"
)
HIDDEN = "[hidden]"


@dataclass(frozen=True)
class TrackedRun:
    id: str
    name: str
    group: str
    job_type: str
    tags: tuple[str, ...]
    notes: str | None
    config: dict[str, Any]
    history: list[dict[str, float | int]]
    summary: dict[str, Any]
    table: tuple[list[str], list[list[Any]]] | None = None
    """Columns and rows."""
    digest: str = field(init=False)
    """Of everything above: the same digest is the same content."""

    def __post_init__(self) -> None:
        content = [
            self.name,
            self.group,
            self.job_type,
            self.notes,
            self.config,
            self.history,
            self.summary,
            self.table,
        ]
        packed = json.dumps(content, sort_keys=True, default=str)
        object.__setattr__(self, "digest", hashlib.sha256(packed.encode()).hexdigest()[:16])


def stable_id(*parts: object) -> str:
    """An id that wandb takes: the same for the same parts, on every machine."""
    return "ndb" + hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()[:20]


def repeat_run(record: Record, verdict: str | None, tags: Sequence[str] = (), hide: Sequence[str] = ()) -> TrackedRun:
    """A repeat: configuration, one history row a step, and the metrics in the summary. ``hide`` are secret strings."""
    cell = record["cell"]
    config = {
        "cell": cell,
        **{key: record[key] for key in ("cell_id", "cell_version", "run", "session", "suite", "repeat", "seed")},
        **{key: record[key] for key in ("fingerprint", "code", "world", "data_hash", "engine", "compile_cache")},
        "schema_version": record["schema_version"],
    }
    summary: dict[str, Any] = {
        "outcome": record["outcome"],
        "reason": record["reason"],
        "verdict": verdict,
        "start": record["start"],
        "end": record["end"],
    }
    for name, metric in record["metrics"].items():
        summary[f"metrics.{name}"] = metric.get("value")
    for name, ranks in (record["memory"] or {}).items():
        known = [value for value in ranks or [] if value is not None]
        if known:
            summary[f"memory.{name}.max"] = max(known)
    if record["steps"]:
        summary["steps.first_timed"] = record["steps"]["first_timed"]
        summary["steps.steady"] = record["steps"]["steady"]
        summary["steps.nonfinite"] = len(record["steps"]["nonfinite"])
    if record["structure"]:
        summary |= {f"structure.{key}": record["structure"].get(key) for key in ("flops", "graph_breaks", "recompiles")}
        by_axis: dict[str, int] = {}
        for entry in record["structure"]["collectives"] or []:
            by_axis[entry["axis"]] = by_axis.get(entry["axis"], 0) + entry["bytes"]
        summary |= {f"collectives.{axis}.bytes": total for axis, total in by_axis.items()}
    layout = record["world"]["layout"]
    return TrackedRun(
        id=stable_id("repeat", record["run"], record["cell_id"], cell["name"], record["repeat"]),
        name=f"{cell['name']}.r{record['repeat']}",
        group=record["run"],
        job_type="train" if record["suite"] == "train" else "bench",
        tags=_tags([record["suite"], (cell.get("hardware") or {}).get("name"), layout, *tags]),
        notes=None,
        config=without_secrets(config, hide),
        history=_history(record),
        summary=without_secrets({key: value for key, value in summary.items() if value is not None}, hide),
    )


def _history(record: Record) -> list[dict[str, float | int]]:
    """A row a step. A non-finite value is NaN, so that the curve has the gap where it was."""
    steps, per_step = record["steps"], (record["tokens"] or {}).get("per_step")
    if not steps:
        return []
    rows: list[dict[str, float | int]] = []
    count = max(len(steps[name] or []) for name in ("seconds", "loss", "grad_norm"))
    for index in range(count):
        row: dict[str, float | int] = {STEP: index}
        for name, key in (("loss", "loss"), ("grad_norm", "grad_norm"), ("seconds", "step_seconds")):
            series = steps[name] or []
            if index < len(series):
                row[f"train/{key}"] = math.nan if series[index] is None else series[index]
        seconds = row.get("train/step_seconds")
        if per_step and seconds and math.isfinite(seconds):
            row["train/tokens_per_second"] = per_step / seconds
        rows.append(row)
    return rows


COLUMNS = ["cell", "layout", "metric", "baseline", "new", "change", "low", "high", "verdict", "reason"]


def comparison_run(
    comparison: Comparison, records: Sequence[Record], tags: Sequence[str] = (), hide: Sequence[str] = ()
) -> TrackedRun:
    """The verdict on a whole run: a table with a row a cell and metric, and the counts in the summary."""
    rows: list[list[Any]] = []
    for cell in comparison.cells:
        values = {
            "tokens_per_second": cell.current.tokens_per_second if cell.current else None,
            "peak_allocated_bytes": cell.current.peak_bytes if cell.current else None,
            "loss": cell.current.loss_last if cell.current else None,
        }
        for metric in cell.metrics:
            new = values.get(metric.metric)
            old = metric.details.get("baseline")
            if not isinstance(old, int | float):
                old = new / (1 + metric.change) if new is not None and metric.change not in (None, -1) else None
            layout = cell.current.layout if cell.current else None
            bounds = interval_of(cell, metric) or (None, None)
            row = [cell.name, layout, metric.metric, old, new, metric.change, *bounds]
            rows.append([*row, metric.verdict, metric.reason])
    hardware = sorted({(record["cell"].get("hardware") or {}).get("name", "") for record in records})
    code = records[0]["code"] if records else {}
    config = {"run": comparison.run, "suite": comparison.suite, "gate_mode": comparison.mode, "code": code}
    config |= {"baseline": comparison.baseline, "baseline_sessions": comparison.sessions}
    if records:
        config["fingerprint"] = records[0]["fingerprint"]
    return TrackedRun(
        id=stable_id("compare", comparison.run, comparison.suite),
        name=f"{comparison.suite}: {comparison.verdict}",
        group=comparison.run,
        job_type="compare",
        tags=_tags([comparison.suite, *hardware, comparison.verdict, *tags]),
        notes="\n".join([comparison.exit_reason, *without_secrets(comparison.notes, hide)]),
        config=without_secrets(config, hide),
        history=[],
        summary={
            "verdict": comparison.verdict,
            "exit_code": comparison.exit_code,
            **{f"cells.{verdict}": count for verdict, count in comparison.counts.items()},
        },
        table=(COLUMNS, without_secrets(rows, hide)),
    )


def baseline_run(
    hardware: str, suite: str, session: Session, tags: Sequence[str] = (), hide: Sequence[str] = ()
) -> TrackedRun:
    """An accepted session: who accepted it, the reason as the run's notes, the metrics of its cells."""
    summary: dict[str, Any] = {"cells": len(session.cells)}
    for name, records in session.cells.items():
        for metric in ("tokens_per_second", "peak_allocated_bytes", "loss_last"):
            values = [value for r in records if (value := r["metrics"].get(metric, {}).get("value")) is not None]
            if values:
                summary[f"{name}.{metric}"] = sum(values) / len(values)
    config: dict[str, Any] = {
        "session": session.session,
        "accepted": session.accepted,
        "by": session.by,
        "commit": session.commit,
    }
    config |= {"dirty": session.dirty, "hardware": hardware, "suite": suite, "cells": sorted(session.cells)}
    return TrackedRun(
        id=stable_id("baseline", hardware, suite, session.session),
        name=f"{hardware}/{suite} {session.session}",
        group=session.session,
        job_type="baseline",
        tags=_tags([suite, hardware, *tags]),
        notes=without_secrets(session.reason, hide),
        config=without_secrets(config, hide),
        history=[],
        summary=summary,
    )


def _tags(words: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word[:LONGEST_TAG] for word in words if word))


def where_tags(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Branch and pull request, as GitHub's runners say them."""
    found = []
    branch = environment.get("GITHUB_HEAD_REF") or environment.get("GITHUB_REF_NAME")
    if branch and not branch.endswith("/merge"):
        found.append(branch)
    pull = re.fullmatch(r"refs/pull/(\d+)/.*", environment.get("GITHUB_REF", ""))
    if pull:
        found.append(f"pr-{pull[1]}")
    return found


def artifact_name(*parts: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", "-".join(parts))[:120]


def without_secrets(value: Any, hide: Sequence[str] = ()) -> Any:
    """The value with every secret string in it replaced: those in ``hide``, and what follows ``…key=`` and the like."""
    if isinstance(value, str):
        for secret in hide:
            value = value.replace(secret, HIDDEN)
        return SECRET.sub(rf"\1{HIDDEN}", value)
    if isinstance(value, Mapping):
        return {key: without_secrets(item, hide) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, hide) for item in value]
    return value
