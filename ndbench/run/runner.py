"""Run a plan: launch every repeat in its order, store a record after each, compare at the end.

A record is written as soon as its repeat has ended, so whatever ends the run loses at most the repeat in flight, and
``resume_run`` goes on with the same plan. Nothing here decides about numbers; ``compare`` does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from ndbench.counted import counted
from ndbench.measure.code import another_package
from ndbench.report.facts import resume_command
from ndbench.report.progress import Progress, duration
from ndbench.results.schema import Record
from ndbench.results.sessions import Baseline, read_baseline
from ndbench.results.store import RunFolder, find_run, hardware_folder
from ndbench.run import launch as launching
from ndbench.run.finish import finish
from ndbench.run.folders import alone_in, check_writable
from ndbench.run.plan import Plan
from ndbench.run.repeat import Measurer
from ndbench.run.same_environment import refuse_other_environment


def start_run(plan: Plan, results_dir: Path, *, max_failures: int | None, console: Console) -> int:
    """Measure ``plan`` into a new folder below ``results_dir``; the exit code of the run.

    Raises ``ValueError`` before any process starts when the baseline cannot be read or the folder cannot be written.
    """
    check_writable(results_dir, "results folder")
    baseline = _read_baseline(plan, results_dir)
    folder = RunFolder.create(results_dir, plan.run)
    plan.save(folder.plan_path)
    return _execute(plan, folder, baseline, max_failures, console)


def resume_run(run: str, results_dir: Path, *, max_failures: int | None, console: Console) -> int:
    """Go on with a run that was ended in the middle: the same plan, only the repeats without a record."""
    folder = find_run(run, results_dir)
    check_writable(folder.path, "results folder")
    plan = Plan.load(folder.plan_path)
    folder.records_dir.mkdir(exist_ok=True)  # an archive leaves out an empty one
    return _execute(plan, folder, _read_baseline(plan, results_dir), max_failures, console)


def _read_baseline(plan: Plan, results_dir: Path) -> Baseline | None:
    if plan.gate.mode == "off":
        return None
    hardware = next(iter(plan.cells.values())).config.hardware
    count = hardware.device_count or max(cell.world_size for cell in plan.cells.values())
    return read_baseline(
        plan.baseline, hardware=hardware_folder(hardware.name, count), suite=plan.suite, results_dir=results_dir
    )


def _execute(
    plan: Plan, folder: RunFolder, baseline: Baseline | None, max_failures: int | None, console: Console
) -> int:
    with alone_in(folder.path, f"run {folder.path.name} is being measured by another process: wait for its end"):
        stopped = _measure(plan, folder, max_failures, console)
        with _resumable(folder, lambda line: console.print(line, markup=False, soft_wrap=True)):  # pairs take minutes
            return finish(plan, folder, baseline, console, stopped=stopped)


def _measure(plan: Plan, folder: RunFolder, max_failures: int | None, console: Console) -> str | None:
    """Every repeat of the plan that has no record yet; why it was not gone through to its end, if so."""
    done = {(record["cell"]["name"], record["repeat"]): record for record in folder.records()}
    measurer = Measurer(plan.run, folder)
    refuse_other_environment(
        plan.run,
        list(done.values()),
        measurer.code,
        measurer.cell_version,
        measurer.fingerprint,
        plan.cells,
        left=sum(pair not in done for pair in plan.order),
    )
    if (told := another_package()) is not None:
        console.print(told, style="yellow", markup=False, soft_wrap=True)
    first = next(iter(plan.cells.values()))
    launching.start_fork_server(launching.preloaded(plan.cells.values()), first.config.launcher.start_method)
    began, failures = time.monotonic(), 0
    stopped: str | None = None
    broken = {name: record for (name, _), record in done.items() if _hopeless(record)}
    with Progress(console, total=len(plan.order), done=len(done)) as progress, _resumable(folder, progress.note):
        for name, repeat in plan.order:
            if (name, repeat) in done:
                continue
            if repeat > 0 and plan.budget_seconds is not None and time.monotonic() - began > plan.budget_seconds:
                stopped = (
                    f"measure.budget of {duration(plan.budget_seconds)} was used up; later rounds were not started"
                )
                break
            if max_failures is not None and failures >= max_failures:
                stopped = f"stopped after {counted(failures, 'failed repeat')} (--max-failures {max_failures})"
                break
            if name in broken:
                record = measurer.not_launched(plan.cells[name], repeat, broken[name])
            else:
                record = measurer.measure(plan.cells[name], repeat, note=progress.note, started=progress.started)
                failures += record["outcome"] != "ok"
                if _hopeless(record):
                    broken[name] = record
            folder.write_record(record)
            progress.finished(record)
        if stopped is not None:
            progress.note(stopped)
    return stopped


@contextlib.contextmanager
def _resumable(folder: RunFolder, say: Callable[[str], None]) -> Iterator[None]:
    """Whatever ends the run in the middle, say how to go on with it."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, BrokenPipeError):  # nobody is there to read it
            say(f"stopped in the middle; go on with: {resume_command(folder.path)}")
        raise


def _hopeless(record: Record) -> bool:
    """A cell that ran out of memory, failed or hung is not launched again: it would only cost the same time again."""
    return record["outcome"] in ("oom", "failed", "timeout")
