"""``ndbench train``: from overrides to ranks that train, watched until they end.

The parent reads the text once, starts the ranks through the launcher of the measurements, shows their log as it grows,
and turns a signal into a stop after the step in flight. It computes nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from ndbench.config import Cell
from ndbench.matrix.expand import expand
from ndbench.measure.code import another_package
from ndbench.report.tracker import check as check_tracker
from ndbench.report.tracker import track_training
from ndbench.report.training import TrainingView
from ndbench.results.store import write_json
from ndbench.run.folders import alone_in, check_writable
from ndbench.run.plan import new_run_name
from ndbench.run.start import ask_engines
from ndbench.run.train_checks import train_refusal

FAILED = 3
"""Exit code of a run that a rank's error ended; one that a signal ended has 128 + its number."""

POLL_SECONDS = 0.2
ECHO_SECONDS = 1.0
"""A second signal within this time is the first once more."""


def train(words: Sequence[str], config_dir: Path | None, console: Console) -> int:
    """Train the one configuration that ``words`` compose; the exit code.

    Raises ``ValueError`` before any process starts for what the user must change.
    """
    cell = the_cell(words, config_dir)
    folder = output_folder(cell)
    # Import torch: after everything that can be refused without it.
    from ndbench.run.train_resume import changes_since, start_of
    from ndbench.training.data import prepare

    with ExitStack() as stack:
        stack.enter_context(alone_in(folder, f"another process trains into {folder}: wait for its end"))
        scratch = Path(tempfile.mkdtemp(prefix="ndbench-train-"))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        corpus = prepare(cell.config, scratch / "data")
        start = start_of(cell.config, folder, scratch / "data")
        view = stack.enter_context(TrainingView(console, cell, folder))
        changes = changes_since(cell.config, start[0]) if start is not None else []
        view.began(None if corpus is None else (len(corpus.tokens), len(corpus.starts), corpus.cut), start, changes)
        if start is not None and start[1] >= cell.config.training.steps:
            return 0
        if (told := another_package()) is not None:
            view.note(told)
        write_json(folder / "config.json", cell.to_dict())
        code = _launch(cell, folder, scratch, view, stack, start[0] if start is not None else None)
        view.tracked(*track_training(folder, cell.config.tracker))
        return code


def the_cell(words: Sequence[str], config_dir: Path | None) -> Cell:
    """The configuration to train. Raises ``ValueError`` for a matrix, or what cannot be trained."""
    for word in words:
        if word.startswith("suite="):
            raise ValueError(f"train takes one configuration, '{word}' is many: choose groups and keys instead")
    matrix = expand(words, config_dir)
    if matrix.skipped:
        cell, reason = matrix.skipped[0]
        raise ValueError(f"{cell.name}: {reason}")
    (cell,) = matrix.cells
    if (refusal := train_refusal(cell.config)) is not None:
        raise ValueError(refusal)
    check_tracker(cell.config.tracker)
    _, refused = ask_engines([cell])
    if refused:
        raise ValueError(f"{cell.name}: {refused[0][1]}")
    return cell


def output_folder(cell: Cell) -> Path:
    """``checkpoint.dir``, else a new folder below ``results.dir``; made here. ``ValueError`` when it holds a run."""
    config = cell.config
    if config.checkpoint.dir is None:
        folder = Path(config.results.dir) / "train" / new_run_name()
    else:
        folder = Path(config.checkpoint.dir).expanduser()
    check_writable(folder, "folder")
    log = folder / "log.jsonl"
    if config.resume is None and ((log.is_file() and log.stat().st_size) or any(folder.glob("step-*"))):
        raise ValueError(f"{folder} holds a training run: resume=auto goes on with it, or name another checkpoint.dir")
    return folder


