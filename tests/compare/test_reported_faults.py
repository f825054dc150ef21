"""What gates of other projects were publicly reported to get wrong, each as an input with its verdict and exit code.

Every test names the reports it answers.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from ndbench.compare.history import change_points
from ndbench.compare.result import Comparison, MetricVerdict
from ndbench.config import GateConfig
from ndbench.gate.foreign import compare_with_file
from ndbench.results.schema import Record, RecordError
from ndbench.results.sessions import read_baseline
from ndbench.results.store import RunFolder, UnreadableFile, read_record
from tests.compare.helpers import NOW, baseline_of, decide, only
from tests.records import MIB, a_cell, a_record, noisy, not_ok, repeats


def said(comparison: Comparison) -> tuple[str, int]:
    return only(comparison).verdict, comparison.exit_code


def curve(count: int = 200) -> list[float | None]:
    return [5.0 * math.exp(-0.01 * step) for step in range(count)]


def test_179_of_200_steps_that_differ_by_a_hair_are_regressed() -> None:
    """Megatron-LM#3097: the check passed."""
    cell = a_cell(steps=200)
    sound: list[float | None] = curve()
    wrong = [v if step < 21 or v is None else v * (1 + 1e-7) for step, v in enumerate(sound)]
    norms: list[float | None] = [1.0] * 200
    comparison = decide(
        repeats(cell=cell, loss=wrong, grad_norm=norms), baseline_of(repeats(cell=cell, loss=sound, grad_norm=norms))
    )
    assert said(comparison) == ("regressed", 1)
    assert "first differs at step 21" in only(comparison).reasons[0]


def test_a_refreshed_baseline_is_not_red_for_noise() -> None:
    """Megatron-LM#4654: a flat ±5 % is flaky right after a refresh; #5061: one image bump, 61 red jobs."""
    rng = random.Random(7)
    for _ in range(40):
        head = noisy("fsdp8", rng, session=rng.gauss(0, 0.02), between=0.03, within=0.02, device="cuda", torch="2.13.0")
        base = noisy("fsdp8", rng, session=rng.gauss(0, 0.02), between=0.03, within=0.02, device="cuda", torch="2.11.0")
        assert decide(head, baseline_of(base)).exit_code == 0


@pytest.mark.parametrize(("sessions", "verdict", "code"), [(1, "inconclusive", 0), (3, "regressed", 1)])
def test_a_slowdown_of_sixty_percent_never_passes(sessions: int, verdict: str, code: int) -> None:
    """Megatron-LM#371, pytorch#152761: found by users."""
    rng = random.Random(3)
    base = [noisy("fsdp8", rng, between=0.01, within=0.01, device="cuda") for _ in range(sessions)]
    head = noisy("fsdp8", rng, between=0.01, within=0.01, slower=1.6, device="cuda")
    assert said(decide(head, baseline_of(*base))) == (verdict, code)


def test_a_stale_baseline_does_not_let_a_factor_of_two_pass_and_its_age_is_said() -> None:
    """ioc-finder#411: 2.3 times slower passed; MetaMask#45451: frozen 36 days behind a green check."""
    baseline = baseline_of(*[repeats(seconds=0.1)] * 3)
    from datetime import timedelta

    from ndbench.compare.verdict import compare
    from tests.records import plan_of

    head = repeats(seconds=0.23)
    comparison = compare(head, baseline, plan_of(head), GateConfig(), suite="s", run="r", now=NOW + timedelta(days=36))
    assert said(comparison) == ("regressed", 1)
    assert any("days old" in note for note in comparison.notes)


def test_a_slow_slope_under_a_rolling_baseline_is_seen() -> None:
    """vize#3488, conbench#608."""
    rng = random.Random(5)
    slope = [0.004 * index + rng.gauss(0, 0.008) for index in range(30)]
    assert change_points(slope)
    rolling = baseline_of(*[repeats(seconds=0.1 * math.exp(level), device="cuda") for level in slope])
    head = repeats(seconds=0.1 * math.exp(0.004 * 31), device="cuda")
    assert any("drift" in note for note in only(decide(head, rolling)).notes)


def test_the_first_run_without_a_baseline_is_measured() -> None:
    """maxwellbloch#242: it crashed."""
    assert said(decide(repeats(), None)) == ("no_baseline", 0)
    assert said(decide(repeats(), None, gate=GateConfig(mode="require"))) == ("no_baseline", 4)


