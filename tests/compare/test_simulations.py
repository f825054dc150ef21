"""The rule as shipped, on thousands of simulated suites: how often it cries wolf, and how often it finds the wolf."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest

from ndbench.compare.confirm import LAUNCH_LOOKS, ConfirmRule, decide
from ndbench.compare.history import change_points
from tests.compare.simulation import CELLS, NOISE, OTHERS, Tally, confirmed, draw, other_rules, our_rule

SUITES, CHUNK = 4000, 250
RULE = ConfirmRule(min_effect=0.01, resolve=0.03)
SHIFTS = {"none": 0.0, "+1 %": 0.01, "+2 %": 0.02, "+3 %": 0.03, "+5 %": 0.05}
EVERY_CELL = "all +1 %"


@cache
def table(model: str) -> dict[tuple[str, str], Tally]:
    """Every rule at every shift, on the same draws: per cent of suites that are red, and that name the first cell."""
    rng = np.random.default_rng([20261130, list(NOISE).index(model)])
    sums: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(SUITES // CHUNK):
        draws = draw(NOISE[model], CHUNK, rng)
        for name, shift in _shifts(model).items():
            ours = our_rule(draws, shift, rng, RULE)
            sums.setdefault(("ndbench", name), []).append((ours.red, ours.found))
            for other, theirs in other_rules(draws, shift).items():
                sums.setdefault((other, name), []).append((theirs.red, theirs.found))
    rates = {key: Tally(*np.mean(values, axis=0)) for key, values in sums.items()}
    print(f"\n{model}: suites of {CELLS} cells, {SUITES} drawn; red without a change %, first cell found %")
    for rule_name in ("ndbench", *OTHERS):
        found = "  ".join(f"{s} {rates[rule_name, s].found:5.1f}" for s in SHIFTS if s != "none")
        everywhere = rates.get((rule_name, EVERY_CELL))
        row = f"  {rule_name:<26} red {rates[rule_name, 'none'].red:5.1f}   found {found}"
        print(row + (f"   all +1 %: red {everywhere.red:5.1f}" if everywhere else ""))
    return rates


def _shifts(model: str) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    first = np.eye(CELLS)[0]
    everywhere = {EVERY_CELL: np.full(CELLS, math.log1p(0.01))} if model == "typical" else {}
    return {name: math.log1p(size) * first for name, size in SHIFTS.items()} | everywhere


@pytest.mark.parametrize("model", NOISE)
def test_a_suite_of_thirty_unchanged_cells_is_red_in_at_most_one_percent(model: str) -> None:
    assert table(model)["ndbench", "none"].red <= 1.0


@pytest.mark.parametrize(
    ("model", "shift", "least"),
    [
        ("typical", "+3 %", 98.0),
        ("typical", "+2 %", 85.0),
        ("quiet", "+2 %", 99.0),
        ("drift 0.5 %", "+3 %", 97.0),
    ],
)
def test_a_slower_cell_is_found(model: str, shift: str, least: float) -> None:
    assert table(model)["ndbench", shift].found >= least


def test_a_small_slowdown_of_every_cell_turns_the_suite_red() -> None:
    assert table("typical")["ndbench", EVERY_CELL].red >= 75.0


def test_no_other_rule_is_both_quiet_and_sharp_on_the_same_draws() -> None:
    """Each of them either alarms without a change in over 1 % of suites or misses +3 % in more than half."""
    for model in NOISE:
        for other in OTHERS:
            unchanged, slower = table(model)[other, "none"], table(model)[other, "+3 %"]
            assert unchanged.red > 1.0 or slower.found < 50.0, (model, other)


def test_the_simulation_sees_a_rule_that_tests_after_every_pair() -> None:
    """The fault planted: peeking after each pair instead of at two looks. The false-alarm rate must show it."""
    rng = np.random.default_rng(5)
    rule = ConfirmRule(min_effect=0.0, resolve=0.03)
    peeked = looked = 0
    for _ in range(1500):
        pairs = rng.normal(0, 0.015, 20).tolist()
        looked += bool(confirmed({"cell": pairs}, rule))
        peeked += any(
            decide({"cell": pairs[:n]}, ConfirmRule(0.0, 0.03, looks=(n, 20)))["cell"].verdict == "regressed"
            for n in range(3, 21)
        )
    assert looked / 1500 <= 0.012
    assert peeked / 1500 > 0.02
    assert LAUNCH_LOOKS == (10, 20)


def _series(rng: np.random.Generator, outliers: float, count: int = 60) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Sessions of 1 % noise; an outlier is a launch that sits around 10 % apart."""
    series: np.ndarray[tuple[int], np.dtype[np.float64]] = rng.normal(0, 0.01, count)
    apart = rng.random(count) < outliers
    series = series + apart * rng.choice([-1, 1], count) * 0.1 * np.exp(rng.normal(0, 0.3, count))
    return series


@pytest.mark.parametrize("outliers", [0.0, 0.03])
def test_a_history_rarely_alarms_and_locates_a_shift_of_two_standard_deviations(outliers: float) -> None:
    rng = np.random.default_rng([20261130, int(100 * outliers)])
    count, alarms, located = 1500, 0, 0
    for _ in range(count):
        series = _series(rng, outliers)
        alarms += bool(change_points(series.tolist()))
        at = int(rng.integers(12, 49))
        series[at:] += 0.02
        located += any(abs(point.index - at) <= 5 for point in change_points(series.tolist()))
    print(f"\nhistory, outliers {outliers:.0%}: alarm {alarms / count:.1%}, located {located / count:.1%}")
    assert alarms / count < 0.04
    assert located / count >= 0.80


def test_a_history_is_read_the_same_every_time() -> None:
    series = _series(np.random.default_rng(3), 0.03)
    series[30:] += 0.03
    assert [change_points(series.tolist()) for _ in range(3)] == [change_points(series.tolist())] * 3
