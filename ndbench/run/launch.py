"""Start the ranks of one repeat through torch elastic, wait with a limit, and say what became of them.

Ranks come from a fork server that has torch and the model's code loaded: importing them costs seconds a process. The
parent never touches an accelerator.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ndbench.counted import counted
from ndbench.run.preload_path import own_path
from ndbench.run.process import tail
from ndbench.run.task import RankReport, Task

if TYPE_CHECKING:
    from ndbench.config import Cell

STACKS_WAIT = 2.0
"""Seconds between asking hung ranks for their stacks and killing them."""
LAST_WAIT = 60.0
"""Seconds that elastic has for noticing that the ranks were killed; then it is left."""
FILES, FILES_OF_A_RANK = 16, 6
"""Open files that the launch itself and each rank cost this process, beside those already open."""
SHIELDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""What a terminal or a scheduler sends to a whole process group, and the helpers of a launch must outlive."""


@dataclass
class LaunchResult:
    outcome: str
    reason: str | None = None
    reports: list[RankReport] = field(default_factory=list)
    """In rank order; only those ranks that wrote one."""
    log_tail: str | None = None


class Interrupted(Exception):
    """A signal ended the launch: the repeat in flight is lost, the run can be resumed."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


COMPILER = ("torch._functorch.aot_autograd", "torch._inductor.compile_fx")
PRELOAD = ("ndbench.run.preload_path", "ndbench.run.preload")
TORCHTITAN = ("datasets", "torch.utils.tensorboard", "tyro", "torchtitan.models.llama3")


def preloaded(cells: Iterable[Cell]) -> list[str]:
    """What the fork server imports for ``cells``, in order: what their ranks would import one by one."""
    models, compiled, engines = set[str](), False, set[str]()
    for cell in cells:
        if cell.config.model.model_type:
            models.add(cell.config.model.model_type)
        compiled |= cell.config.training.compile
        engines.add(cell.config.engine.name)
    return [*model_modules(models), *(COMPILER if compiled else ()), *(TORCHTITAN if "torchtitan" in engines else ())]


def model_modules(model_types: Iterable[str]) -> list[str]:
    """transformers' modules with these models' code."""
    return [f"transformers.models.{name}.modeling_{name}" for name in sorted(model_types)]


def start_fork_server(modules: Sequence[str], start_method: str) -> None:
    """Have the fork server load torch, the engine and ``modules`` once, before the first rank is forked."""
    if start_method != "forkserver":
        return
    from multiprocessing import forkserver, resource_tracker

    multiprocessing.set_forkserver_preload([*PRELOAD, *modules, "ndbench.run.preload_end"])
    # libraries ask whether there is a GPU when they are imported; CUDA's own answer would start it in the server
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # torch reads this once, when its thread pools are made; the worker raises it where there are cores to spare
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Blocked signals stay blocked in what is started: both helpers ignore them first, then unblock them. The tracker
    # comes first because Python unblocks some of them again after starting it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        with own_path():
            resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
        with own_path():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def launch(
    task: Task,
    world_size: int,
    timeout: float,
    start_method: str,
    *,
    entry: Callable[[str], str] | None = None,
    progress: Callable[[], object] | None = None,
) -> LaunchResult:
    """Run the ranks of ``task`` to their end or to ``timeout`` seconds. Raises :class:`Interrupted` on a signal.

    ``entry`` is what a rank runs (default: a measurement). With ``progress`` the limit is the time for which its value
    stays the same. Outside the main thread signals are the caller's.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from ndbench.run.elastic import fail_on_early_ends
    from ndbench.run.worker import run_rank

    _refuse_few_files(world_size)
    fail_on_early_ends()
    scratch = task.folder / "elastic"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=f"{task.cell.name}.r{task.repeat}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,  # a retry would hide a fault
        monitor_interval=0.05,
        start_method=start_method,
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch)),
    )
    failure: ChildFailedError | None = None
    spared = frozenset(process.pid for process in ranks_of_this_process())
    watchdog = _Watchdog(timeout, spared, progress)
    with contextlib.suppress(_Stuck), _quiet_elastic(), _own_signal_handlers(), watchdog:
        try:
            elastic_launch(config, entry or run_rank)(str(task.path))
        except ChildFailedError as error:
            failure = error
        except SignalException as error:
            raise Interrupted(int(error.sigval)) from error
        finally:
            kill_ranks(spared)
            shutil.rmtree(scratch, ignore_errors=True)
    reports = [RankReport.load(path) for rank in range(world_size) if (path := task.report_path(rank)).is_file()]
    return _result(task, world_size, watchdog, failure, reports)


