"""The verdict on structure: collectives, FLOPs, graph breaks, recompiles and tokens are exact on any machine.

Any difference is told as a diff that names the operation, the mesh axis and the modules it is issued from; there is no
tolerance, so a stray all-gather is caught on a shared two-core runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ndbench.compare.comparability import shorten
from ndbench.compare.memory import said_bytes
from ndbench.compare.result import MetricVerdict
from ndbench.results.schema import Record

COUNTS = {"graph_breaks": "graph breaks", "recompiles": "recompiles"}


def first_structure(records: Sequence[Record]) -> dict[str, Any] | None:
    """The structure of the one repeat that recorded it."""
    return next((record["structure"] for record in records if record["structure"]), None)


def judge(head: Sequence[Record], baseline: Sequence[Record]) -> MetricVerdict | None:
    """The verdict, or null when neither side recorded its structure."""
    now, before = first_structure(head), first_structure(baseline)
    if now is None and before is None:
        return None
    if now is None or before is None:
        side = "this run" if now is None else "the baseline"
        return MetricVerdict("structure", "incomparable", f"the structure was not recorded in {side}")
    changes = collective_changes(before["collectives"], now["collectives"])
    better: list[str] = []
    if before.get("flops") != now.get("flops"):
        changes.append(f"model FLOPs of a step {_said(before.get('flops'))} → {_said(now.get('flops'))}")
    for key, name in COUNTS.items():
        old, new = before.get(key), now.get(key)
        if old is not None and new is not None and old != new:
            (changes if new > old else better).append(f"{name} {old} → {new}")
    details = {"changes": changes + better}
    if changes:
        return MetricVerdict(
            "structure", "regressed", f"the step's structure changed: {shorten(changes)}", details=details
        )
    if better:
        return MetricVerdict("structure", "improved", shorten(better), details=details)
    total = sum(entry["count"] for entry in now["collectives"])
    return MetricVerdict("structure", "pass", f"the same {total} collectives and FLOPs", details=details)


def collective_changes(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[str]:
    """One phrase for each (operation, axis) whose count, bytes or issuing modules differ."""
    old, new = _grouped(before), _grouped(after)
    changes = []
    for key in sorted({*old, *new}):
        was, now = old.get(key, _Group()), new.get(key, _Group())
        if (was.count, was.bytes, was.where) == (now.count, now.bytes, now.where):
            continue
        changes.append(_phrase(key, was, now))
    return changes


class _Group:
    """Collectives of one operation over one axis."""

    def __init__(self) -> None:
        self.count = 0
        self.bytes = 0.0
        self.where: dict[str, tuple[int, float]] = {}
        """Count and bytes by the place (module names joined) that issues them."""

    def add(self, entry: dict[str, Any]) -> None:
        self.count += entry["count"]
        self.bytes += entry["bytes"]
        place = ", ".join(entry["where"])
        count, size = self.where.get(place, (0, 0.0))
        self.where[place] = (count + entry["count"], size + entry["bytes"])


def _grouped(entries: Sequence[dict[str, Any]]) -> dict[tuple[str, str], _Group]:
    groups: dict[tuple[str, str], _Group] = {}
    for entry in entries:
        groups.setdefault((entry["op"], entry["axis"]), _Group()).add(entry)
    return groups


def _phrase(key: tuple[str, str], was: _Group, now: _Group) -> str:
    op, axis = key
    what = f"{op} over {axis}"
    if now.count > was.count:
        size = f"{now.count - was.count} more {what} ({was.count} → {now.count}, {_sizes(was, now)})"
    elif now.count < was.count:
        size = f"{was.count - now.count} fewer {what} ({was.count} → {now.count}, {_sizes(was, now)})"
    elif now.bytes != was.bytes:
        size = f"{what}: {_sizes(was, now)} in the same {now.count}"
    else:
        size = f"{what}: issued elsewhere"
    return size + _places(was, now)


def _sizes(was: _Group, now: _Group) -> str:
    return f"{said_bytes(was.bytes)} → {said_bytes(now.bytes)} a rank"


def _places(was: _Group, now: _Group) -> str:
    """The modules at which the two differ, those that are new first."""
    names = {name for place in (*was.where, *now.where) for name in place.split(", ") if name}
    appeared = [name for name in sorted(names) if _issues(now, name) and not _issues(was, name)]
    gone = [name for name in sorted(names) if _issues(was, name) and not _issues(now, name)]
    differing = [place for place in sorted({*was.where, *now.where}) if was.where.get(place) != now.where.get(place)]
    if appeared or gone:
        said = [f"new in {shorten(appeared, 3)}"] * bool(appeared) + [f"gone from {shorten(gone, 3)}"] * bool(gone)
        return f", {', '.join(said)}"
    modules = [place for place in differing if place]
    return f", in {shorten(modules, 3)}" if modules else ""


def _issues(group: _Group, name: str) -> bool:
    return any(name in place.split(", ") for place in group.where)


def judge_tokens(head: Sequence[Record], baseline: Sequence[Record]) -> MetricVerdict | None:
    """Tokens of a step must be what they were: a wrong count makes every throughput wrong."""
    now, before = head[0]["tokens"], baseline[0]["tokens"]
    counted = before is not None and before["per_step"] is not None
    if counted and any(record["tokens"] is None or record["tokens"]["per_step"] is None for record in head):
        said = f"the baseline counts {before['per_step']} tokens a step, this run none: it must say them"
        return MetricVerdict("tokens", "inconclusive", said)
    if now is None or not counted or now["per_step"] is None:
        return None  # a script need not say them
    if any(record["tokens"]["per_step"] != before["per_step"] for record in head):
        wrong = next(r["tokens"]["per_step"] for r in head if r["tokens"]["per_step"] != before["per_step"])
        return MetricVerdict(
            "tokens", "regressed", f"a step counts {wrong} tokens, the baseline's {before['per_step']}"
        )
    same_data = head[0]["data_hash"] == baseline[0]["data_hash"] and head[0]["seed"] == baseline[0]["seed"]
    if same_data and now["valid"] is not None and before["valid"] is not None and now["valid"] != before["valid"]:
        pairs = list(zip(before["valid"], now["valid"], strict=False))
        step = next((i for i, (old, new) in enumerate(pairs) if old != new), len(pairs))
        old, new = pairs[step] if step < len(pairs) else (len(before["valid"]), len(now["valid"]))
        what = "valid tokens" if step < len(pairs) else "steps with valid tokens"
        return MetricVerdict("tokens", "regressed", f"step {step} counts {new} {what}, the baseline's {old}")
    return MetricVerdict("tokens", "pass", f"{now['per_step']} tokens a step")


def _said(value: Any) -> str:
    return "unknown" if value is None else repr(value)
