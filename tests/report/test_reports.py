"""What a run prints and writes: every fact there, nothing drawn by a hostile name or log, and never too long."""

from __future__ import annotations

import dataclasses
import io
import random
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ndbench.compare.result import Comparison, Current
from ndbench.config import GateConfig
from ndbench.report import facts, markdown, ranking
from ndbench.report.console import print_comparison
from ndbench.results.schema import Record
from tests.compare.helpers import baseline_of, decide
from tests.records import MIB, a_record, not_ok, plan_of, repeats


def same_model(records: list[Record]) -> list[Record]:
    """As cells of one suite are: one model, several layouts."""
    for record in records:
        model = record["cell"]["model"] | {"kwargs": {}}
        record["cell"] = record["cell"] | {"model": model}
    return records


def the_head() -> list[Record]:
    return [
        *same_model(repeats("ddp8", seconds=0.05, peak=300 * MIB)),
        *same_model(repeats("fsdp8", seconds=0.1, peak=100 * MIB)),
        *same_model(repeats("hsdp2x4", seconds=0.3, peak=200 * MIB)),
        *[not_ok("failed", "tp8", "rank 3 was killed by SIGKILL", repeat=n, log_tail="one\ntwo\n") for n in range(3)],
    ]


def the_plan(head: list[Record]) -> dict[str, Any]:
    return {
        "suite": "hsdp_tp",
        "overrides": ["suite=hsdp_tp", "training.steps=12", "cells=ddp8"],
        "cells": plan_of(head),
        "excluded": [{"name": "tp16", "reason": "tp > model.num_key_value_heads"}],
        "skipped": [{"name": "big", "reason": "needs 9 GiB of 8 GiB"}],
        "unselected": [{"name": "other", "cell_id": "x"}],
    }


def the_comparison() -> Comparison:
    stored = [*same_model(repeats("ddp8", seconds=0.05, peak=300 * MIB)), *same_model(repeats("fsdp8", seconds=0.1))]
    stored += [*same_model(repeats("hsdp2x4", seconds=0.1, peak=200 * MIB)), *repeats("tp8"), *repeats("gone")]
    return decide(the_head(), baseline_of(*[stored] * 3))


def printed(comparison: Comparison, width: int = 100, **options: Any) -> str:
    stream = io.StringIO()
    options.setdefault("plan", the_plan(the_head()))
    print_comparison(comparison, run_folder="results/runs/r", console=Console(file=stream, width=width), **options)
    return stream.getvalue()


REPORTS = {
    "console": printed,
    "narrow": lambda c: printed(c, width=80),
    "markdown": lambda c: markdown.render(c, plan=the_plan(the_head()), run_folder="results/runs/r"),
}


@pytest.mark.parametrize("report", REPORTS)
def test_every_report_has_the_headline_the_figures_the_reasons_and_the_commands(report: str) -> None:
    text = " ".join(REPORTS[report](the_comparison()).replace("\\", "").split())
    for fact in (
        "REGRESSED: 1 regressed, 1 invalid, 1 missing, 2 pass of 5 cells of hsdp_tp",
        "exit 1: regressed: hsdp2x4",
        "3 sessions, the newest 18 days old",
        "40,960",
        "-66.7%",
        "300.00 MiB",
        "4.4000",
        "step time +200.0%",
        "3 against 9 repeats of 3 sessions",
        "3 of 3 launched repeats failed: rank 3 was killed by SIGKILL",
        "two",
        "ndbench suite=hsdp_tp training.steps=12 cells=hsdp2x4",
        'ndbench baseline accept r --cells hsdp2x4 --reason "…"',
        'ndbench baseline accept r --cells gone --reason "…"',
        "fastest: ddp8, 40,960 tokens/s",
        "ddp8 (40,960 tokens/s, 300.00 MiB), fsdp8 (20,480 tokens/s, 100.00 MiB)",
        "excluded (1)",
        "tp16",
        "needs 9 GiB of 8 GiB",
        "unselected (1)",
    ):
        assert fact in text or fact.replace(">", "&gt;") in text, fact


def test_the_summary_says_since_when() -> None:
    head, baseline = repeats(seconds=0.3), baseline_of(*[repeats()] * 3)
    text = markdown.render(decide(head, baseline), plan=the_plan(head), records=head, baseline=baseline)
    assert "- since: after session s002 (2026-11-12, commit aaaaaaaaaa); here aaaaaaaaaa" in text
    assert "- since" not in markdown.render(decide(repeats(), baseline), records=head, baseline=baseline)


