"""Checkpoints are gated: bytes exactly, seconds as step times are; whoever does not measure them is not bothered."""

from __future__ import annotations

import pytest

from ndbench.compare.checkpoints import BYTES, SECONDS
from ndbench.results.schema import Record, metric
from tests.compare.helpers import baseline_of, decide, only
from tests.records import MIB, repeats


def measured(factor: float = 1.0, size: int = 10 * MIB, which: str = "") -> list[Record]:
    """Three repeats; ``factor`` on the seconds whose metric's name holds ``which``."""
    records = repeats()
    for record in records:
        seconds = dict.fromkeys(SECONDS, 0.5 * (1 + 0.01 * record["repeat"]))
        record["metrics"] |= {
            name: metric(value * (factor if which in name else 1.0), "s", "lower") for name, value in seconds.items()
        }
        record["metrics"][BYTES] = metric(size, "B", "lower")
    return records


BASELINE = baseline_of(*[measured(factor) for factor in (1.0, 1.03, 0.98)])


def verdicts(head: list[Record]) -> dict[str, str]:
    return {each.metric: each.verdict for each in only(decide(head, BASELINE)).metrics}


def test_equal_checkpoints_pass() -> None:
    found = verdicts(measured())
    assert {found[name] for name in (*SECONDS, BYTES)} == {"pass"}
    assert only(decide(measured(), BASELINE)).verdict == "pass"


@pytest.mark.parametrize("name", SECONDS)
def test_a_slower_one_is_regressed_by_name_and_nothing_else_is(name: str) -> None:
    head = measured(3.0, which=name)
    found = verdicts(head)
    assert [metric for metric, verdict in found.items() if verdict == "regressed"] == [name]
    cell = only(decide(head, BASELINE))
    assert cell.verdict == "regressed"
    assert cell.reasons[0].startswith(f"{SECONDS[name]} +19")
    one = cell.metric(name)
    assert one is not None
    assert one.change == pytest.approx(1.99, abs=0.02)
    assert decide(head, BASELINE).exit_code == 1


def test_a_faster_one_is_improved() -> None:
    assert verdicts(measured(0.3, which="load"))["checkpoint_load_seconds"] == "improved"


@pytest.mark.parametrize(("size", "verdict"), [(10 * MIB + 1, "regressed"), (10 * MIB - 1, "improved")])
def test_bytes_are_exact(size: int, verdict: str) -> None:
    assert verdicts(measured(size=size))[BYTES] == verdict


def test_a_side_that_did_not_measure_them_is_told_and_decides_nothing() -> None:
    cell = only(decide(repeats(), BASELINE))
    assert cell.verdict == "pass"
    one = cell.metric("checkpoint_save_seconds")
    assert one is not None
    assert (one.verdict, one.reason) == (
        "incomparable",
        "checkpoints were not measured in this run, as in the baseline (measure.checkpoint)",
    )
    assert only(decide(measured(), baseline_of(repeats()))).metric(BYTES).verdict == "incomparable"  # type: ignore[union-attr]


def test_where_nobody_measures_them_nothing_is_said() -> None:
    cell = only(decide(repeats(), baseline_of(repeats(), repeats(), repeats())))
    assert not any("checkpoint" in each.metric for each in cell.metrics)
    assert not any("checkpoint" in note for note in cell.notes)


def test_one_rank_has_no_other_layout_and_is_still_judged() -> None:
    head = measured()
    for record in head:
        record["metrics"]["checkpoint_reshard_seconds"] = metric(None, "s", "lower", "there is no other layout")
    base = [dict(record) for record in head]
    found = {each.metric: each.verdict for each in only(decide(head, baseline_of(base, base, base))).metrics}
    assert found["checkpoint_load_seconds"] == "pass"
    assert "checkpoint_reshard_seconds" not in found


def test_a_run_says_what_it_measured() -> None:
    notes = only(decide(measured(), None)).notes
    assert "checkpoints: save 0.505 s, async stall 0.505 s, load 0.505 s, reshard 0.505 s, size 10.00 MiB" in notes
