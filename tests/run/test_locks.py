"""Two runs never measure on one device at once, and a dead run frees it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ndbench.run import locks, repeat
from tests.records import a_cell


def _hold(folder: str, pipe: Connection) -> None:
    locks.lock_folder = lambda device: Path(folder)  # type: ignore[assignment]
    with locks.device_locks(["cuda-0", "cuda-1"], 1.0, lambda line: None):
        pipe.send("held")
        time.sleep(60)


@pytest.mark.timeout(60)
def test_a_second_run_waits_names_the_holder_and_goes_on_when_the_holder_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "lock_folder", lambda device: tmp_path)
    mine, theirs = multiprocessing.Pipe()
    holder = multiprocessing.get_context("spawn").Process(target=_hold, args=(str(tmp_path), theirs))
    holder.start()
    assert mine.poll(30)
    lines: list[str] = []
    with (
        pytest.raises(TimeoutError, match=f"cuda-1 is in use by process {holder.pid}"),
        locks.device_locks(["cuda-1"], 0.3, lines.append),
    ):
        pass
    assert len(lines) == 1
    assert f"process {holder.pid} (" in lines[0]
    assert f", in {Path.cwd()}): waiting for its turn, at most 0 s (Ctrl-C gives up; CUDA_VISIBLE" in lines[0]
    with locks.device_locks(["cuda-2"], 0.0, lines.append):
        pass
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join(10)
    with locks.device_locks(["cuda-0", "cuda-1"], 5.0, lines.append):
        pass


def test_a_gpus_lock_is_one_for_the_machine_and_its_file_open_to_every_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, mine = tmp_path / "shared", tmp_path / "mine"
    for folder in (shared, mine):
        folder.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr(locks, "SHARED_FOLDERS", (tmp_path / "absent", mine, shared))
    monkeypatch.setattr(tempfile, "tempdir", str(mine))
    assert locks.lock_folder("GPU-8efab1ab") == shared, "mine is not for all, and TMPDIR differs from job to job"
    assert locks.lock_folder("cpu") == mine
    mask = os.umask(0o077)
    try:
        with locks.device_locks(["GPU-8efab1ab", "cpu"], 1.0, print):
            (file,) = shared.iterdir()
            assert file.stat().st_mode & 0o777 == 0o666
            assert file.read_text() == str(os.getpid())
        with locks.device_locks(["GPU-8efab1ab"], 1.0, print):
            pass
    finally:
        os.umask(mask)


def test_a_lock_that_another_user_made_unwritable_still_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "lock_folder", lambda device: tmp_path)
    file = tmp_path / "ndbench-GPU-1.lock"
    file.write_text("41")
    opened = os.open

    def theirs(path: str, flags: int, *rest: object, **named: object) -> int:
        if str(path) == str(file) and flags & os.O_RDWR:
            raise PermissionError(path)
        return opened(path, flags, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", theirs)
    with (
        locks.device_locks(["GPU-1"], 1.0, print),
        pytest.raises(TimeoutError, match="GPU-1 is in use by process 41"),
        locks.device_locks(["GPU-1"], 0.0, lambda line: None),
    ):
        pass


def test_gpus_are_locked_by_uuid_whatever_their_number_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = a_cell(device="cuda")
    cell.config.world_size = 2
    known = [{"uuid": f"GPU-{n}"} for n in range(2)]
    monkeypatch.setattr(repeat, "visible_devices", lambda: known)
    repeat._uuids.cache_clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert repeat.devices_of(cell) == ["GPU-0", "GPU-1"]
    known.pop()
    repeat._uuids.cache_clear()
    assert repeat.devices_of(cell) == ["cuda-4", "cuda-5"], "a device that does not say who it is"
    repeat._uuids.cache_clear()
    assert repeat.devices_of(a_cell()) == ["cpu"]


def test_the_holder_is_told_by_the_command_that_was_typed_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    words = ["/venv/bin/python3.11", "/venv/bin/ndbench", "suite=hsdp_tp", "k=0123456789abcdef0123456789abcdef01234567"]
    told = locks._command(words)
    assert told.startswith("ndbench suite=hsdp_tp k=")
    assert "0123456789abcdef" not in told
    assert locks._command(["python", "-m", "ndbench"]) == "python -m ndbench"
    assert len(locks._command(["ndbench", "x" * 1000])) < 130


def test_a_holder_that_cannot_be_seen_is_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "lock_folder", lambda device: tmp_path)
    lines: list[str] = []
    with locks.device_locks(["cpu"], 1.0, print):
        (file,) = tmp_path.iterdir()
        file.write_text("999999999")
        with (
            pytest.raises(TimeoutError, match="process 999999999; waited"),
            locks.device_locks(["cpu"], 0.2, lines.append),
        ):
            pass
    assert "process 999999999: waiting" in lines[0]
    assert "TMPDIR of its own" in lines[0]