def test_a_layout_that_another_beats_in_speed_and_memory_is_not_on_the_pareto_front() -> None:
    front = ranking.layouts(the_comparison(), the_plan(the_head()))[1]
    assert front.endswith("memory: ddp8 (40,960 tokens/s, 300.00 MiB), fsdp8 (20,480 tokens/s, 100.00 MiB)")


def test_the_table_stays_within_its_columns() -> None:
    for width in (80, 100, 140):
        lines = printed(the_comparison(), width).splitlines()
        assert all(len(line) <= width for line in lines if "ndbench " not in line)


def test_no_color_prints_no_terminal_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    print_comparison(the_comparison(), console=Console(file=stream, width=100, force_terminal=True))
    assert re.search(r"\x1b\[[0-9;]*3[0-9]m", stream.getvalue()) is None
    monkeypatch.delenv("NO_COLOR")
    coloured = io.StringIO()
    print_comparison(the_comparison(), console=Console(file=coloured, width=100, force_terminal=True))
    assert "\x1b[1;31m" in coloured.getvalue()


def test_a_first_run_prints_the_command_that_accepts_it() -> None:
    text = printed(decide(repeats(), None), plan=None)
    assert "baseline: none yet" in text
    assert 'ndbench baseline accept r --reason "…"' in text
    assert "accept" not in printed(decide(repeats(), None, gate=GateConfig(mode="off")), plan=None)


def test_the_accept_command_names_the_results_folder_when_it_is_not_the_default(tmp_path: Path) -> None:
    comparison = decide(repeats(), None)
    assert facts.accept_command(comparison, tmp_path / "runs" / "r") == (
        f'ndbench baseline accept r --results-dir {tmp_path} --reason "…"'
    )
    assert facts.accept_command(comparison, tmp_path / "artifact") == (
        f'ndbench baseline accept {tmp_path}/artifact --reason "…"'
    )


def test_a_regressed_run_without_anything_new_offers_no_general_acceptance() -> None:
    assert facts.accept_command(decide(repeats(seconds=0.3), baseline_of(*[repeats()] * 3))) is None


def test_a_tie_for_the_fastest_is_said() -> None:
    rng = random.Random(0)
    head = [
        a_record(name, repeat=n, seconds=0.1 * (1 + rng.uniform(-0.05, 0.05))) for name in ("a", "b") for n in range(3)
    ]
    comparison = decide(same_model(head), None)
    assert "not told apart from it by these repeats" in ranking.layouts(comparison, {"cells": plan_of(head)})[0]


def test_cells_of_different_workloads_are_not_ranked_against_each_other() -> None:
    head = [*repeats("a"), *repeats("b", seconds=0.2)]
    assert ranking.layouts(decide(head, None), {"cells": plan_of(head)}) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"engine_config": {"name": "accelerate"}}, "accelerate"),
        ({"training": {"precision": "bf16"}}, "bf16"),
        ({"data": {"name": "source"}}, "data.name=source"),
    ],
)
def test_workloads_that_are_ranked_apart_have_labels_of_their_own(change: dict[str, Any], said: str) -> None:
    head = same_model([*repeats("a"), *repeats("b", seconds=0.2), *repeats("c"), *repeats("d", seconds=0.3)])
    for record in head:
        if record["cell"]["name"] in "cd":
            merged = {key: (record["cell"].get(key) or {}) | value for key, value in change.items()}
            record["cell"] = record["cell"] | merged
    lines = ranking.layouts(decide(head, None), {"cells": plan_of(head)})
    labels = {line.partition(": ")[0] for line in lines if ": fastest" in line}
    assert len(labels) == 2, lines
    assert sum(label.endswith(f", {said}") for label in labels) == 1, lines


def test_an_interval_wider_than_half_its_value_is_shown_as_a_factor() -> None:
    comparison = decide([a_record(repeat=n, seconds=s) for n, s in enumerate((0.01, 0.1, 1.0))], None)
    row = facts.row(comparison.cells[0])
    assert "±" not in row.spread
    current = comparison.cells[0].current
    assert current is not None
    assert current.tokens_low is not None
    assert current.tokens_high is not None
    factor = (current.tokens_high / current.tokens_low) ** 0.5
    assert row.spread == ("\u00d7/\u00f7 100+" if factor >= 100 else f"\u00d7/\u00f7 {factor:.2g}")


def test_changed_software_of_passing_cells_is_said_once_with_their_names() -> None:
    head = [*repeats("a"), *repeats("b")]
    comparison = decide(head, baseline_of([*repeats("a", torch="2.11.0"), *repeats("b", torch="2.11.0")]))
    assert "changed since the baseline: torch 2.11.0 → 2.13.0 (a, b)" in facts.remarks(comparison)
    assert sum("torch 2.11.0" in line for line in printed(comparison, plan=None).splitlines()) == 1


