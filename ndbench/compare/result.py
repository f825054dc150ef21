"""What a comparison says: verdicts per metric, per cell and for the run, as plain data with a JSON form.

Knows the words and the order of their severity; it computes nothing from records.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ndbench.compare.form import check_types

VERDICTS = (
    "regressed",
    "invalid",
    "missing",
    "inconclusive",
    "improved",
    "pass",
    "incomparable",
    "new",
    "no_baseline",
)
"""From the most to the least severe: the worst metric gives a cell its verdict."""

VERDICT_SCHEMA = 1

UNFINISHED = "unfinished"
"""``Comparison.mode`` of a run that has no verdict: it was ended in the middle, or is still being measured."""

ACCEPTED = "accepted"
"""``Comparison.mode`` of a run that was compared with nothing, and has been made the reference since."""


def worst(verdicts: Iterable[str]) -> str | None:
    """The most severe of these verdicts, null for none of them."""
    present = set(verdicts)
    return next((verdict for verdict in VERDICTS if verdict in present), None)


@dataclass(frozen=True)
class MetricVerdict:
    """One metric of one cell."""

    metric: str
    """``tokens_per_second``, ``peak_allocated_bytes``, ``structure``, ``loss``, ``grad_norm``, ``tokens`` or
    ``outcome``."""
    verdict: str
    reason: str
    """One sentence with the numbers."""
    change: float | None = None
    """Relative change of the metric's value (-0.25: a quarter less)."""
    low: float | None = None
    high: float | None = None
    """95 % interval of ``change``."""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Current:
    """What the run measured in one cell, whatever the baseline."""

    outcome: str
    """``ok`` when every repeat was; else the outcome that decides."""
    repeats: int
    ok_repeats: int
    layout: str | None = None
    world_size: int | None = None
    tokens_per_second: float | None = None
    """Geometric mean over repeats."""
    tokens_low: float | None = None
    tokens_high: float | None = None
    """95 % interval over repeats."""
    step_seconds: float | None = None
    peak_bytes: int | None = None
    """Peak of allocated device memory of the worst rank (on CPU: of tracked tensors)."""
    loss_last: float | None = None
    mfu: float | None = None
    reason: str | None = None
    log_tail: str | None = None
    engine: str | None = None
    """``engine.name``; null in verdicts that were written before it was kept."""


@dataclass(frozen=True)
class Against:
    """The part of the baseline that a cell was compared with."""

    sessions: int
    repeats: int
    newest_days: float
    name: str
    """The cell's name there; another one when the cell was renamed."""


@dataclass(frozen=True)
class CellVerdict:
    name: str
    cell_id: str | None
    verdict: str
    reasons: list[str]
    """Full sentences for whoever has to act: why the cell is not a plain pass."""
    notes: list[str] = field(default_factory=list)
    """What else to know: changed software, drift, a yardstick that moved."""
    metrics: list[MetricVerdict] = field(default_factory=list)
    current: Current | None = None
    against: Against | None = None

    def metric(self, name: str) -> MetricVerdict | None:
        return next((metric for metric in self.metrics if metric.metric == name), None)


@dataclass(frozen=True)
class Comparison:
    suite: str
    run: str
    mode: str
    """``gate.mode``; ``ab`` for two sides (measured next to each other, or two runs), of which neither is a run to
    accept; ``unfinished`` or ``accepted``."""
    baseline: str | None
    """Where the baseline came from; null when there was none or it was not asked for."""
    sessions: int
    newest_days: float | None
    cells: list[CellVerdict]
    verdict: str
    exit_code: int
    exit_reason: str
    """One sentence: why the exit code is what it is."""
    notes: list[str] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Cells by verdict, most severe first."""
        counted = Counter(cell.verdict for cell in self.cells)
        return {verdict: counted[verdict] for verdict in VERDICTS if counted[verdict]}

    def cell(self, name: str) -> CellVerdict:
        return next(cell for cell in self.cells if cell.name == name)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``verdict.json``."""
        return {"schema_version": VERDICT_SCHEMA, "counts": self.counts, **dataclasses.asdict(self)}


def from_json(value: Any) -> Comparison:
    """Inverse of :meth:`Comparison.to_json`; raises ``ValueError`` for no verdict, or one of a newer ndbench."""
    if not isinstance(value, dict):
        raise ValueError("it is not a verdict")
    if value.get("schema_version") != VERDICT_SCHEMA:
        raise ValueError(f"verdict has schema {value.get('schema_version')}, this ndbench reads {VERDICT_SCHEMA}")
    try:
        found = _from_json(value)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is not a whole verdict: {type(error).__name__} {error}") from error
    check_types(found, "")
    for cell in found.cells:
        for verdict in (cell.verdict, *(metric.verdict for metric in cell.metrics)):
            if verdict not in VERDICTS:
                raise ValueError(f"'{verdict}' of {cell.name} is not one of {', '.join(VERDICTS)}")
    return found


def _from_json(value: dict[str, Any]) -> Comparison:
    rest = {key: item for key, item in value.items() if key not in ("schema_version", "counts", "cells")}
    cells = [
        CellVerdict(
            **{key: item for key, item in cell.items() if key not in ("metrics", "current", "against")},
            metrics=[MetricVerdict(**metric) for metric in cell["metrics"]],
            current=Current(**cell["current"]) if cell["current"] else None,
            against=Against(**cell["against"]) if cell["against"] else None,
        )
        for cell in value["cells"]
    ]
    return Comparison(cells=cells, **rest)
