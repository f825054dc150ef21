"""One rank of one repeat: set the process up, let the engine take its steps, measure, write a report.

The worker gets a frozen task file and is no Hydra application. It does not decide anything: outcomes are told by
exception type here, everything else is the parent's. Inside the timed window nothing logs, synchronises or writes.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ndbench.config import Cell
from ndbench.engines.protocol import Batch, Engine, StepResult, load_engine
from ndbench.measure.attention_flops import attention_formulas
from ndbench.measure.collectives import CollectiveRecorder
from ndbench.measure.fingerprint import usable_cpus
from ndbench.measure.memory import STEADY_PEAK_FROM, MemoryMeter, TrackedMemory
from ndbench.measure.profile import profile_step
from ndbench.measure.timing import Handicap, StepClock, burn
from ndbench.measure.yardstick import run_yardstick
from ndbench.parallel.mesh import Mesh, build_mesh
from ndbench.results.schema import finite_or_null
from ndbench.results.store import dumps
from ndbench.run import compiling
from ndbench.run.checkpointing import CheckpointMeter
from ndbench.run.process import die_with, log_to
from ndbench.run.progress import StepCounter
from ndbench.run.task import RankReport, Task
from ndbench.run.turns import TurnTaker
from ndbench.training.data import Dataset, build_dataset

FAILURE_GRACE = 0.3
"""Seconds between a rank's error and its end; several of the agent's polling intervals."""
LOST_PEER_GRACE = 3.0
"""The same where the error is a lost connection; the rank that is the cause ends the launch sooner."""


def run_rank(task_path: str) -> str:
    """Entry point of a rank, started by torch elastic. Returns the outcome; the report lies in the task's folder."""
    return rank_main(task_path, measure)


def rank_main(task_path: str, work: Callable[[Task, int, RankReport], None]) -> str:
    """The life of a rank around its ``work``: log, report, and what becomes of an error."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; ending the ranks is the agent's part
    rank = int(os.environ["RANK"])
    task = Task.load(Path(task_path))
    die_with(task.runner)
    log_to(task.log_path(rank))
    report = RankReport(rank=rank)
    try:
        work(task, rank, report)
        report.outcome = "ok"
    except torch.OutOfMemoryError as error:
        report.outcome, report.reason = "oom", str(error).splitlines()[0]
        traceback.print_exc()
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        report.outcome, report.reason = "failed", _one_line(error)
        report.failed_at = getattr(error, "failed_at", None)
        if not getattr(error, "in_log", False):  # a script's own words stand at the end of the log
            traceback.print_exc()
    if report.outcome != "ok":
        report.failed_at = report.failed_at or time.time()
    report.save(task.report_path(rank))
    sys.stdout.flush()
    sys.stderr.flush()
    if report.outcome != "ok":
        # A peer that was killed is seen here as a lost connection at once; wait until the agent has seen the cause.
        # A rank that only lost its peer gives the peer time to say why.
        time.sleep(LOST_PEER_GRACE if report.lost_peer else FAILURE_GRACE)
        # The other ranks wait in a collective for this one; a normal exit would wait for them too.
        os._exit(1)
    return report.outcome


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:600] if text else type(error).__name__


def measure(task: Task, rank: int, report: RankReport) -> None:
    """Fill ``report``, which keeps what was measured when a later part raises."""
    cell = task.cell
    device = prepare_device(cell)
    init_process_group(cell, rank, device, cell.config.measure.timeout)
    mesh = build_mesh(cell.parallelism, device.type)
    dataset = build_dataset(cell.config)
    torch.manual_seed(task.seed)
    compiling.keep_count(cell.config.training.compile)
    engine = load_engine(cell.config.engine.name, cell.config.engine.target, **cell.config.engine.options)
    with closing(engine):
        engine.setup(cell, mesh)
        ours = getattr(engine, "in_process", True)
        report.tokens_per_step = dataset.tokens_per_step
        report.data_hash = dataset.content_hash if rank == 0 and ours else None
        if cell.config.measure.yardstick:
            report.yardstick_before = _yardstick(device)
        _timed_steps(task, engine, dataset, mesh, device, report)
        if not ours:
            report.valid_tokens = []  # the data was the script's own
            report.tokens_per_step = _told_tokens(report.tokens)
            if getattr(engine, "silent", False):
                report.silent, report.seconds, report.loss = True, [], []
        if task.structure and ours:
            report.structure = _structure_step(task, engine, dataset, mesh, device)
        if cell.config.measure.yardstick:
            report.yardstick_after = _yardstick(device)
        meter = CheckpointMeter(cell, device, task.folder) if cell.config.measure.checkpoint else None
        if meter is not None:
            meter.save_and_load(engine, mesh)
        if task.profile and ours:
            report.profile = _profile_step(task, engine, dataset, mesh, device, rank)
        if hasattr(engine, "info"):
            facts = engine.info()
            dumps(facts, "the engine's info()")  # what JSON cannot hold is the engine's error, with its place
            report.engine = facts
    if meter is not None:
        meter.reshard()
        meter.clean_up()
        report.checkpoint = meter.figures
    dist.destroy_process_group()


@contextlib.contextmanager
def closing(engine: Engine) -> Iterator[None]:
    """Close the engine whatever happens; what ``close`` raises after another error goes to the log alone."""
    try:
        yield
    except BaseException:
        try:
            engine.close()
        except Exception as error:
            sys.stderr.write(f"ndbench: after the error below, close() raised {_one_line(error)}\n")
        raise
    engine.close()


def _told_tokens(tokens: list[int | None] | None) -> int | None:
    """Tokens of a step as a script printed them, the mean over its steps; null unless every step has them."""
    told = [count for count in tokens or [] if count is not None]
    return round(sum(told) / len(told)) if told and len(told) == len(tokens or []) else None


def _yardstick(device: torch.device) -> dict[str, float | None] | None:
    """The yardstick without a trace in the cell's memory; null where the cell leaves no room for it."""
    try:
        return run_yardstick(device)
    except torch.OutOfMemoryError:
        return None
    finally:
        if device.type != "cpu":
            torch.cuda.empty_cache()


