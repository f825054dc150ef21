"""A file of a run that is not what it should be is one line and exit 2, whatever it holds; no pipe is waited for."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ndbench.config import GateConfig
from ndbench.gate.stored import compare_run
from ndbench.results.store import RunFolder, write_json
from ndbench.run.plan import Plan
from tests.cli.conftest import Command
from tests.cli.conftest import ndbench as ndbench
from tests.records import a_cell, repeats

RUN = "20261130-061500-ab12cd"
VERBS = (
    ["report", "latest"],
    ["compare", "latest"],
    ["compare", "latest", "latest"],
    ["report", "latest", "--markdown", "-"],
)


@pytest.fixture
def run(ndbench: Command) -> RunFolder:
    folder = RunFolder.create("results", RUN)
    for record in repeats():
        folder.write_record(record)
    cell = a_cell(record["cell"]["name"])
    left_out = {"excluded": [("a", "rule")], "skipped": [("b", "c" * 12, "why")], "unselected": [("d", "e" * 12)]}
    order = [(cell.name, repeat) for repeat in range(3)]
    Plan(RUN, "hsdp_tp", [], {cell.name: cell}, {cell.name: 3}, order, GateConfig(), None, None, **left_out).save(
        folder.plan_path
    )
    return folder


def only_one_line(result: Any, path: Path) -> bool:
    """Exit code 2 and one line that names the file; else fails with what was said."""
    assert result.code == 2, result.err
    assert result.err.startswith("ndbench: ")
    assert result.err.count("\n") == 1
    assert path.name in result.err
    return True


def test_a_whole_run_is_read(ndbench: Command, run: RunFolder) -> None:
    for argv in VERBS:
        assert ndbench(*argv).code in (0, 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"cells": 5}', "cells must be a list, got int 5"),
        ('{"cells": [{}]}', "cells[0] lacks name"),
        ('{"cells": [5]}', "cells[0] must be an object"),
        ('{"cells": [{"name": "a"}]}', "cells[0] lacks model"),
        ("[]", "must be an object"),
        ('{"cells": [], "repeats": {"a": "x"}}', "repeats.a must be an integer"),
        ('{"cells": [], "gate": {"mode": 5}}', "gate.mode=5 is not one of"),
        ('{"cells": [], "gate": {"modus": "auto"}}', "there is no key 'gate.modus'"),
        (f'{{"cells": [], "budget_seconds": {"9" * 6000}}}', "it holds a whole number of 6000 digits"),
        (f'{{"cells": {"[" * 200_000}', "it is nested too deeply"),
    ],
    ids=lambda text: text[:30],
)
def test_a_plan_that_is_none_is_one_line(ndbench: Command, run: RunFolder, text: str, said: str) -> None:
    run.plan_path.write_text(text)
    for argv in VERBS[:2]:
        result = ndbench(*argv)
        assert only_one_line(result, run.plan_path)
        assert said in result.err


@pytest.mark.parametrize("text", ['{"cells": 5}', '{"schema_version": 1, "cells": [5]}', '{"schema_version": 1}'])
def test_a_plan_that_is_none_cannot_be_gone_on_with(ndbench: Command, run: RunFolder, text: str) -> None:
    run.plan_path.write_text(text)
    assert only_one_line(ndbench("--resume", "latest"), run.plan_path)


def change(*keys: str | int, to: Any) -> Callable[[Any], None]:
    def apply(value: Any) -> None:
        for key in keys[:-1]:
            value = value[key]
        value[keys[-1]] = to

    apply.__name__ = ".".join(map(str, keys))
    return apply


@pytest.mark.parametrize(
    "damage",
    [
        change("repeat", to=10**400),
        change("steps", "seconds", 3, to=10**400),
        change("cell", "training", to=True),
        change("cell", "hardware", "name", to=5),
        change("metrics", "tokens_per_second", to=[]),
    ],
    ids=lambda damage: damage.__name__,
)
def test_a_record_that_is_none_is_one_line(ndbench: Command, run: RunFolder, damage: Callable[[Any], None]) -> None:
    path = next(run.records_dir.iterdir())
    record = json.loads(path.read_text())
    damage(record)
    path.write_text(json.dumps(record))
    for argv in VERBS[:2]:
        assert only_one_line(ndbench(*argv), path)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 100_000, f'{{"schema_version": {"9" * 6000}}}'], ids=len)
def test_nesting_and_digits_without_an_end_are_one_line(ndbench: Command, run: RunFolder, text: str) -> None:
    path = next(run.records_dir.iterdir())
    path.write_text(text)
    for argv in VERBS[:2]:
        assert only_one_line(ndbench(*argv), path)


@pytest.mark.parametrize(
    "damage",
    [
        change("notes", to=True),
        change("exit_reason", to=[]),
        change("cells", 0, "verdict", to="fine"),
        change("cells", 0, "name", to=[5]),
        change("cells", 0, "current", "peak_bytes", to="x"),
        change("cells", 0, "current", "tokens_high", to={}),
        change("cells", 0, "metrics", to=[{}]),
    ],
    ids=lambda damage: damage.__name__,
)
def test_a_verdict_that_is_none_is_one_line(ndbench: Command, run: RunFolder, damage: Callable[[Any], None]) -> None:
    value = compare_run(run, None).to_json()
    write_json(run.verdict_path, value)
    assert ndbench("report", "latest").code == 0
    damage(value)
    write_json(run.verdict_path, value)
    assert only_one_line(ndbench("report", "latest"), run.verdict_path)


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [pipe, device])
@pytest.mark.parametrize("which", ["plan.json", "verdict.json", "record"])
def test_what_is_no_regular_file_is_not_waited_for(
    ndbench: Command, run: RunFolder, which: str, make: Callable[[Path], None]
) -> None:
    path = next(run.records_dir.iterdir()) if which == "record" else run.path / which
    make(path)
    result = ndbench("report", "latest")
    assert only_one_line(result, path)
    assert "is not a regular file" in result.err


@pytest.mark.timeout(60)
@pytest.mark.parametrize("which", ["session.json", "fsdp8.json"])
def test_a_pipe_in_a_baseline_is_not_waited_for(ndbench: Command, run: RunFolder, which: str) -> None:
    shutil.copytree(run.path, "accepted")
    assert ndbench("baseline", "accept", "accepted", "--reason", "x", "--force").code == 0
    (session,) = Path("results/baselines").rglob("session.json")
    pipe(session.with_name(which))
    for argv in (["compare", "latest"], ["baseline", "list"]):
        result = ndbench(*argv)
        assert only_one_line(result, session.with_name(which))
        assert "is not a regular file" in result.err
