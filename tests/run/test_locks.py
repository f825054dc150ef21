"""Two runs never measure on one device at once, and a dead run frees it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ndbench.run import locks


def _hold(folder: str, pipe: Connection) -> None:
    locks.lock_folder = lambda: Path(folder)  # type: ignore[assignment]
    with locks.device_locks(["cuda-0", "cuda-1"], 1.0, lambda line: None):
        pipe.send("held")
        time.sleep(60)


@pytest.mark.timeout(60)
def test_a_second_run_waits_names_the_holder_and_goes_on_when_the_holder_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "lock_folder", lambda: tmp_path)
    mine, theirs = multiprocessing.Pipe()
    holder = multiprocessing.get_context("spawn").Process(target=_hold, args=(str(tmp_path), theirs))
    holder.start()
    assert mine.poll(30)
    lines: list[str] = []
    with (
        pytest.raises(TimeoutError, match=f"cuda-1 is in use by process {holder.pid}"),
        locks.device_locks(["cuda-1"], 0.3, lines.append),
    ):
        pass
    assert len(lines) == 1
    with locks.device_locks(["cuda-2"], 0.0, lines.append):
        pass
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join(10)
    with locks.device_locks(["cuda-0", "cuda-1"], 5.0, lines.append):
        pass
