"""Cells as tests, in a pytest of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

INSTALLED = any(entry.value == "ndbench.pytest_plugin" for entry in entry_points(group="pytest11"))
PLUGIN = [] if INSTALLED else ["-p", "ndbench.pytest_plugin"]
"""An installation made before the entry point existed does not load the plugin by itself."""
SMALL = ["data=markov", "training.steps=4", "gate.confirm=off", "cells=fsdp2", "engine.name=selftest"]


def run_pytest(folder: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", *PLUGIN, "-p", "no:cacheprovider", "-rA"]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), *words], cwd=folder, capture_output=True, text=True, timeout=200
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_own.py").write_text("def test_own() -> None:\n    pass\n")
    return folder


def words(folder: Path, fault: str) -> list[str]:
    (folder / "fault").write_text(fault)
    engine = ["engine.target=ndbench.gate.faulty.FaultyEngine", f"+engine.options.plan={folder / 'fault'}"]
    return ["--ndbench-suite=smoke", *(f"--ndbench-override={word}" for word in (*SMALL, *engine))]


@pytest.mark.timeout(280)
def test_cells_are_tests_beside_the_projects_own(project: Path) -> None:
    code, said = run_pytest(project, *words(project, "none"), "--ndbench-benchmark-json=out.json")
    assert code == 0, said
    assert "2 passed" in said
    assert "fsdp2" in said
    (benchmark,) = json.loads((project / "out.json").read_text())["benchmarks"]
    assert benchmark["name"] == "fsdp2"

    accept = [sys.executable, "-m", "ndbench", "baseline", "accept", "latest", "--reason", "seed"]
    assert subprocess.run(accept, cwd=project, check=False, timeout=60).returncode == 0
    code, said = run_pytest(project, *words(project, "all-gather"))
    assert code == 1, said
    assert "1 failed, 1 passed" in said
    assert "1 more all_gather over dp_shard" in said


def test_an_unknown_suite_is_a_usage_error(project: Path) -> None:
    code, said = run_pytest(project, "--ndbench-suite=smok")
    assert code == 4
    assert "smok" in said


def test_without_the_option_nothing_of_ndbench_is_loaded(project: Path) -> None:
    probe = "import sys, pytest; code = pytest.main(['-q', *sys.argv[1:], 'test_own.py']); "
    probe += "heavy = {'torch', 'pandas', 'ndbench.config'} & set(sys.modules); sys.exit(int(bool(heavy)) or int(code))"
    done = subprocess.run(
        [sys.executable, "-c", probe, *PLUGIN], cwd=project, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
