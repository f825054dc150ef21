"""``ndbench wandb push``: which folder is meant, what it was compared with, and where it goes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ndbench.config import TrackerConfig
from ndbench.gate.stored import verdict_of
from ndbench.report.baselines import baseline_at
from ndbench.report.tracker import push_baseline, push_run
from ndbench.results.store import find_run

PUSH_SECONDS = 600


def send(
    name: str,
    results_dir: Path,
    *,
    project: str | None = None,
    entity: str | None = None,
    offline: bool = False,
    timeout: int | None = None,
) -> str:
    """Send the run, or else the baseline, of this name; what was sent, in a line.

    Raises ``ValueError`` when there is neither, or when sending did not work.
    """
    changes = {"project": project, "entity": entity, "mode": "offline" if offline else None}
    given: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
    given |= {"name": "wandb", "timeout": float(timeout or PUSH_SECONDS)}
    try:
        run = find_run(name, results_dir)
    except ValueError as no_run:
        try:
            folder = baseline_at(name, results_dir)
        except ValueError:
            raise no_run from None
        return push_baseline(folder, dataclasses.replace(TrackerConfig(), **given))
    plan = run.plan if run.has_plan else {"cells": []}
    stored = plan["cells"][0].get("tracker") if plan["cells"] else None
    known = {field.name for field in dataclasses.fields(TrackerConfig)}
    kept = {key: value for key, value in (stored or {}).items() if key in known}
    tracker = dataclasses.replace(TrackerConfig(**kept), **given)
    comparison = verdict_of(run)
    return push_run(run, comparison, tracker)
