"""Engines side by side: the ratio of equal cells with its interval, and of nothing else."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

from ndbench.compare.result import Comparison
from ndbench.compare.statistics import mean_interval
from ndbench.compare.verdict import compare
from ndbench.config import GateConfig
from ndbench.report import console, markdown, peers
from ndbench.results.schema import Record
from tests.records import plan_of, repeats


def by(engine: str, seconds: list[float], name: str = "fsdp8", work: str = "fsdp8") -> list[Record]:
    """Repeats of one step time each, of a cell of that engine; cells of equal ``work`` differ in nothing else."""
    found = []
    for repeat, second in enumerate(seconds):
        (record,) = repeats(f"{name}-{engine}", 1, seconds=second)
        model = record["cell"]["model"] | {"kwargs": {"layout": work}}
        described = record["cell"]["engine_config"] | {"name": engine}
        cell = record["cell"] | {"engine": engine, "engine_config": described, "model": model}
        found.append(record | {"repeat": repeat, "cell": cell, "cell_id": f"{name}-{engine}"})
    return found


def told(*groups: list[Record]) -> tuple[Comparison, dict[str, Any]]:
    records = [record for group in groups for record in group]
    plan = {"cells": plan_of(records)}
    return compare(records, None, plan["cells"], GateConfig()), plan


OURS, THEIRS = [0.100, 0.102, 0.101], [0.110, 0.112, 0.113]


def test_the_ratio_is_of_the_speeds_and_its_interval_of_both_spreads() -> None:
    comparison, plan = told(by("ndbench", OURS), by("accelerate", THEIRS))
    (line,) = peers.ratios(comparison, plan)
    logs = [[math.log(second) for second in side] for side in (OURS, THEIRS)]
    value = math.exp(sum(logs[1]) / 3 - sum(logs[0]) / 3)
    halves = [(high - low) / 2 for low, high in (mean_interval(side) or (0.0, 0.0) for side in logs)]
    spread = math.exp(math.hypot(*halves))
    assert f"ndbench is {value:.3f} times as fast as accelerate" in line
    assert f"95 % interval {value / spread:.3f} to {value * spread:.3f}" in line


def test_one_repeat_has_no_interval() -> None:
    (line,) = peers.ratios(*told(by("ndbench", OURS[:1]), by("torchtitan", THEIRS)))
    assert "one repeat: no interval" in line


def test_cells_that_differ_in_more_than_their_engine_are_not_set_against_each_other() -> None:
    assert peers.ratios(*told(by("ndbench", OURS), by("accelerate", THEIRS, work="another"))) == []
    assert peers.ratios(*told(by("ndbench", OURS), by("ndbench", THEIRS, name="tp8"))) == []


@pytest.mark.parametrize("report", ["console", "markdown"])
def test_the_reports_say_it(report: str) -> None:
    comparison, plan = told(by("ndbench", OURS), by("accelerate", THEIRS))
    stream = io.StringIO()
    if report == "console":
        console.print_comparison(comparison, console=Console(file=stream, width=200), plan=plan)
    else:
        stream.write(markdown.render(comparison, plan=plan))
    assert "times as fast as accelerate" in stream.getvalue()
