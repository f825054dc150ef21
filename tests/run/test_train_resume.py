"""What a training run is gone on with is compared with what it was left with."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from ndbench.config import Config
from ndbench.run import train_resume
from ndbench.run.train_resume import changes_since


def test_what_changes_the_learning_is_told_and_what_does_not_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    then = dataclasses.asdict(copy.deepcopy(config))
    del then["training"]["momentum"]  # an older checkpoint does not know every key
    index = SimpleNamespace(rest={"progress": {"config": then}})
    monkeypatch.setattr(train_resume, "read_index", lambda _: index)
    assert changes_since(config, Path("c")) == []

    config.training.global_batch_size, config.training.max_grad_norm = 8, None
    config.training.betas = [0.9, 0.999]
    assert changes_since(config, Path("c")) == [
        "training.global_batch_size 16 -> 8",
        "training.betas [0.9, 0.95] -> [0.9, 0.999]",
        "training.max_grad_norm 1.0 -> null",
    ]
    config = Config()
    config.training.compile, config.training.micro_batch_size = True, 1
    config.parallelism.tp_size, config.world_size = 2, 2
    assert changes_since(config, Path("c")) == []
