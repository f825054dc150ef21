"""Whatever a user gets wrong is one readable line and exit 2 before any process starts; a fault of ours is 70."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ndbench import cli
from tests.cli.conftest import Command
from tests.records import repeats


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["run", "training.stepz=3"], "there is no key 'training.stepz' (did you mean training.steps"),
        (["modle=llama_tiny"], "there is no key 'modle' (did you mean model"),
        (["model=lama_tiny"], "model=lama_tiny is not known (did you mean llama_tiny"),
        (["suite=hsdp_pt"], "suite=hsdp_pt is not known (did you mean hsdp_tp?)"),
        (
            ["parallelism.tp_size=3", "model.num_attention_heads=4", "parallelism.dp_shard_size=1", "world_size=3"],
            "4 attention heads do not divide by tp 3",
        ),
        (["parallelism.dp_shard_size=3", "world_size=8"], "dp_shard 3 x cp 1 x tp 1 = 3 ranks, but world_size is 8"),
        (["suite=smoke", "cells=zz*"], "cells=zz* selects no cell of suite smoke; its cells: ddp2, fsdp2"),
        (["suite=smoke", "cells=,"], "it selects no cell of suite smoke"),
        (["shw", "suite=smoke"], "there is no verb 'shw' (did you mean show?)"),
        (["smoke"], "suite=smoke"),
        (["suite=smoke", "show"], "the verb comes first: ndbench show"),
        (["show", "smoke"], "'smoke' is not KEY=VALUE (suite=smoke, perhaps?)"),
        (["run", "--max-failure", "3"], "there is no flag --max-failure (did you mean --max-failures?)"),
        (["run", "--max-failures", "0", "suite=smoke"], "at least 1 is expected, not '0'"),
        (["run", "--max-failures"], "--max-failures: expected one argument"),
        (["show", "--reason", "x"], "there is no flag --reason"),
        (["compare", "a", "b", "c"], "compare: 3 words given"),
        (["compare", "a"], "no run 'a'"),
        (["baseline"], "one is needed of accept, list, show, table, prune"),
        (["baseline", "acept", "latest"], "did you mean accept?"),
        (["baseline", "accept"], "RUN is needed"),
        (["baseline", "accept", "latest", "--reason", "x"], "no run 'latest'"),
        (["baseline", "prune", "cpu_x8/smoke"], "--keep N is needed"),
        (["baseline", "show", "cpu_x8/smoke"], "cpu_x8/smoke"),
        (["list", "model"], "did you mean models?"),
        (["baseline", "list", "results.dir=a", "--results-dir", "b"], "name 2 folders: a, b"),
        (["report", "latest", "results.dir="], "results.dir= names no folder"),
        (["show", "suite=smoke", "--results-dir", "x"], "no flag --results-dir (results.dir=DIR says it here)"),
        (["report", "latest"], "no run 'latest'"),
        (["--resume", "20261130-000000-abcdef"], "no run '20261130-000000-abcdef'"),
        (["--resume", "latest", "suite=smoke"], "'suite=smoke' cannot change it"),
        (["--resume", "latest", "-m"], "--multirun cannot change it"),
        (["show", "--config-dir", "nowhere"], "--config-dir nowhere is not a folder"),
        (["suite=smoke", "measure.budget=soon"], "measure.budget=soon is not a duration"),
        (["show", "measure.budget=abc"], "measure.budget=abc is not a duration; write 90s, 20m or 1h"),
        (
            ["show", "results.dir=/dev/null/x"],
            "results folder /dev/null/x cannot be written: /dev/null is not a folder",
        ),
        (["show", f"results.dir={'a' * 300}"], "cannot be written: File name too long"),
        (["show", "suite=smoke", "cells="], "cells=: the value is empty; leave cells out"),
        (["suite=smoke", "cells=''"], "the value is empty"),
        (["show", "baseline="], "the value is empty"),
        (["show", "training.steps=1e99"], "training.steps=1e+99 must be at most 10000000"),
        (["show", "training.steps=10000000000"], "training.steps=10000000000 must be at most 10000000"),
        (["show", f"training.steps={'9' * 400}"], "training.steps=a number beyond 1e300 must be at most 10000000"),
        (["show", f"training.steps={'9' * 5000}"], "cannot be read: Exceeds the limit (4300 digits)"),
        (["show", "parallelism.tp_size=1e12"], "parallelism.tp_size=1000000000000 must be at most 2147483647"),
        (["show", "measure.timeout=1e30"], "measure.timeout=1e+30 must be at most 10000000"),
        (["show", "world_size=1000000"], "world_size=1000000 must be at most 100000"),
        (["show", "model=/nope"], "model=/nope: there is no folder /nope"),
        (["show", "model=./nope"], "there is no folder"),
        (["generate", "runs", "promt=x"], "generate: no key 'promt' (did you mean prompt?); keys: prompt, max_tokens"),
        (["show", "model=."], "has no config.json"),
        (["show", "model=acme/zebra-3b"], "hf download acme/zebra-3b config.json --local-dir FOLDER"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(ndbench: Command, no_process: None, argv: list[str], said: str) -> None:
    result = ndbench(*argv)
    assert result.code == 2, result.err
    assert said in result.err
    assert result.err.startswith("ndbench: ")
    assert result.err.count("\n") == 1, result.err
    assert result.out == ""
    assert not Path("results").exists()


@pytest.mark.parametrize(
    ("environment", "argv", "command"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8"}, ["suite=hsdp_tp"], "ndbench suite=hsdp_tp"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, ["run", "model=llama_tiny"], "ndbench run model=llama_tiny world_size=4"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "8"}, ["suite=smoke"], "srun --ntasks=1 ndbench suite=smoke"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, ["--resume", "latest"], "ndbench --resume latest"),
    ],
)
def test_one_rank_of_a_world_refuses_to_measure_and_says_the_command(
    ndbench: Command,
    no_process: None,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    argv: list[str],
    command: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = ndbench(*argv)
    assert result.code == 2
    assert result.err.rstrip().endswith(command)
    assert all(name in result.err for name in environment)
    assert "rank" in result.err


def test_a_world_of_one_and_reading_verbs_are_not_refused(ndbench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert ndbench("show", "suite=smoke").code == 0
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "started by" not in ndbench("run", "modle=x").err


def test_no_command_at_all_is_not_a_success(ndbench: Command) -> None:
    result = ndbench()
    assert result.code == 2
    assert "usage: ndbench" in result.err


def test_no_runnable_cell_is_exit_3_with_the_line_that_would_run(ndbench: Command, no_process: None) -> None:
    result = ndbench("suite=hsdp_tp", "hardware=h100")
    assert result.code == 3
    assert "ndbench suite=hsdp_tp hardware=cpu" in result.out


def test_an_unwritable_results_folder_is_exit_2_and_named(ndbench: Command, no_process: None) -> None:
    Path("taken").write_text("a file, not a folder")
    result = ndbench("suite=smoke", "results.dir=taken/results")
    assert result.code == 2
    assert f"results folder {Path('taken/results').absolute()} cannot be written" in result.err
    assert result.err.count("\n") == 1


def _baseline_cut_in_half() -> Path:
    folder = Path("results/baselines/cpu_x8/smoke/20261130-061500-ab12cd")
    folder.mkdir(parents=True)
    head = {"schema_version": 1, "session": folder.name, "accepted": "2026-11-30T06:15:00+00:00", "reason": "first"}
    whole = json.dumps(head | {"cells": ["ddp2"]})
    (folder / "session.json").write_text(whole[: len(whole) // 2])
    return folder / "session.json"


def test_a_truncated_baseline_is_an_error_and_never_no_baseline(ndbench: Command, no_process: None) -> None:
    path = _baseline_cut_in_half()
    result = ndbench("suite=smoke")
    assert result.code == 2
    assert f"cannot read {path}" in result.err
    assert not Path("results/runs").exists() or not any(Path("results/runs").iterdir())
    assert ndbench("baseline", "list").code == 2


def test_a_truncated_record_is_an_error_that_names_the_file(ndbench: Command) -> None:
    from ndbench.results.store import RunFolder

    folder = RunFolder.create("results", "20261130-061500-ab12cd")
    for record in repeats():
        path = folder.write_record(record)
    path.write_text(path.read_text()[:100])
    for argv in (["compare", "latest"], ["report", "latest"], ["baseline", "accept", "latest", "--reason", "x"]):
        result = ndbench(*argv)
        assert result.code == 2, result
        assert path.name in result.err


def test_a_fault_of_ours_is_70_with_the_traceback_in_a_file(ndbench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("gone")

    monkeypatch.setattr("ndbench.matrix.expand.expand", broken)
    result = ndbench("show", "suite=smoke")
    assert result.code == 70
    assert result.err.startswith("ndbench: internal error: KeyError: 'gone' (traceback in ")
    saved = Path(result.err.rstrip().removesuffix(")").rpartition(" ")[2])
    assert "KeyError: 'gone'" in saved.read_text()
    assert "show suite=smoke" in saved.read_text()
    saved.unlink()


def test_debug_shows_the_traceback_instead(ndbench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        json.loads("{")  # a ValueError, but not one that we raised

    monkeypatch.setattr("ndbench.matrix.expand.expand", broken)
    result = ndbench("show", "suite=smoke", "--debug")
    assert result.code == 70
    assert "Traceback" in result.err
    assert "traceback in" not in result.err
    monkeypatch.undo()
    usage = ndbench("show", "modle=x", "--debug")
    assert usage.code == 2
    assert "Traceback" in usage.err


def test_only_what_was_raised_for_the_user_is_a_usage_error(
    ndbench: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "room.py").write_text(
        "def refuse(*_, **__):\n"
        "    try:\n"
        "        with open(__file__):\n"
        "            raise ValueError(\n"
        "                'tp 3 is too much'\n"
        "            ) from None\n"
        "    finally:\n"
        "        str(3)\n"
        "\n"
        "def slip(*_, **__):\n"
        "    int('raise')\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "package")
    monkeypatch.setattr("ndbench.failures.__file__", str(tmp_path / "package" / "cli.py"))
    room = importlib.import_module("room")
    for function, code in ((room.refuse, 2), (room.slip, 70)):
        monkeypatch.setattr("ndbench.matrix.expand.expand", function)
        assert ndbench("show", "--debug").code == code


def test_a_file_that_the_system_refuses_is_a_usage_error(ndbench: Command) -> None:
    from ndbench.results.store import RunFolder

    folder = RunFolder.create("results", "20261130-061500-ab12cd")
    for record in repeats():
        folder.write_record(record)
    result = ndbench("report", "latest", "--markdown", "nowhere/report.md")
    assert result.code == 2
    assert "cannot write nowhere/report.md: No such file or directory" in result.err


SLEEPER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's ignore this one
import ndbench.matrix.expand
def expand(*_, **__):
    try:
        print("started", flush=True)
        for _ in range(600):
            time.sleep(0.1)  # short: a signal just before the call would only be seen after it
    finally:
        print("cleaned up", flush=True)
ndbench.matrix.expand.expand = expand
from ndbench.cli import main
sys.exit(main(["show", "suite=smoke"]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_unwinds_the_stack_and_is_told_by_the_exit_code(number: int, code: int, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert out == "cleaned up\n"
    said = {130: "interrupted", 143: "terminated", 129: "ended by SIGHUP"}[code]
    assert err == f"ndbench: {said}\n"


def test_a_reader_that_has_gone_is_no_error_to_report(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "ndbench", "show", "suite=layouts", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 141
    assert err == b""


@pytest.mark.parametrize("argv", [["list", "models"], ["--version"]])
def test_a_table_and_a_line_too_are_quiet_when_their_reader_has_gone(tmp_path: Path, argv: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "ndbench", *argv],
        cwd=tmp_path,
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": ""},
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_verbs_that_measure_nothing_load_neither_torch_nor_transformers(tmp_path: Path) -> None:
    checked = (
        "import sys; from ndbench.cli import main; code = main(sys.argv[1:]);"
        "loaded = {'torch', 'transformers'} & set(sys.modules); print(loaded, file=sys.stderr); sys.exit(bool(loaded))"
    )
    for argv in (
        ["--version"],
        ["-h"],
        ["list", "models"],
        ["list", "engines"],
        ["show", "suite=hsdp_tp"],
        ["show", "suite=hsdp_tp", "hardware=h100_x8"],
        ["baseline", "list"],
        ["completion", "bash"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", checked, *argv],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, (argv, done.stderr)


def test_version_is_fast(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ndbench", "--version"]
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=30)
        seconds.append(time.perf_counter() - began)
    assert done.stdout.startswith("ndbench ")
    assert min(seconds) < 1.0


@pytest.mark.parametrize(
    ("argv", "redirect", "code"),
    [
        ("show bad=1", "2>/dev/full", 2),
        ("show suite=smoke", ">&-", 0),
        ("show suite=smoke", ">&- 2>&-", 0),
        ("show bad=1", "2>&-", 2),
    ],
)
def test_the_exit_code_stays_when_nothing_can_be_said(tmp_path: Path, argv: str, redirect: str, code: int) -> None:
    command = f"{sys.executable} -m ndbench {argv} {redirect}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done


@pytest.mark.parametrize(
    "argv",
    [
        "doctor --quick",
        "doctor --quick --json",
        "list models",
        "show suite=smoke",
        "show suite=smoke --json",
        "baseline list",
        "import FILE model=llama_tiny --world-size 1",
        "completion bash",
        "run -h",
        "--version",
    ],
)
def test_a_reader_that_has_gone_is_141_for_every_verb(tmp_path: Path, argv: str) -> None:
    """rich ends the process by itself then, with 1, which means "regressed"."""
    (tmp_path / "FILE").write_text("base_model: some/model\nmicro_batch_size: 1\n")
    command = f"set -o pipefail; {sys.executable} -m ndbench {argv} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


def test_every_console_is_one_that_a_reader_may_leave() -> None:
    """Verbs that measure take too long to try here: none makes a console of its own."""
    files = Path(cli.__file__).parent.rglob("*.py")
    assert [file.name for file in files if re.search(r"\bConsole\(", file.read_text())] == []


def test_a_fault_of_ours_is_70_where_its_traceback_cannot_be_kept(
    ndbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("gone")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ndbench.matrix.expand.expand", broken)
    monkeypatch.setattr("tempfile.mkstemp", full)
    result = ndbench("show", "suite=smoke")
    assert result.code == 70
    assert result.err.startswith("ndbench: internal error: KeyError: 'gone' (traceback not kept: ")
