"""The log: a line a step, each step once, whatever ended the run before."""

from __future__ import annotations

import json
from pathlib import Path

from ndbench.training.log import TrainingLog, read_log


def test_resuming_drops_the_steps_that_come_again_and_what_was_half_written(tmp_path: Path) -> None:
    path = tmp_path / "run" / "log.jsonl"
    log = TrainingLog(path)
    for step in range(1, 8):
        log.write({"step": step, "loss": step / 3})
    log.close()
    with path.open("a") as stream:
        stream.write('{"step": 8, "lo')
    resumed = TrainingLog(path, last=5)
    resumed.write({"step": 6, "loss": float("nan")})
    resumed.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[4]["loss"] == 5 / 3, "numbers come back exactly"
    assert lines[5]["loss"] is None
    assert [line["step"] for line in read_log(path, last=2)] == [1, 2]
    assert [file.name for file in path.parent.iterdir()] == ["log.jsonl"]


def test_a_spoiled_line_does_not_hide_the_others(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n\xfe\xff\x00spoiled\n{"step": 3}\n')
    assert [line["step"] for line in read_log(path)] == [1, 3]
