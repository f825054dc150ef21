"""What a training run says while its log grows."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ndbench.config import Cell, Config, TrainingConfig
from ndbench.report import training
from ndbench.report.training import TrainingView


def view_of(folder: Path, steps: int, **values: Any) -> tuple[TrainingView, io.StringIO]:
    stream = io.StringIO()
    config = Config(training=TrainingConfig(steps=steps), world_size=1)
    return TrainingView(Console(file=stream, width=200), Cell("single", "adhoc", config), folder), stream


def grow(folder: Path, step: int, **more: float) -> None:
    line = {"step": step, "loss": 2.0, "seconds": 1.0, "tokens_per_second": 9.0, "memory_bytes": 2**20, **more}
    with (folder / "log.jsonl").open("a") as stream:
        stream.write(json.dumps(line) + "\n")


@pytest.mark.parametrize("validated", [False, True])
def test_a_step_is_printed_once_however_long_it_takes(
    validated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "PRINT_SECONDS", -1.0)
    view, stream = view_of(tmp_path, 3)
    for step in (1, 2, 3):
        grow(tmp_path, step, **({"validation_loss": 1.5} if validated else {}))
        for _ in range(3):
            view.update()
    view.ended({"stopped": 0, "step": 3, "validation_loss": None, "checkpoint": None})
    said = stream.getvalue().splitlines()
    assert [line.split()[1] for line in said[:-1]] == ["1/3", "2/3", "3/3"]
    assert said[-1].startswith("done after step 3 of 3")


def test_a_line_that_was_not_shown_yet_is_shown_at_the_end(tmp_path: Path) -> None:
    view, stream = view_of(tmp_path, 2)
    for step in (1, 2):
        grow(tmp_path, step)
        view.update()
    assert stream.getvalue() == ""
    view.ended({"stopped": 0, "step": 2, "validation_loss": None, "checkpoint": None})
    assert [line.split()[1] for line in stream.getvalue().splitlines()[:-1]] == ["2/2"]


def test_the_header_says_that_tokens_are_synthetic(tmp_path: Path) -> None:
    view, stream = view_of(tmp_path, 2)
    view.began(None, None)
    assert "\ndata=markov: synthetic tokens" in stream.getvalue()


def test_the_speed_of_a_line_is_the_mean_since_the_line_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of one step: beside the time that is left it would contradict it."""
    view, stream = view_of(tmp_path, 10)
    grow(tmp_path, 1, seconds=60.0, tokens_per_second=1.0)  # compiles
    for step in (2, 3):
        grow(tmp_path, step, seconds=3.0, tokens_per_second=100.0)
    grow(tmp_path, 4, seconds=1.0, tokens_per_second=1200.0)
    monkeypatch.setattr(training, "PRINT_SECONDS", -1.0)
    view.update()
    grow(tmp_path, 5, seconds=2.0, tokens_per_second=50.0)
    view.update()
    first, second = stream.getvalue().splitlines()
    assert "257 tokens/s" in first  # 1,800 tokens in 7 s
    assert "14 s left" in first  # 6 steps of 7/3 s
    assert "50 tokens/s" in second  # the only step since


def test_a_line_on_a_terminal_tells_the_speed_of_the_last_seconds(tmp_path: Path) -> None:
    stream = io.StringIO()
    config = Config(training=TrainingConfig(steps=40), world_size=1)
    console = Console(file=stream, width=200, force_terminal=True)
    with TrainingView(console, Cell("single", "adhoc", config), tmp_path) as view:
        for step in range(1, 31):
            grow(tmp_path, step, tokens_per_second=100.0 if step <= 20 else 200.0 + 200.0 * (step % 2))
        view.update()
    assert "300 tokens/s" in stream.getvalue()


def test_going_on_tells_what_changed_and_a_run_past_its_steps_where_it_is(tmp_path: Path) -> None:
    view, stream = view_of(tmp_path, 100)
    view.began(None, (tmp_path / "step-00000090", 90), ["training.global_batch_size 16 -> 8"])
    assert "step 90\nchanged since the checkpoint: training.global_batch_size 16 -> 8\n" in stream.getvalue()
    view, stream = view_of(tmp_path, 50)
    view.began(None, (tmp_path / "step-00000090", 90))
    said = stream.getvalue()
    assert f"nothing to do: {tmp_path / 'step-00000090'} is at step 90, training.steps is 50\n" in said
    assert "going on" not in said
