"""Seconds and bytes of a cell's checkpoints, taken after everything else of the repeat was measured.

Saving (sharded), what an async save takes from training, loading into the same layout, and into another one. It uses
what training uses (``ndbench.parallel.state``), on the disk of ``checkpoint.dir`` or of the repeat's own folder.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ndbench.config import Cell
from ndbench.engines.protocol import Engine, load_engine
from ndbench.parallel.mesh import Mesh, build_mesh
from ndbench.parallel.state import Checkpoints

ROUNDS = 5
"""Each operation is done so many times; the figure is the median."""
ENOUGH_SECONDS = 20.0
"""An operation that has taken longer than this in all is not done again."""

Figures = dict[str, Any]
"""``save_seconds``, ``stall_seconds``, ``load_seconds``, ``reshard_seconds``, ``bytes``; or
``reason``, why there are none."""


class CheckpointMeter:
    """Measures the checkpoints of one cell; every method is collective and gives the same figures on every rank."""

    def __init__(self, cell: Cell, device: torch.device, folder: Path) -> None:
        self.cell, self.device = cell, device
        self.rank = dist.get_rank()
        parent = cell.config.checkpoint.dir
        self.folder = folder / "checkpoints" if parent is None else Path(parent) / f".measured-{folder.name}"
        self.figures: Figures = {}

    def save_and_load(self, engine: Engine, mesh: Mesh) -> None:
        """With the engine as it stands after its steps."""
        if not hasattr(engine, "training_state"):
            self.figures["reason"] = f"engine {self.cell.config.engine.name} does not hand out its training state"
            return
        model, optimizer, parameters = engine.training_state()
        sharded = Checkpoints(self.folder, mesh, keep=1)
        background = Checkpoints(self.folder, mesh, keep=1, mode="async")
        self.figures["stall_seconds"] = self._median(
            lambda: background.save(1, model, optimizer, parameters, {}), after=background.wait
        )
        self.figures["save_seconds"] = self._median(lambda: sharded.save(1, model, optimizer, parameters, {}))
        path = sharded.newest()
        assert path is not None, "it was just written"
        self.figures["bytes"] = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        self.figures["load_seconds"] = self._median(
            lambda: sharded.load(path, model, optimizer, parameters), before=lambda: forget_cached(path)
        )

    def reshard(self) -> None:
        """Into another layout, when the engine of the cell's own is closed: both need not fit."""
        if "reason" in self.figures:
            return
        other = other_layout(self.cell)
        if other is None:
            return
        named = other.config.engine
        engine = load_engine(named.name, named.target, **named.options)
        mesh = build_mesh(other.parallelism, self.device.type)
        from ndbench.run.worker import closing

        with closing(engine):
            engine.setup(other, mesh)
            model, optimizer, parameters = engine.training_state()  # type: ignore[attr-defined]
            checkpoints = Checkpoints(self.folder, mesh)
            path = checkpoints.newest()
            assert path is not None, "save_and_load comes first"
            self.figures["reshard_seconds"] = self._median(
                lambda: checkpoints.load(path, model, optimizer, parameters), before=lambda: forget_cached(path)
            )

    def clean_up(self) -> None:
        """Remove what was written."""
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _median(
        self,
        work: Callable[[], object],
        before: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
    ) -> float:
        """Seconds of the slowest rank, the median over rounds."""
        seconds = list[float]()
        while len(seconds) < ROUNDS and sum(seconds) < ENOUGH_SECONDS:
            before()
            self._synchronize()
            dist.barrier()
            began = time.perf_counter()
            work()
            self._synchronize()
            slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64, device=self.device)
            after()
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            seconds.append(float(slowest))
        return statistics.median(seconds)

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)


def other_layout(cell: Cell) -> Cell | None:
    """The cell in another layout of as many ranks, into which its checkpoint is loaded: the first of fsdp with tp 2,
    fsdp, and two replicas of it that is not its own and that the engine does not refuse. None where there is none.
    """
    own, size = cell.parallelism, cell.world_size
    named = cell.config.engine
    engine = load_engine(named.name, named.target, **named.options)
    for degrees in ((1, size // 2, 1, 2), (1, size, 1, 1), (2, size // 2, 1, 1)):
        if size == 1 or degrees == tuple(own.sizes.values()) or degrees[0] * degrees[1] * degrees[3] != size:
            continue
        replicate, shard, cp, tp = degrees
        other = dataclasses.replace(own, dp_replicate_size=replicate, dp_shard_size=shard, cp_size=cp, tp_size=tp)
        # No step is taken in it, so no batch has to fit.
        training = dataclasses.replace(cell.config.training, global_batch_size=size, micro_batch_size=None)
        config = dataclasses.replace(cell.config, parallelism=other, training=training)
        candidate = dataclasses.replace(cell, config=config)
        refuse_plan = getattr(engine, "refuse_plan", lambda _: None)
        if engine.refuse(candidate) is None and refuse_plan(candidate) is None:
            return candidate
    return None


def forget_cached(folder: Path) -> None:
    """Ask the system to read the files from the disk again, not from its memory."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
