"""What wandb is told about a training run, as plain data: its configuration and its log, a row a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ndbench.report.wandb_runs import STEP, TrackedRun, stable_id, without_secrets
from ndbench.results.store import read_json


def training_run(folder: Path, tags: Sequence[str] = (), hide: Sequence[str] = ()) -> TrackedRun:
    """The run in ``folder``; the id is the folder's, so that a run that was resumed stays one."""
    from ndbench.training.log import read_log

    cell, lines = read_json(folder / "config.json"), read_log(folder / "log.jsonl")
    history: list[dict[str, float | int]] = []
    for line in lines:
        row = {f"train/{key}": float("nan") if value is None else value for key, value in line.items() if key != "step"}
        history.append({STEP: line["step"], **row})
    summary: dict[str, Any] = {"steps": lines[-1]["step"]} if lines else {}
    for key in ("loss", "validation_loss", "tokens_per_second", "memory_bytes"):
        found = [line[key] for line in lines if line.get(key) is not None]
        if found:
            summary[key] = found[-1]
    return TrackedRun(
        id=stable_id("training", folder.resolve()),
        name=folder.name,
        group="train",
        job_type="train",
        tags=tuple(dict.fromkeys(["train", cell["model"]["name"], *tags])),
        notes=None,
        config=without_secrets({"cell": cell}, hide),
        history=history,
        summary=without_secrets(summary, hide),
    )
