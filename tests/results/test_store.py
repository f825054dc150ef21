from __future__ import annotations

import math
import multiprocessing
import os
import random
from pathlib import Path

import pytest

import ndbench.results
from ndbench.results.frame import to_parquet
from ndbench.results.store import (
    RunFolder,
    UnreadableFile,
    find_run,
    hardware_folder,
    read_json,
    read_record,
    write_json,
)
from tests.records import a_record, repeats


def a_run(tmp_path: Path, run: str = "20261130-061500-ab12cd") -> RunFolder:
    folder = RunFolder.create(tmp_path / "results", run)
    for record in repeats("fsdp8") + repeats("ddp8"):
        folder.write_record(record)
    return folder


def test_a_record_survives_the_disk_to_the_bit(tmp_path: Path) -> None:
    random.seed(0)
    loss = [random.uniform(0, 11) * 10.0 ** random.randint(-300, 300) for _ in range(12)]
    record = a_record(loss=list(loss))
    record["metrics"]["loss_last"]["value"] = 0.1 + 0.2
    write_json(tmp_path / "r.json", record)
    assert read_record(tmp_path / "r.json") == record


def test_a_nan_is_refused_by_its_place_and_the_old_file_stays(tmp_path: Path) -> None:
    write_json(tmp_path / "r.json", {"a": 1})
    with pytest.raises(ValueError, match=r"r\.json\.steps\.loss\[1\] is nan"):
        write_json(tmp_path / "r.json", {"steps": {"loss": [1.0, math.nan]}})
    assert read_json(tmp_path / "r.json") == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "r.json", {"a": 1})

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write .*r\.json: No space left"):
        write_json(tmp_path / "r.json", {"a": 2})
    assert read_json(tmp_path / "r.json") == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize("keep", [0, 1, 100, -3])
def test_a_truncated_record_is_an_error_naming_the_file(tmp_path: Path, keep: int) -> None:
    run = a_run(tmp_path)
    path = run.record_path("fsdp8", 1)
    path.write_text(path.read_text()[:keep])
    for read in (run.records, lambda: ndbench.results.load(run.path)):
        with pytest.raises(UnreadableFile, match=r"fsdp8\.r1\.json"):
            read()
    with pytest.warns(UserWarning, match=r"left out: .*fsdp8\.r1\.json"):
        assert len(ndbench.results.load(run.path, strict=False)) == 5


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("\n")
    with pytest.raises(UnreadableFile, match=r"r\.json: the file is empty"):
        read_json(tmp_path / "r.json")


def test_a_bare_nan_in_a_file_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"loss": NaN}')
    with pytest.raises(UnreadableFile, match="holds NaN"):
        read_json(tmp_path / "r.json")


def test_load_gives_one_row_a_repeat_of_a_run_a_results_folder_and_a_file(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    frame = ndbench.results.load(run.path)
    assert len(frame) == 6
    assert set(frame["cell.name"]) == {"fsdp8", "ddp8"}
    assert list(frame["tokens_per_second"]) == list(frame["metrics.tokens_per_second.value"])
    assert frame["steps.loss"][0] == a_record()["steps"]["loss"]
    assert frame["cell.engine"][0] == "ndbench"
    a_run(tmp_path, "20261130-070000-ffffff")
    assert len(ndbench.results.load(tmp_path / "results")) == 12
    assert len(ndbench.results.load(run.record_path("ddp8", 2))) == 1
    with pytest.raises(UnreadableFile, match="no such file"):
        ndbench.results.load(tmp_path / "nowhere")


def test_parquet_round_trips_numbers(tmp_path: Path) -> None:
    import pandas

    run = a_run(tmp_path)
    target = to_parquet(run.path, tmp_path / "run.parquet")
    again = pandas.read_parquet(target)
    frame = ndbench.results.load(run.path)
    assert [list(loss) for loss in again["steps.loss"]] == [list(loss) for loss in frame["steps.loss"]]
    assert list(again["tokens_per_second"]) == list(frame["tokens_per_second"])


def _write_many(folder: str, worker: int) -> None:
    for number in range(20):
        write_json(Path(folder) / "shared.json", {"worker": worker, "number": number, "pad": "x" * 20000})


def test_two_writers_of_one_file_never_mix(tmp_path: Path) -> None:
    writers = [multiprocessing.Process(target=_write_many, args=(str(tmp_path), n)) for n in range(2)]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        if (tmp_path / "shared.json").exists():
            assert len(read_json(tmp_path / "shared.json")["pad"]) == 20000
            seen += 1
    assert seen
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["shared.json"]


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    a_run(tmp_path)
    with pytest.raises(FileExistsError):
        RunFolder.create(tmp_path / "results", "20261130-061500-ab12cd")


def test_a_cell_name_that_is_no_file_name_is_refused(tmp_path: Path) -> None:
    for name in ("../x", "a/b", ".hidden", "", "a\nb"):
        with pytest.raises(ValueError, match="cannot be a file name"):
            RunFolder(tmp_path).record_path(name, 0)


def test_a_run_is_found_by_path_name_beginning_or_latest(tmp_path: Path) -> None:
    first = a_run(tmp_path)
    second = a_run(tmp_path, "20261130-070000-ffffff")
    results = tmp_path / "results"
    assert find_run(first.path, results).path == first.path
    assert find_run("20261130-0615", results).path == first.path
    assert find_run("latest", results).path == second.path
    with pytest.raises(ValueError, match="beginning of 2 runs"):
        find_run("20261130", results)
    with pytest.raises(ValueError, match="no run 'nothing'"):
        find_run("nothing", results)


def test_reading_results_imports_neither_torch_nor_pandas() -> None:
    import subprocess
    import sys

    code = (
        "import sys, ndbench.results, ndbench.results.store, ndbench.results.sessions;"
        "print([m for m in ('torch', 'pandas', 'scipy', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_folder_of_a_machines_baselines_is_named_by_kind_and_count() -> None:
    assert hardware_folder("cpu", 8) == "cpu_x8"
    assert hardware_folder("h200_x2", 2) == "h200_x2"
    assert hardware_folder("h200_x8", 4) == "h200_x4"
