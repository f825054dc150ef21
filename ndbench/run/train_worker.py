"""One rank of ``ndbench train``: set the process up, train, and hand back how it ended."""

from __future__ import annotations

import dataclasses
import gc
import signal
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from ndbench.parallel.mesh import build_mesh
from ndbench.run.progress import StepCounter
from ndbench.run.task import RankReport, Task
from ndbench.run.worker import init_process_group, prepare_device, rank_main
from ndbench.training.data import build_split
from ndbench.training.trainer import Control, Outcome, Trainer

DATA, STOP, OUTPUT = "data", "stop", "output"
"""In the task's folder: the text read once for all ranks, what asks for a stop, and where the run's own files go."""


def train_rank(task_path: str) -> str:
    """Entry point of a rank, started by torch elastic."""
    return rank_main(task_path, _train)


def _train(task: Task, rank: int, report: RankReport) -> None:
    asked = StepCounter(task.folder / STOP)
    signalled = 0

    def remember(number: int, _frame: FrameType | None) -> None:
        nonlocal signalled
        signalled = number  # a scheduler tells every process of a job, not its parent alone

    signal.signal(signal.SIGTERM, remember)
    config, prepared = task.cell.config, task.folder / DATA
    device = prepare_device(task.cell)
    init_process_group(task.cell, rank, device, config.launcher.stall_timeout)
    mesh = build_mesh(task.cell.parallelism, device.type)
    train, validation = build_split(config, prepared if prepared.is_dir() else None)
    counter = StepCounter(task.counter_path)
    control = Control(
        stop=lambda: signalled or max(asked.get(), 0),
        beat=(lambda: counter.set(counter.get() + 1)) if rank == 0 else lambda: None,
        agree_timeout=config.launcher.stall_timeout,
    )
    folder = Path((task.folder / OUTPUT).read_text())
    saves = config.checkpoint.dir is not None
    trainer = Trainer(config, mesh, device, train, validation, folder=folder, save=saves, control=control)
    control.beat()
    outcome: Outcome = trainer.run()
    report.engine = dataclasses.asdict(outcome)
    trainer.close()
    del trainer
    gc.collect()  # what still holds a group would keep its threads into the interpreter's end
    dist.destroy_process_group()
