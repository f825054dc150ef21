"""How an A/B ends and is found again: whole, stopped in the middle, or before its first pair."""

from __future__ import annotations

import functools
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ndbench import cli
from ndbench.config import Cell
from ndbench.failures import Terminated
from ndbench.gate import ab, loop
from ndbench.gate.pairs import CPU, WALL, Bench, Pair
from ndbench.measure.code import package_folder
from ndbench.results.store import PairsFolder, RunFolder, find_run
from tests.records import a_cell, a_record

WORDS = ["suite=hsdp_tp", "cells=fsdp8", "hardware=cpu", "gate.residency=4"]


class NoProcess:
    """A side that starts nothing."""

    def __init__(self, side: Any, run: str, folder: RunFolder) -> None:
        self.folder, self.side = folder, side
        self.facts = {"package": str(package_folder())}

    def __enter__(self) -> NoProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def hello(self, cells: object) -> None:
        pass


def an_ab(
    monkeypatch: pytest.MonkeyPatch, folder: Path, ends_after: int | None, ratio: float = 0.3
) -> tuple[str, int | None]:
    """What an A/B prints and returns whose pairs are made up; after ``ends_after`` of them SIGTERM arrives."""

    def measure(bench: Bench, base: Cell, head: Cell, index: int) -> Pair:
        if index == ends_after:
            raise Terminated
        for side, slower in ((bench.base_folder, 1.0), (bench.head_folder, math.exp(ratio))):
            side.write_record(a_record(head.name, repeat=index, seconds=0.1 * slower, cell=head))
        return Pair({WALL: ratio + 0.001 * index, CPU: ratio / 2 + 0.001 * index})

    monkeypatch.setattr(ab, "SideProcess", NoProcess)
    monkeypatch.setattr(ab, "confirm", functools.partial(loop.confirm, measure=measure))
    stream = io.StringIO()
    code = None
    try:
        words = [*WORDS, f"results.dir={folder}"]
        code = ab.run_ab(words, "here", "set:training.seed=1", console=Console(file=stream, width=100))
    except Terminated:
        assert ends_after is not None
    return stream.getvalue(), code


def test_an_ab_that_is_stopped_says_what_its_pairs_say_and_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, _ = an_ab(monkeypatch, tmp_path, ends_after=5)
    (folder,) = (tmp_path / "ab").iterdir()
    assert "stopped in the middle; what there is decides nothing" in said
    assert "fsdp8: 5 of the 6 pairs that a decision needs; head against base so far: time +35." in said
    assert str(folder) in said
    assert "again: ndbench ab suite=hsdp_tp" in said
    kept = json.loads((folder / "pairs.json").read_text())
    assert len(kept["cells"]["fsdp8"]["pairs"]) == 5
    assert kept["stopped"]
    assert not (folder / "verdict.json").exists()


def test_an_ab_that_is_stopped_before_its_first_pair_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, _ = an_ab(monkeypatch, tmp_path, ends_after=0)
    assert "fsdp8: 0 of the 6 pairs that a decision needs\n" in said


def test_report_latest_finds_an_ab_with_its_own_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    RunFolder.create(tmp_path, "20200101-000000-aaaaaa")
    _said, code = an_ab(monkeypatch, tmp_path, ends_after=None)
    assert code == 1
    page = tmp_path / "out.html"
    for flags in ([], ["--markdown", "-"], ["--html", str(page)]):
        assert cli.main(["report", "latest", "--results-dir", str(tmp_path), *flags]) == 0
        told = page.read_text() if "--html" in flags else capsys.readouterr().out
        assert "REGRESSED: 1 regressed of 1 cell of hsdp_tp" in told
        assert "ndbench ab suite=hsdp_tp" in told
        assert "ndbench suite=hsdp_tp" not in told
        assert "baseline accept" not in told


def test_report_of_a_stopped_ab_is_partial_and_offers_no_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    an_ab(monkeypatch, tmp_path, ends_after=5)
    assert cli.main(["report", "latest", "--results-dir", str(tmp_path)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "NOT FINISHED" in told
    assert "5 of the 6 pairs that a decision needs" in told
    assert "--resume" not in told


def test_only_who_looks_at_it_finds_an_ab(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "20200101-000000-aaaaaa").path
    pairs = tmp_path / "ab" / "20260101-000000-bbbbbb"
    (pairs / "head").mkdir(parents=True)
    assert find_run("latest", tmp_path).path == run
    assert isinstance(find_run("latest", tmp_path, pairs=True), PairsFolder)
    with pytest.raises(ValueError, match=r"not among the 1 run in"):
        find_run("2026", tmp_path)


def test_the_time_that_is_announced_counts_the_start_of_both_sides_ranks() -> None:
    cell = a_cell("fsdp8")
    cell.config.gate.residency = 4.0
    said = re.search(r"about (\d+) min (\d+) s to", ab.estimate([cell]))
    assert said is not None
    # six residencies of eight ranks a side were measured to take four minutes on two cores
    assert int(said[1]) * 60 + int(said[2]) >= 200


def test_each_pair_says_how_long_the_next_decision_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 100000, 30))
    monkeypatch.setattr(loop.time, "monotonic", lambda: float(next(clock)))
    lines: list[str] = []
    cells = {"fsdp8": (a_cell("fsdp8"), a_cell("fsdp8"))}
    bench = Bench(*[None] * 4)  # type: ignore[arg-type]
    loop.confirm(
        bench, cells, cells["fsdp8"][1].config.gate, say=lines.append, measure=lambda *_: Pair({WALL: 0.3, CPU: 0.3})
    )
    assert lines[0].endswith("about 2 min 30 s to the next decision")
    assert "next decision" not in lines[5]


def test_an_ab_whose_files_cannot_be_written_prints_the_code_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[int] = []
    monkeypatch.setattr(ab, "print_comparison", lambda comparison, **_: printed.append(comparison.exit_code))

    def full(path: Path, _text: Any) -> None:
        raise OSError(28, f"cannot write {path}: No space left on device")

    monkeypatch.setattr(ab, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        an_ab(monkeypatch, tmp_path, ends_after=None)
    assert printed == [2]
