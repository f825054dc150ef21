"""The yardstick: three medians on every rank, in little time, and nothing of the run disturbed."""

from __future__ import annotations

import statistics

import torch

from ndbench.measure.yardstick import run_yardstick
from tests.measure import steps
from tests.parity.pool import pool


def test_every_rank_has_three_times() -> None:
    for found in pool(4).run(steps.yardstick, 1):
        _, result = found[0]
        assert set(result) == {"matmul_seconds", "copy_seconds", "all_reduce_seconds"}
        assert all(seconds > 0 for seconds in result.values())


def test_alone_there_is_nothing_to_reduce_over() -> None:
    result = run_yardstick("cpu")
    assert result["all_reduce_seconds"] is None
    assert result["matmul_seconds"] is not None


def test_it_takes_no_random_numbers() -> None:
    before = torch.get_rng_state()
    run_yardstick("cpu")
    assert torch.equal(before, torch.get_rng_state())


def test_it_is_short() -> None:
    """Under 60 ms on an idle machine; a neighbour may double it."""
    rounds = pool(4).run(steps.yardstick, 7)
    assert statistics.median(wall for wall, _ in rounds[0]) < 0.12
