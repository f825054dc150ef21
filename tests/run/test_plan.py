"""The order of a run, and the plan file that a resume reads."""

from __future__ import annotations

import copy
import fcntl
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ndbench.config import Cell, Config, GateConfig
from ndbench.matrix import resolve
from ndbench.matrix.expand import expand
from ndbench.results.store import RunFolder, UnreadableFile
from ndbench.run import launch as launching
from ndbench.run.plan import Plan, interleave, new_run_name
from ndbench.run.repeat import Measurer
from ndbench.run.runner import resume_run
from ndbench.run.start import ask_engines
from tests.records import a_record


def make_plan() -> Plan:
    config = Config(world_size=1)
    cells = {name: Cell(name, "s", config) for name in ("a", "b", "c")}
    repeats = {"a": 3, "b": 3, "c": 2}
    return Plan(
        run="r",
        suite="s",
        overrides=["x=1"],
        cells=cells,
        repeats=repeats,
        order=interleave(repeats, 0),
        gate=GateConfig(),
        baseline=None,
        budget_seconds=None,
        excluded=[("d", "tp > 4")],
        skipped=[("e", "0" * 12, "needs 8 devices, there are 2")],
        unselected=[("f", "1" * 12)],
    )


def test_every_round_holds_every_cell_once_and_rounds_come_in_order() -> None:
    order = interleave({"a": 3, "b": 3, "c": 2}, seed=1)
    assert Counter(order) == Counter([("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("c", 1), ("a", 2), ("b", 2)])
    assert [repeat for _, repeat in order] == [0, 0, 0, 1, 1, 1, 2, 2]


def test_the_order_is_drawn_from_the_seed_and_differs_between_rounds() -> None:
    repeats = {str(i): 4 for i in range(8)}
    assert interleave(repeats, 3) == interleave(repeats, 3)
    assert interleave(repeats, 3) != interleave(repeats, 4)
    rounds = {tuple(name for name, repeat in interleave(repeats, 3) if repeat == k) for k in range(4)}
    assert len(rounds) == 4


def test_a_plan_read_back_is_the_plan_written(tmp_path: Path) -> None:
    plan = make_plan()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("damage", ["cut", "version", "field"])
def test_a_damaged_plan_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "plan.json"
    make_plan().save(path)
    values = json.loads(path.read_text())
    if damage == "cut":
        path.write_text(path.read_text()[:200])
    elif damage == "version":
        path.write_text(json.dumps(values | {"schema_version": 99}))
    else:
        del values["order"]
        path.write_text(json.dumps(values))
    with pytest.raises(UnreadableFile, match=r"plan\.json"):
        Plan.load(path)


def test_two_runs_of_one_second_have_different_names() -> None:
    assert new_run_name() != new_run_name()


def test_a_run_that_is_being_measured_is_not_resumed_beside_it(tmp_path: Path) -> None:
    plan = make_plan()
    folder = RunFolder.create(tmp_path, plan.run)
    plan.save(folder.plan_path)
    holder = os.open(folder.path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        with pytest.raises(ValueError, match="run r is being measured by another process"):
            resume_run(plan.run, tmp_path, max_failures=0, console=Console(quiet=True))
    finally:
        os.close(holder)
    assert not list(folder.records_dir.iterdir())


def test_a_run_that_came_without_its_empty_records_folder_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan()
    folder = RunFolder.create(tmp_path, plan.run)
    plan.save(folder.plan_path)
    folder.records_dir.rmdir()  # archives and CI artifacts leave out empty folders
    monkeypatch.setattr("ndbench.run.runner._execute", lambda *_: 0)
    assert resume_run(plan.run, tmp_path, max_failures=None, console=Console(quiet=True)) == 0
    assert folder.records_dir.is_dir()


def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> RunFolder:
    """A run of which one repeat was measured in another environment, and which must not start a process."""
    plan = make_plan()
    folder = RunFolder.create(tmp_path, plan.run)
    plan.save(folder.plan_path)
    here = Measurer(plan.run, folder)
    cell = plan.cells["a"]
    kept = {"code": here.code(cell), "cell_version": here.cell_version, "fingerprint": here.fingerprint(cell)} | changed
    folder.write_record(a_record(cell=cell, **kept))
    monkeypatch.setattr(launching, "start_fork_server", lambda *_: pytest.fail("nothing may be started"))
    return folder


@pytest.mark.parametrize(
    ("part", "key", "value", "said"),
    [
        ("software", "torch", "1.0.0", "torch 1.0.0 → "),
        ("hardware", "name", "another CPU", "name another CPU → "),
        ("code", "commit", "b" * 40, "commit bbbbbbbbbb → "),
        ("cell_version", "", "old", "ndbench's own definition of the measurement"),
    ],
)
def test_a_run_is_not_gone_on_with_in_another_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, key: str, value: str, said: str
) -> None:
    folder = measured(tmp_path, monkeypatch)
    (record,) = folder.records()
    record = copy.deepcopy(record)
    if part in ("software", "hardware"):
        record["fingerprint"][part][key] = value
    elif part == "code":
        record["code"][key] = value
    else:
        record[part] = value
    folder.write_record(record)
    with pytest.raises(ValueError, match="run r has 1 repeats measured on something else") as error:
        resume_run("r", tmp_path, max_failures=None, console=Console(quiet=True))
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_complete_run_of_another_environment_is_told_to_be_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to go on with there either."""
    folder = measured(tmp_path, monkeypatch, cell_version="old")
    plan = Plan.load(folder.plan_path)
    (record,) = folder.records()
    for name, repeat in plan.order:
        cell = {**record["cell"], **plan.cells[name].to_dict()}
        folder.write_record({**copy.deepcopy(record), "cell": cell, "repeat": repeat})
    with pytest.raises(ValueError, match=f"run r is complete, all its {len(plan.order)} repeats") as error:
        resume_run("r", tmp_path, max_failures=None, console=Console(quiet=True))
    assert "ndbench report r shows its verdict, ndbench compare r decides anew" in str(error.value)


def test_in_the_same_environment_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(tmp_path, monkeypatch)
    monkeypatch.setattr(launching, "start_fork_server", lambda *_: exec("raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        resume_run("r", tmp_path, max_failures=None, console=Console(quiet=True))


class Asked:
    """An engine that notes what it is asked."""

    def __init__(self, answer: object = None) -> None:
        self.questions: list[tuple[str, str]] = []
        self.answer = answer

    def refuse(self, cell: Cell) -> object:
        self.questions.append(("refuse", cell.name))
        return self.answer

    def refuse_plan(self, cell: Cell) -> object:
        self.questions.append(("refuse_plan", cell.name))
        return None


def test_an_engine_is_asked_each_question_once_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Asked()
    monkeypatch.setattr(resolve, "_engine", lambda *_: engine)
    matrix = expand(["suite=smoke", "hardware=cpu", "cells=fsdp2"])
    assert ask_engines(matrix.cells) == (matrix.cells, [])
    assert ("refuse_plan", "fsdp2") in engine.questions
    assert set(Counter(engine.questions).values()) == {1}


def test_an_engine_that_answers_with_no_line_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_engine", lambda *_: Asked(7))
    with pytest.raises(ValueError, match=r"engine ndbench: refuse\(\) returned 7, not a line or None"):
        expand(["suite=smoke", "hardware=cpu", "cells=fsdp2"])
