"""What the harness adds to a step: the clock's mark and the progress counter, against the same loop without them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from ndbench.measure.timing import Handicap, StepClock
from ndbench.run.progress import StepCounter
from tests.measure import steps
from tests.parity.pool import pool

ALLOWED = 0.005
"""Of a step's time, by the design."""
STEP_SECONDS = 0.1
"""A short step of the gated suites."""


def harness(folder: Path) -> Callable[[], None]:
    """All that the harness does at a step boundary."""
    clock, counter, handicap = StepClock("cpu"), StepCounter(folder / "counter", create=True), Handicap(0.0, "cpu")
    clock.start()

    def boundary() -> None:
        began = time.perf_counter()
        handicap.after_step(time.perf_counter() - began)
        clock.tick()
        counter.set(1)

    return boundary


def test_a_step_boundary_costs_less_than_half_a_percent_of_a_step(benchmark: Any, tmp_path: Path) -> None:
    boundary = harness(tmp_path)
    benchmark.pedantic(boundary, rounds=200, iterations=50, warmup_rounds=2)
    assert benchmark.stats.stats.median < ALLOWED * STEP_SECONDS


def test_a_loop_with_the_harness_is_as_fast_as_one_without(benchmark: Any, tmp_path: Path) -> None:
    """Turns of one step in ABBA order, on CPU time, which is blind to neighbours. The step is ten times shorter than a
    real one, so the bound is ten times harder than the design's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    boundary = harness(tmp_path)
    weights = torch.randn(384, 384)

    def step() -> None:
        value = weights
        for _ in range(6):
            value = torch.mm(value, weights).tanh_()

    def seconds(measured: bool) -> float:
        began = time.thread_time()
        step()
        if measured:
            boundary()
        return time.thread_time() - began

    def turns() -> float:
        ratios = []
        for _ in range(24):
            bare, first, second, bare_again = (seconds(measured) for measured in (False, True, True, False))
            ratios.append((first + second) / (bare + bare_again))
        return median(ratios) - 1

    try:
        overheads = [benchmark.pedantic(turns, rounds=1)] + [turns() for _ in range(4)]
    finally:
        torch.set_num_threads(threads)
    benchmark.extra_info["overhead"] = median(overheads)
    assert median(overheads) < ALLOWED


@pytest.mark.parametrize(("ranks", "limit"), [(8, 0.060)])
def test_the_yardstick_of_eight_ranks_is_short(benchmark: Any, ranks: int, limit: float) -> None:
    """Under 60 ms on two otherwise idle cores; the shortest of several, since neighbours only lengthen it."""
    found = benchmark.pedantic(lambda: pool(ranks).run(steps.yardstick, 8), rounds=1)
    walls = [wall for wall, _ in found[0]]
    benchmark.extra_info["median_seconds"] = median(walls)
    assert min(walls) < limit
