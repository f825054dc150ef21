"""What wandb gets: everything, once, from stored records, and never a secret; its failures change nothing."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ndbench.compare.result import Comparison
from ndbench.config import TrackerConfig
from ndbench.report import tracker, wandb_runs
from ndbench.report.tracker import check, push_baseline, push_run, track
from ndbench.results.baseline import accept
from ndbench.results.sessions import read_baseline
from ndbench.results.store import RunFolder, write_json
from tests.compare.helpers import baseline_of, decide
from tests.micro.tracker_ab import leftovers
from tests.records import a_cell, not_ok, plan_of, repeats
from tests.report.wandb_files import OfflineRun, read_all

KEY = "0123456789abcdef0123456789abcdef01234567"
RUN = "20261130-061500-ab12cd"


def stored_run(results: Path, head: list[Any] | None = None) -> tuple[RunFolder, Comparison]:
    """A finished run with a slower cell, one that failed and one with a non-finite step."""
    if head is None:
        losses = [5.5, None, 5.3, *[5.2 - 0.1 * i for i in range(9)]]
        head = [*repeats("ddp8", seconds=0.2), *repeats("fsdp8"), *repeats("hsdp2x4", count=1, loss=losses)]
        head += [not_ok("failed", "tp8", "rank 3 was killed", log_tail="one\n")]
    folder = RunFolder.create(results, RUN)
    for record in head:
        folder.write_record(record)
    plan = {"schema_version": 1, "run": RUN, "suite": "hsdp_tp", "overrides": ["suite=hsdp_tp"], "cells": plan_of(head)}
    write_json(folder.plan_path, plan)
    comparison = decide(head, baseline_of(*[[*repeats("ddp8"), *repeats("fsdp8")]] * 3))
    comparison = dataclasses.replace(comparison, run=RUN)
    write_json(folder.verdict_path, comparison.to_json())
    return folder, comparison


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunFolder, Comparison]:
    for name in list(os.environ):
        if name.startswith(("WANDB_", "GITHUB_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return stored_run(tmp_path / "results")


def offline(**changes: Any) -> TrackerConfig:
    return TrackerConfig(name="wandb", mode="offline", **changes)


def by_name(runs: list[OfflineRun]) -> dict[str, OfflineRun]:
    return {one.name: one for one in runs}


@pytest.fixture
def wandb() -> Any:
    return pytest.importorskip("wandb")


def test_the_offline_files_hold_every_cells_config_history_and_summary(wandb: Any, run: Any) -> None:
    folder, comparison = run
    said = push_run(folder, comparison, offline(tags=["mine"]))
    assert "wandb sync" in said
    runs = by_name(read_all(folder.path))
    records = folder.records()
    assert len(runs) == len(records) + 1
    for record in records:
        one = runs[f"{record['cell']['name']}.r{record['repeat']}"]
        assert one.finished
        assert (one.group, one.job_type, one.project) == (RUN, "bench", "ndbench")
        assert one.config["cell"] == record["cell"]
        assert one.config["fingerprint"] == record["fingerprint"]
        assert one.config["cell_id"] == record["cell_id"]
        assert {"hsdp_tp", "cpu", record["world"]["layout"], "mine"} <= set(one.tags)
        assert one.summary["outcome"] == record["outcome"]
        for name, metric in record["metrics"].items():
            assert one.summary[f"metrics.{name}"] == metric["value"]
        steps = record["steps"]
        rows = [row for row in one.history if "step" in row]
        if steps is None:
            assert not rows
            continue
        assert one.metrics["train/*"] == "step"
        assert [row["step"] for row in rows] == list(range(len(steps["loss"])))
        for row, loss, seconds, norm in zip(rows, steps["loss"], steps["seconds"], steps["grad_norm"], strict=True):
            assert row["train/step_seconds"] == seconds
            assert row["train/grad_norm"] == norm
            assert row["train/tokens_per_second"] == 2048 / seconds
            assert math.isnan(row["train/loss"]) if loss is None else row["train/loss"] == loss


def test_the_comparison_run_has_the_table_the_counts_and_the_artifact(wandb: Any, run: Any) -> None:
    folder, comparison = run
    push_run(folder, comparison, offline())
    (one,) = [found for found in read_all(folder.path) if found.job_type == "compare"]
    assert (one.summary["verdict"], one.summary["exit_code"]) == ("regressed", 1)
    assert one.summary["cells.regressed"] == 1
    table = next(row["cells"] for row in one.history if "cells" in row)
    assert table["_type"] == "table-file"
    (path,) = folder.path.glob(f"wandb/offline-run-*-{one.id}/files/{table['path']}")
    stored = json.loads(path.read_text())
    assert stored["columns"] == wandb_runs.COLUMNS
    rows = {(row[0], row[2]): row for row in stored["data"]}
    expected = {(cell.name, metric.metric) for cell in comparison.cells for metric in cell.metrics}
    assert set(rows) == expected
    slow = rows["ddp8", "tokens_per_second"]
    assert slow[8] == "regressed"
    assert slow[3] == pytest.approx(20480)
    assert slow[4] == pytest.approx(10240)
    assert slow[5] == pytest.approx(-0.5)
    artifact = next(found for found in one.artifacts if found.type == "result")
    assert artifact.name == "result-hsdp_tp-cpu"
    assert {"latest", RUN} <= set(artifact.aliases)
    names = {entry.path for entry in artifact.manifest.contents}
    assert {"plan.json", "verdict.json", "records/ddp8.r0.json", "records/tp8.r0.json"} <= names


def test_sending_twice_makes_no_duplicates_and_what_is_new_is_sent(wandb: Any, run: Any) -> None:
    folder, comparison = run
    push_run(folder, comparison, offline())
    assert not leftovers(folder.path), "a tracker that goes on working would disturb the next measurement"
    before = sorted(folder.path.glob("wandb/offline-run-*"))
    assert f"0 runs written, {len(before)} were there already" in push_run(folder, comparison, offline())
    assert sorted(folder.path.glob("wandb/offline-run-*")) == before
    ids = [one.id for one in read_all(folder.path)]
    assert len(set(ids)) == len(ids)
    comparison.notes.append("decided anew")
    assert "1 run written" in push_run(folder, comparison, offline())
    assert len(read_all(folder.path)) == len(ids), "the comparison was replaced, not added"


def test_ids_are_the_same_on_every_machine_and_differ_between_repeats() -> None:
    one, two, _ = (wandb_runs.repeat_run(record, None) for record in repeats("fsdp8"))
    assert one.id != two.id
    assert one.id == wandb_runs.repeat_run(repeats("fsdp8")[0], "pass").id
    assert one.id != wandb_runs.repeat_run(repeats("fsdp8", run="20261201-000000-ffffff")[0], None).id


def test_an_accepted_baseline_is_an_artifact_and_its_reason_the_notes(wandb: Any, run: Any, tmp_path: Path) -> None:
    results = tmp_path / "second"
    folder, _ = stored_run(results, repeats("fsdp8"))
    folder.verdict_path.unlink()
    accepted = accept(folder, "fp32 reduction, wanted", results_dir=results, by="me").folder
    push_baseline(accepted.parent, offline())
    (one,) = read_all(results / "wandb" / f"{accepted.parent.parent.name}-hsdp_tp")
    assert (one.job_type, one.notes) == ("baseline", "fp32 reduction, wanted")
    assert one.summary["fsdp8.tokens_per_second"] == pytest.approx(20480)
    (artifact,) = [found for found in one.artifacts if found.type == "baseline"]
    assert artifact.name == f"baseline-hsdp_tp-{accepted.parent.parent.name}"
    assert {"latest", "accepted"} <= set(artifact.aliases)
    paths = {entry.path for entry in artifact.manifest.contents}
    assert {f"{accepted.name}/session.json", f"{accepted.name}/fsdp8.json"} <= paths
    assert {path.name for path in accepted.parent.iterdir()} == {accepted.name}, "nothing is left in what is committed"
    assert [session.session for session in read_baseline(accepted.parent).sessions] == [accepted.name]


def everything_below(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())


def test_a_key_reaches_no_file_of_the_run(wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    head = repeats("fsdp8", count=1)
    head += [not_ok("failed", "tp8", f"exit 1 with {KEY}", log_tail=f"token={KEY}\n")]
    head[0]["engine"] = {"command": f"WANDB_API_KEY={KEY} python train.py --api-key anotherverysecretone"}
    folder, comparison = stored_run(tmp_path / "results", head)
    push_run(folder, comparison, offline())
    written = everything_below(folder.path / "wandb" / "data") + b"".join(
        everything_below(path) for path in folder.path.glob("wandb/offline-run-*")
    )
    assert any("[hidden]" in json.dumps(one.config) for one in read_all(folder.path))
    for secret in (KEY.encode(), b"anotherverysecretone"):
        assert secret not in written, "in what would be sent"


@pytest.mark.parametrize(
    "text",
    ["WANDB_API_KEY=abcdefgh12345678", "--hf-token abcdefgh12345678", "password: abcdefgh12345678", KEY],
)
def test_what_looks_like_a_secret_is_hidden(text: str) -> None:
    assert "abcdefgh12345678" not in wandb_runs.without_secrets(text)
    assert KEY not in wandb_runs.without_secrets(text, [KEY])


def test_words_that_are_no_secrets_stay() -> None:
    for text in ("20,480 tokens/s", "tokenizer=gpt2-large-model", "token embedding of the model", "commit " + "a" * 40):
        assert wandb_runs.without_secrets(text) == text


FAKE = """
import json, os, sys, time
kind = os.environ["FAKE_WANDB"]
if kind == "import": raise RuntimeError("no service")
if kind == "crash": os._exit(9)
LOG = os.environ.get("FAKE_LOG")
def note(what, **fields):
    with open(LOG, "a") as stream: stream.write(json.dumps({"what": what, **fields}, default=str) + chr(10))
