"""A reader of wandb's offline files: the documented log format, without a login and without a network."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 32768
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class OfflineRun:
    id: str = ""
    name: str = ""
    group: str = ""
    job_type: str = ""
    notes: str = ""
    project: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)
    """Step metric by metric (or pattern) name."""
    artifacts: list[Any] = field(default_factory=list)
    finished: bool = False


def payloads(data: bytes) -> Iterator[bytes]:
    """The records of a file of blocks; stops quietly where the file was cut."""
    assert data[:4] == b":W&B", data[:8]
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        piece = data[at + 7 : at + 7 + length]
        if len(piece) < length:
            return
        at += 7 + length
        parts = piece if kind in (FULL, FIRST) else parts + piece
        if kind in (FULL, LAST):
            yield parts


def read_offline(path: Path) -> OfflineRun:
    from wandb.proto.wandb_internal_pb2 import Record

    run = OfflineRun()
    for payload in payloads(path.read_bytes()):
        record = Record()
        record.ParseFromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            one = record.run
            run.id, run.name, run.group, run.job_type = one.run_id, one.display_name, one.run_group, one.job_type
            run.notes, run.project, run.tags = one.notes, one.project, list(one.tags)
            _update(run.config, one.config.update)
        elif kind == "config":
            _update(run.config, record.config.update)
        elif kind == "history":
            row: dict[str, Any] = {}
            _update(row, record.history.item)
            run.history.append(row)
        elif kind == "summary":
            _update(run.summary, record.summary.update)
        elif kind == "metric":
            run.metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "artifact" or (kind == "request" and record.request.HasField("log_artifact")):
            run.artifacts.append(record.artifact if kind == "artifact" else record.request.log_artifact.artifact)
        elif kind == "exit":
            run.finished = True
    return run


def _update(into: dict[str, Any], items: Any) -> None:
    for item in items:
        *above, last = list(item.nested_key) or [item.key]
        place = into
        for key in above:
            place = place.setdefault(key, {})
        place[last] = json.loads(item.value_json)


def read_all(folder: Path) -> list[OfflineRun]:
    """Every offline run below ``folder/wandb``."""
    return [read_offline(path) for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]
