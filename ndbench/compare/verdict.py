"""The decision: records and a baseline in, a verdict per cell and an exit code out.

Outcomes are compared before metrics; every metric by its own rule (``throughput``, ``memory``, ``structure``,
``curves``). Runs nothing, reads no files. A later, larger decision on suspects stands behind :func:`compare` too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ndbench.compare import checkpoints, curves, memory, structure, throughput
from ndbench.compare.comparability import Reference, find_cell, hardware_changes, is_accelerator, reference, shorten
from ndbench.compare.doubts import held
from ndbench.compare.exits import conclude
from ndbench.compare.notes import notes_on, planted_notes
from ndbench.compare.outcomes import cell_outcome, judge_outcome
from ndbench.compare.result import Against, CellVerdict, Comparison, MetricVerdict, worst
from ndbench.compare.summary import summarise
from ndbench.config import AD_HOC, GateConfig
from ndbench.results.schema import Record
from ndbench.results.sessions import Baseline


def compare(
    records: Sequence[Record],
    baseline: Baseline | None,
    plan_cells: Sequence[Mapping[str, Any]],
    gate: GateConfig,
    *,
    suite: str = "",
    run: str = "",
    unselected: Sequence[Mapping[str, Any]] = (),
    skipped: Sequence[Mapping[str, Any]] = (),
    excluded: Sequence[Mapping[str, Any]] = (),
    planned_repeats: Mapping[str, int] | None = None,
    confirmed: Mapping[str, Sequence[MetricVerdict]] | None = None,
    now: datetime | None = None,
) -> Comparison:
    """Decide about a run.

    ``plan_cells`` are ``{"name", "cell_id"}`` of every cell that was to run; ``unselected``, ``skipped`` and
    ``excluded`` (with ``name`` and ``reason``) are known to the suite but were not to run, so they are not missing
    unless the suite itself now excludes them. Runs without a suite share one baseline, of which none has to have all.
    ``baseline`` of null (or without sessions) means there is none.
    ``confirmed`` holds, by cell, what pairs measured next to each other say: it stands in place of the speed that is
    told from stored repeats.
    """
    records, skipped = _without_skipped(records, skipped)
    gone = {str(cell["name"]) for cell in skipped}
    by_cell: dict[str, list[Record]] = {cell["name"]: [] for cell in plan_cells if cell["name"] not in gone}
    ids = {cell["name"]: str(cell["cell_id"]) for cell in plan_cells}
    for record in sorted(records, key=lambda record: record["repeat"]):
        by_cell.setdefault(record["cell"]["name"], []).append(record)
        ids.setdefault(record["cell"]["name"], record["cell_id"])
    stored = baseline if baseline is not None and baseline.sessions and gate.mode != "off" else None

    drafts = [_draft(name, ids[name], group, stored, ids, gate) for name, group in by_cell.items()]
    timed = {(draft.name, timing.metric): timing for draft in drafts for timing in draft.timings}
    speed = throughput.judge(timed)
    fresh = confirmed or {}
    cells = [
        _finish(
            draft,
            [speed[draft.name, timing.metric] for timing in draft.timings],
            planned_repeats or {},
            now,
            fresh.get(draft.name, ()),
        )
        for draft in drafts
    ]
    away = {str(cell["name"]) for cell in (*unselected, *skipped)}
    if stored is not None and suite != AD_HOC:
        cells += _missing(stored, cells, set(by_cell) | away, excluded)
    concluded = conclude(cells, suite=suite, run=run, gate=gate, baseline=baseline, skipped=skipped, now=now)
    return replace(concluded, notes=[*planted_notes(records, stored), *concluded.notes])


def _without_skipped(
    records: Sequence[Record], skipped: Sequence[Mapping[str, Any]]
) -> tuple[list[Record], list[Mapping[str, Any]]]:
    """Cells of which every repeat says ``skipped`` belong to the skipped ones, with that reason."""
    measured = {record["cell"]["name"] for record in records if record["outcome"] != "skipped"}
    late = {r["cell"]["name"]: {"name": r["cell"]["name"], "reason": r["reason"] or "skipped"} for r in records}
    away = [cell for name, cell in late.items() if name not in measured]
    return [record for record in records if record["cell"]["name"] in measured], [*skipped, *away]


@dataclass(frozen=True)
class _Draft:
    """A cell with everything decided but its speed, which needs all cells at once."""

    name: str
    cell_id: str
    records: list[Record]
    reference: Reference | None
    metrics: list[MetricVerdict]
    timings: tuple[throughput.Timing, ...] = ()


def _draft(
    name: str, cell_id: str, records: list[Record], baseline: Baseline | None, ids: Mapping[str, str], gate: GateConfig
) -> _Draft:
    outcome = cell_outcome(records)
    if not records:
        text = "no repeat was finished: the run was interrupted, or its records are gone"
        return _Draft(name, cell_id, records, None, [MetricVerdict("outcome", "invalid", text)])
    known = find_cell(name, cell_id, baseline, set(ids)) if baseline is not None else None
    if baseline is None or known is None:
        verdict = "no_baseline" if baseline is None else "new"
        text = "there is no baseline to compare with" if baseline is None else "the baseline does not have this cell"
        lone = judge_outcome(outcome, records, None) or _lone_curve(records)
        return _Draft(name, cell_id, records, None, [lone or MetricVerdict("outcome", verdict, text)])
    found = reference(records[0], known, baseline)
    if found.problem is not None:
        lone = judge_outcome(outcome, records, None) or _lone_curve(records)
        return _Draft(name, cell_id, records, found, [lone or MetricVerdict("outcome", "incomparable", found.problem)])
    decided = judge_outcome(outcome, records, found.latest)
    if decided is not None:
        return _Draft(name, cell_id, records, found, [decided])
    return _with_metrics(name, cell_id, records, found, gate, baseline.accepted)


def _lone_curve(records: Sequence[Record]) -> MetricVerdict | None:
    """A non-finite or missing step needs no baseline to be wrong."""
    for series in ("loss", "grad_norm"):
        broken = curves.broken(records, series)
        if broken is not None and curves.curve_of(records[0], series) is not None:
            return MetricVerdict(series, "invalid", broken)
    return None


def _with_metrics(
    name: str, cell_id: str, records: list[Record], found: Reference, gate: GateConfig, accepted: bool
) -> _Draft:
    accelerator = is_accelerator(records[0])
    alike = curves.best_reference(records[0], [group for _, group in found.sessions])
    metrics = [
        structure.judge(records, found.latest),
        structure.judge_tokens(records, found.latest),
        curves.judge(records, alike, "loss"),
        curves.judge(records, alike, "grad_norm"),
    ]
    changed = "" if found.timed else shorten(hardware_changes(found.latest[0], records[0]))
    if accelerator and not found.timed:
        metrics.append(MetricVerdict(memory.METRIC, "incomparable", f"device memory needs equal hardware: {changed}"))
    else:
        sessions = found.timed if accelerator else found.sessions
        metrics.append(memory.judge(records, [group for _, group in sessions if group[0]["outcome"] == "ok"]))
    metrics.append(checkpoints.judge_bytes(records, found.latest))
    timings: tuple[throughput.Timing, ...] = ()
    if found.timed:
        timed = [group for _, group in found.timed]
        rule = throughput.gate_rule(accelerator, gate.min_effect, gate.resolve, gate.alpha)
        timings = (
            throughput.timing_of(records, timed, rule, accepted),
            *(replace(t, accepted=accepted) for t in checkpoints.timings(records, timed, gate).values()),
        )
        metrics += checkpoints.one_sided(records, timed)
    else:
        metrics.append(
            MetricVerdict("tokens_per_second", "incomparable", f"time needs equal hardware, which changed: {changed}")
        )
    return _Draft(name, cell_id, records, found, [metric for metric in metrics if metric is not None], timings)


def _finish(
    draft: _Draft,
    speed: Sequence[MetricVerdict],
    planned: Mapping[str, int],
    now: datetime | None,
    confirmed: Sequence[MetricVerdict] = (),
) -> CellVerdict:
    metrics = [*(held(metric, draft.records) for metric in speed), *draft.metrics]
    set_aside = ""
    if confirmed and [metric.verdict for metric in metrics] == ["incomparable"]:
        # measured next to each other, time can be compared though nothing else of the two cells can
        set_aside, metrics = f"only speed was compared: {metrics[0].reason}", []
    if confirmed:
        names = {metric.metric for metric in confirmed}
        metrics = [*confirmed, *(metric for metric in metrics if metric.metric not in names)]
    verdict = worst(metric.verdict for metric in metrics)
    assert verdict is not None, "every cell has at least one metric"
    found = draft.reference
    against = None
    if found is not None and found.sessions:
        repeats = sum(len(group) for _, group in found.sessions)
        newest = found.sessions[-1][0].age_days(now)
        against = Against(len(found.sessions), repeats, round(newest, 2), found.name)
    return CellVerdict(
        name=draft.name,
        cell_id=draft.cell_id,
        verdict=verdict,
        reasons=[metric.reason for metric in metrics if metric.verdict == verdict and verdict != "pass"],
        notes=[
            *([set_aside] if set_aside else []),
            *checkpoints.notes(draft.records),
            *notes_on(draft.name, draft.records, found, metrics, verdict, planned.get(draft.name)),
        ],
        metrics=metrics,
        current=summarise(draft.records),
        against=against,
    )


def _missing(
    baseline: Baseline, cells: Sequence[CellVerdict], known: set[str], excluded: Sequence[Mapping[str, Any]]
) -> list[CellVerdict]:
    """Baseline cells that the plan does not have at all: a dropped check must not pass for a green one."""
    compared = {cell.against.name for cell in cells if cell.against is not None}
    reasons = {str(cell["name"]): str(cell["reason"]) for cell in excluded}
    missing = []
    for name, cell_id in baseline.cells.items():
        if name in known or name in compared:
            continue
        why = f"the suite excludes it now ({reasons[name]})" if name in reasons else "the plan does not have it"
        text = f"the baseline has this cell and {why}"
        missing.append(CellVerdict(name, cell_id, "missing", [text], [], [MetricVerdict("outcome", "missing", text)]))
    return missing
