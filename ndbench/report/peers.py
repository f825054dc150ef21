"""Engines side by side: of cells that differ in nothing but their engine, how many times as fast one is as another.

Reads a comparison and a plan; knows nothing of tables, Markdown or the terminal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ndbench.compare.result import CellVerdict, Comparison
from ndbench.report.facts import Plan

OURS = "ndbench"

WORK = ("model", "training", "data", "parallelism", "world_size")
"""Groups of a cell that must be equal: what is computed, and on how many ranks how."""
MEMORY = ("activation_checkpointing", "activation_offload")
"""Keys of ``training`` that are each trainer's own business: how it finds room for the same computation."""


def ratios(comparison: Comparison, plan: Plan | None) -> list[str]:
    """One line for each cell of the bundled engine and each other engine that ran the same cell."""
    described = {cell["name"]: cell for cell in (plan or {}).get("cells", [])}
    groups: dict[str, list[CellVerdict]] = {}
    for cell in comparison.cells:
        measured = cell.current is not None and cell.current.outcome == "ok" and cell.current.tokens_per_second
        if measured and cell.name in described:
            groups.setdefault(work_of(described[cell.name]), []).append(cell)
    return [
        _sentence(ours, theirs, described[theirs.name]["engine"])
        for group in groups.values()
        for ours in group
        if described[ours.name]["engine"] == OURS
        for theirs in group
        if described[theirs.name]["engine"] != OURS
    ]


def ratio(ours: CellVerdict, theirs: CellVerdict) -> tuple[float, tuple[float, float] | None]:
    """Our tokens/s over theirs, and its 95 % interval; null when a side has a single repeat.

    The logs of both speeds are independent means, so their half widths add in quadrature.
    """
    one, other = ours.current, theirs.current
    assert one is not None
    assert other is not None
    assert one.tokens_per_second is not None
    assert other.tokens_per_second is not None
    value = one.tokens_per_second / other.tokens_per_second
    halves = []
    for side in (one, other):
        if not side.tokens_low or not side.tokens_high:
            return value, None
        halves.append(math.log(side.tokens_high / side.tokens_low) / 2)
    spread = math.exp(math.hypot(*halves))
    return value, (value / spread, value * spread)


def work_of(cell: Mapping[str, Any]) -> str:
    """What is computed, and on how many ranks: equal for cells that stand beside each other."""
    groups = {group: cell.get(group) for group in WORK}
    training = {key: value for key, value in (groups["training"] or {}).items() if key not in MEMORY}
    return json.dumps(groups | {"training": training}, sort_keys=True)


def _sentence(ours: CellVerdict, theirs: CellVerdict, engine: str) -> str:
    value, interval = ratio(ours, theirs)
    layout = ours.current.layout if ours.current is not None else ours.name
    said = "one repeat: no interval" if interval is None else f"95 % interval {interval[0]:.3f} to {interval[1]:.3f}"
    return f"{layout}: {OURS} is {value:.3f} times as fast as {engine} ({said}): {ours.name}, {theirs.name}"
