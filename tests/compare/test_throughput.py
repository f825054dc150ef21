"""The verdict on speed, at hand-made inputs and in seeded simulations of a noisy machine."""

from __future__ import annotations

import math
import random

import pytest

from ndbench.compare.result import MetricVerdict
from ndbench.compare.throughput import Timing, gate_rule, judge, log_step_time, timing_of
from ndbench.config import GateConfig
from tests.compare.helpers import baseline_of, decide, only
from tests.records import a_record, noisy, repeats

CPU = gate_rule(False, None, None, 0.01)
GPU = gate_rule(True, None, None, 0.01)


def test_defaults_follow_the_device() -> None:
    assert (CPU.min_effect, CPU.resolve) == (0.05, 0.30)
    assert (GPU.min_effect, GPU.resolve) == (0.01, 0.03)
    assert gate_rule(True, 0.2, 0.4, 0.01).min_effect == 0.2


def test_a_repeat_is_the_median_log_time_of_its_timed_steps() -> None:
    record = a_record(seconds=[9.0, 9.0, *[0.1, 0.2, 0.3, 0.4] * 2, 0.2, 50.0], first_timed=2)
    assert math.exp(log_step_time(record)) == pytest.approx((0.2 * 0.3) ** 0.5)


def one(head: list[float], sessions: list[list[float]], rule: object = CPU) -> MetricVerdict:
    return judge({"cell": Timing(head, sessions, rule)})["cell"]  # type: ignore[arg-type]


def test_three_times_slower_is_regressed_against_three_sessions_and_says_by_how_much() -> None:
    rng = random.Random(0)
    sessions = [[rng.gauss(0, 0.1) for _ in range(3)] for _ in range(3)]
    verdict = one([rng.gauss(math.log(3), 0.1) for _ in range(3)], sessions)
    assert verdict.verdict == "regressed"
    assert verdict.change == pytest.approx(-2 / 3, abs=0.1)
    assert "step time +" in verdict.reason
    assert "3 against 9 repeats of 3 sessions" in verdict.reason


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_sessions_make_a_suspect_and_say_how_many_to_accept(count: int) -> None:
    verdict = one([1.1] * 3, [[0.0] * 3] * count)
    assert verdict.verdict == "inconclusive"
    assert f"accept {3 - count} more" in verdict.reason


@pytest.mark.parametrize("repeats", [1, 2])
def test_fewer_than_three_repeats_are_never_a_verdict(repeats: int) -> None:
    for effect in (1.1, -1.1, 0.0):
        verdict = one([effect] * repeats, [[0.0] * 3] * 5)
        assert verdict.verdict == "inconclusive"
        assert f"there are {repeats}" in verdict.reason


def test_one_sample_a_side_is_inconclusive_not_significant() -> None:
    assert one([1.0], [[0.0]]).verdict == "inconclusive"
    assert one([0.0], [[0.0]]).verdict == "inconclusive"


def test_zero_variance_neither_passes_a_slowdown_nor_flags_equality() -> None:
    assert one([0.0] * 3, [[0.0] * 3] * 3).verdict == "pass"
    assert one([0.0] * 3, [[0.0] * 3]).verdict == "pass"
    assert one([1.1] * 3, [[0.0] * 3] * 3).verdict == "regressed"
    assert one([1e-9] * 3, [[0.0] * 3] * 3).verdict == "pass"


def test_three_sessions_that_agree_by_luck_do_not_make_noise_significant() -> None:
    """s is nearly zero by chance: the plain t interval would call +8 % on a shared CPU a regression."""
    sessions = [[-0.1, 0.0, 0.1], [0.1, -0.1, 1e-6], [0.0, 0.1, -0.1]]
    assert one([0.18, 0.08, -0.02], sessions).verdict == "inconclusive"


def test_unequal_counts_of_repeats_are_compared() -> None:
    assert one([0.0, 0.01, 0.02, 0.0], [[0.0], [0.01, 0.0], [0.0, 0.02, 0.01]]).verdict == "pass"


def test_one_outlying_launch_decides_nothing() -> None:
    assert one([0.0, 0.0, 1.1], [[0.0, 0.01, 0.0]] * 3).verdict == "inconclusive"


