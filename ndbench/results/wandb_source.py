"""A baseline that lives in wandb as an artifact: fetched into a temporary folder, then read like any other.

The artifact is a run (records and plan) or a baseline's folder. Nothing of it is kept.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from pathlib import Path

from ndbench.results.sessions import Baseline, baseline_of_run, read_baseline
from ndbench.results.store import RunFolder


def from_wandb(source: str, *, hardware: str | None = None, suite: str | None = None) -> Baseline:
    """The baseline in the artifact ``wandb:ENTITY/PROJECT/NAME:ALIAS``.

    Raises ``ValueError`` when it cannot be fetched (no network, no key, no such artifact) or holds no baseline: a
    baseline that was asked for and is not there is never "none yet".
    """
    reference = source.removeprefix("wandb:")
    if not re.fullmatch(r"[^/:\s]+/[^/:\s]+/[^/:\s]+:[^/:\s]+", reference):
        raise ValueError(f"baseline '{source}': wandb:ENTITY/PROJECT/NAME:ALIAS is expected")
    from ndbench.report.tracker import TrackerError, fetch_artifact

    with tempfile.TemporaryDirectory(prefix="ndbench-wandb-") as scratch:
        folder = Path(scratch) / "artifact"
        folder.mkdir()
        try:
            fetch_artifact(reference, folder)
        except TrackerError as error:
            raise ValueError(f"baseline '{source}' cannot be fetched: {error}") from error
        if (folder / "records").is_dir():
            found = baseline_of_run(RunFolder(folder))
        else:
            found = read_baseline(folder, hardware=hardware, suite=suite)
        return dataclasses.replace(found, source=source)
