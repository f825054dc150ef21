"""The report on a terminal: answers on the first and the last screen, every drawing, at 80 columns, in ASCII too."""

from __future__ import annotations

import dataclasses
import io
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ndbench.compare.result import Comparison, MetricVerdict
from ndbench.report import markdown, wandb_runs
from ndbench.report.console import print_comparison
from ndbench.report.plain import ascii_text
from ndbench.report.strokes import ASCII, BLOCKS, bar, sparkline, thinned
from ndbench.results.schema import Record
from ndbench.results.sessions import Baseline
from ndbench.results.store import RunFolder, write_json
from tests.compare.helpers import baseline_of, decide, session_of
from tests.records import MIB, a_record, noisy, not_ok, plan_of, repeats
from tests.report.html_runs import HOSTILE, LONG, crowded, failing_head, one_workload, plan_for, stored_baseline

ROOT = Path(__file__).parents[2]
KEY = "0123456789abcdef0123456789abcdef01234567"
SCREEN = 23
"""Lines of a terminal of 24 above the prompt."""


class Stream(io.StringIO):
    """A stream that says which encoding it has, as a terminal's does."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding


def shown(
    head: list[Record],
    baseline: Baseline | None,
    *,
    width: int = 80,
    encoding: str = "utf-8",
    plan: dict[str, Any] | None = None,
    comparison: Comparison | None = None,
    **console: Any,
) -> str:
    stream = Stream(encoding)
    print_comparison(
        comparison or decide(head, baseline),
        plan=plan if plan is not None else plan_for(head),
        run_folder="results/runs/r",
        records=head,
        baseline=baseline,
        draw=True,
        console=Console(file=stream, width=width, **console),
    )
    return stream.getvalue()


def words(text: str) -> str:
    return " ".join(text.split())


def section(text: str, title: str) -> list[str]:
    """The lines below a title, to the next empty one."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(title)) + 1
    return lines[start : start + lines[start:].index("")]


def test_everything_the_page_draws_is_drawn() -> None:
    text = shown(failing_head(), stored_baseline())
    speed = section(text, "Speed in tokens/s")
    assert speed[0].split()[:2] == ["ddp8", "25,571"]
    assert "fastest, Pareto front" in speed[0]
    assert next(line for line in speed if "fsdp8" in line).count("Pareto") == 0
    lengths = [line.count("█") for line in speed if "█" in line]
    assert lengths == sorted(lengths, reverse=True)
    steps = section(text, "Step times")
    assert "100 ms (100 to 100), 2 dropped" in next(line for line in steps if "hsdp2x4" in line)
    assert next(line for line in steps if "fsdp8" in line).count("|") == 2, "three repeats, apart"
    losses = section(text, "Loss")
    assert "█▇▇▆x▅▄▄▃▂▂▁ 5.5000 to 4.4000, not finite at step 4" in next(line for line in losses if "hsdp2x4" in line)
    assert "8.79 KiB" in section(text, "Collectives")[0]
    history = section(text, "History")
    assert next(line for line in history if "fsdp8" in line).split()[1:] == ["██████>▁", "20,495", "to", "14,576"]
    assert ">" not in next(line for line in history if "gone" in line), "a cell that did not run has no level here"


def test_bars_are_as_long_as_their_values() -> None:
    assert [len(bar(share, 40, ASCII)) for share in (1, 0.5, 0.25, 0.001, 0)] == [40, 20, 10, 1, 0]
    assert bar(0.5, 1, BLOCKS) == "▌"
    assert bar(2, 3, BLOCKS) == "███"


def test_a_sparkline_rises_with_its_values_and_a_peak_survives_thinning() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], BLOCKS, 0, 7) == BLOCKS.levels
    assert sparkline([1.0, None, 2.0], ASCII, 1, 2) == "0x9"
    assert sparkline([3.0, 3.0], ASCII, 3, 3) == "00"
    assert max(value or 0 for value in thinned([1.0] * 500 + [9.0] + [1.0] * 500, 10)) == 9.0
    assert thinned([1.0, float("nan"), 1.0, 1.0], 2) == [None, 1.0]


