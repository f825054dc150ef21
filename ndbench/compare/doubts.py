"""Repeats that count, but whose speed nobody should take for settled: not steady, or throttled now and then.

Such a speed may still be called regressed; it is never a pass and never an improvement without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ndbench.compare.result import MetricVerdict
from ndbench.counted import counted, were
from ndbench.results.schema import Record

LEAST_TIMED_STEPS = 2
"""A step time of fewer has neither a median nor any sign of whether the steps had settled."""
THROTTLED_SHARE = 0.01
"""Of a launch; above ten times as much the repeat is invalid."""


def doubt(records: Sequence[Record]) -> str | None:
    """What is doubtful about the speed of these repeats, in one sentence; null when nothing is."""
    ok = [record for record in records if record["outcome"] == "ok"]
    unsteady = [record for record in ok if record["steps"]["steady"] is False]
    throttled = [share for record in ok if (share := _value(record, "throttled_share") or 0.0) > THROTTLED_SHARE]
    said = []
    short = [n for r in ok if (n := len(r["steps"]["seconds"]) - r["steps"]["first_timed"]) < LEAST_TIMED_STEPS]
    if short:
        steps = len(ok[0]["steps"]["seconds"])
        said.append(f"not a measurement: {counted(max(short), 'timed step')} of training.steps={steps}")
    if unsteady:
        drifts = [drift for record in unsteady if (drift := _value(record, "step_drift")) is not None]
        size = f" (step time changed by up to {max(drifts, key=abs):+.0%} over the timed steps)" if drifts else ""
        said.append(f"{len(unsteady)} of {counted(len(ok), 'repeat')} {were(len(unsteady))} not steady{size}")
    if throttled:
        of = f"{len(throttled)} of {counted(len(ok), 'repeat')} {were(len(throttled))}"
        said.append(f"{of} throttled, for up to {max(throttled):.1%} of the time")
    return "; ".join(said) or None


def held(metric: MetricVerdict, records: Sequence[Record]) -> MetricVerdict:
    """``metric``, or where its repeats are in doubt ``inconclusive`` in place of ``pass`` and ``improved``."""
    reason = doubt(records) if metric.verdict in ("pass", "improved") else None
    if reason is None:
        return metric
    advice = (
        "more training.steps leave more of them for warm-up"
        if "not steady" in reason or "timed step" in reason
        else "let it cool down"
    )
    return replace(metric, verdict="inconclusive", reason=f"{reason}: {advice}; {metric.reason}")


def _value(record: Record, name: str) -> float | None:
    value = record["metrics"].get(name, {}).get("value")
    return None if value is None else float(value)
