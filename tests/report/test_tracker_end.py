"""A tracker that fails at the end of a run: a warning in the summary, the same numbers, the same exit code, no key.

Through ``ndbench run`` itself: with stored repeats (``--resume`` has nothing left to measure) for every way of failing,
and once with a run that is measured.
"""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ndbench.cli import main
from ndbench.config import GateConfig, TrackerConfig
from ndbench.report import tracker
from ndbench.results.baseline import accept
from ndbench.results.schema import Record
from ndbench.results.store import RunFolder, find_run
from ndbench.run import launch, runner
from ndbench.run.plan import Plan
from tests.micro.tracker_ab import leftovers
from tests.records import a_cell, repeats

KEY = "0123456789abcdef0123456789abcdef01234567"
RUN = "20261130-061500-ab12cd"
CONF = Path(__file__).parents[1] / "run" / "conf"
FAKE = """
import os, time
if os.environ.get("FAKE_LOG"): open(os.environ["FAKE_LOG"], "w").write(str(time.time()))
kind = os.environ["FAKE_WANDB"]
class Settings:
    def __init__(self, **fields): pass
def init(**fields):
    if kind == "hang":
        import subprocess
        subprocess.Popen(["sleep", "60"], start_new_session=True)
        time.sleep(60)
    if kind == "full": raise OSError(28, "No space left on device")
    if kind == "garbage":
        from ndbench.report import wandb_push
        os.write(wandb_push.PROTOCOL_OUT, b"{wandb: hello}")
        os._exit(0)
    raise RuntimeError("invalid key " + os.environ["WANDB_API_KEY"])
"""


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import os

    for name in list(os.environ):
        if name.startswith(("WANDB", "GITHUB_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def nothing_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The repeats are made up: they are from no machine, and none is missing."""
    monkeypatch.setattr(runner, "refuse_other_environment", lambda *_, **__: None)
    monkeypatch.setattr(launch, "start_fork_server", lambda *_: None)


@pytest.fixture
def refusing() -> Iterator[str]:
    """A server that knows no key."""

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = b'{"errors": [{"message": "user is not logged in"}]}'
            self.send_response(401)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def results_with(folder: Path, head: list[Record], tracked: TrackerConfig) -> Path:
    """Three accepted sessions, and a run whose repeats are all stored, but which has not come to its end."""
    results = folder / "results"
    for day in range(1, 4):
        run = f"202611{day:02d}-061500-ab12cd"
        earlier = RunFolder.create(results, run)
        for record in repeats("fsdp8", run=run, session=run, hardware={"device": "cpu", "ranks": 8}):
            earlier.write_record(record)
        accept(earlier, "reference", results_dir=results, folder=results / "baselines" / "cpu_x8" / "hsdp_tp", by="me")
    own = RunFolder.create(results, RUN)
    cell = a_cell("fsdp8")
    cell.config.tracker = tracked
    for record in head:
        own.write_record(record)
    plan = Plan(
        run=RUN,
        suite="hsdp_tp",
        overrides=["suite=hsdp_tp"],
        cells={cell.name: cell},
        repeats={cell.name: len(head)},
        order=[(cell.name, record["repeat"]) for record in head],
        gate=GateConfig(resolve=0.3),
        baseline=str(results / "baselines" / "cpu_x8" / "hsdp_tp"),
        budget_seconds=None,
    )
    plan.save(own.plan_path)
    return results


def measured(seconds: float = 0.3) -> list[Record]:
    """Three times slower than the baseline, or as fast."""
    return repeats("fsdp8", seconds=seconds, hardware={"device": "cpu", "ranks": 8})


def ended(results: Path) -> tuple[int, dict[str, Any], dict[str, bytes]]:
    """The exit code of the run's end, its verdict, and its records as they are stored."""
    code = main(["run", "--resume", RUN, f"results.dir={results}"])
    folder = find_run(RUN, results)
    return code, json.loads(folder.verdict_path.read_text()), _records(folder)


def _records(folder: RunFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.records_dir.iterdir()}


def use_fake(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (folder / "fake").mkdir()
    (folder / "fake" / "wandb.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", f"{folder / 'fake'}:{CONF.parents[2]}")
    monkeypatch.setenv("FAKE_WANDB", kind)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr(tracker, "find_spec", lambda _name: True)


def everything_below(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())


KINDS = {
    "no network": ("did not finish within 2 s", 0.3, 1),
    "service not starting": ("Failed to read port info", 0.3, 1),
    "key refused": ("401", 0.1, 0),
    "service hanging": ("did not finish within 2 s", 0.1, 0),
    "disk full": ("No space left on device", 0.1, 0),
    "no answer": ("tracker: ", 0.3, 1),
    "key in the error": ("invalid key [hidden]", 0.1, 0),
}
"""What the warning says, the seconds of a step, and the exit code of the run."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tracker_that_fails_is_a_warning_and_changes_neither_numbers_nor_exit_code(
    kind: str,
    clean: Path,
    refusing: str,
    nothing_to_launch: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said, seconds, exit_code = KINDS[kind]
    results = results_with(clean / "tracked", measured(seconds), TrackerConfig(name="wandb", mode="online", timeout=20))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    if kind in ("no network", "service not starting", "key refused"):
        pytest.importorskip("wandb")
    if kind in ("no network", "service hanging"):
        path = find_run(RUN, results).plan_path
        path.write_text(path.read_text().replace('"timeout": 20', '"timeout": 2'))
    if kind == "no network":
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    elif kind == "service not starting":
        monkeypatch.setenv("WANDB__SERVICE_WAIT", "0.001")
    elif kind == "key refused":
        monkeypatch.setenv("WANDB_BASE_URL", refusing)
    else:
        use_fake(
            clean,
            monkeypatch,
            {"disk full": "full", "no answer": "garbage", "service hanging": "hang"}.get(kind, "key"),
        )
    before = _records(find_run(RUN, results))
    code, verdict, records = ended(results)
    assert not leftovers(results), "nothing of the tracker goes on working"
    out = capsys.readouterr().out
    with monkeypatch.context() as without:
        without.delenv("WANDB_API_KEY")
        plain = results_with(clean / "plain", measured(seconds), TrackerConfig())
        expected_code, expected, _ = ended(plain)

    assert code == expected_code == exit_code
    assert records == before
    (warning,) = (note for note in verdict["notes"] if note not in expected["notes"])
    assert said in warning
    assert "the run itself is whole" in warning
    assert "\n" not in warning
    changed = {key for key in verdict if verdict[key] != expected[key]}
    assert changed <= {"notes", "baseline"}
    folder = find_run(RUN, results)
    summary = folder.summary_path.read_text().replace("\\", "")
    assert said.split("[")[0].strip() in summary
    assert "tracker: " in out
    for text in (out, summary, json.dumps(verdict), (folder.path / "junit.xml").read_text()):
        assert KEY not in text
    assert KEY.encode() not in everything_below(results)


@pytest.mark.timeout(120)
def test_a_disk_that_the_tracker_has_filled_does_not_change_the_exit_code(
    clean: Path, nothing_to_launch: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ndbench.run import finish

    results = results_with(clean, measured(), TrackerConfig(name="wandb"))
    monkeypatch.setattr(finish, "track", lambda *_: (None, "tracker: it failed"))
    written = []

    def write_text(path: Path, text: str) -> None:
        if written:
            raise OSError(28, "No space left on device")
        written.append(path)
        path.write_text(text)

    def only_one_summary(path: Path, text: str) -> None:
        if path.name == "summary.md":
            write_text(path, text)
        else:
            path.write_text(text)

    monkeypatch.setattr(finish, "write_text", only_one_summary)
    code, verdict, _ = ended(results)
    assert code == 1
    assert verdict["verdict"] == "regressed"
    assert "the warning is not in the summary: [Errno 28]" in capsys.readouterr().out


@pytest.mark.timeout(120)
def test_a_measured_run_is_over_before_the_tracker_starts_and_its_key_stays_out(
    clean: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fake(clean, monkeypatch, "key")
    monkeypatch.setenv("FAKE_LOG", str(clean / "began"))
    engine = ["engine.name=small", "engine.target=tests.run.engines.SmallEngine", "measure.repeats=1", "cells=*seq16"]
    words = ["run", "--config-dir", str(CONF), "suite=two", "world_size=2", f"results.dir={clean / 'results'}", *engine]
    assert main([*words, "tracker=wandb", "tracker.mode=online"]) == 0
    folder = find_run("latest", clean / "results")
    ends = [datetime.fromisoformat(record["end"]).timestamp() for record in folder.records()]
    assert ends
    assert float((clean / "began").read_text()) > max(ends)
    assert "invalid key [hidden]" in folder.summary_path.read_text().replace("\\", "")
    assert KEY.encode() not in everything_below(clean / "results")
    captured = capsys.readouterr()
    assert KEY not in captured.out + captured.err
