"""One step of Llama in each kind of layout traces without ranks, memory or a device; its collectives are the real ones.

So nothing in the step waits for a value on the host or takes a shape from data, and a planner can ask it what it sends.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from ndbench.parallel.traffic import Traffic, difference, step_traffic
from tests.parallel import trace_step, traffic_tasks
from tests.parity.cases import Case
from tests.parity.pool import pool

SECONDS = 20.0
COMPARED = ("fsdp8", "hsdp2x2_tp2", "cp8", "fsdp2_cp2_tp2")
"""At 8 ranks all kinds are held to the same closed form elsewhere; these are run next to their trace."""


def traced(world: int) -> tuple[list[Traffic], float]:
    """Collectives of each of ``trace_step.layouts(world)``, and the seconds that all took together."""
    command = [sys.executable, "-m", trace_step.__name__, str(world)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout)
    rows = [{(op, axis): (calls, size) for op, axis, calls, size in step} for step in answer["steps"]]
    return rows, answer["seconds"] / len(rows)


def form(at: Case) -> Traffic:
    model, step = traffic_tasks.shapes(at)
    return step_traffic(model, at.parallelism, step)


def test_a_step_of_64_ranks_traces_in_seconds_with_the_calls_of_the_closed_form() -> None:
    steps, seconds = traced(64)
    wrong = {
        layout.layout: difference(found, form(trace_step.traced(layout)))
        for layout, found in zip(trace_step.layouts(64), steps, strict=True)
    }
    assert {name: rows for name, rows in wrong.items() if rows} == {}
    assert seconds < SECONDS


def test_a_traced_step_of_8_ranks_is_the_real_one() -> None:
    steps, _ = traced(8)
    for layout, found in zip(trace_step.layouts(8), steps, strict=True):
        if layout.layout not in COMPARED:
            continue
        at = trace_step.traced(layout)
        real: list[dict[str, Any]] = pool(8).run(traffic_tasks.recorded, at)
        assert real[trace_step.RANK]["totals"] == found, layout.layout


@pytest.mark.parametrize("fault", trace_step.FAULTS)
def test_a_step_that_looks_at_a_value_or_has_a_shape_from_data_does_not_trace(fault: str) -> None:
    command = [sys.executable, "-m", trace_step.__name__, "8", fault]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode != 0
    assert trace_step.FAULTS[fault][1] in done.stderr
