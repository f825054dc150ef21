"""A training run in wandb: one run, a row a step; what comes later is added to it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ndbench.config import Cell, Config, TrackerConfig
from ndbench.report.tracker import track_training
from ndbench.results.store import write_json
from ndbench.training.log import TrainingLog
from tests.report.wandb_files import read_all


def test_the_log_of_a_training_run_is_sent_once_and_a_resumed_run_stays_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in list(os.environ):
        if name.startswith(("WANDB_", "GITHUB_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "run"
    folder.mkdir()
    write_json(folder / "config.json", Cell("tiny", "adhoc", Config(world_size=1)).to_dict())
    offline = TrackerConfig(name="wandb", mode="offline")
    for last in (0, 3):
        log = TrainingLog(folder / "log.jsonl", last)
        for step in range(last + 1, last + 4):
            log.write({"step": step, "loss": 5.0 / step, "validation_loss": None if step == 2 else 4.0})
        log.close()
        done, warning = track_training(folder, offline)
        assert warning is None
        assert done is not None
        assert "1 run written" in done
    runs = read_all(folder)
    assert len(runs) == 1, "the older copy is replaced"
    assert [row["step"] for row in runs[0].history] == [1, 2, 3, 4, 5, 6]
    assert [row["train/loss"] for row in runs[0].history] == [5.0 / step for step in range(1, 7)]
    assert runs[0].summary["steps"] == 6
    assert runs[0].config["cell"]["training"]["steps"] == 12
    assert track_training(folder, TrackerConfig()) == (None, None)


def test_a_tracker_that_fails_is_a_warning(tmp_path: Path) -> None:
    done, warning = track_training(tmp_path / "nowhere", TrackerConfig(name="wandb", mode="offline", timeout=20))
    assert done is None
    assert warning is not None
    assert "the run itself is whole" in warning
