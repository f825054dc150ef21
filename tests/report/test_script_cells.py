"""A script's cell is described by what the script said alone."""

from __future__ import annotations

from typing import Any

from ndbench.compare.result import CellVerdict, Current
from ndbench.report.facts import row
from ndbench.report.figures import workload


def test_a_scripts_title_has_no_model_batch_or_precision() -> None:
    training = {"sequence_length": 128, "global_batch_size": 16, "precision": "fp32"}
    cell: dict[str, Any] = {"model": {"name": "llama_tiny"}, "training": training}
    assert workload(cell)[1] == "llama_tiny, 128 tokens, batch 16, fp32"
    assert workload({**cell, "engine_config": {"command": "python mine.py"}})[1] == "a script of its own"


def test_without_tokens_the_table_shows_steps() -> None:
    current = Current("ok", 3, 3, step_seconds=0.25)
    assert row(CellVerdict("c", None, "pass", [], current=current)).tokens == "4 steps/s"
