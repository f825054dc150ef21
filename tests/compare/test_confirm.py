from __future__ import annotations

import math
import random

import pytest

from ndbench.compare.confirm import (
    ConfirmRule,
    decide,
    minimal_paired_effect,
    p_slower,
    pairs_to_settle,
    suspects,
)
from ndbench.compare.statistics import holm_levels

RULE = ConfirmRule(min_effect=0.01, resolve=0.03)


def noisy(mean: float, sd: float, count: int, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    values = [rng.gauss(0, 1) for _ in range(count)]
    centre = sum(values) / count
    scale = math.sqrt(sum((v - centre) ** 2 for v in values) / (count - 1))
    return [mean + sd * (v - centre) / scale for v in values]


def test_the_eight_largest_slowdowns_are_suspects_and_the_rest_is_said() -> None:
    effects = {f"c{n:02}": n / 100 for n in range(13)} | {"faster": -0.5}
    chosen, rest = suspects(effects, 0.025)
    assert chosen == [f"c{n:02}" for n in range(12, 4, -1)]
    assert rest == ["c04", "c03"]
    assert suspects({"a": 0.009}, 0.01) == ([], [])


def test_a_clear_slowdown_is_regressed_after_the_first_look() -> None:
    decision = decide({"a": noisy(0.03, 0.01, 10)}, RULE)["a"]
    assert (decision.verdict, decision.final) == ("regressed", True)
    assert decision.effect == pytest.approx(0.03)
    assert "+3.0% time [" in decision.reason


def test_a_sure_slowdown_under_min_effect_is_no_regression() -> None:
    decision = decide({"a": noisy(0.006, 0.001, 10)}, RULE)["a"]
    assert decision.verdict == "pass"
    assert decision.p_slower < 1e-6


def test_a_mean_under_half_of_min_effect_ends_it_and_more_goes_on_to_the_second_look() -> None:
    decided = decide({"a": noisy(0.004, 0.02, 10), "b": noisy(0.012, 0.02, 10)}, RULE)
    assert decided["a"].final
    assert not decided["b"].final
    assert decide({"b": noisy(0.012, 0.02, 20)}, RULE, 2)["b"].final


def test_faster_pairs_are_improved() -> None:
    assert decide({"a": noisy(-0.05, 0.01, 10)}, RULE)["a"].verdict == "improved"


def test_every_confirmed_cell_counts_in_holms_correction_also_those_ended_early() -> None:
    pairs = noisy(0.02, 0.0172, 20)  # p just under 0.005 / 2
    assert decide({"a": pairs}, RULE)["a"].verdict == "regressed"
    p = decide({"a": pairs}, RULE)["a"].p_slower
    need = 0.005 / p
    assert decide({"a": pairs}, RULE, int(need) + 1)["a"].verdict != "regressed"


def test_pairs_without_spread_are_decided_by_their_value() -> None:
    """Zero variance must neither be "significant" by accident nor silently green."""
    assert p_slower([0.02] * 10) == 0.0
    assert p_slower([0.0] * 10) == 1.0
    assert p_slower([-0.02] * 10) == 1.0
    assert decide({"a": [0.02] * 10}, RULE)["a"].verdict == "regressed"
    assert decide({"a": [0.0] * 10}, RULE)["a"].verdict == "pass"
    assert decide({"a": [0.005] * 10}, RULE)["a"].verdict == "pass"


@pytest.mark.parametrize("count", [0, 1, 9])
def test_fewer_pairs_than_the_first_look_decide_nothing(count: int) -> None:
    decision = decide({"a": [0.5] * count}, RULE)["a"]
    assert (decision.verdict, decision.final) == ("inconclusive", False)
    assert "a decision needs 10 pairs" in decision.reason


def test_cells_with_unequal_counts_are_each_decided_by_their_own() -> None:
    decided = decide({"a": noisy(0.03, 0.01, 12), "b": [0.03] * 3, "c": noisy(0.03, 0.01, 10)}, RULE)
    assert [decided[name].verdict for name in "abc"] == ["regressed", "inconclusive", "regressed"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_ratio_that_is_not_finite_is_an_error_never_a_pass(bad: float) -> None:
    with pytest.raises(ValueError, match="pair 1 has the log ratio"):
        decide({"a": [0.0, bad, 0.0] * 4}, RULE)


def test_wide_noise_is_inconclusive_with_what_it_could_show_and_what_would_settle_it() -> None:
    decision = decide({"a": noisy(0.012, 0.05, 20)}, RULE)["a"]
    assert decision.verdict == "inconclusive"
    assert decision.final
    assert decision.enough is not None
    assert decision.enough > 20
    assert f"about {decision.enough} pairs would settle it" in decision.reason


def test_the_minimal_effect_is_seen_in_nine_of_ten_cases() -> None:
    rng = random.Random(4)
    level, count, sd = 0.005, 10, 0.01
    effect = minimal_paired_effect(sd / math.sqrt(count), count, level)
    seen = sum(p_slower([rng.gauss(effect, sd) for _ in range(count)]) < level for _ in range(2000))
    assert seen / 2000 == pytest.approx(0.9, abs=0.06)
    assert pairs_to_settle([0.0, 5.0] * 5, level, 1e-6) is None


@pytest.mark.parametrize("effect", [0.008, 0.012, 0.02, 0.1])
def test_the_pairs_that_would_settle_it_are_the_least_that_would(effect: float) -> None:
    ratios = noisy(0.005, 0.02, 10)
    enough = pairs_to_settle(ratios, 0.001, effect)

    def least(count: int) -> float:
        return minimal_paired_effect(0.02 / math.sqrt(count), count, 0.001)

    assert enough is not None
    assert least(enough) <= effect
    assert enough == 11 or least(enough - 1) > effect


def test_the_level_said_is_the_one_that_holm_compared_with() -> None:
    rng = random.Random(1)
    pairs = {name: [rng.gauss(size, 0.01) for _ in range(10)] for name, size in {"a": 0.1, "b": 0.014}.items()}
    made = decide(pairs, RULE)
    assert [made[name].verdict for name in "ab"] == ["regressed", "regressed"]
    assert made["a"].reason.endswith("≤ 0.0025)")
    assert made["b"].reason.endswith("≤ 0.005)")
    assert holm_levels([0.3, 0.001, 0.02], 0.03) == pytest.approx([0.03, 0.01, 0.015])
