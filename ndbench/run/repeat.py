"""One repeat of a cell, measured in this process's interpreter: ranks, lock, logs, record.

Used by a run, and by the two sides of an A/B, each of which is a process with an interpreter and code of its own.
"""

from __future__ import annotations

import datetime
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ndbench.config import Cell
from ndbench.measure.code import code_of
from ndbench.measure.devices import visible_devices
from ndbench.measure.fingerprint import fingerprint
from ndbench.measure.throttling import ThrottleMeter
from ndbench.measure.version import measurement_version
from ndbench.results.fit import handicap_of as planted
from ndbench.results.schema import Record
from ndbench.results.store import RunFolder, write_json
from ndbench.run import launch as launching
from ndbench.run.locks import device_locks
from ndbench.run.progress import StepCounter
from ndbench.run.record import build_record
from ndbench.run.task import Task

DEVICE_WAIT_SECONDS = 3600.0
"""How long a repeat waits for a device that another run is measuring on."""


class Measurer:
    """Measures repeats of one run; what is the same for all of them is found out once."""

    def __init__(self, run: str, folder: RunFolder, cwd: str | Path = ".") -> None:
        self.run = run
        self.folder = folder
        self._cwd = cwd
        self.cell_version = measurement_version()
        self._fingerprints: dict[tuple[str, int], dict[str, Any]] = {}
        self._codes: dict[tuple[str | None, ...], dict[str, Any]] = {}

    def fingerprint(self, cell: Cell) -> dict[str, Any]:
        key = (cell.config.hardware.name, cell.world_size)
        if key not in self._fingerprints:
            self._fingerprints[key] = fingerprint(cell)
        return self._fingerprints[key]

    def code(self, cell: Cell) -> dict[str, Any]:
        """Of the code that the cell runs, as it was when it was first asked for."""
        config = cell.config
        key = (config.engine.name, config.engine.target, config.model.target, config.training.optimizer)
        if key not in self._codes:
            self._codes[key] = code_of(cell, self._cwd)
        return self._codes[key]

    def measure(
        self,
        cell: Cell,
        repeat: int,
        *,
        note: Callable[[str], None],
        started: Callable[[str, int, int, Callable[[], int]], None] | None = None,
        turns: Path | None = None,
    ) -> Record:
        """Launch the ranks and wait for them. With ``turns`` they step when told to, and the caller holds the device.

        ``note`` hears that a device is waited for, ``started`` how to ask for the current step.
        """
        measure = cell.config.measure
        scratch = Path(tempfile.mkdtemp(prefix="ndbench-"))
        try:
            with ExitStack() as stack:
                if turns is None:
                    stack.enter_context(device_locks(devices_of(cell), DEVICE_WAIT_SECONDS, note))
                throttle = ThrottleMeter(cell.config.hardware.device, devices_of(cell))
                task = Task(
                    cell=cell,
                    repeat=repeat,
                    seed=cell.config.training.seed,
                    structure=measure.structure and repeat == 0,
                    profile=measure.profile and repeat == 0 and turns is None,
                    handicap=handicap_of(cell),
                    folder=scratch,
                    runner=os.getpid(),
                    started=time.time(),
                    turns=turns,
                )
                task.save()
                counter = StepCounter(task.counter_path, create=True)
                if started is not None:
                    started(cell.name, repeat, cell.config.training.steps, counter.get)
                start = _now()
                result = launching.launch(task, cell.world_size, measure.timeout, cell.config.launcher.start_method)
                throttled = throttle.share()
            record = self._record(cell, repeat, result, start, throttled, alone=turns is None)
            keep_logs(task, cell.world_size, self.folder.log_dir(cell.name, repeat))
            _keep_profile(task, result, self.folder.profile_dir(cell.name, repeat))
            return record
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def not_launched(self, cell: Cell, repeat: int, earlier: Record) -> Record:
        """The record of a repeat that would only repeat an earlier failure."""
        reason = f"not launched: repeat {earlier['repeat']} ended as {earlier['outcome']}"
        return self._record(cell, repeat, launching.LaunchResult("skipped", reason), _now())

    def _record(
        self,
        cell: Cell,
        repeat: int,
        result: launching.LaunchResult,
        start: str,
        throttled: float | None = None,
        alone: bool = True,
    ) -> Record:
        return build_record(
            cell=cell,
            result=result,
            run=self.run,
            repeat=repeat,
            seed=cell.config.training.seed,
            start=start,
            end=_now(),
            cell_version=self.cell_version,
            code=self.code(cell),
            fingerprint=self.fingerprint(cell),
            throttled=throttled,
            alone=alone,
        )


def handicap_of(cell: Cell) -> float:
    """The planted slowdown of a cell, zero when it is not among ``measure.handicap_cells``."""
    return planted({"name": cell.name, "measure": vars(cell.config.measure)})


def devices_of(cell: Cell) -> list[str]:
    """Names of the devices that a cell occupies, as the locks know them: GPUs by UUID."""
    if cell.config.hardware.device == "cpu":
        return ["cpu"]
    uuids = _uuids()[: cell.world_size]
    if len(uuids) == cell.world_size:
        return list(uuids)
    # the devices do not say who they are: what they are called here has to do
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(cell.world_size)]
    return [f"{cell.config.hardware.device}-{name.strip()}" for name in names[: cell.world_size]]


@functools.cache
def _uuids() -> tuple[str, ...]:
    """Of the visible GPUs in their order: the same in every container and whatever CUDA_VISIBLE_DEVICES numbers."""
    return tuple(str(device["uuid"]) for device in visible_devices())


def keep_logs(task: Task, world_size: int, folder: Path) -> None:
    """Move what the ranks said into the run folder; a rank that said nothing leaves no file."""
    for rank in range(world_size):
        log = task.log_path(rank)
        if log.is_file() and log.stat().st_size:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.move(log, folder / f"rank{rank}.log")


def _keep_profile(task: Task, result: launching.LaunchResult, folder: Path) -> None:
    """Move the ranks' traces into the run folder, with their breakdowns and longest kernels beside them."""
    profiled = {f"rank{report.rank}": report.profile for report in result.reports if report.profile is not None}
    if not profiled:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for report in result.reports:
        if task.trace_path(report.rank).is_file():
            shutil.move(task.trace_path(report.rank), folder / f"rank{report.rank}.json.gz")
    write_json(folder / "breakdown.json", profiled)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