def _launch(cell: Cell, folder: Path, scratch: Path, view: TrainingView, stack: ExitStack, start: Path | None) -> int:
    """``start``: the checkpoint that is gone on from."""
    from ndbench.run import launch as launching

    config = cell.config
    launching.start_fork_server(launching.preloaded([cell]), config.launcher.start_method)
    # The server loads torch while this process does.
    from ndbench.run.locks import device_locks
    from ndbench.run.progress import StepCounter
    from ndbench.run.repeat import DEVICE_WAIT_SECONDS, devices_of, keep_logs
    from ndbench.run.task import Task
    from ndbench.run.train_worker import OUTPUT, STOP, train_rank

    if config.hardware.device != "cpu":  # ranks on a CPU share its cores with whoever is there anyway
        stack.enter_context(device_locks(devices_of(cell), DEVICE_WAIT_SECONDS, view.note))
    task = Task(
        cell=cell,
        repeat=0,
        seed=config.training.seed,
        structure=False,
        handicap=0.0,
        folder=scratch,
        runner=os.getpid(),
        started=time.time(),
    )
    task.save()
    (scratch / OUTPUT).write_text(str(folder.absolute()))
    beats = StepCounter(task.counter_path, create=True)
    asked = StepCounter(scratch / STOP, create=True)
    spared = frozenset(process.pid for process in launching.ranks_of_this_process())
    ended: list[launching.LaunchResult | BaseException] = []

    def run() -> None:
        try:
            limit, method = config.launcher.stall_timeout, config.launcher.start_method
            ended.append(launching.launch(task, cell.world_size, limit, method, entry=train_rank, progress=beats.get))
        except BaseException as error:
            ended.append(error)

    signals: list[int] = []
    thread = threading.Thread(target=run, daemon=True, name="ndbench-launch")
    with _heard(signals):
        thread.start()
        told = 0
        try:
            while thread.is_alive():
                thread.join(POLL_SECONDS)
                if len(signals) > told:
                    asked_before, told = told > 0, len(signals)
                    if not asked_before:
                        asked.set(signals[0])
                        view.stopping(signals[0])
                    else:
                        launching.kill_ranks(spared)
                view.update()
        except BaseException:  # nobody would be there to end them
            launching.kill_ranks(spared)
            raise
    try:
        keep_logs(task, cell.world_size, folder / "logs")
    except OSError as error:  # a full disk, which may be why the ranks ended: that is what must be told
        view.note(f"the ranks' logs are not kept in {folder / 'logs'}: {error.strerror or error}")
    view.update()
    (result,) = ended
    if len(signals) > 1:
        return view.killed(signals[-1])
    if isinstance(result, BaseException):
        raise result
    if result.outcome != "ok":
        reason = result.reason or ""
        view.failed(result.outcome, reason, result.log_tail or "", _instead_of(start, folder, reason))
        return FAILED
    outcome: dict[str, Any] = result.reports[0].engine
    view.ended(outcome)
    return 128 + int(outcome["stopped"]) if outcome["stopped"] else 0


def _instead_of(start: Path | None, folder: Path, reason: str) -> str | None:
    """What to say of other checkpoints where ``start`` could not be read, and else of those there are."""
    from ndbench.parallel.state_index import whole_checkpoints
    from ndbench.run.train_resume import instead, newest_whole

    if start is None or "CheckpointError" not in reason or start.name not in reason:
        found = whole_checkpoints(folder, damaged=lambda _: None)
        return f"the newest whole one is {found[-1][1]}: once mended, resume=auto goes on from it" if found else None
    whole = newest_whole(folder, start)
    return "no other checkpoint there is whole" if whole is None else instead(whole)


@contextlib.contextmanager
def _heard(signals: list[int]) -> Iterator[None]:
    """Collect the signals that ask for an end instead of being ended by them; what follows at once is the same wish.

    ``timeout``, schedulers and terminals tell a process and then its group.
    """
    first = 0.0

    def hear(number: int, _frame: FrameType | None) -> None:
        nonlocal first
        if not signals:
            first = time.monotonic()
        if not signals or time.monotonic() - first > ECHO_SECONDS:
            signals.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # what nohup or a shell without job control has taken from us stays away
    heard = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, hear) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
