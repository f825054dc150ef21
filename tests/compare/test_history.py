from __future__ import annotations

import math
import random

import pytest

from ndbench.compare.history import change_points, clip_outliers, history_changes, welch_p
from ndbench.results.sessions import Baseline
from tests.compare.helpers import session_of
from tests.records import repeats


def steps(*levels: tuple[float, int], sd: float = 0.01, seed: int = 1) -> list[float]:
    rng = random.Random(seed)
    return [level + rng.gauss(0, sd) for level, count in levels for _ in range(count)]


def test_two_steps_are_found_with_their_sizes() -> None:
    found = change_points(steps((0.0, 20), (0.05, 20), (-0.03, 20)))
    assert [point.index for point in found] == [20, 40]
    assert found[0].change == pytest.approx(0.05, abs=0.01)
    assert found[1].change == pytest.approx(-0.08, abs=0.01)


@pytest.mark.parametrize("series", [[], [1.0], [1.0] * 7, [1.0] * 60, [math.nan] * 60, [None] * 60])
def test_short_flat_and_empty_series_have_no_change(series: list[float | None]) -> None:
    assert change_points(series) == []


def test_one_missing_point_hides_nothing() -> None:
    series: list[float | None] = list(steps((0.0, 20), (0.05, 20)))
    for gap in (None, math.nan, math.inf):
        series[3] = gap
        (point,) = change_points(series)
        assert point.index == 20


def test_a_step_without_any_noise_is_found_and_its_p_is_zero() -> None:
    (point,) = change_points([1.0] * 10 + [2.0] * 10)
    assert (point.index, point.p) == (10, 0.0)
    assert welch_p([1.0] * 4, [1.0] * 4) == 1.0


def test_single_outliers_are_clipped_and_raise_no_alarm() -> None:
    series = steps((0.0, 40))
    for at in (5, 17, 33):
        series[at] += 0.5
    assert max(clip_outliers(series)) < 0.1
    assert change_points(series) == []


def test_outliers_do_not_hide_a_step_of_two_standard_deviations() -> None:
    found = 0
    for seed in range(20):
        series = steps((0.0, 30), (0.02, 30), seed=seed)
        for at in (4, 20, 37, 52):
            series[at] += 0.3
        found += any(abs(point.index - 30) <= 5 for point in change_points(series))
    assert found >= 18


def test_a_slope_of_small_steps_is_seen_in_the_whole_though_no_step_is() -> None:
    """A rolling comparison sees 0.3 % at a time, which is nothing; the history sees the sum."""
    rng = random.Random(2)
    series = [0.003 * index + rng.gauss(0, 0.01) for index in range(40)]
    assert change_points(series)


def history(levels: list[float], **changed: object) -> Baseline:
    rng = random.Random(1)
    sessions = []
    for day, level in enumerate(levels):
        fields = {key: value[day] for key, value in changed.items() if isinstance(value, list)}
        sessions.append(session_of(repeats(seconds=0.1 * math.exp(level + rng.gauss(0, 0.005)), **fields), day))
    return Baseline("b", sessions)


def test_a_change_between_two_sessions_of_a_cell_is_named() -> None:
    (change,) = history_changes(history([0.0] * 8 + [0.1] * 8), "fsdp8")
    assert change.session == "s008"
    assert change.slowdown == pytest.approx(math.expm1(0.1), abs=0.01)


def test_the_series_starts_anew_where_the_hardware_changed() -> None:
    machines = [{"device": "cpu", "model": "old"}] * 8 + [{"device": "cpu", "model": "new"}] * 8
    assert history_changes(history([0.0] * 8 + [0.1] * 8, hardware=machines), "fsdp8") == []


def test_the_series_starts_anew_where_a_change_was_accepted() -> None:
    baseline = history([0.0] * 8 + [0.1] * 8)
    sessions = list(baseline.sessions)
    records = sessions[8].cells["fsdp8"]
    sessions[8] = session_of(records, 8, restarted=("fsdp8",))
    assert history_changes(Baseline("b", sessions), "fsdp8") == []
