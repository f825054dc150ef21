"""What the page says of every cell, as text and figures: the verdict explained, the row, the commands, the history.

Reads records, a comparison, a plan and perhaps a baseline; knows nothing of HTML.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ndbench.compare.memory import said_bytes
from ndbench.compare.result import CellVerdict, Comparison, MetricVerdict
from ndbench.counted import counted
from ndbench.report import facts, figures
from ndbench.report.cells import engine_of, model_of
from ndbench.report.facts import Plan
from ndbench.report.figures import Measured
from ndbench.report.figures_cells import HERE, Point
from ndbench.report.intervals import few, interval_of
from ndbench.results.fit import Standing
from ndbench.results.schema import Record
from ndbench.results.sessions import Baseline

BAD = ("regressed", "invalid", "missing")
LOG_LINES = 30
METRIC_NAMES = {
    "tokens_per_second": "tokens/s",
    "peak_allocated_bytes": "peak memory",
    "grad_norm": "gradient norm",
    "structure": "collectives and FLOPs",
}


@dataclass(frozen=True)
class Finding:
    """What is wrong with one cell: the four questions a reader has, answered."""

    cell: str
    index: int
    """Position among the page's rows, to jump there."""
    verdict: str
    what: list[str]
    """The metrics, such as ``tokens/s -12.0 %``."""
    surely: str
    since: str
    """Both empty where there is nothing to say."""
    again: str | None


@dataclass(frozen=True)
class Row:
    index: int
    shown: facts.Row
    verdict: str
    engine: str
    """Empty for the bundled one."""
    model: str
    world: int
    per_device: float | None
    tokens: float | None
    change: float | None
    peak: float | None
    loss: float | None
    repeats: str
    sentences: list[str]
    commands: list[tuple[str, str]]
    """(what it does, the command)."""
    log: list[str]
    collectives: list[dict[str, Any]]
    yardstick: str
    fingerprint: int | None
    """Position among the page's distinct fingerprints."""
    measured: Measured
    points: list[Point] = field(default_factory=list)


@dataclass(frozen=True)
class Fingerprint:
    parts: dict[str, dict[str, str]]
    cells: int


def measured_cells(records: Sequence[Record], comparison: Comparison, plan: Plan | None) -> list[Measured]:
    """Every cell of the comparison with its description and repeats, most severe verdict first."""
    by_cell: dict[str, list[Record]] = {}
    for record in records:
        by_cell.setdefault(record["cell"]["name"], []).append(record)
    planned = {cell["name"]: cell for cell in (plan or {}).get("cells", [])}
    found = []
    for cell in facts.by_severity(comparison.cells):
        own = by_cell.get(cell.name, [])
        description: Mapping[str, Any] = own[0]["cell"] if own else planned.get(cell.name, {})
        found.append(Measured(cell.name, cell.verdict, description, own))
    return found


def rows(
    measured: Sequence[Measured],
    comparison: Comparison,
    plan: Plan | None,
    baseline: Baseline | None,
    run_folder: str | Path | None,
    stands: Standing | None = None,
    command: str | None = None,
) -> tuple[list[Row], list[Fingerprint]]:
    verdicts = {cell.name: cell for cell in comparison.cells}
    prints: dict[str, tuple[int, dict[str, dict[str, str]]]] = {}
    counts: dict[int, int] = {}
    made = []
    for index, cell in enumerate(measured):
        verdict = verdicts[cell.name]
        number = None
        if cell.records:
            parts = {part: _flat(cell.records[0]["fingerprint"][part]) for part in ("hardware", "software")}
            parts["informational"] = _flat(cell.records[0]["fingerprint"]["informational"])
            parts["informational"].pop("load", None)
            code = cell.records[0]["code"]
            parts["code"] = {"commit": str(code["commit"] or "unknown"), "uncommitted changes": str(code["dirty"])}
            number = prints.setdefault(repr(parts), (len(prints), parts))[0]
            counts[number] = counts.get(number, 0) + 1
        speed = verdict.metric("tokens_per_second")
        made.append(
            Row(
                index=index,
                shown=facts.row(verdict),
                verdict=verdict.verdict,
                engine=engine_of(cell.name, cell.cell.get("engine")),
                model=model_of(cell.cell),
                world=cell.world,
                per_device=cell.per_device,
                tokens=cell.mean("tokens_per_second"),
                change=None if speed is None else speed.change,
                peak=verdict.current.peak_bytes if verdict.current else None,
                loss=verdict.current.loss_last if verdict.current else None,
                repeats=_repeats(verdict),
                sentences=[facts.printable(text) for text in facts.sentences(verdict)],
                commands=commands(comparison, verdict, plan, run_folder, stands)
                if command is None
                else [("both sides again", command)],
                log=facts.tail(verdict.current.log_tail, LOG_LINES) if verdict.current else [],
                collectives=_collectives(cell),
                yardstick=_yardstick(cell),
                fingerprint=number,
                measured=cell,
                points=history_points(cell, baseline),
            )
        )
    found = [Fingerprint(parts, counts[number]) for number, parts in sorted(prints.values(), key=lambda item: item[0])]
    return made, found


