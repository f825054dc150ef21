"""The pool of ranks: results in rank order, and a failure of any kind is a clear message, never a hang."""

from __future__ import annotations

import pytest

from tests.parity import pool as pool_module
from tests.parity import rank_tasks
from tests.parity.pool import pool


def test_every_rank_answers_in_rank_order() -> None:
    assert pool(2).run(rank_tasks.rank_and_sum, 10) == [(0, 21), (1, 21)]


def test_a_failing_rank_is_named_with_its_traceback_and_the_pool_lives_on() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed(.|\n)*ZeroDivisionError"):
        pool(2).run(rank_tasks.divide_on_rank_one)
    assert pool(2).run(rank_tasks.rank_and_sum, 0) == [(0, 1), (1, 1)]


def test_a_dead_rank_is_named() -> None:
    with pytest.raises(RuntimeError, match="rank 1 of 2 died in die_on_rank_one, exit code -9"):
        pool(2).run(rank_tasks.die_on_rank_one)


def test_a_hang_ends_at_the_time_limit_and_shows_where() -> None:
    with pytest.raises(RuntimeError, match=r"did not finish hang_on_rank_zero in 1 s(.|\n)*rank_tasks.py"):
        pool(2).run(rank_tasks.hang_on_rank_zero, timeout=1)


def test_a_crowded_pool_is_closed_and_the_next_one_is_new() -> None:
    here = pool(2)
    pool_module.close_crowded(here.threads)
    assert pool(2) is here
    pool_module.close_crowded(here.threads - 1)
    assert pool(2) is not here
    assert pool(2).run(rank_tasks.rank_and_sum, 0) == [(0, 1), (1, 1)]
