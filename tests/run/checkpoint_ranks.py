"""What each rank runs in the tests of measured checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ndbench.config import Cell
from ndbench.engines.bundled import BundledEngine
from ndbench.parallel.mesh import build_mesh
from ndbench.run.checkpointing import CheckpointMeter
from ndbench.training.data import build_dataset


def measured(cell: Cell, folder: Path, steps: int = 1) -> tuple[dict[str, Any], list[str]]:
    """The figures, and what was in the folder while they were taken."""
    engine, device = BundledEngine(), torch.device("cpu")
    mesh = build_mesh(cell.parallelism, "cpu")
    engine.setup(cell, mesh)
    dataset = build_dataset(cell.config)
    for step in range(steps):
        engine.step(dataset.batch(step, mesh.batch_rank, mesh.batch_size, device))
    meter = CheckpointMeter(cell, device, folder)
    meter.save_and_load(engine, mesh)
    there = sorted(str(path.relative_to(folder)) for path in folder.rglob("step-*"))
    engine.close()
    meter.reshard()
    meter.clean_up()
    return meter.figures, there


def without_state(cell: Cell, folder: Path) -> dict[str, Any]:
    """The figures of an engine that does not hand out its state."""
    meter = CheckpointMeter(cell, torch.device("cpu"), folder)
    meter.save_and_load(object(), build_mesh(cell.parallelism, "cpu"))  # type: ignore[arg-type]
    meter.reshard()
    meter.clean_up()
    return meter.figures
