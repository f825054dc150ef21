"""The selftest's own judgement, on records made up; CI runs the whole of it as a job of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from ndbench.compare.confirm import ConfirmRule, decide
from ndbench.gate import selftest
from ndbench.gate.faulty import FAULTS, FaultyEngine
from ndbench.gate.pairs import CPU, WALL
from ndbench.gate.selftest import EXPECTED, Row, Selftest
from ndbench.report.selftest import print_selftest
from tests.compare.helpers import baseline_of
from tests.records import a_cell, a_record

RULE = ConfirmRule(0.05, 0.08, looks=(6, 12))


def verdict(**changed: object) -> Row:
    fault = str(changed.pop("fault"))
    record = a_record(**changed)  # type: ignore[arg-type]
    return selftest._row(fault, selftest.judge([record], baseline_of([a_record()]), a_cell()))


def test_a_fault_that_changes_nothing_counts_as_not_caught() -> None:
    for fault in FAULTS:
        row = verdict(fault=fault)
        assert not row.caught, fault
    assert verdict(fault="memory leak", peak=200 * 2**20).caught


def test_another_metric_that_objects_does_not_count_as_the_right_one() -> None:
    assert not verdict(fault="all-gather", peak=200 * 2**20).caught


def test_a_record_that_lost_a_step_is_regressed() -> None:
    cut = selftest.without_last_step(a_record())
    row = selftest._row("missing step", selftest.judge([cut], baseline_of([a_record()]), a_cell()))
    assert row.caught
    assert "11 of 12 steps" in row.said


def test_every_planted_fault_has_an_expectation() -> None:
    assert set(FAULTS) | {"missing step", "missing cell"} == set(EXPECTED)


def test_on_a_cpu_thirty_percent_must_be_caught_and_nothing_planted_must_be_quiet() -> None:
    def decisions(effect: float) -> dict[str, object]:
        values = [effect + 0.001 * (-1) ** n for n in range(6)]
        return dict(decide({WALL: values, CPU: values}, RULE))

    made = {h: decisions(h) for h in (0.0, 0.03, 0.1, 0.3)}
    rows = {row.planted: row for row in selftest._speed_rows(made, a_cell())}  # type: ignore[arg-type]
    assert [row.must for row in rows.values()] == [True, False, False, True]
    assert [row.caught for row in rows.values()] == [True, False, True, True]
    blind = selftest._speed_rows({0.0: decisions(0.2), 0.3: decisions(0.0)}, a_cell())  # type: ignore[dict-item]
    assert [row.caught for row in blind] == [False, False]
    gpu = {row.planted: row.must for row in selftest._speed_rows(made, a_cell(device="cuda"))}  # type: ignore[arg-type]
    assert gpu == {"no slowdown": True, "3% slower": False, "10% slower": True, "30% slower": True}


def test_only_what_must_be_caught_fails_it_and_the_table_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row("nothing", True, True, "as before"), Row("3% slower", False, False, "unseen")]
    found = Selftest(rows, 0.07, 6, 100.0, (1.0, 2.0, 3.0), "fsdp2")
    assert found.passed
    failed = Selftest([*rows, Row("nan", True, False, "pass")], 0.07, 6, 100.0, (1.0, 2.0, 3.0), "fsdp2")
    assert not failed.passed
    console = Console(width=100, force_terminal=False)
    for one in (found, failed):
        print_selftest(one, console)
    said = capsys.readouterr().out
    assert "smallest slowdown that these 6 pairs show in nine of ten cases: 7.0%" in said
    assert "PASSED" in said
    assert "FAILED" in said


def test_an_unknown_fault_is_refused_by_name(tmp_path: Path) -> None:
    plan = tmp_path / "fault"
    plan.write_text("earthquake")
    with pytest.raises(ValueError, match="names the fault 'earthquake'"):
        FaultyEngine(str(plan)).setup(a_cell(), None)  # type: ignore[arg-type]
