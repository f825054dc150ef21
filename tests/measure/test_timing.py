"""Step times: which steps count, and what a step time and tokens/s mean."""

from __future__ import annotations

import random
import time

import pytest

from ndbench.measure.timing import Handicap, StepClock, burn, slowest, steady_from, step_seconds, throughput


def noisy(count: int, sd: float, seed: int, trend: float = 0.0) -> list[float]:
    draw = random.Random(seed)
    return [max(0.01, 1 + trend * step / count + draw.gauss(0, sd)) for step in range(count)]


def test_the_clock_measures_each_step_on_its_own() -> None:
    clock = StepClock("cpu")
    clock.start()
    for pause in (0.01, 0.03, 0.02):
        time.sleep(pause)
        clock.tick()
    seconds = clock.seconds()
    assert len(seconds) == 3
    assert seconds[0] >= 0.01
    assert seconds[1] >= 0.03
    assert seconds[2] >= 0.02


def test_a_clock_without_steps_has_no_times() -> None:
    clock = StepClock("cpu")
    assert clock.seconds() == []
    clock.start()
    assert clock.seconds() == []


def test_starting_again_forgets_the_steps_before() -> None:
    clock = StepClock("cpu")
    clock.start()
    clock.tick()
    clock.start()
    clock.tick()
    clock.tick()
    assert len(clock.seconds()) == 2


def test_the_step_time_of_the_job_is_the_slowest_ranks() -> None:
    assert slowest([[1.0, 5.0, 2.0], [3.0, 1.0, 2.5]]) == [3.0, 5.0, 2.5]


def test_ranks_with_different_numbers_of_steps_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="rank 0: 2, rank 1: 3"):
        slowest([[1.0, 1.0], [1.0, 1.0, 1.0]])


def test_tokens_per_second_does_not_depend_on_tp_or_cp() -> None:
    """16 sequences of 128 tokens are 2048 tokens, whether each sits on 1, 2 or 8 ranks of a tp x cp group."""
    for tp, cp in [(1, 1), (2, 1), (1, 2), (4, 2)]:
        batch_ranks = 8 // (tp * cp)
        sequences_per_batch_rank = 16 // batch_ranks
        unique_tokens = sequences_per_batch_rank * batch_ranks * 128
        assert throughput(unique_tokens, 0.5) == 4096.0


def test_throughput_of_several_steps_is_that_of_their_median() -> None:
    assert throughput(100, [1.0, 0.5, 20.0]) == 100.0


def test_a_step_time_of_zero_has_no_throughput() -> None:
    with pytest.raises(ValueError, match="positive"):
        throughput(2048, 0.0)


def test_the_step_time_is_the_median_of_the_timed_steps_only() -> None:
    assert step_seconds([9.0, 9.0, 1.0, 2.0, 30.0], first=2) == 2.0
    with pytest.raises(ValueError, match="no timed step"):
        step_seconds([1.0], first=1)


def test_a_constant_series_drops_exactly_one_step() -> None:
    found = steady_from([1.0] * 12)
    assert (found.first, found.steady, found.drift) == (1, True, 0.0)


def test_slow_first_steps_are_dropped() -> None:
    found = steady_from([30.0, 5.0, 2.0, *noisy(9, 0.01, seed=1)])
    assert (found.first, found.steady) == (3, True)


def test_an_exponential_warm_up_is_dropped_until_it_has_faded() -> None:
    found = steady_from([1 + 4 * 0.4**step for step in range(16)])
    assert found.steady
    assert 4 <= found.first <= 7


def test_one_spike_later_on_neither_moves_the_window_nor_makes_it_unsteady() -> None:
    series = noisy(12, 0.01, seed=2)
    series[7] = 8.0
    found = steady_from(series)
    assert (found.first, found.steady) == (1, True)


def test_a_spike_at_the_start_of_the_window_is_dropped() -> None:
    found = steady_from([3.0, 1.0, 9.0, *([1.0] * 9)])
    assert found.steady
    assert found.first in (1, 3)


def test_a_drift_over_the_whole_run_is_not_steady() -> None:
    found = steady_from([1 + 0.1 * step for step in range(20)])
    assert (found.first, found.steady) == (10, False)
    assert found.drift > 0.1


def test_a_drift_is_seen_through_noise() -> None:
    assert not steady_from(noisy(40, 0.02, seed=3, trend=1.0)).steady


def test_noise_alone_is_steady() -> None:
    """At most one in a hundred series of pure noise is called unsteady, at the noise of a GPU and of a shared CPU."""
    for sd in (0.014, 0.10, 0.20):
        unsteady = sum(not steady_from(noisy(12, sd, seed)).steady for seed in range(500))
        assert unsteady <= 5, sd


def test_noise_alone_costs_few_steps() -> None:
    dropped = [steady_from(noisy(12, 0.10, seed)).first for seed in range(500)]
    assert sum(dropped) / len(dropped) < 1.5


@pytest.mark.parametrize(("count", "first"), [(1, 0), (2, 1), (3, 1)])
def test_short_series_keep_at_least_half(count: int, first: int) -> None:
    found = steady_from([5.0, 1.0, 1.0][:count])
    assert (found.first, found.steady) == (first, True)


def test_a_fixed_warm_up_is_taken_as_given() -> None:
    assert steady_from([9.0, 9.0, 1.0, 1.0], warmup=3).first == 3
    assert steady_from([9.0, 1.0, 1.0, 1.0], warmup=0).first == 0


def test_a_fixed_warm_up_still_says_whether_the_rest_drifted() -> None:
    assert not steady_from([1 + 0.2 * step for step in range(12)], warmup=2).steady


def test_a_fixed_warm_up_that_leaves_nothing_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="warm-up of 4 steps leaves no timed step out of 4"):
        steady_from([1.0] * 4, warmup=4)
    with pytest.raises(ValueError, match="no steps"):
        steady_from([])


def test_burning_takes_the_time_it_was_given() -> None:
    for seconds in (0.005, 0.02):
        began = time.perf_counter()
        burn(seconds, "cpu")
        assert time.perf_counter() - began >= seconds


def test_burning_on_cpu_is_work_not_sleep() -> None:
    began = time.thread_time()
    burn(0.05, "cpu")
    assert time.thread_time() - began > 0.01


def test_a_handicap_of_two_makes_a_step_three_times_as_long() -> None:
    clock = StepClock("cpu")
    clock.start()
    handicap = Handicap(2.0, "cpu")
    for _ in range(5):
        time.sleep(0.01)
        handicap.after_step()
        clock.tick()
    for seconds in clock.seconds():
        assert seconds >= 0.03
    assert step_seconds(clock.seconds(), 0) < 0.06


def test_a_handicap_takes_the_step_time_it_is_told() -> None:
    handicap = Handicap(3.0, "cpu")
    began = time.perf_counter()
    handicap.after_step(0.01)
    assert time.perf_counter() - began >= 0.03


def test_no_handicap_costs_nothing() -> None:
    handicap = Handicap(0.0, "cpu")
    began = time.perf_counter()
    for _ in range(1000):
        handicap.after_step()
    assert time.perf_counter() - began < 0.05


def test_a_negative_handicap_is_refused() -> None:
    with pytest.raises(ValueError, match=r"-1\.0"):
        Handicap(-1.0, "cpu")


def test_a_clock_that_stands_still_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: 1.0)
    clock = StepClock("cpu")
    clock.start()
    clock.tick()
    with pytest.raises(RuntimeError, match=r"step 0 took 0.0 s by time.perf_counter"):
        clock.seconds()
