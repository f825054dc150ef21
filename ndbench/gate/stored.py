"""Comparing and accepting stored runs: reads folders, asks ``compare`` for the verdict, hands it to ``results``.

What the verbs ``compare`` and ``baseline accept`` do, and what a run does at its end. Measures nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Unpack

from ndbench.compare.result import ACCEPTED, UNFINISHED, Comparison, MetricVerdict, from_json
from ndbench.compare.verdict import compare
from ndbench.config import GateConfig
from ndbench.config import cell_id as identity
from ndbench.counted import counted
from ndbench.matrix.keys import typed
from ndbench.report.facts import standing_of
from ndbench.results.baseline import Acceptance, Accepted, accept, target_folder
from ndbench.results.sessions import Baseline, baseline_of_run, holds_sessions, read_baseline
from ndbench.results.store import PairsFolder, RunFolder, UnreadableFile, find_run, read_json


def compare_run(
    run: RunFolder,
    baseline: Baseline | None,
    gate: GateConfig | None = None,
    now: datetime | None = None,
    confirmed: Mapping[str, Sequence[MetricVerdict]] | None = None,
) -> Comparison:
    """The verdict on a run folder; ``gate`` defaults to what the run was made with, ``confirmed`` is what pairs say.

    Raises ``ValueError`` naming the file when the plan or a record is unreadable.
    """
    records = run.records()
    plan = run.plan if run.has_plan else _plan_of(records)
    return compare(
        records,
        baseline,
        [{"name": cell["name"], "cell_id": cell.get("cell_id") or identity(cell)} for cell in plan["cells"]],
        gate or _gate(plan, run),
        suite=plan.get("suite", ""),
        run=plan.get("run", run.path.name),
        unselected=plan.get("unselected", []),
        skipped=plan.get("skipped", []),
        excluded=plan.get("excluded", []),
        planned_repeats=plan.get("repeats", {}),
        confirmed=confirmed,
        now=now,
    )


def verdict_of(run: RunFolder) -> Comparison:
    """The verdict a run ended with; of one that has none yet, what it has measured, compared with nothing.

    Raises ``UnreadableFile`` naming a file that cannot be read.
    """
    if run.has_verdict:
        try:
            return from_json(read_json(run.verdict_path))
        except UnreadableFile:
            raise
        except ValueError as error:
            raise UnreadableFile(f"cannot read {run.verdict_path}: {error} (ndbench compare decides anew)") from error
    comparison = compare_run(run, None)
    if isinstance(run, PairsFolder):
        said = run.pairs.get("stopped") or ["no pair is kept"]
        text = "no verdict yet: stopped in the middle, or still measured"
        return dataclasses.replace(comparison, mode=UNFINISHED, exit_reason=text, notes=[*said, *comparison.notes])
    planned = sum(run.plan.get("repeats", {}).values()) if run.has_plan else 0
    measured = f"{len(run.records())} of {counted(planned, 'repeat')} measured" if planned else "it has no plan"
    return dataclasses.replace(comparison, mode=UNFINISHED, exit_reason=f"no verdict yet: {measured}")


def as_it_stands(run: RunFolder, comparison: Comparison) -> Comparison:
    """The verdict for a reader of today: a run that had nothing to be compared with may be the reference by now."""
    if set(comparison.counts) != {"no_baseline"} or comparison.mode in ("off", "ab", UNFINISHED):
        return comparison
    stands = standing_of(run.records(), run.path)
    if stands is None or not {cell.name for cell in comparison.cells} <= set(stands.accepted):
        return comparison
    said = "there was no baseline: measured, not compared"
    return dataclasses.replace(comparison, mode=ACCEPTED, exit_reason=said)


def compare_two(
    run_a: RunFolder | str | Path,
    run_b: RunFolder | str | Path,
    results_dir: str | Path = "results",
    gate: GateConfig | None = None,
) -> Comparison:
    """The verdict on run B with run A as its only baseline session."""
    a, b = (run if isinstance(run, RunFolder) else find_run(run, results_dir) for run in (run_a, run_b))
    comparison = compare_run(b, baseline_of_run(a), gate)
    return comparison if comparison.mode == "off" else dataclasses.replace(comparison, mode="ab")


def accept_run(
    run: RunFolder | str | Path,
    reason: str,
    **how: Unpack[Acceptance],
) -> Accepted:
    """Accept a run after comparing it with the baseline as it stands now, whatever it was compared with before.

    See :func:`ndbench.results.baseline.accept` for the keywords and errors. A run that has not come to its end needs
    ``force``: fewer repeats than were planned make a reference that decides nothing.
    """
    run = run if isinstance(run, RunFolder) else find_run(run, how.get("results_dir", "results"))
    records = run.records()
    if not records:
        raise ValueError(f"{run.path} holds no record: there is nothing to accept")
    if (lacks := _lacks(run, records)) is not None and not how.get("force", False):
        name = run.path.name
        raise ValueError(f"run {name} has {lacks}: ndbench --resume {name}, or --force takes what there is")
    target = target_folder(records, how)
    baseline = read_baseline(target) if holds_sessions(target) else None
    if baseline is not None:  # the run itself may be in it already, whole or in part
        others = [session for session in baseline.sessions if session.session != records[0]["session"]]
        baseline = Baseline(baseline.source, others)
    verdicts = {cell.name: cell.verdict for cell in compare_run(run, baseline).cells}
    return accept(run, reason, verdicts=verdicts, **how)


def _lacks(run: RunFolder, records: list[Any]) -> str | None:
    """What a run that did not come to its end lacks of its plan."""
    if run.has_verdict or not run.has_plan:
        return None
    planned = sum(run.plan.get("repeats", {}).values())
    return f"only {len(records)} of its {counted(planned, 'repeat')}" if len(records) < planned else None


def _plan_of(records: list[Any]) -> dict[str, Any]:
    """A plan as far as records alone tell it, for a folder that has lost its own."""
    cells = {record["cell"]["name"]: record["cell"] for record in records}
    return {"cells": list(cells.values()), "suite": records[0]["suite"] if records else ""}


def _gate(plan: dict[str, Any], run: RunFolder) -> GateConfig:
    """The gate a run was made with, as its plan has it (or its first cell)."""
    first: dict[str, Any] = plan["cells"][0] if plan["cells"] else {}
    values = plan.get("gate") or first.get("gate") or {}
    try:
        return GateConfig(**{key: typed(f"gate.{key}", value) for key, value in values.items()})
    except (AttributeError, ValueError) as error:
        raise UnreadableFile(f"cannot read {run.plan_path}: {error}") from error
