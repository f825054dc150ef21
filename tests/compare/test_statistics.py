from __future__ import annotations

import math
import random
from statistics import fmean, stdev

import pytest

from ndbench.compare.statistics import (
    estimate_one_session,
    estimate_sessions,
    holm,
    mean_interval,
    minimal_effect,
    pooled_variance,
    repeats_to_pass,
    t_quantile,
    t_tail,
)


def test_student_t_agrees_with_tables() -> None:
    assert t_quantile(0.975, 4) == pytest.approx(2.776, abs=1e-3)
    assert t_quantile(0.99, 2) == pytest.approx(6.965, abs=1e-3)
    assert t_tail(2.776, 4) == pytest.approx(0.025, abs=1e-4)


def test_pooling_weighs_groups_of_unequal_size_by_their_degrees_of_freedom() -> None:
    value, degrees = pooled_variance([[0.0, 2.0], [1.0, 1.0, 1.0], [5.0]])
    assert (value, degrees) == (2.0 / 3, 3)
    assert pooled_variance([[1.0], [2.0]]) == (0.0, 0)


def test_one_repeat_on_each_side_tells_nothing() -> None:
    assert estimate_one_session([1.0], [[2.0]]) is None


def test_identical_values_still_have_the_spread_of_sessions() -> None:
    one = estimate_one_session([0.0] * 3, [[0.0] * 3])
    assert one is not None
    assert one.standard_error == pytest.approx(0.01)
    many = estimate_sessions([0.0] * 3, [[0.0] * 3] * 3, 0.01)
    assert 0.008 < many.standard_error < 0.012
    assert many.p_slower == pytest.approx(0.5)


def test_two_sessions_far_apart_widen_the_interval() -> None:
    near = estimate_one_session([0.0, 0.01, 0.02], [[0.0, 0.01, 0.02], [0.0, 0.01, 0.02]])
    far = estimate_one_session([0.0, 0.01, 0.02], [[-0.2, -0.19, -0.18], [0.2, 0.21, 0.22]])
    assert near is not None
    assert far is not None
    assert far.standard_error > 10 * near.standard_error


def test_many_sessions_decide_their_own_spread() -> None:
    """With 60 sessions the expected spread hardly counts: the interval is the classical prediction interval."""
    rng = random.Random(1)
    sessions = [[shift + rng.gauss(0, 1e-4) for _ in range(3)] for shift in (rng.gauss(0, 0.03) for _ in range(60))]
    estimate = estimate_sessions([0.0] * 3, sessions, 0.03)
    classical = stdev(map(fmean, sessions)) * math.sqrt(1 + 1 / 60)
    assert estimate.standard_error == pytest.approx(classical, rel=0.05)


def test_holm_stops_at_the_first_hypothesis_it_cannot_reject() -> None:
    assert holm([0.001, 0.5, 0.004], 0.01) == [True, False, True]
    assert holm([0.004, 0.004, 0.004], 0.01) == [False, False, False]
    assert holm([0.006, 0.001], 0.01) == [True, True]
    assert holm([], 0.01) == []
    assert holm([math.nan, 0.2], 0.01) == [False, False]


def test_the_minimal_effect_is_found_with_the_power_it_claims() -> None:
    rng = random.Random(2)
    estimate = estimate_sessions([0.0] * 3, [[0.0] * 3] * 5, 0.01)
    effect = minimal_effect(estimate, 0.01)
    seen = sum(
        rng.gauss(effect, estimate.standard_error) > t_quantile(0.99, estimate.degrees) * estimate.standard_error
        for _ in range(4000)
    )
    assert 0.87 < seen / 4000 < 0.97


def test_repeats_to_pass_are_enough_and_absent_when_no_number_is() -> None:
    rng = random.Random(3)
    head, session = [rng.gauss(0, 0.05) for _ in range(3)], [rng.gauss(0, 0.05) for _ in range(12)]
    count = repeats_to_pass(head, [session], 0.0, math.log(1.05))
    assert count is not None
    assert count > 3
    assert repeats_to_pass(head, [session], 0.2, math.log(1.05)) is None


def test_the_interval_of_a_mean_needs_two_values() -> None:
    assert mean_interval([1.0]) is None
    assert mean_interval([]) is None
    assert mean_interval([1.0, 1.0]) == (1.0, 1.0)
