"""Repeats that count, but whose speed nobody should take for settled: not steady, or throttled now and then.

Such a speed may still be called regressed; it is never a pass and never an improvement without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ndbench.compare.result import MetricVerdict
from ndbench.results.schema import Record

THROTTLED_SHARE = 0.01
"""Of a launch; above ten times as much the repeat is invalid."""


def doubt(records: Sequence[Record]) -> str | None:
    """What is doubtful about the speed of these repeats, in one sentence; null when nothing is."""
    ok = [record for record in records if record["outcome"] == "ok"]
    unsteady = [record for record in ok if record["steps"]["steady"] is False]
    throttled = [share for record in ok if (share := _value(record, "throttled_share") or 0.0) > THROTTLED_SHARE]
    said = []
    if unsteady:
        drifts = [drift for record in unsteady if (drift := _value(record, "step_drift")) is not None]
        size = f" (step time changed by up to {max(drifts, key=abs):+.0%} over the timed steps)" if drifts else ""
        said.append(f"{len(unsteady)} of {len(ok)} repeats were not steady{size}")
    if throttled:
        said.append(f"{len(throttled)} of {len(ok)} repeats were throttled, for up to {max(throttled):.1%} of the time")
    return "; ".join(said) or None


def held(metric: MetricVerdict, records: Sequence[Record]) -> MetricVerdict:
    """``metric``, or where its repeats are in doubt ``inconclusive`` in place of ``pass`` and ``improved``."""
    reason = doubt(records) if metric.verdict in ("pass", "improved") else None
    if reason is None:
        return metric
    advice = "more training.steps leave more of them for warm-up" if "not steady" in reason else "let it cool down"
    return replace(metric, verdict="inconclusive", reason=f"{reason}: {advice}; {metric.reason}")


def _value(record: Record, name: str) -> float | None:
    value = record["metrics"].get(name, {}).get("value")
    return None if value is None else float(value)
