"""Run a plan: launch every repeat in its order, store a record after each, compare at the end.

A record is written as soon as its repeat has ended, so whatever ends the run loses at most the repeat in flight, and
``resume_run`` goes on with the same plan. Nothing here decides about numbers; ``compare`` does.
"""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ndbench.config import Cell
from ndbench.measure.devices import hardware_key
from ndbench.measure.fingerprint import code_version, fingerprint
from ndbench.measure.version import measurement_version
from ndbench.report.progress import Progress, duration
from ndbench.results.schema import Record
from ndbench.results.sessions import Baseline, read_baseline
from ndbench.results.store import RunFolder, find_run
from ndbench.run import launch as launching
from ndbench.run.finish import finish
from ndbench.run.locks import device_locks
from ndbench.run.plan import Plan
from ndbench.run.progress import StepCounter
from ndbench.run.record import build_record
from ndbench.run.task import Task

DEVICE_WAIT_SECONDS = 3600.0
"""How long a repeat waits for a device that another run is measuring on."""


@dataclass
class _Context:
    """What is the same for every repeat of a run."""

    plan: Plan
    folder: RunFolder
    code: dict[str, Any]
    cell_version: str
    fingerprints: dict[tuple[str, int], dict[str, Any]]

    def fingerprint(self, cell: Cell) -> dict[str, Any]:
        key = (cell.config.hardware.name, cell.world_size)
        if key not in self.fingerprints:
            self.fingerprints[key] = fingerprint(cell)
        return self.fingerprints[key]


def start_run(plan: Plan, results_dir: Path, *, max_failures: int | None, console: Console) -> int:
    """Measure ``plan`` into a new folder below ``results_dir``; the exit code of the run.

    Raises ``ValueError`` before any process starts when the baseline cannot be read or the folder cannot be written.
    """
    _check_writable(results_dir)
    baseline = _read_baseline(plan, results_dir)
    folder = RunFolder.create(results_dir, plan.run)
    plan.save(folder.plan_path)
    return _execute(plan, folder, baseline, max_failures, console)


def resume_run(run: str, results_dir: Path, *, max_failures: int | None, console: Console) -> int:
    """Go on with a run that was ended in the middle: the same plan, only the repeats without a record."""
    folder = find_run(run, results_dir)
    _check_writable(folder.path)
    plan = Plan.load(folder.plan_path)
    return _execute(plan, folder, _read_baseline(plan, results_dir), max_failures, console)


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as stream:
            stream.write(b"ndbench")
    except OSError as error:
        raise ValueError(f"results folder {folder.absolute()} cannot be written: {error.strerror}") from error


def _read_baseline(plan: Plan, results_dir: Path) -> Baseline | None:
    if plan.gate.mode == "off":
        return None
    hardware = next(iter(plan.cells.values())).config.hardware
    count = hardware.device_count or max(cell.world_size for cell in plan.cells.values())
    return read_baseline(
        plan.baseline, hardware=hardware_key(hardware, count), suite=plan.suite, results_dir=results_dir
    )


def _execute(
    plan: Plan, folder: RunFolder, baseline: Baseline | None, max_failures: int | None, console: Console
) -> int:
    done = {(record["cell"]["name"], record["repeat"]): record for record in folder.records()}
    first = next(iter(plan.cells.values()))
    launching.start_fork_server(
        {cell.config.model.model_type for cell in plan.cells.values() if cell.config.model.model_type},
        first.config.launcher.start_method,
    )
    context = _Context(plan, folder, code_version(Path.cwd()), measurement_version(), {})
    began, failures = time.monotonic(), 0
    stopped: str | None = None
    broken = {name: record for (name, _), record in done.items() if _hopeless(record)}
    with Progress(console, total=len(plan.order), done=len(done)) as progress, _resumable(plan, folder, progress):
        for name, repeat in plan.order:
            if (name, repeat) in done:
                continue
            if repeat > 0 and plan.budget_seconds is not None and time.monotonic() - began > plan.budget_seconds:
                stopped = (
                    f"measure.budget of {duration(plan.budget_seconds)} was used up; later rounds were not started"
                )
                break
            if max_failures is not None and failures >= max_failures:
                stopped = f"stopped after {failures} failed repeats (--max-failures {max_failures})"
                break
            if name in broken:
                record = _not_launched(context, plan.cells[name], repeat, broken[name])
            else:
                record = _run_repeat(context, plan.cells[name], repeat, progress)
                failures += record["outcome"] != "ok"
                if _hopeless(record):
                    broken[name] = record
            folder.write_record(record)
            progress.finished(record)
        if stopped is not None:
            progress.note(stopped)
    return finish(plan, folder, baseline, console, stopped=stopped)


