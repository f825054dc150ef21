"""From the ranks' reports to the record: which repeats that came to their end do not count."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from ndbench.compare.structure import judge_tokens
from ndbench.compare.summary import summarise
from ndbench.compare.throughput import gate_rule, judge, timing_of
from ndbench.results.schema import Record
from ndbench.run import launch as launching
from ndbench.run.launch import LaunchResult
from ndbench.run.record import build_record
from ndbench.run.task import RankReport, Task
from ndbench.run.worker import _told_tokens
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


def script_record(loss: float, *, tokens: int | None, silent: bool = False) -> Record:
    """Of two ranks of a script, the second of which prints another loss or nothing."""
    cell = make_cell()
    cell.config.training.steps = len(STEADY)
    steps = len(STEADY)
    memory = {"allocated": None, "reserved": None, "device_used": None, "rss": 1}
    first = RankReport(0, "ok", seconds=STEADY, loss=[1.0] * steps, tokens_per_step=tokens, memory=memory)
    second = RankReport(1, "ok", seconds=STEADY, loss=[loss] * steps, tokens_per_step=tokens, memory=memory)
    if silent:
        second = RankReport(1, "ok", silent=True, memory=memory)
    return build_record(
        cell=cell,
        result=LaunchResult("ok", reports=[first, second]),
        run="r",
        repeat=0,
        seed=0,
        start="2026-01-01T00:00:00+00:00",
        end="2026-01-01T00:00:10+00:00",
        cell_version="v",
        code={"commit": None, "dirty": None},
        fingerprint={"hardware": {}, "software": {}, "informational": {}},
    )


def test_a_scripts_tokens_are_its_own_and_none_are_invented() -> None:
    record = script_record(1.0, tokens=1000)
    step = record["metrics"]["step_seconds"]["value"]
    assert record["metrics"]["tokens_per_second"]["value"] == pytest.approx(1000 / step)
    current = summarise([record])
    assert current is not None
    assert current.tokens_per_second == pytest.approx(1000 / step, rel=0.02)
    for told, mean in (([1000, 1000], 1000), ([10, 21, 31], 21), ([10, None], None), ([], None), (None, None)):
        assert _told_tokens(cast("list[int | None] | None", told)) == mean
    record = script_record(1.0, tokens=None)
    assert record["outcome"] == "ok"
    told = record["metrics"]["tokens_per_second"]
    assert (told["value"], told["reason"]) == (None, "the script does not print 'tokens' at every step")
    current = summarise([record])
    assert current is not None
    assert (current.tokens_per_second, current.tokens_low) == (None, None)
    assert current.step_seconds == pytest.approx(step, rel=0.02)


def test_the_step_time_of_a_script_without_tokens_is_gated() -> None:
    record = script_record(1.0, tokens=None)
    slow = {**record, "steps": {**record["steps"], "seconds": [4 * value for value in STEADY]}}
    rule = gate_rule(False, None, None, 0.01)
    for head, verdict in ((slow, "regressed"), (record, "pass")):
        assert judge({"c": timing_of([head] * 3, [[record] * 3] * 3, rule)})["c"].verdict == verdict
    assert judge_tokens([record], [record]) is None
    assert judge_tokens([script_record(1.0, tokens=10)], [record]) is None
    stopped = judge_tokens([record], [script_record(1.0, tokens=10)])
    assert stopped is not None
    assert stopped.verdict == "inconclusive", "an exact check that was made is not switched off in silence"


def test_rank_0_alone_may_print_and_ranks_that_print_must_agree() -> None:
    record = script_record(2.0, tokens=None, silent=True)
    assert (record["outcome"], record["steps"]["loss"][0]) == ("ok", 1.0)
    record = script_record(2.0, tokens=None)
    assert record["outcome"] == "invalid"
    assert "disagree about loss at step 0: 1.0 and 2.0; it must be the global batch's" in record["reason"]


def test_the_rank_that_died_first_is_blamed_and_one_that_lost_its_peer_last() -> None:
    lost = RankReport(0, reason="ScriptError: … RuntimeError: [pair.cc:553] Connection closed by peer", failed_at=1.0)
    cause = RankReport(1, reason="ScriptError: … KeyError: 'planted'", failed_at=2.0)
    later = RankReport(2, reason="ScriptError: … ValueError: other", failed_at=3.0)
    assert launching._cause([lost, later, cause]) is cause
    task = Task(make_cell(), 0, 0, False, 0.0, Path("nowhere"), 1)
    watchdog = launching._Watchdog(8.0, frozenset())
    watchdog.expired = True
    result = launching._result(task, 3, watchdog, None, [lost, cause])
    assert result.outcome == "timeout"
    assert result.reason is not None
    assert result.reason.endswith("rank 1: ScriptError: … KeyError: 'planted'")
