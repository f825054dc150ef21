"""The verdict on peak memory: bytes, one-sided, with a tolerance that does not depend on luck.

On a GPU the allocator's peak (worst rank), which needs equal hardware; on CPU the tracked peak of the instrumented
step, which needs only the same cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from ndbench.compare.result import MetricVerdict
from ndbench.results.schema import Record

ABSOLUTE_TOLERANCE = 2**20
"""Bytes; an allocator rounds to 2 MiB segments but counts what was asked for, so A/A is mostly exact."""
RELATIVE_TOLERANCE = 0.001
METRIC = "peak_allocated_bytes"


def peak_bytes(record: Record) -> float | None:
    """The peak of one repeat, worst rank; null when this repeat did not measure it."""
    value = record["metrics"].get(METRIC, {}).get("value")
    if value is None and record["memory"] and record["memory"]["allocated"]:
        ranks = [rank for rank in record["memory"]["allocated"] if rank is not None]
        value = max(ranks, default=None)
    return None if value is None else float(value)


def peaks(records: Sequence[Record]) -> list[float]:
    return [peak for record in records if (peak := peak_bytes(record)) is not None]


def judge(head: Sequence[Record], sessions: Sequence[Sequence[Record]]) -> MetricVerdict | None:
    """The verdict against the latest of the baseline's sessions, or null when neither side measured memory.

    The head's worst repeat may exceed the session's worst by max(1 MiB, 0.1 %), or by what memory is seen to vary
    without cause: between repeats of a session, or three times the usual step from one session to the next. Both are
    zero in an ordinary A/A.
    """
    measured = [found for session in sessions if (found := peaks(session))]
    now = peaks(head)
    if not now and not measured:
        return None
    if not now or not measured:
        side = "this run" if not now else "the baseline"
        return MetricVerdict(METRIC, "incomparable", f"peak memory was not measured in {side}")
    baseline = sessions[-1]
    highest, lowest = max(measured[-1]), min(measured[-1])
    tolerance = max(ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE * highest, _spread(measured))
    value = max(now)
    change = value / highest - 1 if highest else None
    size = f"peak memory {said_bytes(value)} against {said_bytes(highest)} ({said_bytes(value - highest, sign=True)})"
    details = {"value": value, "baseline": highest, "tolerance": tolerance, "ranks": _rank_changes(head, baseline)}
    if value > highest + tolerance:
        verdict, reason = "regressed", f"{size}, tolerance {said_bytes(tolerance)}{_worst_rank(head, baseline)}"
    elif value < lowest - tolerance:
        verdict, reason = "improved", size
    else:
        verdict, reason = "pass", size
    return MetricVerdict(METRIC, verdict, reason, change=change, details=details)


def _spread(measured: Sequence[Sequence[float]]) -> float:
    """Bytes by which memory varies with nothing changed. The median step ignores a rare change of level."""
    within = max(max(values) - min(values) for values in measured)
    steps = [abs(max(after) - max(before)) for before, after in pairwise(measured)]
    return max(within, 3 * median(steps)) if len(steps) >= 3 else within


def _vector(records: Sequence[Record]) -> list[float] | None:
    """The worst repeat's bytes by rank."""
    found = [record["memory"]["allocated"] for record in records if record["memory"] and record["memory"]["allocated"]]
    vectors = [vector for vector in found if all(rank is not None for rank in vector)]
    return max(vectors, key=max, default=None)


def _rank_changes(head: Sequence[Record], baseline: Sequence[Record]) -> list[float] | None:
    now, before = _vector(head), _vector(baseline)
    if now is None or before is None or len(now) != len(before):
        return None
    return [a - b for a, b in zip(now, before, strict=True)]


def _worst_rank(head: Sequence[Record], baseline: Sequence[Record]) -> str:
    changes = _rank_changes(head, baseline)
    if not changes:
        return ""
    rank = max(range(len(changes)), key=lambda index: changes[index])
    return f"; most on rank {rank} ({said_bytes(changes[rank], sign=True)})"


def said_bytes(value: float, sign: bool = False) -> str:
    """``1.25 GiB``; with ``sign`` also a plus."""
    plus = "+" if sign and value >= 0 else ""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= size:
            return f"{plus}{value / size:.2f} {unit}"
    return f"{plus}{value:.0f} B"
