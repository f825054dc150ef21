from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ndbench.cli import main
from ndbench.config import GateConfig
from ndbench.gate.foreign import compare_with_file
from ndbench.results.pytest_benchmark import read_pytest_benchmark, to_pytest_benchmark
from ndbench.results.store import RunFolder
from tests.records import not_ok, repeats


def test_step_times_come_back_exactly() -> None:
    records = [*repeats("a", seconds=0.1), *repeats("b", seconds=0.2, count=1)]
    document = json.loads(json.dumps(to_pytest_benchmark(records), allow_nan=False))
    assert read_pytest_benchmark(document, "f") == {"a": [0.1] * 3, "b": [0.2]}


def test_pytest_benchmark_itself_reads_and_compares_the_file(tmp_path: Path) -> None:
    for number, seconds in ((1, 0.1), (2, 0.2)):
        folder = tmp_path / ".benchmarks" / "Linux-CPython-3.11-64bit"
        folder.mkdir(parents=True, exist_ok=True)
        document = to_pytest_benchmark(repeats("fsdp8", seconds=seconds))
        (folder / f"000{number}_run.json").write_text(json.dumps(document))
    command = [sys.executable, "-m", "pytest_benchmark", "compare", "--columns=median"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "fsdp8" in done.stdout


def test_a_dropped_benchmark_is_missing_and_a_slower_one_a_suspect() -> None:
    """pytest-benchmark passes both the dropped and the NaN one."""
    run = [*repeats("a", seconds=0.3), *repeats("c")]
    found = compare_with_file(run, {"a": [0.1] * 5, "b": [0.1] * 5}, GateConfig())
    assert {name: verdict.verdict for name, verdict in found.items()} == {
        "a": "inconclusive",
        "b": "missing",
        "c": "new",
    }
    assert found["a"].change == pytest.approx(0.1 / 0.3 - 1)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "it has no benchmarks"),
        ({"benchmarks": [{"name": "a", "stats": {"mean": 1.0}}]}, "benchmark 'a' has no data"),
        ({"benchmarks": [{"name": "a", "stats": {"data": [math.nan]}}]}, "benchmark a holds nan"),
        ({"benchmarks": [{"name": "a", "stats": {"data": [0.0]}}]}, "holds 0.0, which is not a time"),
    ],
)
def test_a_file_without_times_is_an_error_never_a_pass(document: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_pytest_benchmark(document, "f.json")


def test_nothing_to_export_is_said() -> None:
    with pytest.raises(ValueError, match="nothing to export"):
        to_pytest_benchmark([not_ok("failed")])


def test_a_file_is_compared_and_written_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create(tmp_path, "20261130-061500-ab12cd")
    for record in repeats("a"):
        folder.write_record(record)
    exported, reference = tmp_path / "out.json", tmp_path / "reference.json"
    assert main(["report", str(folder.path), "--benchmark-json", str(exported)]) == 0
    assert main(["compare", str(exported), str(folder.path)]) == 0
    reference.write_text(json.dumps(to_pytest_benchmark([*repeats("a"), *repeats("gone")])))
    assert main(["compare", str(reference), str(folder.path)]) == 3
    assert "the file has this benchmark and the run does not" in " ".join(capsys.readouterr().out.split())
    reference.write_text("{}")
    assert main(["compare", str(reference), str(folder.path)]) == 2
