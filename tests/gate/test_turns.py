"""Turn-taking without torch: threads stand in for ranks."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from ndbench.gate.pairs import head_first
from ndbench.run.turns import Lost, Turns, TurnTaker


def rank(folder: Path, number: int, seconds: float, log: list[float | None]) -> threading.Thread:
    def run() -> None:
        taker = TurnTaker(folder, number)
        taker.ready()
        while (handicap := taker.wait()) is not None:
            log.append(handicap)
            taker.done(seconds * (1 + handicap), 2 * seconds)
        log.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def silent() -> int:
    """A descriptor that never becomes readable: the side's launch goes on."""
    read, _ = os.pipe()
    return read


def test_a_turn_is_the_slowest_ranks_time_and_all_ranks_cpu_time(tmp_path: Path, silent: int) -> None:
    turns, logs = Turns(tmp_path / "side", 3), [list[float | None]() for _ in range(3)]
    threads = [rank(turns.folder, n, 0.1 * (n + 1), logs[n]) for n in range(3)]
    turns.wait_ready(5, silent)
    assert turns.take(0.0, 5, silent).seconds == pytest.approx(0.3)
    turn = turns.take(0.5, 5, silent)
    assert (turn.seconds, turn.cpu_seconds) == (pytest.approx(0.45), pytest.approx(1.2))
    turns.stop()
    for thread in threads:
        thread.join(5)
    assert logs == [[0.0, 0.5, None]] * 3
    turns.close()


def test_a_rank_that_is_not_on_turn_waits_in_the_kernel(tmp_path: Path, silent: int) -> None:
    turns = Turns(tmp_path / "side", 1)
    thread = rank(turns.folder, 0, 0.0, [])
    turns.wait_ready(5, silent)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
    turns.stop()
    thread.join(5)
    turns.close()


def test_a_launch_that_ended_is_noticed_at_once_and_a_silent_one_after_the_limit(tmp_path: Path) -> None:
    read, write = os.pipe()
    turns = Turns(tmp_path / "side", 2)
    with pytest.raises(Lost, match=r"2 of 2 ranks did not answer within 0\.2 s"):
        turns.wait_ready(0.2, read)
    os.write(write, b"answer")
    with pytest.raises(Lost, match="its launch ended"):
        turns.take(0.0, 30, read)
    turns.close()


def test_the_order_is_abba_and_some_cells_begin_with_the_other_side() -> None:
    for name in ("a", "b", "c", "d", "e", "f"):
        first = [head_first(name, index, 0) for index in range(8)]
        assert first[:4] in ([False, True, True, False], [True, False, False, True])
        assert first[4:] == first[:4]
    assert len({head_first(f"cell{n}", 0, 0) for n in range(20)}) == 2
