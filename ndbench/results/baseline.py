"""The verbs on stored baselines: accept, list, show, prune.

Sessions are added, never overwritten. A cell that was found regressed enters only when it is named, and then starts a
new level, so that a deliberate change can always be accepted and a regression never by accident. What "regressed"
means is decided elsewhere and handed in.
"""

from __future__ import annotations

import contextlib
import fnmatch
import getpass
import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict, Unpack

from ndbench.counted import counted
from ndbench.results.fit import by_cell, hardware_key, unfit
from ndbench.results.schema import SCHEMA_VERSION, Record
from ndbench.results.sessions import (
    Baseline,
    Session,
    baseline_folder,
    read_baseline,
    stored_suites,
)
from ndbench.results.store import RunFolder, UnreadableFile, check_name, find_run, read_json
from ndbench.results.writing import add_cells, locked


@dataclass(frozen=True)
class Accepted:
    """What :func:`accept` did."""

    folder: Path
    """The session's folder; when every cell was held back, where it would be."""
    cells: list[str]
    """Cells that are in the session now because of this call."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why, by cell, one was not taken."""
    restarted: list[str] = field(default_factory=list)
    retired: list[str] = field(default_factory=list)
    already: list[str] = field(default_factory=list)
    """Cells that an earlier call had accepted from the same run."""
    sessions: dict[str, int] = field(default_factory=dict)
    """How many sessions now hold each of ``cells`` at its present level."""
    suspects: list[str] = field(default_factory=list)
    """Cells taken although the comparison could not tell them from a regression."""

    @property
    def exit_code(self) -> int:
        """0 when every selected cell was taken, 1 when a regressed one was held back, 3 when one had not run well."""
        if any(reason.startswith("regressed") for reason in self.refused.values()):
            return 1
        return 3 if self.refused else 0


class Acceptance(TypedDict, total=False):
    """What to accept and where to; the keywords of :func:`accept`."""

    results_dir: str | Path
    folder: str | Path | None
    """The baseline of one suite, by default ``<results_dir>/baselines/<hardware>/<suite>``."""
    hardware: str | None
    cells: str | None
    """Patterns of cell names, comma separated."""
    force: bool
    by: str | None
    now: datetime | None


def target_folder(records: list[Record], how: Acceptance) -> Path:
    """Where the records of a run belong."""
    if folder := how.get("folder"):
        return Path(folder)
    hardware = how.get("hardware") or hardware_key(records)
    return baseline_folder(how.get("results_dir", "results"), hardware, records[0]["suite"])


def accept(
    run: RunFolder | str | Path,
    reason: str,
    *,
    verdicts: Mapping[str, str] | None = None,
    **how: Unpack[Acceptance],
) -> Accepted:
    """Make a run, or the cells of it that match ``cells``, part of the baseline.

    ``run`` may be any run folder, an unpacked CI artifact included. ``verdicts`` (cell to verdict) come from comparing
    the run with this baseline; without them, from the run's own ``verdict.json``. A regressed cell, or a missing one
    (which is then retired), is only taken when ``cells`` names it in full or ``force`` is set.

    Raises ``ValueError`` when the reason is empty, no cell matches, or no selected cell ran well enough to be taken.
    """
    if not reason.strip():
        raise ValueError("a reason is needed: say why this run is the reference now (--reason '...')")
    run = run if isinstance(run, RunFolder) else find_run(run, how.get("results_dir", "results"))
    records = run.records()
    if not records:
        raise ValueError(f"{run.path} holds no record: there is nothing to accept")
    verdicts = verdicts if verdicts is not None else _verdicts_of(run)
    measured = by_cell(records)
    missing = {name for name, verdict in verdicts.items() if verdict == "missing"} - set(measured)
    named, force = _names(how.get("cells")), how.get("force", False)
    selected = _select([*measured, *sorted(missing)], named, run.path)

    refused: dict[str, str] = {}
    taken: dict[str, list[Record]] = {}
    retired: list[str] = []
    for name in selected:
        if name in missing:
            if name in named or force:
                retired.append(name)
        elif (why := unfit(measured[name])) is not None:
            refused[name] = why
        elif verdicts.get(name) == "regressed" and name not in named and not force:
            refused[name] = f"regressed against the baseline; to accept it on purpose: --cells {name} --reason '...'"
        else:
            taken[name] = measured[name]
    target = target_folder(records, how)
    session = check_name(records[0]["session"], "session")
    if not taken and not retired:
        if any(why.startswith("regressed") for why in refused.values()):
            return Accepted(target / session, [], refused)
        listed = "; ".join(f"{name}: {why}" for name, why in refused.items()) or "no cell was selected"
        raise ValueError(f"nothing of {run.path} was accepted: {listed}")

    head = {
        "schema_version": SCHEMA_VERSION,
        "session": session,
        "run": records[0]["run"],
        "suite": records[0]["suite"],
        "accepted": (how.get("now") or datetime.now(UTC)).isoformat(timespec="milliseconds"),
        "by": how.get("by") or _who(),
        "reason": reason.strip(),
        **records[0]["code"],
        "cells": sorted(taken),
        "restarted": sorted(name for name in taken if verdicts.get(name) == "regressed"),
        "improved": sorted(name for name in taken if verdicts.get(name) == "improved"),
        "retired": sorted(retired),
    }
    already = add_cells(target, head, taken)
    cells = [name for name in sorted(taken) if name not in already]
    return Accepted(
        folder=target / session,
        cells=cells,
        sessions=_sessions_of(target, cells),
        refused=refused,
        restarted=head["restarted"],
        retired=sorted(retired),
        already=already,
        suspects=[name for name in sorted(taken) if verdicts.get(name) == "inconclusive" and name not in already],
    )