def _collectives(cell: Measured) -> list[dict[str, Any]]:
    """The collectives of a step summed over the modules that issue them, the largest first."""
    summed: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in figures.table_of(cell) or []:
        key = (entry["op"], entry["axis"])
        row = summed.setdefault(key, {"op": entry["op"], "axis": entry["axis"], "count": 0, "bytes": 0})
        row["count"] += entry["count"]
        row["bytes"] += entry["bytes"]
    return sorted(summed.values(), key=lambda entry: -entry["bytes"])


def _flat(part: Mapping[str, Any]) -> dict[str, str]:
    shown: dict[str, str] = {}
    for key, value in part.items():
        if isinstance(value, Mapping):
            shown |= {f"{key}.{name}": facts.printable(str(item)) for name, item in value.items()}
        elif value is not None:
            shown[key] = facts.printable(str(value))
    return shown


def _repeats(cell: CellVerdict) -> str:
    current = cell.current
    if current is None:
        return "0"
    return str(current.repeats) if current.ok_repeats == current.repeats else f"{current.ok_repeats}/{current.repeats}"


def _yardstick(cell: Measured) -> str:
    """How far the machine itself moved between the cell's repeats."""
    seen = [
        record["yardstick"][when]["matmul_seconds"]
        for record in cell.good
        for when in ("before", "after")
        if record["yardstick"] and (record["yardstick"].get(when) or {}).get("matmul_seconds")
    ]
    return f"the machine's own matmul varied by {max(seen) / min(seen) - 1:.0%}" if len(seen) > 1 else ""


def commands(
    comparison: Comparison,
    cell: CellVerdict,
    plan: Plan | None,
    run_folder: str | Path | None,
    stands: Standing | None = None,
) -> list[tuple[str, str]]:
    """Every command that reproduces the row or acts on it."""
    found = []
    again = facts.reproduce_command(plan, cell.name)
    if again is not None:
        found.append(("measure it again", again))
        show = shlex.join(["ndbench", "show", *shlex.split(again)[1:]])
        found.append(("what it is, without measuring", show))
    compare = facts.run_argument(comparison, run_folder)
    found.append(("decide anew, against the baseline as it is now", f"ndbench compare {compare}"))
    accept = facts.deliberate_command(comparison, cell, run_folder, stands)
    if accept is not None:
        found.append(("if it is meant to be so", accept))
    return found


def findings(
    measured: Sequence[Measured],
    comparison: Comparison,
    plan: Plan | None,
    baseline: Baseline | None,
    again: str | None = None,
) -> list[Finding]:
    """The cells that make the gate fail, most severe first. ``measured`` is what :func:`measured_cells` gave; ``again``
    the command that made the comparison, where it is not the plan's."""
    verdicts = {cell.name: cell for cell in comparison.cells}
    found = []
    for index, own in enumerate(measured):
        cell = verdicts[own.name]
        if cell.verdict in BAD:
            bad = [metric for metric in cell.metrics if metric.verdict in BAD]
            sure = [said for metric in bad if (said := _surely(metric, cell))]
            found.append(
                Finding(
                    cell=cell.name,
                    index=index,
                    verdict=facts.word(cell.verdict),
                    what=[facts.clipped(_what(metric)) for metric in bad] or [facts.word(cell.verdict)],
                    surely="; ".join(dict.fromkeys(sure)) or _certain(bad),
                    since=_other_side(comparison) or _since(own, cell, baseline),
                    again=again or facts.reproduce_command(plan, cell.name),
                )
            )
    return found


