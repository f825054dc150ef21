"""The main job through the command line: measure, compare, stop a bad change, lose nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ndbench.cli import main
from ndbench.results.store import RunFolder, find_run
from ndbench.run.progress import StepCounter

ROOT = Path(__file__).parents[2]
CONF = Path(__file__).parent / "conf"
ENGINE = ["engine.name=small", "engine.target=tests.run.engines.SmallEngine"]


def ndbench(results: Path, *words: str, suite: str = "suite=two") -> int:
    return main(["run", "--config-dir", str(CONF), suite, "world_size=2", f"results.dir={results}", *ENGINE, *words])


def latest(results: Path) -> RunFolder:
    return find_run("latest", results)


def verdicts(results: Path) -> dict[str, str]:
    return {cell["name"]: cell["verdict"] for cell in verdict(results)["cells"]}


def verdict(results: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(latest(results).verdict_path.read_text())
    return found


def accept(results: Path, *words: str) -> int:
    return main(["baseline", "accept", "latest", "--reason", "test", "--results-dir", str(results), *words])


@pytest.fixture(scope="module")
def three_sessions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with three accepted sessions of the suite."""
    results = tmp_path_factory.mktemp("results")
    for _ in range(3):
        assert ndbench(results, "+engine.options.seconds=0.03") == 0
        assert accept(results) == 0
    return results


