"""A script of the user's own: what its lines mean, and how its end is told."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ndbench.config import Cell, Config, EngineConfig
from ndbench.engines import command
from ndbench.engines.command import CommandEngine, ScriptError
from ndbench.run.worker import closing

BATCH: Any = SimpleNamespace()
LINE = 'print(\'{"loss": 1.5, "tokens": 7}\', flush=True)'


def started(tmp_path: Path, code: str) -> CommandEngine:
    script = tmp_path / "script.py"
    script.write_text(code)
    config = Config(engine=EngineConfig(name="command", command=f"{sys.executable} {script}"))
    cell = Cell("c", "s", config)
    engine = CommandEngine()
    assert engine.refuse(cell) is None
    engine.setup(cell, BATCH)
    return engine


@pytest.mark.timeout(60)
def test_a_line_with_a_loss_is_a_step_and_everything_else_is_not(tmp_path: Path) -> None:
    engine = started(tmp_path, f"print('hello')\nprint('{{}}')\nprint('{{broken')\n{LINE}\n")
    step = engine.step(BATCH)
    assert (step.loss, step.grad_norm, step.tokens) == (1.5, None, 7)
    engine.close()


@pytest.mark.timeout(60)
def test_a_script_that_fails_after_its_last_step_is_not_well(tmp_path: Path) -> None:
    engine = started(tmp_path, f"{LINE}\nraise SystemExit(3)\n")
    engine.step(BATCH)
    with pytest.raises(RuntimeError, match="exit code 3 after its last step"):
        engine.close()


@pytest.mark.timeout(60)
def test_the_steps_of_a_script_that_aborts_at_its_very_end_count_and_its_log_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As torch's gloo threads do to a sound DDP script now and then; a segmentation fault is another matter."""
    engine = started(tmp_path, f"import os\n{LINE}\nos.abort()\n")
    engine.step(BATCH)
    engine.close()
    assert "SIGABRT" in capfd.readouterr().err
    engine = started(tmp_path, f"import os, signal\n{LINE}\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    engine.step(BATCH)
    with pytest.raises(RuntimeError, match="exit code -11"):
        engine.close()


@pytest.mark.timeout(60)
def test_a_script_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CLOSING_SECONDS", 1.0)
    engine = started(tmp_path, f"import time\n{LINE}\ntime.sleep(60)\n")
    engine.step(BATCH)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="did not end within 1 s"):
        engine.close()
    assert time.monotonic() - began < 20


@pytest.mark.timeout(60)
def test_a_script_that_prints_more_than_a_pipe_holds_after_its_last_step_ends(tmp_path: Path) -> None:
    engine = started(tmp_path, f"{LINE}\nfor _ in range(20000): print('x' * 100)\n")
    assert engine.step(BATCH).loss == 1.5
    engine.close()
    assert engine._process is not None
    assert engine._process.returncode == 0


@pytest.mark.timeout(60)
def test_a_script_that_ends_too_early_says_after_how_many_steps(tmp_path: Path) -> None:
    engine = started(tmp_path, f"{LINE}\n")
    engine.step(BATCH)
    with pytest.raises(RuntimeError, match=r"exit code 0 after step 0 \(1 of 12 step lines\); rank 0 must print"):
        engine.step(BATCH)
    engine.close()


@pytest.mark.timeout(60)
def test_a_crash_is_told_with_its_step_and_the_scripts_own_exception(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = started(tmp_path, f"{LINE}\n{LINE}\nprint(undefined_name)\n")
    engine.step(BATCH)
    engine.step(BATCH)
    began = time.time()
    told = r"exit code 1 after step 1 \(2 of 12 step lines\): NameError: name 'undefined_name' is not defined"
    with pytest.raises(ScriptError, match=told) as caught:
        engine.step(BATCH)
    engine.close()  # has nothing to add
    assert caught.value.failed_at is not None
    assert began - 5 < caught.value.failed_at <= time.time()
    assert "print(undefined_name)" in capfd.readouterr().err, "the script's own traceback is in the log"


@pytest.mark.timeout(60)
def test_a_crash_before_the_first_step_behind_a_ranks_prefix(tmp_path: Path) -> None:
    said = "[rank1]: Traceback (most recent call last):\\n[rank1]:   File x\\n[rank1]: my.Boom: no\\nlater noise\\n"
    engine = started(tmp_path, f"import sys\nsys.stderr.write('{said}')\nsys.exit(7)\n")
    with pytest.raises(ScriptError, match=r"exit code 7 before its first step line: my\.Boom: no$"):
        engine.step(BATCH)
    engine.close()


@pytest.mark.timeout(60)
def test_a_script_ended_for_its_silence_says_so(tmp_path: Path) -> None:
    engine = started(tmp_path, f"import os, time\n{LINE}\ntime.sleep(1)\nos.kill(os.getpid(), {signal.SIGUSR1:d})\n")
    engine.step(BATCH)
    with pytest.raises(ScriptError, match=r"printed nothing for 1 s after step 0 .* and was ended"):
        engine.step(BATCH)
    engine.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("rank", "lines"), [("0", 0), ("1", 1)])
def test_only_another_rank_than_0_may_print_no_line_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, lines: int
) -> None:
    monkeypatch.setenv("RANK", rank)
    engine = started(tmp_path, f"{LINE}\n" * lines)
    for _ in range(lines):
        engine.step(BATCH)
    with pytest.raises(ScriptError, match="rank 0 must print one JSON object"):
        engine.step(BATCH)
    engine.close()
    monkeypatch.setenv("RANK", "1")
    engine = started(tmp_path, "print('hello')\n")
    assert engine.step(BATCH).loss != engine.step(BATCH).loss, "no number"
    assert engine.silent
    engine.close()
    engine = started(tmp_path, "raise SystemExit(4)\n")
    with pytest.raises(ScriptError, match="exit code 4 before its first"):
        engine.step(BATCH)
    engine.close()


@pytest.mark.timeout(60)
def test_a_step_that_cannot_be_read_ends_the_script_at_once(tmp_path: Path) -> None:
    engine = started(tmp_path, "import time\nprint('{\"loss\": true}', flush=True)\ntime.sleep(50)\n")
    with pytest.raises(ValueError, match="not a number"):
        engine.step(BATCH)
    began = time.monotonic()
    with pytest.raises(ScriptError):
        engine.close()
    assert time.monotonic() - began < 10


def test_what_close_raises_never_hides_an_earlier_error(capsys: pytest.CaptureFixture[str]) -> None:
    class Clumsy:
        def close(self) -> None:
            raise RuntimeError("from close")

    engine: Any = Clumsy()
    with pytest.raises(ValueError, match="the cause"), closing(engine):
        raise ValueError("the cause")
    assert "close() raised RuntimeError: from close" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="from close"), closing(engine):
        pass
