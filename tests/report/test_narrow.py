"""However wide the terminal says it is, or does not, what was measured is told and kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndbench.results.store import RunFolder
from tests.cli.conftest import Command
from tests.cli.conftest import ndbench as ndbench
from tests.records import repeats

WIDTHS = ["0", "00", "1", "2", "-5", "wide", "", "24", "9" * 30]


@pytest.fixture
def run(ndbench: Command) -> RunFolder:
    folder = RunFolder.create("results", "20261130-061500-ab12cd")
    for record in repeats():
        folder.write_record(record)
    return folder


@pytest.mark.parametrize("columns", WIDTHS)
def test_every_table_is_printed_at_any_width(
    ndbench: Command, run: RunFolder, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for argv in (["show", "suite=smoke"], ["list", "models"], ["report", "latest"], ["-h"], ["baseline", "list"]):
        result = ndbench(*argv)
        assert result.code == 0, (argv, result.err)
        assert result.out


def test_a_width_of_zero_is_none(ndbench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    unset = ndbench("list", "models").out
    monkeypatch.setenv("COLUMNS", "0")
    assert ndbench("list", "models").out == unset


def test_the_verdict_is_written_before_anything_is_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from rich.console import Console

    from ndbench.config import GateConfig
    from ndbench.run import finish as module
    from ndbench.run.plan import Plan
    from tests.records import repeats

    folder = RunFolder.create(tmp_path, "run")
    for record in repeats():
        folder.write_record(record)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the terminal has gone")

    monkeypatch.setattr(module, "print_comparison", broken)
    plan = Plan("run", "smoke", [], {}, {}, [], GateConfig(mode="off"), None, None)
    plan.save(folder.plan_path)
    with pytest.raises(RuntimeError, match="the terminal has gone"):
        module.finish(plan, folder, None, Console())
    assert folder.verdict_path.is_file()
    assert (folder.path / "junit.xml").is_file()
