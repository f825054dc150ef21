"""The measured window: from the clock's start to its reading nothing waits for the device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ndbench.engines.protocol import StepResult
from ndbench.measure.memory import MemoryMeter
from ndbench.measure.timing import StepClock
from ndbench.run import worker
from ndbench.run.progress import StepCounter
from ndbench.run.task import RankReport, Task
from tests.run.test_launch import make_cell

NOTHING: Any = SimpleNamespace()


def test_a_new_peak_of_memory_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: called.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: called.append("reset"))
    MemoryMeter("cuda:0").reset()
    assert called == ["reset"]


def test_nothing_is_waited_for_between_the_clocks_start_and_its_reading(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log: list[str] = []
    monkeypatch.setattr(worker, "_synchronize", lambda device: log.append("wait"))
    monkeypatch.setattr(worker.dist, "barrier", lambda: log.append("barrier"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: log.append("wait"))
    for name in ("start", "tick", "seconds"):
        real = getattr(StepClock, name)

        def logged(clock: StepClock, name: str = name, real: Any = real) -> Any:
            log.append(name)
            return real(clock)

        monkeypatch.setattr(StepClock, name, logged)
    task = Task(make_cell(), 0, 0, False, 0.0, tmp_path, runner=0, started=0.0)
    StepCounter(task.counter_path, create=True)
    dataset: Any = SimpleNamespace(batch=lambda *_: NOTHING, valid_tokens=lambda step: 64)
    engine: Any = SimpleNamespace(step=lambda batch: StepResult(1.0, 1.0, 64))
    mesh: Any = SimpleNamespace(batch_rank=0, batch_size=1)
    report = RankReport(rank=0)
    worker._timed_steps(task, engine, dataset, mesh, torch.device("cpu"), report)
    window = log[log.index("start") : log.index("seconds")]
    assert set(window) == {"start", "tick"}
    assert log[: log.index("start")] == ["barrier", "wait"], "what was queued before is not the first step's"
    assert report.time_to_first_step is not None
    assert report.time_to_first_step > 0
