"""Runs and baselines made up for the tests of the decision."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from ndbench.compare.result import CellVerdict, Comparison
from ndbench.compare.verdict import compare
from ndbench.config import GateConfig
from ndbench.results.schema import Record
from ndbench.results.sessions import Baseline, Session
from tests.records import plan_of

NOW = datetime(2026, 11, 30, 6, 0, tzinfo=UTC)


def session_of(records: Sequence[Record], day: int = 0, **fields: Any) -> Session:
    cells: dict[str, list[Record]] = {}
    for record in records:
        cells.setdefault(record["cell"]["name"], []).append(record)
    return Session(
        session=f"s{day:03d}",
        accepted=(NOW - timedelta(days=20 - day)).isoformat(),
        by="me",
        reason=f"day {day}",
        commit="a" * 40,
        dirty=False,
        cells=cells,
        **fields,
    )


def baseline_of(*sessions: Sequence[Record]) -> Baseline:
    return Baseline("results/baselines/cpu_x8/hsdp_tp", [session_of(r, day) for day, r in enumerate(sessions)])


def decide(head: Sequence[Record], baseline: Baseline | None, **fields: Any) -> Comparison:
    gate = fields.pop("gate", GateConfig())
    plan = fields.pop("plan", plan_of(list(head)))
    return compare(head, baseline, plan, gate, suite="hsdp_tp", run="r", now=NOW, **fields)


def only(comparison: Comparison) -> CellVerdict:
    assert len(comparison.cells) == 1
    return comparison.cells[0]