def _certain(bad: Sequence[MetricVerdict]) -> str:
    """Of what is no estimate; nothing of a cell that was not measured: there is nothing to be sure of."""
    return "" if any(metric.verdict == "invalid" for metric in bad) else "exact: no statistics"


def _other_side(comparison: Comparison) -> str:
    """What two sides have in place of a history."""
    return f"against {comparison.baseline}" if comparison.mode == "ab" and comparison.baseline else ""


def _what(metric: MetricVerdict) -> str:
    name = METRIC_NAMES.get(metric.metric, metric.metric)
    if metric.metric == "outcome":
        return facts.printable(metric.reason)
    if metric.change is None or metric.metric in ("loss", "grad_norm", "structure"):
        reason = facts.printable(metric.reason)
        return reason if reason.startswith(name) else f"{name}: {reason}"
    return f"{name} {metric.change:+.1%}"


def _surely(metric: MetricVerdict, cell: CellVerdict) -> str:
    if metric.metric in ("tokens_per_second", "cpu_seconds_per_step"):
        parts = []
        bounds = interval_of(cell, metric)
        if bounds is not None:
            parts.append(f"95 % interval {bounds[0]:+.1%} to {bounds[1]:+.1%}")
        elif cell.current is not None and few(cell.current):
            parts.append(f"{counted(cell.current.ok_repeats, 'repeat')}: too few for an interval")
        p = metric.details.get("p_slower", metric.details.get("p"))
        if p is not None:
            parts.append(f"p = {p:.1g}" if p >= 1e-4 else "p < 0.0001")
        return ", ".join(parts)
    if metric.metric in ("structure", "tokens"):
        return "exact: counted, not timed"
    if metric.metric == "peak_allocated_bytes":
        tolerance = metric.details.get("tolerance")
        return "outside the tolerance" + (f" of {said_bytes(tolerance)}" if tolerance is not None else "")
    if metric.metric in ("loss", "grad_norm"):
        return "outside the tolerance" if metric.details.get("tier") == "tolerance" else "exact: no statistics"
    return ""


def _since(measured: Measured, cell: CellVerdict, baseline: Baseline | None) -> str:
    slower = any(metric.metric == "tokens_per_second" and metric.verdict in BAD for metric in cell.metrics)
    points = history_points(measured, baseline) if slower else []
    moved = [point for point in points if point.change is not None and point.change > 0]
    if moved:
        return f"the level moved at session {moved[-1].session} ({moved[-1].when})"
    held = baseline.history(cell.against.name if cell.against else cell.name) if baseline is not None else []
    if not held:
        return "" if cell.against is None else f"the baseline, {facts.age(cell.against.newest_days)} old"
    last = held[-1]
    commit = f", commit {_code(last.commit, last.dirty)}" if last.commit else ""
    code = measured.records[0]["code"] if measured.records else {"commit": None, "dirty": None}
    here = f"; here {_code(code['commit'], code['dirty'])}" if code["commit"] else ""
    return f"after session {last.session} ({_day(last.accepted)}{commit}){here}"


def _code(commit: str, dirty: bool | None) -> str:
    return f"{commit[:10]} + uncommitted changes" if dirty else commit[:10]


def history_points(cell: Measured, baseline: Baseline | None) -> list[Point]:
    """Every accepted session of the cell, oldest first, and this run as the last point."""
    from ndbench.compare.history import history_changes

    if baseline is None:
        return []
    moved = {change.session: change.slowdown for change in history_changes(baseline, cell.name)}
    points = []
    for session in baseline.history(cell.name):
        marks = ("new level",) * (cell.name in session.restarted) + ("improved",) * (cell.name in session.improved)
        values = Measured(cell.name, "", {}, session.cells[cell.name]).values("tokens_per_second")
        change = moved.get(session.session)
        points.append(Point(session.session, _day(session.accepted), values, ", ".join(marks), session.reason, change))
    if not points:
        return []
    return [*points, Point(HERE, HERE, cell.values("tokens_per_second"))]


def _day(moment: str) -> str:
    return moment[:10]