def test_a_new_cell_does_not_fail_and_a_missing_one_does() -> None:
    """hacl-packages#325: the other way round."""
    both, one = [*repeats("a"), *repeats("b")], repeats("a")
    new = decide(both, baseline_of(one))
    assert (new.cell("b").verdict, new.exit_code) == ("new", 0)
    gone = decide(one, baseline_of(both))
    assert (gone.cell("b").verdict, gone.exit_code) == ("missing", 3)


def test_another_host_is_the_same_machine_when_its_hardware_is() -> None:
    """velox#3592, arrow#33728, asv#148."""
    head = repeats()
    for record in head:
        record["fingerprint"] = {**record["fingerprint"], "informational": {"host": "renamed-42"}}
    assert said(decide(head, baseline_of(repeats()))) == ("pass", 0)


def test_a_renamed_cell_is_compared_and_the_old_name_said() -> None:
    """bench-show#28: the comparison became partial, silently."""
    cell = a_cell("old")
    import dataclasses

    head = repeats(cell=dataclasses.replace(cell, name="new"))
    comparison = decide(head, baseline_of(repeats(cell=cell)))
    assert said(comparison) == ("pass", 0)
    assert any("renamed" in note and "old" in note for note in only(comparison).notes)


def test_cells_of_an_interrupted_run_are_invalid_not_absent() -> None:
    """renaissance#119, K2-Vendor-Verifier#15: all results were lost."""
    plan = [{"name": r["cell"]["name"], "cell_id": r["cell_id"]} for r in (a_record("a"), a_record("b"))]
    comparison = decide(repeats("a"), baseline_of([*repeats("a"), *repeats("b")]), plan=plan)
    assert (comparison.cell("a").verdict, comparison.cell("b").verdict) == ("pass", "invalid")
    assert comparison.exit_code == 3


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": 1}', "[]", "null", '{"loss": NaN}'])
def test_an_empty_or_cut_record_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    """pytorch/benchmark#370: an empty file after a cancelled job."""
    path = tmp_path / "fsdp8.r0.json"
    path.write_text(text)
    with pytest.raises((UnreadableFile, RecordError), match="fsdp8"):
        read_record(path)


def test_an_unreadable_history_is_an_error_and_stays_as_it_is(tmp_path: Path) -> None:
    """github-action-benchmark: it is replaced by an empty one."""
    session = tmp_path / "cpu_x8" / "s" / "20261130"
    session.mkdir(parents=True)
    (session / "session.json").write_text('{"session": "x", ')
    with pytest.raises(ValueError, match=r"session\.json"):
        read_baseline(tmp_path)
    assert (session / "session.json").read_text() == '{"session": "x", '


def _with_nan(step: int = 3) -> list[Record]:
    loss: list[float | None] = [5.5 - 0.1 * i for i in range(12)]
    loss[step] = None
    return repeats(loss=loss)


@pytest.mark.parametrize(
    ("head", "base", "verdict", "code"),
    [
        (_with_nan(), repeats(), "regressed", 1),
        (repeats(), _with_nan(), "incomparable", None),
        (_with_nan(), _with_nan(), "invalid", 3),
    ],
)
def test_a_nan_never_passes(head: list[Record], base: list[Record], verdict: str, code: int | None) -> None:
    """github-action-benchmark, pytest-benchmark, Megatron: NaN is not greater than a threshold, or equals NaN."""
    comparison = decide(head, baseline_of(base))
    loss = only(comparison).metric("loss")
    assert loss is not None
    assert loss.verdict == verdict
    if code is not None:
        assert comparison.exit_code == code


def test_a_dropped_benchmark_of_a_file_is_missing() -> None:
    """pytest-benchmark: rc 0."""
    assert compare_with_file(repeats("a"), {"a": [0.1], "b": [0.1]}, GateConfig())["b"].verdict == "missing"


@pytest.mark.parametrize(
    ("head", "base", "verdict"),
    [
        (repeats(count=3), repeats(count=5), "pass"),
        (repeats(count=3), repeats(count=3), "pass"),
        (repeats(count=1), repeats(count=1), "inconclusive"),
        (repeats(count=1), repeats(count=3), "inconclusive"),
        (repeats(count=3), repeats(count=1), "pass"),
    ],
)
def test_unequal_counts_zero_variance_and_one_sample_are_never_significant(
    head: list[Record], base: list[Record], verdict: str
) -> None:
    """pyperf: all three come out "significant"; Conbench, Bencher: no verdict, silently green."""
    assert said(decide(head, baseline_of(base))) == (verdict, 0)