class Settings:
    def __init__(self, **fields): pass
class Artifact:
    def __init__(self, name, type, metadata=None): self.name = name
    def new_file(self, name, mode="w"): return open(os.devnull, mode)
def Table(**fields): return "table"
def Plotly(figure): return "plot"
class Run:
    def __init__(self, fields):
        path = LOG + "." + fields["id"]
        self.path, self.dir = path, os.path.join(fields["dir"], "wandb", "x", "files")
        self.resumed = os.path.exists(path)
        stored = json.load(open(path)) if self.resumed else {"step": 0, "summary": {}}
        self.step, self.summary = stored["step"], stored["summary"]
    def __enter__(self): return self
    def __exit__(self, *error):
        json.dump({"step": self.step, "summary": self.summary}, open(self.path, "w"))
    def define_metric(self, *a, **k): pass
    def log(self, row, step=None):
        if step is not None and step < self.step: raise ValueError("step went back")
        self.step = (self.step if step is None else step) + 1
        note("log", step=step)
    def log_artifact(self, artifact, aliases): note("artifact", name=artifact.name, aliases=aliases)
def init(**fields):
    if kind == "hang": time.sleep(600)
    if kind == "key": raise RuntimeError("invalid key " + os.environ["WANDB_API_KEY"])
    if kind == "full": raise OSError(28, "No space left on device")
    note("init", id=fields["id"], mode=fields["mode"], resume=fields["resume"])
    return Run(fields)
