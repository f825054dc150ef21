"""The composite action's own steps, run as GitHub runs them: one suite that must be green, one that must be red."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from ndbench.cli import main

ROOT = Path(__file__).parents[2]
ACTION = ROOT / ".github" / "actions" / "ndbench"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def action() -> dict[str, Any]:
    described: dict[str, Any] = yaml.safe_load((ACTION / "action.yml").read_text())
    return described


@cache
def installed() -> str:
    """Where this interpreter has ndbench from, outside of any checkout."""
    command = [sys.executable, "-c", "import ndbench; print(ndbench.__path__[0])"]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120, check=True).stdout.strip()


class Runner:
    """As much of GitHub's runner as the action's steps need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output, self.summary = folder / "output", folder / "summary"
        self.log = ""

    def run(self, only: str | None = None, **inputs: str) -> tuple[int, dict[str, str]]:
        """(exit code of the first step that fails or 0, outputs); ``only`` is the id of a step to run by itself."""
        described = action()
        if only is None:
            # the action's first step installs: never from one checkout over another's in the tests' own interpreter
            assert installed() == str(ROOT / "ndbench"), f"ndbench is {installed()}: pip install -e {ROOT}"
        given = {name.replace("_", "-"): value for name, value in inputs.items()}
        unknown = set(given) - set(described["inputs"])
        assert not unknown, f"the action has no input {unknown}"
        values = {name: given.get(name, about.get("default")) for name, about in described["inputs"].items()}
        for path in (self.output, self.summary):
            path.write_text("")
        code = 0
        for step in described["runs"]["steps"]:
            if "run" in step and code == 0 and only in (None, step.get("id")):
                code = self._step(step, values)
        return code, dict(line.split("=", 1) for line in self.output.read_text().splitlines())

    def _step(self, step: dict[str, Any], inputs: dict[str, str]) -> int:
        filled = {
            name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: inputs[found[1]], value)
            for name, value in step["env"].items()
        }
        environment = (
            os.environ
            | filled
            | {
                "GITHUB_ACTION_PATH": str(ACTION),
                "GITHUB_ACTIONS": "true",
                "GITHUB_OUTPUT": str(self.output),
                "GITHUB_STEP_SUMMARY": str(self.summary),
                "OMP_NUM_THREADS": "1",
            }
        )
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        self.log += done.stdout + done.stderr
        return done.returncode


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an accepted baseline of one small cell, and a file that can plant a fault into its engine."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "fault").write_text("none")
    words = [*overrides(folder), f"results.dir={folder / 'results'}"]
    assert main(["run", "suite=smoke", *words]) == 0
    results = ["--results-dir", str(folder / "results")]
    assert main(["baseline", "accept", "latest", "--reason", "seed", *results]) == 0
    return folder


def overrides(folder: Path) -> list[str]:
    return [
        "data=markov",
        "cells=fsdp2",
        "training.steps=4",
        "gate.confirm=off",
        "engine.name=selftest",
        "engine.target=ndbench.gate.faulty.FaultyEngine",
        f"+engine.options.plan={folder / 'fault'}",
    ]


def run(folder: Path, fault: str = "none", **inputs: str) -> tuple[int, dict[str, str], Runner]:
    (folder / "fault").write_text(fault)
    runner = Runner(folder)
    given = {"suite": "smoke", "python": sys.executable, "overrides": " ".join(overrides(folder))}
    code, outputs = runner.run(**(given | inputs))
    return code, outputs, runner


@pytest.mark.timeout(240)
def test_a_sound_suite_is_green_with_every_output(seeded: Path) -> None:
    code, outputs, runner = run(seeded)
    assert code == 0, runner.log
    assert outputs["exit-code"] == "0"
    assert sum(json.loads(outputs["counts"]).values()) == 1
    for name in ("run-path", "report-path", "json-path", "junit-path"):
        assert Path(outputs[name]).exists()
    assert runner.summary.read_text().startswith("## ndbench:")
    suite = ElementTree.parse(outputs["junit-path"]).getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("1", "0", "0")


@pytest.mark.timeout(240)
def test_a_planted_all_gather_is_red_and_annotated(seeded: Path) -> None:
    code, outputs, runner = run(seeded, "all-gather")
    assert code == 1, runner.log
    assert (outputs["verdict"], outputs["exit-code"]) == ("regressed", "1")
    (line,) = [line for line in runner.log.splitlines() if line.startswith("::error")]
    assert line.startswith("::error title=fsdp2%3A regressed::the step's structure changed: 1 more all_gather over dp_")
    assert "new in model.layers.1.mlp" in line
    suite = ElementTree.parse(outputs["junit-path"]).getroot()[0]
    assert suite.get("failures") == "1"


@pytest.mark.parametrize(
    ("inputs", "code", "said"),
    [
        ({"suite": "absent"}, 2, "there is no verdict (exit code 2)"),
        ({"fail_on": "everything"}, 2, "fail-on has 'everything'"),
        ({"overrides": "training.stepz=3"}, 2, "there is no verdict (exit code 2)"),
        ({"fail_on": "", "suite": "absent"}, 2, "there is no verdict"),
    ],
)
def test_a_mistake_in_an_input_is_red_whatever_fail_on_says(
    seeded: Path, inputs: dict[str, str], code: int, said: str
) -> None:
    found, _, runner = run(seeded, **inputs)
    assert found == code
    assert said in runner.log


