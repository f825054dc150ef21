"""What the ranks of the peers' tests run: the same cell by the bundled engine and by another trainer."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch.distributed as dist

from ndbench.config import Cell, Config
from ndbench.engines.accelerate import AccelerateEngine
from ndbench.engines.bundled import BundledEngine
from ndbench.parallel.mesh import build_mesh
from tests.parity.cases import Case, batch


def side_by_side(case: Case) -> list[list[tuple[float, float, int]]]:
    """(loss, gradient norm, tokens) of each step of both engines."""
    rank, world = dist.get_rank(), dist.get_world_size()
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(environment)
    mesh = build_mesh(case.parallelism, "cpu")
    cell = Cell(
        "peer", "test", Config(model=case.model, training=case.training, parallelism=case.parallelism, world_size=world)
    )
    return [_steps(engine, cell, case, mesh) for engine in (BundledEngine(), AccelerateEngine())]


def _steps(engine: Any, cell: Cell, case: Case, mesh: Any) -> list[tuple[float, float, int]]:
    with contextlib.closing(engine):
        engine.setup(cell, mesh)
        results = [engine.step(batch(case, step, mesh.batch_rank, mesh.batch_size)) for step in range(case.steps)]
        return [(float(r.loss), float(r.grad_norm), int(r.tokens)) for r in results]
