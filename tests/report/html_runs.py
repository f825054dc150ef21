"""Runs made up for the page: one whose gate fails, and a large one."""

from __future__ import annotations

import random
from typing import Any

from ndbench.compare.result import Comparison
from ndbench.report import html
from ndbench.results.schema import Record
from ndbench.results.sessions import Baseline
from tests.compare.helpers import baseline_of, decide
from tests.records import MIB, a_cell, a_record, noisy, not_ok, plan_of, repeats

HOSTILE = "<script>window.hacked=1</script>"
LAYOUTS = ("ddp8", "fsdp8", "hsdp2x4", "fsdp4_tp2", "tp8")


def one_workload(records: list[Record]) -> list[Record]:
    """As the cells of one suite are: one model, several layouts."""
    for record in records:
        record["cell"] = record["cell"] | {"model": record["cell"]["model"] | {"kwargs": {}}}
    return records


def failing_head() -> list[Record]:
    """A slower cell, a loss that breaks off, a repeat alone, a death with a hostile log, a hostile name."""
    rng = random.Random(1)
    broken: list[float | None] = [5.5 - 0.1 * step for step in range(12)]
    broken[4] = None
    head = noisy("fsdp8", rng, within=0.02, slower=1.4, peak=100 * MIB) + noisy("ddp8", rng, within=0.02, base=0.08)
    head += repeats("hsdp2x4", loss=broken) + repeats("fsdp4_tp2", count=1, seconds=0.12, peak=60 * MIB)
    head += [not_ok("failed", "tp8", f"rank 3 said {HOSTILE}", log_tail=f"one\n{HOSTILE}\n\x1b[31mred\x1b[0m\n")]
    head += repeats(HOSTILE, seconds=0.11, peak=90 * MIB)
    return one_workload(head)


def stored_baseline() -> Baseline:
    sessions = []
    for day in range(6):
        rng = random.Random(day)
        stored = noisy("fsdp8", rng, within=0.02) + noisy("ddp8", rng, within=0.02, base=0.08) + repeats("hsdp2x4")
        sessions.append(one_workload(stored + repeats("tp8") + repeats("fsdp4_tp2") + repeats("gone")))
    return baseline_of(*sessions)


def plan_for(head: list[Record]) -> dict[str, Any]:
    return {
        "suite": "hsdp_tp",
        "overrides": ["suite=hsdp_tp", "training.steps=12"],
        "cells": plan_of(head),
        "excluded": [{"name": "tp16", "reason": f"tp > kv heads {HOSTILE}"}],
        "skipped": [],
        "unselected": [],
    }


def failing() -> tuple[Comparison, str]:
    head, baseline = failing_head(), stored_baseline()
    comparison = decide(head, baseline)
    page = html.render(comparison, head, plan=plan_for(head), baseline=baseline, run_folder="results/runs/r")
    return comparison, page


LONG = "moe_tiny-fsdp4_tp2_cp2-sequence32768-bf16-float8-compiled"


def crowded(count: int = 30) -> tuple[list[Record], Baseline, dict[str, Any]]:
    """Many cells that regressed, with long names, many overrides and long reasons: records, baseline, plan."""
    names = [f"{LONG}-{number}" for number in range(count)]
    table = [
        {"op": "all_gather", "axis": f"axis{n}", "count": 3, "bytes": 10**9, "where": [f"model.layers.{n}.mlp.experts"]}
        for n in range(8)
    ]
    head = one_workload([r for name in names for r in repeats(name, seconds=0.31, collectives=table)])
    stored = one_workload([record for name in names for record in repeats(name)])
    plan = plan_for(head)
    plan["overrides"] = ["suite=hsdp_tp", *(f"training.some_long_option_{n}=value_{n}" for n in range(12))]
    return head, baseline_of(*[stored] * 3), plan


def large(cells: int = 500, count: int = 3, steps: int = 50) -> tuple[list[Record], Comparison]:
    """Cells with real spread in every number, so that nothing compresses better than it would."""
    rng = random.Random(0)
    head: list[Record] = []
    for index in range(cells):
        cell = a_cell(f"{rng.choice(LAYOUTS)}_{index:03d}", steps=steps)
        cell.config.model.kwargs = {}
        cell.config.model.name = f"model_{index % 10}"
        for repeat in range(count):
            seconds = [0.1 * rng.lognormvariate(0, 0.05) for _ in range(steps)]
            loss = [5.5 / (1 + 0.05 * step) + rng.gauss(0, 0.01) for step in range(steps)]
            peak = int(rng.uniform(50, 200) * MIB)
            head.append(a_record(cell.name, repeat=repeat, seconds=seconds, loss=loss, peak=peak, cell=cell))
    return head, decide(head, None)
