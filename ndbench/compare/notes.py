"""What a reader of a verdict should know beside it: changed software and code, drift, a machine that moved.

Notes annotate. None of them changes a verdict; a yardstick that moved never turns a regression green.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

from ndbench.compare.comparability import Reference, code_change, is_accelerator, shorten, software_changes
from ndbench.compare.doubts import doubt
from ndbench.compare.result import MetricVerdict
from ndbench.compare.throughput import gate_rule, log_step_time
from ndbench.counted import counted, were
from ndbench.results.fit import handicap_of
from ndbench.results.schema import Record
from ndbench.results.sessions import Baseline

STALE_DAYS = 30.0


def notes_on(
    name: str,
    records: Sequence[Record],
    found: Reference | None,
    metrics: Sequence[MetricVerdict],
    verdict: str,
    planned: int | None,
) -> list[str]:
    """The notes of one cell, each a full sentence."""
    notes: list[str] = []
    if planned is not None and 0 < len(records) < planned:
        notes.append(f"{len(records)} of {counted(planned, 'planned repeat')} {were(len(records))} measured")
    if (doubtful := doubt(records)) is not None:
        notes.append(doubtful)
    if found is None or not found.sessions or not records:
        return notes
    if found.name != name:
        notes.append(f"renamed: the baseline has this configuration as {found.name}")
    base = found.latest[0]
    changes = software_changes(base, records[0])
    if changes:
        notes.append(f"changed since the baseline: {shorten(changes)}")
    code = code_change(base, records[0])
    if code is not None and verdict in ("regressed", "improved", "inconclusive"):
        notes.append(code)
    partial = [m for m in metrics if m.verdict == "incomparable"] if verdict != "incomparable" else []
    notes += [f"not compared: {metric.reason}" for metric in partial]
    drift = drift_note(records, found) if verdict != "regressed" else None
    for note in (yardstick_note(records, found, metrics), drift):
        if note is not None:
            notes.append(note)
    return notes


def planted_notes(records: Sequence[Record], baseline: Baseline | None) -> list[str]:
    """That a slowdown was planted, on either side: the speed is then the plant's as much as the code's."""
    sides = [("", records)]
    if baseline is not None and baseline.sessions:
        now = {record["cell"]["name"] for record in records}
        latest = baseline.sessions[-1].cells
        sides.append((f" of {baseline.source}", [r for name in latest if name in now for r in latest[name]]))
    notes = []
    for whose, side in sides:
        found: dict[float, list[str]] = {}
        for record in side:
            if (handicap := handicap_of(record["cell"])) and record["cell"]["name"] not in found.get(handicap, []):
                found.setdefault(handicap, []).append(record["cell"]["name"])
        notes += [
            f"measure.handicap={handicap:g} was planted in {shorten(names, 6)}{whose}: each step burns {handicap:.0%} "
            "more of its own time, and no such run becomes a reference"
            for handicap, names in found.items()
        ]
    return notes


def yardstick_shift(records: Sequence[Record], baseline: Sequence[Record]) -> float | None:
    """How much slower the fixed work beside the cell became (log): the median over its parts; null if not measured."""
    now, before = _yardstick(records), _yardstick(baseline)
    shifts = [now[part] - before[part] for part in now if part in before]
    return median(shifts) if shifts else None


def _yardstick(records: Sequence[Record]) -> dict[str, float]:
    """Mean log seconds of every part."""
    found: dict[str, list[float]] = {}
    for record in records:
        for side in (record["yardstick"] or {}).values():
            for part, seconds in (side or {}).items():
                if isinstance(seconds, int | float) and seconds > 0:
                    found.setdefault(part, []).append(math.log(seconds))
    return {part: fmean(values) for part, values in found.items()}


def yardstick_note(records: Sequence[Record], found: Reference, metrics: Sequence[MetricVerdict]) -> str | None:
    """Said when the cell is slower or faster by enough to matter and the yardstick moved at least half as much."""
    speed = next((metric for metric in metrics if metric.metric == "tokens_per_second"), None)
    if speed is None or speed.verdict not in ("regressed", "improved", "inconclusive") or not found.timed:
        return None
    effect = float(speed.details["log_effect"])
    shift = yardstick_shift(records, [record for _, group in found.timed for record in group])
    rule = gate_rule(is_accelerator(records[0]), None, None, 0.01)
    if shift is None or abs(math.expm1(effect)) < rule.min_effect or shift * effect <= 0:
        return None
    if abs(shift) < abs(effect) / 2:
        return None
    return (
        f"the yardstick moved too ({math.expm1(shift):+.0%} time for fixed work, the cell {math.expm1(effect):+.0%}): "
        "the machine may have changed, not only the code"
    )


def drift_note(records: Sequence[Record], found: Reference) -> str | None:
    """A slope of small accepted steps, against the oldest accepted session of the same hardware, any software."""
    if found.oldest is None or len(found.timed) < 2 or any(r["outcome"] != "ok" for r in records):
        return None
    session, group = found.oldest
    old = [record for record in group if record["outcome"] == "ok"]
    if not old:
        return None
    drift = math.expm1(fmean(map(log_step_time, records)) - fmean(map(log_step_time, old)))
    if drift <= gate_rule(is_accelerator(records[0]), None, None, 0.01).resolve:
        return None
    return (
        f"drift: step time {drift:+.1%} since the oldest accepted session ({session.session}, {session.accepted[:10]})"
    )
