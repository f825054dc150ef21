"""The verdicts on checkpoints: bytes exactly, seconds as step times are judged.

A disk is noisier than a step, whatever device the cell ran on, so sessions are expected to differ by more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from ndbench.compare.memory import said_bytes
from ndbench.compare.result import MetricVerdict
from ndbench.compare.throughput import GateRule, Timing
from ndbench.config import GateConfig
from ndbench.results.schema import Record

BYTES = "checkpoint_bytes"
SESSION_SD = 0.2
"""Log spread to expect between sessions. Repeats of the same code on a busy two-core machine were seen to differ by 0.4
to 0.6; then, with three sessions and five cells, 4 in 1000 suites are flagged of which nothing changed, and nearly all
in which a quiet disk became four times slower."""
SECONDS = {
    "checkpoint_save_seconds": "saving",
    "checkpoint_stall_seconds": "the stall of an async save",
    "checkpoint_load_seconds": "loading",
    "checkpoint_reshard_seconds": "loading into another layout",
}
"""Metric -> what a sentence calls it."""

NAMES = {
    "checkpoint_save_seconds": "save",
    "checkpoint_stall_seconds": "async stall",
    "checkpoint_load_seconds": "load",
    "checkpoint_reshard_seconds": "reshard",
    BYTES: "size",
}


def judge_bytes(head: Sequence[Record], baseline: Sequence[Record]) -> MetricVerdict | None:
    """The verdict, or null when neither side measured checkpoints: the same state takes the same bytes."""
    now, before = _values(head, BYTES), _values(baseline, BYTES)
    if not now and not before:
        return None
    if not now or not before:
        return MetricVerdict(BYTES, "incomparable", _one_sided(bool(now)))
    value, was = max(now), max(before)
    change = value / was - 1
    details = {"value": value, "baseline": was}
    size = f"a checkpoint takes {said_bytes(value)} against {said_bytes(was)} ({said_bytes(value - was, sign=True)})"
    verdict = "regressed" if value > was else "improved" if value < was else "pass"
    return MetricVerdict(BYTES, verdict, size, change=change, details=details)


def timings(head: Sequence[Record], sessions: Sequence[Sequence[Record]], gate: GateConfig) -> dict[str, Timing]:
    """The log seconds of each operation that every repeat of the head and some session measured."""
    least = 0.05 if gate.min_effect is None else gate.min_effect
    rule = GateRule(least, 0.30 if gate.resolve is None else gate.resolve, SESSION_SD, gate.alpha)
    found = {}
    for metric, quantity in SECONDS.items():
        now = _logs(head, metric)
        before = [logs for session in sessions if (logs := _logs(session, metric))]
        if len(now) == len(head) and before:
            found[metric] = Timing(now, before, rule, metric, quantity)
    return found


def one_sided(head: Sequence[Record], sessions: Sequence[Sequence[Record]]) -> list[MetricVerdict]:
    """Seconds that only one side has."""
    verdicts = []
    for metric in SECONDS:
        now = bool(_logs(head, metric))
        before = any(_logs(session, metric) for session in sessions)
        if now != before:
            verdicts.append(MetricVerdict(metric, "incomparable", _one_sided(now)))
    return verdicts


def notes(records: Sequence[Record]) -> list[str]:
    """What a run measured, for people, whether or not there is a baseline: medians over repeats."""
    ok = [record for record in records if record["outcome"] == "ok"]
    said = []
    for metric, words in NAMES.items():
        if values := _values(ok, metric):
            value = median(values)
            said.append(f"{words} {said_bytes(value) if metric == BYTES else f'{value:.3g} s'}")
    return [f"checkpoints: {', '.join(said)}"] if said else []


def _one_sided(now: bool) -> str:
    side, other = ("the baseline", "this run") if now else ("this run", "the baseline")
    return f"checkpoints were not measured in {side}, as in {other} (measure.checkpoint)"


def _values(records: Sequence[Record], metric: str) -> list[float]:
    values = [record["metrics"].get(metric, {}).get("value") for record in records]
    return [float(value) for value in values if value is not None]


def _logs(records: Sequence[Record], metric: str) -> list[float]:
    return [math.log(value) for value in _values(records, metric) if value > 0]