STAND_IN = """
import json, os, pathlib, sys
pathlib.Path("argv.json").write_text(json.dumps(sys.argv[1:]))
verdict = os.environ["STAND_IN_VERDICT"]
folder = pathlib.Path("results/runs/r")
folder.mkdir(parents=True)
if verdict:
    (folder / "verdict.json").write_text(json.dumps({"verdict": verdict, "counts": {verdict: 1}}))
sys.exit(int(os.environ["STAND_IN_CODE"]))
"""
"""In ndbench's place where only the action's own part is the subject: keeps its arguments and answers as told."""


def stand_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, verdict: str = "pass", code: int = 0, **inputs: str
) -> tuple[int, dict[str, str], list[str], str]:
    """(exit code, outputs, ndbench's arguments, log) of the measuring step with ndbench replaced."""
    (folder / "packages" / "ndbench").mkdir(parents=True)
    (folder / "packages" / "ndbench" / "__init__.py").write_text("")
    (folder / "packages" / "ndbench" / "__main__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(folder / "packages"))
    monkeypatch.setenv("STAND_IN_VERDICT", verdict)
    monkeypatch.setenv("STAND_IN_CODE", str(code))
    runner = Runner(folder)
    found, outputs = runner.run(only="measure", **({"suite": "smoke", "python": sys.executable} | inputs))
    kept = folder / "argv.json"
    return found, outputs, json.loads(kept.read_text()) if kept.exists() else [], runner.log


@pytest.mark.parametrize(
    ("code", "verdict", "fail_on", "found"),
    [
        (0, "pass", None, 0),
        (1, "regressed", None, 1),
        (1, "regressed", "invalid", 0),
        (3, "invalid", "regressed,invalid", 3),
        (4, "no_baseline", None, 4),
        (4, "no_baseline", "regressed", 0),
        (5, "inconclusive", "inconclusive", 5),
        (70, "", "", 70),
    ],
)
def test_fail_on_decides_what_fails_the_job_and_the_output_says_the_truth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, verdict: str, fail_on: str | None, found: int
) -> None:
    inputs = {} if fail_on is None else {"fail_on": fail_on}
    given, outputs, words, log = stand_in(tmp_path, monkeypatch, verdict, code, **inputs)
    assert (given, outputs["exit-code"], outputs.get("verdict", "")) == (found, str(code), verdict)
    assert "gate.mode='require'" in words, "no baseline is red unless asked otherwise"
    assert ("gate.fail_on_inconclusive=true" in words) == (fail_on == "inconclusive")
    assert ("there is no verdict" in log) == (verdict == "")


@pytest.mark.parametrize("name", ["suite", "overrides", "ab_base", "mode", "working_directory"])
@pytest.mark.parametrize("text", ["$(touch {})", "`touch {}`", "x; touch {} #", '\'"; touch {}; "'])
def test_an_input_cannot_run_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    marker = tmp_path / "marker"
    _, _, words, _ = stand_in(tmp_path, monkeypatch, **{name: text.format(marker)})
    assert not marker.exists()
    expected = {"suite": "suite={}", "ab_base": "git:{}", "mode": "gate.mode='{}'"}
    if name in expected:
        assert expected[name].format(text.format(marker)) in words, "it arrives as it was written"


def test_scripts_of_the_action_and_the_workflows_take_nothing_by_interpolation() -> None:
    for path in (ACTION / "action.yml", *WORKFLOWS):
        described = yaml.safe_load(path.read_text())
        jobs = [described["runs"]] if "runs" in described else described["jobs"].values()
        for step in (step for job in jobs for step in job["steps"]):
            script = step.get("run") or (step.get("with") or {}).get("script") or ""
            assert "${{" not in script, f"{path.name}: {script}"


def test_every_foreign_action_is_pinned_by_commit() -> None:
    for path in (ACTION / "action.yml", *WORKFLOWS):
        for line in path.read_text().splitlines():
            found = re.search(r"uses: (\S+)", line)
            if found is not None and not found[1].startswith("./"):
                assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", found[1]), line


def test_rights_are_the_least_and_only_the_comment_may_write() -> None:
    rights = {path.stem: yaml.safe_load(path.read_text())["permissions"] for path in WORKFLOWS}
    comment = rights.pop("gate-comment")
    assert comment == {"actions": "read", "pull-requests": "write"}
    assert all(given == {"contents": "read"} for given in rights.values())
    text = (ROOT / ".github" / "workflows" / "gate-comment.yml").read_text()
    assert "checkout" not in text.replace("never checks out", "")
    assert all("pull_request_target" not in path.read_text() for path in WORKFLOWS)


def test_the_gpu_runs_only_for_a_label_of_a_branch_of_this_repository() -> None:
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "gate-gpu.yml").read_text())["jobs"]["gate"]
    assert "contains(github.event.pull_request.labels.*.name, 'gpu')" in job["if"]
    assert "head.repo.full_name == github.repository" in job["if"]
    assert job["environment"] == "gpu"
    assert "self-hosted" in job["runs-on"]
