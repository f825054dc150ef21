"""A run without a verdict says so and how to go on; a broken verdict is a line, not a fault of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndbench.cli import main
from ndbench.config import GateConfig
from ndbench.failures import Terminated
from ndbench.results.store import RunFolder
from ndbench.run import finish, launch, runner
from ndbench.run.plan import Plan
from tests.records import a_cell, repeats

RUN = "20261130-061500-ab12cd"


@pytest.fixture
def nothing_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every repeat is stored, and may be of another machine: only the end of the run is gone through."""
    monkeypatch.setattr(launch, "start_fork_server", lambda *_: None)
    monkeypatch.setattr(runner, "refuse_other_environment", lambda *_, **__: None)


def a_run(results: Path, measured: int) -> RunFolder:
    """A run of two cells, three repeats each, ended after ``measured`` of them."""
    folder = RunFolder.create(results, RUN)
    cells = {name: a_cell(name) for name in ("ddp8", "fsdp8")}
    order = [(name, repeat) for repeat in range(3) for name in cells]
    Plan(
        run=RUN,
        suite="hsdp_tp",
        overrides=["suite=hsdp_tp"],
        cells=cells,
        repeats=dict.fromkeys(cells, 3),
        order=order,
        gate=GateConfig(),
        baseline=None,
        budget_seconds=None,
    ).save(folder.plan_path)
    records = {(name, record["repeat"]): record for name in cells for record in repeats(name)}
    for key in order[:measured]:
        folder.write_record(records[key])
    return folder


@pytest.mark.parametrize("measured", [0, 3])
def test_a_run_that_was_ended_early_is_reported_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], measured: int
) -> None:
    monkeypatch.chdir(tmp_path)
    a_run(Path("results"), measured)
    assert main(["report", "latest"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("NOT FINISHED: 2 cells of hsdp_tp\n")
    assert f"no verdict yet: {measured} of 6 repeats measured" in out
    assert f"go on with: ndbench --resume {RUN}" in out
    assert "none yet" not in out
    assert "accept" not in out
    for flag in ("--markdown", "--html"):
        assert main(["report", "latest", flag, "page"]) == 0
        assert "NOT FINISHED" in Path("page").read_text()


def test_the_way_to_go_on_names_another_results_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    a_run(Path("my results"), 1)
    assert main(["report", "latest", "--results-dir", "my results"]) == 0
    assert f"ndbench --resume {RUN} 'results.dir=my results'" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "it is not a verdict"),
        ("3", "it is not a verdict"),
        ("{}", "verdict has schema None, this ndbench reads 1"),
        ('{"schema_version": 1}', "it is not a whole verdict"),
        ('{"schema_version": 1, "cells": [3]}', "it is not a whole verdict"),
        ('{"schema_version": 1, "cells": []}', "it is not a whole verdict"),
        ('{"schema_version": 99}', "verdict has schema 99"),
        ("", "the file is empty"),
    ],
)
def test_a_broken_verdict_is_one_line_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    a_run(Path("results"), 6).verdict_path.write_text(content)
    assert main(["report", "latest"]) == 2
    err = capsys.readouterr().err
    assert f"cannot read results/runs/{RUN}/verdict.json: " in err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("error", "code"), [(Terminated, 143), (KeyboardInterrupt, 130)])
def test_what_ends_the_pairs_of_the_gate_leaves_a_run_to_go_on_with(
    nothing_to_launch: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: type[BaseException],
    code: int,
) -> None:
    monkeypatch.chdir(tmp_path)

    def ended(*_: object) -> None:
        raise error

    folder = a_run(Path("results"), 6)
    with monkeypatch.context() as during:
        during.setattr(finish, "confirm_suspects", ended)
        assert main(["--resume", RUN]) == code
    out = capsys.readouterr().out
    assert f"stopped in the middle; go on with: ndbench --resume {RUN}" in out
    assert not folder.verdict_path.exists()
    assert main(["--resume", RUN]) == 0
    assert folder.verdict_path.exists()


def test_the_headline_without_a_baseline_is_a_sentence(
    nothing_to_launch: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    a_run(Path("results"), 6)
    assert main(["--resume", RUN]) == 0
    assert "NO BASELINE: 2 cells of hsdp_tp, compared with nothing yet\n" in capsys.readouterr().out