def _sessions_of(target: Path, cells: Sequence[str]) -> dict[str, int]:
    try:
        stored = read_baseline(target)
    except ValueError:  # another session is damaged: whoever compares is told
        return {}
    return {name: len(stored.segment(name)) for name in cells}


def _verdicts_of(run: RunFolder) -> dict[str, str]:
    if not run.has_verdict:
        return {}
    try:
        return {cell["name"]: cell["verdict"] for cell in read_json(run.verdict_path)["cells"]}
    except (KeyError, TypeError) as error:
        raise UnreadableFile(f"cannot read {run.verdict_path}: it is not a whole verdict") from error


def _names(cells: str | None) -> list[str]:
    return [part.strip() for part in cells.split(",") if part.strip()] if cells else []


def _select(names: list[str], patterns: list[str], where: Path) -> list[str]:
    unmatched = [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]
    if unmatched:
        raise ValueError(f"no cell of {where} matches {', '.join(unmatched)}; its cells: {', '.join(names)}")
    return [name for name in names if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def _who() -> str:
    with contextlib.suppress(OSError):
        named = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True, check=False)
        if named.returncode == 0 and named.stdout.strip():
            return named.stdout.strip()
    with contextlib.suppress(OSError, KeyError):
        return getpass.getuser()
    return "unknown"


def list_baselines(results_dir: str | Path = "results") -> list[dict[str, Any]]:
    """Every stored baseline: hardware, suite, folder, and its sessions (as :func:`describe` has them), oldest first."""
    root = Path(results_dir) / "baselines"
    found = []
    for folder in stored_suites(root):
        baseline = read_baseline(folder)
        found.append(
            {
                "hardware": folder.parent.name,
                "suite": folder.name,
                "folder": str(folder),
                "sessions": [describe(session) for session in baseline.sessions],
            }
        )
    return found


def describe(session: Session, now: datetime | None = None) -> dict[str, Any]:
    """One accepted session in a few facts."""
    any_record = next(iter(session.cells.values()), [None])[0]
    return {
        "session": session.session,
        "accepted": session.accepted,
        "age_days": round(session.age_days(now), 4),
        "by": session.by,
        "reason": session.reason,
        "commit": session.commit,
        "dirty": session.dirty,
        "software": any_record["fingerprint"]["software"] if any_record else {},
        "cells": {name: len(records) for name, records in session.cells.items()},
        "restarted": list(session.restarted),
        "improved": list(session.improved),
        "retired": list(session.retired),
    }


def show(baseline: Baseline, session: str | None = None) -> dict[str, Any]:
    """The facts of one session (its name, or the beginning of one; default the latest) and the metrics of its cells.

    Raises ``ValueError`` naming the sessions there are.
    """
    matching = [s for s in baseline.sessions if session is None or s.session.startswith(session)]
    if not matching or (session is not None and len(matching) > 1):
        known = ", ".join(s.session for s in baseline.sessions) or "none"
        raise ValueError(
            f"{counted(len(matching), 'session')} of {baseline.source} match '{session}'; there are: {known}"
        )
    chosen = matching[-1]
    metrics = {
        name: {
            metric: [record["metrics"].get(metric, {}).get("value") for record in records]
            for metric in records[0]["metrics"]
        }
        for name, records in chosen.cells.items()
    }
    outcomes = {name: records[0]["outcome"] for name, records in chosen.cells.items()}
    return describe(chosen) | {"source": baseline.source, "outcomes": outcomes, "metrics": metrics}


def prune(folder: str | Path, keep: int) -> list[str]:
    """Remove old sessions of one suite's baseline; returns the removed ones.

    For every cell the ``keep`` latest sessions stay, and the oldest one (drift is measured against it); so do the
    sessions at which a level began or a cell was retired. Raises ``ValueError`` when ``keep`` is under 1.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: at least one session of each cell must stay")
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: there is no baseline to prune")
    with locked(folder):
        sessions = read_baseline(folder).sessions
        kept = {s.session for s in sessions if s.restarted or s.improved or s.retired}
        for name in {name for session in sessions for name in session.cells}:
            held = [session.session for session in sessions if name in session.cells]
            kept.update([held[0], *held[-keep:]])
        removed = [session.session for session in sessions if session.session not in kept]
        for session in removed:
            hidden = folder / f".{session}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
            (folder / session).rename(hidden)  # readers see the whole session or none of it
            shutil.rmtree(hidden)
    return removed