def _refuse_few_files(world_size: int) -> None:
    """Raise ``ValueError`` when this process may not open the pipes and sockets of a launch."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = sum(1 for _ in Path("/dev/fd").iterdir()) + FILES + FILES_OF_A_RANK * world_size
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ValueError(
            f"{limit} files may be open at once, a launch of {counted(world_size, 'rank')} needs {needed}: "
            "raise the limit (ulimit -n 1024)"
        )


def _result(
    task: Task, world_size: int, watchdog: _Watchdog, failure: Exception | None, reports: list[RankReport]
) -> LaunchResult:
    if failure is None and not watchdog.expired:
        missing = world_size - len(reports)
        if missing:
            told = f"{missing} of {counted(world_size, 'rank')} ended with exit code 0 before their report"
            return LaunchResult("failed", told, reports, tail(task.log_path(0)))
        return LaunchResult("ok", reports=reports)
    if watchdog.expired:
        log = tail(task.log_path(0), lines=60)
        reason = f"no {watchdog.waits_for} {watchdog.timeout:g} s; the stack of every rank is in its log"
        ended = [report for report in reports if report.reason is not None]
        if ended:
            first = _cause(ended)
            reason += f"; rank {first.rank}: {first.reason}"
        return LaunchResult("timeout", reason, reports, log)
    rank, how = _how_it_died(failure)
    failed = [report for report in reports if report.failed_at is not None]
    if not failed or rank not in {report.rank for report in failed}:
        return LaunchResult("failed", f"rank {rank} {how}", reports, tail(task.log_path(rank)))
    cause = _cause(failed)
    log = tail(task.log_path(cause.rank))
    return LaunchResult(cause.outcome, f"rank {cause.rank}: {cause.reason}", reports, log)


def _cause(failed: Sequence[RankReport]) -> RankReport:
    """The rank that failed first, one that merely lost its peer after every other."""
    return min(failed, key=lambda report: (report.lost_peer, report.failed_at or 0.0))


def _how_it_died(failure: Exception | None) -> tuple[int, str]:
    failures = getattr(failure, "failures", {})
    if not failures:
        return 0, f"could not be started: {failure}"
    first = min(failures.values(), key=lambda entry: entry.timestamp)
    code = first.exitcode
    if code < 0:
        return first.local_rank, f"was killed by {signal.Signals(-code).name}"
    if code == 0:
        return first.local_rank, "ended with exit code 0 before its report"
    return first.local_rank, f"ended with exit code {code}"


def ranks_of_this_process(spared: frozenset[int] = frozenset()) -> list[psutil.Process]:
    """Live processes started for ranks, and what they started: everything below us but our own direct helpers.

    ``spared`` are processes that were there before the launch: another pool of ranks in the same process, say.

    A fork server's ranks are its children; spawned ones are ours, known from multiprocessing's word for them.
    """
    try:
        me = psutil.Process()
        helpers = {child.pid for child in me.children() if not _is_spawned(child)}
        return [child for child in me.children(recursive=True) if child.pid not in helpers | spared]
    except psutil.Error:
        return []


def _is_spawned(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
        return not words or "--multiprocessing-fork" in words  # none yet: it is just starting
    except psutil.Error:
        return False


class _Stuck(BaseException):
    """Raised in a launch that goes on although all its ranks were killed; nothing on the way swallows it."""


class _Watchdog:
    """Kills the ranks when a launch outlasts its limit, after they have written their Python stacks to their logs.

    With ``progress``, when its value has not changed for that long.
    """

    def __init__(self, timeout: float, spared: frozenset[int], progress: Callable[[], object] | None = None) -> None:
        self.expired = False
        self.timeout = timeout
        self.waits_for = "end after" if progress is None else "progress for"
        self._progress = progress
        self._spared = spared
        self._done = threading.Event()
        self._launching = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="ndbench-watchdog")

    def __enter__(self) -> _Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _in_time(self) -> bool:
        """Whether the launch has ended before its limit; returns at that moment or at the limit."""
        if self._progress is None:
            return self._done.wait(self.timeout)
        last, since = self._progress(), time.monotonic()
        while not self._done.wait(min(self.timeout / 4, 5.0)):
            now = self._progress()
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > self.timeout:
                return False
        return True

    def _watch(self) -> None:
        if self._in_time():
            return
        self.expired = True
        for rank in ranks_of_this_process(self._spared):
            # a rank registers for SIGUSR1 first of all; one that has not yet done so has no stack to show
            with contextlib.suppress(psutil.Error):
                rank.send_signal(signal.SIGUSR1)
        self._done.wait(STACKS_WAIT)
        last = time.monotonic() + LAST_WAIT
        while not self._done.is_set():
            if time.monotonic() > last:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._launching), ctypes.py_object(_Stuck))
                return
            for rank in ranks_of_this_process(self._spared):
                with contextlib.suppress(psutil.Error):
                    rank.kill()
            self._done.wait(0.2)


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Put back the handlers that torch elastic replaces while it runs and leaves replaced."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    saved = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    try:
        yield
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Elastic logs every failure with a traceback of its own; what failed is in the record, so it stays quiet."""
    # each of its modules has a logger with a level of its own, so that the parent's would not reach them
    loud = ("torch.distributed.elastic", "torch.multiprocessing")
    names = [name for name in logging.root.manager.loggerDict if name.startswith(loud)]
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def kill_ranks(spared: frozenset[int] = frozenset(), wait: float = 5.0) -> None:
    """End every rank that is still there but the ``spared``, for the way out after an error."""
    ranks = ranks_of_this_process(spared)
    for rank in ranks:
        with contextlib.suppress(psutil.Error):
            rank.kill()
    end = time.monotonic() + wait
    while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks) and time.monotonic() < end:
        time.sleep(0.05)
