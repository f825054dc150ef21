"""Commands run in this process, in an empty folder, on a machine without GPUs whatever it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest


class Result(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture
def ndbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """``ndbench("show", "suite=smoke")`` -> exit code, output, errors."""
    from ndbench.cli import main
    from ndbench.matrix import resolve

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for variable in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)
    resolve.visible.cache_clear()

    def run(*argv: str) -> Result:
        code = main(argv)
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return run


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attempt to start ranks, or the server they come from, fails the test."""
    from ndbench.run import launch

    def started(*_: object, **__: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(launch, "launch", started)
    monkeypatch.setattr(launch, "start_fork_server", started)
