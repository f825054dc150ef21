from __future__ import annotations

import math
from typing import Any

import pytest

from ndbench.compare.curves import ENVELOPES, judge
from ndbench.compare.result import MetricVerdict
from ndbench.results.schema import Record
from tests.records import a_cell, a_record, repeats

LOSS = [5.5 - 0.1 * step for step in range(12)]


def of(head: list[Record], baseline: list[Record] | None = None, series: str = "loss") -> MetricVerdict:
    decided = judge(head, baseline if baseline is not None else repeats(), series)
    assert decided is not None
    return decided


def shifted(relative: float, first: int = 0) -> list[float | None]:
    return [value * (1 + relative) if step >= first else value for step, value in enumerate(LOSS)]


def test_equal_curves_pass_to_the_bit() -> None:
    assert of(repeats()).reason == "loss equal to the bit at every step"


def test_one_flipped_bit_is_caught_and_named_in_full_precision() -> None:
    loss: list[float | None] = list(LOSS)
    loss[7] = math.nextafter(LOSS[7], 9)
    decided = of([*repeats(count=2), a_record(repeat=2, loss=loss)])
    assert decided.verdict == "regressed"
    assert f"step 7 (repeat 2): {loss[7]!r} against {LOSS[7]!r}" in decided.reason


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"torch": "2.14.0"}, "torch 2.13.0 → 2.14.0"),
        ({"hardware": {"model": "Zen 5"}}, "model Zen 4 → Zen 5"),
        ({"commit": "b" * 40}, "commit aaaaaaaaaa → bbbbbbbbbb"),
        ({"dirty": True}, "uncommitted changes on aaaaaaaaaa"),
    ],
)
def test_another_machine_software_or_code_gets_the_tolerance_and_is_named(changed: dict[str, Any], said: str) -> None:
    near = of(repeats(loss=shifted(1e-7), **changed))
    assert near.verdict == "pass"
    assert said in near.reason
    assert "first differs at step 0" in near.reason
    far = of(repeats(loss=shifted(1e-3), **changed))
    assert far.verdict == "regressed"
    assert said in far.reason


def test_code_of_no_known_commit_is_not_taken_for_the_same_code() -> None:
    """A wheel measured outside of any repository: its loss may have changed with its code."""
    unknown = [{**record, "code": {"commit": None, "dirty": None}} for record in repeats()]
    near = of([{**r, "code": {"commit": None, "dirty": None}} for r in repeats(loss=shifted(1e-7))], unknown)
    assert near.verdict == "pass"
    assert "not bitwise (no commit is known on either side" in near.reason
    untold = [{**r, "code": {"commit": "a" * 40, "dirty": None}} for r in repeats(loss=shifted(1e-7))]
    assert "not known" in of(untold, [{**r, "code": {"commit": "a" * 40, "dirty": None}} for r in repeats()]).reason


def test_a_cell_that_is_not_deterministic_is_held_to_the_tolerance() -> None:
    cell = a_cell(deterministic=False)
    baseline = repeats(cell=cell)
    assert of(repeats(cell=cell, loss=shifted(1e-7)), baseline).verdict == "pass"
    assert of(repeats(cell=cell, loss=shifted(1e-3)), baseline).verdict == "regressed"


def test_a_baseline_whose_repeats_differ_gives_the_band() -> None:
    baseline = [a_record(repeat=n, loss=shifted(wobble)) for n, wobble in enumerate((0.0, 1e-3, -1e-3))]
    assert of(repeats(loss=shifted(2e-3)), baseline).verdict == "pass"
    assert of(repeats(loss=shifted(1e-2)), baseline).verdict == "regressed"


@pytest.mark.parametrize(("precision", "passes", "fails"), [("fp32", 9e-6, 2e-5), ("bf16", 9e-4, 2e-3)])
def test_the_tolerance_follows_the_precision(precision: str, passes: float, fails: float) -> None:
    cell = a_cell(precision=precision)
    baseline = repeats(cell=cell)
    for shift, verdict in ((passes, "pass"), (fails, "regressed")):
        loss: list[float | None] = list(LOSS)
        loss[0] = LOSS[0] * (1 + shift)
        assert of(repeats(cell=cell, loss=loss, commit="b" * 40), baseline).verdict == verdict


def test_the_envelope_grows_with_the_step_and_never_takes_a_shift_of_a_thousandth() -> None:
    assert ENVELOPES["fp32"].at(0) < ENVELOPES["fp32"].at(10) <= ENVELOPES["fp32"].at(10_000) < 1e-3


def test_a_doubled_gradient_is_caught_where_the_loss_is_the_same() -> None:
    norms = [2 * value for value in a_record()["steps"]["grad_norm"]]
    head = repeats(grad_norm=norms, commit="b" * 40)
    assert of(head).verdict == "pass"
    assert of(head, series="grad_norm").verdict == "regressed"


@pytest.mark.parametrize("series", ["loss", "grad_norm"])
def test_a_nonfinite_step_fails_against_a_finite_baseline(series: str) -> None:
    values: list[float | None] = list(a_record()["steps"][series])
    values[5] = None
    decided = of([*repeats(count=2), a_record(repeat=2, **{series: values})], series=series)
    assert decided.verdict == "regressed"
    assert "at step 5 of repeat 2 is not finite" in decided.reason


def test_nan_on_both_sides_is_invalid_never_equal() -> None:
    broken = repeats(loss=[*LOSS[:11], None])
    assert of(broken, broken).verdict == "invalid"
    assert of(repeats(), broken).verdict == "incomparable"


def test_a_missing_step_fails() -> None:
    decided = of(repeats(loss=list(LOSS[:11])))
    assert decided.verdict == "regressed"
    assert "has 11 of 12 steps" in decided.reason


def test_other_data_or_another_seed_is_incomparable() -> None:
    assert "the data changed (hash d1 → d2)" in of(repeats(data_hash="d2")).reason
    assert of(repeats(data_hash="d2")).verdict == "incomparable"
    assert "the seeds differ ([0] → [9])" in of(repeats(seed=9)).reason


def test_repeats_are_compared_with_those_of_their_seed() -> None:
    baseline = [a_record(repeat=n, seed=n, loss=shifted(0.1 * n)) for n in range(3)]
    head = [a_record(repeat=2 - n, seed=n, loss=shifted(0.1 * n)) for n in range(3)]
    assert of(head, baseline).reason == "loss equal to the bit at every step"


def test_an_engine_that_does_not_say_its_gradient_norm_is_not_judged_on_it() -> None:
    silent = repeats()
    for record in silent:
        record["steps"]["grad_norm"] = None
    assert judge(silent, silent, "grad_norm") is None
    assert of(silent, series="grad_norm").verdict == "incomparable"
