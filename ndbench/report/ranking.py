"""Which layout: for every workload its cells ranked by speed, the fastest with how sure that is, the Pareto front.

Reads a comparison and a plan; knows nothing of tables, Markdown or the terminal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ndbench.compare.memory import said_bytes
from ndbench.compare.result import CellVerdict, Comparison
from ndbench.counted import counted
from ndbench.report import facts
from ndbench.report.cells import SCRIPT
from ndbench.report.facts import Plan
from ndbench.report.intervals import few


def layouts(comparison: Comparison, plan: Plan | None) -> list[str]:
    """The fastest layout and the Pareto front of speed against memory, for every workload that has several cells."""
    groups = [group for group in workloads(comparison, plan) if len(group.ranked) > 1]
    lines: list[str] = []
    for group in groups:
        prefix = f"{group.title}: " if len(groups) > 1 else ""
        lines += [prefix + line for line in sentences(group.ranked)]
    return lines


@dataclass(frozen=True)
class Workload:
    """Cells whose tokens/s answer "which layout?"."""

    title: str
    ranked: list[CellVerdict]
    """Those with a figure, fastest first."""


def workloads(comparison: Comparison, plan: Plan | None) -> list[Workload]:
    groups: dict[str, list[CellVerdict]] = {}
    described = {cell["name"]: cell for cell in (plan or {}).get("cells", [])}
    for cell in comparison.cells:
        if cell.current is not None and cell.current.outcome == "ok" and cell.current.tokens_per_second:
            groups.setdefault(_workload(described.get(cell.name)), []).append(cell)
    titles = _titles(list(groups))
    return [Workload(titles[key], sorted(group, key=lambda c: -speed_of(c))) for key, group in groups.items()]


def _workload(cell: Mapping[str, Any] | None) -> str:
    """What must be equal for two cells' tokens/s to answer "which layout?"."""
    if cell is None:
        return ""
    # How a rank cuts its share into micro-batches follows from the layout; the work of a step is the same.
    training = {key: value for key, value in (cell.get("training") or {}).items() if key != "micro_batch_size"}
    return json.dumps([cell.get("model"), training, cell.get("data"), cell.get("engine_config")], sort_keys=True)


def _titles(workloads: Sequence[str]) -> dict[str, str]:
    """Of each workload the model and the tokens, and as much more as tells them all apart."""
    facts_of = {workload: _facts(workload) for workload in workloads}
    keys = sorted(
        {key for found in facts_of.values() for key in found}, key=lambda key: (_NAMED_FIRST.get(key, 9), key)
    )
    parts = {
        workload: (found.get("model.name", "?"), found.get("training.sequence_length", "?"))
        for workload, found in facts_of.items()
    }
    titles = {
        # the model and data of a script are not in the configuration
        workload: f"{model}, {tokens} tokens" if facts_of[workload].get("engine.command", "null") == "null" else SCRIPT
        for workload, (model, tokens) in parts.items()
    }
    apart = len(set(titles.values()))
    for key in keys:
        if apart == len(workloads):
            break
        more = {
            workload: f"{title}, {_said(key, facts_of[workload].get(key, 'null'))}"
            for workload, title in titles.items()
        }
        if len(set(more.values())) > apart:
            titles, apart = more, len(set(more.values()))
    return titles


_NAMED_FIRST = {"engine.name": 0, "training.precision": 1, "training.global_batch_size": 2}
"""What is asked first for a difference, and in which order."""


def _facts(workload: str) -> dict[str, str]:
    """Dotted key -> value of everything that a workload consists of."""
    sections = zip(("model", "training", "data", "engine"), json.loads(workload) if workload else [], strict=False)
    found: dict[str, str] = {}
    left: list[tuple[str, Any]] = list(sections)
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{key}.{name}", inner) for name, inner in value.items()]
        else:
            found[key] = value if isinstance(value, str) else json.dumps(value)
    return found


def _said(key: str, value: str) -> str:
    return value if key in ("engine.name", "training.precision") else f"{key}={value}"


def sentences(ranked: Sequence[CellVerdict]) -> list[str]:
    """The fastest of several cells with how sure that is, then the Pareto front."""
    best = ranked[0]
    assert best.current is not None, "only measured cells are ranked"
    lines = [f"fastest: {best.name}, {facts.figure(speed_of(best))} tokens/s{_tie(ranked)}"]
    front = pareto_front(ranked)
    if len(front) > 1:
        said = ", ".join(f"{cell.name} ({facts.figure(speed_of(cell))} tokens/s, {peak_of(cell)})" for cell in front)
        lines.append(f"Pareto front of speed against memory: {said}")
    elif front:
        lines.append(f"Pareto front of speed against memory: {front[0].name} alone, the fastest and the smallest")
    return lines


def _tie(ranked: Sequence[CellVerdict]) -> str:
    """What keeps the fastest from being called so without doubt."""
    best = ranked[0].current
    counts = [cell.current.ok_repeats for cell in ranked if cell.current is not None and few(cell.current)]
    if best is None or counts:
        return f"; {counted(min(counts, default=0), 'repeat')}: too few to be sure"
    low = best.tokens_low or best.tokens_per_second or 0.0
    close = [c.name for c in ranked[1:] if c.current is not None and (c.current.tokens_high or speed_of(c)) >= low]
    return f"; not told apart from it by these repeats: {facts.listed(close)}" if close else ""


def speed_of(cell: CellVerdict) -> float:
    return (cell.current.tokens_per_second or 0.0) if cell.current is not None else 0.0


def peak_of(cell: CellVerdict) -> str:
    """Peak memory in words, empty where it is not known."""
    return said_bytes(cell.current.peak_bytes) if cell.current is not None and cell.current.peak_bytes else ""


def pareto_front(ranked: Sequence[CellVerdict]) -> list[CellVerdict]:
    """Cells that no other beats in both, fastest first; those without a memory figure stay out."""
    front: list[CellVerdict] = []
    least: int | None = None
    for cell in ranked:
        peak = cell.current.peak_bytes if cell.current is not None else None
        if peak is not None and (least is None or peak < least):
            front.append(cell)
            least = peak
    return front
