from __future__ import annotations

from xml.etree import ElementTree

import pytest

from ndbench.compare.result import Comparison
from ndbench.report import annotations, junit
from tests.compare.helpers import baseline_of, decide
from tests.records import MIB, a_record, not_ok, repeats


def suite_of(comparison: Comparison) -> ElementTree.Element:
    return ElementTree.fromstring(junit.render(comparison).encode())[0]


def mixed() -> Comparison:
    fat = repeats("slow", peak=300 * MIB)
    head = [*repeats("fine"), *fat, not_ok("failed", "broken", reason="rank 1: it's <b>bad</b> & \x00wrong")]
    base = [r for name in ("fine", "slow", "broken", "gone") for r in repeats(name)]
    return decide(head, baseline_of(base))


def test_a_cell_is_a_test_case_and_its_verdict_the_result() -> None:
    suite = suite_of(mixed())
    assert {k: suite.get(k) for k in ("tests", "failures", "errors")} == {"tests": "4", "failures": "1", "errors": "2"}
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert cases["slow"].find("failure") is not None
    assert cases["broken"].find("error") is not None
    assert cases["gone"].find("error") is not None
    assert cases["gone"].find("error").get("type") == "missing"  # type: ignore[union-attr]


def test_what_a_log_says_cannot_break_the_document() -> None:
    error = next(case for case in suite_of(mixed()).iter("testcase") if case.get("name") == "broken").find("error")
    assert error is not None
    assert "it's <b>bad</b> & wrong" in (error.text or "")


@pytest.mark.parametrize("mode", ["auto", "require"])
def test_a_run_that_fails_without_a_failing_cell_still_has_an_error(mode: str) -> None:
    from ndbench.config import GateConfig

    suite = suite_of(decide(repeats(), None, gate=GateConfig(mode=mode)))
    assert suite.get("errors") == ("1" if mode == "require" else "0")
    assert suite.get("skipped") == "1"


def test_annotations_are_one_line_each_and_carry_no_commands_of_a_log() -> None:
    found = annotations.lines(decide([not_ok("failed", reason="a\n::error::planted 100%")], baseline_of([a_record()])))
    assert len(found) == 1
    assert found[0].startswith("::error title=fsdp8%3A invalid::")
    assert "\n" not in found[0]
    assert "100%25" in found[0]


def test_many_cells_are_counted_and_the_exit_is_said_when_no_cell_does() -> None:
    names = [f"c{n:02d}" for n in range(30)]
    head = [r for name in names for r in repeats(name, peak=300 * MIB)]
    found = annotations.lines(decide(head, baseline_of([r for name in names for r in repeats(name)])))
    assert len(found) == 11
    assert "20 more cells" in found[-1]
    empty = annotations.lines(decide([], None, plan=[]))
    assert empty == ["::error title=ndbench::exit 3: no cell was measured: an empty result is not a green one"]