def prepare_device(cell: Cell) -> torch.device:
    """This rank's device, made the current one, and its CPU threads."""
    threads = cell.config.launcher.omp_num_threads or max(1, usable_cpus() // cell.world_size)
    torch.set_num_threads(threads)
    if cell.config.hardware.device == "cpu":
        return torch.device("cpu")
    if cell.config.training.deterministic:
        # cuBLAS reads it when CUDA starts; without it deterministic matmuls are only warned about.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if cell.config.training.cuda_graphs is not False:
        # NCCL reads it when it starts. Registering a graph's buffers fails in memory that can grow
        # (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True), and holds it beyond the graph in any.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    device = torch.device(cell.config.hardware.device, int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def init_process_group(cell: Cell, rank: int, device: torch.device, timeout: float) -> None:
    """Gloo on CPU, else NCCL; a collective that takes ``timeout`` seconds is an error."""
    # A prefix of its own: a user's script started by the command engine makes its default group on the same store.
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=PrefixStore("ndbench", store),
        rank=rank,
        world_size=cell.world_size,
        timeout=datetime.timedelta(seconds=timeout),
        device_id=None if device.type == "cpu" else device,
    )


def _batches(dataset: Dataset, mesh: Mesh, device: torch.device, first: int, count: int) -> list[Batch]:
    return [dataset.batch(step, mesh.batch_rank, mesh.batch_size, device) for step in range(first, first + count)]


def _timed_steps(
    task: Task, engine: Engine, dataset: Dataset, mesh: Mesh, device: torch.device, report: RankReport
) -> None:
    steps = task.cell.config.training.steps
    batches = _batches(dataset, mesh, device, 0, steps)
    report.valid_tokens = [dataset.valid_tokens(step) for step in range(steps)]
    counter = StepCounter(task.counter_path) if report.rank == 0 else None
    fence = torch.zeros(1, device=device)
    meter, clock, results = MemoryMeter(device), StepClock(device.type), list[StepResult]()
    dist.barrier()
    _synchronize(device)  # the data is there: nothing queued before belongs to the first step
    meter.reset()
    handicap = Handicap(task.handicap, device, lambda: dist.all_reduce(fence)) if task.handicap else None
    began = time.time()
    clock.start()
    if task.turns is not None:
        _turns(task, engine, batches, device, report, lambda: dist.all_reduce(fence))
        return
    for step, batch in enumerate(batches):
        results.append(_checked(engine.step(batch), step))
        if handicap is not None:
            handicap.after_step()
        clock.tick()
        if counter is not None:
            counter.set(step)
        if step + 1 == min(STEADY_PEAK_FROM, steps - 1):
            meter.reset()
    _report_steps(report, clock.seconds(), meter, results)
    report.time_to_first_step = began + report.seconds[0] - task.started
    report.compile_seconds, report.compile_cache = compiling.compile_time(task.cell.config.training.compile)


