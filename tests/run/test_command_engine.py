"""A script of the user's behind ``engine=command``: whatever it prints or starts, steps are read and nothing stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from ndbench.config import Cell, Config, EngineConfig
from ndbench.engines.command import CommandEngine, ScriptError
from ndbench.engines.protocol import Batch
from ndbench.parallel.mesh import Mesh
from ndbench.run.process import adopt_orphans

NOTHING: Any = None


def _started(script: Path, text: str) -> CommandEngine:
    script.write_text(text)
    config = Config(world_size=1, engine=EngineConfig(name="command", command=f"python {script}"))
    engine = CommandEngine()
    engine.setup(Cell("one", "test", config), cast(Mesh, NOTHING))
    return engine


def test_bytes_that_are_no_text_are_no_step_and_no_error(tmp_path: Path) -> None:
    text = "import sys\nsys.stdout.buffer.write(b'\\xff\\xfe\\x80 bar\\n{\"loss\": 2.5}\\n')\n"
    engine = _started(tmp_path / "noisy.py", text)
    try:
        assert engine.step(cast(Batch, NOTHING)).loss == 2.5
    finally:
        engine.close()


@pytest.fixture
def adopting() -> Iterator[None]:
    """As a rank does: processes that lose their parent stay below this one."""
    adopt_orphans()
    yield
    adopt_orphans(False)


def test_what_the_script_started_ends_with_it_a_daemon_of_its_own_session_too(tmp_path: Path, adopting: None) -> None:
    told = tmp_path / "pids"
    text = (
        "import os, pathlib, subprocess\n"
        "left = [subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid]\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n"  # the classical daemon: fork, session, fork
        "    os.setsid()\n"
        "    daemon = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL)\n"
        "    os.write(write, str(daemon.pid).encode())\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "left.append(int(os.read(read, 20)))\n"
        f"pathlib.Path({str(told)!r}).write_text(' '.join(map(str, left)))\n"
        "print('{\"loss\": 2.5}')\n"
    )
    engine = _started(tmp_path / "parent.py", text)
    engine.step(cast(Batch, NOTHING))
    engine.close()
    left = [int(pid) for pid in told.read_text().split()]
    try:
        assert len(left) == 2
        assert not [pid for pid in left if _alive(pid)]
    finally:
        for pid in left:
            if _alive(pid):
                psutil.Process(pid).kill()


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_lines_that_were_all_there_at_once_are_no_step_times(tmp_path: Path) -> None:
    """A script that keeps its output back until its end would be a thousand times too fast."""
    steps = Config().training.steps
    engine = _started(tmp_path / "burst.py", f"print('{{\"loss\": 2.5}}\\n' * {steps}, flush=True)\n")
    for _ in range(steps - 1):
        engine.step(cast(Batch, NOTHING))
    with pytest.raises(ScriptError, match=rf"of the {steps} step lines were there at once: print and flush"):
        engine.step(cast(Batch, NOTHING))
    engine.close()


def test_nothing_runs_before_the_first_step_is_asked_for(tmp_path: Path) -> None:
    began = tmp_path / "began"
    text = f"import pathlib, time\npathlib.Path({str(began)!r}).touch()\nprint('{{\"loss\": 1.0}}')\n"
    engine = _started(tmp_path / "late.py", text)
    assert engine._process is None
    engine.step(cast(Batch, NOTHING))
    assert began.exists()
    engine.close()
