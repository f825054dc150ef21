"""Every degenerate input with its verdict and its exit code; each is a fault that other gates have let through."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ndbench.compare.result import from_json, worst
from ndbench.config import GateConfig
from ndbench.results.sessions import Baseline
from tests.compare.helpers import baseline_of, decide, only, session_of
from tests.records import MIB, a_record, changed_training, not_ok, plan_of, repeats

SLOW = 0.3
REQUIRE = GateConfig(mode="require")


def three(**fields: Any) -> Baseline:
    return baseline_of(*[repeats(**fields) for _ in range(3)])


def test_the_same_run_again_passes() -> None:
    comparison = decide(repeats(), three())
    assert (comparison.verdict, comparison.exit_code, comparison.counts) == ("pass", 0, {"pass": 1})
    assert {metric.metric for metric in only(comparison).metrics} == {
        "tokens_per_second",
        "peak_allocated_bytes",
        "structure",
        "tokens",
        "loss",
        "grad_norm",
    }


def test_a_slower_run_under_another_torch_is_regressed_and_names_both_versions() -> None:
    comparison = decide(repeats(seconds=SLOW, torch="2.13.0"), three(torch="2.11.0"))
    assert (comparison.verdict, comparison.exit_code) == ("regressed", 1)
    assert any("torch 2.11.0 → 2.13.0" in note for note in only(comparison).notes)
    assert "step time +200.0%" in only(comparison).reasons[0]


def test_an_equal_run_under_another_torch_passes_and_names_both_versions() -> None:
    comparison = decide(repeats(torch="2.13.0"), three(torch="2.11.0"))
    assert comparison.exit_code == 0
    assert any("torch 2.11.0 → 2.13.0" in note for note in only(comparison).notes)


def test_another_host_name_changes_nothing() -> None:
    head = repeats(seconds=SLOW)
    for record in head:
        record["fingerprint"] = record["fingerprint"] | {"informational": {"host": "renamed"}}
    assert decide(head, three()).exit_code == 1


def test_other_hardware_makes_time_incomparable_and_says_what_changed() -> None:
    comparison = decide(repeats(seconds=SLOW, hardware={"device": "cpu", "model": "Zen 5", "ranks": 8}), three())
    cell = only(comparison)
    assert (cell.verdict, comparison.exit_code) == ("pass", 0)
    assert cell.metric("tokens_per_second").verdict == "incomparable"  # type: ignore[union-attr]
    assert any("model Zen 4 → Zen 5" in note for note in cell.notes)
    assert comparison.notes == ["speed was compared in no cell: the baseline is from other hardware"]


# --- no baseline, new, missing, renamed, changed --------------------------------------------------------------------


def test_without_a_baseline_a_run_is_measured_and_exits_0_or_4_when_one_is_required() -> None:
    for baseline in (None, Baseline("somewhere")):
        auto = decide(repeats(), baseline)
        assert (only(auto).verdict, auto.exit_code) == ("no_baseline", 0)
        required = decide(repeats(), baseline, gate=REQUIRE)
        assert required.exit_code == 4
        assert "gate.mode=require" in required.exit_reason


def test_a_new_cell_is_said_and_never_fails() -> None:
    comparison = decide([*repeats("fsdp8"), *repeats("new")], three())
    assert comparison.cell("new").verdict == "new"
    assert (comparison.exit_code, comparison.counts) == (0, {"pass": 1, "new": 1})
    assert decide(repeats("new"), three(), unselected=[{"name": "fsdp8"}], gate=REQUIRE).exit_code == 4


def test_a_cell_removed_from_the_suite_is_missing_exit_3() -> None:
    comparison = decide(repeats("fsdp8"), baseline_of([*repeats("fsdp8"), *repeats("ddp8")]))
    assert comparison.cell("ddp8").verdict == "missing"
    assert comparison.exit_code == 3
    assert "ddp8" in comparison.exit_reason


def test_a_cell_that_the_suite_excludes_now_is_missing_with_the_reason() -> None:
    stored = baseline_of([*repeats("fsdp8"), *repeats("ddp8")])
    comparison = decide(repeats("fsdp8"), stored, excluded=[{"name": "ddp8", "reason": "dp_replicate > 4"}])
    assert comparison.exit_code == 3
    assert "dp_replicate > 4" in comparison.cell("ddp8").reasons[0]


def test_a_cell_not_selected_or_skipped_on_this_machine_is_not_missing() -> None:
    stored = baseline_of([*repeats("fsdp8"), *repeats("ddp8"), *repeats("tp8")])
    comparison = decide(
        repeats("fsdp8"), stored, unselected=[{"name": "ddp8"}], skipped=[{"name": "tp8", "reason": "needs 9 GiB"}]
    )
    assert (comparison.exit_code, comparison.counts) == (0, {"pass": 1})
    assert comparison.notes == ["in the baseline but skipped on this machine: tp8"]


def test_a_cell_whose_engine_skips_every_repeat_is_skipped_not_invalid() -> None:
    head = [*repeats("fsdp8"), *[not_ok("skipped", "tp8", "heads not divisible", repeat=n) for n in range(3)]]
    comparison = decide(head, baseline_of(repeats("fsdp8")))
    assert (comparison.exit_code, len(comparison.cells)) == (0, 1)


def test_a_retired_cell_is_not_missing() -> None:
    stored = Baseline(
        "b", [session_of([*repeats("fsdp8"), *repeats("ddp8")]), session_of(repeats("fsdp8"), 1, retired=("ddp8",))]
    )
    assert decide(repeats("fsdp8"), stored).exit_code == 0


def test_a_renamed_cell_is_still_compared_and_the_old_name_said() -> None:
    renamed = repeats(seconds=SLOW)
    for record in renamed:
        record["cell"] = record["cell"] | {"name": "fsdp8_new"}
    comparison = decide(renamed, three())
    assert (only(comparison).verdict, comparison.exit_code) == ("regressed", 1)
    assert "renamed: the baseline has this configuration as fsdp8" in only(comparison).notes


def test_a_changed_configuration_is_incomparable_and_names_the_keys() -> None:
    head = [changed_training(record, sequence_length=256) for record in repeats(seconds=SLOW)]
    comparison = decide(head, three())
    assert (only(comparison).verdict, comparison.exit_code) == ("incomparable", 4)
    assert "training.sequence_length 128 → 256" in only(comparison).reasons[0]


def test_a_changed_definition_of_the_measurement_is_incomparable_not_regressed() -> None:
    comparison = decide(repeats(seconds=SLOW, cell_version="v2"), three())
    assert (only(comparison).verdict, comparison.exit_code) == ("incomparable", 4)
    assert "cell_version v1 → v2" in only(comparison).reasons[0]


# --- outcomes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "verdict", "code"),
    [
        ("ok", "oom", "regressed", 1),
        ("ok", "timeout", "invalid", 3),
        ("ok", "failed", "invalid", 3),
        ("ok", "invalid", "invalid", 3),
        ("oom", "ok", "improved", 0),
        ("oom", "oom", "pass", 0),
        ("oom", "failed", "invalid", 3),
        (None, "failed", "invalid", 3),
        (None, "timeout", "invalid", 3),
        (None, "oom", "no_baseline", 3),
    ],
)
def test_outcomes_are_compared_before_metrics(before: str | None, after: str, verdict: str, code: int) -> None:
    def group(outcome: str) -> list[dict[str, Any]]:
        return repeats() if outcome == "ok" else [not_ok(outcome, repeat=repeat) for repeat in range(3)]

    comparison = decide(group(after), baseline_of(group(before)) if before else None)
    assert (only(comparison).verdict, comparison.exit_code) == (verdict, code)


def test_one_bad_repeat_of_three_is_enough_and_its_reason_is_said() -> None:
    for outcome, verdict in (("failed", "invalid"), ("timeout", "invalid"), ("oom", "regressed")):
        head = [*repeats(count=2), not_ok(outcome, repeat=2, reason="rank 5 was killed by SIGKILL")]
        cell = only(decide(head, three()))
        assert cell.verdict == verdict
        assert "1 of 3 launched repeats" in cell.reasons[0]
        assert "rank 5 was killed by SIGKILL" in cell.reasons[0]


def test_out_of_memory_before_and_after_passes_and_says_so() -> None:
    both = [not_ok("oom", repeat=repeat) for repeat in range(3)]
    cell = only(decide(both, baseline_of(both)))
    assert cell.metrics[0].reason == "out of memory, as in the baseline (3 of 3 launched repeats)"


def test_out_of_memory_in_one_cell_without_a_baseline_is_data() -> None:
    head = [*repeats("fsdp8"), *[not_ok("oom", "ddp8", repeat=n) for n in range(3)]]
    assert decide(head, None).exit_code == 0


@pytest.mark.parametrize("outcome", ["ok", "invalid"])
def test_a_nan_loss_is_regressed_against_a_finite_baseline_and_invalid_without_one(outcome: str) -> None:
    loss = [5.0] * 5 + [None] + [5.0] * 6
    head = repeats(loss=loss, outcome=outcome, reason="loss is NaN at step 5" if outcome == "invalid" else None)
    against = decide(head, three())
    assert (only(against).verdict, against.exit_code) == ("regressed", 1)
    assert "step 5 of repeat 0 is not finite" in only(against).reasons[0]
    alone = decide(head, None)
    assert (only(alone).verdict, alone.exit_code) == ("invalid", 3)


def test_a_nan_loss_is_invalid_in_a_new_and_in_an_incomparable_cell() -> None:
    head = repeats(loss=[None] * 12)
    assert only(decide(head, three(), plan=[])).verdict == "regressed"
    assert decide([record | {"cell_version": "v2"} for record in head], three()).exit_code == 3
    assert decide(repeats("other", loss=[None] * 12), three(), unselected=[{"name": "fsdp8"}]).exit_code == 3


def test_a_baseline_run_that_failed_is_said_not_compared() -> None:
    stored = baseline_of([not_ok("failed", repeat=repeat) for repeat in range(3)])
    comparison = decide(repeats(), stored)
    assert (only(comparison).verdict, comparison.exit_code) == ("incomparable", 4)
    assert only(comparison).reasons == ["no repeat of the baseline ran to its end"]


# --- empty and partial results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "require", "off"])
@pytest.mark.parametrize("stored", [True, False])
def test_an_empty_result_is_never_0(mode: str, stored: bool) -> None:
    comparison = decide([], three() if stored else None, plan=[], gate=GateConfig(mode=mode))
    assert comparison.exit_code == 3
    assert stored or comparison.exit_reason == "no cell was measured: an empty result is not a green one"


def test_a_planned_cell_without_a_record_is_invalid() -> None:
    comparison = decide(repeats("fsdp8"), None, plan=plan_of([a_record("fsdp8"), a_record("ddp8")]))
    assert comparison.cell("ddp8").verdict == "invalid"
    assert "no repeat was finished" in comparison.cell("ddp8").reasons[0]
    assert comparison.exit_code == 3


def test_fewer_repeats_than_planned_are_said() -> None:
    comparison = decide(repeats(count=2), three(), planned_repeats={"fsdp8": 3})
    assert "2 of 3 planned repeats were measured" in only(comparison).notes
    assert only(comparison).verdict == "inconclusive"


def test_one_repeat_against_one_is_inconclusive_exit_0_or_5_when_asked() -> None:
    head, stored = repeats(count=1, seconds=SLOW), baseline_of(repeats(count=1))
    assert decide(head, stored).exit_code == 0
    asked = decide(head, stored, gate=GateConfig(fail_on_inconclusive=True))
    assert (asked.verdict, asked.exit_code) == ("inconclusive", 5)


def test_the_first_failure_in_the_order_1_3_5_4_gives_the_exit_code() -> None:
    ask = GateConfig(fail_on_inconclusive=True)
    names = ("a", "b", "c", "d")
    stored = baseline_of(*[[record for name in names for record in repeats(name)] for _ in range(3)])
    wrong = {"a": repeats("a", seconds=SLOW), "b": [not_ok("failed", "b")], "c": repeats("c", count=1)}
    different = {"d": repeats("d", cell_version="v2")}
    for keep, code in (("abcd", 1), ("bcd", 3), ("cd", 5), ("d", 4)):
        head = [record for name in keep for record in {**wrong, **different}[name]]
        assert decide(head, stored, gate=ask, unselected=[{"name": name} for name in names]).exit_code == code


def test_the_gate_can_be_off_but_broken_cells_are_still_told() -> None:
    off = GateConfig(mode="off")
    slow = decide(repeats(seconds=SLOW), three(), gate=off)
    assert (slow.exit_code, slow.baseline, only(slow).verdict) == (0, None, "no_baseline")
    assert decide([not_ok("failed")], three(), gate=off).exit_code == 3


# --- notes ---------------------------------------------------------------------------------------------------------


def test_an_old_baseline_is_said() -> None:
    stored = Baseline("b", [session_of(repeats(), -30)])
    assert decide(repeats(), stored).notes == ["the newest baseline session is 50 days old: accept a fresh one"]
    assert decide(repeats(), stored).newest_days == 50.0
    assert only(decide(repeats(), stored)).against.newest_days == 50.0  # type: ignore[union-attr]


def test_a_slope_of_small_accepted_steps_is_seen_against_the_oldest() -> None:
    stored = baseline_of(*[repeats(seconds=0.1 * 1.04**day) for day in range(10)])
    cell = only(decide(repeats(seconds=0.1 * 1.04**10), stored))
    assert any(
        note.startswith("drift: step time +48.0% since the oldest accepted session (s000") for note in cell.notes
    )
    assert cell.against.sessions == 8  # type: ignore[union-attr]


def test_a_yardstick_that_moved_as_well_is_said_and_changes_no_verdict() -> None:
    slow = {"matmul_seconds": 0.03, "copy_seconds": 0.03}
    head = repeats(seconds=SLOW, yardstick={"before": slow, "after": slow})
    cell = only(decide(head, three()))
    assert cell.verdict == "regressed"
    assert any("the machine may have changed, not only the code" in note for note in cell.notes)
    assert not any("yardstick" in note for note in only(decide(repeats(seconds=SLOW), three())).notes)


def test_an_accepted_slower_level_is_the_reference_from_then_on() -> None:
    """After a deliberate change the next run passes: the baseline can always be accepted again."""
    sessions = [session_of(repeats(), day) for day in range(3)]
    sessions.append(session_of(repeats(seconds=SLOW), 3, restarted=("fsdp8",)))
    comparison = decide(repeats(seconds=SLOW), Baseline("b", sessions))
    assert only(comparison).verdict == "pass"
    assert only(comparison).against.sessions == 1  # type: ignore[union-attr]
    assert any(note.startswith("drift: step time +200.0%") for note in only(comparison).notes) is False


def test_improvements_never_change_the_exit_code() -> None:
    comparison = decide(
        [*repeats("fsdp8", seconds=0.03), *repeats("ddp8")], baseline_of(*[[*repeats("fsdp8"), *repeats("ddp8")]] * 3)
    )
    assert (comparison.cell("fsdp8").verdict, comparison.exit_code, comparison.verdict) == ("improved", 0, "pass")


def test_the_worst_metric_gives_the_cell_its_verdict() -> None:
    cell = only(decide(repeats(seconds=0.03, peak=200 * MIB), three()))
    assert cell.metric("tokens_per_second").verdict == "improved"  # type: ignore[union-attr]
    assert cell.verdict == "regressed"
    assert worst([]) is None
    assert worst(["pass", "improved", "inconclusive"]) == "inconclusive"


def test_a_comparison_survives_json() -> None:
    head = [*repeats("fsdp8", seconds=SLOW), *repeats("new", count=1), not_ok("failed", "ddp8")]
    comparison = decide(head, baseline_of(*[[*repeats("fsdp8"), *repeats("gone"), *repeats("ddp8")]] * 3))
    text = json.dumps(comparison.to_json(), allow_nan=False)
    assert from_json(json.loads(text)) == comparison
    assert json.loads(text)["counts"] == {"regressed": 1, "invalid": 1, "missing": 1, "new": 1}
    with pytest.raises(ValueError, match="schema 9, this ndbench reads 1"):
        from_json(json.loads(text) | {"schema_version": 9})


def test_deciding_twice_gives_the_same_answer_and_changes_no_input() -> None:
    head, stored = repeats(seconds=SLOW), three()
    before = json.dumps(head)
    assert decide(head, stored) == decide(list(reversed(head)), stored)
    assert json.dumps(head) == before


def test_ten_thousand_records_are_compared_in_seconds() -> None:
    import time

    names = [f"cell{number}" for number in range(500)]
    session = [record for name in names for record in repeats(name)]
    stored = baseline_of(*[session] * 6)
    start = time.perf_counter()
    comparison = decide(session, stored)
    assert len(comparison.cells) == 500
    assert time.perf_counter() - start < 5