def test_zero_variance_does_not_hide_a_slowdown() -> None:
    assert said(decide(repeats(seconds=0.2), baseline_of(*[repeats(seconds=0.1)] * 3))) == ("regressed", 1)
    assert said(decide(repeats(seconds=0.2), baseline_of(repeats(seconds=0.1)))) == ("inconclusive", 0)


def test_a_warm_up_that_was_too_short_is_no_pass() -> None:
    """samyama-graph#752, llama.cpp#21282."""
    head, baseline = repeats(), baseline_of(*[repeats()] * 3)
    assert said(decide(head, baseline)) == ("pass", 0)
    head[0]["steps"]["steady"] = False
    assert said(decide(head, baseline)) == ("inconclusive", 0)
    assert said(decide(head, baseline, gate=GateConfig(fail_on_inconclusive=True))) == ("inconclusive", 5)
    far = [*head[:2], not_ok("invalid", repeat=2, reason="not steady: step time changed by +140%")]
    assert said(decide(far, baseline)) == ("invalid", 3)


def test_memory_is_the_worst_rank_not_the_sum_and_not_the_device() -> None:
    """optimum-benchmark#123, #154."""
    memory = {"allocated": [100 * MIB] * 7 + [150 * MIB], "reserved": None, "device": [900 * MIB] * 8, "rss": None}
    head = repeats(device="cuda")
    for record in head:
        record["memory"] = memory
        record["metrics"] = {**record["metrics"], "peak_allocated_bytes": {"value": None, "reason": "x"}}
    comparison = decide(head, baseline_of(repeats(device="cuda")))
    assert said(comparison) == ("regressed", 1)
    assert "150.00 MiB against 100.00 MiB" in only(comparison).reasons[0]
    assert "rank 7" in only(comparison).reasons[0]


def test_a_dead_rank_is_a_verdict() -> None:
    """optimum-benchmark#189: collecting reports hangs for ever."""
    comparison = decide([not_ok("failed", reason="rank 3 was killed by SIGKILL")], baseline_of(repeats()))
    assert said(comparison) == ("invalid", 3)
    assert "rank 3 was killed" in only(comparison).reasons[0]


def test_the_same_commit_fourteen_percent_apart_is_cleared_by_measuring_the_base_again() -> None:
    """aprender#2009, Rapid-MLX#1557."""
    head, baseline = repeats(seconds=0.114, device="cuda"), baseline_of(repeats(seconds=0.1, device="cuda"))
    assert said(decide(head, baseline)) == ("inconclusive", 0)
    equal = MetricVerdict("tokens_per_second", "pass", "10 pairs are equal", 0.0, details={"log_effect": 0.0})
    assert said(decide(head, baseline, confirmed={"fsdp8": [equal]})) == ("pass", 0)


def test_a_regressed_run_does_not_become_the_next_baseline(tmp_path: Path) -> None:
    """github-action-benchmark: it does; js2#3703: a baseline that could never be accepted again."""
    from ndbench.gate.stored import accept_run
    from ndbench.results.store import write_json

    def run(name: str, seconds: float) -> RunFolder:
        folder = RunFolder.create(tmp_path, name)
        for record in repeats(seconds=seconds, run=name, session=name):
            folder.write_record(record)
        cell: dict[str, Any] = a_cell().to_dict() | {"cell_id": a_cell().cell_id}
        write_json(folder.plan_path, {"cells": [cell], "suite": "hsdp_tp", "run": name})
        return folder

    for number in range(3):
        assert accept_run(run(f"2026113{number}-000000-aaaaaa", 0.1), "ok", results_dir=tmp_path).exit_code == 0
    slow = run("20261204-000000-aaaaaa", 0.3)
    held = accept_run(slow, "by accident", results_dir=tmp_path)
    assert (held.exit_code, held.cells, held.folder.exists()) == (1, [], False)
    assert held.refused["fsdp8"].startswith("regressed against the baseline")
    assert accept_run(slow, "on purpose", results_dir=tmp_path, cells="fsdp8").exit_code == 0
