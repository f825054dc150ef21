"""Static pictures: real PNG files with the figures' own lines, bars and words, and one line where they cannot be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the extra 'png' is not installed")
pytest.importorskip("plotly", reason="the extra 'report' is not installed")

import numpy as np
from PIL import Image

from ndbench.cli import main
from ndbench.report import html, pictures
from ndbench.report.figures import PALETTE
from ndbench.results.schema import Record
from ndbench.results.store import RunFolder, write_json
from tests.compare.helpers import decide
from tests.records import MIB, a_cell, a_record, not_ok, repeats
from tests.report.html_runs import failing_head, one_workload, plan_for, stored_baseline

pytestmark = pytest.mark.filterwarnings("error:.*:UserWarning:matplotlib.*")


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def longest(picture: Any, colour: str) -> dict[int, int]:
    """The longest stretch of a colour in every row of pixels that has it."""
    mask = (picture == np.array(rgb(colour))).all(axis=-1)
    return {int(row): int(mask[row].sum()) for row in np.flatnonzero(mask.any(axis=1))}


def decoded(path: Path) -> Any:
    with Image.open(path) as image:
        image.verify()
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def sending(name: str, mebibytes: int, **fields: Any) -> Record:
    table = [{"op": "all_gather", "axis": "fsdp", "count": 1, "bytes": mebibytes * MIB, "where": []}]
    return a_record(name, collectives=table, **fields)


def stored(tmp_path: Path, head: list[Record]) -> RunFolder:
    run = RunFolder.create(tmp_path / "results", "20261130-061500-ab12cd")
    for record in head:
        run.write_record(record)
    write_json(run.plan_path, plan_for(head) | {"baseline": None})
    write_json(run.verdict_path, decide(head, None).to_json())
    return run


def test_the_command_writes_pictures_whose_bars_are_as_long_as_their_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = one_workload([sending("ddp8", 4, seconds=0.05, peak=300 * MIB), sending("fsdp8", 1, peak=100 * MIB)])
    run = stored(tmp_path, head)
    assert main(["report", str(run.path), "--png", str(tmp_path / "out")]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.split()]
    assert [path.name.split("-")[1] for path in paths] == ["pareto", "losses", "collectives"]
    read = {path.name.split("-")[1]: decoded(path) for path in paths}
    for name, picture in read.items():
        assert picture.shape[1] == 1800, name
        assert 300 < picture.shape[0] < 1800
        assert 0.005 < (picture < 250).any(axis=-1).mean() < 0.5, f"{name} has ink, and is no blot"
    lengths = sorted({length for length in longest(read["collectives"], PALETTE[0]).values() if length > 50})
    assert len(lengths) == 2
    assert lengths[1] / lengths[0] == pytest.approx(4, abs=0.02)
    assert longest(read["pareto"], PALETTE[0]), "the layouts stand on the front"


def test_every_kind_of_figure_is_drawn(tmp_path: Path) -> None:
    head = [record for record in failing_head() if record["cell"]["name"] != "tp8"]
    for layout, world, seconds in (("single", 1, 0.8), ("fsdp2", 2, 0.4), ("fsdp4", 4, 0.25)):
        record = a_record(layout, cell=a_cell(layout), seconds=seconds)
        record["world"] = record["world"] | {"size": world, "layout": layout}
        head += one_workload([record])
    head += one_workload(repeats("costs $5_a$ and \\alpha", count=1))
    made = html.save_pictures(decide(head, stored_baseline()), head, tmp_path, plan=plan_for(head))
    assert {path.name.split("-")[1] for path in made} == {"pareto", "losses", "collectives", "scaling"}
    for path in made:
        assert (decoded(path) < 250).any()


def test_what_a_name_says_is_drawn_as_it_is_written() -> None:
    cell = a_record("a$b$c&d", collectives=[{"op": "x", "axis": "tp", "count": 1, "bytes": MIB, "where": []}])
    drawn = html.overview_figures(decide([cell], None), one_workload([cell]), None)
    bars = next(value for key, value in drawn.items() if key.startswith("collectives"))
    axes = pictures.picture(bars, "t", "c").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a$b$c&d"]
    assert not any(label.get_parse_math() for label in axes.get_yticklabels())


def test_stacked_bars_begin_where_the_last_one_ended() -> None:
    table = [{"op": "x", "axis": axis, "count": 1, "bytes": n * MIB, "where": []} for axis, n in (("a", 3), ("b", 2))]
    head = one_workload([a_record("one", collectives=table), a_record("two", collectives=table[1:])])
    drawn = html.overview_figures(decide(head, None), head, None)
    bars = next(value for key, value in drawn.items() if key.startswith("collectives"))
    axes = pictures.picture(bars, "t", "c").axes[0]
    placed = sorted((round(bar.get_y() + 0.4), bar.get_x(), bar.get_width()) for bar in axes.patches)
    assert placed == [(0, 0, 3), (0, 3, 2), (1, 0, 0), (1, 0, 2)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two"]


def test_a_curve_that_waits_for_a_click_is_not_drawn() -> None:
    head = one_workload([record for n in range(14) for record in repeats(f"layout{n}", count=1)])
    drawn = html.overview_figures(decide(head, None), head, None)
    losses = next(value for key, value in drawn.items() if key.startswith("losses"))
    upper = pictures.picture(losses, "t", "c").axes[0]
    assert len(upper.get_lines()) == 12


def test_without_matplotlib_one_line_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored(tmp_path, repeats())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(run.path), "--png", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip()
    assert error == "ndbench: pictures need matplotlib: pip install 'ndbench[png]'"
    assert not (tmp_path / "out").exists()
    page, text = tmp_path / "page.html", tmp_path / "text.md"
    all_three = ["--html", str(page), "--png", str(tmp_path / "out"), "--markdown", str(text)]
    assert main(["report", str(run.path), *all_three]) == 2
    assert not page.exists(), "what is refused writes nothing"


def test_a_run_without_figures_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stored(tmp_path, [not_ok("oom")])
    assert main(["report", str(run.path), "--png", str(tmp_path / "out")]) == 2
    assert "has no picture to draw" in capsys.readouterr().err
