"""A script of the user's behind ``engine=command``: whatever it prints or starts, steps are read and nothing stays."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import psutil

from ndbench.config import Cell, Config, EngineConfig
from ndbench.engines.command import CommandEngine
from ndbench.engines.protocol import Batch
from ndbench.parallel.mesh import Mesh

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


def test_what_the_script_started_ends_with_it(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    text = (
        "import pathlib, subprocess\n"
        "left = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL)\n"
        f"pathlib.Path({str(told)!r}).write_text(str(left.pid))\n"
        "print('{\"loss\": 2.5}')\n"
    )
    engine = _started(tmp_path / "parent.py", text)
    engine.step(cast(Batch, NOTHING))
    engine.close()
    left = int(told.read_text())
    end = time.monotonic() + 5
    try:
        while _alive(left) and time.monotonic() < end:
            time.sleep(0.05)
        assert not _alive(left)
    finally:
        if _alive(left):
            psutil.Process(left).kill()


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
