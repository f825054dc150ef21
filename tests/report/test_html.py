"""The page by itself: whole, small, without any reference elsewhere, and with nothing of a record taken for markup."""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="the extra 'report' is not installed")

from ndbench.report import figures_cells, figures_layouts, html
from ndbench.report.figures import Measured
from ndbench.report.files import write_files
from ndbench.results.store import RunFolder, write_json
from tests.compare.helpers import decide
from tests.records import a_cell, a_record, not_ok, repeats
from tests.report.html_runs import HOSTILE, failing, failing_head, large, one_workload, plan_for

failing_page = functools.cache(failing)


class Page(HTMLParser):
    """Elements with their attributes, and the text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.data, self._inside = "", {}, ""  # type: str, dict[str, str], str
        self._id: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside, self._id = tag, dict(attrs).get("id")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.text += data
        elif self._id:
            self.data[self._id] = self.data.get(self._id, "") + data

    def figures(self) -> dict[str, Any]:
        return json.loads(gzip.decompress(base64.b64decode(self.data["packed-figures"])))


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_failing_gate_answers_the_four_questions_before_anything_else() -> None:
    comparison, text = failing_page()
    assert comparison.cell("fsdp8").verdict == "regressed"
    top = words(Page(text[: text.index('<section id="cells"')]).text)
    assert top.index("REGRESSED") < top.index("fsdp8")
    speed = comparison.cell("fsdp8").metric("tokens_per_second")
    assert speed is not None
    assert f"tokens/s {speed.change:+.1%}" in top
    assert f"95 % interval {speed.low:+.1%} to {speed.high:+.1%}" in top
    assert "after session s005 (2026-11-15, commit aaaaaaaaaa)" in top
    assert "ndbench suite=hsdp_tp training.steps=12 cells=fsdp8" in top
    for name in ("tp8", "hsdp2x4", "gone"):
        assert name in top


def test_nothing_in_the_page_refers_elsewhere() -> None:
    page = Page(failing_page()[1])
    for tag, attributes in page.elements:
        assert tag not in ("iframe", "object", "embed", "base", "img"), tag
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    style = (html.TEMPLATES / "report.css").read_text() + (html.TEMPLATES / "report.js").read_text()
    assert not re.search(r"url\(|@import|https?://|fetch\(|XMLHttpRequest", style)
    assert any("default-src 'none'" in (attributes.get("content") or "") for _, attributes in page.elements)


def test_hostile_text_stays_text() -> None:
    page = Page(failing_page()[1])
    assert sum(tag == "script" for tag, _ in page.elements) == 3, "the two packed texts and the page's own script"
    assert page.text.count(HOSTILE) >= 4, "in a name, a reason, a log and a rule"
    assert "\x1b" not in page.text
    told = json.dumps(page.figures())
    assert "<script" not in told
    assert "&lt;script&gt;" in told


def test_a_page_of_500_cells_is_under_8_megabytes() -> None:
    head, comparison = large()
    text = html.render(comparison, head)
    assert len(text.encode()) < 8e6
    page = Page(text)
    assert sum(attributes.get("class") == "cell" for _, attributes in page.elements) == 500
    assert len(page.figures()) == 500 + 3 * 10


def test_missing_nan_and_single_repeat_cells_are_drawn_sensibly() -> None:
    _, text = failing_page()
    page = Page(text)
    drawn = page.figures()
    json.dumps(drawn, allow_nan=False)
    index = {row.get("id"): row for _, row in page.elements}
    order = re.findall(r'class="open"[^>]*>([^<]*)</button>', text)
    assert f"steps-{order.index('gone')}" not in drawn, "a cell that is missing has no step times"
    assert f"steps-{order.index('tp8')}" not in drawn
    single = drawn[f"steps-{order.index('fsdp4_tp2')}"]
    assert [trace["type"] for trace in single["data"]] == ["box", "scatter"]
    losses = next(figure for key, figure in drawn.items() if key.startswith("losses"))
    broken = [trace for trace in losses["data"] if trace["name"] == "hsdp2x4"]
    assert broken[0]["y"][4] is None
    assert broken[1]["mode"] == "markers", "the step that is not finite is marked"
    assert broken[1]["x"] == [4]
    assert "hsdp2x4 is not finite at step 4" in text
    assert f"detail-{order.index('gone')}" in index


def test_every_row_has_the_command_that_measures_it_again() -> None:
    _, text = failing_page()
    said = words(Page(text).text)
    for name in {record["cell"]["name"] for record in failing_head()} - {HOSTILE}:
        assert f"ndbench suite=hsdp_tp training.steps=12 cells={name}" in said
    assert "ndbench compare r" in said


def test_the_page_is_accessible_in_its_structure() -> None:
    page = Page(failing_page()[1])
    assert ("html", {"lang": "en"}) in page.elements
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.elements:
        if tag == "th":
            assert attributes.get("scope") in ("col", "row"), attributes
        if attributes.get("class") == "plot":
            assert attributes.get("role") == "img"
            assert attributes.get("aria-label")
        for name in ("aria-controls", "aria-labelledby"):
            assert attributes.get(name) is None or attributes[name] in ids
    heads = [attributes for tag, attributes in page.elements if tag == "th" and "aria-sort" in attributes]
    assert len(heads) == 11
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1


def measured(*records: Any, name: str = "fsdp8") -> Measured:
    return Measured(name, "pass", records[0]["cell"], list(records))


def test_the_pareto_front_holds_what_no_other_beats_in_both_and_names_the_best() -> None:
    speeds = {"fast": (0.05, 300), "small": (0.2, 50), "middle": (0.1, 100), "bad": (0.2, 310), "worse": (0.15, 120)}
    cells = [measured(a_record(n, seconds=s, peak=p * 2**20), name=n) for n, (s, p) in speeds.items()]
    made = figures_layouts.pareto(cells)
    assert made is not None
    figure, said = made
    assert figure["data"][1]["text"] == ["fast", "middle", "small"]
    assert said.startswith("Best: fast, 5,120 tokens/s a device at 300 MiB")
    assert figure["data"][0]["x"] == [50, 100, 300], "the line runs from the smallest to the fastest"


def scaled(layout: str, world: int, seconds: float) -> Measured:
    cell = a_cell(layout)
    record = a_record(layout, cell=cell, seconds=seconds)
    record["world"] = record["world"] | {"size": world, "layout": layout}
    return measured(record, name=layout)


def test_scaling_is_drawn_with_its_ideal_line_from_one_device_on() -> None:
    cells = [scaled("single", 1, 0.8), scaled("fsdp2", 2, 0.4), scaled("fsdp4", 4, 0.25), scaled("tp2", 2, 0.5)]
    made = figures_layouts.scaling(cells)
    assert made is not None
    figure, said = made
    lines = {trace["name"].split(" ")[0]: trace for trace in figure["data"] if trace.get("showlegend", True)}
    assert lines["fsdp"]["x"] == [1, 2, 4]
    assert lines["fsdp"]["customdata"] == [1, 1, 0.8]
    ideal = next(trace for trace in figure["data"] if trace["name"].startswith("fsdp") and "ideal" in trace["name"])
    assert ideal["y"] == [2560, 10240]
    assert "keeps 80% of ideal from 1 to 4 devices" in said
    assert figures_layouts.scaling(cells[1:2]) is None


def test_collectives_are_stacked_by_axis_in_bytes() -> None:
    table = [
        {"op": "all_gather", "axis": "tp", "count": 1, "bytes": 2**20, "where": []},
        {"op": "all_reduce", "axis": "tp", "count": 1, "bytes": 2**20, "where": []},
        {"op": "all_gather", "axis": "fsdp", "count": 1, "bytes": 2**19, "where": []},
    ]
    made = figures_layouts.collectives([measured(a_record(collectives=table))])
    assert made is not None
    assert {trace["name"]: trace["x"] for trace in made[0]["data"]} == {"tp": [2.0], "fsdp": [0.5]}
    assert made[0]["layout"]["barmode"] == "stack"


def test_the_difference_panel_subtracts_the_first_layout_step_by_step() -> None:
    a, b = a_record("a", loss=[5.0, 4.0, None]), a_record("b", loss=[5.0, 4.25, 3.0])
    made = figures_layouts.losses([measured(a, name="a"), measured(b, name="b")])
    assert made is not None
    (below,) = [trace for trace in made[0]["data"] if trace.get("yaxis") == "y2"]
    assert below["y"] == [0, 0.25, None]
    assert "Largest difference from a: 0.25" in made[1]


def test_warm_up_is_shown_apart_from_the_timed_steps() -> None:
    made = figures_cells.step_times(measured(a_record(seconds=[0.9, 0.5, *[0.1] * 10], first_timed=2)))
    assert made is not None
    box, dropped = made[0]["data"]
    assert box["y"] == [100.0] * 10
    assert dropped["y"] == [900.0, 500.0]
    assert "dropped, by repeat: 2" in made[1]


def test_history_marks_change_points_and_acceptances() -> None:
    points = [figures_cells.Point(f"s{day}", f"day {day}", [100.0, 110.0]) for day in range(3)]
    points[1] = dataclasses.replace(points[1], mark="new level", reason="wanted", change=0.25)
    made = figures_cells.history(points)
    assert made is not None
    figure, said = made
    assert figure["layout"]["shapes"][0]["x0"] == 0.5
    assert "step time +25.0% from session s1 on" in said
    assert "s1 new level: wanted" in figure["data"][0]["text"][1]
    assert figures_cells.history(points[:1]) is None


def test_a_long_curve_is_thinned_and_keeps_its_end() -> None:
    loss = [5.0] * 10_000
    made = figures_layouts.losses([measured(a_record(loss=loss, cell=a_cell(steps=10_000), seconds=[0.1] * 10_000))])
    assert made is not None
    assert len(made[0]["data"][0]["x"]) <= 402
    assert made[0]["data"][0]["x"][-1] == 9_999


def test_a_run_of_nothing_but_failures_still_has_a_page() -> None:
    head = [not_ok("oom", "fsdp8", "out of memory")]
    text = html.render(decide(head, None), head, plan=None)
    assert "No cell has a figure to draw" in text


def test_a_run_folder_becomes_a_file_with_the_reason_where_there_is_no_history(tmp_path: Path) -> None:
    head = one_workload(repeats("fsdp8"))
    run = RunFolder.create(tmp_path, "20261130-061500-ab12cd")
    for record in head:
        run.write_record(record)
    write_json(run.plan_path, plan_for(head) | {"baseline": "/nowhere"})
    written = write_files(run, decide(head, None), html=tmp_path / "out.html", png=None)
    assert written == [tmp_path / "out.html"]
    assert "no history: baseline /nowhere is not a folder" in (tmp_path / "out.html").read_text()
    with pytest.raises(ValueError, match="elsewhere"):
        write_files(run, decide(head, None), html=tmp_path / "out.html", png=None, source="/elsewhere")


def test_a_key_in_a_command_or_a_log_is_not_in_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("WANDB_API_KEY", key)
    head = [*repeats("fsdp8"), not_ok("failed", "tp8", f"it said {key}", log_tail=f"token={key}\n{key}")]
    plan = plan_for(head) | {"overrides": ["engine=command", f"engine.command='WANDB_API_KEY={key} python t.py'"]}
    text = html.render(decide(head, None), head, plan=plan)
    assert key not in text
    assert "[hidden]" in text


def test_a_cell_alone_has_no_chart_of_speed_against_memory() -> None:
    head = one_workload(repeats("fsdp8"))
    assert not any(key.startswith("pareto") for key in html.overview_figures(decide(head, None), head, None))
    both = one_workload([*repeats("fsdp8"), *repeats("ddp8")])
    assert any(key.startswith("pareto") for key in html.overview_figures(decide(both, None), both, None))
