"""``ndbench train`` from outside: whatever ends it, it goes on; a rank that dies ends the whole run with its reason."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ndbench.cli import main
from ndbench.run import launch as launching
from ndbench.run.task import Task

ROOT = Path(__file__).parents[2]
TINY = [
    "model=llama_tiny",
    "model.num_hidden_layers=1",
    "parallelism=ddp",
    "world_size=2",
    "data=source",
    "data.max_bytes=60000",
    "training.sequence_length=32",
    "training.global_batch_size=4",
    "training.learning_rate=0.01",
    "training.schedule=cosine",
    "training.warmup_steps=5",
    "hardware=cpu",
]
STEPS, EVERY = 50, 5


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def words(folder: Path, *more: str) -> list[str]:
    return ["train", *TINY, f"training.steps={STEPS}", f"checkpoint.dir={folder}", f"checkpoint.every={EVERY}", *more]


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ndbench", *words(folder, *more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(condition: Callable[[], bool], limit: float = 90.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


def reached(folder: Path, step: int) -> Callable[[], bool]:
    return lambda: (folder / "log.jsonl").is_file() and any(line["step"] >= step for line in lines(folder))


@pytest.mark.timeout(280)
def test_kill_9_then_a_schedulers_sigterm_and_the_log_is_that_of_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(words(whole)) == 0
    said = capsys.readouterr().out
    assert f"done after step {STEPS} of {STEPS}, validation loss" in said
    assert f"checkpoint {whole / f'step-{STEPS:08d}'}" in said

    killed = start(cut)
    wait_for(reached(cut, 2 * EVERY + 2))
    ranks = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.communicate()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive, "no rank outlives its run"

    stopped = start(cut, "resume=auto")
    at = lines(cut)[-1]["step"]
    wait_for(reached(cut, at + 4))
    stopped.terminate()
    os.killpg(stopped.pid, signal.SIGTERM)  # as timeout does it; the ranks and their server get it too
    out, _ = stopped.communicate(timeout=60)
    assert stopped.returncode == 143, out
    step = lines(cut)[-1]["step"]
    assert f"going on from {cut / 'step-'}" in out
    assert f"stopped by SIGTERM after step {step} of {STEPS}" in out
    assert (cut / f"step-{step:08d}" / "complete.json").is_file()

    assert main(words(cut, "resume=auto")) == 0
    one, other = lines(whole), lines(cut)
    assert [line["step"] for line in other] == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm", "learning_rate", "tokens", "epoch", "validation_loss"):
        assert [line.get(key) for line in one] == [line.get(key) for line in other], key
    assert sorted(path.name for path in cut.glob("step-*")) == [f"step-{s:08d}" for s in (STEPS - EVERY, STEPS)]

    capsys.readouterr()
    assert main(words(cut, "resume=auto")) == 0
    assert f"step-{STEPS:08d} is at step {STEPS}, training.steps is {STEPS}" in capsys.readouterr().out
    assert main(["generate", str(cut), "prompt=def ", "max_tokens=20", "temperature=0"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("def ")
    assert len(text) > len("def \n") + 5
    assert main(["generate", str(whole), "prompt=def ", "max_tokens=20", "temperature=0"]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        ("raise", ["raise RuntimeError", "failed: rank 1: RuntimeError: the reader's shard 7 is gone"]),
        ("hang", ["timeout: no progress for 4 s; the stack of every rank is in its log"]),
    ],
)
def test_a_rank_that_goes_wrong_ends_the_run_with_its_reason(
    fault: str, wanted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = frozenset(process.pid for process in launching.ranks_of_this_process())
    model = ["model=tests.run.broken_models:Broken", "model.vocab_size=256", f"+model.kwargs.fault={fault}"]
    shape = [*model, "+model.kwargs.vocab_size=256", *(word for word in TINY if not word.startswith("model"))]
    folder = tmp_path / "run"
    limit = "launcher.stall_timeout=4" if fault == "hang" else "launcher.stall_timeout=60"
    began = time.monotonic()
    assert main(["train", *shape, "training.micro_batch_size=2", f"checkpoint.dir={folder}", limit]) == 3
    assert time.monotonic() - began < 60
    said = capsys.readouterr().out
    for line in wanted:
        assert line in said
    assert not launching.ranks_of_this_process(before)
    if fault == "hang":
        assert "broken_models.py" in (folder / "logs" / "rank1.log").read_text(), "where it sleeps"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["suite=smoke"], "train takes one configuration"),
        (["engine=command", "engine.command=true"], "engine=command has a loop of its own"),
        (["checkpoint.every=3"], "checkpoint.every=3 needs checkpoint.dir=FOLDER"),
        (["resume=auto"], "resume=auto needs checkpoint.dir=FOLDER"),
        (["checkpoint.dir=a", "resume=b/step-00000007"], "b/step-00000007 is not a folder"),
        (["checkpoint.dir=/proc/x"], "folder /proc/x cannot be written"),
        (["checkpoint.mode=pickle"], "sharded, async, full, hf"),
        (["evaluation.every=9", "evaluation.fraction=0"], "evaluation.every=9 needs evaluation.fraction above 0"),
        (["evaluation.fraction=0.7"], "evaluation.fraction=0.7 must be at most 0.5"),
        (["data.max_bytes=600"], r"validation part"),
        (["training.precision=fp8", "training.sequence_length=31"], "precision 'fp8' needs"),
        (["training.global_batch_size=3"], "global_batch_size 3 is not a multiple"),
        (["checkpoint.dir=used"], "used holds a training run: resume=auto goes on with it"),
        (["checkpoint.dir=used", "resume=used/step-00000001"], "step-00000001 is no whole checkpoint"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_process(
    more: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launching, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    (tmp_path / "used" / "step-00000001").mkdir(parents=True)
    given = {word.partition("=")[0] for word in more}
    assert main(["train", *(word for word in TINY if word.partition("=")[0] not in given), *more]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_log_that_cannot_be_kept_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    reason = "rank 0: CheckpointError: .step-00000020.tmp/rank00000.safetensors: No space left on device"

    def launch(task: Task, *_: object, **__: object) -> launching.LaunchResult:
        (folder / "step-00000010").mkdir()
        marker = {"format": 1, "serial": 1, "step": 10, "index_bytes": 2, "index_sha256": "x"}
        (folder / "step-00000010" / "complete.json").write_text(json.dumps(marker))
        task.log_path(0).parent.mkdir(parents=True, exist_ok=True)
        task.log_path(0).write_text("what the rank said last")
        return launching.LaunchResult("failed", reason, log_tail="what the rank said last")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(launching, "start_fork_server", lambda *_: None)
    monkeypatch.setattr(launching, "launch", launch)
    monkeypatch.setattr(shutil, "move", full)
    assert main(words(folder)) == 3
    said, err = capsys.readouterr()
    assert err == ""
    assert f"the ranks' logs are not kept in {folder / 'logs'}: No space left on device" in said
    assert "| what the rank said last" in said
    assert f"failed: {reason}" in said
    assert f"the newest whole one is {folder / 'step-00000010'}" in said


def test_a_checkpoint_of_another_optimizer_is_refused_before_any_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main(["train", *TINY, "training.steps=6", f"checkpoint.dir={folder}"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(launching, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    again = ["train", *TINY, "training.steps=8", f"checkpoint.dir={folder}", "resume=auto", "training.optimizer=sgd"]
    assert main(again) == 2
    err = capsys.readouterr().err
    there = f"{folder / 'step-00000006'} has the state of training.optimizer=adamw, this run's is sgd; "
    assert err.startswith(f"ndbench: {there}checkpoint.weights=")
    assert err.count("\n") == 1