@pytest.mark.timeout(180)
def test_a_planted_slowdown_turns_exactly_that_cell_red(
    three_sessions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = ["measure.handicap=2.0", "measure.handicap_cells=*seq32"]
    code = ndbench(three_sessions, "+engine.options.seconds=0.03", *slow)
    found = verdicts(three_sessions)
    assert found.keys() == {"ddp2-seq16", "ddp2-seq32"}
    assert [name for name, verdict in found.items() if verdict == "regressed"] == ["ddp2-seq32"]
    assert code == 1
    assert "ddp2-seq32" in capsys.readouterr().out
    summary = latest(three_sessions).summary_path.read_text()
    assert "regressed" in summary.splitlines()[0].lower()


@pytest.mark.timeout(180)
def test_the_same_code_again_is_no_regression(three_sessions: Path) -> None:
    assert ndbench(three_sessions, "+engine.options.seconds=0.03") == 0
    assert "regressed" not in verdicts(three_sessions).values()


@pytest.mark.timeout(180)
def test_a_cell_gone_from_the_suite_is_missing_but_one_not_selected_is_not(
    three_sessions: Path, tmp_path: Path
) -> None:
    assert ndbench(three_sessions, "+engine.options.seconds=0.03", "cells=*seq16", "measure.repeats=1") == 0
    assert "ddp2-seq32" not in verdicts(three_sessions)
    (tmp_path / "suites").mkdir()
    text = (CONF / "suites" / "two.yaml").read_text().replace("[16, 32]", "[16]")
    (tmp_path / "suites" / "two.yaml").write_text(text)
    smaller = ["run", "--config-dir", str(tmp_path), "suite=two", "world_size=2", f"results.dir={three_sessions}"]
    code = main([*smaller, *ENGINE, "+engine.options.seconds=0.03", "measure.repeats=1"])
    assert code == 3
    assert "missing" in verdicts(three_sessions).values()


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("fault", "outcome"), [("nonfinite", "invalid"), ("killed", "failed"), ("hang", "timeout"), ("oom", "oom")]
)
def test_a_repeat_that_goes_wrong_is_exit_3_with_its_reason_and_the_other_records_stay(
    three_sessions: Path, tmp_path: Path, fault: str, outcome: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(latest(three_sessions).path, tmp_path / "runs" / "20000101-000000-aaaaaa")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    words = ["cells=*seq16", "measure.repeats=2", "measure.timeout=6"]
    code = ndbench(tmp_path, *words, f"+engine.options.fault={fault}")
    assert code == 3
    records = latest(tmp_path).records()
    assert {r["outcome"] for r in records if r["repeat"] == 0} == {outcome}
    if outcome != "invalid":
        assert {r["outcome"] for r in records if r["repeat"] == 1} == {"skipped"}, (
            "a hopeless cell is not paid for twice"
        )
    assert before
    assert {path: path.read_bytes() for path in before} == before
    out = capsys.readouterr().out
    assert records[0]["reason"].split(":")[0].split(";")[0] in " ".join(out.split())


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (["cells=nothing*"], "nothing*"),
        (["shard=5/4"], "5/4"),
        (["measure.budget=soon"], "soon"),
        (["+engine.options.x=nan"], "engine.options.x"),
        (["+engine.options.fault='refuse raises'"], "SmallEngine could not be asked about ddp2-seq16: KeyError"),
        (["baseline=/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_what_the_user_must_change_is_one_line_and_exit_2(
    tmp_path: Path, words: list[str], needle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = ndbench(tmp_path, *words)
    error = capsys.readouterr().err.strip()
    assert code == 2
    assert needle in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.rglob("*.r0.json"))


@pytest.mark.timeout(120)
def test_a_truncated_baseline_is_an_error_before_anything_is_measured(
    three_sessions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(three_sessions / "baselines", tmp_path / "baselines")
    cut = sorted((tmp_path / "baselines").rglob("ddp2-seq16.json"))[0]
    cut.write_bytes(cut.read_bytes()[:300])
    assert ndbench(tmp_path) == 2
    assert str(cut.name) in capsys.readouterr().err
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())
    assert len(cut.read_bytes()) == 300, "an unreadable baseline is never replaced"


def test_a_results_folder_that_cannot_be_written_is_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert ndbench(tmp_path / "file" / "results") == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_max_failures_stops_the_run_and_what_was_not_measured_is_not_green(tmp_path: Path) -> None:
    code = main(
        [
            "run",
            "--max-failures",
            "1",
            "--config-dir",
            str(CONF),
            "suite=two",
            "world_size=2",
            f"results.dir={tmp_path}",
            *ENGINE,
            "+engine.options.fault=raise",
            "measure.repeats=1",
        ]
    )
    assert code == 3
    assert len(latest(tmp_path).records()) == 1


@pytest.mark.timeout(120)
def test_a_used_up_budget_finishes_the_first_round_and_starts_no_other(tmp_path: Path) -> None:
    assert ndbench(tmp_path, "measure.budget=1s", "measure.repeats=5") == 0
    assert Counter(r["repeat"] for r in latest(tmp_path).records())[0] == 2
    assert len(latest(tmp_path).records()) < 10
    assert "budget" in latest(tmp_path).verdict_path.read_text()


def _start(results: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ndbench", "--config-dir", str(CONF), "suite=two", "world_size=2", *ENGINE]
    command += [f"results.dir={results}", "measure.repeats=2", "+engine.options.seconds=0.1", *words]
    # a session of its own: a signal to it must not reach the tests, and Ctrl-C reaches all of a group
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _wait_for_records(results: Path, count: int) -> None:
    deadline = time.monotonic() + 90
    while len(list(results.rglob("*.r[0-9].json"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.timeout(180)
def test_kill_9_then_resume_gives_every_repeat_once_in_the_same_plan(tmp_path: Path) -> None:
    process = _start(tmp_path)
    _wait_for_records(tmp_path, 1)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    plan = latest(tmp_path).plan_path.read_bytes()
    done = {path.name: path.read_bytes() for path in latest(tmp_path).records_dir.iterdir()}
    assert 1 <= len(done) < 4
    assert not latest(tmp_path).verdict_path.exists()
    assert main(["run", "--resume", latest(tmp_path).path.name, f"results.dir={tmp_path}"]) == 0
    assert latest(tmp_path).plan_path.read_bytes() == plan
    records = latest(tmp_path).records()
    assert Counter((r["cell"]["name"], r["repeat"]) for r in records) == Counter(
        {(name, repeat): 1 for name in ("ddp2-seq16", "ddp2-seq32") for repeat in (0, 1)}
    )
    assert all(r["outcome"] == "ok" for r in records)
    for name, content in done.items():
        assert (latest(tmp_path).records_dir / name).read_bytes() == content, "a finished repeat is not measured again"


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_what_it_measured_and_says_how_to_go_on(
    tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    process = _start(tmp_path)
    _wait_for_records(tmp_path, 1)
    os.killpg(process.pid, signum) if signum == signal.SIGINT else process.send_signal(signum)
    out, _ = process.communicate(timeout=40)
    assert process.returncode == code, out.decode()
    assert "--resume" in out.decode()
    assert 1 <= len(latest(tmp_path).records()) < 4


LOOP = ["engine.name=my_loop", "engine.target=loop.MyLoop", "parallelism=ddp", "world_size=2", "training.steps=16"]
SCRIPT = ["engine=command", "engine.command=python examples/own_script/train.py", "world_size=2", "training.steps=30"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("words", "variable"), [(LOOP, "MY_LOOP_SLOWDOWN"), (SCRIPT, "MY_SCRIPT_SLOWDOWN")])
def test_a_loop_of_ones_own_is_green_and_red_when_three_times_slower(
    tmp_path: Path, words: list[str], variable: str
) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'examples' / 'own_loop'}{os.pathsep}{ROOT}"}
    accept_words = ["baseline", "accept", "latest", "--reason", "first", "--results-dir", str(tmp_path)]

    def run(*arguments: str, slowdown: str = "1") -> int:
        done = subprocess.run(
            [sys.executable, "-m", "ndbench", *arguments],
            cwd=ROOT,
            env=environment | {variable: slowdown},
            capture_output=True,
            timeout=280,
            check=False,
        )
        assert done.returncode in (0, 1), done.stdout.decode() + done.stderr.decode()
        return done.returncode

    for _ in range(3):
        assert run(*words, f"results.dir={tmp_path}") == 0
        assert run(*accept_words) == 0
    assert run(*words, f"results.dir={tmp_path}", slowdown="3") == 1


def test_the_step_counter_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    writer = StepCounter(tmp_path / "step", create=True)
    reader = StepCounter(tmp_path / "step")
    assert reader.get() == -1
    writer.set(41)
    assert reader.get() == 41


@pytest.mark.timeout(120)
def test_a_plan_style_that_the_engine_does_not_know_is_refused_by_name_before_any_rank_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ["+model.hf.num_local_experts=4", "+model.hf.num_experts_per_tok=2", "model.model_type=mixtral"]
    words = ["run", "parallelism=tp", "world_size=2", "model=mistral_tiny", *shape, f"results.dir={tmp_path}"]
    assert main(words) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert "moe" in error or "packed" in error
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.timeout(120)
def test_a_profile_lies_in_the_run_folder_and_shows_a_rank_that_others_wait_for(tmp_path: Path) -> None:
    words = ["measure.profile=true", "measure.repeats=1", "cells=*16", "+engine.options.fault=late"]
    assert ndbench(tmp_path, *words, "training.steps=4", "measure.structure=false", "measure.yardstick=false") == 0
    folder = latest(tmp_path)
    (record,) = folder.records()
    seconds = {name: record["metrics"][f"profile_{name}_seconds"]["value"] for name in ("step", "compute", "copy")}
    exposed, idle = (record["metrics"][f"profile_{n}_seconds"]["value"] for n in ("exposed_communication", "idle"))
    assert seconds["compute"] + seconds["copy"] + exposed + idle == pytest.approx(seconds["step"])
    profile = folder.profile_dir(record["cell"]["name"], 0)
    assert sorted(path.name for path in profile.iterdir()) == ["breakdown.json", "rank0.json.gz", "rank1.json.gz"]
    waiting, late = (json.loads((profile / "breakdown.json").read_text())[f"rank{i}"]["breakdown"] for i in (0, 1))
    assert waiting["exposed_communication"] > 0.15, "rank 1 comes 0.2 s late to its collective"
    assert late["exposed_communication"] < 0.1
    assert len(record["steps"]["seconds"]) == 4, "the profiled steps are none of the timed ones"
