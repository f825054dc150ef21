from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from ndbench import cli
from ndbench.measure.devices import visible_devices
from ndbench.report import baselines
from ndbench.results.baseline import accept, list_baselines, prune, show
from ndbench.results.sessions import read_baseline
from ndbench.results.store import RunFolder
from tests.records import not_ok, repeats


def a_run(results: Path, run: str, suite: str = "hsdp_tp") -> RunFolder:
    folder = RunFolder.create(results, run)
    for record in repeats("fsdp8", run=run, suite=suite):
        folder.write_record(record)
    return folder


def said(function: object, *arguments: object) -> str:
    stream = io.StringIO()
    function(*arguments, Console(file=stream, width=100))  # type: ignore[operator]
    return " ".join(stream.getvalue().split())


def test_accepting_says_what_was_taken_and_what_was_held_back_with_the_way_on(tmp_path: Path) -> None:
    run = a_run(tmp_path, "r1")
    run.write_record(not_ok("failed", "ddp8", "it broke", run="r1"))
    text = said(baselines.print_accepted, accept(run, "first", results_dir=tmp_path))
    assert "accepted 1 cell: fsdp8" in text
    assert "not accepted: ddp8: 1 of 1 repeat failed: it broke" in text
    again = said(baselines.print_accepted, accept(run, "first", results_dir=tmp_path))
    assert "accepted before, unchanged: fsdp8" in again


def test_accepting_says_how_many_runs_are_lacking_until_less_than_double_is_red(tmp_path: Path) -> None:
    texts = [
        said(
            baselines.print_accepted, accept(a_run(tmp_path, f"r{number}"), "again", results_dir=tmp_path, verdicts={})
        )
        for number in range(3)
    ]
    assert (
        "1 of 3: 2 more accepted runs will tell how runs differ; until then only a step twice as long is red"
        in texts[0]
    )
    assert "2 of 3: 1 more accepted run will tell" in texts[1]
    assert "only a step twice as long" not in texts[2]


def test_listing_an_empty_folder_says_how_to_begin(tmp_path: Path) -> None:
    assert "ndbench baseline accept RUN" in said(baselines.print_list, list_baselines(tmp_path), tmp_path)


def test_list_show_and_prune_print_who_when_and_why(tmp_path: Path) -> None:
    for number in range(4):
        accept(a_run(tmp_path, f"r{number}"), f"reason {number}", results_dir=tmp_path, by="someone", verdicts={})
    listed = said(baselines.print_list, list_baselines(tmp_path), tmp_path)
    for fact in ("cpu_x8/hsdp_tp", "r0", "r3", "someone", "reason 2", "2.13.0"):
        assert fact in listed
    folder = baselines.baseline_at(None, tmp_path)
    shown = said(baselines.print_session, show(read_baseline(folder), "r1"))
    for fact in ("session r1", "reason: reason 1", "torch 2.13.0", "20,480", "100.00 MiB", "4.4000"):
        assert fact in shown
    assert "removed 1 session: r1; 3 stay" in said(baselines.print_pruned, prune(folder, 2), folder)
    assert "nothing to remove; 3 stay" in said(baselines.print_pruned, prune(folder, 2), folder)


def test_a_baseline_is_named_by_path_suite_or_hardware_and_an_ambiguous_name_lists_them(tmp_path: Path) -> None:
    accept(a_run(tmp_path, "r1"), "x", results_dir=tmp_path)
    only = tmp_path / "baselines/cpu_x8/hsdp_tp"
    for name in (None, only, "cpu_x8/hsdp_tp", "hsdp_tp", "cpu_x8"):
        assert baselines.baseline_at(name, tmp_path) == only
    accept(a_run(tmp_path, "r2", suite="smoke"), "x", results_dir=tmp_path)
    assert baselines.baseline_at("smoke", tmp_path).name == "smoke"
    with pytest.raises(ValueError, match=r"2 baselines below .*; stored there: cpu_x8/hsdp_tp, cpu_x8/smoke"):
        baselines.baseline_at(None, tmp_path)
    with pytest.raises(ValueError, match="0 baselines 'other'"):
        baselines.baseline_at("other", tmp_path)


def listed(results: Path, width: int = 100, here: str | None = None) -> list[str]:
    stream = io.StringIO()
    baselines.print_list(list_baselines(results), results, Console(file=stream, width=width), here)
    return stream.getvalue().splitlines()


def test_a_session_is_one_line_of_the_list_however_long_its_reason(tmp_path: Path) -> None:
    reason = "a reason of many words that says at length why the launches of this day are the reference " * 3
    for number in range(3):
        accept(a_run(tmp_path, f"r{number}"), reason, results_dir=tmp_path, by="someone of a long name", verdicts={})
    for width in (80, 100, 160):
        lines = listed(tmp_path, width)
        assert len(lines) == 1 + 2 + 3 + 1 + 1  # name, head, sessions, empty, hint
        assert all(len(line.rstrip()) <= width for line in lines[1:])
        assert sum("r0" in line or "r1" in line or "r2" in line for line in lines[2:]) == 3
        assert sum("a reason of" in line and "…" in line for line in lines) == 3
    whole = said(baselines.print_session, show(read_baseline(baselines.baseline_at(None, tmp_path)), "r1"))
    assert " ".join(reason.split()) in whole


def test_the_hardware_of_this_machine_comes_first_in_the_list(tmp_path: Path) -> None:
    for number, hardware in enumerate(("a100_x8", "cpu_x8", "h200_x2")):
        accept(a_run(tmp_path, f"r{number}"), "x", results_dir=tmp_path, hardware=hardware)
    for here, first in (("h200", "h200_x2"), ("cpu", "cpu_x8"), ("h2", "a100_x8"), (None, "a100_x8")):
        heads = [line.split("/")[0] for line in listed(tmp_path, here=here) if "/hsdp_tp  (" in line]
        assert heads[0] == first
        assert sorted(heads) == ["a100_x8", "cpu_x8", "h200_x2"]


def test_the_list_knows_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, hardware in enumerate(("a100_x8", "cpu_x8")):
        accept(a_run(tmp_path, f"r{number}"), "x", results_dir=tmp_path, hardware=hardware)
    if visible_devices():
        pytest.skip("this machine is not a CPU's")
    assert cli.main(["baseline", "list", "--results-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("cpu_x8/hsdp_tp")