# --- hostile text, and too much of it ------------------------------------------------------------------------------

HOSTILE = "a|b`c`*d*<script>[x](http://e)@someone #12 ~~no~~ \x1b[31mred\x1b[0m\r\u202e"


def with_text(text: str) -> Comparison:
    comparison = decide([not_ok("failed", reason=text, log_tail=f"before\n```\n{text}\n")], None)
    cells = [dataclasses.replace(cell, name=text) for cell in comparison.cells]
    return dataclasses.replace(comparison, cells=cells)


def test_names_reasons_and_logs_cannot_draw_in_the_markdown() -> None:
    text = markdown.render(with_text(HOSTILE))
    outside = re.sub(r"`{4,}text\n.*?\n`{4,}", "", text, flags=re.S)
    assert "<script>" not in outside
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "@someone" not in outside
    assert "#12" not in outside
    rows = [line for line in text.splitlines() if line.startswith("| 🔴")]
    assert len(re.findall(r"(?<!\\)\|", rows[0])) == 9
    assert "````text\nbefore\n```\n" in text


def test_names_reasons_and_logs_cannot_write_terminal_codes() -> None:
    text = printed(with_text(HOSTILE + "[bold]markup[/bold][/]"), plan=None)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[bold]markup[/bold][/]" in text.replace("\n", "")


@pytest.mark.parametrize("limit", [2_000, 20_000, 200_000])
def test_a_long_report_is_cut_with_a_count_and_keeps_the_worst(limit: int) -> None:
    head = [record for n in range(300) for record in repeats(f"pass{n}", count=1)]
    head += [not_ok("failed", f"bad{n}", "x" * 100) for n in range(100)]
    head += repeats("slow", seconds=0.3)
    stored = [record for record in head if record["outcome"] == "ok" and record["cell"]["name"] != "slow"]
    comparison = decide(head, baseline_of(*[[*stored, *repeats("slow")]] * 3))
    text = markdown.render(comparison, plan=the_plan(head), limit=limit)
    assert len(text.encode()) <= limit
    assert "REGRESSED" in text
    assert "| slow |" in text
    if limit < 200_000:
        assert re.search(r"\*\*(\d+ more cells|The reasons of \d+ more cells)\*\*", text)


def test_a_report_of_500_cells_is_quick_and_within_the_limit() -> None:
    import time

    head = [record for n in range(500) for record in repeats(f"cell{n}", count=1)]
    comparison = decide(head, baseline_of(head))
    start = time.perf_counter()
    assert len(markdown.render(comparison, plan=the_plan(head)).encode()) < markdown.STEP_SUMMARY_LIMIT
    assert len(printed(comparison, plan=the_plan(head)).splitlines()) < 1000
    assert time.perf_counter() - start < 5


def test_the_step_summary_is_appended_and_cut_at_githubs_limit(tmp_path: Path) -> None:
    path = tmp_path / "summary"
    path.write_text("before\n")
    assert markdown.append_step_summary(path, "mine\n")
    assert path.read_text() == "before\nmine\n"
    assert markdown.append_step_summary(path, "ä" * markdown.STEP_SUMMARY_LIMIT)
    assert path.stat().st_size < markdown.STEP_SUMMARY_LIMIT
    assert "bytes do not fit into GitHub's step summary" in path.read_text()
    assert not markdown.append_step_summary(path, "x" * 5000)
    assert not markdown.append_step_summary(tmp_path / "no" / "folder", "x")


def test_small_and_missing_figures_are_shown_as_such() -> None:
    cell = decide(repeats(), None).cells[0]
    slow = dataclasses.replace(cell, current=Current("ok", 1, 1, tokens_per_second=0.51))
    assert (facts.row(slow).tokens, facts.row(slow).memory, facts.row(slow).loss) == ("0.51", "", "")
    assert facts.row(dataclasses.replace(cell, current=None)).tokens == "-"


def test_a_pass_without_speed_says_so_in_its_headline() -> None:
    there = [repeats(name) for name in ("a", "b")]
    elsewhere = [repeats(name, hardware={"device": "cpu", "model": "other", "ranks": 8}) for name in ("a", "b")]
    baseline = baseline_of(*[[*elsewhere[0], *there[1]]] * 3)
    comparison = decide([*there[0], *there[1]], baseline)
    assert facts.headline(comparison) == "PASS: 2 pass of 2 cells of hsdp_tp, speed not compared in 1"
    assert "speed not compared" not in facts.headline(decide(there[1], baseline_of(*[there[1]] * 3)))
