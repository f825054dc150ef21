"""From the ranks' reports to the record: which repeats that came to their end do not count."""

from __future__ import annotations

from typing import Any

import pytest

from ndbench.results.schema import Record
from ndbench.run.launch import LaunchResult
from ndbench.run.record import build_record
from ndbench.run.task import RankReport
from tests.run.test_launch import make_cell

STEADY = [0.5, *[0.1, 0.101] * 9, 0.1]
RISING = [0.1 * 1.08**step for step in range(40)]


def recorded(seconds: list[float], **fields: Any) -> Record:
    cell = make_cell()
    cell.config.training.steps = len(seconds)
    reports = [
        RankReport(
            rank=rank,
            outcome="ok",
            seconds=seconds,
            loss=[1.0] * len(seconds),
            grad_norm=[1.0] * len(seconds),
            tokens=[64] * len(seconds),
            valid_tokens=[64] * len(seconds),
            tokens_per_step=64,
            memory={"allocated": None, "reserved": None, "device_used": None, "rss": 1},
        )
        for rank in range(2)
    ]
    return build_record(
        cell=cell,
        result=LaunchResult("ok", reports=reports),
        run="r",
        repeat=0,
        seed=0,
        start="2026-01-01T00:00:00+00:00",
        end="2026-01-01T00:00:10+00:00",
        cell_version="v",
        code={"commit": None, "dirty": None},
        fingerprint={"hardware": {}, "software": {}, "informational": {}},
        **fields,
    )


def test_a_steady_repeat_counts_and_says_what_it_knows_of_throttling() -> None:
    record = recorded(STEADY)
    assert (record["outcome"], record["steps"]["steady"]) == ("ok", True)
    assert record["metrics"]["throttled_share"] == {
        "value": None,
        "unit": "1",
        "direction": "lower",
        "reason": "nothing here counts it",
    }
    assert recorded(STEADY, throttled=0.0)["metrics"]["throttled_share"]["value"] == 0.0


def test_a_step_time_that_never_settles_is_no_measurement() -> None:
    record = recorded(RISING)
    assert record["outcome"] == "invalid"
    assert record["reason"].startswith("not steady: step time changed by +1")
    assert record["metrics"]["step_drift"]["value"] > 1.0


def test_a_side_that_takes_turns_is_not_asked_whether_it_is_steady() -> None:
    record = recorded(RISING, alone=False)
    assert (record["outcome"], record["steps"]["steady"]) == ("ok", None)


def test_a_throttled_repeat_is_no_measurement() -> None:
    record = recorded(STEADY, throttled=0.25)
    assert record["outcome"] == "invalid"
    assert "throttled for 25% of the launch" in record["reason"]
    assert recorded(STEADY, throttled=0.05)["metrics"]["throttled_share"]["value"] == pytest.approx(0.05)
