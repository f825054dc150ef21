"""What the ranks of the peers' tests run: the same cell by the bundled engine and by another trainer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ndbench.config import Cell, Config
from ndbench.engines.accelerate import AccelerateEngine, _own_memory, _ranks_are_devices
from ndbench.engines.bundled import BundledEngine
from ndbench.parallel.mesh import build_mesh
from tests.parity.cases import Case, batch


def side_by_side(case: Case) -> list[list[tuple[float, float, int]]]:
    """(loss, gradient norm, tokens) of each step of both engines."""
    rank, world = dist.get_rank(), dist.get_world_size()
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    mesh = build_mesh(case.parallelism, "cpu")
    cell = Cell(
        "peer", "test", Config(model=case.model, training=case.training, parallelism=case.parallelism, world_size=world)
    )
    with patch.dict(os.environ, environment):  # where Accelerate leaves marks of its own for the next one
        if case.parallelism.tp_size > 1:
            _ranks_are_devices()  # Accelerate keeps TP from CPU ranks
        return [_steps(engine, cell, case, mesh) for engine in (BundledEngine(), AccelerateEngine())]


def _steps(engine: Any, cell: Cell, case: Case, mesh: Any) -> list[tuple[float, float, int]]:
    with contextlib.closing(engine):
        engine.setup(cell, mesh)
        results = [engine.step(batch(case, step, mesh.batch_rank, mesh.batch_size)) for step in range(case.steps)]
        return [(float(r.loss), float(r.grad_norm), int(r.tokens)) for r in results]


def compiled_side_by_side(case: Case) -> list[list[tuple[float, float, int]]]:
    """``side_by_side`` of a case whose training is compiled."""
    with _traced_only():
        return side_by_side(case)


def shards_of_their_own() -> tuple[list[int], bool]:
    """Bytes in memory for each weight of a model with sliced weights, and whether its compiled outputs are right."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(8.0 * 4 * world).view(8 * world, 4)
    model = nn.ModuleList([nn.Linear(4, 8 * world, bias=False), nn.Linear(4, 8 * world, bias=False)])
    shard = DTensor.from_local(whole[8 * rank : 8 * (rank + 1)], mesh, [Shard(0)], run_check=False)
    model[0].weight = model[1].weight = nn.Parameter(shard)
    _own_memory(model)
    x = DTensor.from_local(torch.ones(2, 4), mesh, [Replicate()], run_check=False)
    outputs = [torch.compile(each, backend="eager", fullgraph=True)(x) for each in model]
    torch._dynamo.reset()
    kept = [each._local_tensor.untyped_storage().nbytes() for each in model.parameters()]
    expected = whole.sum(1).expand(2, -1)
    return kept, all(torch.equal(each.full_tensor(), expected) for each in outputs)


@contextlib.contextmanager
def _traced_only() -> Iterator[None]:
    """The compiler without its code generator, which takes half a minute here."""
    compiled = torch.compile

    def traced(model: Any = None, **options: Any) -> Any:
        return compiled(model, **(options | {"backend": "aot_eager"}))

    with patch.object(torch, "compile", traced):
        yield
    torch._dynamo.reset()
