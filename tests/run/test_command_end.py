"""A script of the user's own: what its lines mean, and how its end is told."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ndbench.config import Cell, Config, EngineConfig
from ndbench.engines import command
from ndbench.engines.command import CommandEngine

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
    with pytest.raises(RuntimeError, match="exit code 0 after 1 step lines"):
        engine.step(BATCH)
    engine.close()
