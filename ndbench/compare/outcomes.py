"""Outcomes come before metrics: whether a cell ran to its end, out of memory, or not at all.

One failed repeat decides for its cell (later ones are then not launched: ``skipped``). A cell that ran out of memory
before and after has not changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ndbench.compare import curves
from ndbench.compare.result import MetricVerdict
from ndbench.results.schema import Record

SEVERITY = ("failed", "timeout", "invalid", "oom", "skipped", "ok")


def cell_outcome(records: Sequence[Record]) -> str:
    """The outcome that decides for all repeats of a cell; ``failed`` when there is none."""
    present = {record["outcome"] for record in records}
    return next((outcome for outcome in SEVERITY if outcome in present), "failed")


def judge_outcome(outcome: str, records: Sequence[Record], baseline: Sequence[Record] | None) -> MetricVerdict | None:
    """A verdict when the outcome decides, null when the metrics have to (ok on both sides).

    A repeat that is invalid for a non-finite loss or gradient norm is ``regressed`` when the baseline was finite:
    that is a wrong result, not a failed measurement.
    """
    deciding = [record for record in records if record["outcome"] == outcome]
    launched = [record for record in records if record["outcome"] != "skipped"] or records
    count = f"{len(deciding)} of {len(launched)} launched repeats"
    reason = deciding[0]["reason"] if deciding else None
    because = f": {reason}" if reason else ""
    before = cell_outcome(baseline) if baseline is not None else None
    if outcome in ("failed", "timeout", "invalid", "skipped"):
        word = {"timeout": "timed out"}.get(outcome, outcome)
        if outcome == "invalid" and baseline is not None and before == "ok":
            wrong = _nonfinite(deciding, baseline)
            if wrong is not None:
                return wrong
        return MetricVerdict("outcome", "invalid", f"{count} {word}{because}")
    if outcome == "oom":
        if before is None:
            return None
        if before == "oom":
            return MetricVerdict("outcome", "pass", f"out of memory, as in the baseline ({count})")
        return MetricVerdict("outcome", "regressed", f"{count} ran out of memory, the baseline fitted{because}")
    if before == "oom":
        return MetricVerdict("outcome", "improved", "it fits in memory now, the baseline did not")
    return None


def _nonfinite(records: Sequence[Record], baseline: Sequence[Record]) -> MetricVerdict | None:
    """The verdict on repeats that a NaN or infinity made invalid, when the baseline has the same data."""
    affected = [record for record in records if record["steps"] and record["steps"]["nonfinite"]]
    if not affected or affected[0]["data_hash"] != baseline[0]["data_hash"]:
        return None
    for series in ("loss", "grad_norm"):
        decided = curves.judge(affected, baseline, series)
        if decided is not None and decided.verdict == "regressed":
            return decided
    return None
