"""Saving never harms what was saved before: crashes, full disks, equal steps; and it keeps what it should."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity.cases import case, layout, llama, training
from tests.parity.pool import Pool, pool
from tests.state import ranks

SMALL = llama(num_hidden_layers=1)
ADAMW = training(optimizer="adamw", learning_rate=1e-2)
CASE = case(layout(1, 2), SMALL, training=ADAMW, silent=0)
TWO_TP = case(layout(tp=2), SMALL, training=ADAMW, silent=0)
THREE = case(layout(1, 3), SMALL, training=training(optimizer="adamw", global_batch_size=9), silent=0)


@pytest.mark.parametrize("mode", ["sharded", "async", "full", "hf"])
def test_a_disk_that_is_full_is_an_error_and_harms_nothing(mode: str, tmp_path: Path) -> None:
    """One rank cannot write its file; every rank hears of it, and the next save works."""
    file = {"full": "rank00000.safetensors", "hf": "model.safetensors"}.get(mode, "rank00001.safetensors")
    for text, left in pool(2).run(ranks.save_with_limit, TWO_TP, tmp_path, mode, 50_000):
        assert f".step-00000002.tmp/{file}: File too large" in text
        assert left == ["step-00000001"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]
    assert pool(2).run(ranks.refused, CASE, tmp_path / "step-00000001")[0][0] == "loaded"


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, timeout=10).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("a disk of its own needs the right to mount one")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


@pytest.mark.parametrize("mode", ["sharded", "async"])
def test_no_space_left_is_told_and_the_checkpoint_before_stays_whole(mode: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "900k") as disk:
        for text, left in pool(2).run(ranks.save_with_limit, CASE, disk, mode, None):
            assert ".step-00000002.tmp/rank0000" in text
            assert text.endswith("No space left on device")
            assert left == ["step-00000001"]
        assert pool(2).run(ranks.refused, CASE, disk / "step-00000001")[0][0] == "loaded"


def test_an_equal_step_is_kept_beside_the_old_one_and_is_the_newest(tmp_path: Path) -> None:
    names = pool(2).run(ranks.save_steps, CASE, tmp_path, "sharded", 9, [10, 20, 10, 15])
    assert names[0] == names[1] == ["step-00000010", "step-00000020", "step-00000010-2", "step-00000015"]
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("mode", ["sharded", "async"])
def test_the_last_ones_saved_are_kept(mode: str, tmp_path: Path) -> None:
    """By when they were saved, not by step: a run that went back to step 10 goes on from there."""
    (tmp_path / "log.jsonl").touch()
    (tmp_path / "step-00000007").mkdir()
    names = pool(2).run(ranks.save_steps, CASE, tmp_path, mode, 2, [10, 20, 30, 15, 16])
    assert names[0] == [f"step-{step:08d}" for step in (10, 20, 30, 15, 16)]
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["log.jsonl", "step-00000007", "step-00000015", "step-00000016"]


def test_a_damaged_marker_of_an_old_one_keeps_no_new_one_from_being_written(tmp_path: Path) -> None:
    """It is left alone, and told when somebody asks which is the newest."""
    pool(2).run(ranks.save_steps, CASE, tmp_path, "sharded", 1, [10])
    marker = tmp_path / "step-00000010" / "complete.json"
    marker.write_text(marker.read_text().replace("{", "[", 1))
    with pytest.raises(RuntimeError, match=r"step-00000010/complete\.json is damaged"):
        pool(2).run(ranks.save_steps, CASE, tmp_path, "sharded", 1, [20])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]
    assert pool(2).run(ranks.refused, CASE, tmp_path / "step-00000020")[0][0] == "loaded"


def test_an_async_save_lets_training_go_on_and_keeps_the_numbers_of_its_step(tmp_path: Path) -> None:
    for stall, complete, value in pool(2).run(ranks.save_without_wait, CASE, tmp_path, 1.0):
        assert stall < 0.8
        assert not complete
        assert value == 5.0


@pytest.mark.parametrize("mode", ["sharded", "async"])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(mode: str, tmp_path: Path) -> None:
    generator = random.Random(mode)
    for attempt in range(2):
        kill_while_saving(tmp_path / str(attempt), mode, generator)


def kill_while_saving(folder: Path, mode: str, generator: random.Random, longest: float = 0.3) -> int:
    """Kill three saving ranks, one of them first, and resume with two; returns the step that was found."""
    folder.mkdir()
    saving = Pool(3)
    ended: list[str] = []
    thread = threading.Thread(target=_run, args=(saving, folder, mode, ended))
    thread.start()
    until = time.monotonic() + 60
    while not (folder / "begun").exists():
        assert thread.is_alive(), ended
        assert time.monotonic() < until, "no first save within 60 s"
        time.sleep(0.01)
    time.sleep(generator.uniform(0, longest))
    processes = [process for process, _ in saving._ranks]
    os.kill(processes[generator.randrange(3)].pid, signal.SIGKILL)
    thread.join(30)  # the pool kills the others when it sees one dead
    assert not thread.is_alive()
    assert all(not process.is_alive() for process in processes)
    (folder / "begun").unlink()
    answers = pool(2).run(ranks.resume, CASE, folder)
    for name, step, numbers in answers:
        assert name == f"step-{step:08d}"
        assert numbers == {float(step)}
    assert all(path.name.startswith("step-") for path in folder.iterdir())
    return int(answers[0][1])


def _run(saving: Pool, folder: Path, mode: str, ended: list[str]) -> None:
    try:
        saving.run(ranks.save_for_ever, THREE, folder, mode)
    except RuntimeError as error:
        ended.append(str(error))