class Api:
    def __init__(self, **fields): pass
    def artifact(self, reference):
        if kind == "absent": raise ValueError("artifact not found: " + reference)
        note("fetch", reference=reference)
        return self
    def download(self, root):
        import shutil
        shutil.copytree(os.environ["FAKE_ARTIFACT"], root, dirs_exist_ok=True)
"""


@pytest.fixture
def fake(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A wandb that behaves as told, for the process that sends."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(tracker, "find_spec", lambda _name: True)

    def behave(kind: str) -> None:
        monkeypatch.setenv("FAKE_WANDB", kind)

    return behave


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("hang", "did not finish within 4 s"),
        ("crash", "wandb's process died"),
        ("import", "no service"),
        ("key", "invalid key [hidden]"),
        ("full", "No space left"),
    ],
)
def test_a_failing_tracker_is_one_line_of_warning(run: Any, fake: Any, kind: str, said: str) -> None:
    folder, comparison = run
    fake(kind)
    began = time.monotonic()
    done, warning = track(folder, comparison, TrackerConfig(name="wandb", timeout=4))
    assert time.monotonic() - began < 20, "the time limit holds"
    assert done is None
    assert warning is not None
    assert said in warning
    assert "ndbench wandb push" in warning
    assert KEY not in warning
    assert "\n" not in warning


def test_online_a_second_send_from_elsewhere_adds_no_row(run: Any, fake: Any, tmp_path: Path) -> None:
    folder, comparison = run
    fake("fine")
    push_run(folder, comparison, TrackerConfig(name="wandb", project="p"))
    log = tmp_path / "log"
    first = [json.loads(line) for line in log.read_text().splitlines()]
    assert {entry["mode"] for entry in first if entry["what"] == "init"} == {"online"}
    assert sum(entry["what"] == "artifact" for entry in first) == 1
    log.unlink()
    (folder.path / "wandb" / "pushed.json").unlink()  # as on another machine
    push_run(folder, comparison, TrackerConfig(name="wandb", project="p"))
    second = [json.loads(line)["what"] for line in log.read_text().splitlines()]
    assert set(second) == {"init"}


def test_without_wandb_the_run_is_whole_and_the_warning_names_the_extra(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, comparison = run
    monkeypatch.setattr(tracker, "find_spec", lambda _name: None)
    _, warning = track(folder, comparison, TrackerConfig(name="wandb"))
    assert warning is not None
    assert "pip install 'ndbench[wandb]'" in warning


def test_a_baseline_is_fetched_from_an_artifact(run: Any, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = run
    fake("fine")
    monkeypatch.setenv("FAKE_ARTIFACT", str(folder.path))
    found = read_baseline("wandb:team/ndbench/result-hsdp_tp-cpu:latest", hardware="cpu_x8", suite="hsdp_tp")
    assert found.source == "wandb:team/ndbench/result-hsdp_tp-cpu:latest"
    assert set(found.cells) == {"ddp8", "fsdp8", "hsdp2x4", "tp8"}


def test_a_baseline_that_cannot_be_fetched_is_an_error(run: Any, fake: Any) -> None:
    fake("absent")
    with pytest.raises(ValueError, match="cannot be fetched: wandb: ValueError: artifact not found"):
        read_baseline("wandb:team/ndbench/nothing:latest")
    with pytest.raises(ValueError, match="ENTITY/PROJECT/NAME:ALIAS is expected"):
        read_baseline("wandb:nothing")


@pytest.mark.parametrize("changes", [{"name": "mlflow"}, {"mode": "of"}, {"timeout": 0.0}])
def test_a_tracker_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tracker"):
        check(TrackerConfig(**changes))


def test_wandb_is_not_imported_by_the_process_that_measures(run: Any) -> None:
    code = "import sys, ndbench.run.finish, ndbench.report.tracker; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_a_key_that_a_rank_prints_is_not_in_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    from ndbench.run.launch import LaunchResult
    from ndbench.run.record import build_record

    monkeypatch.setenv("WANDB_API_KEY", KEY)
    said = LaunchResult("failed", f"exit code 1: no login with {KEY}", log_tail=f"logging in with {KEY}\n")
    cell = a_cell()
    cell.config.engine.options = {"command": f"WANDB_API_KEY={KEY} python train.py"}
    parts: dict[str, Any] = {"hardware": {}, "software": {}, "informational": {}}
    facts = {"cell_version": "v1", "code": {"commit": None, "dirty": None}, "fingerprint": parts}
    moment = "2026-11-30T06:15:00+00:00"
    record = build_record(cell=cell, result=said, run=RUN, repeat=0, seed=0, start=moment, end=moment, **facts)
    assert record["log_tail"] == "logging in with [hidden]\n"
    assert record["reason"] == "exit code 1: no login with [hidden]"
    assert KEY not in json.dumps(record)
    assert record["cell_id"] == cell.cell_id, "still the same cell"
