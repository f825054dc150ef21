"""What a report says of making its run the reference: never a command that accepting would refuse."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from ndbench import cli
from ndbench.compare.verdict import compare
from ndbench.config import GateConfig
from ndbench.gate.stored import compare_run
from ndbench.results.schema import Record
from ndbench.results.store import RunFolder, write_json
from tests.records import not_ok, plan_of, repeats


def planted(**measure: Any) -> list[Record]:
    records = repeats()
    for record in records:
        record["cell"] = record["cell"] | {"measure": record["cell"]["measure"] | measure}
    return records


def stored(folder: Path, records: list[Record]) -> RunFolder:
    """A finished run below ``folder``/runs with its verdict."""
    run = RunFolder.create(folder, records[0]["run"])
    for record in records:
        run.write_record(record)
    plan = {"run": records[0]["run"], "suite": "hsdp_tp", "cells": plan_of(records), "overrides": ["suite=hsdp_tp"]}
    write_json(run.plan_path, plan)
    write_json(run.verdict_path, compare_run(run, None).to_json())
    return run


def reports(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The three reports of a run, as the verb prints and writes them."""
    results = str(run.path.parent.parent)
    page, text = run.path / "out.html", run.path / "out.md"
    assert cli.main(["report", run.path.name, "--results-dir", results]) == 0
    terminal = " ".join(capsys.readouterr().out.split())
    assert cli.main(["report", run.path.name, "--results-dir", results, "--html", str(page)]) == 0
    assert cli.main(["report", run.path.name, "--results-dir", results, "--markdown", str(text)]) == 0
    body = page.read_text().partition("</style>")[2].partition('<script type="text/plain"')[0]
    capsys.readouterr()
    return {"terminal": terminal, "html": body, "markdown": text.read_text()}


def test_a_planted_slowdown_is_said_in_every_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, text in reports(stored(tmp_path, planted(handicap=0.3)), capsys).items():
        assert "measure.handicap=0.3 was planted in fsdp8" in text, kind


def test_a_slowdown_of_other_cells_is_none_of_this_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stored(tmp_path, planted(handicap=0.3, handicap_cells="ddp8"))
    assert "planted" not in reports(run, capsys)["terminal"]
    words = ["baseline", "accept", run.path.name, "--reason", "x", "--results-dir", str(tmp_path)]
    assert cli.main(words) == 0


def test_a_slowdown_planted_in_the_other_run_is_said_as_well() -> None:
    from tests.compare.helpers import baseline_of

    head = repeats()
    found = compare(head, baseline_of(planted(handicap=0.3)), plan_of(head), GateConfig())
    assert any("handicap=0.3 was planted in fsdp8 of results" in note for note in found.notes)


def mixed(part: str) -> list[Record]:
    records = repeats()
    records[1]["fingerprint"] = records[1]["fingerprint"] | {part: {"other": "thing"}}
    return records


def of_two_configurations() -> list[Record]:
    records = repeats()
    records[1]["cell_id"] = "0" * 12
    return records


REFUSED = {
    "handicap": planted(handicap=0.3),
    "a failed repeat": [*repeats(count=2), not_ok("failed", repeat=2)],
    "a lost step": repeats(loss=[5.0, None, *[4.0] * 10]),
    "two machines": mixed("hardware"),
    "two softwares": mixed("software"),
    "two configurations": of_two_configurations(),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_no_report_offers_what_accepting_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    run = stored(tmp_path, REFUSED[kind])
    words = ["baseline", "accept", run.path.name, "--reason", "x", "--results-dir", str(tmp_path)]
    assert cli.main(words) == 2, "it is one that accepting refuses"
    capsys.readouterr()
    for where, text in reports(run, capsys).items():
        assert "baseline accept" not in text, where


def test_a_regressed_cell_that_cannot_be_accepted_has_no_command_for_it(tmp_path: Path) -> None:
    from ndbench.report import facts
    from tests.compare.helpers import baseline_of, decide

    head = planted(handicap=2.0)
    for record in head:
        record["steps"]["seconds"] = [0.3] * 12
    comparison = decide(head, baseline_of(*[repeats()] * 3))
    (cell,) = comparison.cells
    assert cell.verdict == "regressed"
    stands = facts.standing_of(head, tmp_path / "runs" / "r")
    assert facts.deliberate_command(comparison, cell, tmp_path / "runs" / "r", stands) is None
    assert facts.deliberate_command(comparison, cell, tmp_path / "runs" / "r") is not None


def test_a_damaged_baseline_is_not_offered_to_be_added_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stored(tmp_path, repeats())
    session = tmp_path / "baselines" / "cpu_x8" / "hsdp_tp" / "s0" / "session.json"
    session.parent.mkdir(parents=True)
    session.write_text("{")
    words = ["baseline", "accept", run.path.name, "--reason", "x", "--results-dir", str(tmp_path)]
    assert cli.main(words) == 2
    capsys.readouterr()
    assert "baseline accept" not in reports(run, capsys)["terminal"]


def test_a_run_that_became_the_reference_says_so_and_offers_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored(tmp_path, repeats())
    before = reports(run, capsys)
    command = f'ndbench baseline accept {run.path.name} --results-dir {tmp_path} --reason "…"'
    assert command in before["terminal"]
    assert "NO BASELINE" in before["terminal"]
    assert cli.main([*shlex.split(command)[1:-1], "first"]) == 0
    capsys.readouterr()
    for where, text in reports(run, capsys).items():
        assert "NO BASELINE" not in text, where
        assert "baseline accept" not in text, where
        assert "ACCEPTED: 1 cell of hsdp_tp, the reference since" in text, where
        assert "accepted since, as" in text, where