def test_collectives_have_a_bar_for_every_axis_in_proportion() -> None:
    table = [
        {"op": "all_gather", "axis": "tp", "count": 1, "bytes": 2 * MIB, "where": []},
        {"op": "all_reduce", "axis": "tp", "count": 1, "bytes": 2 * MIB, "where": []},
        {"op": "all_gather", "axis": "fsdp", "count": 1, "bytes": MIB, "where": []},
    ]
    first, second = section(shown([a_record(collectives=table)], None), "Collectives")
    assert first.split()[:2] == ["fsdp8", "tp"]
    assert second.split()[0] == "fsdp"
    assert first.count("█") == 4 * second.count("█")


def test_history_shows_where_the_level_moved_and_what_was_accepted() -> None:
    rng = random.Random(3)
    days = [noisy("fsdp8", rng, within=0.01, slower=1.3 if day > 6 else 1.0) for day in range(12)]
    sessions = [session_of(records, day) for day, records in enumerate(days)]
    sessions[1] = dataclasses.replace(sessions[1], restarted=("fsdp8",))
    text = shown(noisy("fsdp8", rng, within=0.01, slower=1.3), Baseline("somewhere", sessions))
    lines = section(text, "History")
    assert re.search(r"█\*█+\|▁+>▁", lines[0]), lines[0]
    assert "accepted on purpose as new level, session s001 (2026-11-11): day 1" in words(text)
    assert re.search(r"the level moved at session s007 \(2026-11-17\): step time \+(29|30|31)\.\d%", words(text))


