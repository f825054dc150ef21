"""From folders to verdicts and back into the baseline, as the verbs do it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ndbench.config import AD_HOC
from ndbench.gate.stored import accept_run, compare_run, compare_two
from ndbench.report import facts
from ndbench.results.sessions import baseline_of_run, read_baseline
from ndbench.results.store import RunFolder, UnreadableFile, read_json, write_json
from tests.records import plan_of, repeats

CELLS = ("fsdp8", "ddp8")


def a_run(results: Path, run: str, slow: float = 0.1, cells: tuple[str, ...] = CELLS) -> RunFolder:
    folder = RunFolder.create(results, run)
    records = [r for n in cells for r in repeats(n, run=run, seconds=slow if n == "fsdp8" else 0.1)]
    for record in records:
        folder.write_record(record)
    write_json(folder.plan_path, {"run": run, "suite": "hsdp_tp", "cells": plan_of(records), "repeats": {}})
    return folder


def stored(results: Path) -> object:
    return read_baseline(None, hardware="cpu_x8", suite="hsdp_tp", results_dir=results)


def three_sessions(results: Path) -> None:
    for number in range(3):
        accept_run(a_run(results, f"r{number}"), "nightly", results_dir=results)


def test_a_regressed_run_never_becomes_the_baseline_by_accident_but_can_on_purpose(tmp_path: Path) -> None:
    three_sessions(tmp_path)
    slow = a_run(tmp_path, "slow", 0.3)
    assert compare_run(slow, stored(tmp_path)).exit_code == 1  # type: ignore[arg-type]
    done = accept_run("slow", "nightly", results_dir=tmp_path)
    assert (done.cells, list(done.refused), done.exit_code) == (["ddp8"], ["fsdp8"], 1)
    assert compare_run(slow, stored(tmp_path)).exit_code == 1  # type: ignore[arg-type]
    done = accept_run("slow", "recomputes on purpose", results_dir=tmp_path, cells="fsdp8")
    assert (done.cells, done.restarted) == (["fsdp8"], ["fsdp8"])
    again = compare_run(a_run(tmp_path, "after", 0.3), stored(tmp_path))  # type: ignore[arg-type]
    assert again.exit_code == 0
    assert again.cell("fsdp8").verdict == "pass"


def test_after_a_deliberate_change_the_gate_still_catches_the_next_regression(tmp_path: Path) -> None:
    three_sessions(tmp_path)
    accept_run(a_run(tmp_path, "s0", 0.3), "on purpose", results_dir=tmp_path, force=True)
    for number in (1, 2):
        assert accept_run(a_run(tmp_path, f"s{number}", 0.3), "nightly", results_dir=tmp_path).exit_code == 0
    assert compare_run(a_run(tmp_path, "worse", 0.9), stored(tmp_path)).exit_code == 1  # type: ignore[arg-type]


def test_a_cell_that_left_the_suite_can_be_retired(tmp_path: Path) -> None:
    three_sessions(tmp_path)
    fewer = a_run(tmp_path, "fewer", cells=("ddp8",))
    assert compare_run(fewer, stored(tmp_path)).exit_code == 3  # type: ignore[arg-type]
    accept_run(fewer, "weekly", results_dir=tmp_path)
    assert compare_run(fewer, stored(tmp_path)).exit_code == 3  # type: ignore[arg-type]
    assert accept_run(fewer, "dropped it", results_dir=tmp_path, cells="fsdp8").retired == ["fsdp8"]
    assert compare_run(fewer, stored(tmp_path)).exit_code == 0  # type: ignore[arg-type]


def test_accepting_twice_is_the_same_even_for_a_deliberate_change(tmp_path: Path) -> None:
    three_sessions(tmp_path)
    slow = a_run(tmp_path, "slow", 0.3)
    accept_run(slow, "on purpose", results_dir=tmp_path, cells="fsdp8")
    before = {path: path.read_bytes() for path in sorted((tmp_path / "baselines").rglob("*.json"))}
    again = accept_run(slow, "on purpose", results_dir=tmp_path, cells="fsdp8")
    assert (again.already, again.cells) == (["fsdp8"], [])
    assert before == {path: path.read_bytes() for path in sorted((tmp_path / "baselines").rglob("*.json"))}


def test_an_artifact_with_a_stale_verdict_is_judged_against_the_baseline_of_today(tmp_path: Path) -> None:
    three_sessions(tmp_path)
    slow = a_run(tmp_path / "ci", "slow", 0.3)
    write_json(slow.verdict_path, {"cells": [{"name": "fsdp8", "verdict": "no_baseline"}]})
    shutil.copytree(slow.path, tmp_path / "download" / "artifact")
    done = accept_run(tmp_path / "download", "from CI", results_dir=tmp_path)
    assert list(done.refused) == ["fsdp8"]


def test_a_suspect_is_accepted_and_said(tmp_path: Path) -> None:
    accept_run(a_run(tmp_path, "r0"), "first", results_dir=tmp_path)
    done = accept_run(a_run(tmp_path, "r1", 0.15), "second", results_dir=tmp_path)
    assert (done.cells, done.suspects) == (["ddp8", "fsdp8"], ["fsdp8"])


def test_two_runs_are_compared_by_name(tmp_path: Path) -> None:
    a_run(tmp_path, "a")
    a_run(tmp_path, "b", 0.15)
    comparison = compare_two("a", "b", tmp_path)
    assert comparison.baseline == "run a"
    assert comparison.cell("fsdp8").verdict == "inconclusive"
    (reason,) = comparison.cell("fsdp8").reasons
    assert "two runs do not tell how sessions differ" in reason
    assert "accept" not in reason
    assert facts.accept_command(comparison) is None
    assert comparison.exit_reason == "1 of 2 cells is inconclusive: fsdp8"


def test_of_two_runs_one_several_times_slower_is_regressed(tmp_path: Path) -> None:
    a_run(tmp_path, "a")
    a_run(tmp_path, "b", 0.5)
    assert compare_two("a", "b", tmp_path).exit_code == 1
    assert compare_two("b", "a", tmp_path).cell("fsdp8").verdict == "improved"


def test_a_run_without_suite_lacks_no_cell_of_the_others(tmp_path: Path) -> None:
    both, lone = a_run(tmp_path, "both"), a_run(tmp_path, "lone")
    baseline = baseline_of_run(both)
    plan = lone.plan
    for path in lone.records_dir.glob("ddp8*"):
        path.unlink()
    plan["cells"] = [cell for cell in plan["cells"] if cell["name"] == "fsdp8"]
    write_json(lone.plan_path, plan)
    assert compare_run(lone, baseline).cell("ddp8").verdict == "missing"
    write_json(lone.plan_path, plan | {"suite": AD_HOC})
    assert compare_run(lone, baseline).counts == {"pass": 1}


def test_a_run_folder_that_lost_its_plan_is_compared_by_its_records(tmp_path: Path) -> None:
    run = a_run(tmp_path, "a")
    run.plan_path.unlink()
    assert compare_run(run, None).counts == {"no_baseline": 2}


@pytest.mark.parametrize("name", ["plan.json", "records/fsdp8.r1.json"])
def test_a_truncated_file_stops_the_comparison_and_is_named(tmp_path: Path, name: str) -> None:
    run = a_run(tmp_path, "a")
    path = run.path / name
    path.write_text(path.read_text()[:40])
    with pytest.raises(UnreadableFile, match=path.name):
        compare_run(run, None)


def test_a_run_that_was_cut_off_is_no_reference_unless_it_is_forced(tmp_path: Path) -> None:
    run = a_run(tmp_path, "20261130-070000-dddddd", cells=("fsdp8",))
    plan = read_json(run.plan_path)
    write_json(run.plan_path, plan | {"repeats": {"fsdp8": 5}})
    with pytest.raises(
        ValueError, match=r"has only 3 of its 5 repeats: ndbench --resume 20261130-070000-dddddd, or --fo"
    ):
        accept_run(run, "cut off", results_dir=tmp_path)
    assert accept_run(run, "cut off", results_dir=tmp_path, force=True).cells


def test_a_run_with_a_planted_slowdown_is_no_reference(tmp_path: Path) -> None:
    run = a_run(tmp_path, "20261130-070000-eeeeee", cells=("fsdp8",))
    for record in run.records():
        run.write_record(record | {"cell": record["cell"] | {"measure": {"handicap": 2.0}}})
    with pytest.raises(ValueError, match=r"measure\.handicap=2 was planted in it"):
        accept_run(run, "by mistake", results_dir=tmp_path)