@contextlib.contextmanager
def _resumable(plan: Plan, folder: RunFolder, progress: Progress) -> Iterator[None]:
    """Whatever ends the run in the middle, say how to go on with it."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, BrokenPipeError):  # nobody is there to read it
            results_dir = str(folder.path.parent.parent)
            elsewhere = "" if results_dir == "results" else f" {shlex.quote(f'results.dir={results_dir}')}"
            progress.note(f"stopped in the middle; go on with: ndbench --resume {plan.run}{elsewhere}")
        raise


def _hopeless(record: Record) -> bool:
    """A cell that ran out of memory, failed or hung is not launched again: it would only cost the same time again."""
    return record["outcome"] in ("oom", "failed", "timeout")


def _not_launched(context: _Context, cell: Cell, repeat: int, earlier: Record) -> Record:
    reason = f"not launched: repeat {earlier['repeat']} ended as {earlier['outcome']}"
    return _record(context, cell, repeat, launching.LaunchResult("skipped", reason), _now())


def _run_repeat(context: _Context, cell: Cell, repeat: int, progress: Progress) -> Record:
    measure = cell.config.measure
    handicapped = any(fnmatch.fnmatchcase(cell.name, pattern) for pattern in measure.handicap_cells.split(","))
    scratch = Path(tempfile.mkdtemp(prefix="ndbench-"))
    seed = cell.config.training.seed
    try:
        with device_locks(_devices(cell), DEVICE_WAIT_SECONDS, progress.note):
            task = Task(
                cell=cell,
                repeat=repeat,
                seed=seed,
                structure=measure.structure and repeat == 0,
                handicap=measure.handicap if handicapped else 0.0,
                folder=scratch,
                runner=os.getpid(),
                started=time.time(),
            )
            task.save()
            counter = StepCounter(task.counter_path, create=True)
            progress.started(cell.name, repeat, cell.config.training.steps, counter.get)
            start = _now()
            try:
                result = launching.launch(task, cell.world_size, measure.timeout, cell.config.launcher.start_method)
            finally:
                launching.kill_ranks()
        record = _record(context, cell, repeat, result, start)
        _keep_logs(task, cell.world_size, context.folder.log_dir(cell.name, repeat))
        return record
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _record(context: _Context, cell: Cell, repeat: int, result: launching.LaunchResult, start: str) -> Record:
    return build_record(
        cell=cell,
        result=result,
        run=context.plan.run,
        repeat=repeat,
        seed=cell.config.training.seed,
        start=start,
        end=_now(),
        cell_version=context.cell_version,
        code=context.code,
        fingerprint=context.fingerprint(cell),
    )


def _keep_logs(task: Task, world_size: int, folder: Path) -> None:
    """Move what the ranks said into the run folder; a rank that said nothing leaves no file."""
    for rank in range(world_size):
        log = task.log_path(rank)
        if log.is_file() and log.stat().st_size:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.move(log, folder / f"rank{rank}.log")


def _devices(cell: Cell) -> list[str]:
    if cell.config.hardware.device == "cpu":
        return ["cpu"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(cell.world_size)]
    return [f"{cell.config.hardware.device}-{name.strip()}" for name in names[: cell.world_size]]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