@pytest.mark.parametrize("make", [lambda: (failing_head(), stored_baseline(), None), crowded])
def test_a_failing_gate_is_answered_on_the_first_and_on_the_last_screen(make: Any) -> None:
    head, baseline, plan = make()
    comparison = decide(head, baseline)
    lines = shown(head, baseline, plan=plan, comparison=comparison).splitlines()
    screens = [-(-len(line) // 80) or 1 for line in lines]  # a long command takes several rows
    first = next(count for count in range(len(lines) + 1) if sum(screens[: count + 1]) > SCREEN)
    last = next(count for count in range(len(lines) + 1) if sum(screens[len(lines) - count - 1 :]) > SCREEN)
    name = next(cell.name for cell in comparison.cells if cell.verdict == "regressed")
    speed = comparison.cell(name).metric("tokens_per_second")
    assert speed is not None
    for screen in (" ".join(lines[:first]), " ".join(lines[len(lines) - last :])):
        told = words(screen)
        assert "REGRESSED: " in told
        for fact in (
            f"{name}: regressed",
            f"tokens/s {speed.change:+.1%}",
            f"95 % interval {speed.low:+.1%} to {speed.high:+.1%}",
            "after session s00",
            f"cells={name}",
        ):
            assert fact in told, fact
        assert re.search(r"and \d+ more: ", told), "those that do not fit are counted"


def test_a_short_report_does_not_say_it_twice() -> None:
    head, baseline = repeats(seconds=0.3), baseline_of(*[repeats()] * 3)
    stream = Stream()
    print_comparison(decide(head, baseline), plan=plan_for(head), console=Console(file=stream, width=100))
    assert stream.getvalue().count("how surely") == 1


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [80, 100])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut(width: int, encoding: str) -> None:
    head, baseline, plan = crowded()
    head[0]["metrics"]["tokens_per_second"]["value"] = 123_456_789.0
    for record in head[:3]:
        record["steps"]["seconds"] = [1e-5 * (1 + 0.4 * record["repeat"])] * 12
        record["steps"]["loss"] = [123.4567] * 12
        record["structure"]["tracked_peak_bytes"] = record["metrics"]["peak_allocated_bytes"]["value"] = 1023 * 2**40
    head += [*one_workload(repeats("short", seconds=0.1)), not_ok("failed", "tp8", "x" * 300)]
    text = shown(head, baseline, width=width, encoding=encoding, plan=plan)
    for line in text.splitlines():
        assert len(line) <= width or "ndbench " in line, line
    assert not re.search(r"…(?!\")", words(text).replace("… (the rest among the reasons)", ""))
    row = next(line for line in text.splitlines() if "GiB" in line or "TiB" in line)
    assert re.search(r"\d{1,3}(,\d{3}){2} ((±|\+-)\d+%|x or / [\d.]+|\u00d7/\u00f7 [\d.]+)", row), row
    assert "123.4567" in row
    assert "x" * 300 in re.sub(r"\s", "", text)
    assert f"{LONG}-29" in re.sub(r"\s", "", text)


def test_ascii_has_the_same_facts() -> None:
    fancy, plain = (shown(failing_head(), stored_baseline(), encoding=encoding) for encoding in ("utf-8", "latin-1"))
    assert plain.isascii()
    assert "?" not in plain.replace("? of", "")
    figures = re.compile(r"\d[\d,.]*%?")
    kept = [line for line in plain.splitlines() if "0 is the lowest value" not in line]
    for title in ("Speed in", "Collectives"):
        assert [figures.findall(line) for line in section("\n".join(kept), title)] == [
            figures.findall(line) for line in section(fancy, title)
        ]
    assert '--reason "..."' in plain
    assert "9877x5432210 5.5000 to 4.4000" in plain
    assert "In the lines drawn below 0 is the lowest value of a line and 9 the highest." in plain


def test_lookalikes_are_ascii_and_unknown_signs_are_marked() -> None:
    assert ascii_text("±3 % → 4 … é") == "+-3 % -> 4 ... ?"


def test_no_color_draws_without_colour_and_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = re.compile(r"\x1b\[[0-9;]*m")
    with_colour = shown(failing_head(), stored_baseline(), force_terminal=True, color_system="standard")
    assert "\x1b[36m" in with_colour, "drawings are coloured where they may be"
    monkeypatch.setenv("NO_COLOR", "1")
    without = shown(failing_head(), stored_baseline(), force_terminal=True)
    assert not re.search(r"\x1b\[[0-9;]*(3|4|9)[0-9]m", without)
    assert colour.sub("", without) == colour.sub("", with_colour)


def test_two_repeats_have_no_interval_in_any_report() -> None:
    head = one_workload([a_record("ddp8", repeat=n, seconds=0.1 * (1 + n)) for n in range(2)])
    head += one_workload([a_record("fsdp8", repeat=n, seconds=0.12 * (1 + n)) for n in range(2)])
    stored = one_workload([a_record(name, repeat=0) for name in ("ddp8", "fsdp8")])
    comparison = decide(head, baseline_of(stored))
    speed = comparison.cells[0].metric("tokens_per_second")
    assert speed is not None
    assert speed.high is not None
    assert speed.high > 10, "the interval of two repeats is absurd"
    from ndbench.report import html

    table = wandb_runs.comparison_run(comparison, head).table
    assert table is not None
    texts = {
        "terminal": shown(head, None, comparison=comparison, width=120),
        "markdown": markdown.render(comparison, plan=plan_for(head)),
        "page": html.render(comparison, head, plan=plan_for(head)),
        "wandb": str(table),
    }
    for name, text in texts.items():
        told = words(re.sub(r"<script.*?</script>|<style.*?</style>", "", text, flags=re.DOTALL))
        assert not re.search(r"±\d|\[[+-]\d+(\.\d)?%, ", told), name
        assert not re.search(r"\d{4}(\.\d)?%", told), name
        if name != "wandb":
            assert "n=2: 2 repeats: too few for an interval, 3 or more give one" in told, name
        if name in ("terminal", "markdown"):
            assert "2 repeats: too few to be sure" in told
    assert all(row[6:8] == [None, None] for row in table[1])


def test_pairs_have_their_interval_whatever_the_repeats() -> None:
    """A regression that pairs have confirmed after a run of two repeats is shown as sure as it is."""
    head, baseline = [a_record(repeat=n, seconds=0.3) for n in range(2)], baseline_of(*[repeats()] * 3)
    said = MetricVerdict("tokens_per_second", "regressed", "pairs", -0.6, -0.61, -0.59)
    said = dataclasses.replace(said, details={"confirmed": True, "log_effect": 0.9})
    comparison = decide(head, baseline, confirmed={"fsdp8": [said]})
    text = words(shown(head, baseline, comparison=comparison, width=120))
    assert "how surely 95 % interval -61.0% to -59.0%" in text
    assert "-60.0% [-61%, -59%]" in text
    lone = dataclasses.replace(comparison.cells[0], metrics=[dataclasses.replace(said, details={})])
    text = words(shown(head, baseline, comparison=dataclasses.replace(comparison, cells=[lone]), width=120))
    assert "how surely 2 repeats: too few for an interval" in text
    assert "-61" not in text


def test_three_repeats_have_their_interval() -> None:
    text = shown(*(repeats(seconds=0.1), baseline_of(*[repeats()] * 3)))
    assert "±0%" in text
    assert "too few" not in text


def test_a_key_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    head = [*repeats("fsdp8"), not_ok("failed", "tp8", f"it said {KEY}", log_tail=f"token={KEY}\n{KEY}")]
    plan = plan_for(head) | {"overrides": ["engine=command", f"engine.command='WANDB_API_KEY={KEY} python t.py'"]}
    comparison = decide(head, None)
    comparison.notes.append(f"a note of {KEY}")
    for text in (shown(head, None, plan=plan, comparison=comparison), markdown.render(comparison, plan=plan)):
        assert KEY not in re.sub(r"\s", "", text)
        assert "[hidden]" in text


def test_a_hostile_name_is_drawn_as_it_reads() -> None:
    assert HOSTILE in shown(failing_head(), stored_baseline())


def test_500_cells_are_counted_not_drawn_one_by_one() -> None:
    head = one_workload([record for n in range(500) for record in repeats(f"c{n}", count=1)])
    text = shown(head, baseline_of(head), plan={"suite": "hsdp_tp", "overrides": [], "cells": plan_of(head)})
    assert len(section(text, "Step times")) == 13
    assert "and 488 more cells; ndbench report RUN --html FILE draws them all" in words(text)


@pytest.fixture
def stored(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "results", "20261130-061500-ab12cd")
    head = failing_head()
    kept = [record for record in head if record["cell"]["name"] != HOSTILE]
    for record in kept:
        run.write_record(record)
    write_json(run.plan_path, plan_for(kept) | {"baseline": None})
    write_json(run.verdict_path, decide(kept, stored_baseline()).to_json())
    return run


def test_the_command_line_writes_to_a_terminal_that_knows_ascii_only(stored: RunFolder) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ndbench", "report", str(stored.path)]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode("ascii")
    for fact in ("how surely", "Speed in tokens/s", "Step times", "Loss", "Collectives", "REGRESSED"):
        assert fact in text
    helped = subprocess.run(
        [*command[:3], "-h"], capture_output=True, timeout=60, check=False, cwd=ROOT, env=environment
    )
    assert helped.returncode == 0
    assert b"--reason '...'" in helped.stdout


def failed_once() -> list[Record]:
    return [not_ok("failed", "fsdp8", "rank 1 ended with exit code 3")]


def test_a_cell_that_was_not_measured_has_nothing_to_be_sure_of_and_is_told_once() -> None:
    text = shown(failed_once(), None, plan=plan_for(failed_once()))
    assert "how surely" not in text
    assert "since  " not in text
    assert text.count("rank 1 ended with exit code 3") == 1
    assert text.count("fsdp8: invalid") == 1


def test_since_says_when_the_code_had_uncommitted_changes() -> None:
    head = repeats(seconds=0.3, dirty=True)
    text = words(shown(head, baseline_of(*[repeats()] * 3)))
    assert "commit aaaaaaaaaa); here aaaaaaaaaa + uncommitted changes" in text


def test_steps_dropped_are_those_of_one_repeat() -> None:
    assert "2 dropped a repeat" in shown(repeats(), None)
