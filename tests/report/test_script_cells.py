"""A script's cell is described by what the script said alone."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from ndbench.compare.result import CellVerdict, Current
from ndbench.report import html, markdown
from ndbench.report.cells import named, speed_title, under
from ndbench.report.console import print_comparison
from ndbench.report.facts import row
from ndbench.report.figures import workload
from ndbench.results.schema import Record
from tests.compare.helpers import decide
from tests.records import repeats
from tests.report.html_runs import plan_for


def test_a_scripts_title_has_no_model_batch_or_precision() -> None:
    training = {"sequence_length": 128, "global_batch_size": 16, "precision": "fp32"}
    cell: dict[str, Any] = {"model": {"name": "llama_tiny"}, "training": training}
    assert workload(cell)[1] == "llama_tiny, 128 tokens, batch 16, fp32"
    assert workload({**cell, "engine_config": {"command": "python mine.py"}})[1] == "a script of its own"


def test_without_tokens_the_table_shows_steps() -> None:
    current = Current("ok", 3, 3, step_seconds=0.25)
    assert row(CellVerdict("c", None, "pass", [], current=current)).tokens == "4 steps/s"


def of_engine(name: str, **engine: Any) -> list[Record]:
    records = repeats("ddp2")
    for record in records:
        described = record["cell"]["engine_config"] | {"name": name, **engine}
        record["cell"] = record["cell"] | {"engine": name, "engine_config": described}
    return records


def reports(head: list[Record]) -> dict[str, str]:
    """Terminal, Markdown and the page's body."""
    comparison, stream = decide(head, None), io.StringIO()
    print_comparison(comparison, plan=plan_for(head), records=head, console=Console(file=stream, width=80))
    page = html.render(comparison, head, plan=plan_for(head)).partition("</style>")[2].partition("text/plain")[0]
    return {"terminal": stream.getvalue(), "markdown": markdown.render(comparison, records=head), "page": page}


def test_an_engine_of_the_users_own_stands_beside_its_cells() -> None:
    for where, text in reports(of_engine("my_loop", target="loop.MyLoop")).items():
        assert "(my_loop)" in text, where
    for where, text in reports(repeats("ddp2")).items():
        assert "(ndbench)" not in text, where


def test_an_engine_that_the_cells_name_says_is_not_said_twice() -> None:
    assert named("fsdp2-8b-torchtitan", "torchtitan") == "fsdp2-8b-torchtitan"
    assert named("ddp2", None) == named("ddp2", "ndbench") == "ddp2"


def test_a_script_has_no_model_of_ours_in_any_report() -> None:
    for where, text in reports(of_engine("command", command="python mine.py")).items():
        assert "llama_tiny" not in text, where


def without_tokens(name: str) -> CellVerdict:
    return CellVerdict(name, None, "pass", [], current=Current("ok", 3, 3, step_seconds=0.25))


def test_a_column_is_titled_by_what_it_holds() -> None:
    steps = without_tokens("a")
    tokens = CellVerdict("b", None, "pass", [], current=Current("ok", 3, 3, step_seconds=0.25, tokens_per_second=800.0))
    failed = CellVerdict("c", None, "invalid", [], current=Current("failed", 1, 0))
    for cells, title, shown in (
        ([tokens, failed], "tokens/s", ["800", "failed"]),
        ([steps, failed], "steps/s", ["4", "failed"]),
        ([steps, tokens, failed], "speed", ["4 steps/s", "800 tokens/s", "failed"]),
    ):
        assert speed_title(cells) == title
        assert [under(title, row(cell).tokens) for cell in cells] == shown
