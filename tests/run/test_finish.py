"""The end of a run: what is printed is what is returned, also when nothing can be written any more."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ndbench.config import GateConfig
from ndbench.failures import exit_of
from ndbench.run import finish
from ndbench.run.plan import Plan
from tests.records import a_cell, repeats
from tests.report.test_accepting import stored


def the_plan() -> Plan:
    cell = a_cell("fsdp8")
    return Plan(
        run="r",
        suite="hsdp_tp",
        overrides=["suite=hsdp_tp"],
        cells={cell.name: cell},
        repeats={cell.name: 3},
        order=[],
        gate=GateConfig(),
        baseline=None,
        budget_seconds=None,
    )


def test_a_disk_that_fills_while_reports_are_written_prints_the_code_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored(tmp_path, repeats())
    run.verdict_path.unlink()

    def full(path: Path, _text: Any) -> None:
        raise OSError(errno.ENOSPC, f"cannot write {path}: No space left on device")

    monkeypatch.setattr(finish, "write_text", full)
    stream = io.StringIO()
    with pytest.raises(OSError, match="No space left") as caught:
        finish.finish(the_plan(), run, None, Console(file=stream, width=200))
    assert exit_of(caught.value, []) == 2
    printed = stream.getvalue()
    assert "exit 2: the verdict is not kept" in printed
    assert "exit 0" not in printed
    assert "20,480" in printed, "what was measured is shown all the same"


def test_the_verdict_is_written_before_its_exit_code_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stored(tmp_path, repeats())
    run.verdict_path.unlink()
    seen: list[bool] = []
    monkeypatch.setattr(finish, "print_comparison", lambda *_, **__: seen.append(run.verdict_path.is_file()))
    assert finish.finish(the_plan(), run, None, Console(file=io.StringIO())) == 0
    assert seen == [True]
