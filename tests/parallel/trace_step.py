"""Trace one step of the engine in several layouts of a world that does not exist; prints its collectives as JSON.

Run in a process of its own, as the fake process group is the default group here, with the number of ranks (and a fault)
as arguments.
Tensors are fake, too: a step that reads a value on the host, or whose shapes depend on one, fails.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from ndbench.engines.bundled import BundledEngine
from ndbench.measure.collectives import CollectiveRecorder, totals
from ndbench.parallel import parallelize
from ndbench.parallel.config import ParallelismConfig
from ndbench.parallel.mesh import build_mesh
from tests.parity.cases import Case, batch, case, layout, llama, training

RANK = 5
MODEL = llama(
    vocab_size=512, hidden_size=512, intermediate_size=512, num_attention_heads=64, num_key_value_heads=8, head_dim=8
)

FAULTS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "waits": (lambda loss: loss.item(), "DataDependentOutputException"),
    "shape_from_data": (lambda loss: (loss > 0).nonzero(), "DynamicOutputShapeException"),
}
"""Done with the loss of each step when named on the command line, and the error that must follow."""


def layouts(world: int) -> list[ParallelismConfig]:
    """Each kind of layout at ``world`` ranks."""
    return [
        layout(world),
        layout(1, world),
        layout(2, world // 2),
        layout(world // 8, 1, 1, 8),
        layout(1, world // 4, 1, 4),
        layout(1, world // 4, 1, 4, sequence_parallel=False),
        layout(2, world // 4, 1, 2),
        layout(1, 1, world),
        layout(1, world // 8, 8, cp_method="ulysses"),
        layout(1, world // 4, 2, 2),
        layout(2, world // 8, 2, 2),
        layout(world // 4, 1, 2, 2),
    ]


def traced(parallelism: ParallelismConfig, **changes: Any) -> Case:
    """The case that is traced: two micro-steps of one sequence a batch rank, packed documents, clipping, AdamW."""
    fields: dict[str, Any] = {
        "global_batch_size": 2 * parallelism.batch_size,
        "sequence_length": 256,
        "micro_batch_size": 1,
        "optimizer": "adamw",
        "max_grad_value": 1.0,
    }
    return case(parallelism, MODEL, training=training(**(fields | changes)), documents=True)


def trace(at: Case, fault: str | None = None) -> list[Any]:
    """[operation, axis, calls, bytes] of one step of ``at``."""
    mesh = build_mesh(at.parallelism, "cpu")
    engine = BundledEngine()
    data = batch(at, 0, mesh.batch_rank, mesh.batch_size)
    allocate = parallelize.materialize
    recorder = CollectiveRecorder(mesh.axis_of_group)
    with ExitStack() as stack:

        def fake_from_here(*args: Any) -> None:
            """Meshes cannot be made of fake tensors; memory is allocated after the last of them."""
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            allocate(*args)

        with patch.object(parallelize, "materialize", fake_from_here):
            engine.build(at.model, at.training, mesh, torch.device("cpu"))
        with recorder:
            result = engine.step(data)
            if fault is not None:
                assert isinstance(result.loss, torch.Tensor)
                FAULTS[fault][0](result.loss)
    return [[*key, *row] for key, row in totals(recorder.table()).items()]


if __name__ == "__main__":
    ranks, *planted = int(sys.argv[1]), *sys.argv[2:]
    dist.init_process_group("fake", rank=RANK, world_size=ranks, store=FakeStore())
    began = time.perf_counter()
    steps = [trace(traced(each), *planted) for each in layouts(ranks)]
    json.dump({"steps": steps, "seconds": time.perf_counter() - began}, sys.stdout)