def _checked(result: StepResult, step: int) -> StepResult:
    """``result`` when it can be read as a step. Looks at types alone, so that nothing waits for the device.

    Raises ``TypeError`` at once: the other ranks should not go on to the end for a step that cannot be read.
    """
    for name in ("loss", "grad_norm", "tokens"):
        value = getattr(result, name, _ABSENT)
        if value is None and name != "loss":
            continue
        number = value.numel() == 1 if isinstance(value, torch.Tensor) else hasattr(type(value), "__float__")
        if not number:
            said = f"a {type(result).__name__} without it" if value is _ABSENT else f"{value!r:.80}"
            raise TypeError(f"the engine's {name} at step {step} is {said}, not a number")
    return result


_ABSENT = object()


def _report_steps(report: RankReport, seconds: list[float], meter: MemoryMeter, results: list[StepResult]) -> None:
    report.seconds = seconds
    report.memory = meter.reading()
    report.loss = finite_or_null([float(result.loss) for result in results])
    norms = [float(result.grad_norm) for result in results if result.grad_norm is not None]
    if norms and len(norms) < len(results):
        without = next(step for step, result in enumerate(results) if result.grad_norm is None)
        raise RuntimeError(f"the engine gives no gradient norm at step {without}: give one at every step, or at none")
    report.grad_norm = finite_or_null(norms) if norms else None
    report.tokens = [None if result.tokens is None else int(result.tokens) for result in results]


def _turns(
    task: Task,
    engine: Engine,
    batches: list[Batch],
    device: torch.device,
    report: RankReport,
    fence: Callable[[], object],
) -> None:
    """Step whenever it is this side's turn. The data is gone through again and again; the first pass is reported."""
    assert task.turns is not None, "without turns the ranks step freely"
    taker, meter = TurnTaker(task.turns, report.rank), MemoryMeter(device)
    seconds, results = list[float](), list[StepResult]()
    taker.ready()
    while (handicap := taker.wait()) is not None:
        began, cpu_began = time.perf_counter(), time.process_time()
        result = _checked(engine.step(batches[len(seconds) % len(batches)]), len(seconds))
        _synchronize(device)
        if handicap:
            burn(handicap * (time.perf_counter() - began), device)
            fence()  # the ranks end together, as they would after a slower step
            _synchronize(device)
        seconds.append(time.perf_counter() - began)
        taker.done(seconds[-1], time.process_time() - cpu_began)
        if len(results) < len(batches):
            results.append(result)
        report.time_to_first_step = report.time_to_first_step or time.time() - task.started
    if not results:
        raise RuntimeError("no turn was taken")
    _report_steps(report, seconds[: len(batches)], meter, results)


def _structure_step(task: Task, engine: Engine, dataset: Dataset, mesh: Mesh, device: torch.device) -> dict[str, Any]:
    """Collectives, FLOPs and (on CPU) the tracked peak of one more step, outside the timed window."""
    from torch.utils.flop_counter import FlopCounterMode

    (batch,) = _batches(dataset, mesh, device, task.cell.config.training.steps, 1)
    model = getattr(engine, "model", None)
    collectives = CollectiveRecorder(mesh.axis_of_group, model)
    flops = FlopCounterMode(display=False, custom_mapping=attention_formulas())
    tracked = TrackedMemory([engine, batch]) if device.type == "cpu" else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(compiling.eager_step())
        if tracked is not None:
            stack.enter_context(tracked)
        stack.enter_context(flops)
        stack.enter_context(collectives)
        engine.step(batch)
    return {
        "collectives": collectives.table(),
        "flops": flops.get_total_flops(),
        "tracked_peak_bytes": None if tracked is None else tracked.peak,
        **compiling.counters(),
    }


def _profile_step(
    task: Task, engine: Engine, dataset: Dataset, mesh: Mesh, device: torch.device, rank: int
) -> dict[str, Any]:
    """A trace of one more step, outside the timed window; the ranks start it together."""
    (batch,) = _batches(dataset, mesh, device, task.cell.config.training.steps + 1, 1)
    if task.cell.config.training.cuda_graphs is not False:
        engine.step(batch)  # the instrumented step freed the graph: it is captured here, and replayed for the trace
    dist.barrier()
    return profile_step(lambda: engine.step(batch), device, task.trace_path(rank))


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)