def test_faster_is_improved_only_against_three_sessions() -> None:
    assert one([-1.1] * 3, [[0.0, 0.05, -0.05]] * 3).verdict == "improved"
    assert one([-1.1] * 3, [[0.0, 0.05, -0.05]] * 2).verdict == "pass"


def test_a_slowdown_under_min_effect_is_not_a_regression_however_sure() -> None:
    quiet = [[0.0, 1e-4, -1e-4]] * 8
    assert one([0.03] * 3, quiet, gate_rule(True, 0.05, 0.10, 0.01)).verdict == "pass"
    assert one([0.06] * 3, quiet, gate_rule(True, 0.05, 0.10, 0.01)).verdict == "regressed"


def test_wide_noise_is_inconclusive_and_says_what_would_settle_it() -> None:
    verdict = one([0.0, 0.16, -0.16], [[0.0, 0.16, -0.16]])
    assert verdict.verdict == "inconclusive"
    assert "measure.repeats=" in verdict.reason
    hopeless = one([0.0, 0.3, -0.3], [[0.0, 0.3, -0.3]])
    assert "more repeats would not settle it" in hopeless.reason
    suspect = one([0.1, 0.4, -0.2], [[0.0, 0.3, -0.3]] * 3)
    assert suspect.verdict == "inconclusive"
    assert "the smallest slowdown this baseline can show is" in suspect.reason


def test_every_cell_counts_in_holms_correction() -> None:
    """The same evidence that suffices for one cell does not when thirty are looked at."""
    sessions = [[0.0, 0.01, -0.01]] * 3
    slow = Timing([0.40] * 3, sessions, CPU)
    even = Timing([0.0, 0.01, -0.01], sessions, CPU)
    assert judge({"slow": slow})["slow"].verdict == "regressed"
    many = judge({"slow": slow} | {f"cell{number}": even for number in range(29)})
    assert many["slow"].verdict == "inconclusive"


# Noise measured on a shared two-core machine: launches differ by 10 to 16 %, sessions by as much again.
MODELS = {"launches": (0.0, 0.16), "both": (0.13, 0.13), "sessions": (0.13, 0.02), "quiet": (0.01, 0.01)}


def simulate(model: str, handicap: float, suites: int, seed: int) -> tuple[float, float, float]:
    """Fractions of suites of 8 cells with a false alarm, with the slowed cell caught, with exactly that cell."""
    session_sd, launch_sd = MODELS[model]
    rng = random.Random(seed)

    def session() -> list[list[float]]:
        shift = rng.gauss(0, session_sd)
        # the median of ten steps that vary by 10 % within a launch
        return [[shift + rng.gauss(0, launch_sd) + rng.gauss(0, 0.04) for _ in range(3)] for _ in range(8)]

    false = caught = exactly = 0
    for _ in range(suites):
        stored, head = [session() for _ in range(3)], session()
        head[0] = [value + math.log(handicap) for value in head[0]]
        verdicts = judge({str(cell): Timing(head[cell], [s[cell] for s in stored], CPU) for cell in range(8)})
        red = {name for name, verdict in verdicts.items() if verdict.verdict == "regressed"}
        false += bool(red - {"0"}) or (handicap == 1 and bool(red))
        caught += "0" in red
        exactly += red == {"0"}
    return false / suites, caught / suites, exactly / suites


@pytest.mark.parametrize("model", MODELS)
def test_a_suite_of_eight_unchanged_cells_raises_an_alarm_in_at_most_one_percent(model: str) -> None:
    false, _, _ = simulate(model, 1.0, suites=1200, seed=11)
    assert false <= 0.01


@pytest.mark.parametrize(("model", "least"), [("launches", 0.99), ("both", 0.97), ("sessions", 0.98), ("quiet", 1.0)])
def test_a_cell_three_times_slower_is_regressed_and_no_other(model: str, least: float) -> None:
    _, _, exactly = simulate(model, 3.0, suites=400, seed=12)
    assert exactly >= least


def test_the_planted_handicap_turns_exactly_its_cell_red_from_records_to_exit_code() -> None:
    rng = random.Random(4)
    names = [f"cell{number}" for number in range(8)]

    def run(slower: dict[str, float]) -> list[dict[str, object]]:
        shift = rng.gauss(0, 0.1)
        noise = {"session": shift, "between": 0.1, "within": 0.1}
        return [r for name in names for r in noisy(name, rng, slower=slower.get(name, 1.0), **noise)]

    baseline = baseline_of(run({}), run({}), run({}))
    even = decide(run({}), baseline)
    assert (even.exit_code, even.counts.get("regressed")) == (0, None)
    red = decide(run({"cell3": 3.0}), baseline)
    assert [cell.name for cell in red.cells if cell.verdict == "regressed"] == ["cell3"]
    assert red.exit_code == 1


def test_the_gate_settings_of_the_run_are_used() -> None:
    sessions = [repeats(seconds=0.1) for _ in range(8)]
    slow = repeats(seconds=0.15)
    assert only(decide(slow, baseline_of(*sessions))).verdict == "regressed"
    lenient = decide(slow, baseline_of(*sessions), gate=GateConfig(min_effect=0.6, resolve=2.0))
    assert only(lenient).verdict == "pass"


def launches(*seconds: float) -> list[float]:
    return [math.log(value) for value in seconds]


def apart(head: list[float], sessions: list[list[float]], **fields: bool) -> MetricVerdict:
    return judge({"cell": Timing(head, sessions, CPU, **({"same_hardware": True} | fields))})["cell"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_factor_of_two_between_every_launch_needs_no_third_session(count: int) -> None:
    base = [launches(0.9, 1.0, 1.1)] * count
    slower = apart(launches(2.3, 2.4, 2.5), base)
    assert slower.verdict == "regressed"
    assert "every launch is slower than every one before by more than a factor of 2" in slower.reason
    assert apart(launches(0.40, 0.42, 0.44), base).verdict == "improved"


def test_one_launch_that_is_not_a_factor_of_two_away_leaves_it_open() -> None:
    assert apart(launches(2.1, 5.0, 5.0), [launches(0.9, 1.0, 1.1)]).verdict == "inconclusive"
    assert apart(launches(0.2, 0.2, 0.46), [launches(0.9, 1.0, 1.1)]).verdict != "improved"
    assert apart(launches(5.0, 5.0), [launches(1.0, 1.0, 1.0)]).verdict == "inconclusive"
    assert apart(launches(5.0, 5.0, 5.0), [launches(1.0, 1.0)]).verdict == "inconclusive"
    assert apart(launches(5.0, 5.0, 5.0), [launches(1.0, 1.0, 1.0)], same_hardware=False).verdict == "inconclusive"


def test_a_run_against_one_accepted_session_is_red_when_it_is_five_times_slower() -> None:
    comparison = decide(repeats(seconds=0.5), baseline_of(repeats()))
    assert (comparison.exit_code, only(comparison).verdict) == (1, "regressed")
    unsure = decide(repeats(seconds=0.15), baseline_of(repeats()))
    assert (unsure.exit_code, unsure.exit_reason) == (0, "1 of 1 cell is inconclusive: fsdp8")


@pytest.mark.parametrize(("device", "verdict"), [("cuda", "regressed"), ("cpu", "inconclusive")])
def test_steps_that_stall_are_seen_though_the_median_step_is_as_fast(device: str, verdict: str) -> None:
    """Every third step takes 50 times as long; one launch in which it is so may be a burst of other work."""
    stalled = [5.0 if step % 3 == 0 else 0.1 for step in range(12)]
    rule = gate_rule(device == "cuda", None, None, 0.01)
    sessions = [repeats(device=device) for _ in range(3)]
    timing = timing_of(repeats(device=device, seconds=stalled), sessions, rule)
    decided = judge({"fsdp8": timing})["fsdp8"]
    assert decided.verdict == verdict
    assert "on average a step takes 15.7 times as long or more: some steps stall" in decided.reason
    once = [*repeats(device=device, count=2), a_record(device=device, repeat=2, seconds=stalled)]
    assert judge({"fsdp8": timing_of(once, sessions, rule)})["fsdp8"].verdict == "pass"
